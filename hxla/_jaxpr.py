"""What hxla needs of jax's program representation, in one place."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

ClosedJaxpr = core.ClosedJaxpr
Literal = core.Literal


def inner_jaxpr(eqn: Any) -> ClosedJaxpr | None:
    """The program inside an equation, if it has exactly one."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(key)
        if isinstance(inner, core.ClosedJaxpr):
            return inner
        if isinstance(inner, core.Jaxpr):
            return core.ClosedJaxpr(inner, ())
    return None


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried; slices follow."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # from jax 0.12 on
    return len(consts), len(carry)


def run_equation(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Run one equation again, under its own name stack and context."""
    given = {
        var: x for var, x in zip(eqn.invars, operands, strict=True) if not isinstance(var, Literal)
    }
    alone = core.Jaxpr((), list(given), eqn.outvars, [eqn], eqn.effects, debug_info=_debug_info())
    return list(core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*given.values()))


@functools.cache
def _debug_info() -> Any:
    """Any will do: messages name the equation's own source."""
    return jax.make_jaxpr(lambda: ())().jaxpr.debug_info


def checkpoint_like(eqn: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under the rematerialisation that a `checkpoint` equation asks for."""
    return jax.checkpoint(
        function,
        prevent_cse=eqn.params.get("prevent_cse", True),
        policy=eqn.params.get("policy"),
    )
