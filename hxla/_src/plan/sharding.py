"""A traced loss with sharding constraints between its equations.

XLA's SPMD partitioner turns the constraints into the collectives that the plan counted: the bridges
between TaskGraphs, and those inside a split.

References:
    Whale, USENIX ATC 2022, section 3.2.3 (bridges).
    Xu et al., "GSPMD", 2021.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..graph.experts import experts_of
from ..graph.factors import UNITS
from ..graph.graph import Graph, Op, bytes_of, leaves, origins
from ..graph.interpreter import ArrayPlacement, run_experts, run_graph
from ..graph.local_ops import run_some_experts
from ..jax.jaxpr import run_equation
from ..jax.partition_invariant import partition_invariant
from .granule_products import GranuleProduct
from .layout import piece_shape, to_spec

#: For each value by dimension, into how many shards mesh axes cut it.
Cuts = Mapping[int, Mapping[int, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisAssignment:
    """The dimensions that one mesh axis cuts.

    Attributes:
        made: For each value the dimension in which its maker leaves it cut; None: whole.
        wanted: For each equation (by its first result) the dimension of each operand; None: whole.
        factors: For each equation (by its first result) its factor's name, or None.
        sent_bytes: For each device and microbatch.
        num_collectives: The collectives of a microbatch's forward and backward; 0: not counted.
        regathers: Equations (by their first results) whose backward gathers operands again.
        granules: Of each dimension that it cuts, if bits do not depend on the axis' size; else
            None.
    """

    num_devices: int
    made: dict[int, int | None]
    wanted: dict[int, tuple[int | None, ...]]
    factors: dict[int, str | None]
    sent_bytes: float
    num_collectives: int = 0
    regathers: frozenset[int] = frozenset()
    granules: int | None = None

    def in_granules(self, num_devices: int) -> "AxisAssignment":
        """The same assignment over devices that have one or more of its shards each."""
        most = self.num_devices
        # What a ring sends is in proportion to this fraction.
        sent = self.sent_bytes * (1 - 1 / num_devices) / (1 - 1 / most)
        return dataclasses.replace(self, num_devices=num_devices, granules=most, sent_bytes=sent)


def spec(rank: int, states: Mapping[str, int | None]) -> P:
    """The PartitionSpec of an array, from mesh axes to the dimensions they cut."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis, dim in states.items():
        if dim is not None:
            dims[dim].append(axis)
    return to_spec(dims)


def place_in(mesh: Mesh, x: jax.Array, spec: P) -> jax.Array:
    """Constrain a traced array's sharding, also inside a `shard_map` over other axes."""
    context = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(
        x, NamedSharding(context if context.manual_axes else mesh, spec)
    )


def run_experts_on(mesh: Mesh, axes: tuple[str, ...], op: Op, operands: Sequence[Any]) -> list[Any]:
    """Run a layer of experts that mesh axes cut by experts, evenly.

    Each device reads all tokens and makes partial sums. Both are stacks with one entry a device, so
    the all-reduces are the sum of a stack: forward that of results, backward that of cotangents.
    """
    context = jax.sharding.get_abstract_mesh()
    known = context if context.manual_axes else mesh
    experts, num = experts_of(op), math.prod(mesh.shape[name] for name in axes)
    assert experts is not None
    dims = next(f for f in op.factors if f.name == "expert").operands
    specs = [
        P(axes) if dim is None else spec(x.ndim, dict.fromkeys(axes, dim))
        for x, dim in zip(operands, dims, strict=True)
    ]

    def local(*arrays: Any) -> list[Any]:
        here = [x[0] if dim is None else x for x, dim in zip(arrays, dims, strict=True)]
        num_here = experts.num_experts // num
        start = jax.lax.axis_index(axes) * num_here
        results = run_some_experts(experts, here, num_here, start)
        return [x[None] for x in results]

    stacks = [
        x if dim is not None else place_in(mesh, jnp.broadcast_to(x, (num, *x.shape)), s)
        for x, dim, s in zip(operands, dims, specs, strict=True)
    ]
    run = jax.shard_map(
        local,
        mesh=known,
        in_specs=tuple(specs),
        out_specs=P(axes),
        axis_names=set(axes),
        check_vma=False,
    )
    return [x.sum(0) for x in run(*stacks)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bridge:
    """An array that crosses from one TaskGraph to another.

    Attributes:
        source: Index of the TaskGraph that makes the array.
        target: Index of the TaskGraph that reads it.
        array: Dtype and shape, `float32[8,128]`.
        made: Dimension in which the maker leaves it cut, or None.
        wanted: Dimension in which the reader wants it cut, or None.
    """

    axis: str
    source: int
    target: int
    array: str
    made: int | None
    wanted: int | None

    @property
    def kind(self) -> str:
        """`fused` (no communication), `gather`, `partition` or `exchange`."""
        if self.made == self.wanted:
            return "fused"
        if self.made is None:
            return "partition"
        return "gather" if self.wanted is None else "exchange"

    def __str__(self) -> str:
        return (
            f"bridge {self.source} -> {self.target} over {self.axis}: {self.kind} {self.array}, "
            f"dimension {self.made} to {self.wanted}"
        )


class Sharded:
    """A graph with the assignment of each mesh axis."""

    def __init__(
        self, graph: Graph, axes: Mapping[str, AxisAssignment], warnings: tuple[str, ...] = ()
    ):
        self.graph = graph
        self.warnings = warnings
        self.axes = dict(axes)

    def over(self, graph: Graph) -> "Sharded":
        """The same assignments for the graph with its scans cut into ranges of iterations."""
        axes = {
            name: dataclasses.replace(
                axis, made={**axis.made, **{v: axis.made.get(u) for v, u in graph.alike.items()}}
            )
            for name, axis in self.axes.items()
        }
        return Sharded(graph, axes, self.warnings)

    def spec_of(self, value: int) -> P:
        """PartitionSpec of a value, as its maker leaves it."""
        return spec(len(self.graph.values[value].shape), self.made(value))

    def made(self, value: int) -> dict[str, int | None]:
        """For each mesh axis the dimension in which a value's maker leaves it cut."""
        return {name: axis.made.get(value) for name, axis in self.axes.items()}

    def waiting_spec(self, value: int) -> P:
        """PartitionSpec of a stashed value.

        A replicated value is cut over all devices in the first dimension that divides: ZeRO-R's
        partitioned activations (Rajbhandari et al., SC 2020, section 6.1).
        """
        made, known = self.spec_of(value), self.graph.values[value]
        if any(made) or not known.differentiable:
            return made
        num = math.prod(self._sizes.values())
        dim = next((d for d, n in enumerate(known.shape) if n and n % num == 0), None)
        return made if dim is None else to_spec([*[()] * dim, tuple(self.axes)])

    def waiting_bytes(self, value: int) -> int:
        """Bytes of a stashed value on one device."""
        known = self.graph.values[value]
        return bytes_of(
            piece_shape(known.shape, self.waiting_spec(value), self._sizes), known.dtype
        )

    @property
    def _sizes(self) -> dict[str, int]:
        return {name: axis.num_devices for name, axis in self.axes.items()}

    def param_specs(self) -> list[P]:
        """PartitionSpec of every parameter, in the order of the leaves."""
        return [self.spec_of(v) for v in self.graph.param_values]

    def param_bytes(self) -> int:
        """Bytes of one device's shard of the parameters."""
        return sum(map(self.device_bytes, self.graph.param_values))

    def device_bytes(self, value: int) -> int:
        """Bytes of a value on one device, as its maker leaves it."""
        return self.graph.values[value].num_bytes // self.num_parts(value)

    def num_parts(self, value: int) -> int:
        """Number of shards of a value, as its maker leaves it."""
        made = self.made(value)
        return math.prod(a.num_devices for n, a in self.axes.items() if made[n] is not None)

    def aux_specs(self) -> list[P]:
        """PartitionSpec of every other variable, in the order of the leaves."""
        return [self.spec_of(v) for v in self.graph.aux_values]

    def batch_specs(self) -> list[P]:
        """PartitionSpec of every array of a microbatch, in the order of the leaves."""
        return [self.spec_of(v) for v in self.graph.batch_values]

    def bridges(self) -> tuple[Bridge, ...]:
        """The bridges between TaskGraphs, fused ones included."""
        values = self.graph.values
        maker = {v: op for op in leaves(self.graph.ops) for v in op.outputs}
        origin = origins(self.graph.ops)
        bridges: dict[tuple[str, int, int, int | None], Bridge] = {}
        for op in leaves(self.graph.ops):
            for k, v in enumerate(op.inputs):
                source = maker.get(origin(v)) if isinstance(v, int) else None
                if source is None or source.task == op.task or not values[v].shape:
                    continue
                for name, axis in self.axes.items():
                    wanted = axis.wanted[op.outputs[0]][k] if op.outputs else None
                    made = axis.made.get(v)
                    if (made is None and wanted is None) or values[v].param is not None:
                        continue
                    bridges[name, v, op.task, wanted] = Bridge(
                        axis=name,
                        source=source.task,
                        target=op.task,
                        array=str(values[v]),
                        made=made,
                        wanted=wanted,
                    )
        return tuple(bridges.values())

    def gathered_params(self) -> dict[tuple[str, int], str]:
        """Warnings, by axis and parameter, of sharded parameters that an operation reads whole.

        Over an axis `fsdp` the all-gather is intended, so there is no warning.
        """
        values, warnings = self.graph.values, dict[tuple[str, int], str]()
        for op in leaves(self.graph.ops):
            for k, v in enumerate(op.inputs):
                param = values[v].param if isinstance(v, int) else None
                if param is None or not op.outputs:
                    continue
                for name, axis in self.axes.items():
                    whole = axis.made.get(v) is not None and axis.wanted[op.outputs[0]][k] is None
                    if whole and name != "fsdp":
                        received = values[v].num_bytes * (axis.num_devices - 1) // axis.num_devices
                        where = f"{op.name} at {op.source}" if op.source else op.name
                        warnings.setdefault(
                            (name, param),
                            f"parameter {self.graph.param_names[param]} is cut over {name} and "
                            f"gathered whole in each microbatch, {received:,} bytes to a device: "
                            f"{where} cannot be cut in that dimension",
                        )
        return warnings

    def explain(self) -> tuple[str, ...]:
        """Lines about sharded parameters, bridges and warnings."""
        lines = []
        for name, s in zip(self.graph.param_names, self.param_specs(), strict=True):
            if any(s):
                lines.append(f"parameter {name}: {s}")
        return (*lines, *map(str, self.bridges()), *self.warnings)

    def function(self, mesh: Mesh) -> Callable[..., list[Any]]:
        """`run(params, aux, key, batch)` with the traced equations and flat results."""
        return functools.partial(run_graph, self.graph, place=self.placement(mesh))

    def placement(self, mesh: Mesh) -> ArrayPlacement:
        """The sharding constraints on operands and results.

        Args:
            mesh: The axes of the graph's assignments are automatic.
        """

        def place(x: Any, states: Mapping[str, int | None]) -> Any:
            if jnp.ndim(x) == 0 or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return x
            return place_in(mesh, x, spec(x.ndim, states))

        def operands(op: Op, arrays: list[Any]) -> list[Any]:
            return arrays if self._regathers(op) else as_wanted(op, arrays)

        def equation(op: Op, arrays: list[Any]) -> list[Any]:
            if op.name == "dot_general" and self.granules is not None:
                return [self._product(mesh, op).of(op.eqn, arrays)]
            if not self._regathers(op):
                return run_equation(op.eqn, arrays)
            # A gathered operand is no residual.
            return jax.checkpoint(lambda *xs: run_equation(op.eqn, as_wanted(op, xs)))(*arrays)

        def as_wanted(op: Op, arrays: Sequence[Any]) -> list[Any]:
            out = []
            for k, (v, x) in enumerate(zip(op.inputs, arrays, strict=True)):
                if isinstance(v, int) and op.outputs:
                    made = self.made(v)
                    first = op.outputs[0]
                    wanted = {
                        name: a.wanted[first][k] if first in a.wanted else made[name]
                        for name, a in self.axes.items()
                    }
                    x = x if made == wanted else place(x, wanted)
                out.append(x)
            return out

        def as_made(numbers: Sequence[int], arrays: list[Any]) -> list[Any]:
            return [place(x, self.made(v)) for v, x in zip(numbers, arrays, strict=True)]

        def results(op: Op, arrays: list[Any]) -> list[Any]:
            return as_made(op.outputs, arrays) if self._constrains_results(op) else arrays

        def experts(op: Op, arrays: list[Any]) -> list[Any]:
            cut = tuple(n for n, a in self.axes.items() if a.factors.get(op.outputs[0]) == "expert")
            return run_experts_on(mesh, cut, op, arrays) if cut else run_experts(op, arrays)

        return ArrayPlacement(
            operands=operands, results=results, carry=as_made, experts=experts, equation=equation
        )

    @property
    def granules(self) -> int | None:
        """See `AxisAssignment.granules`, of the one axis."""
        return next((axis.granules for axis in self.axes.values()), None)

    def _product(self, mesh: Mesh, op: Op) -> GranuleProduct:
        [(name, axis)] = self.axes.items()
        assert axis.granules is not None
        name_of_factor = axis.factors.get(op.outputs[0])
        is_cut = [f for f in op.factors if f.name == name_of_factor]
        dims = axis.wanted[op.outputs[0]] if is_cut else (None, None)
        return GranuleProduct(mesh=mesh, axis=name, granules=axis.granules, dims=dims)

    def invariant(
        self, function: Callable[..., Any], mesh: Mesh | None, number: jax.Array
    ) -> Callable[..., Any]:
        """The same function of trees of arrays, with the bits that `granules` promises, if any.

        Args:
            number: int32, not negative, and not known to a compiler.
        """
        if self.granules is None:
            return function
        assert mesh is not None
        zero = jnp.minimum(number, 0)  # see `rounded`

        def gather(x: jax.Array, dim: int) -> jax.Array:
            free = P.UNCONSTRAINED
            return place_in(mesh, x, P(*(None if d == dim else free for d in range(x.ndim))))

        return partition_invariant(function, zero, self.granules, gather)

    def _regathers(self, op: Op) -> bool:
        return bool(op.outputs) and any(
            op.outputs[0] in axis.regathers for axis in self.axes.values()
        )

    def _constrains_results(self, op: Op) -> bool:
        """Whether results need constraints; elsewhere XLA's propagation agrees with the plan."""
        if op.body or not op.outputs:
            return False
        return op.name in UNITS or any(
            axis.factors.get(op.outputs[0]) in ("row", "vocabulary") for axis in self.axes.values()
        )
