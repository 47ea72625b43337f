"""`hxla.Job`: a training task without devices, which makes plans and opens sessions.

`hxla plan` and `hxla profile` run a script up to its first job.
"""

import contextvars
import copy
import dataclasses
import datetime
import functools
import inspect
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

from ..choose.make_plan import check_joined, plan_job
from ..choose.microbatch_counts import Counts, counts_can_move
from ..choose.planning import PlanRequest
from ..cluster.cluster import Cluster
from ..core.errors import ConfigError
from ..core.files import local_path
from ..core.keywords import (
    as_whole_number,
    check_whole_numbers,
    suggests_arguments,
    suggests_keywords,
)
from ..data.data import epochs_of, num_steps
from ..graph.graph import Graph
from ..jax.tracing import brief_absence
from ..job.context import JobArguments, JobContext
from ..launch.join import run_as_main
from ..plan.plan import Plan
from ..plan.rules import RuleSet, as_rules
from ..profile.profile import Profile
from .measure import SessionMeasure
from .opening import check_settings
from .saved_state import chosen_before
from .session import Session
from .values import SessionOptions, as_every, check_period

_is_wanted = contextvars.ContextVar("hxla_capture", default=False)


class Captured(BaseException):
    """Carries a job out of its script, past any `except Exception` of the script."""

    def __init__(self, job: JobContext, request: PlanRequest):
        super().__init__("a job was captured")
        self.job, self.request = job, request


def offer(job: JobContext, request: PlanRequest) -> None:
    """End the script here if it runs for its job only."""
    if _is_wanted.get():
        raise Captured(job, request)


def job_of(command: Sequence[str]) -> tuple[JobContext, PlanRequest]:
    """The first job that a script plans, opens or trains, and its plan request.

    Args:
        command: A Python script and its arguments.

    Raises:
        ConfigError: If the script ends without a job.
    """
    token = _is_wanted.set(True)
    try:
        with brief_absence():  # scripts often make shapes only
            run_as_main(command)
    except Captured as captured:
        return captured.job, captured.request
    finally:
        _is_wanted.reset(token)
    raise ConfigError(f"{command[0]} ended without a call of hxla.train, Job.plan or Job.open")


PLAN_VARIABLE = "HXLA_PLAN"  # of hxla run --plan


def _arguments_of_train() -> dict[str, str]:
    names = {*inspect.signature(Job.plan).parameters, *inspect.signature(Job.open).parameters}
    more = ("eval_data", "eval_every", "callbacks")
    return dict.fromkeys((*sorted(names - {"self"}), *more), "hxla.train")


@suggests_arguments("hxla.Job", _arguments_of_train)
@dataclasses.dataclass(frozen=True)
class Job(JobArguments):
    """A training task: a model, its data, its loss and its optimizer, for any devices.

    Args:
        model: An `nnx.Module` instance (updated in place), a function without arguments that makes
            one, or an unbound `flax.linen.Module`. The arrays of an instance are in host memory
            while a session is open, and can be read there. Arrays of a function are made sharded
            as they are placed, so no device needs room for whole ones. An abstract module of
            `nnx.eval_shape` is enough for plans.
        data: A pytree of arrays with examples in the leading dimension, a sequence of examples, a
            Grain dataset, a callable from index to example, or an iterable of global batches. A
            pytree of `jax.ShapeDtypeStruct` is enough for plans.
        loss: A function `loss(model, batch)`, or `loss(model, batch, key)` for one that needs a
            random key, that returns a scalar (the mean over its microbatch), per-example losses of
            shape [microbatch, ...], or `(losses, weights)`; optionally followed by a dictionary of
            metrics. The gradient is that of the global batch's mean. Linen modules are passed
            bound, NNX models in the mode of `model`. A result of `over_batch` is accepted too.
        optimizer: Any optax transformation, or an `optax.MultiSteps`. Its update gets the model's
            parameter tree and, as keyword arguments, the loss of the global batch (`value`) and its
            gradient (`grad`). An optimizer that calls the loss, such as a line search, is refused.
        batch_size: The number of examples in a global batch; it never changes with the hardware.
        seed: The root of sample order, dropout and initialisation.
        shuffle: Whether random-access data is shuffled anew each epoch.
        num_examples: The number of examples of a callable, which it needs for epochs.
        variables: The initial variables of a Linen module; initialised from `seed` if None. Those
            on a device stay there while a session is open.
        rngs: The names of the random streams of a Linen module.
        weights: The initial weights, in place of the model's arrays: a `.safetensors` file, the
            index or folder of several, or an `hxla.Weights`, which also maps their names to the
            model's. Each device reads only its shards. A resumed run takes its checkpoint instead.
        trainable: Which parameters are trained: a pattern that must match in a parameter's path,
            from the start of a path component (`"head/"`); an NNX filter (`nnx.LoRAParam`); or a
            list of these. All other parameters have no gradient, and the optimizer sees the tree of
            the trained ones only. By default all parameters are trained.
        merge: How variables other than parameters merge over the microbatches of a step, such as
            `{"count": "sum", "best": "max"}`. A key is a pattern or an NNX filter, as in
            `trainable`. A value is `mean` or `sum` of the changes, elementwise `max` or `min`,
            `last`, or `refuse`. By default averages are averaged, variables that depend on neither
            the batch nor its size are kept as the loss makes them, and all others are refused.
        eval_loss: The loss for evaluation, with NNX models in evaluation mode; by default `loss`.
        precision: The dtypes of the computation: `fp32`, `tf32`, `bf16`, `fp16`, the keys of the
            section `precision` in a dictionary or a TOML file, or an `hxla.Precision`. The default
            is that of `config`, or else the dtypes of the model. Parameters, sums of gradients and
            the optimizer keep their dtypes.
        nonfinite: The reaction to a gradient that is not finite: `stop`, `skip` the update, or
            `scale`. With `scale` the loss is scaled by a power of two, which is then halved, and
            the update is skipped. The default is `scale` if any computation is in float16, else
            `stop`.
        mixes_examples: Whether the loss of an example may read other examples of its microbatch, as
            a contrastive loss does. The trained loss is then the mean over microbatches, which
            depends on their size. By default such a loss is refused unless a microbatch is the
            whole batch. `over_batch` makes a loss that reads other examples of the whole batch.
        default: The annotation, `hxla.replicate(...)` or `hxla.split(...)`, of equations outside
            all scopes.
        patterns: The ways in which equations can be split; `hxla.PATTERNS.with_pattern` adds one.
        config: Further settings: an `hxla.Config`, nested dictionaries, or the path of a `.toml` or
            `.json` file.

    Raises:
        ConfigError: If an argument is of the wrong kind.
        LossError: If the loss closes over a random key or an `nnx.Rngs`.

    Example:
        >>> import hxla, numpy as np, optax
        >>> from flax import nnx
        >>> data = {"x": np.eye(8, dtype=np.float32), "y": np.arange(8, dtype=np.float32)}
        >>> def loss(model, batch):
        ...     return (model(batch["x"])[:, 0] - batch["y"]) ** 2
        >>> model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        >>> job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8)
        >>> plan = job.plan(microbatch_size=2)
        >>> with job.open(plan, steps=3) as session:
        ...     losses = [record.loss for record in session]
        >>> losses[0] > losses[-1]
        True
    """

    def __repr__(self) -> str:
        model, loss = _name_of(self.model), _name_of(self.loss)
        return f"Job(model={model}, loss={loss}, batch_size={self.batch_size})"

    @functools.cached_property
    def _context(self) -> JobContext:
        # A copy: a cycle would keep the model's arrays until Python looks for cycles.
        return JobContext(copy.copy(self))

    def graph(self, microbatch_size: int) -> Graph:
        """Trace the loss for microbatches of a size; nothing is computed.

        Args:
            microbatch_size: The examples of a microbatch.

        Returns:
            The graph; `print` shows its TaskGraphs.

        Raises:
            AnnotationError: If scopes overlap, or an equation calls programs in an unknown way.
            LossError: If the loss returns another form, or mixes examples without `mixes_examples`.
        """
        return self._context.graph(microbatch_size)

    @suggests_keywords("Job.plan")
    def plan(
        self,
        cluster: Cluster | str | None = None,
        *,
        auto: bool | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        microbatch_size: int | Literal["measured"] | None = None,
        mesh: jax.sharding.Mesh | Mapping[str, int | tuple[int, ...]] | None = None,
        rules: str | RuleSet | None = None,
        stages: int | Sequence[float] | Sequence[Mapping[str, float]] | None = None,
        counts: Counts = "measured",
        reduction: Literal["exact", "float"] = "exact",
        checkpoint_dir: str | os.PathLike[str] | None = None,
    ) -> Plan:
        """Make a plan by the model's annotations, by the arguments, or by search.

        Under `hxla run --plan FILE` the plan of the file is returned for the present devices.

        Args:
            cluster: A description of any cluster, or a mesh file or its name. None stands for the
                present devices.
            auto: Whether to search for the fastest plan. For the present devices every segment of
                the model is timed first, on each kind of device. For a described cluster times are
                those of `profile`, or estimates. By default a search is made for a described
                cluster if neither arguments nor annotations distribute the model, and for the
                present devices if `auto.auto_parallel` is set.
            profile: The measured times for the search and for the cut of stages, or their file from
                `hxla profile`.
            microbatch_size: The number of examples in a microbatch. `"measured"` tries some sizes
                and takes the fastest. None takes the size of the checkpoint in `checkpoint_dir`, or
                else one that follows from the batch alone: its largest divisor with which the plan
                fits the memory, with at least 8 microbatches and at least as many microbatches as
                examples in each.
            mesh: A mesh, or its axes and their sizes: an axis `data` for replicas, inner axes
                (`tensor`, ...) over which rules or annotations shard, and `stage` for pipelines. By
                default every device is used as annotated.
            rules: The rule set, or its name or file, that shards over the inner axes.
            stages: The number of stages of a pipeline, which are then balanced for their devices,
                or the share of the work of each stage. Or a table for each stage, whose devices
                and axes may be unlike those of the others: `[{"devices": 1}, {"tensor": 2}]`. A
                stage has the axes `tensor`, over which rules or the least communication shard its
                parameters, and `data`, over which a microbatch is cut. `"work"` is its share of the
                work; by default it is its number of devices.
            counts: The microbatch counts of replicas. `measured` and `even` plans begin with even
                counts, which a session moves if it balances. A sequence gives one for each replica.
            reduction: The form of the sums of gradients: `exact`, or `float` for float32 sums whose
                bits depend on the placement.
            checkpoint_dir: The folder with which the plan will be opened. Choices of its
                checkpoint's run that decide bits stay, whether default or measured: the microbatch
                size, the cut of a pipeline, and the ratio of an uneven split.

        Returns:
            The plan; `print(plan.explain())` shows it, runners-up of a search included.

        Raises:
            ConfigError: If arguments contradict each other, or a search is asked for an annotated
                model.
            MeshError: If some devices cannot be used.
            PlanError: If no plan fits the devices.
            AnnotationError: If a parameter cannot be sharded as an annotation or a rule says.
            LaunchError: If this is one of several processes and they have not joined, or disagree.
        """
        if cluster is None and (file := os.environ.get(PLAN_VARIABLE)):
            return Plan.read(file)
        check_settings()
        job = self._context
        if cluster is None:
            arguments = {
                "auto": auto,
                "microbatch_size": microbatch_size,
                "mesh": mesh,
                "rules": rules,
                "stages": stages,
                "counts": counts,
                "reduction": reduction,
                "checkpoint_dir": checkpoint_dir,
            }
            texts = {name: str(value) for name, value in arguments.items()}
            job.agree("arguments of the plan", lambda: job.facts() | texts)
        request = PlanRequest(
            microbatch_size=microbatch_size,
            mesh=mesh,
            rules=as_rules(rules),
            stages=stages,
            counts=counts,
            reduction=reduction,
            kept=chosen_before(job, checkpoint_dir),
        )
        offer(job, request)
        made = plan_job(job, cluster, request, SessionMeasure, auto=auto, profile=profile)
        return made.plan

    @suggests_keywords("Job.open")
    def open(
        self,
        plan: Plan | str | os.PathLike[str],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        balance: bool = False,
        mesh: jax.sharding.Mesh | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | Literal["epoch"] | datetime.timedelta | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        tensorboard: bool = False,
        logged_learning_rate: float | Callable[[int], Any] | None = None,
        quiet: bool = False,
        log_every: int | None = None,
    ) -> Session:
        """Open a session: compile the plan's programs, place the state, and warm up.

        Args:
            plan: The plan for the present devices, or its file.
            steps: The total number of updates, after which iterating over the session ends. Without
                `steps` and `epochs` the session has no end, and only `Session.step` trains.
            epochs: The total number of passes over the data, in place of `steps`.
            balance: Whether microbatch counts follow measured times, if the plan and its devices
                allow that. Otherwise the counts of the plan stay.
            mesh: The `jax.sharding.Mesh` from which the plan was made, if any; the plan numbers its
                devices.
            checkpoint_dir: The folder for checkpoints. If it holds one, training resumes from it.
            checkpoint_every: When the session writes checkpoints: a number of steps between them;
                `"epoch"`, at the end of each pass over the data; or a `datetime.timedelta`, the
                least time between them, by the clock of rank 0 and after the same step everywhere.
                By default one is written only by `result` and when the session ends early.
            run_dir: The folder for `metrics.jsonl` and `report.html`; None writes nothing.
            tensorboard: Whether to write TensorBoard events to `run_dir` too.
            logged_learning_rate: What records show as the learning rate, for an optimizer whose
                state does not have it: a number, or the optax schedule of the optimizer, which is
                called with the number of steps done. It changes nothing in training. The learning
                rate of `optax.inject_hyperparams` is shown without it.
            quiet: Whether to show warnings only. What is shown goes through the logger `hxla` to
                standard error, or to the root logger's handlers if the program has configured
                logging at level INFO.
            log_every: The number of steps between progress lines. By default a terminal has a live
                line, and elsewhere a line comes every ten seconds.

        Returns:
            The session, a context manager.

        Raises:
            ConfigError: If the model is shapes only and neither weights nor a checkpoint have its
                arrays, if `tensorboard` lacks a `run_dir`, if both `steps` and `epochs` are given,
                or if `hxla run --plan` was given another plan.
            DataError: If `epochs` is set and the length of the data is unknown.
            PlanError: If the plan is for another model, batch, cluster or version, with every
                difference, or does not fit the memory.
            CheckpointError: If a folder cannot be written, belongs to another session, or has a
                checkpoint of another run.
            WeightsError: If the weights are damaged or do not suit the model: all faults at once.
            LaunchError: If this is one of several processes and they have not joined, or disagree.
        """
        check_settings()
        if steps is not None and epochs is not None:
            raise ConfigError(f"give either steps or epochs, not steps={steps} and epochs={epochs}")
        check_whole_numbers(1, steps=steps, epochs=epochs, log_every=log_every)
        check_period("checkpoint_every", checkpoint_every, takes_time=True)
        if checkpoint_every is not None and checkpoint_dir is None:
            raise ConfigError(f"checkpoint_every={checkpoint_every} needs a checkpoint_dir")
        job = self._context
        offer(job, PlanRequest())
        check_joined()
        if tensorboard and run_dir is None:
            raise ConfigError("tensorboard=True needs a run_dir to write to")
        chosen = plan if isinstance(plan, Plan) else Plan.read(plan)
        file = os.environ.get(PLAN_VARIABLE)
        if file and chosen.decisions != Plan.read(file).decisions:
            raise ConfigError(
                f"hxla run --plan {file}, but the script opens another plan: open job.plan(), "
                "which then is that of the file, or start the script without --plan"
            )
        if epochs is not None:
            steps = num_steps(job.source, batch_size=self.batch_size, epochs=epochs)
        devices = job.devices(mesh)
        every = as_every(
            "checkpoint_every", checkpoint_every, epochs_of(job.source, self.batch_size)
        )
        options = SessionOptions(
            steps=as_whole_number(steps),
            balance=job.settings.balance if balance and counts_can_move(chosen, devices) else None,
            checkpoint_dir=_folder(checkpoint_dir, "checkpoint_dir"),
            checkpoint_every=every,
            learning_rate=logged_learning_rate,
            run_dir=_folder(run_dir, "run_dir"),
            tensorboard=tensorboard,
            quiet=quiet,
            log_every=as_whole_number(log_every),
        )
        return Session(job, chosen, devices, options)


def _name_of(value: Any) -> str:
    """The name of a function or class, or of the class of an object."""
    return str(getattr(value, "__name__", type(value).__name__))


def _folder(path: str | os.PathLike[str] | None, name: str) -> pathlib.Path | None:
    return None if path is None else local_path(path, name, ConfigError)
