"""What tests know of the insides of `hxla._src.weights`."""

from hxla._src.weights.name_map import NamePattern, Pieced, pieced
from hxla._src.weights.safetensors import files_of, make_file, read_header, read_metadata
from hxla._src.weights.weights import Wanted, open_weights
