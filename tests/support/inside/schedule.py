"""What tests know of the insides of `hxla._schedule`."""

from hxla._schedule._blocking_replay import blocking_replay
from hxla._schedule._replay import replay
from hxla._schedule._schedules import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    from_rows,
    interleaved,
    needs,
    one_f_one_b,
)
from hxla._schedule._segment_sequence import sequence_from_texts
from hxla._schedule._sequence_replay import (
    Residuals,
    SegmentCost,
    layered_peak_bytes,
    replay_sequence,
    while_running,
)
from hxla._schedule._ticks import measured_timeline, replay_ticks
from hxla._schedule._timeline import from_perfetto, perfetto
