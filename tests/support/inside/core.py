"""What tests know of the insides of `hxla._src.core`."""

from hxla._src.core import errors as _errors
from hxla._src.core import keywords as _keywords
from hxla._src.core.config import as_config
from hxla._src.core.files import find, local_path, names, unpack
from hxla._src.core.format import clock, num_bytes, si, span
from hxla._src.core.timing import median_seconds, middle_mean, steady_seconds
