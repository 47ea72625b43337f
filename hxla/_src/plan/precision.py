"""The dtypes of a computation, by class of operation: a part of the plan."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pydantic

from ..core.config import Dtype, PrecisionConfig
from ..core.errors import ConfigError
from ..core.files import fault, listed, named, read_toml
from .layout import PlanValue
from .rules import check_pattern

#: The exponents of a loss scale: below the least, float16 cannot represent the scale itself; above
#: the most, no gradient that needs a scale stays finite.
LEAST_SCALE_EXPONENT, MOST_SCALE_EXPONENT = -14, 64
_LOW = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_FLOAT8 = ("preset", "fp8")
_PRODUCTS = {"fp32": "float32", "tf32": "tf32", "fp8": "float8"}


class PrecisionException(PlanValue):
    """Operations that compute in another dtype than the rest of their class.

    Attributes:
        path: The regular expression for the path of a parameter that an operation reads; it must
            match from the start of a path component. None for a scope's exception.
        scope: The regular expression for the scopes around an operation, likewise; None for a
            path's exception.
        compute: The dtype of matching operations.
        source: The source of the exception.
    """

    path: str | None = None
    scope: str | None = None
    compute: Dtype = "float32"
    source: str | None = None

    @pydantic.field_validator("path", "scope")
    @classmethod
    def _is_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            check_pattern(pattern)
        return pattern

    @pydantic.model_validator(mode="after")
    def _has_one_subject(self) -> "PrecisionException":
        if (self.path is None) == (self.scope is None):
            raise ValueError("an exception has either `path` or `scope`")
        return self

    def __str__(self) -> str:
        subject = f"path {self.path!r}" if self.path is not None else f"scope {self.scope!r}"
        return f"{subject} in {self.compute}"


class LossScale(PlanValue):
    """How the loss is scaled before it is differentiated, always by a power of two.

    Attributes:
        initial_exponent: The exponent of the first step's scale, which is that of a microbatch's
            mean loss.
        growth_steps: The number of steps without an overflow after which the scale doubles.
    """

    initial_exponent: int = pydantic.Field(24, ge=LEAST_SCALE_EXPONENT, le=MOST_SCALE_EXPONENT)
    growth_steps: pydantic.PositiveInt = 2000


class Precision(PlanValue):
    """The dtypes of the computation; parameters between steps and the optimizer keep their dtypes.

    Attributes:
        params: The dtype to which parameters are rounded before the loss reads them; `model` keeps
            the model's dtypes.
        compute: The dtype of matrix products, convolutions and the operations after them; `model`
            keeps the model's dtypes of all operations.
        products: The arithmetic of float32 products: `default` is jax's choice for the device,
            `float32` all bits, `tf32` a GPU's tensor cores. With `float8`, matrix products that
            read a parameter are in float8, scaled by powers of two, and their results in `compute`.
        reduction: The dtype in which gradients are accumulated.
        buffers: The dtype to which other variables are rounded before the loss reads them.
        output: The dtype to which losses and metrics are rounded.
        exceptions: The operations that compute in another dtype; the first match decides.
        loss_scale: The scale of the loss, where `nonfinite` is `scale`; None: no scale.
    """

    params: Literal["model"] | Dtype = "model"
    compute: Literal["model"] | Dtype = "model"
    products: Literal["default", "float32", "tf32", "float8"] = "default"
    reduction: Literal["float32"] = "float32"
    buffers: Literal["model"] | Dtype = "model"
    output: Literal["model"] | Dtype = "model"
    exceptions: tuple[PrecisionException, ...] = ()
    loss_scale: LossScale | None = None

    @pydantic.model_validator(mode="after")
    def _is_consistent(self) -> "Precision":
        others = (self.params, self.buffers, self.output, *(e.compute for e in self.exceptions))
        if self.compute == "model" and (self.products != "default" or {*others} != {"model"}):
            raise ValueError(
                "with compute 'model' every operation keeps the model's dtype: set compute, or "
                "leave the others at 'model'"
            )
        return self

    @property
    def is_own(self) -> bool:
        """Whether every operation keeps the model's dtype."""
        return self.compute == "model"

    @property
    def arithmetic(self) -> str:
        """The arithmetic of matrix products, by mesh files' names; `model`: the model's dtypes."""
        if self.products == "float8":
            return "float8"
        if self.compute == "float32":
            return {"float32": "float32", "tf32": "tensorfloat32"}.get(self.products, "model")
        return self.compute

    @property
    def low_dtypes(self) -> frozenset[str]:
        """The dtypes below float32 in which some operation computes."""
        every: set[str] = {self.params, self.compute, self.buffers, self.output}
        every |= {exception.compute for exception in self.exceptions}
        if self.products == "float8":
            every.add("float8_e4m3fn")
        return frozenset(every - {"model", "float32"})

    def in_words(self) -> Iterator[str]:
        """Lines for `Plan.explain`; none for the model's dtypes without a loss scale."""
        if not self.is_own:
            rest = [
                f"{name} {value}"
                for name, value in (
                    ("parameters", self.params),
                    ("buffers", self.buffers),
                    ("output", self.output),
                )
                if value not in ("model", "float32")
            ]
            low = self.compute != "float32"
            how = "; softmax, norms, losses and large sums in float32" if low else ""
            products = f", float32 products: {self.products}" * (self.products != "default")
            if self.products == "float8":
                products = (
                    ", products with a parameter in float8 (gradients in e5m2, all else e4m3)"
                )
            yield f"  computes in {self.compute}{how}{products}" + "".join(f", {r}" for r in rest)
        for exception in self.exceptions:
            yield f"  except {exception}"
        if self.loss_scale is not None:
            yield (
                f"  the loss is scaled, at first by 2^{self.loss_scale.initial_exponent}; doubled "
                f"after {self.loss_scale.growth_steps} good steps, halved after an overflow"
            )


def as_precision(
    setting: "Precision | PrecisionConfig | str | Mapping[str, Any] | os.PathLike[str]",
    *,
    scales: bool | None = None,
) -> Precision:
    """The policy of a user's setting.

    Args:
        setting: A `Precision`, a preset (`bf16`), the keys of the section `precision`, or a TOML
            file of them.
        scales: Whether the loss is scaled; None: as a `Precision` says, else where float16 is
            computed in.

    Raises:
        ConfigError: For unknown presets, keys and dtypes, all at once.
    """
    if isinstance(setting, Precision):
        if scales is None or scales == (setting.loss_scale is not None):
            return setting
        return setting.model_copy(update={"loss_scale": LossScale() if scales else None})
    config = setting if isinstance(setting, PrecisionConfig) else _config(setting)
    low = _LOW.get(config.preset, "float32")
    fields: dict[str, Any] = {}
    if config.preset != "model" or _names_dtypes(config):
        fields = {
            "params": config.params or "float32",
            "compute": config.compute or low,
            "products": _PRODUCTS.get(config.preset, "default"),
            "buffers": config.buffers or "float32",
            "output": config.output or "float32",
            "exceptions": tuple(e.model_dump() for e in config.exceptions),
        }
    try:
        policy = Precision.model_validate(fields)
        if scales if scales is not None else "float16" in policy.low_dtypes:
            scale = LossScale(
                initial_exponent=_exponent(config.initial_scale), growth_steps=config.growth_steps
            )
            policy = policy.model_copy(update={"loss_scale": scale})
    except pydantic.ValidationError as error:
        lines = [fault(failure, Precision) for failure in error.errors()]
        raise ConfigError("precision has errors:" + listed(lines)) from None
    return policy


def _names_dtypes(config: PrecisionConfig) -> bool:
    dtypes = config.params, config.compute, config.buffers, config.output
    return any(dtype is not None for dtype in dtypes) or bool(config.exceptions)


def _exponent(scale: float) -> int:
    mantissa, exponent = math.frexp(scale)
    least, most = LEAST_SCALE_EXPONENT, MOST_SCALE_EXPONENT
    if mantissa != 0.5 or not least <= exponent - 1 <= most:
        raise ConfigError(
            f"precision.initial_scale={scale:g}: a loss scale is a power of two from 2^{least} to "
            f"2^{most}, so that it can be undone without a rounding; 2^24 is {2**24}"
        )
    return exponent - 1


def _config(setting: Any) -> PrecisionConfig:
    words = PrecisionConfig.model_fields["preset"].annotation
    if isinstance(setting, os.PathLike) or (isinstance(setting, str) and setting.endswith(".toml")):
        table = read_toml(setting, named("precision file", setting, ConfigError))
        setting = table.get("precision", table)
    if setting != "fp8" and _names_float8(setting):
        raise ConfigError(
            f"precision={setting!r}: float8 is a dtype of products only, chosen by preset 'fp8': "
            "products that read a parameter are in float8, all else is in 'compute'"
        )
    if isinstance(setting, str):
        setting = _DTYPES.get(setting, setting)
    if not isinstance(setting, str | Mapping):
        raise ConfigError(
            f"precision={setting!r}: use a word, {_listed(words)}; a dictionary of the keys of the "
            "section precision; a .toml file; or an hxla.Precision"
        )
    if isinstance(setting, Mapping):
        setting = {k: list(v) if isinstance(v, tuple) else v for k, v in setting.items()}
    try:
        return PrecisionConfig.model_validate(setting)
    except pydantic.ValidationError as error:
        lines = [fault(failure, PrecisionConfig) for failure in error.errors()]
        raise ConfigError("precision has errors:" + listed(lines)) from None


def _names_float8(setting: Any) -> bool:
    """Whether a word, or a dtype in a table, is one of 8 bits."""
    if isinstance(setting, Mapping):
        exceptions = setting.get("exceptions")
        inner = exceptions if isinstance(exceptions, list | tuple) else ()
        words = (v for key, v in setting.items() if isinstance(v, str) and (key, v) != _FLOAT8)
        return any(map(_names_float8, words)) or any(
            isinstance(item, Mapping) and _names_float8(item.get("compute")) for item in inner
        )
    return isinstance(setting, str) and re.fullmatch(r"(fp8|float8)\w*", setting) is not None


def _listed(words: Any) -> str:
    return ", ".join(words.__args__)
