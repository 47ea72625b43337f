"""Runs the microbatches of a pipeline whose stages are unlike in devices and axes.

A stage is one part of a chain, with the programs of a chain over its devices. Between stages the
values that cross take a route, and so do the gradients that come back: the processes of both stages
call it, in the order of the schedule. Before the microbatches the parameters go from all devices of
the replica to their stages, and after them the sums go back; see `plan.unlike_stages`.

Legend of shape suffixes: M microbatches of a step, S sums of a microbatch, T float tensors.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import DEVICE_AXIS, PyTree
from ..graph.graph import Graph, params_of, shapes_of
from ..jax.devices import is_here
from ..plan.plan import Plan
from ..schedule.schedules import BACKWARD, FORWARD
from ..schedule.segment_sequence import CUT, INPUT, SegmentOperation
from .chain_operations import ChainOperations, MicrobatchArrays, Running
from .contribution import Contribution, DeviceSums, Tensors
from .inputs import Training
from .program_text import ProgramText
from .replica import Replica, device_bytes
from .segment_programs import ChainParts, SegmentPrograms, crossing_values, some_parts
from .stage import map_specs
from .stage_chain_spec import StageChainSpec, stage_chain_spec
from .stage_routes import Stage, fill_routes, hop, return_routes


def stage_chains(
    training: Training, graph: Graph, plan: Plan, tensors: Tensors, trained: tuple[int, ...]
) -> tuple[Contribution, Callable[[Replica], "StageChain"]]:
    """How gradients join the sums, and a function that makes the runner of a replica."""
    spec = stage_chain_spec(training, graph, plan, tensors, trained)
    return spec.chains[0].contribution, functools.partial(StageChain, spec)


class StageChain:
    """The programs of one pipeline on its devices.

    Args:
        replica: All devices of the pipeline, along one axis.
    """

    unit = 1  # it takes any number of microbatches
    kept_bytes = 0

    def __init__(self, spec: StageChainSpec, replica: Replica):
        self._spec, self._replica = spec, replica
        self._stash = spec.schedule(spec.most).peak_stash
        self.most_inputs = max(self._stash)
        first = spec.chains[0]
        #: The traced loss: processes of unlike stages have unlike programs.
        self.text = str(first.graph.program)
        sizes = (math.prod(size for _, size in axes) for axes in spec.axes)
        ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        devices = [replica.devices[a:b] for a, b in ends]
        self._stages = [self._stage(s, each) for s, each in enumerate(devices)]
        self._local = [stage for stage in self._stages if stage.replica.is_local]
        parts = [stage.part for stage in self._stages]
        self._crossing = crossing_values([part.stage.part for part in parts])
        self._operations = ChainOperations(first, parts, _ProgramsOf(self._stages), None)
        # Gloo mixes up collectives that do not depend on each other.
        self._in_turn = replica.spans_processes and replica.devices[0].platform == "cpu"
        self._fills = [x for s in self._stages for x in fill_routes(spec, replica, s)]
        self._returns = [x for s in self._stages for x in return_routes(spec, replica, s)]
        self._hops = {
            (s - (kind == FORWARD), kind): hop(self._stages, self._crossing[s], s, kind)
            for s in range(1, len(self._stages))
            for kind in (FORWARD, BACKWARD)
        }
        moved = [*self._fills, *self._hops.values(), *self._returns]
        self._moved = [x for x in moved if x.route.is_local and x.items]
        self._join = self._jit_join()
        self._empty = self._jit_empty()
        self.names = (
            *(name for s in self._local if s.programs for name in s.programs.names),
            *(x.name for x in self._moved),
            "the small sums of all stages",
            "empty sums",
        )

    def _stage(self, s: int, devices: Sequence[jax.Device]) -> Stage:
        chain = self._spec.chains[s]
        replica = Replica(self._replica.index, tuple(devices), self._spec.axes[s])
        [part] = some_parts(chain, replica, [s])
        param_of = params_of(chain.graph)
        return Stage(
            index=s,
            chain=chain,
            replica=replica,
            part=part,
            programs=SegmentPrograms(
                chain, ChainParts((part,), (0,), replica), replica, [part.packs]
            )
            if replica.is_local
            else None,
            params=tuple(sorted({param_of[entry] for entry in part.stage.params})),
        )

    # -- small programs --------------------------------------------------------------------------

    def _jit_join(self) -> Any:
        """The small sums of all stages, from those of each device: rows, peaks, words."""
        last = self._replica.devices.index(self._stages[-1].replica.devices[0])

        def hxla_join(small: Any, peaks_T: jax.Array, words: Any) -> Any:
            is_last = jax.lax.axis_index(DEVICE_AXIS) == last
            rest = [jnp.where(is_last, x, jnp.zeros_like(x)) for x in (small, *words)]
            small, *words = (jax.lax.psum(x, DEVICE_AXIS) for x in rest)
            return small, jax.lax.pmax(peaks_T, DEVICE_AXIS), words

        mapped = jax.shard_map(
            hxla_join,
            mesh=self._replica.mesh,
            in_specs=P(DEVICE_AXIS),
            out_specs=P(),
            check_vma=False,
        )
        return jax.jit(mapped, out_shardings=self._replica.sharding(P()))

    def _small_shapes(self) -> tuple[Any, Any, list[Any]]:
        chain = self._spec.chains[0]
        rows = jax.ShapeDtypeStruct((chain.num_microbatches, chain.num_columns), jnp.int32)
        peaks = jax.ShapeDtypeStruct((len(chain.tensors.floats),), jnp.int32)
        return rows, peaks, list(chain.tensors.words)

    def _row(self, x: Any) -> tuple[tuple[int, ...], Any]:
        """The shape and sharding of the arrays of all devices, one after another."""
        shape = (len(self._replica.devices) * x.shape[0], *x.shape[1:])
        return shape, self._replica.sharding(P(DEVICE_AXIS))

    def _row_like(self, x: Any) -> jax.ShapeDtypeStruct:
        shape, sharding = self._row(x)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    def _jit_empty(self) -> Any:
        chain = self._spec.chains[0]
        num = chain.contribution.form.num_parts
        stored = [self._spec.stored_tensor(t) for t in range(len(chain.tensors.floats))]

        def hxla_empty() -> DeviceSums:
            sums = dataclasses.replace(chain, tensors=self._spec.tensors).empty_sums()
            pairs = zip(sums.values, stored, strict=True)
            return sums._replace(values=[tuple(map(p.pad, limbs)) for limbs, (_, p) in pairs])

        values: Any = [(spec,) * num for spec, _ in stored]
        words: Any = [P()] * len(chain.tensors.words)
        specs: Any = [P(), P(), values, words]
        where = map_specs(self._replica.sharding, DeviceSums(*specs))
        return jax.jit(hxla_empty, out_shardings=where)

    # -- compilation -----------------------------------------------------------------------------

    def lower(self, _params: Sequence[Any], aux: Sequence[Any], exponents: Any) -> list[Any]:
        """The programs before compilation, in the order of `names`."""
        out = []
        for stage in self._local:
            assert stage.programs is not None
            like, graph = stage.replica.like, stage.chain.graph
            params = self._params_inside(stage, range(len(graph.param_shapes)))
            out += stage.programs.lower(params, list(map(like, aux)), like(exponents))
        out += [x.route.lower() for x in self._moved]
        rows, peaks, words = (jax.tree.map(self._row_like, x) for x in self._small_shapes())
        return [*out, self._join.lower(rows, peaks, words), self._empty.lower()]

    def _params_inside(self, stage: Stage, places: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
        """Shapes of parameters inside a stage."""
        graph, inside = stage.chain.graph, self._spec.inside[stage.index]
        values = [graph.param_values[p] for p in places]
        pairs = zip(shapes_of(graph, values), [inside[p] for p in places], strict=True)
        return [stage.replica.like(padding.like(x), spec) for x, (spec, padding) in pairs]

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of `lower`, compiled."""
        flat = iter(compiled)
        for stage in self._local:
            assert stage.programs is not None
            stage.programs.adopt(list(itertools.islice(flat, len(stage.programs.names))))
        for x in self._moved:
            x.route.compiled = next(flat)
        self._join, self._empty = next(flat), next(flat)

    def texts(self) -> Iterator[ProgramText]:
        """The optimized programs of the local stages, each forward before its backward."""
        for stage in self._local:
            assert stage.programs is not None
            for kind, program in stage.programs.of(0).items():
                yield ProgramText(
                    text=program.as_text() or "",
                    params={f"params[{k}]": (p,) for k, p in enumerate(stage.part.params)},
                    saved=stage.part.stage.saved_results if kind == "backward" else {},
                )

    # -- running ---------------------------------------------------------------------------------

    def empty(self) -> DeviceSums:
        """Sums of no microbatch."""
        return self._empty()  # type: ignore[no-any-return]

    def run(
        self,
        params: Sequence[jax.Array],
        aux: Sequence[jax.Array],
        _sums: DeviceSums | None,
        exponents: jax.Array,
        step: int,
        ids: range,
        batches: Sequence[PyTree],
    ) -> tuple[DeviceSums, jax.Array]:
        """Run a step's microbatches.

        Args:
            exponents: Scales, int32[T].
            ids: Numbers of the microbatches, at least one.

        Returns:
            The sums as they are between steps, and a small array to wait on.
        """
        filled = self._filled(params)
        running = {
            stage.index: self._begin(stage, filled[stage.index], aux, exponents, step)
            for stage in self._local
        }
        del filled
        begun: dict[int, MicrobatchArrays] = {}
        for tick in self._spec.schedule(len(ids)).table_TS:
            actions = [(s, action) for s, action in enumerate(tick) if action is not None]
            for s, action in actions:
                m = action.microbatch
                if m not in begun:
                    begun[m] = self._microbatch(running, step, ids[m], batches[m])
                self._run(running, begun[m], s, action.kind)
            for s, action in actions:
                self._send(begun[action.microbatch], s, action.kind)
                if (s, action.kind) == (0, BACKWARD):
                    ended = begun.pop(action.microbatch)
                    assert not ended.waits
        return self._end(running)

    def _filled(self, params: Sequence[jax.Array]) -> list[dict[int, jax.Array]]:
        """For each stage its parameters, by their places."""
        out: list[dict[int, jax.Array]] = [{} for _ in self._stages]
        for fill in self._fills:
            arrays = self._settled(fill.route.run([params[p] for p in fill.items]))
            out[fill.stage] |= _present(fill.items, arrays)
        return out

    def _begin(
        self,
        stage: Stage,
        params: Mapping[int, jax.Array],
        aux: Sequence[jax.Array],
        exponents: jax.Array,
        step: int,
    ) -> Running:
        part, programs, num = stage.part, stage.programs, len(self._stages)
        assert programs is not None
        sums = programs.zeros()
        [scales], [peaks], _ = programs.begin(_moved_to(stage.replica, exponents), sums, [])
        values: list[Any] = [None] * len(stage.chain.packs)
        if part.packs:
            for k, x in zip(part.packs, programs.fresh(0), strict=True):
                values[k] = x

        def of_stage(x: Any) -> list[Any]:
            return [x if s == stage.index else None for s in range(num)]

        return Running(
            step=step,
            params=of_stage(([params[p] for p in part.params], part.starts)),
            aux=of_stage([_moved_to(stage.replica, aux[k]) for k in part.aux]),
            scales=of_stage(scales),
            values=values,
            peaks=of_stage(peaks),
            small_MS=sums.small_MS,
            words=sums.words,
        )

    def _microbatch(
        self, running: Mapping[int, Running], step: int, index: int, batch: PyTree
    ) -> MicrobatchArrays:
        leaves = jax.tree.leaves(batch)
        where = np.array([step, index, 1], np.int32)  # all sums begin at zero
        arguments: list[Any] = [None] * len(self._stages)
        for stage in self._local:
            graph, aux = stage.chain.graph, running[stage.index].aux[stage.index]
            specs = stage.chain.specs_of([graph.batch_values[k] for k in stage.part.batch])
            arrays = [leaves[k] for k in stage.part.batch]
            placed = [stage.replica.put(x, s) for x, s in zip(arrays, specs, strict=True)]
            arguments[stage.index] = aux, where, placed
        microbatch = self._operations.microbatch(arguments)
        if 0 not in running:
            microbatch.inputs.clear()  # those of the first stage
        return microbatch

    def _run(
        self, running: Mapping[int, Running], microbatch: MicrobatchArrays, s: int, kind: str
    ) -> None:
        """Run an action of the schedule, if this process has its stage."""
        is_last = s == len(self._stages) - 1
        # What crosses whole is all that is kept, and the backward itself runs the forward again.
        recompute = self._spec.recompute and not self._spec.chains[s].crosses_whole
        operations: list[SegmentOperation] = []
        if kind == FORWARD and not is_last:
            kept = "" if recompute else CUT
            operations = [SegmentOperation(FORWARD, s, kept, recompute)]
        elif kind == BACKWARD:
            again = [SegmentOperation(FORWARD, s, CUT)] * (recompute and not is_last)
            operations = [*again, SegmentOperation(BACKWARD, s, INPUT if is_last else CUT)]
        if s in running:
            for operation in operations:
                self._operations.run(running[s], microbatch, operation)
            if operations and self._in_turn:
                jax.block_until_ready([microbatch.inputs, microbatch.grads, running[s].peaks])
        elif kind == BACKWARD:
            microbatch.top = s - 1

    def _send(self, microbatch: MicrobatchArrays, s: int, kind: str) -> None:
        """Send what an action made to the next stage, or to the one before."""
        hop = self._hops.get((s, kind))
        if hop is None or not hop.route.is_local:
            return
        if not hop.items:
            if kind == FORWARD:
                microbatch.inputs[s + 1] = {}
            return
        given = microbatch.inputs.pop(s + 1, {}) if kind == FORWARD else microbatch.grads
        arrays = [given.pop(v, None) for v in hop.items]
        made = _present(hop.items, self._settled(hop.route.run(arrays)))
        if kind == BACKWARD:
            microbatch.grads.update(made)
        elif made:
            microbatch.inputs[s + 1] = made

    def _end(self, running: Mapping[int, Running]) -> tuple[DeviceSums, jax.Array]:
        values: list[Any] = [None] * len(self._spec.chains[0].packs)
        num = self._spec.chains[0].contribution.form.num_parts
        for x in self._returns:
            state = running.get(x.stage)
            limbs = [state.values[k] if state is not None else (None,) * num for k in x.items]
            arrays = self._settled(x.route.run([part for each in limbs for part in each]))
            for i, k in enumerate(x.items):
                new = tuple(arrays[num * i : num * (i + 1)])
                if state is not None:
                    state.values[k] = None  # free
                values[k] = new if values[k] is None else tuple(map(jnp.add, values[k], new))
        small, peaks, words = self._joined(running)
        return DeviceSums(small, peaks, values, words), peaks

    def _joined(self, running: Mapping[int, Running]) -> tuple[jax.Array, jax.Array, Any]:
        """The small sums of all stages on all devices."""
        shards: list[dict[jax.Device, jax.Array]] = []
        for stage in self._local:
            assert stage.programs is not None
            state = running[stage.index]
            peaks = stage.programs.end([state.peaks[stage.index]])
            for k, x in enumerate([state.small_MS, peaks, *state.words]):
                if k == len(shards):
                    shards.append({})
                shards[k] |= {shard.device: shard.data for shard in x.addressable_shards}
        arrays = []
        for each in shards:
            some = next(iter(each.values()))
            shape, sharding = self._row(some)
            parts = [each[d] for d in self._replica.devices if is_here(d)]
            arrays.append(jax.make_array_from_single_device_arrays(shape, sharding, parts))
        small, peaks, *words = arrays
        small, peaks, words = self._join(small, peaks, words)
        self._settled([small, peaks, *words])
        return small, peaks, words

    def _settled(self, arrays: Any) -> Any:
        return jax.block_until_ready(arrays) if self._in_turn else arrays

    # -- bytes -----------------------------------------------------------------------------------

    def memory_bytes(self, sums_bytes: int) -> int:
        """Bytes that one device needs beside the state while it runs microbatches."""
        return sums_bytes + max(map(self._stage_bytes, self._local), default=0)

    def _stage_bytes(self, stage: Stage) -> int:
        programs = stage.programs
        assert programs is not None
        params, limbs = self._params_inside(stage, stage.params), programs.sums_shapes.values
        arrays: list[Any] = [*params, *(x for k in stage.part.packs for x in limbs[k])]
        stash = stage.chain.waiting_bytes(self._crossing[stage.index])
        stash += 0 if self._spec.recompute else programs.residual_bytes(0)
        stash *= self._stash[stage.index]
        return sum(map(device_bytes, arrays)) + stash + max(programs.temporary_bytes(0))


class _ProgramsOf:
    """The programs of all stages, as `ChainOperations` asks for them."""

    clip = None

    def __init__(self, stages: Sequence[Stage]):
        self._stages = stages

    def of(self, i: int) -> dict[str, Any]:
        """The compiled programs of a stage."""
        programs = self._stages[i].programs
        assert programs is not None
        return programs.of(0)


def _present(items: Sequence[int], arrays: Sequence[jax.Array | None]) -> dict[int, jax.Array]:
    return {k: x for k, x in zip(items, arrays, strict=True) if x is not None}


def _moved_to(replica: Replica, x: jax.Array) -> jax.Array:
    """A replicated array on some of its devices; moves nothing."""
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    here = [shards[d] for d in replica.devices if d in shards]
    return jax.make_array_from_single_device_arrays(x.shape, replica.sharding(P()), here)
