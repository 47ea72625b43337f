"""The values of membership: generations, the knowledge about a run, events and actions.

A member is a device with its process. A generation is replaced as a whole, and its number grows: a
message with an older number is about processes that are no longer members.

`KeptState` is a state in the memory of hosts, whole or in parts, which members left or copied.
"""

import dataclasses
import glob
import time
from collections.abc import Collection, Iterable
from typing import Literal, TypeGuard


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptState:
    """A state, or a part of one, in the memory of a host.

    Attributes:
        device: A device of the host: the member that wrote it, or a neighbour with a copy.
        digest: The SHA-256 of the part.
        spread: The number of hosts that need each part before older states are removed.
    """

    device: str
    step: int
    digest: str
    generation: int = 0
    part: int = 0
    num_parts: int = 1
    host: str = ""
    spread: int = dataclasses.field(default=1, compare=False)  # no part of the identity

    @property
    def state(self) -> tuple[int, int]:
        """Identity of the whole state; each generation divides it into other parts."""
        return self.step, self.generation


_Parts = dict[int, list[KeptState]]  # parts of a state, by number


def newest(
    kept: Iterable[KeptState], leaving: Collection[str] = frozenset()
) -> tuple[KeptState, ...]:
    """One of each part of the newest complete state; empty without one.

    Args:
        leaving: Devices to avoid if another has the same part.
    """
    for _, parts in sorted(_by_state(kept).items(), reverse=True):
        if _is_complete(parts):
            return tuple(
                min(parts[part], key=lambda one: one.device in leaving) for part in sorted(parts)
            )
    return ()


def differing(kept: Iterable[KeptState]) -> frozenset[tuple[int, int]]:
    """The states of which two devices have different bits of a part."""
    return frozenset(
        state
        for state, parts in _by_state(kept).items()
        if any(len({one.digest for one in ones}) > 1 for ones in parts.values())
    )


def added(kept: tuple[KeptState, ...], new: KeptState) -> tuple[KeptState, ...]:
    """Add a state, in place of the same part of the same device."""
    which = new.device, new.state, new.part
    return (*(one for one in kept if (one.device, one.state, one.part) != which), new)


def pruned(kept: tuple[KeptState, ...]) -> tuple[KeptState, ...]:
    """Drop states older than the newest one of which enough hosts have each part."""
    safe = max((s for s, parts in _by_state(kept).items() if _is_safe(parts)), default=(0, 0))
    return tuple(one for one in kept if one.state >= safe)


def whole(kept: tuple[KeptState, ...]) -> tuple[KeptState, ...]:
    """Drop incomplete states."""
    states = {state for state, parts in _by_state(kept).items() if _is_complete(parts)}
    return tuple(one for one in kept if one.state in states)


def _is_safe(parts: _Parts) -> bool:
    return _is_complete(parts) and all(
        len({one.host for one in ones}) >= max(one.spread for one in ones)
        and len({one.digest for one in ones}) == 1
        for ones in parts.values()
    )


def _is_complete(parts: _Parts) -> bool:
    return all(len(parts) == one.num_parts for ones in parts.values() for one in ones)


def _by_state(kept: Iterable[KeptState]) -> dict[tuple[int, int], _Parts]:
    states: dict[tuple[int, int], _Parts] = {}
    for one in kept:
        states.setdefault(one.state, {}).setdefault(one.part, []).append(one)
    return states


def left_folder(memory: str, generation: int, rank: int) -> str:
    """The folder for a process's last state."""
    return f"{memory}/{generation}-{rank}"


def copy_folder(left: str, step: int) -> str:
    """The folder for a copy of the state after a step."""
    return f"{left}-{step}"


def folders_of(memory: str, generation: int) -> list[str]:
    """All folders that processes of a generation wrote, complete or not."""
    return glob.glob(f"{glob.escape(memory)}/{generation}-*")


#: The phase of a run. In `running` and `preparing` it trains; in `collecting` survivors leave their
#: states after an unplanned event; `failed` and `finished` are its ends.
RunPhase = Literal[
    "running",
    "preparing",
    "handing over",
    "collecting",
    "forming",
    "waiting",
    "failed",
    "finished",
]
ENDED: tuple[RunPhase, ...] = ("failed", "finished")  #: Final phases.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The members that train together.

    Attributes:
        number: Larger for later generations.
        members: The devices, in the order of their ranks.
        port: The port of its coordinator, not that of the generation before.
        first_step: The number of steps done when it starts.
    """

    number: int
    members: tuple[str, ...]
    port: int
    first_step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MembershipRules:
    """The rules of a run.

    Attributes:
        num_steps: Steps of the whole run.
        heartbeat_seconds: Longest silence of a member.
        prepare_seconds: Limit for new processes to become ready beside the old ones.
        hand_over_seconds: Limit for members to stop and leave their states.
        collect_seconds: Limit for survivors to leave their states, and for killed processes to end.
        form_seconds: Limit for a new generation to join.
        most_failures: The most generations in a row that may end without a step.
        ports: The ports for coordinators, used in turns; at least two.
    """

    min_devices: int
    max_devices: int
    num_steps: int
    num_microbatches: int
    heartbeat_seconds: float = 5.0
    prepare_seconds: float = 60.0
    hand_over_seconds: float = 5.0
    collect_seconds: float = 3.0
    form_seconds: float = 60.0
    most_failures: int = 3
    ports: tuple[int, ...] = (5300, 5301, 5302, 5303)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommittedRun:
    """Consecutive steps that one generation committed.

    Attributes:
        end: The step after the last.
    """

    generation: int
    first: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
    """The committed steps: every microbatch of every step before `end`, once each.

    A step is one exact sum over all its microbatches, so they are committed together. Steps whose
    state is lost are taken back and counted.

    Attributes:
        runs: Committed steps by generation, without gaps.
        num_lost: Steps that were taken back.
    """

    num_microbatches: int
    runs: tuple[CommittedRun, ...] = ()
    num_lost: int = 0

    @property
    def end(self) -> int:
        """The number of committed steps."""
        return self.runs[-1].end if self.runs else 0

    def committed(self, generation: int, end: int) -> "Ledger":
        """Commit all steps before `end` that are not yet committed."""
        if end <= self.end:
            return self
        last = self.runs[-1] if self.runs else None
        if last is not None and last.generation == generation:
            runs = (*self.runs[:-1], dataclasses.replace(last, end=end))
        else:
            run = CommittedRun(generation=generation, first=self.end, end=end)
            runs = (*self.runs, run)
        return dataclasses.replace(self, runs=runs)

    def back_to(self, end: int) -> "Ledger":
        """Take back the steps from `end` on."""
        if end >= self.end:
            return self
        kept = (r for r in self.runs if r.first < end)
        runs = tuple(dataclasses.replace(r, end=min(r.end, end)) for r in kept)
        return dataclasses.replace(self, runs=runs, num_lost=self.num_lost + self.end - end)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
    """The knowledge of the authority.

    Attributes:
        generation: The generation that trains or is formed; otherwise the last one.
        coming: The generation that is prepared beside it.
        devices: The devices that may be used, in the order of their offers.
        leaving: Devices that were asked back, each with its deadline.
        alive: The members of `generation` whose process has not ended.
        ready: The members that are prepared, or have joined.
        heard: Members and the times of their last messages.
        kept: The states that members left or copied.
        left: The members of `generation` that left their last state.
        sources: All parts of the state from which a generation is formed.
        saved_step: The step of the newest checkpoint.
        until_seconds: Deadline of the phase.
        is_killing: Whether the members that are alive were killed.
        num_generations: Numbers in use so far.
        num_failures: Generations in a row that ended without a step.
    """

    rules: MembershipRules
    phase: RunPhase
    generation: Generation
    ledger: Ledger
    coming: Generation | None = None
    devices: tuple[str, ...] = ()
    leaving: tuple[tuple[str, float], ...] = ()
    alive: frozenset[str] = frozenset()
    ready: frozenset[str] = frozenset()
    heard: tuple[tuple[str, float], ...] = ()
    kept: tuple[KeptState, ...] = ()
    left: frozenset[str] = frozenset()
    sources: tuple[KeptState, ...] = ()
    saved_step: int = 0
    until_seconds: float = float("inf")
    is_killing: bool = False
    num_generations: int = 0
    num_failures: int = 0

    @property
    def have_left(self) -> bool:
        """Whether all members that are alive have left their last state."""
        return self.alive <= self.left

    @property
    def needed(self) -> tuple[KeptState, ...]:
        """All parts of the newest kept state, preferably on devices that stay; empty if saved."""
        leaving = {device for device, _ in self.leaving}
        best = newest(self.kept, leaving)
        if not best or best[0].step < self.saved_step:
            return ()
        leaves = any(one.device in leaving for one in best)
        return () if leaves and best[0].step == self.saved_step else best

    def with_shorter_wait(self, at_seconds: float) -> "Membership":
        """Shorten the deadline of a hand-over once one member has ended and the rest left states.

        A member may wait for a killed one, which no other process notices.
        """
        has_ended = self.alive < set(self.generation.members)
        if self.phase != "handing over" or not has_ended or not self.have_left:
            return self
        until = min(self.until_seconds, at_seconds + self.rules.collect_seconds)
        return dataclasses.replace(self, until_seconds=until)

    @property
    def is_over(self) -> bool:
        """Whether the run is in a final phase."""
        return self.phase in ENDED

    def can_note(self, event: "Happened") -> TypeGuard["Offered | AskedBack"]:
        """Whether an event needs no decision before the next one."""
        is_known = isinstance(event, AskedBack) and event.device in self.devices
        return not self.is_over and (is_known or isinstance(event, Offered))

    def noted(self, event: "Offered | AskedBack") -> "Membership":
        """Note an offered or asked-back device, without a decision."""
        leaving = tuple(pair for pair in self.leaving if pair[0] != event.device)
        if isinstance(event, AskedBack):
            until = event.at_seconds + event.notice_seconds
            return dataclasses.replace(self, leaving=(*leaving, (event.device, until)))
        new = () if event.device in self.devices else (event.device,)
        return dataclasses.replace(self, devices=(*self.devices, *new), leaving=leaving)

    def without(self, device: str) -> "Membership":
        """Remove a device and its kept states."""
        return dataclasses.replace(
            self,
            devices=tuple(d for d in self.devices if d != device),
            leaving=tuple(pair for pair in self.leaving if pair[0] != device),
            kept=tuple(one for one in self.kept if one.device != device),
        )

    def silent(self, at_seconds: float) -> tuple[str, ...]:
        """Members without a message for too long."""
        longest = self.rules.heartbeat_seconds
        return tuple(
            device
            for device, last in self.heard
            if device in self.alive and at_seconds - last > longest
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Happened:
    """An event, by default at the present time."""

    at_seconds: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offered(Happened):
    """A device may be used."""

    device: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedBack(Happened):
    """A device will be taken away, by a scheduler or by a SIGTERM with notice."""

    device: str
    notice_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vanished(Happened):
    """A device is gone, with its process and kept states."""

    device: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemberEvent(Happened):
    """A message of a member; by itself a heartbeat.

    Messages of a process arrive in their order, its end last.
    """

    generation: int
    device: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared(MemberEvent):
    """The process is ready: imported and compiled, but not joined."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joined(MemberEvent):
    """The process has joined, and has the state of the generation's first step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completed(MemberEvent):
    """The process has the state after `step` steps.

    Attributes:
        num_microbatches: Microbatches of its device in the last step; 0 if not known.
    """

    step: int
    num_microbatches: int = 0
    num_executors: int = 1
    busy_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrote(MemberEvent):
    """A member's state, or its part, is in a host's memory.

    Attributes:
        digest: The SHA-256 of the written bytes.
        num_parts: Number of parts of a whole state.
        spread: The number of hosts that need each part before older states are removed.
    """

    step: int
    digest: str
    part: int = 0
    num_parts: int = 1
    host: str = ""
    spread: int = 1

    @property
    def kept(self) -> KeptState:
        """The state in memory."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(KeptState)}
        return KeptState(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftState(Wrote):
    """The process left its state, and ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copied(Wrote):
    """The process copied its state, or its host got a copy of a neighbour's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exited(MemberEvent):
    """The process ended."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved(Happened):
    """A checkpoint of a step is complete."""

    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passed(Happened):
    """Time passed without another event."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepare:
    """Start processes for a generation, beside the one that trains."""

    generation: Generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Discard:
    """End the processes that were prepared for a generation."""

    generation: Generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """Let members fix a last step together, leave their states and end."""

    generation: Generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leave:
    """Let members leave their last complete state at once and end."""

    generation: Generation
    devices: frozenset[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """Kill members."""

    generation: Generation
    devices: frozenset[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """Let a generation join and train; start its processes if they are not prepared.

    If prepared processes end, no others are started under the same number.

    Attributes:
        sources: All parts of its first state; empty for the checkpoint of its first step.
    """

    generation: Generation
    sources: tuple[KeptState, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Save:
    """Report that a state without a checkpoint waits in memory for devices."""

    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """Give back a device that was asked back."""

    device: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tell:
    """Show words to the user."""

    words: str


ToDo = Prepare | Discard | Stop | Leave | Kill | Form | Save | Release | Tell
