"""What tests know of the insides of `hxla._cluster`."""

from hxla._cluster import _hardware as _hardware
from hxla._cluster import _job_devices as _job_devices
from hxla._cluster._cluster import Cluster as Cluster
from hxla._cluster._cluster import Device as Device
from hxla._cluster._detect import describe as describe
from hxla._cluster._detect import detect as detect
from hxla._cluster._job_devices import device_kind as device_kind
from hxla._cluster._libraries import are_unlike as are_unlike
from hxla._cluster._libraries import in_words as in_words
from hxla._cluster._libraries import library_of as library_of
from hxla._cluster._mesh_file import dump_cluster as dump_cluster
from hxla._cluster._transfers import Send as Send
from hxla._cluster._transfers import ring_transfers as ring_transfers
from hxla._cluster._transfers import transfer_seconds as transfer_seconds
