"""Typed settings that most runs never change."""

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
    "AGAIN CHANNEL CHOSEN_DEVICES DEVICES PLAN MESH COORDINATOR LAUNCHER_PID LIVE LOCAL_CLIENTS "
    "LOGS NUM_PROCESSES PROCESS_ID JOB GENERATION MEMORY NEIGHBOURS WAITS COMMAND"
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
    """The section `balance`: when microbatch counts change."""

    min_gain: float = pydantic.Field(0.015, ge=0)
    """Predicted gain in step time below which counts stay (0.015: 1.5 per cent)."""
    patience_steps: int = pydantic.Field(2, ge=1)
    """Consecutive steps that must agree before counts change."""
    window_steps: int = pydantic.Field(9, ge=1)
    """Steps whose median time shows a change of speed; a device that keeps its speed has the median
    of up to eight times as many."""
    retry_steps: int = pydantic.Field(50, ge=1)
    """Steps after which a device without microbatches is tried again, and counts without a gain may
    be chosen again."""


class WatchdogConfig(_Section):
    """The section `watchdog`: when a job of several processes is ended."""

    heartbeat_timeout_seconds: float = pydantic.Field(7.0, gt=0)
    """Seconds without an answer after which a process counts as dead or frozen."""
    progress_timeout_seconds: float = pydantic.Field(600.0, gt=0)
    """Seconds without progress after which a job counts as stuck; compilation is progress."""
    compare_steps: int = pydantic.Field(100, ge=1)
    """Steps after which the state of all replicas is compared, by a checksum."""


class CheckpointConfig(_Section):
    """The section `checkpoint`: the number of checkpoints, and copies in memory."""

    keep: int = pydantic.Field(3, ge=1)
    """The number of newest checkpoints to keep."""
    in_memory_every: int | None = pydantic.Field(None, ge=1)
    """Steps between copies of the state in host memory, for `hxla run --elastic`. If each member
    has only a shard of the state, a killed process loses at most so many steps. None: no copies."""


class DataConfig(_Section):
    """The section `data`: how far ahead microbatches are loaded, and by which processes."""

    prefetch_steps: int = pydantic.Field(2, ge=1)
    """The number of steps whose microbatches are loaded ahead."""
    share: bool = True
    """Whether one process of each host reads an iterable for all its processes; else each process
    reads all of it, with separate loader processes."""
    workers: int = pydantic.Field(0, ge=0, le=128)
    """Worker processes of each host that load the examples of a sequence, a callable or a
    `grain.MapDataset`, for all its training processes; 0: each training process loads examples in a
    thread."""


class AutoConfig(_Section):
    """The section `auto`: automatic choices of hxla (EPL's section of the same name)."""

    auto_parallel: bool = False
    """Without a plan, mesh, rules or stages: time the local devices, search, and run the best plan;
    the runners-up are reported. An annotated model is refused."""
    num_stages: int | None = pydantic.Field(None, ge=2)
    """The number of pipeline stages for a model without annotations."""
    all_devices: bool = False
    """A search keeps every device in the plan, also a device that makes a step longer. If false,
    `hxla run` starts the job again without such devices."""


class IoConfig(_Section):
    """The section `io`: how examples are stored in files (EPL's)."""

    examples_per_file: int = pydantic.Field(1, ge=1)
    """Examples of one file: files are shuffled, then the examples within a file, so that a device
    reads few files; 1: all examples are shuffled."""


class ClusterConfig(_Section):
    """The section `cluster`: how TaskGraphs take devices (Whale's and EPL's)."""

    share_devices: bool = False
    """TaskGraphs with device counts use the same devices instead of separate ones."""
    visible_devices: list[pydantic.NonNegativeInt] | None = pydantic.Field(None, min_length=1)
    """Indices of the devices to use, in the order of all devices; null: all."""
    prefer_intra_node: bool = True
    """Keep the devices of a replica on one node if the nodes' sizes allow it."""
    executors: Literal["auto"] | pydantic.PositiveInt = "auto"
    """Microbatches that a device runs at once, each with separate sums, if the device has a replica
    alone; no bit moves. `auto`: for a CPU device with several cores the fastest number at the start
    of a session, if the trials take at most a twentieth of its steps; else one."""
    microbatches_per_call: Literal["auto"] | Annotated[int, pydantic.Field(ge=1, le=4096)] = "auto"
    """The most microbatches that one call of a program runs, in a loop on the device: a call costs
    as much as many small operations. Bits do not depend on the counts, but on this number. A chain
    of segments keeps the residuals of all microbatches of a call. One call of a pipeline runs all
    of a step, whatever the number. `auto`: as many as have inputs of 16 MiB together, where a
    replica is one device and a microbatch one program; else 1."""
    layout: Literal["auto", "all", "host"] | list[list[pydantic.NonNegativeInt]] = "auto"
    """Devices of a replica: `auto`, as many as the TaskGraphs ask for; `all`, one replica over all
    devices; `host`, those of one host; or lists of device indices."""


class PipelineConfig(_Section):
    """The section `pipeline`: the microbatches of a global batch, and the schedule of stages."""

    num_micro_batch: int | None = pydantic.Field(None, ge=1)
    """The number of microbatches of a global batch, an alternative to `microbatch_size`."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] | list[list[str]] = "1f1b"
    """The order of forwards and backwards in a pipeline: a name, or a table of ticks and stages as
    `hxla.schedule_from_table` reads it."""
    num_chunks: int = pydantic.Field(1, ge=1)
    """Chunks of the model on each stage of an `interleaved` pipeline."""


class CommunicationConfig(_Section):
    """The section `communication`: how gradients are reduced (EPL's)."""

    bucket_mib: int = pydantic.Field(256, ge=1)
    """Size of the buckets in which small tensors are reduced; a larger tensor goes alone."""
    gradient: Literal["mean", "sum"] = "mean"
    """Whether the gradient is that of the global batch's mean loss, or of its sum."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which the sums of `reduction="float"` are sent between replicas."""
    sparse_embeddings: bool = False
    """Send only the rows of an embedding's gradient that a step touched, if that is less."""
    clip_norm: float | None = pydantic.Field(None, gt=0)
    """Global norm to which gradients are clipped; null: no clipping."""
    clip: Literal["before", "after"] = "after"
    """Clip the gradient of each microbatch before the sum, or of the global batch after it."""
    limbs: Literal[1, 2, "auto"] = 2
    """32-bit integers in which an element of a gradient is summed exactly. Two keep every element
    to float32 precision. One takes half the memory and traffic, but every element of a tensor then
    has the absolute error of its largest: with M microbatches at most 2**(8 - 30 + ceil(log2 M)) of
    the largest magnitude for each of them. `auto`: one if that is at most 2**-16, so for 64
    microbatches or fewer, else two; the plan records which."""
    over: Literal["device", "host"] | None = None
    """Where gradients of replicas are reduced: by collectives of the devices, or in host memory,
    for which devices need no common library. Null: in host memory for devices without one (a GPU
    and a CPU, or cards of two makers), else on the devices."""

    @property
    def microbatch_clip_norm(self) -> float | None:
        """Norm to which the gradient of each microbatch is clipped; None: no clipping."""
        return self.clip_norm if self.clip == "before" else None

    @property
    def update_clip_norm(self) -> float | None:
        """Norm to which the gradient of a step is clipped; None: no clipping."""
        return self.clip_norm if self.clip == "after" else None


class OptimizerConfig(_Section):
    """The section `optimizer`: how parameters are updated (EPL's)."""

    num_apply_groups: int = pydantic.Field(1, ge=1)
    """Groups of parameters that are updated one after another, to save memory. Values that groups
    share, such as the gradients below a global norm, are recomputed by each. 1: all at once."""


class OffloadConfig(_Section):
    """The table `memory.offload`: state and residuals outside the devices' memory."""

    optimizer: Literal["device", "host", "disk"] | None = None
    """Where the optimizer's state is between updates, which then run group by group: `device`;
    `host`, in pinned host memory; `disk`, in a file below `directory`. The choice moves no bit.
    Null: on the device; if it does not fit, in host memory, provided that the devices' description
    includes it."""
    stash: Literal["device", "host"] | None = None
    """Where the residuals of a chain of segments (`recompute`, stages 2 and 3 of `zero`) are stored
    between forward and backward. `host`: in pinned host memory, sent while the next program runs,
    and fetched while the program before their backward runs. A microbatch then runs as a chain. No
    bit moves. Null: as for `optimizer`."""
    parameters: Literal["device", "host"] | None = None
    """With `zero` of 3, where each replica's shard of the parameters is stored: `host`, in pinned
    host memory, fetched for the all-gather of its segment and for its update. No bit moves. Null:
    as for `optimizer`."""
    directory: str | None = None
    """With `disk`, a folder on a disk of this machine in which each process creates a file; null:
    the system's folder for temporary files."""


class MemoryConfig(_Section):
    """The section `memory`: where training state and residuals are stored."""

    zero: Literal[0, 1, 2, 3] | None = None
    """Stage of ZeRO: 0, every replica has the whole optimizer state; 1, the optimizer state is
    sharded over replicas, and each updates its shard of the parameters; 2, gradients are sharded
    too, segment by segment; 3, also the parameters, which are gathered segment by segment. From
    stage 2 on a step runs as a chain of segments, with all microbatches of a device in a segment
    before the next (`recompute`; null then means `auto`, or `boundaries` if no memory is
    described). In pipelines gathers and reductions run once, before the first tick and after the
    last. Null: the stage of the cheapest layout that fits the described memory."""
    shares: Literal["auto", "even"] | list[pydantic.PositiveInt] = "auto"
    """The ratio of the replicas' shards of the optimizer state, such as `[3, 1]`, each at least 1;
    `auto`: by the speed of the devices, within their memory; even in pipelines."""
    shard_groups: Literal["nodes"] | pydantic.PositiveInt | None = None
    """With `zero`, the number of groups of consecutive replicas. The state is sharded inside a
    group and replicated over groups, so parameters are gathered inside a group. `nodes`: the
    replicas of each node are a group. Sums are reduced inside groups and then over groups. No bit
    moves. Null: one group; if memory and links of the devices are described, the nodes, provided
    that is faster and fits."""
    recompute: Literal["none", "boundaries", "auto"] | None = None
    """The residuals of a microbatch. With a word a microbatch runs as a chain of segments with
    separate programs: `none` keeps all residuals; `boundaries` keeps only the inputs of segments,
    and runs each forward again; `auto` runs the cheapest forwards again, so that the rest fits the
    described memory. Null: a microbatch is one program, and XLA decides. The choice of a word moves
    no bit. In a pipeline the segments are the parts on its stages, and the bits depend on what they
    keep: `auto` is `none` if that fits, and null is `none`; stages of several devices keep
    `boundaries`."""
    waves: int | None = pydantic.Field(None, ge=1)
    """With `zero` of 2 or 3, the number of waves of microbatches in a step. A wave runs through all
    segments before the next: residuals are those of one wave, and each wave repeats the gathers and
    reductions. Null: with `recompute` of `auto` the fewest that fit the described memory, else
    one."""
    segments: pydantic.PositiveInt | Annotated[list[str], pydantic.Field(min_length=1)] | None = (
        None
    )
    """The segments of `recompute`, and of stages 2 and 3 of `zero`: their approximate number, each
    several layers or a part of one; or regular expressions for the paths of modules, each of which
    is a segment, such as `["blocks/[0-9]+"]`; null: one for each layer."""
    offload: OffloadConfig = OffloadConfig()
    """Where optimizer state, parameters and residuals are stored outside the devices' memory."""


class IslandsConfig(_Section):
    """The section `islands`: local steps between meetings (DiLoCo), for slow networks."""

    every: int | None = pydantic.Field(None, ge=1)
    """Steps between two meetings. An island is a group of consecutive replicas. It sums gradients
    over its own microbatches and updates its own parameters. At a meeting all islands average their
    parameters and the optimizer's state. No gradient travels between islands. Bits depend on this
    number. Null: no islands."""
    replicas: (
        Literal["nodes"] | Annotated[list[pydantic.PositiveInt], pydantic.Field(min_length=2)]
    ) = "nodes"
    """The replicas of each island, in order, such as `[2, 1]`; `nodes`: those of each node, or one
    each on a single node."""
    learning_rate: float = pydantic.Field(1.0, gt=0)
    """Learning rate of the outer step, which moves the parameters of the last meeting towards the
    average."""
    momentum: float = pydantic.Field(0.0, ge=0, lt=1)
    """Nesterov momentum of the outer step; 0 keeps no momentum."""


class NumericsConfig(_Section):
    """The section `numerics`: what may not move a bit."""

    cut: Literal["planned", "any"] = "planned"
    """`any`: bits do not depend on the size of the axis `tensor`, on stages, on the form of
    replicas or on recomputation, so all of these plans share `Plan.numerics`. Matrix products are
    computed in granules, and all sums in a fixed order, which costs time. `planned`: bits are those
    of the planned cut, the fastest."""
    granules: Literal[2, 4, 8, 16, 32, 64] = 4
    """With `cut` of `any`, the granules of each dimension that `tensor` cuts: a device has one or
    more whole ones. Bits depend on this number."""


#: The dtype of an operation under a precision policy.
Dtype = Literal["float32", "bfloat16", "float16"]


class PrecisionExceptionConfig(_Section):
    """An entry of `precision.exceptions`: operations that compute in another dtype."""

    path: str | None = None
    """Regular expression that must match in the path of a parameter that an operation reads, from
    the start of a path component, as in a rule."""
    scope: str | None = None
    """The same for the scopes (`jax.named_scope`, a Linen module, a TaskGraph) around it."""
    compute: Dtype = "float32"
    """Dtype of matching operations."""
    source: str | None = None
    """The origin of the exception, for readers of the file."""


class PrecisionConfig(_Section):
    """The section `precision`: dtypes by class of operation; a word alone is its `preset`."""

    preset: Literal["model", "fp32", "tf32", "bf16", "fp16", "fp8"] = "model"
    """The values of the keys below that are null: `model`, the model's dtypes; `fp32` and `tf32`,
    float32 with products of that precision; `bf16` and `fp16`, products and the operations that
    follow them low, and softmax, norm statistics, exponentials, losses and large sums in float32;
    `fp8`, as `bf16`, with the products that read a parameter in float8."""
    params: Dtype | None = None
    """Dtype to which parameters are rounded before the loss reads them; masters stay float32."""
    compute: Dtype | None = None
    """Dtype of matrix products, convolutions, and the operations that follow them."""
    reduction: Literal["float32"] | None = None
    """Dtype of gradients before they are summed."""
    buffers: Dtype | None = None
    """Dtype to which other variables (BatchNorm's statistics) are rounded before they are read."""
    output: Dtype | None = None
    """Dtype to which losses and metrics are rounded."""
    exceptions: list[PrecisionExceptionConfig] = pydantic.Field([])
    """Operations that compute in another dtype; the first that matches decides."""
    initial_scale: float = pydantic.Field(2.0**24, gt=0)
    """Loss scale of the first step, a power of two, if `nonfinite` is `scale`."""
    growth_steps: int = pydantic.Field(2000, ge=1)
    """Steps without an overflow after which the loss scale doubles."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_word(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value


class Config(_Section):
    """All settings of a job that are not arguments of `Job`, in sections.

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
    numerics: NumericsConfig = NumericsConfig()
    islands: IslandsConfig = IslandsConfig()
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
        config: A `Config` is returned unchanged. Dictionaries, and a path to a `.json` or `.toml`
            file, override the environment.
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
    sections = (
        _read(config) if isinstance(config, str | os.PathLike) else _lists(dict(config or {}))
    )
    for section, values in sections.items():
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


def _lists(tree: Any) -> Any:
    """The same value with lists in place of tuples, as in a file."""
    if isinstance(tree, dict):
        return {key: _lists(value) for key, value in tree.items()}
    return [_lists(value) for value in tree] if isinstance(tree, list | tuple) else tree


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
    """A number, boolean or null of JSON; any other text is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text
