"""Memory at its peak, by buffer and by owner."""

import dataclasses
from collections.abc import Sequence

from .._jax._buffer_assignment import BufferAssignment, Piece
from . import _shapes
from ._arguments import array_bytes
from ._dataflow import Flow
from ._hlo_text import Computation, Instruction, Module
from ._liveness import peak
from ._origin import Origins
from ._program import Array, Buffer, Memory, Origin

_GAPS = "(between buffers)"
_REST = "(not broken down)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """The compiler's own: `jax.stages.Compiled.memory_analysis()`."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int


def memory(
    module: Module,
    arrays: Sequence[Array],
    origins: Origins,
    flow: Flow,
    *,
    assignment: BufferAssignment | None,
    figures: Figures | None,
    source: str,
) -> Memory:
    """Who holds what at the peak.

    Args:
        module: Optimized.
        arrays: Its arguments.
        origins: Of its instructions.
        flow: Of its values.
        assignment: The compiler's; None if there is none, and only sums are known.
        figures: The compiler's; None: they are taken from the assignment.
        source: What the assignment was read from.
    """
    if figures is None:
        assert assignment is not None
        figures = Figures(
            argument_bytes=assignment.argument_bytes,
            output_bytes=assignment.own_output_bytes + assignment.alias_bytes,
            alias_bytes=assignment.alias_bytes,
            temp_bytes=assignment.temp_bytes,
        )
    buffers = [
        Buffer(
            name=a.path,
            owner=a.owner,
            num_bytes=array_bytes(a),
            array=_shapes.array_text(a.dtype, a.local_shape),
        )
        for a in arrays
    ]
    _fill(buffers, figures.argument_bytes, "arguments", "temporary")
    outputs = figures.output_bytes - figures.alias_bytes
    if outputs:
        buffers.append(Buffer(name="results", owner="output", num_bytes=outputs))
    held = peak(module, assignment.temporaries) if assignment is not None else ()
    temporaries = list(_temporaries(module, held, arrays, origins, flow))
    missing = figures.temp_bytes - sum(b.num_bytes for b in temporaries)
    if missing:
        name = _GAPS if temporaries else _REST
        temporaries.append(Buffer(name=name, owner="temporary", num_bytes=missing))
    return Memory(
        argument_bytes=figures.argument_bytes,
        output_bytes=figures.output_bytes,
        alias_bytes=figures.alias_bytes,
        temp_bytes=figures.temp_bytes,
        buffers=tuple(sorted([*buffers, *temporaries], key=lambda b: -b.num_bytes)),
        source=source,
    )


def _fill(buffers: list[Buffer], total: int, what: str, owner: str) -> None:
    """Layouts may need more than the elements do: say it as a buffer of its own."""
    rest = total - sum(b.num_bytes for b in buffers)
    if rest:
        buffers.append(Buffer(name=f"({what}: layout)", owner=owner, num_bytes=rest))


def _temporaries(
    module: Module, held: Sequence[Piece], arrays: Sequence[Array], origins: Origins, flow: Flow
) -> list[Buffer]:
    places: dict[str, tuple[Instruction, Computation]] = {}
    wanted = {h.name for h in held}
    for computation in module.computations.values():
        for name in wanted & computation.instructions.keys():
            places[name] = computation.instructions[name], computation
    shapes = {a.local_shape for a in arrays if a.owner == "parameter" and a.local_shape}
    owners = {a.path: a.owner for a in arrays}
    by_name = {
        p.name: a for p, a in zip(module.computations[module.entry].parameters, arrays, strict=True)
    }
    out = []
    for value in held:
        if value.name not in places:
            out.append(Buffer(name=value.name, owner="temporary", num_bytes=value.num_bytes))
            continue
        instruction, computation = places[value.name]
        found = flow.maker(computation, value.name, value.element)
        if found is not None:
            instruction, computation = found
        origin = origins.of(instruction, computation)
        shape = _element(instruction.shape, value)
        argument = flow.argument(computation, instruction.name)
        if argument is not None and argument.name in by_name:
            owner = owners[by_name[argument.name].path]
            origin = dataclasses.replace(origin, module=by_name[argument.name].path, missing="")
        else:
            owner = _owner(origin, shape, shapes)
        padding = _padding(module, instruction, computation)
        padding = min(padding, value.num_bytes)
        for bytes_, whose in ((value.num_bytes - padding, owner), (padding, "padding")):
            if bytes_:
                out.append(
                    Buffer(
                        name=instruction.name,
                        owner=whose,
                        num_bytes=bytes_,
                        array=_shapes.shape_text(shape),
                        origin=origin,
                    )
                )
    return out


def _element(shape: str, value: Piece) -> str:
    elements = _shapes.tuple_elements(shape)
    if value.element is not None and value.element < len(elements):
        return elements[value.element]
    fits = [e for e in elements if _shapes.shape_bytes(e) == value.num_bytes]
    return fits[0] if fits else shape


def _owner(origin: Origin, shape: str, parameter_shapes: set[tuple[int, ...]]) -> str:
    if origin.phase == "backward":
        arrays = _shapes.arrays(shape)
        is_gradient = any(dims in parameter_shapes for _, dims in arrays)
        return "gradient" if is_gradient else "temporary"
    return "activation" if origin.phase in ("forward", "recomputation") else "temporary"


def _padding(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Bytes that a `pad`, or a fusion that ends in one, adds."""
    pad, inside = instruction, computation
    if instruction.opcode == "fusion":
        inner = module.computations.get((instruction.called("calls") or [""])[0])
        if inner is None or inner.root is None:
            return 0
        pad, inside = inner.root, inner
    source = (
        inside.instructions.get(pad.operands[0][0])
        if pad.opcode == "pad" and pad.operands
        else None
    )
    if source is None:
        return 0
    return max(0, _shapes.shape_bytes(pad.shape) - _shapes.shape_bytes(source.shape))
