import dataclasses

import numpy as np
import pytest
import scipy.optimize

from support import chains
from support.inside.choose import _best_pipeline as _stages
from support.inside.choose import _search, fractional_packing
from support.inside.core import _errors
from support.tiers import examples


def gpt(*, devices, memory, speeds, microbatches, parameters, stash, layers=96):
    """Embedding, equal layers, head. Kinds differ in speed, and in the head's share of it."""
    num_kinds = len(devices)
    groups = []
    for k, (num, size, speed) in enumerate(zip(devices, memory, speeds, strict=True)):
        shape = np.array([0.3] + [1.0] * layers + [1.5 * (1 + 0.25 * k)])
        groups.append(
            chains.Group(
                kind="ABC"[k],
                num_devices=num,
                memory_bytes=size * 1e9,
                forward_seconds=tuple(shape * 0.02 / 3 / speed),
                backward_seconds=tuple(shape * 0.04 / 3 / speed),
                update_seconds=tuple(np.array([0.5] + [1.0] * layers + [0.5]) * 0.0005 / speed),
                parameter_bytes=tuple(np.array([0.35] + [1.0] * layers + [0.35]) * parameters),
                stash_bytes=tuple(np.array([0.1] + [1.0] * layers + [0.3]) * stash),
            )
        )
    return chains.Chain(
        groups=tuple(groups),
        num_microbatches=microbatches,
        output_bytes=(2.0 * 2560 * 2048,) * (layers + 2),
        state_factor=8.0,
        workspace_bytes=2e9,
        send_seconds=tuple(
            tuple(1e-11 if a == b else 4e-11 for b in range(num_kinds)) for a in range(num_kinds)
        ),
        send_latency_seconds=((2e-5,) * num_kinds,) * num_kinds,
        reduce_seconds=(5e-11,) * num_kinds,
    )


def test_plans_are_the_best_of_an_exhaustive_search():
    """Instances of the whole space; of every second one sums take long."""
    ratios, seeds = [], sorted({*range(examples(15, 500)), 480})
    for seed in seeds:  # in 480 the devices' meeting takes longer than their sums
        rng = np.random.default_rng(1000 + seed)
        chain = chains.random_chain(
            rng, max_devices=6 if seed % 10 == 0 else 4, max_layers=4, max_microbatches=6
        )
        if seed % 2:
            rates = rng.uniform(0, 0.3, len(chain.groups))
            chain = dataclasses.replace(chain, reduce_seconds=tuple(rates))
            if chain.rings:
                inside = tuple(rates * rng.uniform(0, 0.5, len(rates)))
                rings = dataclasses.replace(chain.rings, inside_seconds=inside)
                chain = dataclasses.replace(chain, rings=rings)
        if seed % 3 == 0:  # as with measured sums, which have no rings
            chain = dataclasses.replace(chain, rings=None, meeting_seconds=rng.uniform(0, 5))
        ratios += above_the_best(chain, seed)
    assert len(ratios) > len(seeds) // 2
    assert np.mean(np.array(ratios) < 1 + 1e-6) > 0.95
    assert np.mean(ratios) < 1.01


def above_the_best(chain, seed):
    """The step of the plan found over that of the best; nothing if no plan fits."""
    best = chains.brute_search(chain)
    if best is None:
        with pytest.raises(_errors.NothingFitsError):
            _search.search({"only": chain})
        return []
    found = _search.search({"only": chain})
    plan = found.ranked[0].staging
    assert not chains.faults(chain, plan), seed
    assert found.bound_seconds <= best * (1 + 1e-9), seed
    assert plan.step_seconds >= best * (1 - 1e-9), seed
    return [plan.step_seconds / best]


def short_chain(**changes):
    """Two layers of a second each on two like devices, whose boundary takes five to cross."""
    group = chains.Group(
        kind="A",
        num_devices=2,
        memory_bytes=100.0,
        forward_seconds=(0.4, 0.4),
        backward_seconds=(0.6, 0.6),
        update_seconds=(0.0, 0.0),
        parameter_bytes=(1.0, 1.0),
        stash_bytes=(4.0, 4.0),
    )
    own = {"num_microbatches": 8, "send_latency_seconds": ((2.5,),)} | changes
    group = dataclasses.replace(group, memory_bytes=own.pop("memory_bytes", 100.0))
    return chains.Chain(groups=(group,), output_bytes=(0.0, 0.0), **own)


def test_a_layer_that_is_dear_to_cut_off_stays_in_a_longer_stage():
    assert above_the_best(short_chain(), 0) == [pytest.approx(1)]


def test_a_pipeline_of_one_microbatch_holds_one_on_every_stage():
    """A stage's state and one microbatch fill its device."""
    chain = short_chain(num_microbatches=1, memory_bytes=8.0)
    assert _search.search({"only": chain}).ranked[0].staging.cuts == (0, 1)
    with pytest.raises(_errors.NothingFitsError):
        _search.search({"only": dataclasses.replace(chain, num_microbatches=2)})


def test_two_devices_with_no_twins_meet_over_the_link_between_them():
    """Nothing is sent between devices of a kind that has one."""
    group = chains.Group(
        kind="A",
        num_devices=1,
        memory_bytes=8.0,
        forward_seconds=(0.4, 0.4),
        backward_seconds=(0.6, 0.6),
        update_seconds=(0.0, 0.0),
        parameter_bytes=(1.0, 1.0),
        stash_bytes=(0.0, 0.0),
    )
    chain = chains.Chain(
        groups=(group, dataclasses.replace(group, kind="B", memory_bytes=4.0)),
        num_microbatches=8,
        output_bytes=(0.0, 0.0),
        send_latency_seconds=((0.0, 0.1), (0.1, 0.0)),
    )
    assert above_the_best(chain, 0) == [pytest.approx(1)]


def test_devices_that_are_too_many_for_exact_packing_get_good_plans(monkeypatch):
    monkeypatch.setattr("hxla._src.choose.packing._SMALL", 0)
    monkeypatch.setattr(_search, "_SMALL_LAYERS", 0)
    ratios, num = [], examples(8, 60)
    for seed in range(num):
        chain = chains.random_chain(
            np.random.default_rng(5000 + seed), max_devices=4, max_layers=4, max_microbatches=6
        )
        ratios += above_the_best(chain, seed)
    assert len(ratios) > 0.4 * num
    assert np.mean(ratios) < 1.05


MIXED = {
    "devices": (256, 256, 256),
    "memory": (80, 40, 32),
    "speeds": (1.0, 0.6, 0.35),
    "microbatches": 4096,
}
LARGE = {
    "deep": MIXED | {"parameters": 2.7e9 / 96 * 2, "stash": 2560 * 2048 * 4.0},
    "tight": MIXED | {"parameters": 13e9 / 96 * 2, "stash": 5120 * 2048 * 16.0},
    "shallow": MIXED | {"parameters": 1.3e9 / 96 * 2, "stash": 1024 * 2048 * 2.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_768_devices_of_three_kinds_are_busy_most_of_a_step(name):
    chain = gpt(**LARGE[name])
    found = _search.search({"only": chain})
    fastest = found.ranked[0].staging
    assert fastest.step_seconds < 1.25 * found.bound_seconds
    assert not chains.faults(chain, fastest)
    # A model that fits one device of each kind needs no stages.
    assert (len(fastest.cuts) == 1) == (name == "shallow")


def test_the_same_input_gives_the_same_plans():
    rng = np.random.default_rng(5)
    chain = chains.random_chain(rng, max_devices=6, max_layers=5, max_microbatches=12, tight=False)
    assert _search.search({"a": chain}) == _search.search({"a": chain})


def slower(chain, factor):
    """A chain whose forwards and backwards take so many times as long."""
    groups = tuple(
        dataclasses.replace(
            own,
            forward_seconds=tuple(factor * x for x in own.forward_seconds),
            backward_seconds=tuple(factor * x for x in own.backward_seconds),
        )
        for own in chain.groups
    )
    return dataclasses.replace(chain, groups=groups)


def test_alternatives_are_ranked_together_and_one_that_does_not_fit_is_said():
    chain = gpt(
        devices=(2, 2),
        memory=(80, 40),
        speeds=(1.0, 0.5),
        microbatches=32,
        parameters=1e8,
        stash=1e7,
        layers=8,
    )
    double = dataclasses.replace(slower(chain, 1.6), num_microbatches=16)
    small = dataclasses.replace(
        chain, groups=tuple(dataclasses.replace(g, memory_bytes=2.1e9) for g in chain.groups)
    )
    found = _search.search({"single": chain, "double": double, "small": small})
    assert found.ranked[0].alternative == "double"
    assert list(found.infeasible) == ["small"]
    assert "lacks" in found.infeasible["small"]
    steps = [f.staging.step_seconds for f in found.ranked]
    assert steps == sorted(steps)
    assert found.bound_seconds <= steps[0]


def test_many_devices_that_are_too_small_are_said_to_be_so_with_the_missing_bytes():
    chain = gpt(**{**LARGE["deep"], "memory": (2.2, 2.1, 2.1)})
    with pytest.raises(_errors.PlanError, match=r"stage \d+ of \d+ .* lacks [\d,]+ bytes"):
        _search.search({"only": chain})


def test_one_replica_is_never_faster_than_what_the_search_finds():
    rng = np.random.default_rng(6)
    for _ in range(examples(3, 20)):
        chain = chains.random_chain(
            rng, max_devices=5, max_layers=6, max_microbatches=8, tight=False
        )
        found = _search.search({"only": chain}).ranked[0].staging
        assert found.step_seconds <= _stages.best_pipeline(chain).step_seconds * 1.02


def test_a_search_for_nothing_is_refused():
    with pytest.raises(_errors.PlanError, match="nothing to search"):
        _search.search({})


def test_programmes_of_few_rows_are_solved_as_by_a_general_solver():
    rng = np.random.default_rng(7)
    for _ in range(60):
        kinds, columns, stages = rng.integers(1, [4, 300, 17])
        used = rng.multinomial(stages, [1 / kinds] * kinds, size=columns)
        value = rng.integers(0, 50, columns).astype(float)
        available = rng.integers(0, 40, kinds).tolist()
        counts, upper = fractional_packing(used, value, available)
        rows = np.vstack([used.T, np.ones(columns)])
        right = [*available, sum(available) // stages]
        best = -scipy.optimize.linprog(-value, A_ub=rows, b_ub=right).fun
        assert value @ counts == pytest.approx(best, abs=1e-6)
        assert upper == pytest.approx(best, abs=1e-6)
        assert (rows @ counts <= np.array(right) + 1e-6).all()
