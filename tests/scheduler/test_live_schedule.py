"""A policy that decides live: beside the simulator, over real jobs, and its record again."""

import collections
import contextlib
import dataclasses
import json
import signal

import pytest

from hxla import ScheduleError
from hxla.__main__ import main
from support.inside.scheduler import (
    LIVE_POLICIES,
    POLICIES,
    Decided,
    ExecutorTime,
    Holds,
    LiveJob,
    LiveSchedule,
    Places,
    as_line,
    as_simulation,
    decided_otherwise,
    plus,
    read_live_jobs,
    read_record,
    simulate,
)
from support.launched import PATIENCE_SECONDS
from support.scheduled_jobs import KINDS, job, random_jobs
from support.scheduled_runs import (
    LONG,
    Scheduled,
    check_record,
    check_three,
    share_out,
)
from support.tiers import rows

CAPACITY = (4, 3, 5)
MOVE = 5.0


class Clock:
    now = 0.0


class ModelledJob:
    """Progresses as the simulator says, and keeps devices for a while after they are taken."""

    def __init__(self, one, places, clock, keeps_seconds):
        self.one, self._clock, self._keeps = one, clock, keeps_seconds
        self.num_done, self._at, self._pause = 0.0, clock.now, 0.0
        self._own, self._before, self._until = Places(), Places(), 0.0
        self.stopped_at = None
        self.times = ()
        self.give(places)

    def give(self, places):
        self.hear()
        self._before, self._until = self.used, self._clock.now + self._keeps
        self._own, self._pause = places, MOVE

    @property
    def used(self):
        return self._own | self._before if self._clock.now < self._until else self._own

    def hear(self):
        seconds = self._clock.now - self._at
        self._at = self._clock.now
        if not self._own or self.stopped_at is not None:
            return
        pause = min(self._pause, seconds)
        self._pause -= pause
        nums = tuple(self._own[kind] for kind in KINDS)
        self.num_done += (seconds - pause) / self.one.job.step_seconds(nums)

    def exit_code(self):
        self.hear()
        if self.num_done >= self.one.job.num_steps * (1 - 1e-9):
            return 0
        is_stopped = self.stopped_at is not None and self._clock.now >= self.stopped_at
        return 75 if is_stopped else None

    def stop(self):
        self.hear()
        self.stopped_at = self._clock.now + self._keeps


class ModelledFleet:
    def __init__(self, capacity):
        self.capacity = capacity

    def offered(self):
        return {kind: (kind, num) for kind, num in zip(KINDS, self.capacity, strict=True)}

    def keep(self, names):
        pass


def test_speeds_are_those_of_the_run_once_there_is_one():
    one = job(steps=1000)
    live = Live([one], "easyscale", learns_speeds=True)
    live.step(0.0)
    [process] = live.processes
    seen = ExecutorTime(kind=KINDS[1], num_executors=1, num_microbatches=3, seconds=6.0)
    process.times = (seen,) * 5
    live.step(60.0)
    [before], [after] = (d.situation.jobs for d in (live.decisions[0], live.decisions[-1]))
    assert before.job == one
    expected = [c.microbatches_per_second for c in one.capabilities]
    expected[1] = 0.5
    assert [c.microbatches_per_second for c in after.job.capabilities] == expected
    assert not decided_otherwise(live.entries, POLICIES["easyscale"])


class Live:
    """A live schedule over modelled jobs: one that was stopped goes on from its checkpoint."""

    def __init__(
        self,
        jobs,
        policy,
        capacity=CAPACITY,
        keeps_seconds=0.0,
        interval=60.0,
        decide=None,
        **options,
    ):
        self.clock, self.fleet, self.entries = Clock(), ModelledFleet(capacity), []
        self.processes, self._keeps = [], keeps_seconds
        self.schedule = LiveSchedule(
            [LiveJob(job=one, command=("train.py",)) for one in jobs],
            self.fleet,
            (policy, decide or POLICIES[policy]),
            start=self._start,
            record=self.entries.append,
            move_seconds=MOVE,
            interval_seconds=interval,
            **options,
        )

    def _start(self, one, places):
        process = ModelledJob(one, places, self.clock, self._keeps)
        done = [p.num_done for p in self.processes if p.one is one]
        process.num_done = max(done, default=0.0)
        self.processes.append(process)
        return process

    def step(self, now):
        self.clock.now = now
        return self.schedule.step(now)

    @property
    def decisions(self):
        return [entry for entry in self.entries if isinstance(entry, Decided)]


def some(held):
    return {name: nums for name, nums in held.items() if any(nums)}


@pytest.mark.parametrize("policy", LIVE_POLICIES)
@pytest.mark.parametrize("seed", rows(range(3), 0))
def test_live_and_simulated_decisions_are_equal(policy, seed):
    """Jobs that run as the simulator assumes are given what it gave them, at the same times."""
    jobs, seen = random_jobs(seed), []
    changes = [(100.0, (2, 2, 3)), (400.0, CAPACITY)]

    def decide(situation):  # times are added up in other orders: a tie is to stay one
        rounded = [
            dataclasses.replace(
                one,
                remaining_steps=round(one.remaining_steps, 6),
                pause_seconds=round(one.pause_seconds, 6),
            )
            for one in situation.jobs
        ]
        return POLICIES[policy](dataclasses.replace(situation, jobs=tuple(rounded)))

    simulate(
        jobs,
        KINDS,
        CAPACITY,
        decide,
        move_seconds=MOVE,
        changes=changes,
        watch=lambda situation, held: seen.append((situation, held)),
    )
    live = Live(jobs, policy, decide=decide)
    for situation, _ in seen:
        live.fleet.capacity = situation.capacity
        for _ in range(8):  # what one gives back another gets at the next look
            is_over = live.step(situation.at_seconds)
    assert is_over
    expected = [(situation, held) for situation, held in seen if situation.jobs]
    for (situation, held), decided in zip(expected, live.decisions, strict=True):
        assert some(decided.holdings) == some(held)
        assert decided.situation.at_seconds == situation.at_seconds
        assert [one.nums for one in decided.situation.jobs] == [one.nums for one in situation.jobs]
        for mine, its in zip(decided.situation.jobs, situation.jobs, strict=True):
            assert mine.pause_seconds == pytest.approx(its.pause_seconds, abs=1e-6)
            left = pytest.approx(its.remaining_steps, rel=1e-6, abs=1e-6)
            assert mine.remaining_steps == left


@pytest.mark.parametrize("policy", LIVE_POLICIES)
@pytest.mark.parametrize("seed", rows(range(3), 1))
def test_nobody_gets_a_device_before_it_is_released(policy, seed, tmp_path):
    """However long jobs keep what was taken from them, and whatever comes and goes; all end."""
    live = Live(random_jobs(seed), policy, keeps_seconds=7.0, interval=20.0)
    is_over, now = False, 0.0
    while not is_over:
        live.fleet.capacity = (2, 2, 3) if 100 <= now < 400 else CAPACITY
        is_over = live.step(now)
        used = collections.Counter()
        for process in live.processes:
            code = process.exit_code()
            used += process.used if code is None else Places()
            nums = tuple(process._own[kind] for kind in KINDS)
            if code is None and process.stopped_at is None:
                assert sum(nums) <= process.one.job.num_microbatches
                assert sum(nums) >= process.one.job.min_devices
        most = CAPACITY if now < 100 or now >= 400 else plus((2, 2, 3), (2, 1, 2))
        assert all(used[kind] <= num for kind, num in zip(KINDS, most, strict=True)), now
        now += 1.0
        assert now < 20_000
    record = tmp_path / "record.jsonl"
    record.write_text("".join(f"{as_line(entry)}\n" for entry in live.entries))
    entries = read_record(record)
    assert list(entries) == live.entries
    assert not decided_otherwise(entries, POLICIES[policy])
    found = as_simulation(entries)
    assert len(found.ends) == 8
    assert all(start < end for start, end in zip(found.starts, found.ends, strict=True))


def test_jobs_that_wait_for_each_others_last_device_are_untied():
    def swapped(situation):
        names = [one.name for one in situation.jobs]
        first, second = (
            ((1, 0, 0), (0, 1, 0)) if situation.at_seconds < 50 else ((0, 1, 0), (1, 0, 0))
        )
        return dict(zip(names, (first, second) if len(names) == 2 else (second,), strict=True))

    live = Live(
        [job("a", steps=1000), job("b", steps=1000)],
        "weighing",
        (1, 1, 0),
        interval=10.0,
        decide=swapped,
    )
    for now in range(60):
        live.step(float(now))
    held = {e.name: e.nums for e in live.entries if isinstance(e, Holds)}
    assert held == {"a": (0, 1, 0), "b": (1, 0, 0)}
    assert len(live.processes) == 3  # one was stopped, and went on


JOBS = """
[[job]]
name = "a"
script = "train.py"
steps = 100
microbatches = 4
seconds = {"cpu@0.5" = 0.1, "cpu@0.4" = 0.2}
"""


def test_a_file_of_jobs_is_read_and_all_its_faults_are_told(tmp_path):
    path = tmp_path / "jobs.toml"
    (tmp_path / "train.py").write_text("")
    path.write_text(JOBS + JOBS.replace('"a"', '"b"') + 'arguments = ["--x"]\nmin_devices = 2\n')
    a, b = read_live_jobs(path)
    assert (a.name, a.command, a.job.min_devices) == ("a", (str(tmp_path / "train.py"),), 1)
    assert b.command[1:] == ("--x",)
    assert [c.microbatches_per_second for c in b.job.capabilities] == [10.0, 5.0]
    other = JOBS.replace("train.py", "none.py").replace("cpu@0.4", "gpu")
    path.write_text(JOBS + other + JOBS.replace('"a"', '"c"') + "min_devices = 5\n")
    with pytest.raises(ScheduleError) as error:
        read_live_jobs(path)
    said = str(error.value)
    assert "a: several jobs of this name" in said
    assert "a: no script '" in said
    assert "a: seconds on cpu@0.5, gpu, those of a are on cpu@0.4, cpu@0.5" in said
    assert "job 'c' cannot be scheduled: at least 5 devices, of 4 microbatches" in said
    path.write_text(JOBS.replace("steps", "step") + 'kind = "x"\n')
    with pytest.raises(ScheduleError, match=r"job\.0\.step: unknown key, did you mean 'steps'"):
        read_live_jobs(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "backfill", "--mesh", "cpu-1.0-0.5"], "--policy one of easyscale-alike"),
        (["--policy", "weighing"], "say where devices are: give --mesh FILE"),
        (["--policy", "weighing", "--mesh", "cpu-1.0-0.5"], "has cpu, and the jobs have seconds"),
        (["--policy", "weighing", "--mesh", "whale-8v100-8p100"], "nodes and hxla run starts"),
        (["--policy", "weighing", "--mesh", "x", "--out", "."], "--out .: it is not empty"),
    ],
)
def test_wrong_wishes_get_one_line(options, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "jobs.toml").write_text(JOBS)
    assert main(["schedule", "run", "jobs.toml", *options]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_record_that_was_decided_otherwise_is_told(tmp_path, capsys):
    live = Live([job("a", steps=50), job("b", arrival=10.0, steps=50)], "easyscale")
    while not live.step(live.clock.now + 1):
        pass
    lines = [as_line(entry) for entry in live.entries]
    record, picture = tmp_path / "record.jsonl", tmp_path / "held.png"
    record.write_text("\n".join(lines) + "\n")
    assert main(["schedule", "replay", str(record), "--draw", str(picture)]) == 0
    num = len(live.decisions)
    said = capsys.readouterr().out
    assert said == f"easyscale: {num} of {num} decisions are made again as recorded\n"
    assert picture.stat().st_size > 10_000
    k = next(k for k, line in enumerate(lines) if '"Decided"' in line)
    changed = json.loads(lines[k])
    changed["held"]["a"] = [4, 0, 0]
    record.write_text("\n".join([*lines[:k], json.dumps(changed), *lines[k + 1 :]]))
    assert main(["schedule", "replay", str(record)]) == 1
    said = capsys.readouterr().out
    assert f"{num - 1} of {num}" in said
    assert "recorded a: 4 V100; decided again a: " in said
    for text, words in (
        ("", "is empty"),
        (lines[1], "line 1"),
        ("[1]", "line 1"),
        ("x", "no JSON"),
    ):
        record.write_text(text)
        assert main(["schedule", "replay", str(record)]) == 2
        assert words in capsys.readouterr().err


@pytest.fixture
def scheduled(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(make, *args):
            found = make(tmp_path, *args)
            stack.callback(found.process.wait, PATIENCE_SECONDS)
            stack.callback(found.process.terminate)
            return found

        yield start


def test_a_device_that_goes_is_given_back_and_a_scheduler_that_ends_leaves_nothing(scheduled):
    run = scheduled(Scheduled, [LONG], [0.9, 0.9])
    run.wait("long.events", lambda e: e["what"] == "Completed", "a step on both devices")
    run.write_devices([0.9])
    run.wait("record.jsonl", lambda e: e["what"] == "Holds" and sum(e["nums"]) == 1, "one device")
    run.process.terminate()
    assert run.process.wait(PATIENCE_SECONDS) == 75
    check_record(run, [2, 1])
    left = [(e["step"], e["digest"]) for e in run.lines("long.events") if e["what"] == "LeftState"]
    assert len(left) > 1
    assert len(set(left)) < len(left)  # of one step, on both devices the same bits


@pytest.mark.slow
def test_three_jobs_share_out_unlike_devices_and_no_bit_moves(scheduled):
    shares = [0.5, 0.5, 0.4, 0.4]
    run = scheduled(Scheduled, [LONG], shares)
    before, taken = share_out(
        run, lambda: run.write_devices(shares[1:]), lambda: run.write_devices(shares)
    )
    kinds = run.lines("record.jsonl")[0]["kinds"]
    lent = [x - y for x, y in zip(before["held"]["long"], taken["held"]["long"], strict=True)]
    assert lent == [int(kind == "cpu@0.5") for kind in kinds]  # like for like
    check_three(run, [4, 1])
    # The first held all four; those that came later took from what it had above its fewest.
    decisions = [e for e in read_record(run.out / "record.jsonl") if isinstance(e, Decided)]
    assert sum(decisions[0].holdings["long"]) == 4
    both = next(d.holdings for d in decisions if len(d.situation.jobs) == 3)
    assert {name: sum(nums) for name, nums in both.items()} == {"long": 1, "pair": 2, "late": 1}


@pytest.mark.slow
def test_a_scheduler_that_is_killed_leaves_nothing(scheduled):
    run = scheduled(Scheduled, [("only", 4000, 0.1, 2, 1)], [0.5])
    run.wait("only.events", lambda e: e["what"] == "Started", "a process")
    run.process.kill()
    assert run.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    run.check_nothing_is_left()
