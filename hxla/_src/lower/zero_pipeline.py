"""A step of pipelines of which each copy has its share of parameters or of the sums.

A stage needs its parameters from its first forward to its last backward, and adds up its gradients
as long. So what is shared out travels once in a step, for some slots after others: the parameters
before the first tick, whole only in the slots, and the sums after the last one. The programs are
those of a pipeline, so no bit differs.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, sections 5.2 and 5.3 (stages 2 and 3).
"""

from collections.abc import Sequence
from typing import Any

import jax

from ..core.types import PyTree
from .compile import extra_bytes
from .contribution import DeviceSums
from .layerwise import Spans
from .pipeline import Pipeline
from .replica import ReplicaArrays
from .sharded_params import GroupCollectives, ShardedParams, smallest
from .sum import Reducer


class ZeroPipeline:
    """Runs the microbatches of all local copies; it is used as `LayerwiseStep` is.

    Args:
        reducer: The sums over all copies, with these groups.
        groups: See `stage_groups`.
        trained: Places of the parameters that are trained.
        sharded: Gathers the parameters of each group of slots; None: all copies have them.
    """

    def __init__(
        self,
        runners: Sequence[Pipeline],
        reducer: Reducer,
        groups: Sequence[Sequence[int]],
        trained: Sequence[int],
        sharded: ShardedParams | None,
    ):
        self._runners, self._reducer, self._groups = list(runners), reducer, groups
        self._sharded = sharded
        self._collectives = GroupCollectives(reducer, sharded, trained)
        self.wait, self.whole = self._collectives.wait, self._collectives.whole

    def run(
        self,
        held: Sequence[ReplicaArrays],
        exponents: Sequence[jax.Array],
        step: int,
        ids: Sequence[Sequence[int]],
        batches: Sequence[Sequence[PyTree]],
        spans: Sequence["Spans[Any]"],
    ) -> tuple[list[DeviceSums], list[list[jax.Array]]]:
        """Run a step's microbatches; see `LayerwiseStep.run`."""
        slots = self.filled(held)
        begins = [smallest(own) for own in slots]
        self.wait()
        added = []
        for i, runner in enumerate(self._runners):
            acc, tick = runner.ticks(slots[i], held[i].aux, exponents[i], step, ids[i], batches[i])
            slots[i] = []  # parameters are whole no longer than they must be
            if tick is not None:
                spans[i].put((begins[i], tick))
            added.append(acc)
        self._collectives.under_way = [acc.peaks_NT for acc in added]
        totals: list[list[jax.Array]] = [[] for _ in held]
        small: list[DeviceSums] = []
        for g in range(len(self._runners[0].groups)):
            self.wait()
            found = [
                runner.collect(g, acc) for runner, acc in zip(self._runners, added, strict=True)
            ]
            values = [own for own, _ in found]
            small += [told for _, told in found if told is not None]
            del found
            self._collectives.under_way = values
            self._collectives.sum_group(g, values, totals)
            del values  # they are there while the next group is collected, else
        if len(self._groups) > len(self._runners[0].groups):
            others = [list(own.values) for own in small]
            self._collectives.sum_group(len(self._groups) - 1, others, totals)
        return [own._replace(values=[]) for own in small], totals

    def filled(self, held: Sequence[ReplicaArrays]) -> list[list[jax.Array]]:
        """The slots of each local copy; every process calls this."""
        pieces = self._collectives.pieces(held)
        filled: list[list[list[jax.Array]]] = [[] for _ in held]
        for g in range(len(self._runners[0].groups)):
            stored = [dict(enumerate(own.params)) for own in held]
            if self._sharded is not None:
                gathered = self._collectives.gather(g, pieces)
                stored = [own | found for own, found in zip(stored, gathered, strict=True)]
                del gathered
            self.wait()
            new = [runner.fill(g, own) for runner, own in zip(self._runners, stored, strict=True)]
            del stored  # with the last name of what was gathered
            for copy, own_slots in zip(filled, new, strict=True):
                copy.append(own_slots)
            del new
            self._collectives.under_way = [smallest(own[-1]) for own in filled]
            if self._sharded is not None:
                # Programs wait in a queue with their arguments: one group may be there twice.
                jax.block_until_ready(self._collectives.under_way)
        return [runner.in_order(own) for runner, own in zip(self._runners, filled, strict=True)]

    def memory_bytes(self, num: int) -> int:
        """Bytes that one device needs beside the state and what pipelines keep between steps.

        Args:
            num: Its microbatches of a step; it does not matter how many.
        """
        del num
        runner = self._runners[0]
        each = range(len(runner.groups))
        most = slots = 0
        for g in each:
            filling = extra_bytes(runner.programs.fills[g])
            if self._sharded is not None:
                filling = max(self._sharded.gather_bytes(g), self._sharded.num_bytes(g) + filling)
            most = max(most, slots + filling)
            slots += runner.slots_bytes(g)
        sums = sum(map(runner.sums_bytes, each))
        most = max(most, slots + sums + extra_bytes(runner.programs.ticks))
        totals = 0
        for k in range(len(self._groups)):
            own = self._reducer.group_bytes(k)
            if k in each:
                most = max(most, sums + totals + extra_bytes(runner.programs.collects[k]))
                sums -= runner.sums_bytes(k)
            most = max(most, sums + totals + own.sums + own.adding)
            totals += own.totals
        return most


def stage_groups(
    of_slots: Sequence[Sequence[int]], trained: Sequence[int], num_tensors: int
) -> list[tuple[int, ...]]:
    """The tensors that are summed together, for each group of slots, and last the other variables.

    Args:
        of_slots: For each group the trained parameters in its slots, by their places.
        trained: Places of all of them, in the order of their tensors.
        num_tensors: Parameters and float variables that are no parameters.
    """
    number = {p: t for t, p in enumerate(trained)}
    groups = [tuple(number[p] for p in own) for own in of_slots]
    others = tuple(range(len(trained), num_tensors))
    return [*groups, others] if others else groups
