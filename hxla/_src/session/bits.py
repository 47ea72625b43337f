"""`hxla.record_bits` and `hxla.inspect_bits`: one microbatch of a job on two sides."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..choose.make_plan import workloads
from ..choose.planning import PlanRequest, size_asked
from ..core.errors import InspectError
from ..core.types import PyTree
from ..graph.graph import Graph
from ..inspect.bits import BitsComparison, BitsRecord, compare_bits
from ..inspect.bits_runs import EquationRuns, digest
from ..jax.jaxpr import as_function
from ..jax.ordered_adds import ordered
from ..job.context import JobContext
from ..lower.compile import adds_in_order, compiler_options
from ..lower.contribution import gradient_of, microbatch_key
from ..model.functional import leaf_names
from ..plan.parts import SumsForm, versions_here
from .job import Job, job_of

_DEVICE = re.compile(r"[a-z]+:\d+")


def record_bits(
    job: Job, *, device: str | None = None, microbatch_size: int | None = None
) -> BitsRecord:
    """Run the first microbatch of a job forward and backward, and keep a digest of every result.

    Each equation of the traced gradient is compiled alone and run on the results of the equations
    before it; scans run iteration by iteration. Then the whole microbatch is compiled as one
    program and run too. The parameters are the initial ones of a training run.

    Args:
        job: The job whose microbatch is run.
        device: The platform and number of a device, such as `gpu:0`; None takes jax's first device.
        microbatch_size: The number of examples in the microbatch. None takes the size by
            `pipeline.num_micro_batch`, or else the whole batch.

    Returns:
        The record, to be written to a file and compared with that of another machine or version.

    Raises:
        InspectError: If there is no such device.
        ConfigError: If the size does not divide the batch, or the model has no initial arrays.
        WeightsError: If the job's weights and its model do not suit each other.
        LossError: If the loss returns another form.

    Example:
        >>> import hxla, numpy as np, optax
        >>> from flax import nnx
        >>> data = {"x": np.eye(8, dtype=np.float32)}
        >>> def loss(model, batch):
        ...     return model(batch["x"]).mean()
        >>> model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        >>> job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8)
        >>> record = hxla.record_bits(job, microbatch_size=2)
        >>> {e.primitive for e in record.equations} >= {"dot_general", "add"}
        True

    References:
        Li et al., "EasyScale", SC 2023, section 3.3.
    """
    chosen = None if device is None else device_of(device)
    [record] = _records(JobContext(job), [chosen or jax.devices()[0]], microbatch_size)
    return record


def inspect_bits(
    a: BitsRecord | str | os.PathLike[str],
    b: BitsRecord | str | os.PathLike[str],
    *,
    job: Job | None = None,
    microbatch_size: int | None = None,
) -> BitsComparison:
    """Compare the results of two sides, and name the first equation whose bits differ.

    Args:
        a: A record of `hxla.record_bits`, its file, or, with a job, a device of this process such
            as `cpu:0`.
        b: The other side, of the same kinds. Two devices run every equation on the results of the
            first device, so every equation is compared. Of two records only equations that read
            the same bits are compared.
        job: The job to run, where `a` and `b` are devices.
        microbatch_size: The number of examples in the microbatch, see `record_bits`.

    Returns:
        The comparison; `print` shows it.

    Raises:
        InspectError: If a file holds no record, or there is no such device.
        ConfigError: See `record_bits`; so are `WeightsError` and `LossError`.

    Example:
        >>> import hxla, numpy as np, optax
        >>> from flax import nnx
        >>> data = {"x": np.eye(8, dtype=np.float32)}
        >>> def job(power):
        ...     def loss(model, batch):
        ...         return (model(batch["x"]) ** power).mean()
        ...     model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        ...     return hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8)
        >>> one, two = hxla.record_bits(job(2)), hxla.record_bits(job(3))
        >>> hxla.inspect_bits(one, one).is_equal, hxla.inspect_bits(one, two).is_equal
        (True, False)

    References:
        Li et al., "EasyScale", SC 2023, section 3.3 (its profiler of operators).
    """
    if job is None:
        sides = [_read(side) for side in (a, b)]
        return compare_bits(*sides)
    devices = [device_of(side) for side in (a, b)]
    return compare_bits(*_records(JobContext(job), devices, microbatch_size))


def _read(side: BitsRecord | str | os.PathLike[str]) -> BitsRecord:
    if isinstance(side, BitsRecord):
        return side
    if isinstance(side, str) and _DEVICE.fullmatch(side):
        raise InspectError(f"{side} is a device: say too what is to run on it, by job=")
    return BitsRecord.read(side)


def device_of(name: Any) -> jax.Device:
    """A device of this process by its platform and number.

    Raises:
        InspectError: If there is no such device, with the devices there are.
    """
    if not (isinstance(name, str) and _DEVICE.fullmatch(name)):
        raise InspectError(f"{name!r} is no device: give platform and number, cpu:0 or gpu:0")
    platform, number = name.split(":")
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise InspectError(f"{name}: jax has no {platform} here: {error}") from None
    if int(number) >= len(devices):
        raise InspectError(f"{name}: the {platform} devices here are 0 to {len(devices) - 1}")
    return devices[int(number)]


def _records(
    job: JobContext, devices: Sequence[jax.Device], microbatch_size: int | None
) -> list[BitsRecord]:
    """A record of each device; a second device runs on the operands of the first."""
    size = (
        size_asked(workloads(job), PlanRequest(microbatch_size=microbatch_size)) or job.batch_size
    )
    graph, model = job.graph(size), job.functional(size)
    params, aux = _initial(job, size)
    trained = model.trained_places
    # Integer arithmetic, equal on every device.
    key = microbatch_key(job.seed, jnp.int32(0), jnp.int32(0))
    batch = job.as_inputs(job.first_batch(0, size))
    shapes = jax.tree.leaves(job.shapes(size))
    leaves = [np.asarray(x, s.dtype) for x, s in zip(jax.tree.leaves(batch), shapes, strict=True)]
    arguments = [*params, *aux, key, *leaves]
    names = [
        *graph.param_names,
        *leaf_names(model.aux),
        "random key",
        *(f"batch/{name}" for name in leaf_names(batch)),
    ]
    gradient = _gradient(graph, trained, on_cpu=False)
    closed = jax.make_jaxpr(gradient)(*_grouped(graph, arguments))
    runs = EquationRuns(devices)
    digests = runs.run(closed, arguments, graph.param_names)
    made = ["loss", "sums", *(f"new {name}" for name in leaf_names(model.aux))]
    made += [f"gradient of {graph.param_names[i]}" for i in trained]
    return [
        BitsRecord(
            device=f"{device.platform} {device.device_kind}",
            made_with=versions_here(on_cpu=device.platform == "cpu"),
            microbatch_size=size,
            inputs=tuple(zip(names, digests, strict=True)),
            equations=tuple(runs.equations),
            runs=tuple(device_runs),
            compiled=tuple(zip(made, _whole(graph, trained, arguments, device), strict=True)),
        )
        for device, device_runs in zip(devices, runs.runs, strict=True)
    ]


def _initial(job: JobContext, size: int) -> tuple[list[Any], list[Any]]:
    """Initial parameters and other variables, made on a CPU."""
    model = job.training(size, 0).model
    read = job.opened_weights(size)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        tree: PyTree = model.arrays
        if model.initialise is not None:
            tree = jax.jit(model.initialise)(*model.init_arguments)
    params, aux = (jax.tree.leaves(part) for part in tree)
    if read is not None:
        arrays = [*params, *aux]
        for i, from_file in enumerate(read):
            if from_file is not None:
                arrays[i] = np.asarray(
                    from_file((slice(None),) * len(arrays[i].shape)), arrays[i].dtype
                )
        params, aux = arrays[: len(params)], arrays[len(params) :]
    return params, aux


def _gradient(graph: Graph, trained: tuple[int, ...], *, on_cpu: bool) -> Any:
    program = as_function(graph.program)

    def run(params: Any, aux: Any, key: Any, batch: Any) -> list[Any]:
        return program(*params, *aux, key, *batch)

    return gradient_of(run, trained, on_cpu)


def _grouped(graph: Graph, arguments: Sequence[Any]) -> tuple[list[Any], list[Any], Any, list[Any]]:
    num_params, num_aux = len(graph.param_values), len(graph.aux_values)
    rest = list(arguments[num_params + num_aux :])
    aux = list(arguments[num_params : num_params + num_aux])
    return list(arguments[:num_params]), aux, rest[0], rest[1:]


def _whole(
    graph: Graph, trained: tuple[int, ...], arguments: Sequence[Any], device: jax.Device
) -> list[str]:
    """SHA-256 of each result of the microbatch as one program."""
    gradient = _gradient(graph, trained, on_cpu=device.platform == "cpu")
    if adds_in_order(device.platform, SumsForm()):
        gradient = ordered(gradient)
    options = compiler_options(device.platform, SumsForm())
    placed = [jax.device_put(x, device) for x in arguments]
    made = jax.jit(gradient, compiler_options=options)(*_grouped(graph, placed))
    return [digest(x) for x in jax.tree.leaves(made)]


# -- the command -----------------------------------------------------------------------------------


def record_script(script: str, path: str, *, device: str | None, size: int | None) -> None:
    """`hxla inspect SCRIPT --bits-record FILE`: record the job of a script.

    Args:
        script: A Python script and its arguments, as in a shell.
    """
    chosen = None if device is None else device_of(device)
    job, request = job_of(_command(script))
    [record] = _records(
        job, [chosen or jax.devices()[0]], size or size_asked(workloads(job), request)
    )
    record.write(path)
    print(f"written: {path}, {len(record.equations):,} equations in {len(record.runs):,} runs")


def compare_sides(script: str | None, sides: Sequence[str], size: int | None) -> BitsComparison:
    """`hxla inspect [SCRIPT] --bits A B`: of devices with a script, else of records and scripts.

    Raises:
        InspectError: If a side is of no such kind, or a script's record cannot be made.
    """
    if script is not None:
        devices = [device_of(side) for side in sides]
        job, request = job_of(_command(script))
        return compare_bits(*_records(job, devices, size or size_asked(workloads(job), request)))
    for side in sides:
        if _DEVICE.fullmatch(side):
            raise InspectError(
                f"{side} is a device: say too what is to run on it, hxla inspect SCRIPT --bits "
                + " ".join(sides)
            )
    return compare_bits(*(_side(side, size) for side in sides))


def _side(side: str, size: int | None) -> BitsRecord:
    if os.path.isfile(side) and not side.endswith(".py"):
        return BitsRecord.read(side)
    _command(side)
    # A process for each script, as modules of one name may differ between scripts.
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "bits.json")
        command = [sys.executable, "-m", "hxla", "inspect", side, "--bits-record", path]
        command += [] if size is None else ["--microbatch-size", str(size)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise InspectError(f"{side} could not be recorded:\n{done.stdout[-4000:]}")
        return BitsRecord.read(path)


def _command(script: str) -> list[str]:
    command = shlex.split(script)
    if not command or not os.path.isfile(command[0]):
        raise InspectError(
            f"{script!r} is neither a record of bits nor a script in {os.getcwd()}: a script's own "
            "arguments go into the same quotes"
        )
    return command
