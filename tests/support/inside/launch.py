"""What tests know of the insides of `hxla._launch`."""

from hxla._launch import _launcher, _mailbox, _state_folders, _throttle
from hxla._launch._board import Post, new_board, post_of
from hxla._launch._elastic_wishes import ElasticWishes
from hxla._launch._environment import (
    _GPU_FLAGS,
    _MIXED_GPU_FLAGS,
    num_gpus,
    place_of,
    process_environment,
)
from hxla._launch._host import LocalHost
from hxla._launch._mailbox import MEMORY_VARIABLE
from hxla._launch._member import Pinned, pin
from hxla._launch._output import Logs, Output
from hxla._launch._ray_cluster import connect
from hxla._launch._ray_host import RayHost
from hxla._launch._texts import ServiceTexts
from hxla._launch._verdict import Standing, judge
from hxla._launch._warm import WarmProcess
from hxla._launch._workers import Seat, Streams, WorkersStart
