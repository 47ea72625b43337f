"""`hxla.Job`: what is trained, without devices; it makes plans and opens sessions."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Literal

import jax

from ..choose.make_plan import check_joined, make_plan
from ..choose.microbatch_counts import Counts, counts_can_move
from ..choose.planning import PlanRequest
from ..cluster.cluster import Cluster
from ..core.errors import ConfigError
from ..core.files import local_path
from ..core.whole_numbers import as_whole_number, check_whole_numbers
from ..data.data import num_steps
from ..graph.graph import Graph
from ..job.arguments import JobArguments
from ..job.context import JobContext
from ..plan.plan import Plan
from ..plan.rules import RuleSet, as_rules
from ..profile.profile import Profile
from . import capture
from .measure import SessionMeasure
from .restore import chosen_before
from .session import Session
from .validate_plan import check_settings
from .values import SessionOptions

PLAN_VARIABLE = "HXLA_PLAN"  # of hxla run --plan


@dataclasses.dataclass(frozen=True)
class Job(JobArguments):
    """What is trained: a model, its data, its loss and its optimizer, whatever the devices.

    Args:
        model: An `nnx.Module` instance (updated in place), a function without arguments that makes
            one (its arrays are then made where they are to lie, never whole on a device that does
            not hold them), or an unbound `flax.linen.Module`. For plans an abstract module of
            `nnx.eval_shape` will do.
        data: A pytree of arrays with examples in the leading dimension, a sequence of examples, a
            Grain dataset, a callable from index to example, or an iterable of global batches. For
            plans a pytree of `jax.ShapeDtypeStruct` will do.
        loss: A function `loss(model, batch)`, or `loss(model, batch, key)` for one that needs a
            random key, that returns a scalar (the mean over its microbatch), per-example losses of
            shape [microbatch, ...], or `(losses, weights)`; optionally followed by a dictionary of
            metrics. The gradient is that of the global batch's mean. Linen modules come bound, NNX
            models in the mode in which they were given. Or what `over_batch` made.
        optimizer: Any optax transformation, or an `optax.MultiSteps`; it sees the model's own
            parameter tree, and by name the `value` of the global batch's loss and its gradient
            `grad`. One that calls the loss itself, as a line search does, is refused.
        batch_size: The examples of a global batch; it never changes with the hardware.
        seed: The root of sample order, dropout and initialisation.
        shuffle: Whether random-access data is shuffled anew each epoch.
        num_examples: The number of examples of a callable that is to have epochs.
        variables: The initial variables of a Linen module; initialised from `seed` if None.
        rngs: The names of the random streams that a Linen module asks for.
        weights: The weights to begin with instead of the model's own arrays: a `.safetensors` file,
            the index or folder of several, or an `hxla.Weights` that also says how their names map
            to the model's. Each device reads the slices that it holds. A resumed run goes on from
            its checkpoint.
        trainable: Which parameters are trained: a pattern that must be found in a parameter's path,
            from the start of a path component (`"head/"`); an NNX filter (`nnx.LoRAParam`); or a
            list of these. The others have no gradient and no state of the optimizer, which sees the
            tree of the trained ones. By default all are.
        merge: How variables that are no parameters merge where a step has several microbatches,
            such as `{"count": "sum", "best": "max"}`: from a pattern of paths or an NNX filter, as
            in `trainable`, to `mean` or `sum` of the changes, `max` or `min`, element by element,
            `last`, or `refuse`. Without it averages are averaged, what depends on neither the batch
            nor its size is as the loss makes it, and anything else is refused.
        eval_loss: The loss for evaluation; default `loss`. NNX models are then in evaluation mode.
        precision: The dtypes of the computation: `fp32`, `tf32`, `bf16`, `fp16`, the keys of the
            section `precision` in a dictionary or a TOML file, or an `hxla.Precision`. By default
            it is that of `config`, where nothing is said all as the model has it. Parameters,
            gradients' sums and the optimizer stay as they are.
        nonfinite: What to do when a gradient is not finite: `stop`, `skip` the update, or `scale`:
            the loss is scaled by a power of two, which is halved and the update skipped. By
            default `scale` where something computes in float16, else `stop`.
        mixes_examples: Whether the loss of an example may read the others of its microbatch, as a
            contrastive loss does. Then the mean over microbatches is trained, which depends on
            their size; else such a loss is refused where a microbatch is not the whole batch.
            `over_batch` makes one that reads the others of the whole batch.
        default: The annotation, `hxla.replicate(...)` or `hxla.split(...)`, of what no scope
            covers.
        patterns: The ways in which equations can be cut; add your own with
            `hxla.PATTERNS.with_pattern`.
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

    @functools.cached_property
    def _context(self) -> JobContext:
        return JobContext(self)

    def graph(self, microbatch_size: int) -> Graph:
        """Trace the loss for microbatches of a size; nothing is computed.

        Args:
            microbatch_size: The examples of a microbatch.

        Returns:
            The graph; `print` shows its TaskGraphs.

        Raises:
            AnnotationError: If scopes overlap, or an equation runs programs in a way hxla does not
                know.
            LossError: If the loss returns another form, or mixes examples unasked.
        """
        return self._context.graph(microbatch_size)

    def plan(
        self,
        cluster: Cluster | str | None = None,
        *,
        auto: bool | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        microbatch_size: int | Literal["measured"] | None = None,
        mesh: jax.sharding.Mesh | Mapping[str, int | tuple[int, ...]] | None = None,
        rules: str | RuleSet | None = None,
        stages: int | Sequence[float] | None = None,
        counts: Counts = "measured",
        reduction: Literal["exact", "float"] = "exact",
        checkpoint_dir: str | os.PathLike[str] | None = None,
    ) -> Plan:
        """Make a plan: by the model's annotations, by what the arguments say, or by search.

        Under `hxla run --plan FILE` the plan for the devices that are here is that of the file.

        Args:
            cluster: A described cluster that need not be here, or a mesh file or its name; None:
                the devices that are here.
            auto: Whether to search for the fastest plan. For the devices that are here every
                segment of the model is timed first, on each kind of device; for a described cluster
                times are those of `profile` or estimated. By default a search is made for a
                described cluster where neither arguments nor annotations say how to share the
                model, and for the devices that are here where `auto.auto_parallel` is set.
            profile: The measured times for the search and for the cut of stages, or the file of
                them that `hxla profile` wrote.
            microbatch_size: The examples of a microbatch. None stands for that of the checkpoint in
                `checkpoint_dir`, else for one that follows from the batch alone: the largest
                divisor of it with at least 8 microbatches, and no fewer than a microbatch has
                examples, with which the plan fits the memory. `"measured"` tries some, and
                takes the fastest.
            mesh: A mesh, or its axes and their sizes, with an axis `data` for copies of the model,
                inner axes (`tensor`, ...) that rules or annotations cut, and `stage` for pipelines;
                by default every device is used as annotated.
            rules: The rule set, or the name or file of one, that says what the inner axes cut.
            stages: The number of stages of a pipeline, whose work then suits their devices, or one
                number for each stage, its share of the work.
            counts: The microbatches of each copy of the model. `measured` and `even` plans begin
                with even ones, which a session moves if it balances; a sequence gives one for each
                copy.
            reduction: The form of the sums of gradients: `exact`, or `float` for float32 sums whose
                bits depend on the spread.
            checkpoint_dir: The folder that the plan will be opened with. What its checkpoint's run
                has chosen by default or by measurements, and bits depend on, stays: the
                microbatch size, the cut of a pipeline, and the ratio of an uneven split.

        Returns:
            The plan; `print(plan.explain())` shows it, runners-up of a search included.

        Raises:
            ConfigError: If arguments contradict each other, or the model is annotated and a search
                is asked for.
            MeshError: If there are devices that cannot be used.
            PlanError: If nothing fits the devices.
            AnnotationError: If a parameter cannot be cut as annotated or as a rule says.
            LaunchError: If this is one of several processes and they have not joined, or disagree.
        """
        if cluster is None and (file := os.environ.get(PLAN_VARIABLE)):
            return Plan.read(file)
        check_settings()
        job = self._context
        if cluster is None:
            asked = {
                "auto": auto,
                "microbatch_size": microbatch_size,
                "mesh": mesh,
                "rules": rules,
                "stages": stages,
                "counts": counts,
                "reduction": reduction,
                "checkpoint_dir": checkpoint_dir,
            }
            texts = {name: str(value) for name, value in asked.items()}
            job.agree("arguments of the plan", lambda: job.facts() | texts)
        wishes = PlanRequest(
            microbatch_size=microbatch_size,
            mesh=mesh,
            rules=as_rules(rules),
            stages=stages,
            counts=counts,
            reduction=reduction,
            kept=chosen_before(job, checkpoint_dir),
        )
        capture.offer(job, wishes)
        found = make_plan(job, cluster, wishes, SessionMeasure, auto=auto, profile=profile)
        return found.plan

    def open(
        self,
        plan: Plan | str | os.PathLike[str],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        balance: bool = False,
        mesh: jax.sharding.Mesh | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        tensorboard: bool = False,
    ) -> Session:
        """Open a session: compile the plan's programs, put the state in its places, warm up.

        Args:
            plan: The plan, or a file of one, for the devices that are here.
            steps: The updates in all, after which iterating over the session ends. Without it and
                `epochs` no end is known, and only `Session.step` trains.
            epochs: The passes over the data in all, in place of `steps`.
            balance: Whether counts follow measured times, where the form of the plan and its
                devices let them; else they stay those of the plan.
            mesh: The `jax.sharding.Mesh` that the plan was made with, if it was made with one: the
                plan numbers its devices.
            checkpoint_dir: The folder for checkpoints. If it holds one, training resumes from it.
            run_dir: The folder for `metrics.jsonl` and `report.html`; None writes nothing.
            tensorboard: Whether to write TensorBoard events to `run_dir` too.

        Returns:
            The session, a context manager.

        Raises:
            ConfigError: If the model is shapes only and neither weights nor a checkpoint hold its
                arrays, if `tensorboard` lacks a `run_dir`, if both `steps` and `epochs` are given,
                or if `hxla run --plan` was given another plan.
            DataError: If `epochs` are asked of data of unknown length.
            PlanError: If the plan is for another model, batch, cluster or version, with every
                difference, or does not fit the memory.
            CheckpointError: If a folder cannot be written or is another session's, or holds a
                checkpoint of another run.
            WeightsError: If the weights are damaged or do not suit the model: all faults at once.
            LaunchError: If this is one of several processes and they have not joined, or disagree.
        """
        check_settings()
        if steps is not None and epochs is not None:
            raise ConfigError(f"give either steps or epochs, not steps={steps} and epochs={epochs}")
        check_whole_numbers(1, steps=steps, epochs=epochs)
        job = self._context
        capture.offer(job, PlanRequest())
        check_joined()
        if tensorboard and run_dir is None:
            raise ConfigError("tensorboard=True needs a run_dir to write to")
        found = plan if isinstance(plan, Plan) else Plan.read(plan)
        file = os.environ.get(PLAN_VARIABLE)
        if file and found.decisions != Plan.read(file).decisions:
            raise ConfigError(
                f"hxla run --plan {file}, but the script opens another plan: open job.plan(), "
                "which then is that of the file, or start the script without --plan"
            )
        if epochs is not None:
            steps = num_steps(job.source, batch_size=self.batch_size, epochs=epochs)
        devices = job.devices(mesh)
        options = SessionOptions(
            steps=as_whole_number(steps),
            balance=job.settings.balance if balance and counts_can_move(found, devices) else None,
            checkpoint_dir=_folder(checkpoint_dir, "checkpoint_dir"),
            run_dir=_folder(run_dir, "run_dir"),
            tensorboard=tensorboard,
        )
        return Session(job, found, devices, options)


def _folder(path: str | os.PathLike[str] | None, name: str) -> pathlib.Path | None:
    return None if path is None else local_path(path, name, ConfigError)
