"""One part of a pipeline for one microbatch, and how its arrays are sharded inside a stage.

Everything is a pure function of arrays; buffers, ticks and permutes are the pipeline's business.

XLA shards the computation over the devices of a stage. So arrays that enter and leave a loop have
sharding constraints, for propagation alone could move them. So do arrays that cross a boundary,
which are whole on each device.

Legend of shape suffixes: N devices of a stage, T tensors.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..core.errors import PlanError
from ..core.types import PyTree
from ..graph.graph import Graph, shapes_of
from ..graph.interpreter import ArrayPlacement, Env
from ..graph.parts import ChainPart, run_part
from ..graph.segments import segment_kind
from ..jax.cpu_dots import row_major, uncrossed
from ..jax.jaxpr import ClosedJaxpr, Literal
from ..jax.min_cut import Halves, halve
from ..jax.ordered_adds import ordered
from ..plan.layout import names_of
from ..plan.sharding import place_in
from ..profile.segment_times import Composed, ResidualEstimator
from .bitcast_packing import BitcastPacking
from .contribution import largest, peak_bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crossing:
    """The arrays of one boundary.

    Attributes:
        floats: Places of the values whose gradient comes back.
    """

    values: tuple[int, ...]
    words: BitcastPacking
    floats: tuple[int, ...]
    float_words: BitcastPacking


def crossing(
    graph: Graph, values: Sequence[int], wanted: Collection[int] | None = None
) -> Crossing:
    """The crossing of these values, with gradients of the `wanted` ones only; None: of all."""
    shapes = shapes_of(graph, values)
    floats = tuple(
        i
        for i, v in enumerate(values)
        if graph.values[v].differentiable and (wanted is None or v in wanted)
    )
    return Crossing(
        values=tuple(values),
        words=BitcastPacking.like(shapes),
        floats=floats,
        float_words=BitcastPacking.like([shapes[i] for i in floats]),
    )


class StagePart:
    """One part, ready to be traced into a program.

    Args:
        place: Placement of arrays on a stage's devices.
        trained: Parameters that are trained: others have no gradient.
        on_cpu: Whether to write dots for CPUs.
        in_order: Whether scatters have a fixed order of additions.
        wanted: Values whose gradient is wanted, if they have one; None: all.
        passing: Inputs that later parts read too: the gradients of these come back as those of
            outputs do. So the terms of a value's gradient add up from the last reader to the first,
            wherever a chain is cut.
        composer: Residual estimator of the graph, shared by its parts; None: a new one.
        run: Runs it in another way than operation by operation.
        padded: Shapes of its parameters if they are padded.
    """

    def __init__(
        self,
        graph: Graph,
        part: ChainPart,
        place: ArrayPlacement,
        *,
        trained: Collection[int],
        on_cpu: bool,
        in_order: bool = False,
        wanted: Collection[int] | None = None,
        passing: Collection[int] = (),
        composer: ResidualEstimator | None = None,
        run: Callable[[Sequence[Any], Sequence[Any], Env], list[Any]] | None = None,
        padded: Sequence[jax.ShapeDtypeStruct] | None = None,
    ):
        self.part = part
        self._composer = composer
        self._on_cpu, self._in_order = on_cpu, in_order
        self._graph = graph
        self.params = part.segment.params
        self.trained = tuple(i for i, p in enumerate(self.params) if p in trained)
        self.above = crossing(graph, part.inputs, wanted)
        self.below = crossing(graph, part.outputs, wanted)
        self._passing = tuple(i for i in self.above.floats if part.inputs[i] in passing)
        self._env_values = part.segment.given
        outputs = *part.outputs, *self.passing
        self._run = run or run_part(graph, dataclasses.replace(part, outputs=outputs), place)
        self._padded = padded

    @property
    def kind(self) -> Any:
        """Equal for parts that compute the same from arrays of the same shapes."""
        part = self.part
        segment = segment_kind(self._graph, part.segment, ())
        crossing = len(part.inputs), self.above.floats, len(part.outputs), self.below.floats
        return segment, self.trained, crossing, self._passing, part.is_last

    @functools.cached_property
    def composed(self) -> Composed:
        """An estimate of its forward and backward, whose residuals are known without a trace."""
        part, params = self.part, [self._graph.param_values[p] for p in self.params]
        results = self._graph.result_values if part.is_last else part.outputs
        made = [v for v in results if isinstance(v, int)]
        cotangents = made[:1] if part.is_last else self.below_floats
        wanted = [*(params[i] for i in self.trained), *self.above_floats]
        arguments = (*params, *part.inputs, *self._env_values)
        composer = self._composer or ResidualEstimator(self._graph)
        return composer.program(part.segment.ops, arguments, made, cotangents, wanted)

    @functools.cached_property
    def _whole(self) -> ClosedJaxpr:
        """`(params, inputs, arrays of env, grads) -> (made, gradients of params and inputs)`."""

        def run(params: Any, inputs: Any, arrays: Any, grads: Any) -> Any:
            env = dict(zip(self._env_values, arrays, strict=True))
            d_params, d_floats, made = self.backward(params, inputs, env, grads)
            return made, d_params, d_floats

        return jax.make_jaxpr(run)(*self._shapes)

    @functools.cached_property
    def _shapes(self) -> tuple[list[jax.ShapeDtypeStruct], ...]:
        groups = (
            [self._graph.param_values[p] for p in self.params],
            self.part.inputs,
            self._env_values,
            [*self.below_floats, *self.passing],
        )
        params, *others = (shapes_of(self._graph, values) for values in groups)
        return list(self._padded or params), *others

    @functools.cached_property
    def _passes(self) -> Halves:
        """Forward and backward, which may run some equations of the forward again."""
        ends = np.cumsum([len(shapes) for shapes in self._shapes])
        num_grads = len(self.trained) + len(self.above.floats)
        return halve(
            self._whole,
            len(self._whole.jaxpr.outvars) - num_grads,
            only_early=range(ends[0], ends[1]),
            only_late=range(ends[2], ends[3]),
        )

    @functools.cached_property
    def _backward_halves(self) -> Halves:
        """The backward in two halves: gradients of the inputs, then of the parameters."""
        num = len(self.trained)

        def run(arguments: Any, kept: Any) -> Any:
            made = self._passes.run_late(arguments, kept)
            return made[num:], made[:num]

        params, _, env, grads = self._shapes
        closed = jax.make_jaxpr(run)([*params, *env, *grads], list(self._passes.kept))
        return halve(closed, len(self.above.floats))

    @property
    def residuals(self) -> Sequence[jax.ShapeDtypeStruct]:
        """Shapes of the residuals of `forward_and_residuals`."""
        return self._passes.kept

    @functools.cached_property
    def _residual_places(self) -> list[tuple[str, int]]:
        """For each residual its place among the inputs, the outputs or the inner values."""
        halves = self._passes
        early = halves.early
        ends = len(early.invars) - len(self._shapes[2])
        inputs = {v: i for i, v in enumerate(early.invars[ends - len(self.part.inputs) : ends])}
        made = enumerate(early.outvars[: halves.num_first])
        outputs = {v: i for i, v in made if not isinstance(v, Literal)}
        out: list[tuple[str, int]] = []
        num_inner = 0
        for v in early.outvars[halves.num_first :]:
            is_literal = isinstance(v, Literal)
            if not is_literal and v in inputs:
                out.append(("input", inputs[v]))
            elif not is_literal and v in outputs:
                out.append(("output", outputs[v]))
            else:
                out.append(("inner", num_inner))
                num_inner += 1
        return out

    @property
    def below_floats(self) -> tuple[int, ...]:
        """Output values whose gradient comes back."""
        return tuple(self.below.values[i] for i in self.below.floats)

    @property
    def above_floats(self) -> tuple[int, ...]:
        """Input values whose gradient it makes, or a term of it."""
        return tuple(self.above.values[i] for i in self.above.floats)

    @property
    def passing(self) -> tuple[int, ...]:
        """Inputs whose gradients have terms of later parts; these come after those of outputs."""
        return tuple(self.above.values[i] for i in self._passing)

    @property
    def reads_its_input(self) -> bool:
        """Whether inputs of the forward are residuals."""
        return any(where == "input" for where, _ in self._residual_places)

    @property
    def inner_residuals(self) -> list[int]:
        """Places of the residuals that are neither inputs nor outputs."""
        return [i for i, (where, _) in enumerate(self._residual_places) if where == "inner"]

    @functools.cached_property
    def residual_values(self) -> list[int | None]:
        """For each residual its value in the graph; None: an inner one."""
        values = {"input": self.part.inputs, "output": self.part.outputs}
        return [
            None if where == "inner" else values[where][i] for where, i in self._residual_places
        ]

    @property
    def saved_results(self) -> dict[str, int]:
        """Arguments of a backward that are results of its forward, with the results' places."""
        first_inner = len(self.part.outputs)
        starts = {"output": 0, "inner": first_inner}
        return {
            f"saved[{k}]": starts[where] + i
            for k, (where, i) in enumerate(self._residual_places)
            if where in starts
        }

    def all_residuals(
        self, inputs: Sequence[Any], outputs: Sequence[Any], inner: Sequence[Any]
    ) -> list[Any]:
        """All residuals, from a forward's inputs, outputs and inner residuals."""
        kinds = {"input": inputs, "output": outputs, "inner": inner}
        return [kinds[where][i] for where, i in self._residual_places]

    @property
    def late(self) -> Sequence[jax.ShapeDtypeStruct]:
        """Shapes of the residuals of `input_grads`."""
        return self._backward_halves.kept

    def _function(
        self, inputs: Sequence[Any], env: Env
    ) -> Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]:
        """`(params, floating inputs) -> (floating outputs or the loss, all outputs)`."""

        def run(params: Sequence[Any], floats: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            all_inputs = list(inputs)
            for i, x in zip(self.above.floats, floats, strict=True):
                all_inputs[i] = x
            made = self._run(params, all_inputs, env)
            if self.part.is_last:
                return [made[0]], made
            num = len(self.part.outputs)
            # A `run` of its own gives no inputs back.
            made, passed = made[:num], made[num:] or [all_inputs[i] for i in self._passing]
            return [*(made[i] for i in self.below.floats), *passed], made

        return run

    def forward(self, params: Sequence[Any], inputs: Sequence[Any], env: Env) -> list[Any]:
        """The values for the next part; of the last part the program's results."""

        def run(params: Sequence[Any], inputs: Sequence[Any], env: Env) -> list[Any]:
            floats = [inputs[i] for i in self.above.floats]
            return self._function(inputs, env)(params, floats)[1]

        return self._written(run)(params, inputs, self._given(env))  # type: ignore[no-any-return]

    def forward_of_gradient(
        self, params: Sequence[Any], inputs: Sequence[Any], env: Env
    ) -> list[Any]:
        """`forward` by the rules of the gradient, whose bits a function's own rule may change."""

        def run(params: Sequence[Any], inputs: Sequence[Any], env: Env) -> list[Any]:
            return self._differentiated(params, inputs, env)[1]

        return self._written(run)(params, inputs, self._given(env))  # type: ignore[no-any-return]

    def forward_and_residuals(
        self, params: Sequence[Any], inputs: Sequence[Any], env: Env
    ) -> tuple[list[Any], list[Any]]:
        """`forward`, and the residuals: the backward reads them, parameters and `env`."""
        return self._passes.run_early([*params, *inputs, *self._env_arrays(env)])

    def backward_from_residuals(
        self, params: Sequence[Any], saved: Sequence[Any], env: Env, grads: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of the trained parameters and of the floating inputs."""
        made = self._passes.run_late([*params, *self._env_arrays(env), *grads], saved)
        return made[: len(self.trained)], made[len(self.trained) :]

    def backward(
        self, params: Sequence[Any], inputs: Sequence[Any], env: Env, grads: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Gradients as of `backward_from_residuals`, and the results of the forward, run again."""
        run = self._written(self._both)
        return run(params, inputs, self._given(env), grads)  # type: ignore[no-any-return]

    def _both(
        self, params: Sequence[Any], inputs: Sequence[Any], env: Env, grads: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        vjp, made = self._differentiated(params, inputs, env)
        return *self._pull_back(vjp, grads), made

    def _differentiated(
        self, params: Sequence[Any], inputs: Sequence[Any], env: Env
    ) -> tuple[Callable[..., Any], list[Any]]:
        """The backward of the outputs' gradients, and the results of the forward."""
        floats = [inputs[i] for i in self.above.floats]
        function = self._function(inputs, env)

        def run(trained: Sequence[Any], floats: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            by_place = dict(zip(self.trained, trained, strict=True))
            return function([by_place.get(i, x) for i, x in enumerate(params)], floats)

        trained = [params[i] for i in self.trained]
        _, vjp, made = jax.vjp(run, trained, floats, has_aux=True)
        return vjp, made

    def input_grads(
        self, params: Sequence[Any], saved: Sequence[Any], env: Env, grads: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of the floating inputs, and the residuals of `weight_grads`."""
        return self._backward_halves.run_early([*params, *self._env_arrays(env), *grads, *saved])

    def weight_grads(
        self,
        params: Sequence[Any],
        saved: Sequence[Any],
        env: Env,
        grads: Sequence[Any],
        kept: Sequence[Any],
    ) -> list[Any]:
        """Gradients of the trained parameters, after `input_grads`."""
        arguments = [*params, *self._env_arrays(env), *grads, *saved]
        return self._backward_halves.run_late(arguments, kept)

    def _env_arrays(self, env: Env) -> list[Any]:
        return [env[v] for v in self._env_values]

    def _given(self, env: Env) -> Env:
        """The arrays of an environment that the part reads."""
        return {v: env[v] for v in self._env_values}

    def _written(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of trees of arrays as this device's programs are written."""
        return ordered(function) if self._in_order else function

    def signature(self) -> str:
        """Text that two parts share only if they compute the same from arrays of the same shapes.

        It is the text of the backward, which contains the gradient rules of the user's functions.
        """
        closed = self._whole
        words = (self.above.words, self.above.floats, self.below.words, self.below.floats)
        facts = words, self._passing, self.part.is_last
        text = [re.sub(r"0x[0-9a-f]+", "", str(closed.jaxpr)), str(facts)]
        text += [f"{c.dtype}{c.shape}{np.asarray(c).tobytes().hex()}" for c in closed.consts]
        return "\n".join(text)

    def _pull_back(
        self, vjp: Callable[..., Any], grads: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of the parameters and of the floating inputs, from those of the outputs."""
        if self._on_cpu:
            vjp = uncrossed(vjp)
        d_params, d_floats = vjp([jnp.float32(1)] if self.part.is_last else list(grads))
        return list(d_params), list(d_floats)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSharding:
    """The mesh axes inside a stage.

    Attributes:
        mesh: Mesh of the pipeline; its first axis is that of the stages.
        axes: Names of the other axes; none where a stage has one device.
        on_cpu: Whether to lay out arrays for CPUs.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    on_cpu: bool

    def place(self, tree: PyTree, specs: PyTree) -> PyTree:
        """Constrain the arrays of one stage; `specs` include the axis of the stages."""
        if not self.axes:
            return tree
        return jax.tree.map(lambda x, s: place_in(self.mesh, x, P(*s[1:])), tree, specs)

    def whole(self, arrays: Sequence[Any]) -> list[Any]:
        """Constrain arrays to be the same on every device of a stage."""
        if not self.axes:
            return list(arrays)
        return [
            x
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else place_in(self.mesh, jnp.asarray(x), P())
            for x in arrays
        ]

    def raise_peaks(
        self,
        peaks_NT: jax.Array,
        tensors: Sequence[int],
        values: Sequence[jax.Array],
        specs: Sequence[P],
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Update each device's largest magnitudes of its pieces, without communication.

        Args:
            peaks_NT: Bit patterns of the largest magnitudes so far.
            tensors: Columns of `peaks_NT`.
            specs: PartitionSpecs of the values, over all stages.

        Returns:
            The new peaks, and the values in the layout that sums read fast.
        """
        if not values:
            return peaks_NT, []

        def run(
            peaks_NT: jax.Array, values: Sequence[jax.Array]
        ) -> tuple[jax.Array, list[jax.Array]]:
            peaks_T = peaks_NT[0]
            values = [row_major(x) if self.on_cpu else x for x in values]
            for tensor, x in zip(tensors, values, strict=True):
                peaks_T = peaks_T.at[tensor].max(peak_bits(largest(x)))
            return peaks_T[None], values

        if not self.axes:
            return run(peaks_NT, values)
        inner = [P(*s[1:]) for s in specs]
        mapped = jax.shard_map(
            run,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(P(self.axes), inner),
            out_specs=(P(self.axes), inner),
            axis_names=frozenset(self.axes),
            check_vma=False,
        )
        return mapped(peaks_NT, values)  # type: ignore[no-any-return]

    def largest(self, peaks_NT: jax.Array) -> jax.Array:
        """Largest magnitudes over a stage's devices; inside a `shard_map` over every axis."""
        [peaks_T] = peaks_NT
        return jax.lax.pmax(peaks_T, self.axes) if self.axes else peaks_T


def map_specs(run: Callable[[P], Any], specs: PyTree) -> PyTree:
    """Map `run` over the PartitionSpecs of a tree."""
    return jax.tree.map(run, specs, is_leaf=lambda s: isinstance(s, P))


def only(spec: P, names: Collection[str]) -> P:
    """A spec with these mesh axes only."""
    return P(*(tuple(n for n in names_of(part) if n in names) or None for part in spec))


def check_permutes(text: str, per_stage: int) -> None:
    """Refuse a compiled program in which a collective-permute runs on some stages only.

    All devices of a program take part in a permute, but an action runs on one stage only. Other
    collectives inside a stage wait for its devices only.

    Args:
        per_stage: Devices of a stage, which have consecutive numbers.

    Raises:
        PlanError: If there is a permute between devices of the same stage.
    """
    for pairs in re.findall(r"collective-permute.*?source_target_pairs=\{(\{.*?\})\}", text):
        for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs):
            if a != b and int(a) // per_stage == int(b) // per_stage:
                raise PlanError(
                    f"XLA moves arrays between devices {a} and {b} of one stage by a "
                    "collective-permute, for which all stages would have to wait: cut other "
                    "dimensions (rules, or hxla.split around less), or use stages of one device"
                )
