"""What tests know of the insides of `hxla._report`."""

from hxla._report import _lanes as _lanes
from hxla._report import _lanes_picture as _lanes_picture
from hxla._report import _waiting as _waiting
from hxla._report._lanes import COLLECTIVE as COLLECTIVE
from hxla._report._lanes import COMPUTATION as COMPUTATION
from hxla._report._lanes import Bar as Bar
from hxla._report._lanes import Lanes as Lanes
from hxla._report._lanes import lanes_of_timeline as lanes_of_timeline
from hxla._report._lanes_picture import step_picture as step_picture
from hxla._report._lanes_picture import write_picture as write_picture
from hxla._report._metrics_file import FILE_NAME as FILE_NAME
from hxla._report._metrics_file import MetricsWriter as MetricsWriter
from hxla._report._progress import line as line
from hxla._report._waiting import Waiting as Waiting
