"""Users who wait for an answer, think and ask again."""

import numpy as np

from sim.rng import Streams
from sim.workload.build import build_users
from sim.workload.closed_loop import ClosedLoop
from sim.workload.length_source import Fixed, PromptAndOutput
from tests.helpers.fleet import engine, run

STEP_S, PROMPT_S = 0.01, 0.001


def users(count, think_s=0.0, think=None, prompt=1, output=10, ramp=0.0):
    settings = ClosedLoop(users=count, think_time=think_s, think=think, ramp=ramp)
    lengths = PromptAndOutput(prompt=Fixed(tokens=prompt), output=Fixed(tokens=output))
    return build_users(settings, lengths, None, Streams(0))


def test_a_user_asks_again_after_the_pause_that_follows_the_answer():
    """Not from start to start: think time is not part of the service."""
    requests = run(engine(), users(1, 0.5, "fixed", output=11), horizon_s=10.0).requests
    answer_s = PROMPT_S + 10 * STEP_S
    np.testing.assert_allclose(requests["arrived_s"], np.arange(requests["arrived_s"].size) * (answer_s + 0.5))


def test_a_user_has_one_request_at_a_time():
    result = run(engine(), users(5), horizon_s=5.0)
    assert result.steps["running"].max() == 5
    status = result.requests["status"]
    assert (status == "unfinished").sum() <= 5
    assert (status == "finished").sum() > 200


def test_users_begin_over_the_ramp():
    requests = run(engine(), users(4, 100.0, "fixed", ramp=2.0), horizon_s=50.0).requests
    assert requests["arrived_s"].tolist() == [0.0, 0.5, 1.0, 1.5]


def test_a_rejected_user_tries_again_and_time_passes():
    """All users at once, seats for one, a queue of one: nobody spins at one instant, and all get served some day."""
    result = run(engine(max_running=1, max_waiting=1), users(6, output=50), horizon_s=30.0)
    status = result.requests["status"]
    assert (status == "rejected").sum() > 20
    assert (status == "finished").sum() > 50
    instants, counts = np.unique(result.requests["arrived_s"][status == "rejected"], return_counts=True)
    assert instants.size > 10
    assert counts.max() <= 6


def test_an_aborted_user_asks_again():
    result = run(engine(deadline_s=0.2), users(2, output=100), horizon_s=5.0)
    status = result.requests["status"]
    assert set(status) == {"aborted", "unfinished"}
    assert (status == "aborted").sum() == 2 * 24


def test_a_failed_user_asks_again():
    result = run(engine(block_tokens=1, kv_blocks=30), users(1, prompt=10, output=100), horizon_s=5.0)
    assert set(result.requests["status"]) <= {"failed", "unfinished"}
    assert (result.requests["status"] == "failed").sum() > 10


def test_the_log_grows_with_the_turns():
    """More turns than twice the users, many times over."""
    result = run(engine(step_s=0.001), users(2, output=2), horizon_s=5.0)
    assert result.requests["status"].size > 3000
    assert (result.requests["output_tokens"][:-2] == 2).all()


def test_users_go_on_where_others_are_rejected_for_their_prompts():
    result = run(engine(max_context_tokens=10), users(1, prompt=10), horizon_s=20.0)
    assert set(result.requests["reason"]) == {"prompt_too_long"}
    assert 15 <= result.requests["status"].size <= 21
