"""Products that are rounded before they are added, whatever a compiler fuses.

A compiler may contract a product and a sum to one operation that rounds once, and which of two
products it takes depends on the shapes and programs around them. That is harmless but for one
thing: the same update in another program then ends with other bits. Here a product's bits pass
through an integer operation with a number that is zero, which no compiler knows, so that it is
rounded by itself.

References:
    IEEE 754-2019, section 10.4 (a language's licence to synthesise fused operations).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._jaxpr import ClosedJaxpr, Literal, run_equation, variables

_PRODUCTS = ("mul", "integer_pow", "square")
_SUMS = ("add", "add_any", "reduce_sum", "sub")
#: What a product is still seen through.
_TRANSPARENT = ("broadcast_in_dim", "copy", "expand_dims", "neg", "reshape", "select_n", "squeeze")


def to_round(closed: ClosedJaxpr) -> set[int]:
    """Numbers of the equations of a program whose products some sum might take in."""
    added: set[Any] = set()
    found = set()
    for i in range(len(closed.jaxpr.eqns) - 1, -1, -1):
        eqn = closed.jaxpr.eqns[i]
        name = eqn.primitive.name
        is_added = not added.isdisjoint(eqn.outvars)
        if name in _PRODUCTS and is_added and _is_wide(eqn.outvars[0].aval.dtype):
            found.add(i)
        if name in _SUMS or (name in _TRANSPARENT and is_added):
            added.update(variables(eqn.invars))
    return found


def _is_wide(dtype: Any) -> bool:
    """Narrower ones are rounded when they are converted."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize >= 4


def rounded(x: jax.Array, zero: jax.Array) -> jax.Array:
    """The same number.

    Args:
        x: float32 or float64.
        zero: int32 scalar, zero, but unknown when a program is compiled.
    """
    kind = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, kind) ^ zero.astype(kind)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def run_rounded(closed: ClosedJaxpr, arguments: Sequence[Any], zero: jax.Array) -> list[Any]:
    """The results of a program.

    Args:
        closed: With jitted functions inlined.
        arguments: As it takes them.
        zero: See `rounded`.
    """
    jaxpr, chosen = closed.jaxpr, to_round(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for i, eqn in enumerate(jaxpr.eqns):
        found = run_equation(eqn, [read(v) for v in eqn.invars])
        if i in chosen:
            found = [rounded(found[0], zero)]
        env.update(zip(eqn.outvars, found, strict=True))
    return [read(v) for v in jaxpr.outvars]
