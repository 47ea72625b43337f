"""What tests know of the insides of `hxla._launch`."""

from hxla._launch import _launcher as _launcher
from hxla._launch import _mailbox as _mailbox
from hxla._launch import _state_folders as _state_folders
from hxla._launch import _throttle as _throttle
from hxla._launch._board import Post as Post
from hxla._launch._board import new_board as new_board
from hxla._launch._board import post_of as post_of
from hxla._launch._detached_run import DetachedActor as DetachedActor
from hxla._launch._elastic_wishes import ElasticWishes as ElasticWishes
from hxla._launch._environment import _GPU_FLAGS as _GPU_FLAGS
from hxla._launch._environment import _MIXED_GPU_FLAGS as _MIXED_GPU_FLAGS
from hxla._launch._environment import num_gpus as num_gpus
from hxla._launch._environment import place_of as place_of
from hxla._launch._environment import process_environment as process_environment
from hxla._launch._mailbox import MEMORY_VARIABLE as MEMORY_VARIABLE
from hxla._launch._member import Pinned as Pinned
from hxla._launch._member import pin as pin
from hxla._launch._output import Logs as Logs
from hxla._launch._output import Output as Output
from hxla._launch._ray_cluster import connect as connect
from hxla._launch._ray_host import RayHost as RayHost
from hxla._launch._verdict import Standing as Standing
from hxla._launch._verdict import judge as judge
from hxla._launch._workers import Seat as Seat
from hxla._launch._workers import Streams as Streams
from hxla._launch._workers import WorkersStart as WorkersStart
