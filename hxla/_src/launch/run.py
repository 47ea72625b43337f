"""A run of `hxla run`, fixed or elastic: carries out the authority's decisions on hosts.

A fixed run is one generation of all its devices, without a successor. Its ranks are no members:
they get signals only, and the first failure ends the run.

`StateFolders` has the folders of members' states and copies, and of second copies on other hosts.
"""

import contextlib
import dataclasses
import json
import math
import secrets
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..core.errors import HxlaError, LaunchError
from .authority import advance, begin
from .channel import Report, Standing
from .ending import HOPELESS_SECONDS, RunEnding, Verdict, Wakeup, costs_generation_only
from .host import Carrying, GenerationRanks, Host, Hosts, KeptFolder, KnownDevices
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
    KeptState,
    Kill,
    Leave,
    Ledger,
    LeftState,
    MemberEvent,
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
    Vanished,
    copy_folder,
    newest,
)
from .output import Streams


class StateFolders:
    """The folders of states that are still needed, on their hosts."""

    def __init__(self, carry: Callable[[KeptFolder, KeptFolder], Carrying]) -> None:
        self._carry = carry
        self._folders: dict[KeptState, KeptFolder] = {}
        # The first copy, the second copy, its folder and its transfer.
        self._under_way: list[tuple[Copied, Copied, KeptFolder, Carrying]] = []

    @property
    def paths(self) -> Collection[str]:
        """The folders on all hosts, including those of transfers."""
        expected = {there.folder for _, _, there, _ in self._under_way}
        return {folder.folder for folder in self._folders.values()} | expected

    def wrote(
        self, event: Copied | LeftState, rank: int, hosts: Mapping[str, Host]
    ) -> Copied | LeftState:
        """Record a state that a process wrote; with several hosts another one gets a copy.

        Args:
            hosts: The hosts of its generation by device, in the order of ranks.

        Returns:
            The event with its host, and the number of hosts that should have the state.
        """
        host = hosts[event.device]
        first = {other.name: device for device, other in reversed(list(hosts.items()))}
        names = list(dict.fromkeys(other.name for other in hosts.values()))
        event = dataclasses.replace(event, host=host.name, spread=min(2, len(names)))
        here = _folder(event, rank, host)
        self._put(event.kept, here)
        if isinstance(event, Copied) and len(names) > 1:
            name = names[(names.index(host.name) + 1) % len(names)]
            copy = dataclasses.replace(event, device=first[name], host=name)
            there = _folder(copy, rank, hosts[first[name]])
            self._under_way.append((event, copy, there, self._carry(here, there)))
        return event

    def arrived(self, at_seconds: float) -> Iterable[Copied]:
        """Events of second copies whose transfer has ended, with the time `at_seconds`.

        After a failed transfer the first copy is yielded again with a spread of one, so that later
        copies do not wait.
        """
        for one in list(self._under_way):
            first, copy, there, carrying = one
            has_arrived = carrying.arrived()
            if has_arrived is None:
                continue
            self._under_way.remove(one)
            if has_arrived:
                self._put(copy.kept, there)
                yield dataclasses.replace(copy, at_seconds=at_seconds)
            elif first.kept in self._folders and not there.host.is_lost:
                yield dataclasses.replace(first, at_seconds=at_seconds, spread=1)

    def of(self, states: Iterable[KeptState]) -> list[KeptFolder]:
        """The folders of states."""
        return [self._folders[kept] for kept in states]

    def keep(self, needed: Collection[KeptState]) -> None:
        """Remove all states but `needed`."""
        for kept in [kept for kept in self._folders if kept not in needed]:
            old = self._folders.pop(kept)
            if not old.host.is_lost:
                old.host.forget(old.folder)

    def _put(self, kept: KeptState, new: KeptFolder) -> None:
        before = self._folders.get(kept)
        if before is not None and before != new:
            before.host.forget(before.folder)  # the state was copied before it was left
        self._folders[kept] = new


def _folder(event: Copied | LeftState, rank: int, host: Host) -> KeptFolder:
    left = host.state_folder(event.generation, rank)
    folder = copy_folder(left, event.step) if isinstance(event, Copied) else left
    return KeptFolder(host=host, folder=folder)


_FIXED_POLL_SECONDS, _ELASTIC_POLL_SECONDS = 0.05, 0.1
_REREAD_SECONDS = 0.5
_INTERRUPTED = "Ctrl-C: the running step is finished, then training ends; once more ends it at once"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class EventLog:
    """A file of events and decisions, with the seconds since the start.

    Args:
        path: Path of the file; None writes nothing.

    Raises:
        LaunchError: If the file cannot be written.
    """

    def __init__(self, path: str | None):
        self._began = time.monotonic()
        try:
            self._file = open(path, "w", buffering=1) if path is not None else None  # noqa: SIM115
        except OSError as error:
            raise LaunchError(f"--events {path}: {error.strerror}") from error

    def write(self, what: Any) -> None:
        """Write an event or a decision of the authority."""
        fields = dataclasses.asdict(what)
        fields.pop("at_seconds", None)
        self.add(type(what).__name__, **fields)

    def close(self, ledger: Ledger) -> None:
        """Write the committed steps of each generation, and close the file."""
        self.write(ledger)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def add(self, what: str, **fields: object) -> None:
        """Write another event by its name."""
        if self._file is None:
            return
        row = {"seconds": round(time.monotonic() - self._began, 4), "what": what, **fields}
        with contextlib.suppress(OSError):  # a full disk ends no job
            self._file.write(json.dumps(row, default=sorted) + "\n")


class Run:
    """A job from its start until `wait` returns.

    Args:
        grace_seconds: From SIGTERM to SIGKILL, and the notice of a SIGTERM to one member.
        events: The log of an elastic run; None for a fixed run.
    """

    def __init__(
        self,
        hosts: Hosts,
        streams: Streams,
        rules: MembershipRules,
        *,
        grace_seconds: float,
        events: EventLog | None,
    ):
        self._hosts, self._streams = hosts, streams
        self._is_elastic = events is not None
        self._events = EventLog(None) if events is None else events
        self._known: Membership = begin(rules)
        self._job = secrets.token_hex(8)
        self._most = rules.max_devices
        self._devices = KnownDevices("device" if self._is_elastic else "rank")
        self._generations: dict[int, GenerationRanks] = {}
        self._left = StateFolders(hosts.carry)
        self._ending = RunEnding(grace_seconds)
        self._signals: list[int] = []
        self._wake = Wakeup()
        self._is_output_lost = False
        self._read_at = 0.0
        self._passed_at = time.monotonic()
        self._step = 0

    def receive(self, number: int) -> None:
        """Note a signal and wake up the loop; any thread may call this."""
        self._signals.append(number)
        self._wake.set()

    def wait(self) -> int:
        """Run the job to its end; returns its exit code."""
        with _forwarding_signals(self):
            try:
                self._compare_devices()
                while not self._is_over:
                    self._poll()
            finally:
                for ranks in list(self._generations.values()):
                    self._close(ranks)
                self._hosts.close()
                self._events.close(self._known.ledger)
        self._watch_output()
        return self._conclude()

    def _poll(self) -> None:
        """Wait a moment, then handle all events since."""
        self._wake.wait(_ELASTIC_POLL_SECONDS if self._is_elastic else _FIXED_POLL_SECONDS)
        self._watch_output()
        while self._signals:
            self._serve_signal(self._signals.pop(0))
        is_due = self._is_elastic and time.monotonic() - self._read_at > _REREAD_SECONDS
        if (self._hosts.poll() or is_due) and not self._ending.is_near:
            self._compare_devices()
        for number in list(self._generations):
            if number in self._generations:  # otherwise another generation has ended it
                self._hear(self._generations[number])
        for copied in self._left.arrived(time.monotonic()):
            if copied.spread == 1:
                self._streams.say(f"no other host could take what {copied.device} has copied")
            self._happens(copied)
        self._pass_time()
        for ranks in self._generations.values():
            ranks.kill_late(self._ending)

    def _pass_time(self) -> None:
        """Pass the time to the authority; members were not silent while this process slept."""
        now, known = time.monotonic(), self._known
        if now - self._passed_at > known.rules.heartbeat_seconds / 2:
            self._refresh_heartbeats(known.generation.number, sorted(known.alive))
        self._passed_at = now
        self._happens(Passed())

    def _refresh_heartbeats(self, generation: int, devices: Iterable[str]) -> None:
        """Count members as heard from, as they had no reason to send messages."""
        for device in devices:
            self._happens(MemberEvent(generation=generation, device=device))

    # -- events ------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        if self._known.phase == "failed":
            return True
        is_last = not self._is_elastic or self._known.phase == "finished"
        return (is_last or self._ending.is_near) and not self._generations

    def _happens(self, *events: Happened) -> None:
        """Let the authority decide on simultaneous events, and act."""
        if self._ending.is_near:
            return
        for event in events:
            if type(event) not in (MemberEvent, Passed):
                self._events.write(event)
        self._known, todo = advance(self._known, *events)
        for what in todo:
            self._events.write(what)
            self._do(what)
        self._left.keep({*self._known.kept, *self._known.sources})

    def _compare_devices(self) -> None:
        """Compare offered devices with known ones, and report changes."""
        self._read_at = time.monotonic()
        try:
            changes = self._devices.compare(self._hosts.offered())
        except HxlaError as error:
            if not self._is_elastic:
                raise
            self._streams.say(f"devices stay as they are: {error}")
            return
        places = self._devices.places
        for name in changes.met:
            place = places[name]
            label, host = place.device.label, place.host.name
            self._events.add("Placed", device=name, label=label, host=host)
        for name in changes.lost:
            if places.pop(name, None) is not None:  # otherwise it is released already
                self._streams.say(f"{name} is gone with its host")
                self._happens(Vanished(device=name))
        offered = [Offered(device=name) for name in changes.usable]
        asked = [
            AskedBack(device=d, notice_seconds=places[d].host.notice_seconds)
            for d in changes.missing
            if d in places
        ]
        self._devices.ask_back([event.device for event in asked])
        # Together, as a new device may replace one that leaves.
        self._happens(*offered, *asked)

    def _hear(self, ranks: GenerationRanks) -> None:
        """Handle the messages of a generation's ranks, and then their ends."""
        standings = ranks.hear()
        for standing in standings:
            if standing.rank in ranks.ended:
                continue
            device = ranks.generation.members[standing.rank]
            self._hear_one(ranks, device, standing)
            if standing.code is not None:
                ranks.ended.add(standing.rank)
                if self._ending.asked is not None or not self._is_elastic:
                    self._ending.codes.add(standing.code)
                self._ended(ranks, device, standing)
        if not self._is_elastic:
            ranks.judge(self._ending, time.monotonic())
        if len(ranks.ended) == len(standings):
            self._close(ranks)

    def _hear_one(self, ranks: GenerationRanks, device: str, standing: Standing) -> None:
        before, now = ranks.reports[standing.rank], standing.report
        # Ranks of a fixed run send no report, only the step at hand.
        self._step = max(self._step, now.step if self._is_elastic else standing.status.step + 1)
        if now == before:
            return
        ranks.reports[standing.rank] = now
        of: dict[str, Any] = {"generation": ranks.generation.number, "device": device}
        if now.num_microbatches and now.num_microbatches != before.num_microbatches:
            self._limit_devices(now.num_microbatches)
        self._happens(MemberEvent(**of))
        if now.is_prepared and not before.is_prepared:
            self._happens(Prepared(**of))
        if now.saved_step > before.saved_step:
            self._happens(Saved(step=now.saved_step))
        part = of | {"part": now.part, "num_parts": now.num_parts}
        for step in sorted(now.copies.keys() - before.copies.keys(), key=int):
            self._record_state(Copied(**part, step=int(step), digest=now.copies[step]), ranks)
        if now.is_joined and not before.is_joined:
            self._happens(Joined(**of))
        if now.step > before.step:
            num, executors, seconds = now.ran
            of |= {"num_microbatches": int(num), "num_executors": int(executors)}
            self._happens(Completed(**of, step=now.step, busy_seconds=seconds))
        if now.left_step > before.left_step:
            self._record_state(LeftState(**part, step=now.left_step, digest=now.digest), ranks)
        if now.note and not before.note:
            self._streams.say(f"{device} could not leave its state: {now.note}")
        if now.asked_back and not before.asked_back:
            notice_seconds = self._ending.grace_seconds
            self._happens(AskedBack(device=device, notice_seconds=notice_seconds))
        if now.is_finished and not before.is_finished:
            self._finish(now)

    def _record_state(self, event: Copied | LeftState, ranks: GenerationRanks) -> None:
        members, places = ranks.generation.members, self._devices.places
        hosts = {device: places[device].host for device in members if device in places}
        if event.device in hosts:  # otherwise the device is gone with its states
            self._happens(self._left.wrote(event, members.index(event.device), hosts))

    def _limit_devices(self, num_microbatches: int) -> None:
        """Limit the number of devices to that of microbatches."""
        most = min(self._most, num_microbatches)
        rules = dataclasses.replace(
            self._known.rules, max_devices=most, num_microbatches=num_microbatches
        )
        ledger = dataclasses.replace(self._known.ledger, num_microbatches=num_microbatches)
        self._known = dataclasses.replace(self._known, rules=rules, ledger=ledger)

    def _finish(self, report: Report) -> None:
        rules = dataclasses.replace(self._known.rules, num_steps=report.step)
        self._known = dataclasses.replace(self._known, rules=rules)
        self._happens(Saved(step=report.step))

    def _ended(self, ranks: GenerationRanks, device: str, standing: Standing) -> None:
        """End the run for an error of the script, otherwise only the rank's generation."""
        status, report, code = standing.status, standing.report, standing.code or 0
        if not self._is_elastic or self._ending.is_near or self._known.phase == "finished":
            return
        if not code and not report.is_prepared:  # a script that trains nothing
            self._finish(report)
            return
        number = ranks.generation.number
        if costs_generation_only(status, code):
            self._happens(Exited(generation=number, device=device))
            return
        words = status.note or f"ended with exit code {code}"
        is_current = number == self._known.generation.number
        if is_current and not ranks.has_joined and self._known.ledger.end:
            last = ranks.generation.members[-1]
            if self._known.phase == "forming":  # a plan for fewer devices may exist
                self._streams.say(
                    f"generation {number} cannot begin: {words}; it is tried without {last}"
                )
                self._happens(AskedBack(device=last, notice_seconds=0.0))
            self._happens(Exited(generation=number, device=device))
            return
        if is_current:
            verdict = Verdict(rank=standing.rank, reason=f"failed: {words}", code=code or 1)
            ranks.fail(self._ending, verdict, HOPELESS_SECONDS)
            return
        self._streams.say(f"generation {number} cannot be prepared: {words}")
        for new in ranks.generation.members:
            if new not in self._known.generation.members:
                self._happens(Exited(generation=number, device=new))
        self._happens(Exited(generation=number, device=device))

    # -- decisions ---------------------------------------------------------------------------

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
                if generation.number in self._generations:
                    numbers = {generation.members.index(device) for device in devices}
                    self._generations[generation.number].kill(ranks=numbers)
            case Form(generation=generation, sources=sources):
                self._form(generation, sources)
            case Save(step=step):
                self._streams.say(
                    f"fewer devices than --min: the state of step {step} waits in memory"
                )
            case Release(device=device):
                unused = self._devices.release(device)
                self._streams.say(f"{device} is released")
                if unused is not None:
                    self._hosts.let_go(unused)
            case Tell(words=words):
                self._streams.say(words)

    def _prepare(self, generation: Generation) -> None:
        try:
            self._start(generation)
        except HxlaError as error:
            self._streams.say(f"generation {generation.number} cannot be started: {error}")
            now = self._known.generation.members
            for device in [d for d in generation.members if d not in now]:
                self._happens(Exited(generation=generation.number, device=device))

    def _start(self, generation: Generation) -> GenerationRanks:
        ranks = GenerationRanks(
            generation,
            self._devices,
            self._streams,
            address=self._hosts.address,
            job=self._job,
            are_members=self._is_elastic,
        )
        self._generations[generation.number] = ranks
        where = dict(zip(generation.members, ranks.hosts, strict=True))
        number = generation.number
        self._events.add("Started", generation=number, pids=ranks.pids, hosts=where)
        return ranks

    def _form(self, generation: Generation, sources: Sequence[KeptState]) -> None:
        ranks = self._generations.get(generation.number) or self._start(generation)
        self._step = generation.first_step  # later steps may be lost
        if self._is_elastic:
            step = f"step {generation.first_step}" if generation.first_step else "the beginning"
            keepers = ", ".join(one.device for one in sources)
            where = f", state left by {keepers}" if sources else ""
            members = ", ".join(generation.members)
            self._streams.say(f"generation {generation.number} from {step}{where}: {members}")
        ranks.begin(self._left.of(sources))
        self._refresh_heartbeats(generation.number, generation.members)

    def _order(self, generation: Generation, *, stops: bool = False, leaves: bool = False) -> None:
        ranks = self._generations.get(generation.number)
        if ranks is not None:
            if leaves:
                ranks.quieten()
            ranks.order(stops=stops, leaves=leaves)

    def _discard(self, number: int) -> None:
        ranks = self._generations.get(number)
        if ranks is not None:
            ranks.quieten()
            self._close(ranks)

    def _close(self, ranks: GenerationRanks) -> None:
        if self._generations.pop(ranks.generation.number, None) is None:
            return
        if not self._is_elastic:
            ranks.kill()
            ranks.judge(self._ending, math.inf)  # before delayed lines are shown
        ranks.close(shows_delayed=self._ending.asked is None, kept=self._left.paths)

    # -- the end -----------------------------------------------------------------------------

    def _serve_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:
            (self._compare_devices if self._is_elastic else self._change_shares)()
            return
        self._ending.ask(number, time.monotonic())
        trains = self._known.phase in ("running", "preparing", "handing over")
        for ranks in list(self._generations.values()):
            if ranks.generation.number != self._known.generation.number:
                self._discard(ranks.generation.number)
            elif self._ending.num_interrupts > 1:
                ranks.kill()
            elif self._is_elastic and (trains or number != signal.SIGINT):
                if number == signal.SIGINT:
                    self._streams.say(_INTERRUPTED)
                ranks.order(ends=True)
            else:
                if number == signal.SIGINT:  # every rank would report the interrupt
                    ranks.quieten()
                    ranks.hear()  # the last poll may be older than the first step
                    if ranks.trains:
                        self._streams.say(_INTERRUPTED)
                ranks.kill(number)

    def _watch_output(self) -> None:
        """End the run like SIGTERM if standard output is closed, as by `head`.

        Other failures of the output are only reported.
        """
        lost = self._streams.out.lost
        if lost is None or self._is_output_lost:
            return
        self._is_output_lost = True
        if isinstance(lost, BrokenPipeError):
            self._ending.is_unread = True
            self._signals.append(signal.SIGTERM)
        else:
            self._streams.say(f"the output is lost from here on: {lost}")

    def _change_shares(self) -> None:
        try:
            shares = [place.device.core_share for place in self._hosts.offered()]
            if not any(shares):
                return
            for ranks in self._generations.values():
                ranks.change_shares(shares)
        except (HxlaError, OSError) as error:
            self._streams.say(f"shares stay as they are: {error}")
            return
        self._streams.say(f"core shares are now {shares}")

    def _conclude(self) -> int:
        """Report how the job ended; returns the exit code."""
        logs = self._streams.logs
        rest = f"the rest of the output is in {logs.folder}" if logs.has_lines else ""
        code, lines = _conclusion(
            self._known, self._ending, self._step, rest, is_elastic=self._is_elastic
        )
        for line in lines:
            self._streams.say(line)
        return code


def _conclusion(
    known: Membership, ending: RunEnding, step: int, rest: str, *, is_elastic: bool
) -> tuple[int, list[str]]:
    """The exit code of a run that has ended, and lines for the user.

    Args:
        step: The last step that a rank of a fixed run was seen in.
        rest: Where the output is that is not shown; empty: it is all shown.
    """
    ledger, best, lines, code = known.ledger, newest(known.kept), list[str](), 0
    trains = known.phase in ("running", "preparing", "handing over", "finished")
    if best and best[0].step > known.saved_step and not trains:
        lines.append(
            f"the state of step {best[0].step} was in memory only and is gone: give "
            "hxla.train a checkpoint_dir"
        )
    if ending.verdict is not None:
        code = ending.verdict.code
        if not is_elastic and len(known.generation.members) == 1:
            words = f"{known.generation.members[0]} {ending.verdict.reason}"
            rest = f"{words}; {rest}" if rest else words
    elif ended := ending.outcome(max(step, ledger.end), known.saved_step):
        code, words = ended
        lines.append(words)
    elif is_elastic:
        lost = f", {ledger.num_lost} lost and run again" if ledger.num_lost else ""
        num = len(ledger.runs)
        lines.append(f"{ledger.end} steps by {num} generation{'s' * (num != 1)}{lost}")
        code = int(known.phase == "failed")
    return code, [*lines, rest] if rest else lines


@contextlib.contextmanager
def _forwarding_signals(run: Run) -> Iterator[None]:
    """Forward signals to a run, in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, lambda number, _: run.receive(number)) for n in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
