"""Several microbatches at once on one device, as EasyScale's executors (SC'23) have them.

Each executor is a thread that runs the same program with sums of its own, and takes the next
microbatch as soon as it has done one. Sums are of integers, so neither who ran what nor the order
moves a bit.
"""

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._contribution import DeviceSums, SumsSpec, joined_words

#: `(sums, whether they go on, number of the microbatch, its batch) -> (sums, tick)`.
RunOne = Callable[[DeviceSums, bool, int, Any], tuple[DeviceSums, jax.Array]]


class Executors:
    """Those of one device.

    Args:
        spec: Of the sums.
        num: Executors, at least two.
        like: Shapes and places of a device's sums.
        empty: Makes sums of no microbatch.
        keeps: Whether the sums of executors stay from step to step.
    """

    def __init__(
        self,
        spec: SumsSpec,
        num: int,
        like: DeviceSums,
        empty: Callable[[], DeviceSums],
        *,
        keeps: bool,
    ):
        self.num, self._empty, self._keeps = num, empty, keeps
        self._more: list[DeviceSums | None] = [None] * (num - 1)
        merged = functools.partial(_merged, spec)
        self._merge = jax.jit(merged, donate_argnums=0).lower(like, like).compile()

    def run(
        self,
        run_one: RunOne,
        sums: DeviceSums | None,
        ids: range,
        batches: Sequence[Any],
    ) -> tuple[DeviceSums, jax.Array]:
        """Run microbatches on all executors.

        Args:
            run_one: Runs a microbatch.
            sums: Of the first executor in the step before, whose memory is used again.
            ids: Numbers of the microbatches, at least one.
            batches: Their arrays.

        Returns:
            The sums of all of them, and a small array to wait on.
        """
        work, lock = iter(zip(ids, batches, strict=True)), threading.Lock()
        owned = [sums, *self._more][: len(ids)]

        def taken() -> Iterator[tuple[int, Any]]:
            while True:
                with lock:
                    item = next(work, None)
                if item is None:
                    return
                yield item

        def execute(own: DeviceSums | None) -> tuple[DeviceSums, jax.Array | None]:
            own, tick = own or self._empty(), None
            for index, batch in taken():
                own, tick = run_one(own, tick is not None, index, batch)
                jax.block_until_ready(tick)  # one in flight each
            return own, tick

        with concurrent.futures.ThreadPoolExecutor(len(owned)) as pool:
            found = list(pool.map(execute, owned))
        found.sort(key=lambda pair: pair[1] is None)  # those that ran none are the last
        (total, tick), *others = found
        assert tick is not None
        for own, is_used in others:
            if is_used is not None:
                total, tick = self._merge(total, own)
        if self._keeps:
            self._more = [own for own, _ in others]
            self._more += [None] * (self.num - 1 - len(others))
        return total, tick


def _merged(spec: SumsSpec, a: DeviceSums, b: DeviceSums) -> tuple[DeviceSums, jax.Array]:
    """The sums of two executors, as the sum over devices makes them, and an array to wait on."""

    def added(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y

    small = a.small_MS + b.small_MS
    total = DeviceSums(
        small,
        jnp.maximum(a.peaks_T, b.peaks_T),
        jax.tree.map(added, a.values, b.values),
        joined_words(spec.tensors, a.words, b.words),
    )
    return total, small[0, 0]
