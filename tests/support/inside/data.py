"""What tests know of the insides of `hxla._src.data`."""

from hxla._src.data import data as _data
from hxla._src.data import host_link as _host_link
from hxla._src.data.batches import from_text, to_text
