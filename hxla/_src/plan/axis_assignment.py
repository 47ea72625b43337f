"""The dimension of every array that each mesh axis inside a replica cuts, by the solver."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.errors import AnnotationError, PlanError
from ..graph.factors import Factor, fits
from ..graph.graph import Graph, Op, Value, is_unit, leaves
from ..jax.jaxpr import scan_counts
from .assignment_problem import (
    ChoiceNode,
    Edge,
    Problem,
    State,
    all_reduce_bytes,
    cost,
    num_collectives,
    solve,
)
from .parts import Role
from .sharding import AxisAssignment, Cuts, Sharded

if TYPE_CHECKING:
    from .token_assignment import TokenAssignment

Axes = tuple[tuple[str, int], ...]  # names and sizes
Roles = Mapping[str, tuple[Role, ...]]

# Replicated work costs time but no bytes. One byte sent is worth a thousand floating-point
# operations (A100 datasheet: 312 Tflop/s in bf16, 300 GB/s each way over NVLink).
_BYTES_PER_FLOP = 1e-3
_BYTES_PER_BYTE = 1e-3


def shard_graph(
    graph: Graph,
    axes: Sequence[tuple[str, int]],
    roles: Roles,
    dims: Sequence[Mapping[str, int]] | None = None,
    warnings: tuple[str, ...] = (),
    *,
    unlike: bool = False,
    like: Sharded | None = None,
    granules: int | None = None,
) -> Sharded:
    """Solve one axis after another, each on the shards that the others leave.

    Args:
        roles: For each axis, the role of each TaskGraph.
        dims: For each parameter, mesh axis to the dimension it cuts, where rules or a plan decide
            it; None: the least communication.
        unlike: Whether shards may be uneven.
        like: The same program and axes for another microbatch size, whose assignment is reused
            where possible; None: solve.
        granules: Of each dimension that the one axis cuts, so that its size changes no decision;
            None: dimensions are cut into shards only.
    """
    known = like.axes if like is not None and is_alike(like.graph, graph) else {}
    cuts: dict[int, dict[int, int]] = {}
    solved: dict[str, AxisAssignment] = {}
    tokens = _tokens(graph, axes, roles, unlike=unlike)
    sizes = dict(axes)
    for name, found in tokens.items():
        _cut(cuts, found.made, sizes[name])
    for name, size in reversed(list(axes)):  # the innermost axis has the fastest links
        if name in tokens:
            continue
        fixed: dict[int, int | None] = {}
        if dims is not None:
            fixed = {i: dim_of.get(name) for i, dim_of in enumerate(dims)}
        solved[name] = assign(
            graph,
            roles[name],
            granules or size,
            cuts=cuts,
            fixed=fixed,
            unlike=unlike,
            like=known.get(name),
        )
        if granules is not None:
            solved[name] = solved[name].in_granules(size)
        _cut(cuts, solved[name].made, size)
    if tokens:
        others: dict[int, dict[int, int]] = {}
        for name, axis in solved.items():
            _cut(others, axis.made, sizes[name])
        for name, found in tokens.items():
            solved[name], warnings = found.axis(others), (*warnings, *found.lines(others))
    return Sharded(graph, {name: solved[name] for name, _ in axes}, warnings)


def _tokens(
    graph: Graph, axes: Sequence[tuple[str, int]], roles: Roles, *, unlike: bool
) -> dict[str, "TokenAssignment"]:
    """The assignments of the axes that cut tokens; few plans have one."""
    named = [(name, size) for name, size in axes if "tokens" in roles[name]]
    if not named:
        return {}
    from .token_assignment import assign_tokens

    return {name: assign_tokens(graph, size, unlike=unlike) for name, size in named}


def _cut(cuts: dict[int, dict[int, int]], made: Mapping[int, State], size: int) -> None:
    """Add the shards of an axis."""
    for v, dim in made.items():
        if dim is not None:
            divisors = cuts.setdefault(v, {})
            divisors[dim] = divisors.get(dim, 1) * size


def is_alike(one: Graph, other: Graph) -> bool:
    """Whether two graphs are the same program, traced for different sizes."""

    def program(graph: Graph) -> list[tuple[str, tuple[int, ...]]]:
        return [(op.name, op.outputs) for op in leaves(graph.ops)]

    return program(one) == program(other)


def assign(
    graph: Graph,
    roles: Sequence[Role],
    num_devices: int,
    *,
    cuts: Cuts | None = None,
    fixed: Mapping[int, State] | None = None,
    unlike: bool = False,
    like: AxisAssignment | None = None,
) -> AxisAssignment:
    """Choose the dimensions that one mesh axis cuts.

    Args:
        roles: For each TaskGraph whether this axis shards its batch (`replicate`), its parameters
            (`split`), or what `fixed` says (`rules`).
        cuts: By the other axes.
        fixed: For parameters (by index) that a rule decides: the dimension, or None for whole.
        unlike: Whether shards may be uneven.
        like: The assignment of the same program for another microbatch size, reused where
            possible; None: solve.

    Raises:
        PlanError: If the batch does not divide.
        AnnotationError: If a parameter in a `split` cannot be cut.
    """
    builder = _Builder(graph, roles, num_devices, cuts or {}, fixed or {}, unlike)
    builder.build()
    problem = Problem(
        num_devices=num_devices, nodes=tuple(builder.nodes), edges=tuple(builder.edges)
    )
    chosen = builder.chosen_like(like) if like is not None else None
    if chosen is None:
        chosen = solve(problem)
    return builder.decode(problem, chosen)


class _Builder:
    def __init__(
        self,
        graph: Graph,
        roles: Sequence[Role],
        num_devices: int,
        cuts: Cuts,
        fixed: Mapping[int, State],
        unlike: bool,
    ):
        self.graph = graph
        self._unlike = unlike
        self.nodes: list[ChoiceNode] = []
        self.edges: list[Edge] = []
        self._roles = roles
        self._n = num_devices
        self._cuts = cuts
        self._fixed = fixed
        self._maker: dict[int, tuple[int, int]] = {}  # value -> (node, result)
        self._free: set[int] = set()
        self._names: dict[int, tuple[str | None, ...]] = {}  # node -> name of each choice
        self._node_of_op: dict[int, int] = {}  # first result of an equation -> node
        self._problems: list[str] = []
        self._waste: dict[tuple[int, int], float] = {}  # (node, choice) -> cost of repeated work

    def build(self) -> None:
        graph = self.graph
        for index, v in enumerate(graph.param_values):
            self._input(v, fixed=self._fixed.get(index, ...))
        for v in graph.aux_values:
            self._input(v, fixed=...)
        # These are replicated, so every shard of them is free.
        for v in (*graph.batch_values, graph.key_value, *(v for v, _ in graph.consts)):
            self._input(v, fixed=None, free=True)
        self._add(graph.ops)
        if self._problems:
            raise AnnotationError("\n".join(self._problems))

    def chosen_like(self, other: AxisAssignment) -> tuple[int, ...] | None:
        """The choices with the same states as another assignment; None: there are none."""
        left: dict[int, list[tuple[int, State]]] = {}
        for v, (maker, result) in self._maker.items():
            if v not in other.made:
                return None
            left.setdefault(maker, []).append((result, other.made[v]))
        wanted = {
            number: (other.wanted.get(v), other.factors.get(v))
            for v, number in self._node_of_op.items()
        }
        chosen = []
        for i, node in enumerate(self.nodes):
            fitting = [
                c
                for c, (operands, results, _) in enumerate(node.choices)
                if all(results[result] == state for result, state in left.get(i, ()))
                and (i not in wanted or (operands, self._names[i][c]) == wanted[i])
            ]
            if not fitting:
                return None
            chosen.append(min(fitting, key=[cost for _, _, cost in node.choices].__getitem__))
        return tuple(chosen)

    def decode(self, problem: Problem, chosen: Sequence[int]) -> AxisAssignment:
        made = {
            v: self.nodes[node].choices[chosen[node]][1][result]
            for v, (node, result) in self._maker.items()
        }
        wanted = {
            v: self.nodes[node].choices[chosen[node]][0] for v, node in self._node_of_op.items()
        }
        factors = {v: self._names[node][chosen[node]] for v, node in self._node_of_op.items()}
        return AxisAssignment(
            num_devices=self._n,
            made=made,
            wanted=wanted,
            factors=factors,
            sent_bytes=cost(problem, chosen) - self._repeated(chosen),
            num_collectives=num_collectives(problem, chosen, self._repeating(chosen)),
        )

    def _repeated(self, chosen: Sequence[int]) -> float:
        """The part of the cost that is replicated work, not bytes sent."""
        return sum(self._waste.get((node, c), 0.0) for node, c in enumerate(chosen))

    def _repeating(self, chosen: Sequence[int]) -> set[int]:
        """The nodes whose cost is replicated work alone."""
        return {
            node
            for node, c in enumerate(chosen)
            if self._waste.get((node, c), 0.0) >= self.nodes[node].choices[c][2]
        }

    # -- nodes ---------------------------------------------------------------------------------

    def _local_shape(self, v: int) -> tuple[int, ...]:
        cut = self._cuts.get(v, {})
        return tuple(size // cut.get(d, 1) for d, size in enumerate(self.graph.values[v].shape))

    def _bytes(self, v: int) -> float:
        value = self.graph.values[v]
        parts = 1
        for divisor in self._cuts.get(v, {}).values():
            parts *= divisor
        return value.num_bytes / parts

    def _dims(self, v: int) -> list[int]:
        n = self._n
        shape = self._local_shape(v)
        return [d for d, size in enumerate(shape) if size >= n and (self._unlike or size % n == 0)]

    def _repeat(self, num_bytes: float) -> float:
        return _BYTES_PER_BYTE * num_bytes * (1 - 1 / self._n)

    def _input(self, v: int, *, fixed: Any, free: bool = False) -> None:
        states: list[State] = [None, *self._dims(v)] if fixed is ... else [fixed]
        whole = 0.0 if free else self._repeat(self._bytes(v))
        node = ChoiceNode(choices=tuple(((), (s,), whole if s is None else 0.0) for s in states))
        self._waste |= {(len(self.nodes), c): whole for c, s in enumerate(states) if s is None}
        self._maker[v] = (len(self.nodes), 0)
        self.nodes.append(node)
        if free:
            self._free.add(v)

    def _add(self, ops: tuple[Op, ...]) -> None:
        for op in ops:
            if op.kind == "scan":
                self._scan(op)
            elif op.body:
                for inside, outside in zip(op.body_inputs, op.inputs, strict=True):
                    self._alias(inside, outside)
                for v, _ in op.body_consts:
                    self._input(v, fixed=None, free=True)
                self._add(op.body)
                for outside, inside in zip(op.outputs, op.body_outputs, strict=True):
                    self._alias(outside, inside)
            else:
                self._equation(op)

    def _alias(self, new: int, old: Any) -> None:
        if isinstance(old, int):
            self._maker[new] = self._maker[old]
            if old in self._free:
                self._free.add(new)
        else:
            self._input(new, fixed=None, free=True)

    def _scan(self, op: Op) -> None:
        params = op.eqn.params
        num_consts, num_carry = scan_counts(op.eqn)
        for v, _ in op.body_consts:
            self._input(v, fixed=None, free=True)
        carries: list[int] = []
        for i, (inside, outside) in enumerate(zip(op.body_inputs, op.inputs, strict=True)):
            if i < num_consts:
                self._alias(inside, outside)
            elif i < num_consts + num_carry:
                states: list[State] = [None, *self._dims(inside)]
                carries.append(len(self.nodes))
                self._node([((s, s), (s,), 0.0) for s in states], [inside], names=None)
                self._edge(outside, carries[-1], 0, op.times)
            else:
                self._shift(outside, inside, -1, op.times)
        self._add(op.body)
        for i, (outside, inside) in enumerate(zip(op.outputs, op.body_outputs, strict=True)):
            if i < num_carry:
                self._edge(inside, carries[i], 1, op.times * params["length"])
                self._maker[outside] = (carries[i], 0)
            else:
                self._shift(inside, outside, 1, op.times)

    def _shift(self, source: Any, target: int, offset: int, times: int) -> None:
        """A slice of a stacked array (-1), or a stack of slices (+1)."""
        inner = target if offset < 0 else source
        dims = self._dims(inner) if isinstance(inner, int) else []
        choices: list[Any] = [((None,), (None,), 0.0)]
        for d in dims:
            outer = d + 1
            choices.append(((outer,), (d,), 0.0) if offset < 0 else ((d,), (outer,), 0.0))
        if isinstance(source, int) and self._only_state(source) is not None:
            state = self._only_state(source)
            choices = [c for c in choices if c[0][0] == state] or choices
        node = len(self.nodes)
        self._node(choices, [target], names=None)
        self._edge(source, node, 0, times)

    def _node(
        self, choices: list[Any], results: Sequence[int], names: list[str | None] | None
    ) -> int:
        number = len(self.nodes)
        self.nodes.append(ChoiceNode(choices=tuple(choices)))
        self._names[number] = tuple(names or [None] * len(choices))
        for i, v in enumerate(results):
            self._maker[v] = (number, i)
        return number

    def _edge(self, source: Any, node: int, operand: int, times: int) -> None:
        if not isinstance(source, int):
            return
        maker, result = self._maker[source]
        self.edges.append(
            Edge(
                source=maker,
                result=result,
                target=node,
                operand=operand,
                num_bytes=self._bytes(source) * times,
                differentiable=self.graph.values[source].differentiable,
                free=source in self._free,
            )
        )

    # -- equations -----------------------------------------------------------------------------

    def _equation(self, op: Op) -> None:
        n = self._n
        in_shapes = [
            self._local_shape(v) if isinstance(v, int) else tuple(v.aval.shape) for v in op.inputs
        ]
        out_shapes = [self._local_shape(v) for v in op.outputs]
        fitting = [f for f in op.factors if fits(f, in_shapes, out_shapes, n, unlike=self._unlike)]
        allowed = self._allowed(op, fitting)
        choices: list[Any] = []
        names: list[str | None] = []
        for f in allowed:
            if f is None:
                whole = (None,) * len(op.inputs), (None,) * len(op.outputs)
                repeated = sum(self._bytes(v) for v in op.outputs)
                waste = self._repeat(repeated) + _BYTES_PER_FLOP * op.flops * (1 - 1 / n)
                self._waste[len(self.nodes), len(choices)] = waste
                choices.append((*whole, waste))
                names.append(None)
            else:
                choices.append((f.operands, f.results, self._sent_bytes(op, f)))
                names.append(f.name)
        if not op.outputs:
            return
        node = self._node(choices, op.outputs, names)
        self._node_of_op[op.outputs[0]] = node
        for k, v in enumerate(op.inputs):
            self._edge(v, node, k, op.times)

    def _sent_bytes(self, op: Op, f: Factor) -> float:
        values = self.graph.values
        total = 0.0
        if f.partial:
            total += sum(
                all_reduce_bytes(self._bytes(v), self._n)
                for v, dim in zip(op.outputs, f.results, strict=True)
                if dim is None
            )
        for v, dim in zip(op.inputs, f.operands, strict=True):
            if dim is None and isinstance(v, int) and values[v].differentiable:
                total += all_reduce_bytes(self._bytes(v), self._n)
        return total * op.times

    def _allowed(
        self,
        op: Op,
        fitting: Sequence[Factor],
    ) -> list[Factor | None]:
        role = self._roles[op.task]
        values = self.graph.values
        if role == "replicate":
            over_batch = [f for f in op.factors if _cuts_batch(f, op, values)]
            if not over_batch:
                return [None, *fitting] if not _reads_batch(op, values) else [None]
            fits_batch = [f for f in over_batch if f in fitting]
            if not fits_batch:
                f = over_batch[0]
                size = next(
                    values[v].shape[d]
                    for v, d in zip(op.inputs, f.operands, strict=True)
                    if isinstance(v, int) and d is not None and values[v].batch_dim == d
                )
                raise PlanError(
                    f"{self._where(op)}: {size} examples do not divide over {self._n} devices of "
                    f"a replicate; use a microbatch_size that is a multiple of {self._n}"
                )
            return [fits_batch[0]]
        if role == "rules":
            pinned = self._pinned(op, fitting)
            return pinned or [None, *fitting]
        if not is_unit(op, values):
            return [None, *fitting]
        cutting = [f for f in fitting if _cuts_param(f, op, values)]
        if not cutting:
            self._problems.append(self._cannot_split(op))
            return [None]
        return list(cutting)

    def _pinned(self, op: Op, fitting: Sequence[Factor]) -> list[Factor | None]:
        """The factors that cut an equation along with a parameter that a rule cuts."""
        for k, v in enumerate(op.inputs):
            if isinstance(v, int) and self.graph.values[v].param is not None:
                state = self._only_state(v)
                if state is not None:
                    return [f for f in fitting if f.operands[k] == state]
        return []

    def _only_state(self, v: int) -> State:
        """The dimension that is cut in every choice, or None."""
        node, result = self._maker[v]
        states = {choice[1][result] for choice in self.nodes[node].choices}
        return states.pop() if len(states) == 1 else None

    def _where(self, op: Op) -> str:
        task = self.graph.task_graphs[op.task]
        module = "/".join(p for p in op.stack.split("/") if not p.startswith("hxla."))
        return f"hxla.{task.label}, {op.name} in {module or 'the loss'} ({op.source})"

    def _cannot_split(self, op: Op) -> str:
        values = self.graph.values
        lines = []
        for k, v in enumerate(op.inputs):
            if isinstance(v, int) and values[v].param is not None:
                name = self.graph.param_names[values[v].param or 0]
                sizes = sorted(
                    {values[v].shape[d] for f in op.factors if (d := f.operands[k]) is not None}
                )
                lines.append(
                    f"parameter {name} {list(values[v].shape)} cannot be cut into {self._n}: "
                    f"dimensions that may be cut have the sizes {sizes or 'none'}"
                )
        return (
            f"{self._where(op)}: {'; '.join(lines)}. Give it a size that is a multiple of "
            f"{self._n}, ask for a device count that divides it, or leave it out of the split"
        )


def _cuts_batch(f: Factor, op: Op, values: Sequence[Value]) -> bool:
    return any(
        isinstance(v, int) and dim is not None and values[v].batch_dim == dim
        for v, dim in zip(op.inputs, f.operands, strict=True)
    )


def _reads_batch(op: Op, values: Sequence[Value]) -> bool:
    return any(isinstance(v, int) and values[v].batch_dim is not None for v in op.inputs)


def _cuts_param(f: Factor, op: Op, values: Sequence[Value]) -> bool:
    return any(
        isinstance(v, int) and dim is not None and values[v].param is not None
        for v, dim in zip(op.inputs, f.operands, strict=True)
    )
