"""Typed settings that most runs never touch."""

import difflib
from collections.abc import Mapping
from typing import Any

import pydantic

from ._errors import ConfigError


class _Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Balance(_Section):
    """When counts move."""

    min_gain: float = pydantic.Field(0.015, ge=0)
    """Predicted gain in step time below which counts stay (0.015: 1.5 per cent)."""
    patience_steps: int = pydantic.Field(2, ge=1)
    """Steps in a row that must agree before counts move."""
    window_steps: int = pydantic.Field(9, ge=1)
    """Steps whose median is a device's speed."""
    retry_steps: int = pydantic.Field(50, ge=1)
    """Steps after which a device without microbatches is tried again."""


class Watchdog(_Section):
    """When a job of several processes is given up."""

    heartbeat_timeout_seconds: float = pydantic.Field(8.0, gt=0)
    """A process that has not answered for so long is dead or frozen."""
    progress_timeout_seconds: float = pydantic.Field(600.0, gt=0)
    """A job that lives but has not moved for so long is stuck; compilation counts."""


class Checkpoint(_Section):
    """Checkpoints."""

    keep: int = pydantic.Field(3, ge=1)
    """Newest checkpoints that are kept."""


class Data(_Section):
    """Loading."""

    prefetch_steps: int = pydantic.Field(2, ge=1)
    """Steps whose microbatches are loaded ahead."""


class Config(_Section):
    """All settings of `hxla.train` that are not its arguments."""

    balance: Balance = Balance()
    watchdog: Watchdog = Watchdog()
    checkpoint: Checkpoint = Checkpoint()
    data: Data = Data()


def as_config(config: Config | Mapping[str, Any] | None) -> Config:
    """A `Config` from one, from nested dictionaries, or from nothing.

    Raises:
        ConfigError: Unknown keys (with the nearest known one) and wrong values, all at once.
    """
    if config is None:
        return Config()
    if isinstance(config, Config):
        return config
    try:
        return Config.model_validate(config)
    except pydantic.ValidationError as error:
        lines = []
        for failure in error.errors():
            path = ".".join(map(str, failure["loc"]))
            if failure["type"] == "extra_forbidden":
                known = _keys_beside(failure["loc"])
                near = difflib.get_close_matches(str(failure["loc"][-1]), known, n=1, cutoff=0)
                lines.append(f"  {path}: unknown key, did you mean {near[0]!r}?")
            else:
                lines.append(f"  {path}: {failure['msg']}, not {failure['input']!r}")
        raise ConfigError("config has errors:\n" + "\n".join(lines)) from None


def _keys_beside(path: tuple[int | str, ...]) -> list[str]:
    model: Any = Config
    for key in path[:-1]:
        model = model.model_fields[str(key)].annotation
    return list(model.model_fields)
