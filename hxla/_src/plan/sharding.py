"""A traced loss run again with its arrays where a plan wants them.

The program's equations are those that jax traced; between them stand sharding constraints, which
XLA's SPMD partitioner turns into the collectives that the plan counted: the bridges between
TaskGraphs, and those inside a split.

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

from ..graph.factors import UNITS
from ..graph.graph import Graph
from ..graph.interpreter import ArrayPlacement, run_graph
from ..graph.operations import Op, bytes_of, leaves, origins
from .layout import to_spec
from .stage_storage import piece_shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisAssignment:
    """What one mesh axis cuts.

    Attributes:
        made: For each value the dimension that its maker leaves cut.
        wanted: For each equation (by its first result) the states of its operands.
        factors: For each equation (by its first result) its factor's name, or None.
        sent_bytes: What one device sends over the axis for a microbatch.
    """

    num_devices: int
    made: dict[int, int | None]
    wanted: dict[int, tuple[int | None, ...]]
    factors: dict[int, str | None]
    sent_bytes: float


def spec(rank: int, states: Mapping[str, int | None]) -> P:
    """The PartitionSpec of an array.

    Args:
        states: Mesh axis to the dimension it cuts, or None.
    """
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis, dim in states.items():
        if dim is not None:
            dims[dim].append(axis)
    return to_spec(dims)


def place_in(mesh: Mesh, x: jax.Array, spec: P) -> jax.Array:
    """Constrain an array of a traced program, also inside a `shard_map` over the mesh's others."""
    context = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(
        x, NamedSharding(context if context.manual_axes else mesh, spec)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bridge:
    """An array that crosses from one TaskGraph to another.

    Attributes:
        source: Index of the TaskGraph that makes it.
        target: Index of the one that reads it.
        array: `float32[8,128]`.
        made: Dimension that the maker leaves cut, or None.
        wanted: Dimension that the reader wants cut, or None.
    """

    axis: str
    source: int
    target: int
    array: str
    made: int | None
    wanted: int | None

    @property
    def kind(self) -> str:
        """`fused` (nothing moves), `gather`, `partition` or `exchange`."""
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
    """A graph with what each mesh axis cuts.

    Args:
        axes: Mesh axis to its assignment.
    """

    def __init__(
        self, graph: Graph, axes: Mapping[str, AxisAssignment], warnings: tuple[str, ...] = ()
    ):
        self.graph = graph
        self.warnings = warnings
        self.axes = dict(axes)

    def over(self, graph: Graph) -> "Sharded":
        """The same for the graph with its scans cut into ranges of iterations."""
        axes = {
            name: dataclasses.replace(
                axis, made={**axis.made, **{v: axis.made.get(u) for v, u in graph.alike.items()}}
            )
            for name, axis in self.axes.items()
        }
        return Sharded(graph, axes, self.warnings)

    def spec_of(self, value: int) -> P:
        """How a value lies on the mesh."""
        return spec(len(self.graph.values[value].shape), self.made(value))

    def made(self, value: int) -> dict[str, int | None]:
        """For each mesh axis the dimension of a value that it cuts, as its maker leaves it."""
        return {name: axis.made.get(value) for name, axis in self.axes.items()}

    def waiting_spec(self, value: int) -> P:
        """How a value lies on the mesh while it waits for a later program.

        What is whole on every device is cut over all of them, in the first dimension that divides:
        ZeRO-R's partitioned activations (Rajbhandari et al., SC 2020, section 6.1).
        """
        own, known = self.spec_of(value), self.graph.values[value]
        if any(own) or not known.differentiable:
            return own
        num = math.prod(self._sizes.values())
        dim = next((d for d, n in enumerate(known.shape) if n and n % num == 0), None)
        return own if dim is None else to_spec([*[()] * dim, tuple(self.axes)])

    def waiting_bytes(self, value: int) -> int:
        """Bytes on one device of a value that waits for a later program."""
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
        """Bytes of one device's part of the parameters."""
        return sum(map(self.device_bytes, self.graph.param_values))

    def device_bytes(self, value: int) -> int:
        """Bytes on one device of a value, as its maker leaves it."""
        return self.graph.values[value].num_bytes // self.num_parts(value)

    def num_parts(self, value: int) -> int:
        """Into how many parts a value is cut."""
        made = self.made(value)
        return math.prod(a.num_devices for n, a in self.axes.items() if made[n] is not None)

    def aux_specs(self) -> list[P]:
        """PartitionSpec of every other variable, in the order of the leaves."""
        return [self.spec_of(v) for v in self.graph.aux_values]

    def batch_specs(self) -> list[P]:
        """PartitionSpec of every array of a microbatch, in the order of the leaves."""
        return [self.spec_of(v) for v in self.graph.batch_values]

    def bridges(self) -> tuple[Bridge, ...]:
        """What crosses from one TaskGraph to another, that which moves nothing included."""
        values = self.graph.values
        maker = {v: op for op in leaves(self.graph.ops) for v in op.outputs}
        origin = origins(self.graph.ops)
        found: dict[tuple[str, int, int, int | None], Bridge] = {}
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
                    found[name, v, op.task, wanted] = Bridge(
                        axis=name,
                        source=source.task,
                        target=op.task,
                        array=str(values[v]),
                        made=made,
                        wanted=wanted,
                    )
        return tuple(found.values())

    def gathered_params(self) -> dict[tuple[str, int], str]:
        """Sharded parameters that an operation reads whole: by axis and parameter what is said.

        Over an axis `fsdp` the all-gather is meant, and nothing is said.
        """
        values, found = self.graph.values, dict[tuple[str, int], str]()
        for op in leaves(self.graph.ops):
            for k, v in enumerate(op.inputs):
                param = values[v].param if isinstance(v, int) else None
                if param is None or not op.outputs:
                    continue
                for name, axis in self.axes.items():
                    whole = axis.made.get(v) is not None and axis.wanted[op.outputs[0]][k] is None
                    if whole and name != "fsdp":
                        brought = values[v].num_bytes * (axis.num_devices - 1) // axis.num_devices
                        where = f"{op.name} at {op.source}" if op.source else op.name
                        found.setdefault(
                            (name, param),
                            f"parameter {self.graph.param_names[param]} is cut over {name} and "
                            f"gathered whole in each microbatch, {brought:,} bytes to a device: "
                            f"{where} has no way to be cut so",
                        )
        return found

    def explain(self) -> tuple[str, ...]:
        """Which parameters are cut, which bridges there are, what rules left open."""
        lines = []
        for name, s in zip(self.graph.param_names, self.param_specs(), strict=True):
            if any(s):
                lines.append(f"parameter {name}: {s}")
        return (*lines, *map(str, self.bridges()), *self.warnings)

    def function(self, mesh: Mesh) -> Callable[..., list[Any]]:
        """`run(params, aux, key, batch)` as it was traced, its results flat."""
        return functools.partial(run_graph, self.graph, place=self.placement(mesh))

    def placement(self, mesh: Mesh) -> ArrayPlacement:
        """Where the graph's operations find and leave their arrays.

        Args:
            mesh: Its axes that are cut here are automatic.
        """

        def place(x: Any, states: Mapping[str, int | None]) -> Any:
            if jnp.ndim(x) == 0 or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return x
            return place_in(mesh, x, spec(x.ndim, states))

        def operands(op: Op, arrays: list[Any]) -> list[Any]:
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
            return as_made(op.outputs, arrays) if self._is_bound(op) else arrays

        return ArrayPlacement(operands=operands, results=results, carry=as_made)

    def _is_bound(self, op: Op) -> bool:
        """Whether the results are placed by us: elsewhere XLA's propagation does as we would."""
        if op.body or not op.outputs:
            return False
        return op.name in UNITS or any(
            axis.factors.get(op.outputs[0]) in ("row", "vocabulary") for axis in self.axes.values()
        )
