"""Loops over a device's own part of a padded array: as many granules as it has, in place.

SPMD gives every device an array of the largest part. Element-wise work on it would take a device
with half the units as long as one with all of them, so it runs on slices of one static size, and
each device takes as many of them as cover its part. The last one may reach into the padding, which
is zero and stays so.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ._across import Cut

_MOST_GRANULES = 16  # each is a round of a loop, some microseconds


@dataclasses.dataclass(frozen=True)
class Granules:
    """Slices of a padded dimension.

    Attributes:
        cut: How the dimension is cut.
        size: Of each slice; a divisor of the padded size.
    """

    cut: Cut
    size: int

    @classmethod
    def of(cls, cut: Cut) -> "Granules":
        """Those with which devices do the least work beyond their own parts."""
        most = cut.padded
        sizes = [most // n for n in range(1, _MOST_GRANULES + 1) if most % n == 0]
        return cls(cut, min(sizes, key=lambda size: (_covering(cut, size), -size)))

    @property
    def counts(self) -> tuple[int, ...]:
        """Of each device."""
        return tuple(-(-own // self.size) for own in self.cut.sizes)

    def take(self, x: jax.Array, i: Any) -> jax.Array:
        """One slice."""
        return jax.lax.dynamic_slice_in_dim(x, i * self.size, self.size, self.cut.dim)

    def put(self, x: jax.Array, part: jax.Array, i: Any) -> jax.Array:
        """The array with another slice."""
        return jax.lax.dynamic_update_slice_in_dim(x, part, i * self.size, self.cut.dim)

    def loop(
        self,
        step: Callable[[Any, list[jax.Array], Any], tuple[Sequence[jax.Array], Any]],
        arrays: Sequence[jax.Array],
        carry: Any,
    ) -> tuple[list[jax.Array], Any]:
        """Replace this device's part of some arrays, one slice of each after another.

        Args:
            step: `(i, slices, carry) -> (new slices, carry)`.
            arrays: Padded.
            carry: What goes from slice to slice.

        Returns:
            The arrays and the last carry.
        """

        def body(i: Any, held: Any) -> Any:
            arrays, carry = held
            found, carry = step(i, [self.take(x, i) for x in arrays], carry)
            return [self.put(x, new, i) for x, new in zip(arrays, found, strict=True)], carry

        count = self.cut.own(self.counts)
        return jax.lax.fori_loop(0, count, body, (list(arrays), carry))  # type: ignore[no-any-return]


def _covering(cut: Cut, size: int) -> int:
    return sum(-(-own // size) * size for own in cut.sizes)
