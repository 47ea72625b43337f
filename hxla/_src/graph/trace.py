"""From a loss to a `Graph`: one trace, every equation with its TaskGraph.

Heads too wide for cuDNN's fused attention are refused.

References:
    Whale, USENIX ATC 2022, section 3.1.2 (TaskGraphs) and 3.3 (the default strategy).
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.errors import AnnotationError, LossError
from ..core.types import PyTree
from ..jax.digest import digests, joined
from ..jax.fused_attention import PRIMITIVES, attention_shape
from ..jax.jaxpr import (
    ClosedJaxpr,
    Literal,
    inner_jaxpr,
    kind_of,
    naming_axes,
    scan_counts,
    source_of,
    sources,
    with_axes,
    with_results,
)
from ..jax.tracing import brief_absence, placement_calls
from ..model.annotations import Scope, Strategy, scopes_of, written
from ..model.functional import Functional, functional, leaf_names
from ..model.loss import MetricColumns, as_sums
from ..model.loss_call import Loss, closed_over_key_message, placement_message
from ..model.loss_scale import scaled_loss
from ..model.plain_arrays import root_key
from ..model.variables import CallWrites, refuse_writes
from .experts import with_experts
from .factors import PATTERNS, UNITS, Patterns
from .graph import Graph, Input, Op, Value, equation_flops, make_task_graphs
from .mixing import by_dtype, mixing


def _attentions(ops: Sequence[Op], where: str = "") -> Iterator[tuple[Op, str]]:
    """The operations in cuDNN's attention, each with its source line or that of its caller."""
    for op in ops:
        here = source_of(op.eqn) or where
        if op.name in PRIMITIVES:
            yield op, here
        yield from _attentions(op.body, here)


def _head_dim(op: Op) -> int:
    of = attention_shape([v.aval.shape for v in op.eqn.invars], op.eqn.params)
    return max(of.head_dim, of.value_dim)


def largest_head(graph: Graph) -> int | None:
    """The size of the largest head of cuDNN's attention in a loss; None: it calls none."""
    return max((_head_dim(op) for op, _ in _attentions(graph.ops)), default=None)


def refuse_wide_attention(graph: Graph) -> None:
    """Refuse cuDNN's attention in float32.

    Raises:
        LossError: If it would compute in float32, with the source line and the remedy.
    """
    for op, where in _attentions(graph.ops):
        if op.eqn.invars[0].aval.dtype == jnp.float32:
            raise LossError(
                f"the loss calls cuDNN's attention in float32 ({where}), which has bfloat16 and "
                "float16 only: pass precision='bf16' or 'fp16', cast query, key and value in the "
                "model, or leave out implementation='cudnn'"
            )


_DEFAULT = Scope("replicate", None, -1)
_VIEWS = ("convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy")


class Tracer:
    """Reads a program into a `Graph`.

    Args:
        counts: Numbers of arguments that are parameters, other variables, keys and batch arrays.
        default: Annotation of equations outside all scopes.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        counts: Sequence[int],
        names: tuple[str, ...],
        default: Strategy | None,
        patterns: Patterns,
    ):
        self._default = default
        self._values: list[Value] = []
        self._task_of: list[int | None] = []  # of each value
        self._closed = closed
        self._counts = counts
        self._names = names
        self._patterns = patterns
        self._tasks: dict[tuple[Scope, ...], int] = {}
        self._consts: list[tuple[int, Any]] = []
        self._closed_over: set[int] = set()  # values that are constants
        self._caller: Any = None

    def _new(
        self,
        aval: Any,
        *,
        param: int | None = None,
        batch_dim: int | None = None,
        differentiable: bool = False,
        task: int | None = None,
    ) -> int:
        self._task_of.append(task)
        self._values.append(
            Value(
                shape=tuple(aval.shape),
                dtype=aval.dtype,
                param=param,
                batch_dim=batch_dim,
                differentiable=differentiable and _is_inexact(aval),
            )
        )
        return len(self._values) - 1

    def graph(self) -> Graph:
        """Read the program.

        Raises:
            AnnotationError: If scopes overlap, or an equation runs programs in a way hxla does not
                know.
            LossError: If the loss closes over a random key.
        """
        jaxpr = self._closed.jaxpr
        env: dict[Any, Input] = {}
        groups: list[list[int]] = []
        variables = iter(jaxpr.invars)
        for kind, count in enumerate(self._counts):
            group = []
            for i in range(count):
                var = next(variables)
                number = self._new(
                    var.aval,
                    param=i if kind == 0 else None,
                    batch_dim=0 if kind == 3 else None,
                    differentiable=kind == 0,
                )
                env[var] = number
                group.append(number)
            groups.append(group)
        self._add_consts(self._closed, env)
        ops = self._walk(jaxpr, env, "", 1)
        results = tuple(self._read(env, v) for v in jaxpr.outvars)
        ops = self._resolve(ops)
        values = tuple(self._values)
        keys = list(self._tasks) or [()]
        return Graph(
            task_graphs=make_task_graphs(
                [_replicas_and_scope(key)[1] for key in keys],
                ops,
                values,
                groups[0],
                results,
                self._names,
            ),
            param_names=self._names,
            param_shapes=tuple(values[v].shape for v in groups[0]),
            program=self._closed,
            ops=ops,
            values=values,
            param_values=tuple(groups[0]),
            aux_values=tuple(groups[1]),
            key_value=groups[2][0],
            batch_values=tuple(groups[3]),
            result_values=results,
            consts=tuple(self._consts),
            nested=tuple(_replicas_and_scope(key)[0] for key in keys),
        )

    # -- reading the program -------------------------------------------------------------------

    def _add_consts(self, closed: ClosedJaxpr, env: dict[Any, Input]) -> None:
        for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            if jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key):
                raise LossError(closed_over_key_message(None, "a random key"))
            number = self._new(var.aval)
            self._closed_over.add(number)
            env[var] = number
            self._consts.append((number, const))

    def _read(self, env: dict[Any, Input], var: Any) -> Input:
        return var if isinstance(var, Literal) else env[var]

    def _walk(self, jaxpr: Any, env: dict[Any, Input], stack: str, times: int) -> tuple[Op, ...]:
        ops: list[Op] = []
        for eqn in jaxpr.eqns:
            inputs = tuple(self._read(env, v) for v in eqn.invars)
            here = "/".join(filter(None, (stack, str(eqn.source_info.name_stack))))
            kind, inner = kind_of(eqn), inner_jaxpr(eqn)
            if kind is None:
                raise AnnotationError(
                    f"the loss uses {eqn.primitive.name!r} ({source_of(eqn)}), which runs programs "
                    "in a way that hxla does not know: it comes from a newer jax or from another "
                    "library; call the function that it wraps directly"
                )
            if kind == "inlined":
                assert inner is not None
                inner_env = dict(zip(inner.jaxpr.invars, inputs, strict=True))
                self._add_consts(inner, inner_env)
                # Equations from jax's cache of traced functions do not record their caller.
                caller, self._caller = self._caller, eqn if source_of(eqn) else self._caller
                ops += self._walk(inner.jaxpr, inner_env, here, times)
                self._caller = caller
                outs = [self._read(inner_env, v) for v in inner.jaxpr.outvars]
                for var, value in zip(eqn.outvars, outs, strict=True):
                    env[var] = value
                continue
            task = self._task(here)
            if kind == "leaf":
                ops.append(self._leaf(eqn, inputs, env, here, times, task))
            else:
                assert inner is not None
                ops.append(self._with_body(eqn, kind, inner, inputs, env, here, times, task))
        return tuple(ops)

    def _with_body(
        self,
        eqn: Any,
        kind: str,
        inner: ClosedJaxpr,
        inputs: tuple[Input, ...],
        env: dict[Any, Input],
        stack: str,
        times: int,
        task: int | None,
    ) -> Op:
        num_consts, num_carry = scan_counts(eqn) if kind == "scan" else (0, 0)
        first_slice = num_consts + num_carry if kind == "scan" else None
        body_inputs = []
        flows = any(self._values[v].differentiable for v in inputs if isinstance(v, int))
        for i, (var, outer) in enumerate(zip(inner.jaxpr.invars, inputs, strict=True)):
            sliced = first_slice is not None and i >= first_slice
            # A carry of zeros depends on parameters from the second iteration on.
            carried = num_consts <= i < num_consts + num_carry and flows
            body_inputs.append(self._renumber(var.aval, outer, sliced=sliced, flows=carried))
        inner_env: dict[Any, Input] = dict(zip(inner.jaxpr.invars, body_inputs, strict=True))
        start = len(self._consts)
        self._add_consts(inner, inner_env)
        body_consts = tuple(self._consts[start:])
        del self._consts[start:]
        length = eqn.params["length"] if kind == "scan" else 1
        body = self._walk(inner.jaxpr, inner_env, stack, times * length)
        body_outputs = tuple(self._read(inner_env, v) for v in inner.jaxpr.outvars)
        outputs = []
        for i, (var, value) in enumerate(zip(eqn.outvars, body_outputs, strict=True)):
            stacked = kind == "scan" and i >= num_carry
            outputs.append(self._renumber(var.aval, value, stacked=stacked))
            env[var] = outputs[-1]
        return Op(
            eqn=eqn,
            caller=self._caller,
            kind=kind,
            inputs=inputs,
            outputs=tuple(outputs),
            body=body,
            body_inputs=tuple(body_inputs),
            body_outputs=body_outputs,
            body_consts=body_consts,
            task=-1 if task is None else task,
            stack=stack,
            times=times,
        )

    def _renumber(
        self,
        aval: Any,
        original: Input,
        *,
        sliced: bool = False,
        stacked: bool = False,
        flows: bool = False,
    ) -> int:
        """Number an array again: it has one value outside a body and one inside."""
        if not isinstance(original, int):
            return self._new(aval, differentiable=flows)
        value = self._values[original]
        dim = value.batch_dim
        if dim is not None:
            dim += stacked - sliced
        number = self._new(
            aval,
            param=value.param,
            batch_dim=dim if dim is None or dim >= 0 else None,
            differentiable=flows or value.differentiable,
            task=self._task_of[original],
        )
        if original in self._closed_over:
            self._closed_over.add(number)
        return number

    def _leaf(
        self,
        eqn: Any,
        inputs: tuple[Input, ...],
        env: dict[Any, Input],
        stack: str,
        times: int,
        task: int | None,
    ) -> Op:
        numbers = [v for v in inputs if isinstance(v, int)]
        if eqn.primitive.name == "random_wrap" and self._closed_over.issuperset(numbers):
            raise LossError(closed_over_key_message(None, "the data of a random key"))
        operands = [self._values[v] for v in numbers]
        if (
            task is None
            and eqn.primitive.name in UNITS
            and any(x.param is not None for x in operands)
        ):
            task = self._tasks.setdefault((_DEFAULT,), len(self._tasks))
        elif task is None:
            known = [task for v in numbers if (task := self._task_of[v]) is not None]
            task = known[-1] if known else None
        in_shapes = [tuple(v.aval.shape) for v in eqn.invars]
        out_shapes = [tuple(v.aval.shape) for v in eqn.outvars]
        factors = self._patterns.factors(eqn.primitive.name, in_shapes, out_shapes, eqn.params)
        view = eqn.primitive.name in _VIEWS and len(operands) == 1
        stops = eqn.primitive.name == "stop_gradient"
        outputs = []
        for i, var in enumerate(eqn.outvars):
            number = self._new(
                var.aval,
                param=operands[0].param if view else None,
                batch_dim=_batch_dim(factors, inputs, i, self._values),
                differentiable=not stops and any(x.differentiable for x in operands),
                task=task,
            )
            outputs.append(number)
            env[var] = number
        return Op(
            eqn=eqn,
            caller=self._caller,
            kind="leaf",
            inputs=inputs,
            outputs=tuple(outputs),
            task=-1 if task is None else task,
            stack=stack,
            times=times,
            flops=equation_flops(eqn) * times,
            factors=tuple(factors),
        )

    # -- TaskGraphs ----------------------------------------------------------------------------

    def _task(self, stack: str) -> int | None:
        scopes = tuple(scopes_of(stack))
        if not scopes:
            if self._default is None:
                return None
            scopes = (Scope(self._default.kind, self._default.device_count, -1),)
        if len(scopes) > 2 or (
            len(scopes) == 2 and (scopes[0].kind, scopes[1].kind) != ("replicate", "split")
        ):
            shown = " inside ".join(
                f"hxla.{written(s.kind, s.device_count)}" for s in reversed(scopes)
            )
            where = stack.split("hxla.")[0].strip("/") or "the loss"
            raise AnnotationError(
                f"{shown}, in {where}: scopes do not nest, except a split inside one replicate "
                "(replicas of a split); leave one of them out, or close the outer scope first"
            )
        if len(scopes) == 2 and scopes[0].device_count is None:
            inner = written("split", scopes[1].device_count)
            raise AnnotationError(
                f"hxla.{inner} inside hxla.replicate() without a count: say how many replicas "
                "of the split there are, hxla.replicate(2), or leave the outer scope out to get as "
                "many as the devices allow"
            )
        return self._tasks.setdefault(scopes, len(self._tasks))

    def _resolve(self, ops: tuple[Op, ...]) -> tuple[Op, ...]:
        """Assign operations without a TaskGraph to the first TaskGraph that reads them."""
        reader: dict[int, int] = {}

        def visit(ops: tuple[Op, ...]) -> tuple[Op, ...]:
            out = []
            for op in reversed(ops):
                body = visit(op.body) if op.body else ()
                task = op.task
                if task < 0 and body:
                    task = body[-1].task
                if task < 0:
                    task = min((reader[v] for v in op.outputs if v in reader), default=0)
                for v in op.inputs:
                    if isinstance(v, int):
                        reader[v] = min(task, reader.get(v, task))
                for v, stand_in in zip(op.inputs, op.body_inputs, strict=False):
                    if isinstance(v, int) and stand_in in reader:
                        reader[v] = min(reader[stand_in], reader.get(v, task))
                out.append(dataclasses.replace(op, task=task, body=body))
            return tuple(out[::-1])

        return visit(ops)


def _is_inexact(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def _replicas_and_scope(key: tuple[Scope, ...]) -> tuple[int, Scope]:
    """The number of replicas around a TaskGraph, and its innermost scope."""
    if not key:
        return 1, _DEFAULT
    if len(key) == 2:
        assert key[0].device_count is not None
        return key[0].device_count, key[1]
    return 1, key[0]


def _batch_dim(
    factors: Sequence[Any], inputs: tuple[Input, ...], output: int, values: Sequence[Value]
) -> int | None:
    for factor in factors:
        for v, dim in zip(inputs, factor.operands, strict=True):
            if isinstance(v, int) and dim is not None and values[v].batch_dim == dim:
                return factor.results[output]
    return None


def trace(
    model: Any,
    loss: Loss,
    batch: PyTree,
    *,
    variables: PyTree | None = None,
    seed: int = 0,
    default: Strategy | None = None,
    patterns: Patterns = PATTERNS,
) -> Graph:
    """Trace a loss and group its equations into TaskGraphs.

    Nothing is computed: arrays may be `jax.ShapeDtypeStruct`, and an NNX model may come from
    `nnx.eval_shape`, so a model can be traced at a size that no device here could hold.

    Args:
        model: An `nnx.Module` or an unbound `flax.linen.Module`.
        loss: The loss `loss(model, batch)`, as for `Job`.
        batch: One microbatch, arrays or shapes with examples in the leading dimension.
        variables: The variables of a Linen module, arrays or shapes; None: those of its
            initialisation.
        seed: The seed of that initialisation.
        default: The annotation, `hxla.replicate(...)` or `hxla.split(...)`, of equations outside
            all scopes. None: equations that apply parameters are replicated over all devices, and
            all others join the TaskGraph that made their inputs.
        patterns: The ways in which equations can be cut; add your own with
            `hxla.PATTERNS.with_pattern`.

    Returns:
        The graph; `print` shows its TaskGraphs.

    Raises:
        AnnotationError: If scopes overlap, `default` is no annotation, or an equation runs programs
            in a way hxla does not know.
        ConfigError: If `model` is no Flax module, or the loss cannot be called as `Job` does.
        LossError: If the loss returns a value that `Job` does not take, depends on no parameter, or
            closes over a random key.

    Example:
        >>> import hxla, jax
        >>> from flax import nnx
        >>> model = nnx.eval_shape(lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0)))
        >>> batch = {"x": jax.ShapeDtypeStruct((16, 1024), "float32")}
        >>> graph = hxla.trace(model, lambda model, batch: model(batch["x"]).mean(), batch)
        >>> graph.task_graphs[0].param_bytes
        16793600

    References:
        Jia et al., "Whale", USENIX ATC 2022, section 3.1.2 (TaskGraphs).
    """
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), batch)
    flat = functional(model, loss, loss, variables=variables, seed=seed, example=example)
    return trace_functional(flat, example, default=default, patterns=patterns)


@brief_absence()
def trace_functional(
    model: Functional,
    batch: PyTree,
    *,
    default: Strategy | None = None,
    patterns: Patterns = PATTERNS,
) -> Graph:
    """`trace` for a `Functional`.

    Raises:
        LossError: If the loss changes which variables the model has, or returns a value of no
            documented form.
    """
    num_examples = jax.tree.leaves(batch)[0].shape[0]
    metrics: list[MetricColumns] = []
    num_losses = [1]
    axes: list[str] = []
    written: list[str] = []

    def run(params: PyTree, aux: PyTree, key: jax.Array, batch: PyTree) -> Any:
        out, new_aux = model.train(params, aux, key, batch)
        written[:] = []
        before_after: list[Any] = []
        if isinstance(out, CallWrites):
            written[:], before_after, out = out.names, [*out.before, *out.after], out.out
        sums = as_sums(out, num_examples)
        metrics[:], num_losses[:] = sums.metrics, [sums.num_losses]
        _check_aux(aux, new_aux)
        return scaled_loss(sums.loss, sums.num_losses, aux), sums.row, new_aux, before_after

    def checked(closed: ClosedJaxpr) -> ClosedJaxpr:
        num = len(written)
        param_sources = sources(closed)[len(closed.jaxpr.outvars) - 2 * num :]
        pairs = zip(written, param_sources[:num], param_sources[num:], strict=True)
        refuse_writes(*(f"the parameter {name}" for name, a, b in pairs if a is None or a is not b))
        return with_results(closed, len(closed.jaxpr.outvars) - 2 * num)

    graph = naming_axes(
        lambda: trace_sums(
            with_axes(run, axes),
            model.params,
            model.aux,
            batch,
            logical=model.logical,
            default=default,
            patterns=patterns,
            checked=checked,
        ),
        axes,
    )
    _check_depends(graph)
    refuse_wide_attention(graph)
    mixes, normalizes = mixing(graph)
    return dataclasses.replace(
        with_experts(graph),
        metrics=tuple(metrics),
        num_losses=num_losses[0],
        bound_axes=tuple(axes),
        mixes=mixes,
        normalizes=normalizes,
    )


def loss_digest(graph: Graph) -> str:
    """A digest of a traced loss: its sums and the new values of variables, without metrics.

    Args:
        graph: A result of `trace_functional`.
    """
    jaxpr = graph.program.jaxpr
    loss, sums, *aux = jaxpr.outvars
    made_of = {v: eqn.invars for eqn in jaxpr.eqns for v in eqn.outvars}
    if sums.aval.shape != (2,) and made_of[sums][0].aval.shape == (2,):
        sums = made_of[sums][0]  # before metrics are concatenated to it
    return joined([loss, sums, *aux], digests(graph.program))


def _check_aux(before: PyTree, after: PyTree) -> None:
    if str(jax.tree.structure(before)) == str(jax.tree.structure(after)):
        return
    old, new = leaf_names(before), leaf_names(after)
    added, removed = [sorted(set(a) - set(b)) for a, b in ((new, old), (old, new))]
    lines = [
        f"  {what} {name}"
        for what, names in (("new:", added), ("gone:", removed))
        for name in names
    ]
    remedy = "create every variable when the model is made"
    if isinstance(after, nnx.State):
        remedy += "; what is sown for the loss to read is of a type derived from nnx.Intermediate"
    raise LossError(
        "\n".join(("the loss changed the structure of the model's variables:", *lines, remedy))
    )


def _check_depends(graph: Graph) -> None:
    loss = graph.result_values[0]
    if not isinstance(loss, int) or not graph.values[loss].differentiable:
        raise LossError(
            "the loss does not depend on any parameter of the model that it is given, so nothing "
            "would be trained: call the model that is its first argument, not another model from "
            "outside, and use no result computed before the loss"
        )


def _check_placement(closed: ClosedJaxpr) -> None:
    for name, equations in placement_calls(closed.jaxpr):
        where = next(filter(None, map(source_of, reversed(equations))), "")
        raise LossError(placement_message(name, where))


def trace_sums(
    run: Callable[..., Any],
    params: PyTree,
    aux: PyTree,
    batch: PyTree,
    *,
    logical: Sequence[Sequence[str | None] | None] | None = None,
    default: Strategy | None = None,
    patterns: Patterns = PATTERNS,
    checked: Callable[[ClosedJaxpr], ClosedJaxpr] = lambda closed: closed,
) -> Graph:
    """Trace `run(params, aux, key, batch)`, whose first result is differentiated.

    Args:
        params: Arrays or shapes, the arguments of the gradient.
        batch: Arrays or shapes with examples in the leading dimension.
        logical: For each parameter the logical axes of its dimensions, or None.
        checked: Checks the program and removes results that only the check needs.
    """
    if default is not None and not isinstance(default, Strategy):
        raise AnnotationError(
            f"default={default!r}: pass hxla.replicate(...), hxla.split(...) or None"
        )
    key = jax.eval_shape(root_key, 0)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, aux, key, batch)
    )
    closed = checked(jax.make_jaxpr(run)(*shapes))
    _check_placement(closed)
    counts = [len(jax.tree.leaves(tree)) for tree in shapes]
    graph = Tracer(closed, counts, leaf_names(params), default, patterns).graph()
    return dataclasses.replace(graph, param_logical=logical, merges=by_dtype(graph))
