"""Facts of a run that are written beside its state, and compared on resume.

Some facts must be equal, or the state would belong to neither run. Others, as a learning rate or
the data, may change on purpose; each such change is reported.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ..core.errors import CheckpointError
from ..graph.trace import loss_digest
from ..jax.settings import unlike_settings
from ..model.functional import leaf_names
from ..model.loss_scale import own_variables
from ..plan.plan import Plan
from ..plan.precision import Precision
from .agreement import facts_of_data, facts_of_versions
from .context import JobContext

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
