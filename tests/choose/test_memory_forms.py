"""Which stage of ZeRO, which shares and what recomputation: the cheapest of all that fit."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from support import segment_chains
from support.inside.choose import (
    GRANULES_OF_A_REPLICA,
    Candidate,
    ChainBytes,
    ModelBytes,
    ReplicaDevice,
    StepMemory,
    Travel,
    boundary_texts,
    keep_texts,
    price,
    upper_bound,
)
from support.inside.schedule import (
    Residuals,
    SegmentCost,
    layered_peak_bytes,
    sequence_from_texts,
    while_running,
)
from support.tiers import examples

ALL = [(0, None), (1, None), (0, "auto"), (1, "auto")]
ALL += [(stage, word) for word in ("none", "boundaries") for stage in (2, 3)]


def ranked(forms, step, groups=1):
    """Layouts of stages of ZeRO and what is recomputed, the one to take first."""
    candidates = [
        Candidate(zero=zero, recompute=recompute, shard_groups=groups if zero else 1)
        for zero, recompute in forms
    ]
    return sorted((price(own, step) for own in candidates), key=lambda own: own.cost)


def random_chain(rng, num):
    """Segments as a job has them: the fewest residuals of each, and the last from its input."""
    chain = []
    for i in range(num):
        last = i == num - 1
        forward = float(rng.integers(1, 9))
        residuals = Residuals(
            name="input" if last else "cut",
            num_bytes=0 if last else int(rng.integers(5, 40)),
            reads_input=last or bool(rng.random() < 0.7),
            forward_seconds=forward,
            backward_seconds=forward * (3 if last else 2),
            backward_temporary_bytes=int(rng.integers(0, 30)),
        )
        size = int(rng.integers(1, 15)) if i else 0
        chain.append(
            SegmentCost(
                name=f"segment {i}",
                input_bytes=size,
                input_gradient_bytes=size,
                forward_seconds=forward,
                residuals=(residuals,),
                forward_temporary_bytes=int(rng.integers(0, 20)),
            )
        )
    return tuple(chain)


def in_one_program(chain):
    """The same where a compiler keeps more of each segment but the last."""
    more = [
        dataclasses.replace(c.residuals[0], num_bytes=c.residuals[0].num_bytes + 9) for c in chain
    ]
    pairs = zip(chain[:-1], more[:-1], strict=True)
    return (*(dataclasses.replace(c, residuals=(r,)) for c, r in pairs), chain[-1])


def instance(seed, groups=1):
    """A model, and devices of about as much memory as it needs or a good deal less."""
    rng = np.random.default_rng(seed)
    chain = random_chain(rng, int(rng.integers(2, 5)))
    own = tuple(int(n) for n in rng.integers(1, 30, len(chain)))
    trained = sum(own)
    model = ModelBytes(
        parameters=trained + int(rng.integers(0, 10)),
        trained=trained,
        num_sums=int(rng.integers(1, 3)),
        optimizer=float(rng.integers(0, 3) * trained),
        bucket=int(rng.integers(1, 2 * trained)),
        keeps_sums=bool(rng.random() < 0.5),
        inputs=int(rng.integers(0, 3)),
        values=10_000,
        chain=lambda: ChainBytes(costs=chain, fused=in_one_program(chain), parameter_bytes=own),
    )
    whole = model.parameters + (model.num_sums + 1) * trained + model.optimizer
    whole += sum(c.residuals[0].num_bytes + c.input_bytes for c in chain)
    num = int(rng.integers(1, 4)) * groups
    devices = [
        ReplicaDevice(
            name=f"device {i}",
            num_microbatches=int(rng.integers(1, 4)),
            memory_bytes=None if rng.random() < 0.05 else int(whole * rng.uniform(0.4, 1.3)),
            speed=float(rng.integers(1, 4)),
        )
        for i in range(num)
    ]
    gather = float(rng.integers(0, 20))
    return model, chain, own, devices, gather


def compositions(total, num):
    """All ways to hand out so many granules, at least one each."""
    for ends in itertools.combinations(range(1, total), num - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *ends, total)))


def cheapest(model, chain, own, devices, gather, forms, groups=1):
    """Extra seconds of the cheapest that fits, over all forms and shares; None: none does."""
    all_copies, found = len(devices), []
    num = all_copies // groups  # that share the state
    kept = sum(c.residuals[0].forward_seconds + c.residuals[0].backward_seconds for c in chain)
    kept -= chain[-1].forward_seconds
    trained, optimizer, sums_of = model.trained, model.optimizer, model.num_sums
    bucket = min(trained, model.bucket)
    travels = [sums_of * bucket * (1 + 2 / all_copies), (sums_of * (1 + 1 / num) + 1) * bucket]
    travels = [travels[0] * (all_copies > 1), travels[1] * (num > 1)]
    totals = trained * model.keeps_sums
    travels = [travels[0] + totals, travels[1] + totals / num]
    frozen = model.parameters - trained
    slowest = max(d.num_microbatches / d.speed for d in devices)
    room = [math.inf if d.memory_bytes is None else d.memory_bytes for d in devices]
    for stage, word in forms:
        best = None
        waiting = [d.num_microbatches if stage > 1 else 1 for d in devices]
        shares = compositions(GRANULES_OF_A_REPLICA * num, num) if stage else [(1,) * num]
        for granules in shares:
            part = [g / sum(granules) if stage else 1.0 for g in granules] * groups
            parameters = [frozen + trained * (p if stage == 3 else 1) for p in part]
            sums = [trained * (p if stage > 1 else model.num_sums) for p in part]
            left = [
                r - n * model.inputs - a - b - optimizer * p
                for r, n, a, b, p in zip(room, waiting, parameters, sums, part, strict=True)
            ]
            if stage < 2 and word is None:
                texts = sequence_from_texts(len(chain), keep_texts(len(chain)))
                own_peak = layered_peak_bytes(
                    texts, in_one_program(chain), 1, while_running(texts, [0] * len(chain))
                )
                needed = [max(trained + own_peak, travels[stage])] * all_copies
                extra = 0.0
            elif stage < 2:
                needed, limit = [travels[stage]] * all_copies, min(left)
                fastest = None
                if limit >= 0 and (best is None or limit > best):
                    best = limit
                    fastest = segment_chains.fastest_seconds(
                        chain, int(limit) if math.isfinite(limit) else 10**6
                    )
                if fastest is None:
                    continue
                extra = (fastest - kept) * slowest
            else:
                texts = (keep_texts if word == "none" else boundary_texts)(len(chain))
                beside = [n * (model.num_sums + (stage == 3)) for n in own]
                texts = sequence_from_texts(len(chain), texts)
                needed = [
                    layered_peak_bytes(
                        texts, chain, d.num_microbatches, while_running(texts, beside)
                    )
                    for d in devices
                ]
                again = sum(c.forward_seconds for c in chain[:-1]) if word == "boundaries" else 0
                extra = again * slowest + gather * (stage == 3)
            if all(n <= has for n, has in zip(needed, left, strict=True)):
                found.append(extra)
                if not (stage < 2 and word):
                    break
    return min(found, default=None)


@pytest.mark.parametrize(("groups", "num"), [(1, examples(9, 120)), (2, examples(7, 40))])
def test_the_choice_is_that_of_brute_force(groups, num):
    num_fit = num_not = num_uneven = 0
    for seed in range(num):
        model, chain, own, devices, gather = instance(seed, groups)
        forms = ALL if len(devices) > groups else [(0, None), (0, "auto")]
        travel = Travel(gather=gather, all_copies=gather)
        step = StepMemory(model=model, devices=tuple(devices), travel=lambda _, own=travel: own)
        found = ranked(forms, step, groups)
        wanted = cheapest(model, chain, own, devices, gather, forms, groups)
        assert found[0].fits == (wanted is not None), seed
        assert len(found) == len(forms)
        if wanted is None:
            num_not += 1
            continue
        num_fit += 1
        num_uneven += bool(found[0].shares)
        # Sequences that make an input again are left out by the planner, see `best_sequence`.
        assert found[0].extra_seconds == pytest.approx(wanted, rel=0.02, abs=1e-9), seed
        for held, device in zip(found[0].held, devices, strict=True):
            assert device.memory_bytes is None or held.total <= device.memory_bytes + 1e-6, seed
    assert num_fit >= num // 4
    assert num_not >= num // 20
    assert num_uneven >= num // 20


def test_what_fits_plainly_stays_plain():
    model, _, _, devices, _ = instance(1)
    large = tuple(
        ReplicaDevice(name=d.name, num_microbatches=1, memory_bytes=10**6) for d in devices
    )
    step = StepMemory(model=model, devices=large)
    assert str(ranked(ALL, step)[0]) == "state not sharded"
    assert upper_bound(Candidate(zero=0), step).fits


@pytest.mark.parametrize("waves", [1, 2, 3])
def test_low_gathers_shorten_gathers_and_no_sums(waves):
    """Parameters that travel in 16 bits halve what is gathered; sums stay as wide as they were."""
    chain = random_chain(np.random.default_rng(3), 3)
    own, seconds = (8, 4, 4), 5.0
    extra = {}
    for name, gathered in (("wide", ()), ("low", tuple(n // 2 for n in own))):
        model = ModelBytes(
            parameters=sum(own),
            trained=sum(own),
            num_sums=2,
            optimizer=0.0,
            bucket=4,
            keeps_sums=False,
            inputs=0,
            values=1,
            chain=lambda gathered=gathered: ChainBytes(
                costs=chain, fused=chain, parameter_bytes=own, gathered_bytes=gathered
            ),
        )
        devices = tuple(ReplicaDevice(name=f"device {i}", num_microbatches=6) for i in range(2))
        for stage in (2, 3):
            step = StepMemory(
                model=model,
                devices=devices,
                waves=waves,
                travel=lambda _: Travel(gather=seconds),
            )
            found = price(Candidate(zero=stage, recompute="none"), step)
            extra[name, stage] = found.extra_seconds
    assert extra["wide", 2] == extra["low", 2] == pytest.approx((waves - 1) * 2 * seconds)
    # A wave gathers for its forward and for its backward; the first wave's are one more than none.
    gathers = 1 + 2 * (waves - 1)
    assert extra["wide", 3] - extra["wide", 2] == pytest.approx(gathers * seconds)
    assert extra["low", 3] - extra["low", 2] == pytest.approx(gathers * seconds / 2)
