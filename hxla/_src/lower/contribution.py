"""How gradients and changes of other variables join the sums of a step, and the sums' values.

The program of a microbatch, the stages of a pipeline and the reduction over replicas all use this.

Legend of shape suffixes: M microbatches of a step, T float tensors (parameters, then other
variables), S sums per microbatch (loss, weight, metrics).
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..graph.graph import Graph, params_of, shapes_of
from ..graph.parts import ChainPart
from ..jax.cpu_dots import uncrossed
from ..jax.jaxpr import as_function
from ..jax.lookups import Lookups, Rows
from ..model.plain_arrays import root_key
from ..plan.layout import piece_shape
from ..plan.parts import SumsForm
from ..plan.sharding import place_in
from . import exact
from .state_sums import as_real, change, is_decided, is_summed, joined, own_words, words_like


def num_terms(graph: Graph, parts: Sequence[ChainPart], num_microbatches: int) -> int:
    """Terms of one element's sum: a parameter that several parts read has more."""
    read: dict[int, list[tuple[int, int, int] | None]] = collections.defaultdict(list)
    param_of = params_of(graph)
    for entry in (p for part in parts for p in part.segment.params):
        read[param_of[entry]].append(graph.values[graph.param_values[entry]].rows)

    def meet(a: tuple[int, int, int] | None, b: tuple[int, int, int] | None) -> bool:
        return a is None or b is None or a[0] != b[0] or b[1] <= a[1] < b[2]

    readers = [sum(meet(a, b) for b in rows) for rows in read.values() for a in rows]
    return num_microbatches * max(readers, default=1)


_PACKED_ELEMENTS = 1 << 14  # copying more costs more time than a kernel


class DeviceSums(NamedTuple):
    """The sums of one replica over its microbatches.

    Attributes:
        small_MS: Bit patterns of each microbatch's loss, weight and metrics; zero where another
            replica ran it.
        peaks_T: Bit patterns of the largest magnitude of each tensor.
        values: For each pack of float tensors its parts: int32 limbs, two or one, or one float32.
        words: Words of other variables that are no sums of floats, see `state_sums`; zeros where
            no microbatch ran.
    """

    small_MS: jax.Array
    peaks_T: jax.Array
    values: list[tuple[jax.Array, ...]]
    words: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The float tensors of a model's sums: trained parameters, then changes of other variables.

    Attributes:
        params: Shapes of the trained parameters.
        aux: Shapes of the other variables.
        merges: For each other variable how it merges, see `Graph.merges`.
    """

    params: tuple[jax.ShapeDtypeStruct, ...]
    aux: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[str, ...]
    merges: tuple[str, ...] = ()

    @property
    def is_summed(self) -> tuple[bool, ...]:
        """For each other variable whether its changes are a float tensor of the sums."""
        pairs = zip(self.merges, self.aux, strict=True)
        return tuple(is_summed(rule, x.dtype) for rule, x in pairs)

    @property
    def is_decided(self) -> tuple[bool, ...]:
        """For each other variable whether it travels as words."""
        pairs = zip(self.merges, self.aux, strict=True)
        return tuple(is_decided(rule, x.dtype) for rule, x in pairs)

    @property
    def floats(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the T float tensors."""
        return [*self.params, *map(as_real, itertools.compress(self.aux, self.is_summed))]

    @property
    def float_names(self) -> tuple[str, ...]:
        """T names, for messages about values that are not finite."""
        num = len(self.params)
        changed = itertools.compress(self.names[num:], self.is_summed)
        return (*self.names[:num], *(f"{name} (no parameter: its change)" for name in changed))

    @property
    def word_merges(self) -> tuple[str, ...]:
        """Merge rules of the variables that travel as words."""
        return tuple(itertools.compress(self.merges, self.is_decided))

    @property
    def words(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the words of variables that travel as words."""
        decided = itertools.compress(self.aux, self.is_decided)
        each = map(words_like, self.word_merges, decided)
        return [jax.ShapeDtypeStruct(at_least_1d(x.shape), x.dtype) for x in each]


def tensors_of(graph: Graph, names: Sequence[str], trained: Sequence[int]) -> Tensors:
    """The tensors of a traced loss.

    Args:
        names: Paths of the trained parameters, then of the other variables.
        trained: Places of the trained parameters.
    """
    params = shapes_of(graph, [graph.param_values[p] for p in trained])
    aux = shapes_of(graph, graph.aux_values)
    return Tensors(tuple(params), tuple(aux), tuple(names), graph.merges)


def packs_of(tensors: Tensors, alone: Collection[int] | None) -> list[list[int]]:
    """Pack small tensors of one size: their sums are the rows of one array.

    Each array of a program takes several kernels, which dominate a small model's compilation. Packs
    decide which operations XLA fuses, and so bits: they must follow from `Plan.numerics`.

    Args:
        alone: Tensors that must keep their shape; None: all.

    Returns:
        Places of the tensors of each pack; a tensor without partners is a pack of one.
    """
    by_size: dict[Any, list[int]] = {}
    for i, x in enumerate(tensors.floats):
        is_small = alone is not None and i not in alone and x.size <= _PACKED_ELEMENTS
        by_size.setdefault(x.size if is_small else ("alone", i), []).append(i)
    return list(by_size.values())


def buckets(
    sizes: Sequence[int], bucket_elements: int, alone: Collection[int] = ()
) -> list[list[int]]:
    """Group consecutive tensors, since each buffer costs a round trip.

    Args:
        bucket_elements: Most elements of a bucket of several tensors.
        alone: Tensors that share no bucket.

    Returns:
        Indices of `sizes`, each once and in order.
    """
    out: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if size > room or not out or i in alone:
            out.append([])
            room = bucket_elements
        out[-1].append(i)
        room = 0 if i in alone else room - size
    return out


def pack_shapes(tensors: Tensors, packs: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Shape of each pack's sums: a row for each tensor, or the shape of the only one."""
    first = [tensors.floats[pack[0]] for pack in packs]
    return [
        (len(pack), x.size) if len(pack) > 1 else at_least_1d(x.shape)
        for pack, x in zip(packs, first, strict=True)
    ]


def pack_specs(specs: Sequence[P], packs: Sequence[Sequence[int]]) -> list[P]:
    """PartitionSpec of each pack's sums, from those of tensors; packs of several are whole."""
    return [specs[pack[0]] if len(pack) == 1 else P() for pack in packs]


def pack_sizes(
    tensors: Tensors,
    packs: Sequence[Sequence[int]],
    specs: Sequence[P],
    axes: Mapping[str, int],
) -> list[int]:
    """Elements of the sums of each pack on a device.

    Args:
        specs: PartitionSpec of each tensor over the axes inside a replica.
    """
    pairs = zip(pack_shapes(tensors, packs), pack_specs(specs, packs), strict=True)
    return [math.prod(piece_shape(shape, spec, axes)) for shape, spec in pairs]


def packed(values: Sequence[jax.Array], packs: Sequence[Sequence[int]]) -> list[jax.Array]:
    """The values of each pack as one array."""
    return [
        values[pack[0]] if len(pack) == 1 else jnp.stack([values[i].reshape(-1) for i in pack])
        for pack in packs
    ]


def at_least_1d(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor's sums: its first dimension stacks shards of replicas."""
    return tuple(shape) or (1,)


@dataclasses.dataclass(frozen=True)
class Contribution:
    """How tensors join the sums.

    Attributes:
        limbs: Limbs of an exact sum.
    """

    form: SumsForm
    limbs: exact.Limbs

    @classmethod
    def of(cls, form: SumsForm, num_terms: int) -> "Contribution":
        """The contribution to sums of `num_terms` terms."""
        limbs = exact.Limbs(form.limbs, num_terms)
        if form.kind == "exact":
            exact.num_bits(num_terms)
        return cls(form, limbs)

    @property
    def is_exact(self) -> bool:
        """Whether sums are of integers."""
        return self.form.kind == "exact"

    @property
    def dtype(self) -> Any:
        """Dtype of the parts of a sum."""
        return jnp.int32 if self.is_exact else jnp.float32

    def zeros(self, shape: Sequence[int]) -> tuple[jax.Array, ...]:
        """The parts of an empty sum."""
        return tuple(jnp.zeros(shape, self.dtype) for _ in range(self.form.num_parts))

    def add(
        self, before: Sequence[jax.Array], x: jax.Array, exponent: jax.Array, keep: Any = None
    ) -> tuple[jax.Array, ...]:
        """A sum with one more term.

        Args:
            x: The term, of the same number of elements.
            keep: 0 to begin the sum anew, 1 to add to it; None: 1.
        """
        x = x.astype(jnp.float32).reshape(before[0].shape)
        if not self.is_exact:
            [old] = before
            return (old + x if keep is None else jnp.where(keep, old, 0) + x,)
        limbs = exact.encode(x, exponent, self.limbs)
        if keep is not None:
            before = [old * keep for old in before]
        return tuple(old + new for old, new in zip(before, limbs, strict=True))

    def add_rows(
        self, before: Sequence[jax.Array], x: Rows, exponent: jax.Array
    ) -> tuple[jax.Array, ...]:
        """An exact sum with one more term, in which only some rows are not zero."""
        limbs = exact.encode(x.values, exponent, self.limbs)
        # Padding has a place beyond the end.
        options: Any = {"mode": "drop", "indices_are_sorted": True, "unique_indices": True}
        pairs = zip(before, limbs, strict=True)
        return tuple(old.at[x.places].add(new, **options) for old, new in pairs)

    def combine(self, *parts: jax.Array) -> jax.Array:
        """The summed parts as float32, in units that `value` undoes."""
        return exact.combine(parts, self.limbs) if self.is_exact else parts[0]

    def value(self, total: jax.Array, exponent: jax.Array) -> jax.Array:
        """A result of `combine` in true units."""
        return exact.rescale(total, exponent) if self.is_exact else total


def largest(x: jax.Array, axis: int | None = None) -> jax.Array:
    """The largest magnitude, float32; NaN if there is one."""
    return jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axis, initial=0.0)


def peak_bits(largest: jax.Array) -> jax.Array:
    """The bit patterns of magnitudes: those of floats sort as the floats do, NaN last."""
    return jax.lax.bitcast_convert_type(jnp.abs(largest), jnp.int32)


_ROW = 1 << 12  # elements of which a GPU finds the largest in one kernel


def largest_in_rows(x: jax.Array) -> jax.Array:
    """int32[rows]: the bits of the largest magnitudes of parts of an array."""
    lengths = [x.size] if 0 < x.size <= _ROW else range(_ROW, _ROW // 8, -1)
    length = next((n for n in lengths if x.size % n == 0), _ROW)
    bits = peak_bits(x.astype(jnp.float32).reshape(-1))
    return jnp.pad(bits, (0, -x.size % length)).reshape(-1, length).max(axis=1)


def largest_bits_of(rows: Sequence[jax.Array]) -> jax.Array:
    """int32[K]: the bits of each array's largest magnitude, from its `largest_in_rows`.

    All are found at once: a kernel for each would cost more than its work.
    """
    is_of = rows_of_each([len(x) for x in rows])
    return jnp.where(is_of, jnp.concatenate(rows), 0).max(axis=1)


def rows_of_each(nums: Sequence[int]) -> jax.Array:
    """bool[K, rows]: which rows are of each array, where arrays with so many rows are joined."""
    lengths = np.array(nums, np.int32)[:, None]
    ends = np.cumsum(lengths, axis=0, dtype=np.int32)
    places = jax.lax.broadcasted_iota(jnp.int32, (len(nums), sum(nums)), 1)
    return (places >= ends - lengths) & (places < ends)


def peaks_to_maxima(peaks_DT: np.ndarray) -> np.ndarray:
    """float32[T] maxima over devices (leading dimension) from their bit patterns."""
    return np.ascontiguousarray(peaks_DT.max(axis=0)).view(np.float32)


def row_bits(row_S: jax.Array) -> jax.Array:
    """The sums of a microbatch as int32 bit patterns: replicas add zeros to them, exactly."""
    return jax.lax.bitcast_convert_type(jnp.asarray(row_S, jnp.float32), jnp.int32)


def changes(
    tensors: Tensors,
    old: Sequence[jax.Array],
    new: Sequence[jax.Array],
    index: jax.Array,
    num: int,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """A microbatch's changes of other variables: differences of floats, words of the rest.

    Args:
        old: The variables before the step.
    """
    every = list(zip(tensors.merges, old, new, strict=True))
    deltas = [change(a, jnp.asarray(b)) for _, a, b in itertools.compress(every, tensors.is_summed)]
    words = [
        own_words(rule, a, jnp.asarray(b), index, num)
        for rule, a, b in itertools.compress(every, tensors.is_decided)
    ]
    return deltas, words


def joined_words(
    tensors: Tensors, before: Sequence[jax.Array], words: Sequence[jax.Array]
) -> list[jax.Array]:
    """Join the words of two sets of microbatches."""
    each = zip(tensors.word_merges, before, words, strict=True)
    return [joined(rule, a, b.reshape(a.shape)) for rule, a, b in each]


def microbatch_key(seed: int, step: jax.Array, index: jax.Array) -> jax.Array:
    """The random key of a microbatch, a function of seed, step and index only."""
    return jax.random.fold_in(jax.random.fold_in(root_key(seed), step), index)


def gradient_of(
    run: Callable[..., list[Any]], trained: Sequence[int], on_cpu: bool
) -> Callable[..., tuple[Any, list[jax.Array]]]:
    """`(params, aux, key, batch leaves) -> ((loss, [sums[S], *new aux]), gradients)`.

    Args:
        run: `(params, aux, key, batch leaves) -> [loss, sums[S], *new aux]`.
        trained: Places of the parameters whose gradients are wanted.
    """

    def gradient(params: Any, aux: Any, key: Any, batch: Any) -> tuple[Any, list[jax.Array]]:
        def loss(arrays: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
            by_place = dict(zip(trained, arrays, strict=True))
            every = [by_place.get(i, x) for i, x in enumerate(params)]
            value, *rest = run(every, list(aux), key, batch)
            return value, rest

        both = jax.value_and_grad(loss, has_aux=True)
        return (uncrossed(both) if on_cpu else both)([params[i] for i in trained])

    return gradient


def row_gradient_of(
    lookups: Lookups, trained: Sequence[int], on_cpu: bool
) -> Callable[..., tuple[Any, list[jax.Array | Rows]]]:
    """`gradient_of` the program of a microbatch, with `Rows` as gradients of its tables.

    Args:
        trained: Places of the parameters whose gradients are wanted, tables included.
    """
    program, num = as_function(lookups.closed), len(lookups.tables)
    dense = [i for i in trained if i not in lookups.tables]

    def gradient(params: Any, aux: Any, key: Any, batch: Any) -> tuple[Any, list[jax.Array | Rows]]:
        def loss(arrays: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
            by_place = dict(zip(dense, arrays, strict=False))
            every = [by_place.get(i, x) for i, x in enumerate(params)]
            value, *rest = program(*every, *aux, key, *batch, *arrays[len(dense) :])
            return value, rest

        both = jax.value_and_grad(loss, has_aux=True)
        wanted = [*(params[i] for i in dense), *lookups.zeros()]
        (value, rest), grads = (uncrossed(both) if on_cpu else both)(wanted)
        rows = lookups.rows(rest[-num:], grads[-num:])
        each = dict(zip((*dense, *lookups.tables), (*grads[:-num], *rows), strict=True))
        return (value, rest[:-num]), [each[i] for i in trained]

    return gradient


def local_largest(
    values: Sequence[Any],
    lay_out: Callable[[jax.Array], jax.Array],
    packs: Sequence[Sequence[int]],
    *,
    in_rows: bool = False,
) -> tuple[list[Any], jax.Array]:
    """Packs in the layout that sums read fast, and the bits of each tensor's largest magnitude.

    Args:
        in_rows: Whether magnitudes are found row by row, in fewer kernels.
    """
    arrays = [x if isinstance(x, Rows) else lay_out(x) for x in packed(values, packs)]
    each = [x.values if isinstance(x, Rows) else x for x in arrays]
    pairs = list(zip(each, packs, strict=True))
    alone = [(x, pack) for x, pack in pairs if len(pack) == 1]
    if in_rows and alone:
        others = [(x, pack) for x, pack in pairs if len(pack) > 1]
        bits = [largest_bits_of([largest_in_rows(x) for x, _ in alone])]
        bits += [peak_bits(largest(x, axis=1)) for x, _ in others]
        order = np.argsort([i for _, pack in (*alone, *others) for i in pack])
        return arrays, jnp.concatenate(bits)[order]
    peaks = [largest(x) if len(pack) == 1 else largest(x, axis=1) for x, pack in pairs]
    order = np.argsort([i for pack in packs for i in pack])
    return arrays, peak_bits(jnp.concatenate([jnp.atleast_1d(x) for x in peaks])[order])


def largest_over(
    mesh: Mesh,
    specs: Sequence[P],
    lay_out: Callable[[jax.Array], jax.Array],
    packs: Sequence[Sequence[int]],
) -> Callable[[Sequence[jax.Array]], tuple[list[jax.Array], jax.Array]]:
    """`local_largest` of tensors sharded inside a replica, with magnitudes of whole tensors.

    Args:
        specs: PartitionSpec of each tensor over the mesh.
    """

    def local(values: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        arrays, peaks_T = local_largest(values, lay_out, packs)
        return arrays, jax.lax.pmax(peaks_T, mesh.axis_names)  # one for all tensors

    ins, out = list(specs), pack_specs(specs, packs)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(ins,), out_specs=(out, P()), check_vma=False)

    def run(values: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        placed = [place_in(mesh, x, s) for x, s in zip(values, ins, strict=True)]
        return mapped(placed)  # type: ignore[no-any-return]

    return run
