"""The programs of a chain: those of its parts, small ones around them, and their bytes.

A chain of one part needs no small program but empty sums: its program reads the sums directly.

Legend of shape suffixes: T float tensors.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..graph.graph import bytes_of, shapes_of
from ..graph.parts import ChainPart, values_by_shape
from ..jax.jaxpr import is_cheap, is_fused, variables
from ..model.plain_arrays import in_bytes
from ..plan.layout import piece_shape
from ..plan.sharding import Sharded
from ..profile.segment_times import Composed, Variable
from ..schedule.segment_sequence import CUT, INPUT, Residuals, SegmentCost
from .call_loop import clip_of_call
from .chain_spec import ChainSpec, wanted_values
from .compile import (
    adds_in_order,
    compiler_options,
    firsts_alike,
    loop_options,
    update_options,
)
from .contribution import DeviceSums, pack_shapes
from .replica import Replica, device_bytes
from .segment_part import SegmentPart, join_clipped
from .stage import StagePart

#: Operations of a backward in proportion to its forward's.
_BACKWARD_WORK = 2.0


def crossing_values(parts: Sequence[ChainPart]) -> tuple[tuple[int, ...], ...]:
    """For each part the values that cross into it, for it or later parts."""
    made = [set(part.outputs) for part in parts]
    read = [set(part.inputs) for part in parts]
    return tuple(
        tuple(sorted(set().union(*made[:i]) & set().union(*read[i:]))) for i in range(len(parts))
    )


def segment_costs(
    sharded: Sharded,
    stages: Sequence[StagePart],
    temporary: Sequence[tuple[int, ...]] | None = None,
    *,
    fused: bool = False,
    residuals: Sequence[int] | None = None,
    keeps_gradients: bool = False,
    per_call: int = 1,
) -> list[SegmentCost]:
    """Memory and time of each part's programs on a device; seconds in proportion to operations.

    Args:
        sharded: The graph of the loss, and how the devices of a replica cut it.
        temporary: For each part the bytes of temporaries of its forward and backward, or of its
            only program; None: before compilation, estimated from the arrays of a backward.
        fused: Whether all parts and their backwards are one program, which keeps more.
        residuals: For each part the bytes of its inner residuals; None: before compilation, when
            each is taken to be sharded as other values of its shape in the part.
        keeps_gradients: Whether gradients of parameters wait for the end of the microbatch.
        per_call: The microbatches of a call, whose values between programs are counted together.
    """
    crossing = crossing_values([stage.part for stage in stages])
    num = per_call if len(stages) > 1 else 1  # a whole microbatch leaves no values
    known = [max(stage.part.segment.flops, 1.0) for stage in stages]
    kinds: dict[Any, tuple[list[Variable], bool]] = {}
    out = []
    for i, stage in enumerate(stages):
        if residuals is None:
            kind = stage.kind
            if kind not in kinds:
                kinds[kind] = _inner_residuals(stage.composed, stage.part, fused=fused)
            arrays, reads_input = kinds[kind]
            parts = _fewest_parts(sharded, stage.part)
            each = (bytes_of(v.aval.shape, v.aval.dtype) // parts(v.aval.shape) for v in arrays)
            inner = num * sum(each)
        else:
            inner, reads_input = residuals[i], stage.part.is_last or stage.reads_its_input
        floats = {v for later in stages[i:] for v in later.above_floats}
        grads = num * sum(sharded.device_bytes(v) for v in crossing[i] if v in floats)
        trained = [sharded.graph.param_values[stage.params[k]] for k in stage.trained]
        left = sum(map(sharded.device_bytes, trained))
        if temporary is None:
            forward, backward = 0, inner + (0 if keeps_gradients else left)
        else:
            forward, backward = temporary[i][0], temporary[i][-1]
        name = INPUT if stage.part.is_last else CUT
        both = known[i] * (1 + _BACKWARD_WORK) if stage.part.is_last else known[i] * _BACKWARD_WORK
        made = Residuals(
            name=name,
            # At least 1: only the last part starts from its input alone.
            num_bytes=0 if stage.part.is_last else max(inner, 1),
            reads_input=stage.part.is_last or reads_input,
            forward_seconds=known[i],
            backward_seconds=both,
            forward_temporary_bytes=forward,
            backward_temporary_bytes=backward + (inner if stage.part.is_last else 0),
        )
        out.append(
            SegmentCost(
                name=stage.part.segment.name,
                input_bytes=num * sum(map(sharded.waiting_bytes, crossing[i])),
                input_gradient_bytes=grads,
                forward_seconds=known[i],
                residuals=(made,),
                # A forward makes its residuals, whether they are kept or not.
                forward_temporary_bytes=forward + inner,
                parameter_gradient_bytes=num * left if keeps_gradients else 0,
            )
        )
    return out


def _inner_residuals(
    program: Composed, part: ChainPart, *, fused: bool
) -> tuple[list[Variable], bool]:
    """The inner residuals of a forward, and whether inputs are residuals too."""
    inputs = {program.arguments[v] for v in part.inputs}
    alone, kept = (
        program.kept(part.inputs, repeats, is_last=part.is_last)
        for repeats in (is_cheap, is_fused if fused else is_cheap)
    )
    outer = inputs.union(variables(program.results))
    return [v for v in kept if v not in outer], not inputs.isdisjoint(alone)


def _fewest_parts(sharded: Sharded, part: ChainPart) -> Callable[[Sequence[int]], int]:
    """From a shape to the fewest shards of any value of that shape in a part."""
    values = values_by_shape(sharded.graph, part)
    return lambda shape: min(map(sharded.num_parts, values.get(tuple(shape), ())), default=1)


def temporary_bytes(compiled: Any) -> int:
    """Bytes of a compiled program beside its arguments and results; 0 if unknown."""
    stats = compiled.memory_analysis()
    return 0 if stats is None else int(stats.temp_size_in_bytes)


class ChainParts(NamedTuple):
    """The parts of a chain on one kind of device, shared by replicas: tracing them takes longest.

    Attributes:
        same: For each part the first one with the same programs.
        replica: The replica whose devices the traces name; None: they name no device.
    """

    each: tuple[SegmentPart, ...]
    same: tuple[int, ...]
    replica: Replica | None


def parts_for(spec: ChainSpec, replica: Replica) -> ChainParts:
    """Make the parts of a chain; those of replicas on like devices differ in their devices only."""
    parts = _parts(spec, replica)
    same = [0] if spec.is_whole else firsts_alike(part.key for part in parts)
    return ChainParts(parts, tuple(same), replica if replica.axes else None)


def _parts(spec: ChainSpec, replica: Replica) -> tuple[SegmentPart, ...]:
    return tuple(some_parts(spec, replica, range(len(spec.parts))))


def some_parts(spec: ChainSpec, replica: Replica, places: Iterable[int]) -> Iterator[SegmentPart]:
    """The parts at some places of a chain, for a replica."""
    shared = spec.shared
    wanted = wanted_values(spec.graph, spec.trained)
    platform, several = replica.devices[0].platform, replica if replica.axes else None
    for i in places:
        yield SegmentPart(
            spec,
            i,
            shared=shared,
            wanted=wanted,
            on_cpu=platform == "cpu",
            in_order=adds_in_order(platform, spec.contribution.form),
            replica=several,
        )


class SegmentPrograms:
    """The programs of a chain on a replica.

    Args:
        parts: All parts, or those that run on this replica.
        first_packs: For each part the packs whose sums begin with its backward, if sums exist only
            while their part runs; empty: sums exist all the time.

    Attributes:
        names: Names of all programs, in the order of `lower`.
        same: For each part the first one with the same programs.
        shared: Packs to which several parts add, whose sums begin with a step.
    """

    def __init__(
        self,
        spec: ChainSpec,
        parts: ChainParts,
        replica: Replica,
        first_packs: Sequence[tuple[int, ...]] = (),
    ):
        self._spec, self._replica, self._by_part = spec, replica, bool(first_packs)
        self._parts, self.same, self._traced_for = parts
        self._distinct = sorted(set(self.same))
        shared = spec.shared
        shared_packs = [k for k, pack in enumerate(spec.packs) if not shared.isdisjoint(pack)]
        # By part zeros are made when they are needed.
        self.shared = [] if first_packs else shared_packs
        options = compiler_options if spec.is_whole else update_options
        options = options if spec.per_call == 1 else loop_options
        self._options = options(replica.devices[0].platform, spec.contribution.form)
        #: Split a replica's scales for the parts of a chain, and join their peaks.
        self._around: list[Any] = []
        if not (spec.is_whole or spec.joins_at_end):
            each = [P()] * len(self._parts)
            specs = each, each, spec.sums_specs(self.shared)
            # The donated arrays are not read, but their memory is to be reused.
            begin = self._jit(self._begun, specs, donate_argnums=1, keep_unused=True)
            # The peaks of parts without parameters are not read either, but say on which device.
            self._around = [begin, self._jit(self._whole_peaks, P(), keep_unused=True)]
        #: Clips the gradients of all parts and adds them to the sums.
        self._clip: Any = None
        if spec.joins_at_end:
            joined: Any = spec.sums_specs(), P()
            clip = clip_of_call(join_clipped(spec, self._traced), spec.per_call)
            self._clip = self._jit(clip, joined, donate_argnums=(0, 1))
        self.zeros = self._jit_placed(self._empty, self._sums_specs)
        self.first_packs = list(first_packs)
        shapes = pack_shapes(spec.tensors, spec.packs)
        self._first_shapes = [
            tuple(zip((shapes[k] for k in packs), spec.sums_specs(packs), strict=True))
            for packs in self.first_packs
        ]
        self._fresh = {
            first: self._jit_placed(
                lambda first=first: [spec.contribution.zeros(shape) for shape, _ in first],
                [specs for _, specs in first],
            )
            for first in dict.fromkeys(filter(None, self._first_shapes))
        }
        self.names = (
            *self._part_names(),
            *["the scales of all parts", "the peaks of all parts"][: len(self._around)],
            *["the clip of a microbatch"] * spec.joins_at_end,
            "empty sums",
            *["empty sums of a part"] * len(self._fresh),
        )
        #: For each distinct part the shapes of its residuals, once it is lowered.
        self._residuals: dict[int, list[Any]] = {}
        self._compiled: dict[int, dict[str, Any]] = {}

    def _part_names(self) -> list[str]:
        if self._spec.is_whole:
            return ["a microbatch"]
        return [
            f"the {which} of {self._parts[i].stage.part.segment.name}"
            for i in self._distinct
            for which in self._kinds(i)
        ]

    @property
    def _sums_specs(self) -> DeviceSums:
        """PartitionSpecs of a replica's sums."""
        values: list[Any] = [] if self._by_part else self._spec.sums_specs()
        specs: Any = [P(), P(), values, [P()] * len(self._spec.tensors.words)]
        return DeviceSums(*specs)

    def _jit(self, run: Any, specs: PyTree, **options: Any) -> Any:
        """Jit a program; `specs` are the PartitionSpecs of its results, None where XLA decides."""
        if self._replica.axes:
            return self._jit_placed(run, specs, **options)
        return jax.jit(run, compiler_options=self._options, **options)

    def _jit_placed(self, run: Any, specs: PyTree, **options: Any) -> Any:
        """`_jit` of a program without arguments: result shardings give its devices."""
        is_spec = lambda x: isinstance(x, P)  # noqa: E731
        where = jax.tree.map(self._replica.sharding, specs, is_leaf=is_spec)
        return jax.jit(run, compiler_options=self._options, out_shardings=where, **options)

    def _part_programs(self, part: SegmentPart) -> dict[str, Any]:
        spec = self._spec
        limbs: list[Any] = spec.sums_specs(part.packs)
        floats = spec.of_call(spec.specs_of(part.floats))
        if spec.joins_at_end:
            return self._gradient_programs(part, floats)
        if part.is_last:
            sums = self._sums_specs._replace(values=limbs)
            return {"loss": self._jit(part.programs.loss, (sums, None, floats), donate_argnums=4)}
        backward = part.programs.backward
        return {
            "forward": self._forward_program(part),
            "backward": self._jit(backward, (limbs, P(), floats), donate_argnums=(4, 5)),
        }

    def _forward_program(self, part: SegmentPart) -> Any:
        stage, made = part.stage, self._spec.waiting_specs(part.stage.part.outputs)
        kept: list[P | None] = []
        if self._replica.axes:
            shapes = [stage.residuals[i].shape for i in stage.inner_residuals]
            kept = self._spec.inner_specs(stage.part, shapes)
        results = self._spec.of_call(made), self._spec.of_call(kept)
        return self._jit(part.programs.forward, results)

    def _gradient_programs(self, part: SegmentPart, floats: list[P]) -> dict[str, Any]:
        """The programs of a part whose gradients wait for those of all parts."""
        spec = self._spec
        grads = spec.of_call([spec.specs[t] for t in part.grad_tensors])
        if part.is_last:
            sums = self._sums_specs._replace(values=[])
            deltas = spec.of_call(spec.specs[len(spec.trained) :])
            results = sums, None, floats, grads, deltas
            return {"loss": self._jit(part.programs.last_gradients, results, donate_argnums=4)}
        backward = self._jit(part.programs.gradients, (grads, floats))
        return {"forward": self._forward_program(part), "backward": backward}

    @functools.cached_property
    def _traced(self) -> tuple[SegmentPart, ...]:
        """The parts, traced again if traces name another replica's devices."""
        is_traced = self._traced_for in (None, self._replica)
        return self._parts if is_traced else _parts(self._spec, self._replica)

    @functools.cached_property
    def _jitted(self) -> dict[int, dict[str, Any]]:
        """The programs of distinct parts."""
        return {i: self._part_programs(self._traced[i]) for i in self._distinct}

    def _kinds(self, i: int) -> tuple[str, ...]:
        return ("loss",) if self._parts[i].is_last else ("forward", "backward")

    # -- small programs --------------------------------------------------------------------------

    def begin(self, exponents: jax.Array, sums: DeviceSums, shared: Any) -> Any:
        """The scales and peaks of each part, and zeros for sums to which several parts add."""
        if not self._around:
            return [exponents], [sums.peaks_T], []
        return self._around[0](exponents, shared)

    def end(self, peaks: Sequence[jax.Array]) -> jax.Array:
        """The peaks of all tensors, from the peaks of each part."""
        return self._around[1](peaks) if self._around else peaks[0]  # type: ignore[no-any-return]

    def _begun(self, exponents_T: jax.Array, shared: Any) -> Any:
        scales = [exponents_T[np.array(part.tensors, np.int32)] for part in self._parts]
        peaks = [jnp.zeros(len(part.tensors), jnp.int32) for part in self._parts]
        return scales, peaks, jax.tree.map(jnp.zeros_like, shared)

    def _whole_peaks(self, peaks: Sequence[jax.Array]) -> jax.Array:
        places = np.array([t for part in self._parts for t in part.tensors], np.int32)
        zeros = jnp.zeros(len(self._spec.tensors.floats), jnp.int32)
        return zeros.at[places].max(jnp.concatenate(list(peaks)))

    def _empty(self) -> DeviceSums:
        sums = self._spec.empty_sums()
        return sums._replace(values=[]) if self._by_part else sums

    # -- compilation -----------------------------------------------------------------------------

    def lower(self, params: Sequence[Any], aux: Sequence[Any], exponents: Any) -> list[Any]:
        """The programs before compilation: those of distinct parts, then the small ones."""
        spec, like = self._spec, self._replica.like
        batch = list(map(like, spec.batch_shapes(), spec.batch_specs()))
        limbs, sums = self.sums_shapes.values, jax.tree.map(like, jax.eval_shape(self._empty))
        shared = [limbs[k] for k in self.shared]
        scales, peaks = [exponents], [sums.peaks_T]
        if self._around:
            each = jax.eval_shape(self._begun, exponents, shared)
            scales, peaks, _ = jax.tree.map(like, each)
        where = np.zeros(3 if spec.per_call == 1 else 4, np.int32)
        out = []
        for i, programs in self._jitted.items():
            part = self._parts[i]
            stage = part.stage
            arguments = [params[p] for p in part.params], part.starts
            others = [aux[k] for k in part.aux]
            arrays = batch if spec.is_whole else [batch[k] for k in part.batch]
            added = [limbs[k] for k in part.packs]
            inputs = self._arrays(stage.part.inputs, spec.waiting_specs)
            if part.is_last:
                of_part, scale = sums._replace(values=[]), []
                if not spec.joins_at_end:
                    of_part, scale = of_part._replace(values=added, peaks_T=peaks[i]), [scales[i]]
                read = *arguments, inputs, others, of_part, *scale, where, arrays
                out.append(programs["loss"].lower(*read))
                continue
            out.append(programs["forward"].lower(*arguments, inputs, others, where, arrays))
            saved = self._residuals[i] = self._residual_shapes(part, inputs, out[-1])
            joined = () if spec.joins_at_end else (added, peaks[i], scales[i])
            grads, late = self._arrays(stage.below_floats), self._arrays(part.pending)
            read_late = *arguments, saved, others, *joined, where, arrays, grads, late
            out.append(programs["backward"].lower(*read_late))
        if self._around:
            begin, end = self._around
            out += [begin.lower(exponents, shared), end.lower(peaks)]
        if self._clip is not None:
            [shape] = spec.shapes_of_call([jax.ShapeDtypeStruct((), np.float32)])
            weight = like(shape)
            given = limbs, sums.peaks_T, exponents, where, weight, *self._gradient_shapes()
            out.append(self._clip.lower(*given))
        return [*out, self.zeros.lower(), *(program.lower() for program in self._fresh.values())]

    def _gradient_shapes(self) -> tuple[list[list[Any]], list[Any]]:
        """Shapes of the gradients of all parts, and of the changes of other variables."""
        spec, num = self._spec, len(self._spec.trained)

        def like(shape: Sequence[int], t: int) -> Any:
            x = jax.ShapeDtypeStruct(shape, np.float32)
            return self._replica.like(*spec.shapes_of_call([x]), *spec.of_call([spec.specs[t]]))

        grads = [list(map(like, part.grad_shapes, part.grad_tensors)) for part in self._parts]
        floats = enumerate(spec.tensors.floats[num:], num)
        return grads, [like(x.shape, t) for t, x in floats]

    @functools.cached_property
    def sums_shapes(self) -> DeviceSums:
        """Shapes of a replica's sums, with those that exist only while their part runs."""
        shapes, specs = jax.eval_shape(self._spec.empty_sums), self._spec.sums_specs()
        placed: DeviceSums = jax.tree.map(self._replica.like, shapes)
        limbs: list[Any] = [
            tuple(map(self._replica.like, parts, each))
            for parts, each in zip(shapes.values, specs, strict=True)
        ]
        return placed._replace(values=limbs)

    def _arrays(self, values: Sequence[int], specs: Any = None) -> list[Any]:
        """Shapes of values of the graph, sharded as `specs` or `specs_of` says."""
        spec, shapes = self._spec, in_bytes(shapes_of(self._spec.graph, values))
        each = spec.of_call((specs or spec.specs_of)(values))
        return list(map(self._replica.like, spec.shapes_of_call(shapes), each))

    def _residual_shapes(self, part: SegmentPart, inputs: Sequence[Any], forward: Any) -> list[Any]:
        """Shapes and shardings of the residuals of a part.

        XLA's partitioner decides the shardings of inner residuals.
        """
        stage = part.stage
        shapes = in_bytes([stage.residuals[i] for i in stage.inner_residuals])
        inner: list[Any] = self._spec.shapes_of_call(shapes)
        if self._replica.axes and inner:
            _, where = forward.compile().output_shardings
            inner = [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
                for x, sharding in zip(inner, where, strict=True)
            ]
        else:
            inner = list(map(self._replica.like, inner))
        outputs = self._arrays(stage.part.outputs, self._spec.waiting_specs)
        return stage.all_residuals(inputs, outputs, inner)

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of `lower`, compiled."""
        flat = iter(compiled)
        self._compiled = {i: {name: next(flat) for name in self._kinds(i)} for i in self._distinct}
        self._around = list(itertools.islice(flat, len(self._around)))
        if self._clip is not None:
            self._clip = next(flat)
        self.zeros = next(flat)
        self._fresh = dict(zip(self._fresh, flat, strict=True))

    # -- compiled programs and their bytes -------------------------------------------------------

    def of(self, i: int) -> dict[str, Any]:
        """The compiled programs of a part: `forward` and `backward`, or `loss`."""
        return self._compiled[self.same[i]]

    @property
    def whole(self) -> Any:
        """The function of the program of whole microbatches."""
        return self._traced[0].programs.loss

    @property
    def clip(self) -> Any:
        """The compiled program that clips the gradients of all parts and adds them to the sums."""
        return self._clip

    def fresh(self, i: int) -> Any:
        """Zeros for the sums that begin with a part."""
        return self._fresh[self._first_shapes[i]]()

    def temporary_bytes(self, i: int) -> tuple[int, ...]:
        """Bytes of the programs of a part beside their arguments and results."""
        return tuple(map(temporary_bytes, self.of(i).values()))

    def residual_bytes(self, i: int) -> int:
        """Bytes on a device of the inner residuals of a part."""
        part = self._parts[i]
        if part.is_last:
            return 0
        residuals = self._residuals[self.same[i]]
        inner = [residuals[k] for k in part.stage.inner_residuals]
        return sum(map(device_bytes, inner))

    def sums_bytes(self) -> list[int]:
        """For each part the bytes of the sums that begin with its backward, if `by_part`."""
        each, sizes = 4 * self._spec.contribution.form.num_parts, dict(self._replica.axes)
        return [
            each * sum(math.prod(piece_shape(shape, specs[0], sizes)) for shape, specs in packs)
            for packs in self._first_shapes
        ]
