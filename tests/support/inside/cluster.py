"""What tests know of the insides of `hxla._cluster`."""

from hxla._cluster import _hardware, _job_devices
from hxla._cluster._cluster import Cluster, Device
from hxla._cluster._detect import describe, detect
from hxla._cluster._job_devices import device_kind
from hxla._cluster._libraries import are_unlike, in_words, library_of
from hxla._cluster._mesh_file import dump_cluster
from hxla._cluster._transfers import Send, ring_transfers, transfer_seconds
