"""A backward in two halves: the gradient of the input, which a stage waits for, and the rest.

References:
    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ._jaxpr import ClosedJaxpr, Literal, backward_slice, run_equation, variables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halves:
    """A program whose results are wanted at two times.

    Attributes:
        early: Equations that the first results need.
        late: Those that only the others need.
        kept: What the early ones make and the late ones read.
        inputs: The program's arguments.
        consts: What it closes over.
        first: Its first results.
        others: The rest.
    """

    early: tuple[Any, ...]
    late: tuple[Any, ...]
    kept: tuple[Any, ...]
    inputs: tuple[Any, ...]
    consts: tuple[tuple[Any, Any], ...]
    first: tuple[Any, ...]
    others: tuple[Any, ...]

    def run_early(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The first results, and what `run_late` needs of them besides the arguments."""
        env = dict(self.consts) | dict(zip(self.inputs, arguments, strict=True))
        _run(self.early, env)
        return [_read(env, v) for v in self.first], [env[v] for v in self.kept]

    def run_late(self, arguments: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        """The other results."""
        env = dict(self.consts) | dict(zip(self.inputs, arguments, strict=True))
        env |= dict(zip(self.kept, kept, strict=True))
        _run(self.late, env)
        return [_read(env, v) for v in self.others]


def halve(closed: ClosedJaxpr, num_first: int) -> Halves:
    """Cut a program in two.

    Args:
        closed: Traced.
        num_first: How many of its results are wanted early.
    """
    jaxpr = closed.jaxpr
    first, others = tuple(jaxpr.outvars[:num_first]), tuple(jaxpr.outvars[num_first:])
    early = backward_slice(jaxpr.eqns, first)
    made = {v for eqn in early for v in eqn.outvars}
    late = backward_slice(jaxpr.eqns, others, given=made)
    needed = variables([*(v for eqn in late for v in eqn.invars), *others])
    kept = [v for eqn in early for v in eqn.outvars if v in needed]
    return Halves(
        early=tuple(early),
        late=tuple(late),
        kept=tuple(kept),
        inputs=tuple(jaxpr.invars),
        consts=tuple(zip(jaxpr.constvars, closed.consts, strict=True)),
        first=first,
        others=others,
    )


def _run(equations: Sequence[Any], env: dict[Any, Any]) -> None:
    for eqn in equations:
        results = run_equation(eqn, [_read(env, v) for v in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))


def _read(env: dict[Any, Any], v: Any) -> Any:
    return v.val if isinstance(v, Literal) else env[v]
