"""Who gets in, in which order, and who does not: queue, seats, deadlines, sizes, horizon."""

import numpy as np
import pytest

from sim.batching import Chunked, Disaggregated
from sim.verify.fixed import Fixed
from tests.helpers.fleet import always, at_once, engine, run, traffic

STEP_S = 0.01


def ends(result):
    return list(zip(result.requests["status"].tolist(), result.requests["reason"].tolist(), strict=True))


def test_a_request_at_time_0_is_served():
    assert ends(run(engine(), traffic(0.0))) == [("finished", "stop")]


def test_a_fleet_without_a_request_runs_to_the_end():
    result = run(engine(), traffic(np.empty(0)), horizon_s=5.0)
    assert result.requests["status"].size == result.steps["steps"].size == 0


def test_one_output_token_comes_from_the_prompt_alone():
    result = run(engine(Fixed(k=2), always(2)), traffic(0.0, prompt=3, output=1))
    requests = result.requests
    assert ends(result) == [("finished", "stop")]
    assert (requests["output_tokens"][0], requests["rounds"][0], requests["drafted_tokens"][0]) == (1, 0, 0)
    assert requests["first_token_s"] == requests["last_token_s"] == requests["ended_s"]
    assert np.isnan(requests["max_itl_s"][0])


def test_requests_are_admitted_in_order_of_arrival_though_a_later_one_would_fit():
    """The head of the queue waits for memory, and with it everybody behind."""
    offered = traffic([0.0, 0.01, 0.02], prompt=[100, 100, 1], output=[50, 5, 5])
    requests = run(engine(block_tokens=1, kv_blocks=180), offered).requests
    assert (np.diff(requests["admitted_s"]) >= 0).all()
    assert requests["admitted_s"][1] == pytest.approx(requests["ended_s"][0])
    assert requests["admitted_s"][2] == requests["admitted_s"][1]


def test_seats_bound_what_runs_and_the_next_takes_a_seat_when_one_is_left():
    result = run(engine(max_running=4), at_once(6, output=[10, 20, 30, 40, 5, 5]))
    assert result.steps["running"].max() == 4
    requests = result.requests
    assert requests["admitted_s"][4:].tolist() == requests["ended_s"][[0, 4]].tolist()


def test_a_prompt_under_way_has_a_seat():
    result = run(engine(max_running=1, prefill=Chunked(chunk_tokens=10)), at_once(2, prompt=100, output=2))
    assert result.steps["running"].max() == 1
    assert result.requests["admitted_s"][1] == result.requests["ended_s"][0]


# ------------------------------------------------------------------------------------------------------------ rejection


def test_a_full_queue_rejects_and_says_so():
    offered = traffic([0.0, 0.02, 0.03, 0.04, 0.05], output=100)
    result = run(engine(max_running=1, max_waiting=2), offered)
    assert ends(result) == [("finished", "stop")] * 3 + [("rejected", "queue_full")] * 2
    assert result.steps["waiting"].max() == 2


def test_a_queue_is_counted_a_replica():
    offered = traffic([0.0, 0.0, 0.02, 0.02, 0.04], output=100)
    result = run(engine(max_running=1, max_waiting=1), offered, replicas=2)
    assert ends(result).count(("rejected", "queue_full")) == 1


def test_a_prefill_pool_has_a_queue_of_its_own():
    prefill = Disaggregated(replicas=1, hand_off=0.0, max_step_tokens=100)
    offered = traffic([0.0, 0.01, 0.02, 0.03], prompt=100, output=5)
    result = run(engine(prefill=prefill, max_waiting=2), offered)
    assert ends(result) == [("finished", "stop")] * 3 + [("rejected", "queue_full")]


@pytest.mark.parametrize(
    ("prompt", "status"), [(98, "finished"), (99, "finished"), (100, "rejected"), (5000, "rejected")]
)
@pytest.mark.parametrize("prefill", [Chunked(), Disaggregated(replicas=1, hand_off=0.0)], ids=lambda one: one.kind)
def test_a_prompt_must_leave_the_context_a_token(prompt, status, prefill):
    result = run(engine(max_context_tokens=100, prefill=prefill), traffic(0.0, prompt, output=1))
    assert result.requests["status"].tolist() == [status]
    assert result.requests["reason"].tolist() == [{"finished": "stop", "rejected": "prompt_too_long"}[status]]


@pytest.mark.parametrize(("prompt", "status"), [(27, "finished"), (28, "finished"), (29, "rejected")])
@pytest.mark.parametrize("prefill", [Chunked(), Disaggregated(replicas=1, hand_off=0.0)], ids=lambda one: one.kind)
def test_a_prompt_must_leave_memory_for_a_whole_round(prompt, status, prefill):
    """32 tokens of memory: the prompt, three drafts and the round's own."""
    toy = engine(Fixed(k=3), always(3), block_tokens=8, kv_blocks=4, prefill=prefill)
    result = run(toy, traffic(0.0, prompt, output=2))
    assert result.requests["status"].tolist() == [status]


# ------------------------------------------------------------------------------------------------------------ deadlines


def test_a_deadline_ends_what_waits():
    result = run(engine(max_running=1, deadline_s=0.3), at_once(3, output=[25, 5, 5]))
    assert ends(result) == [("finished", "stop")] * 2 + [("aborted", "deadline")]
    assert result.requests["output_tokens"].tolist()[:2] == [25, 5]
    result = run(engine(max_running=1, deadline_s=0.2), at_once(3, output=[18, 60, 5]))
    assert ends(result) == [("finished", "stop")] + [("aborted", "deadline")] * 2
    assert np.isnan(result.requests["admitted_s"][2])


def test_a_deadline_ends_a_prompt_under_way_and_frees_its_memory():
    toy = engine(prefill=Chunked(chunk_tokens=10), prompt_token_s=0.01, deadline_s=1.0, block_tokens=1, kv_blocks=1100)
    result = run(toy, traffic([0.0, 0.5], prompt=[1000, 900], output=[5, 5]))
    assert ends(result) == [("aborted", "deadline")] * 2
    assert result.requests["output_tokens"].tolist() == [0, 0]
    assert result.requests["admitted_s"][1] == result.requests["ended_s"][0] == pytest.approx(1.0, abs=0.15)


def test_a_deadline_ends_a_prompt_under_way_in_a_pool_too():
    """Nothing more is computed of it, and the next one has the engine to itself."""
    prefill = Disaggregated(replicas=1, hand_off=0.0, max_step_tokens=10)
    toy = engine(prefill=prefill, prompt_token_s=0.01, deadline_s=1.0)
    result = run(toy, traffic([0.0, 0.5], prompt=[1000, 10], output=[5, 5]))
    assert ends(result) == [("aborted", "deadline"), ("finished", "stop")]
    assert result.requests["output_tokens"].tolist() == [0, 5]
    assert result.steps["prompt_tokens"].sum() < 150


def test_a_deadline_ends_decoding_at_the_step_that_passes_it():
    result = run(engine(prompt_token_s=0.01, deadline_s=0.105), traffic(0.0, prompt=1, output=1000))
    requests = result.requests
    assert ends(result) == [("aborted", "deadline")]
    assert requests["ended_s"] == pytest.approx(0.11)
    assert requests["output_tokens"].tolist() == [11]


def test_what_ends_in_the_step_that_passes_its_deadline_is_finished():
    result = run(engine(prompt_token_s=0.01, deadline_s=0.105), traffic(0.0, prompt=1, output=11))
    assert ends(result) == [("finished", "stop")]


@pytest.mark.parametrize("prefill", [Chunked(), Disaggregated(replicas=1, hand_off=0.05)], ids=lambda one: one.kind)
def test_under_overload_with_deadlines_all_are_accounted_for(prefill, rng):
    arrived = np.cumsum(rng.exponential(0.02, 400))
    toy = engine(
        Fixed(k=2), always(2, 0.5), prefill=prefill, max_running=4, deadline_s=0.6, block_tokens=4, kv_blocks=90
    )
    result = run(toy, traffic(arrived, rng.integers(1, 60, 400), rng.integers(1, 60, 400)))
    status = result.requests["status"]
    assert {"finished", "aborted"} <= set(status)
    assert not (status == "unfinished").any()


# -------------------------------------------------------------------------------------------------------------- horizon


def test_what_is_under_way_at_the_horizon_is_unfinished_and_keeps_its_tokens():
    offered = traffic([0.0, 0.0, 0.5, 2.0], output=[10, 1000, 1000, 1])
    result = run(engine(max_running=2), offered, horizon_s=1.0)
    assert ends(result) == [("finished", "stop"), ("unfinished", "horizon"), ("unfinished", "horizon")]
    assert result.requests["output_tokens"][1] > 90
    assert np.isnan(result.requests["ended_s"][1:]).all()


def test_a_longer_horizon_changes_nothing_before_the_shorter_one(rng):
    arrived = np.cumsum(rng.exponential(0.05, 100))
    offered = traffic(arrived, 20, rng.integers(1, 80, 100))
    toy = engine(Fixed(k=3), always(3, 0.5), max_running=8)
    short, long = run(toy, offered, horizon_s=2.0), run(toy, offered, horizon_s=9.0)
    n = short.steps["steps"].size
    for name, column in short.steps.items():
        np.testing.assert_array_equal(column, long.steps[name][:n])


@pytest.mark.parametrize("horizon_s", [0.7, 1.1, 3.3, 1e-3, 12345.678])
def test_every_arrival_before_the_horizon_counts(horizon_s):
    arrived = [0.1 * horizon_s, np.nextafter(horizon_s, 0.0), horizon_s]
    result = run(engine(), traffic(arrived, output=2), horizon_s=horizon_s)
    assert result.requests["arrived_s"].tolist() == arrived[:2]
    assert run(engine(), traffic(arrived[2:]), horizon_s=horizon_s).requests["arrived_s"].size == 0


def test_nobody_is_admitted_before_arriving(rng):
    """Sums of floating delays end a hair before or after the instant meant."""
    gaps = rng.exponential(1.0, 200) * np.repeat([1.0, 1e-3], 100)
    run(engine(step_s=1e-3), traffic(np.cumsum(gaps), output=1))


# ------------------------------------------------------------------------------------------------- outside the measured


def test_steps_outside_the_profile_are_counted():
    result = run(engine(known_to=3), at_once(5, output=[2, 2, 3, 4, 5]))
    assert result.steps["outside_steps"].tolist() == [0, 1, 0, 0, 0]
    assert result.steps["batch_tokens"].tolist() == [0, 5, 3, 2, 1]


def test_drafting_for_more_requests_than_measured_is_outside_too():
    toy = engine(Fixed(k=1), always(1, 0.0), known_requests=2)
    result = run(toy, at_once(4, output=[2, 2, 3, 4]))
    assert result.steps["outside_steps"].tolist() == [0, 1, 0, 0]


def test_a_batch_below_the_smallest_measured_one_is_outside_too():
    result = run(engine(known_from=3), at_once(4, output=[2, 2, 3, 4]))
    assert result.steps["outside_steps"].tolist() == [0, 0, 1, 1]
