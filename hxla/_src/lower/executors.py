"""Several microbatches of a replica at once, on executors with separate sums.

Each executor is a thread that takes the next call as soon as it has done one. Sums are of
integers, so no bit depends on which executor ran a microbatch, or on the order.
"""

import concurrent.futures
import functools
import itertools
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

    def run(
        self, run_calls: RunCalls, sums: DeviceSums | None, calls: Sequence[Any]
    ) -> tuple[DeviceSums, jax.Array]:
        """Run calls on all executors.

        Args:
            sums: The first executor's sums of the step before, whose memory is reused.

        Returns:
            The sums of all executors, and a small array to wait on.
        """
        kept, taken = [sums, *self._more][: len(calls)], _shared(calls)

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


class PartExecutors:
    """The executors of a device in ZeRO 2 and 3, where all microbatches of a part run together.

    Args:
        like: For each part shapes and shardings of the sums to which it adds.
        same: For each part the first with the same shapes.
    """

    def __init__(self, tensors: Tensors, num: int, like: Sequence[DeviceSums], same: Sequence[int]):
        self.num, self._same = num, same
        merged = functools.partial(_merged, tensors)
        self._programs: dict[int, tuple[Any, Any]] = {}
        for i in sorted(set(same)):
            where = jax.tree.map(lambda x: x.sharding, like[i])
            zeros = jax.jit(functools.partial(_zeros, like[i]), out_shardings=where)
            merge = jax.jit(merged, donate_argnums=0).lower(like[i], like[i])
            self._programs[i] = zeros.lower().compile(), merge.compile()

    def run(
        self,
        i: int,
        state: Any,
        microbatches: Sequence[Any],
        run: Callable[[Any, Any], Any],
        sums: Any,
    ) -> None:
        """Run the microbatches of a part.

        Args:
            state: The arrays of a step.
            run: `(state, microbatch) -> arrays to wait on`.
            sums: Takes and puts the sums of the part in a state; None: nothing is added.
        """
        zeros, merge = self._programs[self._same[i]]
        states = [state] * min(self.num, len(microbatches))
        if sums is not None:
            states[1:] = [sums.with_sums(state, zeros()) for _ in states[1:]]
        first, taken = microbatches[:1], _shared(microbatches[1:])

        def execute(k: int) -> None:
            # The first microbatch begins the sums, so it must be the first of its executor.
            for microbatch in itertools.chain(first if k == 0 else (), taken()):
                jax.block_until_ready(run(states[k], microbatch))

        with concurrent.futures.ThreadPoolExecutor(len(states)) as pool:
            list(pool.map(execute, range(len(states))))
        for other in states[1:] if sums is not None else ():
            total, _ = merge(sums.take(state), sums.take(other))
            sums.put(state, total)


def fair_share(num_executors: int, num_microbatches: int) -> int:
    """The microbatches of a call, so that no executor waits long for the last one."""
    return -(-num_microbatches // (_CALLS_OF_EACH * num_executors))


def _shared(items: Iterable[Any]) -> Callable[[], Iterator[Any]]:
    """Makes iterators for several threads, each of which takes the next item that is left."""
    left, lock = iter(items), threading.Lock()

    def taken() -> Iterator[Any]:
        while True:
            with lock:
                item = next(left, None)
            if item is None:
                return
            yield item

    return taken


def _zeros(like: DeviceSums) -> DeviceSums:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)  # type: ignore[no-any-return]


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
