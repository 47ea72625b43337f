"""Which dimensions of parameters are layers that a scan stacks, read from a compiled program."""

from collections.abc import Mapping

from . import _shapes
from ._annotated_module import AnnotatedModule
from ._hlo_text import Computation, Instruction
from ._program import ProgramArray


def stacked_dims(read: AnnotatedModule) -> Mapping[str, tuple[int, ...]]:
    """For arguments, by path, the dimensions of which a loop takes one entry in each iteration.

    A scan inside a scan, as over blocks of layers, takes two.
    """
    found: dict[str, set[int]] = {}
    for instruction, computation in read.module.find({"dynamic-slice"}):
        array = read.argument(computation, *instruction.operands[0])
        if array is None:
            continue
        dim = _layer(read, instruction, computation, array)
        if dim is not None:
            found.setdefault(array.path, set()).add(dim)
    return {path: tuple(sorted(dims)) for path, dims in found.items()}


def _layer(
    read: AnnotatedModule, instruction: Instruction, computation: Computation, array: ProgramArray
) -> int | None:
    _, whole = _shapes.first(computation.shape_of(*instruction.operands[0]))
    _, part = _shapes.first(instruction.shape)
    cut = [d for d, (n, own) in enumerate(zip(whole, part, strict=True)) if own != n]
    if len(cut) != 1 or part[cut[0]] != 1 or len(whole) > len(array.local_shape):
        return None
    [dim] = cut
    # What an outer scan has taken off stands in front.
    of_array = dim + len(array.local_shape) - len(whole)
    trips = {c.loops[-1].trips for c in read.contexts.get(computation.name, []) if c.loops}
    is_layers = array.local_shape[of_array] == whole[dim] and whole[dim] in trips
    return of_array if is_layers else None
