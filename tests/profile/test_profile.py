"""`hxla profile` measures a real script; its files are refused where they are wrong."""

import dataclasses
import json
import os
import sys

import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from hxla import LayerSize, LayerTime, Profile, Setting, StepRecord, load_profile
from hxla.__main__ import main
from support.inside.graph import segments
from support.inside.job import JobContext
from support.inside.profile import dump_profile, merge_profiles, model_name
from support.inside.session import ObservedSteps, Observer, in_training, measured_links
from support.profiles import profile_command

SMALL = """
import numpy as np, optax, hxla
from flax import nnx

def loss(model, batch):
    return (model(batch["x"]) ** 2).mean(axis=1)

model = nnx.Sequential(*[nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(i)) for i in range(2)])
data = {"x": np.ones((32, 8), np.float32)}
one = {"cluster": {"visible_devices": [0]}}
job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8, config=one)
hxla.train(job, steps=3)
print("trained")
"""


@pytest.fixture
def profile_here(tmp_path, monkeypatch, capsys):
    """`hxla profile` in this process: its exit code, what it prints, and its errors."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "_exit", sys.exit)  # how a command of one process leaves

    def run(*options, text=SMALL):
        script = tmp_path / "script.py"
        script.write_text(text)
        write = ["--write", str(tmp_path / "p.json")]
        try:
            code = main(["profile", *write, *options, str(script)])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


OPTIONS = ("--segments", "2", "--microbatch-sizes", "2")


def test_a_script_is_measured_once_and_not_trained(tmp_path, profile_here):
    code, out, error = profile_here(*OPTIONS)
    assert code == 0, error
    assert "trained" not in out
    assert "microbatch of 2: 2 of 2 segments" in error
    found = load_profile(tmp_path / "p.json")
    assert len(found.layers) == 2
    assert set(found.times) == {Setting("cpu", 2)}
    times = found.times[Setting("cpu", 2)]
    assert all(t.measured and t.forward > 0 and t.update > 0 for t in times)
    assert sum(s.parameter_bytes for s in found.sizes[2, 1]) == 2 * 8 * 8 * 4
    code, _, error = profile_here(*OPTIONS)
    assert code == 0
    assert "microbatch of 2" not in error
    assert load_profile(tmp_path / "p.json") == found
    code, _, error = profile_here("--segments", "1")
    assert code != 0
    assert "use the same number" in error
    code, _, error = profile_here("--microbatch-sizes", "3")
    assert code != 0
    assert error.endswith("not divisible by microbatch_size=3: the nearest size that fits is 2\n")
    assert "Traceback" not in error


@pytest.mark.slow
def test_an_interrupted_profile_resumes_with_the_size_that_is_missing(tmp_path, profile_here):
    assert profile_here(*OPTIONS)[0] == 0
    before = load_profile(tmp_path / "p.json")
    code, _, error = profile_here("--segments", "2", "--microbatch-sizes", "2,4")
    assert code == 0
    after = load_profile(tmp_path / "p.json")
    assert after.times[Setting("cpu", 2)] == before.times[Setting("cpu", 2)]  # not measured anew
    assert set(after.times) == {Setting("cpu", 2), Setting("cpu", 4)}
    assert "microbatch of 2" not in error


COLUMNS = (
    "hxla.RuleSet(name='columns', rules=("
    "hxla.Rule(path='kernel', rank=2, axes=((), ('tensor',))),))"
)


@pytest.mark.slow
def test_a_split_that_the_script_asks_for_is_measured_as_it_runs_and_once(tmp_path, profile_here):
    mesh = f"mesh={{'data': 1, 'tensor': 2}}, rules={COLUMNS}, steps=3"
    text = SMALL.replace("steps=3", mesh).replace("[0]", "[0, 1]")
    code, out, error = profile_here(*OPTIONS, text=text)
    assert code == 0, error
    [split] = load_profile(tmp_path / "p.json").splits
    assert split.kinds == ("cpu", "cpu")
    assert (split.microbatch_size, split.parts) == (2, (0.5, 0.5))
    assert split.seconds > 0
    assert "cut over cpu 50%, cpu 50%" in out
    assert profile_here(*OPTIONS, text=text)[0] == 0
    assert load_profile(tmp_path / "p.json").splits == (split,)


@pytest.mark.slow
def test_a_stream_is_profiled_at_several_sizes_and_what_is_the_users_is_left_alone(tmp_path):
    text = SMALL.replace(
        "job = hxla.Job(",
        """
def stream():
    for i in range(500):
        yield {k: v[:8] * i for k, v in data.items()}

def never(record, session):
    raise AssertionError

job = hxla.Job(""",
    )
    text = text.replace(", data, loss", ", stream(), loss")
    more = f"steps=3, callbacks=[never], run_dir={str(tmp_path / 'run')!r}"
    ran = profile_command(tmp_path, "--microbatch-sizes", "4,8", text=text.replace("steps=3", more))
    assert ran.returncode == 0, ran.stderr
    assert "trained" not in ran.stdout
    found = load_profile(tmp_path / "p.json")
    assert set(found.times) == {Setting("cpu", 4), Setting("cpu", 8)}
    assert not (tmp_path / "run").exists()


def record(step, counts, seconds):
    return StepRecord(
        step=step,
        loss=1.0,
        metrics={},
        seconds=seconds,
        num_examples=8,
        num_tokens=0,
        counts=counts,
        busy_seconds=(0.0,) * len(counts),
    )


def test_a_trial_ends_after_enough_steps_with_the_same_counts():
    observer = Observer()
    # Two are not counted, and the counts move once.
    steps = [((4, 4), 9.0)] * 5 + [((6, 2), 1.0)] * 20
    told = [observer.has_enough_steps(record(i, *step)) for i, step in enumerate(steps)]
    assert told.index(True) == 5 + 10 - 1
    assert observer.most == ((6, 2), 1.0)
    short = Observer()
    told = [short.has_enough_steps(record(i, (8,), 0.25)) for i in range(30)]
    assert told.index(True) == 2 + 4 / 0.25 - 1  # ten steps would not do


def test_the_parts_of_a_trial_add_up_to_its_step():
    trial = ObservedSteps(
        micro_seconds=(1.0, 2.0, 2.5),
        update_seconds=(0.5, 0.25, 0.75),
        counts=(5, 2, 1),
        step_seconds=6.0,
        peak_bytes=8,
        end_step=12,
    )
    assert trial.rest_seconds == 6.0 - (5 * 1.0 + 0.5)
    by_kind = trial.by_kind(["fast", "slow", "slow"])
    assert by_kind.micro_seconds == (1.0, 2.25, 2.25)
    assert by_kind.update_seconds == (0.5, 0.5, 0.5)
    assert by_kind.rest_seconds == trial.rest_seconds


def test_times_of_segments_alone_become_those_of_training():
    """Calls and sums cost every size the same seconds more; a faster trial scales every size."""
    size = LayerSize(parameter_bytes=8.0, output_bytes=4.0, stash_bytes=4.0)
    alone = Profile(
        model="net",
        layers=("a", "b"),
        sizes={(1, 1): (size, size), (4, 1): (size, size)},
        times={
            Setting(kind, b): (LayerTime(forward=b * s, backward=b * s, update=1.0),) * 2
            for kind, s in (("fast", 0.1), ("slow", 0.2))
            for b in (1, 4)
        },
    )
    trial = ObservedSteps(
        micro_seconds=(2.6, 2.4),
        update_seconds=(3.0, 4.0),
        counts=(5, 4),
        step_seconds=17.0,
        peak_bytes=8,
        end_step=12,
        form="zero 0",
    )
    found = in_training(alone, trial, ["fast", "slow"], 4)

    def micro(kind, b):
        return sum(t.forward + t.backward for t in found.times[Setting(kind, b)])

    assert micro("fast", 4) == pytest.approx(2.6)
    assert micro("fast", 1) == pytest.approx(4 * 0.1 + 1.0)
    assert micro("slow", 4) == pytest.approx(2.4)
    assert micro("slow", 1) == pytest.approx(4 * 0.2 * 2.4 / 3.2)
    assert sum(t.update for t in found.times[Setting("slow", 1)]) == pytest.approx(4.0)
    assert found.reductions == {"fast + slow": pytest.approx(17.0 - (5 * 2.6 + 3.0))}
    assert found.form == "zero 0"


def test_links_between_the_devices_of_a_job_are_measured_by_messages():
    data = {"x": np.ones((8, 4), np.float32)}
    two = {"cluster": {"visible_devices": [0, 1]}}
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    loss = lambda model, batch: model(batch["x"]).mean(axis=-1)  # noqa: E731
    job = JobContext(hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8, config=two))
    devices = job.all_devices()
    [found] = measured_links(job, job.cluster(devices), devices)
    assert (found.kinds, found.in_node) == (("cpu", "cpu"), True)
    sizes = [num_bytes for num_bytes, _ in found.link.curve]
    assert sizes == sorted(sizes)
    assert found.link.latency_seconds > 0
    assert found.link.all_reduce_seconds > 0
    # A longer message takes longer, by a thousand times the bytes.
    assert found.link.seconds(sizes[-1]) > found.link.seconds(sizes[0])


def test_a_copy_on_several_devices_is_not_profiled(profile_here):
    text = SMALL.replace("[0]", "[0, 1]").replace(
        "data, loss, optax", "data, hxla.split()(loss), optax"
    )
    code, _, error = profile_here(text=text)
    assert code != 0
    assert "put a replica of this one on 2: profile it without them" in error


def example(**changes):
    time = LayerTime(forward=0.1, backward=0.2, update=0.01)
    size = LayerSize(parameter_bytes=8.0, output_bytes=4.0, stash_bytes=4.0)
    values = {
        "model": "net",
        "layers": ("a", "b"),
        "sizes": {(2, 1): (size, size)},
        "times": {Setting("cpu", 2): (time, time)},
    }
    return Profile(**{**values, **changes})


LINK = hxla.MeasuredLink(
    kinds=("cpu", "cpu@0.5"),
    in_node=True,
    mesh="mine",
    link=hxla.Link(bytes_per_second=1e9, latency_seconds=1e-4, curve=((4096.0, 4e7),), source="x"),
)


def test_a_profile_is_read_back_equal(tmp_path):
    whole = example(links=(LINK,))
    dump_profile(whole, tmp_path / "new" / "p.json")
    assert load_profile(tmp_path / "new" / "p.json", model="net") == whole


def test_a_link_that_was_measured_later_wins():
    link = LINK.link.model_copy(update={"latency_seconds": 1.0})
    later = dataclasses.replace(LINK, link=link)
    between = dataclasses.replace(LINK, in_node=False)
    merged = merge_profiles([example(links=(LINK, between)), example(links=(later,))])
    assert merged.links == (later, between)


def test_a_time_that_was_measured_later_wins():
    later = LayerTime(forward=0.3, backward=0.4)
    setting, other = Setting("cpu", 2), Setting("cpu", 4)
    merged = merge_profiles(
        [example(), example(times={setting: (later,) * 2, other: (later,) * 2})]
    )
    assert merged.times == {setting: (later,) * 2, other: (later,) * 2}


def test_a_model_of_another_size_is_another_model():
    names = [model_name({"kernel": np.zeros((4, n), np.float32)}) for n in (3, 5, 3)]
    assert names[0] == names[2] != names[1]


def test_a_chain_of_fewer_segments_than_asked_is_cut_in_the_same_places_again():
    def loss(model, batch):
        return (model(batch["x"]) ** 2).mean(axis=-1)

    layers = [nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(4)]
    data = {"x": np.ones((16, 4), np.float32)}
    one = {"cluster": {"visible_devices": [0]}}
    model = nnx.Sequential(*layers)
    job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8, config=one)
    chain = segments(job.graph(2), 8)
    again = segments(job.graph(2), len(chain))
    assert len(again) < len(chain) < 8  # asking for what was found does not find it
    own = job.plan(auto=True, microbatch_size=2)  # by a short profile of the devices that are here
    assert own.prediction.step_seconds > 0
    table = example(
        model=model_name(JobContext(job).functional(2).params),
        layers=tuple(segment.name for segment in chain),
        num_segments=8,
        sizes={},
        times={Setting("cpu", 2): (LayerTime(forward=0.1, backward=0.2),) * len(chain)},
    ).to_table()
    cluster = hxla.Cluster(name="one", devices=(hxla.Device(kind="cpu"),))
    plan = job.plan(cluster, profile=Profile.from_table(table), microbatch_size=2)
    assert plan.prediction.step_seconds == pytest.approx(4 * len(chain) * 0.3, rel=1e-3)


def broken(change):
    table = {"version": 1, **example(links=(LINK,)).to_table()}
    change(table)
    return json.dumps(table)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        (broken(lambda t: t.update(version=9)), "version 9, this hxla reads 1"),
        (broken(lambda t: t.pop("layers")), "layers: missing"),
        (
            broken(lambda t: t["times"][0]["layers"][1].update(forward=float("nan"))),
            "times.0.layers.1.forward: Input should be a finite number, found nan",
        ),
        (
            broken(lambda t: t["times"][0]["layers"][0].update(backward=-1.0)),
            "times.0.layers.0.backward: .* greater than or equal to 0, found -1.0",
        ),
        (
            broken(lambda t: t["sizes"][0]["layers"][0].update(stash_bytes="much")),
            "sizes.0.layers.0.stash_bytes: .* valid number, found 'much'",
        ),
        (broken(lambda t: t["times"][0]["layers"].pop()), "1 of 2 layers"),
        (broken(lambda t: t["times"][0]["layers"][0].update(colour=1)), "colour"),
        (
            broken(lambda t: t["times"][0].update(microbatch_size=0.5)),
            "times.0.microbatch_size: .* valid integer.*, found 0.5",
        ),
        (
            broken(lambda t: t["sizes"][0].update(tensor=True)),
            "sizes.0.tensor: .* valid integer, found True",
        ),
        (
            broken(lambda t: t["links"].append(t["links"][0])),
            r"links: \('cpu', 'cpu@0.5', True\) is listed 2 times",
        ),
        (
            broken(lambda t: t["links"][0]["link"].update(bytes_per_second=-1.0)),
            "links.0.link.bytes_per_second: .* greater than 0, found -1.0",
        ),
        (broken(lambda t: t.update(layers=[])), "layers: .* at least 1 item"),
        (broken(lambda t: t["times"].append(t["times"][0])), r"\('cpu', 2, 1\) is listed 2 times"),
        ('{"version": 1, "version": 1}', "version: given 2 times"),
    ],
)
def test_a_wrong_profile_is_refused_with_file_and_key(tmp_path, text, message):
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(hxla.PlanError, match=message) as caught:
        load_profile(path)
    assert "wrong.json" in str(caught.value)


def test_a_profile_of_another_model_is_refused(tmp_path):
    dump_profile(example(), tmp_path / "p.json")
    with pytest.raises(hxla.PlanError, match="another model: net, not other"):
        load_profile(tmp_path / "p.json", model="other")
    with pytest.raises(hxla.PlanError, match="do not match"):
        merge_profiles([example(), dataclasses.replace(example(), model="other")])


def test_a_missing_profile_is_refused(tmp_path):
    with pytest.raises(hxla.PlanError, match="cannot be read"):
        load_profile(tmp_path / "none.json")
