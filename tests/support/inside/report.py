"""What tests know of the insides of `hxla._report`."""

from hxla._report import _lanes, _lanes_picture, _waiting
from hxla._report._lanes import COLLECTIVE, COMPUTATION, Bar, Lanes, lanes_of_timeline
from hxla._report._lanes_picture import step_picture, write_picture
from hxla._report._metrics_file import FILE_NAME, MetricsWriter
from hxla._report._progress import line
from hxla._report._waiting import Waiting
