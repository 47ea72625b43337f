"""One part of a chain: forward, backward, and the gradients that join the sums.

Legend of shape suffixes: M microbatches of a step, S sums of a microbatch (loss, weight, metrics),
T tensors of one part, or of a `Joining`: the terms of gradients that join the sums of a replica.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..graph.graph import params_of, shapes_of
from ..graph.interpreter import AS_THEY_ARE, Env
from ..jax.cpu_dots import row_major
from ..jax.lookups import Rows
from ..jax.ordered_adds import ordered
from ..model.plain_arrays import from_bytes, in_bytes
from .call_loop import CallPrograms
from .chain_spec import ChainSpec
from .contribution import (
    DeviceSums,
    changes,
    joined_words,
    largest_over,
    local_largest,
    microbatch_key,
    row_bits,
)
from .microbatch import clipped, factor_of, joining_uneven, whole_gradient
from .replica import Replica
from .stage import StagePart
from .uneven import Uneven
from .uneven_part import run_uneven_part

_LEAST_KERNEL_DIMS = 4  # of convolutions over two dimensions or more


class Term(NamedTuple):
    """One term of the sum of a tensor.

    Attributes:
        at: Dimension and first row, if it is some rows of a stacked parameter; None: all of it.
    """

    tensor: int
    value: Any
    at: tuple[int, jax.Array] | None = None

    def added_to(self, whole: jax.Array) -> jax.Array:
        """An array of the tensor's shape with the term added."""
        if self.at is None:
            return whole + self.value  # type: ignore[no-any-return]
        dim, start = self.at
        rows = jax.lax.dynamic_slice_in_dim(whole, start, self.value.shape[dim], dim)
        return jax.lax.dynamic_update_slice_in_dim(whole, rows + self.value, start, dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joining:
    """How terms join the sums of some tensors.

    Attributes:
        tensors: The tensors, sorted.
        packs: Places in `ChainSpec.packs` of their sums.
        shared: Tensors with several terms, whose sums begin at zero.
        mesh: The mesh of the replica; None: it has one device.
        uneven: The graph on its devices, if their shards are of unlike sizes.
        on_cpu: Whether to lay out arrays for CPUs.
    """

    spec: ChainSpec
    tensors: tuple[int, ...]
    packs: tuple[int, ...]
    shared: frozenset[int]
    mesh: Mesh | None
    uneven: Uneven | None
    on_cpu: bool

    def is_shared(self, pack: Sequence[int]) -> bool:
        """Whether several terms join the sums of a pack."""
        return not self.shared.isdisjoint(pack)

    def join(
        self,
        terms: Sequence[Term],
        before: Sequence[Any],
        exponents_T: jax.Array,
        keep: jax.Array,
    ) -> tuple[list[Any], jax.Array]:
        """The sums with a microbatch's terms, and the bits of their largest magnitudes."""
        spec = self.spec
        if not self.packs:
            return list(before), jnp.zeros(0, jnp.int32)
        if self.mesh is not None and self.uneven is not None:
            packs = [spec.packs[k] for k in self.packs]
            of_terms = [term.tensor for term in terms]
            join = joining_uneven(spec, self.mesh, self.uneven, self._lay_out, packs, of_terms)
            return join([term.value for term in terms], before, exponents_T, keep)
        places: dict[int, list[int]] = collections.defaultdict(list)
        for i, term in enumerate(terms):
            places[term.tensor].append(i)
        packs = [spec.packs[k] for k in self.packs]
        together = []  # groups of terms that join as one array
        for pack in packs:
            joined = [i for t in pack for i in places[t]]
            together += [[i] for i in joined] if self.is_shared(pack) else [joined]
        arrays, bits = self._largest(terms, together)
        row_of = {t: i for i, t in enumerate(self.tensors)}
        out, joining = [], iter(arrays)
        for pack, old in zip(packs, before, strict=True):
            rows = np.array([row_of[t] for t in pack])
            if self.is_shared(pack):
                if spec.is_whole:  # no program of a chain begins its sums
                    old = tuple(x * keep for x in old)
                for i in places[pack[0]]:
                    old = self._add_to_shared(old, next(joining), terms[i].at, exponents_T[rows[0]])
            else:
                old = self._add_to_pack(old, next(joining), exponents_T, rows, keep)
            out.append(old)
        if len(terms) > len(self.tensors):
            of_tensors = [[bits[i] for i in places[t]] for t in self.tensors]
            bits = jnp.stack([functools.reduce(jnp.maximum, each) for each in of_tensors])
        return out, bits

    def _largest(
        self, terms: Sequence[Term], together: Sequence[Sequence[int]]
    ) -> tuple[list[Any], jax.Array]:
        """Terms in the layout that sums read fast, and the bits of each one's largest magnitude."""
        values = [term.value for term in terms]
        if self.mesh is None:
            return local_largest(values, self._lay_out, together, in_rows=not self.on_cpu)
        specs = [self.spec.specs[term.tensor] for term in terms]
        return largest_over(self.mesh, specs, self._lay_out, together)(values)

    def _lay_out(self, x: jax.Array) -> jax.Array:
        # A GPU's convolution gives its kernel's gradient in another layout. Sums that are joined as
        # it is laid out again are not updated in place.
        is_kernel = x.ndim >= _LEAST_KERNEL_DIMS
        return row_major(x) if self.on_cpu or is_kernel else x

    def _add_to_pack(
        self, old: Any, x: Any, exponents_T: jax.Array, rows: np.ndarray, keep: jax.Array
    ) -> Any:
        """The sum of a pack with one more term; with `keep` 0 that term alone."""
        if not isinstance(x, Rows):
            exponent = exponents_T[rows[0]] if len(rows) == 1 else exponents_T[rows, None]
            return self.spec.contribution.add(old, x, exponent, keep)
        if self.on_cpu:
            old = jax.lax.cond(
                keep == 0, lambda xs: [jnp.zeros_like(x) for x in xs], lambda xs: xs, list(old)
            )
        else:  # elsewhere a branch may wait for the host
            old = [x * keep for x in old]
        return self.spec.contribution.add_rows(old, x, exponents_T[rows[0]])

    def _add_to_shared(self, old: Any, x: jax.Array, at: Any, exponent: jax.Array) -> Any:
        """A shared sum, which begins at zero, with one more term for all of it or for some rows."""
        add = self.spec.contribution.add
        if at is None:
            return add(old, x, exponent)
        dim, start = at
        rows = [jax.lax.dynamic_slice_in_dim(p, start, x.shape[dim], dim) for p in old]
        new = add(rows, x, exponent)
        pairs = zip(old, new, strict=True)
        return tuple(jax.lax.dynamic_update_slice_in_dim(p, n, start, dim) for p, n in pairs)


class SegmentPart:
    """One part of a chain, as functions that are traced into its programs.

    Args:
        shared: See `shared_tensors`.
        wanted: See `wanted_values`.
        replica: The replica that runs it, if it has several devices.

    Attributes:
        params: Places of the parameters that it reads, whole or some rows.
        starts: The first row of each parameter read by rows, int32.
        batch: Places of the batch's arrays that it reads.
        aux: Places of the other variables that it reads.
        packs: Places in `ChainSpec.packs` of the sums to which it adds.
        tensors: The tensors of these sums, sorted.
        pending: Inputs whose gradients have terms of later parts.
    """

    def __init__(
        self,
        spec: ChainSpec,
        index: int,
        *,
        shared: Collection[int],
        wanted: Collection[int],
        on_cpu: bool,
        in_order: bool,
        replica: Replica | None = None,
    ):
        graph, part = spec.graph, spec.parts[index]
        param_of = params_of(graph)
        entries = spec.trained_entries
        self._spec, self._on_cpu, self._in_order = spec, on_cpu, in_order
        self._mesh = None if replica is None else replica.mesh
        self._uneven = None if replica is None or spec.uneven is None else spec.uneven.on(replica)
        place = AS_THEY_ARE if replica is None else spec.sharded.placement(replica.mesh)
        uneven, run, padded = self._uneven, None, None
        if uneven is not None and replica is not None and not spec.is_whole:
            run = run_uneven_part(uneven, replica.mesh, part, on_cpu=on_cpu)
            values = [graph.param_values[entry] for entry in part.segment.params]
            pairs = zip(values, shapes_of(graph, values), strict=True)
            padded = [uneven.padding_of(v).like(x) for v, x in pairs]
        self.stage = StagePart(
            graph,
            part,
            place,
            trained=entries,
            on_cpu=on_cpu,
            in_order=in_order,
            wanted=wanted,
            passing={v for q in spec.parts[index + 1 :] for v in q.inputs},
            run=run,
            padded=padded,
        )
        self.is_last = part.is_last
        tensor_of = {p: t for t, p in enumerate(spec.trained)}
        # The program of a whole microbatch is the traced one, whose arguments are complete.
        entries_of_part = range(len(param_of)) if spec.is_whole else self.stage.params
        trained = entries if spec.is_whole else self.stage.trained
        self.params = tuple(param_of[entry] for entry in entries_of_part)
        self._rows = [graph.values[graph.param_values[entry]].rows for entry in entries_of_part]
        reads = set(part.segment.given)
        self.batch = tuple(
            i for i, v in enumerate(graph.batch_values) if v in reads or spec.is_whole
        )
        self.aux = tuple(i for i, v in enumerate(graph.aux_values) if v in reads or self.is_last)
        self.starts = np.array([rows[1] for rows in self._rows if rows is not None], np.int32)
        #: For each gradient the place of its parameter, its tensor and its rows.
        self._grads = [(i, tensor_of[self.params[i]], self._rows[i]) for i in trained]
        tensors = set(self.grad_tensors)
        #: Tensors that no part reads: their gradient is zero.
        self._unread: list[int] = []
        if self.is_last:
            entries_read = (entry for q in spec.parts for entry in q.segment.params)
            tensors_read = {tensor_of.get(param_of[entry]) for entry in entries_read}
            self._unread = sorted(set(tensor_of.values()) - tensors_read - tensors)
            tensors |= {*self._unread, *range(len(tensor_of), len(spec.tensors.floats))}
        self.tensors = tuple(sorted(tensors))
        self.packs = tuple(k for k, pack in enumerate(spec.packs) if not tensors.isdisjoint(pack))
        self.joining = Joining(
            spec=spec,
            tensors=self.tensors,
            packs=self.packs,
            shared=frozenset(shared),
            mesh=self._mesh,
            uneven=self._uneven,
            on_cpu=on_cpu,
        )
        self.floats = self.stage.above_floats
        self.pending = self.stage.passing

    @property
    def grad_tensors(self) -> list[int]:
        """The tensor of each gradient of a backward."""
        return [t for _, t, _ in self._grads]

    @property
    def grad_shapes(self) -> list[tuple[int, ...]]:
        """The shape of each gradient of a backward."""
        values, graph = self.stage.trained, self._spec.graph
        places = [graph.param_values[self.stage.params[i]] for i in values]
        return [graph.values[v].shape for v in places]

    # -- the programs ----------------------------------------------------------------------------

    def forward(
        self, params: Any, starts: jax.Array, inputs: Any, aux: Any, where: jax.Array, batch: Any
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The values for later parts, and the inner residuals."""
        env = self._env(aux, self._key(where), batch)
        arrays = self._params_or_rows(params, starts)
        run = self._written(self.stage.forward_and_residuals, where)
        made, saved = run(arrays, self._inputs(inputs), env)
        return in_bytes(made), in_bytes([saved[i] for i in self.stage.inner_residuals])

    def backward(
        self,
        params: Any,
        starts: jax.Array,
        saved: Any,
        aux: Any,
        limbs: Any,
        peaks_T: jax.Array,
        exponents_T: jax.Array,
        where: jax.Array,
        batch: Any,
        grads: Any,
        pending: Any,
    ) -> tuple[Any, ...]:
        """The sums and peaks of the part's tensors, and gradients of its inputs."""
        read = params, starts, saved, aux, where, batch, grads, pending
        d_params, d_inputs = self.gradients(*read)
        terms = self.terms(d_params, starts)
        limbs, bits_T = self.joining.join(terms, limbs, exponents_T, where[2])
        peaks_T = jnp.maximum(peaks_T * where[2], bits_T)
        return limbs, peaks_T, d_inputs

    def gradients(
        self,
        params: Any,
        starts: jax.Array,
        saved: Any,
        aux: Any,
        where: jax.Array,
        batch: Any,
        grads: Any,
        pending: Any,
    ) -> tuple[list[Any], list[Any]]:
        """The gradients of the part's trained parameters, and of its inputs."""
        env, arrays = self._env(aux, self._key(where), batch), self._params_or_rows(params, starts)
        saved = from_bytes(saved, self.stage.residuals)
        run = self._written(self.stage.backward_from_residuals, where)
        d_params, d_inputs = run(arrays, saved, env, [*grads, *pending])
        return list(map(_as_float32, d_params)), d_inputs

    def loss(
        self,
        params: Any,
        starts: jax.Array,
        inputs: Any,
        aux: Any,
        sums: DeviceSums,
        exponents_T: jax.Array,
        where: jax.Array,
        batch: Any,
    ) -> tuple[DeviceSums, jax.Array, list[jax.Array]]:
        """Forward and backward of the last part: sums, an array to wait on, input gradients.

        The limbs and peaks of `sums` are those of the part only.
        """
        read = params, starts, inputs, aux, sums, where, batch
        sums, factor, d_inputs, d_params, deltas = self.last_gradients(*read)
        if self._spec.is_whole:
            d_params = clipped(self._spec, d_params, factor)
        terms = self.terms(d_params, starts, deltas)
        limbs, bits_T = self.joining.join(terms, sums.values, exponents_T, where[2])
        peaks_T = jnp.maximum(sums.peaks_T * where[2], bits_T)
        return sums._replace(values=limbs, peaks_T=peaks_T), factor, d_inputs

    def last_gradients(
        self,
        params: Any,
        starts: jax.Array,
        inputs: Any,
        aux: Any,
        sums: DeviceSums,
        where: jax.Array,
        batch: Any,
    ) -> tuple[DeviceSums, jax.Array, list[jax.Array], list[Any], list[jax.Array]]:
        """Forward and backward of the last part, whose gradients join no sum yet.

        Returns:
            The sums with this microbatch in their small arrays; see `factor_of`; gradients of the
            inputs and of the trained parameters; changes of the other variables.
        """
        step, index, keep = where[0], where[1], where[2]
        key = microbatch_key(self._spec.seed, step, index)
        results = self._gradient(params, starts, inputs, aux, key, batch, where)
        (row_S, *new_aux), d_params, d_inputs = results
        tensors, num = self._spec.tensors, self._spec.num_microbatches
        deltas, words = changes(tensors, aux, new_aux, index, num)
        sums = sums._replace(
            small_MS=(sums.small_MS * keep).at[index].set(row_bits(row_S)),
            words=joined_words(tensors, [x * keep for x in sums.words], words),
        )
        factor = factor_of(self._spec, row_S[1], aux)
        return sums, factor, d_inputs, list(map(_as_float32, d_params)), list(deltas)

    @property
    def programs(self) -> CallPrograms:
        """The functions above, for one microbatch or for several of a call."""
        spec, each = self._spec, (self.forward, self.backward, self.gradients, self.loss)
        one = CallPrograms(*each, self.last_gradients)
        if spec.per_call == 1 and not spec.is_whole:
            return one
        return one.of_several(spec.per_call, spec.packing)

    # -- steps of the programs -------------------------------------------------------------------

    def _gradient(
        self,
        params: Any,
        starts: Any,
        inputs: Any,
        aux: Any,
        key: jax.Array,
        batch: Any,
        where: jax.Array,
    ) -> tuple[list[Any], list[Any], list[jax.Array]]:
        """`[sums[S], *new aux]`, gradients of the trained parameters, gradients of the inputs."""
        if self._spec.is_whole:
            gradient = whole_gradient(
                self._spec, self._mesh, self._uneven, self._on_cpu, self._in_order
            )
            gradient = ordered(gradient) if self._in_order else gradient
            (_, results), grads = self._written(gradient, where)(params, aux, key, batch)
            return results, grads, []
        env, arrays = self._env(aux, key, batch), self._params_or_rows(params, starts)
        backward = self._written(self.stage.backward, where)
        d_params, d_inputs, (_, *results) = backward(arrays, self._inputs(inputs), env, [])
        return results, d_params, d_inputs

    def _written(self, function: Callable[..., Any], where: jax.Array) -> Callable[..., Any]:
        return self._spec.sharded.invariant(function, self._mesh, where[0])

    def _inputs(self, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        return from_bytes(inputs, shapes_of(self._spec.graph, self.stage.part.inputs))

    def _params_or_rows(self, params: Sequence[jax.Array], starts: jax.Array) -> list[jax.Array]:
        """The parameters that the part reads; of stacked ones its rows."""
        out, k = [], 0
        for x, rows in zip(params, self._rows, strict=True):
            if rows is not None:
                dim, start, stop = rows
                x = jax.lax.dynamic_slice_in_dim(x, starts[k], stop - start, dim)
                k += 1
            out.append(x)
        return out

    def _key(self, where: jax.Array) -> jax.Array:
        return microbatch_key(self._spec.seed, where[0], where[1])

    def _env(self, aux: Any, key: jax.Array, batch: Any) -> Env:
        graph = self._spec.graph
        env: Env = {graph.aux_values[i]: x for i, x in zip(self.aux, aux, strict=True)}
        env |= {graph.batch_values[i]: x for i, x in zip(self.batch, batch, strict=True)}
        env[graph.key_value] = key
        return env

    def terms(
        self, d_params: Sequence[Any], starts: Any, deltas: Sequence[jax.Array] = ()
    ) -> list[Term]:
        """The terms of a microbatch, in the order of tensors."""
        order = iter(range(len(self.starts)))
        start_of = [None if rows is None else next(order) for rows in self._rows]
        terms = []
        for (i, t, rows), grad in zip(self._grads, d_params, strict=True):
            at = None if rows is None else (rows[0], starts[start_of[i]])
            terms.append(Term(t, grad, at))
        terms += [
            Term(t, jnp.zeros(self._spec.tensors.floats[t].shape, jnp.float32))
            for t in self._unread
        ]
        num = len(self._spec.trained)
        terms += [Term(num + i, delta) for i, delta in enumerate(deltas)]
        return sorted(terms, key=lambda term: term.tensor)

    @property
    def key(self) -> Any:
        """Equal for two parts only if their programs are the same."""
        spec = self._spec
        order = {t: i for i, t in enumerate(self.tensors)}
        packs = [
            ([order[t] for t in spec.packs[k]], self.joining.is_shared(spec.packs[k]))
            for k in self.packs
        ]
        grads = [(order[t], rows and (rows[0], rows[2] - rows[1])) for _, t, rows in self._grads]
        shapes = [spec.tensors.floats[t].shape for t in self.tensors]
        whole = [spec.graph.param_shapes[p] for p in self.params]
        pending = [self.floats.index(v) for v in self.pending]
        part, graph = self.stage.part, spec.graph
        read = [graph.param_values[p] for p in self.stage.params], part.inputs, part.outputs
        waiting = [spec.waiting_specs(values) for values in read[1:]]
        specs = [spec.specs[t] for t in self.tensors], [*map(spec.specs_of, read), *waiting]
        return self.stage.signature(), str((packs, grads, shapes, whole, pending, specs))


def join_clipped(spec: ChainSpec, parts: Sequence[SegmentPart]) -> Callable[..., Any]:
    """A function that clips a microbatch's gradients, of all parts, and adds them to the sums.

    It is `(limbs, peaks, exponents, where, factor, gradients by part, changes) -> (limbs, peaks)`.
    """
    joining = dataclasses.replace(
        parts[-1].joining,
        tensors=tuple(range(len(spec.tensors.floats))),
        packs=tuple(range(len(spec.packs))),
    )

    def hxla_clip(
        limbs: Any,
        peaks_T: jax.Array,
        exponents_T: jax.Array,
        where: jax.Array,
        factor: jax.Array,
        gradients: Sequence[Sequence[jax.Array]],
        deltas: Sequence[jax.Array],
    ) -> tuple[list[Any], jax.Array]:
        terms = [
            term
            for part, grads in zip(parts, gradients, strict=True)
            for term in part.terms(grads, part.starts)
        ]
        num = len(spec.trained)
        whole = [jnp.zeros(x.shape, jnp.float32) for x in spec.tensors.floats[:num]]
        for term in terms:
            whole[term.tensor] = term.added_to(whole[term.tensor])
        whole = clipped(spec, whole, factor)
        every = [Term(t, x) for t, x in enumerate([*whole, *deltas])]
        limbs, bits_T = joining.join(every, limbs, exponents_T, where[2])
        return limbs, jnp.maximum(peaks_T * where[2], bits_T)

    return hxla_clip


def _as_float32(x: Any) -> Any:
    if isinstance(x, Rows):
        return x._replace(values=x.values.astype(jnp.float32))
    return x.astype(jnp.float32)
