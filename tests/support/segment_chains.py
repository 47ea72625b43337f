"""Random chains of segments, and the fastest of all sequences by exhaustion.

The exhaustion shares nothing with the planner and knows no class of sequences: any input and any
residuals may be made, kept, dropped and made again at any time.
"""

import heapq
import itertools

from support.inside.schedule import Residuals, SegmentCost


def unit_chain(num_segments, *, backward_temporary_bytes=0):
    """Every forward and every boundary is one; a backward starts from the segment's input."""
    choice = Residuals(
        name="input",
        num_bytes=0,
        forward_seconds=1.0,
        backward_seconds=1.0,
        backward_temporary_bytes=backward_temporary_bytes,
    )
    segment = SegmentCost(
        name="step",
        input_bytes=1,
        input_gradient_bytes=0,
        forward_seconds=1.0,
        residuals=(choice,),
    )
    return [segment] * num_segments


def random_chain(rng, num_segments, *, num_choices=2):
    """Segments of unlike sizes and times; choices that keep less take longer."""

    def residuals(name, share, forward_seconds):
        return Residuals(
            name=name,
            num_bytes=int(rng.integers(0, 40) * share),
            reads_input=bool(rng.random() < 0.7),
            forward_seconds=forward_seconds * rng.uniform(1.0, 1.1),
            backward_seconds=forward_seconds * (1 + rng.uniform(0.5, 1.5) + (1 - share) / 2),
            forward_temporary_bytes=int(rng.integers(0, 8)),
            backward_temporary_bytes=int(rng.integers(0, 16)),
        )

    chain = []
    for i in range(num_segments):
        forward = rng.uniform(0.2, 2.0)
        names = ["all", "cut", "dots"][: rng.integers(1, num_choices + 1)]
        size = int(rng.integers(1, 20))
        floating = rng.random() < 0.9
        chain.append(
            SegmentCost(
                name=f"segment {i}",
                input_bytes=size if i else int(rng.integers(0, 3)),
                input_gradient_bytes=size if i and floating else 0,
                forward_seconds=forward,
                forward_temporary_bytes=int(rng.integers(0, 8)),
                residuals=tuple(
                    residuals(name, 1 - 0.35 * k, forward) for k, name in enumerate(names)
                ),
                parameter_gradient_bytes=int(rng.integers(0, 4)),
            )
        )
    return chain


def fastest_seconds(chain, memory_bytes):
    """The time of the fastest sequence, by Dijkstra over what is stored; None: there is none.

    A state is the last segment without its backward, the inputs and the residuals of each segment.
    Anything may be dropped in no time.
    """
    num = len(chain)
    done = set()
    start = (num - 1, frozenset([0]), (None,) * num)
    queue = [(0.0, 0, start)]
    numbers = itertools.count(1)
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        if state[0] < 0:
            return seconds
        for took, peak, after in _steps(chain, *state):
            if peak <= memory_bytes and after not in done:
                heapq.heappush(queue, (seconds + took, next(numbers), after))
    return None


def _steps(chain, top, inputs, residuals):
    num = len(chain)
    # Residuals that include the input are one thing: it is there while they are.
    there = inputs | {i for i, r in enumerate(residuals) if r is not None and r.reads_input}
    held = sum(chain[i].input_bytes for i in there)
    held += sum(r.num_bytes for r in residuals if r is not None)
    held += chain[top + 1].input_gradient_bytes if top + 1 < num else 0
    held += sum(c.parameter_gradient_bytes for c in chain[top + 1 :])

    def replaced(i, r):
        return (*residuals[:i], r, *residuals[i + 1 :])

    for i in inputs:
        yield 0.0, held, (top, inputs - {i}, residuals)
    for i, r in enumerate(residuals):
        if r is not None:
            yield 0.0, held, (top, inputs, replaced(i, None))
            if r.reads_input and i not in inputs:
                yield 0.0, held, (top, inputs | {i}, replaced(i, None))
    for i in there:
        cost = chain[i]
        made = held + (chain[i + 1].input_bytes if i + 1 < num else 0)
        after = inputs | {i + 1} if i < top else inputs
        if i < top and i + 1 not in there:
            peak = made + cost.forward_temporary_bytes
            yield cost.forward_seconds, peak, (top, after, residuals)
        for r in cost.residuals:
            if residuals[i] is None:
                peak = made + r.num_bytes + r.forward_temporary_bytes
                yield r.forward_seconds, peak, (top, after, replaced(i, r))
    cost = chain[top]
    for r in cost.residuals:
        if residuals[top] == r or (r.num_bytes == 0 and r.reads_input and top in there):
            peak = held + r.backward_temporary_bytes
            peak += cost.input_gradient_bytes + cost.parameter_gradient_bytes
            after = (top - 1, inputs - {top}, replaced(top, None))
            yield r.backward_seconds, peak, after
