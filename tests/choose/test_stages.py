import dataclasses

import numpy as np
import pytest

from support import chains, whale
from support.inside.choose import Chain, Group
from support.inside.choose import _best_pipeline as _stages
from support.inside.choose import _chain_tables as _pipeline
from support.inside.core import _errors
from support.tiers import examples


def test_the_best_pipeline_is_that_of_exhaustive_search():
    infeasible, num = 0, examples(24, 250)
    for seed in range(num):
        # The largest are few: exhaustion takes seconds for each.
        large = seed % 5 == 4 and num > 100
        chain = chains.random_chain(
            np.random.default_rng(seed),
            max_devices=8 if large else 6,
            max_layers=16 if large else 10,
            max_microbatches=24,
        )
        best = chains.brute_pipeline(chain)
        if best is None:
            infeasible += 1
            with pytest.raises(_errors.PlanError, match=r"stage \d+ of \d+ .* lacks [\d,]+ bytes"):
                _stages.best_pipeline(chain)
            continue
        staging = _stages.best_pipeline(chain)
        assert staging.step_seconds == pytest.approx(best, rel=1e-9), seed
        assert not chains.faults(chain, staging), seed
    assert 0.1 * num < infeasible < 0.9 * num


def replay(forward, backward, trips, m, busy_ends):
    """Event by event: 1F1B with transfers that hold up both ends, or only the data."""
    num = len(forward)
    orders = []
    for i in range(num):
        warm = min(num - i - 1, m)
        order = [("F", j) for j in range(warm)]
        for j in range(m - warm):
            order += [("F", warm + j), ("B", j)]
        orders.append(order + [("B", j) for j in range(m - warm, m)])
    done, clock, at = {}, [0.0] * num, [0] * num
    ends = [0.0, *(t / 2 for t in trips), 0.0]  # one way
    while any(a < len(o) for a, o in zip(at, orders, strict=True)):
        moved = False
        for i in range(num):
            while at[i] < len(orders[i]):
                what, j = orders[i][at[i]]
                if what == "F":
                    need = ("F", i - 1, j) if i else None
                    link = ends[i]
                else:
                    need = ("B", i + 1, j) if i + 1 < num else ("F", i, j)
                    link = ends[i + 1]
                if need is not None and need not in done:
                    break
                ready = done.get(need, 0.0)
                own = forward[i] if what == "F" else backward[i]
                if busy_ends:
                    # Receive, compute, send: the sender's send and the receiver's receive coincide
                    # where the receiver waits.
                    send = ends[i + 1] if what == "F" else ends[i]
                    start = max(clock[i], ready - link)
                    clock[i] = start + link + own + send
                    done[what, i, j] = clock[i]
                else:
                    clock[i] = max(clock[i], ready + link) + own
                    done[what, i, j] = clock[i]
                at[i] += 1
                moved = True
        assert moved, "deadlock"
    return max(clock)


def predicted(forward, backward, trips, m):
    num = len(forward)
    group = Group(
        kind="x",
        num_devices=num,
        memory_bytes=1.0,
        forward_seconds=tuple(forward),
        backward_seconds=tuple(backward),
        update_seconds=(0.0,) * num,
        parameter_bytes=(0.0,) * num,
        stash_bytes=(0.0,) * num,
    )
    chain = Chain(
        groups=(group,),
        num_microbatches=m,
        output_bytes=(*trips, 0.0),
        send_seconds=((0.5,),),
    )
    fill, period = _pipeline.fill_and_period(_pipeline.tables(chain), tuple(range(num)), (0,) * num)
    return fill + (m - 1) * period, period


@pytest.mark.parametrize("busy_ends", [False, True])
def test_a_replayed_1f1b_never_takes_longer_than_predicted(busy_ends):
    rng = np.random.default_rng(2)
    nearest = 0.0
    for _ in range(examples(150, 600)):
        num, m = int(rng.integers(1, 8)), int(rng.integers(1, 30))
        time = rng.uniform(0.5, 2.0, num)
        trips = np.zeros(num - 1)
        if num > 1 and rng.random() < 0.5:
            trips[:] = rng.uniform(0, 0.5)
            if busy_ends:  # the same share of forward only where the ends are alike
                trips[:] = 0.0
        seconds, _ = predicted(time / 3, time * 2 / 3, trips, m)
        replayed = replay(time / 3, time * 2 / 3, trips, m, busy_ends)
        assert replayed <= seconds * (1 + 1e-9)
        # What it leaves is part of one fill, at most.
        assert replayed >= seconds - time.sum() - 4 * m * trips.sum() - 1e-9
        nearest = max(nearest, replayed / seconds)
    assert nearest > 0.999


def test_unlike_shares_of_forward_are_late_by_no_more_than_said():
    rng = np.random.default_rng(3)
    late = 0
    for _ in range(examples(150, 600)):
        num, m = int(rng.integers(1, 8)), int(rng.integers(1, 30))
        forward, backward = rng.uniform(0.1, 2.0, (2, num))
        trips = rng.uniform(0, 0.3, num - 1)
        seconds, period = predicted(forward, backward, trips, m)
        ends = np.array([0.0, *trips / 2, 0.0])
        both = ends[:-1] + ends[1:]
        allowance = max(0, num - 2) * max(
            0.0, (forward + both).max() + (backward + both).max() - period
        )
        for busy_ends in (False, True):
            replayed = replay(forward, backward, trips, m, busy_ends)
            assert replayed <= seconds + allowance + 1e-9
            late += replayed > seconds * (1 + 1e-9)
    assert late > 0  # the allowance is needed


def chain_of(**changes):
    group = Group(
        kind="a100",
        num_devices=2,
        memory_bytes=100.0,
        forward_seconds=(1.0, 1.0),
        backward_seconds=(2.0, 2.0),
        update_seconds=(0.0, 0.0),
        parameter_bytes=(10.0, 10.0),
        stash_bytes=(5.0, 5.0),
    )
    inside = {k: v for k, v in changes.items() if hasattr(group, k)}
    outside = {k: v for k, v in changes.items() if k not in inside}
    return dataclasses.replace(
        Chain(
            groups=(dataclasses.replace(group, **inside),),
            num_microbatches=4,
            output_bytes=(1.0, 1.0),
        ),
        **outside,
    )


def test_earlier_stages_hold_more_microbatches():
    # 40 of state and 5 or 10 of stash: one device would need 90, two 50 and 45.
    assert whale.stage_bytes(chain_of(), (0, 1), (0, 0), 4) == (50.0, 45.0)
    assert _stages.best_pipeline(chain_of(memory_bytes=50.0)).cuts == (0, 1)
    with pytest.raises(_errors.PlanError, match=r"stage 0 of 2 \(layers 0 to 0 on a100 .* 1 bytes"):
        _stages.best_pipeline(chain_of(memory_bytes=49.0))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"forward_seconds": (1.0, -1.0)}, "a100: forward_seconds[1] is -1.0"),
        ({"backward_seconds": (float("nan"), 1.0)}, "a100: backward_seconds[0] is nan"),
        ({"update_seconds": (float("inf"), 1.0)}, "a100: update_seconds[0] is inf"),
        ({"stash_bytes": (1.0,)}, "a100: stash_bytes has 1 values for 2 layers"),
        ({"memory_bytes": 0.0}, "a100: memory_bytes is 0.0"),
        ({"num_devices": 0}, "there are no devices"),
        ({"groups": ()}, "there are no devices"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"send_seconds": ((1.0, 2.0),)}, "send_seconds[0] has 2 values for 1 groups"),
        ({"state_factor": float("nan")}, "state_factor[0] is nan"),
    ],
)
def test_a_hostile_chain_is_refused(changes, part):
    with pytest.raises(_errors.PlanError) as error:
        _stages.best_pipeline(chain_of(**changes))
    assert part in str(error.value)


def test_all_faults_are_listed_at_once():
    with pytest.raises(_errors.PlanError) as error:
        _stages.best_pipeline(chain_of(num_microbatches=0, memory_bytes=-1.0, stash_bytes=()))
    assert str(error.value).count("\n  ") == 3
