"""What tests know of the insides of `hxla._src.launch`."""

from hxla._src.launch import authority as _authority
from hxla._src.launch import control_channel as _mailbox
from hxla._src.launch import launcher as _launcher
from hxla._src.launch import membership as _membership
from hxla._src.launch import state_folders as _state_folders
from hxla._src.launch import throttle as _throttle
from hxla._src.launch.authority import advance, begin, chosen
from hxla._src.launch.control_channel import MEMORY_VARIABLE
from hxla._src.launch.environment import (
    _GPU_FLAGS,
    _MIXED_GPU_FLAGS,
    num_gpus,
    place_of,
    process_environment,
)
from hxla._src.launch.event_log import Ledger
from hxla._src.launch.host import LocalHost
from hxla._src.launch.kept_state import KeptState, added, differing, newest, pruned
from hxla._src.launch.launcher import ElasticOptions
from hxla._src.launch.member import Pinned, pin
from hxla._src.launch.membership import (
    AskedBack,
    Completed,
    Copied,
    Discard,
    Exited,
    Form,
    Joined,
    Kill,
    Leave,
    LeftState,
    MembershipRules,
    Offered,
    Passed,
    Prepare,
    Prepared,
    Release,
    Save,
    Saved,
    SharesAsked,
    Stop,
    Tell,
    Told,
    Vanished,
)
from hxla._src.launch.output import Logs, Output
from hxla._src.launch.processes import Standing, judge
from hxla._src.launch.rank_notes import ServiceNotes
from hxla._src.launch.ray_cluster import connect
from hxla._src.launch.ray_host import RayHost
from hxla._src.launch.status_page import Post, new_board, post_of
from hxla._src.launch.warm import WarmProcess
from hxla._src.launch.workers import Seat, Streams, WorkersStart
