"""Sequences of segment programs: their replay, and the fastest within a limit of memory."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from hxla import PlanError
from support import segment_chains
from support.inside.choose import best_sequence, keep_all, least_memory
from support.inside.schedule import (
    Residuals,
    SegmentCost,
    layered_peak_bytes,
    replay_sequence,
    sequence_from_texts,
    while_running,
)
from support.tiers import examples, rows


def replayed(chain, texts):
    return replay_sequence(sequence_from_texts(len(chain), texts.split()), chain)


def segment(name, **given):
    choices = (
        Residuals(name="all", num_bytes=40, forward_seconds=1.25, backward_seconds=2.0),
        Residuals(name="input", num_bytes=0, forward_seconds=1.0, backward_seconds=3.5),
    )
    cost = SegmentCost(
        name=name,
        input_bytes=10,
        input_gradient_bytes=7,
        forward_seconds=1.0,
        forward_temporary_bytes=3,
        residuals=choices,
        parameter_gradient_bytes=2,
    )
    return dataclasses.replace(cost, **given)


CHAIN = [segment("first", input_bytes=0, input_gradient_bytes=0), segment("second"), segment("end")]


@pytest.mark.parametrize(
    ("texts", "seconds", "bytes_O", "host_bytes"),
    [
        # Each keeps its residuals and its input, and each backward leaves 2 bytes.
        (
            "F0:all F1:all F2:all B2:all B1:all B0:all",
            3 * 1.25 + 3 * 2.0,
            (50, 100, 140, 149, 108, 53),
            0,
        ),
        ("F0+ F1+ B2:input B1:input B0:input", 2.0 + 3 * 3.5, (13, 23, 29, 28, 13), 0),
        ("F0+ F1 B2:input F0:all F1:all B1:all B0:all", 12.0, (13, 23, 19, 59, 109, 108, 53), 0),
        ("F0+ F1+ O1 B2:input I1 B1:input B0:input", 12.5, (13, 23, 20, 19, 19, 28, 13), 10),
        # Residuals go with the input that their backward reads, and both stay on the host.
        (
            "F0:all F1:all O1:all B2:input I1:all B1:all B0:all",
            2 * 1.25 + 2 * 2.0 + 3.5,
            (50, 100, 100, 59, 99, 108, 53),
            50,
        ),
    ],
)
def test_a_replay_counts_what_lies_on_the_device(texts, seconds, bytes_O, host_bytes):
    replay = replayed(CHAIN, texts)
    assert replay.seconds == pytest.approx(seconds)
    assert replay.bytes_O == bytes_O
    assert replay.host_bytes == host_bytes
    assert replay.sequence.written == tuple(texts.split())


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ("F0 F1 B2:input B1:input", "operation 3, B1:input: the input is not on the device"),
        ("F0:all B2:all", "operation 1, B2:all: the input is not on the device"),
        ("F0:all F1:all B1:all", "the backward of segment 2 has not run"),
        ("F0:all F1:all B2:all", "no forward has left 'all'; run F2:all"),
        ("F0:all F1:all B2:input", "backward of segment 1 (second) never runs"),
        ("F0:all F0:all", "its residuals are there already"),
        ("F0:dots", "no residuals 'dots'; choose of all, input"),
        ("F0+ F1 I1", "not in host memory"),
        ("F0+ F1:all O1", "its residuals are there and need the input; offload both, O1:all"),
        ("F0+ F1:all O1:all B2:input B1:all", "the input is not on the device"),
        ("F0+ F1+ O1:all", "no forward has left 'all'; run F1:all"),
        ("F0+ F1:all I1:all", "its residuals 'all' are not in host memory"),
        ("F0+ F1+ B2:input F2", "the backward of its segment has run"),
    ],
)
def test_a_sequence_that_cannot_run_is_refused(texts, words):
    with pytest.raises(PlanError) as caught:
        replayed(CHAIN, texts)
    assert words in str(caught.value)


def test_texts_that_are_no_operations_are_all_named():
    with pytest.raises(PlanError) as caught:
        sequence_from_texts(2, ["F0", "X1", "F2", "B0+:all", "O1+", 3])
    assert [f"operation {i}:" in str(caught.value) for i in range(6)] == [False] + [True] * 5


def test_costs_that_cannot_be_are_all_named():
    choice = dataclasses.replace(CHAIN[0].residuals[0], backward_seconds=math.nan)
    wrong = [segment("a", input_bytes=-1), segment("b", residuals=(choice, choice))]
    with pytest.raises(PlanError) as caught:
        keep_all(wrong)
    for words in ("(a): input_bytes is -1", "(b), residuals all: backward_seconds is nan", "apart"):
        assert words in str(caught.value)


def test_the_best_sequence_is_that_of_exhaustion_on_random_chains():
    exact = close = num = 0
    many = examples(12, 120)
    for seed in range(many):
        rng = np.random.default_rng(seed)
        sizes = [3, 4] if many < 100 else [3, 4, 4, 5, 5, 6]
        length = int(rng.choice(sizes))
        chain = segment_chains.random_chain(rng, length, num_choices=1 if length == 6 else 2)
        least, most = least_memory(chain).peak_bytes, keep_all(chain).peak_bytes
        limit = int(rng.integers(least, max(most, least + 1)))
        best = best_sequence(chain, limit)
        assert best.peak_bytes <= limit
        fastest = segment_chains.fastest_seconds(chain, limit)
        assert best.seconds >= fastest * (1 - 1e-9)
        close += best.seconds <= fastest * 1.02
        exact += best.seconds <= fastest * (1 + 1e-9)
        num += 1
        if seed % 4 == 0:
            assert segment_chains.fastest_seconds(chain, least - 1) is None, seed
    # The rest keep an input for a while, drop it, and make it again.
    assert exact >= 0.98 * num
    assert close >= 0.99 * num


def test_what_is_copied_is_there_until_that_is_done():
    replay = replayed(CHAIN, "F0:all F1:all O1:all B2:input I1:all B1:all B0:all")
    assert replay.offloaded_O == (0, 0, 50, 0, 0, 0, 0)
    assert replay.fetched_O == (0, 0, 0, 0, 50, 0, 0)
    assert replay.moved_bytes == 100
    assert (replay.peak_bytes, replay.copying_peak_bytes) == (108, 59 + 50)


def test_many_microbatches_on_the_host_have_what_one_reads_and_what_the_next_will():
    def most(texts):
        sequence = sequence_from_texts(3, texts.split())
        return layered_peak_bytes(sequence, CHAIN, 3, while_running(sequence, (0, 0, 0)))

    # The backward of the second reads 10, while 10 come; the last one left 9 and it leaves 11.
    found = most("F0+ F1+ O1 B2:input I1 B1:input B0:input")
    assert found == (10 + 9) + (7 + 2) + 10 + 2 * 11
    assert found < most("F0+ F1+ B2:input B1:input B0:input")


def test_without_a_tight_limit_nothing_runs_twice():
    rng = np.random.default_rng(0)
    for length in (1, 2, 7):
        chain = segment_chains.random_chain(rng, length)
        best = best_sequence(chain, keep_all(chain).peak_bytes)
        assert best.seconds == pytest.approx(
            sum(min(r.forward_seconds + r.backward_seconds for r in c.residuals) for c in chain)
        )
        assert best.sequence.num_forwards == (1,) * length
        assert best.peak_bytes <= keep_all(chain).peak_bytes


#: Segments and checkpoints.
REVOLVE = list(itertools.product((2, 5, 11, 24, 40), (1, 2, 3, 5)))


@pytest.mark.parametrize("row", rows(REVOLVE, (2, 1), (5, 5), (11, 3), (11, 2), (24, 2)))
def test_equal_segments_take_the_forwards_of_revolve(row):
    """Griewank and Walther, "Algorithm 799: Revolve", 2000: r l - beta(c + 1, r - 1) forwards."""
    length, num_checkpoints = row
    beta = lambda s, t: math.comb(s + t, s)  # noqa: E731
    repeats = next(r for r in range(length) if beta(num_checkpoints, r) >= length)
    forwards = repeats * length - beta(num_checkpoints + 1, repeats - 1) if repeats else 0
    # A backward has its own input, and two units for itself, beside the checkpoints.
    chain = segment_chains.unit_chain(length, backward_temporary_bytes=2)
    best = best_sequence(chain, num_checkpoints + 3)
    assert sum(best.sequence.num_forwards) == forwards
    assert best.seconds == forwards + length


def test_more_memory_is_never_slower_and_never_exceeded():
    rng = np.random.default_rng(1)
    for length in (5, 12):
        chain = [
            dataclasses.replace(c, input_bytes=c.input_bytes * 1013 + i)
            for i, c in enumerate(segment_chains.random_chain(rng, length))
        ]
        least, most = least_memory(chain).peak_bytes, keep_all(chain).peak_bytes
        limits = np.linspace(least, most, examples(14, 40)).astype(int).tolist()
        # Few slots, so that much is rounded.
        found = [best_sequence(chain, limit, num_slots=60) for limit in limits]
        assert all(r.peak_bytes <= limit for r, limit in zip(found, limits, strict=True))
        seconds = [r.seconds for r in found]
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[0] > seconds[-1]


def test_a_limit_that_no_sequence_meets_names_the_least_and_its_segment():
    chain = segment_chains.unit_chain(6)
    large = dataclasses.replace(chain[3], name="attention", forward_temporary_bytes=1000)
    choice = dataclasses.replace(large.residuals[0], backward_temporary_bytes=2000)
    chain[3] = dataclasses.replace(large, residuals=(choice,))
    least = least_memory(chain)
    assert least.peak_bytes == 2002  # the first input, its own and what its backward takes
    with pytest.raises(PlanError, match=r"backward of segment 3 \(attention\) .* 2,002 bytes of 7"):
        best_sequence(chain, 7)
    assert best_sequence(chain, 2002).peak_bytes == 2002


@pytest.mark.slow
def test_a_hundred_segments_are_planned_with_little_lost_to_rounding():
    rng = np.random.default_rng(0)
    chain = []
    for i in range(100):
        seconds = rng.uniform(0.5, 2.0)
        cut, every = rng.integers(2_000_000, 4_000_000), rng.integers(4_000_000, 20_000_000)
        times = [("all", every, 2.0), ("cut", cut, 2.3)]
        size = int(rng.integers(1_000_000, 3_000_000))
        chain.append(
            SegmentCost(
                name=str(i),
                input_bytes=size,
                input_gradient_bytes=size,
                forward_seconds=seconds,
                residuals=tuple(
                    Residuals(
                        name=name,
                        num_bytes=int(kept),
                        forward_seconds=seconds,
                        backward_seconds=factor * seconds,
                    )
                    for name, kept, factor in times
                ),
            )
        )
    limit = keep_all(chain).peak_bytes * 3 // 10
    best, coarse = best_sequence(chain, limit), best_sequence(chain, limit, num_slots=120)
    assert 0.97 * limit < best.peak_bytes <= limit
    assert best.seconds <= coarse.seconds <= 1.01 * best.seconds
