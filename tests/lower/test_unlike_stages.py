"""Unlike stages and replicas: a card alone beside two that share a stage, or a replica."""

import dataclasses
import itertools
import json
import math

import jax
import numpy as np
import pytest
from flax import nnx

import hxla
from support import models, scanned_models
from support.launched import end_of, start
from support.tensor_gpt import BATCH, MICRO, STEPS
from support.tiers import examples, rows
from support.unlike_stages import CASES, ONE, OPTIMIZER, TWO, params_of, reference, trained


@pytest.mark.parametrize(
    "name", rows(CASES, "one and two", "one beside two", "annotated", "gpt of tokens")
)
def test_unlike_stages_train_as_plain_jax_does(name):
    case = CASES[name]
    losses, params = reference(case)
    result = trained(case)
    np.testing.assert_allclose([s.loss for s in result.history.steps], losses, rtol=2e-5)
    for got, expected in zip(params_of(result.model), params, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=case.most * np.abs(expected).max())


#: Replicas of unlike form on three devices.
BESIDE = ("one beside two", "two beside one")

CODE = """
import os
import hxla
hxla.join()
import jax
import numpy as np
from support.unlike_stages import CASES, STEPS, trained

whole = []

def keep(record, session):
    if session.step_number == STEPS:
        whole[:] = jax.tree.leaves(session.gather(session.state.params))

result = trained(CASES[os.environ["NAME"]], visible=False, callbacks=[keep])
if jax.process_index() == 0:
    losses = [record.loss for record in result.history.steps]
    np.savez("found.npz", losses=losses, **{f"p{k:03}": x for k, x in enumerate(whole)})
print("ended", jax.process_index())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("one and two", "gpt", "two and one", "of unlike shards", *BESIDE),
        *("gpt of tokens", "experts", "pictures", "t5, two and one"),
    ],
)
def test_processes_of_unlike_stages_train_as_plain_jax_does(tmp_path, name):
    losses, params = reference(CASES[name])
    out, err = end_of(start(tmp_path, CODE, "-n", "3", env={"NAME": name}))
    assert out.count("ended") == 3, err[-3000:]
    found = np.load(tmp_path / "found.npz")
    np.testing.assert_allclose(found["losses"], losses, rtol=2e-5)
    for k, expected in enumerate(params):
        got = found[f"p{k:03}"]
        np.testing.assert_allclose(
            got, expected, rtol=0, atol=CASES[name].most * np.abs(expected).max()
        )


@pytest.mark.slow
def test_checkpoints_and_evaluations_know_nothing_of_stages(tmp_path):
    case = CASES["one and two"]
    held_out = models.regression(10)
    folder = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "eval_data": held_out}
    losses, _ = reference(case)
    trained(case, steps=1, **folder)
    two = trained(case, steps=2, **folder)  # the same stages again
    last = trained(CASES["first of unlike shards"], **folder)
    alone = trained(dataclasses.replace(case, options={}, num_devices=1), eval_data=held_out)
    resumed = [step.loss for r in (two, last) for step in r.history.steps]
    np.testing.assert_allclose(resumed, losses[1:], rtol=2e-5)
    evaluated = [r.history.evaluations[-1].loss for r in (last, alone)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)


@pytest.mark.slow
def test_statistics_dropout_and_low_precision_are_those_of_one_device():
    case = dataclasses.replace(
        CASES["one and two"],
        make=lambda: models.NnxNet(nnx.Rngs(0)),
        loss=models.token_loss,
        data=lambda: models.tokens(STEPS * BATCH),
        options={"stages": [TWO, ONE], "rules": "decoder"},
    )
    for precision, rel in (("fp32", 1e-5), ("bf16", 2e-2)):
        split = trained(case, precision=precision)
        one = dataclasses.replace(case, options={}, num_devices=1)
        alone = trained(one, precision=precision)
        for a, b in zip(alone.history.steps, split.history.steps, strict=True):
            assert a.loss == pytest.approx(b.loss, rel=rel)
        statistics = [jax.tree.leaves(nnx.state(r.model, nnx.BatchStat)) for r in (alone, split)]
        for a, b in zip(*statistics, strict=True):
            np.testing.assert_allclose(a, b, rtol=rel, atol=rel / 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one and two", "of unlike shards"])
def test_no_spread_of_microbatches_moves_a_bit(name):
    one = CASES[name]
    two = dataclasses.replace(one, num_devices=2 * one.num_devices)
    results = [trained(one), *(trained(two, counts=counts) for counts in ((5, 3), (2, 6)))]
    assert len({result.plan.numerics for result in results}) == 1
    assert len({result.sha256 for result in results}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one and two", "one beside two"])
def test_gradients_are_clipped_by_the_norm_of_all_stages(name):
    case = CASES[name]
    clipped = {"config": {"communication": {"clip_norm": 0.1}}}
    alone = trained(dataclasses.replace(case, options={}, num_devices=1), **clipped)
    split = trained(case, **clipped)
    for a, b in zip(params_of(alone.model), params_of(split.model), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-5 * np.abs(a).max())


def test_a_stage_whose_axis_has_no_role_is_refused():
    case = CASES["one and two"]
    own = hxla.Job(case.make(), case.data(), case.loss, OPTIMIZER, batch_size=BATCH)
    devices = (hxla.Device(kind="cpu"),) * case.num_devices
    made = own.plan(hxla.Cluster(name="", devices=devices), microbatch_size=MICRO, **case.options)
    table = json.loads(made.to_json())
    table["pipeline"]["stages"][1]["axes"][0]["roles"] = []
    with pytest.raises(hxla.PlanError, match="0 TaskGraphs have roles in the plan"):
        own.open(hxla.Plan.from_json(json.dumps(table)), steps=1)


@pytest.mark.parametrize(
    "stages", rows([[ONE, ONE, ONE], [[ONE], [ONE, ONE, ONE]]], [[ONE], [ONE, ONE, ONE]])
)
def test_stages_inside_a_scan_over_layers_run_what_the_plan_says(stages):
    model = scanned_models.NnxNet()
    own = hxla.Job(model, scanned_models.data(), scanned_models.loss, OPTIMIZER, batch_size=8)
    devices = (hxla.Device(kind="cpu"),) * sum(map(len, stages if stages[0] != ONE else [stages]))
    plan = own.plan(hxla.Cluster(name="", devices=devices), microbatch_size=2, stages=stages)
    with own.open(plan, steps=1) as session:
        *_, deepest = session._programs.runners[0]._pipelines
        flops = [stage.part.stage.part.segment.flops for stage in deepest.stages]
    shares = ", ".join(f"{each / sum(flops):.0%}" for each in flops)
    said = [reason for reason in plan.reasons if "work of the stages: " in reason]
    assert said[-1].endswith(f": {shares}")


SCANNED_FORMS = {
    "parameters": [ONE, {"tensor": 2}],
    "examples": [{"tensor": 2}, {"data": 2}],
    "both": [{"data": 2, "tensor": 2}, ONE],
    "tokens": [ONE, {"sequence": 2}],
    "replicas": [[ONE], [ONE, {"tensor": 2}]],
}
SCANNED = list(itertools.product(("NnxNet", "LinenNet"), SCANNED_FORMS))


@pytest.mark.parametrize(
    "case", rows(SCANNED, ("NnxNet", "examples"), ("LinenNet", "replicas"), ids="-".join)
)
def test_stages_that_share_a_part_of_a_scan_train_as_one_device(case):
    """They stopped with an error of Python as they were planned."""
    make, form = getattr(scanned_models, case[0]), case[1]
    stages = SCANNED_FORMS[form]
    each = [stage for row in stages for stage in row] if form == "replicas" else stages
    num = sum(
        math.prod(size for name, size in stage.items() if name != "devices") for stage in each
    )
    counts = "measured" if form == "replicas" else "even"
    result = scanned_models.train(make(), stages, num, counts=counts)
    assert "layers[" in "".join(segment.name for segment in result.plan.pipeline.segments)
    scanned_models.same(result, scanned_models.train(make(), None, 1))


COUNTS = ((5, 3), (1, 7), (8, 0), (0, 8), (4, 4))


@pytest.mark.parametrize("make", rows(["net", "gpt"], "net"))
def test_which_replica_runs_a_microbatch_moves_no_bit(make):
    case = CASES["one beside two"]
    if make == "gpt":
        case = dataclasses.replace(
            CASES["gpt, one beside two"],
            num_devices=3,
            options={"stages": [[ONE], [ONE, ONE]]},
        )
    deep = {"stages": [[ONE, ONE], [ONE]]}
    each = [{"counts": counts} for counts in COUNTS[: examples(2, len(COUNTS))]]
    results = [trained(case, **options) for options in (*each, deep)]
    assert len({result.plan.numerics for result in results}) == 1
    assert len({result.sha256 for result in results}) == 1


def test_each_of_unlike_replicas_is_timed_with_its_own_counts():
    case = CASES["one beside two"]
    config = {"cluster": {"visible_devices": [0, 1, 2]}}
    job = hxla.Job(case.make(), case.data(), case.loss, OPTIMIZER, batch_size=BATCH, config=config)
    plan = job.plan(microbatch_size=MICRO, **case.options)
    busy = {}
    for counts in ((5, 3), (8, 0), (0, 8)):  # with the programs of the first
        with job.open(plan.with_counts(counts), steps=1, quiet=True) as session:
            record = session.step()
        assert record.counts == counts == session.plan.counts
        busy[counts] = record.busy_seconds
    # Each waits for the parameters and gives its sums back, and works if it has microbatches.
    assert all(seconds > 0 for each in busy.values() for seconds in each)
    assert busy[8, 0][0] > busy[8, 0][1]
    assert busy[0, 8][0] < busy[0, 8][1]


MOVED_CODE = """
import hxla
hxla.join()
import jax
import itertools
import json
import math
import optax
import os
from flax import nnx
from support import models

model, data = models.Layers(nnx.Rngs(0), 4, 512), models.regression(1024, inputs=512)
loss = lambda model, batch: model(batch["x"]) ** 2
options = {"stages": [[{"devices": 1}], [{"devices": 1}, {"devices": 1}]]}
if os.environ["FORM"] == "sharded":
    of_layers = {"layers/(0|2)/kernel": ((), ("tensor",)), "layers/(1|3)/kernel": (("tensor",), ())}
    rules = tuple(hxla.Rule(path=path, axes=axes) for path, axes in of_layers.items())
    options = {
        "stages": [[{"devices": 1}], [{"tensor": 2}]],
        "rules": hxla.RuleSet(name="pairs", rules=rules),
    }
config = {"numerics": {"cut": "any" if os.environ["FORM"] == "sharded" else "planned"}}
job = hxla.Job(model, data, loss, optax.sgd(1e-4), batch_size=512, config=config)
plan = job.plan(**options, microbatch_size=32, counts=(2, 14))
found = {}
for balance in (True, False):
    with job.open(plan, steps=25, balance=balance, quiet=True) as session:
        counts = [record.counts for record in session]
    found[balance] = [counts, session.plan.numerics, session.result().sha256]
if jax.process_index() == 0:
    print(json.dumps(list(found.values())))
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["stages", "sharded"])
def test_counts_of_unlike_replicas_follow_the_speed_in_a_run_and_move_no_bit(tmp_path, form):
    devices = "".join(f'[[device]]\nkind = "cpu"\ncore_share = {s}\n' for s in (0.8, 0.2, 0.2))
    (tmp_path / "mesh.toml").write_text(f'name = "three"\n{devices}')
    out, err = end_of(start(tmp_path, MOVED_CODE, "--mesh", "mesh.toml", env={"FORM": form}))
    moved, fixed = json.loads(out[out.index("[[[") :])
    assert fixed[0] == [[2, 14]] * 25, err[-3000:]
    # A core of 0.8 beside two of 0.2 runs two thirds of the microbatches.
    assert moved[0][0] == [2, 14]
    assert moved[0][-1][0] > 7
    assert moved[1:] == fixed[1:]


@pytest.mark.slow
def test_a_run_of_unlike_replicas_is_resumed_with_other_counts_to_the_same_bits(tmp_path):
    case = CASES["one beside two"]
    folder = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    trained(case, steps=1, counts=(7, 1), **folder)
    trained(case, steps=2, counts=(2, 6), **folder)
    last = trained(case, counts=(4, 4), **folder)
    assert last.sha256 == trained(case).sha256


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(5, 3), (2, 6)])
def test_statistics_and_dropout_of_unlike_replicas_are_those_of_one_device(counts):
    case = dataclasses.replace(
        CASES["one beside two"],
        make=lambda: models.NnxNet(nnx.Rngs(0)),
        loss=models.token_loss,
        data=lambda: models.tokens(STEPS * BATCH),
        options={"stages": [[ONE], [ONE, ONE]], "counts": counts},
    )
    split = trained(case)
    alone = trained(dataclasses.replace(case, options={}, num_devices=1))
    for a, b in zip(alone.history.steps, split.history.steps, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
    statistics = [jax.tree.leaves(nnx.state(r.model, nnx.BatchStat)) for r in (alone, split)]
    for a, b in zip(*statistics, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


MEMORY_CODE = """
import hxla
hxla.join()
import jax
from support.unlike_stages import CASES, trained

try:
    trained(CASES["one beside two"], visible=False, steps=1)
except hxla.PlanError as error:
    print(f"refused by {jax.process_index()}: {error}")
print("ended", jax.process_index())
"""


@pytest.mark.slow
@pytest.mark.parametrize("large", [0, 1, 2])
def test_each_device_needs_memory_for_its_own_stage_only(tmp_path, large):
    """The replica of the whole model does not fit a small device, and need not."""
    lines = ['name = "unlike memory"', "[[node]]", 'name = "node"']
    for rank in range(3):
        kib = 300 if rank == large else 44
        lines += ["[[node.device]]", 'kind = "cpu"', "core_share = 0.5"]
        lines += [f"memory_gib = {kib / 2**20:.9f}"]
    lines += ["[node.link]", "gigabytes_per_second = 1", "latency_microseconds = 50"]
    (tmp_path / "mesh.toml").write_text("\n".join(lines))
    out, err = end_of(start(tmp_path, MEMORY_CODE, "--mesh", "mesh.toml"))
    assert out.count("ended") == 3, err[-3000:]
    assert out.count("refused") == (0 if large == 0 else 3)
    assert ("device 0 has 44.0 KiB, and its stage needs" in out) == (large != 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one and two", "of unlike shards", "one beside two"])
@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_low_precision_of_stages_is_that_of_one_device(name, precision):
    # A scaled loss overflows in the first nine steps, which change nothing.
    options = {"precision": precision, "steps": 16, "mixes_examples": precision == "fp8"}
    alone = trained(dataclasses.replace(CASES[name], options={}, num_devices=1), **options)
    split = trained(CASES[name], **options)
    losses = [[step.loss for step in r.history.steps] for r in (alone, split)]
    np.testing.assert_allclose(*losses, rtol=1e-2)
    assert losses[0][-1] < 0.7 * losses[0][0]


@pytest.mark.slow
def test_pipelines_of_unlike_stages_share_the_state_of_the_optimizer():
    two = dataclasses.replace(CASES["one and two"], num_devices=6)
    shared = {"zero": 1}, {"zero": 1, "offload": {"optimizer": "host"}}
    results = [trained(two), *(trained(two, config={"memory": memory}) for memory in shared)]
    assert len({result.plan.numerics for result in results}) == 1
    assert len({result.sha256 for result in results}) == 1
