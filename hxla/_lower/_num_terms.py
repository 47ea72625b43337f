"""How many terms a sum of gradients has: they decide how large each may be."""

import collections
from collections.abc import Sequence

from .._graph._graph import Graph, params_of
from .._graph._parts import ChainPart


def num_terms(graph: Graph, parts: Sequence[ChainPart], num_microbatches: int) -> int:
    """Terms of one element's sum: a parameter that several parts read has more."""
    read: dict[int, list[tuple[int, int, int] | None]] = collections.defaultdict(list)
    param_of = params_of(graph)
    for entry in (p for part in parts for p in part.segment.params):
        read[param_of[entry]].append(graph.values[graph.param_values[entry]].rows)

    def meet(a: tuple[int, int, int] | None, b: tuple[int, int, int] | None) -> bool:
        return a is None or b is None or a[0] != b[0] or b[1] <= a[1] < b[2]

    readers = [sum(meet(a, b) for b in own) for own in read.values() for a in own]
    return num_microbatches * max(readers, default=1)
