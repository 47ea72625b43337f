"""The arguments of a job, checked."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import optax

from ..core.config import Config
from ..core.errors import ConfigError
from ..core.keywords import as_whole_number, check_whole_numbers
from ..core.types import PyTree
from ..graph.factors import PATTERNS, Patterns
from ..model.annotations import Strategy
from ..model.arguments import check_model, check_optimizer
from ..model.functional import RNGS
from ..model.loss_call import Loss, called, refuse_model_outside
from ..plan.precision import Precision
from ..weights.weights import Weights


@dataclasses.dataclass(frozen=True)
class JobArguments:
    """The user's arguments of a job: see `hxla.Job`."""

    model: Any
    data: Any
    loss: Loss
    optimizer: optax.GradientTransformation | optax.MultiSteps
    _: dataclasses.KW_ONLY
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    num_examples: int | None = None
    variables: PyTree | None = None
    rngs: Sequence[str] = RNGS
    weights: str | os.PathLike[str] | Weights | None = None
    trainable: str | Sequence[Any] | Callable[..., Any] | None = None
    merge: Mapping[Any, str] | None = None
    eval_loss: Loss | None = None
    precision: Precision | str | Mapping[str, Any] | os.PathLike[str] | None = None
    nonfinite: Literal["stop", "skip", "scale"] | None = None
    mixes_examples: bool = False
    default: Strategy | None = None
    patterns: Patterns = PATTERNS
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_model(self.model)
        check_optimizer(self.optimizer)
        called(self.loss)
        called(self.eval_loss or self.loss, "eval_loss")
        for loss in (self.loss, self.eval_loss):
            refuse_model_outside(loss, self.model)
        if self.nonfinite not in (None, "stop", "skip", "scale"):
            raise ConfigError(f"nonfinite={self.nonfinite!r}: use 'stop', 'skip' or 'scale'")
        check_whole_numbers(1, batch_size=self.batch_size, num_examples=self.num_examples)
        check_whole_numbers(seed=self.seed)
        for name in ("batch_size", "num_examples", "seed"):
            object.__setattr__(self, name, as_whole_number(getattr(self, name)))
        missing = [name for name in ("batch_size", "seed") if getattr(self, name) is None]
        if missing:
            raise ConfigError(f"{', '.join(missing)} is None, no whole number")
        if isinstance(self.rngs, str):
            raise ConfigError(f"rngs={self.rngs!r} is one name: pass rngs=({self.rngs!r},)")
