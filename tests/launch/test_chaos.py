"""The short form of `make chaos`: one event of each of eight kinds, with all its bars."""

import pytest

from support import chaos

#: The seeds of the first events of these kinds and places.
EVENTS = (
    ("kill", "any"),
    ("stop", "callback"),
    ("raise", "data"),
    ("exit", "callback"),
    ("full", "disk"),
    ("end a rank", "outside"),
    ("close stdout", "outside"),
    ("damage", "outside"),
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return chaos.sha256_of_undisturbed(tmp_path_factory.mktemp("chaos") / "job")


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVENTS, ids=" ".join)
def test_a_job_ends_soon_names_the_culprit_and_resumes_to_the_same_bits(
    kind, undisturbed, tmp_path
):
    events = map(chaos.event, range(1000))
    event = next(e for e in events if (e.kind, e.place) == kind)
    outcome = chaos.play(event, tmp_path / "job", undisturbed)
    # How long it takes is measured by `make chaos`: a test must not depend on a machine's load.
    faults = [fault for fault in outcome.faults(event) if not fault.startswith("ended after")]
    assert not faults, f"{event}\n{outcome.error}"


def test_every_kind_of_event_comes_up_and_a_seed_is_an_event():
    events = [chaos.event(seed) for seed in range(400)]
    assert {(e.kind, e.place) for e in events} == {kind[:2] for kind in chaos.KINDS}
    assert [chaos.event(seed) for seed in range(10)] == events[:10]


def test_lines_of_a_users_traceback_are_not_counted_and_all_others_are():
    error = (
        "[1] Traceback (most recent call last):\n[1]   File x, line 1\n[1] ValueError: mine\n"
        "hxla: rank 1 failed\n[0] noise\n"
    )
    assert chaos.num_lines(error) == 2
