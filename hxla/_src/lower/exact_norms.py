"""Sums over all elements of an array in an update, such as the squares of a global norm.

Whoever owns which part of an array, and however a compiler would add, the sum is the same: elements
are cut into integers relative to the largest of them, integers are added, and the host makes one
number of what all copies of the model have.

References:
    Demmel and Nguyen, "Parallel Reproducible Summation", IEEE Trans. Computers 2015, section 3
    (pre-rounding to a common exponent).
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.powers_of_two import times_power_of_two
from ..jax.separable_update import MISSING, SeparableUpdate
from .contribution import largest
from .units import ShardedUpdate, UnitsPart
from .update import UpdateInputs

_LIMB_BITS, _NUM_LIMBS = 15, 4
_ROW = 1 << 12  # so many limbs add up below 2**27
_DIGIT = 16  # bits; rows and devices add up 2**15 of these

#: From an update's arrays and inputs to arguments of its traced program, and what they have.
Arguments = Callable[[Any, UpdateInputs], tuple[list[Any], UnitsPart]]


def digits_of(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """The sum of an array's part, as digits that may be added to those of other parts.

    Args:
        x: float32, any shape, at most 2**27 elements.
        exponent: int32 scalar, `abs(x) * 2**exponent < 1`.

    Returns:
        int32[4, 4]: of each limb's sum two digits of the rows' lower halves, and two of the upper.
    """
    rest = times_power_of_two(x.reshape(-1), exponent)
    rest = jnp.pad(rest, (0, -rest.size % _ROW)).reshape(-1, _ROW)
    digits = []
    for _ in range(_NUM_LIMBS // 2):  # two at once: a float32 has fewer bits
        rest = rest * np.float32(1 << 2 * _LIMB_BITS)
        whole = jnp.floor(rest)
        rest, pair = rest - whole, whole.astype(jnp.int32)
        for limb in (pair >> _LIMB_BITS, pair & ((1 << _LIMB_BITS) - 1)):
            rows = limb.sum(axis=1)
            halves = (rows & 0xFFFF).sum(), (rows >> _DIGIT).sum()
            digits.append(jnp.stack([d for h in halves for d in (h & 0xFFFF, h >> _DIGIT)]))
    return jnp.stack(digits)


def exponents_for(maxima: np.ndarray) -> np.ndarray:
    """int32[S]: scales that put magnitudes below one."""
    _, magnitude = np.frexp(maxima)
    return np.clip(-magnitude, -250, 250).astype(np.int32)


def value_of(digits: np.ndarray, exponent: int) -> np.float32:
    """The sum as a float, correctly rounded.

    Args:
        digits: int32[4, 4], added over all parts.
        exponent: That of `digits_of`.
    """
    value = Fraction(0)
    for k, (low_low, low_high, high_low, high_high) in enumerate(digits.tolist()):
        whole = low_low + ((low_high + high_low) << _DIGIT) + (high_high << 2 * _DIGIT)
        value += Fraction(whole, 1 << _LIMB_BITS * (k + 1))
    value *= Fraction(2) ** -int(exponent)
    with np.errstate(over="ignore"):
        return np.float32(float(value)) if abs(value) < 2**200 else np.float32(np.inf)


def sum_programs(
    update: SeparableUpdate,
    arguments: Arguments,
    options: Mapping[str, Any],
    on: ShardedUpdate | None,
    specs: tuple[Any, UpdateInputs],
) -> list[tuple[Any, Any]]:
    """For each level of an update's sums the programs of their largest terms, and of their digits.

    `(arrays, given) -> float32[K]`, and `(arrays, given, exponents) -> int32[K, 4, 4]`, for the K
    sums of the level; `UpdateInputs.sums` are those of earlier levels.

    Args:
        arguments: From the first two.
        on: The devices of a replica of several; None: it is of one.
        specs: PartitionSpecs of the first two.
    """

    def programs(level: int) -> tuple[Any, Any]:
        num = len(update.levels[level])

        def of_terms(
            made: Callable[[int, jax.Array], jax.Array], arrays: Any, given: UpdateInputs
        ) -> list[jax.Array]:
            """What is made of the terms of each sum, from its number and them."""

            def run(own: Sequence[Any], part: UnitsPart) -> dict[int, jax.Array]:
                found = update.summed(level, own, part, given.where[1], given.sums)
                return {k: made(k, x) for k, x in enumerate(found) if x is not MISSING}

            own, part = arguments(arrays, given)
            found = run(own, part) if on is None else on.each(run, own, part, given.where[1])
            return [found[k] if k in found else made(k, jnp.zeros(0)) for k in range(num)]

        def hxla_largest(arrays: Any, given: UpdateInputs) -> jax.Array:
            here = jnp.stack(of_terms(lambda _, x: largest(x), arrays, given))
            return here if on is None else on.largest(here)

        def hxla_digits(arrays: Any, given: UpdateInputs, exponents: jax.Array) -> jax.Array:
            digits = of_terms(lambda k, x: digits_of(x, exponents[k]), arrays, given)
            if on is not None:
                digits = list(map(on.added, digits, update.summed_domains(level)))
            return jnp.stack(digits)

        runs: list[Callable[..., jax.Array]] = [hxla_largest, hxla_digits]
        if on is not None:
            each = [specs, (*specs, P())]
            runs = [on.mapped(run, own, P()) for run, own in zip(runs, each, strict=True)]
        first, second = (jax.jit(run, compiler_options=dict(options)) for run in runs)
        return first, second

    return [programs(level) for level in range(len(update.levels))]


def lowered_sums(
    update: SeparableUpdate, programs: Sequence[tuple[Any, Any]], given: Sequence[Any]
) -> list[Any]:
    """The programs before compilation, in order.

    Args:
        programs: From `sum_programs`.
    """
    out = []
    for level, (first, second) in zip(update.levels, programs, strict=True):
        out.append(first.lower(*given))
        out.append(second.lower(*given, np.zeros(len(level), np.int32)))
    return out


def summed(
    update: SeparableUpdate,
    compiled: Sequence[Sequence[Any]],
    given: Sequence[tuple[Any, UpdateInputs]],
    counted: Sequence[bool],
    exchange: Callable[[np.ndarray], np.ndarray],
    rank: tuple[int, int],
) -> np.ndarray:
    """The results of an update's sums.

    Args:
        compiled: For each local copy the programs of `lowered_sums`.
        given: For each local copy the arguments of these, but for the sums.
        counted: For each local copy whether its terms are none that another process or copy adds.
        exchange: Adds the bits of numbers over all processes.
        rank: Number of this process, and of all.

    Returns:
        float32[S].
    """
    sums = np.zeros(len(update.sums), np.float32)
    start = 0
    for k, level in enumerate(update.levels):
        here = range(len(given))
        read = [(arrays, own._replace(sums=sums)) for arrays, own in given]
        rows = np.zeros((rank[1], len(level)), np.float32)
        for i in here:
            found = np.abs(np.asarray(compiled[i][2 * k](*read[i])))
            rows[rank[0]] = np.maximum(rows[rank[0]], found)
        most = exchange(rows).max(axis=0)
        exponents = exponents_for(np.where(np.isfinite(most), most, 0))
        digits = np.zeros((len(level), _NUM_LIMBS, 4), np.int32)
        for i in here:
            own = np.asarray(compiled[i][2 * k + 1](*read[i], exponents))
            digits += own * counted[i]
        digits = exchange(digits)
        for n in range(len(level)):
            whole = value_of(digits[n], exponents[n])
            sums[start + n] = whole if np.isfinite(most[n]) else most[n]
        start += len(level)
    return sums
