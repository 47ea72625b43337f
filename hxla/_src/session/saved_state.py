"""The saved states of a session: which one it starts with, and when it writes checkpoints.

Facts of a run are written beside its state, and compared on resume. Some must be equal, or the
state would belong to neither run. Others, as a learning rate or the data, may change on purpose;
each such change is reported.
"""

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
from ..core.errors import CheckpointError, ConfigError
from ..core.files import local_path
from ..graph.trace import loss_digest
from ..jax.settings import unlike_settings
from ..job.agreement import facts_of_data, facts_of_versions
from ..job.context import JobContext
from ..launch.channel import Pinned
from ..lower.store import Store
from ..model.functional import leaf_names, tree_bytes
from ..model.loss_scale import own_variables
from ..plan.plan import Plan
from ..plan.precision import Precision
from .ending import SAVE
from .values import Every, SessionOptions, plans_from_table, plans_to_table

if TYPE_CHECKING:
    from ..checkpoint.checkpoints import Checkpoints

FORMAT = 4  # of these facts, and of the names of a state's arrays
LOSS, _MERGE = "traced loss", "merge"
OF_TRACE = (LOSS, _MERGE)  # facts that differ with another jax, or with other parameters
_MOST_CHANGES = 3  # of a line


def facts_of_run(job: JobContext, plan: Plan) -> dict[str, Any]:
    """The facts that all states of a run have in common."""
    graph = job.graph(plan.microbatch_size)
    names = leaf_names(own_variables(job.functional(plan.microbatch_size).aux))
    merges = zip(names, graph.merges, strict=False)  # a loss scale has no name
    return {
        "format": FORMAT,
        "batch_size": plan.batch_size,
        "microbatch_size": plan.microbatch_size,
        "seed": job.seed,
        "shuffle": job.source.order,
        "reduction": plan.sums.kind,
        "gradient": job.settings.communication.gradient,
        "precision": None if plan.precision == Precision() else str(plan.precision),
        "settings": list(plan.made_with.settings),
        "islands.momentum above 0": None
        if plan.islands is None
        else plan.islands.momentum > 0 or None,
        _MERGE: {name: rule for name, rule in merges if rule != "same"},
        LOSS: loss_digest(graph) + job.contrast_digest(plan.microbatch_size),
    }


def told_of_run(job: JobContext, plan: Plan) -> dict[str, Any]:
    """The facts that may change when a run is resumed."""
    num, sample = job.source.num_examples, job.source.sample(plan.microbatch_size)
    communication = job.settings.communication
    return {
        "made with": facts_of_versions()
        | {"devices": ", ".join(sorted({device.arithmetic for device in plan.devices}))},
        "data": ({} if num is None else {"number of examples": str(num)})
        | ({} if sample is None else facts_of_data(sample, "first ")),
        "optimizer": job.plain_optimizer.digests(job.functional(plan.microbatch_size).trained),
        "settings": {
            "communication.clip_norm": str(communication.clip_norm),
            "communication.clip": communication.clip,
            "nonfinite": job.nonfinite,
            "islands": str(plan.islands),
        },
    }


def check_format(folder: str, step: int, saved: Mapping[str, Any]) -> None:
    """Refuse a state of another version of hxla.

    Raises:
        CheckpointError: With both formats.
    """
    if saved.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} holds step {step} in format {saved.get('format')}, of another version of "
            f"hxla; this one reads format {FORMAT}: use another checkpoint_dir"
        )


def check_resumed(
    folder: str, step: int, saved: Mapping[str, Any], asked: Mapping[str, Any], last: int | None
) -> None:
    """Refuse a state of another run.

    Args:
        saved: The facts of the checkpoint.
        asked: The facts that must be equal.
        last: Step of the run; None if not known.

    Raises:
        CheckpointError: With every fact that differs.
    """
    wrong = [
        f"  {key}: {saved.get(key)!r} in the checkpoint, {value!r} asked"
        for key, value in asked.items()
        if key != "settings" and saved.get(key) != value
    ]
    wrong += [
        f"  {name}: {there} in the checkpoint, {here} in this process"
        for name, there, here in unlike_settings(saved.get("settings", ()), asked["settings"])
    ]
    if wrong:
        is_other_loss = saved.get(LOSS) != asked.get(LOSS, saved.get(LOSS))
        why = "\nthe loss, or the model in it, computes something else" if is_other_loss else ""
        raise CheckpointError(
            f"{folder} holds step {step} of another run:\n"
            + "\n".join(wrong)
            + why
            + "\nresume with the checkpoint's values or use another checkpoint_dir"
        )
    if last is not None and step > last:
        raise CheckpointError(
            f"{folder} holds step {step}, beyond the {last} asked: raise steps or use "
            "another checkpoint_dir"
        )


def told_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """A line for each fact that may change and has changed since the checkpoint.

    Args:
        there: The result of `told_of_run` for the checkpoint.
    """
    if changed := _changed(there["made with"], here["made with"]):
        yield (
            f"the checkpoint was made otherwise: {changed}; bits may differ from those of a run "
            "without a stop, and whether the loss is the same is not checked"
        )
    if changed := _changed(there["data"], here["data"]):
        yield f"the data is not the checkpoint's, and training goes on with it: {changed}"
    if there["optimizer"]["update"] != here["optimizer"]["update"]:
        yield (
            "the optimizer differs from the checkpoint's, as with another learning rate, and "
            "training goes on with the new one"
        )
    if there["optimizer"]["start"] != here["optimizer"]["start"]:
        yield (
            "the optimizer's initial state differs from the checkpoint's, as by a learning rate of "
            "optax.inject_hyperparams, and training goes on with the checkpoint's"
        )
    if changed := _changed(there["settings"], here["settings"]):
        yield (
            f"settings differ from the checkpoint's, and training goes on with the new ones: "
            f"{changed}"
        )


def _changed(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    # A fact on one side only belongs to another kind of data.
    names = [name for name in here if there.get(name, here[name]) != here[name]]
    more = [f"and {len(names) - _MOST_CHANGES} more"] if len(names) > _MOST_CHANGES else []
    changes = [f"{name}: {there[name]}, now {here[name]}" for name in names[:_MOST_CHANGES]]
    return "; ".join(changes + more)


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
        return dataclasses.replace(choices, shares=axis.ratio)
    return choices


def chosen_before(job: JobContext, folder: str | os.PathLike[str] | None) -> Pinned:
    """The choices of the checkpoint that will be resumed; every process calls this.

    A folder of another job gives none, and is refused when it is opened.
    """
    if folder is None:
        return Pinned()
    from ..checkpoint.seal import newest_facts

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
