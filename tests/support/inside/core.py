"""What tests know of the insides of `hxla._core`."""

from hxla._core import _errors
from hxla._core._catalogue import find, names
from hxla._core._config import as_config
from hxla._core._files import local_path, unpack
from hxla._core._format import num_bytes
from hxla._core._statistics import middle_mean
from hxla._core._timing import median_seconds, steady_seconds
