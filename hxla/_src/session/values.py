"""The options of a session, its result, and the table of its plans.

Training evaluates and saves every few steps, every epoch, or by the clock.
"""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax

from ..core.config import BalanceConfig
from ..core.errors import CheckpointError, ConfigError, DataError, PlanError
from ..core.files import shown
from ..core.keywords import as_whole_number, check_whole_numbers
from ..core.types import PyTree
from ..data.data import Epochs
from ..jax.digest import fingerprint
from ..lower.lower import Programs
from ..lower.store import Store
from ..plan.plan import Plan
from ..report.history import History
from ..report.run_tables import html_summary
from ..report.terminal import Waiting
from ..weights.weights import weights_of

#: A number of steps, or the end of each epoch.
StepPeriod = int | Literal["epoch"]
#: The same, or the least time between two.
Period = StepPeriod | datetime.timedelta


@dataclasses.dataclass(frozen=True, kw_only=True)
class Every:
    """A checked period: exactly one attribute is set.

    Attributes:
        steps: The number of steps between two.
        epochs: The epochs, of which each end is one.
        seconds: The least time between two.
    """

    steps: int | None = None
    epochs: Epochs | None = None
    seconds: float | None = None

    def is_due(self, steps: int) -> bool:
        """Whether it is time after a number of steps; by the clock, never."""
        if self.steps is not None:
            return steps % self.steps == 0
        return self.epochs is not None and self.epochs.ends_with(steps)


def check_period(name: str, period: Any, *, takes_time: bool = False) -> None:
    """Refuse what is no period.

    Raises:
        ConfigError: With the argument's name and the accepted values.
    """
    if period is None or period == "epoch":
        return
    accepted = "a number of steps, 'epoch'" + ", or a datetime.timedelta" * takes_time
    if isinstance(period, datetime.timedelta):
        if not takes_time:
            raise ConfigError(
                f"{name}={period}: processes do not evaluate by the clock; pass {accepted}"
            )
        if period <= datetime.timedelta():
            raise ConfigError(f"{name}={period} must be longer than no time")
        return
    if isinstance(period, str):
        raise ConfigError(f"{name}={period!r}: pass {accepted}")
    check_whole_numbers(1, **{name: period})


def as_every(name: str, period: Period | None, epochs: Epochs | None) -> Every | None:
    """A checked period of a job's data.

    Raises:
        DataError: If epochs are asked of data of unknown length.
    """
    if period is None:
        return None
    if isinstance(period, datetime.timedelta):
        return Every(seconds=period.total_seconds())
    if period == "epoch":
        if epochs is None:
            raise DataError(
                f"{name}='epoch' needs data of known length: pass a number of steps, num_examples "
                "with a callable, or an iterable that has a length"
            )
        return Every(epochs=epochs)
    return Every(steps=as_whole_number(period))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of training.

    Attributes:
        model: The NNX model that was passed, updated in place; or the Linen module.
        state: The trained variables in the user's tree (an `nnx.State`, or Linen's variables), with
            the sharding that they had in training: on one device if a replica has one device.
        opt_state: The state of the optimizer, with its sharding in training.
        step: The total number of updates, those before a resume included.
        history: The records of this run.
        plan: The plan of the last step.
        sha256: The SHA-256 of the bytes of parameters, other variables and optimizer state, in 64
            hexadecimal digits. Equal digits mean equal bits.
    """

    model: Any
    state: PyTree
    opt_state: PyTree
    step: int
    history: History
    plan: Plan
    sha256: str

    def __repr__(self) -> str:
        loss = f"loss={self.history.steps[-1].loss:.4g}, " if self.history.steps else ""
        return f"Result(step={self.step}, {loss}sha256='{self.sha256[:16]}...')"

    def _repr_html_(self) -> str:
        return html_summary(self.history)

    @property
    def weights(self) -> PyTree:
        """Parameters and other variables, such as BatchNorm's statistics, for `save_weights`."""
        return weights_of(self.state)


def result_of(programs: Programs, store: Store, step: int, history: History, plan: Plan) -> Result:
    """The result of training: the state in a store, which is also put into the user's model."""
    training, state = programs.training, store.state(step)
    sha256 = fingerprint((state.params, state.aux, state.opt_state), store.gather)
    model, trained = training.model.finish(store.here(state.params), state.aux)
    return Result(
        model=model,
        state=trained,
        opt_state=training.optimizer.restored(state.opt_state, training.model.trained),
        step=step,
        history=history,
        plan=plan,
        sha256=sha256,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """The options of a session.

    Attributes:
        steps: Total number of updates; None if there is no end.
        balance: When microbatch counts move; None if they stay.
        checkpoint_dir: Folder for checkpoints. If it holds one, training resumes from it.
        checkpoint_every: When checkpoints are written; None: at the end only.
        learning_rate: What records show as the learning rate; None: what the optimizer's state has.
        run_dir: Folder for records and the report, or None.
        tensorboard: Whether to write TensorBoard events to `run_dir` too.
        quiet: Whether only warnings are shown.
        log_every: Number of steps between lines; None if these come by time.
        first_step: The first step of a session without a checkpoint.
        is_trial: Whether its steps are not reported.
    """

    steps: int | None = None
    balance: BalanceConfig | None = None
    checkpoint_dir: pathlib.Path | None = None
    checkpoint_every: Every | None = None
    learning_rate: float | Callable[[int], Any] | None = None
    run_dir: pathlib.Path | None = None
    tensorboard: bool = False
    quiet: bool = False
    log_every: int | None = None
    first_step: int = 0
    is_trial: bool = False

    def facts(self) -> dict[str, str]:
        """The options on which processes must agree, by name; only rank 0 writes to `run_dir`."""
        return {
            "steps": str(self.steps),
            "counts follow the devices": str(self.balance is not None),
            "checkpoint_dir": str(self.checkpoint_dir),
            "checkpoint_every": str(self.checkpoint_every),
            "run_dir": "none" if self.run_dir is None else "given",
            "first step": str(self.first_step),
        }

    def waiting(self, plan: Plan) -> Waiting:
        """Progress lines of the session's opening, on rank 0."""
        what = f"trying microbatches of {plan.microbatch_size}" if self.is_trial else "opening"
        return Waiting(what, is_main=jax.process_index() == 0 and not self.quiet)


def plans_to_table(plans: Mapping[int, Plan]) -> list[dict[str, Any]]:
    """Plans by their first step as JSON rows; after a rebalance with counts only."""
    rows: list[dict[str, Any]] = []
    before: Plan | None = None
    for step, plan in plans.items():
        row: dict[str, Any] = {"plan": json.loads(plan.decisions.to_json())}
        if before is not None and all(".num_microbatches:" in line for line in before.diff(plan)):
            row = {"counts": list(plan.counts)}
        rows.append({"first_step": step, **row})
        before = plan
    return rows


def plans_from_table(rows: Iterable[Mapping[str, Any]], *, until: int) -> dict[int, Plan]:
    """Read the rows of `plans_to_table`, for the steps before `until`.

    Raises:
        CheckpointError: If a row is malformed.
    """
    plans: dict[int, Plan] = {}
    plan: Plan | None = None
    try:
        for row in rows:
            if "plan" in row:
                plan = Plan.from_json(json.dumps(row["plan"]))
            elif plan is None:
                raise ValueError("the first of them is missing")
            else:
                plan = plan.with_counts(tuple(row["counts"]))
            step = row["first_step"]
            if type(step) is not int or step < 0:
                raise ValueError(f"first_step is {shown(step)}")
            plans[step] = plan
    except (PlanError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the plans of a checkpoint cannot be read: {error}") from None
    return {step: plan for step, plan in plans.items() if step < until}
