"""What tests know of the insides of `hxla._src.schedule`."""

from hxla._src.schedule.replay import (
    SEND,
    Timeline,
    blocking_replay,
    from_perfetto,
    make_event,
    measured_timeline,
    perfetto,
    replay_ticks,
)
from hxla._src.schedule.schedules import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    from_rows,
    interleaved,
    needs,
    one_f_one_b,
)
from hxla._src.schedule.segment_sequence import (
    Residuals,
    SegmentCost,
    layered_peak_bytes,
    replay_sequence,
    sequence_from_texts,
    while_running,
)
from hxla._src.schedule.stage_peaks import HopBytes, PartBytes, stage_peaks
