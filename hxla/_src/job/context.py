"""A job's checked arguments, its data, its model as functions, and its traced losses.

The loss is traced once for each microbatch size.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import linen as nn

from ..cluster import job_devices
from ..cluster.cluster import Cluster
from ..cluster.job_devices import Devices
from ..cluster.mesh_file import load_cluster
from ..core.config import Config, as_config
from ..core.errors import ConfigError, LossError
from ..core.keywords import as_whole_number, check_whole_numbers
from ..core.types import PyTree
from ..data.data import Source, as_source
from ..graph.casts import PrecisionCalls
from ..graph.factors import PATTERNS, Patterns
from ..graph.graph import Graph
from ..graph.mixing import with_rules
from ..graph.trace import trace_functional
from ..jax import coordination
from ..jax.digest import program_digest
from ..launch.again import chosen_places
from ..launch.channel import own_member
from ..launch.join import check_is_there
from ..lower.inputs import Training
from ..lower.lower import Programs, lower
from ..model.annotations import Strategy
from ..model.arguments import check_model, check_optimizer, given_bytes
from ..model.functional import RNGS, Functional, functional, leaf_names, tree_bytes
from ..model.loss_call import Loss, called, refuse_model_outside
from ..model.loss_scale import own_variables, with_loss_scale
from ..model.optimizer import Optimizer
from ..model.over_batch import OverBatch, ToEmbed, TracedOverBatch, WithGradients, trace_over_batch
from ..plan.ownership import TracedUpdate, traced_update
from ..plan.parts import SumsForm
from ..plan.plan import Plan
from ..plan.precision import Precision, as_precision
from ..weights.weights import Read, Wanted, Weights, as_weights, open_weights
from .agreement import Facts, agree, flat


@dataclasses.dataclass(frozen=True)
class JobArguments:
    """The user's arguments of a job: see `hxla.Job`."""

    model: Any
    data: Any
    loss: Loss
    optimizer: optax.GradientTransformation | optax.MultiSteps
    _: dataclasses.KW_ONLY
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    num_examples: int | None = None
    variables: PyTree | None = None
    rngs: Sequence[str] = RNGS
    weights: str | os.PathLike[str] | Weights | None = None
    trainable: str | Sequence[Any] | Callable[..., Any] | None = None
    merge: Mapping[Any, str] | None = None
    eval_loss: Loss | None = None
    precision: Precision | str | Mapping[str, Any] | os.PathLike[str] | None = None
    nonfinite: Literal["stop", "skip", "scale"] | None = None
    mixes_examples: bool = False
    default: Strategy | None = None
    patterns: Patterns = PATTERNS
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_model(self.model)
        check_optimizer(self.optimizer)
        called(self.loss)
        called(self.eval_loss or self.loss, "eval_loss")
        for loss in (self.loss, self.eval_loss):
            refuse_model_outside(loss, self.model)
        if self.nonfinite not in (None, "stop", "skip", "scale"):
            raise ConfigError(f"nonfinite={self.nonfinite!r}: use 'stop', 'skip' or 'scale'")
        check_whole_numbers(1, batch_size=self.batch_size, num_examples=self.num_examples)
        check_whole_numbers(seed=self.seed)
        for name in ("batch_size", "num_examples", "seed"):
            object.__setattr__(self, name, as_whole_number(getattr(self, name)))
        missing = [name for name in ("batch_size", "seed") if getattr(self, name) is None]
        if missing:
            raise ConfigError(f"{', '.join(missing)} is None, no whole number")
        if isinstance(self.rngs, str):
            raise ConfigError(f"rngs={self.rngs!r} is one name: pass rngs=({self.rngs!r},)")


class JobContext:
    """A job's arguments and everything derived from them, each computed once.

    Attributes:
        batch_size: Examples of a global batch.
        seed: Root of sample order, dropout and initialisation.
        nonfinite: On a gradient that is not finite: `stop`, `skip` the update, or also `scale` the
            loss less.
        precision: The dtypes of the computation.
    """

    def __init__(self, arguments: JobArguments):
        self._arguments = arguments
        self.settings = as_config(arguments.config)
        self.batch_size, self.seed = arguments.batch_size, arguments.seed
        self._loss, self._eval_loss = arguments.loss, arguments.eval_loss or arguments.loss
        self.optimizer = arguments.optimizer
        weights = arguments.weights
        self._weights = None if weights is None else as_weights(weights)
        precision = arguments.precision
        self.precision = as_precision(
            self.settings.precision if precision is None else precision,
            scales=None if arguments.nonfinite is None else arguments.nonfinite == "scale",
        )
        self.nonfinite = arguments.nonfinite or ("scale" if self.precision.loss_scale else "stop")
        self._models: dict[int, PrecisionCalls] = {}
        self._scaled: dict[int, Functional] = {}
        self._optimizer_bytes: list[int] = []
        self._updates: list[TracedUpdate] = []
        self._over_batch: dict[int, TracedOverBatch] = {}
        self._graphs: dict[int, Graph] = {}
        self._clusters: dict[Devices, Cluster] = {}
        self._lowered: dict[Any, Programs] = {}

    # -- the model -------------------------------------------------------------------------------

    @functools.cached_property
    def source(self) -> Source:
        """The data."""
        return as_source(
            self._arguments.data,
            batch_size=self.batch_size,
            seed=self.seed,
            shuffle=self._arguments.shuffle,
            num_examples=self._arguments.num_examples,
            examples_per_file=self.settings.io.examples_per_file,
            num_kept=self.settings.data.prefetch_steps + 2,
            is_shared=self.settings.data.share,
            num_workers=self.settings.data.workers,
        )

    @functools.cached_property
    def _example(self) -> PyTree:
        return self.source.example()

    def shapes(self, size: int) -> PyTree:
        """Shapes of a program's inputs from a microbatch of a size."""
        traced = self.over_batch(size)
        return self._shapes(size) if traced is None else traced.second()

    def _shapes(self, size: int) -> PyTree:
        """Shapes of a microbatch of a size."""

        def shape(x: Any) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(x.dtype)
            return jax.ShapeDtypeStruct((size, *x.shape[1:]), dtype)

        return jax.tree.map(shape, self._example)

    def batch_bytes(self, size: int) -> int:
        """Bytes of a microbatch of a size."""
        return tree_bytes(self.shapes(size))

    def first_batch(self, step: int, size: int) -> PyTree:
        """The first examples of the global batch of a step."""
        return self.source.fetch(step, np.arange(size))

    def as_inputs(self, batch: PyTree) -> PyTree:
        """A program's inputs from a microbatch, without the rest of its batch."""
        if not isinstance(self._loss, OverBatch):
            return batch
        shapes = self.shapes(len(jax.tree.leaves(batch)[0]))
        # Ones are as large as usual gradients of an example's loss, which initial scales need.
        ones = functools.partial(jax.tree.map, lambda x: np.ones(x.shape, x.dtype))
        return WithGradients(batch, ones(shapes.out), ones(shapes.gradients))

    def over_batch(self, size: int) -> TracedOverBatch | None:
        """The loss over the whole batch, for microbatches of a size; None for other losses."""
        if not isinstance(self._loss, OverBatch):
            return None
        if size not in self._over_batch:
            model = self.functional(size)
            inputs = model.train, (model.params, model.aux), self._shapes(size), self.batch_size
            self._over_batch[size] = trace_over_batch(self._loss, *inputs)
        return self._over_batch[size]

    def functional(self, size: int) -> Functional:
        """The model as pure functions, for microbatches of a size."""
        model, scale = self._calls(size).model, self.precision.loss_scale
        if scale is None:
            return model
        if size not in self._scaled:
            self._scaled[size] = with_loss_scale(model, scale.initial_exponent)
        return self._scaled[size]

    def _calls(self, size: int) -> PrecisionCalls:
        if size not in self._models:
            is_linen = isinstance(self._arguments.model, nn.Module)
            model = self._make_functional(size) if is_linen else self._nnx_functional
            self._models[size] = PrecisionCalls(model, self.precision)
        return self._models[size]

    @functools.cached_property
    def _nnx_functional(self) -> Functional:
        """The functions of an NNX module, which do not depend on the microbatch size."""
        return self._make_functional(1)

    def _make_functional(self, size: int) -> Functional:
        return functional(
            self._arguments.model,
            self._loss,
            self._eval_loss,
            variables=self._arguments.variables,
            seed=self.seed,
            example=self._init_example(self._shapes(size)),
            rngs=self._arguments.rngs,
            trainable=self._arguments.trainable,
            merge=self._arguments.merge,
        )

    def contrast_digest(self, size: int) -> str:
        """A digest of the loss over the whole batch; empty for other losses."""
        traced = self.over_batch(size)
        return "" if traced is None else program_digest(traced.program[0])

    def _init_example(self, batch: PyTree) -> PyTree:
        """The input that initialises a Linen module."""
        return ToEmbed(batch) if isinstance(self._loss, OverBatch) else batch

    def graph(self, size: int) -> Graph:
        """The loss traced for microbatches of a size.

        Raises:
            LossError: If the loss mixes examples and `mixes_examples` is not set.
            ConfigError: If it is not known how a variable merges over microbatches.
        """
        if size not in self._graphs:
            graph = self._trace(size)
            self._calls(size).check_used()
            if graph.mixes and size < self.batch_size and not self._arguments.mixes_examples:
                raise LossError(
                    f"the loss mixes examples: {graph.mixes} reads several of a microbatch, so "
                    f"microbatches of {size} have another mean than the batch of "
                    f"{self.batch_size}; {_mixing_remedy(self._loss, self.batch_size)}"
                )
            model = self._calls(size).model
            graph = with_rules(
                graph,
                leaf_names(own_variables(model.aux)),
                model.merges,
                model.statistics,
                max(self.batch_size // size, 1),
                lambda: self._trace(self.batch_size),
            )
            self._graphs[size] = dataclasses.replace(graph, precision=self.precision)
        return self._graphs[size]

    def _trace(self, size: int) -> Graph:
        return trace_functional(
            self.functional(size),
            self.shapes(size),
            default=self._arguments.default,
            patterns=self._arguments.patterns,
        )

    @functools.cached_property
    def plain_optimizer(self) -> Optimizer:
        """The optimizer as updates run it, which is traced once."""
        return Optimizer(self.optimizer)

    def optimizer_bytes(self, size: int) -> int:
        """Bytes of the optimizer state of the whole model, equal for every size."""
        if not self._optimizer_bytes:
            trained = self.functional(size).trained
            state = self.plain_optimizer.state_shapes(trained)
            self._optimizer_bytes.append(tree_bytes(state))
        return self._optimizer_bytes[0]

    def traced_update(self, size: int) -> TracedUpdate:
        """The optimizer's update of the whole model, the same for every size."""
        if not self._updates:
            params = jax.eval_shape(lambda tree: tree, self.functional(size).trained)
            norm = self.settings.communication.update_clip_norm
            self._updates.append(traced_update(self.plain_optimizer, params, norm))
        return self._updates[0]

    def facts(self) -> dict[str, str]:
        """The arguments and settings on which processes must agree, by name."""
        names = ("batch_size", "seed", "shuffle", "rngs", "mixes_examples", "default", "merge")
        return {
            **{name: str(getattr(self._arguments, name)) for name in names},
            "nonfinite": self.nonfinite,
            **flat("precision", self.precision.model_dump(mode="json")),
            "number of examples": str(self.source.num_examples),
            **flat("config", self.settings.model_dump(mode="json")),
        }

    def arguments_in_words(self) -> dict[str, str]:
        """The arguments of the job for people, and the settings other than the defaults."""
        arguments, num = self._arguments, self.source.num_examples
        words = {
            "model": _name(arguments.model),
            "loss": _name(arguments.loss),
            "data": _name(arguments.data) if num is None else f"{num:,} examples",
            "batch size": f"{self.batch_size:,}",
            "seed": str(self.seed),
        }
        if arguments.weights is not None:
            words["weights"] = str(arguments.weights)
        settings = self.settings.model_dump(mode="json", exclude_defaults=True)
        if settings:
            by_path = {k: v for name, tree in settings.items() for k, v in flat(name, tree).items()}
            words["settings"] = ", ".join(f"{path}={value}" for path, value in by_path.items())
        return words

    # -- the devices -----------------------------------------------------------------------------

    def gather(self, what: str, text: str) -> tuple[str, ...]:
        """The texts of all processes, in the order of ranks; each must call this equally often."""
        seconds = self.settings.watchdog.progress_timeout_seconds
        return coordination.gather(what, text, timeout_seconds=seconds, check=check_is_there)

    def agree(self, what: str, facts: Callable[[], Facts]) -> None:
        """Stop every process if processes disagree.

        Args:
            what: Name of the comparison; each process must make it equally often.
            facts: Makes the facts to compare; not called in a job of one process.

        Raises:
            LaunchError: With every difference, and the value of each rank.
        """
        if jax.distributed.is_initialized():  # known without devices, unlike their number
            seconds = self.settings.watchdog.progress_timeout_seconds
            differing = functools.partial(
                coordination.differing, timeout_seconds=seconds, check=check_is_there
            )
            agree(what, facts(), differing)

    def devices(self, mesh: jax.sharding.Mesh | None = None) -> Devices:
        """The devices of a mesh, or else all visible ones, by rank."""
        visible = self.settings.cluster.visible_devices
        text = os.environ.get("HXLA_DEVICES")
        started = tuple(map(int, text.split(","))) if text else None
        return job_devices.resolve(mesh, self._described, visible, started)

    def all_devices(self, mesh: jax.sharding.Mesh | None = None) -> tuple[jax.Device, ...]:
        """The same devices, for a plan that uses all of them.

        Raises:
            ConfigError: If some were not started, because a plan leaves them out.
        """
        devices = self.devices(mesh)
        started = tuple(device for device in devices if device is not None)
        if len(started) < len(devices):
            raise ConfigError(
                "hxla run --plan started the devices of its plan only, and the script makes "
                "another plan: train with the plan of --plan, or start it with --mesh alone"
            )
        return started

    @functools.cached_property
    def _described(self) -> Cluster | None:
        file, places = os.environ.get("HXLA_MESH"), chosen_places()
        if not file:
            return None
        cluster = load_cluster(file)
        if places is None:
            return cluster
        return cluster.model_copy(update={"devices": tuple(cluster.devices[i] for i in places)})

    def cluster(self, devices: Devices) -> Cluster:
        """The description of the devices, the same on every process."""
        if devices not in self._clusters:
            taken = functools.partial(given_bytes, self._arguments.variables)
            self._clusters[devices] = job_devices.job_cluster(
                devices, self._described, self.gather, taken
            )
        return self._clusters[devices]

    def opened_weights(self, size: int) -> list[Read | None] | None:
        """The reader of each array of the model from its weight files; None without such files.

        Raises:
            WeightsError: If the files and the model do not suit each other: all faults at once.
            ConfigError: If the model has shapes only, and the files do not have all arrays.
        """
        model, opened = self.functional(size), None
        wanted = [*Wanted.of(model.params), *Wanted.of(own_variables(model.aux))]
        if self._weights is not None:
            opened = open_weights(self._weights, wanted, self.gather)
        if model.can_start or (opened is not None and None not in opened):
            loss_scale = [None] * (self.precision.loss_scale is not None)  # in no file
            return None if opened is None else [*opened, *loss_scale]
        missing = [w.name for w, read in zip(wanted, opened or (), strict=False) if read is None]
        raise ConfigError(
            "the model is shapes only, so there is nothing to begin with"
            + (f" for {', '.join(missing[:5])}" if missing else "")
            + ": pass a function that makes it, lambda: Model(nnx.Rngs(0)), weights, or a "
            "checkpoint_dir that holds its arrays"
        )

    # -- programs --------------------------------------------------------------------------------

    def training(self, size: int, start: int) -> Training:
        """The model, the optimizer and their settings, for lowering.

        Args:
            start: First step, whose data initialises a Linen module.

        Raises:
            ConfigError: For more groups of parameters than trained parameters, or an optimizer that
                needs arguments that no update has.
        """
        model = self.functional(size)
        if model.init_arguments:
            example = self._init_example(self.first_batch(start, size))
            model = dataclasses.replace(model, init_arguments=(example,))
        communication = self.settings.communication
        num_groups = self.settings.optimizer.num_apply_groups
        num_params = max(len(jax.tree.leaves(model.trained)), 1)
        if num_groups > num_params:
            raise ConfigError(
                f"optimizer.num_apply_groups={num_groups} but the model has {num_params} "
                f"parameters: use {num_params} at most"
            )
        self.plain_optimizer.check(model.trained)
        return Training(
            model=model,
            optimizer=self.plain_optimizer,
            seed=self.seed,
            mean=communication.gradient == "mean",
            microbatch_clip_norm=communication.microbatch_clip_norm,
            update_clip_norm=communication.update_clip_norm,
            num_groups=num_groups,
            offload_directory=self.settings.memory.offload.directory,
            over_batch=self.over_batch(size),
            eval_over_batch=self._eval_loss if isinstance(self._eval_loss, OverBatch) else None,
        )

    def programs(
        self,
        plan: Plan,
        devices: Devices,
        tell: Callable[[str], None],
        *,
        keep: bool = False,
    ) -> Programs:
        """The compiled programs of a plan.

        Args:
            devices: By rank.
            keep: Whether the programs of other plans are kept, too.

        Raises:
            LaunchError: If processes lowered different programs.
        """
        key = _without_counts(plan), devices
        if not keep:
            for other in set(self._lowered) - {key}:
                del self._lowered[other]
        if key not in self._lowered:
            size = plan.microbatch_size
            programs = lower(self.training(size, 0), self.graph(size), plan, devices)
            if own_member() is not None:
                programs.step_program = None  # it may leave between the sums and the update
            is_alone = jax.process_count() == 1
            check = None if is_alone else lambda texts: self.agree("programs", lambda: texts)
            with ThreadPoolExecutor(max(4, 2 * len(plan.devices))) as pool:
                programs.compile(pool.map, tell, check)
            self._lowered[key] = programs
        return self._lowered[key]


def sums_form(settings: Config, precision: Precision, reduction: str) -> SumsForm:
    """The form of the sums of gradients.

    Raises:
        ConfigError: For an unknown reduction, or settings that do not suit it.
    """
    if reduction not in ("exact", "float"):
        raise ConfigError(f"reduction={reduction!r}: use 'exact' or 'float'")
    communication = settings.communication
    if communication.dtype != "float32" and reduction == "exact":
        raise ConfigError(
            f"communication.dtype={communication.dtype!r} rounds what exact sums keep: pass "
            "reduction='float' with it, or leave it at 'float32'"
        )
    if precision.loss_scale is not None and reduction == "float":
        raise ConfigError(
            "a scaled loss (float16, or nonfinite='scale') needs reduction='exact': float sums "
            "of scaled gradients are other sums; or pass nonfinite='skip' to scale nothing"
        )
    if communication.limbs != 2 and reduction == "float":
        raise ConfigError(
            f"communication.limbs={communication.limbs!r} is of exact sums, and "
            "reduction='float' has none: leave one of them out"
        )
    return SumsForm(
        kind="exact" if reduction == "exact" else "float",
        limbs=1 if communication.limbs == 1 else 2,  # "auto" is decided with the terms
        dtype=communication.dtype,
        bucket_mib=communication.bucket_mib,
    )


def _mixing_remedy(loss: Any, batch_size: int) -> str:
    """The remedy for a loss that mixes examples."""
    if isinstance(loss, OverBatch):
        return (
            "the result of embed for an example may not depend on other examples: leave that "
            "to contrast, hxla.over_batch(embed, contrast); or, if statistics of microbatches "
            "are meant, pass mixes_examples=True"
        )
    return (
        "for the loss of the whole batch pass hxla.over_batch(embed, contrast), which gets "
        "all its embeddings; or return per-example losses, or (losses, weights) for a mean "
        f"over a mask; or train whole batches, microbatch_size={batch_size}; "
        "or, if statistics or means of each microbatch are meant, as in Flax's BatchNorm or a "
        "similar layer, pass mixes_examples=True"
    )


def _without_counts(plan: Plan) -> Plan:
    """The decisions on which programs depend; counts only if the schedule suits some only."""
    if plan.pipeline is not None and plan.pipeline.needs_even_counts:
        return plan.decisions
    none = [0] * (len(plan.counts) - 1)
    return plan.decisions.with_counts((plan.num_microbatches, *none))


def _name(value: Any) -> str:
    """A class, function or object for people."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return str(named.__qualname__)
