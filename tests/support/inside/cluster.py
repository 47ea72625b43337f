"""What tests know of the insides of `hxla._src.cluster`."""

from hxla._src.cluster import hardware as _hardware
from hxla._src.cluster import job_devices as _job_devices
from hxla._src.cluster.card_support import REQUIREMENTS, extra_for, unsupported
from hxla._src.cluster.cluster import Cluster, Device
from hxla._src.cluster.detect import describe, detect
from hxla._src.cluster.job_devices import device_kind
from hxla._src.cluster.libraries import are_unlike, in_words, library_of
from hxla._src.cluster.mesh_file import dump_cluster
from hxla._src.cluster.nvml import Card
from hxla._src.cluster.transfers import Send, ring_transfers, transfer_seconds
