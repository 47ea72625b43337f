"""Policies that give devices to jobs, the simulator that replays them, and `hxla schedule`."""

import dataclasses
import itertools
import json

import pytest

from hxla import ScheduleError
from hxla.__main__ import main
from support.inside.scheduler import (
    GANGS,
    POLICIES,
    Situation,
    backfill,
    fits,
    free_devices,
    one_at_a_time,
    read_jobs,
    returned,
    shortest_remaining,
    simulate,
)
from support.paths import ROOT
from support.scheduled_jobs import KINDS, active, job, random_jobs
from support.tiers import rows

TRACES = ROOT.parent / "shared/data/traces"
CAPACITY = (4, 3, 5)


def trace(path):
    if not (TRACES / path).is_file():
        pytest.skip("the published traces are not beside this checkout")
    return TRACES / path


def situation(*jobs, capacity=CAPACITY, move_seconds=5.0):
    return Situation(
        at_seconds=0.0, kinds=KINDS, capacity=capacity, jobs=jobs, move_seconds=move_seconds
    )


def replayed(jobs, policy, **more):
    more.setdefault("move_seconds", 5.0)
    return simulate(jobs, KINDS, CAPACITY, POLICIES[policy], **more)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", rows(range(6), 0, 1))
def test_every_policy_keeps_limits_and_every_job_ends(policy, seed):
    jobs = random_jobs(seed)
    changes = [(100.0, (2, 2, 3)), (400.0, CAPACITY)]

    def watch(seen, held):
        assert fits((0, 0, 0), free_devices(seen.capacity, held))
        for one in seen.jobs:
            nums = held.get(one.name, (0, 0, 0))
            if any(nums) and policy not in GANGS:
                assert one.job.allows(nums), (one, nums)  # minP, maxP and the kind

    found = replayed(jobs, policy, changes=changes, watch=watch)
    assert len(found.ends) == len(jobs)
    for one, end, start in zip(found.jobs, found.ends, found.starts, strict=True):
        assert one.arrival_seconds <= start < end
    again = replayed(jobs, policy, changes=changes)
    assert again == found  # a pure function of its arguments


@pytest.mark.parametrize("policy", POLICIES)
def test_no_work_is_lost_or_done_twice(policy):
    """Steps made while devices were held, less pauses, are the steps of the job."""
    for found in (replayed(random_jobs(seed), policy) for seed in range(4)):
        for one in found.jobs:
            made = sum(
                (h.end_seconds - h.start_seconds - h.pause_seconds) / one.step_seconds(h.nums)
                for h in found.holds
                if h.name == one.name
            )
            assert made == pytest.approx(one.num_steps, rel=1e-6)


def test_one_job_alone_takes_its_pause_and_its_steps():
    one = job(arrival=7.0, steps=10, microbatches=4, speeds=(2.0, 1.0, 0.5))
    for policy in GANGS:
        # Four V100 with one microbatch each: half a second a step.
        assert replayed([one], policy).ends == (pytest.approx(7 + 5 + 10 * 0.5),)
    slow = dataclasses.replace(one, sums_seconds=((1, 0.0), (4, 0.25)))
    assert replayed([slow], "backfill").ends == (pytest.approx(7 + 5 + 10 * 0.75),)


def test_backfill_starts_only_what_does_not_delay_the_first_that_waits():
    def gang(name, num, steps):
        return job(name, microbatches=max(num, 1), speeds=(1.0,), gang=(num,), steps=steps)

    running = active(gang("runs", 3, 100), (3,))
    first, short, long = gang("first", 4, 10), gang("short", 1, 50), gang("long", 1, 500)

    def decided(*waiting):
        jobs = (running, *map(active, waiting))
        return backfill(
            Situation(at_seconds=0, kinds=("V100",), capacity=(4,), jobs=jobs, move_seconds=5.0)
        )

    assert decided(first, long, short) == {"runs": (3,), "short": (1,)}
    assert decided(long, first) == {"runs": (3,), "long": (1,)}  # it came before
    small = gang("first", 2, 10)  # leaves two of four when it starts
    assert decided(dataclasses.replace(small), long) == {"runs": (3,), "long": (1,)}


def test_a_gang_policy_stops_long_jobs_for_short_ones_or_runs_one_at_a_time():
    long = active(job("long", steps=1000, microbatches=4), (4, 0, 0))
    short = active(job("short", steps=10, microbatches=4))
    assert shortest_remaining(situation(long, short)) == {"short": (4, 0, 0)}
    assert one_at_a_time(situation(long, short)) == {"long": (4, 0, 0)}


def test_algorithm_1_takes_the_best_speedup_per_device_and_larger_proposals_on_ties():
    # Both could use the two free V100; b becomes twice as fast with one, a with two.
    a = active(job("a", microbatches=4, speeds=(1.0, 1.0, 1.0)), (2, 0, 0))
    b = active(job("b", microbatches=2, speeds=(1.0, 1.0, 1.0)), (0, 1, 0))
    held = POLICIES["easyscale"](situation(a, b, capacity=(4, 1, 0)))
    assert held == {"a": (2, 0, 0), "b": (1, 1, 0)}  # one is left, which makes a no faster
    held = POLICIES["easyscale"](situation(a, b, capacity=(5, 1, 0)))
    assert held == {"a": (4, 0, 0), "b": (1, 1, 0)}
    new = active(job("new", min_devices=2))
    held = POLICIES["easyscale"](situation(a, new, capacity=(4, 1, 2)))
    assert held["new"] == (0, 0, 2)  # the fewest, of the slowest kind that has them


def test_devices_are_returned_like_for_like_by_whom_it_costs_least():
    fast = active(job("fast", microbatches=8), (3, 0, 0))
    idle = active(job("idle", microbatches=4), (1, 0, 3))  # a T4 less changes nothing
    both = (fast, idle)
    held = {one.name: one.nums for one in both}
    assert returned(both, (4, 0, 2), held) == {"fast": (3, 0, 0), "idle": (1, 0, 2)}
    assert returned(both, (4, 0, 3), held) == held
    for capacity in itertools.product(range(5), (0,), range(4)):
        left = returned(both, capacity, held)
        assert fits((0, 0, 0), free_devices(capacity, left))
        for one in both:
            assert fits(left[one.name], one.nums)  # of no kind more than before
            assert not any(left[one.name]) or one.job.allows(left[one.name])


def test_a_job_below_its_fewest_devices_waits_the_last_that_came_first():
    a = active(job("a", min_devices=2), (2, 0, 0))
    b = active(job("b", min_devices=2), (2, 0, 0))
    held = returned((a, b), (3, 0, 0), {"a": (2, 0, 0), "b": (2, 0, 0)})
    assert held == {"a": (2, 0, 0), "b": (0, 0, 0)}


def test_a_job_keeps_what_it_holds_unless_the_move_pays():
    nearly = active(job("a", microbatches=2, speeds=(1.0, 1.0, 1.0)), (1, 0, 0), remaining=2)
    weighing = POLICIES["weighing"]
    # Two steps of 2 s on one device; on two of 1 s, but after the pause.
    assert weighing(situation(nearly, move_seconds=3.0)) == {"a": (1, 0, 0)}
    assert sum(weighing(situation(nearly, move_seconds=1.0))["a"]) == 2


def test_a_long_job_shrinks_for_a_short_one():
    long = active(job("long", steps=10_000, microbatches=4, speeds=(1.0,)), (4,))
    short = active(job("short", steps=10, microbatches=2, speeds=(1.0,)))
    held = POLICIES["weighing"](
        Situation(at_seconds=0, kinds=("V100",), capacity=(4,), jobs=(long, short), move_seconds=5)
    )
    assert held == {"long": (2,), "short": (2,)}


def test_on_random_jobs_elastic_policies_end_sooner_than_gangs():
    ratios = []
    for seed in range(12):
        found = {name: replayed(random_jobs(seed, 12), name) for name in POLICIES}
        best = min(found[name].mean_completion for name in GANGS)
        ratios.append(best / found["weighing"].mean_completion)
    assert min(ratios) > 1
    assert sorted(ratios)[6] > 1.3


def test_what_can_never_run_is_refused_with_its_reason():
    twice = [job("a"), job("a")]
    with pytest.raises(ScheduleError, match="a: several jobs of this name"):
        replayed(twice, "weighing")
    with pytest.raises(ScheduleError, match="needs 5 V100, there are 4"):
        replayed([job(min_devices=5, mixed=False)], "weighing")
    with pytest.raises(ScheduleError, match="nothing runs and nothing will change: a get none"):
        replayed([job()], "weighing", changes=[(1.0, (0, 0, 0))])
    with pytest.raises(ScheduleError, match="at least 9 devices, of 8 microbatches"):
        job(min_devices=9)


def test_easyscales_trace_ends_as_published_within_a_quarter():
    """Their policies decide once a minute, and on 64 GPUs; the table is jct_makespan.csv."""
    jobs, devices = read_jobs(trace("easyscale/test.csv"))
    assert (len(jobs), sum(devices.values())) == (62, 64)
    published = {
        "one-at-a-time": (8904.9685, 16560.0),
        "easyscale-alike": (1070.5008, 6720.0),
        "easyscale": (676.7497, 6000.0),
    }
    for name, (mean, makespan) in published.items():
        found = simulate(
            jobs,
            tuple(devices),
            tuple(devices.values()),
            POLICIES[name],
            move_seconds=20,
            is_eager=False,
        )
        assert found.mean_completion == pytest.approx(mean, rel=0.3), name
        assert found.makespan == pytest.approx(makespan, rel=0.15), name


def test_every_published_trace_is_read():
    for number in range(1, 9):
        jobs, devices = read_jobs(trace(f"pollux/workload-{number}.csv"))
        assert (len(jobs), devices) == (160, {"T4": 64})
        assert max(sum(one.gang) for one in jobs) <= 64
        most, _ = read_jobs(trace(f"pollux/workload-{number}.csv"), gangs="most", is_cut=False)
        assert all(one.gang == (one.num_microbatches,) for one in most)


OWN = """name,time,steps,microbatches,min_devices,kind,mixed,gang,seconds_V100,seconds_T4
a,0,100,4,1,V100,1,4,0.5,1.0
b,5,50,2,,T4,0,,0.5,1.0
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text(OWN)
    return str(path)


def test_a_trace_of_ones_own_is_read(own):
    (a, b), devices = read_jobs(own)
    assert devices == {}
    assert (a.num_steps, a.num_microbatches, a.gang, a.mixed) == (100, 4, (4, 0), True)
    assert (b.gang, b.mixed, b.alone, b.min_devices) == ((0, 2), False, 1, 1)
    assert [c.microbatches_per_second for c in b.capabilities] == [2.0, 1.0]


def test_hxla_schedule_simulates_and_explains(own, tmp_path, capsys):
    figures, picture = tmp_path / "found.json", tmp_path / "found.png"
    command = ["schedule", "simulate", own, "--devices", "V100=4,T4=2", "--move-seconds", "2"]
    assert main([*command, "--json", str(figures), "--draw", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "2 jobs on 4 V100, 2 T4; a move takes 2 s" in said
    assert all(name in said for name in POLICIES)
    found = json.loads(figures.read_text())
    assert found["backfill"]["mean_completion_seconds"] == pytest.approx((52 + 52) / 2)
    assert picture.stat().st_size > 10_000
    command = ["schedule", "explain", own, "--devices", "V100=2,T4=2", "--policy", "easyscale"]
    assert main([*command, "--at", "30"]) == 0
    said = capsys.readouterr().out
    assert "easyscale at 5 s" in said
    assert "starts" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["simulate", "none.csv"], "trace none.csv cannot be read"),
        (["simulate", "OWN"], "devices none: the trace has speeds on V100, T4; give --devices"),
        (["simulate", "OWN", "--devices", "A100=4"], "devices {'A100': 4}: the trace has speeds"),
        (["simulate", "OWN", "--policy", "best"], "no policy best: there are one-at-a-time"),
        (["explain", "OWN", "--at", "3"], "give --policy one of"),
        (["simulate", "OWN", "--interval", "0"], "give at least 0 s, and more than 0 s"),
    ],
)
def test_wrong_wishes_get_one_line(own, options, words, capsys):
    assert main(["schedule", *[own if o == "OWN" else o for o in options]]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("hxla: ")
    assert said.count("\n") == 1


def test_rows_that_are_wrong_are_all_named(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text(
        OWN + "c,x,1,1,,,,,1,1\nd,0,1,1.5,,,,,1,1\ne,0,1,1,,P100,,,1,1\nf,0,0,2,,,,,1,0\n"
    )
    with pytest.raises(ScheduleError) as error:
        read_jobs(path)
    said = str(error.value)
    assert "job 3, 'c': time 'x', give a number" in said
    assert "job 4, 'd': microbatches '1.5', give a whole number" in said
    assert "job 5, 'e': kind 'P100', of which there is no seconds_ column" in said
    assert "job 6, 'f': seconds_T4 '0', give a positive number" in said
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ScheduleError, match=r"has columns .*give name, time, steps"):
        read_jobs(path)
