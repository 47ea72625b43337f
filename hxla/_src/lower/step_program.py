"""A small step as one program: its microbatches, their sum, what follows from it, and the update.

A call costs 50 to 350 microseconds, which a small step feels three times. The program is made of
the same three functions, with barriers between them, and between them are integers only, or arrays
whose arithmetic no compiler may change. So it ends with the bits of the three.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.types import PyTree
from ..graph.graph import Graph
from ..plan.plan import Plan
from .chain_runner import ChainRunner
from .compile import compile_all, extra_bytes, loop_options, update_waits
from .contribution import DeviceSums
from .decisions import Decisions
from .determinism import calls_host
from .replica import ReplicaArrays
from .runners import Runner
from .sum import Reducer
from .update import UpdateInputs
from .updates import ReplicaUpdate, Updates

#: The largest state whose step is one program. An update that can be refused has temporaries of
#: the state's size on a CPU, and a large step does not feel its calls.
_MOST_BYTES = 16 << 20


def step_program_of(
    graph: Graph,
    plan: Plan,
    runner: Runner,
    reducer: Reducer,
    updates: Updates,
    trained: Sequence[int],
    num_rows: int,
    state_bytes: int,
) -> "StepProgram | None":
    """A step as one program, where one device has all of a small state; else None.

    Args:
        runner: That of the first local replica.
        trained: Places of the trained parameters.
        num_rows: See `update.num_rows`.
        state_bytes: Of one device.
    """
    loss, update = graph.program, updates.each[0]
    if not (isinstance(runner, ChainRunner) and isinstance(update, ReplicaUpdate)):
        return None
    if jax.process_count() > 1 or any(replica.executors > 1 for replica in plan.replicas):
        return None  # processes compare the programs of a step, and executors call them
    has_more = runner.per_call < plan.num_microbatches or bool(update.groups.groups)
    if has_more or not runner.is_one_program or loss.effects or calls_host(loss):
        return None
    if not _is_small(plan, state_bytes):
        return None
    return StepProgram(runner, reducer, updates, trained, len(plan.parameters), num_rows)


def _is_small(plan: Plan, state_bytes: int) -> bool:
    """Whether one device has all of a small state, and sums it there."""
    placement, is_alone = plan.placement, len(plan.replicas) == 1 and not plan.axes
    is_plain = plan.pipeline is None and placement.zero == 0 and placement.sums != "released"
    is_here = placement.optimizer == placement.parameters == plan.sums.over == "device"
    return is_alone and is_plain and is_here and state_bytes <= _MOST_BYTES


class StepProgram:
    """The program of a whole step on a replica of one device, which is alone.

    Args:
        trained: Places of the trained parameters.
    """

    name = "a step"

    def __init__(
        self,
        runner: ChainRunner,
        reducer: Reducer,
        updates: Updates,
        trained: Sequence[int],
        num_params: int,
        num_rows: int,
    ):
        self._runner, self._reducer, self._updates = runner, reducer, updates
        self._trained = trained
        self._others = sorted(set(range(num_params)).difference(trained))
        [self._replica], [update] = reducer.local, updates.each
        assert isinstance(update, ReplicaUpdate)
        self._update = update
        self._num_rows = num_rows
        self.compiled: Any = None

    @functools.cached_property
    def _fixed(self) -> tuple[jax.Array, list[jax.Array]]:
        """Arguments that are the same in every step: see `where` and `rows` of `UpdateInputs`."""
        rows = [self._replica.put(np.int32(i)) for i in range(self._num_rows)]
        return self._update.place, rows

    @functools.cached_property
    def _flags(self) -> list[jax.Array]:
        return [self._replica.put(np.bool_(x)) for x in (False, True)]

    # -- the program -----------------------------------------------------------------------------

    def compile(
        self,
        state: tuple[Sequence[Any], Sequence[Any], PyTree],
        over: Callable[..., Any] = map,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Compile the program.

        Args:
            state: Shapes of the replica's parameters, other variables and optimizer state.
            over: Like `map`, perhaps on several threads.
        """
        [self.compiled] = compile_all([(self.name, self.lower(*state))], over, tell)

    def lower(self, params: Sequence[Any], aux: Sequence[Any], opt_state: PyTree) -> Any:
        """The program before compilation, from shapes of the replica's arrays."""
        sums, form = self._runner.sums_shapes, self._reducer.form
        number, one, two = (
            self._replica.like(jax.ShapeDtypeStruct(shape, np.int32)) for shape in ((), (1,), (2,))
        )
        scales = sums.peaks_T, *[one] * self._reducer.is_scaled
        fixed = two, [number] * self._num_rows
        counts = self._replica.like(jax.ShapeDtypeStruct((), bool))
        where, batch = self._runner.numbers_and_batch_shapes()
        options = loop_options(self._replica.devices[0].platform, form)
        run = jax.jit(self._traced(), donate_argnums=(0, 2, 3, 4), compiler_options=options)
        state = *self._split(params), jax.tree.leaves(opt_state), list(aux)
        return run.lower(*state, sums, scales, where, batch, fixed, counts)

    def _split(self, params: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The trained parameters, and the others."""
        return [params[k] for k in self._trained], [params[k] for k in self._others]

    def _traced(self) -> Any:
        micro, update = self._runner.traced, self._update.traced()
        decide, totals = self._reducer.traced()
        has_branches = update_waits(self._replica.devices[0].platform)

        def hxla_step(
            params: list[jax.Array],
            frozen_params: list[jax.Array],
            opt_state: list[jax.Array],
            aux: list[jax.Array],
            sums: DeviceSums,
            scales: tuple[jax.Array, ...],
            where: jax.Array,
            batch: Any,
            fixed: tuple[Any, ...],
            counts: jax.Array,
        ) -> Any:
            place, rows = fixed
            places = *self._trained, *self._others
            every = dict(zip(places, (*params, *frozen_params), strict=True))
            read = [every[k] for k in range(len(every))]
            sums = micro(read, aux, sums, scales[0], where, batch)
            summed = _apart(sums)
            decisions, words = _apart(decide(summed, scales))
            counts &= decisions.is_accepted

            def updated(is_accepted: jax.Array | None = None) -> Any:
                given = UpdateInputs(
                    _apart(totals(summed)),
                    words,
                    decisions.exponents_T,
                    decisions.weight,
                    decisions.value,
                    is_accepted,
                    rows=rows,
                )
                return update(params, opt_state, aux, given, place)

            def same() -> Any:
                return params, opt_state, aux, jnp.zeros(self._update.num_sums, jnp.float32)

            # With a branch XLA copies no state, and fuses no decision into each tensor's kernels.
            # Elsewhere the host would wait for it.
            after = jax.lax.cond(counts, updated, same) if has_branches else updated(counts)
            return *after, sums, decisions

        return hxla_step

    # -- a step ----------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether the replica runs its microbatches one after another."""
        return self._runner.num_executors == 1

    def run(
        self,
        arrays: ReplicaArrays,
        sums: DeviceSums | None,
        scales: tuple[jax.Array, ...],
        step: int,
        ids: range,
        batches: Sequence[PyTree],
        *,
        counts: bool = True,
    ) -> tuple[DeviceSums, Decisions]:
        """Run a step, and replace the replica's arrays; waits for no device.

        Args:
            sums: Sums of the step before, whose memory is reused; None: there are none.
            scales: See `Reducer.reduce`.
            ids: All microbatches of the step; some of them where it does not count.
            counts: Whether the update counts if the sums do, or never.
        """
        leaves, treedef = jax.tree.flatten(arrays.opt_state)
        if sums is None:
            make = lambda x: self._replica.put(np.zeros(x.shape, x.dtype))  # noqa: E731
            sums = jax.tree.map(make, self._runner.sums_shapes)
        where, batch = self._runner.numbers_and_batch(step, ids, batches)
        params, leaves, arrays.aux, self._updates.sums, sums, decisions = self.compiled(
            *self._split(arrays.params),
            leaves,
            arrays.aux,
            sums,
            scales,
            where,
            batch,
            self._fixed,
            self._flags[counts],
        )
        for k, x in zip(self._trained, params, strict=True):
            arrays.params[k] = x
        arrays.opt_state = jax.tree.unflatten(treedef, leaves)
        return sums, decisions

    @property
    def extra_bytes(self) -> int:
        """Bytes that the device needs beside the state and the sums."""
        return extra_bytes(self.compiled)


def _apart(tree: PyTree) -> PyTree:
    """The same arrays, with which XLA fuses nothing that comes after."""
    return jax.lax.optimization_barrier(tree)
