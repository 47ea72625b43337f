"""The updates of the local copies of the model, with what they need of each other."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from .._core._types import PyTree
from .._jax._independent import Independent
from .._plan._ownership import Ownership
from .._plan._plan_parts import Tier
from ._array_sums import lowered_sums, sum_programs, summed
from ._on_devices import OnDevices
from ._options import extra_bytes, update_options
from ._own_update import own_arguments, own_update_program
from ._shelves import on_device
from ._streamed_update import StreamedUpdate
from ._sum import Reducer
from ._update import Given, UpdateSpec, update_function, update_program
from ._whole_update import whole_arguments, whole_update_program


class Updates:
    """Runs the updates of the local copies.

    Args:
        spec: What they are made from.
        reducer: Knows all copies.
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
        whole: Independent | None,
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
        self._on: list[OnDevices | None] = []
        self._of_device = spec
        for replica in local:
            on: OnDevices | None = None
            if own is not None:
                of_device = spec
                if own.axes:
                    state_specs: Any = own.state_specs(opt_state)
                    if tier != "device":  # what waits elsewhere is none of the arguments
                        leaves = jax.tree.leaves(state_specs, is_leaf=lambda x: isinstance(x, P))
                        state_specs = [None if x == own.parts_spec else x for x in leaves]
                    on = OnDevices(
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

    def lower(self, i: int, params: Any, opt_state: Any, aux: Any, given: Given) -> list[Any]:
        """A local copy's programs before compilation, in the order of `names`.

        Args:
            i: Number of the local copy.
            params: Shapes of the trained parameters, as they lie.
            opt_state: Of the optimizer's state.
            aux: Of other variables.
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

    def run(self, local: Sequence[tuple[Any, Any, Any, Given]]) -> list[Any]:
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
