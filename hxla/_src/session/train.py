"""`hxla.train`: a job's plan, a session, and the usual loop over its steps."""

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

from ..choose.microbatch_counts import Counts
from ..core.errors import ConfigError, DataError
from ..core.keywords import check_whole_numbers, suggests_keywords
from ..data.data import is_iterator
from ..plan.plan import Plan
from ..plan.rules import RuleSet
from ..report.history import StepRecord
from ..report.terminal import quietly
from .callbacks import Callback, Callbacks
from .island_steps import check_meets
from .job import PLAN_VARIABLE, Job
from .session import Session
from .values import Result, as_every, check_period


def _arguments_of_job() -> dict[str, str]:
    return {field.name: "hxla.Job" for field in dataclasses.fields(Job)}


@suggests_keywords("hxla.train", _arguments_of_job)
def train(
    job: Job,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    microbatch_size: int | Literal["measured"] | None = None,
    mesh: jax.sharding.Mesh | Mapping[str, int | tuple[int, ...]] | None = None,
    rules: str | RuleSet | None = None,
    stages: int | Sequence[float] | Sequence[Mapping[str, float]] | None = None,
    counts: Counts | None = None,
    reduction: Literal["exact", "float"] = "exact",
    eval_data: Any = None,
    eval_every: int | Literal["epoch"] | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | Literal["epoch"] | datetime.timedelta | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    tensorboard: bool = False,
    logged_learning_rate: float | Callable[[int], Any] | None = None,
    callbacks: Sequence[Callable[[StepRecord, Session], bool | None] | Callback] = (),
    quiet: bool = False,
    log_every: int | None = None,
) -> Result:
    """Train a Flax model on all devices of the job, to the same bits for every placement of work.

    The global batch is cut into microbatches of one shape. Each device runs a number of them that
    suits its measured speed, and the gradients are summed exactly. The trained parameters depend on
    the job, the number of steps and `plan.numerics`, and on nothing else: not on the number of
    devices, their speeds, or rebalances during the run.

    This is `Job.plan`, `Job.open` and a loop over the session; `examples/08_own_loop.py` shows
    that loop.

    Args:
        job: The model, its data, its loss and its optimizer, with the size of the global batch.
        steps: The total number of updates, those before a resume included. Pass either this or
            `epochs`.
        epochs: The total number of passes over the data.
        plan: The plan that runs, or its file. `"auto"` searches for the best plan for the present
            devices, by a short profile of them. None makes a plan by the next five arguments and
            the model's annotations; without any of these and with `auto.auto_parallel` it is
            `"auto"`. The plan of `hxla run --plan` replaces both. The counts of a passed plan stay
            unless `counts="measured"` is passed with it.
        microbatch_size: The number of examples in a microbatch, `"measured"`, or None; see
            `Job.plan`.
        mesh: The mesh axes and their sizes, see `Job.plan`.
        rules: The rule set for the inner axes of the mesh, see `Job.plan`.
        stages: The number of stages of a pipeline, their shares of the work, or a table of devices
            for each, see `Job.plan`.
        counts: The microbatch counts of replicas: `measured` (the default) adapts them to the
            devices, `even` keeps them even, and a sequence gives one for each replica.
        reduction: The form of the sums of gradients, see `Job.plan`.
        eval_data: The data to evaluate on, of any kind that a job takes but an unbounded one.
        eval_every: The number of steps between evaluations, or `"epoch"` for one at the end of each
            pass over the data. The last step is followed by one in any case.
        checkpoint_dir: The folder for checkpoints. If it holds one, training resumes from it, with
            its microbatch size if none is passed. A different loss or order of examples is refused
            by name; a different learning rate or data is reported in a line.
        checkpoint_every: The number of steps between checkpoints, `"epoch"`, or a
            `datetime.timedelta` between them by the clock of rank 0; see `Job.open`.
        run_dir: The folder for `metrics.jsonl` and `report.html`, which is written anew every
            minute; None writes nothing. A run that does not resume keeps an earlier run's metrics
            as `metrics.1.jsonl`.
        tensorboard: Whether to write TensorBoard events to `run_dir` too.
        logged_learning_rate: What records show as the learning rate; see `Job.open`.
        callbacks: Functions that every process calls as `callback(record, session)` after each
            step and its evaluation, which is `record.evaluation`; or objects with methods as in
            `hxla.Callback`, such as `hxla.keep_best`, `hxla.stop_early` and `hxla.log_to`. They
            see the sharded state in `session.state`; `session.gather` gathers whole arrays of it,
            and `session.replace` replaces arrays. A function returns True, False or None. True
            from any process ends training after one more step.
        quiet: Whether to show warnings only, see `Job.open`.
        log_every: The number of steps between progress lines, see `Job.open`.

    Returns:
        The trained model and state, the history, the plan of the last step, and the SHA-256 of
        the state.

    Raises:
        ConfigError: If arguments contradict each other or cannot be satisfied.
        DataError: If the data is malformed or ends before the last step.
        LossError: If the loss returns another form, or mixes examples without `mixes_examples`.
        MeshError: If some devices cannot be used.
        AnnotationError: If a parameter cannot be sharded as an annotation or a rule says.
        PlanError: If no plan fits the devices, or the passed plan does not suit the job.
        NonFiniteError: If a gradient was not finite and `nonfinite="stop"`.
        CheckpointError: If a folder cannot be written, belongs to another session, or has a
            checkpoint of another run.
        WeightsError: If the weights are damaged or do not suit the model: all faults at once.
        LaunchError: If this is one of several processes and they have not joined, or disagree.
        Preempted: After SIGTERM or Ctrl-C, once a checkpoint is written. If it is not caught, the
            exit code is 75, or 143 or 130 without a `checkpoint_dir`.

    Example:
        >>> import hxla, numpy as np, optax
        >>> from flax import nnx
        >>> data = {"x": np.eye(8, dtype=np.float32), "y": np.arange(8, dtype=np.float32)}
        >>> def loss(model, batch):
        ...     return (model(batch["x"])[:, 0] - batch["y"]) ** 2
        >>> model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        >>> job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8)
        >>> result = hxla.train(job, microbatch_size=1, steps=3)
        >>> result.step, len(result.sha256)
        (3, 64)

    References:
        Jia et al., "Whale", USENIX ATC 2022, section 3.3.1 (load balance over unlike devices);
        Li et al., "EasyScale", SC 2023, section 3 (logical workers with an identity).
    """
    arguments = locals().copy()  # for callbacks
    if not isinstance(job, Job):
        raise ConfigError(
            f"job={type(job).__name__} is no hxla.Job: pass hxla.train(hxla.Job(model, data, loss, "
            "optimizer, batch_size=...), steps=...)"
        )
    called = Callbacks(callbacks)
    _check_arguments(steps, epochs, checkpoint_every, checkpoint_dir, eval_every, eval_data)
    called.checked(arguments)
    requested = {
        "microbatch_size": microbatch_size,
        "mesh": mesh,
        "rules": rules,
        "stages": stages,
        "reduction": reduction,
    }
    with quietly(quiet):
        chosen, balance = _plan(job, plan, counts, requested, checkpoint_dir)
    with (
        contextlib.ExitStack() as closing,
        job.open(
            chosen,
            steps=steps,
            epochs=epochs,
            balance=balance,
            mesh=mesh if isinstance(mesh, jax.sharding.Mesh) else None,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            run_dir=run_dir,
            tensorboard=tensorboard,
            logged_learning_rate=logged_learning_rate,
            quiet=quiet,
            log_every=log_every,
        ) as session,
    ):
        evaluates = "none" if eval_data is None else "given"
        session.agree({"eval_every": eval_every, "eval_data": evaluates})
        every = as_every("eval_every", eval_every, session.epochs)
        if session.plan.islands is not None and eval_data is not None:
            check_meets(session.plan.islands, "eval_every", every, session.num_steps)
        called.closed_by(closing)
        is_over = called.started(session)
        if eval_data is not None and session.step_number == session.num_steps:  # no steps are left
            session.evaluate(eval_data)
        for record in session if not is_over else ():
            done = record.step
            is_due = done == session.num_steps or (every is not None and every.is_due(done))
            if eval_data is not None and is_due:
                evaluation = session.evaluate(eval_data)
                record = dataclasses.replace(record, evaluation=evaluation)
            called.stepped(record, session)
        if session.checkpoint_dir is not None:
            session.save()
        called.ended(session)
        return session.result()


def _plan(
    job: Job,
    plan: Plan | str | os.PathLike[str] | None,
    counts: Counts | None,
    requested: dict[str, Any],
    checkpoint_dir: str | os.PathLike[str] | None,
) -> tuple[Plan, bool]:
    """The plan to run, and whether its counts follow measured times."""
    file = os.environ.get(PLAN_VARIABLE)
    if file and plan not in (None, "auto"):
        raise ConfigError(f"hxla run --plan {file}, but the script has plan={plan!r}: give one")
    plan = file or plan
    if plan is None or plan == "auto":
        counts = "measured" if counts is None else counts
        auto = True if plan == "auto" else None
        made = job.plan(auto=auto, counts=counts, checkpoint_dir=checkpoint_dir, **requested)
        return made, isinstance(counts, str) and counts == "measured"
    repeated = [name for name, value in requested.items() if value not in (None, "exact")]
    if repeated and not file:
        raise ConfigError(f"{', '.join(repeated)}: the plan says that already, leave it out")
    chosen = plan if isinstance(plan, Plan) else Plan.read(plan)
    if counts is None:
        return chosen, False
    if isinstance(counts, str) and counts == "measured":
        return chosen, True
    raise ConfigError(
        f"counts={counts!r}: the plan has its own; edit them there (Plan.with_counts), or pass "
        "counts='measured' to let them follow the devices"
    )


def _check_arguments(
    steps: int | None,
    epochs: int | None,
    checkpoint_every: Any,
    checkpoint_dir: Any,
    eval_every: Any,
    eval_data: Any,
) -> None:
    if (steps is None) == (epochs is None):
        raise ConfigError(f"give either steps or epochs, not steps={steps} and epochs={epochs}")
    check_whole_numbers(1, steps=steps, epochs=epochs)
    check_period("eval_every", eval_every)
    check_period("checkpoint_every", checkpoint_every, takes_time=True)
    if checkpoint_every is not None and checkpoint_dir is None:
        raise ConfigError(f"checkpoint_every={checkpoint_every} needs a checkpoint_dir")
    if eval_every is not None and eval_data is None:
        raise ConfigError(f"eval_every={eval_every} needs eval_data")
    if eval_every is not None and is_iterator(eval_data):
        raise DataError(
            f"eval_data is a {type(eval_data).__name__}, which can be read once, and "
            f"eval_every={eval_every} reads it again: pass arrays, or what begins anew "
            "whenever it is iterated, such as a class with __iter__"
        )
