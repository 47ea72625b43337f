"""A step of ZeRO 2 and 3 for pipelines: replicas shard the sums, or the parameters too.

A stage needs its parameters and its sums from its first forward to its last backward. So shards
travel once in a step, one group of slots after another: parameters are gathered before the first
tick, whole in the slots only, and sums are reduced after the last. Shards that are stored on the
host are fetched for the gather of their group. The programs are those of a pipeline, so no bit
differs.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, sections 5.2 and 5.3 (stages 2 and 3).
"""

from collections.abc import Sequence
from typing import Any

import jax

from ..core.types import PyTree
from ..plan.parts import Placement
from .compile import extra_bytes
from .contribution import DeviceSums
from .layerwise import Spans
from .pipeline import Pipeline
from .replica import ReplicaArrays
from .sharded_params import GroupCollectives, ShardedParams, smallest
from .sum import Reducer


class ZeroPipeline:
    """Runs the microbatches of all local replicas; it is used as `LayerwiseStep` is.

    Args:
        reducer: The sums over all replicas, with these groups.
        groups: See `stage_groups`.
        sharded: Gathers the parameters of each group of slots; None: all replicas have them.
        placement: Where shards of the parameters are stored between steps.
    """

    def __init__(
        self,
        runners: Sequence[Pipeline],
        reducer: Reducer,
        groups: Sequence[Sequence[int]],
        trained: Sequence[int],
        sharded: ShardedParams | None,
        placement: Placement,
    ):
        self._runners, self._reducer, self._groups = list(runners), reducer, groups
        self._sharded, self._is_away = sharded, placement.parameters == "host"
        self._collectives = GroupCollectives(reducer, sharded, trained)
        self.wait, self.whole = self._collectives.wait, self._collectives.whole

    def run(
        self,
        replicas: Sequence[ReplicaArrays],
        exponents: Sequence[jax.Array],
        step: int,
        ids: Sequence[Sequence[int]],
        batches: Sequence[Sequence[PyTree]],
        spans: Sequence["Spans[Any]"],
    ) -> tuple[list[DeviceSums], list[list[jax.Array]]]:
        """Run a step's microbatches; see `LayerwiseStep.run`."""
        slots = self.filled(replicas)
        begins = [smallest(arrays) for arrays in slots]
        self.wait()
        added = []
        for i, runner in enumerate(self._runners):
            acc, tick = runner.ticks(
                slots[i], replicas[i].aux, exponents[i], step, ids[i], batches[i]
            )
            slots[i] = []  # free the whole parameters
            if tick is not None:
                spans[i].put((begins[i], tick))
            added.append(acc)
        self._collectives.under_way = [acc.peaks_NT for acc in added]
        totals: list[list[jax.Array]] = [[] for _ in replicas]
        small: list[DeviceSums] = []
        for g in range(len(self._runners[0].groups)):
            self.wait()
            collected = [
                runner.collect(g, acc) for runner, acc in zip(self._runners, added, strict=True)
            ]
            values = [sums for sums, _ in collected]
            small += [sums for _, sums in collected if sums is not None]
            del collected
            self._collectives.under_way = values
            self._collectives.sum_group(g, values, totals)
            del values  # else they stay in memory while the next group is collected
        if len(self._groups) > len(self._runners[0].groups):
            others = [list(sums.values) for sums in small]
            self._collectives.sum_group(len(self._groups) - 1, others, totals)
        return [sums._replace(values=[]) for sums in small], totals

    def filled(self, replicas: Sequence[ReplicaArrays]) -> list[list[jax.Array]]:
        """The slots of each local replica; every process calls this."""
        pieces = self._collectives.pieces(replicas)
        filled: list[list[list[jax.Array]]] = [[] for _ in replicas]
        for g in range(len(self._runners[0].groups)):
            stored = [dict(enumerate(arrays.params)) for arrays in replicas]
            if self._sharded is not None:
                gathered = self._collectives.gather(g, pieces)
                if g + 1 < len(self._runners[0].groups):
                    self._sharded.fetch(g + 1, pieces)
                stored = [params | whole for params, whole in zip(stored, gathered, strict=True)]
                del gathered
            self.wait()
            new = [
                runner.fill(g, params) for runner, params in zip(self._runners, stored, strict=True)
            ]
            del stored  # the last name of the gathered parameters
            for groups, slots in zip(filled, new, strict=True):
                groups.append(slots)
            del new
            self._collectives.under_way = [smallest(groups[-1]) for groups in filled]
            if self._sharded is not None:
                # Queued programs keep their arguments: one group may be in memory twice.
                jax.block_until_ready(self._collectives.under_way)
        return [runner.in_order(slots) for runner, slots in zip(self._runners, filled, strict=True)]

    def memory_bytes(self, num: int) -> int:
        """Bytes that one device needs beside the state and the pipelines' buffers.

        Args:
            num: Not used: any number of microbatches takes the same.
        """
        del num
        runner = self._runners[0]
        each = range(len(runner.groups))
        most = slots = 0
        for g in each:
            filling = extra_bytes(runner.programs.fills[g])
            if self._sharded is not None:
                filling = max(self._sharded.gather_bytes(g), self._sharded.num_bytes(g) + filling)
                # Of parameters on the host, pieces of this group and the next are on the device.
                coming = each[g : g + 2] if self._is_away else []
                filling += sum(map(self._sharded.piece_bytes, coming))
            most = max(most, slots + filling)
            slots += runner.slots_bytes(g)
        sums = sum(map(runner.sums_bytes, each))
        most = max(most, slots + sums + extra_bytes(runner.programs.ticks))
        totals = 0
        for k in range(len(self._groups)):
            reduced = self._reducer.group_bytes(k)
            if k in each:
                most = max(most, sums + totals + extra_bytes(runner.programs.collects[k]))
                sums -= runner.sums_bytes(k)
            most = max(most, sums + totals + reduced.sums + reduced.adding)
            totals += reduced.totals
        return most


def stage_groups(
    of_slots: Sequence[Sequence[int]], trained: Sequence[int], num_tensors: int
) -> list[tuple[int, ...]]:
    """Tensors that are reduced together: for each group of slots, and last the other variables.

    Args:
        of_slots: For each group the trained parameters in its slots, by their places.
        trained: Places of all trained parameters, in the order of their tensors.
        num_tensors: Trained parameters and other float variables.
    """
    number = {p: t for t, p in enumerate(trained)}
    groups = [tuple(number[p] for p in params) for params in of_slots]
    others = tuple(range(len(trained), num_tensors))
    return [*groups, others] if others else groups
