"""Predictions against runs that others measured on GH200 nodes: see sailor.py.

The bar is time within 5 % on average and 10 % at worst, memory within 3 %. What is asserted here
is what is reached; where that is less than the bar, the test says why.
"""

import dataclasses
import functools
import json
import statistics

import pytest

from hxla import Setting
from support import sailor, sailor_data

DATA = sailor_data.load()
POSSIBLE = [plan for plan in DATA.plans if sailor.is_possible(DATA, plan)]


@functools.cache
def predicted(plan, **choices):
    return sailor.predict_time(DATA, plan, **choices)


def time_error(plan, **choices):
    return predicted(plan, **choices).step_seconds / plan.step_seconds - 1


def memory_error(plan, memory):
    return memory.total_bytes / plan.peak_bytes - 1


def was_set(plan):
    """Whether the forwards that the plan is predicted from are no measurements."""
    setting = Setting(sailor_data.KIND, plan.microbatch_size, sailor_data.TENSOR)
    return sailor.was_set(DATA.profiles[plan.model], setting)


def memory_errors(plans, rule):
    memories = [sailor.fullest(sailor.predict_memory(DATA, plan, rule)) for plan in plans]
    return [memory_error(plan, m) for plan, m in zip(plans, memories, strict=True)]


needs_shared = pytest.mark.skipif(
    not sailor_data.SHARED.exists(), reason=f"{sailor_data.SHARED} is not there"
)


@functools.cache
def whole_data():
    return sailor_data.read(sailor_data.SHARED)


@needs_shared
def test_the_shipped_figures_are_the_repositorys():
    shipped = json.loads(sailor_data.SHIPPED.read_text())
    assert shipped == sailor_data.extract(sailor_data.SHARED)


@pytest.mark.slow
@needs_shared
def test_predictions_from_all_the_repositorys_data_are_the_same():
    whole = whole_data()
    assert whole.plans == DATA.plans
    for plan in whole.plans:
        assert sailor.predict_time(whole, plan) == predicted(plan)
        assert sailor.predict_memory(whole, plan) == sailor.predict_memory(DATA, plan)


@needs_shared
def test_a_mixed_plan_lies_between_its_plain_ones():
    """Two stages of A100s and V100s; half of the V100 replicas split 2 ways instead of 4."""
    whole = whole_data()

    def plan(*stages):
        return sailor_data.read_plan(
            {
                "pipeline_list": [
                    {
                        "layers_per_stage": [list(range(13)), list(range(13, 26))],
                        "tmp_per_stage": [
                            [[[[kind, 4, "us-central1-a"]], tensor] for kind, tensor in stage]
                            for stage in stages
                        ],
                    }
                ],
                "mbs": 2,
                "gbs": 64,
                "real": 1.0,
                "red_grads": 0.1,
                "max_mem": 1.0,
            },
            "OPT-350",
        )

    fast, slow = [("A100-40", 4)] * 2, [("V100-16", 4)] * 2
    seconds = [
        sailor.predict_time(whole, plan(*stages)).step_seconds
        for stages in ((fast, fast), (fast, slow), (slow, slow), (fast, [slow[0], ("V100-16", 2)]))
    ]
    assert seconds[0] < seconds[1] < seconds[2]
    assert seconds[1] < seconds[3]
    narrow = sailor.predict_memory(whole, plan(fast, [slow[0], ("V100-16", 2)]))
    wide = sailor.predict_memory(whole, plan(fast, slow))
    assert narrow[0] == wide[0]
    assert narrow[1].parameter_bytes > 1.9 * wide[1].parameter_bytes


def test_there_are_as_many_plans_as_were_measured():
    assert len(DATA.plans) == 19


def test_step_times_are_within_four_percent_on_average():
    assert statistics.mean(abs(time_error(plan)) for plan in DATA.plans) < 0.041


def test_step_times_are_within_five_percent_where_the_profile_was_measured():
    plans = [plan for plan in DATA.plans if not was_set(plan)]
    assert len(plans) == 13
    assert statistics.mean(abs(time_error(plan)) for plan in plans) < 0.018
    assert max(abs(time_error(plan)) for plan in plans) < 0.054


def test_three_step_times_are_off_by_more_than_ten_percent():
    # All three are one stage at microbatches of 1 and 4, where the host sets the pace and the
    # profile's forwards are 1.5, 1.7 and 1.8 ms a layer sharp. Two ran 12 and 14 % faster than the
    # sum of their layers, one 14 % slower, so no constant could mend both.
    off = [plan for plan in DATA.plans if abs(time_error(plan)) > 0.1]
    assert {(plan.num_replicas, len(plan.cuts)) for plan in off} == {(1, 1), (4, 1)}
    assert len(off) == 3
    assert all(was_set(plan) for plan in off)
    assert max(abs(time_error(plan)) for plan in off) < 0.14


def test_the_slow_ones_file_contradicts_itself():
    """What its reduction leaves of the step is less than its backwards take."""
    (slow,) = (plan for plan in DATA.plans if time_error(plan) < -0.1)
    profile = DATA.profiles[slow.model]
    setting = Setting(sailor_data.KIND, slow.microbatch_size, sailor_data.TENSOR)
    backward = sum(time.backward for time in profile.times[setting])
    assert slow.step_seconds - slow.reduction_seconds < 0.3 * slow.num_microbatches * backward


def test_transfers_that_block_explain_the_pipelines():
    """Without them pipelines of 4 stages are predicted a sixth too fast."""
    plan = next(p for p in DATA.plans if len(p.cuts) == 4 and p.microbatch_size == 8)
    assert abs(time_error(plan)) < 0.05
    # The usual estimate: the slowest stage once per microbatch, the others once.
    times = [s.compute_seconds / plan.num_microbatches for s in predicted(plan).stages[0]]
    estimate = (plan.num_microbatches - 1) * max(times) + sum(times)
    assert estimate / plan.step_seconds - 1 < -0.15


def pipelines(model):
    """Of a model, where the profile was measured."""
    return [p for p in DATA.plans if p.model == model and len(p.cuts) > 1 and not was_set(p)]


@pytest.mark.parametrize("model", DATA.profiles)
def test_pipelines_of_either_model_need_what_rebuilding_takes_the_host(model):
    plans = pipelines(model)
    rates = (None, 12e9, 24e9, 1e15)
    assumed, slow, fast, none = (
        statistics.mean(abs(time_error(plan, host_bytes_per_second=r)) for plan in plans)
        for r in rates
    )
    assert assumed < none
    # The figure is assumed, and the plans do not tell it closely: others do about as well.
    assert max(slow, fast) < 0.045


def test_every_measured_reduction_says_that_these_cards_are_shared_by_both_directions():
    # One is given as nine tenths of its step, which holds the computation that it waited for.
    plans = [
        p for p in DATA.plans if p.num_replicas > 1 and p.reduction_seconds < p.step_seconds / 2
    ]
    assert len(plans) == 13
    for plan in plans:
        shared, apart = (
            max(s.reduction_seconds for s in predicted(plan, not_duplex=kinds).stages[0])
            for kinds in (sailor.NOT_DUPLEX, frozenset())
        )
        assert shared == pytest.approx(2 * apart)
        assert abs(shared - plan.reduction_seconds) < abs(apart - plan.reduction_seconds)


def test_all_but_the_microbatches_of_a_single_replica_takes_what_its_update_does():
    """A step of 32 microbatches less 31 of a step of one leaves less than 3 ms for all else."""
    one, many = (p for p in DATA.plans if p.num_replicas == len(p.cuts) == 1)
    assert (one.num_microbatches, many.num_microbatches) == (1, 32)
    microbatch = (many.step_seconds - one.step_seconds) / 31
    profile = DATA.profiles[one.model]
    setting = Setting(sailor_data.KIND, one.microbatch_size, sailor_data.TENSOR)
    update = sum(time.update for time in profile.times[setting])
    assert 0 < one.step_seconds - microbatch - update < 2e-3


def test_one_measured_peak_is_less_than_its_state_and_stash():
    (odd,) = set(DATA.plans) - set(POSSIBLE)
    assert (odd.model, odd.num_replicas, len(odd.cuts)) == ("GPT-Neo-2.7", 2, 4)


def test_context_and_allocator_come_from_another_runtimes_runs():
    assert len(sailor.OTHER_RUNS) == 32
    assert sailor.RULE.context_bytes == 3883 * 2**20
    assert sailor.RULE.allocator_share == pytest.approx(0.053, abs=0.0005)


def test_peaks_are_within_three_percent_but_for_one():
    errors = dict(zip(POSSIBLE, memory_errors(POSSIBLE, sailor.RULE), strict=True))
    assert statistics.mean(map(abs, errors.values())) < 0.015
    (off,) = (plan for plan, e in errors.items() if abs(e) > 0.03)
    # Under the other runtime the same plan had 982 MiB less of context than is assumed for all.
    # That is 8 % of its peak, so that no one context brings it and the others within 3 %.
    assert (off.model, off.num_replicas, len(off.cuts)) == ("OPT-350", 2, 1)
    assert 0.03 < errors[off] < 0.05


def test_a_context_seen_on_average_is_too_small_for_the_fullest_device():
    # That the largest counts, and not the mean, is a choice that these plans confirm.
    mean = statistics.mean(run.used_bytes - run.reserved_bytes for run in sailor.OTHER_RUNS)
    rule = dataclasses.replace(sailor.RULE, context_bytes=mean)
    errors = memory_errors(POSSIBLE, rule)
    assert max(errors) < 0
    assert min(errors) < -0.14


def test_the_temporaries_of_a_traced_layer_are_too_many_beside_the_largest_context():
    # A layer's backward holds 1.9 stashes where the rule has the least, 1.
    errors = memory_errors(POSSIBLE, dataclasses.replace(sailor.RULE, workspace_layers=1.9))
    assert 0.025 < statistics.mean(map(abs, errors)) < 0.03
    assert min(errors) > -0.02
    assert max(errors) < 0.082


def test_the_repositorys_own_context_is_too_large_for_small_peaks():
    errors = memory_errors(POSSIBLE, sailor.THEIRS)
    assert 0.035 < statistics.mean(map(abs, errors)) < 0.04
    assert 0.1 < max(errors) < 0.105


@pytest.mark.parametrize("plan", DATA.plans, ids=lambda plan: plan.name)
def test_no_plan_is_said_to_fit_where_it_did_not(plan):
    stages = sailor.predict_memory(DATA, plan)
    too_small = plan.peak_bytes - 1
    assert not all(memory.fits(too_small) for memory in stages)
    assert all(memory.fits(96e9) for memory in stages)
