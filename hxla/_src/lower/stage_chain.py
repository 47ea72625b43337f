"""Runs the microbatches of pipelines whose stages are unlike in devices and axes.

Their state is sharded over the devices of all stages. Before the microbatches the parameters go
from there to the stages, and after them the sums go back; see `plan.unlike_stages`. Several
pipelines of unlike form may share one state: then each runs its own microbatches, and what comes
back is added.

Legend of shape suffixes: M microbatches of a step, S sums of a microbatch, T float tensors.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.timing import Seconds, Spans, watched
from ..core.types import DEVICE_AXIS, PyTree
from ..graph.graph import Graph
from ..jax.devices import is_here
from ..plan.plan import Plan
from .chain_operations import Running
from .contribution import Contribution, DeviceSums, Tensors
from .inputs import Training
from .program_text import ProgramText
from .replica import Replica
from .stage import map_specs
from .stage_chain_spec import StageChainSpec, stage_chain_spec
from .stage_routes import Stage, StageRoute, fill_routes, return_routes
from .staged_pipeline import StagedPipeline, present


def stage_chains(
    training: Training, graph: Graph, plan: Plan, tensors: Tensors, trained: tuple[int, ...]
) -> tuple[Contribution, Callable[[Replica], "StageChain"]]:
    """How gradients join the sums, and a function that makes the runner of a replica."""
    spec = stage_chain_spec(training, graph, plan, tensors, trained)
    return spec.chain.contribution, functools.partial(StageChain, spec)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PartRoute:
    """A route of the parameters or sums of a part of one of the pipelines."""

    pipeline: int
    part: int
    route: StageRoute


class StageChain:
    """The programs of the pipelines of a replica on its devices.

    Args:
        replica: All devices of the pipelines, along one axis.

    Attributes:
        counts: The microbatches of each pipeline in a step; empty: there is one.
    """

    unit = 1  # it takes any number of microbatches
    kept_bytes = 0

    def __init__(self, spec: StageChainSpec, replica: Replica):
        self._spec, self._replica = spec, replica
        self.counts: tuple[int, ...] = ()
        self._spans: Sequence[Spans[Any]] = ()
        self._watches: Sequence[Seconds] = ()
        # Gloo mixes up collectives that do not depend on each other.
        self._in_turn = replica.spans_processes and replica.devices[0].platform == "cpu"
        #: The traced loss: processes of unlike stages have unlike programs.
        self.text = str(spec.chain.graph.program)
        rest = iter(replica.devices)
        self._pipelines = [
            StagedPipeline(
                each,
                list(itertools.islice(rest, _num_devices(each.axes, each.cut))),
                index=replica.index,
                label=f"replica {i}, " * (len(spec.pipelines) > 1),
                in_turn=self._in_turn,
            )
            for i, each in enumerate(spec.pipelines)
        ]
        self.most_inputs = max(max(pipeline.stash) for pipeline in self._pipelines)
        every = [(i, stage) for i, line in enumerate(self._pipelines) for stage in line.stages]
        self._fills = self._routes(fill_routes, every)
        self._returns = self._routes(return_routes, every)
        hops = [hop for pipeline in self._pipelines for hop in pipeline.hops]
        moved = [*(x.route for x in self._fills), *hops, *(x.route for x in self._returns)]
        self._moved = [x for x in moved if x.route.is_local and x.items]
        self._join = self._jit_join()
        self._empty = self._jit_empty()
        self.names = (
            *(name for pipeline in self._pipelines for name in pipeline.names),
            *(x.name for x in self._moved),
            "the small sums of all stages",
            "empty sums",
        )

    def _routes(self, make: Any, every: Sequence[tuple[int, Stage]]) -> list[_PartRoute]:
        return [
            _PartRoute(pipeline=i, part=stage.index, route=route)
            for i, stage in every
            for route in make(self._spec, self._replica, stage)
        ]

    # -- small programs --------------------------------------------------------------------------

    def _jit_join(self) -> Any:
        """The small sums of all stages, from those of each device: rows, peaks, words."""
        ends = [self._replica.devices.index(pipeline.last) for pipeline in self._pipelines]

        def hxla_join(small: Any, peaks_T: jax.Array, words: Any) -> Any:
            is_last = (jax.lax.axis_index(DEVICE_AXIS) == np.array(ends)).any()
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
        chain = self._spec.chain
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
        spec, chain = self._spec, self._spec.chain
        num = chain.contribution.form.num_parts
        stored = [spec.placed(spec.stored, t) for t in range(len(chain.tensors.floats))]

        def hxla_empty() -> DeviceSums:
            sums = dataclasses.replace(chain, tensors=spec.tensors).empty_sums()
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
        out = [x for pipeline in self._pipelines for x in pipeline.lower(aux, exponents)]
        out += [x.route.lower() for x in self._moved]
        rows, peaks, words = (jax.tree.map(self._row_like, x) for x in self._small_shapes())
        return [*out, self._join.lower(rows, peaks, words), self._empty.lower()]

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of `lower`, compiled."""
        flat = iter(compiled)
        for pipeline in self._pipelines:
            pipeline.adopt(flat)
        for x in self._moved:
            x.route.compiled = next(flat)
        self._join, self._empty = next(flat), next(flat)

    def texts(self) -> Iterator[ProgramText]:
        """The optimized programs of the local stages, each forward before its backward."""
        return itertools.chain.from_iterable(pipeline.texts() for pipeline in self._pipelines)

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
        running = [
            pipeline.begin(each, aux, exponents, step)
            for pipeline, each in zip(self._pipelines, filled, strict=True)
        ]
        del filled
        parts = list(self._shared_out(len(ids)))
        ticks = [
            pipeline.ticks(each, step, ids[a:b], batches[a:b])
            for pipeline, each, (a, b) in zip(self._pipelines, running, parts, strict=True)
        ]
        for i, spans in enumerate(self._spans):
            a, b = parts[i]
            if running[i] and a < b:
                ticks[i] = _timed(ticks[i], running[i], spans)
        for _ in itertools.zip_longest(*ticks):
            pass
        return self._end(running)

    def watch(self, pool: ThreadPoolExecutor) -> None:
        """Time each pipeline in the next run, until `end_watch`."""
        self._spans = [Spans() for _ in self._pipelines]
        self._watches = [pool.submit(watched, spans, 0.0, None) for spans in self._spans]

    def end_watch(self) -> None:
        """End what `watch` began, also after an error."""
        for spans in self._spans:
            spans.put(None)
        self._spans = ()

    @property
    def pipeline_seconds(self) -> list[float]:
        """Seconds of each pipeline in the last watched run; 0: it ran nothing here."""
        return [found.result()[0] for found in self._watches] or [0.0] * len(self._pipelines)

    def _shared_out(self, num: int) -> Iterator[tuple[int, int]]:
        """Where the microbatches of each pipeline begin and end."""
        ends = list(itertools.accumulate(self.counts or (num,), initial=0))
        # A trial has fewer than a step: each pipeline gets about its part.
        return itertools.pairwise(end * num // ends[-1] for end in ends)

    def _filled(self, params: Sequence[jax.Array]) -> list[dict[int, dict[int, jax.Array]]]:
        """For each pipeline and part its parameters, by their places."""
        out: list[dict[int, dict[int, jax.Array]]] = [
            {stage.index: {} for stage in pipeline.stages} for pipeline in self._pipelines
        ]
        for x in self._fills:
            items = x.route.items
            arrays = self._settled(x.route.route.run([params[p] for p in items]))
            out[x.pipeline][x.part] |= present(items, arrays)
        return out

    def _end(self, running: Sequence[dict[int, Running]]) -> tuple[DeviceSums, jax.Array]:
        values: list[Any] = [None] * len(self._spec.chain.packs)
        num = self._spec.chain.contribution.form.num_parts
        for x in self._returns:
            state, items = running[x.pipeline].get(x.part), x.route.items
            limbs = [state.values[k] if state is not None else (None,) * num for k in items]
            parts = [part for each in limbs for part in each]
            arrays = self._settled(x.route.route.run(parts))
            for i, k in enumerate(items):
                new = tuple(arrays[num * i : num * (i + 1)])
                if state is not None:
                    state.values[k] = None  # free
                values[k] = new if values[k] is None else tuple(map(jnp.add, values[k], new))
        small, peaks, words = self._joined(running)
        return DeviceSums(small, peaks, values, words), peaks

    def _joined(self, running: Sequence[dict[int, Running]]) -> tuple[jax.Array, jax.Array, Any]:
        """The small sums of all stages on all devices."""
        num = 2 + len(self._spec.chain.tensors.words)
        shards: list[dict[jax.Device, jax.Array]] = [{} for _ in range(num)]
        for pipeline, each in zip(self._pipelines, running, strict=True):
            for _, parts in itertools.groupby(pipeline.local, lambda stage: stage.replica.devices):
                arrays = _of_stage(list(parts), each)
                for known, x in zip(shards, arrays, strict=True):
                    known |= {shard.device: shard.data for shard in x.addressable_shards}
        joined = []
        for known in shards:
            shape, sharding = self._row(next(iter(known.values())))
            here = [known[d] for d in self._replica.devices if is_here(d)]
            joined.append(jax.make_array_from_single_device_arrays(shape, sharding, here))
        small, peaks, *words = joined
        small, peaks, words = self._join(small, peaks, words)
        self._settled([small, peaks, *words])
        return small, peaks, words

    def _settled(self, arrays: Any) -> Any:
        return jax.block_until_ready(arrays) if self._in_turn else arrays

    # -- bytes -----------------------------------------------------------------------------------

    def memory_bytes(self, _sums_bytes: int) -> int:
        """Bytes that one device needs beside the state while it runs microbatches."""
        return max(self.stage_bytes().values())

    def stage_bytes(self) -> dict[jax.Device, int]:
        """The most bytes that each local device needs in `run` beside the state."""
        kept: dict[jax.Device, int] = {}
        running: dict[jax.Device, int] = {}
        for pipeline in self._pipelines:
            kept |= pipeline.kept_bytes()
            running |= pipeline.activation_bytes()
        most = {device: num + running.get(device, 0) for device, num in kept.items()}
        for device in most:
            filled, left, returned = 0, kept[device], 0
            for part in self._fills:
                route = part.route.route
                most[device] = max(most[device], filled + route.extra_bytes(device))
                filled += route.target_bytes(device)
            for part in self._returns:
                route = part.route.route
                most[device] = max(most[device], left + returned + route.extra_bytes(device))
                left -= route.source_bytes(device)
                returned += route.target_bytes(device) * (part.pipeline == 0)  # added to those
        return most


def use_counts(runners: Iterable[Any], plan: Plan) -> None:
    """Give each replica of unlike form the microbatches that it has in a plan."""
    for runner in runners:
        if isinstance(runner, StageChain):
            runner.counts = plan.counts if plan.unlike_replicas else ()


def _timed(
    ticks: Iterator[None], running: Mapping[int, Running], spans: Spans[Any]
) -> Iterator[None]:
    """The ticks of a pipeline between two pairs of arrays for a watcher."""
    params = [state.params for state in running.values()]
    spans.put((params, params))
    yield from ticks
    spans.put((None, [state.peaks for state in running.values()]))


def _num_devices(axes: Sequence[Sequence[tuple[str, int]]], cut: Sequence[int]) -> int:
    """The devices of a pipeline, from the axes of each part and the parts of each stage."""
    firsts = itertools.accumulate(cut[:-1], initial=0)
    return sum(math.prod(size for _, size in axes[first]) for first in firsts)


def _of_stage(parts: Sequence[Stage], running: dict[int, Running]) -> list[jax.Array]:
    """The rows, peaks and words of the parts of one stage."""
    each = []
    for stage in parts:
        assert stage.programs is not None
        each.append(stage.programs.end([running[stage.index].peaks[stage.index]]))
    last = running[parts[-1].index]
    return [last.small_MS, functools.reduce(jnp.maximum, each), *last.words]
