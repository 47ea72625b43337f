"""What tests know of the insides of `hxla._src.model`."""

from hxla._src.model import functional as _functional
from hxla._src.model.arguments import as_module, given_bytes
from hxla._src.model.functional import Functional, functional
from hxla._src.model.loss import as_sums
from hxla._src.model.optimizer import Optimizer
