"""Where a session begins: with a state that a member left in memory, with a checkpoint, or anew."""

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ..checkpoint.hand_over import facts_of_state, load_state
from ..checkpoint.seal import newest_facts
from ..core.errors import CheckpointError, ConfigError
from ..core.files import local_path
from ..job.context import JobContext
from ..job.facts import (
    FORMAT,
    OF_TRACE,
    check_format,
    check_resumed,
    facts_of_run,
    told_differences,
    told_of_run,
)
from ..launch.member import Pinned
from ..lower.store import Store
from ..model.functional import tree_bytes
from ..plan.plan import Plan
from .values import SessionOptions, plans_from_table

if TYPE_CHECKING:
    from ..checkpoint.checkpoints import Checkpoints


def _opened(
    folder: str | os.PathLike[str], job: JobContext, plan: Plan, *, is_tight: bool
) -> "Checkpoints":
    from ..checkpoint.checkpoints import Checkpoints  # with Orbax, which takes long to import

    model = job.functional(plan.microbatch_size)
    largest = max(map(tree_bytes, jax.tree.leaves((model.params, model.aux))), default=0)
    return Checkpoints(
        folder,
        keep=job.settings.checkpoint.keep,
        largest_bytes=largest if is_tight else None,
        gather=job.gather,
    )


class RestoreSource:
    """A session's first step, and where the state of it is; the data goes there, too.

    Attributes:
        checkpoints: The folder of them; None if the session has none.
        step: The updates of the state that is there; None: the state is a new one.
        first_step: The updates done when the session begins.
        plans: Those of the steps before, by their first step.
        notes: What the user should know of the folder, and of what goes on there, in words.

    Args:
        stack: Closes the folder of checkpoints.
        is_tight: Whether checkpoints are to be written in little memory.
        folders: A state that members of the generation before left in memory, all its parts.

    Raises:
        CheckpointError: If a folder cannot be written, or holds a state of another run.
    """

    def __init__(
        self,
        job: JobContext,
        plan: Plan,
        options: SessionOptions,
        stack: contextlib.ExitStack,
        *,
        is_tight: bool,
        folders: Sequence[str] = (),
    ):
        self._folders, self._job, self._plan = folders, job, plan
        self.checkpoints: Checkpoints | None = None
        if options.checkpoint_dir is not None:
            opened = _opened(options.checkpoint_dir, job, plan, is_tight=is_tight)
            self.checkpoints = stack.enter_context(opened)
        # The data is read here: nobody else reads it yet.
        self._told = told_of_run(job, plan) if self.checkpoints is not None else {}
        self.step: int | None = self._latest(job)
        self.first_step = options.first_step if self.step is None else self.step
        found = {} if self.step is None else self._found(options, self.step)
        self.plans: dict[int, Plan] = plans_from_table(found.get("plans", ()), until=self.step or 0)
        note = job.source.begin(self.first_step, found.get("data"))
        is_kept = self.checkpoints is not None or bool(self._folders)
        of_folder = () if self.checkpoints is None else self.checkpoints.notes
        said = self._said(found, options)
        self.notes = (*of_folder, *said, *([note] if note and is_kept else []))

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """What is written beside every state of the run."""
        facts = facts_of_run(self._job, self._plan)
        return facts if self.checkpoints is None else facts | {"told": self._told}

    def _found(self, options: SessionOptions, step: int) -> dict[str, Any]:
        """What is written beside the state of a step, which is one of this run."""
        asked = facts_of_run(self._job, self._plan)
        if self._folders:
            where, found = self._folders[0], facts_of_state(self._folders)
            asked["numerics"] = self._plan.numerics
        else:
            assert self.checkpoints is not None
            where, found = str(options.checkpoint_dir), self.checkpoints.meta(step)
            check_format(where, step, found)
            is_traced_alike = found.get("told", {}).get("made with") == self._told["made with"]
            # Of a model with other parameters each one is told when the state is read.
            if not is_traced_alike or self._has_other_parameters(found):
                asked = {name: fact for name, fact in asked.items() if name not in OF_TRACE}
        check_resumed(where, step, found, asked, options.steps)
        return found

    def _has_other_parameters(self, found: Mapping[str, Any]) -> bool:
        plans = list(plans_from_table(found.get("plans", ()), until=1 << 62).values())
        shapes = [
            [(own.name, own.shape, own.dtype) for own in plan.parameters]
            for plan in (self._plan, *plans[-1:])
        ]
        return shapes[0] != shapes[-1]

    def _said(self, found: Mapping[str, Any], options: SessionOptions) -> Iterator[str]:
        """Where it begins, if with a checkpoint, and what is another than there."""
        if self.step is None or self._folders:
            return
        yield f"resumed from step {self.step} in {options.checkpoint_dir}"
        yield from told_differences(found["told"], self._told)
        if self.step == options.steps:
            yield (
                f"nothing is left to train: {self.step} of {options.steps} steps are done, and the "
                "model is the checkpoint's; raise steps, or use another checkpoint_dir for "
                "another run"
            )

    def _latest(self, job: JobContext) -> int | None:
        if self._folders:
            return int(facts_of_state(self._folders)["step"])
        latest = self.checkpoints.latest() if self.checkpoints is not None else None
        job.agree("checkpoint", lambda: {"checkpoint to resume from": str(latest)})
        return latest

    def load(self, store: Store) -> bool:
        """Take over the state of `step`; returns whether there is one."""
        # Gloo waits for slower compilers half a minute only.
        self._job.gather("programs are ready", "")
        if self._folders:
            store.load(load_state(self._folders, store.wanted()))
        elif self.checkpoints is not None and self.step is not None:
            store.load(self.checkpoints.restore(store.wanted(), self.step))
        return self.step is not None

    @property
    def is_in_memory(self) -> bool:
        """Whether it begins with a state that members left in memory."""
        return bool(self._folders)

    @property
    def saved_step(self) -> int | None:
        """The step of the checkpoint that it began with."""
        return None if self._folders else self.step


def chosen(plan: Plan) -> Pinned:
    """What of a plan measurements may have chosen, and bits depend on.

    Args:
        plan: Of a run, which others go on with.
    """
    choices = Pinned(microbatch_size=plan.microbatch_size, is_chain=plan.chain is not None)
    if plan.pipeline is not None:
        return dataclasses.replace(choices, cut=plan.pipeline.cut)
    if len(plan.axes) == 1:
        [axis] = plan.axes
        return dataclasses.replace(choices, shares=axis.shares or (1,) * axis.size)
    return choices


def chosen_before(job: JobContext, folder: str | os.PathLike[str] | None) -> Pinned:
    """What the run whose checkpoint will be resumed has chosen; every process calls this.

    Args:
        folder: Of the checkpoints. What is not this job's is refused when it is opened.
    """
    if folder is None:
        return Pinned()
    local, choices = local_path(folder, "checkpoint_dir", ConfigError), Pinned()
    if jax.process_index() == 0:
        facts = newest_facts(local)
        if (facts.get("format"), facts.get("batch_size")) == (FORMAT, job.batch_size):
            with contextlib.suppress(CheckpointError):  # which opening it raises
                *_, plan = plans_from_table(facts.get("plans", ()), until=1 << 62).values()
                choices = chosen(plan)
    [text, *_] = job.gather("choices of the checkpoint", json.dumps(dataclasses.asdict(choices)))
    return Pinned.read(text)
