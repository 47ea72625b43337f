"""What waits between forward and backward in pinned memory of the host.

Copies begin when they are asked for and run beside programs. A queue of them would be a queue of
memory: so before one is asked for, that before it in the same direction must be done.

References:
    Rhu et al., "vDNN: virtualized deep neural networks for scalable, memory-efficient neural
    network design", MICRO 2016, section 3 (offload and prefetch beside computation).
"""

import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any

import jax

from ._replica import Replica
from ._shelves import DEVICE, HOST, check_host_memory, in_memory

#: Of a value of a microbatch its copy, as long as anybody needs it.
Known = MutableMapping[int, jax.Array]


class Stash:
    """Copies of one device to and from its host.

    Args:
        replica: The copy of the model.

    Raises:
        PlanError: If its device cannot name its host's memory.
    """

    def __init__(self, replica: Replica):
        check_host_memory(replica.devices[0], "placement.stash")
        #: In each direction one of the arrays that were asked for last.
        self._latest: dict[bool, jax.Array] = {}

    def offload(
        self, values: Sequence[int | None], arrays: Sequence[jax.Array], known: Known
    ) -> list[jax.Array]:
        """Copies in host memory.

        Args:
            values: Numbers of the arrays in the graph, None for what has none.
            arrays: Of one microbatch.
            known: Of its values what is in host memory, which is not copied again.
        """
        return self._copied(values, arrays, known, to_host=True)

    def fetch(
        self, values: Sequence[int | None], arrays: Sequence[jax.Array], known: Known
    ) -> list[jax.Array]:
        """Copies on the device; see `offload`."""
        return self._copied(values, arrays, known, to_host=False)

    def _copied(
        self,
        values: Sequence[int | None],
        arrays: Sequence[jax.Array],
        known: Known,
        *,
        to_host: bool,
    ) -> list[jax.Array]:
        found: list[Any] = [None if v is None else known.get(v) for v in values]
        new = [k for k, x in enumerate(found) if x is None]
        jax.block_until_ready(self._latest.pop(to_host, None))
        kind, moved = HOST if to_host else DEVICE, [arrays[k] for k in new]
        made = jax.device_put(moved, [in_memory(x.sharding, kind) for x in moved])
        for k, x in zip(new, made, strict=True):
            found[k] = x
        for v, x in zip(values, found, strict=True):
            if v is not None:
                known[v] = x
        if made:  # copies in one direction end in order, and a small array holds little
            self._latest[to_host] = min(reversed(made), key=lambda x: x.nbytes)
        return found

    def wait(self) -> None:
        """Until nothing is under way."""
        jax.block_until_ready(list(self._latest.values()))
        self._latest = {}


def nothing_known() -> Known:
    """Of a microbatch that begins."""
    return weakref.WeakValueDictionary()
