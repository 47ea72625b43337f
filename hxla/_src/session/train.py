"""`hxla.train`: the plan of a job, a session, and the usual loop around it."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from ..choose.microbatch_counts import Counts
from ..core.errors import ConfigError, DataError
from ..core.whole_numbers import check_whole_numbers
from ..data.data import is_iterator
from ..plan.plan import Plan
from ..plan.rules import RuleSet
from ..report.history import StepRecord
from .job import PLAN_VARIABLE, Job
from .session import Session
from .values import Result

#: Called after each step and its evaluation, on every process; only True ends training.
Callback = Callable[[StepRecord, Session], bool | None]


def train(
    job: Job,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    microbatch_size: int | Literal["measured"] | None = None,
    mesh: jax.sharding.Mesh | Mapping[str, int | tuple[int, ...]] | None = None,
    rules: str | RuleSet | None = None,
    stages: int | Sequence[float] | None = None,
    counts: Counts | None = None,
    reduction: Literal["exact", "float"] = "exact",
    eval_data: Any = None,
    eval_every: int | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    tensorboard: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train a Flax model on every device of the job, to the same bits however the work is spread.

    The global batch is cut into microbatches of one shape. Each device runs as many as its
    measured speed is worth, and the gradients are summed exactly. The trained parameters depend on
    the job, the number of steps and `plan.numerics`, and on nothing else: not on the number of
    devices, their speeds, or how often work moved between them.

    This is `Job.plan`, `Job.open` and a loop over the session; `examples/08_own_loop.py` writes
    them out.

    Args:
        job: The model, its data, its loss and its optimizer, with the size of the global batch.
        steps: The updates in all, those before a resume included. Give either this or `epochs`.
        epochs: The passes over the data in all.
        plan: The plan that runs, or a file of one. `"auto"` stands for the best plan that a search
            finds for the devices that are here, by a short profile of them. None stands for what
            the next five arguments and the model's annotations say, or for `"auto"` where these say
            nothing and `auto.auto_parallel` is set; the plan of `hxla run --plan` takes the place
            of both. The counts of a given plan stay unless `counts="measured"` is passed with it.
        microbatch_size: The examples of a microbatch, `"measured"`, or None, see `Job.plan`; so are
            `mesh`, `rules`, `stages` and `reduction` below.
        mesh: The mesh axes and their sizes, see `Job.plan`.
        rules: The rule set for the inner axes of the mesh, see `Job.plan`.
        stages: The number of stages of a pipeline or their shares of the work, see `Job.plan`.
        counts: The microbatches of each copy of the model: `measured` (the default) lets them
            follow the devices, `even` keeps them even, and a sequence gives one for each copy.
        reduction: The form of the sums of gradients, see `Job.plan`.
        eval_data: The data to evaluate on, of any kind that a job takes but an unbounded one.
        eval_every: The steps between evaluations; by default only the last step is followed by one.
        checkpoint_dir: The folder for checkpoints. If it holds one, training resumes from it, with
            its microbatch size if none is given. Another loss or order of examples is refused by
            name; that the learning rate or the data is another is said in a line.
        checkpoint_every: The steps between checkpoints; by default one is written only at the end
            and on SIGTERM.
        run_dir: The folder for `metrics.jsonl` and `report.html`; None writes nothing. A run that
            does not resume keeps an earlier run's metrics as `metrics.1.jsonl`.
        tensorboard: Whether to write TensorBoard events to `run_dir` too.
        callbacks: Functions that every process calls as `callback(record, session)` after each
            step and its evaluation, which is `record.evaluation`. They see the state as it lies, in
            `session.state`; `session.gather` makes parts of it whole, and `session.replace` puts
            others in their place. True from any process ends training after the next step; a
            callback returns nothing else, or None or False.

    Returns:
        The trained model and state, the history, the plan of the last step, and the SHA-256 of
        the state.

    Raises:
        ConfigError: If arguments contradict each other or cannot be met.
        DataError: If the data is malformed or shorter than asked.
        LossError: If the loss returns another form, or mixes examples unasked.
        MeshError: If there are devices that cannot be used.
        AnnotationError: If a parameter cannot be cut as annotated or as a rule says.
        PlanError: If nothing fits the devices, or the plan is for something else.
        NonFiniteError: If a gradient was not finite and `nonfinite="stop"`.
        CheckpointError: If a folder cannot be written or is another session's, or holds a
            checkpoint of another run.
        WeightsError: If the weights are damaged or do not suit the model: all faults at once.
        LaunchError: If this is one of several processes and they have not joined, or disagree.
        Preempted: After SIGTERM or Ctrl-C, once a checkpoint is written; uncaught, the script ends
            with 75, or with 143 or 130 where there is no folder for one.

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
        Li et al., "EasyScale", SC 2023, section 3 (logical workers with an identity of their own).
    """
    if not isinstance(job, Job):
        raise ConfigError(
            f"job={type(job).__name__} is no hxla.Job: pass hxla.train(hxla.Job(model, data, loss, "
            "optimizer, batch_size=...), steps=...)"
        )
    every = {"eval_every": eval_every, "checkpoint_every": checkpoint_every}
    _check_arguments(steps, epochs, every, checkpoint_dir, eval_data, callbacks)
    asked = {
        "microbatch_size": microbatch_size,
        "mesh": mesh,
        "rules": rules,
        "stages": stages,
        "reduction": reduction,
    }
    chosen, balance = _plan(job, plan, counts, asked, checkpoint_dir)
    with job.open(
        chosen,
        steps=steps,
        epochs=epochs,
        balance=balance,
        mesh=mesh if isinstance(mesh, jax.sharding.Mesh) else None,
        checkpoint_dir=checkpoint_dir,
        run_dir=run_dir,
        tensorboard=tensorboard,
    ) as session:
        session.agree({**every, "eval_data": "none" if eval_data is None else "given"})
        if eval_data is not None and session.step_number == session.num_steps:  # none left to train
            session.evaluate(eval_data)
        for record in session:
            done = record.step + 1
            is_due = done == session.num_steps or (eval_every and done % eval_every == 0)
            if eval_data is not None and is_due:
                evaluation = session.evaluate(eval_data)
                record = dataclasses.replace(record, evaluation=evaluation)
            for i, callback in enumerate(callbacks):
                if _asks_to_stop(callback(record, session), callback, i):
                    session.stop()
            if checkpoint_every and done % checkpoint_every == 0:
                session.save()
        return session.result()


def _asks_to_stop(answer: Any, callback: Callback, number: int) -> bool:
    """What a callback returned: anything but True, False and None is no answer."""
    if answer is None or isinstance(answer, bool | np.bool_):
        return bool(answer)
    name = getattr(callback, "__qualname__", type(callback).__qualname__)
    raise ConfigError(
        f"callbacks[{number}] ({name}) returned {type(answer).__name__}: True ends training after "
        "the next step, None or False goes on; return nothing else"
    )


def _plan(
    job: Job,
    plan: Plan | str | os.PathLike[str] | None,
    counts: Counts | None,
    asked: dict[str, Any],
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
        made = job.plan(auto=auto, counts=counts, checkpoint_dir=checkpoint_dir, **asked)
        return made, isinstance(counts, str) and counts == "measured"
    given = [name for name, value in asked.items() if value not in (None, "exact")]
    if given and not file:
        raise ConfigError(f"{', '.join(given)}: the plan says that already, leave it out")
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
    every: Mapping[str, int | None],
    checkpoint_dir: Any,
    eval_data: Any,
    callbacks: Any,
) -> None:
    if (steps is None) == (epochs is None):
        raise ConfigError(f"give either steps or epochs, not steps={steps} and epochs={epochs}")
    check_whole_numbers(1, steps=steps, epochs=epochs, **every)
    if callable(callbacks) or not all(map(callable, callbacks)):
        raise ConfigError(
            f"callbacks={callbacks!r} is no list of functions: pass callbacks=[function]"
        )
    if every["checkpoint_every"] is not None and checkpoint_dir is None:
        raise ConfigError(f"checkpoint_every={every['checkpoint_every']} needs a checkpoint_dir")
    if every["eval_every"] is not None and eval_data is None:
        raise ConfigError(f"eval_every={every['eval_every']} needs eval_data")
    if every["eval_every"] is not None and is_iterator(eval_data):
        raise DataError(
            f"eval_data is a {type(eval_data).__name__}, which can be read once, and "
            f"eval_every={every['eval_every']} reads it again: pass arrays, or what begins anew "
            "whenever it is iterated, such as a class with __iter__"
        )
