"""What each device of an uneven split holds of the parameters, and how much of it is padding."""

from collections.abc import Iterator, Sequence

from ._layout import Layout


def part_bytes(parameters: Sequence[Layout], axis: str, num_devices: int) -> tuple[int, ...]:
    """Bytes of the parameters on each device of an axis, without padding.

    Args:
        parameters: Their layouts.
        axis: The one axis inside a copy.
        num_devices: Its size.
    """
    found = [0] * num_devices
    for layout in parameters:
        dim = layout.dim_of(axis)
        for d in range(num_devices):
            if dim is None:
                found[d] += layout.num_bytes
            elif layout.shape[dim]:
                own = layout.parts(dim, num_devices)[d]
                found[d] += layout.num_bytes // layout.shape[dim] * own
    return tuple(found)


def parts_in_words(parameters: Sequence[Layout], axis: str, num_devices: int) -> Iterator[str]:
    """A line for each device of a copy: its own bytes, and the padding beside them."""
    padded = sum(layout.device_bytes({axis: num_devices}) for layout in parameters)
    for d, own in enumerate(part_bytes(parameters, axis, num_devices)):
        yield (
            f"  device {d} of a copy: {own:,} bytes of parameters and {padded - own:,} of padding"
        )
