"""The program of one microbatch on a replica that is no pipeline, or of several at once.

Each executor is a thread that runs the same program with sums of its own, and takes the next
microbatch as soon as it has done one. Sums are of integers, so neither who ran what nor the order
moves a bit.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..graph.graph import Graph, shapes_of
from ..jax.cpu_dots import row_major
from ..jax.jaxpr import as_function
from ..jax.lookups import Lookups, Rows, lookups_of
from ..model.functional import tree_bytes
from ..plan.sharding import Sharded
from .compile import compiler_options, extra_bytes
from .contribution import (
    Contribution,
    DeviceSums,
    SumsSpec,
    Tensors,
    changes,
    empty_sums,
    gradient_of,
    joined_words,
    largest,
    largest_over,
    local_largest,
    microbatch_key,
    pack_specs,
    peak_bits,
    row_bits,
    row_gradient_of,
)
from .padding import Granules
from .replica import Replica
from .uneven import Uneven
from .uneven_collectives import Cut, narrow, replaced

#: `(sums, whether they go on, number of the microbatch, its batch) -> (sums, tick)`.
RunOne = Callable[[DeviceSums, bool, int, Any], tuple[DeviceSums, jax.Array]]


class Executors:
    """Those of one device.

    Args:
        num: Executors, at least two.
        like: Shapes and places of a device's sums.
        empty: Makes sums of no microbatch.
        keeps: Whether the sums of executors stay from step to step.
    """

    def __init__(
        self,
        spec: SumsSpec,
        num: int,
        like: DeviceSums,
        empty: Callable[[], DeviceSums],
        *,
        keeps: bool,
    ):
        self.num, self._empty, self._keeps = num, empty, keeps
        self._more: list[DeviceSums | None] = [None] * (num - 1)
        merged = functools.partial(_merged, spec)
        self._merge = jax.jit(merged, donate_argnums=0).lower(like, like).compile()

    def run(
        self,
        run_one: RunOne,
        sums: DeviceSums | None,
        ids: range,
        batches: Sequence[Any],
    ) -> tuple[DeviceSums, jax.Array]:
        """Run microbatches on all executors.

        Args:
            sums: Of the first executor in the step before, whose memory is used again.
            ids: Numbers of the microbatches, at least one.

        Returns:
            The sums of all of them, and a small array to wait on.
        """
        work, lock = iter(zip(ids, batches, strict=True)), threading.Lock()
        owned = [sums, *self._more][: len(ids)]

        def taken() -> Iterator[tuple[int, Any]]:
            while True:
                with lock:
                    item = next(work, None)
                if item is None:
                    return
                yield item

        def execute(own: DeviceSums | None) -> tuple[DeviceSums, jax.Array | None]:
            own, tick = own or self._empty(), None
            for index, batch in taken():
                own, tick = run_one(own, tick is not None, index, batch)
                jax.block_until_ready(tick)  # one in flight each
            return own, tick

        with concurrent.futures.ThreadPoolExecutor(len(owned)) as pool:
            found = list(pool.map(execute, owned))
        found.sort(key=lambda pair: pair[1] is None)  # those that ran none are the last
        (total, tick), *others = found
        assert tick is not None
        for own, is_used in others:
            if is_used is not None:
                total, tick = self._merge(total, own)
        if self._keeps:
            self._more = [own for own, _ in others]
            self._more += [None] * (self.num - 1 - len(others))
        return total, tick


def _merged(spec: SumsSpec, a: DeviceSums, b: DeviceSums) -> tuple[DeviceSums, jax.Array]:
    """The sums of two executors, as the sum over devices makes them, and an array to wait on."""

    def added(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y

    small = a.small_MS + b.small_MS
    total = DeviceSums(
        small,
        jnp.maximum(a.peaks_T, b.peaks_T),
        jax.tree.map(added, a.values, b.values),
        joined_words(spec.tensors, a.words, b.words),
    )
    return total, small[0, 0]


_LEAST_ROWS_PER_LOOKUP = 4  # of a table; of fewer its whole gradient is as cheap

#: `(values, parts of the sums, exponents, keep) -> (parts of the sums, peaks)`.
_Joining = Callable[[Any, Any, jax.Array, Any], tuple[list[tuple[jax.Array, ...]], jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicrobatchSpec:
    """What the programs of microbatches are made from.

    Attributes:
        graph: Of the loss, for one microbatch.
        packs: Of tensors whose sums are one array.
        trained: Places of the parameters that are trained.
        contribution: How they join the sums.
        num_columns: S, sums of a microbatch.
        per_call: Microbatches that a call runs at most; more than one run in a loop.
        seed: Root of all random keys.
        mean: Whether a microbatch's own gradient is that of its mean loss, or of its sum.
        clip_norm: Global norm to which each microbatch's own gradient is clipped; None: not at all.
        sharded: How the devices of a replica cut the graph; None: a replica has one.
        uneven: The same, where their parts may be unlike.
    """

    graph: Graph
    tensors: Tensors
    packs: Sequence[Sequence[int]]
    trained: tuple[int, ...]
    contribution: Contribution
    num_microbatches: int
    num_columns: int
    seed: int
    per_call: int = 1
    mean: bool = True
    clip_norm: float | None = None
    sharded: Sharded | None = None
    uneven: Uneven | None = None

    def specs(self) -> list[P]:
        """How each float tensor lies on the replica's mesh."""
        if self.sharded is None:
            return [P()] * len(self.tensors.floats)
        params, aux = self.sharded.param_specs(), self.sharded.aux_specs()
        summed = itertools.compress(aux, self.tensors.is_summed)
        return [*(params[i] for i in self.trained), *summed]


class Microbatches:
    """Runs the microbatches of a replica one after another, or several at once."""

    names = ("a microbatch", "empty sums")  # of the programs
    unit = 1  # it takes any number of microbatches

    def __init__(self, spec: MicrobatchSpec, replica: Replica):
        if spec.uneven is not None:
            spec = dataclasses.replace(spec, uneven=spec.uneven.on(replica))
        self._spec, self._replica = spec, replica
        specs = None if spec.sharded is None else spec.sharded.batch_specs()
        if specs is not None and spec.per_call > 1:
            specs = [P(None, *own) for own in specs]
        self._batch_specs = specs
        zeros = functools.partial(empty_sums, spec)
        self._sums = _placed(jax.eval_shape(zeros), _sums_specs(spec), replica)
        shardings = jax.tree.map(lambda x: x.sharding, self._sums)
        self._program = jax.jit(
            _program(spec, replica),
            donate_argnums=2,
            compiler_options=compiler_options(replica.devices[0].platform, spec.contribution.form),
            out_shardings=None if spec.sharded is None else (shardings, None),
        )
        self._zeros = jax.jit(zeros, out_shardings=shardings)
        self._compiled: Any = None
        self._compiled_zeros: Any = None
        self._executors: Executors | None = None

    @property
    def text(self) -> str:
        """What stands for the programs where processes have unlike ones of them: the loss."""
        uneven = self._spec.uneven
        return "" if uneven is None or uneven.place is None else str(self._spec.graph.program)

    @property
    def compiled_text(self) -> str:
        """The optimized program of a microbatch."""
        return self._compiled.as_text() or ""

    def empty(self) -> DeviceSums:
        """Sums of no microbatch."""
        return self._compiled_zeros()  # type: ignore[no-any-return]

    def lower(self, params: Sequence[Any], aux: Sequence[Any], exponents: Any) -> list[Any]:
        """The programs before compilation: a microbatch, empty sums."""
        where = np.zeros(4 if self._spec.per_call > 1 else 3, np.int32)
        batch = _placed(self._batch_shapes(), self._batch_specs, self._replica)
        return [
            self._program.lower(list(params), list(aux), self._sums, exponents, where, batch),
            self._zeros.lower(),
        ]

    def _batch_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """What a call takes."""
        num = self._spec.per_call
        shapes = shapes_of(self._spec.graph, self._spec.graph.batch_values)
        if num == 1:
            return shapes
        return [jax.ShapeDtypeStruct((num, *x.shape), x.dtype) for x in shapes]

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of `lower`, compiled."""
        self._compiled, self._compiled_zeros = compiled

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
            sums: Those of the step before, whose memory is used again; None: there are none.
            exponents: Scales, int32[T].
            ids: Numbers of the microbatches, at least one.

        Returns:
            The sums of these microbatches, and a small array to wait on.
        """

        def run_some(own: DeviceSums, batch: list[Any], *where: int) -> Any:
            # A program of one device takes host arrays itself, which costs a tenth of a device_put.
            if self._replica.axes:
                batch = self._replica.put_tree(batch, self._batch_specs)
            return self._compiled(params, aux, own, exponents, np.array(where, np.int32), batch)

        def run_one(own: DeviceSums, goes_on: bool, index: int, batch: Any) -> Any:
            return run_some(own, jax.tree.leaves(batch), step, index, goes_on)

        if self._executors is not None:
            return self._executors.run(run_one, sums, ids, batches)
        sums, tick, num = sums or self.empty(), None, self._spec.per_call
        work = list(zip(ids, batches, strict=True))
        for first in range(0, len(work), num):
            (index, batch), *more = work[first : first + num]
            if num == 1:
                sums, tick = run_one(sums, first > 0, index, batch)
            else:
                every = _stacked([batch, *(own for _, own in more)], num)
                sums, tick = run_some(sums, every, step, index, first > 0, 1 + len(more))
        assert tick is not None
        return sums, tick

    def use_executors(self, num: int, *, keeps: bool) -> None:
        """Run so many microbatches at once from now on.

        Args:
            num: Executors; 1: one microbatch after another.
            keeps: Whether the sums of each stay from step to step.
        """
        own = None if num == 1 else Executors(self._spec, num, self._sums, self.empty, keeps=keeps)
        self._executors = own

    @property
    def num_together(self) -> int:
        """Microbatches whose time together says how fast one is."""
        return max(self.num_executors, self._spec.per_call)

    @property
    def num_executors(self) -> int:
        """How many microbatches run at once."""
        return 1 if self._executors is None else self._executors.num

    @property
    def kept_bytes(self) -> int:
        """Of a device between steps, beside the sums: those of its other executors."""
        if self._executors is None:
            return 0
        return (self._executors.num - 1) * tree_bytes(self._sums)

    def memory_bytes(self, sums_bytes: int) -> int:
        """Bytes that one device needs beside the state while it runs microbatches."""
        waiting = tree_bytes(self._batch_shapes()) if self._spec.per_call > 1 else 0
        return sums_bytes + self.num_executors * extra_bytes(self._compiled) + waiting


def _stacked(batches: Sequence[PyTree], num: int) -> list[np.ndarray]:
    """The arrays of some microbatches as those of `num`, the last of them as often as need be."""
    leaves = [jax.tree.leaves(batch) for batch in batches]
    leaves += [leaves[-1]] * (num - len(leaves))
    return [np.stack([np.asarray(x) for x in own]) for own in zip(*leaves, strict=True)]


def _sums_specs(spec: MicrobatchSpec) -> list[P]:
    packs = pack_specs(spec.specs(), spec.packs)
    each = [s for s in packs for _ in range(spec.contribution.form.num_parts)]
    return [P(), P(), *each, *[P()] * len(spec.tensors.words)]


def _placed(tree: PyTree, specs: Sequence[P] | None, replica: Replica) -> PyTree:
    leaves, treedef = jax.tree.flatten(tree)
    each = specs or [P()] * len(leaves)
    return jax.tree.unflatten(treedef, map(replica.like, leaves, each))


def _gradient(
    spec: MicrobatchSpec, replica: Replica, on_cpu: bool
) -> Callable[..., tuple[Any, list[Any]]]:
    """`(params, aux, key, batch leaves) -> ((loss, [sums[S], *new aux]), gradients)`.

    Gradients are arrays, or `Rows` of tables.
    """
    if spec.uneven is not None:
        return spec.uneven.gradient(replica.mesh, spec.trained, on_cpu)
    if spec.sharded is not None:
        return gradient_of(spec.sharded.function(replica.mesh), spec.trained, on_cpu)
    lookups = _lookups(spec)
    if lookups is not None:
        return row_gradient_of(lookups, spec.trained, on_cpu)
    program = as_function(spec.graph.program)

    def run(params: Any, aux: Any, key: Any, batch: Any) -> list[Any]:
        return program(*params, *aux, key, *batch)

    return gradient_of(run, spec.trained, on_cpu)


def _lookups(spec: MicrobatchSpec) -> Lookups | None:
    """The tables whose gradients are some rows, where their sum is exact: any order will do."""
    if not spec.contribution.is_exact or spec.clip_norm is not None:
        return None
    heights = {i: shape[0] for i in spec.trained if (shape := spec.graph.param_shapes[i])}
    most = {i: height // _LEAST_ROWS_PER_LOOKUP for i, height in heights.items()}
    return lookups_of(spec.graph.program, most)


def _joining(spec: MicrobatchSpec, replica: Replica, on_cpu: bool) -> _Joining:
    """How a microbatch's values join the sums on a replica's devices."""
    lay_out = row_major if on_cpu else lambda x: x
    packs = [np.array(pack) for pack in spec.packs]
    if spec.uneven is not None:
        return _joining_parts(spec, replica, lay_out)

    def added(
        before: Sequence[Any], values: Sequence[Any], exponents_T: jax.Array, keep: Any
    ) -> list[tuple[jax.Array, ...]]:
        return [
            spec.contribution.add_rows(_kept(old, keep, on_cpu), x, exponents_T[pack[0]])
            if isinstance(x, Rows)
            else spec.contribution.add(
                old, x, exponents_T[pack[0]] if len(pack) == 1 else exponents_T[pack, None], keep
            )
            for old, x, pack in zip(before, values, packs, strict=True)
        ]

    def alone(values: Any, before: Any, exponents_T: jax.Array, keep: Any) -> Any:
        found, peaks_T = local_largest(values, lay_out, spec.packs)
        return added(before, found, exponents_T, keep), peaks_T

    if spec.sharded is None:
        return alone
    over_devices = largest_over(replica.mesh, spec.specs(), lay_out, spec.packs)

    def run(values: Any, before: Any, exponents_T: jax.Array, keep: Any) -> Any:
        found, peaks_T = over_devices(values)
        return added(before, found, exponents_T, keep), peaks_T

    return run


def _kept(before: Sequence[jax.Array], keep: jax.Array, on_cpu: bool) -> Sequence[jax.Array]:
    """The parts of a sum, or zeros where it begins anew."""
    if not on_cpu:  # a branch would wait for the host there
        return [x * keep for x in before]
    return jax.lax.cond(  # type: ignore[no-any-return]
        keep == 0, lambda xs: [jnp.zeros_like(x) for x in xs], lambda xs: xs, list(before)
    )


def _joining_parts(
    spec: MicrobatchSpec, replica: Replica, lay_out: Callable[[jax.Array], jax.Array]
) -> _Joining:
    """The same, each device for its own part of what is cut into unlike ones."""
    assert spec.uneven is not None
    specs, mesh, num = spec.specs(), replica.mesh, spec.contribution.form.num_parts
    cuts = spec.uneven.cuts_of_sums(spec.trained, spec.tensors.is_summed)

    def one(x: jax.Array, before: Any, exponent: jax.Array, keep: Any, cut: Cut | None) -> Any:
        if cut is None:
            x = lay_out(x)
            return spec.contribution.add(before, x, exponent, keep), largest(x)
        if cut.place is not None:
            own = cut.sizes[cut.place]
            x, *old = (narrow(whole, cut.dim, own) for whole in (x, *before))
            x = lay_out(x)
            new = spec.contribution.add(old, x, exponent, keep)
            return tuple(replaced(b, n) for b, n in zip(before, new, strict=True)), largest(x)
        x = lay_out(x)
        granules = Granules.of(cut)

        def step(i: Any, old: list[jax.Array], peak: jax.Array) -> Any:
            new = granules.take(x, i)
            added = spec.contribution.add(old, new, exponent, keep)
            return added, jnp.maximum(peak, largest(new))

        parts, peak = granules.loop(step, before, jnp.zeros(()))
        return tuple(parts), peak

    def local(values: Any, before: Any, exponents_T: jax.Array, keep: Any) -> Any:
        pairs = [
            one(x, before[p], exponents_T[i], keep, cuts[i])
            for p, [i] in enumerate(spec.packs)
            for x in [values[i]]
        ]
        peaks_T = peak_bits(jnp.stack([peak for _, peak in pairs]))
        return [parts for parts, _ in pairs], jax.lax.pmax(peaks_T, mesh.axis_names)

    of_parts = [(s,) * num for s in specs]
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, of_parts, P(), P()),
        out_specs=(of_parts, P()),
        check_vma=False,
    )


def _program(spec: MicrobatchSpec, replica: Replica) -> Callable[..., tuple[DeviceSums, Any]]:
    """`(params, aux, sums, exponents, where, batch) -> (sums, tick)`.

    `where` is int32[3]: step, microbatch, and 0 to begin the sums anew or 1 to add to them.
    """
    on_cpu = replica.devices[0].platform == "cpu"
    gradient = _gradient(spec, replica, on_cpu)
    join = _joining(spec, replica, on_cpu)

    def hxla_micro(
        params: Sequence[jax.Array],
        aux: Sequence[jax.Array],
        sums: DeviceSums,
        exponents_T: jax.Array,
        where: jax.Array,
        batch: Sequence[jax.Array],
    ) -> tuple[DeviceSums, jax.Array]:
        step, index, keep = where[0], where[1], where[2]
        key = microbatch_key(spec.seed, step, index)
        (_, (row_S, *new_aux)), grads = gradient(params, aux, key, batch)
        if spec.clip_norm is not None:
            tiny = jnp.finfo(jnp.float32).tiny
            share = jnp.maximum(row_S[1], tiny) if spec.mean else 1.0
            own = clip([g.astype(jnp.float32) / share for g in grads], spec.clip_norm)
            grads = [g * share for g in own]
        deltas, words = changes(spec.tensors, aux, new_aux, index, spec.num_microbatches)
        values = [*map(_as_float32, grads), *deltas]
        added, peaks_T = join(values, sums.values, exponents_T, keep)
        out = DeviceSums(
            (sums.small_MS * keep).at[index].set(row_bits(row_S)),
            jnp.maximum(sums.peaks_T * keep, peaks_T),
            added,
            joined_words(spec.tensors, [x * keep for x in sums.words], words),
        )
        return out, row_S[1]

    return hxla_micro if spec.per_call == 1 else _looped(hxla_micro)


def _as_float32(x: jax.Array | Rows) -> jax.Array | Rows:
    if isinstance(x, Rows):
        return x._replace(values=x.values.astype(jnp.float32))
    return x.astype(jnp.float32)


def _looped(one: Callable[..., tuple[DeviceSums, Any]]) -> Callable[..., tuple[DeviceSums, Any]]:
    """The same of several microbatches, one after another.

    `where` has a fourth number, of those that are run: the body is one for all counts, so that no
    bit depends on them.
    """

    def hxla_micro(
        params: Any, aux: Any, sums: DeviceSums, exponents_T: jax.Array, where: Any, batches: Any
    ) -> tuple[DeviceSums, jax.Array]:
        step, first, keep, num = where[0], where[1], where[2], where[3]

        def body(i: jax.Array, held: tuple[DeviceSums, jax.Array]) -> tuple[DeviceSums, jax.Array]:
            batch = [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in batches]
            own = jnp.stack([step, first + i, jnp.where(i == 0, keep, 1)])
            return one(params, aux, held[0], exponents_T, own, batch)

        return jax.lax.fori_loop(0, num, body, (sums, jnp.float32(0)))

    return hxla_micro


def clip(grads: list[jax.Array], norm: float) -> list[jax.Array]:
    """Clip to a global norm; what is not finite stays, so that it can be named."""
    clipped, _ = optax.clip_by_global_norm(norm).update(grads, optax.EmptyState())
    finite = jnp.isfinite(optax.tree.norm(grads))
    return [jnp.where(finite, c, g) for c, g in zip(clipped, grads, strict=True)]
