"""The saved states of a session: which one it starts with, and when it writes checkpoints."""

import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from .ending import SAVE
from .values import Every, SessionOptions, plans_from_table, plans_to_table

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
    """A session's first step and the source of its state; the data is set to this step.

    Attributes:
        checkpoints: The checkpoint folder; None if the session has none.
        step: The updates of the restored state; None for a new state.
        first_step: The updates done when the session begins.
        plans: The plans of earlier steps, by their first step.
        metadata: The user's JSON values that are saved with every state.
        notes: Lines for the user about the folder and the resumed run.

    Args:
        is_tight: Whether checkpoints must be written in little memory.
        folders: All parts of a state that the last generation left in memory.

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
        # Reads the data, which no thread reads yet.
        self._changeable = told_of_run(job, plan) if self.checkpoints is not None else {}
        self.step: int | None = self._latest_step(job)
        self.first_step = options.first_step if self.step is None else self.step
        saved = {} if self.step is None else self._saved_facts(options, self.step)
        self.plans: dict[int, Plan] = plans_from_table(saved.get("plans", ()), until=self.step or 0)
        self.metadata: dict[str, Any] = dict(saved.get("metadata", {}))
        note = job.source.begin(self.first_step, saved.get("data"))
        is_kept = self.checkpoints is not None or bool(self._folders)
        folder_notes = () if self.checkpoints is None else self.checkpoints.notes
        lines = self._resume_lines(saved, options)
        self.notes = (*folder_notes, *lines, *([note] if note and is_kept else []))

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """The facts that are saved with every state of the run."""
        facts = facts_of_run(self._job, self._plan)
        return facts if self.checkpoints is None else facts | {"told": self._changeable}

    def _saved_facts(self, options: SessionOptions, step: int) -> dict[str, Any]:
        """The facts that were saved with the state of a step; refuses a state of another run."""
        asked = facts_of_run(self._job, self._plan)
        if self._folders:
            where, saved = self._folders[0], facts_of_state(self._folders)
            asked["numerics"] = self._plan.numerics
        else:
            assert self.checkpoints is not None
            where, saved = str(options.checkpoint_dir), self.checkpoints.meta(step)
            check_format(where, step, saved)
            is_traced_alike = (
                saved.get("told", {}).get("made with") == self._changeable["made with"]
            )
            # Different parameters are reported one by one when the state is read.
            if not is_traced_alike or self._has_other_parameters(saved):
                asked = {name: fact for name, fact in asked.items() if name not in OF_TRACE}
        check_resumed(where, step, saved, asked, options.steps)
        return saved

    def _has_other_parameters(self, saved: Mapping[str, Any]) -> bool:
        plans = list(plans_from_table(saved.get("plans", ()), until=1 << 62).values())
        shapes = [
            [(parameter.name, parameter.shape, parameter.dtype) for parameter in plan.parameters]
            for plan in (self._plan, *plans[-1:])
        ]
        return shapes[0] != shapes[-1]

    def _resume_lines(self, saved: Mapping[str, Any], options: SessionOptions) -> Iterator[str]:
        """Lines about the checkpoint of a resumed run and what has changed since."""
        if self.step is None or self._folders:
            return
        yield f"resumed from step {self.step} in {options.checkpoint_dir}"
        yield from told_differences(saved["told"], self._changeable)
        if self.step == options.steps:
            yield (
                f"nothing is left to train: {self.step} of {options.steps} steps are done, and the "
                "model is the checkpoint's; raise steps, or use another checkpoint_dir for "
                "another run"
            )

    def _latest_step(self, job: JobContext) -> int | None:
        if self._folders:
            return int(facts_of_state(self._folders)["step"])
        latest = self.checkpoints.latest() if self.checkpoints is not None else None
        job.agree("checkpoint", lambda: {"checkpoint to resume from": str(latest)})
        return latest

    def facts_at(self, step: int, plans: Mapping[int, Plan]) -> dict[str, Any]:
        """The facts that are saved with the state of a step.

        Args:
            plans: The plans that ran, by their first step.
        """
        changed = {"plans": plans_to_table(plans), "metadata": self.saved_metadata()}
        state = self._job.source.state(step)
        return self.facts | changed | ({} if state is None else {"data": state})

    def saved_metadata(self) -> dict[str, Any]:
        """A copy of the metadata, for a checkpoint.

        Raises:
            ConfigError: If a value is none of JSON's.
        """
        copied = {}
        for name, value in dict(self.metadata).items():
            try:
                copied[str(name)] = json.loads(json.dumps(value))
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigError(
                    f"session.metadata[{name!r}] is no JSON value ({error}): keep numbers, texts, "
                    "lists and dictionaries in it"
                ) from None
        return copied

    def load(self, store: Store) -> bool:
        """Load the state of `step`; returns whether there is one."""
        # Gloo waits only half a minute for processes that still compile.
        self._job.gather("programs are ready", "")
        if self._folders:
            store.load(load_state(self._folders, store.wanted()))
        elif self.checkpoints is not None and self.step is not None:
            store.load(self.checkpoints.restore(store.wanted(), self.step))
        return self.step is not None

    @property
    def is_in_memory(self) -> bool:
        """Whether the state comes from the memory of members."""
        return bool(self._folders)

    @property
    def saved_step(self) -> int | None:
        """The step of the checkpoint that was restored; None without one."""
        return None if self._folders else self.step


def chosen(plan: Plan) -> Pinned:
    """The choices of a plan that may come from measurements and that bits depend on."""
    choices = Pinned(microbatch_size=plan.microbatch_size, is_chain=plan.chain is not None)
    if plan.pipeline is not None:
        pipeline = plan.pipeline
        return dataclasses.replace(choices, cut=pipeline.cut, recomputes=pipeline.recompute)
    if plan.chain is not None and plan.is_uneven:
        choices = dataclasses.replace(choices, recomputes=plan.chain.recomputes)
    if len(plan.axes) == 1:
        [axis] = plan.axes
        return dataclasses.replace(choices, shares=axis.shares or (1,) * axis.size)
    return choices


def chosen_before(job: JobContext, folder: str | os.PathLike[str] | None) -> Pinned:
    """The choices of the checkpoint that will be resumed; every process calls this.

    A folder of another job gives none, and is refused when it is opened.
    """
    if folder is None:
        return Pinned()
    local, choices = local_path(folder, "checkpoint_dir", ConfigError), Pinned()
    if jax.process_index() == 0:
        facts = newest_facts(local)
        if (facts.get("format"), facts.get("batch_size")) == (FORMAT, job.batch_size):
            with contextlib.suppress(CheckpointError):  # opening the session raises it
                *_, plan = plans_from_table(facts.get("plans", ()), until=1 << 62).values()
                choices = chosen(plan)
    [text, *_] = job.gather("choices of the checkpoint", json.dumps(dataclasses.asdict(choices)))
    return Pinned.read(text)


class Saver:
    """Writes checkpoints when they are due, and none twice.

    Attributes:
        after_save: Functions that are called whenever a checkpoint was begun.

    Args:
        every: The period of checkpoints; None: nothing makes one due.
        is_alone: Whether training waits for a checkpoint, because memory is scarce.
    """

    def __init__(
        self,
        source: RestoreSource,
        store: Store,
        every: Every | None,
        *,
        is_alone: bool,
    ):
        self._source, self._store, self._every, self._is_alone = source, store, every, is_alone
        self._saved, self._saved_at = source.saved_step, time.monotonic()
        self._is_asked = self._is_changed = False
        self.after_save: list[Callable[[], object]] = []

    def request(self) -> float:
        """The request of this process to all: rank 0's clock alone counts."""
        seconds = None if self._every is None else self._every.seconds
        if seconds is None or jax.process_index():
            return 0.0
        return SAVE * (time.monotonic() - self._saved_at >= seconds)

    def heed(self, request: float) -> None:
        """Take the largest request of a process in a step."""
        self._is_asked = request == SAVE

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after some steps, the same on every process."""
        return self._is_asked or (self._every is not None and self._every.is_due(step))

    def is_saved(self, step: int) -> bool:
        """Whether the state after some steps is saved."""
        return self._saved == step

    def change(self) -> None:
        """Note that the state is another one, after as many steps."""
        self._saved, self._is_changed = None, True

    def may_save(self, step: int) -> bool:
        """Whether there is a folder, and the state is another than at the session's beginning."""
        is_new = self._is_changed or step > self._source.first_step
        return is_new and self._source.checkpoints is not None

    def save(self, step: int, plans: Mapping[int, Plan]) -> None:
        """Begin a checkpoint.

        Args:
            plans: The plans that ran, by their first step.

        Raises:
            CheckpointError: If this or an earlier checkpoint failed.
        """
        checkpoints = self._source.checkpoints
        assert checkpoints is not None
        facts = self._source.facts_at(step, plans)
        checkpoints.save(step, self._store.saved(), facts)
        self._saved, self._saved_at = step, time.monotonic()
        if self._is_alone:
            checkpoints.wait()
