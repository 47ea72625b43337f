"""What runs of stages are worth where they are packed into nodes of several devices."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import scipy

from ._chain_tables import Array
from ._runs import Sort

_SHARES = 21  # of a price by devices


@dataclasses.dataclass(frozen=True)
class RunPrices:
    """Of runs in nodes.

    Attributes:
        runs: By sort, [K] of a run, and [K] of a second of its ring.
        worth: Of all nodes: no runs that they can hold cost more.
    """

    runs: Mapping[Sort, tuple[Array, Array]]
    worth: float


class NodePacking:
    """Nodes that hold runs of so many copies.

    A run takes as many devices of a node as it has stages. But where the node has a stage of all
    copies, the devices for that are taken for all of them at once: a *unit* for each, and the
    stage has no ring over the node's card.

    Other rings are on the card for a share of their time at least. Copies whose runs have a layer
    in common share its ring. Beside a run of j stages a node has devices for `inside - j` others,
    and fewer copies than all.

    Args:
        num_devices: [K]
        num_nodes: [K]
        inside: [K] The most devices of a node of the kind.
        copies: The fewest that there are.

    Attributes:
        sorts: Of runs that nodes can hold, by kind.
    """

    def __init__(
        self,
        num_devices: Sequence[int],
        num_nodes: Sequence[int],
        inside: Sequence[int],
        copies: int,
    ):
        self._num_devices, self._num_nodes = num_devices, num_nodes
        self._inside, self._copies = inside, copies
        self.sorts = [list(_sorts(own, copies)) for own in inside]
        # Of each kind units, runs of 1, 2, ... devices, and what is beside units, of as many.
        self._starts = np.cumsum([0, *(2 * own + 1 for own in inside)])
        self._patterns = [np.array(list(_patterns(own, copies))) for own in inside]
        self._held = scipy.linalg.block_diag(*(own.T for own in self._patterns))
        kinds = np.repeat(np.arange(len(inside)), [len(own) for own in self._patterns])
        self._nodes = np.array(kinds == np.arange(len(inside))[:, None], float)

    def most_whole(self, k: int) -> int:
        """Stages that the nodes of a kind can have of all copies."""
        return self._num_nodes[k] * (self._inside[k] // self._copies)

    def by_device(self, prices: Sequence[float]) -> Array:
        """[T] Prices where a device of each kind has one."""
        return np.concatenate([np.zeros(self._starts[-1] + len(prices)), prices])

    def share(self, k: int, sort: Sort) -> float:
        """Of the ring of very many copies over a run's layers, what a card has of it at least."""
        if sort.whole or self._copies == 1:
            return 0.0
        most = min(self._copies - 1, self._inside[k] - sort.stages + 1)
        return (1 - 1 / self._copies) / most

    def used(self, runs: Iterable[tuple[int, Sort, float]]) -> Array:
        """[T] What runs take: of each its kind, sort, and the ring of very many copies.

        They take items of nodes, kind by kind, and seconds of cards and devices of each kind.
        """
        num_kinds, last = len(self._inside), int(self._starts[-1])
        found = np.zeros(last + 2 * num_kinds)
        for k, sort, ring in runs:
            (stages, whole), at = sort, self._starts[k]
            found[at] += whole
            if stages > whole:
                found[at + stages - whole] += 1
            if stages > whole > 0:
                found[at + self._inside[k] + stages - whole] += 1
            found[last + k] += self.share(k, sort) * ring
            found[last + num_kinds + k] += stages
        return found

    def packed(
        self, used: Array, value: Array, most: float, card_seconds: float
    ) -> tuple[Array, Array]:
        """How often a linear programme packs each pipeline, and [T] the prices that go with it.

        Args:
            used: [C, T] What they take.
            value: [C] Of each.
            most: Pipelines in all.
            card_seconds: Of each node.
        """
        num, scale = len(value), float(value.max()) or 1.0
        (num_kinds, num_patterns), last = self._nodes.shape, self._starts[-1]
        amounts = np.repeat([card_seconds, 1.0], num_kinds)
        solved = scipy.optimize.linprog(
            np.append(-value / scale, np.zeros(num_patterns)),
            A_ub=np.block(
                [
                    [used.T[:last], -self._held],
                    [used.T[last:] / amounts[:, None], np.zeros((2 * num_kinds, num_patterns))],
                    [np.zeros((num_kinds, num)), self._nodes],
                    [np.ones((1, num)), np.zeros((1, num_patterns))],
                ]
            ),
            b_ub=[
                *np.zeros(last),
                *self._num_nodes,
                *self._num_devices,
                *self._num_nodes,
                most,
            ],
            method="highs-ds",
        )
        found = scale * np.maximum(-solved.ineqlin.marginals, 0.0)
        others = found[last : last + 2 * num_kinds] / amounts
        return solved.x[:num], np.concatenate([self._raised(found[:last]), others])

    def _raised(self, items: Array) -> Array:
        """Prices as high as leaves nodes worth what they are, of what no pipeline takes too."""
        found = []
        for k, own in enumerate(self._inside):
            patterns, at = self._patterns[k], items[self._starts[k] : self._starts[k + 1]]
            worth = float((patterns @ at).max())
            shares = worth / own * _devices(own)[:, None] * np.linspace(0, 1, _SHARES)
            raised = np.maximum(at[:, None], shares)
            holds = (patterns @ raised).max(axis=0) <= worth * (1 + 1e-9)
            at = raised[:, np.flatnonzero(holds)[-1]]
            for j in [*range(own, 0, -1), 0, *range(2 * own, own, -1)]:
                num = patterns[:, j]
                others = patterns @ at - num * at[j]
                more = (worth - others)[num > 0] / num[num > 0]
                if len(more):
                    at[j] = max(at[j], float(more.min()))
            found.append(at)
        return np.concatenate(found)

    def priced(self, items: Array, card_seconds: float) -> RunPrices:
        """Runs, from [T] prices of what they take."""
        last, num_kinds = self._starts[-1], len(self._inside)
        sorts = {sort for own in self.sorts for sort in own}
        runs = {sort: (np.zeros(num_kinds), np.zeros(num_kinds)) for sort in sorts}
        worth = 0.0
        for k, own in enumerate(self._inside):
            at = items[self._starts[k] : self._starts[k + 1]]
            card, device = float(items[last + k]), float(items[last + num_kinds + k])
            held = float((self._patterns[k] @ at).max())
            worth += self._num_nodes[k] * (held + card * card_seconds)
            worth += self._num_devices[k] * device
            beside = [0.0, *(at[1 : own + 1] + at[own + 1 :])]
            for sort in self.sorts[k]:
                stages, whole = sort
                price = whole * at[0] + beside[stages - whole] if whole else at[stages]
                runs[sort][0][k] = price + stages * device
                runs[sort][1][k] = card * self.share(k, sort)
        return RunPrices(runs, worth)


def _devices(inside: int) -> Array:
    """Of a unit, and of runs; that of what is beside units is counted as that of a run."""
    return np.array([1, *range(1, inside + 1), *[0] * inside])


def _sorts(inside: int, copies: int) -> Iterator[Sort]:
    """Runs that a node can hold."""
    for stages in range(1, inside + 1):
        yield Sort(stages)
        for whole in range(1, min(stages, inside // copies if copies > 1 else 0) + 1):
            if stages - whole <= inside - copies * whole:
                yield Sort(stages, whole)


def _patterns(room: int, copies: int) -> Iterator[list[int]]:
    """Units, runs of 1, 2, ... devices, and what can be beside units, that fill a node."""
    for groups in range(room // copies + 1):
        for parts in _partitions(room - groups * copies, room):
            runs = [parts.count(j) for j in range(1, room + 1)]
            yield [groups * copies, *runs, *(runs if groups else [0] * room)]


def _partitions(num: int, most: int) -> Iterator[list[int]]:
    """Of a number into parts of at most so much."""
    if not num:
        yield []
    for first in range(min(num, most), 0, -1):
        for rest in _partitions(num - first, first):
            yield [first, *rest]
