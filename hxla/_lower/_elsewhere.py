"""Which arrays of the copies of a model wait outside the devices' memory, and takes them there."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ._own_state import OwnState
from ._replica import Replica
from ._shelves import Away, Shelf, away_leaves, check_host_memory, on_host
from ._update_groups import UpdateGroups, update_groups

MakeShelf = Callable[[Replica, UpdateGroups], Shelf]


class Elsewhere:
    """What of the local copies' `Held.leaves` waits elsewhere.

    Args:
        own: Where what each copy has a part of is; None: all have everything, and nothing waits.
        local: The local copies.
        num_params: The first leaves, the parameters.
        state: Places of the leaves of the optimizer's state, the last ones.
        make_shelf: Makes what holds the optimizer's state of a copy; None: devices do.
        params_on_host: Whether the own part of parameters that each copy has waits on the host.
    """

    def __init__(
        self,
        own: OwnState | None,
        local: Sequence[Replica],
        num_params: int,
        state: range,
        make_shelf: MakeShelf | None,
        params_on_host: bool,
    ):
        self._own, self._num_params, self._state = own, num_params, state
        self._params_on_host = params_on_host
        if params_on_host:
            check_host_memory(local[0].devices[0], "placement.parameters")
        self.shelves: list[Shelf] = []
        #: Of each local copy the leaves of the optimizer's state that are on its shelf.
        self._away: list[dict[int, Away]] = [{} for _ in local]
        if make_shelf is not None and own is not None:
            for i, replica in enumerate(local):
                leaves = [own.like(k, replica.index) for k in state]
                shelf = make_shelf(
                    replica, update_groups(own.own, own.own.member(replica.index), leaves)
                )
                self.shelves.append(shelf)
                self._away[i] = away_leaves(shelf, replica, leaves)

    def waits(self, k: int) -> bool:
        """Whether copies have a leaf elsewhere than on the device."""
        if self._own is None or self._own.is_common[k]:
            return False
        is_state = k in self._state and bool(self.shelves)
        return is_state or (k < self._num_params and self._params_on_host)

    def put(self, i: int, k: int, x: jax.Array) -> Any:
        """What a local copy has of a leaf, where it waits.

        Args:
            i: Number of the local copy.
            k: Number of the leaf.
            x: What it has, perhaps where it waits already.
        """
        if k < self._num_params:
            return on_host(x) if self.waits(k) else x
        away = self._away[i].get(k - self._state.start)
        if away is None:
            return x
        away.put(x)
        return away

    def close(self) -> None:
        """Let go of what is not on devices."""
        for shelf in self.shelves:
            shelf.close()
