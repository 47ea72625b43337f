"""A program in two halves, with the fewest bytes of residuals between them.

Examples are a forward and its backward, and a backward's gradient of the input, which a stage waits
for, and its weight gradients. Residuals are values of the early half that the late half keeps;
other values it recomputes with element-wise work. A minimum cut selects the fewest bytes.

References:
    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.
    Ansel et al., "PyTorch 2", ASPLOS 2024, section 5 (min-cut rematerialization).
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from .jaxpr import ClosedJaxpr, backward_slice, is_cheap, part, run_jaxpr, variables

_MOST = 1 << 29  # SciPy's flows are int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halves:
    """A program cut into an early and a late half.

    Attributes:
        early: Program from `consts` and its arguments to the first results and the residuals.
        late: Program from `consts`, its arguments and the residuals to the other results.
        consts: Constants of the whole program.
        num_first: The number of results of the early half.
        places: Indices of the residuals among arguments and equation results of the whole program.
    """

    early: Any
    late: Any
    consts: tuple[Any, ...]
    num_first: int
    kept: tuple[Any, ...]
    places: tuple[int, ...]

    def run_early(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The first results, and the residuals for `run_late`."""
        made = run_jaxpr(self.early, [*self.consts, *arguments])
        return made[: self.num_first], made[self.num_first :]

    def run_late(self, arguments: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        """The other results."""
        return run_jaxpr(self.late, [*self.consts, *arguments, *kept])


def halve(
    closed: ClosedJaxpr,
    num_first: int,
    *,
    only_early: Collection[int] = (),
    only_late: Collection[int] = (),
    places: Collection[int] | None = None,
) -> Halves:
    """Cut a program in two.

    Args:
        num_first: The number of early results, which may not depend on `only_late`.
        only_early: Indices of arguments of the early half alone.
        only_late: Indices of arguments of the late half alone.
        places: The residuals, as `Halves.places` of an equal program; None: the fewest bytes.
    """
    jaxpr = closed.jaxpr
    early_only = {jaxpr.invars[i] for i in only_early}
    coming = {jaxpr.invars[i] for i in only_late}
    order = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    if places is None:
        kept = kept_between(jaxpr, num_first, early_only, coming)
        return _halves(closed, num_first, early_only, coming, [v for v in order if v in kept])
    return _halves(closed, num_first, early_only, coming, [order[i] for i in sorted(places)])


def kept_between(
    program: Any,
    num_first: int,
    early_only: Collection[Any],
    late_only: Collection[Any],
    repeats: Callable[[Any], bool] = is_cheap,
) -> set[Any]:
    """The residuals of `halve`, as variables.

    Args:
        program: A jaxpr, or a value with `constvars`, `invars`, `eqns` and `outvars`.
        num_first: The number of early results.
        early_only: Arguments of the early half alone.
        late_only: Arguments of the late half alone.
        repeats: Whether the late half may run an equation of the early half again.
    """
    first, others = program.outvars[:num_first], program.outvars[num_first:]
    known = {*program.constvars, *program.invars} - set(early_only) - set(late_only)
    needed = {id(eqn) for eqn in backward_slice(program.eqns, first)}
    # Values that the early half has, or can compute with additional cheap work.
    can_be_early = known | set(early_only)
    for eqn in program.eqns:
        if id(eqn) in needed or (repeats(eqn) and can_be_early.issuperset(variables(eqn.invars))):
            can_be_early |= set(eqn.outvars)

    must_be_late = backward_slice(program.eqns, others, known=can_be_early)
    read = variables([*(v for eqn in must_be_late for v in eqn.invars), *others])
    maker = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    return _fewest_bytes([v for v in read if v in can_be_early], maker, known, repeats)


def _halves(
    closed: ClosedJaxpr,
    num_first: int,
    early_only: Collection[Any],
    late_only: Collection[Any],
    saved: Sequence[Any],
) -> Halves:
    """The halves with these residuals."""
    jaxpr = closed.jaxpr
    first, others = tuple(jaxpr.outvars[:num_first]), tuple(jaxpr.outvars[num_first:])
    order = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]

    def inputs_without(unknown: Collection[Any]) -> list[Any]:
        return [*jaxpr.constvars, *(v for v in jaxpr.invars if v not in unknown)]

    early = part(jaxpr, [*first, *saved], inputs=inputs_without(late_only))
    late = part(jaxpr, others, known=set(saved), inputs=[*inputs_without(early_only), *saved])
    return Halves(
        early=early,
        late=late,
        consts=tuple(closed.consts),
        num_first=num_first,
        kept=tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in saved),
        places=tuple(i for i, v in enumerate(order) if v in set(saved)),
    )


def _fewest_bytes(
    read: Sequence[Any],
    maker: dict[Any, Any],
    known: Collection[Any],
    repeats: Callable[[Any], bool],
) -> set[Any]:
    """The residuals from which cheap equations make all values in `read`.

    Of minimum cuts it takes the last, after which the least work is repeated.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    number: dict[Any, int] = {}
    todo = [v for v in read if v not in known]
    edges: list[tuple[int, int, int]] = []
    source, sink = 0, 1

    def place(v: Any) -> tuple[int, int]:
        """The two nodes of a value; the edge between them costs its bytes."""
        if v not in number:
            number[v] = len(number)
            todo.append(v)
        return 2 + 2 * number[v], 3 + 2 * number[v]

    ends = [place(v)[1] for v in [*todo]]
    done: set[Any] = set()
    while todo:
        v = todo.pop()
        if v in done:
            continue
        done.add(v)
        before = place(v)[0]
        eqn = maker.get(v)
        if eqn is None or not repeats(eqn):
            edges.append((source, before, _MOST))
            continue
        edges += [(place(u)[1], before, _MOST) for u in variables(eqn.invars) if u not in known]
    if not number:
        return set()
    edges += [(end, sink, _MOST) for end in set(ends)]
    sizes = [v.aval.size * v.aval.dtype.itemsize for v in number]
    unit = 1 + sum(sizes) // (_MOST // 2)
    edges += [(2 + 2 * i, 3 + 2 * i, 1 + size // unit) for i, size in enumerate(sizes)]
    rows, columns, capacities = np.array(edges, np.int32).T
    num = 2 + 2 * len(number)
    graph = coo_array((capacities, (rows, columns)), shape=(num, num)).tocsr()
    left = graph - maximum_flow(graph, source, sink).flow
    left.eliminate_zeros()
    behind = set(breadth_first_order(left.T.tocsr(), sink, return_predecessors=False).tolist())
    return {v for v, i in number.items() if 3 + 2 * i in behind and 2 + 2 * i not in behind}
