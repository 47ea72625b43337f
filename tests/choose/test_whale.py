import numpy as np
import pytest

from support import balanced_counts, chains, whale
from support.inside.choose import _best_pipeline as _stages
from support.inside.core import _errors
from support.tiers import examples


def test_load_is_proportional_to_speed_where_memory_allows():
    # 3 : 1 : 1, as in section 3.3.1.
    assert whale.whale_counts(10, [1, 3, 3], [1] * 3, [0] * 3, [100] * 3) == (6, 2, 2)


def test_load_moves_from_the_peak_to_the_valley_of_computing():
    # Shares are 6, 2, 2. Device 0 holds 4: one each goes to the less loaded of the others.
    assert whale.whale_counts(10, [1, 3, 3], [1] * 3, [0] * 3, [4, 100, 100]) == (4, 3, 3)
    # A valley that is full hands over to the next.
    assert whale.whale_counts(10, [1, 3, 3], [1] * 3, [0] * 3, [4, 2, 100]) == (4, 2, 4)


def test_what_does_not_fit_is_named_with_its_missing_bytes():
    with pytest.raises(_errors.PlanError, match="device 0 lacks 2 bytes"):
        whale.whale_counts(10, [1, 3, 3], [1] * 3, [0] * 3, [4, 2, 2])


def test_hostile_input_is_refused_with_every_fault():
    with pytest.raises(_errors.PlanError) as error:
        whale.whale_counts(0, [1, float("nan")], [1, 1], [0], [0, 1])
    for part in (
        "num_microbatches is 0",
        "seconds[1] is nan",
        "limit_bytes[0] is 0",
        "fixed_bytes",
    ):
        assert part in str(error.value)
    with pytest.raises(_errors.PlanError, match="there are no devices"):
        whale.whale_counts(1, [], [], [], [])


def test_whale_is_never_faster_than_the_exact_counts_and_sometimes_slower():
    rng = np.random.default_rng(0)
    slower = 0
    for _ in range(300):
        num, devices = int(rng.integers(1, 30)), int(rng.integers(1, 9))
        seconds = rng.uniform(0.5, 3, devices).tolist()
        size, fixed = rng.integers(1, 4, devices), rng.integers(0, 5, devices)
        limits = (fixed + size * rng.integers(0, 12, devices) + 1).tolist()
        try:
            counts = whale.whale_counts(num, seconds, size, fixed, limits)
        except _errors.PlanError:
            continue
        table = [[c * s for c in range(num + 1)] for s in seconds]
        memory = [[f + c * b for c in range(num + 1)] for b, f in zip(size, fixed, strict=True)]
        best = balanced_counts.balanced_counts(num, table, memory, limits)
        theirs, exact = (max(table[d][c] for d, c in enumerate(x)) for x in (counts, best))
        assert sum(counts) == num
        assert all(memory[d][c] <= limits[d] for d, c in enumerate(counts))
        assert theirs >= exact
        slower += theirs > exact * 1.001
    assert slower > 30


def test_larger_memory_comes_first_and_the_exact_pipeline_is_never_slower():
    rng = np.random.default_rng(1)
    fitting, refused, num = 0, 0, examples(50, 200)
    for _ in range(num):
        chain = chains.random_chain(rng, max_devices=6, max_layers=10, max_microbatches=16)
        try:
            placed = whale.whale_staging(chain)
        except _errors.PlanError as error:
            refused += "lacks" in str(error)
            continue
        fitting += 1
        memory = [chain.groups[k].memory_bytes for k in placed.replicas[0].groups]
        assert memory == sorted(memory, reverse=True)
        assert not chains.faults(chain, placed)
        best = _stages.best_pipeline(chain).step_seconds
        assert best <= placed.step_seconds * (1 + 1e-9)
    assert fitting > num // 4
    assert fitting + refused == num
