"""The authority over membership: a pure function of the present knowledge and events.

It runs outside the members and survives them. The next generation begins in one of two ways. A
planned one is prepared while this one trains, which then stops at a step that all its members fix
together. After an unplanned event each survivor leaves its last complete state. Either way a
generation is formed only when every member of the one before has ended, and it starts from the
newest complete state.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

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
    added,
    differing,
    newest,
    pruned,
    whole,
)

_Done = tuple[Membership, tuple[ToDo, ...]]
_TRAINS = ("running", "preparing")


def begin(rules: MembershipRules, saved_step: int = 0) -> Membership:
    """The membership before the first device is offered.

    Args:
        saved_step: The step of the checkpoint from which the run resumes.
    """
    empty = Generation(number=0, members=(), port=rules.ports[0], first_step=saved_step)
    ledger = Ledger(num_microbatches=rules.num_microbatches).committed(0, saved_step)
    return Membership(
        rules=rules, phase="waiting", generation=empty, ledger=ledger, saved_step=saved_step
    )


def advance(known: Membership, *events: Happened) -> _Done:
    """The membership after events, and the actions to take.

    Args:
        events: Simultaneous events; those of an older generation change nothing.

    Returns:
        The new membership, and the actions in their order.
    """
    todo: tuple[ToDo, ...] = ()
    for k, event in enumerate(events):
        if k + 1 < len(events) and known.can_note(event):
            known = known.noted(event)
        elif not known.is_over:
            known, actions = _HANDLERS[type(event)](known, event)
            todo += actions
        elif isinstance(event, AskedBack):
            todo += (Release(device=event.device),)
    return known, todo


def chosen(known: Membership) -> tuple[str, ...]:
    """The devices that should be members: present ones, then offered ones, up to maxP."""
    gone = {device for device, _ in known.leaving}
    stay = [d for d in known.generation.members if d in known.devices and d not in gone]
    more = [d for d in known.devices if d not in gone and d not in stay]
    return tuple((stay + more)[: known.rules.max_devices])


def _then(done: _Done, step: Callable[[Membership], _Done]) -> _Done:
    known, before = done
    known, after = step(known)
    return known, before + after


def _offered(known: Membership, event: Offered) -> _Done:
    return _reconsidered(known.noted(event), event.at_seconds)


def _asked_back(known: Membership, event: AskedBack) -> _Done:
    if event.device not in known.devices:
        done = known, (Release(device=event.device),)
        return _then(done, lambda k: _reconsidered(k, event.at_seconds))
    return _then(_reconsidered(known.noted(event), event.at_seconds), _released)


def _vanished(known: Membership, event: Vanished) -> _Done:
    at = event.at_seconds
    known, number = known.without(event.device), known.generation.number
    if event.device in known.alive:
        return _exited(known, Exited(at_seconds=at, generation=number, device=event.device))
    if event.device in {one.device for one in known.sources}:
        words = f"{event.device} is gone, from whose state generation {number} starts"
        return _then((known, (Tell(words=words),)), lambda k: _collecting(k, at))
    return _reconsidered(known, at)


def _heard(known: Membership, event: MemberEvent) -> _Done:
    if event.device in known.alive and event.generation == known.generation.number:
        others = tuple(pair for pair in known.heard if pair[0] != event.device)
        known = dataclasses.replace(known, heard=(*others, (event.device, event.at_seconds)))
    return known, ()


def _prepared(known: Membership, event: Prepared) -> _Done:
    if known.phase != "preparing" or known.coming is None:
        return known, ()
    if event.generation != known.coming.number:
        return known, ()
    known = dataclasses.replace(known, ready=known.ready | {event.device})
    return _if_prepared(known, event.at_seconds)


def _if_prepared(known: Membership, at: float) -> _Done:
    if known.coming is None or not known.ready >= set(known.coming.members):
        return known, ()
    return _stopped(known, at)


def _stopped(known: Membership, at: float) -> _Done:
    """Stop the generation at its next step."""
    until = at + known.rules.hand_over_seconds
    known = dataclasses.replace(known, phase="handing over", until_seconds=until)
    return known, (Stop(generation=known.generation),)


def _joined(known: Membership, event: Joined) -> _Done:
    if known.phase != "forming" or event.generation != known.generation.number:
        return known, ()
    known = dataclasses.replace(known, ready=known.ready | ({event.device} & known.alive))
    if known.ready != known.alive:
        return known, ()
    known = dataclasses.replace(
        known,
        phase="running",
        ready=frozenset(),
        sources=(),
        until_seconds=math.inf,
        heard=tuple((device, event.at_seconds) for device in known.generation.members),
    )
    return _then(_released(known), lambda k: _reconsidered(k, event.at_seconds))


def _is_of_member(known: Membership, event: MemberEvent) -> bool:
    generation = known.generation
    return event.generation == generation.number and event.device in generation.members


def _completed(known: Membership, event: Completed) -> _Done:
    if not _is_of_member(known, event):
        return known, ()
    known, _ = _heard(known, event)
    ledger = known.ledger.committed(event.generation, event.step)
    if ledger.end == known.ledger.end:
        return known, ()
    kept, number = known.kept, event.generation
    if not any(one.generation == number for one in kept):
        # Members have newer states than the kept ones, and this generation makes no copies.
        kept = tuple(one for one in kept if one.step >= event.step)
    known = dataclasses.replace(known, ledger=ledger, num_failures=0, kept=kept)
    return _released(known)


def _left_state(known: Membership, event: LeftState) -> _Done:
    if not _is_of_member(known, event):
        return known, ()
    known, todo = _completed(
        known,
        Completed(
            at_seconds=event.at_seconds,
            generation=event.generation,
            device=event.device,
            step=event.step,
        ),
    )
    if event.device in known.devices:
        kept, left = added(known.kept, event.kept), known.left | {event.device}
        known = dataclasses.replace(known, kept=kept, left=left)
    return known.with_shorter_wait(event.at_seconds), todo


def _copied(known: Membership, event: Copied) -> _Done:
    if not _is_of_member(known, event) or event.device not in known.devices:
        return known, ()
    known, _ = _heard(known, event)
    kept = pruned(added(known.kept, event.kept))
    return _released(dataclasses.replace(known, kept=kept))


def _exited(known: Membership, event: Exited) -> _Done:
    at = event.at_seconds
    if known.coming is not None and event.generation == known.coming.number:
        return _lost_while_preparing(known, event)
    if event.generation != known.generation.number or event.device not in known.alive:
        return known, ()
    known = dataclasses.replace(known, alive=known.alive - {event.device})
    expected = known.phase == "handing over" and event.device in known.left
    if known.phase == "collecting" or expected:
        step = _without_the_silent if known.alive else _formed
        return step(known.with_shorter_wait(at), at)
    words = f"{event.device} ended in phase {known.phase}: the others leave their state"
    return _then((known, (Tell(words=words),)), lambda k: _collecting(k, at))


def _lost_while_preparing(known: Membership, event: Exited) -> _Done:
    """Handle a lost prepared process: a member is started again later, a new device is dropped."""
    assert known.coming is not None
    if event.device in known.generation.members:
        # A new number, as messages with this one may still arrive.
        discard = Discard(generation=known.coming)
        known = dataclasses.replace(known, coming=None, ready=frozenset())
        result: _Done = known, (discard,)
        is_training = known.phase == "preparing"
        return _then(result, lambda k: _stopped(k, event.at_seconds)) if is_training else result
    words = f"{event.device} could not be prepared and is not used"
    known = _given_up(known, [event.device], event.at_seconds)
    done = _then((known, (Tell(words=words),)), lambda k: _reconsidered(k, event.at_seconds))
    return _then(done, _released)


def _collecting(known: Membership, at: float) -> _Done:
    """After an unplanned event, let survivors leave their states."""
    done: tuple[ToDo, ...] = ()
    if known.coming is not None:
        done = (Discard(generation=known.coming),)
    known = dataclasses.replace(
        known,
        phase="collecting",
        coming=None,
        sources=(),
        is_killing=False,
        num_failures=known.num_failures + 1,
        until_seconds=at + known.rules.collect_seconds,
    )
    if not known.alive:
        return _then((known, done), lambda k: _formed(k, at))
    return known, (*done, Leave(generation=known.generation, devices=known.alive))


def _saved(known: Membership, event: Saved) -> _Done:
    ledger = known.ledger.committed(known.generation.number, event.step)
    saved = max(known.saved_step, event.step)
    known = dataclasses.replace(known, ledger=ledger, saved_step=saved)
    if known.saved_step < known.rules.num_steps:
        return _released(known)
    done = (Discard(generation=known.coming),) if known.coming is not None else ()
    known = dataclasses.replace(known, phase="finished", coming=None, until_seconds=math.inf)
    return known, (*done, *(Release(device=device) for device, _ in known.leaving))


def _passed(known: Membership, event: Passed) -> _Done:
    at = event.at_seconds
    silent = known.silent(at)
    if silent and known.phase in (*_TRAINS, "forming"):
        words = f"nothing heard of {', '.join(silent)} for {known.rules.heartbeat_seconds:g} s"
        return _then((known, (Tell(words=words),)), lambda k: _collecting(k, at))
    if at < known.until_seconds:
        return known, ()
    return _LATE[known.phase](known, at)


def _late_preparing(known: Membership, at: float) -> _Done:
    """Go on with the ready devices: late members are started again, late new devices dropped."""
    assert known.coming is not None
    late = [d for d in known.coming.members if d not in known.ready | set(known.generation.members)]
    if not late or len(set(chosen(known)) - set(late)) < known.rules.min_devices:
        return _stopped(known, at)  # too few devices without the late ones
    words = f"{', '.join(late)} took longer than asked for and is not used"
    known = _given_up(known, late, at)
    done = _then((known, (Tell(words=words),)), lambda k: _reconsidered(k, at))
    return _then(done, _released)


def _without_the_silent(known: Membership, at: float) -> _Done:
    """Do not wait for silent members, if all others have ended and no step is lost."""
    best = newest(known.kept)
    waits = known.phase == "collecting" and not known.is_killing
    if not waits or known.alive != set(known.silent(at)):
        return known, ()
    if not best or best[0].step < known.ledger.end:
        return known, ()
    return _late_collecting(known, at)


def _late_collecting(known: Membership, at: float) -> _Done:
    if not known.is_killing:
        until = at + known.rules.collect_seconds
        known = dataclasses.replace(known, is_killing=True, until_seconds=until)
        return known, (Kill(generation=known.generation, devices=known.alive),)
    # A member that cannot be killed is unreachable, and its messages have an old number.
    words = f"{', '.join(sorted(known.alive))} cannot be reached and is not used"
    for device in sorted(known.alive):
        known = known.without(device)
    known = dataclasses.replace(known, alive=frozenset())
    return _then((known, (Tell(words=words),)), lambda k: _formed(k, at))


def _late_handing_over(known: Membership, at: float) -> _Done:
    """Kill members that have left their states but not ended; otherwise collect states."""
    return (_late_collecting if known.have_left and not known.is_killing else _collecting)(
        known, at
    )


def _late_forming(known: Membership, at: float) -> _Done:
    late = sorted(known.alive - known.ready)
    words = f"{', '.join(late)} did not join within {known.rules.form_seconds:g} s and is not used"
    known = _given_up(known, late, at)
    return _then((known, (Tell(words=words),)), lambda k: _collecting(k, at))


def _late_never(known: Membership, _at: float) -> _Done:
    return known, ()


def _reconsidered(known: Membership, at: float) -> _Done:
    """Prepare another generation if members should change."""
    if known.phase == "waiting":
        return _formed(known, at)
    if known.phase not in _TRAINS:
        return known, ()  # decided when the next generation is formed
    members = chosen(known)
    now, coming = known.generation, known.coming
    if coming is not None and members == coming.members:
        return known, ()
    done: tuple[ToDo, ...] = ()
    if coming is not None:
        done = (Discard(generation=coming),)
        known = dataclasses.replace(
            known, phase="running", coming=None, ready=frozenset(), until_seconds=math.inf
        )
    if members == now.members:
        return known, done
    if len(members) < known.rules.min_devices:
        return _then((known, done), lambda k: _stopped(k, at))
    return _then((known, done), lambda k: _preparing(k, members, at))


def _preparing(known: Membership, members: tuple[str, ...], at: float) -> _Done:
    known, coming = _numbered(known, members)
    until = at + known.rules.prepare_seconds
    for device, gone in known.leaving:
        if device in known.generation.members:
            until = min(until, gone - known.rules.hand_over_seconds)
    known = dataclasses.replace(
        known, phase="preparing", coming=coming, ready=frozenset(), until_seconds=until
    )
    return known, (Prepare(generation=coming),)


def _numbered(known: Membership, members: tuple[str, ...]) -> tuple[Membership, Generation]:
    number, ports = known.num_generations + 1, known.rules.ports
    generation = Generation(
        number=number,
        members=members,
        port=ports[(ports.index(known.generation.port) + 1) % len(ports)],
        first_step=known.ledger.end,
    )
    return dataclasses.replace(known, num_generations=number), generation


def _formed(known: Membership, at: float) -> _Done:
    """Form the next generation from the newest state, after all members have ended."""
    assert not known.alive
    wrong = differing(known.kept)
    kept = whole(tuple(one for one in known.kept if one.state not in wrong))
    best, end = newest(kept), known.ledger.end
    done: list[ToDo] = [
        Tell(words=f"the states of step {step} differ and are not used")
        for step, _ in sorted(wrong)
    ]
    step = max(known.saved_step, best[0].step if best else -1)
    if step < end:
        done.append(Tell(words=f"steps {step} to {end - 1} run again: nobody left them"))
    known = dataclasses.replace(
        known,
        ledger=known.ledger.back_to(step),
        kept=tuple(one for one in kept if one.step <= step),
        left=frozenset(),
        heard=(),
        is_killing=False,
    )
    members, coming = chosen(known), known.coming
    is_too_few = len(members) < known.rules.min_devices
    is_failing = known.num_failures >= known.rules.most_failures
    if coming is not None and (is_too_few or is_failing or coming.members != members):
        done.append(Discard(generation=coming))
        coming = None
    if is_failing:
        words = f"{known.num_failures} generations in a row ended without a step"
        known = dataclasses.replace(known, phase="failed", coming=None, until_seconds=math.inf)
        return known, (*done, Tell(words=words))
    if is_too_few:
        if step > known.saved_step:
            done.append(Save(step=step))
        known = dataclasses.replace(known, phase="waiting", coming=None, until_seconds=math.inf)
        return _then((known, tuple(done)), _released)
    if coming is None:
        known, coming = _numbered(known, members)
    generation = dataclasses.replace(coming, first_step=step)
    known = dataclasses.replace(
        known,
        phase="forming",
        generation=generation,
        coming=None,
        sources=known.needed,
        alive=frozenset(members),
        ready=frozenset(),
        until_seconds=at + known.rules.form_seconds,
    )
    form = Form(generation=generation, sources=known.sources)
    return _then((known, (*done, form)), _released)


def _released(known: Membership) -> _Done:
    """Release devices that were asked back, run no process and have no needed state."""
    is_between = known.phase in ("handing over", "collecting")  # other parts will follow
    needed = known.kept if is_between else (*known.sources, *known.needed)
    keepers = {one.device for one in needed}
    free = [device for device, _ in known.leaving if device not in known.alive | keepers]
    for device in free:
        known = known.without(device)
    return known, tuple(Release(device=device) for device in free)


def _given_up(known: Membership, devices: Iterable[str], at: float) -> Membership:
    """Stop using devices; they are released when no state of theirs is needed."""
    leaving = {device for device, _ in known.leaving}
    more = tuple((device, at) for device in devices if device not in leaving)
    return dataclasses.replace(known, leaving=(*known.leaving, *more))


_HANDLERS: dict[type[Happened], Callable[[Membership, Any], _Done]] = {
    MemberEvent: _heard,
    Offered: _offered,
    AskedBack: _asked_back,
    Vanished: _vanished,
    Prepared: _prepared,
    Joined: _joined,
    Completed: _completed,
    LeftState: _left_state,
    Copied: _copied,
    Exited: _exited,
    Saved: _saved,
    Passed: _passed,
}
_LATE: dict[str, Callable[[Membership, float], _Done]] = {
    "preparing": _late_preparing,
    "handing over": _late_handing_over,
    "collecting": _late_collecting,
    "forming": _late_forming,
    "running": _late_never,
    "waiting": _late_never,
}
