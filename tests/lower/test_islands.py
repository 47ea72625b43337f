"""Islands: replicas that train apart and meet every few steps, and what they are equal to."""

import datetime
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import launched, models
from support.inside.lower import Meetings
from support.tiers import rows

BATCH, SIZE, FEATURES = 16, 2, 6


class Net(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(FEATURES, 8, rngs=rngs, param_dtype=dtype)
        self.out = nnx.Linear(8, 1, rngs=rngs, param_dtype=dtype)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


def loss(model, batch):
    return (model(batch["x"])[:, 0] - batch["y"]) ** 2


def examples(num=64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(axis=1)).astype(np.float32)}


def job_of(islands, optimizer, model=None, loss=loss, data=None, **config):
    data = examples() if data is None else data
    config = {"islands": islands, **config}
    model = Net() if model is None else model
    return hxla.Job(model, data, loss, optimizer, batch_size=BATCH, shuffle=False, config=config)


def train(islands, optimizer, counts, steps=6, **options):
    options = {"mesh": models.mesh(data=len(counts)), "microbatch_size": SIZE, **options}
    job = job_of(islands, optimizer)
    return hxla.train(job, steps=steps, counts=counts, quiet=True, **options)


# -- against plain JAX ----------------------------------------------------------------------------


def trained_apart(optimizer, counts, every, rate, momentum, steps):
    """DiLoCo by hand: the parameters, and the optimizer's state averaged like them."""
    graph, params = nnx.split(Net())
    data = examples()
    weights = np.array(counts) / sum(counts)
    ends = np.cumsum([0, *counts]) * SIZE

    def mean_loss(params, batch):
        return loss(nnx.merge(graph, params), batch).mean()

    def averaged(trees):
        def mean(*xs):
            if not jnp.issubdtype(xs[0].dtype, jnp.floating):
                return xs[0]
            return sum(w * x for w, x in zip(weights, xs, strict=True))

        return jax.tree.map(mean, *trees)

    velocity = jax.tree.map(jnp.zeros_like, params)
    own = [(params, optimizer.init(params))] * len(counts)
    for step in range(steps):
        first = step * BATCH % 64
        for i, (mine, state) in enumerate(own):
            here = slice(first + ends[i], first + ends[i + 1])
            grads = jax.grad(mean_loss)(mine, jax.tree.map(lambda x, h=here: x[h], data))
            updates, state = optimizer.update(grads, state, mine)
            own[i] = optax.apply_updates(mine, updates), state
        if (step + 1) % every == 0:
            moved = averaged([jax.tree.map(jnp.subtract, params, p) for p, _ in own])
            velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, moved)
            params = jax.tree.map(
                lambda x, g, v: x - rate * (g + momentum * v), params, moved, velocity
            )
            own = [(params, averaged([s for _, s in own]))] * len(counts)
    return params, own[0][1]


@pytest.mark.parametrize(
    ("optimizer", "counts", "every", "rate", "momentum"),
    [
        (optax.sgd(0.1), (4, 4), 3, 1.0, 0.0),
        (optax.adamw(0.02), (5, 3), 2, 0.7, 0.9),
        (optax.inject_hyperparams(optax.adam)(learning_rate=0.02), (1, 3, 4), 3, 0.7, 0.5),
    ],
    ids=["averages", "DiLoCo", "three islands"],
)
def test_islands_are_diloco_by_hand(optimizer, counts, every, rate, momentum):
    islands = {"every": every, "learning_rate": rate, "momentum": momentum}
    result = train(islands, optimizer, counts)
    params, state = trained_apart(optimizer, counts, every, rate, momentum, 6)
    for have, want in ((result.state, params), (result.opt_state, state)):
        pairs = zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_a_learning_rate_that_all_islands_have_is_not_averaged():
    rate = 0.1 / 3
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    result = train({"every": 2}, optimizer, (3, 5))
    assert result.opt_state.hyperparams["learning_rate"] == np.float32(rate)


def test_islands_that_meet_after_each_step_of_sgd_train_as_one():
    together = train({}, optax.sgd(0.1), (4, 4))
    apart = train({"every": 1, "momentum": 0.0}, optax.sgd(0.1), (4, 4))
    pairs = zip(jax.tree.leaves(apart.state), jax.tree.leaves(together.state), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# -- the law --------------------------------------------------------------------------------------

SPREADS = {
    "one each": ((5, 3), (1, 1)),
    "the first of two": ((2, 3, 3), (2, 1)),
    "the second of three": ((5, 1, 0, 2), (1, 3)),
    "two of two": ((1, 4, 2, 1), (2, 2)),
}


@pytest.fixture(scope="module")
def one_each():
    return train({"every": 2, "momentum": 0.9}, optax.adamw(0.02), *SPREADS["one each"][:1])


@pytest.mark.parametrize("name", rows(list(SPREADS)[1:], "the first of two"))
def test_bits_depend_on_the_microbatches_of_islands_only(name, one_each):
    counts, replicas = SPREADS[name]
    islands = {"every": 2, "momentum": 0.9, "replicas": list(replicas)}
    other = train(islands, optax.adamw(0.02), counts)
    assert other.plan.numerics == one_each.plan.numerics
    assert other.sha256 == one_each.sha256


@pytest.mark.parametrize(
    "change", [{"every": 3}, {"learning_rate": 0.5}, {"momentum": 0.5}, {"counts": (4, 4)}], ids=str
)
def test_what_moves_bits_is_in_numerics(change, one_each):
    islands = {"every": 2, "momentum": 0.9, **change}
    counts = islands.pop("counts", (5, 3))
    other = train(islands, optax.adamw(0.02), counts)
    assert other.plan.numerics != one_each.plan.numerics
    assert other.sha256 != one_each.sha256


def test_a_resumed_run_ends_with_the_same_bits(tmp_path, one_each):
    islands, optimizer = {"every": 2, "momentum": 0.9}, optax.adamw(0.02)
    train(islands, optimizer, (5, 3), steps=4, checkpoint_dir=tmp_path)
    resumed = train(islands, optimizer, (5, 3), checkpoint_dir=tmp_path)
    assert [record.step for record in resumed.history.steps] == [5, 6]
    assert resumed.sha256 == one_each.sha256


def test_sessions_of_one_job_share_no_momentum(one_each):
    job = job_of({"every": 2, "momentum": 0.9}, optax.adamw(0.02))
    mesh = models.mesh(data=2)
    plan = job.plan(mesh=mesh, microbatch_size=SIZE, counts=(5, 3))
    with (
        job.open(plan, steps=6, mesh=mesh, quiet=True) as one,
        job.open(plan, steps=6, mesh=mesh, quiet=True) as other,
    ):
        for _ in range(6):
            one.step()
            other.step()
        found = [session.result().sha256 for session in (one, other)]
    with job.open(plan, steps=6, mesh=mesh, quiet=True) as third:
        found += [[*third], third.result().sha256][1:]
    assert found == [one_each.sha256] * 3


def test_a_failed_meeting_is_not_saved(tmp_path, one_each, monkeypatch):
    islands, optimizer = {"every": 2, "momentum": 0.9}, optax.adamw(0.02)
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    meet, steps = Meetings.meet, []

    def fail_at_the_second(*args):
        steps.append(0)
        if len(steps) == 2:
            raise MemoryError
        meet(*args)

    monkeypatch.setattr(Meetings, "meet", fail_at_the_second)
    with pytest.raises(MemoryError):
        train(islands, optimizer, (5, 3), **options)
    assert train(islands, optimizer, (5, 3), **options).sha256 == one_each.sha256


def test_a_run_that_ends_between_meetings_resumes_from_the_last(tmp_path, one_each):
    def fail(record, _):
        assert record.step < 3

    islands, optimizer = {"every": 2, "momentum": 0.9}, optax.adamw(0.02)
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    with pytest.raises(AssertionError):
        train(islands, optimizer, (5, 3), callbacks=[fail], **options)
    resumed = train(islands, optimizer, (5, 3), **options)
    assert [record.step for record in resumed.history.steps] == [3, 4, 5, 6]
    assert resumed.sha256 == one_each.sha256


def test_a_resumed_run_keeps_measured_counts(tmp_path):
    def run(counts, steps):
        job = job_of({"every": 2}, optax.sgd(0.1))
        options = {"mesh": models.mesh(data=2), "microbatch_size": SIZE, "quiet": True}
        return hxla.train(job, steps=steps, counts=counts, checkpoint_dir=tmp_path, **options)

    run((7, 1), 2)
    assert run("measured", 4).plan.counts == (7, 1)
    changed = run((1, 7), 6)
    assert "islands of 1+7 microbatches, 7+1 before: bits differ" in changed.plan.explain()


class Dropping(Net):
    def __init__(self):
        super().__init__()
        self.dropout = nnx.Dropout(0.3, rngs=nnx.Rngs(dropout=1))

    def __call__(self, x):
        return self.out(self.dropout(jnp.tanh(self.hidden(x))))


WITH = {
    "adafactor": dict(optimizer=optax.adafactor(1e-2)),
    "bf16": dict(precision="bf16"),
    "bf16 parameters": dict(model=lambda: Net(jnp.bfloat16)),
    "clip after": dict(communication={"clip_norm": 0.1}),
    "clip before": dict(communication={"clip_norm": 0.1, "clip": "before"}),
    "dropout": dict(model=Dropping),
    "fp8": dict(precision="fp8"),
    "groups": dict(num_groups=2),
    "lamb": dict(optimizer=optax.lamb(1e-2)),
    "MultiSteps": dict(optimizer=optax.MultiSteps(optax.adam(1e-2), 2)),
    "muon": dict(optimizer=optax.contrib.muon(1e-2)),
    "one limb": dict(communication={"limbs": 1}),
    "one microbatch a call": dict(cluster={"microbatches_per_call": 1}),
    "plateau": dict(
        optimizer=optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1))
    ),
    "recomputed": dict(memory={"recompute": "boundaries"}),
    "schedule-free": dict(optimizer=optax.contrib.schedule_free_adamw(1e-2)),
    "stash on the host": dict(memory={"recompute": "none", "offload": {"stash": "host"}}),
}


@pytest.mark.parametrize("name", rows(WITH, "adafactor", "dropout", "stash on the host"))
def test_bits_do_not_depend_on_the_devices_of_an_island_with(name):
    config = {"optimizer": optax.adamw(0.02), "model": Net, **WITH[name]}
    optimizer, model = config.pop("optimizer"), config.pop("model")
    if num := config.pop("num_groups", None):
        config["optimizer"] = {"num_apply_groups": num}
    found = set()
    for counts, replicas in (((5, 3), [1, 1]), ((2, 3, 1, 2), [2, 2])):
        job = hxla.Job(
            model(),
            examples(),
            loss,
            optimizer,
            batch_size=BATCH,
            config={"islands": {"every": 2, "replicas": replicas}, **config},
        )
        options = {"mesh": models.mesh(data=len(counts)), "microbatch_size": SIZE, "quiet": True}
        result = hxla.train(job, steps=4, counts=counts, **options)
        found.add((result.plan.numerics, result.sha256))
    assert len(found) == 1


RULES = hxla.RuleSet(
    name="columns",
    rules=(hxla.Rule(path="hidden/kernel", axes=((), ("tensor",))),),
)


@pytest.mark.parametrize("axis", rows(["tensor", "stage"], "tensor"))
def test_an_island_may_be_several_devices(axis):
    """Their axes move bits, and nothing else: the result is that of islands of one device."""
    islands = {"every": 2, "momentum": 0.5, "replicas": [1, 1]}
    options = {"rules": RULES} if axis == "tensor" else {"stages": 2}
    alone = train(islands, optax.adamw(0.02), (4, 4))
    mesh = models.mesh(data=2, **{axis: 2})
    cut = train(islands, optax.adamw(0.02), (4, 4), mesh=mesh, **options)
    pairs = zip(jax.tree.leaves(cut.state), jax.tree.leaves(alone.state), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# -- what travels ---------------------------------------------------------------------------------


def test_between_meetings_no_gradient_travels():
    """The sums' program has collectives of statistics and peaks, a few numbers for each tensor."""

    def elements(islands):
        job = job_of(islands, optax.sgd(0.1))
        plan = job.plan(mesh=models.mesh(data=2), microbatch_size=SIZE)
        with job.open(plan, mesh=models.mesh(data=2), quiet=True) as session:
            texts = [program.as_text() for program in session._programs.reducer.programs]
        found = [c for text in texts for c in hxla.inspect(text).main.select(None)]
        return sum(c.num_bytes for c in found)

    assert elements({"every": 2}) < 400 < elements({})


# -- refusals -------------------------------------------------------------------------------------


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nnx.BatchNorm(FEATURES, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return super().__call__(self.norm(x))


REFUSED = {
    "an end between meetings": (dict(steps=5), hxla.ConfigError, r"5 steps.*steps=4 or steps=6"),
    "an evaluation between meetings": (
        dict(eval_data=examples(), eval_every=3),
        hxla.ConfigError,
        "eval_every.*after step 3.*multiple of 2",
    ),
    "a checkpoint between meetings": (
        dict(checkpoint_every=1),
        hxla.ConfigError,
        "checkpoint_every.*after step 1.*multiple of 2",
    ),
    "an island without microbatches": (dict(counts=(8, 0)), hxla.ConfigError, r"8\+0.*needs one"),
    "float sums": (dict(reduction="float"), hxla.PlanError, "sums.kind.*use 'exact'"),
    "ZeRO": (dict(memory={"zero": 1}), hxla.PlanError, "placement.zero.*use 0"),
    "other groups": (
        dict(islands={"every": 2, "replicas": [2, 1]}),
        hxla.PlanError,
        "2 \\+ 1 are 3, this plan has 2",
    ),
    "one replica": (dict(mesh=1), hxla.ConfigError, "one replica is one island"),
    "a search": (dict(plan="auto"), hxla.ConfigError, "islands.every: a search"),
    "counters of gradients": (
        dict(optimizer=optax.apply_if_finite(optax.adam(1e-2), 3)),
        hxla.PlanError,
        "notfinite_count is int32 and depends on gradients",
    ),
    "sums of gradients": (
        dict(config={"communication": {"gradient": "sum"}}),
        hxla.PlanError,
        "communication.gradient.*use 'mean'",
    ),
    "a plan without islands": (
        dict(plan="none"),
        hxla.PlanError,
        "islands: none in the plan.*islands.every of 2",
    ),
    "an epoch that ends between meetings": (
        dict(eval_data=examples(), eval_every="epoch", data=examples(80)),
        hxla.ConfigError,
        "eval_every.*after step 5.*multiple of 2",
    ),
    "momentum without a period": (
        dict(islands={"momentum": 0.9}),
        hxla.ConfigError,
        "none without islands.every",
    ),
    "running statistics": (dict(model=Normed), hxla.PlanError, "variable 'norm/mean'.*LayerNorm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    changes, error, words = REFUSED[name]
    changes = {"steps": 6, "mesh": 2, "microbatch_size": SIZE, **changes}
    islands = changes.pop("islands", {"every": 2})
    config = {"memory": changes.pop("memory")} if "memory" in changes else {}
    config |= changes.pop("config", {})
    model, data = changes.pop("model", Net)(), changes.pop("data", None)
    optimizer = changes.pop("optimizer", optax.sgd(0.1))
    mesh = models.mesh(data=changes.pop("mesh"))
    if changes.get("plan") == "none":
        plain = job_of({}, optimizer)
        changes["plan"] = plain.plan(mesh=mesh, microbatch_size=changes.pop("microbatch_size"))
    elif "plan" in changes:
        config["cluster"] = {"visible_devices": [0, 1]}
    else:
        changes["mesh"] = mesh
    if "checkpoint_every" in changes:
        changes["checkpoint_dir"] = tmp_path
    arguments = islands, optimizer, model, loss, data
    with pytest.raises(error, match=f"(?s){words}"):
        hxla.train(job_of(*arguments, **config), quiet=True, **changes)


@pytest.fixture
def session():
    job = job_of({"every": 2}, optax.sgd(0.1))
    plan = job.plan(mesh=models.mesh(data=2), microbatch_size=SIZE)
    with job.open(plan, mesh=models.mesh(data=2), quiet=True) as session:
        yield session


def test_a_state_is_there_after_a_meeting_only(session):
    whole = session.state.params
    session.replace(params=session.gather(whole))
    session.step()
    uses = {
        "session.state": lambda: session.state,
        "session.evaluate": lambda: session.evaluate(examples()),
        "session.replace": lambda: session.replace(params=whole),
        "session.result": session.result,
    }
    for name, use in uses.items():
        with pytest.raises(hxla.ConfigError, match=f"{name} after step 1.*after step 2"):
            use()
    session.step()
    for name in uses.keys() - {"session.replace"}:  # its arrays are gone
        uses[name]()


def test_a_replaced_state_is_what_the_next_meeting_starts_from(session):
    zeros = jax.tree.map(np.zeros_like, session.gather(session.state.params))
    session.replace(params=zeros)
    session.step(), session.step()
    moved = jax.tree.leaves(session.gather(session.state.params))
    assert 0 < max(float(np.abs(x).max()) for x in moved) < 0.5


def test_a_stop_and_a_checkpoint_by_the_clock_wait_for_a_meeting(tmp_path):
    seen = []

    def stop(record, session):
        seen.append(record.step)
        return record.step == 3

    job = job_of({"every": 4}, optax.sgd(0.1))
    options = {"mesh": models.mesh(data=2), "microbatch_size": SIZE, "quiet": True}
    clock = datetime.timedelta(microseconds=1)
    result = hxla.train(
        job, steps=12, callbacks=[stop], checkpoint_dir=tmp_path, checkpoint_every=clock, **options
    )
    assert (result.step, seen[-1]) == (4, 4)
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [4]


# -- real processes -------------------------------------------------------------------------------

SCRIPT = """
import sys, jax, optax
sys.path.insert(0, {folder!r})
import hxla
import test_islands as here

islands = {{"every": 2, "momentum": 0.9, "replicas": [2, 1]}}
job = here.job_of(islands, optax.adamw(0.02))
result = hxla.train(job, steps=6, counts=(2, 3, 3), microbatch_size=here.SIZE, quiet=True)
if jax.process_index() == 0:
    print("sha256", result.sha256, result.plan.numerics)
"""


@pytest.mark.slow
def test_three_processes_end_with_the_bits_of_one(tmp_path):
    code = SCRIPT.format(folder=str(pathlib.Path(__file__).parent))
    job = launched.start(tmp_path, code, "-n", "3")
    out, err = launched.end_of(job)
    assert job.returncode == 0, err
    one = train({"every": 2, "momentum": 0.9}, optax.adamw(0.02), (5, 3))
    assert out.split()[-2:] == [one.sha256, one.plan.numerics]
