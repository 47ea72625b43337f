"""The pictures of docs/schedules.md.

python docs/pictures/draw_schedules.py
"""

import pathlib

from hxla._schedule._replay import replay
from hxla._schedule._schedules import interleaved, one_f_one_b, zero_bubble_h1
from hxla._schedule._timeline import draw

FOLDER = pathlib.Path(__file__).parent
UNLIKE_F, UNLIKE_B = [0.010, 0.012, 0.012, 0.014], [0.020, 0.024, 0.024, 0.028]


def main() -> None:
    """All of them."""
    blocking = replay(
        one_f_one_b(4, 8), UNLIKE_F, UNLIKE_B, send_seconds_P=[0.002] * 3, blocking=True
    )
    draw(
        blocking,
        FOLDER / "schedule-1f1b.svg",
        title="1F1B, unlike stages, blocking transfers",
        step_seconds=blocking.makespan_seconds + 0.02,
    )
    # Forward, backward and weight gradient of a whole stage take 12 ms each.
    like = [0.012] * 4
    draw(
        replay(zero_bubble_h1(4, 8), like, like, weight_seconds_P=like),
        FOLDER / "schedule-zero-bubble-h1.svg",
        title="zero-bubble H1",
    )
    draw(
        replay(interleaved(4, 8, 2), [0.006] * 8, [0.012] * 8),
        FOLDER / "schedule-interleaved.svg",
        title="interleaved 1F1B, two chunks (the second hatched)",
    )


if __name__ == "__main__":
    main()
