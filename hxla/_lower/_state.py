"""The state of training as a value."""

import dataclasses

import jax
import numpy as np

from .._core._types import PyTree
from .._model._loss_scale import ScaleState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """All that a step of training reads and writes, as it lies.

    The arrays live on the devices of the first copy of the model that this process has a part of,
    and the next step overwrites them: copy what you keep. Where several processes share a copy (a
    pipeline, rules), each has a part only: `Session.gather` gives the whole. Where the devices of a
    copy have parts of unlike sizes, the arrays are made without their padding for whoever asks for
    the state: then every process must ask. State that waits in host memory or on a disk is given in
    host memory.

    Attributes:
        step: The updates done.
        params: The parameters in the user's own tree.
        aux: The other variables (BatchNorm statistics) in the user's own tree.
        opt_state: The state of the optimizer, as optax makes it. Random keys, here and in `aux`,
            are their data.
        loss_scale: The loss scale and how many good steps it has had; None: the loss is not scaled.
        exponents: int32[T], the scales of the exact sums of T tensors, as powers of two.
    """

    step: int
    params: PyTree
    aux: PyTree
    opt_state: PyTree
    exponents: np.ndarray
    loss_scale: ScaleState | None = dataclasses.field(default=None, metadata={"static": True})
