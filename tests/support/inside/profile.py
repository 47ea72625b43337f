"""What tests know of the insides of `hxla._profile`."""

from hxla._profile import _kept_bytes
from hxla._profile._profile_file import dump_profile, merge_profiles
from hxla._profile._segment_times import layer_sizes, measure, model_name
