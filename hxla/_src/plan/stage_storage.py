"""Where the parameters of a pipeline lie between steps: cut evenly over all stages.

So the optimizer sees the user's tree, its state is even on unlike stages, and a checkpoint knows
nothing of stages.
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
    """Shape of one device's part of an array.

    Args:
        shape: Of the whole.
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
        inner: How the devices of a stage cut them.
        sizes: Of the mesh axes inside a stage.
        num_stages: Over which each piece is cut in the first dimension that divides.
    """
    return [
        _also_cut(spec, _dim(piece_shape(shape, spec, sizes), num_stages))
        for shape, spec in zip(shapes, inner, strict=True)
    ]


def without_stages(spec: P) -> tuple[P, int | None]:
    """How the devices of a stage cut a parameter, and the dimension that stages cut besides."""
    parts = from_spec(spec, len(spec))
    dim = next((d for d, names in enumerate(parts) if STAGE_AXIS in names), None)
    return to_spec([[n for n in names if n != STAGE_AXIS] for names in parts]), dim


def _also_cut(spec: P, dim: int | None) -> P:
    """The spec with each device's part cut over stages in a dimension."""
    if dim is None:
        return spec
    parts = [*from_spec(spec, max(len(spec), dim + 1))]
    parts[dim] = (*parts[dim], STAGE_AXIS)
    return to_spec(parts)


@functools.cache
def _dim(shape: tuple[int, ...], num_stages: int) -> int | None:
    """The first dimension that can be cut evenly."""
    return next((d for d, n in enumerate(shape) if n % num_stages == 0 and n), None)


def check_layers_whole(graph: Graph, parameters: Sequence[Layout]) -> None:
    """Refuse layouts in which the devices of a stage cut a stacked parameter between its layers.

    Args:
        graph: With its scans cut where the stages end.

    Raises:
        PlanError: If there are any, with every one.
    """
    found: dict[str, None] = {}
    for p, v in zip(params_of(graph), graph.param_values, strict=True):
        layout, rows = parameters[p], graph.values[v].rows
        dim = None if rows is None else rows[0]
        names = () if dim is None else [n for n in layout.spec[dim] if n != STAGE_AXIS]
        for name in names:
            line = (
                f"parameters.{layout.name}.spec: {name!r} cuts dimension {dim}, in which the "
                "layers of a scan are stacked that the stages share out: let it cut another one"
            )
            found[line] = None
    if found:
        raise PlanError("\n".join(found))
