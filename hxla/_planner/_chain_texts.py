"""The two plain sequences of a chain of segments, as a plan has them: what waits, and where.

With a stash on the host, what waits between forward and backward goes there, and comes back while
the segment above runs (or, where all microbatches of a device run a segment together, the
microbatch before). What the first backward but one reads is read at once, so in the former case it
stays.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from .._schedule._segment_sequence import CUT, INPUT

#: Where what waits is: on the device; on the host, fetched while the segment above runs; or
#: fetched just before, where another microbatch of that segment runs meanwhile.
Waits = Literal["device", "host, segment by segment", "host, microbatch by microbatch"]


def keep_texts(num: int, waits: Waits = "device") -> tuple[str, ...]:
    """The sequence that keeps the residuals of every segment, for so many."""
    away = _away(range(num - 1), num, waits)
    return tuple(_texts(num, {i: f"F{i}:{CUT}" for i in range(num - 1)}, away, f":{CUT}", waits))


def boundary_texts(num: int, waits: Waits = "device") -> tuple[str, ...]:
    """The sequence that keeps what crosses between segments, for so many."""
    away = _away(range(1, num - 1), num, waits)  # nothing crosses into the first
    return tuple(_texts(num, {i: f"F{i}+" for i in range(num - 1)}, away, "", waits))


def num_again(sequence: Sequence[str]) -> int:
    """How many forwards of a sequence run again."""
    forwards = sum(text.startswith("F") for text in sequence)
    return forwards - sum(text.startswith("B") for text in sequence) + 1


def _away(kept: range, num: int, waits: Waits) -> range:
    """The segments of whose kept values some go to the host."""
    if waits == "device":
        return range(0)
    return kept if waits == "host, microbatch by microbatch" else range(kept.start, num - 2)


def _texts(
    num: int, forwards: dict[int, str], away: range, copied: str, waits: Waits
) -> Iterator[str]:
    for i, text in forwards.items():
        yield text
        if i in away:
            yield f"O{i}{copied}"
    yield f"B{num - 1}:{INPUT}"
    for i in reversed(range(num - 1)):
        coming = i if waits == "host, microbatch by microbatch" else i - 1
        if coming in away:
            yield f"I{coming}{copied}"
        if forwards[i] != f"F{i}:{CUT}":
            yield f"F{i}:{CUT}"
        yield f"B{i}:{CUT}"
