"""What tests know of the insides of `hxla._weights`."""

from hxla._weights._name_patterns import NamePattern
from hxla._weights._pieces import Pieced, pieced
from hxla._weights._safetensors import files_of, make_file, read_header
from hxla._weights._weights import Wanted, open_weights
