"""Runs the microbatches of a device as a chain: the programs of its parts, one after another.

Each part has a forward and a backward of its own, but for the last, which has both in one. In which
order they run, and what waits in memory meanwhile, is a list of operations: it moves no bit, for
the programs are the same. Parts that compute the same share their programs.

Legend of shape suffixes: M microbatches of a step, T float tensors.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core._types import PyTree
from .._graph._graph import shapes_of
from .._schedule._schedules import FORWARD
from .._schedule._segment_sequence import SegmentOperation, SegmentSequence
from .._schedule._sequence_replay import replay_sequence
from ._contribution import DeviceSums, empty_sums
from ._options import compiler_options
from ._replica import Replica
from ._segment_costs import crossing_values, segment_costs, temporary_bytes
from ._segment_part import SegmentedSpec, SegmentPart, shared_tensors, wanted_values


@dataclasses.dataclass
class _Running:
    """What the operations of a step read and leave.

    Attributes:
        own: For each part its parameters, and the first rows of those of which it reads rows.
        scales: For each part those of its sums.
        values: The parts of the sums of each pack.
        peaks: For each part the largest magnitudes.
        small_MS: See `DeviceSums`.
        ints: Likewise.
        given: For each part what it reads of other variables and of the batch, and the numbers of
            step and microbatch.
        inputs: What crosses into a part, where it is kept.
        saved: The residuals of a part.
        grads: Of values, as far as later parts have made them.
        top: The last part whose backward has not run.
    """

    own: list[Any]
    scales: list[jax.Array]
    values: list[Any]
    peaks: list[jax.Array]
    small_MS: jax.Array
    ints: list[jax.Array]
    given: list[Any] = dataclasses.field(default_factory=list)
    inputs: dict[int, dict[int, jax.Array]] = dataclasses.field(default_factory=dict)
    saved: dict[int, list[jax.Array]] = dataclasses.field(default_factory=dict)
    grads: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    top: int = 0


class Segmented:
    """See the module; it is used as `Microbatches` is.

    Args:
        spec: What to run.
        sequence: What runs for a microbatch.
        replica: Its device.
    """

    unit = 1  # it takes any number of microbatches
    kept_bytes = 0  # between steps
    text = ""  # processes have alike programs

    def __init__(self, spec: SegmentedSpec, sequence: SegmentSequence, replica: Replica):
        self._spec, self._sequence, self._replica = spec, sequence, replica
        platform = replica.devices[0].platform
        shared = shared_tensors(spec.graph, spec.parts, spec.trained)
        self._shared = [k for k, pack in enumerate(spec.packs) if not shared.isdisjoint(pack)]
        wanted = wanted_values(spec.graph, spec.trained)
        self._parts = [
            SegmentPart(spec, i, shared=shared, wanted=wanted, on_cpu=platform == "cpu")
            for i in range(len(spec.parts))
        ]
        self._crossing = crossing_values([part.stage.part for part in self._parts])
        seen: dict[Any, int] = {}
        #: For each part the first that has the same programs.
        self._same = [seen.setdefault(part.key, i) for i, part in enumerate(self._parts)]
        jit = functools.partial(
            jax.jit, compiler_options=compiler_options(platform, spec.contribution.form)
        )
        self._jitted = {}
        for i in sorted(set(self._same)):
            part = self._parts[i]
            self._jitted[i] = (
                {"loss": jit(part.loss, donate_argnums=(6, 7, 8, 9))}
                if part.is_last
                else {
                    "forward": jit(part.forward),
                    "backward": jit(part.backward, donate_argnums=(8, 9)),
                }
            )
        self._begin = jit(self._begun, donate_argnums=1)
        self._end = jit(self._whole_peaks)
        empty = jax.tree.map(replica.like, jax.eval_shape(self._empty))
        self._zeros = jit(self._empty, out_shardings=jax.tree.map(lambda x: x.sharding, empty))
        self.names = (
            *(
                f"the {which} of {spec.parts[i].segment.name}"
                for i, own in self._jitted.items()
                for which in own
            ),
            "the scales of all parts",
            "the peaks of all parts",
            "empty sums",
        )
        self._compiled: dict[int, dict[str, Any]] = {}
        self._peaks: list[jax.Array] = []

    # -- small programs --------------------------------------------------------------------------

    def _begun(self, exponents_T: jax.Array, shared: Any) -> Any:
        """The scales of each part, and zeros for sums to which several parts add."""
        scales = [exponents_T[np.array(part.tensors, np.int32)] for part in self._parts]
        return scales, jax.tree.map(jnp.zeros_like, shared)

    def _whole_peaks(self, peaks: Sequence[jax.Array]) -> jax.Array:
        """Of all tensors, from those of the parts."""
        places = np.array([t for part in self._parts for t in part.tensors], np.int32)
        zeros = jnp.zeros(len(self._spec.tensors.floats), jnp.int32)
        return zeros.at[places].max(jnp.concatenate(list(peaks)))

    def _empty(self) -> tuple[DeviceSums, list[jax.Array]]:
        return empty_sums(self._spec), [
            jnp.zeros(len(part.tensors), jnp.int32) for part in self._parts
        ]

    # -- compilation -----------------------------------------------------------------------------

    def lower(self, params: Sequence[Any], aux: Sequence[Any], exponents: Any) -> list[Any]:
        """The programs before compilation: of each part that is like no earlier one; the rest."""
        spec, like = self._spec, self._replica.like
        batch = [like(x) for x in shapes_of(spec.graph, spec.graph.batch_values)]
        sums, peaks = jax.tree.map(like, jax.eval_shape(self._empty))
        shared = [sums.values[k] for k in self._shared]
        scales, _ = jax.tree.map(like, jax.eval_shape(self._begun, exponents, shared))
        where = np.zeros(3, np.int32)

        def arrays(values: Sequence[int]) -> list[Any]:
            return [like(x) for x in shapes_of(spec.graph, values)]

        out = []
        for i, programs in self._jitted.items():
            part = self._parts[i]
            stage = part.stage
            own = [params[p] for p in part.params], part.starts
            given = [aux[k] for k in part.aux], [batch[k] for k in part.batch], where
            joined = [sums.values[k] for k in part.packs], peaks[i], scales[i]
            inputs = arrays(stage.part.inputs)
            if part.is_last:
                small = sums.small_MS, sums.ints
                out.append(programs["loss"].lower(*own, inputs, *given, *small, *joined))
                continue
            out.append(programs["forward"].lower(*own, inputs, *given))
            saved = [like(x) for x in stage.residuals]
            grads = arrays(stage.below_floats)
            late = arrays(part.pending)
            out.append(programs["backward"].lower(*own, saved, *given, grads, late, *joined))
        return [
            *out,
            self._begin.lower(exponents, shared),
            self._end.lower(peaks),
            self._zeros.lower(),
        ]

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of `lower`, compiled."""
        flat = iter(compiled)
        self._compiled = {
            i: {name: next(flat) for name in programs} for i, programs in self._jitted.items()
        }
        self._begin, self._end, self._zeros = flat

    # -- running ---------------------------------------------------------------------------------

    def empty(self) -> DeviceSums:
        """Sums of no microbatch."""
        sums, self._peaks = self._zeros()
        return sums  # type: ignore[no-any-return]

    def run(
        self,
        params: Sequence[jax.Array],
        aux: Sequence[jax.Array],
        sums: DeviceSums | None,
        exponents: jax.Array,
        step: int,
        ids: range,
        batches: Sequence[PyTree],
    ) -> tuple[DeviceSums, jax.Array]:
        """Run a step's microbatches.

        Args:
            params: On the replica.
            aux: Other variables.
            sums: Those of the step before, whose memory is used again; None: there are none.
            exponents: Scales, int32[T].
            step: Number of the step.
            ids: Numbers of the microbatches, at least one.
            batches: Their arrays.

        Returns:
            The sums of these microbatches, and a small array to wait on.
        """
        sums = sums or self.empty()
        values = list(sums.values)
        scales, zeros = self._begin(exponents, [values[k] for k in self._shared])
        for k, x in zip(self._shared, zeros, strict=True):
            values[k] = x
        running = _Running(
            own=[([params[p] for p in part.params], part.starts) for part in self._parts],
            scales=scales,
            values=values,
            peaks=self._peaks,
            small_MS=sums.small_MS,
            ints=sums.ints,
        )
        del sums, values  # what is donated is no one else's
        of_aux = [[aux[k] for k in part.aux] for part in self._parts]
        for n, (index, batch) in enumerate(zip(ids, batches, strict=True)):
            where = np.array([step, index, n > 0], np.int32)
            leaves = jax.tree.leaves(batch)
            running.given = [
                (x, [leaves[k] for k in part.batch], where)
                for part, x in zip(self._parts, of_aux, strict=True)
            ]
            running.inputs, running.top = {0: {}}, len(self._parts) - 1
            for op in self._sequence.operations:
                run = self._forward if op.kind == FORWARD else self._backward
                run(running, op)
            assert not {**running.inputs, **running.saved, **running.grads}
        self._peaks = running.peaks
        peaks_T = self._end(self._peaks)
        return DeviceSums(running.small_MS, peaks_T, running.values, running.ints), peaks_T

    def _forward(self, running: "_Running", op: SegmentOperation) -> None:
        i, part, inputs = op.segment, self._parts[op.segment], running.inputs
        before = inputs[i] if op.keeps_input else inputs.pop(i)
        read = [before[v] for v in part.stage.part.inputs]
        program = self._compiled[self._same[i]]["forward"]
        made, kept = program(*running.own[i], read, *running.given[i])
        if op.residuals:
            running.saved[i] = part.stage.all_residuals(read, made, kept)
        if i < running.top and i + 1 not in running.saved:
            after = before | dict(zip(part.stage.part.outputs, made, strict=True))
            inputs[i + 1] = {v: after[v] for v in self._crossing[i + 1]}

    def _backward(self, running: "_Running", op: SegmentOperation) -> None:
        i, part = op.segment, self._parts[op.segment]
        running.top = i - 1
        programs, values = self._compiled[self._same[i]], running.values
        before = running.inputs.pop(i, {})
        joined = [values[k] for k in part.packs], running.peaks[i], running.scales[i]
        if part.is_last:
            read = [before[v] for v in part.stage.part.inputs]
            small = running.small_MS, running.ints
            found, added, running.peaks[i], running.small_MS, running.ints = programs["loss"](
                *running.own[i], read, *running.given[i], *small, *joined
            )
        else:
            grads = [running.grads.pop(v) for v in part.stage.below_floats]
            late = [running.grads.pop(v) for v in part.pending]
            saved = running.saved.pop(i)
            found, added, running.peaks[i] = programs["backward"](
                *running.own[i], saved, *running.given[i], grads, late, *joined
            )
        running.grads.update(zip(part.floats, found, strict=True))
        for k, x in zip(part.packs, added, strict=True):
            values[k] = x

    def memory_bytes(self, sums_bytes: int) -> int:
        """Bytes that one device needs beside the state while it runs microbatches.

        Args:
            sums_bytes: Of the sums.
        """
        temporary = [
            tuple(temporary_bytes(program) for program in self._compiled[i].values())
            for i in self._same
        ]
        costs = segment_costs(self._spec.graph, [part.stage for part in self._parts], temporary)
        return sums_bytes + replay_sequence(self._sequence, costs).peak_bytes
