"""From a traced program to a `Graph`: every equation with its TaskGraph.

References:
    Whale, USENIX ATC 2022, section 3.1.2 (TaskGraphs) and 3.3 (the default strategy).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._core._errors import AnnotationError, LossError
from .._jax._jaxpr import ClosedJaxpr, Literal, inner_jaxpr, kind_of, scan_counts
from .._model._annotations import Scope, Strategy, scopes_of, written
from .._model._called_loss import own_key_message
from ._factors import UNITS, Patterns
from ._flops import equation_flops
from ._graph import Graph
from ._operations import Input, Op, Value, source_of
from ._task_graphs import make_task_graphs

_DEFAULT = Scope("replicate", None, -1)
_VIEWS = ("convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy")


class Tracer:
    """Reads a program into a `Graph`.

    Args:
        closed: The program.
        counts: How many of its arguments are parameters, other variables, keys and the batch.
        names: Paths of the parameters.
        default: Annotation of what no scope covers.
        patterns: Which dimensions can be cut together.
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
                differentiable=differentiable and _inexact(aval),
            )
        )
        return len(self._values) - 1

    def graph(self) -> Graph:
        """The graph.

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
                [_outer(key)[1] for key in keys], ops, values, groups[0], results, self._names
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
            nested=tuple(_outer(key)[0] for key in keys),
        )

    # -- reading the program -------------------------------------------------------------------

    def _add_consts(self, closed: ClosedJaxpr, env: dict[Any, Input]) -> None:
        for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            if jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key):
                raise LossError(own_key_message(None, "a random key"))
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
                    "in a way that hxla does not know: it is of a newer jax, or of a library's "
                    "own; call what it wraps without it"
                )
            if kind == "inlined":
                assert inner is not None
                inside = dict(zip(inner.jaxpr.invars, inputs, strict=True))
                self._add_consts(inner, inside)
                # Equations of a function that jax has traced before do not know who calls it.
                caller, self._caller = self._caller, eqn if source_of(eqn) else self._caller
                ops += self._walk(inner.jaxpr, inside, here, times)
                self._caller = caller
                outs = [self._read(inside, v) for v in inner.jaxpr.outvars]
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
        numbers = []
        flows = any(self._values[v].differentiable for v in inputs if isinstance(v, int))
        for i, (var, outer) in enumerate(zip(inner.jaxpr.invars, inputs, strict=True)):
            sliced = first_slice is not None and i >= first_slice
            # What starts as zeros is something else in the next iteration.
            carried = num_consts <= i < num_consts + num_carry and flows
            numbers.append(self._stand_in(var.aval, outer, sliced=sliced, flows=carried))
        inside: dict[Any, Input] = dict(zip(inner.jaxpr.invars, numbers, strict=True))
        start = len(self._consts)
        self._add_consts(inner, inside)
        own_consts = tuple(self._consts[start:])
        del self._consts[start:]
        length = eqn.params["length"] if kind == "scan" else 1
        body = self._walk(inner.jaxpr, inside, stack, times * length)
        results = tuple(self._read(inside, v) for v in inner.jaxpr.outvars)
        outputs = []
        for i, (var, value) in enumerate(zip(eqn.outvars, results, strict=True)):
            stacked = kind == "scan" and i >= num_carry
            outputs.append(self._stand_in(var.aval, value, stacked=stacked))
            env[var] = outputs[-1]
        return Op(
            eqn=eqn,
            caller=self._caller,
            kind=kind,
            inputs=inputs,
            outputs=tuple(outputs),
            body=body,
            body_inputs=tuple(numbers),
            body_outputs=results,
            body_consts=own_consts,
            task=-1 if task is None else task,
            stack=stack,
            times=times,
        )

    def _stand_in(
        self,
        aval: Any,
        of: Input,
        *,
        sliced: bool = False,
        stacked: bool = False,
        flows: bool = False,
    ) -> int:
        """The same array under another number: inside and outside a body."""
        if not isinstance(of, int):
            return self._new(aval, differentiable=flows)
        value = self._values[of]
        dim = value.batch_dim
        if dim is not None:
            dim += stacked - sliced
        number = self._new(
            aval,
            param=value.param,
            batch_dim=dim if dim is None or dim >= 0 else None,
            differentiable=flows or value.differentiable,
            task=self._task_of[of],
        )
        if of in self._closed_over:
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
            raise LossError(own_key_message(None, "the data of a random key"))
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
                "(copies of a split); leave one of them out, or close the outer scope first"
            )
        if len(scopes) == 2 and scopes[0].device_count is None:
            inner = written("split", scopes[1].device_count)
            raise AnnotationError(
                f"hxla.{inner} inside hxla.replicate() without a count: say how many copies "
                "of the split there are, hxla.replicate(2), or leave the outer scope out to get as "
                "many as the devices allow"
            )
        return self._tasks.setdefault(scopes, len(self._tasks))

    def _resolve(self, ops: tuple[Op, ...]) -> tuple[Op, ...]:
        """Operations before any annotated one join the TaskGraph that reads them first."""
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


def _inexact(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def _outer(key: tuple[Scope, ...]) -> tuple[int, Scope]:
    """Copies around a TaskGraph, and its own scope."""
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
