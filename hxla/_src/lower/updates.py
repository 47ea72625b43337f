"""The updates of the local replicas, whole ones and those that need each other.

Each product is rounded by itself and sums over whole arrays are made of integers, as where copies
share the state out: so whether they do changes no bit. Arrays keep their own shapes; only the few
whose arithmetic a compiler would treat as that of single numbers are flat and padded, as granules
are.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..jax.program_parts import balanced, in_groups
from ..jax.separable_update import Part, SeparableUpdate
from ..plan.ownership import LEAST_GRANULE, Ownership
from ..plan.parts import Tier
from .compile import extra_bytes, update_options
from .exact_norms import lowered_sums, sum_programs, summed
from .offload import on_device
from .replica import Replica
from .sharded_update import ShardedUpdate
from .streamed_update import StreamedUpdate
from .sum import Reducer
from .update import UpdateInputs, UpdateSpec, new_aux, update_function, update_program, whole_sums
from .zero_update import mean_of, own_arguments, own_update_program


class WholePart(Part):
    """All of an update's arrays."""

    def __init__(self, update: SeparableUpdate):
        self._update = update
        self._sizes = {
            d: math.prod(v.aval.shape)
            for v, d in zip(update.closed.jaxpr.outvars, update.domain_of, strict=False)
            if d is not None
        }

    def owns(self, domain: int) -> bool:
        """Every domain."""
        return True

    def has_whole(self, domain: int) -> bool:
        """Whether its arrays keep their shapes: those of too few elements are flat and padded."""
        return not self._update.slices[domain] or self._sizes[domain] >= LEAST_GRANULE

    def piece(self, domain: int, x: Any) -> Any:
        """The whole array, as it is run."""
        return x if self.has_whole(domain) else _flat(x)

    def own(self, domain: int, x: Any) -> Any:
        """The same with zeros where it is padding."""
        if self.has_whole(domain):
            return x
        return jnp.where(jnp.arange(x.size) < self._sizes[domain], x, jnp.zeros((), x.dtype))

    def of(self, k: int, x: Any) -> Any:
        """One of the update's arrays, as it is run."""
        domain = self._update.domain_of[k]
        return x if domain is None else self.piece(domain, x)


def _flat(x: jax.Array) -> jax.Array:
    return jnp.pad(x.reshape(-1), (0, LEAST_GRANULE - x.size))


def whole_arguments(
    spec: UpdateSpec,
    update: SeparableUpdate,
    params: Sequence[jax.Array],
    opt_state: PyTree,
    given: UpdateInputs,
) -> tuple[list[Any], WholePart]:
    """Those of the traced update.

    Args:
        spec: What the update is made from.
        given: What else is read.
    """
    found, part = whole_sums(spec, given), WholePart(update)
    leaves, num = jax.tree.leaves(opt_state), len(params)
    means = [mean_of(x, given).astype(p.dtype) for x, p in zip(found[:num], params, strict=True)]
    arrays = [*params, *leaves, *means]
    return [*(part.of(k, x) for k, x in enumerate(arrays)), given.value], part


def whole_update_program(spec: UpdateSpec, update: SeparableUpdate, replica: Replica) -> Any:
    """The program of an update, whose first three arguments are donated; see `update_program`.

    Args:
        spec: What the update is made from.
        replica: The copy, of one device.
    """
    num = len(spec.tensors.params)

    def hxla_update(
        params: Sequence[jax.Array],
        opt_state: PyTree,
        aux: Sequence[jax.Array],
        given: UpdateInputs,
    ) -> tuple[list[jax.Array], PyTree, list[jax.Array], jax.Array]:
        arguments, part = whole_arguments(spec, update, params, opt_state, given)
        leaves, state_tree = jax.tree.flatten(opt_state)
        results = [
            new if new.shape == x.shape else new[: x.size].reshape(x.shape)
            for new, x in zip(
                update.run(arguments, part, given.where[1], given.sums),
                (*params, *leaves),
                strict=True,
            )
        ]
        others = whole_sums(spec, given)[num:]
        state = jax.tree.unflatten(state_tree, results[num:])
        return results[:num], state, new_aux(spec, aux, others, given.words), given.weight + 0

    run: Any = hxla_update
    if spec.num_groups > 1:
        sizes = [x.size * x.dtype.itemsize for x in spec.tensors.params]
        run = in_groups(run, balanced(sizes, spec.num_groups))
    return jax.jit(
        run,
        donate_argnums=(0, 1, 2),
        compiler_options=update_options(replica.devices[0].platform, spec.contribution.form),
    )


class Updates:
    """Runs the updates of the local copies.

    Args:
        spec: What they are made from.
        own: Which copy updates what; None: each updates everything.
        whole: The traced update, where each updates everything by the arithmetic of shared updates;
            None: where its one program decides how it rounds.
        params: PartitionSpec of each trained parameter.
        opt_state: Tree of the PartitionSpecs of the optimizer's state.
        aux: PartitionSpec of each other variable.
        tier: Where the optimizer's state waits, `device`, `host` or `disk`.
        state: From the number of a local copy to the shapes of its optimizer state.
    """

    def __init__(
        self,
        spec: UpdateSpec,
        reducer: Reducer,
        own: Ownership | None,
        whole: SeparableUpdate | None,
        params: Sequence[P],
        opt_state: PyTree,
        aux: Sequence[P],
        tier: Tier,
        state: Callable[[int], PyTree],
    ):
        self._spec, self._reducer, self._own = spec, reducer, own
        self._traced = whole if own is None else own.update
        self._tier, self._state_of = tier, state
        self._is_of_one_device = any(
            replica.only_place is not None and not spec.padding.is_none for replica in reducer.local
        )
        self._of_whole = ""
        chunks, local = reducer.chunks, reducer.local
        self.programs: list[Any] = []  #: Of each local copy, before compilation.
        self._sums: list[list[tuple[Any, Any]]] = []
        self._on: list[ShardedUpdate | None] = []
        self._of_device = spec
        for replica in local:
            on: ShardedUpdate | None = None
            if own is not None:
                of_device = spec
                if own.axes:
                    state_specs: Any = own.state_specs(opt_state)
                    if tier != "device":  # what waits elsewhere is none of the arguments
                        leaves = jax.tree.leaves(state_specs, is_leaf=lambda x: isinstance(x, P))
                        state_specs = [None if x == own.parts_spec else x for x in leaves]
                    on = ShardedUpdate(
                        own=own,
                        replica=replica,
                        params=params,
                        aux=aux,
                        state=state_specs,
                        leaves=jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, P)),
                    )
                    self._of_device = of_device = on.local(spec)
                arguments: Any = functools.partial(
                    own_arguments, of_device, own, chunks, own.member(replica.index)
                )
                if tier == "device":
                    self.programs.append(own_update_program(of_device, own, chunks, replica, on))
            elif whole is not None:
                arguments = functools.partial(whole_arguments, spec, whole)
                self.programs.append(whole_update_program(spec, whole, replica))
            else:
                self.programs.append(update_program(spec, replica, params, opt_state, aux))
            self._on.append(on)
            options = update_options(replica.devices[0].platform, spec.contribution.form)
            traced = self._traced
            self._sums.append(
                [] if traced is None else sum_programs(traced, arguments, options, on)
            )
        firsts = [0 if own is None else own.first(r.index) for r in local]
        self._where = [np.array([first, 0], np.int32) for first in firsts]
        self.compiled: list[list[Any]] = []  #: Of each local copy, the update last.

    @functools.cached_property
    def _read_by_sums(self) -> set[int]:
        """The parameters that sums of the update need, and others of its arguments."""
        return set() if self._traced is None else self._traced.read_by_sums()

    @functools.cached_property
    def _streamed(self) -> list[StreamedUpdate]:
        """Of each local copy, where state waits elsewhere."""
        if self._own is None or self._tier == "device":
            return []
        leaves = [jax.tree.leaves(self._state_of(i)) for i in range(len(self._reducer.local))]
        spec, own, chunks = self._of_device, self._own, self._reducer.chunks
        return [
            StreamedUpdate(spec, own, chunks, replica, state, self._tier == "host", on)
            for replica, state, on in zip(self._reducer.local, leaves, self._on, strict=True)
        ]

    def names(self, i: int) -> tuple[str, ...]:
        """Of a local copy's programs."""
        num = self._streamed[i].num_programs if self._streamed else 1
        return (*["a sum in the update"] * (2 * len(self._sums[i])), *["the update"] * num)

    @property
    def text(self) -> str:
        """What stands for the update where copies or their devices have unlike programs of it."""
        return self._of_whole if self._own is None else str(self._own.update.closed)

    def lower(
        self, i: int, params: Any, opt_state: Any, aux: Any, given: UpdateInputs
    ) -> list[Any]:
        """A local copy's programs before compilation, in the order of `names`.

        Args:
            i: Number of the local copy.
            params: Shapes of the trained parameters, as they lie.
            given: Of what else is read.
        """
        if self._traced is None:
            whole = params, opt_state, aux, given
            if self._is_of_one_device:
                run = update_function(self._spec)
                self._of_whole = str(jax.make_jaxpr(run)(*whole))
            return [self.programs[i].lower(*whole)]
        sums = np.zeros(len(self._traced.sums), np.float32)
        given = given._replace(where=self._where[i], sums=sums)
        read = params, self._here(i, opt_state), given._replace(words=[])
        before = lowered_sums(self._traced, self._sums[i], read)
        if self._streamed:
            return [*before, *self._streamed[i].lower(params, opt_state, aux, given)]
        return [*before, self.programs[i].lower(params, opt_state, aux, given)]

    def _here(self, i: int, opt_state: PyTree) -> PyTree:
        """The leaves of a local copy's optimizer state that are on the device, None for others."""
        if not self._streamed:
            return opt_state
        away = self._streamed[i].groups.away
        return [None if k in away else x for k, x in enumerate(jax.tree.leaves(opt_state))]

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of the next local copy, compiled."""
        i = len(self.compiled)
        self.compiled.append(list(compiled))
        if self._streamed:
            self._streamed[i].adopt(compiled[-self._streamed[i].num_programs :])

    def run(self, local: Sequence[tuple[Any, Any, Any, UpdateInputs]]) -> list[Any]:
        """Update: see `update_program` and `own_update_program`.

        Args:
            local: For each local copy its parameters, state, other variables, and what else is
                read.
        """
        last = [programs[-1] for programs in self.compiled]
        if self._traced is None:
            return [update(*own) for update, own in zip(last, local, strict=True)]
        read = [
            (
                [on_device(x) if k in self._read_by_sums else x for k, x in enumerate(params)],
                self._here(i, state),
                given._replace(words=[], where=self._where[i]),
            )
            for i, (params, state, _, given) in enumerate(local)
        ]
        if self._own is None:  # any copy has all terms
            sums = summed(self._traced, self.compiled[:1], read[:1], [True], lambda x: x, (0, 1))
        else:
            counted = [
                self._own.is_counted(replica.index) and replica.is_led_here
                for replica in self._reducer.local
            ]
            exchange, rank = self._reducer.host.exchange, (jax.process_index(), jax.process_count())
            sums = summed(self._traced, self.compiled, read, counted, exchange, rank)
        run = [streamed.run for streamed in self._streamed] or last
        if not self._streamed:  # one program reads all parameters
            local = [([*map(on_device, own[0])], *own[1:]) for own in local]
        return [
            update(params, state, aux, given._replace(where=where, sums=sums))
            for update, where, (params, state, aux, given) in zip(
                run, self._where, local, strict=True
            )
        ]

    def params_at_once(self, params: Sequence[Any]) -> int:
        """Bytes of parameters that wait on the host, as far as the update has them on the device.

        Args:
            params: Shapes of what the first local copy has of each.
        """
        num = self._reducer.arrays.num_inner
        sizes = [x.size * x.dtype.itemsize // num for x in params]
        return self._streamed[0].params_at_once(sizes) if self._streamed else sum(sizes)

    def extra_bytes(self) -> int:
        """Bytes that one device needs beside the arguments."""
        if self._streamed:
            return max(streamed.extra_bytes() for streamed in self._streamed)
        return max(extra_bytes(program) for programs in self.compiled for program in programs)
