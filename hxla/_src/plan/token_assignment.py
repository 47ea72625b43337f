"""The dimension of every array that runs over tokens, which the mesh axis `sequence` cuts.

Each device computes the queries of its tokens, and whatever belongs to one token alone. Attention
contracts over the keys, so it reads keys and values of all tokens: they are gathered. They are
gathered again in the backward, so that no device holds them between the two. XLA for CPUs makes one
gather of both.

Parts may be unlike: `lower.uneven` runs them.

Arrays without a gradient (positions, masks) are computed whole where an operation reads them whole:
that is cheaper than to send them.

References:
    Li et al., "Sequence Parallelism: Long Sequence Training from System Perspective", ACL 2023.
    Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2 (all-gather of keys and values).
"""

import collections
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.errors import AnnotationError, PlanError
from ..core.files import listed
from ..graph.factors import UNITS, Factor, fits
from ..graph.graph import Graph, Op, Value, leaves, origins
from ..jax.fused_attention import FORWARD as FUSED
from ..jax.jaxpr import scan_counts
from .assignment_problem import State, all_gather_bytes, all_reduce_bytes, reshard_bytes
from .sharding import AxisAssignment, Cuts

_PARAM, _BATCH = 1, 2  # what a value depends on
_MOST_GATHERS = 4  # in words
_MUCH_REPEATED = 0.05  # of the operations of a forward
_WITHOUT = "train without a mesh axis 'sequence'"
_REMEDIES = {
    "scan": "a loop over tokens, such as an LSTM, needs each token before the next",
    "conv_general_dilated": "a convolution over tokens reads the neighbours of a token",
    "reshape": "keep examples and tokens in dimensions apart: losses of optax take any number",
    "slice": "shift the tokens of the batch before the model reads them, as in "
    "`model(tokens[:, :-1])` with labels `tokens[:, 1:]`",
    FUSED: "it has no form for some of the queries: leave implementation='cudnn' out",
    "pad": "the number of tokens must not change inside the model",
    "concatenate": "add tokens to the batch, not in the model",
}

Place = tuple[int, int]  # a value and one of its dimensions


def assign_tokens(graph: Graph, num_devices: int, *, unlike: bool = False) -> "TokenAssignment":
    """Cut the tokens of a graph over the devices of one mesh axis.

    Args:
        unlike: Whether parts may be uneven.

    Raises:
        PlanError: If no dimension is one of tokens, or an operation reads tokens in a way that
            cannot be cut.
        AnnotationError: If parts are to be even, and the number of tokens does not divide.
    """
    found = TokenAssignment(graph, num_devices, unlike=unlike)
    found.solve()
    return found


class TokenAssignment:
    """What the axis cuts and sends.

    Args:
        num_devices: The size of the axis.
        unlike: Whether parts may be uneven.
    """

    def __init__(self, graph: Graph, num_devices: int, *, unlike: bool = False):
        self._graph, self._n, self._unlike = graph, num_devices, unlike
        self._values: Sequence[Value] = graph.values
        self._tokens = TokenDims(graph)
        self._origin = origins(graph.ops)
        self._maker = {v: op for op in leaves(graph.ops) for v in op.outputs}
        self._whole: set[int] = set()  # results that are computed whole on every device
        self._made: dict[int, State] = {}
        self._wanted: dict[int, tuple[State, ...]] = {}
        self._factors: dict[int, Factor | None] = {}
        self._faults: dict[str, None] = {}

    def solve(self) -> None:
        """Choose the dimensions."""
        if self._n > 1:
            self._tokens.check_known()
        while True:
            before = len(self._whole)
            self._made, self._faults = {}, {}
            self._add(self._graph.ops)
            for op in self._equations():
                for v, wanted in zip(op.inputs, self._wanted[op.outputs[0]], strict=True):
                    if isinstance(v, int) and wanted is None and self._made.get(v) is not None:
                        self._make_whole(v)
            if len(self._whole) == before:
                break
        if self._faults:
            raise PlanError(
                f"the mesh axis 'sequence' cuts {self._tokens}, and these operations cannot be "
                f"cut along tokens:{listed([*self._faults])}\nor {_WITHOUT}"
            )
        self._tokens.check_sizes(self._n, unlike=self._unlike)
        if not self._unlike:  # else devices get the data whole, and take their tokens
            self._cut_data()

    @property
    def made(self) -> Mapping[int, State]:
        """See `AxisAssignment.made`."""
        return self._made

    def axis(self, others: Cuts) -> AxisAssignment:
        """The dimensions, and the bytes sent.

        Args:
            others: Shards over the other axes, which make arrays smaller.
        """
        equations = list(self._equations())
        return AxisAssignment(
            num_devices=self._n,
            made=self._made,
            wanted=self._wanted,
            factors={v: None if f is None else f.name for v, f in self._factors.items()},
            sent_bytes=sum(self._sent_bytes(op, others) for op in equations),
            regathers=frozenset(op.outputs[0] for op in equations if self._has_gathers(op)),
        )

    def _equations(self) -> Iterator[Op]:
        return (
            op for op in leaves(self._graph.ops) if op.outputs and op.outputs[0] in self._wanted
        )

    # -- states --------------------------------------------------------------------------------

    def _add(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if not op.body:
                self._equation(op)
                continue
            num_consts, num_carry = scan_counts(op.eqn) if op.kind == "scan" else (0, 0)
            carried = range(num_consts, num_consts + num_carry)
            for i, (inside, outside) in enumerate(zip(op.body_inputs, op.inputs, strict=True)):
                if i in carried:
                    self._made[inside] = self._first_dim(inside)
                else:
                    is_row = op.kind == "scan" and i >= carried.stop
                    self._made[inside] = self._renamed(outside, -1 if is_row else 0)
            self._add(op.body)
            for i, (outside, inside) in enumerate(zip(op.outputs, op.body_outputs, strict=True)):
                if op.kind == "scan" and i < num_carry:
                    self._made[outside] = self._made[op.body_inputs[num_consts + i]]
                else:
                    self._made[outside] = self._renamed(inside, int(op.kind == "scan"))
            if op.kind == "scan" and any(self._runs_over_tokens(op)):
                self._refuse(op, "reads the tokens one after another")
            elif op.kind == "custom" and any(map(self._has_gathers, leaves(op.body))):
                self._refuse(op, "has rules of its own for gradients, and reads all tokens inside")

    def _runs_over_tokens(self, op: Op) -> Iterator[bool]:
        """For each array whose rows a scan reads or makes, whether these are tokens."""
        num_consts, num_carry = scan_counts(op.eqn)
        for v in (*op.inputs[num_consts + num_carry :], *op.outputs[num_carry:]):
            yield isinstance(v, int) and self._is_cut(v, 0)

    def _renamed(self, v: Any, shift: int) -> State:
        dim = self._made.get(v) if isinstance(v, int) else None
        return None if dim is None or dim + shift < 0 else dim + shift

    def _first_dim(self, v: int) -> State:
        return next(iter(self._cut_dims(v)), None)

    def _cut_dims(self, v: int) -> list[int]:
        """The dimensions over tokens: of scores first the queries', then the keys'."""
        dims = (d for d in range(len(self._values[v].shape)) if self._is_cut(v, d))
        return sorted(dims, key=functools.partial(self._tokens.order, v))

    def _is_cut(self, v: int, d: int) -> bool:
        size = self._values[v].shape[d]
        can_be = size >= self._n if self._unlike else size % self._n == 0
        return self._n > 1 and can_be and self._tokens.is_token(v, d)

    def _equation(self, op: Op) -> None:
        if not op.outputs:
            return
        first, num = op.outputs[0], len(op.inputs)
        factor = None if not self._whole.isdisjoint(op.outputs) else self._factor(op)
        self._factors[first] = factor
        self._wanted[first] = (None,) * num if factor is None else factor.operands
        results = (None,) * len(op.outputs) if factor is None else factor.results
        self._made.update(zip(op.outputs, results, strict=True))
        if factor is None and self._has_gathers(op):
            self._refuse(op, "reads several tokens at once")

    def _factor(self, op: Op) -> Factor | None:
        """The way to cut an equation along its first result's tokens, else to add over tokens."""
        shapes = [
            self._values[v].shape if isinstance(v, int) else tuple(v.aval.shape) for v in op.inputs
        ]
        results = [self._values[v].shape for v in op.outputs]
        fitting = [f for f in op.factors if fits(f, shapes, results, self._n, unlike=self._unlike)]
        for d in self._cut_dims(op.outputs[0]):
            for factor in fitting:
                if factor.results[0] == d:
                    return factor
        states = [self._made.get(v) if isinstance(v, int) else None for v in op.inputs]
        for k, made in enumerate(states):
            for factor in fitting:
                if made is not None and factor.operands[k] == made and factor.partial:
                    return factor
        return None

    def _make_whole(self, v: int) -> None:
        """Compute an array without a gradient on every device, with what it is made of."""
        v = self._origin(v)
        op = self._maker.get(v)
        if op is None or v in self._whole or self._values[v].differentiable:
            return
        operands = [u for u in op.inputs if isinstance(u, int)]
        if not any(self._values[u].differentiable for u in operands):
            self._whole.update(op.outputs)
            for u in operands:
                if self._made.get(u) is not None:
                    self._make_whole(u)

    def _cut_data(self) -> None:
        """Send devices their tokens of data only, if each operation reads it so."""
        data = set(self._graph.batch_values)
        wants: dict[int, set[State]] = collections.defaultdict(set)
        for op in self._all_ops(self._graph.ops):
            known = self._wanted.get(op.outputs[0]) if op.outputs else None
            for v, wanted in zip(op.inputs, known or (None,) * len(op.inputs), strict=True):
                if isinstance(v, int) and v in data:
                    wants[v].add(wanted)
        self._made |= {v: next(iter(dims)) for v, dims in wants.items() if len(dims) == 1}

    def _all_ops(self, ops: Sequence[Op]) -> Iterator[Op]:
        for op in ops:
            yield op
            yield from self._all_ops(op.body)

    def _gathered(self, op: Op) -> Iterator[int]:
        """The operands with a gradient that are cut, and that an equation reads whole."""
        for v, wanted in zip(op.inputs, self._wanted[op.outputs[0]], strict=True):
            if not isinstance(v, int) or not self._values[v].differentiable:
                continue
            if wanted is None and self._made.get(v) is not None:
                yield v

    def _has_gathers(self, op: Op) -> bool:
        return bool(op.outputs) and any(True for _ in self._gathered(op))

    # -- words and bytes -----------------------------------------------------------------------

    def _refuse(self, op: Op, why: str) -> None:
        module = "/".join(p for p in op.stack.split("/") if not p.startswith("hxla."))
        where = f"{op.name} in {module or 'the loss'} ({op.source})"
        remedy = _REMEDIES.get(op.name)
        self._faults[f"{where} {why}" + (f": {remedy}" if remedy else "")] = None

    def _num_bytes(self, v: int, others: Cuts) -> float:
        return self._values[v].num_bytes / math.prod(others.get(v, {}).values())

    def _sent_bytes(self, op: Op, others: Cuts) -> float:
        """The bytes that each device sends for an equation, forward and backward."""
        first, total = op.outputs[0], 0.0
        factor, gathered = self._factors[first], set(self._gathered(op))
        for v, wanted in zip(op.inputs, self._wanted[first], strict=True):
            if not isinstance(v, int):
                continue
            has_gradient, made = self._values[v].differentiable, self._made.get(v)
            size = self._num_bytes(v, others)
            total += reshard_bytes(made, wanted, size, self._n, differentiable=has_gradient)
            if v in gathered:
                total += all_gather_bytes(size, self._n)
            if factor is not None and wanted is None and has_gradient:
                total += all_reduce_bytes(size, self._n)
        if factor is not None and factor.partial:
            whole = [v for v, dim in zip(op.outputs, factor.results, strict=True) if dim is None]
            total += sum(all_reduce_bytes(self._num_bytes(v, others), self._n) for v in whole)
        return total * op.times

    def lines(self, others: Cuts) -> tuple[str, ...]:
        """What is cut and gathered, for the plan.

        Args:
            others: As of `axis`.
        """
        if self._n == 1:
            return ()
        sent: dict[str, float] = collections.defaultdict(float)
        for op in self._equations():
            for v in self._gathered(op):
                where = f"{self._values[v]} for {op.name} ({op.source})"
                sent[where] += all_gather_bytes(self._num_bytes(v, others) * op.times, self._n)
        total = sum(sent.values())
        what = (
            f"receives {total:,.0f} bytes of keys and values forward, and as many backward unless "
            "XLA keeps them, as it does on CPUs"
        )
        if not total:
            what = "reads no token of another"
        lines = [f"sequence cuts {self._tokens} into {self._n}: in a microbatch a device {what}"]
        lines += [
            f"gathered over sequence: {where}, {n:,.0f} bytes"
            for where, n in list(sent.items())[:_MOST_GATHERS]
        ]
        if len(sent) > _MOST_GATHERS:
            lines.append(f"gathered over sequence: {len(sent) - _MOST_GATHERS} arrays more")
        equations = list(self._equations())
        whole = sum(op.flops for op in equations if self._factors[op.outputs[0]] is None)
        repeated = whole / (sum(op.flops for op in equations) or 1)
        if repeated > _MUCH_REPEATED:
            lines.append(
                f"{repeated:.0%} of a forward's operations belong to no token: each device of a "
                "replica computes all of them"
            )
        return tuple(lines)


class _Classes:
    """Sets of places that are joined one after another."""

    def __init__(self) -> None:
        self._parent: dict[Place, Place] = {}

    def root(self, place: Place) -> Place:
        """The place that stands for a place's class."""
        path = []
        while place in self._parent:
            path.append(place)
            place = self._parent[place]
        self._parent.update(dict.fromkeys(path, place))
        return place

    def join(self, places: Sequence[Place]) -> None:
        """Make one class of the classes of some places."""
        roots = dict.fromkeys(map(self.root, places))
        if len(roots) > 1:
            first, *others = roots
            self._parent.update(dict.fromkeys(others, first))


class TokenDims:
    """Which dimensions of a graph's values run over tokens.

    Dimensions that a factor of any equation joins are one class. A class is one of tokens if it has
    the second dimension of data of the batch, reaches arrays that depend on parameters, and no
    product contracts or makes it with a parameter, as it does features and classes.
    """

    def __init__(self, graph: Graph):
        self._graph = graph
        self._classes = _Classes()
        self._joined: list[tuple[list[Place], bool]] = []  #: and whether a factor adds over them
        self._depends = dict.fromkeys(graph.param_values, _PARAM)
        self._depends |= dict.fromkeys(graph.batch_values, _BATCH)
        self._of_weights: set[Place] = set()
        self._walk(graph.ops)
        data = {v for v, on in self._depends.items() if on == _BATCH}
        stream = (v for v, on in self._depends.items() if on == _PARAM | _BATCH)
        known = graph.values
        root = self._classes.root
        reached = {root((v, d)) for v in stream for d in range(len(known[v].shape))}
        excluded = {root(place) for place in self._of_weights}
        excluded |= {root((v, 0)) for v in graph.batch_values}
        #: For each class of tokens a value of data, and how many tokens it has.
        self._sizes: dict[Place, tuple[int, int]] = {}
        for v in sorted(data):
            shape = known[v].shape
            # Of a single example no equation says which dimension is that of examples.
            has_examples = known[v].batch_dim == 0 or shape[:1] == (1,)
            is_second = has_examples and len(shape) > 1 and shape[1] > 1
            if is_second and root((v, 1)) in reached - excluded:
                self._sizes.setdefault(root((v, 1)), (v, shape[1]))
        self._sides = _Classes()
        self._times_added: collections.Counter[Place] = collections.Counter()
        self._last: dict[Place, int] = {}
        self._find_sides()

    def __str__(self) -> str:
        arrays = [f"dimension 1 of {self._graph.values[v]}" for v, _ in self._sizes.values()]
        return f"the tokens ({', '.join(dict.fromkeys(arrays))})"

    def is_token(self, v: int, d: int) -> bool:
        """Whether a dimension of a value runs over tokens."""
        return self._classes.root((v, d)) in self._sizes

    def order(self, v: int, d: int) -> tuple[int, int]:
        """Sorts a value's dimensions over tokens: queries before keys."""
        side = self._sides.root((v, d))
        return self._times_added[side], self._last.get(side, d)

    def check_known(self) -> None:
        """Refuse data without tokens.

        Raises:
            PlanError: If no dimension is one of tokens.
        """
        if not self._sizes:
            arrays = ", ".join(str(self._graph.values[v]) for v in self._graph.batch_values)
            raise PlanError(
                "the mesh axis 'sequence' cuts tokens, and no dimension of the batch is known to "
                f"be one of tokens (the batch has {arrays}): tokens are in dimension 1 of an "
                "array, [examples, tokens, ...], and no product contracts them with a parameter. "
                f"Lay out the data so, or {_WITHOUT}"
            )

    def check_sizes(self, num_devices: int, *, unlike: bool) -> None:
        """Refuse too few tokens, and numbers that do not divide where parts are to be even.

        Raises:
            PlanError: If there are fewer tokens than devices.
            AnnotationError: If they do not divide, with every number.
        """
        least = min((size for _, size in self._sizes.values()), default=num_devices)
        if least < num_devices:
            raise PlanError(
                f"the mesh axis 'sequence' cuts tokens over {num_devices} devices, and there are "
                f"{least}: ask for {least} devices at most, or {_WITHOUT}"
            )
        if unlike:
            return
        uneven = sorted({size for _, size in self._sizes.values() if size % num_devices})
        if uneven:
            fitting = ", ".join(str(-(-size // num_devices) * num_devices) for size in uneven)
            raise AnnotationError(
                f"the mesh axis 'sequence' cuts tokens evenly over {num_devices} devices, and "
                f"{' and '.join(map(str, uneven))} tokens do not divide: pad them to {fitting}, or "
                f"{_WITHOUT}"
            )

    # -- classes of dimensions -----------------------------------------------------------------

    def _join(self, places: list[Place], *, adds: bool = False) -> None:
        self._classes.join(places)
        self._joined.append((places, adds))

    def _find_sides(self) -> None:
        """Tell queries from keys in scores, masks and weights: softmax and values add over keys."""
        values = self._graph.values
        num = collections.Counter(
            v
            for v, known in enumerate(values)
            for d in range(len(known.shape))
            if self.is_token(v, d)
        )
        kept = [([(v, d) for v, d in places if num[v] > 1], adds) for places, adds in self._joined]
        for places, _ in kept:
            self._sides.join(places)
        for places, adds in kept:
            for v, d in places:
                side = self._sides.root((v, d))
                self._last[side] = d
                self._times_added[side] += adds

    def _same(self, one: Any, other: Any, shift: int = 0) -> None:
        """Join the dimensions of two names of one array, or of a stack (`one`) and its rows."""
        if isinstance(one, int) and isinstance(other, int):
            for d in range(len(self._graph.values[other].shape)):
                self._join([(one, d + shift), (other, d)])

    def _walk(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if not op.body:
                self._equation(op)
                continue
            num_consts, num_carry = scan_counts(op.eqn) if op.kind == "scan" else (0, 0)
            carried = range(num_consts, num_consts + num_carry)
            rows = int(op.kind == "scan")
            for i, (inside, outside) in enumerate(zip(op.body_inputs, op.inputs, strict=True)):
                self._same(outside, inside, rows * (i >= carried.stop))
                # What is carried depends on all that the loop reads from the second round on.
                self._depends[inside] = self._of(op.inputs if i in carried else [outside])
            self._walk(op.body)
            for i, (outside, inside) in enumerate(zip(op.outputs, op.body_outputs, strict=True)):
                self._same(outside, inside, rows * (i >= num_carry))
                if rows and i < num_carry:
                    self._same(op.body_inputs[num_consts + i], inside)
                self._depends[outside] = self._of([inside])

    def _of(self, values: Sequence[Any]) -> int:
        out = 0
        for v in values:
            out |= self._depends.get(v, 0) if isinstance(v, int) else 0
        return out

    def _equation(self, op: Op) -> None:
        self._depends.update(dict.fromkeys(op.outputs, self._of(op.inputs)))
        for factor in op.factors:
            places = [
                (v, d)
                for v, d in (
                    *zip(op.inputs, factor.operands, strict=True),
                    *zip(op.outputs, factor.results, strict=True),
                )
                if isinstance(v, int) and d is not None
            ]
            self._join(places, adds=factor.partial)
            if op.name in UNITS and op.name != "gather":
                self._of_weights.update(
                    (v, d) for v, d in places if self._depends.get(v, 0) == _PARAM
                )
