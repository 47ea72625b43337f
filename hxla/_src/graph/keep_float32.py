"""Which arrays of a program only float32 operations read: what makes them is not to round them."""

from collections.abc import Sequence
from typing import Any

from ..jax.jaxpr import Literal, inner_jaxpr, kind_of
from .precision import class_of


def wanted_in_float32(jaxpr: Any, results: Sequence[bool]) -> frozenset[Any]:
    """Variables all of whose readers compute in float32 whatever they are given.

    The difference in a squared error, the shifted logits of a softmax and the square in a variance
    are such, and so is what only moves their elements.

    Args:
        results: For each of its results whether it is to be float32.
    """
    wanted: set[Any] = set()
    refused: set[Any] = set()

    def read(v: Any, in_float32: bool) -> None:
        if not isinstance(v, Literal):
            (wanted if in_float32 else refused).add(v)

    for v, own in zip(jaxpr.outvars, results, strict=True):
        read(v, own)
    for eqn in reversed(jaxpr.eqns):
        outs = [v in wanted and v not in refused for v in eqn.outvars]
        inner = inner_jaxpr(eqn) if kind_of(eqn) in ("inlined", "custom", "remat") else None
        if inner is not None:
            inside = wanted_in_float32(inner.jaxpr, outs)
            for v, own in zip(eqn.invars, inner.jaxpr.invars, strict=False):
                read(v, own in inside)
            continue
        op_class = class_of(eqn) if kind_of(eqn) == "leaf" else "low"
        if op_class == "compares":
            continue
        in_float32 = op_class in (None, "float32") or (op_class != "low" and all(outs))
        for v in eqn.invars:
            read(v, in_float32 and eqn.primitive.name not in ("cond", "while"))
    return frozenset(wanted - refused)
