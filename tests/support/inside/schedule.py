"""What tests know of the insides of `hxla._schedule`."""

from hxla._schedule._blocking_replay import blocking_replay as blocking_replay
from hxla._schedule._replay import replay as replay
from hxla._schedule._schedules import BACKWARD as BACKWARD
from hxla._schedule._schedules import FORWARD as FORWARD
from hxla._schedule._schedules import WEIGHT as WEIGHT
from hxla._schedule._schedules import from_rows as from_rows
from hxla._schedule._schedules import interleaved as interleaved
from hxla._schedule._schedules import needs as needs
from hxla._schedule._schedules import one_f_one_b as one_f_one_b
from hxla._schedule._segment_sequence import sequence_from_texts as sequence_from_texts
from hxla._schedule._sequence_replay import Residuals as Residuals
from hxla._schedule._sequence_replay import SegmentCost as SegmentCost
from hxla._schedule._sequence_replay import layered_peak_bytes as layered_peak_bytes
from hxla._schedule._sequence_replay import replay_sequence as replay_sequence
from hxla._schedule._sequence_replay import while_running as while_running
from hxla._schedule._ticks import measured_timeline as measured_timeline
from hxla._schedule._ticks import replay_ticks as replay_ticks
from hxla._schedule._timeline import from_perfetto as from_perfetto
from hxla._schedule._timeline import perfetto as perfetto
