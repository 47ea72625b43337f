"""Which devices can meet in a collective: those of one library."""

from collections.abc import Iterable

#: Set in processes of jobs of devices that share none: each device knows its own process only.
LOCAL_CLIENTS_VARIABLE = "HXLA_LOCAL_CLIENTS"
_AMD = ("amd", "instinct", "radeon", "gfx")


def library_of(kind: str) -> str:
    """The library for collectives of a kind of device.

    Args:
        kind: See `Device.kind`; what is no processor, TPU or AMD card counts as one of NVIDIA.
    """
    name = kind.lower().split("@")[0]
    if name == "cpu":
        return "Gloo"
    if name.startswith("tpu"):
        return "TPU"
    return "RCCL" if any(word in name for word in _AMD) else "NCCL"


def are_unlike(kinds: Iterable[str]) -> bool:
    """Whether some of these kinds share no library."""
    return len(set(map(library_of, kinds))) > 1


def in_words(kinds: Iterable[str]) -> str:
    """One kind for each library, such as `NVIDIA L4 (NCCL) and cpu (Gloo)`."""
    firsts: dict[str, str] = {}
    for kind in kinds:
        firsts.setdefault(library_of(kind), kind)
    return " and ".join(f"{kind} ({library})" for library, kind in firsts.items())
