"""The collective library of each kind of device: unlike libraries share no collective."""

from collections.abc import Iterable

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
