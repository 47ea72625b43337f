"""Formulas of collectives by algorithm equal simulations, message by message."""

import json

import pytest

import hxla
from support import collective_messages as messages
from support.inside.choose import ALGORITHMS, favoured, ring_all_reduce_seconds, volume
from support.paths import ROOT
from support.tiers import examples

BYTES, LATENCY, BANDWIDTH = 3e6, 2e-5, 1e9
LINK = hxla.Link(bytes_per_second=BANDWIDTH, latency_seconds=LATENCY)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_takes_what_its_messages_take(algorithm):
    make = getattr(messages, algorithm.replace("-", "_"))
    for n in range(2, examples(18, 65)):
        chunks, rounds = make(n)
        sent = messages.run(n, chunks, rounds)
        found = volume(algorithm, n, BYTES)
        own = [sum(one.get(i, 0) for one in sent) / chunks for i in range(n)]
        assert found.num_rounds == len(rounds), n
        assert found.sent_bytes == pytest.approx(max(own) * BYTES), n
        assert found.total_bytes == pytest.approx(sum(own) * BYTES), n
        wanted = messages.seconds(sent, chunks, BYTES, LATENCY, BANDWIDTH)
        assert found.seconds(LINK) == pytest.approx(wanted), n


def test_a_ring_is_the_one_that_the_planner_counts_with():
    for n in (2, 5, 16):
        wanted = ring_all_reduce_seconds(BYTES, n, LINK.seconds)
        assert volume("ring", n, BYTES).seconds(LINK) == pytest.approx(wanted)


def test_latency_favours_few_rounds_and_bandwidth_few_bytes():
    slow = hxla.Link(bytes_per_second=1e12, latency_seconds=1e-3)
    assert favoured(16, 1e3, slow)[0] == "butterfly"
    assert favoured(16, 1e9, LINK)[0] == "halving-doubling"
    assert favoured(17, 1e9, LINK)[0] == "ring"
    for n in (2, 3, 16, 17, 64):
        for num_bytes in (1e2, 1e5, 1e8):
            name, seconds = favoured(n, num_bytes, LINK)
            assert seconds == volume(name, n, num_bytes).seconds(LINK)
            assert all(volume(a, n, num_bytes).seconds(LINK) >= seconds for a in ALGORITHMS)


def test_one_worker_sends_nothing_and_impossible_arguments_are_refused():
    assert all(volume(a, 1, BYTES).seconds(LINK) == 0 for a in ALGORITHMS)
    for n, num_bytes in ((0, 1.0), (2, -1.0), (2, float("nan"))):
        with pytest.raises(hxla.PlanError, match="give at least one"):
            volume("ring", n, num_bytes)


def test_measured_sums_are_within_a_fifth_of_two_figures_of_a_link():
    file = ROOT / "benchmarks" / "results" / "collectives.json"
    told = json.loads(file.read_text())
    link = hxla.Link(**told["fitted"])
    seen = set()
    for row in told["rows"]:
        if row["form"] not in ALGORITHMS:  # a message between two, permutes of pairs, XLA's own
            continue
        wanted = volume(row["form"], row["workers"], row["bytes"]).seconds(link)
        assert row["predicted_seconds"] == pytest.approx(wanted, rel=1e-4), row
        if row["bytes"] / row["workers"] < 60_000:
            continue  # a message of 20 ms: shorter ones wait for the processor, not for the link
        assert row["measured_seconds"] == pytest.approx(wanted, rel=0.2), row
        seen.add((row["form"], row["workers"]))
    algorithms = ("ring", "tree", "halving-doubling")
    assert {(a, n) for a in algorithms for n in (2, 4, 8)} <= seen
