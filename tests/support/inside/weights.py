"""What tests know of the insides of `hxla._weights`."""

from hxla._weights._name_patterns import NamePattern as NamePattern
from hxla._weights._pieces import Pieced as Pieced
from hxla._weights._pieces import pieced as pieced
from hxla._weights._safetensors import files_of as files_of
from hxla._weights._safetensors import make_file as make_file
from hxla._weights._safetensors import read_header as read_header
from hxla._weights._weights import Wanted as Wanted
from hxla._weights._weights import open_weights as open_weights
