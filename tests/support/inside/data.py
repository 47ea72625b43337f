"""What tests know of the insides of `hxla._src.data`."""

from hxla._src.data import data as _data
from hxla._src.data import host_link as _host_link
from hxla._src.data import sample_order as _sample_order
from hxla._src.data.position import from_text, to_text
