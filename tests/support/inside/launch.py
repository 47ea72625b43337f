"""What tests know of the insides of `hxla._src.launch`."""

from hxla._src.launch import authority as _authority
from hxla._src.launch import launcher as _launcher
from hxla._src.launch import membership as _membership
from hxla._src.launch import run as _run
from hxla._src.launch import throttle as _throttle
from hxla._src.launch.again import AGAIN_VARIABLES, start_again_on
from hxla._src.launch.authority import advance, begin, chosen
from hxla._src.launch.channel import (
    MEMORY_VARIABLE,
    STEP_PHASES,
    Order,
    Pinned,
    Report,
    Standing,
    Status,
    new_channel,
    open_channel,
    pin,
)
from hxla._src.launch.ending import Wakeup, judge
from hxla._src.launch.environment import (
    _GPU_FLAGS,
    _MIXED_GPU_FLAGS,
    num_gpus,
    place_of,
    process_environment,
)
from hxla._src.launch.host import LocalHost
from hxla._src.launch.join import ServiceStatuses
from hxla._src.launch.launcher import planned_mesh
from hxla._src.launch.membership import (
    AskedBack,
    Completed,
    Copied,
    Discard,
    Exited,
    Form,
    Joined,
    KeptState,
    Kill,
    Leave,
    Ledger,
    LeftState,
    MemberEvent,
    MembershipRules,
    Offered,
    Passed,
    Prepare,
    Prepared,
    Release,
    Save,
    Saved,
    Stop,
    Tell,
    Vanished,
    added,
    differing,
    newest,
    pruned,
)
from hxla._src.launch.output import SAID, Forwarder, Logs, Output, Streams
from hxla._src.launch.ranks import RanksStart, Seat, WarmProcess
from hxla._src.launch.ray_cluster import RayHost, connect
