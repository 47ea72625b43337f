"""How fast the devices of this process multiply, copy and talk, whatever model runs on them."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._core._statistics import middle_mean

_REPEATS = 7
_MIN_SECONDS = 0.02  # of one product: far above the clock's and the dispatch's noise
_LARGEST = 16384  # 1 GiB per float32 operand
_CALM = 1.1  # longest run over the median of a device that never rests
_BLOCKS = 3
_BLOCK_SECONDS = 0.1  # several periods of a process's CPU quota
_MESSAGE_BYTES = (2**12, 2**16, 2**20, 2**24, 2**27)


def matmul_flops_per_second(device: jax.Device, dtype: str) -> float:
    """Rate of square matrix products, as large as take 20 ms.

    Args:
        device: Where.
        dtype: Of operands and result. `tensorfloat32` is float32 in JAX's default precision, which
            NVIDIA cards from Ampere on round to TF32; `float32` is not rounded.
    """
    precision = "default" if dtype == "tensorfloat32" else "highest"
    dtype = dtype.replace("tensor", "")
    product = jax.jit(functools.partial(jnp.matmul, precision=precision))
    size = 256
    while True:
        # Not constants: GPUs run those at a higher clock than real data.
        x = jax.device_put(jax.random.normal(jax.random.key(0), (size, size), dtype), device)
        seconds = median_seconds(functools.partial(product, x, x))
        if seconds >= _MIN_SECONDS or size >= _LARGEST:
            return 2 * size**3 / seconds
        size *= 2


def copy_bytes_per_second(device: jax.Device, num_bytes: int) -> float:
    """Rate of a pass over memory that reads and writes every byte in place, both counted."""
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(jnp.zeros(num_bytes // 4, jnp.float32), device)

    def again() -> jax.Array:
        nonlocal x
        x = increment(x)
        return x

    return 2 * x.nbytes / median_seconds(again)


def link_curve(source: jax.Device, target: jax.Device) -> tuple[tuple[float, float], ...]:
    """(Message bytes, bytes per second) of copies from one device to another, by size."""
    points = []
    for size in _MESSAGE_BYTES:
        x = jax.device_put(jnp.zeros(size, jnp.uint8), source)
        points.append(
            (float(size), size / median_seconds(functools.partial(jax.device_put, x, target)))
        )
    return tuple(points)


def median_seconds(run: Callable[[], Any]) -> float:
    """Median time, after a first run that compiles and warms up.

    As often in every process: `run` may hold collectives.
    """
    return statistics.median(_times(run, _REPEATS))


def middle_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Mean of the middle half of some times, after a first run that warms up.

    What many runs in turn take each, also in a throttled process: it runs and rests in turns, so
    that most runs hold either a rest more or a rest less than their share, and the median is one
    of the two. As often in every process: `run` may hold collectives.
    """
    return middle_mean(_times(run, repeats))


def steady_seconds(run: Callable[[], Any]) -> float:
    """Like `middle_seconds`, also for runs much shorter than a rest; holds no collectives."""
    times = _times(run, _REPEATS)
    usual = statistics.median(times)
    if max(times) <= _CALM * usual or usual >= _BLOCK_SECONDS:
        return usual
    means = []
    for _ in range(_BLOCKS):
        num, begin = 0, time.perf_counter()
        while (took := time.perf_counter() - begin) < _BLOCK_SECONDS:
            jax.block_until_ready(run())
            num += 1
        means.append(took / num)
    return statistics.median(means)


def _times(run: Callable[[], Any], repeats: int) -> list[float]:
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return times
