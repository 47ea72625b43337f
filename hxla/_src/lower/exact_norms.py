"""Sums over all elements of an array in an update, such as the squares of a global norm.

The sum does not depend on the sharding or on the compiler: elements are cut into integers relative
to the largest one, integers are added, and their total is rounded once. A replica with all terms
does so on its devices; with ZeRO the host adds the integers of all replicas.

Legend of shape suffixes: K sums of a level.

The gradient's global norm is known where an update computes it anyway, as clipping does.

References:
    Demmel and Nguyen, "Parallel Reproducible Summation", IEEE Trans. Computers 2015, section 3
    (pre-rounding to a common exponent).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..jax.jaxpr import Literal
from ..jax.rounded import times_power_of_two
from ..jax.separable_update import MISSING, SeparableUpdate
from ..plan.ownership import Ownership
from .contribution import largest, largest_bits_of, largest_in_rows, peak_bits, rows_of_each
from .decisions import NUM_DIGITS, as_float, finite, magnitudes, put_digits
from .units import ShardedUpdate, UnitsPart
from .update import UpdateInputs

_LIMB_BITS, _NUM_LIMBS = 15, 4
_ROW = 1 << 12  # limbs whose sum stays below 2**27
_DIGIT = 16  # bits; rows and devices add 2**15 digits
_MOST_EXPONENT = 250

#: From an update's arrays and inputs to arguments of its traced program, and their part.
Arguments = Callable[[Any, UpdateInputs], tuple[list[Any], UnitsPart]]


def row_sums(x: jax.Array, exponent: jax.Array) -> list[jax.Array]:
    """4 arrays of int32[rows]: the sums of each limb over rows of a shard.

    Args:
        x: float32, any shape, at most 2**27 elements.
        exponent: int32 scalar, `abs(x) * 2**exponent < 1`.
    """
    rest = times_power_of_two(x.reshape(-1), exponent)
    rest = jnp.pad(rest, (0, -rest.size % _ROW)).reshape(-1, _ROW)
    rows = []
    for _ in range(_NUM_LIMBS // 2):  # two limbs at a time: a float32 has fewer bits
        rest = rest * np.float32(1 << 2 * _LIMB_BITS)
        whole = jnp.floor(rest)
        rest, pair = rest - whole, whole.astype(jnp.int32)
        for limb in (pair >> _LIMB_BITS, pair & ((1 << _LIMB_BITS) - 1)):
            rows.append(limb.sum(axis=1, dtype=jnp.int32))
    return rows


def digits_of(rows: Sequence[Sequence[jax.Array]], *, on_cpu: bool) -> jax.Array:
    """The sums of shards, as digits that may be added to those of other shards.

    All are made of one array: a kernel for each would cost more than its work.

    Args:
        rows: For each shard the result of `row_sums`.
        on_cpu: Whether the limbs of a shard are put together first. XLA's compiler for CPUs would
            else make a limb of all shards before the next, and keep what they are made of.

    Returns:
        int32[K, 4, 4]: of each limb's sum two digits of the rows' lower halves, and two of the
        upper.
    """
    if on_cpu:
        every = jnp.concatenate([jnp.stack(limbs, axis=1) for limbs in rows])
    else:
        every = jnp.stack([jnp.concatenate(each) for each in zip(*rows, strict=True)], axis=1)
    is_of = rows_of_each([len(x) for x, *_ in rows])
    halves = jnp.stack([every & 0xFFFF, every >> _DIGIT], axis=-1)
    sums = jnp.where(is_of[..., None, None], halves, 0).sum(axis=1, dtype=jnp.int32)
    return jnp.stack([sums & 0xFFFF, sums >> _DIGIT], axis=-1).reshape(-1, _NUM_LIMBS, 4)


def exponents_for(maxima: np.ndarray) -> np.ndarray:
    """int32[S]: scales that put magnitudes below one."""
    _, magnitude = np.frexp(maxima)
    return np.clip(-magnitude, -_MOST_EXPONENT, _MOST_EXPONENT).astype(np.int32)


def value_of(digits: np.ndarray, exponent: int) -> np.float32:
    """The sum as a float, rounded to float64 and from that to float32.

    Args:
        digits: int32[4, 4], added over all shards.
        exponent: The exponent of `row_sums`.
    """
    total = 0
    for low_low, low_high, high_low, high_high in digits.tolist():
        whole = low_low + ((low_high + high_low) << _DIGIT) + (high_high << 2 * _DIGIT)
        total = (total << _LIMB_BITS) + whole
    with np.errstate(over="ignore"):
        return np.float32(math.ldexp(total, -_NUM_LIMBS * _LIMB_BITS - int(exponent)))


def values_of(digits: jax.Array, exponents: jax.Array) -> jax.Array:
    """float32[K]: `value_of` each sum, on a device.

    Args:
        digits: int32[K, 4, 4].
        exponents: int32[K].
    """
    out = [jnp.zeros_like(exponents)] * NUM_DIGITS
    for limb, digit in itertools.product(range(_NUM_LIMBS), range(4)):
        places = digit // 2 + digit % 2
        shift = _LIMB_BITS * (_NUM_LIMBS - 1 - limb) + _DIGIT * places
        put_digits(out, digits[:, limb, digit], shift)
    return as_float(out, -_NUM_LIMBS * _LIMB_BITS - exponents)


class LevelSums:
    """The two halves of a level of an update's sums, as functions that are traced.

    Args:
        sharded: The update over a replica's devices; None: there is one device.
        on_cpu: Whether an array's largest magnitude is found at once.
    """

    def __init__(
        self,
        update: SeparableUpdate,
        level: int,
        arguments: Arguments,
        sharded: ShardedUpdate | None,
        *,
        on_cpu: bool,
    ):
        self._update, self._level, self._on_cpu = update, level, on_cpu
        self._arguments, self._sharded = arguments, sharded

    def _of_terms(
        self, made: Callable[[int, jax.Array], Any], arrays: Any, inputs: UpdateInputs
    ) -> list[Any]:
        """Apply a function of a sum's number and its terms to each sum."""

        def run(shards: Sequence[Any], part: UnitsPart) -> dict[int, Any]:
            zero = inputs.where[1]
            terms = self._update.summed(self._level, shards, part, zero, inputs.sums)
            return {k: made(k, x) for k, x in enumerate(terms) if x is not MISSING}

        shards, part = self._arguments(arrays, inputs)
        if self._sharded is None:
            results = run(shards, part)
        else:
            results = self._sharded.each(run, shards, part, inputs.where[1])
        num = len(self._update.levels[self._level])
        return [
            results[k] if k in results else made(k, jnp.zeros(0, jnp.float32)) for k in range(num)
        ]

    def largest(self, arrays: Any, given: UpdateInputs) -> jax.Array:
        """float32[K]: the largest magnitude of the terms of each sum."""
        if self._on_cpu:
            terms = jnp.stack(self._of_terms(lambda _, x: largest(x), arrays, given))
        else:
            rows = self._of_terms(lambda _, x: largest_in_rows(x), arrays, given)
            terms = jax.lax.bitcast_convert_type(largest_bits_of(rows), jnp.float32)
        return terms if self._sharded is None else self._sharded.largest(terms)

    def digits(self, arrays: Any, given: UpdateInputs, exponents: jax.Array) -> jax.Array:
        """int32[K, 4, 4]: see `digits_of`."""
        rows = self._of_terms(lambda k, x: row_sums(x, exponents[k]), arrays, given)
        digits = digits_of(rows, on_cpu=self._on_cpu)
        if self._sharded is None:
            return digits
        return self._sharded.added(digits, self._update.summed_domains(self._level))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumPrograms:
    """The programs of an update's sums over whole arrays.

    Attributes:
        whole: Of a replica with all terms, `(arrays, given) -> float32[S]`; None: there is no such
            replica, or no sum.
        levels: Of other replicas for each level two programs: of the largest terms,
            `(arrays, given) -> float32[K]`, and of the digits,
            `(arrays, given, exponents) -> int32[K, 4, 4]`. `UpdateInputs.sums` are those of earlier
            levels.
        sizes: For each of these levels the number K of its sums.
    """

    whole: Any = None
    levels: Sequence[tuple[Any, Any]] = ()
    sizes: Sequence[int] = ()

    @property
    def num(self) -> int:
        """The number of programs."""
        return (self.whole is not None) + 2 * len(self.levels)

    def lower(self, arrays: Any, given: UpdateInputs) -> list[Any]:
        """The programs before compilation: the whole one, or the two of each level in turn."""
        lowered = [] if self.whole is None else [self.whole.lower(arrays, given)]
        for (first, second), size in zip(self.levels, self.sizes, strict=True):
            lowered.append(first.lower(arrays, given))
            lowered.append(second.lower(arrays, given, np.zeros(size, np.int32)))
        return lowered


def sum_programs(
    update: SeparableUpdate,
    arguments: Arguments,
    options: Mapping[str, Any],
    sharded: ShardedUpdate | None,
    specs: tuple[Any, UpdateInputs],
    *,
    is_alone: bool,
    on_cpu: bool,
) -> SumPrograms:
    """The programs of an update's sums.

    Args:
        sharded: The update over a replica's devices; None: there is one device.
        specs: PartitionSpecs of `arrays` and `given`.
        is_alone: Whether a replica has all terms.
        on_cpu: See `LevelSums`.
    """
    levels = [
        LevelSums(update, k, arguments, sharded, on_cpu=on_cpu) for k in range(len(update.levels))
    ]

    def hxla_sums(arrays: Any, given: UpdateInputs) -> jax.Array:
        sums: list[jax.Array] = []
        zero = given.where[1]
        for level in levels:
            known = jnp.stack([*sums, *[jnp.float32(0)] * (len(update.sums) - len(sums))])
            read = given._replace(sums=known, where=given.where.at[1].set(zero))
            most = level.largest(arrays, read)
            bits = peak_bits(most)
            # Of another zero the terms are made again: kept, they would need the memory of all.
            zero &= bits[0]
            is_finite = finite(bits)
            exponents = -magnitudes(jnp.where(is_finite, bits, 0))
            exponents = jnp.clip(exponents, -_MOST_EXPONENT, _MOST_EXPONENT)
            digits = level.digits(
                arrays, read._replace(where=given.where.at[1].set(zero)), exponents
            )
            zero &= digits[0, 0, 0]
            sums.extend(jnp.where(is_finite, values_of(digits, exponents), most))
        return jnp.stack(sums)

    def program(run: Callable[..., jax.Array], *more: P) -> Any:
        if sharded is not None:
            run = sharded.mapped(run, (*specs, *more), P())
        return jax.jit(run, compiler_options=dict(options))

    if is_alone:
        return SumPrograms(whole=program(hxla_sums) if levels else None)
    pairs = [(program(level.largest), program(level.digits, P())) for level in levels]
    return SumPrograms(levels=pairs, sizes=[len(level) for level in update.levels])


def summed(
    update: SeparableUpdate,
    compiled: Sequence[Sequence[Any]],
    arguments: Sequence[tuple[Any, UpdateInputs]],
    counted: Sequence[bool],
    exchange: Callable[[np.ndarray], np.ndarray],
    rank: tuple[int, int],
) -> np.ndarray:
    """The results of an update's sums, whose terms several replicas have; waits for the devices.

    Args:
        compiled: For each local replica the programs of `SumPrograms.levels`, in turn.
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


_SAME = ("copy", "reshape", "convert_element_type")


def squares_of_gradient(ownership: Ownership) -> tuple[int, ...]:
    """The update's sums that are of the squares of the gradients, one of each trained parameter.

    Returns:
        Their numbers in `exact_norms.summed`; empty: a gradient has none.
    """
    update, first = ownership.update, ownership.num_arrays
    jaxpr = update.closed.jaxpr
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    summed = [jaxpr.eqns[i].invars[0] for i in update.sums]
    gradients = jaxpr.invars[first : first + ownership.num_params]
    of_gradient = {
        gradient: next((k for k, x in enumerate(summed) if _is_square(x, gradient, made)), None)
        for gradient in gradients
    }
    places = [k for k in of_gradient.values() if k is not None]
    return tuple(places) if len(places) == len(gradients) else ()


def norm_of(sums: np.ndarray, places: Sequence[int]) -> float | None:
    """The norm from an update's sums; None without sums of squares."""
    return math.sqrt(sum(float(sums[k]) for k in places)) if places else None


def _is_square(x: Any, of: Any, made: dict[Any, Any]) -> bool:
    """Whether a variable is the square of another, plus that of an imaginary part of zeros."""
    eqn = made.get(x)
    if eqn is None:
        return False
    name, operands = eqn.primitive.name, eqn.invars
    if name == "add":
        left, right = operands
        return any(
            _is_square(a, of, made) and _is_zero(b, made) for a, b in ((left, right), (right, left))
        )
    if name in _SAME:
        return _is_square(operands[0], of, made)
    is_power = name == "square" or (name == "integer_pow" and eqn.params["y"] == 2)
    is_product = name == "mul" and operands[0] is operands[1]
    return (is_power or is_product) and operands[0] is of


def _is_zero(x: Any, made: dict[Any, Any]) -> bool:
    if isinstance(x, Literal):
        return not np.any(x.val)
    eqn = made.get(x)
    if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "square", *_SAME):
        return False
    return _is_zero(eqn.invars[0], made)
