"""Sharding of a pipeline's parameters between steps: evenly over all stages.

So the optimizer sees the user's tree, its state is even on unlike stages, and checkpoints do not
depend on stages.
"""

import functools
import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec as P

from ..core.errors import PlanError
from ..core.types import STAGE_AXIS
from ..graph.graph import Graph, params_of
from .layout import Layout, from_spec, names_of, to_spec


def piece_shape(shape: Sequence[int], spec: P, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of one device's shard of an array.

    Args:
        sizes: Of the mesh axes; others count as one.
    """
    cuts = [math.prod(sizes.get(name, 1) for name in names_of(part)) for part in spec]
    return tuple(n // cuts[d] if d < len(cuts) else n for d, n in enumerate(shape))


def storage_specs(
    shapes: Sequence[tuple[int, ...]],
    inner: Sequence[P],
    sizes: Mapping[str, int],
    num_stages: int,
) -> list[P]:
    """PartitionSpec of each parameter between steps.

    Args:
        inner: For each parameter, inside a stage.
        sizes: Of the mesh axes inside a stage.
        num_stages: Each shard is cut over them in the first dimension that divides.
    """
    return [
        _also_cut(spec, _dim(piece_shape(shape, spec, sizes), num_stages))
        for shape, spec in zip(shapes, inner, strict=True)
    ]


def without_stages(spec: P) -> tuple[P, int | None]:
    """The PartitionSpec inside a stage, and the dimension that is cut over stages."""
    parts = from_spec(spec, len(spec))
    dim = next((d for d, names in enumerate(parts) if STAGE_AXIS in names), None)
    return to_spec([[n for n in names if n != STAGE_AXIS] for names in parts]), dim


def _also_cut(spec: P, dim: int | None) -> P:
    """The spec with one dimension also cut over stages."""
    if dim is None:
        return spec
    parts = [*from_spec(spec, max(len(spec), dim + 1))]
    parts[dim] = (*parts[dim], STAGE_AXIS)
    return to_spec(parts)


@functools.cache
def _dim(shape: tuple[int, ...], num_stages: int) -> int | None:
    """The first dimension that divides evenly."""
    return next((d for d, n in enumerate(shape) if n % num_stages == 0 and n), None)


def check_layers_whole(graph: Graph, parameters: Sequence[Layout]) -> None:
    """Refuse layouts in which an axis inside a stage cuts a stacked parameter between its layers.

    Args:
        graph: With its scans cut at the ends of stages.

    Raises:
        PlanError: With every such parameter.
    """
    faults: dict[str, None] = {}
    for p, v in zip(params_of(graph), graph.param_values, strict=True):
        layout, rows = parameters[p], graph.values[v].rows
        dim = None if rows is None else rows[0]
        names = () if dim is None else [n for n in layout.spec[dim] if n != STAGE_AXIS]
        for name in names:
            line = (
                f"parameters.{layout.name}.spec: {name!r} cuts dimension {dim}, in which a scan's "
                "layers are stacked and cut over stages: let it cut another dimension"
            )
            faults[line] = None
    if faults:
        raise PlanError("\n".join(faults))
