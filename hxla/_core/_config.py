"""Typed settings that most runs never touch."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, cast

import pydantic

from ._errors import ConfigError
from ._faults import fault, listed, nearest
from ._files import named, read_json, read_toml

#: Variables that `hxla run` and tests use; all other `HXLA_*` are settings.
_INTERNAL = "BOARD DEVICES PLAN MESH COORDINATOR LAUNCHER_PID LIVE LOGS NUM_PROCESSES PROCESS_ID"
INTERNAL_VARIABLES = frozenset(f"HXLA_{name}" for name in _INTERNAL.split())


class _Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class BalanceConfig(_Section):
    """The section `balance`: when counts of microbatches move."""

    min_gain: float = pydantic.Field(0.015, ge=0)
    """Predicted gain in step time below which counts stay (0.015: 1.5 per cent)."""
    patience_steps: int = pydantic.Field(2, ge=1)
    """Steps in a row that must agree before counts move."""
    window_steps: int = pydantic.Field(9, ge=1)
    """Steps whose median is a device's speed."""
    retry_steps: int = pydantic.Field(50, ge=1)
    """Steps after which a device without microbatches is tried again, and counts that did not pay
    are no longer avoided."""


class WatchdogConfig(_Section):
    """The section `watchdog`: when a job of several processes is given up."""

    heartbeat_timeout_seconds: float = pydantic.Field(7.0, gt=0)
    """A process that has not answered for so long is dead or frozen."""
    progress_timeout_seconds: float = pydantic.Field(600.0, gt=0)
    """A job that lives but has not moved for so long is stuck; compilation counts."""
    compare_steps: int = pydantic.Field(100, ge=1)
    """Steps after which the copies of the state are compared, by a checksum."""


class CheckpointConfig(_Section):
    """The section `checkpoint`: how many checkpoints are kept."""

    keep: int = pydantic.Field(3, ge=1)
    """Newest checkpoints that are kept."""


class DataConfig(_Section):
    """The section `data`: how far ahead microbatches are loaded."""

    prefetch_steps: int = pydantic.Field(2, ge=1)
    """Steps whose microbatches are loaded ahead."""


class AutoConfig(_Section):
    """The section `auto`: what hxla chooses by itself (EPL's section of the same name)."""

    auto_parallel: bool = False
    """Where no plan, mesh, rules or stages are given, time the devices that are here, search, and
    run the best plan; the runners-up are said. An annotated model is refused."""
    num_stages: int | None = pydantic.Field(None, ge=2)
    """Cut a model without annotations into a pipeline of so many stages."""


class IoConfig(_Section):
    """The section `io`: how examples lie in files (EPL's)."""

    examples_per_file: int = pydantic.Field(1, ge=1)
    """Examples that lie together: files are shuffled, then the examples within a file, so that a
    device reads few files; 1: examples are shuffled by themselves."""


class ClusterConfig(_Section):
    """The section `cluster`: how TaskGraphs take devices (Whale's and EPL's)."""

    share_devices: bool = False
    """TaskGraphs with device counts use the same devices instead of one set each."""
    visible_devices: list[pydantic.NonNegativeInt] | None = pydantic.Field(None, min_length=1)
    """Numbers of the devices to use, in the order of all devices; null: every one."""
    prefer_intra_node: bool = True
    """Keep the devices of a replica on one node where the nodes' sizes allow it."""
    layout: Literal["auto", "all", "host"] | list[list[pydantic.NonNegativeInt]] = "auto"
    """Devices among which one copy of the model is placed: `auto`, as many as the TaskGraphs ask
    for; `all`, one copy over every device; `host`, those of one host; or lists of numbers."""


class PipelineConfig(_Section):
    """The section `pipeline`: how a global batch is cut, and in which order stages work."""

    num_micro_batch: int | None = pydantic.Field(None, ge=1)
    """Microbatches of a global batch, another way to say `microbatch_size`."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] | list[list[str]] = "1f1b"
    """Order of forwards and backwards in a pipeline: a name, or a table of ticks and stages as
    `hxla.schedule_from_table` reads it."""
    num_chunks: int = pydantic.Field(1, ge=1)
    """Parts of the model on each stage of an `interleaved` pipeline."""
    recompute: bool = False
    """Keep the input of a stage and run its forward again in the backward, instead of keeping what
    the backward needs."""


class CommunicationConfig(_Section):
    """The section `communication`: how gradients are brought together (EPL's)."""

    bucket_mib: int = pydantic.Field(256, ge=1)
    """Size up to which small tensors are summed together; a larger one goes alone."""
    gradient: Literal["mean", "sum"] = "mean"
    """Gradient of the global batch's mean loss, or of its sum."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """In which sums of `reduction="float"` travel between replicas."""
    sparse_embeddings: bool = False
    """Send only the rows of an embedding's gradient that a step touched, where that is less."""
    clip_norm: float | None = pydantic.Field(None, gt=0)
    """Global norm to which gradients are clipped; null: not at all."""
    clip: Literal["before", "after"] = "after"
    """Clip each microbatch's own gradient before the sum, or the global batch's after it."""


class OptimizerConfig(_Section):
    """The section `optimizer`: how parameters are updated (EPL's)."""

    num_apply_groups: int = pydantic.Field(1, ge=1)
    """Groups in which parameters are updated one after another, each making the gradients that it
    shares with others, below a global norm, again instead of keeping them; 1: all at once."""


class MemoryConfig(_Section):
    """The section `memory`: where the state of training is."""

    zero: Literal[0, 1, 2, 3] | None = None
    """Stage of ZeRO: 0, every copy of the model has the whole of the optimizer's state; 1, each has
    a share of it and updates that part of the parameters; 2, gradients are shared out too, segment
    by segment; 3, and the parameters, which are gathered segment by segment. From 2 on a step runs
    layer by layer, all microbatches of a device one after another in each, as a chain of segments
    (`recompute`; null is `boundaries` there). Null: 1 where the memory that the devices are
    described with holds no whole state, else 0."""
    shares: Literal["auto", "even"] | list[pydantic.PositiveInt] = "auto"
    """What of the optimizer's state each copy has, in ratio, such as `[3, 1]`, each at least 1;
    `auto`: by the speed of its device, as far as its memory holds it."""
    recompute: Literal["none", "boundaries", "auto"] | None = None
    """What waits for the backward of a microbatch. With a word a microbatch runs as a chain of
    segments, each with programs of its own: `none` keeps the residuals of all; `boundaries` keeps
    only what crosses between segments, and runs each forward again; `auto` runs again what is
    cheapest, so that it fits into the memory that the devices are described with. Null: it is one
    program, and XLA decides. Between the words no bit moves."""
    segments: int | None = pydantic.Field(None, ge=1)
    """With `recompute`, about how many segments there are; null: one for each layer."""


class Config(_Section):
    """All settings of a job that are not arguments of `Job` or `train`, in sections.

    Example:
        >>> import hxla
        >>> config = hxla.Config(checkpoint=hxla.CheckpointConfig(keep=5))
        >>> config.checkpoint.keep, config.pipeline.schedule
        (5, '1f1b')
    """

    auto: AutoConfig = AutoConfig()
    cluster: ClusterConfig = ClusterConfig()
    pipeline: PipelineConfig = PipelineConfig()
    communication: CommunicationConfig = CommunicationConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    memory: MemoryConfig = MemoryConfig()
    balance: BalanceConfig = BalanceConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    data: DataConfig = DataConfig()
    io: IoConfig = IoConfig()


def as_config(
    config: "Config | Mapping[str, Any] | str | os.PathLike[str] | None",
    environ: Mapping[str, str] | None = None,
) -> Config:
    """A `Config` from one, from nested dictionaries, from a file, or from nothing.

    Args:
        config: A `Config` is taken as it is. Dictionaries, and a path to a `.json` or `.toml`
            file, are laid over what the environment says.
        environ: Variables such as `HXLA_CLUSTER_SHARE_DEVICES=true`; None: those of the process.

    Raises:
        ConfigError: Unknown keys (with the nearest known one) and wrong values, all at once.
    """
    if isinstance(config, Config):
        return config
    table: dict[str, dict[str, Any]] = {}
    sources: dict[tuple[str, ...], str] = {}
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith("HXLA_") and name not in INTERNAL_VARIABLES:
            section, key = _key_of_variable(name)
            table.setdefault(section, {})[key] = _typed(value)
            sources[section, key] = name
    given = _read(config) if isinstance(config, str | os.PathLike) else _lists(dict(config or {}))
    for section, values in given.items():
        if isinstance(values, _Section):
            values = values.model_dump(exclude_unset=True)
        if isinstance(values, Mapping):
            table[section] = {**table.get(section, {}), **values}
            for key in values:
                sources.pop((section, key), None)
        else:
            table[section] = values
    try:
        return Config.model_validate(table)
    except pydantic.ValidationError as error:
        lines = []
        for failure in error.errors():
            source = sources.get(tuple(map(str, failure["loc"][:2])))
            lines.append(fault(failure, Config, f" (from {source})" if source else ""))
        raise ConfigError("config has errors:" + listed(lines)) from None


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    refuse = named("config file", path, ConfigError)
    read = read_toml if pathlib.Path(path).suffix == ".toml" else read_json
    table = read(path, refuse)
    if not isinstance(table, dict):
        raise refuse("holds no table of sections")
    return table


def _lists(given: Any) -> Any:
    """With lists for tuples, as a file has them."""
    if isinstance(given, dict):
        return {key: _lists(value) for key, value in given.items()}
    return [_lists(value) for value in given] if isinstance(given, list | tuple) else given


def _key_of_variable(name: str) -> tuple[str, str]:
    """`HXLA_PIPELINE_NUM_MICRO_BATCH` is `pipeline.num_micro_batch`."""
    known = {
        f"HXLA_{section}_{key}".upper(): (section, key)
        for section, field in Config.model_fields.items()
        for key in cast(type[_Section], field.annotation).model_fields
    }
    if name not in known:
        near = nearest(name, [*known, *INTERNAL_VARIABLES])
        raise ConfigError(f"environment variable {name}: unknown, did you mean {near}?")
    return known[name]


def _typed(text: str) -> Any:
    """Numbers, booleans and null as JSON has them; anything else is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text
