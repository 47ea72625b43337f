"""Functions with gradient rules of their own under a precision policy: they keep their rules.

The rule of a `custom_jvp` or `custom_vjp` is traced for the dtypes that the function was traced
with, and that program is run under the policy like any other.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from .._jax._jaxpr import ClosedJaxpr, inner_jaxpr, run_with


class CastLike(Protocol):
    """See `Cast`."""

    @property
    def x(self) -> Any: ...
    @property
    def is_low(self) -> bool: ...
    def to(self, dtype: Any) -> Any: ...


C = TypeVar("C", bound=CastLike)


def run_custom(
    eqn: Any,
    operands: Sequence[C],
    wanted: Sequence[bool],
    *,
    run: Callable[[ClosedJaxpr, Sequence[C], Sequence[bool]], list[C]],
    cast: Callable[[Any, C | None], C],
) -> list[C]:
    """An equation with gradient rules of its own, which it keeps.

    Args:
        eqn: A `custom_jvp_call` or `custom_vjp_call`.
        operands: Its operands.
        wanted: For each result whether it is to be float32.
        run: A program under the policy.
        cast: An array, and what it was known as before, if it was.
    """
    closed = inner_jaxpr(eqn)
    assert closed is not None
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    is_float = [jnp.issubdtype(s.dtype, jnp.inexact) for s in shapes]
    places, last = [i for i, own in enumerate(is_float) if own], list[C]()

    def known(arrays: Sequence[Any]) -> list[C]:
        return [cast(x, c) for x, c in zip(arrays, operands, strict=True)]

    def primal(*arrays: Any) -> list[Any]:
        last[:] = run(closed, known(arrays), wanted)
        return [c.x for c in last]

    def called(given: Sequence[Any]) -> Callable[..., list[Any]]:
        def of(*floats: Any) -> list[Any]:
            own = dict(zip(places, floats, strict=True))
            return run_with(eqn, [own.get(i, x) for i, x in enumerate(given)])

        return of

    arrays = [jnp.asarray(c.x) for c in operands]
    jax.eval_shape(primal, *arrays)  # a rule may be traced alone
    like, num = list(last), len(last)
    in_float32 = [not c.is_low for c in like]

    def as_results(found: Sequence[C]) -> list[Any]:
        return [
            c.to(own.x.dtype) if jnp.issubdtype(own.x.dtype, jnp.inexact) else c.x
            for c, own in zip(found, like, strict=True)
        ]

    def finished(results: Sequence[Any]) -> list[C]:
        return [cast(x, own) for x, own in zip(results, like, strict=True)]

    if eqn.primitive.name == "custom_jvp_call":

        def with_tangents(*both: Any) -> Any:
            given, tangents = both[: len(shapes)], both[len(shapes) :]
            return jax.jvp(called(given), tuple(given[i] for i in places), tangents)

        def tangent(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            traced = jax.make_jaxpr(with_tangents)(*shapes, *(shapes[i] for i in places))
            moved = [cast(tangents[i], None) for i in places]
            found = run(traced, [*known(primals), *moved], in_float32 * 2)
            return as_results(found[:num]), as_results(found[num:])

        kept = jax.custom_jvp(lambda *xs: primal(*xs))
        kept.defjvp(tangent)
        return finished(kept(*arrays))

    tree: list[Any] = []
    residuals: list[C] = []

    def with_residuals(*given: Any) -> list[Any]:
        out, pull = jax.vjp(called(given), *(given[i] for i in places))
        leaves, treedef = jax.tree.flatten(pull)
        tree[:] = [treedef]
        return [*out, *leaves]

    forward_program = jax.make_jaxpr(with_residuals)(*shapes)
    kept_shapes = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
        for v in forward_program.jaxpr.outvars[num:]
    ]
    out_shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]

    def forward(*xs: Any) -> tuple[Any, Any]:
        wants = [*in_float32, *[False] * len(kept_shapes)]
        found = run(forward_program, known(xs), wants)
        residuals[:] = found[num:]
        return as_results(found[:num]), [c.x for c in found[num:]]

    def backward(saved: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        before = [cast(x, c) for x, c in zip(saved, residuals, strict=True)]
        back = [cast(x, None) for x in cotangents]
        # Not before: a rule that is nested in another's forward may have no derivative itself.
        backward_program = jax.make_jaxpr(
            lambda leaves, back: list(jax.tree.unflatten(tree[0], leaves)(list(back)))
        )(kept_shapes, out_shapes)
        found = iter(run(backward_program, [*before, *back], [False] * len(places)))
        dtypes = [x.dtype for x in arrays]
        return tuple(
            next(found).to(d) if own else None for d, own in zip(dtypes, is_float, strict=True)
        )

    turned = jax.custom_vjp(lambda *xs: primal(*xs))
    turned.defvjp(forward, backward)
    return finished(turned(*arrays))
