"""Measured rates of matrix products, copies and links of this process's devices."""

import functools
import math

import jax
import jax.numpy as jnp

from ..core.timing import median_seconds

_MIN_SECONDS = 0.02  # of one product: far above the noise of clock and dispatch
_LARGEST = 16384  # 1 GiB per float32 operand
_LAUNCHED, _SMALL = 128, 64  # products in a chain, and their size
_MESSAGE_BYTES = (2**12, 2**16, 2**20, 2**24, 2**27)


def matmul_flops_per_second(device: jax.Device, dtype: str) -> float:
    """Rate of square matrix products that take about 20 ms.

    Args:
        dtype: Of operands and result. `tensorfloat32` is float32 in JAX's default precision, which
            NVIDIA cards from Ampere on round to TF32; `float32` is not rounded.
    """
    precision = "default" if dtype == "tensorfloat32" else "highest"
    dtype = dtype.replace("tensor", "")
    product = jax.jit(functools.partial(jnp.matmul, precision=precision))
    size = 256
    while True:
        # Random, since GPUs multiply constants at a higher clock than real data.
        x = jax.device_put(jax.random.normal(jax.random.key(0), (size, size), dtype), device)
        seconds = median_seconds(functools.partial(product, x, x))
        if seconds >= _MIN_SECONDS or size >= _LARGEST:
            return 2 * size**3 / seconds
        # Seconds grow at most cubically: the largest power of two that stays below the minimum.
        more = math.log2(_MIN_SECONDS / seconds) / 3
        size = min(_LARGEST, size * 2 ** max(1, int(more)))


def launch_seconds(device: jax.Device) -> float:
    """Seconds per small kernel in a long sequence, running or launching."""

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(_LAUNCHED):
            x = x @ x
        return x

    x = jax.device_put(jnp.eye(_SMALL), device)
    return median_seconds(functools.partial(chain, x)) / _LAUNCHED


def host_bytes_per_second(device: jax.Device, num_bytes: int) -> float | None:
    """Rate of copies to pinned memory of the device's host or back, the slower of the two.

    Returns:
        The rate; None if the backend has no pinned memory.
    """
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        return None
    kinds = ("device", "pinned_host")
    here, there = (jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in kinds)
    x = jax.device_put(jnp.zeros(num_bytes // 4, jnp.float32), here)
    y = jax.device_put(x, there)
    ways = (functools.partial(jax.device_put, x, there), functools.partial(jax.device_put, y, here))
    return x.nbytes / max(map(median_seconds, ways))


def copy_bytes_per_second(device: jax.Device, num_bytes: int) -> float:
    """Rate of a pass over memory, with both its reads and its writes counted."""
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(jnp.zeros(num_bytes // 4, jnp.float32), device)

    def again() -> jax.Array:
        nonlocal x
        x = increment(x)
        return x

    return 2 * x.nbytes / median_seconds(again)


def link_curve(source: jax.Device, target: jax.Device) -> tuple[tuple[float, float], ...]:
    """(Message bytes, bytes per second) of copies from one device to another, by message size."""
    points = []
    for size in _MESSAGE_BYTES:
        x = jax.device_put(jnp.zeros(size, jnp.uint8), source)
        points.append(
            (float(size), size / median_seconds(functools.partial(jax.device_put, x, target)))
        )
    return tuple(points)
