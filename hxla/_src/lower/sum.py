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
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..jax.devices import process_of
from ..plan.ownership import Ownership, Shares
from ..plan.stage_storage import piece_shape
from .chunks import Chunks, sum_of_rows
from .compile import extra_bytes, firsts_alike
from .contribution import (
    Contribution,
    DeviceSums,
    Tensors,
    buckets,
    pack_shapes,
    pack_sizes,
    pack_specs,
)
from .decisions import Decisions, DecisionSpec, Told, decide
from .global_arrays import GlobalArrays, HostSums
from .reduce_scatter import (
    GroupBytes,
    ReduceScatter,
    as_bits,
    concatenated,
    cut,
    flatly,
    zeros_like,
)
from .replica import Replica
from .state_sums import joined_over
from .uneven_collectives import Cut

NUM_TOLD = 3  # statistics that each replica sends to all others with a sum


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


class Reducer:
    """Sums over all replicas of a run.

    Legend of shape suffixes: D replicas, C elements of a chunk, N statistics of a replica, M
    microbatches of a step, S sums per microbatch, T float tensors.

    Args:
        replicas: Replicas of all processes, in the order of `counts`.
        specs: PartitionSpec of each tensor over the axes inside a replica.
        row_shape: Shape of the sums per microbatch, of all microbatches of a step.
        decisions: What the decisions of a step depend on besides its sums.
        packs: Tensors whose sums are the rows of one array; None: each tensor has its own array.
        rows: Most nonzero rows in a replica, by tensor; of these tensors only such rows are sent.
        release: Whether the local sums are freed as soon as they are reduced.
        ownership: The shard of each parameter's sum that a replica gets; None: all get the whole.
        shard_groups: Groups of replicas that each shard the sums; see `Placement`.
        cuts: How tensors are cut, where this process sends its shards without padding.
        groups: Packs that `sum_group` reduces apart from the others; None: `reduce` reduces all.
        has_waves: Whether a step may reduce each group in several waves.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        contribution: Contribution,
        tensors: Tensors,
        specs: Sequence[P],
        *,
        row_shape: tuple[int, int],
        decisions: DecisionSpec,
        packs: Sequence[Sequence[int]] | None = None,
        rows: Mapping[int, int] | None = None,
        release: bool = False,
        ownership: Ownership | None = None,
        shard_groups: int = 1,
        cuts: Sequence[Cut | None] | None = None,
        groups: Sequence[Sequence[int]] | None = None,
        has_waves: bool = False,
    ):
        self._contribution, self._has_waves = contribution, has_waves
        self.releases, self.form = release, contribution.form
        self.is_scaled = decisions.is_scaled
        self.arrays = GlobalArrays(replicas, contribution.form.over, shard_groups)
        self._decisions, self._row_shape = decisions, row_shape
        self._ownership = ownership
        if ownership is not None:
            self.arrays.check_in_order()
        self._reduce_scatter = ReduceScatter(self.arrays, contribution)
        self.replicas, self.local = self.arrays.replicas, self.arrays.local
        self._inner = self.arrays.axes
        #: Sums of host arrays over all processes.
        self.host = HostSums(self.arrays.devices, self.replicas)
        packs = packs or [[i] for i in range(len(tensors.floats))]
        self._packs = packs
        self.num_tensors = len(tensors.floats)
        self._shapes = pack_shapes(tensors, packs)
        self._specs = pack_specs(specs, packs)
        places = {pack[0]: p for p, pack in enumerate(packs)}
        num_here = max(map(len, self.arrays.places))
        self._rows = {places[i]: most * num_here for i, most in (rows or {}).items()}
        stats_shape = len(self.replicas), NUM_TOLD
        self._small_shapes = [stats_shape, row_shape, *(x.shape for x in tensors.words)]
        self._merges = ("sum", "sum", *tensors.word_merges)
        axes = dict(self._inner)
        self._sizes = pack_sizes(tensors, packs, specs, axes)
        if groups is None:
            self._buckets = buckets(self._sizes, contribution.form.bucket_mib << 18, self._rows)
        else:
            self._buckets = [[], *map(list, groups)]  # the first has the small arrays
        self._reduced_at_once = range(len(self._buckets) if groups is None else 1)
        #: Tensors of each program, in the order of its vector.
        self.buckets = [[i for p in bucket for i in packs[p]] for bucket in self._buckets]
        self._params = len(tensors.params)
        #: Elements of each tensor on a device.
        self._tensor_sizes = [
            math.prod(piece_shape(x.shape, spec, axes))
            for x, spec in zip(tensors.floats, specs, strict=True)
        ]
        #: How each bucket shards the sums of its parameters; empty if it does not.
        self.chunks: list[Chunks] = []
        if ownership is not None:
            self.chunks = [self._chunks(k, ownership.shares) for k in self.buckets]
        self._cuts = cuts or [None] * len(packs)
        #: A compiled program for each bucket.
        self.programs: list[Any] = []
        #: The programs of waves before the last, by group, and of zeros for the first wave.
        self._early: dict[int, Any] = {}
        self._zeros: dict[int, Any] = {}

    @property
    def total_tensors(self) -> list[list[int]]:
        """Tensors of each array of totals, in order; of each bucket, where totals are chunks."""
        packs = itertools.chain(*self._buckets)
        return self.buckets if self.chunks else [list(self._packs[p]) for p in packs]

    @property
    def total_specs(self) -> list[P]:
        """PartitionSpec of each array of totals over the inner axes, where they are whole."""
        return [self._specs[p] for p in itertools.chain(*self._buckets)]

    @property
    def num_chunk_elements(self) -> int:
        """Elements of the first local replica's chunks."""
        if self._ownership is None:
            return 0
        member = self._ownership.member(self.local[0].index)
        return sum(chunks.buffer_size(member) for chunks in self.chunks)

    def _chunks(self, bucket: Sequence[int], shares: Shares) -> Chunks:
        params = tuple(i for i in bucket if i < self._params)
        return Chunks(shares, params, tuple(self._tensor_sizes[i] for i in params))

    def _small_specs(self, k: int) -> tuple[list[P], list[P]]:
        """PartitionSpecs of the small arrays that travel with a bucket: all go with the first."""
        num_own = 2 + self._decisions.is_scaled
        return ([P()] * num_own, [P()] * len(self._small_shapes)) if k == 0 else ([], [])

    def _build(self, k: int, is_last: bool = True) -> Any:
        """The program `(own, ints, values, before) -> (decisions, words, totals)` of a bucket.

        `own` are peaks and the scales of this step, `ints` small integer arrays to sum, `values`
        the limbs of each tensor's sum, and `before` chunks of sums from earlier waves. Buckets
        after the first have neither of the first two, and decide nothing. Totals are floats, one
        array for each pack however replicas are spread, so that the update is one program. Their
        bits are int32, so that a donated sum's buffer can hold them. With sharded sums they are
        chunks, and before the last wave integers like `before`.
        """
        num, bucket, names = len(self.arrays.places), self._buckets[k], self.arrays.names
        rows = self._rows.get(bucket[0]) if bucket else None

        def totals(values: list[tuple[jax.Array, ...]]) -> list[jax.Array]:
            if num == 1:
                return [self._contribution.combine(*parts) for parts in values]
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
                of_loss = scale[0] if scale else None
                decisions = decide(self._decisions, small_MS, peaks_T, used_T, of_loss, stats_DN)
            if self.chunks:
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
            words = self._small_specs(k)[1][2:]
            arguments = self._arguments(k)
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
                out_specs=(decisions if is_last else [inner_spec], words, specs),
                check_vma=False,
            )
        return jax.jit(run, donate_argnums=(2, 3) if self.releases else ())

    def _other_tensors(self, k: int) -> list[int]:
        """The tensors of a bucket that are not parameters."""
        return [i for i in self.buckets[k] if i >= self._params]

    def _total_specs(self, k: int) -> list[P]:
        """PartitionSpecs of the totals that the program of `_build` returns."""
        if self.chunks:
            params = [self.arrays.own_spec] if self.chunks[k].tensors else []
            return params + ([self.arrays.inner_spec] if self._other_tensors(k) else [])
        return [self._specs[i] for i in self._buckets[k]]

    def _total_sizes(self, k: int, i: int = 0) -> list[int]:
        """Elements of each array of totals on each device of a local replica."""
        if not self.chunks:
            return [sum(math.prod(self._shapes[p]) for p in self._buckets[k])]
        others = sum(self._tensor_sizes[j] for j in self._other_tensors(k))
        params = []
        if self._ownership is not None and self.chunks[k].tensors:
            params = [self.chunks[k].buffer_size(self._ownership.member(self.local[i].index))]
        return params + ([others] if others else [])

    def _sum_chunks(
        self,
        k: int,
        values: list[tuple[jax.Array, ...]],
        before: list[tuple[jax.Array, ...]],
        is_last: bool,
    ) -> list[Any]:
        """This place's chunk of the parameters' totals, and all totals of the other tensors."""
        limbs = []
        for limb in zip(*values, strict=True):
            rows = [list(x.reshape(n, -1)) for x, n in zip(limb, self._pack_sizes(k), strict=True)]
            limbs.append(dict(zip(self.buckets[k], itertools.chain(*rows), strict=True)))
        size = sum(self._tensor_sizes[i] for i in self._other_tensors(k))
        chunks = self._reduce_scatter.reduce_chunks(
            self.chunks[k], self._other_tensors(k), limbs, before
        )
        longest = max(self.arrays.lengths(self.chunks[k].lengths))
        return self._reduce_scatter.gather_chunks(chunks, longest, size) if is_last else chunks

    def _pack_sizes(self, k: int) -> list[int]:
        """Number of tensors in each pack of a bucket."""
        return [len(self._packs[p]) for p in self._buckets[k]]

    def _arguments(self, k: int) -> Any:
        """PartitionSpecs of a program's arguments over the inner axes."""
        num = self._contribution.form.num_parts
        return *self._small_specs(k), [(self._specs[i],) * num for i in self._buckets[k]]

    @functools.cached_property
    def _first_alike(self) -> list[int]:
        """For each bucket the first that has the same program."""
        return firsts_alike(self._form(k) for k in range(len(self._buckets)))

    def _form(self, k: int) -> Any:
        """A key that two buckets share only if they have the same program."""
        if not k or not self.chunks or k in self._reduced_at_once:
            return k
        owners = self.chunks[k].shares.owners
        packs = [
            (
                [owners[i] for i in pack_tensors if i < self._params],
                len(pack_tensors),
                pack_tensors[0] < self._params,
            )
            for pack_tensors in (self._packs[p] for p in self._buckets[k])
        ]
        return str((packs, [(self._shapes[p], self._specs[p]) for p in self._buckets[k]]))

    def lower(self) -> list[Any]:
        """The programs of all buckets before compilation, one for groups of one form."""
        lowered = []
        for k in sorted(set(self._first_alike)):
            shapes = [(self.num_tensors,)] * 2 + [(1,)] * self._decisions.is_scaled
            small = [self._shape(x, P()) for x in shapes] if k == 0 else []
            ints = [self._shape(x, P()) for x in self._small_shapes] if k == 0 else []
            dtype, num = self._contribution.dtype, self._contribution.form.num_parts
            values = [
                (self._shape(self._shapes[i], self._specs[i], dtype),) * num
                for i in self._buckets[k]
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
        if not self._has_waves or k in self._reduced_at_once:
            return []
        dtype, num = self._contribution.dtype, self._contribution.form.num_parts
        others = sum(self._tensor_sizes[i] for i in self._other_tensors(k))
        longest = max(self.arrays.lengths(self.chunks[k].lengths))
        sizes = [longest] if self.chunks[k].tensors else []
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
        for k in sorted(set(self._first_alike)):
            programs[k] = next(flat)
            if self._wave_shapes(k):
                self._early[k], self._zeros[k] = next(flat), next(flat)
        self.programs = [programs[k] for k in self._first_alike]

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
        ints = stacking(
            [P()] * (len(self._small_shapes) - 1), [[s.small_MS, *s.words] for s in sums]
        )
        values = [
            stacking(self._arguments(k)[2], [[s.values[i] for i in bucket] for s in sums])
            for k, bucket in enumerate(self._buckets)
            if k in self._reduced_at_once
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
        same = self._first_alike[k + 1]
        stacked = self.arrays.stack(self._arguments(k + 1)[2], [list(limbs) for limbs in values])
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
        stacked = self.arrays.stack(self._arguments(k + 1)[2], [list(limbs) for limbs in values])
        return self._totals_of(k + 1, self.programs[k + 1]([], [], stacked, before or [])[2])

    def group_bytes(self, k: int) -> GroupBytes:
        """Memory of group `k`, once its programs are compiled."""
        sums = sum(self._sizes[i] for i in self._buckets[k + 1])
        waiting = sum(4 * x.size for limbs in self._wave_shapes(k + 1) for x in limbs)
        programs = [self.programs[k + 1], self._early.get(self._first_alike[k + 1])]
        on_device = [p for p in programs if p is not None and self.arrays.is_in_place]
        return GroupBytes(
            sums=4 * self._contribution.form.num_parts * sums,
            adding=max(map(extra_bytes, on_device), default=0),
            totals=4 * sum(self._total_sizes(k + 1)),
            waiting=waiting // len(self.arrays.devices),
        )

    def _totals_of(self, k: int, totals: Sequence[jax.Array]) -> list[list[jax.Array]]:
        """The totals of a bucket on each local replica."""
        arrays, cut = self.arrays, self.chunks and self.chunks[k].lengths
        each = [
            arrays.part(x, cut) if cut and spec == arrays.own_spec else arrays.local_parts(x, spec)
            for x, spec in zip(totals, self._total_specs(k), strict=True)
        ]
        per_replica = [[parts[i] for parts in each] for i in range(len(self.local))]
        if not self.chunks or self._inner:
            return per_replica
        # Without the padding of shorter chunks.
        pairs = zip(
            per_replica, (self._total_sizes(k, i) for i in range(len(per_replica))), strict=True
        )
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
            scales: On each local replica the exponents of its microbatches, int32[T], and if the
                loss is scaled that of its gradients, int32[1].
            totals: On each local replica the totals of the groups, in order.
        """
        arrays, (peaks, ints, values) = self.arrays, local_sums
        of_scales = [P()] * len(scales[0])
        used = arrays.stack(of_scales, [list(x) for x in scales], jnp.maximum)
        told = arrays.stack([P()], [[x] for x in stats])
        small: Any = [*peaks(), *used], [*told, *ints()]
        per_replica: list[list[Any]] = [[] for _ in self.local]
        next_values = values[0]()
        for i, k in enumerate(self._reduced_at_once):
            program, is_last = self.programs[k], i + 1 == len(self._reduced_at_once)
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

    @property
    def traced(self) -> list[tuple[list[int], Callable[..., Any]]]:
        """For each bucket its packs, and the function of its program."""
        return [(packs, self._build(k).__wrapped__) for k, packs in enumerate(self._buckets)]

    def told(self, decisions: Decisions) -> Told:
        """What the host learns of a reduction; waits for it."""
        return Told.of(decisions.told, self.num_tensors, self._row_shape, NUM_TOLD)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """For each replica the processes of its devices."""
        return tuple(tuple(sorted({process_of(d) for d in r.devices})) for r in self.replicas)

    def result_shapes(self, i: int) -> tuple[Any, Any]:
        """Shapes of the totals and words of `reduce` on a local replica; `i` is its place."""

        def like(shape: Sequence[int], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=self.local[i].sharding(spec))

        if self.chunks:
            sizes = [n for k in range(len(self._buckets)) for n in self._total_sizes(k, i)]
            num, spec = self.arrays.num_inner, self.arrays.inner_spec
            totals = [like((num * n,), jnp.int32, spec) for n in sizes]
        else:
            packs = itertools.chain(*self._buckets)
            totals = [like(self._shapes[p], jnp.int32, self._specs[p]) for p in packs]
        return totals, [like(shape, jnp.int32, P()) for shape in self._small_shapes[2:]]
