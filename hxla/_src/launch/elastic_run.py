"""`hxla run --elastic`: the authority's decisions, carried out on its hosts."""

import dataclasses
import itertools
import secrets
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..cluster.cluster import Cluster
from ..cluster.mesh_file import dump_cluster
from ..core.errors import HxlaError
from ..core.types import EXIT_PREEMPTED, EXIT_WATCHDOG
from .authority import advance, begin
from .control_channel import Report
from .event_log import EventLog, Placed, Started
from .host import Host, Hosts, OfferedDevice, cores_of
from .kept_state import KeptState, newest
from .membership import (
    AskedBack,
    Completed,
    Copied,
    Discard,
    Exited,
    Form,
    Generation,
    Happened,
    Joined,
    Kill,
    Leave,
    LeftState,
    Membership,
    MembershipRules,
    Offered,
    Passed,
    Prepare,
    Prepared,
    Release,
    Save,
    Saved,
    Stop,
    Tell,
    ToDo,
    Told,
    Vanished,
)
from .state_folders import StateFolders
from .user_signals import ended_by
from .warm import CoordinationProcess
from .workers import GenerationProcesses, Seat, Streams, WorkersStart

_POLL_SECONDS = 0.1
_REREAD_SECONDS = 0.5
_OF_OTHERS = ("victim", "judged", "preempted", "left")


class ElasticRun:
    """A job whose processes come and go, from its start until `wait` returns.

    Args:
        hosts: Where devices come from, and their processes run.
        streams: Where what is printed goes.
        rules: What the run keeps to.
        events: What is told of everything that happens.
    """

    def __init__(
        self,
        hosts: Hosts,
        streams: Streams,
        rules: MembershipRules,
        grace_seconds: float,
        events: EventLog,
    ):
        self._hosts, self._streams, self._grace = hosts, streams, grace_seconds
        self._known: Membership = begin(rules)
        self._job = secrets.token_hex(8)
        self._events = events
        self._most = rules.max_devices
        self._places: dict[str, OfferedDevice] = {}
        self._numbers: dict[str, int] = {}  # of devices on their hosts
        self._asked_back: set[str] = set()  # those that are no longer offered
        self._given_back: dict[str, OfferedDevice] = {}  # those that still are, and are not used
        self._teams: dict[int, GenerationProcesses] = {}
        self._left = StateFolders(hosts.carry)
        self._signals: list[int] = []
        self._wake = threading.Event()
        self._asked: int | None = None
        self._last_codes: set[int] = set()  # of processes that ended once that was asked
        self._asked_at = self._read_at = 0.0
        self._passed_at = time.monotonic()
        # The exit code and the words of an error of the script.
        self._failure: tuple[int, str] | None = None
        self._number = self._step = 0

    def receive(self, number: int) -> None:
        """Take note of a signal, and wake up; any thread may say so."""
        self._signals.append(number)
        self._wake.set()

    def wait(self) -> int:
        """Run the job to its end.

        Returns:
            Its exit code.
        """
        try:
            self._reread()
            while not self._is_over:
                self._wake.wait(_POLL_SECONDS)
                self._wake.clear()
                while self._signals:
                    self._serve_signal(self._signals.pop(0))
                is_due = time.monotonic() - self._read_at > _REREAD_SECONDS
                if (self._hosts.poll() or is_due) and self._asked is None:
                    self._reread()
                for team in list(self._teams.values()):
                    self._hear(team)
                for copied in self._left.arrived(time.monotonic()):
                    if copied.spread == 1:
                        self._say(f"no other host could take what {copied.device} has copied")
                    self._happens(copied)
                self._pass_time()
                self._escalate()
        finally:
            for team in list(self._teams.values()):
                self._close(team)
            self._hosts.close()
            self._events.close(self._known.ledger)
        return self._conclude()

    def _pass_time(self) -> None:
        """Let the authority look at the clock; while this process slept nobody was silent."""
        now, known = time.monotonic(), self._known
        if now - self._passed_at > known.rules.heartbeat_seconds / 2:
            for device in sorted(known.alive):
                number = known.generation.number
                self._happens(Told(at_seconds=now, generation=number, device=device))
        self._passed_at = now
        self._happens(Passed(at_seconds=now))

    # -- what happens ------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        if self._failure is not None:
            return True
        if self._asked is not None or self._known.phase == "finished":
            return not self._teams
        return self._known.phase == "failed"

    def _happens(self, *events: Happened) -> None:
        """One decision for all that happen together."""
        if self._asked is not None or self._failure is not None:
            return
        for event in events:
            if type(event) not in (Told, Passed):
                self._events.write(event)
        self._known, todo = advance(self._known, *events)
        for what in todo:
            self._events.write(what)
            self._do(what)
        self._left.keep({*self._known.kept, *self._known.sources})

    def _reread(self) -> None:
        """Compare the devices that may be used with those that are known."""
        self._read_at = time.monotonic()
        try:
            now = list(self._hosts.offered())
        except HxlaError as error:
            self._say(f"devices stay as they are: {error}")
            return
        # Of devices that are alike those stay which are used, and those go which leave anyway.
        used = sorted(self._places, key=self._asked_back.__contains__)
        gone = {name: self._places[name] for name in used} | self._given_back
        new: list[str] = []
        for place in now:
            same = next((name for name, own in gone.items() if own == place), None)
            if same is not None:
                del gone[same]
                if same in self._asked_back:
                    self._asked_back.discard(same)
                    new.append(same)
                continue
            name = f"device {self._number}"
            self._number += 1
            taken = {self._numbers[d] for d, p in self._places.items() if p.host is place.host}
            self._places[name] = place
            met = Placed(device=name, label=place.device.label, host=place.host.name)
            self._events.write(met)
            self._numbers[name] = next(k for k in itertools.count() if k not in taken)
            new.append(name)
        for name in self._given_back.keys() & gone.keys():
            del self._given_back[name], gone[name]
        for name in [name for name, place in gone.items() if place.host.is_lost]:
            del gone[name]
            self._lose(name)
        at = time.monotonic()
        offered = [Offered(at_seconds=at, device=name) for name in new]
        asked = [
            AskedBack(at_seconds=at, device=name, notice_seconds=place.host.notice_seconds)
            for name, place in gone.items()
            if name in self._places and name not in self._asked_back
        ]
        self._asked_back |= {event.device for event in asked}
        # A device that takes another's place comes with its leaving.
        self._happens(*offered, *asked)

    def _lose(self, name: str) -> None:
        """A device's host is gone."""
        if self._places.pop(name, None) is None:  # it was released when another was lost
            return
        self._say(f"{name} is gone with its host")
        self._happens(Vanished(at_seconds=time.monotonic(), device=name))

    def _ask_back(self, name: str, notice_seconds: float) -> None:
        at = time.monotonic()
        self._happens(AskedBack(at_seconds=at, device=name, notice_seconds=notice_seconds))

    def _hear(self, team: GenerationProcesses) -> None:
        """What the processes of a generation said since, the end of each last."""
        for device in team.generation.members:
            if device in team.exits:
                continue
            code = team.exit_code(device)
            self._hear_one(team, device)
            if code is not None:
                team.exits[device] = code
                self._last_codes |= set() if self._asked is None else {code}
                self._ended(team, device, code)
        team.release()
        if len(team.exits) == len(team.generation.members):
            self._close(team)

    def _hear_one(self, team: GenerationProcesses, device: str) -> None:
        before, now = team.told[device], team.report(device)
        if now == before:
            return
        team.told[device] = now
        self._step = max(self._step, now.step)
        at = time.monotonic()
        of: dict[str, Any] = {
            "at_seconds": at,
            "generation": team.generation.number,
            "device": device,
        }
        if now.num_microbatches and now.num_microbatches != before.num_microbatches:
            self._limit(now.num_microbatches)
        self._happens(Told(**of))
        if now.is_prepared and not before.is_prepared:
            self._happens(Prepared(**of))
        if now.saved_step > before.saved_step:
            self._happens(Saved(at_seconds=at, step=now.saved_step))
        part = of | {"part": now.part, "num_parts": now.num_parts}
        for step in sorted(now.copies.keys() - before.copies.keys(), key=int):
            self._wrote(Copied(**part, step=int(step), digest=now.copies[step]), team)
        if now.is_joined and not before.is_joined:
            self._happens(Joined(**of))
        if now.step > before.step:
            num, executors, seconds = now.ran
            of |= {"num_microbatches": int(num), "num_executors": int(executors)}
            self._happens(Completed(**of, step=now.step, busy_seconds=seconds))
        if now.left_step > before.left_step:
            self._wrote(LeftState(**part, step=now.left_step, digest=now.digest), team)
        if now.note and not before.note:
            self._say(f"{device} could not leave its state: {now.note}")
        if now.asked_back and not before.asked_back:
            self._ask_back(device, self._grace)
        if now.is_finished and not before.is_finished:
            self._finish(now)

    def _wrote(self, event: Copied | LeftState, team: GenerationProcesses) -> None:
        members, places = team.generation.members, self._places
        hosts = {device: places[device].host for device in members if device in places}
        if event.device in hosts:  # else it is gone, with what was written there
            self._happens(self._left.wrote(event, members.index(event.device), hosts))

    def _limit(self, num_microbatches: int) -> None:
        """A step has so many microbatches: more devices than that have nothing to do."""
        most = min(self._most, num_microbatches)
        rules = dataclasses.replace(
            self._known.rules, max_devices=most, num_microbatches=num_microbatches
        )
        ledger = dataclasses.replace(self._known.ledger, num_microbatches=num_microbatches)
        self._known = dataclasses.replace(self._known, rules=rules, ledger=ledger)

    def _finish(self, report: Report) -> None:
        rules = dataclasses.replace(self._known.rules, num_steps=report.step)
        self._known = dataclasses.replace(self._known, rules=rules)
        self._happens(Saved(at_seconds=time.monotonic(), step=report.step))

    def _ended(self, team: GenerationProcesses, device: str, code: int) -> None:
        post, report = team.post(device), team.told[device]
        is_current = team.generation.number == self._known.generation.number
        is_own_error = post.state == "failed" or (code > 0 and post.state not in _OF_OTHERS)
        if self._asked is not None or self._known.phase == "finished":
            return
        if not code and not report.is_prepared:  # a script that trains nothing
            self._finish(report)
            return
        if code in (EXIT_PREEMPTED, EXIT_WATCHDOG) or (not is_own_error and code):
            self._gone(team.generation.number, device)
            return
        words = post.note or f"ended with exit code {code}"
        if is_current and not team.has_joined and self._known.ledger.end:
            number, last = team.generation.number, team.generation.members[-1]
            if self._known.phase == "forming":  # perhaps it can be planned for fewer
                self._say(f"generation {number} cannot begin: {words}; it is tried without {last}")
                self._ask_back(last, 0.0)
            self._gone(number, device)
            return
        if is_current:
            self._failure = (code or 1, f"{device} failed: {words}")
            return
        self._say(f"generation {team.generation.number} cannot be prepared: {words}")
        for new in team.generation.members:
            if new not in self._known.generation.members:
                self._gone(team.generation.number, new)
        self._gone(team.generation.number, device)

    def _gone(self, number: int, device: str) -> None:
        at = time.monotonic()
        self._happens(Exited(at_seconds=at, generation=number, device=device))

    # -- what is to be done ------------------------------------------------------------------

    def _do(self, what: ToDo) -> None:
        match what:
            case Prepare(generation=generation):
                self._prepare(generation)
            case Discard(generation=generation):
                self._discard(generation.number)
            case Stop(generation=generation):
                self._order(generation, stops=True)
            case Leave(generation=generation):
                self._order(generation, leaves=True)
            case Kill(generation=generation, devices=devices):
                if generation.number in self._teams:
                    self._teams[generation.number].kill(sorted(devices))
            case Form(generation=generation, sources=sources):
                self._form(generation, sources)
            case Save(step=step):
                self._say(f"fewer devices than --min: the state of step {step} waits in memory")
            case Release(device=device):
                given = self._places.pop(device, None)
                if given is not None and device not in self._asked_back:
                    self._given_back[device] = given
                self._say(f"{device} is released")
                hosts = [place.host for place in self._places.values()]
                if given is not None and given.host not in hosts:
                    self._hosts.let_go(given.host)
            case Tell(words=words):
                self._say(words)

    def _prepare(self, generation: Generation) -> None:
        try:
            self._start(generation)
        except HxlaError as error:
            self._say(f"generation {generation.number} cannot be started: {error}")
            now = self._known.generation.members
            for device in [d for d in generation.members if d not in now]:
                self._gone(generation.number, device)

    def _start(self, generation: Generation) -> GenerationProcesses:
        places = [self._places[name] for name in generation.members]
        alone = [place.device.model_copy(update={"node": 0}) for place in places]
        mesh = dump_cluster(Cluster(name="elastic", devices=tuple(alone)))
        hosts = self._hosts_of(generation)
        pinned = next((host.pinned for host in hosts.values() if host.pinned), "")
        address = f"{self._hosts.address}:{generation.port}"
        cores = cores_of(places)
        service = CoordinationProcess(address, len(places)) if len(places) > 1 else None
        workers = {
            name: host.start(
                WorkersStart(
                    job=self._job,
                    generation=generation.number,
                    num_processes=len(places),
                    address=address,
                    seats={
                        rank: Seat(
                            device=place.device,
                            place=self._numbers[generation.members[rank]],
                            core=cores[rank],
                        )
                        for rank, place in enumerate(places)
                        if place.host is host
                    },
                    mesh=mesh,
                    pinned=pinned,
                )
            )
            for name, host in hosts.items()
        }
        team = GenerationProcesses(
            generation, workers, [place.host.name for place in places], service
        )
        self._teams[generation.number] = team
        where = {name: self._places[name].host.name for name in generation.members}
        self._events.write(Started(generation=generation.number, pids=team.pids, hosts=where))
        return team

    def _hosts_of(self, generation: Generation) -> dict[str, Host]:
        hosts = [self._places[name].host for name in generation.members]
        return {host.name: host for host in hosts}

    def _form(self, generation: Generation, sources: Sequence[KeptState]) -> None:
        team = self._teams.get(generation.number) or self._start(generation)
        step = f"step {generation.first_step}" if generation.first_step else "the beginning"
        keepers = ", ".join(one.device for one in sources)
        where = f", state left by {keepers}" if sources else ""
        self._say(
            f"generation {generation.number} from {step}{where}: {', '.join(generation.members)}"
        )
        left = self._left.of(sources)
        for name, host in self._hosts_of(generation).items():
            host.begin(team.workers[name], left)
        at, number = time.monotonic(), generation.number
        for device in generation.members:
            self._happens(Told(at_seconds=at, generation=number, device=device))

    def _order(self, generation: Generation, *, stops: bool = False, leaves: bool = False) -> None:
        team = self._teams.get(generation.number)
        if team is not None:
            if leaves:
                team.quieten()
            team.order(stops=stops, leaves=leaves)

    def _discard(self, number: int) -> None:
        team = self._teams.get(number)
        if team is not None:
            team.quieten()
            self._close(team)

    def _close(self, team: GenerationProcesses) -> None:
        self._teams.pop(team.generation.number, None)
        team.close(shows_held=self._asked is None, kept=self._left.paths)

    # -- the end -----------------------------------------------------------------------------

    def _serve_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self._reread()
            return
        is_again = self._asked is not None
        trains = self._known.phase in ("running", "preparing", "handing over")
        self._asked, self._asked_at = number, time.monotonic()
        for team in list(self._teams.values()):
            if team.generation.number != self._known.generation.number:
                self._discard(team.generation.number)
            elif is_again:
                team.kill()
            elif number == signal.SIGINT and not trains:
                team.quieten()
                team.kill(number=signal.SIGINT)
            else:
                if number == signal.SIGINT:
                    self._say("Ctrl-C: training ends after this step; once more ends it at once")
                team.order(ends=True)

    def _escalate(self) -> None:
        """SIGKILL for those who do not end, unless they write a checkpoint."""
        if self._asked is None:
            return
        for team in self._teams.values():
            for device in team.generation.members:
                post = team.post(device)
                extra = 2 * post.step_seconds if post.state == "running" else 0.0
                since = max(self._asked_at, post.moved_at)
                late = time.monotonic() > since + self._grace + extra
                if late and post.phase != "checkpoint":
                    team.kill([device])

    def _conclude(self) -> int:
        """Say how the job ended; returns the exit code."""
        ledger = self._known.ledger
        best = newest(self._known.kept)
        trains = self._known.phase in ("running", "preparing", "handing over", "finished")
        if best and best[0].step > self._known.saved_step and not trains:
            self._say(
                f"the state of step {best[0].step} was in memory only and is gone: give "
                "hxla.train a checkpoint_dir"
            )
        ended = self._failure
        if self._asked is not None and ended is None:
            done, saved = max(self._step, ledger.end), self._known.saved_step
            ended = ended_by(self._asked, self._last_codes, done, saved)
        if ended is not None:
            self._say(ended[1])
            return ended[0]
        lost = f", {ledger.num_lost} lost and run again" if ledger.num_lost else ""
        num = len(ledger.runs)
        self._say(f"{ledger.end} steps by {num} generation{'s' * (num != 1)}{lost}")
        return 1 if self._known.phase == "failed" else 0

    def _say(self, text: str) -> None:
        self._streams.err.write(f"hxla: {text}\n".encode())
