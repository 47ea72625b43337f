"""Dimensions that one mesh axis must cut alike, and the whole units in which they are cut.

An equation cut along a factor cuts all dimensions of the factor alike: the columns of one kernel,
the rows of the next, the activations between them. The number of units of such a group is the
greatest common divisor of its sizes: 40 columns that become 10 heads of 4 are cut between heads.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..core.errors import PlanError
from ..graph.graph import Graph, Op
from ..graph.precision import is_float8_product
from ..jax.jaxpr import scan_counts
from .layout import Layout
from .sharding import AxisAssignment


def in_shares(num_units: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Whole units for each device in a given ratio, at least one each.

    Largest remainders (Hamilton): the shares are rounded down, and the remaining units go to the
    largest remainders, the first device first.

    Args:
        shares: For each device, positive, in any unit.

    Raises:
        PlanError: If there are fewer units than devices.
    """
    n = len(shares)
    if num_units < n:
        raise PlanError(
            f"{num_units} units cannot be split over {n} devices with at least one each: use "
            "fewer devices, or leave this out of the split"
        )
    exact = np.array(shares) * (num_units / float(sum(shares)))
    sizes = np.maximum(np.floor(exact + 1e-9), 1).astype(int)
    while sizes.sum() > num_units:  # where sizes were raised to one
        sizes[np.argmax(np.where(sizes > 1, sizes - exact, -np.inf))] -= 1
    order = np.argsort(-np.round(exact - sizes, 9), kind="stable")
    for d in itertools.islice(itertools.cycle(order), int(num_units - sizes.sum())):
        sizes[d] += 1
    return tuple(int(size) for size in sizes)


#: (value, dimension) as its maker leaves it; or (first result of an equation, operand, dimension)
#: where the equation wants another dimension cut.
Node = tuple[int, int] | tuple[int, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DimGroup:
    """Dimensions that are cut together.

    Attributes:
        params: Their parameters: index and dimension.
    """

    num_units: int
    params: tuple[tuple[int, int], ...]


class LinkedDims:
    """The groups of linked dimensions of a graph over one mesh axis."""

    def __init__(self, graph: Graph, axis: AxisAssignment):
        self._graph, self._axis = graph, axis
        self._above: dict[Node, Node] = {}
        self._size: dict[Node, int] = {}
        self._order: list[Node] = []
        for v in (*graph.param_values, *graph.aux_values):
            if (dim := axis.made.get(v)) is not None:
                self._find(self._node(v, dim))
        self._link(graph.ops)
        sizes: dict[Node, int] = {}
        for node in self._order:
            root = self._find(node)
            sizes[root] = math.gcd(sizes.get(root, 0), self._size[node])
        params: dict[Node, list[tuple[int, int]]] = {}
        for p, v in enumerate(graph.param_values):
            if (dim := axis.made.get(v)) is not None:
                params.setdefault(self._find((v, dim)), []).append((p, dim))
        self.groups = tuple(
            DimGroup(num_units=units, params=tuple(params.get(root, ())))
            for root, units in sizes.items()
        )
        number = {root: g for g, root in enumerate(sizes)}
        self._group = {node: number[self._find(node)] for node in self._order}

    def of_value(self, v: int) -> int | None:
        """The group of a value's cut dimension, as its maker leaves it; None if it is whole."""
        dim = self._axis.made.get(v)
        return None if dim is None else self._group[v, dim]

    def of_operand(self, op: Op, k: int) -> tuple[int, int] | None:
        """Group and dimension in which an equation wants operand `k` cut; None if whole."""
        dim = self._axis.wanted[op.outputs[0]][k]
        if dim is None:
            return None
        v = op.inputs[k]
        assert isinstance(v, int)
        same = self._axis.made.get(v) == dim
        return self._group[(v, dim) if same else (op.outputs[0], k, dim)], dim

    # -- linking ---------------------------------------------------------------------------------

    def _node(self, v: int, dim: int) -> Node:
        self._size.setdefault((v, dim), self._graph.values[v].shape[dim])
        return v, dim

    def _find(self, node: Node) -> Node:
        if node not in self._above:
            self._above[node] = node
            self._order.append(node)
        root = node
        while self._above[root] != root:
            root = self._above[root]
        self._above[node] = root
        return root

    def _join(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._above[self._find(node)] = self._find(nodes[0])

    def _link(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if op.body:
                self._link(op.body)
                for inner, outer in self._body_pairs(op):
                    self._join([inner, outer])
                if is_float8_product(op):  # it is run on the shards that it gets
                    made = self._axis.made
                    values = (v for v in (*op.inputs, *op.outputs) if isinstance(v, int))
                    cut = ((v, dim) for v in values if (dim := made.get(v)) is not None)
                    self._join([self._node(v, dim) for v, dim in cut])
            elif op.outputs:
                self._join([*self._operands(op), *self._results(op)])

    def _operands(self, op: Op) -> Iterator[Node]:
        first = op.outputs[0]
        for k, v in enumerate(op.inputs):
            dim = self._axis.wanted[first][k]
            if dim is None or not isinstance(v, int):
                continue
            if self._axis.made.get(v) == dim:
                yield self._node(v, dim)
            else:
                self._size[first, k, dim] = self._graph.values[v].shape[dim]
                yield first, k, dim

    def _results(self, op: Op) -> Iterator[Node]:
        for v in op.outputs:
            if (dim := self._axis.made.get(v)) is not None:
                yield self._node(v, dim)

    def _body_pairs(self, op: Op) -> Iterator[tuple[Node, Node]]:
        """Pairs of equal dimensions, of a value inside a body and its counterpart outside."""
        consts, carry = (len(op.inputs), 0) if op.kind != "scan" else scan_counts(op.eqn)
        pairs = [(i, a, b) for i, (a, b) in enumerate(zip(op.body_inputs, op.inputs, strict=True))]
        first_stack = carry if op.kind == "scan" else len(op.outputs)
        outs = zip(op.outputs, op.body_outputs, strict=True)
        triples = [(a, b, int(i >= consts + carry)) for i, a, b in pairs]
        triples += [(b, a, int(i >= first_stack)) for i, (a, b) in enumerate(outs)]
        for inner, outer, shift in triples:
            inside, outside = (
                self._axis.made.get(v) if isinstance(v, int) else None for v in (inner, outer)
            )
            if inside is not None:
                self._find(self._node(inner, inside))
            if inside is not None and outside is not None and inside + shift == outside:
                yield self._node(inner, inside), self._node(outer, outside)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The units of each group on each device of an axis.

    Attributes:
        units: For each group, then each device.
    """

    linked: LinkedDims
    units: tuple[tuple[int, ...], ...]

    def sizes(self, group: int, size: int) -> tuple[int, ...]:
        """The shard sizes of a dimension of this size in a group."""
        each = size // self.linked.groups[group].num_units
        return tuple(n * each for n in self.units[group])


def planned_parts(linked: LinkedDims, layouts: Sequence[Layout], shares: Sequence[int]) -> Parts:
    """The units of each group according to a plan's layouts.

    Args:
        shares: The axis's ratio, for groups without parameters.

    Raises:
        PlanError: If layouts cut a unit, or parameters of one group differently: every fault.
    """
    faults, units = [], []
    for group in linked.groups:
        names: dict[tuple[int, ...], str] = {}  # units of each device -> a parameter cut so
        for p, dim in group.params:
            layout, each = layouts[p], layouts[p].shape[dim] // group.num_units
            sizes = layout.parts(dim, len(shares))
            if any(size % each for size in sizes):
                faults.append(
                    f"parameters.{layout.name}.sizes: dimension {dim} is cut between units of "
                    f"{each}, {', '.join(map(str, sizes))} are no multiples of it"
                )
            else:
                names.setdefault(tuple(size // each for size in sizes), layout.name)
        if len(names) > 1:
            faults.append(
                "parameters that are cut together have different sizes, in units: "
                + "; ".join(f"{name} {list(sizes)}" for sizes, name in names.items())
            )
        units.append(next(iter(names), ()) or in_shares(group.num_units, shares))
    if faults:
        raise PlanError("\n".join(faults))
    return Parts(linked=linked, units=tuple(units))
