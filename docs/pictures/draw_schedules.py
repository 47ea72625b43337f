"""Pictures of schedules for the docs, drawn from the product's own replay of them.

python docs/pictures/draw_schedules.py
"""

import pathlib

from hxla._src.report.lanes import lanes_of_timeline, write_picture
from hxla._src.schedule.replay import blocking_replay, replay
from hxla._src.schedule.schedules import interleaved, one_f_one_b, zero_bubble_h1

FOLDER = pathlib.Path(__file__).parent
UNLIKE_F, UNLIKE_B = [0.010, 0.012, 0.012, 0.014], [0.020, 0.024, 0.024, 0.028]
LIKE = [0.012] * 4


def main() -> None:
    """Draw every picture anew."""
    blocking = blocking_replay(one_f_one_b(4, 8), UNLIKE_F, UNLIKE_B, [0.002] * 3)
    pictures = {
        "1f1b": lanes_of_timeline(
            blocking,
            title="1F1B, unlike stages, blocking transfers; then reduction and update",
            end_seconds=blocking.makespan_seconds + 0.02,
        ),
        # Forward, backward and weight gradient of a whole stage take 12 ms each.
        "zero-bubble-h1": lanes_of_timeline(
            replay(zero_bubble_h1(4, 8), LIKE, LIKE, weight_seconds_P=LIKE), title="zero-bubble H1"
        ),
        "interleaved": lanes_of_timeline(
            replay(interleaved(4, 8, 2), [0.006] * 8, [0.012] * 8),
            title="interleaved 1F1B, two chunks (the second fainter)",
        ),
    }
    for name, lanes in pictures.items():
        write_picture(lanes, FOLDER / f"schedule-{name}.svg")


if __name__ == "__main__":
    main()
