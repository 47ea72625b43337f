"""The pictures of docs/schedules.md.

python benchmarks/schedule_pictures.py
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from blocking import blocking_replay  # noqa: E402

from hxla._schedule._replay import replay  # noqa: E402
from hxla._schedule._schedules import interleaved, one_f_one_b, zero_bubble_h1  # noqa: E402
from hxla._schedule._timeline import draw  # noqa: E402

FOLDER = ROOT / "docs/pictures"
UNLIKE_F, UNLIKE_B = [0.010, 0.012, 0.012, 0.014], [0.020, 0.024, 0.024, 0.028]


def main() -> None:
    blocking = blocking_replay(one_f_one_b(4, 8), UNLIKE_F, UNLIKE_B, [0.002] * 3)
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
