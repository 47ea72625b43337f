"""`hxla.record_bits` and `hxla.inspect_bits`: one microbatch of a job on two sides.

A program runs equation by equation, each compiled alone, on one device or on two. Two devices both
read the operands that the first one computed, so that a difference comes from the equation itself
and not from an earlier one.
"""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..choose.make_plan import workloads
from ..choose.planning import PlanRequest, size_asked
from ..core.errors import InspectError
from ..core.types import PyTree
from ..graph.graph import Graph
from ..inspect.bits import (
    BitsComparison,
    BitsRecord,
    RecordedEquation,
    RecordedRead,
    RecordedRun,
    compare_bits,
)
from ..jax.digest import fingerprint
from ..jax.jaxpr import (
    ClosedJaxpr,
    Literal,
    as_function,
    inner_jaxpr,
    is_of_jax,
    kind_of,
    run_equation,
    scan_counts,
    scopes_around,
    source_of,
)
from ..jax.ordered_adds import ordered
from ..job.context import JobContext
from ..lower.compile import adds_in_order, compiler_options
from ..lower.contribution import gradient_of, microbatch_key
from ..model.annotations import uncounted
from ..model.functional import leaf_names
from ..plan.parts import SumsForm, versions_here
from .job import Job, job_of


@dataclasses.dataclass(frozen=True)
class _RecordedArray:
    """An array on the first device, with its record.

    Attributes:
        digest: SHA-256 of its bits.
        param: Its path if it is a parameter.
    """

    array: Any
    digest: str
    producer: int | None = None
    param: str = ""

    @property
    def read(self) -> RecordedRead:
        return RecordedRead(self.producer, self.digest)


@dataclasses.dataclass(frozen=True)
class _CallStack:
    """The equations that run a program, outermost first.

    Attributes:
        path: Their ids, which distinguish the calls of one program.
        lines: Ids of their lines in the user's code, equal forward and backward.
        is_backward: Whether one of them belongs to a backward pass.
        source: File and line of the innermost one.
        is_of_jax: Whether one of them runs a function of jax itself.
    """

    path: tuple[int, ...] = ()
    lines: tuple[int, ...] = ()
    scope: str = ""
    is_backward: bool = False
    source: str = ""
    is_of_jax: bool = False

    def inside(self, eqn: Any) -> "_CallStack":
        scopes, is_backward = scopes_around(eqn)
        parts = uncounted(scopes).split("/") if scopes else []
        # Some inner programs repeat the scopes around their equation, others do not.
        scope = _unrepeated([*filter(None, self.scope.split("/")), *parts])
        return _CallStack(
            path=(*self.path, id(eqn)),
            lines=(*self.lines, id(eqn.source_info.traceback)),
            scope="/".join(scope),
            is_backward=self.is_backward or is_backward,
            # jax traces its functions once: they know the line of their first call only.
            source=(not self.is_of_jax and source_of(eqn)) or self.source,
            is_of_jax=self.is_of_jax or is_of_jax(eqn),
        )


def _unrepeated(parts: list[str]) -> list[str]:
    """Names without a repeated prefix."""
    for n in range(len(parts) // 2, 0, -1):
        if parts[:n] == parts[n : 2 * n]:
            return _unrepeated(parts[n:])
    return parts


class EquationRuns:
    """Runs a program and records it.

    Args:
        devices: One, or two; both read the operands that the first one computed.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self._devices = tuple(devices)
        self._options = [compiler_options(d.platform, SumsForm()) for d in devices]
        self._programs: dict[Any, list[Callable[..., Any]]] = {}
        self._places: dict[tuple[int, ...], int] = {}
        self._last_param = ""
        self._after: dict[tuple[int, ...], str] = {}
        self._kept: list[Any] = []  # programs whose equations' ids are keys must live
        self.equations: list[RecordedEquation] = []
        #: By device.
        self.runs: list[list[RecordedRun]] = [[] for _ in devices]

    def run(
        self, closed: ClosedJaxpr, arguments: Sequence[Any], params: Sequence[str]
    ) -> list[str]:
        """Run a program.

        Args:
            params: Paths of the first arguments, which are parameters.

        Returns:
            SHA-256 of each argument.
        """
        names = [*params, *[""] * (len(arguments) - len(params))]
        values = [
            _RecordedArray(jax.device_put(x, self._devices[0]), digest(x), -1 - i, name)
            for i, (x, name) in enumerate(zip(arguments, names, strict=True))
        ]
        self._walk(closed, values, _CallStack())
        return [x.digest for x in values]

    def _walk(
        self, closed: ClosedJaxpr, arguments: Sequence[_RecordedArray], around: _CallStack
    ) -> list[_RecordedArray]:
        jaxpr = closed.jaxpr
        self._kept.append(jaxpr)
        env = {v: _constant(c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}
        env |= dict(zip(jaxpr.invars, arguments, strict=True))

        def read(v: Any) -> _RecordedArray:
            return _constant(v.val, v.aval.dtype) if _is_literal(v) else env[v]

        last = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not _is_literal(v)}
        kept = {v for v in jaxpr.outvars if not _is_literal(v)}
        for i, eqn in enumerate(jaxpr.eqns):
            results = self._equation(eqn, [read(v) for v in eqn.invars], around)
            env.update(zip(eqn.outvars, results, strict=True))
            for v in {v for v in eqn.invars if not _is_literal(v)} - kept:
                if last[v] == i:
                    del env[v]
        return [read(v) for v in jaxpr.outvars]

    def _equation(
        self, eqn: Any, operands: list[_RecordedArray], around: _CallStack
    ) -> list[_RecordedArray]:
        kind, inner = kind_of(eqn), inner_jaxpr(eqn)
        for x in operands:
            self._last_param = x.param or self._last_param
        inside = around.inside(eqn)
        if kind == "scan":
            assert inner is not None
            return self._scan(eqn, inner, operands, inside)
        if kind in ("inlined", "custom", "remat"):
            assert inner is not None
            return self._walk(inner, operands, inside)
        return self._leaf(eqn, operands, inside)

    def _scan(
        self, eqn: Any, inner: ClosedJaxpr, operands: list[_RecordedArray], inside: _CallStack
    ) -> list[_RecordedArray]:
        num_consts, num_carry = scan_counts(eqn)
        consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
        slices, length = operands[num_consts + num_carry :], eqn.params["length"]
        stacked: list[list[_RecordedArray]] = []
        for i in range(length)[:: -1 if eqn.params["reverse"] else 1]:
            rows = [_row(x, i) for x in slices]
            results = self._walk(inner, [*consts, *carry, *rows], inside)
            carry = results[:num_carry]
            stacked.append(results[num_carry:])
        if eqn.params["reverse"]:
            stacked.reverse()
        avals = [v.aval for v in eqn.outvars[num_carry:]]
        columns = list(zip(*stacked, strict=True)) or [()] * len(avals)
        return [*carry, *(_stack(x, a) for x, a in zip(columns, avals, strict=True))]

    def _leaf(
        self, eqn: Any, operands: list[_RecordedArray], inside: _CallStack
    ) -> list[_RecordedArray]:
        place = self._place(eqn, inside)
        arrays = [x.array for v, x in zip(eqn.invars, operands, strict=True) if not _is_literal(v)]
        programs = self._compiled(eqn)
        made = []
        for device, program, runs in zip(self._devices, programs, self.runs, strict=True):
            results = program(*(jax.device_put(x, device) for x in arrays))
            digests = tuple(map(digest, results))
            runs.append(RecordedRun(place, tuple(x.read for x in operands), digests))
            made.append((results, digests))
        number = len(self.runs[0]) - 1
        return [_RecordedArray(x, d, number) for x, d in zip(*made[0], strict=True)]

    def _place(self, eqn: Any, inside: _CallStack) -> int:
        """The place of an equation, which is recorded if it is new."""
        if inside.path not in self._places:
            if not inside.is_backward:
                self._after.setdefault(inside.lines, self._last_param)
                self._after.setdefault(inside.lines[:1], self._last_param)
            after = self._after.get(inside.lines) or self._after.get(inside.lines[:1], "")
            self._places[inside.path] = len(self.equations)
            self.equations.append(
                RecordedEquation(
                    primitive=eqn.primitive.name,
                    scope=inside.scope,
                    after=after,
                    source=inside.source,
                    results=tuple(v.aval.str_short() for v in eqn.outvars),
                    is_backward=inside.is_backward,
                )
            )
        return self._places[inside.path]

    def _compiled(self, eqn: Any) -> list[Callable[..., Any]]:
        """The programs of an equation alone, for each device; like equations share them."""
        operands = tuple(
            (str(v.aval), digest(v.val)) if _is_literal(v) else str(v.aval) for v in eqn.invars
        )
        key: Any = (eqn.primitive.name, operands, tuple(sorted(eqn.params.items())))
        try:
            hash(key)
        except TypeError:  # an array is among the parameters
            key = id(eqn)
        if key not in self._programs:
            run = _alone(eqn)
            jitted = [jax.jit(run, compiler_options=options) for options in self._options]
            # Devices of one kind share a program.
            self._programs[key] = [jitted[self._options.index(o)] for o in self._options]
        return self._programs[key]


def _alone(eqn: Any) -> Callable[..., list[Any]]:
    def run(*arrays: Any) -> list[Any]:
        operands = iter(arrays)
        return run_equation(eqn, [None if _is_literal(v) else next(operands) for v in eqn.invars])

    return run


def _is_literal(v: Any) -> bool:
    return isinstance(v, Literal)


def _constant(value: Any, dtype: Any = None) -> _RecordedArray:
    return _RecordedArray(value, digest(value if dtype is None else np.asarray(value, dtype)))


def digest(x: Any) -> str:
    """SHA-256 of the bits of an array; random keys are allowed."""
    if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return fingerprint(x)


def _row(x: _RecordedArray, i: int) -> _RecordedArray:
    row = jax.lax.dynamic_index_in_dim(x.array, i, keepdims=False)
    return dataclasses.replace(x, array=row, digest=digest(row))


def _stack(rows: Sequence[_RecordedArray], aval: Any) -> _RecordedArray:
    """Stack the rows of a scan's iterations; the last one's producer counts for all."""
    whole = jnp.stack([x.array for x in rows]) if rows else jnp.zeros(aval.shape, aval.dtype)
    return _RecordedArray(whole, digest(whole), rows[-1].producer if rows else None)


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
