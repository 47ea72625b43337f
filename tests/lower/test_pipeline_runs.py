"""Runs of pipelines: several at once, dropout, checkpoints, evaluation, and what is refused."""

import concurrent.futures
import functools
import json
import shutil
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import lowering, models
from support.inside.choose import PipelineRequest
from support.inside.graph import graph_of, parts_of, trace_sums
from support.inside.lower import PieceTimes, Pipeline
from support.inside.schedule import BACKWARD, FORWARD
from support.inside.session import Balancer, _pipeline_watch
from support.tiers import rows
from support.training import train_with

BATCH, SIZE = 128, 16  # examples of a step, and of a microbatch


class Net(nnx.Module):
    """BatchNorm and dropout: statistics of a whole step, and bits of each example."""

    def __init__(self, rngs):
        self.first = nnx.Linear(6, models.WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(models.WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(models.WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))


@functools.cache
def job(num):
    """On so many devices; traced, and each of its plans compiled, once."""
    return hxla.Job(
        lambda: Net(nnx.Rngs(0)),
        models.regression(3 * BATCH),
        models.squared_error,
        optax.sgd(0.1),
        batch_size=BATCH,
        shuffle=False,
        config={"cluster": {"visible_devices": list(range(num))}},
    )


def run(num, stages=None, counts="even", *, steps=3, checkpoint_dir=None):
    """The result of a run, and the loss of an evaluation after it."""
    plan = job(num).plan(stages=stages, microbatch_size=SIZE, counts=counts)
    with job(num).open(plan, steps=steps, checkpoint_dir=checkpoint_dir) as session:
        for _ in session:
            pass
        if checkpoint_dir is not None:
            session.save()
        return session.result(), session.evaluate(models.regression(BATCH + 8)).loss


#: One device, or of two pipelines one that has all microbatches.
ONE_DEVICE, TWO_STAGES, FOUR_STAGES = (1,), (4, 2, (8, 0)), (4, 4)
run_once = functools.cache(run)


def floats(tree):
    leaves = jax.tree.leaves(tree)
    return [np.asarray(x) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


def same_but_for_rounding(a, b):
    for x, y in zip(floats(a.state), floats(b.state), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=5e-6 * max(1.0, np.abs(y).max()))
    own, other = ({s.step: s.loss for s in r.history.steps} for r in (a, b))
    common = sorted(set(own) & set(other))
    assert common
    np.testing.assert_allclose([own[s] for s in common], [other[s] for s in common], rtol=2e-6)


@pytest.mark.parametrize("spread", rows([(4, 2), (4, 2, (5, 3)), (2, 2)], (4, 2, (5, 3))))
def test_the_bits_do_not_depend_on_how_many_pipelines_there_are(spread):
    result, _ = run_once(*spread)
    assert len(result.plan.replicas) == spread[0] // 2
    assert result.sha256 == run_once(*TWO_STAGES)[0].sha256


@pytest.mark.slow
def test_an_optimizer_without_state_begins_on_several_pipelines(no_persistent_cache):
    """There is no program for nothing, which would be one device's and not each copy's."""
    job.cache_clear()
    assert len(run(4, 2, steps=1)[0].history.steps) == 1


@pytest.mark.parametrize("staged", rows([TWO_STAGES, FOUR_STAGES], TWO_STAGES))
def test_dropout_statistics_and_evaluation_are_those_without_stages(staged):
    (plain, before), (piped, after) = run_once(*ONE_DEVICE), run_once(*staged)
    same_but_for_rounding(piped, plain)
    assert after == pytest.approx(before, rel=2e-6)
    assert jax.tree.structure(piped.state) == jax.tree.structure(plain.state)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """From how a run began to the folder of its first two steps."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def of(*first):
        own = folder / str(len(list(folder.iterdir())))
        run(*first, steps=2, checkpoint_dir=own)
        return own

    return of


#: Who saved, and who goes on.
RESUMES = [
    (TWO_STAGES, TWO_STAGES),
    (TWO_STAGES, ONE_DEVICE),
    (TWO_STAGES, FOUR_STAGES),
    (ONE_DEVICE, TWO_STAGES),
]


@pytest.mark.parametrize("case", rows(RESUMES, *RESUMES[:2]))
def test_a_checkpoint_knows_nothing_of_stages(tmp_path, checkpoints, case):
    first, then = case
    own = shutil.copytree(checkpoints(*first), tmp_path / "own")
    result, _ = run(*then, checkpoint_dir=own)
    assert [s.step for s in result.history.steps] == [3]
    whole, _ = run_once(*TWO_STAGES)
    if first == then:
        assert result.sha256 == whole.sha256
    same_but_for_rounding(result, whole)


class Annotated(nnx.Module):
    """The same operations with annotations and without."""

    def __init__(self, rngs, *, annotate=True):
        dense = lambda i, o: nnx.Linear(i, o, use_bias=False, rngs=rngs)  # noqa: E731
        self.layers = nnx.List([nnx.List([dense(16, 32), dense(32, 16)]) for _ in range(4)])
        self.annotate = annotate

    def __call__(self, x):
        for up, down in self.layers:
            with hxla.replicate(1) if self.annotate else jax.named_scope("plain"):
                x = down(jnp.tanh(up(x)))
        return x


def slots_and_parts(annotate, **how):
    def run(params, aux, key, batch):
        graphdef, _ = nnx.split(model)
        value = (nnx.merge(graphdef, params)(batch) ** 2).sum()
        return value, jnp.stack([value, 1.0]), aux

    model = Annotated(nnx.Rngs(0), annotate=annotate)
    made = lowering.programs(
        run,
        nnx.state(model, nnx.Param),
        np.ones((2, 16), np.float32),
        num_microbatches=8,
        stages={"num": 4, **how},
    )
    [spec] = [runner.spec for runner in made.runners]
    return spec.slots, spec.parts


def test_pieces_that_are_too_short_to_be_measured_predict_no_step(monkeypatch):
    """As where two processes share a core: every piece may seem shorter than nothing at all."""
    nothing = {(kind, part): 0.0 for kind in (FORWARD, BACKWARD) for part in range(2)}
    times = PieceTimes(seconds=nothing, meeting_seconds={0: 0.0, 1: 0.0}, fixed_seconds=0.1)
    monkeypatch.setattr(_pipeline_watch, "share_cores", lambda devices: False)
    watch = _pipeline_watch.PipelineWatch
    monkeypatch.setattr(watch, "times_here", lambda self, batch: {0: times})
    with job(4).open(two_pipelines(), steps=1) as session:
        session.step()
        [said] = [r for r in session.plan.reasons if r.startswith("pipeline 0: ")]
    assert said.endswith("the overhead of measuring them, so no step is predicted")


def test_annotations_make_the_pipeline_of_the_cut_that_they_say():
    annotated = slots_and_parts(True, by_annotations=True)
    cut = slots_and_parts(False, shares=(1, 1, 1, 1))
    assert annotated[0] == cut[0]
    for ours, theirs in zip(annotated[1], cut[1], strict=True):
        assert ours.segment.params == theirs.segment.params
        assert (ours.inputs, ours.outputs) == (theirs.inputs, theirs.outputs)
        names = [[op.eqn.primitive.name for op in p.segment.ops] for p in (ours, theirs)]
        assert names[0] == names[1]


@pytest.mark.parametrize(
    ("shares", "layers"),
    [((3, 1), [6, 2]), ((0.75, 0.25), [6, 2]), ((1, 1), [4, 4]), ((1, 3, 2, 2), [1, 3, 2, 2])],
)
def test_shares_say_how_much_of_the_work_a_stage_has(shares, layers):
    def run(params, aux, key, batch):
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return x.sum(), jnp.stack([x.sum(), 1.0]), aux

    params = [np.ones((16, 16), np.float32)] * 8
    graph = trace_sums(run, params, {}, np.ones((2, 16), np.float32))
    planned = PipelineRequest(num=len(shares), shares=shares).planned(graph)
    parts = parts_of(graph_of(graph, planned.cut_by), planned.points)
    assert [len(part.segment.params) for part in parts] == layers


class Recurrent(nn.Module):
    """A scan over time: it takes slices of data, and its parameters whole."""

    @nn.compact
    def __call__(self, tokens):
        x = jnp.eye(16)[tokens % 16]
        return nn.RNN(nn.LSTMCell(16))(x)


def recurrent_loss(model, batch):
    return model(batch["tokens"]).mean((1, 2))


class AnnotatedTokens(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(models.VOCABULARY, 16, rngs=rngs)
        self.out = nnx.Linear(16, models.VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        with hxla.replicate(1):
            x = self.embed(tokens)
        with hxla.replicate(1):
            return self.out(x)


TABLE = [["F0", ""], ["", "F0"], ["", "B0"], ["B0", ""]]


def pipeline(**settings):
    return {"config": {"pipeline": settings}}


def train(num_devices=None, net=models.NnxNet, loss=models.token_loss, **options):
    stages = options.get("stages")
    num = num_devices or (stages if isinstance(stages, int) else len(stages or (1,)))
    config = {"cluster": {"visible_devices": list(range(num))}} | options.pop("config", {})
    is_nnx = issubclass(net, nnx.Module)
    model = nnx.eval_shape(lambda: net(nnx.Rngs(0))) if is_nnx else net()
    sizes = {"batch_size": 16, "microbatch_size": 2, "steps": 3, "counts": "even"} | options
    return train_with(model, models.tokens(48), loss, optax.sgd(0.1), **sizes, config=config)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (
            hxla.PlanError,
            "8 devices cannot make pipelines of 3 stages: use 2 or 4 or 8",
            {"stages": 3, "num_devices": 8},
        ),
        (hxla.PlanError, "pipelines of 1 stages", {"stages": 1, "num_devices": 2}),
        (hxla.PlanError, "pipelines of 0 stages", {"stages": 0, "num_devices": 2}),
        (hxla.ConfigError, "neither a number of stages", {"stages": 2.5, "num_devices": 2}),
        (hxla.ConfigError, "positive shares", {"stages": (1, -1)}),
        (hxla.ConfigError, "positive shares", {"stages": (1, 0)}),
        (hxla.ConfigError, "positive shares", {"stages": (1, float("nan"))}),
        (
            hxla.ConfigError,
            "one for each of the 2 chunks",
            {
                "stages": (1, 1, 1),
                "num_devices": 2,
                **pipeline(schedule="interleaved", num_chunks=2),
            },
        ),
        (
            hxla.ConfigError,
            "needs pipeline.schedule='interleaved'",
            {"stages": 2, **pipeline(num_chunks=2)},
        ),
        (
            hxla.ConfigError,
            "stages=2 cuts a model that annotations cut already.*remove the annotations",
            {"stages": 2, "net": AnnotatedTokens},
        ),
        (
            hxla.PlanError,
            r"\(a scan, .*, is one: it takes no slices of parameters, as a scan over layers does\)",
            {"stages": 4, "net": Recurrent, "loss": recurrent_loss},
        ),
        (
            hxla.PlanError,
            "8 microbatches do not suit 1 pipelines .* multiple of 3",
            {"stages": 3, **pipeline(schedule="interleaved")},
        ),
        (
            hxla.PlanError,
            "is for 2 stages, 1 microbatches",
            {"stages": 2, **pipeline(schedule=TABLE)},
        ),
        (hxla.PlanError, "is for 2 stages", {"stages": 4, **pipeline(schedule=TABLE)}),
        (
            hxla.PlanError,
            "needs F0, which",
            {"stages": 2, "microbatch_size": 16, **pipeline(schedule=[["B0", "F0"], ["F0", "B0"]])},
        ),
        (
            hxla.ConfigError,
            "clip='after'",
            {"stages": 2, "config": {"communication": {"clip_norm": 1.0, "clip": "before"}}},
        ),
        (
            hxla.PlanError,
            "only 2 microbatches",
            {"stages": 2, "num_devices": 8, "microbatch_size": 8},
        ),
        (
            hxla.ConfigError,
            r"counts=\(5, 3\): this schedule",
            {
                "stages": 2,
                "num_devices": 4,
                "counts": (5, 3),
                **pipeline(schedule="interleaved", num_chunks=2),
            },
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(error, message, options):
    with pytest.raises(error, match=message):
        train(**options)


def two_pipelines():
    return job(4).plan(stages=2, microbatch_size=SIZE)


def starting(plan, *seconds):
    """The plan with these starts of its copies."""
    pairs = zip(plan.replicas, seconds, strict=True)
    return plan.replaced(
        replicas=tuple(r.model_copy(update={"start_seconds": s}) for r, s in pairs)
    )


def test_a_plan_says_when_each_copy_begins():
    plan = two_pipelines()
    late = starting(plan, 0.0, 0.0007)
    assert late.numerics == plan.numerics
    assert plan.diff(late) == ("replicas.1.start_seconds: 0.0 here, 0.0007 there",)
    first, second = late.explain().splitlines()[1:3]
    assert first.endswith("4 microbatches")
    assert second.endswith("4 microbatches, starts 0.7 ms later")
    assert "later" not in plan.explain()
    assert hxla.Plan.from_json(late.to_json()) == late
    assert [r.start_seconds for r in late.with_counts((5, 3)).replicas] == [0.0, 0.0007]
    table = json.loads(plan.to_json())
    for replica in table["replicas"]:
        del replica["start_seconds"]
    assert hxla.Plan.from_json(json.dumps(table)) == plan


def test_a_start_that_no_copy_could_keep_is_refused():
    own, plan = job(4), two_pipelines()
    for wrong in (-0.1, float("inf"), float("nan"), "soon"):
        table = json.loads(plan.to_json())
        table["replicas"][1]["start_seconds"] = wrong
        with pytest.raises(hxla.PlanError, match=r"replicas\.1\.start_seconds: "):
            hxla.Plan.from_json(json.dumps(table))
    message = r"replicas\.1\.start_seconds: only pipelines .* have no stages: leave it 0"
    with pytest.raises(hxla.PlanError, match=message):
        starting(own.plan(microbatch_size=SIZE), *(0.0, 0.1, 0.2, 0.3))
    for zero in (0, 1, 2, 3):
        shared = plan.replaced(placement=plan.placement.model_copy(update={"zero": zero}))
        if zero < 2:
            assert starting(shared, 0.1, 0.0).replicas[0].start_seconds == 0.1
            continue
        message = rf"replicas\.0\.start_seconds: with placement\.zero of {zero} .*: leave it 0"
        with pytest.raises(hxla.PlanError, match=message):
            starting(shared, 0.1, 0.0)


@functools.cache
def ended_together():
    with job(4).open(two_pipelines(), steps=2) as session:
        return [record.loss for record in session], session.result().sha256


DAY = 86_400.0


@pytest.fixture
def long_sleeps(monkeypatch):
    """Sleeps of a day and more, which take no time but on the clock that programs read."""
    slept, passed, sleep, clock = [], [], time.sleep, time.perf_counter

    def asked(seconds):
        if seconds < DAY:
            sleep(seconds)
        else:
            slept.append(seconds)
            passed.append(seconds)

    monkeypatch.setattr(time, "sleep", asked)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(passed))
    return slept


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_a_copy_begins_later_than_the_others_and_ends_with_the_same_bits(
    late, monkeypatch, long_sleeps
):
    wait, end = 10 * DAY, ended_together()
    own, plan = job(4), two_pipelines()
    starts = [wait * (i == late) for i in range(2)]
    begun, busy, losses = [], [], []
    run, observe = Pipeline.run, Balancer.observe

    def timed(self, *arguments):
        begun.append((self.replica.index, time.perf_counter()))
        return run(self, *arguments)

    def told(self, step, seconds, update, **others):
        busy.append(seconds)
        return observe(self, step, seconds, update, **others)

    with own.open(starting(plan, *starts), steps=2, balance=True) as session:
        monkeypatch.setattr(Pipeline, "run", timed)
        monkeypatch.setattr(Balancer, "observe", told)
        for _ in range(2):
            called = time.perf_counter()
            losses.append(session.step().loss)
            # The first step runs again, with scales of its own.
            assert [copy for copy, _ in begun] == [1 - late, late] * (len(begun) // 2)
            assert begun[0][1] - called < wait - DAY
            assert begun[1][1] - called >= wait - DAY
            begun.clear()
        assert session.plan.prediction.step_seconds > wait
        assert (losses, session.result().sha256) == end
    assert busy
    assert all(0 < seconds[late] < DAY for seconds in busy)  # without what it waited


@pytest.mark.slow
def test_a_measured_pipeline_that_begins_later_is_predicted_to_end_later(monkeypatch):
    own, plan = job(4), two_pipelines()
    seconds = {(kind, part): 0.01 for kind in (FORWARD, BACKWARD) for part in range(2)}
    times = PieceTimes(seconds=seconds, meeting_seconds={0: 0.0, 1: 0.001}, fixed_seconds=0.1)
    monkeypatch.setattr(_pipeline_watch, "share_cores", lambda devices: False)
    watch = _pipeline_watch.PipelineWatch
    monkeypatch.setattr(watch, "times_here", lambda self, batch: {0: times, 1: times})
    predicted = []
    for late in (plan, starting(plan, 0.0, 2.0)):
        with own.open(late, steps=1, balance=False) as session:
            predicted.append(session.plan.prediction)
    assert predicted[1].step_seconds == pytest.approx(predicted[0].step_seconds + 2.0)


def test_only_the_microbatches_of_a_step_wait_for_their_turn(long_sleeps):
    """No warm-up, no timing, no evaluation, and no copy that has nothing to do."""
    own, plan = job(4), starting(two_pipelines(), 0.0, 10 * DAY)
    with own.open(plan, steps=1, balance=True) as session:
        session.evaluate(models.regression(BATCH + 8))
        assert not long_sleeps
        session.step()
        assert long_sleeps
    long_sleeps.clear()
    with own.open(plan.with_counts((8, 0)), steps=1, balance=False) as session:
        session.step()
    assert not long_sleeps
    with own.open(plan, steps=2, balance=False) as session:
        session.step()
        update = concurrent.futures.Future()
        update.set_result((0.0, time.perf_counter() + 10 * DAY))
        session._stepper._updates[1] = update
        session.step()
    assert long_sleeps[-1] > 19 * DAY  # from the end of its own update
