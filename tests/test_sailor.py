"""Predictions against runs that others measured on GH200 nodes: see sailor.py.

The bar is time within 5 % on average and 10 % at worst, memory within 3 %. What is asserted here
is what is reached; where that is less than the bar, the test says why.
"""

import json
import statistics

import pytest
import sailor
import sailor_data

from hxla._profile._values import Setting

DATA = sailor_data.load()
POSSIBLE = [plan for plan in DATA.plans if sailor.is_possible(DATA, plan)]


def time_error(plan, **choices):
    return sailor.predict_time(DATA, plan, **choices).step_seconds / plan.step_seconds - 1


def memory_error(plan, memory):
    return memory.total_bytes / plan.peak_bytes - 1


def host_bound(plan):
    """Whether an example takes over 5 % longer than in twice the microbatch."""
    setting = Setting(sailor_data.KIND, plan.microbatch_size, sailor_data.TENSOR)
    excess = sailor.excess_per_example(DATA.profiles[plan.model], setting)
    assert excess is not None
    return excess > 0.05


needs_shared = pytest.mark.skipif(
    not sailor_data.SHARED.exists(), reason=f"{sailor_data.SHARED} is not there"
)


@needs_shared
def test_the_shipped_figures_are_the_repositorys():
    shipped = json.loads(sailor_data.SHIPPED.read_text())
    assert shipped == sailor_data.extract(sailor_data.SHARED)


@needs_shared
def test_predictions_from_all_the_repositorys_data_are_the_same():
    whole = sailor_data.read(sailor_data.SHARED)
    assert whole.plans == DATA.plans
    for plan in whole.plans:
        assert sailor.predict_time(whole, plan) == sailor.predict_time(DATA, plan)
        assert sailor.predict_memory(whole, plan) == sailor.predict_memory(DATA, plan)


@needs_shared
def test_a_mixed_plan_lies_between_its_plain_ones():
    """Two stages of A100s and V100s; half of the V100 replicas split 2 ways instead of 4."""
    whole = sailor_data.read(sailor_data.SHARED)

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


def test_step_times_are_within_five_percent_on_average():
    assert statistics.mean(abs(time_error(plan)) for plan in DATA.plans) < 0.05


def test_step_times_are_within_five_percent_where_the_device_is_the_limit():
    plans = [plan for plan in DATA.plans if not host_bound(plan)]
    assert len(plans) == 11
    assert max(abs(time_error(plan)) for plan in plans) < 0.05


def test_three_step_times_are_off_by_more_than_ten_percent():
    # All three are one stage at microbatches of 1 and 4, whose profile the host set: forwards there
    # are 1.5 to 1.8 ms a layer whatever the microbatch.
    # Two ran 12 % faster than the sum of their own layers' profile, one 14 % slower, so no constant
    # could mend both.
    off = [plan for plan in DATA.plans if abs(time_error(plan)) > 0.1]
    assert {(plan.num_replicas, len(plan.cuts)) for plan in off} == {(1, 1), (4, 1)}
    assert len(off) == 3
    assert all(host_bound(plan) for plan in off)
    assert max(abs(time_error(plan)) for plan in off) < 0.14


def test_transfers_that_block_explain_the_pipelines():
    """Without them pipelines of 4 stages are predicted a sixth too fast."""
    plan = next(p for p in DATA.plans if len(p.cuts) == 4 and p.microbatch_size == 8)
    assert abs(time_error(plan)) < 0.05
    # The usual estimate: the slowest stage once per microbatch, the others once.
    times = [
        s.compute_seconds / plan.num_microbatches for s in sailor.predict_time(DATA, plan).stages[0]
    ]
    estimate = (plan.num_microbatches - 1) * max(times) + sum(times)
    assert estimate / plan.step_seconds - 1 < -0.15


@pytest.mark.parametrize("model", DATA.profiles)
def test_the_runs_of_either_model_say_that_a_transfer_costs_the_whole_activation(model):
    plans = [plan for plan in DATA.plans if plan.model == model]
    whole, parts = (
        statistics.mean(abs(time_error(plan, whole=choice)) for plan in plans)
        for choice in (True, False)
    )
    assert whole < 0.65 * parts


def test_every_measured_reduction_says_that_cards_are_shared_by_both_directions():
    # One is given as nine tenths of its step, which holds the computation that it waited for.
    plans = [
        p for p in DATA.plans if p.num_replicas > 1 and p.reduction_seconds < p.step_seconds / 2
    ]
    assert len(plans) == 13
    for plan in plans:
        shared, apart = (
            max(s.reduction_seconds for s in sailor.predict_time(DATA, plan, duplex=d).stages[0])
            for d in (False, True)
        )
        assert abs(shared - plan.reduction_seconds) < abs(apart - plan.reduction_seconds)


def test_one_measured_peak_is_less_than_its_state_and_stash():
    (odd,) = set(DATA.plans) - set(POSSIBLE)
    assert (odd.model, odd.num_replicas, len(odd.cuts)) == ("GPT-Neo-2.7", 2, 4)


def test_peaks_with_published_constants_are_within_four_percent_on_average():
    # The published context is too large where little else is there, by 8 to 11 % of 7 to 13 GB.
    errors = [
        memory_error(plan, sailor.fullest(sailor.predict_memory(DATA, plan))) for plan in POSSIBLE
    ]
    assert statistics.mean(map(abs, errors)) < 0.042
    assert min(errors) > -0.03
    assert max(errors) < 0.12
    large = [e for e, plan in zip(errors, POSSIBLE, strict=True) if plan.peak_bytes > 15e9]
    assert len(large) == 13
    assert max(map(abs, large)) < 0.035


def test_peaks_are_within_three_percent_once_the_machine_is_known():
    """Each plan predicted with the context, communicators and workspace of all the others."""
    errors = [memory_error(plan, memory) for plan, memory in sailor.leave_one_out(DATA).items()]
    assert statistics.mean(map(abs, errors)) < 0.015
    # Two of the small ones, of 10 and 13 GB, are off by 430 MB.
    assert sum(abs(e) > 0.03 for e in errors) == 2
    assert max(map(abs, errors)) < 0.045


def test_a_machine_known_from_one_model_predicts_the_other():
    errors = {}
    for model in DATA.profiles:
        rule = sailor.fitted(DATA, [plan for plan in POSSIBLE if plan.model != model])
        for plan in POSSIBLE:
            if plan.model == model:
                memory = sailor.fullest(sailor.predict_memory(DATA, plan, rule))
                errors[plan] = memory_error(plan, memory)
    assert statistics.mean(map(abs, errors.values())) < 0.02
    assert max(abs(e) for plan, e in errors.items() if plan.model == "GPT-Neo-2.7") < 0.011
    # GPT-Neo ran in pipelines only: what their communicators take counts as context from it, and
    # makes the plans of one stage too large.
    assert max(abs(e) for plan, e in errors.items() if len(plan.cuts) > 1) < 0.027
    assert all(-0.001 < e < 0.07 for plan, e in errors.items() if len(plan.cuts) == 1)


@pytest.mark.parametrize("plan", DATA.plans, ids=lambda plan: plan.name)
def test_no_plan_is_said_to_fit_where_it_did_not(plan):
    stages = sailor.predict_memory(DATA, plan)
    too_small = plan.peak_bytes - 1
    assert not all(memory.fits(too_small) for memory in stages)
    assert all(memory.fits(96e9) for memory in stages)
