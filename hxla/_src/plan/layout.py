"""How one array of the state lies over the devices."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P


def whole(value: Any) -> Any:
    """NumPy's whole numbers as Python's; anything else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def padded_shape(shape: Sequence[int], sizes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape of an array with every part padded to the largest.

    Args:
        sizes: For each dimension the sizes of its parts, where they are unlike; empty: none are.
    """
    return tuple(
        max(parts) * len(parts) if parts else size
        for size, parts in zip(shape, sizes or ((),) * len(shape), strict=True)
    )


class PlanValue(pydantic.BaseModel):
    """A part of a plan: frozen, hashable, and strict about what it is read from."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False
    )


class Layout(PlanValue):
    """How one parameter lies over the devices of its copy of the model.

    Attributes:
        name: The path of the parameter, `blocks/0/mlp/kernel`.
        shape: The shape of the whole array.
        dtype: The name of its dtype, `float32`.
        spec: For each dimension the mesh axes that cut it, as a `jax.sharding.PartitionSpec` has
            them; an empty tuple where it is whole.
        memory: The kind of memory that holds it.
        sizes: For each dimension the sizes of its parts on the devices of the one axis that cuts
            it, where they are unlike; an empty tuple where they are alike, and in all where all
            are.
    """

    name: str
    # Up to 2**48, so that products of a few sizes stay numbers; so are examples in `Plan`.
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
        """Say into how many parts each dimension is cut.

        Args:
            axes: The mesh axes and their sizes; others count as one.

        Returns:
            One number for each dimension.
        """
        return tuple(math.prod(axes.get(a, 1) for a in names) for names in self.spec)

    def parts(self, dim: int, num_devices: int) -> tuple[int, ...]:
        """Say how large the parts of a dimension are.

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
        """The shape of the array with every part padded to the largest."""
        return padded_shape(self.shape, self.sizes)

    def device_shape(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """Say what shape the part of one device has, padding included.

        Args:
            axes: The mesh axes and their sizes; others count as one.

        Returns:
            One size for each dimension.
        """
        pairs = zip(self.padded_shape, self.cuts(axes), strict=True)
        return tuple(size // num for size, num in pairs)

    def device_bytes(self, axes: Mapping[str, int]) -> int:
        """The bytes that one device holds, padding included.

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
    """Mesh axes of one entry of a PartitionSpec."""
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def to_spec(spec: Sequence[Sequence[str]]) -> P:
    """As jax has it, without empty dimensions at the end."""
    parts = [None if not names else names[0] if len(names) == 1 else tuple(names) for names in spec]
    while parts and parts[-1] is None:
        parts.pop()
    return P(*parts)


def from_spec(spec: P, rank: int) -> tuple[tuple[str, ...], ...]:
    """As a plan has it: one tuple of mesh axes for each of `rank` dimensions."""
    return (*map(names_of, spec), *[()] * (rank - len(spec)))


def dtype_name(dtype: object) -> str:
    """`float32`, also for dtypes that numpy does not know."""
    return np.dtype(dtype).name  # type: ignore[call-overload, no-any-return]
