"""Seeded faults against real small jobs: `make chaos`.

An event is a job of one to three processes to which one thing happens: a process is killed, stopped
or told to end, raises, exits, the disk is full, nobody reads the output any more, a checkpoint is
damaged. Of each event it is measured how long the job took to end after it, whether the culprit,
its step and its phase were named, how many lines stood on standard error besides the user's own
traceback, and whether the resumed job ended with the bits of one that was never disturbed.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from support.inside.launch import STEP_PHASES
from support.launched import PATIENCE_SECONDS
from support.paths import JOBS, PYTHONPATH

MOST_SECONDS, MOST_LINES = 10.0, 5
NAMED = re.compile(
    r"^hxla: rank (\d+) .*?(?:at step (\d+) in|before its first step, in) phase (.*)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """What happens to a job.

    Attributes:
        kind: What.
        place: Where in the job: `script`, `callback`, `data`, `any` moment, `disk`, or `outside`.
        rank: To which process; -1: to none of its own.
        step: At which step; -1: before the first.
        code: With which exit code it leaves, or the signal that is sent.
        num_processes: Of the job.
        saves: Whether the job writes checkpoints.
        exit_code: What the job has to end with.
        seed: For what is random in it.
    """

    kind: str
    place: str
    rank: int
    step: int
    code: int = 0
    num_processes: int
    saves: bool = True
    exit_code: int
    seed: int

    @property
    def has_culprit(self) -> bool:
        return self.place != "outside"

    def __str__(self) -> str:
        code = f"({self.code})" if self.code else ""
        where = f"rank {self.rank}" if self.rank >= 0 else "the job"
        return (
            f"{self.kind}{code} at {where} of {self.num_processes}, {self.place}"
            + (f" of step {self.step}" if self.step >= 0 else "")
            + ("" if self.saves else ", no checkpoints")
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it.

    Attributes:
        seconds: From the event to the end of the job.
        exit_code: Of the job.
        is_named: Whether culprit, step and phase were named right; None where there is none.
        num_lines: On standard error besides the traceback of the user's own error and the lines of
            a run without faults.
        same_bits: Whether the resumed job ended with those of the undisturbed one.
        error: What the job said on standard error.
    """

    seconds: float
    exit_code: int
    is_named: bool | None
    num_lines: int
    same_bits: bool
    error: str

    def faults(self, event: Event) -> list[str]:
        """Which bars are missed."""
        found = []
        if self.seconds > MOST_SECONDS:
            found.append(f"ended after {self.seconds:.1f} s")
        if self.exit_code != event.exit_code:
            found.append(f"exit code {self.exit_code}, not {event.exit_code}")
        if self.is_named is False:
            found.append("culprit, step or phase named wrong")
        if self.num_lines > MOST_LINES:
            found.append(f"{self.num_lines} lines")
        if not self.same_bits:
            found.append("other bits after resuming")
        return found


#: Each with the chance of it, as often as it stands here: kind, place, exit code, other fields.
KINDS = (
    *[("kill", "callback", 137, {})] * 3,
    *[("kill", "any", 137, {})] * 4,
    ("kill", "script", 137, {}),
    ("segv", "callback", 139, {}),
    *[("stop", "callback", 76, {})] * 2,
    ("stop", "any", 76, {}),
    *[("raise", "callback", 1, {})] * 3,
    *[("raise", "data", 1, {})] * 2,
    ("raise", "script", 1, {}),
    *[("exit", "callback", 76, {})] * 2,
    ("exit", "callback", 3, {"code": 3}),
    ("vanish", "callback", 76, {}),
    ("vanish", "callback", 5, {"code": 5}),
    *[("full", "disk", 1, {})] * 2,
    ("end a rank", "outside", 75, {"code": signal.SIGTERM}),
    ("end", "outside", 75, {"code": signal.SIGTERM}),
    ("end", "outside", 143, {"code": signal.SIGTERM, "saves": False}),
    ("wait in the script", "outside", 143, {"code": signal.SIGTERM}),
    *[("end", "outside", 75, {"code": signal.SIGINT})] * 2,
    ("kill the launcher", "outside", -9, {"code": signal.SIGKILL}),
    *[("close stdout", "outside", 141, {})] * 2,
    *[("damage", "outside", 75, {"code": signal.SIGTERM})] * 4,
)


def event(seed: int, kinds=KINDS) -> Event:
    """The event of a seed."""
    chance = random.Random(seed)
    kind, place, code, fields = chance.choice(kinds)
    num = chance.choice((2, 2, 3))
    step = chance.randint(3, 9)
    if kind == "close stdout":
        step = 3  # so that more is to be printed
    if place == "script" or kind == "wait in the script":
        step = -1
    return Event(
        kind=kind,
        place=place,
        rank=-1 if place == "outside" and kind != "end a rank" else chance.randrange(num),
        step=step,
        num_processes=num,
        exit_code=code,
        seed=seed,
        **fields,
    )


def start(event: Event | None, folder: pathlib.Path, num: int, *, saves: bool) -> subprocess.Popen:
    """Start the job, without a fault where there is no event."""
    fault = {"kind": "", "place": "", "rank": -1, "step": -1, "seed": 0}
    if event is not None:
        fault = dataclasses.asdict(event)
    own = {"CHAOS": json.dumps(fault | {"saves": saves}), "CHAOS_FOLDER": str(folder)}
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    with (folder / "stderr").open("wb") as error:
        return subprocess.Popen(
            [sys.executable, "-m", "hxla", "run", "-n", str(num), str(JOBS / "chaos_job.py")],
            stdout=subprocess.PIPE,
            stderr=error,
            env=clean | own | {"PYTHONPATH": PYTHONPATH},
        )


def sha256_of_undisturbed(folder: pathlib.Path) -> str:
    """The bits of a job to which nothing happens."""
    folder.mkdir()
    job = start(None, folder, 1, saves=False)
    job.communicate(timeout=PATIENCE_SECONDS)
    return (folder / "sha256").read_text()


def play(event: Event, folder: pathlib.Path, undisturbed: str) -> Outcome:
    """Let an event happen and resume the job."""
    folder.mkdir()
    job = start(event, folder, event.num_processes, saves=event.saves)
    began = disturb(event, job, folder) if not event.has_culprit else None
    try:
        job.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        job.terminate()
        job.communicate()
    ended = time.monotonic()
    fault = folder / "fault.json"
    if began is None:
        began = json.loads(fault.read_text())["at"] if fault.exists() else ended
    if event.kind == "kill the launcher":
        ended = when_gone(folder)
    error = (folder / "stderr").read_text(errors="replace")
    if event.kind == "damage":
        damage(folder / "checkpoints", random.Random(event.seed))
    again = start(None, folder, random.Random(event.seed).choice((1, 2)), saves=event.saves)
    again.communicate(timeout=PATIENCE_SECONDS)
    sha = folder / "sha256"
    return Outcome(
        seconds=ended - began,
        exit_code=job.returncode,
        is_named=is_named(event, error, folder) if event.has_culprit else None,
        num_lines=num_lines(error),
        same_bits=sha.exists() and sha.read_text() == undisturbed,
        error=error,
    )


def disturb(event: Event, job: subprocess.Popen, folder: pathlib.Path) -> float:
    """Do what comes from outside; returns when."""
    ready = folder / ("waiting-0" if event.kind == "wait in the script" else "step-0")
    until = time.monotonic() + PATIENCE_SECONDS
    while job.poll() is None and time.monotonic() < until:
        if ready.exists() and int(ready.read_text() or "-1") >= event.step:
            break
        time.sleep(0.005)
    time.sleep(random.Random(event.seed).uniform(0.0, 0.1))
    began = time.monotonic()
    (folder / "processes").write_text(" ".join(map(str, ranks_of(job.pid))))
    if event.kind == "close stdout":
        assert job.stdout is not None
        job.stdout.close()
        job.wait()  # communicate would read
        job.stdout = None
    elif event.kind == "end a rank":
        os.kill(ranks_of(job.pid)[event.rank], event.code)
    else:
        job.send_signal(event.code)
    return began


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks of a launcher, in their order."""
    found = {}
    for task in pathlib.Path(f"/proc/{launcher}/task").glob("*/children"):
        for pid in task.read_text().split():
            env = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            own = [line for line in env if line.startswith(b"HXLA_PROCESS_ID=")]
            if own:
                found[int(own[0].partition(b"=")[2])] = int(pid)
    return [pid for _, pid in sorted(found.items())]


def when_gone(folder: pathlib.Path) -> float:
    """When all ranks of a killed launcher had ended."""
    until = time.monotonic() + PATIENCE_SECONDS
    pids = (folder / "processes").read_text().split()
    while time.monotonic() < until and any(is_alive(pid) for pid in pids):
        time.sleep(0.02)
    return time.monotonic()


def is_alive(pid: str) -> bool:
    try:
        return ") Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def damage(checkpoints: pathlib.Path, chance: random.Random) -> None:
    """Damage the newest checkpoint."""
    newest = checkpoints / str(max(int(p.name) for p in checkpoints.iterdir() if p.name.isdigit()))
    files = sorted(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size)
    files = [p for p in files if p.name != "_CHECKPOINT_METADATA"]
    path = chance.choice(files)
    how = chance.choice(("flip", "cut", "unlink", "empty folder", "unlink folder"))
    if how == "flip":
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    elif how == "cut":
        os.truncate(path, chance.randrange(path.stat().st_size))
    elif how == "unlink":
        path.unlink()
    elif how == "empty folder":
        shutil.rmtree(newest)
        newest.mkdir()
    else:
        shutil.rmtree(newest / chance.choice(("tree", "meta")))


def is_named(event: Event, error: str, folder: pathlib.Path) -> bool:
    """Whether the job's own line names the culprit, its step and its phase."""
    named = [found for line in error.splitlines() if (found := NAMED.match(line))]
    if len(named) != 1:
        return False
    rank, step, phase = named[0].groups()
    phase = phase.split("'")[1]
    # Within a step the line counts it as done, and the fault's number is from 0.
    step = -1 if step is None else int(step) - (phase in STEP_PHASES)
    if int(rank) != event.rank:
        return False
    fault = folder / "fault.json"
    at = json.loads(fault.read_text())["step"] if fault.exists() else event.step
    if event.place == "any":
        return at <= step <= at + 1
    if event.place == "disk":  # the next save fails, or the one after it, which waits for that
        return at < step <= at + 4 and phase in ("checkpoint", "finishing")
    return step == event.step and phase == event.place


#: Lines that a run without faults has, too: what it opens, its plan, steps and summary.
ORDINARY = re.compile(
    r"hxla: rank \d+ has |opening: |data: |resumed |\d+ examples a step in |step \d+|"
    r"hxla: \d+ steps? on |  (?:\S+ #\d+ |predicted step |bits: |[\d.k]+ examples/s|counts moved )"
)


def num_lines(error: str) -> int:
    """Lines that are neither ordinary nor of a traceback of the user's own error."""
    count, inside = 0, False
    for line in error.splitlines():
        if not inside and ORDINARY.match(line):
            continue
        text = re.sub(r"^\[\d+\] ?", "", line)
        if text.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and not text.startswith(" "):
            inside = False  # the error itself
        elif not inside:
            count += 1
    return count


def main() -> int:
    """Play the events of some seeds and count what was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first event")
    args = parser.parse_args()
    missed = collections.Counter()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="hxla-chaos-") as name:
        folder = pathlib.Path(name)
        undisturbed = sha256_of_undisturbed(folder / "undisturbed")
        for seed in range(args.seed, args.seed + args.events):
            happening = event(seed)
            outcome = play(happening, folder / str(seed), undisturbed)
            outcomes.append(outcome)
            faults = outcome.faults(happening)
            missed.update(re.sub(r"[\d.]+", "#", fault) for fault in faults)
            told = "; ".join(faults) if faults else "ok"
            print(
                f"{seed:4} {happening}: {outcome.seconds:.1f} s, {outcome.num_lines} lines: {told}",
                flush=True,
            )
            if faults:
                print(outcome.error[-3000:], flush=True)
            shutil.rmtree(folder / str(seed))
    named = [o.is_named for o in outcomes if o.is_named is not None]
    print(
        f"{len(outcomes)} events: the slowest ended after "
        f"{max(o.seconds for o in outcomes):.1f} s, "
        f"named right {sum(named)} of {len(named)}, "
        f"most lines {max(o.num_lines for o in outcomes)}, "
        f"same bits {sum(o.same_bits for o in outcomes)} of {len(outcomes)}"
    )
    for what, times in missed.items():
        print(f"  missed {times} times: {what}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
