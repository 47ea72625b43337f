"""What tests know of the insides of `hxla._core`."""

from hxla._core import _catalogue as _catalogue
from hxla._core import _errors as _errors
from hxla._core._catalogue import find as find
from hxla._core._catalogue import names as names
from hxla._core._config import as_config as as_config
from hxla._core._files import unpack as unpack
from hxla._core._format import num_bytes as num_bytes
from hxla._core._statistics import middle_mean as middle_mean
from hxla._core._timing import median_seconds as median_seconds
from hxla._core._timing import steady_seconds as steady_seconds
