"""What is written beside the state of a run, and compared when another call goes on with it.

Some facts must be alike: with others the state would be that of neither run. Others may change on
purpose, a learning rate or the data, and where they do it is said.
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
OF_TRACE = (LOSS, _MERGE)  # what another jax, or other parameters, may make otherwise
_MOST_CHANGES = 3  # of a line


def facts_of_run(job: JobContext, plan: Plan) -> dict[str, Any]:
    """What a state of a run has in common with all others of it."""
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
    """What may be another when a run goes on."""
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


def check_format(folder: str, step: int, found: Mapping[str, Any]) -> None:
    """Refuse a state of another version of hxla.

    Raises:
        CheckpointError: With both formats.
    """
    if found.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} holds step {step} in format {found.get('format')}, of another version of "
            f"hxla; this one reads format {FORMAT}: use another checkpoint_dir"
        )


def check_resumed(
    folder: str, step: int, found: Mapping[str, Any], asked: Mapping[str, Any], last: int | None
) -> None:
    """Refuse a state of another run.

    Args:
        asked: Those that must be alike.
        last: Step of the run; None: not known.

    Raises:
        CheckpointError: With every fact that differs.
    """
    wrong = [
        f"  {key}: {found.get(key)!r} in the checkpoint, {value!r} asked"
        for key, value in asked.items()
        if key != "settings" and found.get(key) != value
    ]
    wrong += [
        f"  {name}: {there} in the checkpoint, {here} in this process"
        for name, there, here in unlike_settings(found.get("settings", ()), asked["settings"])
    ]
    if wrong:
        is_other_loss = found.get(LOSS) != asked.get(LOSS, found.get(LOSS))
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
    """What is another now than in a checkpoint that goes on, a line for each.

    Args:
        there: What `told_of_run` gave for the checkpoint.
    """
    if changed := _changed(there["made with"], here["made with"]):
        yield (
            f"the checkpoint was made otherwise: {changed}; bits may be others than of never "
            "having stopped, and whether the loss is the same is not looked at"
        )
    if changed := _changed(there["data"], here["data"]):
        yield f"the data is another than the checkpoint's, and training goes on with it: {changed}"
    if there["optimizer"]["update"] != here["optimizer"]["update"]:
        yield (
            "the optimizer computes otherwise than the checkpoint's, as with another learning "
            "rate, and training goes on with the new one"
        )
    if there["optimizer"]["start"] != here["optimizer"]["start"]:
        yield (
            "the optimizer would begin with other values than the checkpoint's, as a learning rate "
            "of optax.inject_hyperparams, and training goes on with those of the checkpoint"
        )
    if changed := _changed(there["settings"], here["settings"]):
        yield f"settings are others than the checkpoint's, and training goes on so: {changed}"


def _changed(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    # What only one side knows is of another kind of data.
    names = [name for name in here if there.get(name, here[name]) != here[name]]
    more = [f"and {len(names) - _MOST_CHANGES} more"] if len(names) > _MOST_CHANGES else []
    changes = [f"{name}: {there[name]}, now {here[name]}" for name in names[:_MOST_CHANGES]]
    return "; ".join(changes + more)
