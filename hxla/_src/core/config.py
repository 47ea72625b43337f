"""Typed settings that most runs never touch."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

import pydantic

from .errors import ConfigError
from .files import fault, listed, named, nearest, read_json, read_toml

#: Variables that `hxla run` and tests use; all other `HXLA_*` are settings.
_INTERNAL = (
    "CHANNEL DEVICES PLAN MESH COORDINATOR LAUNCHER_PID LIVE LOCAL_CLIENTS LOGS NUM_PROCESSES "
    "PROCESS_ID JOB GENERATION MEMORY NEIGHBOURS WAITS"
)
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
    """The section `checkpoint`: how many checkpoints are kept, and copies in memory."""

    keep: int = pydantic.Field(3, ge=1)
    """Newest checkpoints that are kept."""
    in_memory_every: int | None = pydantic.Field(None, ge=1)
    """Steps between copies of the state in the memory of the hosts, for `hxla run --elastic`: where
    each member has only a part of it, a process that is killed takes no more steps along than
    these. None: no copies."""


class DataConfig(_Section):
    """The section `data`: how far ahead microbatches are loaded, and by whom."""

    prefetch_steps: int = pydantic.Field(2, ge=1)
    """Steps whose microbatches are loaded ahead."""
    share: bool = True
    """Whether one process of each host reads an iterable for all of them; else each reads it whole,
    with loader processes of its own."""
    workers: int = pydantic.Field(0, ge=0, le=128)
    """Processes of each host that make the examples of a sequence, a callable or a
    `grain.MapDataset`, for all of its training processes; 0: each makes its own in a thread."""


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
    executors: Literal["auto"] | pydantic.PositiveInt = "auto"
    """Microbatches that a device runs at once, each on sums of its own, where it holds a copy of
    the model alone; no bit moves. `auto`: for a CPU device with several cores the number that is
    fastest when a session begins, if it has so many steps that trying takes a twentieth of them at
    most; else one."""
    microbatches_per_call: int = pydantic.Field(1, ge=1, le=4096)
    """Microbatches that one call of a program runs, at most, in a loop on the device: a call costs
    what many small operations take. Equal bits for any counts; another number has bits of its own.
    """
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
    limbs: Literal[1, 2, "auto"] = 2
    """32-bit integers in which an element of a gradient is summed exactly. Two keep every element
    to float32 precision. One takes half the memory and traffic, but every element of a tensor then
    has the absolute error of its largest: with M microbatches at most 2**(8 - 30 + ceil(log2 M)) of
    the largest magnitude for each of them. `auto`: one where that is at most 2**-16, as it is with
    64 microbatches or fewer, else two; the plan says which."""
    over: Literal["device", "host"] | None = None
    """Where copies of the model meet: in collectives of their devices, or in host memory, where
    devices need no library in common; null: over the host where devices share no such library, a
    GPU and a CPU or cards of two makers, else over the devices."""

    @property
    def microbatch_clip_norm(self) -> float | None:
        """To which each microbatch's own gradient is clipped; None: not at all."""
        return self.clip_norm if self.clip == "before" else None

    @property
    def update_clip_norm(self) -> float | None:
        """To which the gradient of a step is clipped; None: not at all."""
        return self.clip_norm if self.clip == "after" else None


class OptimizerConfig(_Section):
    """The section `optimizer`: how parameters are updated (EPL's)."""

    num_apply_groups: int = pydantic.Field(1, ge=1)
    """Groups in which parameters are updated one after another, each making the gradients that it
    shares with others, below a global norm, again instead of keeping them; 1: all at once."""


class OffloadConfig(_Section):
    """The table `memory.offload`: what waits outside the devices' own memory."""

    optimizer: Literal["device", "host", "disk"] | None = None
    """Where the optimizer's state is between updates, which then run group by group: `device`;
    `host`, in pinned memory of the host; `disk`, in a file below `directory`. Between the three no
    bit moves. Null: on the device, or where it does not fit, in host memory if the devices are
    described with the host's."""
    stash: Literal["device", "host"] | None = None
    """Where that is which waits between forward and backward of a chain of segments (`recompute`,
    stages 2 and 3 of `zero`): `host`, in pinned memory of the host, to which it goes while the next
    program runs, and comes back while one runs before its backward. A microbatch then is such a
    chain. No bit moves. Null: as for `optimizer`."""
    parameters: Literal["device", "host"] | None = None
    """With `zero` of 3, where each copy's own share of the parameters is: `host`, in pinned memory
    of the host, from which it comes for the gather of its segment and for its update. No bit
    moves. Null: as for `optimizer`."""
    directory: str | None = None
    """With `disk`, the folder in which each process has a file of its own, on a disk of this
    machine; null: the system's own for temporary files."""


class MemoryConfig(_Section):
    """The section `memory`: where the state of training is."""

    zero: Literal[0, 1, 2, 3] | None = None
    """Stage of ZeRO: 0, every copy of the model has the whole of the optimizer's state; 1, each has
    a share of it and updates that part of the parameters; 2, gradients are shared out too, segment
    by segment; 3, and the parameters, which are gathered segment by segment. From 2 on a step runs
    layer by layer, all microbatches of a device one after another in each, as a chain of segments
    (`recompute`; null is `auto` there, or `boundaries` where no memory is described); in pipelines
    both travel once, before the first tick and after the last. Null: that of the cheapest form
    which the memory holds that the devices are described with."""
    shares: Literal["auto", "even"] | list[pydantic.PositiveInt] = "auto"
    """What of the optimizer's state each copy has, in ratio, such as `[3, 1]`, each at least 1;
    `auto`: by the speed of its device, as far as its memory holds it; even in pipelines."""
    shard_groups: Literal["nodes"] | pydantic.PositiveInt | None = None
    """With `zero`, the number of groups of copies that follow each other: those of a group share
    the state out, and every group has all of it, so that parameters are gathered inside a group;
    `nodes`, the copies of each node are a group. Sums are reduced inside groups and then over them.
    No bit moves. Null: one group; or where the devices are described with their memory and links,
    the nodes, if that is faster and fits."""
    recompute: Literal["none", "boundaries", "auto"] | None = None
    """What waits for the backward of a microbatch. With a word a microbatch runs as a chain of
    segments, each with programs of its own: `none` keeps the residuals of all; `boundaries` keeps
    only what crosses between segments, and runs each forward again; `auto` runs again what is
    cheapest, so that it fits into the memory that the devices are described with. Null: it is one
    program, and XLA decides. Between the words no bit moves."""
    waves: int | None = pydantic.Field(None, ge=1)
    """With `zero` of 2 or 3, in how many waves a device runs its microbatches of a step, one
    through all segments before the next: what waits for backwards is of one wave, and what travels
    does so once in each. Null: with `recompute` of `auto` the fewest that the memory holds that the
    devices are described with, else one."""
    segments: pydantic.PositiveInt | Annotated[list[str], pydantic.Field(min_length=1)] | None = (
        None
    )
    """The segments of `recompute`, and of stages 2 and 3 of `zero`: about how many there are,
    of several layers each or of parts of one, or regular expressions for the paths of modules
    that make one each, such as `["blocks/[0-9]+"]`; null: one for each layer."""
    offload: OffloadConfig = OffloadConfig()
    """What waits outside the devices' own memory: the optimizer's state, parameters, and what
    waits for backwards."""


#: The dtype of an operation under a precision policy.
Dtype = Literal["float32", "bfloat16", "float16"]


class PrecisionExceptionConfig(_Section):
    """An entry of `precision.exceptions`: operations that compute in another dtype."""

    path: str | None = None
    """Regular expression that must be found in the path of a parameter that an operation reads,
    from the start of a path component, as in a rule."""
    scope: str | None = None
    """The same of the scopes (`jax.named_scope`, a Linen module, a TaskGraph) around it."""
    compute: Dtype = "float32"
    """Dtype of what matches."""
    source: str | None = None
    """Where the exception is from, for who reads the file."""


class PrecisionConfig(_Section):
    """The section `precision`: dtypes by class of operation; a word alone is its `preset`."""

    preset: Literal["model", "fp32", "tf32", "bf16", "fp16", "fp8"] = "model"
    """What the keys below are where they are null: `model`, all as the model has it; `fp32` and
    `tf32`, float32 with products of that precision; `bf16` and `fp16`, products and what follows
    them low, and softmax, norm statistics, exponentials, losses and large sums in float32; `fp8`,
    as `bf16`, with the products that read a parameter in float8."""
    params: Dtype | None = None
    """Dtype to which parameters are rounded before the loss reads them; masters stay float32."""
    compute: Dtype | None = None
    """Dtype of matrix products, convolutions, and what follows them."""
    reduction: Literal["float32"] | None = None
    """Dtype in which gradients reach the sums."""
    buffers: Dtype | None = None
    """Dtype to which other variables (BatchNorm's statistics) are rounded before they are read."""
    output: Dtype | None = None
    """Dtype to which losses and metrics are rounded."""
    exceptions: list[PrecisionExceptionConfig] = pydantic.Field([])
    """Operations that compute in another dtype; the first that matches decides."""
    initial_scale: float = pydantic.Field(2.0**24, gt=0)
    """Loss scale of the first step, a power of two, where `nonfinite` is `scale`."""
    growth_steps: int = pydantic.Field(2000, ge=1)
    """Steps without an overflow after which the loss scale doubles."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _is_word(cls, given: Any) -> Any:
        return {"preset": given} if isinstance(given, str) else given


class Config(_Section):
    """All settings of a job that are no arguments of `Job`, in sections.

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
    precision: PrecisionConfig = PrecisionConfig()
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
