"""All pairs of features of a plan, with those that hxla refuses.

`python -m support.feature_pairs` plans and lowers every pair, and prints the table and its counts;
`python -m support.feature_pairs "zero 3 + fp8" ...` does so for some. Nothing is compiled. Devices
are fake and have a described memory, so that no pair is refused for want of them.

`python -m support.feature_pairs --page` writes the page of the documentation that lists them.
"""

import functools
import itertools
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator

import numpy as np
import optax
from flax import nnx

import hxla
from support.inside.job import JobContext
from support.inside.lower import lower
from support.paths import ROOT

#: Of the same pairs, when they were first counted.
REFUSED_AT_FIRST = 86


def _config(**sections):
    return {"config": sections}


def _memory(**settings):
    return _config(memory=settings)


def _offload(**settings):
    more = {"zero": 3} if "parameters" in settings else {}
    return _memory(offload=settings, **more)


def _update(**communication):
    return _config(communication=communication)


def _cluster(**settings):
    return _config(cluster=settings)


_PIPELINE = {"stages": 2, "counts": "even"}
FORMS = {
    "one device": {"plan": {"mesh": {"data": 1}}},
    "data": {"plan": {"mesh": {"data": 4}}},
    "tensor": {"plan": {"mesh": {"data": 4, "tensor": 2}, "rules": "decoder"}},
    "uneven tensor": {"plan": {"mesh": {"data": 4, "tensor": (2, 1)}, "rules": "decoder"}},
    "fsdp": {"plan": {"mesh": {"data": 4, "fsdp": 2}, "rules": "decoder"}},
    "pipeline 1f1b": {"plan": _PIPELINE},
    "pipeline interleaved": {
        "plan": _PIPELINE,
        **_config(pipeline={"schedule": "interleaved", "num_chunks": 2}),
    },
    "pipeline zb-h1": {"plan": _PIPELINE, **_config(pipeline={"schedule": "zb-h1"})},
}
MEMORY = {
    "zero 1": _memory(zero=1),
    "zero 2": _memory(zero=2),
    "zero 3": _memory(zero=3),
    "recompute none": _memory(recompute="none"),
    "recompute boundaries": _memory(recompute="boundaries"),
    "recompute auto": _memory(recompute="auto"),
    "optimizer on host": _offload(optimizer="host"),
    "optimizer on disk": _offload(optimizer="disk", directory=tempfile.gettempdir()),
    "parameters on host": _offload(parameters="host"),
    "stash on host": _memory(recompute="boundaries", offload={"stash": "host"}),
    "waves 2": _memory(zero=2, waves=2),
    "shard groups 2": _memory(zero=1, shard_groups=2),
    "shares": _memory(zero=1, shares=[3, 1, 1, 1]),
}
PRECISION = {
    "bf16": _config(precision="bf16"),
    "fp16": _config(precision="fp16"),
    "fp8": {**_config(precision="fp8"), "job": {"mixes_examples": True}},
    "float sums": {"plan": {"reduction": "float"}},
    "one limb": _update(limbs=1),
    "skip": {"job": {"nonfinite": "skip"}},
}
UPDATE = {
    "clip after": _update(clip_norm=1.0),
    "clip before": _update(clip_norm=1.0, clip="before"),
    "apply groups 2": _config(optimizer={"num_apply_groups": 2}),
    "sparse rows": _update(sparse_embeddings=True),
    "adafactor": {"optimizer": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4)},
    "multisteps": {"optimizer": lambda: optax.MultiSteps(optax.adam(1e-2), 2)},
    "over the host": _update(over="host"),
}
WORK = {
    "2 a call": _cluster(microbatches_per_call=2),
    "2 executors": _cluster(executors=2),
}
GROUPS = (FORMS, MEMORY, PRECISION, UPDATE, WORK)
FEATURES = {name: settings for group in GROUPS for name, settings in group.items()}

_PIPELINES = ("pipeline 1f1b", "pipeline interleaved", "pipeline zb-h1")


def _each(names, *others):
    return [f"{name} + {other}" for name in names for other in others]


#: By reason the pairs that are refused, and what the message says.
REFUSED = {
    "Over uneven shards a microbatch is one program, which offloads nothing.": (
        _each(["uneven tensor"], "stash on host"),
        "a microbatch is one, which offloads nothing",
    ),
    "The ticks of a pipeline are one program, which offloads nothing.": (
        _each(_PIPELINES[:2], "stash on host"),
        "stages run as one program, which offloads nothing",
    ),
    "A schedule bounds the residuals of a pipeline: waves would only add bubbles.": (
        _each(_PIPELINES, "waves 2"),
        "run all microbatches of a step in one wave",
    ),
    "With separate weight gradients each forward would run three times.": (
        _each(["pipeline zb-h1"], "recompute boundaries", "stash on host"),
        "would run each forward three times",
    ),
    "No device of a pipeline has the whole gradient of a microbatch.": (
        _each(_PIPELINES, "clip before"),
        "which no stage of a pipeline has",
    ),
    "In ZeRO 2 and 3 no device has it either: it would be as large as in stage 1.": (
        _each(["zero 2", "zero 3", "parameters on host", "waves 2"], "clip before"),
        "needs the whole gradient of a microbatch",
    ),
    "Not built: over the host each replica has one device.": (
        _each(["tensor", "uneven tensor", "fsdp", *_PIPELINES], "over the host"),
        "need collectives inside a replica",
    ),
    "The replicas of a process have one place over the host, and so one shard group.": (
        _each(["shard groups 2"], "over the host"),
        "sums over the host need all replicas of a process in one group",
    ),
    "Collectives of several microbatches at once would wait for each other.": (
        _each(["tensor", "uneven tensor", "fsdp", *_PIPELINES], "2 executors"),
        "executors run microbatches on one device",
    ),
    "Sums over whole parameters read Adafactor's state, which would be fetched twice a step.": (
        _each(["optimizer on host", "optimizer on disk"], "adafactor"),
        "would come to the device twice in a step",
    ),
    "Sums of floats depend on their order.": (
        _each(["float sums"], "over the host"),
        "hosts add integers only",
    ),
    "Executors take microbatches in no fixed order.": (
        _each(["float sums"], "2 executors"),
        "which moves the bits of float sums",
    ),
}

#: Forms that came after the pairs were first counted.
LATER_FORMS = {
    "unlike stages": {"plan": {"stages": [{"tensor": 2}, {"tensor": 2}], "counts": "even"}},
    "unlike replicas": {
        "plan": {
            "stages": [
                [{"devices": 1}],
                [{"data": 2}, {"devices": 1}],
                [{"devices": 1}, {"devices": 1}, {"tensor": 2}],
            ],
            "counts": "even",
        }
    },
    "islands": {"plan": {"mesh": {"data": 4}}, **_config(islands={"every": 2, "replicas": [2, 2]})},
    "any cut": {
        "plan": {"mesh": {"data": 4, "tensor": 2}, "rules": "decoder"},
        **_config(numerics={"cut": "any"}),
    },
    "any cut of stages": {
        "plan": {"mesh": {"data": 4, "stage": 2, "tensor": 1}, "rules": "decoder"},
        **_config(numerics={"cut": "any"}),
    },
    "any cut of unlike replicas": {
        "plan": {
            "stages": [[{"devices": 1}], [{"devices": 1}, {"tensor": 2}], [{"tensor": 4}]],
            "rules": "decoder",
            "counts": "even",
        },
        **_config(numerics={"cut": "any"}),
    },
}
_BESIDE = ("unlike replicas", "any cut of unlike replicas")
_UNLIKE = ("unlike stages", *_BESIDE)
_ANY_CUT = ("any cut", "any cut of stages", "any cut of unlike replicas")
_SHARED = ("zero 1", "zero 2", "zero 3", "parameters on host", "waves 2", "shard groups 2")

#: The same for these forms.
LATER_REFUSED = {
    "Not built: the programs of unlike stages gather and sum no part of the state at a time.": (
        _each(_UNLIKE, "zero 2", "zero 3", "parameters on host", "waves 2", "shard groups 2"),
        "unlike stages do not run with",
    ),
    "Not built: unlike stages offload nothing inside a microbatch.": (
        _each(_UNLIKE, "stash on host"),
        "memory.offload.stash='host'",
    ),
    "All devices of unlike replicas share one state already.": (
        _each(_BESIDE, "zero 1", "optimizer on host", "optimizer on disk", "shares"),
        "",
    ),
    "Unlike stages add integers where replicas meet.": (
        _each(_UNLIKE, "float sums"),
        "sums.kind: unlike stages",
    ),
    "No device of a pipeline has the whole gradient of a microbatch.": (
        _each([*_UNLIKE, "any cut of stages"], "clip before"),
        "which no stage of a pipeline has",
    ),
    "Not built: over the host each replica has one device.": (
        _each([*_UNLIKE, *_ANY_CUT[:2]], "over the host"),
        "need collectives inside a replica",
    ),
    "Collectives of several microbatches at once would wait for each other.": (
        _each([*_UNLIKE, *_ANY_CUT[:2]], "2 executors"),
        "executors run microbatches on one device",
    ),
    "Each island keeps and updates a whole state, and islands meet in exact sums.": (
        _each(["islands"], *_SHARED, "shares", "float sums", "over the host"),
        "islands update all of their own state",
    ),
    "An offloaded optimizer updates part after part, as ZeRO does, and islands do not.": (
        _each(["islands"], "optimizer on host", "optimizer on disk"),
        "updates part after part",
    ),
    "Not built: each island would have a loss scale of its own.": (
        _each(["islands"], "fp16"),
        "precision.loss_scale: islands",
    ),
    "Sums of floats depend on the cut.": (
        _each(_ANY_CUT[:2], "float sums"),
        "float sums depend on the cut",
    ),
    "Not built: low precisions round in places that depend on the cut.": (
        _each(_ANY_CUT, "bf16", "fp16", "fp8"),
        "is rounded in a way that depends on how a program is cut",
    ),
    "The squares of a microbatch's gradients add up in an order that depends on the cut.": (
        _each(["any cut"], "clip before"),
        "in an order that depends on how a replica is cut",
    ),
    "Optimizers that read whole parameters do so in an order that depends on the cut.": (
        _each(_ANY_CUT, "adafactor", "multisteps"),
        "the bits of that depend on how a replica is cut",
    ),
    "The ticks of a pipeline are one program, which offloads nothing.": (
        _each(["any cut of stages"], "stash on host"),
        "stages run as one program, which offloads nothing",
    ),
    "A schedule bounds the residuals of a pipeline: waves would only add bubbles.": (
        _each(["any cut of stages"], "waves 2"),
        "run all microbatches of a step in one wave",
    ),
    "Stages whose bits depend on no cut keep their inputs only.": (
        _each(["any cut of stages"], "recompute none"),
        "needs stages that keep only their inputs",
    ),
}

#: One device has nobody to share with.
_NEED_REPLICAS = {
    *("zero 1", "zero 2", "zero 3", "parameters on host"),
    *("waves 2", "shard groups 2", "shares"),
}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(4)])
        self.head = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    tokens = batch["tokens"]
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean(-1)


def pairs() -> Iterator[tuple[str, str]]:
    """All pairs of features that do not contradict each other."""
    for a, b in itertools.combinations(GROUPS, 2):
        for one, other in itertools.product(a, b):
            if not (one == "one device" and other in _NEED_REPLICAS):
                yield one, other
    for one, other in itertools.combinations(MEMORY, 2):
        a, b = (MEMORY[name]["config"]["memory"] for name in (one, other))
        both = {key for key in a.keys() & b.keys() if not isinstance(a[key], dict)}
        if all(a[key] == b[key] for key in both):
            yield one, other


def later_pairs() -> list[tuple[str, str]]:
    """All pairs of a form of `LATER_FORMS` and a feature that is no form."""
    features = [name for group in GROUPS[1:] for name in group]
    return list(itertools.product(LATER_FORMS, features))


def refusal(*names: str) -> str:
    """Why hxla refuses these features together; empty: it trains with them."""
    settings = functools.reduce(_merged, map((FEATURES | LATER_FORMS).__getitem__, names))
    # One share for each replica of a group; eight devices are two of these pipelines.
    if "shares" in names and {"shard groups 2", "unlike stages"} & {*names}:
        settings = _merged(settings, _memory(shares=[3, 1]))
    asked = {"microbatch_size": 2, "counts": "even", "mesh": {"data": 4}}
    asked |= settings.get("plan", {})
    if "stages" in asked:
        del asked["mesh"]
    num = math.prod(np.size(size) if np.ndim(size) else size for size in _sizes(asked))
    device = hxla.Device(kind="cpu", memory_bytes=1 << 30)
    cluster = hxla.Cluster(name="", devices=(device,) * num)
    data = {"tokens": np.arange(32 * 4, dtype=np.int32).reshape(32, 4) % 16}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _refusal(cluster, data, settings, asked)


def _refusal(cluster, data, settings, asked):
    try:
        job = hxla.Job(
            Net(nnx.Rngs(0)),
            data,
            loss,
            settings.get("optimizer", lambda: optax.adamw(1e-2))(),
            batch_size=32,
            config=settings.get("config"),
            **settings.get("job", {}),
        )
        plan = job.plan(cluster, **asked)
        context = JobContext(job)
        lower(context.training(2, 0), context.graph(2), plan, context.devices())
    except hxla.HxlaError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _sizes(asked):
    return asked["mesh"].values() if "mesh" in asked else (8,)


def _merged(a, b):
    both = {k: _merged(a[k], b[k]) for k in a.keys() & b.keys() if isinstance(a[k], dict)}
    return {**a, **b, **both}


# -- the page --------------------------------------------------------------------------------------

PAGE = ROOT / "docs/reference/combinations.md"
_WORDS = {
    "adafactor": "`optax.adafactor`: its update reads whole parameters",
    "multisteps": "`optax.MultiSteps`",
    "fp8": '`config={"precision": "fp8"}`',
    "data": '`mesh={"data": 4}`, the default',
}
_HEAD = """# Which settings go together

All of these forms and settings go together, in any pair, but for those of the last table. A pair
that does not is refused when the plan is made, with a message that names the setting. Nothing is
left out silently.

Every pair is planned and lowered by a test (`tests/laws/test_feature_pairs.py`), which also holds
this page to the code.
"""


def _written(name: str) -> str:
    """A form or setting as a user writes it."""
    if name in _WORDS:
        return _WORDS[name]
    settings = (FEATURES | LATER_FORMS)[name]
    parts = [f"{key}={value!r}" for key, value in settings.get("plan", {}).items()]
    parts += [f"{key}={value!r}" for key, value in settings.get("job", {}).items()]
    parts += [f"config={settings['config']!r}"] if "config" in settings else []
    shown = [part for part in parts if part != "counts='even'"]
    return ", ".join(f"`{part}`" for part in shown).replace("'", '"')


def _in_groups(names: Iterable[str]) -> str:
    """Pairs as `a, b: c, d`, for each group of firsts that have the same seconds."""
    seconds: dict[str, list[str]] = {}
    for name in names:
        first, second = name.split(" + ")
        seconds.setdefault(first, []).append(second)
    firsts: dict[tuple[str, ...], list[str]] = {}
    for first, others in seconds.items():
        firsts.setdefault(tuple(others), []).append(first)
    return "<br>".join(f"{', '.join(a)}: {', '.join(b)}" for b, a in firsts.items())


def page() -> str:
    """The page of the documentation that lists all pairs."""
    lines = [_HEAD]
    titles = "Forms", "Memory", "Precision", "Sums and update", "Calls"
    for title, group in zip(titles, ({**FORMS, **LATER_FORMS}, *GROUPS[1:]), strict=True):
        lines += [f"## {title}\n", "| name | as you write it |", "|---|---|"]
        lines += [f"| {name} | {_written(name)} |" for name in group]
        lines.append("")
    lines += ["## Not together\n", "| pairs | why |", "|---|---|"]
    for reason, names in _by_reason().items():
        lines.append(f"| {_in_groups(names)} | {reason} |")
    lines += ["", '`mesh={"sequence": 2}` goes with all that `tensor` goes with, and']
    lines += ['`mesh={"sequence": (2, 1)}` with all that uneven `tensor` goes with.']
    lines += ["", "## See also\n", "- [Configuration](configuration.md)"]
    lines.append("- [Pipelines](../how-to/pipelines.md)")
    return "\n".join(lines).replace(tempfile.gettempdir(), "/tmp") + "\n"


def _by_reason() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for table in (REFUSED, LATER_REFUSED):
        for reason, (names, _) in table.items():
            found.setdefault(reason, []).extend(names)
    return found


def main(asked: list[str]) -> None:
    """Print each pair with its refusal, and the counts; or write the page."""
    if asked == ["--page"]:
        PAGE.write_text(page())
        return
    if unknown := set(asked) - set(map(" + ".join, pairs())):
        raise SystemExit(f"no pairs of the table: {', '.join(sorted(unknown))}")
    tried = [pair for pair in pairs() if not asked or " + ".join(pair) in asked]
    refused = 0
    for pair in tried:
        why = " ".join(refusal(*pair).split())
        refused += bool(why)
        print(" + ".join(pair), "|", f"refused: {why}" if why else "accepted", flush=True)
    print(f"{len(tried)} pairs, {refused} refused")


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    main(sys.argv[1:])
