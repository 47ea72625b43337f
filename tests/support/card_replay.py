"""All copies of a pipeline together, event by event, their transfers sharing network cards.

It shares nothing with hxla's replays and formulas but the values that describe a plan.
"""

import collections
import dataclasses
import heapq
import itertools
import math

_SAME = 1 + 1e-12  # times that rounding alone tells apart


def card_replay(chain, staging, copies, cluster, starts):
    """When each copy of the model has run its microbatches by 1F1B.

    A transfer holds up both of its stages, and ends when each rank of the sender's tensor group has
    sent its message. Over a card the messages of a direction, or of both if it is not duplex, get
    equal shares of the bandwidth, anew whenever one begins or ends. None is faster than the link
    between its devices, whose latency comes before the bytes.

    Args:
        chain: The `Chain` that is cut.
        staging: The `Staging` that cuts it.
        copies: Of each copy, in the order of the staging's replicas, the ranks of each stage.
        cluster: That the ranks are of.
        starts: Seconds at which each copy begins.

    Returns:
        The seconds at which each copy ends, without the sum of gradients and the update.
    """
    ends = (*staging.cuts[1:], len(chain.output_bytes))
    sorts = itertools.chain(*([sort] * sort.count for sort in staging.replicas))
    runs = []
    for sort, ranks in zip(sorts, copies, strict=True):
        stages = list(zip(sort.groups, staging.cuts, ends, strict=True))
        forward = [sum(chain.groups[k].forward_seconds[a:b]) for k, a, b in stages]
        backward = [sum(chain.groups[k].backward_seconds[a:b]) for k, a, b in stages]
        sent = [chain.output_bytes[end - 1] for end in ends[:-1]]
        runs.append(_Copy(ranks, {"F": forward, "B": backward}, sent, sort.num_microbatches))

    network, events = _Network(cluster), _Events()
    for run, start in zip(runs, starts, strict=True):
        events.add(start, _Begin(run))
    while (now := min(events.next, network.next)) < math.inf:
        changed = []
        for what in events.until(now):
            if isinstance(what, _Message):
                network.begin(what)
            else:
                changed.append(what)
        for message in network.until(now):
            message.of.num_left -= 1
            if not message.of.num_left:
                changed.append(message.of)
        for what in changed:
            what.run.finish(what)
        for run in dict.fromkeys(what.run for what in changed):
            run.done = now
            for transfer in run.transfers():
                for pair in transfer.pairs:
                    link = cluster.link(*pair)
                    begins = now + (link.latency_seconds if link else 0.0)
                    events.add(begins, _Message(transfer, pair, transfer.num_bytes))
            for computation in run.computations():
                events.add(now + computation.seconds, computation)
    assert all(run.is_done for run in runs), "stages wait for one another in a circle"
    return [run.done for run in runs]


@dataclasses.dataclass(eq=False)
class _Begin:
    run: "_Copy"


@dataclasses.dataclass(eq=False)
class _Computation:
    run: "_Copy"
    stage: int
    seconds: float


@dataclasses.dataclass(eq=False)
class _Transfer:
    run: "_Copy"
    source: int
    target: int
    pairs: list[tuple[int, int]]  # of ranks
    num_bytes: float  # of each pair
    num_left: int


@dataclasses.dataclass(eq=False)
class _Message:
    of: _Transfer
    pair: tuple[int, int]
    bytes_left: float


class _Events:
    """What comes at times that are known."""

    def __init__(self):
        self._heap, self._order = [], itertools.count()

    def add(self, time, what):
        heapq.heappush(self._heap, (time, next(self._order), what))

    @property
    def next(self):
        return self._heap[0][0] if self._heap else math.inf

    def until(self, now):
        while self.next <= now * _SAME:
            yield heapq.heappop(self._heap)[2]


class _Network:
    """Messages on their way."""

    def __init__(self, cluster):
        self._cluster, self._now, self._messages = cluster, 0.0, []
        self._ends = {}  # when each would be there if none began or ended before

    def begin(self, message):
        """At the time up to which all were brought."""
        self._messages.append(message)

    @property
    def next(self):
        return min(self._ends.values(), default=math.inf)

    def until(self, now):
        """Those that end until then; later ones get shares of what begins and stays."""
        own = [m for m in self._messages if m in self._ends]
        for m in own:
            if self._ends[m] > now * _SAME:
                m.bytes_left *= (self._ends[m] - now) / (self._ends[m] - self._now)
        ended = [m for m in own if self._ends[m] <= now * _SAME]
        self._messages = [m for m in self._messages if m not in ended]
        self._now = now
        self._ends = {m: now + s for m, s in self._seconds_left().items()}
        return ended

    def _seconds_left(self):
        nodes = [[self._cluster.devices[rank].node for rank in m.pair] for m in self._messages]
        passed, load = [], collections.Counter()
        for a, b in nodes:
            cards = [(a, False), (b, True)] if a != b else []
            known = [(self._cluster.network_card(node), node, into) for node, into in cards]
            passed.append([(card, (node, card.duplex and into)) for card, node, into in known])
            load.update(key for _, key in passed[-1])
        found = {}
        for m, cards in zip(self._messages, passed, strict=True):
            link = self._cluster.link(*m.pair)
            rates = [link.bytes_per_second] if link else []
            rates += [card.bytes_per_second / load[key] for card, key in cards]
            found[m] = m.bytes_left / min(rates, default=math.inf)
        return found


class _Copy:
    """One copy of the model: how far its stages are, and which of them are free.

    Args:
        ranks: Of each stage.
        seconds: Of a forward ("F") and a backward ("B") of each stage.
        sent: Bytes of a message over each boundary.
        num_microbatches: Of the copy.
    """

    def __init__(self, ranks, seconds, sent, num_microbatches):
        self._ranks, self._seconds, self._sent = ranks, seconds, sent
        self._num = num = len(ranks)
        self._left = [_one_f_one_b(num - 1 - stage, num_microbatches) for stage in range(num)]
        self._is_free, self._to_send = [True] * num, set()
        self._received = [False] * num  # what the next action of a stage waits for
        self.done = 0.0

    @property
    def is_done(self):
        return not any(self._left) and not self._to_send

    def _source(self, stage):
        """The stage of whose output the next action of a stage is."""
        other = stage + {"F": -1, "B": 1}[self._left[stage][0][0]]
        return other if 0 <= other < self._num else None

    def transfers(self):
        """Those that can begin now; the lower receiver goes first."""
        for target in range(self._num):
            if not self._left[target] or self._received[target] or not self._is_free[target]:
                continue
            source = self._source(target)
            if source is None or not self._is_free[source]:
                continue
            if (source, target, self._left[target][0]) in self._to_send:
                self._is_free[source] = self._is_free[target] = False
                pairs = list(zip(self._ranks[source], self._ranks[target], strict=True))
                sent = self._sent[min(source, target)]
                yield _Transfer(self, source, target, pairs, sent, len(pairs))

    def computations(self):
        """Those that can begin now: a stage first sends what it has computed."""
        for stage in range(self._num):
            if not self._left[stage] or not self._is_free[stage]:
                continue
            owes = any(source == stage for source, _, _ in self._to_send)
            if not owes and (self._received[stage] or self._source(stage) is None):
                self._is_free[stage] = False
                kind, _ = self._left[stage][0]
                yield _Computation(self, stage, self._seconds[kind][stage])

    def finish(self, what):
        """A transfer or a computation is done, or the copy's time to begin has come."""
        if isinstance(what, _Begin):
            return
        if isinstance(what, _Transfer):
            self._is_free[what.source] = self._is_free[what.target] = True
            self._to_send.remove((what.source, what.target, self._left[what.target][0]))
            self._received[what.target] = True
            return
        kind, microbatch = self._left[what.stage].pop(0)
        self._is_free[what.stage], self._received[what.stage] = True, False
        target = what.stage + {"F": 1, "B": -1}[kind]
        if 0 <= target < self._num:
            self._to_send.add((what.stage, target, (kind, microbatch)))


def _one_f_one_b(num_warm_up, num_microbatches):
    """The actions of a stage in their order."""
    first = min(num_warm_up, num_microbatches)
    forward = [("F", m) for m in range(num_microbatches)]
    backward = [("B", m) for m in range(num_microbatches)]
    turns = itertools.chain(*zip(forward[first:], backward, strict=False))
    return [*forward[:first], *turns, *backward[num_microbatches - first :]]
