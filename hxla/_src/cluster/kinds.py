"""Kinds of devices: their dtypes, fused attention, CUDA and collective library.

Some cards cannot multiply a dtype, or not faster than float32. Each version of CUDA supports some
cards and drivers. Unlike libraries share no collective.

References:
    NVIDIA, "CUDA C++ Programming Guide", arithmetic instructions: bfloat16 products from compute
    capability 8.0 on; float16 from 5.3 on, at a sixty-fourth of float32's rate on 6.1; float8 from
    8.9 on.
    NVIDIA, "cuDNN", "Scaled Dot Product Attention": from compute capability 8.0 on; heads larger
    than 128 from 9.0 on, as jax checks too.
"""

import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Sequence

from .nvml import Card

# Compute capabilities 3.5 to 7.5, by the names of cards.
_BEFORE_AMPERE = re.compile(
    r"\b(V100|P100|P40|P4|T4|K80|K40|M40|M60|TITAN|GTX|RTX 20\d\d|Quadro (?:[KMPG]|RTX)\w*|T1000)\b"
)
_BEFORE_ADA = re.compile(r"\b(A100|A800|A40|A30|A16|A10G?|A2|RTX 30\d\d|RTX A\d+)\b")
_BEFORE_HOPPER = re.compile(r"\b(L4|L20|L40S?|RTX 40\d\d|RTX \d+ Ada|Ada)\b")
_WITHOUT_CUDA = re.compile(r"^(cpu|TPU|AMD|MI\d)", re.IGNORECASE)
_BEFORE_PASCAL = re.compile(r"\b(K80|K40|M40|M60|GTX (?:[6-9]\d\d))\b")
_SLOW_FLOAT16 = re.compile(r"\b(P40|P4|GTX 10\d\d|Quadro P\d+)\b")


def _name(kind: str) -> str:
    return kind.split("@")[0].replace("-", " ")


def cards_without(dtype: str, kinds: Iterable[str]) -> tuple[str, ...]:
    """The kinds of devices that cannot multiply matrices of a dtype.

    Args:
        dtype: `bfloat16`, `float16` or `float8_e4m3fn`; every device has float32.
    """
    known = {
        "bfloat16": (_BEFORE_AMPERE,),
        "float16": (_BEFORE_PASCAL,),
        "float8_e4m3fn": (_BEFORE_AMPERE, _BEFORE_ADA),
    }.get(dtype, ())
    return tuple(
        kind
        for kind in dict.fromkeys(kinds)
        if any(pattern.search(_name(kind)) for pattern in known)
    )


def slow_cards(dtype: str, kinds: Iterable[str]) -> tuple[str, ...]:
    """The kinds that can multiply in a dtype, but slower than in float32."""
    if dtype != "float16":
        return ()
    return tuple(kind for kind in dict.fromkeys(kinds) if _SLOW_FLOAT16.search(_name(kind)))


def missing_dtypes(dtypes: Iterable[str], kinds: Iterable[str]) -> Iterator[str]:
    """For each dtype that some card lacks a fault, with the dtypes that all cards have."""
    kinds = tuple(kinds)
    for dtype in sorted(dtypes):
        lacking = cards_without(dtype, kinds)
        if lacking:
            words = {"bfloat16": "bf16", "float16": "fp16"}
            others = [w for other, w in words.items() if not cards_without(other, kinds)]
            remedy = " or ".join(f"precision={w!r}" for w in (*others, "fp32"))
            yield (
                f"precision: {', '.join(lacking)} cannot multiply in {dtype}, and one precision is "
                f"for all devices: use {remedy}, or leave these cards out"
            )


def missing_attention(head_dim: int | None, kinds: Iterable[str]) -> Iterator[str]:
    """A fault if some devices lack cuDNN's attention.

    Args:
        head_dim: The size of the largest head; None: the loss calls no such attention.
    """
    if head_dim is None:
        return
    older = (_WITHOUT_CUDA, _BEFORE_AMPERE, *((_BEFORE_ADA, _BEFORE_HOPPER) * (head_dim > 128)))
    names = dict.fromkeys(kinds)
    lacking = [kind for kind in names if any(card.search(_name(kind)) for card in older)]
    if lacking:
        least = "9.0" if head_dim > 128 else "8.0"
        yield (
            f"attention: the loss calls cuDNN's, with heads of {head_dim}, which needs NVIDIA GPUs "
            f"of compute capability {least} or more, unlike {', '.join(lacking)}: leave these "
            "devices out, or leave out implementation='cudnn', for jax's own on any device"
        )


#: Of each CUDA version: the smallest compute capability and the oldest driver.
#: https://docs.jax.dev/en/latest/installation.html, "NVIDIA GPU".
REQUIREMENTS = {12: ((5, 2), 525), 13: ((7, 5), 580)}


def installed_cuda() -> int | None:
    """The CUDA version of the installed plugin of jax, the newest of several; None without one."""
    for version in sorted(REQUIREMENTS, reverse=True):
        try:
            importlib.metadata.version(f"jax-cuda{version}-plugin")
        except importlib.metadata.PackageNotFoundError:
            continue
        return version
    return None


def extra_for(cards: Sequence[Card], driver: int | None) -> str | None:
    """The extra of hxla that supports all of some cards; None if none does.

    Args:
        driver: The first number of the driver's version; None if not known.
    """
    for version, (capability, oldest) in sorted(REQUIREMENTS.items(), reverse=True):
        is_new = driver is None or driver >= oldest
        if is_new and all(c.capability is None or c.capability >= capability for c in cards):
            return f"cuda{version}"
    return None


def unsupported(cards: Sequence[Card], driver: int | None, cuda: int | None) -> Iterator[str]:
    """A line for each kind of card that the installed jax does not support, and for the driver.

    Args:
        driver: The first number of the driver's version; None if not known.
        cuda: The CUDA version of jax; None for a jax without CUDA.
    """
    if cuda is None or not cards:
        return
    least, oldest = REQUIREMENTS[cuda]
    kinds = {c.name: c.capability for c in cards if c.capability and c.capability < least}
    faults = [
        f"{name} has compute capability {_dotted(capability)}, and this jax with CUDA {cuda} "
        f"needs {_dotted(least)} or more"
        for name, capability in kinds.items()
    ]
    if driver is not None and driver < oldest:
        faults.append(
            f"the NVIDIA driver is version {driver}, and this jax with CUDA {cuda} needs {oldest} "
            "or newer"
        )
    extra = extra_for(cards, driver)
    remedy = "no version of jax that hxla supports can use all of these cards"
    if extra is not None:
        packages = f"jax-cuda{cuda}-plugin jax-cuda{cuda}-pjrt"
        remedy = f"pip uninstall {packages}; pip install 'jax[{extra}]', hxla's extra {extra}"
    yield from (f"{fault}: {remedy}" for fault in faults)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


#: Set in jobs of unlike libraries, where each process's JAX client only sees its local device.
LOCAL_CLIENTS_VARIABLE = "HXLA_LOCAL_CLIENTS"
_AMD = ("amd", "instinct", "radeon", "gfx")


def library_of(kind: str) -> str:
    """The collective library of a kind of device; NVIDIA's for all but CPUs, TPUs and AMD."""
    name = kind.lower().split("@")[0]
    if name == "cpu":
        return "Gloo"
    if name.startswith("tpu"):
        return "TPU"
    return "RCCL" if any(word in name for word in _AMD) else "NCCL"


def are_unlike(kinds: Iterable[str]) -> bool:
    """Whether these kinds have different libraries."""
    return len(set(map(library_of, kinds))) > 1


def in_words(kinds: Iterable[str]) -> str:
    """One kind for each library, such as `NVIDIA L4 (NCCL) and cpu (Gloo)`."""
    firsts: dict[str, str] = {}
    for kind in kinds:
        firsts.setdefault(library_of(kind), kind)
    return " and ".join(f"{kind} ({library})" for library, kind in firsts.items())
