"""The arrays of a step's sums: packs, buckets, chunks and their shapes, known before any program.

`Reducer` makes the programs that fill these arrays.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from ..plan.layout import piece_shape
from ..plan.ownership import Shares
from ..plan.parts import Islands
from .chunks import Chunks
from .compile import firsts_alike
from .contribution import Contribution, Tensors, buckets, pack_shapes, pack_sizes, pack_specs

NUM_STATS = 3  # seconds of microbatches, seconds of the update before, a request to stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumLayout:
    """The arrays of the sums of all tensors.

    A pack is an array with the sums of one or several tensors. A bucket has the packs of one
    program. In these methods `k` is the place of a bucket.

    Attributes:
        specs: PartitionSpec of each tensor over the axes inside a replica.
        row_shape: Shape of the sums per microbatch, of all microbatches of a step.
        is_scaled: Whether the loss is scaled.
        packs: Tensors whose sums are the rows of one array.
        rows: Most nonzero rows in a replica, by tensor; of these tensors only such rows are sent.
        shares: The shard of each parameter's sum that a replica gets; None: all get the whole.
        groups: Packs that are reduced apart from the others; None: all are reduced at once.
        in_one: Whether one bucket has all packs, for a replica that sends nothing.
        islands: Groups of replicas that sum apart; None: there are none.
        num_stats: Numbers that each replica tells all others with a sum.
    """

    tensors: Tensors
    specs: Sequence[P]
    contribution: Contribution
    num_replicas: int
    row_shape: tuple[int, int]
    packs: Sequence[Sequence[int]]
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    is_scaled: bool = False
    rows: Mapping[int, int] = dataclasses.field(default_factory=dict)
    shares: Shares | None = None
    groups: Sequence[Sequence[int]] | None = None
    in_one: bool = False
    islands: Islands | None = None
    num_stats: int = NUM_STATS

    @property
    def num_tensors(self) -> int:
        """Float tensors that are summed."""
        return len(self.tensors.floats)

    # -- packs -----------------------------------------------------------------------------------

    @functools.cached_property
    def pack_shapes(self) -> list[tuple[int, ...]]:
        """Shape of each pack."""
        return pack_shapes(self.tensors, self.packs)

    @functools.cached_property
    def pack_specs(self) -> list[P]:
        """PartitionSpec of each pack over the inner axes."""
        return pack_specs(self.specs, self.packs)

    @functools.cached_property
    def pack_sizes(self) -> list[int]:
        """Elements of each pack on a device."""
        return pack_sizes(self.tensors, self.packs, self.specs, self.axes)

    @functools.cached_property
    def _rows_of_packs(self) -> dict[int, int]:
        places = {pack[0]: p for p, pack in enumerate(self.packs)}
        return {places[i]: most for i, most in self.rows.items()}

    # -- buckets ---------------------------------------------------------------------------------

    @functools.cached_property
    def bucket_packs(self) -> list[list[int]]:
        """The packs of each bucket. A group is a bucket, after one with the small arrays."""
        if self.in_one:
            return [list(range(len(self.packs)))]
        if self.groups is None:
            return buckets(
                self.pack_sizes, self.contribution.form.bucket_mib << 18, self._rows_of_packs
            )
        return [[], *map(list, self.groups)]

    @property
    def num_buckets(self) -> int:
        """Buckets, those of groups among them."""
        return len(self.bucket_packs)

    @property
    def at_once(self) -> range:
        """The buckets that are reduced together at the end of a step."""
        return range(self.num_buckets if self.groups is None else 1)

    @functools.cached_property
    def bucket_tensors(self) -> list[list[int]]:
        """The tensors of each bucket, in the order of its vector."""
        return [[i for p in packs for i in self.packs[p]] for packs in self.bucket_packs]

    @functools.cached_property
    def tensor_sizes(self) -> list[int]:
        """Elements of each tensor on a device."""
        return [
            math.prod(piece_shape(x.shape, spec, self.axes))
            for x, spec in zip(self.tensors.floats, self.specs, strict=True)
        ]

    @functools.cached_property
    def chunks(self) -> list[Chunks]:
        """How each bucket shards the sums of its parameters; empty if it does not."""
        if self.shares is None:
            return []
        num, sizes = len(self.tensors.params), self.tensor_sizes
        params = [tuple(i for i in tensors if i < num) for tensors in self.bucket_tensors]
        return [Chunks(self.shares, each, tuple(sizes[i] for i in each)) for each in params]

    def most_rows(self, k: int) -> int | None:
        """Most nonzero rows in a replica, of a bucket of one sparse tensor; None: it has others."""
        return next((self._rows_of_packs.get(p) for p in self.bucket_packs[k]), None)

    def others(self, k: int) -> list[int]:
        """The tensors of a bucket that are not parameters."""
        return [i for i in self.bucket_tensors[k] if i >= len(self.tensors.params)]

    def num_others(self, k: int) -> int:
        """Elements of the tensors that are not parameters, on a device."""
        return sum(self.tensor_sizes[i] for i in self.others(k))

    # -- arguments -------------------------------------------------------------------------------

    @property
    def scale_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of each replica's peaks, of the scales of its step, and of the islands' bounds."""
        num = self.num_tensors
        bounds = [] if self.islands is None else [(len(self.islands.replicas) + 1,)]
        return [(num,), (num,), *([(1,)] if self.is_scaled else []), *bounds]

    @property
    def small_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the small integer arrays that are summed: statistics, rows and words."""
        stats_shape = self.num_replicas, self.num_stats
        return [stats_shape, self.row_shape, *(x.shape for x in self.tensors.words)]

    def small_specs(self, k: int) -> tuple[list[P], list[P]]:
        """PartitionSpecs of the small arrays that travel with a bucket: all go with the first."""
        return (
            ([P()] * len(self.scale_shapes), [P()] * len(self.small_shapes)) if k == 0 else ([], [])
        )

    def limb_specs(self, k: int) -> list[tuple[P, ...]]:
        """PartitionSpecs of the limbs of each pack of a bucket over the inner axes."""
        return [
            (self.pack_specs[p],) * self.contribution.form.num_parts for p in self.bucket_packs[k]
        ]

    # -- totals ----------------------------------------------------------------------------------

    @property
    def total_tensors(self) -> list[list[int]]:
        """Tensors of each array of totals, in order; of each bucket, where totals are chunks."""
        packs = itertools.chain(*self.bucket_packs)
        return self.bucket_tensors if self.chunks else [list(self.packs[p]) for p in packs]

    @property
    def total_specs(self) -> list[P]:
        """PartitionSpec of each array of totals over the inner axes, where they are whole."""
        return [self.pack_specs[p] for p in itertools.chain(*self.bucket_packs)]

    @property
    def total_shapes(self) -> list[tuple[int, ...]]:
        """Shape of each array of totals, where they are whole."""
        return [self.pack_shapes[p] for p in itertools.chain(*self.bucket_packs)]

    def total_sizes(self, k: int, replica: int) -> list[int]:
        """Elements of each array of a bucket's totals on each device of a replica."""
        if self.shares is None:
            return [sum(math.prod(self.pack_shapes[p]) for p in self.bucket_packs[k])]
        others, member = self.num_others(k), self.shares.member(replica)
        params = [self.chunks[k].buffer_size(member)] if self.chunks[k].tensors else []
        return params + ([others] if others else [])

    def num_chunk_elements(self, replica: int) -> int:
        """Elements of a replica's chunks of all buckets; 0 if totals are whole."""
        if self.shares is None:
            return 0
        member = self.shares.member(replica)
        return sum(chunks.buffer_size(member) for chunks in self.chunks)

    # -- programs --------------------------------------------------------------------------------

    @functools.cached_property
    def first_alike(self) -> list[int]:
        """For each bucket the first that has the same program."""
        return firsts_alike(self._key(k) for k in range(self.num_buckets))

    def _key(self, k: int) -> Any:
        """A key that two buckets share only if they have the same program."""
        if not k or not self.chunks or k in self.at_once:
            return k
        owners, num = self.chunks[k].shares.owners, len(self.tensors.params)
        packs = [
            ([owners[i] for i in pack if i < num], len(pack), pack[0] < num)
            for pack in (self.packs[p] for p in self.bucket_packs[k])
        ]
        return str(
            (packs, [(self.pack_shapes[p], self.pack_specs[p]) for p in self.bucket_packs[k]])
        )
