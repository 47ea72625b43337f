"""The updates of the local copies of the model, with what they need of each other."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from .._core._types import PyTree
from .._plan._ownership import Ownership
from ._array_sums import lowered_sums, sum_programs, summed
from ._options import compiler_options, extra_bytes
from ._own_update import own_arguments, own_update_program
from ._sum import Reducer
from ._update import UpdateSpec, update_function, update_program


class Updates:
    """Runs the updates of the local copies.

    Args:
        spec: What they are made from.
        reducer: Knows all copies.
        own: Which copy updates what; None: each updates everything.
        params: PartitionSpec of each trained parameter.
        opt_state: Tree of the PartitionSpecs of the optimizer's state.
        aux: PartitionSpec of each other variable.
    """

    def __init__(
        self,
        spec: UpdateSpec,
        reducer: Reducer,
        own: Ownership | None,
        params: Sequence[P],
        opt_state: PyTree,
        aux: Sequence[P],
    ):
        self._spec, self._reducer, self._own = spec, reducer, own
        self._is_of_one_device = any(
            replica.only_place is not None and not spec.padding.is_none for replica in reducer.local
        )
        self._of_whole = ""
        chunks, local = reducer.chunks, reducer.local
        self.programs: list[Any] = []  #: Of each local copy, before compilation.
        self._sums: list[list[tuple[Any, Any]]] = []
        for replica in local:
            if own is None:
                self.programs.append(update_program(spec, replica, params, opt_state, aux))
                self._sums.append([])
                continue
            self.programs.append(own_update_program(spec, own, chunks, replica))
            arguments = functools.partial(own_arguments, spec, own, chunks, replica.index)
            options = compiler_options(replica.devices[0].platform, spec.contribution.form)
            self._sums.append(sum_programs(own.update, arguments, options))
        firsts = [] if own is None else [own.shares.firsts[r.index] for r in local]
        self._where = [np.array([first, 0], np.int32) for first in firsts]
        self.compiled: list[list[Any]] = []  #: Of each local copy, the update last.

    @property
    def names(self) -> tuple[str, ...]:
        """Of a copy's programs."""
        return (*["a sum in the update"] * (2 * len(self._sums[0])), "the update")

    @property
    def text(self) -> str:
        """What stands for the update where copies or their devices have unlike programs of it."""
        return self._of_whole if self._own is None else str(self._own.update.closed)

    def lower(
        self, i: int, params: Any, opt_state: Any, aux: Any, totals: Any, ints: Any, exponents: Any
    ) -> list[Any]:
        """A local copy's programs before compilation, in the order of `names`.

        Args:
            i: Number of the local copy.
            params: Shapes of the trained parameters, as they lie.
            opt_state: Of the optimizer's state.
            aux: Of other variables.
            totals: Of the sums.
            ints: Of the summed integers.
            exponents: Of the scales.
        """
        numbers = np.float32(1), np.float32(1)
        given = (params, opt_state, aux, totals, ints, exponents, *numbers)
        if self._own is None:
            if self._is_of_one_device:
                run = update_function(self._spec, has_axes=True)
                self._of_whole = str(jax.make_jaxpr(run)(*given))
            return [self.programs[i].lower(*given)]
        traced, where = self._own.update, self._where[i]
        read = (params, opt_state, totals, exponents, *numbers, where)
        last = self.programs[i].lower(*given, where, np.zeros(len(traced.sums), np.float32))
        return [*lowered_sums(traced, self._sums[i], read), last]

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of the next local copy, compiled."""
        self.compiled.append(list(compiled))

    def run(
        self, local: Sequence[tuple[Any, ...]], weight: np.float32, value: np.float32
    ) -> list[Any]:
        """Update: see `update_program` and `own_update_program`.

        Args:
            local: For each local copy its parameters, state, other variables, totals, integers and
                scales.
            weight: What the sums are divided by.
            value: The loss.
        """
        last = [programs[-1] for programs in self.compiled]
        if self._own is None:
            return [update(*own, weight, value) for update, own in zip(last, local, strict=True)]
        read = [
            [params, opt_state, totals, exponents, weight, value, where]
            for (params, opt_state, _, totals, _, exponents), where in zip(
                local, self._where, strict=True
            )
        ]
        rank = jax.process_index(), jax.process_count()
        sums = summed(self._own.update, self.compiled, read, self._reducer.exchange, rank)
        return [
            update(*own, weight, value, where, sums)
            for update, own, where in zip(last, local, self._where, strict=True)
        ]

    def extra_bytes(self) -> int:
        """Bytes that one device needs beside the arguments."""
        return max(extra_bytes(program) for programs in self.compiled for program in programs)
