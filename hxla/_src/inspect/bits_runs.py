"""Runs a program equation by equation, each compiled alone, on one device or on two.

Two devices both read the operands that the first one computed, so that a difference comes from the
equation itself and not from an earlier one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..jax.digest import fingerprint
from ..jax.jaxpr import (
    ClosedJaxpr,
    Literal,
    inner_jaxpr,
    is_of_jax,
    kind_of,
    run_equation,
    scan_counts,
    scopes_around,
    source_of,
)
from ..lower.compile import compiler_options
from ..model.annotations import uncounted
from ..plan.parts import SumsForm
from .bits import RecordedEquation, RecordedRead, RecordedRun


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
