"""`hxla.train`: a job, its plan, and the usual loop around a session."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import optax

from .._core._config import Config
from .._core._errors import ConfigError
from .._core._types import PyTree
from .._graph._factors import PATTERNS, Patterns
from .._model._annotations import Strategy
from .._model._functional import RNGS, Loss
from .._plan._plan import Plan
from .._plan._rules import RuleSet, load_rules
from .._report._history import StepRecord
from ._counts_of_plan import Counts
from ._data import num_steps
from ._job import Job
from ._make_plan import make_plan
from ._planning import Wishes
from ._session import Session
from ._session_values import Result

PLAN_VARIABLE = "HXLA_PLAN"

#: Called after each step on every process; True ends training after the next step.
Callback = Callable[[StepRecord, Session], bool | None]


def train(
    model: Any,
    data: Any,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    steps: int | None = None,
    epochs: int | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    microbatch_size: int | None = None,
    mesh: jax.sharding.Mesh | Mapping[str, int] | None = None,
    rules: str | RuleSet | None = None,
    stages: int | Sequence[float] | None = None,
    counts: Counts | None = None,
    reduction: Literal["exact", "float"] = "exact",
    seed: int = 0,
    shuffle: bool = True,
    num_examples: int | None = None,
    variables: PyTree | None = None,
    rngs: Sequence[str] = RNGS,
    nonfinite: Literal["stop", "skip"] = "stop",
    default: Strategy | None = None,
    patterns: Patterns = PATTERNS,
    eval_data: Any = None,
    eval_loss: Loss | None = None,
    eval_every: int | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    tensorboard: bool = False,
    callbacks: Sequence[Callback] = (),
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Result:
    """Train a Flax model on every device of the job; the same bits however the work is spread.

    The global batch is cut into microbatches of one shape. Each device runs as many as its
    measured speed is worth, and the gradients are summed exactly, so the trained parameters depend
    on the arguments below and on `plan.numerics`, and on nothing else: not on the number of
    devices, their speeds, or how often work moved between them.

    Args:
        model: See `Job`, as for `data`, `loss`, `optimizer`, `batch_size`, `seed`, `shuffle`,
            `num_examples`, `variables`, `rngs`, `nonfinite`, `default`, `patterns`, `eval_loss` and
            `config`.
        data: See `Job`.
        loss: See `Job`.
        optimizer: See `Job`.
        batch_size: Examples of a global batch.
        steps: Updates in all. Give either this or `epochs`.
        epochs: Passes over the data.
        plan: What runs: a plan, a file of one, or `auto`, the best that a search finds for the
            devices that are here; None: what the next five arguments and the model's annotations
            mean. A plan's counts stay unless `counts="measured"` is given with it.
        microbatch_size: See `Job.plan`, as for `mesh`, `rules`, `stages` and `reduction`.
        mesh: See `Job.plan`.
        rules: See `Job.plan`.
        stages: See `Job.plan`.
        counts: `measured` (the default: counts follow the devices), `even`, or one per copy of the
            model.
        reduction: See `Job.plan`.
        seed: See `Job`.
        shuffle: See `Job`.
        num_examples: See `Job`.
        variables: See `Job`.
        rngs: See `Job`.
        nonfinite: See `Job`.
        default: See `Job`.
        patterns: See `Job`.
        eval_data: Data to evaluate on; any kind that `data` takes but an unbounded one.
        eval_loss: See `Job`.
        eval_every: Steps between evaluations; default: only after the last step.
        checkpoint_dir: Folder for checkpoints. If it holds one, training resumes from it.
        checkpoint_every: Steps between checkpoints; default: only at the end and on SIGTERM.
        run_dir: Folder for `metrics.jsonl` and `report.html`; nothing is written if None.
        tensorboard: Also write TensorBoard events to `run_dir`.
        callbacks: Called on every process as `callback(record, session)` after each step; True from
            any process ends training after the next step.
        config: See `Job`.

    Returns:
        The trained model and state, the history and the plan.

    Raises:
        ConfigError: Arguments that contradict each other or cannot be met.
        DataError: Data that is malformed or shorter than asked.
        LossError: A loss of another form.
        MeshError: Devices that cannot be used.
        PlanError: Nothing fits the devices, or the plan is for something else.
        NonFiniteError: A gradient was not finite and `nonfinite="stop"`.
        CheckpointError: A folder that cannot be written, or a checkpoint of another run.
        Preempted: After SIGTERM, once a checkpoint is written; uncaught, the script ends with 75.

    Example:
        >>> import jax, numpy as np, optax, hxla
        >>> from flax import nnx
        >>> data = {"x": np.eye(8, dtype=np.float32), "y": np.arange(8.0, dtype=np.float32)}
        >>> def loss(model, batch):
        ...     return (model(batch["x"])[:, 0] - batch["y"]) ** 2
        >>> model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        >>> result = hxla.train(model, data, loss, optax.sgd(0.1), batch_size=8,
        ...                     microbatch_size=1, steps=3)
        >>> result.step
        3

    References:
        Jia et al., "Whale", USENIX ATC 2022 (load balance over unlike devices).
        Li et al., "EasyScale", SC 2023 (logical workers with an identity of their own).
    """
    every = {"eval_every": eval_every, "checkpoint_every": checkpoint_every}
    _check_arguments(steps, epochs, every, checkpoint_dir, eval_data)
    job = Job(
        model,
        data,
        loss,
        optimizer,
        batch_size=batch_size,
        seed=seed,
        shuffle=shuffle,
        num_examples=num_examples,
        variables=variables,
        rngs=rngs,
        eval_loss=eval_loss,
        nonfinite=nonfinite,
        default=default,
        patterns=patterns,
        config=config,
    )
    asked = {
        "microbatch_size": microbatch_size,
        "mesh": mesh,
        "rules": rules,
        "stages": stages,
        "reduction": reduction,
    }
    chosen, balance = _plan(job, plan, counts, asked)
    if steps is None:
        source = job._traced.source
        steps = num_steps(source, batch_size=batch_size, epochs=epochs or 0)
    with job.open(
        chosen,
        steps=steps,
        balance=balance,
        mesh=mesh if isinstance(mesh, jax.sharding.Mesh) else None,
        checkpoint_dir=checkpoint_dir,
        run_dir=run_dir,
        tensorboard=tensorboard,
    ) as session:
        for record in session:
            done = record.step + 1
            for callback in callbacks:
                if callback(record, session):
                    session.stop()
            if eval_every and done % eval_every == 0 and done < steps:
                session.evaluate(eval_data)
            if checkpoint_every and done % checkpoint_every == 0:
                session.save()
        if eval_data is not None and session.step_number == steps:
            session.evaluate(eval_data)
        return session.result()


def _plan(
    job: Job,
    plan: Plan | str | os.PathLike[str] | None,
    counts: Counts | None,
    asked: dict[str, Any],
) -> tuple[Plan, bool]:
    """The plan to run, and whether its counts follow measured times."""
    file = os.environ.get(PLAN_VARIABLE)
    if file and plan is not None:
        raise ConfigError(f"hxla run --plan {file}, but the script has plan={plan!r}: give one")
    plan = file or plan
    if plan is None or plan == "auto":
        rules = asked.pop("rules")
        wishes = Wishes(
            rules=load_rules(rules) if isinstance(rules, str) else rules,
            counts=counts if counts is not None else "measured",
            **asked,
        )
        return make_plan(job._traced, None, wishes, auto=True if plan == "auto" else None)
    given = [name for name, value in asked.items() if value not in (None, "exact")]
    if given and not file:
        raise ConfigError(f"{', '.join(given)}: the plan says that already, leave it out")
    found = plan if isinstance(plan, Plan) else Plan.read(plan)
    if counts is None or counts == "measured":
        return found, counts == "measured"
    raise ConfigError(
        f"counts={counts!r}: the plan has its own; edit them there (Plan.with_counts), or pass "
        "counts='measured' to let them follow the devices"
    )


def _check_arguments(
    steps: int | None,
    epochs: int | None,
    every: Mapping[str, int | None],
    checkpoint_dir: Any,
    eval_data: Any,
) -> None:
    if (steps is None) == (epochs is None):
        raise ConfigError(f"give either steps or epochs, not steps={steps} and epochs={epochs}")
    numbers = {"steps": steps, "epochs": epochs, **every}
    low = [f"{k}={v}" for k, v in numbers.items() if v is not None and v < 1]
    if low:
        raise ConfigError(f"{', '.join(low)} must be at least 1")
    if every["checkpoint_every"] is not None and checkpoint_dir is None:
        raise ConfigError(f"checkpoint_every={every['checkpoint_every']} needs a checkpoint_dir")
    if every["eval_every"] is not None and eval_data is None:
        raise ConfigError(f"eval_every={every['eval_every']} needs eval_data")
