"""The layout of one array of the state over the devices of a replica.

Between steps a pipeline's parameters are sharded evenly over all stages. So the optimizer sees the
user's tree, its state is even on unlike stages, and checkpoints do not depend on stages.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from ..core.errors import PlanError
from ..core.types import DEVICE_AXIS, OUTER_AXES, STAGE_AXIS
from ..graph.graph import Graph, params_of


def whole(value: Any) -> Any:
    """NumPy's integers as Python's; any other value unchanged."""
    return int(value) if isinstance(value, np.integer) else value


def padded_shape(shape: Sequence[int], sizes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape of an array with every shard padded to the largest.

    Args:
        sizes: For each dimension its shard sizes, empty where they are alike; empty if all are.
    """
    return tuple(
        max(parts) * len(parts) if parts else size
        for size, parts in zip(shape, sizes or ((),) * len(shape), strict=True)
    )


class PlanValue(pydantic.BaseModel):
    """Base of a plan's values: frozen, hashable, and strict in parsing."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False
    )


class Layout(PlanValue):
    """The sharding of one parameter over the devices of its replica.

    Attributes:
        name: The path of the parameter, `blocks/0/mlp/kernel`.
        shape: The shape of the whole array.
        dtype: The name of its dtype, `float32`.
        spec: For each dimension the mesh axes that cut it, as in a `jax.sharding.PartitionSpec`; an
            empty tuple where it is whole.
        memory: The kind of memory in which it is.
        sizes: For each dimension the shard sizes along the one axis that cuts it, where they are
            unlike; an empty tuple where they are alike. Empty if all dimensions have even shards.
    """

    name: str
    # Up to 2**48, so that products of a few sizes stay finite; `Plan` limits examples likewise.
    shape: tuple[Annotated[int, pydantic.Field(ge=0, le=2**48)], ...] = pydantic.Field(
        max_length=16
    )
    dtype: str
    spec: tuple[tuple[str, ...], ...]
    memory: Literal["device"] = "device"
    sizes: tuple[tuple[pydantic.PositiveInt, ...], ...] = ()

    @pydantic.field_validator("dtype")
    @classmethod
    def _is_known(cls, dtype: str) -> str:
        try:
            known = jnp.dtype(dtype)
        except (TypeError, ValueError, SyntaxError):
            known = None
        if known is None or known.name != dtype or not _is_number(known):
            raise ValueError("this is no dtype of numbers, such as 'float32' or 'bfloat16'")
        return dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole array."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def cuts(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """Count the shards of each dimension.

        Args:
            axes: The mesh axes and their sizes; others count as one.

        Returns:
            One number for each dimension.
        """
        return tuple(math.prod(axes.get(a, 1) for a in names) for names in self.spec)

    def parts(self, dim: int, num_devices: int) -> tuple[int, ...]:
        """Give the shard sizes of a dimension.

        Args:
            dim: The dimension.
            num_devices: The devices of the axis that cuts it.

        Returns:
            One size for each device.
        """
        unlike = self.sizes[dim] if self.sizes else ()
        return unlike or (self.shape[dim] // num_devices,) * num_devices

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape of the array with every shard padded to the largest."""
        return padded_shape(self.shape, self.sizes)

    def device_shape(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """Give the shape of one device's shard, padding included.

        Args:
            axes: The mesh axes and their sizes; others count as one.

        Returns:
            One size for each dimension.
        """
        pairs = zip(self.padded_shape, self.cuts(axes), strict=True)
        return tuple(size // num for size, num in pairs)

    def device_bytes(self, axes: Mapping[str, int]) -> int:
        """The bytes of one device's shard, padding included.

        Args:
            axes: The mesh axes and their sizes; others count as one.

        Returns:
            A number of bytes.
        """
        return math.prod(self.device_shape(axes)) * jnp.dtype(self.dtype).itemsize

    def dim_of(self, axis: str) -> int | None:
        """Find the dimension that a mesh axis cuts.

        Args:
            axis: The name of the axis.

        Returns:
            The dimension, or None.
        """
        return next((d for d, names in enumerate(self.spec) if axis in names), None)


def _is_number(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_))


def names_of(part: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def to_spec(spec: Sequence[Sequence[str]]) -> P:
    """A plan's spec as jax's, without empty entries at the end."""
    parts = [None if not names else names[0] if len(names) == 1 else tuple(names) for names in spec]
    while parts and parts[-1] is None:
        parts.pop()
    return P(*parts)


def from_spec(spec: P, rank: int) -> tuple[tuple[str, ...], ...]:
    """jax's spec as a plan's: a tuple of mesh axes for each of `rank` dimensions."""
    return (*map(names_of, spec), *[()] * (rank - len(spec)))


def dtype_name(dtype: object) -> str:
    """`float32`, also for dtypes that numpy does not know."""
    return np.dtype(dtype).name  # type: ignore[call-overload, no-any-return]


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


def device_layout(
    shape: tuple[int, ...], num_devices: int
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[int, ...], ...]]:
    """The spec and sizes of a parameter that is sharded over all devices of a replica.

    The first dimension that divides is cut evenly, else the longest in sizes that differ by one. An
    array with fewer rows than devices is whole.
    """
    none: tuple[tuple[int, ...], ...] = ((),) * len(shape)
    dim, sizes = _dim(shape, num_devices), none
    if dim is None and max(shape, default=0) > num_devices:
        dim = shape.index(max(shape))
        each, rest = divmod(shape[dim], num_devices)
        parts = (*(each + 1 for _ in range(rest)), *(each for _ in range(num_devices - rest)))
        sizes = (*none[:dim], parts, *none[dim + 1 :])
    spec = tuple((DEVICE_AXIS,) if d == dim else () for d in range(len(shape)))
    return spec, sizes if any(sizes) else ()


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
        # Outer axes cut it between steps only.
        names = () if dim is None else [n for n in layout.spec[dim] if n not in OUTER_AXES]
        for name in names:
            line = (
                f"parameters.{layout.name}.spec: {name!r} cuts dimension {dim}, in which a scan's "
                "layers are stacked and cut over stages: let it cut another dimension"
            )
            faults[line] = None
    if faults:
        raise PlanError("\n".join(faults))
