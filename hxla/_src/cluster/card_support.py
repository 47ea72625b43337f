"""NVIDIA cards and drivers that jax supports with each version of CUDA."""

import importlib.metadata
from collections.abc import Iterator, Sequence

from .nvml import Card

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
