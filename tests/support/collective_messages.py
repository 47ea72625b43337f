"""All-reduces message by message: rounds of (sender, receiver, chunks, adds) on whole numbers.

An array is so many chunks. Each worker starts with its own number in each; a message carries some
chunks as they are when its round begins, and the receiver adds them to its own or puts them in
their place.
"""

import math
from collections import Counter


def parameter_server(n):
    push = [[(i, 0, (0,), True)] for i in range(1, n)]
    return 1, push + [[(0, i, (0,), False)] for i in range(1, n)]


def naive(n):
    """Each sends what it had at first; `own` is chunk 1, which nobody adds to."""
    return 1, [[(i, (i + r) % n, ("own",), True) for i in range(n)] for r in range(1, n)]


def ring(n):
    scatter = [[(i, (i + 1) % n, ((i - r) % n,), True) for i in range(n)] for r in range(n - 1)]
    gather = [[(i, (i + 1) % n, ((i + 1 - r) % n,), False) for i in range(n)] for r in range(n - 1)]
    return n, scatter + gather


def tree(n):
    levels = (n - 1).bit_length()
    up = [[(i, i - 2**k, (0,), True) for i in range(2**k, n, 2 ** (k + 1))] for k in range(levels)]
    down = [[(b, a, (0,), False) for a, b, _, _ in messages] for messages in reversed(up)]
    return 1, up + down


def _folded(n, chunks, rounds):
    """The workers beyond the largest power of two hand over theirs before, and are told after."""
    power = 1 << (n.bit_length() - 1)
    every = tuple(range(chunks))
    before = [(power + j, j, every, True) for j in range(n - power)]
    after = [(j, power + j, every, False) for j in range(n - power)]
    return chunks, [before, *rounds, after] if before else rounds


def butterfly(n):
    power = 1 << (n.bit_length() - 1)
    levels = power.bit_length() - 1
    return _folded(n, 1, [[(i, i ^ 2**k, (0,), True) for i in range(power)] for k in range(levels)])


def halving_doubling(n):
    power = 1 << (n.bit_length() - 1)
    rounds = []
    held = [range(power)] * power
    size = power
    while size > 1:  # each keeps the half in which its own chunk lies
        size //= 2
        own = [range(i // size * size, i // size * size + size) for i in range(power)]
        rounds.append(
            [
                (i, i ^ size, tuple(c for c in held[i] if c not in own[i]), True)
                for i in range(power)
            ]
        )
        held = own
    while size < power:
        rounds.append([(i, i ^ size, tuple(held[i]), False) for i in range(power)])
        size *= 2
        held = [range(i // size * size, i // size * size + size) for i in range(power)]
    return _folded(n, power, rounds)


def run(n, chunks, rounds):
    """The sums that all end with, checked; per round and worker the chunks that it sends."""
    state = [[1 << i] * chunks for i in range(n)]
    own = [1 << i for i in range(n)]
    sent = []
    for messages in rounds:
        assert messages
        assert max(Counter(a for a, *_ in messages).values()) == 1
        assert max(Counter(b for _, b, *_ in messages).values()) == 1
        carried = [
            (a, b, [(c, own[a] if c == "own" else state[a][c]) for c in moved], adds)
            for a, b, moved, adds in messages
        ]
        for _, b, moved, adds in carried:
            for c, value in moved:
                place = 0 if c == "own" else c
                if adds:
                    assert not state[b][place] & value, "a number would be added twice"
                state[b][place] = state[b][place] | value if adds else value
        sent.append({a: len(moved) for a, _, moved, _ in messages})
    assert all(value == (1 << n) - 1 for row in state for value in row)
    return sent


def seconds(sent, chunks, num_bytes, latency, bandwidth):
    return math.fsum(latency + max(own.values()) * num_bytes / chunks / bandwidth for own in sent)
