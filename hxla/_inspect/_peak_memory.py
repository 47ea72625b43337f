"""Memory at its peak, by buffer and by owner."""

import dataclasses
from collections.abc import Iterator, Set

from .._jax._buffer_assignment import BufferAssignment, Piece
from . import _shapes
from ._annotated_module import AnnotatedModule
from ._hlo_text import Computation, Instruction
from ._liveness import peak
from ._program import Buffer, Memory, Origin


def memory(read: AnnotatedModule, assignment: BufferAssignment) -> Memory:
    """Who holds what at the peak.

    Args:
        read: The module.
        assignment: The compiler's.
    """
    buffers = [
        Buffer(name=a.path, owner=a.owner, num_bytes=a.num_bytes, array=a.local)
        for a in read.arrays
    ]
    outputs = assignment.output_bytes - assignment.alias_bytes
    temporaries = list(_temporaries(read, assignment))
    # Layouts may need more than the elements do, and there are gaps between buffers.
    layout = assignment.argument_bytes - sum(b.num_bytes for b in buffers)
    gaps = assignment.temp_bytes - sum(b.num_bytes for b in temporaries)
    rest = {
        ("results", "output"): outputs,
        ("(arguments: layout)", "temporary"): layout,
        ("(between buffers)" if temporaries else "(not broken down)", "temporary"): gaps,
    }
    buffers += [
        Buffer(name=name, owner=owner, num_bytes=n) for (name, owner), n in rest.items() if n
    ]
    return Memory(
        argument_bytes=assignment.argument_bytes,
        output_bytes=assignment.output_bytes,
        alias_bytes=assignment.alias_bytes,
        temp_bytes=assignment.temp_bytes,
        buffers=tuple(sorted([*buffers, *temporaries], key=lambda b: -b.num_bytes)),
        source=assignment.source,
    )


def _temporaries(read: AnnotatedModule, assignment: BufferAssignment) -> Iterator[Buffer]:
    parameters = {a.local_shape for a in read.arrays if a.owner == "parameter" and a.local_shape}
    for value, computation in peak(read.module, assignment.temporaries):
        instruction = computation.instructions[value.name]
        found = read.flow.maker(computation, value.name, value.element)
        if found is not None:
            instruction, computation, _ = found
        shape = _element(instruction.shape, value)
        origin = read.origins.of(instruction, computation)
        argument = read.argument(computation, instruction.name)
        if argument is not None:
            owner = argument.owner
            origin = dataclasses.replace(origin, module=argument.path, missing="")
        else:
            owner = _owner(origin, shape, parameters)
        padding = min(_padding(read, instruction, computation), value.num_bytes)
        for num_bytes, whose in ((value.num_bytes - padding, owner), (padding, "padding")):
            if num_bytes:
                yield Buffer(
                    name=instruction.name,
                    owner=whose,
                    num_bytes=num_bytes,
                    array=_shapes.shape_text(shape),
                    origin=origin,
                )


def _element(shape: str, value: Piece) -> str:
    elements = _shapes.tuple_elements(shape)
    if value.element is not None and value.element < len(elements):
        return elements[value.element]
    fits = [e for e in elements if _shapes.shape_bytes(e) == value.num_bytes]
    return fits[0] if fits else shape


def _owner(origin: Origin, shape: str, parameters: Set[tuple[int, ...]]) -> str:
    if origin.phase == "backward":
        is_gradient = any(dims in parameters for _, dims in _shapes.arrays(shape))
        return "gradient" if is_gradient else "temporary"
    return "activation" if origin.phase in ("forward", "recomputation") else "temporary"


def _padding(read: AnnotatedModule, instruction: Instruction, computation: Computation) -> int:
    """Bytes that a `pad`, or a fusion that ends in one, adds."""
    pad, inside = read.module.root_of(instruction, computation)
    if pad.opcode != "pad" or not pad.operands:
        return 0
    before = inside.shape_of(*pad.operands[0])
    return max(0, _shapes.shape_bytes(pad.shape) - _shapes.shape_bytes(before)) if before else 0
