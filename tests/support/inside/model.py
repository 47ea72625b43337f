"""What tests know of the insides of `hxla._model`."""

from hxla._model import _functional as _functional
from hxla._model._functional import Functional as Functional
from hxla._model._functional import functional as functional
from hxla._model._given_model import as_module as as_module
from hxla._model._given_model import given_bytes as given_bytes
from hxla._model._loss import as_sums as as_sums
from hxla._model._optimizer import Optimizer as Optimizer
