"""What one part of a pipeline computes for one microbatch: forward, backward, weight gradient.

Everything is a pure function of arrays; buffers, ticks and permutes are the pipeline's business.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._graph._composed import Composed, Composer
from .._graph._graph import Graph, shapes_of
from .._graph._interpreter import ArrayPlacement, Env
from .._graph._parts import ChainPart, run_part
from .._graph._segment_kind import segment_kind
from .._jax._cpu_dots import uncrossed
from .._jax._jaxpr import ClosedJaxpr, Literal
from .._jax._min_cut import Halves, halve
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


def crossing(
    graph: Graph, values: Sequence[int], wanted: Collection[int] | None = None
) -> Crossing:
    """Of the values that cross a boundary; a gradient of those `wanted` alone comes back."""
    shapes = shapes_of(graph, values)
    floats = tuple(
        i
        for i, v in enumerate(values)
        if graph.values[v].differentiable and (wanted is None or v in wanted)
    )
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
        place: Where arrays lie on a stage's devices.
        trained: Parameters that are trained: others have no gradient.
        on_cpu: Whether dots are written as a CPU likes them.
        wanted: Values whose gradient is wanted, if they have one; None: all.
        composer: Of the graph, which knows equations of other parts too; None: a new one.
    """

    def __init__(
        self,
        graph: Graph,
        part: ChainPart,
        place: ArrayPlacement,
        *,
        trained: Collection[int],
        on_cpu: bool,
        wanted: Collection[int] | None = None,
        composer: Composer | None = None,
    ):
        self.part = part
        self._composer = composer
        self._on_cpu = on_cpu
        self._graph = graph
        self.params = part.segment.params
        self.trained = tuple(i for i, p in enumerate(self.params) if p in trained)
        self.above = crossing(graph, part.inputs, wanted)
        self.below = crossing(graph, part.outputs, wanted)
        self._given = part.segment.given
        self._run = run_part(graph, part, place)

    @property
    def kind(self) -> Any:
        """Equal for those whose programs compute the same from arrays of the same shapes."""
        part = self.part
        own = segment_kind(self._graph, part.segment, ())
        crossing = len(part.inputs), self.above.floats, len(part.outputs), self.below.floats
        return own, self.trained, crossing, part.is_last

    @functools.cached_property
    def composed(self) -> Composed:
        """Its forward and backward before they are traced, to tell what waits between them."""
        part, own = self.part, [self._graph.param_values[p] for p in self.params]
        results = self._graph.result_values if part.is_last else part.outputs
        made = [v for v in results if isinstance(v, int)]
        given_back = made[:1] if part.is_last else self.below_floats
        wanted = [*(own[i] for i in self.trained), *self.above_floats]
        arguments = (*own, *part.inputs, *self._given)
        composer = self._composer or Composer(self._graph)
        return composer.program(part.segment.ops, arguments, made, given_back, wanted)

    @functools.cached_property
    def _whole(self) -> ClosedJaxpr:
        """`(params, inputs, given, grads) -> (made, gradients of trained ones and of inputs)`."""

        def run(params: Any, inputs: Any, given: Any, grads: Any) -> Any:
            again = dict(zip(self._given, given, strict=True))
            d_params, d_floats, made = self.backward(params, inputs, again, grads)
            return made, d_params, d_floats

        return jax.make_jaxpr(run)(*self._shapes)

    @functools.cached_property
    def _shapes(self) -> tuple[list[jax.ShapeDtypeStruct], ...]:
        own = (
            [self._graph.param_values[p] for p in self.params],
            self.part.inputs,
            self._given,
            [self.below.values[i] for i in self.below.floats],
        )
        return tuple(shapes_of(self._graph, values) for values in own)

    @functools.cached_property
    def _passes(self) -> Halves:
        """Forward and backward, which may run some equations of the forward again."""
        ends = np.cumsum([len(own) for own in self._shapes])
        num_grads = len(self.trained) + len(self.above.floats)
        return halve(
            self._whole,
            len(self._whole.jaxpr.outvars) - num_grads,
            only_early=range(ends[0], ends[1]),
            only_late=range(ends[2], ends[3]),
        )

    @functools.cached_property
    def _backward_halves(self) -> Halves:
        """The gradients of the inputs, and those of the parameters."""
        num = len(self.trained)

        def run(arguments: Any, kept: Any) -> Any:
            made = self._passes.run_late(arguments, kept)
            return made[num:], made[:num]

        params, _, given, grads = self._shapes
        closed = jax.make_jaxpr(run)([*params, *given, *grads], list(self._passes.kept))
        return halve(closed, len(self.above.floats))

    @property
    def residuals(self) -> Sequence[jax.ShapeDtypeStruct]:
        """Shapes of what `forward_and_residuals` keeps."""
        return self._passes.kept

    @functools.cached_property
    def _found(self) -> list[tuple[str, int]]:
        """For each residual where it is found: among inputs, outputs, or on its own."""
        halves = self._passes
        early = halves.early
        ends = len(early.invars) - len(self._shapes[2])
        inputs = {v: i for i, v in enumerate(early.invars[ends - len(self.part.inputs) : ends])}
        made = enumerate(early.outvars[: halves.num_first])
        outputs = {v: i for i, v in made if not isinstance(v, Literal)}
        out: list[tuple[str, int]] = []
        own = 0
        for v in early.outvars[halves.num_first :]:
            is_literal = isinstance(v, Literal)
            if not is_literal and v in inputs:
                out.append(("input", inputs[v]))
            elif not is_literal and v in outputs:
                out.append(("output", outputs[v]))
            else:
                out.append(("own", own))
                own += 1
        return out

    @property
    def below_floats(self) -> tuple[int, ...]:
        """Values that it makes whose gradient comes back."""
        return tuple(self.below.values[i] for i in self.below.floats)

    @property
    def above_floats(self) -> tuple[int, ...]:
        """Values that it reads of whose gradient it makes a part."""
        return tuple(self.above.values[i] for i in self.above.floats)

    @property
    def reads_its_input(self) -> bool:
        """Whether the backward reads inputs of the forward as they are."""
        return any(where == "input" for where, _ in self._found)

    @property
    def own_residuals(self) -> list[int]:
        """Places of the residuals that are neither inputs nor outputs."""
        return [i for i, (where, _) in enumerate(self._found) if where == "own"]

    @functools.cached_property
    def residual_values(self) -> list[int | None]:
        """For each residual its value in the graph; None: it is no input or output."""
        values = {"input": self.part.inputs, "output": self.part.outputs}
        return [None if where == "own" else values[where][i] for where, i in self._found]

    def all_residuals(
        self, inputs: Sequence[Any], outputs: Sequence[Any], own: Sequence[Any]
    ) -> list[Any]:
        """All that a backward reads, from what a forward read and made."""
        kinds = {"input": inputs, "output": outputs, "own": own}
        return [kinds[where][i] for where, i in self._found]

    @property
    def late(self) -> Sequence[jax.ShapeDtypeStruct]:
        """Shapes of what `input_grads` keeps."""
        return self._backward_halves.kept

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
        """`forward`, and what the backward needs besides parameters and what is given."""
        return self._passes.run_early([*params, *inputs, *self._read(given)])

    def backward_from_residuals(
        self, params: Sequence[Any], saved: Sequence[Any], given: Env, grads: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of the trained parameters and of the floating inputs."""
        made = self._passes.run_late([*params, *self._read(given), *grads], saved)
        return made[: len(self.trained)], made[len(self.trained) :]

    def backward(
        self, params: Sequence[Any], inputs: Sequence[Any], given: Env, grads: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The forward again: its results, after the gradients of what is trained and floating."""
        floats = [inputs[i] for i in self.above.floats]
        function = self._function(inputs, given)

        def run(trained: Sequence[Any], floats: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            own = dict(zip(self.trained, trained, strict=True))
            return function([own.get(i, x) for i, x in enumerate(params)], floats)

        own = [params[i] for i in self.trained]
        _, vjp, made = jax.vjp(run, own, floats, has_aux=True)
        return *self._pulled_back(vjp, grads), made

    def input_grads(
        self, params: Sequence[Any], saved: Sequence[Any], given: Env, grads: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of the floating inputs, and what `weight_grads` needs besides."""
        return self._backward_halves.run_early([*params, *self._read(given), *grads, *saved])

    def weight_grads(
        self,
        params: Sequence[Any],
        saved: Sequence[Any],
        given: Env,
        grads: Sequence[Any],
        kept: Sequence[Any],
    ) -> list[Any]:
        """Gradients of the trained parameters, after `input_grads`."""
        arguments = [*params, *self._read(given), *grads, *saved]
        return self._backward_halves.run_late(arguments, kept)

    def _read(self, given: Env) -> list[Any]:
        return [given[v] for v in self._given]

    def signature(self) -> str:
        """Text that two parts share only if they compute the same from arrays of the same shapes.

        It is that of the backward, in which the gradient rules of the user's functions are written
        out.
        """
        closed = self._whole
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
