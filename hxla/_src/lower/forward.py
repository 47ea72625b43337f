"""Programs without gradients for each replica: a call of the model, one microbatch's loss.

The first pass of a loss over the whole batch is one: it makes embeddings, and gradients for the
second pass. Embeddings of all microbatches go through host memory to every process. Each process
runs the same program of the whole batch, so no bit depends on where a microbatch was embedded.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.errors import ConfigError
from ..core.types import PyTree
from ..jax.devices import is_here
from ..jax.jaxpr import naming_axes, program_text, with_axes
from ..jax.ordered_adds import ordered
from ..model.functional import Functional
from ..model.loss import MetricColumns, as_sums
from ..model.over_batch import ToEmbed, TracedOverBatch, WithGradients, embedding, trace_over_batch
from ..model.plain_arrays import root_key
from ..plan.parts import SumsForm
from ..plan.plan import Plan
from .compile import adds_in_order, compiler_options, extra_bytes, for_each, update_options
from .contribution import microbatch_key
from .global_arrays import HostSums
from .inputs import Training
from .padding import StatePadding, unpadded
from .replica import Replica

#: `(params, aux, key, microbatch) -> results`.
Call = Callable[[PyTree, PyTree, jax.Array, PyTree], Any]


class Forward:
    """Runs a call on replicas, each with its sharded arrays; results are whole.

    Args:
        name: Name of the program in profiles.
        key: From `where`, int32 scalars or arrays that identify a microbatch, to its random key.
        model: The model whose parameters and other variables are the call's arguments.
        like: From a replica's number to the shapes and shardings of its parameters and of its
            other variables.
    """

    def __init__(
        self,
        name: str,
        call: Call,
        key: Callable[[Any], jax.Array],
        model: Functional,
        *,
        replicas: Sequence[Replica],
        like: Callable[[int], tuple[Any, Any]],
        sums: SumsForm,
        padding: StatePadding,
    ):
        self._replicas, self._like = tuple(replicas), like
        self._compiled: dict[Any, list[Any]] = {}  # for each replica, by the shapes of a microbatch
        param_def, aux_def = jax.tree.structure(model.params), jax.tree.structure(model.aux)

        def function(params: Any, aux: Any, where: Any, batch: PyTree) -> Any:
            params, aux = unpadded(params, padding.params), unpadded(aux, padding.aux)
            trees = jax.tree.unflatten(param_def, params), jax.tree.unflatten(aux_def, aux)
            axes: list[str] = []

            def run(params: PyTree, aux: PyTree) -> Any:
                return call(params, aux, key(where), batch)

            return naming_axes(lambda: with_axes(run, axes)(*trees), axes)

        function.__name__ = name
        platform = replicas[0].devices[0].platform
        self._function = ordered(function) if adds_in_order(platform, sums) else function
        # A replica of several devices gathers shards for each equation, then frees them.
        options = update_options if replicas[0].axes else compiler_options
        self._options = options(platform, sums)

    def shapes(self, where: Any, batch: PyTree) -> Any:
        """Shapes of the results."""
        return jax.eval_shape(self._function, *self._like(0), where, batch)

    def compile(self, where: Any, batch: PyTree) -> list[Any]:
        """The programs of all replicas for a microbatch.

        Args:
            batch: Arrays of the microbatch, or their shapes.
        """
        leaves, treedef = jax.tree.flatten(batch)
        key = treedef, tuple((x.shape, x.dtype) for x in leaves)
        if key not in self._compiled:

            def lowered(k: int) -> Any:
                replica = self._replicas[k]
                run = jax.jit(
                    self._function,
                    compiler_options=self._options,
                    out_shardings=replica.sharding(P()),
                )
                return run.lower(*self._like(k), where, jax.tree.map(replica.like, batch))

            self._compiled[key] = for_each(self._replicas, lowered)
        return self._compiled[key]

    def is_led_here(self, i: int) -> bool:
        """Whether this process leads a local replica, which several processes may share."""
        return self._replicas[i].is_led_here

    def memory_bytes(self) -> int:
        """Bytes that one device needs beside the state, for the programs compiled so far."""
        return max((extra_bytes(programs[0]) for programs in self._compiled.values()), default=0)

    def run(self, i: int, params: Any, aux: Any, where: Any, batch: PyTree) -> Any:
        """The results of one microbatch; waits for nothing."""
        placed = self._replicas[i].put_tree(batch)
        return self.compile(where, placed)[i](params, aux, where, placed)


def evaluation_key(seed: int, index: jax.Array) -> jax.Array:
    """The random key of a microbatch of an evaluation, a function of seed and number."""
    return jax.random.fold_in(root_key(seed), index)


class Evaluation:
    """Evaluates microbatches on replicas, each with its sharded arrays.

    Args:
        microbatch_size: Examples of a microbatch; the last one may have fewer.
        forward: Makes a `Forward` for the replicas from its first three arguments.
    """

    def __init__(
        self, model: Functional, seed: int, microbatch_size: int, forward: Callable[..., Forward]
    ):
        # Not in an attribute, which `row` would reach in a cycle that keeps the model's arrays.
        found: list[MetricColumns] = []

        def row(params: PyTree, aux: PyTree, key: jax.Array, batch: PyTree) -> jax.Array:
            size = jax.tree.leaves(batch)[0].shape[0]
            out, _ = model.evaluate(params, aux, key, batch)
            sums = as_sums(out, size, mean_weight=size, padded_size=microbatch_size)
            found[:] = sums.metrics  # the same in every trace
            return sums.row

        self._metrics = found

        self._forward = forward("hxla_evaluate", row, lambda index: evaluation_key(seed, index))

    @property
    def metrics(self) -> tuple[MetricColumns, ...]:
        """The columns of metrics, once a microbatch was evaluated here."""
        return tuple(self._metrics)

    def metrics_of(self, fetch: Callable[[int], PyTree]) -> tuple[MetricColumns, ...]:
        """The columns of metrics, also in a process that evaluates no microbatch."""
        if not self._metrics:
            self._forward.shapes(np.int32(0), fetch(0))
        return self.metrics

    def run(self, i: int, params: Any, aux: Any, index: int, batch: PyTree) -> jax.Array:
        """The sums of one microbatch, float32[2 + columns of metrics]; waits for nothing."""
        return self._forward.run(i, params, aux, np.int32(index), batch)  # type: ignore[no-any-return]


#: A microbatch to embed: its number, the `where` of `Forward`, its arrays.
Work = tuple[int, Any, PyTree]
#: An embedded microbatch: its number, its operands of `contrast`, whether this process sends them.
Begun = tuple[int, list[Any], bool]


class OverBatchPass:
    """Embeds microbatches on replicas, and computes the loss of the whole batch with its gradients.

    Args:
        traced: The loss, with the shapes of a microbatch.
    """

    def __init__(
        self,
        traced: TracedOverBatch,
        forward: Forward,
        host: HostSums,
        replica: Replica,
        sums: SumsForm,
    ):
        self._traced, self._forward, self._host = traced, forward, host
        self._device = next(d for d in replica.devices if is_here(d))
        self._options = compiler_options(self._device.platform, sums)
        self._in_order = adds_in_order(self._device.platform, sums)
        self._compiled: dict[tuple[str, int], Any] = {}
        self.metrics: tuple[MetricColumns, ...] = ()

    # -- embeddings ------------------------------------------------------------------------------

    def begun(self, i: int, params: Any, aux: Any, work: Sequence[Work]) -> list[Begun]:
        """Embed microbatches on local replica `i`, from whole parameters; waits for nothing."""
        embedded = []
        for index, where, batch in work:
            run = self._forward.run(i, params, aux, where, ToEmbed(batch))
            operands = [*jax.tree.leaves(run), *self._traced.read_of(batch)]
            embedded.append((index, operands, self._forward.is_led_here(i)))
        return embedded

    def exchanged(self, begun: Sequence[Sequence[Begun]], num_examples: int) -> list[np.ndarray]:
        """The operands of `contrast` of all examples: embeddings, then arrays of the batch.

        Args:
            begun: For each local replica the results of `begun`; a last microbatch may be short.
        """
        whole = [np.zeros(x.shape, x.dtype) for x in self._traced.operands(num_examples)]
        for index, arrays, is_led_here in itertools.chain(*begun):
            start = index * self._traced.size
            for host, x in zip(whole, arrays if is_led_here else (), strict=is_led_here):
                host[start : start + len(x)] = np.asarray(x)
        return [self._host.exchange_bits(host) for host in whole]

    # -- the whole batch -------------------------------------------------------------------------

    def gradients(self, operands: Sequence[np.ndarray]) -> tuple[PyTree, PyTree]:
        """Outputs of `contrast` as rows, and the gradient of the sum of losses by embeddings."""
        return jax.device_get(self._run("gradients", operands))  # type: ignore[no-any-return]

    def row(self, operands: Sequence[np.ndarray]) -> np.ndarray:
        """The sums of a batch, in the form of `MicrobatchSums.row`.

        Args:
            operands: Results of `exchanged`, or rows of them.
        """
        return np.asarray(self._run("row", operands))

    def _gradients(self, operands: Sequence[jax.Array]) -> tuple[PyTree, PyTree]:
        embeddings, batch = self._traced.arguments(operands)

        def total(embeddings: PyTree) -> tuple[jax.Array, PyTree]:
            out = self._traced.loss.outputs(embeddings, batch)
            return as_sums(out, len(operands[0])).loss, out

        gradients, out = jax.grad(total, has_aux=True)(embeddings)
        return out, gradients

    def _row(self, operands: Sequence[jax.Array]) -> jax.Array:
        embeddings, batch = self._traced.arguments(operands)
        out = self._traced.loss.outputs(embeddings, batch)
        sums = as_sums(out, len(operands[0]), padded_size=self._traced.batch_size)
        self.metrics = sums.metrics  # the same in every trace
        return sums.row

    def _run(self, name: str, operands: Sequence[Any]) -> Any:
        placed = [jax.device_put(x, self._device) for x in operands]
        return self._program(name, len(operands[0]))(placed)

    def _program(self, name: str, num_examples: int) -> Any:
        key = name, num_examples
        if key not in self._compiled:
            function = {"gradients": self._gradients, "row": self._row}[name]
            sharding = jax.sharding.SingleDeviceSharding(self._device)
            shapes = [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
                for x in self._traced.operands(num_examples)
            ]

            def hxla_over_batch(operands: Sequence[jax.Array]) -> Any:
                return (ordered(function) if self._in_order else function)(operands)

            run = jax.jit(hxla_over_batch, compiler_options=self._options)
            self._compiled[key] = run.lower(shapes).compile()
        return self._compiled[key]

    @property
    def text(self) -> str:
        """The program of the whole batch."""
        return program_text(self._traced.program[0])

    # -- a step ----------------------------------------------------------------------------------

    def compile(self, where: Any) -> None:
        """Compile the programs of a step.

        Args:
            where: The `where` of `Forward` for a microbatch.
        """
        self._forward.compile(where, ToEmbed(self._traced.batch))
        self._program("gradients", self._traced.batch_size)

    def memory_bytes(self) -> int:
        """Bytes that one device needs beside the state."""
        extra = (extra_bytes(program) for program in self._compiled.values())
        operands = sum(
            x.size * x.dtype.itemsize for x in self._traced.operands(self._traced.batch_size)
        )
        return max(self._forward.memory_bytes(), operands + max(extra, default=0))

    def second(
        self,
        ids: Sequence[range],
        batches: Sequence[Sequence[PyTree]],
        gradients: tuple[PyTree, PyTree],
    ) -> list[list[WithGradients]]:
        """The microbatches of the second pass."""
        size = self._traced.size

        def rows(index: int, batch: PyTree) -> WithGradients:
            cut = functools.partial(jax.tree.map, lambda x: x[index * size : (index + 1) * size])
            return WithGradients(batch, *map(cut, gradients))

        return [
            [rows(index, batch) for index, batch in zip(numbers, arrays, strict=True)]
            for numbers, arrays in zip(ids, batches, strict=True)
        ]


class OverBatchPasses:
    """The first passes of a job: for the training loss and for the evaluation loss.

    Args:
        forward: Makes a `Forward` for the local replicas from its first three arguments.

    Raises:
        ConfigError: If the two passes of a step might draw different random numbers.

    Attributes:
        first: The first pass of a step; None: the loss needs none.
    """

    def __init__(
        self,
        training: Training,
        plan: Plan,
        host: HostSums,
        replica: Replica,
        forward: Callable[..., Forward],
    ):
        self._training, self._batch_size, self._forward = training, plan.batch_size, forward
        self._make = functools.partial(OverBatchPass, host=host, replica=replica, sums=plan.sums)
        self._of_evaluation: dict[Any, OverBatchPass] = {}  # by the shapes of a microbatch
        self.first: OverBatchPass | None = None
        if training.over_batch is not None:
            generator = jax.config.values["jax_default_prng_impl"]
            if plan.axes and generator != "threefry2x32":
                raise ConfigError(
                    f"jax_default_prng_impl={generator!r} may draw other numbers where a program "
                    "is cut over devices, and both passes of hxla.over_batch must draw the same: "
                    "use 'threefry2x32', or a plan whose replicas have one device each"
                )
            key = functools.partial(microbatch_key, training.seed)
            call = embedding(training.model.train)
            embed = forward("hxla_embed", call, lambda where: key(*where))
            self.first = self._make(training.over_batch, embed)

    def of_evaluation(self, batch: PyTree) -> OverBatchPass | None:
        """The first pass of an evaluation; None: the evaluation loss needs none."""
        loss, model = self._training.eval_over_batch, self._training.model
        if loss is None:
            return None
        leaves, treedef = jax.tree.flatten(batch)
        shapes = tuple((x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in leaves)
        if (treedef, shapes) not in self._of_evaluation:
            like = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*each) for each in shapes])
            arguments = model.evaluate, (model.params, model.aux), like, self._batch_size
            traced = trace_over_batch(loss, *arguments)
            key = functools.partial(evaluation_key, self._training.seed)
            embed = self._forward("hxla_embed", embedding(model.evaluate), key)
            self._of_evaluation[treedef, shapes] = self._make(traced, embed)
        return self._of_evaluation[treedef, shapes]

    def texts(self) -> dict[str, str]:
        """Text of the programs of a step, which processes compare."""
        return {} if self.first is None else {"program of the whole batch": self.first.text}

    def compile(self, tell: Callable[[str], None]) -> None:
        """Compile the programs of a step."""
        if self.first is not None:
            tell("compiling the losses over the whole batch")
            self.first.compile((np.int32(0), np.int32(0)))

    def memory_bytes(self) -> int:
        """Bytes that one device needs for a first pass, beside the state."""
        return 0 if self.first is None else self.first.memory_bytes()
