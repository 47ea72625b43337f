"""What the stages of a pipeline have from one tick to the next.

Legend of shape suffixes: M microbatches of a step, T tensors, S stages, N devices of a stage.
"""

from typing import NamedTuple

import jax


class Accumulated(NamedTuple):
    """What each stage adds up over a step; every array has a leading dimension of stages."""

    small_MS: jax.Array
    peaks_NT: jax.Array
    slots: list[tuple[jax.Array, ...]]
    aux: list[tuple[jax.Array, ...]]
    words: list[jax.Array]


class Buffers(NamedTuple):
    """What waits between ticks; every array has a leading dimension of stages."""

    inputs: jax.Array
    grads: jax.Array
    residuals: list[jax.Array]
    late: list[jax.Array]
    down: jax.Array
    up: jax.Array


class Carry(NamedTuple):
    buffers: Buffers
    acc: Accumulated
