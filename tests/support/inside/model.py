"""What tests know of the insides of `hxla._model`."""

from hxla._model import _functional
from hxla._model._functional import Functional, functional
from hxla._model._given_model import as_module, given_bytes
from hxla._model._loss import as_sums
from hxla._model._optimizer import Optimizer
