"""A microbatch as one program is a chain of one segment: one plan, one numerics, the same bits."""

import functools
import json

import pytest

import hxla
from support.executor_jobs import NUM, ended, job
from support.inside.choose import with_executors
from support.inside.graph import graph_of, segments_at
from support.tiers import rows

pytestmark = pytest.mark.optimized


@functools.cache
def whole(num=1):
    """A plan of one program on so many devices, its microbatches on the first."""
    return job(range(num)).plan(microbatch_size=2, counts=[NUM] + [0] * (num - 1))


@functools.cache
def end():
    return ended(whole())


def one_segment(sequence):
    [segment] = segments_at(graph_of(job().graph(2)), ())
    segments = (hxla.ChainSegment(name=segment.name, first=0),)
    return hxla.PlannedChain(segments=segments, sequence=sequence)


def test_a_plan_has_one_form_of_it():
    plan, chain = whole(), one_segment(("B0:input",))
    assert plan.chain is None
    assert plan.replaced(chain=chain) == plan
    written = json.loads(plan.to_json()) | {"chain": chain.model_dump()}
    assert hxla.Plan.from_json(json.dumps(written)) == plan


def test_a_job_that_asks_for_one_segment_has_that_plan():
    own = job(memory={"recompute": "none", "segments": 1})
    plan = own.plan(microbatch_size=2)
    assert plan.numerics == whole().numerics
    assert plan.chain is None


def placed(plan, **fields):
    return plan.replaced(placement=plan.placement.model_copy(update=fields))


def moved():
    """Which moves nothing, for one segment has no input."""
    chain = one_segment(("O0", "I0", "B0:input"))
    placement = whole().placement.model_copy(update={"stash": "host"})
    return whole().replaced(chain=chain, placement=placement)


#: Other plans of one segment.
FORMS = {
    "moved": moved,
    "several at once": lambda: with_executors(whole(), (3,)),
    "stage 1": lambda: placed(whole(2), zero=1).with_counts((7, 5)),
    "stage 2": lambda: placed(whole(2), zero=2, waves=2).with_counts((7, 5)),
    "stage 3": lambda: placed(whole(2), zero=3, parameters="host").with_counts((1, 11)),
}


@pytest.mark.parametrize("name", rows(FORMS, "moved", "stage 3"))
def test_every_plan_of_one_segment_ends_with_the_same_bits(name):
    plan = FORMS[name]()
    assert plan.numerics == whole().numerics
    assert ended(plan, job(range(len(plan.replicas)))) == end()


def test_microbatches_of_several_segments_run_at_once():
    """As those of one do, with sums of each executor's own."""
    own = job(memory={"recompute": "boundaries", "segments": 3})
    plan = own.plan(microbatch_size=2)
    assert plan.num_segments > 1
    at_once = with_executors(plan, (3,))
    assert at_once.numerics == plan.numerics
    assert ended(at_once, own) == ended(plan, own)
