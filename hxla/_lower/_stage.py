"""What one part of a pipeline computes for one microbatch: forward, backward, weight gradient.

Everything is a pure function of arrays; buffers, ticks and permutes are the pipeline's business.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._evaluate import Env, Placement
from .._graph import Graph
from .._halves import Halves, halve
from .._parts import Part, has_gradient, run_part
from .._uncross import uncrossed
from ._words import Words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crossing:
    """The arrays of one boundary.

    Attributes:
        values: Their numbers.
        words: How they are packed.
        floats: Places of those whose gradient comes back.
        float_words: How the gradients are packed.
    """

    values: tuple[int, ...]
    words: Words
    floats: tuple[int, ...]
    float_words: Words


def crossing(graph: Graph, values: Sequence[int]) -> Crossing:
    """Of the values that cross a boundary."""
    shapes = [jax.ShapeDtypeStruct(graph.values[v].shape, graph.values[v].dtype) for v in values]
    floats = tuple(i for i, v in enumerate(values) if has_gradient(graph, v))
    return Crossing(
        values=tuple(values),
        words=Words.like(shapes),
        floats=floats,
        float_words=Words.like([shapes[i] for i in floats]),
    )


class StagePart:
    """One part, ready to be traced into a program.

    Args:
        graph: Traced.
        part: Of the chain.
        placement: Where arrays lie on a stage's devices; None: it has one.
        on_cpu: Whether dots are written as a CPU likes them.
    """

    def __init__(
        self, graph: Graph, part: Part, placement: Placement | None = None, *, on_cpu: bool = False
    ):
        self.part = part
        self._on_cpu = on_cpu
        self._graph = graph
        self.params = part.segment.params
        self.above = crossing(graph, part.inputs)
        self.below = crossing(graph, part.outputs)
        self._run = run_part(graph, part, placement)
        self._residual_tree: Any = None
        self._kept: list[tuple[str, int]] = []
        self._halves: Halves | None = None
        self.residuals: list[jax.ShapeDtypeStruct] = []
        self.late: list[jax.ShapeDtypeStruct] = []

    def _function(
        self, inputs: Sequence[Any], given: Env
    ) -> Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]:
        """`(params, floating inputs) -> (floating outputs or the loss, all outputs)`."""

        def run(params: Sequence[Any], floats: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            all_inputs = list(inputs)
            for i, x in zip(self.above.floats, floats, strict=True):
                all_inputs[i] = x
            made = self._run(params, all_inputs, given)
            if self.part.is_last:
                return [made[0]], made
            return [made[i] for i in self.below.floats], made

        return run

    def forward(self, params: Sequence[Any], inputs: Sequence[Any], given: Env) -> list[Any]:
        """What crosses to the next part, of the last part the program's results."""
        _, made = self._function(inputs, given)(params, [inputs[i] for i in self.above.floats])
        return made

    def forward_and_residuals(
        self, params: Sequence[Any], inputs: Sequence[Any], given: Env
    ) -> tuple[list[Any], list[Any]]:
        """`forward`, and what the backward needs besides parameters and what is given.

        The residuals that are parameters, inputs of the whole program or constants are left out:
        the backward has them.
        """
        floats = [inputs[i] for i in self.above.floats]
        _, vjp, made = jax.vjp(self._function(inputs, given), list(params), floats, has_aux=True)
        leaves, self._residual_tree = jax.tree.flatten(vjp)
        known = {id(x): ("param", i) for i, x in enumerate(params)}
        known |= {id(x): ("given", v) for v, x in given.items()}
        self._kept = []
        saved: list[Any] = []
        for x in leaves:
            where = known.get(id(x))
            if where is None:
                where = ("saved", len(saved))
                saved.append(x)
            self._kept.append(where)
        self.residuals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved]
        return made, saved

    def backward_from_residuals(
        self, params: Sequence[Any], saved: Sequence[Any], given: Env, grads: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of the parameters and of the floating inputs."""
        sources: dict[str, Any] = {"param": params, "saved": saved, "given": given}
        vjp = jax.tree.unflatten(self._residual_tree, [sources[k][i] for k, i in self._kept])
        return self._pulled_back(vjp, grads)

    def backward(
        self, params: Sequence[Any], inputs: Sequence[Any], given: Env, grads: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The forward again: gradients of parameters and floating inputs, what `forward` gives."""
        floats = [inputs[i] for i in self.above.floats]
        _, vjp, made = jax.vjp(self._function(inputs, given), list(params), floats, has_aux=True)
        return *self._pulled_back(vjp, grads), made

    def input_grads(
        self, params: Sequence[Any], saved: Sequence[Any], given: Env, grads: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of the floating inputs, and what `weight_grads` needs besides."""
        order = tuple(given)

        def run(params: Any, saved: Any, values: Any, grads: Any) -> Any:
            again = dict(zip(order, values, strict=True))
            d_params, d_floats = self.backward_from_residuals(params, saved, again, grads)
            return d_floats, d_params

        arguments = (list(params), list(saved), list(given.values()), list(grads))
        self._halves = halve(jax.make_jaxpr(run)(*arguments), len(self.above.floats))
        d_floats, kept = self._halves.run_early(jax.tree.leaves(arguments))
        self.late = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept]
        return d_floats, kept

    def weight_grads(
        self,
        params: Sequence[Any],
        saved: Sequence[Any],
        given: Env,
        grads: Sequence[Any],
        kept: Sequence[Any],
    ) -> list[Any]:
        """Gradients of the parameters, after `input_grads`."""
        assert self._halves is not None
        arguments = (list(params), list(saved), list(given.values()), list(grads))
        return self._halves.run_late(jax.tree.leaves(arguments), kept)

    def signature(self, *, recompute: bool, halves: bool) -> str:
        """Text that two parts share only if they compute the same from arrays of the same shapes.

        It is that of the backward, in which the gradient rules of the user's functions are written
        out.
        """
        graph = self._graph

        def like(v: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(graph.values[v].shape, graph.values[v].dtype)

        params = [like(graph.param_values[p]) for p in self.params]
        inputs = [like(v) for v in self.part.inputs]
        others = (*graph.aux_values, graph.key_value, *graph.batch_values)
        given = {v: like(v) for v in others}
        grads = [like(self.below.values[i]) for i in self.below.floats]

        def run(params: Any, inputs: Any, given: Any, grads: Any) -> Any:
            if recompute:
                return self.backward(params, inputs, given, grads)
            made, saved = self.forward_and_residuals(params, inputs, given)
            if halves:
                d_floats, kept = self.input_grads(params, saved, given, grads)
                return made, saved, d_floats, self.weight_grads(params, saved, given, grads, kept)
            return made, saved, self.backward_from_residuals(params, saved, given, grads)

        closed = jax.make_jaxpr(run)(params, inputs, given, grads)
        words = (self.above.words, self.above.floats, self.below.words, self.below.floats)
        text = [re.sub(r"0x[0-9a-f]+", "", str(closed.jaxpr)), str((words, self.part.is_last))]
        text += [f"{c.dtype}{c.shape}{np.asarray(c).tobytes().hex()}" for c in closed.consts]
        return "\n".join(text)

    def _pulled_back(
        self, vjp: Callable[..., Any], grads: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of the parameters and of the floating inputs, from those of the outputs."""
        if self._on_cpu:
            vjp = uncrossed(vjp)
        d_params, d_floats = vjp([jnp.float32(1)] if self.part.is_last else list(grads))
        return list(d_params), list(d_floats)
