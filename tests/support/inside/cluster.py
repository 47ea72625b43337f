"""What tests know of the insides of `hxla._src.cluster`."""

from hxla._src.cluster import detect as _hardware
from hxla._src.cluster import job_devices as _job_devices
from hxla._src.cluster.cluster import Cluster, Device, Send, ring_transfers, transfer_seconds
from hxla._src.cluster.detect import describe, detect
from hxla._src.cluster.job_devices import device_kind
from hxla._src.cluster.kinds import (
    REQUIREMENTS,
    are_unlike,
    extra_for,
    in_words,
    library_of,
    unsupported,
)
from hxla._src.cluster.mesh_file import dump_cluster
from hxla._src.cluster.nvml import Card
