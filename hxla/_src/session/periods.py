"""How often training evaluates and saves: every few steps, every epoch, or by the clock."""

import dataclasses
import datetime
from typing import Any, Literal

from ..core.errors import ConfigError, DataError
from ..core.keywords import as_whole_number, check_whole_numbers
from ..data.data import Epochs

#: A number of steps, or the end of each epoch.
StepPeriod = int | Literal["epoch"]
#: The same, or the least time between two.
Period = StepPeriod | datetime.timedelta


@dataclasses.dataclass(frozen=True, kw_only=True)
class Every:
    """A checked period: exactly one attribute is set.

    Attributes:
        steps: The number of steps between two.
        epochs: The epochs, of which each end is one.
        seconds: The least time between two.
    """

    steps: int | None = None
    epochs: Epochs | None = None
    seconds: float | None = None

    def is_due(self, steps: int) -> bool:
        """Whether it is time after a number of steps; by the clock, never."""
        if self.steps is not None:
            return steps % self.steps == 0
        return self.epochs is not None and self.epochs.ends_with(steps)


def check_period(name: str, period: Any, *, takes_time: bool = False) -> None:
    """Refuse what is no period.

    Raises:
        ConfigError: With the argument's name and the accepted values.
    """
    if period is None or period == "epoch":
        return
    accepted = "a number of steps, 'epoch'" + ", or a datetime.timedelta" * takes_time
    if isinstance(period, datetime.timedelta):
        if not takes_time:
            raise ConfigError(
                f"{name}={period}: processes do not evaluate by the clock; pass {accepted}"
            )
        if period <= datetime.timedelta():
            raise ConfigError(f"{name}={period} must be longer than no time")
        return
    if isinstance(period, str):
        raise ConfigError(f"{name}={period!r}: pass {accepted}")
    check_whole_numbers(1, **{name: period})


def as_every(name: str, period: Period | None, epochs: Epochs | None) -> Every | None:
    """A checked period of a job's data.

    Raises:
        DataError: If epochs are asked of data of unknown length.
    """
    if period is None:
        return None
    if isinstance(period, datetime.timedelta):
        return Every(seconds=period.total_seconds())
    if period == "epoch":
        if epochs is None:
            raise DataError(
                f"{name}='epoch' needs data of known length: pass a number of steps, num_examples "
                "with a callable, or an iterable that has a length"
            )
        return Every(epochs=epochs)
    return Every(steps=as_whole_number(period))
