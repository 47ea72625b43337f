"""Sums over all elements of an array in an update, such as the squares of a global norm.

The sum does not depend on the sharding or on the compiler: elements are cut into integers relative
to the largest one, integers are added, and the host converts the total of all replicas to a float.

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
_ROW = 1 << 12  # limbs whose sum stays below 2**27
_DIGIT = 16  # bits; rows and devices add 2**15 digits

#: From an update's arrays and inputs to arguments of its traced program, and their part.
Arguments = Callable[[Any, UpdateInputs], tuple[list[Any], UnitsPart]]


def digits_of(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """The sum of a shard, as digits that may be added to those of other shards.

    Args:
        x: float32, any shape, at most 2**27 elements.
        exponent: int32 scalar, `abs(x) * 2**exponent < 1`.

    Returns:
        int32[4, 4]: of each limb's sum two digits of the rows' lower halves, and two of the upper.
    """
    rest = times_power_of_two(x.reshape(-1), exponent)
    rest = jnp.pad(rest, (0, -rest.size % _ROW)).reshape(-1, _ROW)
    digits = []
    for _ in range(_NUM_LIMBS // 2):  # two limbs at a time: a float32 has fewer bits
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
        digits: int32[4, 4], added over all shards.
        exponent: The exponent of `digits_of`.
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
    sharded: ShardedUpdate | None,
    specs: tuple[Any, UpdateInputs],
) -> list[tuple[Any, Any]]:
    """Two programs for each level of an update's sums: of the largest terms, and of the digits.

    `(arrays, given) -> float32[K]`, and `(arrays, given, exponents) -> int32[K, 4, 4]`, for the K
    sums of the level; `UpdateInputs.sums` are those of earlier levels.

    Args:
        sharded: The update over a replica's devices; None: there is one device.
        specs: PartitionSpecs of `arrays` and `given`.
    """

    def programs(level: int) -> tuple[Any, Any]:
        num = len(update.levels[level])

        def of_terms(
            made: Callable[[int, jax.Array], jax.Array], arrays: Any, inputs: UpdateInputs
        ) -> list[jax.Array]:
            """Apply a function of a sum's number and its terms to each sum."""

            def run(shards: Sequence[Any], part: UnitsPart) -> dict[int, jax.Array]:
                terms = update.summed(level, shards, part, inputs.where[1], inputs.sums)
                return {k: made(k, x) for k, x in enumerate(terms) if x is not MISSING}

            shards, part = arguments(arrays, inputs)
            if sharded is None:
                results = run(shards, part)
            else:
                results = sharded.each(run, shards, part, inputs.where[1])
            return [results[k] if k in results else made(k, jnp.zeros(0)) for k in range(num)]

        def hxla_largest(arrays: Any, given: UpdateInputs) -> jax.Array:
            terms = jnp.stack(of_terms(lambda _, x: largest(x), arrays, given))
            return terms if sharded is None else sharded.largest(terms)

        def hxla_digits(arrays: Any, given: UpdateInputs, exponents: jax.Array) -> jax.Array:
            digits = of_terms(lambda k, x: digits_of(x, exponents[k]), arrays, given)
            if sharded is not None:
                digits = list(map(sharded.added, digits, update.summed_domains(level)))
            return jnp.stack(digits)

        runs: list[Callable[..., jax.Array]] = [hxla_largest, hxla_digits]
        if sharded is not None:
            specs_each = [specs, (*specs, P())]
            runs = [
                sharded.mapped(run, in_specs, P())
                for run, in_specs in zip(runs, specs_each, strict=True)
            ]
        first, second = (jax.jit(run, compiler_options=dict(options)) for run in runs)
        return first, second

    return [programs(level) for level in range(len(update.levels))]


def lowered_sums(
    update: SeparableUpdate, programs: Sequence[tuple[Any, Any]], arguments: Sequence[Any]
) -> list[Any]:
    """The programs of `sum_programs` before compilation, in order."""
    out = []
    for level, (first, second) in zip(update.levels, programs, strict=True):
        out.append(first.lower(*arguments))
        out.append(second.lower(*arguments, np.zeros(len(level), np.int32)))
    return out


def summed(
    update: SeparableUpdate,
    compiled: Sequence[Sequence[Any]],
    arguments: Sequence[tuple[Any, UpdateInputs]],
    counted: Sequence[bool],
    exchange: Callable[[np.ndarray], np.ndarray],
    rank: tuple[int, int],
) -> np.ndarray:
    """The results of an update's sums.

    Args:
        compiled: For each local replica the programs of `lowered_sums`.
        arguments: For each local replica the arguments of these, without the sums.
        counted: For each local replica whether no other process or replica adds the same terms.
        exchange: Sums bits over all processes.
        rank: Number of this process, and number of processes.

    Returns:
        float32[S].
    """
    sums = np.zeros(len(update.sums), np.float32)
    start = 0
    for k, level in enumerate(update.levels):
        local = range(len(arguments))
        read = [(arrays, inputs._replace(sums=sums)) for arrays, inputs in arguments]
        rows = np.zeros((rank[1], len(level)), np.float32)
        for i in local:
            terms = np.abs(np.asarray(compiled[i][2 * k](*read[i])))
            rows[rank[0]] = np.maximum(rows[rank[0]], terms)
        most = exchange(rows).max(axis=0)
        exponents = exponents_for(np.where(np.isfinite(most), most, 0))
        digits = np.zeros((len(level), _NUM_LIMBS, 4), np.int32)
        for i in local:
            replica_digits = np.asarray(compiled[i][2 * k + 1](*read[i], exponents))
            digits += replica_digits * counted[i]
        digits = exchange(digits)
        for n in range(len(level)):
            whole = value_of(digits[n], exponents[n])
            sums[start + n] = whole if np.isfinite(most[n]) else most[n]
        start += len(level)
    return sums
