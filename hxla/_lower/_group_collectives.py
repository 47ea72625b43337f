"""Collectives between copies of the model, for a group of parameters at a time, one after another.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, sections 5.2 and 5.3 (stages 2 and 3).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from ._held import Held
from ._sharded_params import ShardedParams
from ._sum import Reducer


class GroupCollectives:
    """Gathers parameters and sums gradients of one group after another.

    Args:
        reducer: The sums over all copies, with its groups.
        sharded: Gathers the parameters of each group; None: all copies have them.
        trained: Places of the parameters that are trained.

    Attributes:
        under_way: What is there when the last collective is done.
    """

    def __init__(self, reducer: Reducer, sharded: ShardedParams | None, trained: Sequence[int]):
        self.reducer, self.sharded, self._trained = reducer, sharded, tuple(trained)
        self.under_way: Any = None

    def wait(self) -> None:
        """Until the last collective is done: Gloo mixes up those that wait for nothing."""
        if self.reducer.arrays.is_ring:
            jax.block_until_ready(self.under_way)

    def pieces(self, held: Sequence[Held]) -> list[list[jax.Array]]:
        """For each local copy what it has of each trained parameter."""
        return [[own.params[p] for p in self._trained] for own in held]

    def gather(
        self, g: int, pieces: Sequence[Sequence[jax.Array]], *, as_they_are: bool = False
    ) -> list[dict[int, jax.Array]]:
        """See `ShardedParams.gather`; by the places of the parameters."""
        assert self.sharded is not None
        self.wait()
        gathered = self.sharded.gather(g, pieces, as_they_are=as_they_are)
        self.under_way = [smallest(own.values()) for own in gathered]
        return [{self._trained[t]: x for t, x in own.items()} for own in gathered]

    def add_group(self, k: int, values: Sequence[Sequence[Any]], before: Any) -> Any:
        """See `Reducer.add_group`; what it gives to the next wave."""
        self.wait()
        found, self.under_way = self.reducer.add_group(k, values, before)
        return found

    def sum_group(
        self,
        k: int,
        values: Sequence[Sequence[Any]],
        totals: Sequence[list[jax.Array]],
        before: Any = None,
    ) -> None:
        """See `Reducer.sum_group`; each local copy's totals are put behind those it has."""
        self.wait()
        self.under_way = self.reducer.sum_group(k, values, before)
        for own, new in zip(totals, self.under_way, strict=True):
            own += new

    def whole(self, held: Sequence[Held]) -> list[list[jax.Array]]:
        """All parameters whole on each local copy; every process calls this."""
        found = [list(own.params) for own in held]
        if self.sharded is None:
            return found
        pieces = self.pieces(held)
        for g in range(self.sharded.num_groups):
            for params, own in zip(found, self.gather(g, pieces, as_they_are=True), strict=True):
                for p, x in own.items():
                    params[p] = x
        return found


def smallest(arrays: Iterable[jax.Array]) -> jax.Array | None:
    """One of what a program makes, all of which is there at once; whoever holds it holds little."""
    return min(arrays, key=lambda x: x.size, default=None)
