"""The largest request of any process is what all obey."""

import pytest

from support.inside.session import LEAVE, SAVE, STOP, Requests


def test_the_largest_request_of_a_process_is_sent():
    asked = {"signal": 0.0, "clock": 0.0}
    requests = Requests(lambda: asked["signal"], lambda: asked["clock"], is_member=True)
    assert requests.present == 0.0
    asked["clock"] = SAVE
    assert requests.present == SAVE
    requests.stop()
    assert requests.present == STOP
    asked["signal"] = LEAVE
    assert requests.present == LEAVE


def test_a_save_ends_no_run_and_what_ends_it_is_asked_once():
    requests = Requests(lambda: 0.0, is_member=False)
    requests.agree(SAVE)
    assert requests.agreed == 0.0
    requests.stop()
    requests.agree(STOP)
    requests.stop()
    assert (requests.agreed, requests.present) == (STOP, 0.0)
    requests.agree(0.0)  # a loop of the user's own may go on
    assert requests.agreed == STOP


@pytest.mark.parametrize("is_member", [False, True])
def test_a_signal_between_steps_is_obeyed_at_once_by_a_process_that_is_alone(is_member):
    asked = {"signal": 0.0}
    requests = Requests(lambda: asked["signal"], is_member=is_member)
    requests.stop()
    requests.settle()
    assert (requests.agreed, requests.present) == (0.0, STOP)  # one more step, as for many
    asked["signal"] = LEAVE
    requests.settle()
    assert requests.agreed == (0.0 if is_member else LEAVE)
