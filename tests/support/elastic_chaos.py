"""Devices come and go, processes die, and nothing of it may move a bit.

    make elastic ARGS="--events 100 --seed 1 --out benchmarks/results/elastic.json"

Each run is a real `hxla run --elastic` of a small job to which events happen at random; afterwards
its SHA-256 must be that of the undisturbed run, its ledger without gaps, no step lost while one
holder of the state lived, and nothing left behind: processes, shared memory, cgroups. In each third
job nobody has the whole state (ZeRO 1), which all copy into memory every few steps: there no event
may cost more steps than those.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from support import left_behind
from support.launched import PATIENCE_SECONDS, own_environment
from support.paths import ROOT
from support.ray_clusters import add_node, drain, started_cluster
from support.undisturbed import JOB, undisturbed, undisturbed_line

KINDS = (
    "kill",
    "kill the first",
    "freeze",
    "SIGTERM",
    "join",
    "leave",
    "other share",
    "kill twice",
    "kill while it prepares",
    "kill while it saves",
)
PLANNED = ("join", "leave", "other share")
#: On a Ray cluster: `leave` drains a node.
RAY_KINDS = (
    "kill",
    "kill the first",
    "freeze",
    "SIGTERM",
    "join",
    "leave",
    "kill twice",
    "node death",
)
SHARES = (0.3, 0.4, 0.5)
OTHER_SHARES = (0.25, 0.35, 0.45)
NUM_CORES = 2
MOST_STEPS = 100_000  # which no run reaches: it is stopped
EVERY = 4  # steps between copies in memory


@dataclasses.dataclass
class Job:
    """A run under way."""

    folder: pathlib.Path
    steps: int
    slow: float
    shares: list[float]  # of a core each
    options: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    script: pathlib.Path = JOB
    is_copied: bool = False  # its state is shared out, and copied into memory

    #: How many times `EVERY` steps may be lost at once.
    most_lost = 1

    def __post_init__(self):
        self.names = [f"device {k}" for k in range(len(self.shares))]  # as the job calls them
        self.num_named = len(self.names)
        self.is_held = min(self.shares) < 0.9
        self.fewest, self.most = (2, 4) if self.is_held else (1, NUM_CORES)
        self.write_mesh()
        self.log, self.last = self.folder / "events.jsonl", self.folder / "last"
        if self.is_copied:
            self.options += ("--zero", "1", "--in-memory-every", str(EVERY))
            self.options += ("--stop-when", str(self.last))
            self.launcher += ("--min", "2")  # one has nobody to share with
        self.printed = (self.folder / "printed.txt").open("wb")
        command = [sys.executable, "-m", "hxla", "run", "--elastic", "--heartbeat", "3"]
        command += [*self.where(), "--events", str(self.log), *self.launcher]
        command += [
            str(self.script),
            "--steps",
            str(self.steps),
            "--slow",
            str(self.slow),
            *self.options,
        ]
        self.process = subprocess.Popen(
            command,
            stdout=self.printed,
            stderr=subprocess.STDOUT,
            env=own_environment(),
            start_new_session=True,
        )

    def where(self):
        """Options that say where devices are."""
        return "--mesh", str(self.mesh)

    @property
    def mesh(self):
        return self.folder / "mesh.toml"

    def write_mesh(self):
        """The devices as they shall be; the file is whole at any time."""
        text = 'name = "chaos"\n'
        for share in self.shares:
            text += f'[[device]]\nkind = "cpu"\ncore_share = {share}\n'
        part = self.mesh.with_suffix(".part")
        part.write_text(text)
        part.rename(self.mesh)

    def add(self, share):
        """A device more; of two that are alike nobody could tell which one is gone."""
        self.shares.append(round(share - 0.001 * self.num_named, 3))
        self.names.append(f"device {self.num_named}")
        self.num_named += 1

    def remove(self, k):
        """A device less."""
        del self.shares[k], self.names[k]

    def events(self):
        """What happened so far."""
        if not self.log.exists():
            return []
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def ledger(self):
        """Which generation committed which steps, once the job has ended."""
        [found] = [e for e in self.events() if e["what"] == "Ledger"]
        return found

    def wait(self, wanted, what):
        """Until the events say something; returns it."""
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            found = wanted(self.events())
            if found:
                return found
            if self.process.poll() is not None:
                raise AssertionError(f"the job ended while it was waited for {what}: {self.tail()}")
            time.sleep(0.05)
        raise AssertionError(f"{what}: not within {PATIENCE_SECONDS:g} s: {self.tail()}")

    def started(self):
        """The processes of the newest generation that trains, and where they are."""
        events = self.events()
        formed = [e for e in events if e["what"] == "Form"]
        number = formed[-1]["generation"]["number"]
        [started] = [e for e in events if e["what"] == "Started" and e["generation"] == number]
        return started

    def pids(self):
        """Those processes by device."""
        return self.started()["pids"]

    def called(self, name):
        """The job's own word for a device."""
        return name

    def printed_text(self):
        """What it printed."""
        return (self.folder / "printed.txt").read_text(errors="replace")

    def tail(self):
        """The end of it."""
        return self.printed_text()[-3000:]

    def stop(self):
        """Nothing of it goes on."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.printed.close()

    def end(self):
        """Wait for it; returns its exit code."""
        try:
            return self.process.wait(PATIENCE_SECONDS)
        finally:
            self.stop()


class RayJob(Job):
    """A run on a Ray cluster, whose nodes have a device each: one of its own, or one given."""

    most_lost = 2  # the newest copies may be on their way to another node

    def __init__(self, *arguments, cluster=None, **options):
        self.nodes, self.is_own_cluster = {}, cluster is None
        self.cluster = started_cluster() if cluster is None else cluster
        super().__init__(*arguments, **options)

    def where(self):
        return "--ray", self.cluster.address

    def write_mesh(self):
        """The nodes as they shall be: new ones are added, others drained."""
        for name, share in zip(self.names, self.shares, strict=True):
            if name not in self.nodes:
                self.nodes[name] = add_node(self.cluster, share)
        for name in self.nodes.keys() - set(self.names):
            drain(self.cluster, self.nodes.pop(name))

    def hosts(self):
        """The names of devices, by the job's words for them."""
        of_host = {f"node {node.node_id[:8]}": name for name, node in self.nodes.items()}
        return {device: of_host.get(host, host) for device, host in self.started()["hosts"].items()}

    def pids(self):
        hosts, pids = self.hosts(), super().pids()
        return {hosts[device]: pid for device, pid in pids.items()}

    def called(self, name):
        return next(device for device, own in self.hosts().items() if own == name)

    def kill_node(self, name):
        """With all that runs on it."""
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)
        self.remove(self.names.index(name))

    def stop(self):
        super().stop()
        if self.is_own_cluster:
            self.cluster.shutdown()
        while not self.is_own_cluster and self.nodes:
            self.cluster.remove_node(self.nodes.popitem()[1])


def last_step(events):
    """Steps that are known to be done, and when the last one was told."""
    done = [e for e in events if e["what"] == "Completed"]
    return (done[-1]["step"], done[-1]["seconds"]) if done else (0, 0.0)


def runs(events):
    """Whether all members of the newest generation have joined."""
    formed = [e["generation"] for e in events if e["what"] == "Form"]
    if not formed:
        return False
    joined = {
        e["device"]
        for e in events
        if e["what"] == "Joined" and e["generation"] == formed[-1]["number"]
    }
    return joined == set(formed[-1]["members"])


def send(pid, number):
    """A signal to a process, if it is still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def possible(job, kind):
    """What of a kind of event can be done now, and what is done where it cannot."""
    pids = job.pids()
    for name in [name for name in job.names if name not in pids]:  # it could not be prepared
        job.remove(job.names.index(name))
    is_least = len(pids) == (2 if job.is_copied else 1)
    takes_away = kind in ("SIGTERM", "node death") if job.is_copied else kind != "other share"
    if is_least and takes_away:
        kind = "join"  # whoever holds the only state is not to be lost
    if kind not in PLANNED:
        return kind
    has_room, may_leave = len(job.shares) < job.most, len(job.shares) > job.fewest
    if (kind == "join" and has_room) or (kind == "leave" and may_leave):
        return kind
    return "other share" if job.is_held else "join" if has_room else "leave"


def disturb(job, kind, rng):
    """One event; returns whether a generation must follow it."""
    pids = job.pids()
    victim = rng.choice(sorted(pids))
    if kind in ("kill", "kill the first", "kill while it saves"):
        return send(pids[min(pids) if kind == "kill the first" else victim], signal.SIGKILL)
    if kind == "node death":
        job.kill_node(victim)
        return True
    if kind == "freeze":
        return send(pids[victim], signal.SIGSTOP)
    if kind == "SIGTERM":
        device = job.called(victim)
        send(pids[victim], signal.SIGTERM)
        job.wait(lambda e: any(x["what"] == "Release" and x["device"] == device for x in e), "it")
        job.remove(job.names.index(victim))
        job.write_mesh()
        return True
    if kind == "kill twice":
        send(pids[victim], signal.SIGKILL)
        before = len([e for e in job.events() if e["what"] == "Started"])
        job.wait(lambda e: len([x for x in e if x["what"] == "Started"]) > before, "a new one")
        started = [e for e in job.events() if e["what"] == "Started"][-1]
        time.sleep(rng.uniform(0, 2))
        return send(rng.choice(sorted(started["pids"].values())), signal.SIGKILL)
    change = kind if kind in PLANNED else possible(job, "other share")
    if change == "join":
        job.add(rng.choice(SHARES) if job.is_held else 1.0)
    elif change == "leave":
        job.remove(rng.randrange(len(job.shares)))
    else:
        k = rng.randrange(len(job.shares))
        share = rng.choice([s for s in OTHER_SHARES if s != job.shares[k]])
        job.remove(k)
        job.add(share)
    job.write_mesh()
    if kind == "kill while it prepares":
        before = len([e for e in job.events() if e["what"] == "Started"])
        job.wait(lambda e: len([x for x in e if x["what"] == "Started"]) > before, "a new one")
        time.sleep(rng.uniform(0, 2))
        pids = job.pids()
        if len(pids) == 1:  # whoever holds the only state is not to be lost
            newest = [e for e in job.events() if e["what"] == "Started"][-1]["pids"]
            pids = {d: pid for d, pid in newest.items() if pid not in pids.values()}
        if pids:  # else the new generation is one of its own already
            send(rng.choice(sorted(pids.values())), signal.SIGKILL)
    return True


def disturbed(seed, num_events, kinds=KINDS, steps_between=8, make=Job):
    """A job to which so many events happen; returns a row for each.

    With an even seed two to four processes are held to shares of a core, so that all of them fit
    on two; with an odd one there are up to two, which have a core each. With one that three divides
    they are held as well, and the state is shared out, and copied.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        saves = ("--checkpoints", str(folder / "saved"), "--checkpoint-every", "5")
        is_copied = seed % 3 == 0
        is_held = is_copied or seed % 2 == 0
        options = saves if "kill while it saves" in kinds and not is_copied else ()
        shares = [rng.choice(SHARES) for _ in range(rng.randint(2, 4))]
        shares = shares if is_held else [1.0] * NUM_CORES
        shares = [round(share - 0.001 * k, 3) for k, share in enumerate(shares)]
        job = make(folder, MOST_STEPS, 0.05, shares, options, is_copied=is_copied)
        rows = []
        try:
            job.wait(runs, "the first generation")
            for _ in range(num_events):
                kind = rng.choice([k for k in kinds if is_held or k != "other share"])
                step, _ = last_step(job.events())
                wanted = step + rng.randint(1, steps_between)
                job.wait(lambda e, n=wanted: last_step(e)[0] >= n, "steps before an event")
                row = {"seed": seed, "held": is_held, "copied": is_copied}
                row["num"] = len(job.shares)
                rows.append(row | one(job, kind, rng))
            if is_copied:
                job.last.touch()
            else:
                send(job.process.pid, signal.SIGTERM)
            code = job.end()
        finally:
            job.stop()
        check(job, code)
        return rows


def one(job, kind, rng):
    """One event, until a step is completed by all that are then members; returns what it was."""
    kind = possible(job, kind)
    before = job.events()
    number = len([e for e in before if e["what"] == "Form"])
    step, _ = last_step(before)
    must_change = disturb(job, kind, rng)
    at = time.monotonic()

    def again(events):
        formed = [e for e in events if e["what"] == "Form"]
        if must_change and len(formed) == number:
            return False
        settled = runs(events) and last_step(events)[0] > max(
            step, formed[-1]["generation"]["first_step"]
        )
        return settled

    job.wait(again, kind)
    seconds = time.monotonic() - at
    return {"kind": kind, "seconds": round(seconds, 2), "pause": round(pause(job.events()), 3)}


def pause(events):
    """Seconds without a step at the last change of generation."""
    formed = [k for k, e in enumerate(events) if e["what"] == "Form"][-1]
    done = [e["seconds"] for e in events[:formed] if e["what"] == "Completed"]
    after = [e["seconds"] for e in events[formed:] if e["what"] == "Completed"]
    return after[0] - done[-1] if done and after else 0.0


def check(job, code):
    """What must be so in the end, whatever happened."""
    events, ledger = job.events(), job.ledger()
    end = 0
    for run in ledger["runs"]:
        assert run["first"] == end, ledger
        end = run["end"]
    assert ledger["num_lost"] == num_lost(events, EVERY * job.most_lost if job.is_copied else 0)
    if job.is_copied:
        assert code == 0, (code, job.tail())
        line = undisturbed_line(end, "-n", "2", "--zero", "1")
        found = [told for told in job.printed_text().splitlines() if "sha256" in told]
        assert [told.split("] ")[-1] for told in found] == [line], (line, found)
    else:
        assert code == (75 if "--checkpoints" in job.options else 143), (code, job.tail())
        check_states(events)
    for started in (e for e in events if e["what"] == "Started"):
        for pid in started["pids"].values():
            assert not pathlib.Path(f"/proc/{pid}").exists(), pid
    left_behind.wait_until_none()


def check_states(events, *options, num=1):
    """States that processes left are those of a job that nobody disturbs."""
    left = [e for e in events if e["what"] == "LeftState" and not e["part"]]
    most = max((e["step"] for e in left), default=0)
    digests = undisturbed(math.ceil(most / 500) * 500, *options, num=num)
    for state in left:
        assert state["digest"] == digests[state["step"] - 1], state
    return {state["step"] for state in left}


def num_lost(events, most):
    """Steps that were run again, no more than so many after any event."""
    end = lost = number = 0
    for e in events:
        if e["what"] == "Form":
            number, first = e["generation"]["number"], e["generation"]["first_step"]
            assert end - first <= most, (end, e)
            lost, end = lost + end - first, first
        elif e["what"] == "Saved" or (e.get("generation") == number and "step" in e):
            end = max(end, e["step"])
    return lost


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--of-a-run", type=int, default=5)
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster of its own")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows, kinds = [], RAY_KINDS if args.ray else KINDS
    for number, k in enumerate(range(0, args.events, args.of_a_run)):
        began = time.monotonic()
        num = min(args.of_a_run, args.events - k)
        seed = args.seed + number
        rows += disturbed(seed, num, kinds, make=RayJob if args.ray else Job)
        for row in rows[-args.of_a_run :]:
            print(row, flush=True)
        print(f"run of seed {seed}: {time.monotonic() - began:.1f} s", flush=True)
    copied, whole = ([row for row in rows if row["copied"] == k] for k in (True, False))
    tables = {
        "held to shares of a core": table([row for row in whole if row["held"]], kinds),
        "a core each": table([row for row in whole if not row["held"]], kinds),
        "held to shares, the state shared out and copied": table(copied, kinds),
    }
    if args.out:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        import results

        results.write(pathlib.Path(args.out), {"seed": args.seed, **tables, "rows": rows})


def table(rows, kinds):
    """Pauses of each kind of event."""
    found = {}
    for kind in kinds:
        pauses = [row["pause"] for row in rows if row["kind"] == kind]
        if pauses:
            found[kind] = {
                "events": len(pauses),
                "median pause seconds": round(statistics.median(pauses), 3),
                "longest pause seconds": max(pauses),
            }
            print(f"{kind:26} {found[kind]}")
    return found


if __name__ == "__main__":
    main()
