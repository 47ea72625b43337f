"""From a traced model and the devices to replicas, and to what each of their axes cuts."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from .._factors import PATTERNS, Patterns
from .._graph import Graph
from .._lower._replica import Replica
from .._lower._shard import Sharded
from .._partition import axes_of_annotations, resolve_rules, roles_of_mesh, shard_graph
from .._planner._assign import Role
from .._rules import RuleSet
from .._trace import trace_sums
from .._types import DATA_AXIS, PyTree
from .._virtual import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the devices share the model.

    Attributes:
        replicas: Each holds one copy.
        axes: Mesh axes inside a replica.
        roles: For each axis, the part of each TaskGraph.
        rules: Rule set that decides, or None for annotations.
        patterns: Which dimensions of an equation can be cut together.
        reasons: What to say about it in the plan.
    """

    replicas: tuple[Replica, ...]
    axes: tuple[tuple[str, int], ...] = ()
    roles: Mapping[str, tuple[Role, ...]] = dataclasses.field(default_factory=dict)
    rules: RuleSet | None = None
    patterns: Patterns = PATTERNS
    reasons: tuple[str, ...] = ()

    def shard(
        self,
        run: Callable[..., Any],
        params: PyTree,
        aux: PyTree,
        batch: PyTree,
        logical: Sequence[Sequence[str | None] | None],
    ) -> Sharded:
        """Plan what the inner axes cut, for a microbatch like `batch`: see `trace_sums`."""
        graph = trace_sums(run, params, aux, batch, logical=logical, patterns=self.patterns)
        resolved = resolve_rules(graph, self.rules, self.axes) if self.rules is not None else None
        return shard_graph(graph, self.axes, self.roles, resolved)


def from_annotations(
    graph: Graph,
    devices: Sequence[jax.Device],
    *,
    share: bool,
    prefer_intra_node: bool,
    layout: Layout = "auto",
) -> Strategy:
    """The strategy that `replicate` and `split` ask for.

    Raises:
        PlanError: If the devices do not fit, or TaskGraphs would need a pipeline.
    """
    virtual, axes, roles = axes_of_annotations(
        graph,
        len(devices),
        nodes=_nodes(devices),
        share=share,
        prefer_intra_node=prefer_intra_node,
        layout=layout,
    )
    if not axes:
        return replicated(devices)
    replicas = tuple(
        Replica(i, tuple(devices[d] for d in virtual.replica(i)), axes)
        for i in range(virtual.num_replicas)
    )
    return Strategy(replicas=replicas, axes=axes, roles=roles)


def replicated(devices: Sequence[jax.Device]) -> Strategy:
    """Every device a replica."""
    return Strategy(replicas=tuple(Replica(i, (d,)) for i, d in enumerate(devices)))


def from_mesh(graph: Graph, mesh: Mesh, rules: RuleSet | None) -> Strategy:
    """The strategy of a user's own mesh: `data` between replicas, the other axes inside.

    Args:
        graph: Of the loss.
        mesh: The user's, with an axis besides `data`.
        rules: Decide which parameters the inner axes cut; None: the annotations do.

    Raises:
        PlanError: If nothing says what the inner axes are for.
    """
    names = [n for n in mesh.axis_names if n != DATA_AXIS]
    order = [mesh.axis_names.index(n) for n in names]
    grid = mesh.devices
    if DATA_AXIS in mesh.axis_names:
        grid = grid.transpose([mesh.axis_names.index(DATA_AXIS), *order])
    else:
        grid = grid.transpose(order)[None]
    axes = tuple((str(n), int(mesh.shape[n])) for n in names)
    roles = roles_of_mesh(graph, axes, by_rules=rules is not None)
    replicas = tuple(Replica(i, tuple(row.flat), axes) for i, row in enumerate(grid))
    return Strategy(replicas=replicas, axes=axes, roles=roles, rules=rules)


def share_cores(replicas: Sequence[Replica]) -> bool:
    """Whether several replicas of several CPU devices each live in one process."""
    local = [r for r in replicas if r.is_local and r.axes]
    return len(local) > 1 and local[0].devices[0].platform == "cpu"


def _nodes(devices: Sequence[jax.Device]) -> list[int]:
    """Consecutive devices of one process share a node at least."""
    if jax.process_count() == 1 or all(d.platform == "cpu" for d in devices):
        return [len(devices)]
    sizes: list[int] = []
    last = None
    for d in devices:
        if d.process_index != last:
            sizes.append(0)
            last = d.process_index
        sizes[-1] += 1
    return sizes if len(set(sizes)) == 1 and sizes[0] > 1 else [len(devices)]
