"""What tests know of the insides of `hxla._profile`."""

from hxla._profile import _kept_bytes as _kept_bytes
from hxla._profile._profile_file import dump_profile as dump_profile
from hxla._profile._profile_file import merge_profiles as merge_profiles
from hxla._profile._segment_times import layer_sizes as layer_sizes
from hxla._profile._segment_times import measure as measure
from hxla._profile._segment_times import model_name as model_name
