"""`hxla.Job`: what is trained, without devices; it makes plans and opens sessions."""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import optax

from .._cluster._cluster import Cluster
from .._core._config import Config, as_config
from .._core._errors import ConfigError
from .._core._types import PyTree
from .._graph._factors import PATTERNS, Patterns
from .._graph._graph import Graph
from .._model._annotations import Strategy
from .._model._functional import RNGS, Loss
from .._plan._plan import Plan
from .._plan._rules import RuleSet, load_rules
from .._profile._profile import Profile
from . import _capture
from ._counts_of_plan import Counts
from ._make_plan import check_joined, make_plan
from ._planning import Wishes
from ._session import Session
from ._session_values import SessionOptions
from ._traced_job import TracedJob


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained: a model, its data, its loss and its optimizer, whatever the devices.

    Args:
        model: An `nnx.Module` instance (updated in place), a function without arguments that makes
            one (its arrays are then made where they are to lie, never whole on a device that does
            not hold them), or an unbound `flax.linen.Module`. For plans, an abstract module of
            `nnx.eval_shape` will do.
        data: A pytree of arrays, a sequence, a Grain dataset, a callable from index to example, or
            an iterable of global batches. For plans, a pytree of `jax.ShapeDtypeStruct` will do.
        loss: `loss(model, batch)`, returning a scalar (the mean over its microbatch), per-example
            losses, or `(losses, weights)`; optionally followed by a dictionary of metrics. The
            gradient is that of the global batch's mean. Linen modules come bound.
        optimizer: Any optax transformation; it sees the model's own parameter tree.
        batch_size: Examples of a global batch; never changes with the hardware.
        seed: Root of sample order, dropout and initialisation.
        shuffle: Whether random-access data is shuffled anew each epoch.
        num_examples: Of a callable that is to have epochs.
        variables: Initial variables of a Linen module; initialised from `seed` if None.
        rngs: Names of the random streams that a Linen module asks for.
        eval_loss: Loss for evaluation; default `loss`. NNX models are in evaluation mode.
        nonfinite: On a gradient that is not finite, `stop` or `skip` the update.
        default: `hxla.replicate(...)` or `hxla.split(...)` for what no annotation covers.
        patterns: Which dimensions of an equation can be cut together; add your own with
            `hxla.PATTERNS.with_pattern`.
        config: Further settings: an `hxla.Config`, dictionaries, or a `.toml` or `.json` file.

    Example:
        >>> job = hxla.Job(model, data, loss, optax.adam(1e-3), batch_size=256)
        >>> plan = job.plan()
        >>> with job.open(plan, steps=100) as session:
        ...     for record in session:
        ...         print(record.loss)
    """

    model: Any
    data: Any
    loss: Loss
    optimizer: optax.GradientTransformation
    _: dataclasses.KW_ONLY
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    num_examples: int | None = None
    variables: PyTree | None = None
    rngs: Sequence[str] = RNGS
    eval_loss: Loss | None = None
    nonfinite: Literal["stop", "skip"] = "stop"
    default: Strategy | None = None
    patterns: Patterns = PATTERNS
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.nonfinite not in ("stop", "skip"):
            raise ConfigError(f"nonfinite={self.nonfinite!r}: use 'stop' or 'skip'")
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int):
            raise ConfigError(f"batch_size={self.batch_size!r} is no whole number")

    @functools.cached_property
    def _traced(self) -> TracedJob:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        settings = as_config(fields.pop("config"))
        eval_loss = fields.pop("eval_loss") or self.loss
        return TracedJob(**fields, eval_loss=eval_loss, settings=settings)

    def graph(self, microbatch_size: int) -> Graph:
        """The loss traced for microbatches of a size; `print` shows its TaskGraphs."""
        return self._traced.graph(microbatch_size)

    def plan(
        self,
        cluster: Cluster | str | None = None,
        *,
        auto: bool | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        microbatch_size: int | None = None,
        mesh: jax.sharding.Mesh | Mapping[str, int] | None = None,
        rules: str | RuleSet | None = None,
        stages: int | Sequence[float] | None = None,
        counts: Counts = "measured",
        reduction: Literal["exact", "float"] = "exact",
    ) -> Plan:
        """Make a plan: by the model's annotations, by what the arguments say, or by search.

        Args:
            cluster: A described cluster, or a mesh file or its name, that need not be here; None:
                the devices that are here.
            auto: Search for the fastest plan. On devices that are here every segment is measured
                first; for a described cluster, times are those of `profile` or estimated. Default:
                for a described cluster without `mesh` and `stages`, and where `auto.auto_parallel`
                is set.
            profile: Measured times for the search, of `hxla profile`.
            microbatch_size: Examples of a microbatch; measured and chosen if None.
            mesh: A mesh, or its axes and their sizes, with an axis `data` for copies of the model,
                inner axes (`tensor`, ...) that rules or annotations cut, and `stage` for pipelines;
                default: every device, used as annotated.
            rules: Rule set, or the name or file of one, that says what the inner axes cut.
            stages: Cut the model into a pipeline: so many stages of work that suits their devices,
                or one number per stage, the shares of the work.
            counts: Microbatches of each copy of the model: `measured` and `even` plans begin with
                even ones, which a session moves if they are measured; or one number per copy.
            reduction: `exact`, or `float` for float32 sums whose bits depend on the spread.

        Returns:
            The plan; `print(plan.explain())` shows it.

        Raises:
            ConfigError: Arguments that contradict each other or cannot be met.
            MeshError: Devices that cannot be used.
            PlanError: If nothing fits the devices.
            AnnotationError: If a parameter cannot be cut as annotated or as a rule says.
        """
        wishes = Wishes(
            microbatch_size=microbatch_size,
            mesh=mesh,
            rules=load_rules(rules) if isinstance(rules, str) else rules,
            stages=stages,
            counts=counts,
            reduction=reduction,
        )
        return make_plan(self._traced, cluster, wishes, auto=auto, profile=profile)[0]

    def open(
        self,
        plan: Plan | str | os.PathLike[str],
        *,
        steps: int | None = None,
        balance: bool = False,
        mesh: jax.sharding.Mesh | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        tensorboard: bool = False,
    ) -> Session:
        """Open a session: compile the plan's programs, put the state in its places, warm up.

        Args:
            plan: For these devices, or a file of one.
            steps: Updates in all, after which iterating over the session ends.
            balance: Whether counts follow measured times; else they stay those of the plan.
            mesh: That the plan was made with, if it was one of jax's: the plan numbers its devices.
            checkpoint_dir: Folder for checkpoints. If it holds one, training resumes from it.
            run_dir: Folder for `metrics.jsonl` and `report.html`; nothing is written if None.
            tensorboard: Also write TensorBoard events to `run_dir`.

        Returns:
            The session, a context manager.

        Raises:
            PlanError: If the plan is for another model, batch, cluster or version: every
                difference.
            CheckpointError: A folder that cannot be written, or a checkpoint of another run.
        """
        job = self._traced
        _capture.offer(job, Wishes())
        check_joined()
        if tensorboard and run_dir is None:
            raise ConfigError("tensorboard=True needs a run_dir to write to")
        found = plan if isinstance(plan, Plan) else Plan.read(plan)
        options = SessionOptions(
            steps=steps,
            balance=job.settings.balance if balance else None,
            checkpoint_dir=checkpoint_dir,
            run_dir=run_dir,
            tensorboard=tensorboard,
        )
        return Session(job, found, job.devices(mesh), options)
