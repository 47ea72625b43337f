"""Pictures of schedules for the docs, drawn from the product's own replay of them.

python docs/pictures/draw_schedules.py
"""

import pathlib

from hxla._src.lower.actions import crossed
from hxla._src.report.lanes import lanes_of_timeline, write_picture
from hxla._src.schedule.replay import Timeline, blocking_replay, replay_ticks
from hxla._src.schedule.schedules import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Schedule,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
)

FOLDER = pathlib.Path(__file__).parent
UNLIKE_F, UNLIKE_B = [0.010, 0.012, 0.012, 0.014], [0.020, 0.024, 0.024, 0.028]


def replayed(schedule: Schedule, **seconds: float) -> Timeline:
    """The timeline of like stages, by the seconds of each kind of operation on a chunk."""
    parts = range(schedule.num_stages * schedule.num_chunks)
    by_part = {(kind, part): took for kind, took in seconds.items() for part in parts}
    return replay_ticks(schedule, by_part, [sorted(ends) for ends in crossed(schedule)])


def main() -> None:
    """Draw every picture anew."""
    blocking = blocking_replay(one_f_one_b(4, 8), UNLIKE_F, UNLIKE_B, [0.002] * 3)
    pictures = {
        "1f1b": lanes_of_timeline(
            blocking,
            title="1F1B, unlike stages, blocking transfers; then reduction and update",
            end_seconds=blocking.makespan_seconds + 0.02,
        ),
        # Operations of one length, so that ticks show: they end together.
        "zero-bubble-h1": lanes_of_timeline(
            replayed(zero_bubble_h1(4, 8), **dict.fromkeys((FORWARD, BACKWARD, WEIGHT), 0.012)),
            title="zero-bubble H1",
        ),
        "interleaved": lanes_of_timeline(
            replayed(interleaved(4, 8, 2), **dict.fromkeys((FORWARD, BACKWARD), 0.006)),
            title="interleaved 1F1B, two chunks (the second fainter)",
        ),
    }
    for name, lanes in pictures.items():
        write_picture(lanes, FOLDER / f"schedule-{name}.svg")


if __name__ == "__main__":
    main()
