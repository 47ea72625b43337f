"""What tests know of the insides of `hxla._src.profile`."""

from hxla._src.profile import segment_times as _kept_bytes
from hxla._src.profile.profile import dump_profile, merge_profiles
from hxla._src.profile.segment_times import ResidualEstimator, layer_sizes, measure, model_name
