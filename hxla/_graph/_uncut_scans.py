"""Scans over layers that stages cannot be cut in, and why not."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from .._jax._jaxpr import inlined, scan_counts, variables
from ._graph import Graph
from ._operations import Op, source_of
from ._scans import is_over_layers

_OUTSIDE = "stages can be cut between its layers where it stands outside"
_REMEDIES = {
    "a checkpoint": (
        "put the checkpoint around the layer instead, nn.scan(nn.remat(Layer)), and stages can be "
        "cut between layers"
    ),
    "a scan over layers": "stages are cut between the iterations of the outer one only",
    "a scan": (
        "stack the parameters of the outer one too, and stages can be cut between its iterations"
    ),
}


def uncut_scans(graph: Graph) -> tuple[str, ...]:
    """What to say of each scan over layers that is inside another equation.

    Args:
        graph: Traced, its scans cut or not.
    """
    return tuple(dict.fromkeys(_uncut(graph, graph.ops, "")))


def _uncut(graph: Graph, ops: Sequence[Op], around: str) -> Iterator[str]:
    for op in ops:
        over_layers = op.iterations is not None or is_over_layers(graph, op)
        if over_layers and around:
            yield _said(op.eqn, around)
        if op.kind == "scan":
            yield from _uncut(graph, op.body, around or "a scan" + " over layers" * over_layers)
        elif op.body:
            inside = "a checkpoint" if op.kind == "remat" else "a function with its own gradient"
            yield from _uncut(graph, op.body, around or inside)
        elif op.name == "cond":
            yield from _in_branches(graph, op, around or "a cond")


def _in_branches(graph: Graph, op: Op, around: str) -> Iterator[str]:
    """Of the scans in a cond, whose first operand is the branch's number."""
    params = [isinstance(v, int) and graph.values[v].param is not None for v in op.inputs[1:]]
    for branch in op.eqn.params["branches"]:
        jaxpr = inlined(branch).jaxpr
        stacked = list(itertools.compress(jaxpr.invars, params))
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan" and scan_counts(eqn)[1]:
                sliced = variables(eqn.invars[sum(scan_counts(eqn)) :])
                if not sliced.keys().isdisjoint(stacked):
                    yield _said(eqn, around)


def _said(eqn: Any, around: str) -> str:
    place = source_of(eqn).rsplit("/", 1)[-1]
    remedy = _REMEDIES.get(around, _OUTSIDE)
    return f"a scan over layers ({place}) stays whole inside {around}: {remedy}"
