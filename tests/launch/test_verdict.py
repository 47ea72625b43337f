"""Which rank is blamed, from what ranks said last and how they ended."""

import pytest

from support.inside.launch import Standing, Status, judge, new_channel


def standing(rank, code=None, ended_at=0.0, **status):
    return Standing(
        rank=rank, status=Status(**{"state": "running"} | status), code=code, ended_at=ended_at
    )


def blamed(*standings, now=100.0):
    verdict = judge(standings, now)
    return None if verdict is None else (verdict.rank, verdict.code)


WAITING = dict(step=6, phase="reduce")
CASES = {
    "all is well": ([standing(0, step=3), standing(1, step=3)], None),
    "the killed one, though its victim ended first": (
        [
            standing(0, 1, 9.0, state="victim", moved_at=8.9, note="Gloo"),
            standing(1, -9, 9.1, step=5, phase="update"),
        ],
        (1, 137),
    ),
    "the one that raised, though its victim aborted first": (
        [standing(0, state="failed", note="ValueError: x"), standing(1, -6, 9.0)],
        (0, 1),
    ),
    "the first of two that raised": (
        [standing(0, 1, 9.0, state="failed", moved_at=8.0), standing(1, 1, 8.9, state="failed")],
        (1, 1),
    ),
    "a code of its own": (
        [standing(0, **WAITING), standing(1, 7, 9.0, state="failed", exit_code=7)],
        (1, 7),
    ),
    "no word at all": ([standing(0, **WAITING), standing(1, 7, 9.0)], (1, 7)),
    "the one that left what another waits for": (
        [standing(0, **WAITING), standing(1, step=5, phase="callback", state="left")],
        (1, 76),
    ),
    "all leave at one place, one of them later": (
        [
            standing(0, step=5, phase="callback"),
            standing(1, step=5, phase="callback", state="left"),
        ],
        None,
    ),
    "one ended in the midst of a session with 0": (
        [standing(0, **WAITING), standing(1, 0, 9.0, step=5, phase="callback")],
        (1, 76),
    ),
    "one ended with 0, and another died of that": (
        [
            standing(0, 0, 9.0, step=6, phase="callback"),
            standing(1, -6, 9.0, step=7, phase="reduce"),
        ],
        (0, 76),
    ),
    "one ended with 0, and another told of that before it waited long": (
        [
            standing(0, step=4, phase="checkpoint", state="victim", moved_at=98.9),
            standing(1, 0, 98.8, step=3, phase="callback", moved_at=98.7),
        ],
        (1, 76),
    ),
    "the killed one, though another ended with 0 besides": (
        [
            standing(0, 0, 9.0, step=6, phase="callback"),
            standing(1, -9, 9.0, step=6),
            standing(2, state="victim", step=6),
        ],
        (1, 137),
    ),
    "one never came": (
        [
            standing(0, step=-1, phase="compiling"),
            standing(1, step=-1, phase="script", state="left"),
        ],
        (1, 76),
    ),
    "the frozen one, not the one that saw it": (
        [
            standing(0, 76, 9.0, state="judged", blamed=1, note="has not answered for 8.0 s"),
            standing(1, step=5, phase="callback"),
        ],
        (1, 76),
    ),
    "a victim, if there is nobody else": ([standing(0, state="victim"), standing(1)], (0, 1)),
    "all caught an error, and one of them begins the next session already": (
        [
            standing(0, step=-1, phase="compiling and measuring", session=2, left_session=1),
            standing(1, step=2, phase="data", session=1, left_session=1, state="left"),
        ],
        None,
    ),
    "one caught an error of its own, and begins a session that the other knows nothing of": (
        [
            standing(0, step=2, phase="reduce", session=1),
            standing(1, step=-1, phase="compiling", session=2, left_session=1),
        ],
        (1, 76),
    ),
    "a script that is over, and a session that it never opened": (
        [
            standing(0, step=-1, phase="compiling", session=1),
            standing(1, phase="script", state="finished", has_ended=True),
        ],
        (1, 76),
    ),
    "a script that is over, and a session that both were in": (
        [
            standing(0, step=9, phase="finishing", session=1),
            standing(1, phase="script", state="finished", has_ended=True, session=1),
        ],
        None,
    ),
    "a checkpoint was written": ([standing(0, 75, 9.0, state="preempted"), standing(1)], None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rank_that_failed_first_is_blamed(name):
    standings, expected = CASES[name]
    assert blamed(*standings) == expected


def test_a_victim_is_not_blamed_before_the_culprit_had_time_to_show():
    victim = standing(0, state="victim", moved_at=10.0, note="Gloo")
    assert blamed(victim, standing(1), now=10.5) is None
    killed = standing(1, -9, 10.4, step=5, phase="callback")
    assert (
        judge([victim, killed], 10.7).reason
        == "was killed by SIGKILL at step 6 in phase 'callback'"
    )


def test_a_channel_keeps_what_each_rank_said_last():
    channel, path = new_channel(2)
    channel.tell(1, Status(step=12, phase="microbatches", note="x" * 5000))
    channel.tell(1, Status(step=13, phase="update"))
    assert path.startswith("/proc/")
    assert channel.statuses() == {1: Status(step=13, phase="update")}
    assert channel.read(Status, 0) == Status()
    for character in "ä", '"', "\\":
        channel.tell(0, Status(note=character * 5000, step=10**9))
        assert channel.statuses()[0].note.startswith(character * 750)
