"""Residuals of a forward, estimated from the gradients of its equations.

The planner needs only the size of the residuals. A deep model repeats few kinds of equations. Each
kind is differentiated once and its gradient repeated under new names, which takes a fraction of the
time of differentiating the whole program.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..jax.jaxpr import Literal, is_cheap, renamed, variables
from ..jax.min_cut import kept_between
from .graph import Graph, Op, shapes_of
from .interpreter import AS_THEY_ARE, evaluate
from .segments import op_kind


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
