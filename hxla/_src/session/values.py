"""How a session is opened, and what it leaves."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from ..core.config import BalanceConfig
from ..core.errors import CheckpointError, PlanError
from ..core.files import shown
from ..core.types import PyTree
from ..plan.plan import Plan
from ..report.history import History
from ..report.progress import Waiting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What training made.

    Attributes:
        model: The NNX model that was passed, updated in place; or the Linen module.
        state: The trained variables in the user's own tree (an `nnx.State`, or Linen's variables).
            They lie as training held them: on one device where a copy of the model had one.
        opt_state: The state of the optimizer, likewise.
        step: The updates done in all, those before a resume included.
        history: The records of this run.
        plan: The plan of the last step.
        sha256: The SHA-256 of the bytes of parameters, other variables and optimizer state, 64
            hexadecimal digits: equal means equal to the last bit.
    """

    model: Any
    state: PyTree
    opt_state: PyTree
    step: int
    history: History
    plan: Plan
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """How a session is opened.

    Attributes:
        steps: Updates in all; None: as many as are asked for one by one.
        balance: When counts move; None: they stay.
        checkpoint_dir: Folder for checkpoints. If it holds one, training resumes from it.
        run_dir: Folder for records and the report, or None.
        tensorboard: Whether to write TensorBoard events to `run_dir` too.
        first_step: Where to begin without a checkpoint.
        is_trial: Whether nobody is told of its steps.
    """

    steps: int | None = None
    balance: BalanceConfig | None = None
    checkpoint_dir: pathlib.Path | None = None
    run_dir: pathlib.Path | None = None
    tensorboard: bool = False
    first_step: int = 0
    is_trial: bool = False

    def facts(self) -> dict[str, str]:
        """What processes must have alike, by name; only the first one writes to `run_dir`."""
        return {
            "steps": str(self.steps),
            "counts follow the devices": str(self.balance is not None),
            "checkpoint_dir": str(self.checkpoint_dir),
            "run_dir": "none" if self.run_dir is None else "given",
            "first step": str(self.first_step),
        }

    def waiting(self, plan: Plan) -> Waiting:
        """What tells of a session's opening, in the first process."""
        what = f"trying microbatches of {plan.microbatch_size}" if self.is_trial else "opening"
        return Waiting(what, is_main=jax.process_index() == 0)


def plans_to_table(plans: Mapping[int, Plan]) -> list[dict[str, Any]]:
    """Plans by their first step, for JSON: after a re-balance its counts only."""
    rows: list[dict[str, Any]] = []
    before: Plan | None = None
    for step, plan in plans.items():
        row: dict[str, Any] = {"plan": json.loads(plan.decisions.to_json())}
        if before is not None and all(".num_microbatches:" in line for line in before.diff(plan)):
            row = {"counts": plan.counts}
        rows.append({"first_step": step, **row})
        before = plan
    return rows


def plans_from_table(rows: Iterable[Mapping[str, Any]], *, until: int) -> dict[int, Plan]:
    """What `plans_to_table` wrote, of the steps before one.

    Raises:
        CheckpointError: If it is something else.
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
