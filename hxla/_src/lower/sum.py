"""The all-reduce of gradients: the one program with collectives between replicas.

It runs on the devices of the replicas, or on one device of each host (see `GlobalArrays`).
Everything else in a step is compiled for a single replica, so a microbatch's arithmetic cannot
depend on the number of replicas. Integers are added, which no compiler pass, collective algorithm
or device order can change. Each device then turns its share of the sums into floats, element by
element, and the shares are gathered. Sending floats back makes an exact all-reduce 1.5 times the
bytes of a float one, not twice. The program also decides whether the update counts.

References:
    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    JPDC 2009, section 3 (reduce-scatter and all-gather on a ring).
"""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import DATA_AXIS
from ..jax.devices import process_of
from ..plan.parts import Islands
from .chunks import (
    GroupBytes,
    ReduceScatter,
    as_bits,
    concatenated,
    cut,
    flatly,
    sum_of_rows,
    zeros_like,
)
from .compile import extra_bytes
from .contribution import DeviceSums
from .decisions import Decisions, DecisionSpec, Told, decide
from .global_arrays import GlobalArrays, HostSums
from .padding import Cut
from .replica import Replica
from .state_sums import joined_over
from .sum_layout import SumLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduced:
    """The result of a reduction, which stays on the devices: for each local replica its arrays.

    Attributes:
        totals: The bits of the totals: a vector for each bucket, or an array for each tensor where
            replicas have several devices.
        words: The words of other variables, see `state_sums`.
        decisions: What follows from the sums; `told` is the first replica's only.
    """

    totals: tuple[Any, ...]
    words: tuple[Any, ...]
    decisions: tuple[Decisions, ...]


def _own_island(islands: Islands) -> jax.Array:
    """int32: the island of this place."""
    each = [i for i, members in enumerate(islands.members()) for _ in members]
    return jnp.asarray(np.array(each, np.int32))[jax.lax.axis_index(DATA_AXIS)]


def _sums_of_islands(
    values: list[tuple[jax.Array, ...]], islands: Islands | None
) -> list[tuple[jax.Array, ...]]:
    """The limbs of each array, summed over the replicas of this place's island.

    The results of islands differ, though their PartitionSpec says they are replicated: only the
    island's own devices read them.
    """
    if islands is None or max(islands.replicas) == 1:
        return values
    groups = [[*members] for members in islands.members()]
    flat, treedef = jax.tree.flatten(values)
    over = functools.partial(jax.lax.psum, axis_name=DATA_AXIS, axis_index_groups=groups)
    summed: list[tuple[jax.Array, ...]] = jax.tree.unflatten(treedef, flatly(over, flat))
    return summed


class Reducer:
    """Sums over all replicas of a run.

    Legend of shape suffixes: D replicas, C elements of a chunk, N statistics of a replica, M
    microbatches of a step, S sums per microbatch, T float tensors.

    Args:
        replicas: Replicas of all processes, in the order of `counts`.
        decisions: What the decisions of a step depend on besides its sums.
        release: Whether the local sums are freed as soon as they are reduced.
        shard_groups: Groups of replicas that each shard the sums; see `Placement`.
        cuts: How tensors are cut, where this process sends its shards without padding.
        has_waves: Whether a step may reduce each group in several waves.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        layout: SumLayout,
        *,
        decisions: DecisionSpec,
        release: bool = False,
        shard_groups: int = 1,
        cuts: Sequence[Cut | None] | None = None,
        has_waves: bool = False,
    ):
        self.layout, self._contribution = layout, layout.contribution
        self.form, self.is_scaled = self._contribution.form, decisions.is_scaled
        self._decisions, self.releases, self._has_waves = decisions, release, has_waves
        self.arrays = GlobalArrays(replicas, self._contribution.form.over, shard_groups)
        if layout.shares is not None:
            self.arrays.check_in_order()
        self._reduce_scatter = ReduceScatter(self.arrays, self._contribution)
        self.replicas, self.local = self.arrays.replicas, self.arrays.local
        self._inner = self.arrays.axes
        #: Sums of host arrays over all processes.
        self.host = HostSums(self.arrays.devices, self.replicas)
        self._merges = ("sum", "sum", *layout.tensors.word_merges)
        self._cuts = cuts or [None] * len(layout.packs)
        #: A compiled program for each bucket.
        self.programs: list[Any] = []
        #: The programs of waves before the last, by group, and of zeros for the first wave.
        self._early: dict[int, Any] = {}
        self._zeros: dict[int, Any] = {}

    def _build(self, k: int, is_last: bool = True) -> Any:
        """The program `(own, ints, values, before) -> (decisions, words, totals)` of a bucket.

        `own` are peaks and the scales of this step, `ints` small integer arrays to sum, `values`
        the limbs of each tensor's sum, and `before` chunks of sums from earlier waves. Buckets
        after the first have neither of the first two, and decide nothing. Totals are floats, one
        array for each pack however replicas are spread, so that the update is one program. Their
        bits are int32, so that a donated sum's buffer can hold them. With sharded sums they are
        chunks, and before the last wave integers like `before`.
        """
        num, names, islands = len(self.arrays.places), self.arrays.names, self.layout.islands
        bucket, most_rows = self.layout.bucket_packs[k], self.layout.most_rows(k)
        rows = None if most_rows is None else most_rows * max(map(len, self.arrays.places))

        def totals(values: list[tuple[jax.Array, ...]]) -> list[jax.Array]:
            if num == 1 or islands is not None:
                each = _sums_of_islands(values, islands)
                return [self._contribution.combine(*parts) for parts in each]
            if rows is not None:
                summed = sum_of_rows(values[0], rows, self._reduce_scatter.sent_dtype)
                return [self._contribution.combine(*summed).reshape(values[0][0].shape)]
            flat = self._reduce_scatter.all_reduce(
                [concatenated(limb) for limb in zip(*values, strict=True)]
            )
            return cut(flat, [parts[0] for parts in values])

        def padded_totals(values: list[tuple[jax.Array, ...]]) -> list[jax.Array]:
            cuts = [self._cuts[i] for i in bucket]
            if not any(cuts):
                return totals(values)
            parts = [
                limbs if cut is None else tuple(map(cut.narrowed, limbs))
                for limbs, cut in zip(values, cuts, strict=True)
            ]
            pairs = zip(totals(parts), cuts, strict=True)
            return [x if cut is None else cut.widened(x) for x, cut in pairs]

        def hxla_sum(
            own: list[jax.Array],
            ints: list[jax.Array],
            values: list[tuple[jax.Array, ...]],
            before: list[tuple[jax.Array, ...]],
        ) -> tuple[Any, list[jax.Array], list[Any]]:
            decisions: Any = []
            if ints and self._inner:
                # Each process of a replica has statistics, none negative: take the largest.
                ints = [jax.lax.pmax(ints[0], tuple(name for name, _ in self._inner)), *ints[1:]]
            if own:
                peaks_T, used_T, *scale = own
                if num > 1:
                    gathered = flatly(lambda x: jax.lax.all_gather(x, names), [peaks_T])
                    peaks_T = gathered[0].max(axis=0)
                    ints = joined_over(names, self._merges, ints, flatly)
                stats_DN, small_MS, *ints = ints
                island = None if islands is None else (scale.pop(), _own_island(islands))
                of_loss = scale[0] if scale else None
                step = small_MS, peaks_T, used_T, of_loss, stats_DN, island
                decisions = decide(self._decisions, *step)
            if self.layout.chunks:
                chunk_sums = self._sum_chunks(k, values, before, is_last)
                if is_last:
                    return decisions, ints, [as_bits(x) for x in chunk_sums]
                # An array that is not donated, to block on.
                return [chunk_sums[0][0][:1]], ints, chunk_sums
            return decisions, ints, [as_bits(x) for x in padded_totals(values)]

        # One device needs no mesh: a mesh would mark the outputs as sharded, and the update would
        # be compiled in another form.
        run: Any = hxla_sum
        if self._inner or num > 1:
            small = self.layout.small_specs(k)
            arguments = *small, self.layout.limb_specs(k)
            inner_spec = self.arrays.stacked(self.arrays.inner_spec)
            specs: Any = self._total_specs(k) if is_last else inner_spec
            specs_of: Any = [P()] * len(Decisions._fields)
            decisions: Any = Decisions._make(specs_of) if k == 0 else []
            run = jax.shard_map(
                hxla_sum,
                mesh=self.arrays.mesh,
                in_specs=(
                    *jax.tree.map(
                        self.arrays.stacked, arguments, is_leaf=lambda x: isinstance(x, P)
                    ),
                    inner_spec,
                ),
                out_specs=(decisions if is_last else [inner_spec], small[1][2:], specs),
                check_vma=False,
            )
        return jax.jit(run, donate_argnums=(2, 3) if self.releases else ())

    def _total_specs(self, k: int) -> list[P]:
        """PartitionSpecs of the totals that the program of `_build` returns."""
        if self.layout.chunks:
            params = [self.arrays.own_spec] if self.layout.chunks[k].tensors else []
            return params + ([self.arrays.inner_spec] if self.layout.others(k) else [])
        return [self.layout.pack_specs[p] for p in self.layout.bucket_packs[k]]

    def _sum_chunks(
        self,
        k: int,
        values: list[tuple[jax.Array, ...]],
        before: list[tuple[jax.Array, ...]],
        is_last: bool,
    ) -> list[Any]:
        """This place's chunk of the parameters' totals, and all totals of the other tensors."""
        limbs, layout = [], self.layout
        sizes = [len(layout.packs[p]) for p in layout.bucket_packs[k]]
        for limb in zip(*values, strict=True):
            rows = [list(x.reshape(n, -1)) for x, n in zip(limb, sizes, strict=True)]
            limbs.append(dict(zip(layout.bucket_tensors[k], itertools.chain(*rows), strict=True)))
        chunks = self._reduce_scatter.reduce_chunks(
            layout.chunks[k], layout.others(k), limbs, before
        )
        if not is_last:
            return chunks
        longest = max(self.arrays.lengths(layout.chunks[k].lengths))
        return self._reduce_scatter.gather_chunks(chunks, longest, layout.num_others(k))

    def lower(self) -> list[Any]:
        """The programs of all buckets before compilation, one for groups of one form."""
        lowered, layout, dtype = [], self.layout, self._contribution.dtype
        for k in sorted(set(layout.first_alike)):
            own, small_specs = layout.small_specs(k)
            small = list(map(self._shape, layout.scale_shapes, own)) if k == 0 else []
            ints = list(map(self._shape, layout.small_shapes, small_specs)) if k == 0 else []
            values = [
                tuple(self._shape(layout.pack_shapes[p], spec, dtype) for spec in specs)
                for p, specs in zip(layout.bucket_packs[k], layout.limb_specs(k), strict=True)
            ]
            before = self._wave_shapes(k)
            with warnings.catch_warnings():
                # Sums are donated to free them, though no result has the size of their buffers.
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
                lowered.append(self._build(k).lower(small, ints, values, before))
                if before:
                    early = self._build(k, is_last=False)
                    lowered.append(early.lower(small, ints, values, before))
                    lowered.append(zeros_like(before).lower())
        return lowered

    def _wave_shapes(self, k: int) -> list[Any]:
        """Shapes of the chunks of sums that a group keeps between waves."""
        if not self._has_waves or k in self.layout.at_once:
            return []
        dtype, num = self._contribution.dtype, self._contribution.form.num_parts
        others, chunks = self.layout.num_others(k), self.layout.chunks[k]
        sizes = [max(self.arrays.lengths(chunks.lengths))] if chunks.tensors else []
        sizes += [self._reduce_scatter.even_length(others)] if others else []
        parts = map(self._reduce_scatter.part_of, sizes)
        inner, spec = self.arrays.num_inner, self.arrays.inner_spec
        return [(self._shape((inner * size,), spec, dtype),) * num for size in parts]

    @property
    def text(self) -> str:
        """A text in place of the programs, where processes have unlike ones; else empty."""
        return "of parts without padding" if any(self._cuts) else ""

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Use the compiled programs of `lower`."""
        flat, programs = iter(compiled), {}
        for k in sorted(set(self.layout.first_alike)):
            programs[k] = next(flat)
            if self._wave_shapes(k):
                self._early[k], self._zeros[k] = next(flat), next(flat)
        self.programs = [programs[k] for k in self.layout.first_alike]

    def memory_bytes(self) -> int:
        """Bytes that one device needs beside the sums and the totals while it sums."""
        if not self.arrays.is_in_place:
            return 0
        stats = [program.memory_analysis() for program in self.programs]
        return max((int(s.temp_size_in_bytes) for s in stats if s is not None), default=0)

    def _shape(self, shape: Sequence[int], spec: P, dtype: Any = jnp.int32) -> Any:
        """The global shape of an array, from the shape at each place."""
        arrays = self.arrays
        whole = (len(arrays.places) * shape[0], *shape[1:])
        return jax.ShapeDtypeStruct(whole, dtype, sharding=arrays.sharding(arrays.stacked(spec)))

    def hold(self, sums: Sequence[DeviceSums]) -> Any:
        """The sums of the local replicas as global arrays, for `reduce`; does not block.

        To assemble hundreds of arrays takes milliseconds, in which the devices still compute.
        """
        stacking = self.arrays.stacking
        peaks = stacking([P()], [[s.peaks_T] for s in sums], jnp.maximum)
        ints = stacking(self.layout.small_specs(0)[1][1:], [[s.small_MS, *s.words] for s in sums])
        values = [
            stacking(
                self.layout.limb_specs(k),
                [[s.values[p] for p in self.layout.bucket_packs[k]] for s in sums],
            )
            for k in self.layout.at_once
        ]
        return peaks, ints, values

    def add_group(self, k: int, values: Sequence[Sequence[Any]], before: Any) -> tuple[Any, Any]:
        """Add a wave to the sums of a group.

        Args:
            values: For each local replica the limbs of the group's packs, which are donated.
            before: The chunks after the previous wave, which are donated; None: this is the first.

        Returns:
            Chunks of the sums as integers, and a small array to block on until they are ready.
        """
        same = self.layout.first_alike[k + 1]
        stacked = self.arrays.stack(
            self.layout.limb_specs(k + 1), [list(limbs) for limbs in values]
        )
        before = before or self._zeros[same]()
        [mark], _, chunks = self._early[same]([], [], stacked, before)
        return chunks, mark

    def sum_group(
        self, k: int, values: Sequence[Sequence[Any]], before: Any = None
    ) -> list[list[jax.Array]]:
        """The totals of a group on each local replica.

        Args:
            values: For each local replica the limbs of the group's packs, which are donated.
            before: The chunks of `add_group` after earlier waves, which are donated; None: none.
        """
        stacked = self.arrays.stack(
            self.layout.limb_specs(k + 1), [list(limbs) for limbs in values]
        )
        return self._totals_of(k + 1, self.programs[k + 1]([], [], stacked, before or [])[2])

    def group_bytes(self, k: int) -> GroupBytes:
        """Memory of group `k`, once its programs are compiled."""
        layout = self.layout
        sums = sum(layout.pack_sizes[p] for p in layout.bucket_packs[k + 1])
        waiting = sum(4 * x.size for limbs in self._wave_shapes(k + 1) for x in limbs)
        programs = [self.programs[k + 1], self._early.get(layout.first_alike[k + 1])]
        on_device = [p for p in programs if p is not None and self.arrays.is_in_place]
        return GroupBytes(
            sums=4 * self._contribution.form.num_parts * sums,
            adding=max(map(extra_bytes, on_device), default=0),
            totals=4 * sum(layout.total_sizes(k + 1, self.local[0].index)),
            waiting=waiting // len(self.arrays.devices),
        )

    def _totals_of(self, k: int, totals: Sequence[jax.Array]) -> list[list[jax.Array]]:
        """The totals of a bucket on each local replica."""
        arrays, chunks = self.arrays, self.layout.chunks
        cut = chunks and chunks[k].lengths
        each = [
            arrays.part(x, cut) if cut and spec == arrays.own_spec else arrays.local_parts(x, spec)
            for x, spec in zip(totals, self._total_specs(k), strict=True)
        ]
        per_replica = [[parts[i] for parts in each] for i in range(len(self.local))]
        if not chunks or self._inner:
            return per_replica
        # Without the padding of shorter chunks.
        sizes = [self.layout.total_sizes(k, replica.index) for replica in self.local]
        pairs = zip(per_replica, sizes, strict=True)
        return [[x[:n] for x, n in zip(*pair, strict=True)] for pair in pairs]

    def reduce(
        self,
        stats: Sequence[jax.Array],
        local_sums: Any,
        scales: Sequence[Sequence[jax.Array]],
        totals: Sequence[Any] = (),
    ) -> Reduced:
        """Sum over all replicas; everything stays on the devices.

        Args:
            stats: On each local replica the result of `stat_rows`.
            local_sums: The result of `hold`.
            scales: On each local replica what `SumLayout.scale_shapes` says, but for the peaks.
            totals: On each local replica the totals of the groups, in order.
        """
        arrays, (peaks, ints, values) = self.arrays, local_sums
        of_scales = [P()] * len(scales[0])
        used = arrays.stack(of_scales, [list(x) for x in scales], jnp.maximum)
        told = arrays.stack([P()], [[x] for x in stats])
        small: Any = [*peaks(), *used], [*told, *ints()]
        per_replica: list[list[Any]] = [[] for _ in self.local]
        next_values = values[0]()
        for k in self.layout.at_once:
            program, is_last = self.programs[k], k + 1 == len(self.layout.at_once)
            values[k] = None
            decided, words, bucket_totals = program(
                *(small if k == 0 else ([], [])), next_values, []
            )
            next_values = values[k + 1]() if k + 1 < len(values) else None
            if k == 0:
                small = decided, words
            for replica_totals, new in zip(
                per_replica, self._totals_of(k, bucket_totals), strict=True
            ):
                replica_totals += new
            if arrays.is_ring and not is_last:
                # Gloo mixes up collectives that do not depend on each other.
                jax.block_until_ready(bucket_totals)
        decided, words = small
        *read, told = decided
        each = [arrays.local_parts(x, P()) for x in read]
        of_words = [arrays.local_parts(x, P()) for x in words]
        num = range(len(self.local))
        return Reduced(
            totals=tuple(
                [*a, *b]
                for a, b in zip(per_replica, totals or [()] * len(per_replica), strict=True)
            ),
            words=tuple([x[i] for x in of_words] for i in num),
            decisions=tuple(Decisions._make([*(x[i] for x in each), told]) for i in num),
        )

    def traced(self) -> tuple[Callable[..., Any], Callable[..., list[jax.Array]]]:
        """What `reduce` computes on one device, which is alone.

        Returns:
            `(sums, scales) -> (decisions, words)` and `sums -> totals`.
        """
        programs = [self._build(k).__wrapped__ for k in range(self.layout.num_buckets)]

        def decide(sums: DeviceSums, scales: Sequence[jax.Array]) -> Any:
            stats = jnp.zeros(self.layout.small_shapes[0], jnp.int32)
            small = [sums.peaks_T, *scales], [stats, sums.small_MS, *sums.words]
            decisions, words, _ = programs[0](*small, [], [])
            return decisions, words

        def totals(sums: DeviceSums) -> list[jax.Array]:
            each = [[sums.values[p] for p in packs] for packs in self.layout.bucket_packs]
            pairs = zip(programs, each, strict=True)
            return [x for program, values in pairs for x in program([], [], values, [])[2]]

        return decide, totals

    def told(self, decisions: Decisions) -> Told:
        """What the host learns of a reduction; waits for it."""
        return Told.of(decisions.told, self.layout.num_tensors, *self.layout.small_shapes[:2])

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """For each replica the processes of its devices."""
        return tuple(tuple(sorted({process_of(d) for d in r.devices})) for r in self.replicas)

    def result_shapes(self, i: int) -> tuple[Any, Any]:
        """Shapes of the totals and words of `reduce` on a local replica; `i` is its place."""

        def like(shape: Sequence[int], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=self.local[i].sharding(spec))

        layout = self.layout
        if layout.chunks:
            index, num = self.local[i].index, self.arrays.num_inner
            sizes = [n for k in range(layout.num_buckets) for n in layout.total_sizes(k, index)]
            totals = [like((num * n,), jnp.int32, self.arrays.inner_spec) for n in sizes]
        else:
            shapes = zip(layout.total_shapes, layout.total_specs, strict=True)
            totals = [like(shape, jnp.int32, spec) for shape, spec in shapes]
        return totals, [like(shape, jnp.int32, P()) for shape in layout.small_shapes[2:]]
