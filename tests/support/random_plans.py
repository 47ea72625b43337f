"""Random plans of three small models, in groups of which the law says that bits are equal.

A `Form` is what may decide bits. A `Trial` is a plan of a form with all else drawn at random:
counts, copies, devices, schedule, buckets, and perhaps a checkpoint that another trial wrote.

Run by `hxla run`, this file trains what `Processes` puts into a folder.
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import traceback

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
from flax import nnx

import hxla
from hxla import ChainSegment, PlannedChain, PlannedDevice, PlannedSegment, ReplicaWork, SparseRows
from support.inside.graph import cut_points, graph_of, segments_at
from support.paths import PYTHONPATH

BATCH, STEPS, NUM_EXAMPLES = 8, 4, 24
LENGTH, VOCABULARY = 6, 16
MOST_DEVICES = 4


class Mlp(nnx.Module):
    """Two residual blocks with dropout; features so small that a float beside them loses them."""

    def __init__(self, rngs):
        self.first = nnx.Linear(5, 8, rngs=rngs)
        self.up = nnx.List([nnx.Linear(8, 12, rngs=rngs) for _ in range(2)])
        self.down = nnx.List([nnx.Linear(12, 8, use_bias=False, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + self.dropout(down(nnx.gelu(up(x))))
        return self.last(x)


def mlp_loss(model, batch):
    errors = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)
    return errors, batch["weight"]


def mlp_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_EXAMPLES, 5)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(5, 3))).astype(np.float32)
    sizes = np.array([1, 1e-3, 1e-6, 1e-9, 1e-12], np.float32)
    return {"x": x * sizes, "y": y, "weight": rng.uniform(0.5, 2, len(x)).astype(np.float32)}


class Gpt(nn.Module):
    """Two blocks of a decoder, in Linen."""

    @nn.compact
    def __call__(self, tokens):
        position = self.param("position", nn.initializers.normal(0.1), (LENGTH, 8))
        x = nn.Embed(VOCABULARY, 8, name="embed")(tokens) + position
        mask = nn.make_causal_mask(tokens)
        for i in range(2):
            y = nn.LayerNorm(use_bias=False)(x)
            attention = nn.MultiHeadDotProductAttention(4, use_bias=False, name=f"attention{i}")
            x = x + nn.Dropout(0.1, deterministic=False)(attention(y, mask=mask))
            y = nn.Dense(16, use_bias=False, name=f"up{i}")(nn.LayerNorm(use_bias=False)(x))
            x = x + nn.Dense(8, use_bias=False, name=f"down{i}")(nn.gelu(y))
        return nn.Dense(VOCABULARY, use_bias=False, name="head")(x)


def gpt_loss(model, batch):
    logits = model(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])


def gpt_data():
    rows = np.random.default_rng(1).integers(0, VOCABULARY, (NUM_EXAMPLES, LENGTH + 1))
    return {"tokens": rows.astype(np.int32)}


class Conv(nnx.Module):
    """Convolutions with BatchNorm, whose statistics are state besides the parameters."""

    def __init__(self, rngs):
        self.stem = nnx.Conv(2, 4, (3, 3), use_bias=False, rngs=rngs)
        self.stem_norm = nnx.BatchNorm(4, rngs=rngs)
        self.up = nnx.Conv(4, 8, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem_norm(self.stem(x)))
        x = nnx.relu(self.norm(self.up(x)))
        return self.head(x.mean((1, 2)))


def conv_loss(model, batch):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"right": (logits.argmax(-1) == batch["label"]).astype(jnp.float32)}


def conv_data():
    rng = np.random.default_rng(2)
    image = rng.normal(size=(NUM_EXAMPLES, 6, 6, 2)) * [1, 1e-9]
    return {
        "image": image.astype(np.float32),
        "label": rng.integers(0, 4, NUM_EXAMPLES).astype(np.int32),
    }


#: A gradient's rounding moves an update of Adam by up to its rate over `eps`: see the references.
ADAM = {"learning_rate": 1e-2, "eps": 1e-2}


#: Gradients of all examples but one are finite in float16 with this scale.
FP16 = {"preset": "fp16", "initial_scale": 2.0**12, "growth_steps": 2}


def with_outlier(data):
    """One example whose gradient overflows float16: on whatever device its microbatch is."""
    data["y"][5] = 1e4
    return data


@functools.cache
def job(name, precision="model"):
    if name == "mlp":
        data = with_outlier(mlp_data()) if precision == "fp16" else mlp_data()
        arguments = lambda: Mlp(nnx.Rngs(0)), data, mlp_loss, optax.adam(**ADAM)
    elif name == "gpt":
        arguments = Gpt(), gpt_data(), gpt_loss, optax.adamw(**ADAM)
    else:
        optimizer = optax.sgd(0.1, momentum=0.9)
        arguments = lambda: Conv(nnx.Rngs(0)), conv_data(), conv_loss, optimizer
    config = {"communication": {"clip_norm": 1.0}} if name == "mlp" else {}
    return hxla.Job(
        *arguments,
        batch_size=BATCH,
        seed=len(name),
        precision=FP16 if precision == "fp16" else precision,
        config=config,
    )


RULES = hxla.RuleSet(
    name="small",
    rules=(
        hxla.Rule(path="up.*kernel$", axes=((), ("tensor",))),
        hxla.Rule(path="up.*bias$", axes=(("tensor",),)),
        hxla.Rule(path="down.*kernel$", axes=(("tensor",), ())),
        hxla.Rule(path="attention./(query|key|value)/kernel$", axes=((), ("tensor",), ())),
        hxla.Rule(path="attention./out/kernel$", axes=(("tensor",), (), ())),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """What may decide bits.

    Attributes:
        model: Name of a job.
        size: Examples of a microbatch.
        tensor: Devices that cut the parameters.
        stages: Of the pipeline; 1: there is none.
        chunks: Parts of the model on each stage.
        keep: What waits for a backward.
        has_weight: Whether weight gradients are operations of their own.
        counts: Of float sums, which depend on them; none: sums are exact.
        limbs: The integers of an exact sum's element.
        chain: Segments of a microbatch that are programs of their own; 0: it is one program.
        shared: Whether copies that are cut share their state out, which rounds an update otherwise.
        precision: The dtypes of the computation.
        seed: Of the cut.
    """

    model: str
    size: int = 1
    tensor: int = 1
    stages: int = 1
    chunks: int = 1
    keep: str = "residuals"
    has_weight: bool = False
    counts: tuple[int, ...] = ()
    limbs: int = 2
    chain: int = 0
    shared: bool = False
    precision: str = "model"
    seed: int = 0

    def __str__(self):
        fields = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        values = {f.name: getattr(self, f.name) for f in fields if f.name not in ("model", "seed")}
        words = (f"{name}={value}".replace(" ", "") for name, value in values.items())
        return "-".join((self.model, *words))

    @property
    def job(self):
        return job(self.model, self.precision)

    @property
    def num_microbatches(self):
        return BATCH // self.size

    @property
    def could_share(self):
        """Whether copies may share their state out, which decides nothing."""
        return self.stages == self.tensor == 1 and not self.counts

    @functools.cached_property
    def usual(self):
        """The plan that hxla makes."""
        own, mesh, pipeline = self.job, {"data": 1}, {}
        if self.stages > 1:
            mesh["stage"], pipeline["stages"] = self.stages, self.stages
        if self.tensor > 1:
            mesh["tensor"] = self.tensor
        num = self.stages * self.tensor
        plan = own.plan(
            hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * num),
            mesh=mesh,
            rules=RULES if self.tensor > 1 else None,
            microbatch_size=self.size,
            counts="even",
            reduction="float" if self.counts else "exact",
            **pipeline,
        )
        return plan.replaced(sums=plan.sums.model_copy(update={"limbs": self.limbs}))

    @functools.cached_property
    def graph(self):
        """What is cut."""
        pipeline = self.usual.pipeline
        cut_by = "work" if pipeline is None else pipeline.cut_by
        return graph_of(self.job.graph(self.size), cut_by)

    @property
    def firsts(self):
        """Equations at which a part can begin."""
        return cut_points(self.graph, 10)

    @functools.cached_property
    def plan(self):
        """One of its plans, with cuts drawn."""
        plan = self.usual
        if self.stages > 1:
            rng = random.Random(self.seed)
            cuts = sorted(rng.sample(self.firsts, self.stages * self.chunks - 1))
            usual = "interleaved" if self.chunks > 1 else "1f1b"
            schedule = "zb-h1" if self.has_weight else usual
            cut = self.cut(plan.pipeline, cuts, cuts, schedule)
            plan = plan.replaced(pipeline=cut, prediction=None)
        if self.chain:
            rng = random.Random(self.seed)
            points = sorted(rng.sample(self.firsts, self.chain - 1))
            segments = tuple(
                ChainSegment(name=segment.name, first=first)
                for first, segment in zip(
                    (0, *points), segments_at(self.graph, points), strict=True
                )
            )
            sequence = draw_sequence(rng, 0, self.chain - 1)
            chain = PlannedChain(segments=segments, sequence=sequence)
            per_call = plan.microbatches_per_call
            if self.chain > 1:
                per_call = random.Random(f"{self} calls").choice((1, 2, 3))
            plan = plan.replaced(chain=chain, microbatches_per_call=per_call)
        return plan

    def cut(self, pipeline, cuts, points, schedule):
        """The pipeline with parts that begin at `cuts` and segments that begin at `points`."""
        firsts = (0, *points)
        segments = tuple(
            PlannedSegment(
                name=segment.name,
                first=first,
                part=sum(first >= cut for cut in cuts),
                keep=self.keep,
            )
            for first, segment in zip(firsts, segments_at(self.graph, points), strict=True)
        )
        fields = {"segments": segments, "schedule": schedule, "num_chunks": self.chunks}
        return pipeline.model_copy(update=fields)


def forms():
    """Each kind of plan for each model, the sizes drawn."""
    rng, of_limbs = random.Random(15), random.Random(1)
    found = []
    for model in ("mlp", "gpt", "conv"):
        cuts = [
            {"size": 1},
            {"size": 2},
            {"chain": rng.randint(3, 5)},
            {"tensor": 2},
            {"stages": 2},
            {"stages": 3, "has_weight": True},
            {"stages": rng.choice((2, 3)), "keep": "inputs"},
            {"stages": 2, "chunks": 2},
        ]
        if model != "conv":
            cuts.append({"stages": 2, "tensor": 2, "keep": "inputs"})
        if model == "mlp":
            counts = rng.choice(((5, 3), (1, 7)))
            cuts.append({"size": 1, "counts": counts})
        for fields in cuts:
            fields = {"size": rng.choice((1, 2)), "seed": rng.randrange(1 << 30)} | fields
            fields["limbs"] = 2 if "counts" in fields else of_limbs.choice((1, 2))
            found.append(Form(model=model, **fields))
    low = [
        ("mlp", "bf16", {}),
        ("mlp", "fp16", {}),
        ("gpt", "fp8", {"chain": 3}),
    ]
    found += [
        Form(model=model, precision=word, **fields, seed=rng.randrange(1 << 30))
        for model, word, fields in low
    ]
    cut = {"tensor": 2, "size": 2}
    return found + [
        Form(model=model, **fields, seed=rng.randrange(1 << 30))
        for model, fields in (
            ("mlp", {**cut, "chain": 4}),
            ("mlp", {**cut, "chain": 3, "shared": True}),
            ("gpt", {**cut, "chain": 3, "shared": True}),
            ("gpt", {"stages": 2, "size": 2, "shared": True}),
            ("mlp", {"stages": 2, "size": 1, "shared": True, "has_weight": True}),
            ("conv", {"stages": 2, "size": 1, "shared": True, "limbs": 1}),
        )
    ]


FORMS = forms()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A plan to train by.

    Attributes:
        plan: As drawn.
        processes: Real ones, or 1: fake devices of this one.
        saves: Steps after which a checkpoint is written; 0: never.
        resumes: Number of the trial whose checkpoint it begins with, or None.
        balance: Whether counts follow measured times.
    """

    plan: hxla.Plan
    processes: int = 1
    saves: int = 0
    resumes: int | None = None
    balance: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a trial ended with: the SHA-256 of its state, and the loss of each step that it did."""

    sha256: str
    losses: dict[int, float]


#: The forms that are run: every tenth, and of one model those cut both ways and of several chunks.
RUN_FORMS = [
    own
    for i, own in enumerate(FORMS)
    if i % 10 == 2 or (own.model == "mlp" and (own.chunks > 1 or min(own.tensor, own.stages) > 1))
]
#: Trials of the same programs: what costs time is to compile them.
EACH = 5


def trials(form):
    """A set of programs, `EACH` trials of it, and two on real processes.

    A chain has a set more, and stages that share, so that these are of several stages of ZeRO.
    """
    num_sets = 1 + (form.chain > 0 or form.shared)
    rng = random.Random(str(form))
    found = []
    can_be_four = not form.counts and MOST_DEVICES % (form.stages * form.tensor) == 0
    processes = rng.choice((2, 4)) if can_be_four else max(2, form.stages)
    for number in range(num_sets + 1):
        is_real = number == num_sets
        used = processes if is_real else 1
        plan, draw_counts = _draw_set(form, rng, number, used)
        for _ in range(2 if is_real else EACH):
            trial, seen = None, {(t.plan, t.saves, t.resumes) for t in found}
            while trial is None or (trial.plan, trial.saves, trial.resumes) in seen:
                saved = [n for n, other in enumerate(found) if other.saves]
                resumes = rng.choice(saved) if saved and rng.random() < 0.5 else None
                is_measured = not form.counts and form.stages == 1 and not is_real
                trial = Trial(
                    plan=plan.with_counts(draw_counts()),
                    processes=used,
                    saves=rng.randrange(1, STEPS) if resumes is None and rng.random() < 0.7 else 0,
                    resumes=resumes,
                    balance=is_measured and rng.random() < 0.2,
                )
            found.append(trial)
    return found


def _draw_set(form, rng, number, processes):
    """A plan, and what draws counts for it: the same programs run all of them."""
    plan, width = form.plan, form.stages * form.tensor
    pipeline = plan.pipeline
    most = min(MOST_DEVICES // width, form.num_microbatches)
    stage = (number + form.seed // 2) % (4 if form.chain else 2) if form.could_share else 0
    if form.shared:
        stage = 1 + (number + form.seed // 2) % 3
    copies = rng.randint(min(2, most) if stage else 1, most)
    copies = len(form.counts) or (most if processes > 1 else copies)
    ranks = rng.sample(range(copies * width), copies * width)
    each = MOST_DEVICES // processes
    while processes > 1 and len({rank // each for rank in ranks}) < processes:
        ranks = rng.sample(range(MOST_DEVICES), copies * width)
    over = random.Random(f"{form} {number}").choice(("device", "host"))
    over = over if width == 1 and not form.counts else "device"
    if over == "host" and stage:  # those of a process have one piece of the state together
        ranks.sort(key=lambda rank: rank // each)
    groups = [tuple(ranks[i * width : (i + 1) * width]) for i in range(copies)]
    unit, draw = 1, functools.partial(_draw_counts, rng, form.num_microbatches, copies)
    if form.stages > 1:
        cuts = plan.pipeline.points
        inside = [first for first in form.firsts if first not in cuts]
        points = sorted({*cuts, *rng.sample(inside, rng.randint(0, len(inside)))})
        even = form.num_microbatches % copies == 0
        names = ["zb-h1"] if form.has_weight else ["interleaved"]
        names += ["1f1b", "gpipe"] if form.chunks == 1 and not form.has_weight else []
        if even:
            names.append("table")
        schedule = names[(number + form.seed) % len(names)]
        if schedule == "interleaved" and form.num_microbatches % form.stages:
            schedule = "gpipe"
        if schedule == "interleaved":
            unit = form.stages
        if schedule == "table":
            unit = form.num_microbatches // copies
            schedule = draw_table(rng, form.stages, form.chunks, unit, form.has_weight)
        pipeline = form.cut(plan.pipeline, cuts, points, schedule)
        draw = functools.partial(_draw_counts, rng, form.num_microbatches, copies, unit)
        if not isinstance(schedule, str):
            draw = lambda: (unit,) * copies  # noqa: E731
    if form.counts:
        draw = lambda: form.counts  # noqa: E731
    sums = {"bucket_mib": rng.choice((1, 16, 256))} if not form.counts else {}
    sums["over"] = over
    if form.model == "gpt" and width == 1 and rng.random() < 0.5:
        sums["sparse"] = (SparseRows(name="embed/embedding", most_rows=VOCABULARY),)
    placed = plan.placement.model_copy(update={"sums": rng.choice(("kept", "released"))})
    if stage:
        shares = [rng.randint(1, 4) for _ in range(copies - 1)]
        shares.insert(rng.randrange(copies), rng.randint(1, 4))
        shard_groups = 1
        if copies == 4 and sums["over"] == "device":
            shard_groups = random.Random(f"{form} {number} groups").choice((1, 2))
            shares = shares[: copies // shard_groups]
        zero = {"zero": stage, "shares": rng.choice(((), tuple(shares)))}
        zero["shard_groups"] = shard_groups
        if stage > 1 and form.chain:
            zero["waves"] = random.Random(f"{form} {number} waves").choice((1, 2, 3))
        where = random.Random(f"{form} {number} where")
        tiers = ("device", "host") if form.shared else ("device", "host", "disk")
        zero["optimizer"] = where.choice(tiers)
        zero["parameters"] = where.choice(("device", "host")) if stage == 3 else "device"
        placed = placed.model_copy(update=zero)
        sums.pop("sparse", None)
    counts, executors = draw(), 1
    if width == 1 and not form.counts:
        executors = random.Random(f"{form} {number} executors").choice((1, 2, 3))
    starts = [0.0] * copies
    if pipeline is not None and stage < 2:
        late = random.Random(f"{form} {number} starts")
        starts = [late.choice((0.0, 0.002, 0.01)) for _ in groups]
    chain = plan.chain
    if chain is not None:
        sequence = draw_sequence(rng, 0, len(chain.segments) - 1)
        chain = chain.model_copy(update={"sequence": sequence})
    return plan.replaced(
        chain=chain,
        cluster=rng.choice(("", "mine")),
        pipeline=pipeline,
        devices=tuple(PlannedDevice(rank=rank, kind="cpu") for rank in sorted(ranks)),
        replicas=tuple(
            ReplicaWork(
                devices=group, num_microbatches=count, executors=executors, start_seconds=start
            )
            for group, count, start in zip(groups, counts, starts, strict=True)
        ),
        sums=plan.sums.model_copy(update=sums),
        placement=placed,
        prediction=None,
        reasons=("drawn",),
    ), draw


def _draw_counts(rng, num, copies, unit=1):
    """Multiples of `unit` that add up to `num`, zeros among them."""
    ends = sorted(rng.randint(0, num // unit) for _ in range(copies - 1))
    return tuple(unit * (b - a) for a, b in itertools.pairwise((0, *ends, num // unit)))


def draw_sequence(rng, first, last, end=None):
    """What runs for the gradients of some segments, forwards kept or run again by chance."""
    end = last if end is None else end
    if first == last:
        return (f"B{last}:input",) if last == end else (f"F{last}:cut", f"B{last}:cut")
    if rng.random() < 0.4:
        inner = draw_sequence(rng, first + 1, last, end)
        return (f"F{first}:cut", *inner, f"B{first}:cut")
    middle = rng.randint(first + 1, last)
    forwards = (f"F{first}+", *(f"F{i}" for i in range(first + 1, middle)))
    above = draw_sequence(rng, middle, last, end)
    return (*forwards, *above, *draw_sequence(rng, first, middle - 1, end))


def draw_table(rng, num_stages, num_chunks, num_microbatches, has_weight):
    """A schedule in which each stage does, or leaves for later, any of what it could do."""
    last = num_stages * num_chunks - 1
    kinds = "FBW" if has_weight else "FB"
    parts, microbatches = range(last + 1), range(num_microbatches)
    todo = {*itertools.product(kinds, parts, microbatches)}
    done, table = set(), []

    def is_ready(op):
        kind, part, m = op
        if kind == "F":
            return part == 0 or ("F", part - 1, m) in done
        if kind == "B":
            return ("F" if part == last else "B", min(part + 1, last), m) in done
        return ("B", part, m) in done

    while todo:
        row = []
        for stage in range(num_stages):
            ready = sorted(op for op in todo if op[1] % num_stages == stage and is_ready(op))
            row.append(rng.choice(ready) if ready and rng.random() < 0.8 else None)
        todo -= {*row}
        done |= {*row} - {None}
        if any(row):
            table.append(tuple("" if op is None else _written(op, num_stages) for op in row))
    return tuple(table)


def _written(op, num_stages):
    kind, part, m = op
    chunk = part // num_stages
    return f"{kind}{m}" + (f".{chunk}" if chunk else "")


def run(form, trial, folder=None):
    """Train by a plan, from a checkpoint of `folder` if it holds one."""
    options = {"checkpoint_dir": folder} if folder is not None else {}
    with form.job.open(trial.plan, steps=STEPS, balance=trial.balance, **options) as session:
        losses = {}
        for record in session:
            losses[record.step] = record.loss
            if record.step == 1:  # what is handed in is a part of the run, however it lies
                whole = session.gather((session.state.params, session.state.opt_state))
                params = jax.tree.map(lambda x: x * x.dtype.type(0.75), whole[0])
                session.replace(params=params, opt_state=whole[1])
            if session.step_number == trial.saves:
                session.save()
        state = session.state
        tree = (state.params, state.aux, state.opt_state)
        return Outcome(hxla.fingerprint(tree, session.gather), losses)


class Processes:
    """Real processes that train one plan after another.

    Args:
        num: How many, of `MOST_DEVICES // num` devices each.
        folder: For what is asked and answered.
    """

    def __init__(self, num, folder):
        self.num, self._folder, self._asked = num, folder, 0
        # The last of a flag holds; others, such as the instruction set, must be those of here.
        flags = os.environ.get("XLA_FLAGS", "")
        flags += f" --xla_force_host_platform_device_count={MOST_DEVICES // num}"
        # Several devices of a process wait for each other in collectives: each takes threads.
        settings = {"XLA_FLAGS": flags, "NPROC": "8", "PYTHONPATH": PYTHONPATH}
        self._said = open(folder / "said", "w")  # noqa: SIM115
        command = [sys.executable, "-m", "hxla", "run", "-n", str(num), __file__, str(folder)]
        command.append(str(os.getpid()))
        self._launcher = subprocess.Popen(
            command, stdout=self._said, stderr=self._said, env=os.environ | settings
        )

    @property
    def has_ended(self):
        """Whether a plan failed in them: the next one needs others."""
        return self._launcher.poll() is not None

    def run(self, form, trial, folder=None):
        """What each process ends with."""
        number, self._asked = self._asked, self._asked + 1
        asked = {
            "form": FORMS.index(form),
            "plan": trial.plan.to_json(),
            "saves": trial.saves,
            "folder": str(folder) if folder is not None else None,
        }
        new = self._folder / "new"
        new.write_text(json.dumps(asked))
        new.rename(self._folder / str(number))
        found = [self._folder / f"{number}.{rank}" for rank in range(self.num)]
        while not all(path.exists() for path in found):
            if self.has_ended:
                raise AssertionError((self._folder / "said").read_text()[-6000:])
            time.sleep(0.02)
        answers = [json.loads(path.read_text()) for path in found]
        return [
            Outcome(a["sha256"], {int(step): float.fromhex(x) for step, x in a["losses"].items()})
            for a in answers
        ]

    def close(self):
        (self._folder / "end").touch()
        try:
            self._launcher.wait(20)
        except subprocess.TimeoutExpired:
            self._launcher.send_signal(signal.SIGTERM)
            self._launcher.wait(20)
        self._said.close()


def serve(folder, asker):
    """Be one of `Processes`, until it ends or the process that asks is gone."""
    for number in itertools.count():
        asked = folder / str(number)
        while not asked.exists():
            if (folder / "end").exists() or not psutil.pid_exists(asker):
                return
            time.sleep(0.02)
        given = json.loads(asked.read_text())
        plan = hxla.Plan.from_json(given["plan"])
        trial = Trial(plan=plan, saves=given["saves"])
        outcome = run(FORMS[given["form"]], trial, given["folder"])
        losses = {step: loss.hex() for step, loss in outcome.losses.items()}
        new = folder / f"new.{jax.process_index()}"
        new.write_text(json.dumps({"sha256": outcome.sha256, "losses": losses}))
        new.rename(folder / f"{number}.{jax.process_index()}")


if __name__ == "__main__":
    try:
        serve(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        raise
