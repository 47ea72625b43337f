"""Seconds and residuals of each segment of a model's chain on one device.

The planner needs only the size of the residuals. They are estimated from the gradients of a
forward's equations: a deep model repeats few kinds of equations. Each kind is differentiated once
and its gradient repeated under new names, which takes a fraction of the time of differentiating the
whole program.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.timing import steady_seconds
from ..core.types import PyTree
from ..graph.graph import Graph, Op, bytes_of, params_of, shapes_of
from ..graph.interpreter import AS_THEY_ARE, Env, evaluate
from ..graph.segments import Segment, op_kind, run_segment, segment_kind, trained_params
from ..jax.cpu_dots import uncrossed
from ..jax.jaxpr import ClosedJaxpr, Literal, is_cheap, renamed, variables
from ..jax.min_cut import kept_between
from ..jax.ordered_adds import ordered
from ..model.functional import is_abstract, leaf_names
from ..model.plain_arrays import root_key
from ..plan.sharding import Sharded
from .products import moved_bytes, products_of
from .profile import LayerSize, LayerTime


@dataclasses.dataclass(frozen=True, eq=False)
class Variable:
    """An array of a composed program."""

    aval: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Composed:
    """A forward and its backward, with the attributes of a jaxpr that a minimum cut reads.

    Attributes:
        arguments: The forward's arguments, by value number.
        cotangents: The cotangents of results, by value number.
        gradients: The nonzero gradients of arguments.
    """

    constvars: tuple[Variable, ...]
    arguments: Mapping[int, Variable]
    cotangents: Mapping[int, Variable]
    eqns: tuple[Any, ...]
    results: tuple[Any, ...]
    gradients: tuple[Variable, ...]

    @property
    def invars(self) -> tuple[Variable, ...]:
        """Arguments of the forward, then cotangents."""
        return *self.arguments.values(), *self.cotangents.values()

    @property
    def outvars(self) -> tuple[Any, ...]:
        """Results of the forward, then gradients."""
        return *self.results, *self.gradients

    def kept(
        self,
        early_only: Iterable[int],
        repeats: Callable[[Any], bool] = is_cheap,
        *,
        is_last: bool = False,
    ) -> set[Variable]:
        """The residuals with the fewest bytes, see `kept_between`.

        Args:
            early_only: Arguments that the backward cannot read.
            repeats: Whether the backward may run an equation of the forward again.
            is_last: Whether the cotangents are constants, as the 1 of a loss.
        """
        early = [self.arguments[v] for v in early_only]
        late = () if is_last else self.cotangents.values()
        return kept_between(self, len(self.results), early, late, repeats)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gradient:
    """The forward and backward of one kind of equation.

    Attributes:
        consts: Variables that the program closes over.
        operands: Variables of the operands that are no literals.
        wanted: Indices of results with a cotangent, and the cotangents' variables.
        backward: The equations that depend on cotangents.
        flowing: Indices of operands with a nonzero gradient, and the gradients.
    """

    consts: tuple[Any, ...]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    forward: tuple[Any, ...]
    wanted: tuple[tuple[int, Any], ...]
    backward: tuple[Any, ...]
    flowing: tuple[tuple[int, Any], ...]

    @classmethod
    def of(cls, program: Any, floats: Sequence[int], wanted: Sequence[int]) -> "_Gradient":
        """Split a program of the operands and the cotangents into forward and backward."""
        num_operands = len(program.invars) - len(wanted)
        num_results = len(program.outvars) - len(floats)
        grads = program.invars[num_operands:]
        late, early, others = set(grads), list[Any](), list[Any]()
        for eqn in program.eqns:
            is_late = not late.isdisjoint(variables(eqn.invars))
            late.update(eqn.outvars if is_late else ())
            (others if is_late else early).append(eqn)
        makers = {v: eqn for eqn in program.eqns for v in eqn.outvars}
        flowing = zip(floats, program.outvars[num_results:], strict=True)
        return cls(
            consts=tuple(program.constvars),
            operands=tuple(program.invars[:num_operands]),
            results=tuple(program.outvars[:num_results]),
            forward=tuple(early),
            wanted=tuple(zip(wanted, grads, strict=True)),
            backward=tuple(others),
            flowing=tuple((i, v) for i, v in flowing if not _is_zero(v, makers)),
        )


class ResidualEstimator:
    """Composes programs of a graph's equations; each kind is differentiated once."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._known: dict[Any, _Gradient] = {}
        self._sums: dict[Any, Any] = {}

    def program(
        self,
        ops: Sequence[Op],
        arguments: Sequence[int],
        results: Sequence[int],
        cotangents_of: Sequence[int],
        wanted: Sequence[int],
    ) -> Composed:
        """The forward and backward of some operations.

        Args:
            results: Values that the forward returns.
            cotangents_of: Results whose cotangents are arguments of the backward.
            wanted: Arguments whose gradients the backward returns.
        """
        kinds = self._gradients(ops, wanted, cotangents_of)
        consts = self._variables(v for v, _ in self._graph.consts)
        read, grads = self._variables(arguments), self._variables(cotangents_of)
        cotangents, closed_over = {**grads}, [*consts.values()]
        names: dict[int, Any] = consts | read
        equations: list[Any] = []
        names_of_ops: list[dict[Any, Any]] = []  # from variables of each kind to new ones
        for op, kind in zip(ops, kinds, strict=True):
            operands = [names[v] for v in op.inputs if isinstance(v, int)]
            op_names = dict(zip(kind.operands, operands, strict=True))
            op_names |= {v: Variable(v.aval) for v in kind.consts}
            closed_over += [op_names[v] for v in kind.consts]
            equations += _renamed(kind.forward, op_names)
            op_results = [v if isinstance(v, Literal) else op_names[v] for v in kind.results]
            names.update(zip(op.outputs, op_results, strict=True))
            names_of_ops.append(op_names)
        for op, kind, op_names in zip(
            reversed(ops), reversed(kinds), reversed(names_of_ops), strict=True
        ):
            op_names |= {v: grads[op.outputs[i]] for i, v in kind.wanted}
            equations += _renamed(kind.backward, op_names)
            for i, v in kind.flowing:
                operand, total = op.inputs[i], op_names[v]
                if operand in grads:
                    total, eqn = self._sum(grads[operand], total)
                    equations.append(eqn)
                grads[operand] = total
        return Composed(
            constvars=tuple(closed_over),
            arguments=read,
            cotangents=cotangents,
            eqns=tuple(equations),
            results=tuple(names[v] for v in results),
            gradients=tuple(grads[v] for v in wanted if v in grads),
        )

    def _gradients(
        self, ops: Sequence[Op], wanted: Collection[int], cotangents_of: Collection[int]
    ) -> list[_Gradient]:
        """The gradient of each operation."""
        values = self._graph.values
        active = set(wanted)
        for op in ops:
            if not active.isdisjoint(v for v in op.inputs if isinstance(v, int)):
                active.update(v for v in op.outputs if values[v].differentiable)
        cotangents, gradients = set(cotangents_of), []
        for op in reversed(ops):
            back = [i for i, v in enumerate(op.outputs) if v in cotangents and v in active]
            floats = [i for i, v in enumerate(op.inputs) if isinstance(v, int) and v in active]
            kind = self._gradient(op, tuple(floats) if back else (), tuple(back))
            cotangents.update(op.inputs[i] for i, _ in kind.flowing)
            gradients.append(kind)
        return gradients[::-1]

    def _gradient(self, op: Op, floats: tuple[int, ...], wanted: tuple[int, ...]) -> _Gradient:
        key = op_kind(self._graph, op), floats, wanted
        if key not in self._known:
            self._known[key] = self._differentiate(op, floats, wanted)
        return self._known[key]

    def _differentiate(self, op: Op, floats: tuple[int, ...], wanted: tuple[int, ...]) -> _Gradient:
        def run(operands: Sequence[Any], grads: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            read = iter(operands)
            all_operands = [next(read) if isinstance(v, int) else v.val for v in op.inputs]

            def call(float_operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
                changed = dict(zip(floats, float_operands, strict=True))
                arrays = [changed.get(i, x) for i, x in enumerate(all_operands)]
                results = evaluate(op, arrays, AS_THEY_ARE)
                return [results[i] for i in wanted], results

            if not wanted:
                return call([])[1], []
            _, back, results = jax.vjp(call, [all_operands[i] for i in floats], has_aux=True)
            return results, *back(list(grads))

        shapes = shapes_of(self._graph, [v for v in op.inputs if isinstance(v, int)])
        cotangents_of = shapes_of(self._graph, [op.outputs[i] for i in wanted])
        program = jax.make_jaxpr(run)(shapes, cotangents_of).jaxpr
        return _Gradient.of(program, floats, wanted)

    def _variables(self, values: Iterable[int]) -> dict[int, Variable]:
        distinct = dict.fromkeys(values)
        return {
            v: Variable(x) for v, x in zip(distinct, shapes_of(self._graph, distinct), strict=True)
        }

    def _sum(self, one: Any, other: Any) -> tuple[Variable, Any]:
        """The sum of two gradients, and the equation that adds them."""
        aval = one.aval
        key = aval.shape, aval.dtype
        if key not in self._sums:
            like = jax.ShapeDtypeStruct(*key)
            [self._sums[key]] = jax.make_jaxpr(jnp.add)(like, like).jaxpr.eqns
        total = Variable(aval)
        return total, self._sums[key].replace(invars=[one, other], outvars=[total])


def _renamed(equations: Sequence[Any], names: dict[Any, Any]) -> list[Any]:
    """Equations with new variables; the variables of their results are added to `names`."""
    out = []
    for eqn in equations:
        names.update({v: Variable(v.aval) for v in eqn.outvars})
        out.append(renamed(eqn, names))
    return out


def _is_zero(gradient: Any, makers: Mapping[Any, Any]) -> bool:
    """Whether a gradient is a literal zero, or a broadcast of one."""
    if not isinstance(gradient, Literal):
        eqn = makers.get(gradient)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return False
        gradient = eqn.invars[0]
    return isinstance(gradient, Literal) and not gradient.val


def kept_bytes(
    graph: Graph, chain: Sequence[Segment], trained: Collection[int] | None = None
) -> tuple[int, ...]:
    """For each segment the fewest bytes of residuals that its backward needs.

    A stage of a pipeline keeps a minimum cut between its forward and backward, in which
    element-wise work may be recomputed. The cuts of consecutive segments together are a cut of
    their stage, so their sum is an upper bound: an array in two cuts counts twice. Parameters,
    batch and constants do not count.

    Args:
        trained: Indices of the parameters that have a gradient; None: all.
    """
    estimator = ResidualEstimator(graph)
    known: dict[Any, int] = {}
    out = []
    for segment in chain:
        key = segment_kind(graph, segment, trained)
        if key not in known:
            known[key] = _residual_bytes(estimator, graph, segment, trained)
        out.append(known[key])
    return tuple(out)


def _residual_bytes(
    estimator: ResidualEstimator, graph: Graph, segment: Segment, trained: Collection[int] | None
) -> int:
    values = graph.values
    params = [graph.param_values[p] for p in segment.params]
    with_gradient = [params[i] for i in trained_params(graph, segment, trained)]
    with_gradient += [v for v in segment.inputs if values[v].differentiable]
    cotangents = [v for v in segment.outputs if values[v].differentiable]
    arguments = (*params, *segment.inputs, *segment.given)
    program = estimator.program(segment.ops, arguments, segment.outputs, cotangents, with_gradient)
    return sum(bytes_of(v.aval.shape, v.aval.dtype) for v in program.kept(segment.inputs))


def model_name(params: PyTree) -> str:
    """A fingerprint of a model's parameter names and shapes."""
    named = zip(leaf_names(params), jax.tree.leaves(params), strict=True)
    text = "\n".join(f"{name} {x.shape}" for name, x in named)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def layer_sizes(
    graph: Graph,
    chain: Sequence[Segment],
    cut: Sharded,
    *,
    kept: Sequence[int] | None = None,
    trained: Collection[int] | None = None,
) -> tuple[LayerSize, ...]:
    """The size of each segment on one device of a tensor-parallel group.

    The residuals are taken to be sharded like all values that the segment makes together.

    Args:
        cut: The sharding over the group.
        kept: For each segment the bytes of its residuals; None: by `kept_bytes`.
        trained: Indices of the parameters that have a gradient; None: all.
    """

    def device_bytes(values: Iterable[int]) -> int:
        return sum(graph.values[v].num_bytes // cut.num_parts(v) for v in values)

    num = math.prod(axis.num_devices for axis in cut.axes.values())
    kept = kept_bytes(graph, chain, trained) if kept is None else kept
    made = [s.stashed(graph) for s in chain]
    whole = [sum(graph.values[v].num_bytes for v in values) for values in made]
    shares = [device_bytes(values) for values in made]
    return tuple(
        LayerSize(
            parameter_bytes=device_bytes(graph.param_values[p] for p in s.params),
            output_bytes=s.output_bytes,
            stash_bytes=kept[i] * (shares[i] / whole[i] if whole[i] else 1.0),
            flops=s.flops / num,
            arithmetic=graph.arithmetic,
            products=products_of(graph, s.ops, cut),
            # Without products and reductions, all values that it makes move through memory.
            moved_bytes=moved_bytes(graph, s.ops, cut) or shares[i],
        )
        for i, s in enumerate(chain)
    )


def measure(
    graph: Graph,
    chain: Sequence[Segment],
    *,
    params: PyTree,
    aux: PyTree,
    batch: PyTree,
    device: jax.Device,
    options: dict[str, Any],
    in_order: bool = False,
    done: Callable[[int], None] = lambda _: None,
) -> tuple[LayerTime, ...]:
    """Time every segment's forward, and its forward with backward, on real data.

    A segment's backward takes the difference. Parameters are on the device one segment at a time;
    where only shapes are known, they are random. Segments that are one program, as the iterations
    of a scan over layers are, are compiled and timed once.

    Args:
        graph: Traced for a microbatch like `batch`.
        params: Arrays or shapes.
        in_order: Whether scatters have a fixed order of additions.
        done: Called with the number of segments measured so far.

    Returns:
        One time per segment, without the optimizer's update.
    """
    put = functools.partial(jax.device_put, device=device)
    leaves = jax.tree.leaves(params)
    others = [_stand_in(x) for x in jax.tree.leaves(aux)]
    outer: Env = dict(zip(graph.aux_values, put(others), strict=True))
    outer[graph.key_value] = put(root_key(0))
    outer |= dict(zip(graph.batch_values, put(jax.tree.leaves(batch)), strict=True))
    crossing: Env = {}
    times = []
    known: dict[Any, tuple[Any, LayerTime]] = {}
    for i, segment in enumerate(chain):
        read = put([_read_rows(graph, leaves, p) for p in segment.params])
        inputs = [crossing[v] for v in segment.inputs]
        rest = [outer[v] for v in segment.given]
        run = _by_place(graph, segment)
        key = len(read), len(inputs), _text(jax.make_jaxpr(run)(read, inputs, rest))
        if key not in known:
            with_backward = _with_backward(run)
            if in_order:
                run, with_backward = ordered(run), ordered(with_backward)
            forward = jax.jit(run, compiler_options=options)
            jax.block_until_ready(forward(read, inputs, rest))
            forward_seconds = steady_seconds(functools.partial(forward, read, inputs, rest))
            if device.platform == "cpu":
                with_backward = uncrossed(with_backward)
            both = jax.jit(with_backward, compiler_options=options)
            both_seconds = steady_seconds(functools.partial(both, read, inputs, rest))
            backward_seconds = max(0.0, both_seconds - forward_seconds)
            time = LayerTime(forward=forward_seconds, backward=backward_seconds)
            known[key] = forward, time
        forward, time = known[key]
        crossing |= dict(zip(segment.outputs, forward(read, inputs, rest), strict=True))
        times.append(time)
        done(i + 1)
    return tuple(times)


def _by_place(graph: Graph, segment: Segment) -> Callable[..., list[Any]]:
    """A segment as a function of lists of arrays."""
    run = run_segment(graph, segment)

    def by_place(params: Sequence[Any], inputs: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        crossing = dict(zip(segment.inputs, inputs, strict=True))
        return run(params, crossing, dict(zip(segment.given, rest, strict=True)))

    return by_place


def _text(closed: ClosedJaxpr) -> str:
    """Text that is equal for segments with the same program and constants."""
    consts = [f"{np.shape(c)}{np.asarray(c).tobytes().hex()}" for c in closed.consts]
    return "\n".join((str(closed.jaxpr), *consts))


def _read_rows(graph: Graph, params: Sequence[Any], entry: int) -> Any:
    """A parameter, or the rows that a segment reads from it."""
    x, value = params[params_of(graph)[entry]], graph.values[graph.param_values[entry]]
    if value.rows is None:
        return _stand_in(x)
    if is_abstract(x):
        return _stand_in(jax.ShapeDtypeStruct(value.shape, x.dtype))
    dim, start, stop = value.rows
    return jax.lax.slice_in_dim(x, start, stop, axis=dim)


def _stand_in(x: Any) -> Any:
    if not is_abstract(x):
        return x
    # Neither zeros nor large, so that later values stay in the usual range.
    return np.random.default_rng(0).normal(0, 0.02, x.shape).astype(x.dtype)


def _with_backward(run: Callable[..., list[Any]]) -> Callable[..., Any]:
    def both(params: Sequence[Any], inputs: Sequence[Any], rest: Sequence[Any]) -> Any:
        smooth = {i: x for i, x in enumerate(inputs) if _is_float(x)}

        def outputs(params: Sequence[Any], smooth: dict[int, Any]) -> list[Any]:
            made = run(params, [smooth.get(i, x) for i, x in enumerate(inputs)], rest)
            return [x for x in made if _is_float(x)]

        made, back = jax.vjp(outputs, list(params), smooth)
        return made, back([jnp.ones_like(x) for x in made])

    return both


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))
