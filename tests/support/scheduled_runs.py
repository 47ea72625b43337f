"""`hxla schedule run` over small real jobs, for tests of live schedules."""

import itertools
import json
import subprocess
import sys
import time

from support import elastic_chaos, left_behind
from support.inside.scheduler import POLICIES, decided_otherwise, read_record
from support.launched import PATIENCE_SECONDS
from support.undisturbed import ALIKE


class Scheduled:
    """`hxla schedule run` over small real jobs on devices of this machine."""

    def __init__(self, folder, jobs, shares):
        self.folder, self.out = folder, folder / "out"
        self.go = folder / "go"
        figures = ", ".join(f'"cpu@{share}" = {0.02 / share}' for share in sorted(set(shares)))
        self.figures, self.text = figures, ""
        self.submit(jobs)
        self.write_devices(shares)
        command = [sys.executable, "-m", "hxla", "schedule", "run", str(folder / "jobs.toml")]
        command += [*self.where(), "--out", str(self.out), "--policy", "weighing"]
        self.process = subprocess.Popen(
            [*command, "--move-seconds", "1", "--interval", "5"],
            env=elastic_chaos.own_environment(),
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def where(self):
        return "--mesh", str(self.folder / "devices.toml")

    def submit(self, jobs):
        """Add jobs; the file is whole at any time."""
        for name, steps, slow, num, least in jobs:
            options = ["--steps", str(steps), "--slow", str(slow), "--batch-size", str(4 * num)]
            options += ["--slow-until", str(self.go)]
            self.text += f'[[job]]\nname = "{name}"\nscript = "{elastic_chaos.JOB}"\n'
            self.text += f"steps = {steps}\narguments = {json.dumps(options)}\n"
            self.text += f"microbatches = {num}\nmin_devices = {least}\n"
            self.text += f"seconds = {{{self.figures}}}\n"
        part = self.folder / "jobs.part"
        part.write_text(self.text)
        part.rename(self.folder / "jobs.toml")

    def write_devices(self, shares):
        """The devices as they shall be; the file is whole at any time."""
        text = 'name = "shared out"\n'
        for share in shares:
            text += f'[[device]]\nkind = "cpu"\ncore_share = {share}\n'
        part = self.folder / "devices.part"
        part.write_text(text)
        part.rename(self.folder / "devices.toml")

    def lines(self, name):
        path = self.out / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait(self, name, wanted, what):
        """Until lines of a file say something; returns the first that does."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            found = [line for line in self.lines(name) if wanted(line)]
            if found:
                return found[0]
            is_late = self.process.poll() is not None or time.monotonic() > until
            assert not is_late, f"{what}\n{self.printed()}"
            time.sleep(0.2)

    def printed(self):
        if self.process.poll() is None:
            self.process.terminate()
        logs = [path.read_text()[-1500:] for path in sorted(self.out.glob("*.log"))]
        return "\n".join([self.process.communicate()[1].decode(), *logs])

    def end(self):
        """Let jobs go on at full speed, to the end."""
        self.go.touch()
        _, printed = self.process.communicate(timeout=PATIENCE_SECONDS)
        assert self.process.returncode == 0, printed.decode()

    def formed(self, name):
        """The numbers of members of a job's generations."""
        events = self.lines(f"{name}.events")
        return [len(e["generation"]["members"]) for e in events if e["what"] == "Form"]

    def pids(self):
        """Of all processes of the jobs."""
        started = [e for path in self.out.glob("*.events") for e in self.lines(path.name)]
        return [p for e in started if e["what"] == "Started" for p in e["pids"].values()]

    def check_nothing_is_left(self):
        left_behind.wait_until_gone(self.pids())
        left_behind.wait_until_none()


def digest(text):
    [found] = [line.split()[-4] for line in text.splitlines() if "sha256" in line]
    return found


def undisturbed(steps, num):
    """The SHA-256 of a job alone on one device."""
    command = [sys.executable, str(elastic_chaos.JOB), "--steps", str(steps)]
    env = elastic_chaos.own_environment() | ALIKE
    ran = subprocess.run(
        [*command, "--batch-size", str(4 * num)], env=env, check=True, capture_output=True
    )
    return digest(ran.stdout.decode())


#: Name, steps, seconds that a step waits, microbatches (maxP), fewest devices (minP).
LONG = ("long", 200, 1.0, 4, 1)
THREE = (LONG, ("pair", 40, 0.0, 2, 2), ("late", 30, 0.0, 1, 1))


def is_decided_on(num):
    """Of a line of the record: whether it is a decision on so many devices."""
    return lambda e: e["what"] == "Decided" and sum(e["capacity"]) == num


def has_ended(name):
    """Of a line of the record: whether a job has."""
    return lambda e: e["what"] == "Ended" and e["name"] == name


def share_out(run, take, give_back):
    """The first of three jobs has begun; a device is taken meanwhile, and given back.

    Returns:
        The decisions before and after it was taken.
    """
    run.wait("long.events", lambda e: e["what"] == "Completed", "a step on all devices")
    run.submit(THREE[1:])
    run.wait("record.jsonl", has_ended("pair"), "its end")
    run.wait("record.jsonl", has_ended("late"), "its end")
    before = [e for e in run.lines("record.jsonl") if e["what"] == "Decided"][-1]
    take()
    taken = run.wait("record.jsonl", is_decided_on(3), "a decision on fewer devices")
    nums = taken["held"]["long"]
    run.wait(
        "record.jsonl",
        lambda e: e["what"] == "Holds" and e["name"] == "long" and e["nums"] == nums,
        "a device that is given back",
    )
    give_back()
    run.wait(
        "record.jsonl",
        lambda e: is_decided_on(4)(e) and e["at_seconds"] > taken["at_seconds"],
        "a decision on all devices",
    )
    run.end()
    return before, taken


def check_record(run, sizes):
    """Decisions are those of the policy, and nothing is left.

    Args:
        run: That ended.
        sizes: How many members the first job has at first, and after each change of their number.
    """
    # Nodes that are seen one after another may change the members and not their number.
    found = [size for size, _ in itertools.groupby(run.formed("long"))]
    assert found[: len(sizes)] == sizes, run.formed("long")
    entries = read_record(run.out / "record.jsonl")
    assert not decided_otherwise(entries, POLICIES["weighing"])
    run.check_nothing_is_left()


def check_three(run, sizes):
    """And that three jobs which have ended have the bits of undisturbed ones."""
    for name, steps, _, num, _ in THREE:
        assert digest((run.out / f"{name}.log").read_text()) == undisturbed(steps, num), name
    check_record(run, sizes)
