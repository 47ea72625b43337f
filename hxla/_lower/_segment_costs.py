"""What the programs of a chain take: bytes of what crosses, of residuals, of temporaries."""

from collections.abc import Callable, Sequence
from typing import Any

from .._graph._composed import Composed, Variable
from .._graph._operations import bytes_of
from .._graph._parts import ChainPart, values_by_shape
from .._jax._jaxpr import is_cheap, is_fused, variables
from .._plan._sharding import Sharded
from .._schedule._segment_sequence import CUT, INPUT
from .._schedule._sequence_replay import Residuals, SegmentCost
from ._stage import StagePart

#: Operations of a backward beside those of its forward.
_BACKWARD_WORK = 2.0


def crossing_values(parts: Sequence[ChainPart]) -> tuple[tuple[int, ...], ...]:
    """For each part the values that earlier parts made and it or later ones read."""
    made = [set(part.outputs) for part in parts]
    read = [set(part.inputs) for part in parts]
    return tuple(
        tuple(sorted(set().union(*made[:i]) & set().union(*read[i:]))) for i in range(len(parts))
    )


def segment_costs(
    sharded: Sharded,
    stages: Sequence[StagePart],
    temporary: Sequence[tuple[int, ...]] | None = None,
    *,
    fused: bool = False,
    offloads: bool = False,
    residuals: Sequence[int] | None = None,
) -> list[SegmentCost]:
    """What the programs of each part take of a device; seconds in proportion to operations.

    Args:
        sharded: The graph of the loss, as it is cut into parts, and how the devices of a copy cut
            it, of which one's part counts.
        stages: The parts.
        temporary: For each part the temporaries in bytes of its forward and its backward, or of
            its only program; None: not known before compilation, estimated as the bytes of what a
            backward reads and makes.
        fused: Whether all parts and their backwards are one program, which keeps more.
        offloads: Whether what waits may go to host memory, by copies that no program waits for.
        residuals: For each part the bytes of what its forward leaves besides its inputs and
            outputs; None: not known before compilation, and those in the midst of a part are taken
            to be cut as what else has their shape there.
    """
    crossing = crossing_values([stage.part for stage in stages])
    known = [max(stage.part.segment.flops, 1.0) for stage in stages]
    kinds: dict[Any, tuple[list[Variable], bool]] = {}
    out = []
    for i, stage in enumerate(stages):
        if residuals is None:
            kind = stage.kind
            if kind not in kinds:
                kinds[kind] = _own_residuals(stage.composed, stage.part, fused=fused)
            left, reads_input = kinds[kind]
            parts = _fewest_parts(sharded, stage.part)
            own = sum(bytes_of(v.aval.shape, v.aval.dtype) // parts(v.aval.shape) for v in left)
        else:
            own, reads_input = residuals[i], stage.reads_its_input
        floats = {v for later in stages[i:] for v in later.above_floats}
        grads = sum(sharded.device_bytes(v) for v in crossing[i] if v in floats)
        if temporary is None:
            forward = 0
            trained = [sharded.graph.param_values[stage.params[k]] for k in stage.trained]
            backward = own + sum(map(sharded.device_bytes, trained))
        else:
            forward, backward = temporary[i][0], temporary[i][-1]
        name = INPUT if stage.part.is_last else CUT
        both = known[i] * (1 + _BACKWARD_WORK) if stage.part.is_last else known[i] * _BACKWARD_WORK
        made = Residuals(
            name=name,
            # Not none: only the last starts from its input alone.
            num_bytes=0 if stage.part.is_last else max(own, 1),
            reads_input=stage.part.is_last or reads_input,
            forward_seconds=known[i],
            backward_seconds=both,
            forward_temporary_bytes=forward,
            backward_temporary_bytes=backward + (own if stage.part.is_last else 0),
        )
        out.append(
            SegmentCost(
                name=stage.part.segment.name,
                input_bytes=sum(map(sharded.waiting_bytes, crossing[i])),
                input_gradient_bytes=grads,
                forward_seconds=known[i],
                residuals=(made,),
                # A forward makes its residuals, whether they are kept or not.
                forward_temporary_bytes=forward + own,
                offload_seconds=0.0 if offloads else None,
            )
        )
    return out


def _own_residuals(
    program: Composed, part: ChainPart, *, fused: bool
) -> tuple[list[Variable], bool]:
    """What a forward leaves besides inputs and outputs, and whether backwards read its inputs."""
    inputs = {program.arguments[v] for v in part.inputs}
    alone, kept = (
        program.kept(part.inputs, repeats, is_last=part.is_last)
        for repeats in (is_cheap, is_fused if fused else is_cheap)
    )
    there = inputs.union(variables(program.results))
    return [v for v in kept if v not in there], not inputs.isdisjoint(alone)


def _fewest_parts(sharded: Sharded, part: ChainPart) -> Callable[[Sequence[int]], int]:
    """From a shape to how many parts arrays of it are cut into in a part, the fewest of all."""
    values = values_by_shape(sharded.graph, part)
    return lambda shape: min(map(sharded.num_parts, values.get(tuple(shape), ())), default=1)


def temporary_bytes(compiled: Any) -> int:
    """Bytes of a compiled program beside its arguments and results; 0 if they are not known."""
    stats = compiled.memory_analysis()
    return 0 if stats is None else int(stats.temp_size_in_bytes)
