"""What one part of a chain computes for one microbatch, and adds to the sums of its parameters.

Legend of shape suffixes: M microbatches of a step, S sums of a microbatch (loss, weight, metrics),
T tensors of one part.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..graph.graph import Graph, params_of, shapes_of
from ..graph.interpreter import AS_THEY_ARE, Env
from ..graph.parts import ChainPart, graph_at, values_by_shape
from ..graph.segments import segments_at
from ..jax.cpu_dots import row_major
from ..model.loss import num_columns
from ..model.plain_arrays import from_bytes, in_bytes
from ..plan.plan import Plan
from ..plan.sharding import Sharded
from ..plan.stage_storage import check_layers_whole
from .contribution import (
    Contribution,
    Tensors,
    changes,
    joined_words,
    largest_over,
    local_largest,
    microbatch_key,
    num_terms,
    pack_specs,
    packs_of,
    row_bits,
)
from .replica import Replica
from .stage import StagePart

Rows = tuple[int, int, int]  # the dimension, the first row, the one after the last


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentedSpec:
    """What the programs of a chain are made from.

    Attributes:
        graph: Of the loss, for one microbatch, in the order in which it is cut.
        parts: Of the chain; each reads what any earlier one made.
        packs: Of tensors whose sums are one array; those of a pack are of one part.
        trained: Places of the parameters that are trained.
        contribution: How they join the sums.
        num_columns: S, sums of a microbatch.
        seed: Root of all random keys.
        specs: How each float tensor lies on the axes inside a copy.
        sharded: How these cut the graph.
    """

    graph: Graph
    parts: tuple[ChainPart, ...]
    tensors: Tensors
    packs: Sequence[Sequence[int]]
    trained: tuple[int, ...]
    contribution: Contribution
    num_microbatches: int
    num_columns: int
    seed: int
    specs: tuple[P, ...]
    sharded: Sharded

    def lie(self, values: Sequence[int]) -> list[P]:
        """How values of the graph lie on the axes inside a copy."""
        return list(map(self.sharded.spec_of, values))

    def lie_waiting(self, values: Sequence[int]) -> list[P]:
        """How values lie that wait for a later program."""
        return list(map(self.sharded.waiting_spec, values))

    def lie_inside(self, part: ChainPart, shapes: Sequence[Sequence[int]]) -> list[P | None]:
        """How arrays in the midst of a part lie, as far as their shapes tell; None: they do not.

        XLA may leave whole what nobody places. What has the shape of values that are all cut in one
        way is cut so, too.
        """
        values = values_by_shape(self.graph, part)
        known = [set(self.lie(values.get(tuple(shape), ()))) for shape in shapes]
        return [next(iter(specs)) if len(specs) == 1 else None for specs in known]

    def lie_sums(self, packs: Sequence[int] | None = None) -> list[tuple[P, ...]]:
        """How the parts of the sums of packs do; None: of all."""
        each, num = pack_specs(self.specs, self.packs), self.contribution.form.num_parts
        return [(each[k],) * num for k in (range(len(each)) if packs is None else packs)]


def segmented_spec(
    graph: Graph,
    plan: Plan,
    tensors: Tensors,
    trained: tuple[int, ...],
    alone: Collection[int],
    seed: int,
    specs: Sequence[P],
    sharded: Sharded | None,
) -> SegmentedSpec:
    """What the chain of a plan is made from.

    Args:
        trained: Places of the parameters that are trained.
        alone: Tensors that are packed with none.
        seed: Root of all random keys.
        specs: How each float tensor lies on the axes inside a copy.
        sharded: What these cut; None: there are none.
    """
    assert plan.chain is not None
    ordered, points = graph_at(graph, "work", plan.chain.points)
    check_layers_whole(ordered, plan.parameters)
    parts = direct_parts(ordered, points)
    owners = parts_of_tensors(ordered, parts, tensors, trained)
    num = plan.num_microbatches
    return SegmentedSpec(
        graph=ordered,
        parts=parts,
        tensors=tensors,
        packs=chain_packs(tensors, owners, {*alone, *shared_tensors(ordered, parts, trained)}),
        trained=trained,
        contribution=Contribution.of(plan.sums, num_terms(ordered, parts, num)),
        num_microbatches=num,
        num_columns=num_columns(ordered.metrics),
        seed=seed,
        specs=tuple(specs),
        sharded=(sharded or Sharded(graph, {})).over(ordered),
    )


def direct_parts(graph: Graph, points: Sequence[int]) -> tuple[ChainPart, ...]:
    """The parts of a chain that one copy runs by itself: each reads what any earlier one made.

    Args:
        points: Cuts, see `_segments.cut_points`.
    """
    chain = segments_at(graph, points)
    return tuple(
        ChainPart(
            segment=segment,
            inputs=segment.inputs,
            outputs=() if i == len(chain) - 1 else segment.outputs,
            is_last=i == len(chain) - 1,
        )
        for i, segment in enumerate(chain)
    )


def parts_of_tensors(
    graph: Graph, parts: Sequence[ChainPart], tensors: Tensors, trained: Sequence[int]
) -> list[tuple[int, ...]]:
    """For each float tensor the parts that add to its sums; other variables are the last one's."""
    param_of, last = params_of(graph), len(parts) - 1
    found: dict[int, dict[int, None]] = collections.defaultdict(dict)
    for i, part in enumerate(parts):
        for entry in part.segment.params:
            found[param_of[entry]][i] = None
    return [*(tuple(found[p]) or (last,) for p in trained), *[(last,)] * sum(tensors.is_summed)]


def chain_packs(
    tensors: Tensors, parts_of: Sequence[tuple[int, ...]], alone: Collection[int]
) -> list[list[int]]:
    """`packs_of` whose tensors are of one part.

    Args:
        parts_of: For each the parts that add to its sums.
        alone: Those that are packed with none, such as `shared_tensors`.
    """
    out = []
    for part in sorted(set(parts_of)):
        others = {t for t, own in enumerate(parts_of) if own != part}
        packs = packs_of(tensors, {*alone, *others})
        out += [pack for pack in packs if parts_of[pack[0]] == part]
    return out


def first_packs(spec: SegmentedSpec) -> list[tuple[int, ...]]:
    """For each part the packs whose sums begin with its backward, the first that adds to them."""
    return _packs_at(spec, max)


def last_packs(spec: SegmentedSpec) -> list[tuple[int, ...]]:
    """For each part the packs whose sums are whole after its backward."""
    return _packs_at(spec, min)


def _packs_at(
    spec: SegmentedSpec, which: Callable[[tuple[int, ...]], int]
) -> list[tuple[int, ...]]:
    owners = parts_of_tensors(spec.graph, spec.parts, spec.tensors, spec.trained)
    at = [which(owners[pack[0]]) for pack in spec.packs]
    return [tuple(k for k, own in enumerate(at) if own == i) for i in range(len(spec.parts))]


def shared_tensors(
    graph: Graph, parts: Sequence[ChainPart], trained: Sequence[int]
) -> frozenset[int]:
    """Tensors to whose sums several entries add, or such that are some of their rows."""
    param_of = params_of(graph)
    num: collections.Counter[int] = collections.Counter()
    for entry in (entry for part in parts for entry in part.segment.params):
        has_rows = graph.values[graph.param_values[entry]].rows is not None
        num[param_of[entry]] += 1 + has_rows
    return frozenset(t for t, p in enumerate(trained) if num[p] > 1)


def wanted_values(graph: Graph, trained: Collection[int]) -> set[int]:
    """Values that are made of trained parameters, and of which the loss is made."""
    param_of = params_of(graph)
    varies = {v for v, p in zip(graph.param_values, param_of, strict=True) if p in trained}
    for op in graph.ops:
        if not varies.isdisjoint(v for v in op.inputs if isinstance(v, int)):
            varies.update(op.outputs)
    found = {v for v in graph.result_values[:1] if isinstance(v, int)}
    for op in reversed(graph.ops):
        if not found.isdisjoint(op.outputs):
            found.update(v for v in op.inputs if isinstance(v, int))
    return found & varies


class SegmentPart:
    """One part of a chain, as functions that are traced into its programs.

    Args:
        shared: See `shared_tensors`.
        wanted: See `wanted_values`.
        on_cpu: Whether arrays are laid out as a CPU likes them.
        replica: The copy whose devices run it, if there are several.

    Attributes:
        params: The parameters that it reads, whole ones or such of which it reads rows.
        starts: Of those of which it reads rows the first, int32.
        batch: The places of what it reads of the batch.
        aux: The places of the other variables that it reads.
        packs: The sums that it adds to, by their places in `SegmentedSpec.packs`.
        tensors: The tensors of those sums, in order.
        pending: The inputs to whose gradients a later part has added.
    """

    def __init__(
        self,
        spec: SegmentedSpec,
        index: int,
        *,
        shared: Collection[int],
        wanted: Collection[int],
        on_cpu: bool,
        replica: Replica | None = None,
    ):
        graph, part = spec.graph, spec.parts[index]
        param_of = params_of(graph)
        entries = [i for i, p in enumerate(param_of) if p in spec.trained]
        self._spec, self._on_cpu, self._replica = spec, on_cpu, replica
        lie = AS_THEY_ARE if replica is None else spec.sharded.placement(replica.mesh)
        self.stage = StagePart(graph, part, lie, trained=entries, on_cpu=on_cpu, wanted=wanted)
        self.is_last = part.is_last
        self.params = tuple(param_of[entry] for entry in self.stage.params)
        self._rows = [graph.values[graph.param_values[entry]].rows for entry in self.stage.params]
        self.starts = np.array([rows[1] for rows in self._rows if rows is not None], np.int32)
        read = set(part.segment.given)
        self.batch = tuple(i for i, v in enumerate(graph.batch_values) if v in read)
        self.aux = tuple(i for i, v in enumerate(graph.aux_values) if v in read or self.is_last)
        place = {p: t for t, p in enumerate(spec.trained)}
        #: For each gradient its tensor, and its rows.
        self._grads = [(place[self.params[i]], self._rows[i]) for i in self.stage.trained]
        own = {t for t, _ in self._grads}
        if self.is_last:
            # What no part reads has a gradient of zero.
            everywhere = {
                place[p]
                for q in spec.parts
                for e in q.segment.params
                if (p := param_of[e]) in place
            }
            self._unread = sorted(set(place.values()) - everywhere)
            own |= {*self._unread, *range(len(place), len(spec.tensors.floats))}
        self.packs = tuple(k for k, pack in enumerate(spec.packs) if not own.isdisjoint(pack))
        self.tensors = tuple(t for k in self.packs for t in spec.packs[k])
        self._shared = frozenset(shared)
        later = {v for q in spec.parts[index + 1 :] for v in q.inputs}
        self.floats = self.stage.above_floats
        self.pending = tuple(v for v in self.floats if v in later)

    # -- the programs ----------------------------------------------------------------------------

    def forward(
        self, params: Any, starts: jax.Array, inputs: Any, aux: Any, batch: Any, where: jax.Array
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """What later parts read, and those residuals that are neither this nor an input."""
        given = self._given(aux, batch, where)
        own = self._own(params, starts)
        made, saved = self.stage.forward_and_residuals(own, self._inputs(inputs), given)
        return in_bytes(made), in_bytes([saved[i] for i in self.stage.own_residuals])

    def backward(
        self,
        params: Any,
        starts: jax.Array,
        saved: Any,
        aux: Any,
        batch: Any,
        where: jax.Array,
        grads: Any,
        pending: Any,
        sums: Any,
        peaks_T: jax.Array,
        exponents_T: jax.Array,
    ) -> tuple[Any, ...]:
        """Gradients of the inputs; the sums and the peaks of the part's tensors."""
        given, own = self._given(aux, batch, where), self._own(params, starts)
        saved = from_bytes(saved, self.stage.residuals)
        d_params, d_inputs = self.stage.backward_from_residuals(own, saved, given, grads)
        added = self._added(d_params, starts, (), sums, peaks_T, exponents_T, where[2])
        return self._with_pending(d_inputs, pending), *added

    def loss(
        self,
        params: Any,
        starts: jax.Array,
        inputs: Any,
        aux: Any,
        batch: Any,
        where: jax.Array,
        small_MS: jax.Array,
        words: Any,
        sums: Any,
        peaks_T: jax.Array,
        exponents_T: jax.Array,
    ) -> tuple[Any, ...]:
        """Forward and backward of the last part; what the microbatch is worth, and sums."""
        given, own = self._given(aux, batch, where), self._own(params, starts)
        found = self.stage.backward(own, self._inputs(inputs), given, [])
        d_params, d_inputs, (_, row_S, *new_aux) = found
        index, keep = where[1], where[2]
        tensors, num = self._spec.tensors, self._spec.num_microbatches
        deltas, new_words = changes(tensors, aux, new_aux, index, num)
        added = self._added(d_params, starts, deltas, sums, peaks_T, exponents_T, keep)
        small_MS = (small_MS * keep).at[index].set(row_bits(row_S))
        words = joined_words(tensors, [x * keep for x in words], new_words)
        return d_inputs, *added, small_MS, words

    # -- what they are made of -------------------------------------------------------------------

    def _inputs(self, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        return from_bytes(inputs, shapes_of(self._spec.graph, self.stage.part.inputs))

    def _own(self, params: Sequence[jax.Array], starts: jax.Array) -> list[jax.Array]:
        """The parameters, of stacked ones the rows that are read."""
        out, k = [], 0
        for x, rows in zip(params, self._rows, strict=True):
            if rows is not None:
                dim, start, stop = rows
                x = jax.lax.dynamic_slice_in_dim(x, starts[k], stop - start, dim)
                k += 1
            out.append(x)
        return out

    def _given(self, aux: Any, batch: Any, where: jax.Array) -> Env:
        graph = self._spec.graph
        given: Env = {graph.aux_values[i]: x for i, x in zip(self.aux, aux, strict=True)}
        given |= {graph.batch_values[i]: x for i, x in zip(self.batch, batch, strict=True)}
        given[graph.key_value] = microbatch_key(self._spec.seed, where[0], where[1])
        return given

    def _with_pending(self, grads: Sequence[jax.Array], pending: Sequence[jax.Array]) -> Any:
        before = dict(zip(self.pending, pending, strict=True))
        pairs = zip(self.floats, grads, strict=True)
        return [before[v] + g if v in before else g for v, g in pairs]

    def _added(
        self,
        d_params: Sequence[jax.Array],
        starts: jax.Array,
        deltas: Sequence[jax.Array],
        sums: Sequence[Any],
        peaks_T: jax.Array,
        exponents_T: jax.Array,
        keep: jax.Array,
    ) -> tuple[Any, jax.Array]:
        """The sums with this microbatch's gradients, and the largest magnitudes."""
        spec = self._spec
        values: dict[int, list[tuple[jax.Array, Any]]] = collections.defaultdict(list)
        order = iter(range(len(self.starts)))
        start_of = [None if rows is None else next(order) for rows in self._rows]
        for (t, rows), i, grad in zip(self._grads, self.stage.trained, d_params, strict=True):
            at = None if rows is None else (rows[0], starts[start_of[i]])
            values[t].append((grad.astype(jnp.float32), at))
        for i, delta in enumerate(deltas):
            values[len(spec.trained) + i].append((delta, None))
        if self.is_last:
            for t in self._unread:
                values[t].append((jnp.zeros(spec.tensors.floats[t].shape), None))
        if not self.packs:
            return sums, peaks_T
        exponent = {t: exponents_T[i] for i, t in enumerate(self.tensors)}
        out, peaks = [], dict[int, jax.Array]()
        readied = iter(self._readied(values))
        for k, old in zip(self.packs, sums, strict=True):
            pack = spec.packs[k]
            if self._shared.isdisjoint(pack):
                found, own = next(readied)
                scale = exponent[pack[0]]
                if len(pack) > 1:
                    scale = jnp.stack([exponent[t] for t in pack])[:, None]
                out.append(spec.contribution.add(old, found, scale, keep))
                peaks |= dict(zip(pack, own, strict=True))
                continue
            [t] = pack
            for _, at in values[t]:
                found, [own] = next(readied)
                old = self._added_to(old, found, at, exponent[t])
                peaks[t] = jnp.maximum(peaks.get(t, 0), own)
            out.append(old)
        return out, jnp.maximum(peaks_T * keep, jnp.stack([peaks[t] for t in self.tensors]))

    def _readied(
        self, values: dict[int, list[tuple[jax.Array, Any]]]
    ) -> list[tuple[jax.Array, jax.Array]]:
        """What joins the sums, pack by pack, and the bits of the largest magnitudes in it."""
        packs = [self._spec.packs[k] for k in self.packs]
        terms = []
        for pack in packs:
            if self._shared.isdisjoint(pack):
                terms.append([values[t][0][0] for t in pack])
            else:
                terms += [[x] for x, _ in values[pack[0]]]
        lay_out = row_major if self._on_cpu else lambda x: x

        if self._replica is None:
            found = [local_largest(own, lay_out, [list(range(len(own)))]) for own in terms]
            return [(x, bits) for [x], bits in found]
        # There a pack has one tensor.
        specs = [self._spec.specs[pack[0]] for pack in packs for _ in values[pack[0]]]
        each, alone = [x for [x] in terms], [[i] for i in range(len(terms))]
        arrays, bits = largest_over(self._replica.mesh, specs, lay_out, alone)(each)
        return [(x, bits[i : i + 1]) for i, x in enumerate(arrays)]

    def _added_to(self, old: Any, x: jax.Array, at: Any, exponent: jax.Array) -> Any:
        """A sum that began at zero, with a term for all of it or for some rows."""
        add = self._spec.contribution.add
        if at is None:
            return add(old, x, exponent)
        dim, start = at
        rows = [jax.lax.dynamic_slice_in_dim(p, start, x.shape[dim], dim) for p in old]
        new = add(rows, x, exponent)
        pairs = zip(old, new, strict=True)
        return tuple(jax.lax.dynamic_update_slice_in_dim(p, n, start, dim) for p, n in pairs)

    @property
    def key(self) -> Any:
        """What two parts share only if their programs are the same."""
        spec = self._spec
        order = {t: i for i, t in enumerate(self.tensors)}
        packs = [
            (len(spec.packs[k]), not self._shared.isdisjoint(spec.packs[k])) for k in self.packs
        ]
        grads = [(order[t], rows and (rows[0], rows[2] - rows[1])) for t, rows in self._grads]
        shapes = [spec.tensors.floats[t].shape for t in self.tensors]
        whole = [spec.graph.param_shapes[p] for p in self.params]
        pending = [self.floats.index(v) for v in self.pending]
        part, graph = self.stage.part, spec.graph
        read = [graph.param_values[p] for p in self.stage.params], part.inputs, part.outputs
        waiting = [spec.lie_waiting(values) for values in read[1:]]
        lie = [spec.specs[t] for t in self.tensors], [*map(spec.lie, read), *waiting]
        return self.stage.signature(), str((packs, grads, shapes, whole, pending, lie))
