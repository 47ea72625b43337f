"""Several microbatches of a replica at once, on executors with separate sums.

Each executor is a thread that takes the next call as soon as it has done one. Sums are of
integers, so no bit depends on which executor ran a microbatch, or on the order.
"""

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .contribution import DeviceSums, Tensors, joined_words

#: For each call its microbatches: consecutive numbers, each with its batch.
Calls = Iterable[Sequence[tuple[int, Any]]]
#: `(sums, calls) -> (sums, tick)`; no tick where there was no call.
RunCalls = Callable[[DeviceSums | None, Calls], tuple[DeviceSums, jax.Array | None]]

_CALLS_OF_EACH = 4  # of an executor in a step: a slow one takes fewer


class Executors:
    """The executors of one device.

    Args:
        like: Shapes and shardings of a replica's sums.
        keeps: Whether the sums of executors stay in memory from step to step.
    """

    def __init__(
        self,
        tensors: Tensors,
        num: int,
        like: DeviceSums,
        keeps: bool,
    ):
        self.num, self._keeps = num, keeps
        self._more: list[DeviceSums | None] = [None] * (num - 1)
        merged = functools.partial(_merged, tensors)
        self._merge = jax.jit(merged, donate_argnums=0).lower(like, like).compile()

    def fair_share(self, num_microbatches: int) -> int:
        """The microbatches of a call, so that no executor waits long for the last one."""
        return -(-num_microbatches // (_CALLS_OF_EACH * self.num))

    def run(
        self, run_calls: RunCalls, sums: DeviceSums | None, calls: Sequence[Any]
    ) -> tuple[DeviceSums, jax.Array]:
        """Run calls on all executors.

        Args:
            sums: The first executor's sums of the step before, whose memory is reused.

        Returns:
            The sums of all executors, and a small array to wait on.
        """
        items, lock = iter(calls), threading.Lock()
        kept = [sums, *self._more][: len(calls)]

        def taken() -> Iterator[Any]:
            while True:
                with lock:
                    item = next(items, None)
                if item is None:
                    return
                yield item

        def execute(sums: DeviceSums | None) -> tuple[DeviceSums, jax.Array | None]:
            return run_calls(sums, taken())

        with concurrent.futures.ThreadPoolExecutor(len(kept)) as pool:
            ended = list(pool.map(execute, kept))
        ended.sort(key=lambda pair: pair[1] is None)  # executors without a call come last
        (total, tick), *others = ended
        assert tick is not None
        for more, is_used in others:
            if is_used is not None:
                total, tick = self._merge(total, more)
        if self._keeps:
            self._more = [more for more, _ in others]
            self._more += [None] * (self.num - 1 - len(others))
        return total, tick


def _merged(tensors: Tensors, a: DeviceSums, b: DeviceSums) -> tuple[DeviceSums, jax.Array]:
    """The sum of two executors' sums, by the rules of the all-reduce, and an array to wait on."""
    small = a.small_MS + b.small_MS
    total = DeviceSums(
        small,
        jnp.maximum(a.peaks_T, b.peaks_T),
        jax.tree.map(jnp.add, a.values, b.values),
        joined_words(tensors, a.words, b.words),
    )
    return total, small[0, 0]
