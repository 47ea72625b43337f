"""Arrays that parts of a pipeline keep from one action to a later one, in buffers of their shapes.

Every stage has the same buffers, as SPMD asks; parts that keep arrays of one shape share them.
Packing them together would copy each twice.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

_Kind = tuple[tuple[int, ...], Any]


@dataclasses.dataclass(frozen=True)
class Kept:
    """Which buffer each kept array of each part has.

    Attributes:
        kinds: Shape and dtype of each buffer's entries; random keys are kept as their data.
        of: For each part the buffer of each of its arrays.
        dtypes: For each part the dtype of each of its arrays.
    """

    kinds: tuple[_Kind, ...]
    of: tuple[tuple[int, ...], ...]
    dtypes: tuple[tuple[Any, ...], ...]

    def put(
        self, buffers: Sequence[jax.Array], part: int, arrays: Sequence[jax.Array], index: jax.Array
    ) -> list[jax.Array]:
        """The buffers with a part's arrays in entry `index`."""
        out = list(buffers)
        for i, x in zip(self.of[part], arrays, strict=True):
            out[i] = jax.lax.dynamic_update_index_in_dim(out[i], _data(x), index, 0)
        return out

    def get(self, buffers: Sequence[jax.Array], part: int, index: jax.Array) -> list[jax.Array]:
        """A part's arrays from entry `index`."""
        out = []
        for i, dtype in zip(self.of[part], self.dtypes[part], strict=True):
            x = jax.lax.dynamic_index_in_dim(buffers[i], index, keepdims=False)
            if jnp.issubdtype(dtype, jax.dtypes.prng_key):
                x = jax.random.wrap_key_data(x, impl=jax.random.key_impl(jnp.empty((), dtype)))
            out.append(x)
        return out


def make_kept(arrays: Sequence[Sequence[Any]]) -> Kept:
    """Buffers for what each part keeps.

    Args:
        arrays: For each part its arrays, or their shapes.
    """
    kinds: list[_Kind] = []
    of = []
    for own in arrays:
        used: set[int] = set()
        places = []
        for x in own:
            data = jax.eval_shape(_data, x)
            kind = (tuple(data.shape), data.dtype)
            place = next((i for i, k in enumerate(kinds) if k == kind and i not in used), None)
            if place is None:
                place = len(kinds)
                kinds.append(kind)
            used.add(place)
            places.append(place)
        of.append(tuple(places))
    dtypes = tuple(tuple(x.dtype for x in own) for own in arrays)
    return Kept(kinds=tuple(kinds), of=tuple(of), dtypes=dtypes)


def _data(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
