"""What is known of arrays of indices before a program runs: bounds, and which places are unlike.

`jnp.arange` has other elements at other places, and so has the permutation of a sort along the
sorted dimension. The shifts, broadcasts and joins between these and a scatter keep some of that.
So a scatter is known to write each place once, and needs no order of additions.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MOST_ELEMENTS = 1 << 20  # of constants that are looked at

#: A dimension, and other dimensions: equal elements at places that are equal along the others are
#: at places that are equal along the first.
Rule = tuple[int, frozenset[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of an array.

    Attributes:
        low: A lower bound of the elements of an array of integers or booleans.
        high: An upper bound.
        rules: The dimensions along which elements are unlike. A dimension of one place is in none.
        varies: The dimensions along which elements may be unlike.
        columns: What is known of each column, if the array joins columns along its last dimension.
    """

    low: int
    high: int
    rules: frozenset[Rule] = frozenset()
    varies: frozenset[int]
    columns: tuple["Known", ...] = ()

    @property
    def is_one(self) -> bool:
        """Whether all elements are one known number."""
        return self.low == self.high

    def determined(self, dims: Iterable[int]) -> set[int]:
        """The dimensions along which places are equal if elements, and places along `dims`, are."""
        return determined((self,), dims)

    def shifted(self, by: int) -> "Known":
        """The same with each dimension renumbered."""
        return self._renumbered(lambda d: d + by)

    def sliced(self) -> "Known":
        """What is known of one slice along the first dimension."""
        return dataclasses.replace(self, **self._without(0))._renumbered(lambda d: d - 1)

    def stacked(self) -> "Known":
        """What is known of slices stacked along a new first dimension, if each is like this one."""
        moved = self.shifted(1)
        rules = frozenset((d, given | {0}) for d, given in moved.rules)
        return dataclasses.replace(moved, rules=rules, varies=moved.varies | {0}, columns=())

    def _without(self, dim: int) -> dict[str, Any]:
        """The fields without a dimension along which the place is fixed."""
        rules = frozenset((d, given - {dim}) for d, given in self.rules if d != dim)
        return {"rules": rules, "varies": self.varies - {dim}, "columns": ()}

    def _renumbered(self, new: Callable[[int], int]) -> "Known":
        rules = frozenset((new(d), frozenset(map(new, given))) for d, given in self.rules)
        return dataclasses.replace(
            self, rules=rules, varies=frozenset(map(new, self.varies)), columns=()
        )


def determined(columns: Sequence[Known], dims: Iterable[int]) -> set[int]:
    """`Known.determined` of the elements of several arrays together."""
    found, before = set(dims), -1
    rules = [rule for column in columns for rule in column.rules]
    while len(found) > before:
        before = len(found)
        found |= {d for d, given in rules if given <= found}
    return found


def unknown(aval: Any) -> Known:
    """An array of which only the shape and the dtype are known; or a token, which has neither."""
    if not hasattr(aval, "dtype"):
        return Known(low=0, high=-1, varies=frozenset())
    low, high = _range_of(aval.dtype)
    return Known(low=low, high=high, varies=_wide(aval.shape))


def constant(aval: Any, value: Any) -> Known:
    """A literal, or an array that a program closes over."""
    is_small = (
        hasattr(aval, "dtype")
        and _is_integer(aval.dtype)
        and 0 < math.prod(aval.shape) <= _MOST_ELEMENTS
    )
    if not is_small or isinstance(value, jax.core.Tracer):
        return unknown(aval)
    x = np.asarray(value)
    dims = _wide(x.shape)
    is_distinct = len(np.unique(x)) == x.size
    rules = frozenset((d, frozenset[int]()) for d in dims) if is_distinct else frozenset[Rule]()
    low, high = int(x.min()), int(x.max())
    return Known(low=low, high=high, rules=rules, varies=dims if low < high else frozenset())


def common(each: Sequence[Known]) -> Known:
    """What is known of an array that is like one of several."""
    first, *others = each
    if all(other == first for other in others):
        return first
    return Known(
        low=min(k.low for k in each),
        high=max(k.high for k in each),
        varies=frozenset().union(*(k.varies for k in each)),
    )


def results_of(eqn: Any, operands: Sequence[Known]) -> list[Known]:
    """What is known of an equation's results."""
    rule = _RULES.get(eqn.primitive.name)
    avals = [v.aval for v in eqn.outvars]
    if rule is None or not any(_is_integer(getattr(aval, "dtype", None)) for aval in avals):
        return list(map(unknown, avals))
    found = rule(eqn, operands)
    return found if isinstance(found, list) else [found]


def _wide(shape: Sequence[int]) -> frozenset[int]:
    return frozenset(d for d, size in enumerate(shape) if size != 1)


def _is_integer(dtype: Any) -> bool:
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.integer) or dtype == np.bool_)


def _range_of(dtype: Any) -> tuple[int, int]:
    if dtype == np.bool_:
        return 0, 1
    if not _is_integer(dtype):
        return 0, -1  # nothing reads it
    info = jnp.iinfo(dtype)
    return int(info.min), int(info.max)


# -- rules of primitives: of the dimensions of a result ------------------------------------------


def _same(_: Any, operands: Sequence[Known]) -> list[Known]:
    return list(operands)


def _first(_: Any, operands: Sequence[Known]) -> Known:
    return operands[0]


def _convert(eqn: Any, operands: Sequence[Known]) -> Known:
    [x], aval = operands, eqn.outvars[0].aval
    low, high = _range_of(aval.dtype)
    fits = _is_integer(eqn.invars[0].aval.dtype) and low <= x.low and x.high <= high
    return x if fits else unknown(aval)


def _iota(eqn: Any, _: Sequence[Known]) -> Known:
    dim, aval = eqn.params["dimension"], eqn.outvars[0].aval
    last = max(aval.shape[dim] - 1, 0)
    if last > _range_of(aval.dtype)[1]:
        return unknown(aval)
    dims = _wide(aval.shape) & {dim}
    rules = frozenset((d, frozenset[int]()) for d in dims)
    return Known(low=0, high=last, rules=rules, varies=dims)


def _moved(x: Known, new: Mapping[int, int]) -> Known:
    """The same elements with dimensions renumbered; those that are left out are none any more."""
    rules = frozenset(
        (new[d], frozenset(new[g] for g in given))
        for d, given in x.rules
        if d in new and all(g in new for g in given)
    )
    varies = frozenset(new[d] for d in x.varies if d in new)
    return Known(low=x.low, high=x.high, rules=rules, varies=varies)


def _broadcast(eqn: Any, operands: Sequence[Known]) -> Known:
    places = eqn.params["broadcast_dimensions"]
    wide = _wide(eqn.invars[0].aval.shape)
    return _moved(operands[0], {d: place for d, place in enumerate(places) if d in wide})


def _transpose(eqn: Any, operands: Sequence[Known]) -> Known:
    order = eqn.params["permutation"]
    return _moved(operands[0], {d: i for i, d in enumerate(order)})


def _reshape(eqn: Any, operands: Sequence[Known]) -> Known:
    x, old, new = operands[0], eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    wide, new_wide = sorted(_wide(old)), sorted(_wide(new))
    if [old[d] for d in wide] == [new[d] for d in new_wide]:
        return _moved(x, dict(zip(wide, new_wide, strict=True)))
    is_distinct = x.determined(()) >= set(wide)
    rules = frozenset((d, frozenset[int]()) for d in new_wide) if is_distinct else frozenset()
    varies = frozenset(new_wide) if x.varies else frozenset()
    return Known(low=x.low, high=x.high, rules=rules, varies=varies)


def _slice(eqn: Any, operands: Sequence[Known]) -> Known:
    wide = _wide(eqn.outvars[0].aval.shape)
    x = operands[0]
    for d in _wide(eqn.invars[0].aval.shape) - wide:
        x = dataclasses.replace(x, **x._without(d))
    return dataclasses.replace(x, columns=())


def _concatenate(eqn: Any, operands: Sequence[Known]) -> Known:
    dim, shape = eqn.params["dimension"], eqn.outvars[0].aval.shape
    if len(operands) == 1:
        return operands[0]
    is_columns = dim == len(shape) - 1 and all(v.aval.shape[dim] == 1 for v in eqn.invars)
    varies = frozenset({dim}).union(*(x.varies for x in operands))
    low, high = min(x.low for x in operands), max(x.high for x in operands)
    columns = tuple(operands) if is_columns else ()
    return Known(low=low, high=high, varies=varies, columns=columns)


def _stack(eqn: Any, operands: Sequence[Known]) -> Known:
    axis = eqn.params["axis"] % len(eqn.outvars[0].aval.shape)
    is_columns = axis == len(eqn.outvars[0].aval.shape) - 1
    low, high = min(x.low for x in operands), max(x.high for x in operands)
    varies = _wide(eqn.outvars[0].aval.shape)
    return Known(low=low, high=high, varies=varies, columns=tuple(operands) * is_columns)


def _bounded(eqn: Any, bounds: Iterable[int], rules: Iterable[Rule], x: Sequence[Known]) -> Known:
    """An element-wise result: nothing but what varies is known of it if it may overflow."""
    low, high = min(bounds := list(bounds)), max(bounds)
    varies = frozenset().union(*(k.varies for k in x))
    least, most = _range_of(eqn.outvars[0].aval.dtype)
    if low < least or high > most:
        return Known(low=least, high=most, varies=varies)
    return Known(low=low, high=high, rules=frozenset(rules), varies=varies)


def _sum_rules(a: Known, b: Known) -> Iterable[Rule]:
    """Where one term is equal, equal sums have another equal term."""
    for x, y in ((a, b), (b, a)):
        yield from ((d, given | y.varies - {d}) for d, given in x.rules if d not in y.varies)


def _add(eqn: Any, operands: Sequence[Known]) -> Known:
    a, b = operands
    return _bounded(eqn, (a.low + b.low, a.high + b.high), _sum_rules(a, b), operands)


def _sub(eqn: Any, operands: Sequence[Known]) -> Known:
    a, b = operands
    return _bounded(eqn, (a.low - b.high, a.high - b.low), _sum_rules(a, b), operands)


def _mul(eqn: Any, operands: Sequence[Known]) -> Known:
    a, b = operands
    bounds = [x * y for x, y in itertools.product((a.low, a.high), (b.low, b.high))]
    rules: frozenset[Rule] = frozenset()
    for x, y in ((a, b), (b, a)):
        if y.is_one and y.low:
            rules |= x.rules
    return _bounded(eqn, bounds, rules, operands)


def _compare(surely: Callable[[Known, Known], bool], never: Callable[[Known, Known], bool]) -> Any:
    def rule(eqn: Any, operands: Sequence[Known]) -> Known:
        a, b = operands
        if not _is_integer(eqn.invars[0].aval.dtype):
            return unknown(eqn.outvars[0].aval)
        low, high = int(surely(a, b)), int(not never(a, b))
        return Known(low=low, high=high, varies=a.varies | b.varies)

    return rule


def _select(_: Any, operands: Sequence[Known]) -> Known:
    which, *cases = operands
    if which.is_one:
        return cases[which.low]
    found = common(cases)
    return Known(low=found.low, high=found.high, varies=found.varies | which.varies)


def _max(eqn: Any, operands: Sequence[Known]) -> Known:
    a, b = operands
    for x, y in ((a, b), (b, a)):
        if x.low >= y.high:
            return x
    bounds = max(a.low, b.low), max(a.high, b.high)
    return _bounded(eqn, bounds, (), operands)


def _min(eqn: Any, operands: Sequence[Known]) -> Known:
    a, b = operands
    for x, y in ((a, b), (b, a)):
        if x.high <= y.low:
            return x
    bounds = min(a.low, b.low), min(a.high, b.high)
    return _bounded(eqn, bounds, (), operands)


def _clamp(eqn: Any, operands: Sequence[Known]) -> Known:
    low, x, high = operands
    if low.high <= x.low and x.high <= high.low:
        return x
    bounds = max(low.low, min(x.low, high.low)), max(low.high, min(x.high, high.high))
    return _bounded(eqn, bounds, (), operands)


def _sort(eqn: Any, operands: Sequence[Known]) -> list[Known]:
    """Elements move along the sorted dimension only, in all operands alike."""
    dim = eqn.params["dimension"]
    others = _wide(eqn.invars[0].aval.shape) - {dim}
    varies = frozenset({dim}).union(*(x.varies for x in operands))
    return [
        Known(
            low=x.low,
            high=x.high,
            rules=frozenset(
                (d, others if d == dim else given) for d, given in x.rules if dim not in given
            ),
            varies=varies,
        )
        for x in operands
    ]


def _top_k(eqn: Any, _: Sequence[Known]) -> list[Known]:
    values, indices = (v.aval for v in eqn.outvars)
    dim, wide = eqn.params["axis"] % len(indices.shape), _wide(indices.shape)
    rules = frozenset((d, wide - {d}) for d in wide & {dim})
    most = max(eqn.invars[0].aval.shape[dim] - 1, 0)
    return [unknown(values), Known(low=0, high=most, rules=rules, varies=wide)]


def _arg(eqn: Any, _: Sequence[Known]) -> Known:
    size = math.prod(eqn.invars[0].aval.shape[d] for d in eqn.params["axes"])
    return Known(low=0, high=max(size - 1, 0), varies=_wide(eqn.outvars[0].aval.shape))


_RULES: dict[str, Callable[[Any, Sequence[Known]], Known | list[Known]]] = {
    "add": _add,
    "argmax": _arg,
    "argmin": _arg,
    "broadcast_in_dim": _broadcast,
    "clamp": _clamp,
    "concatenate": _concatenate,
    "convert_element_type": _convert,
    "copy": _first,
    "copy_p": _first,
    "dynamic_slice": _slice,
    "expand_dims": _reshape,
    "ge": _compare(lambda a, b: a.low >= b.high, lambda a, b: a.high < b.low),
    "gt": _compare(lambda a, b: a.low > b.high, lambda a, b: a.high <= b.low),
    "iota": _iota,
    "le": _compare(lambda a, b: a.high <= b.low, lambda a, b: a.low > b.high),
    "lt": _compare(lambda a, b: a.high < b.low, lambda a, b: a.low >= b.high),
    "max": _max,
    "min": _min,
    "mul": _mul,
    "name": _first,
    "optimization_barrier": _same,
    "reshape": _reshape,
    "rev": _first,
    "select_n": _select,
    "sharding_constraint": _first,
    "slice": _slice,
    "sort": _sort,
    "squeeze": _reshape,
    "stack": _stack,
    "stop_gradient": _first,
    "sub": _sub,
    "top_k": _top_k,
    "transpose": _transpose,
}
