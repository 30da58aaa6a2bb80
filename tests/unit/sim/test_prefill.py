"""How prompts share the engine with decoding: chunked, exclusive, on a pool of their own."""

import dataclasses

import numpy as np
import pytest

from sim.batching import Chunked, Disaggregated, Exclusive
from sim.verify.fixed import Fixed
from tests.helpers.fleet import always, at_once, engine, run, traffic

STEP_S, TOKEN_S, FLOOR_S = 0.01, 1e-4, 0.002


def toy(prefill, **settings):
    return engine(prefill=prefill, prompt_token_s=TOKEN_S, prompt_floor_s=FLOOR_S, step_s=STEP_S, **settings)


def test_a_prompt_goes_in_chunks_and_its_last_chunk_delivers_a_token():
    result = run(toy(Chunked(chunk_tokens=512)), traffic(0.0, prompt=1200, output=3))
    assert result.steps["prompt_tokens"].tolist() == [512, 512, 176, 0, 0]
    assert result.steps["first_tokens"].tolist() == [0, 0, 1, 0, 0]
    first_s = 3 * FLOOR_S + 1200 * TOKEN_S
    assert result.requests["first_token_s"] == pytest.approx(first_s)
    assert result.requests["last_token_s"] == pytest.approx(first_s + 2 * STEP_S)


def test_two_prompts_share_a_chunk_first_come_first_served():
    result = run(toy(Chunked(chunk_tokens=512)), at_once(2, prompt=300, output=1))
    assert result.steps["prompt_tokens"].tolist() == [512, 88]
    assert result.requests["first_token_s"] == pytest.approx([FLOOR_S + 512 * TOKEN_S, 2 * FLOOR_S + 600 * TOKEN_S])


def test_letting_a_request_in_is_paid_in_the_step_that_begins_its_prompt():
    """Four seats are taken at once; chunks of 100 begin prompts 0, then 1 and 2, then none, then 3."""
    dear = {"prompt_request_s": 0.5}
    result = run(toy(Chunked(chunk_tokens=100), **dear), at_once(4, prompt=[100, 50, 150, 20], output=1))
    assert (result.requests["admitted_s"] == 0).all()
    assert result.steps["prompt_tokens"].tolist() == [100, 100, 100, 20]
    own_s = FLOOR_S + np.array([100, 100, 100, 20]) * TOKEN_S
    assert result.steps["busy_s"] == pytest.approx(own_s + 0.5 * np.array([1, 2, 0, 1]))
    beside = run(toy(Chunked(), **dear), traffic([0.0, 0.6], prompt=[1, 10], output=[100, 1])).steps
    longest = beside["busy_s"][1:].max()
    assert longest == pytest.approx(STEP_S + 10 * TOKEN_S + 0.5)
    assert (beside["busy_s"][1:] > STEP_S * 1.01).sum() == 1


def test_the_pool_pays_for_each_request_that_it_takes_in():
    dear = toy(apart(max_step_tokens=100), prompt_request_s=0.5)
    result = run(dear, at_once(3, prompt=[40, 40, 250], output=1))
    own_s = FLOOR_S + np.array([100, 100, 100, 30]) * TOKEN_S
    assert result.steps["busy_s"] == pytest.approx(own_s + 0.5 * np.array([3, 0, 0, 0]))


def test_what_a_drafter_takes_in_is_paid_beside_prompts_that_count_as_batch_tokens():
    """Four prompts of 30 tokens in two steps; in the second of them two requests decode already."""
    target = engine(prefill=Chunked(chunk_tokens=60), prompts_as_batch=True)
    drafter = {"prefill_floor_s": 0.5, "prefill_token_s": 0.25, "prefill_request_s": 16.0, "prefill_beside_s": 0.125}
    both = dataclasses.replace(target, cost=dataclasses.replace(target.cost, **drafter))
    alone, beside = (run(one, at_once(4, prompt=30, output=4)).steps for one in (target, both))
    assert beside["prompt_tokens"].tolist() == [60, 60, 0, 0, 0]
    assert beside["decoding"].tolist() == [0, 2, 4, 4, 2]
    more = np.array([0.5 + 60 * 0.25 + 2 * 16, 0.125 + 60 * 0.25 + 2 * 16, 0, 0, 0])
    np.testing.assert_allclose(beside["busy_s"] - alone["busy_s"], more, atol=1e-9)


def test_the_size_of_a_chunk_changes_no_token():
    def decoded(chunk_tokens):
        prefill = Chunked(chunk_tokens=chunk_tokens)
        toy_ = engine(Fixed(k=3), always(3, 0.6), prefill=prefill)
        result = run(toy_, at_once(3, prompt=[200, 10, 77], output=60))
        return [result.requests[name].tolist() for name in ("rounds", "accepted_draft_tokens", "output_tokens")]

    assert decoded(1) == decoded(3) == decoded(64) == decoded(512)


def test_decoding_goes_on_beside_a_long_prompt_only_when_prompts_are_chunked():
    """The longest gap is a chunk's step when they mix, the whole prompt's when they do not."""
    arrived = [0.0] * 8 + [0.5]
    offered = traffic(arrived, prompt=[1] * 8 + [64_000], output=[200] * 8 + [1])
    mixed = run(toy(Chunked(chunk_tokens=512)), offered).requests["max_itl_s"][:8]
    apart = run(toy(Exclusive(), max_batch_tokens=65_536), offered).requests["max_itl_s"][:8]
    assert mixed == pytest.approx(STEP_S + 512 * TOKEN_S)
    assert apart == pytest.approx(STEP_S + FLOOR_S + 64_000 * TOKEN_S)


def test_a_chunk_leaves_a_token_to_every_decoding_request():
    offered = traffic([0.0] * 8 + [0.1], prompt=[1] * 8 + [100], output=[100] * 8 + [1])
    result = run(toy(Chunked(chunk_tokens=10), max_running=10, max_batch_tokens=10), offered)
    beside = (result.steps["decoding"] == 8) & (result.steps["prompt_tokens"] > 0)
    assert beside.sum() == 50
    assert (result.steps["prompt_tokens"][beside] == 2).all()


def test_drafts_get_what_prompts_left_of_the_batch():
    offered = traffic([0.0] * 4 + [0.05], prompt=[1] * 4 + [40], output=[200] * 4 + [1])
    toy_ = engine(Fixed(k=3), always(3, 0.5), prefill=Chunked(chunk_tokens=8), max_running=8, max_batch_tokens=14)
    steps = run(toy_, offered).steps
    beside = (steps["decoding"] == 4) & (steps["prompt_tokens"] == 8)
    assert beside.any()
    assert (steps["verified_tokens"][beside] == 2).all()
    assert (steps["trimmed_tokens"][beside] == 10).all()


def test_exclusive_steps_hold_prompts_or_decoding():
    offered = traffic([0.0, 0.0, 0.055], prompt=[100, 100, 150], output=10)
    result = run(toy(Exclusive(), max_batch_tokens=150), offered)
    steps = result.steps
    assert not ((steps["prompt_tokens"] > 0) & (steps["decoding"] > 0)).any()
    alone = steps["prompt_tokens"] > 0
    assert steps["prompt_tokens"][alone].tolist() == [150, 50, 150]
    np.testing.assert_allclose(steps["busy_s"][alone], FLOOR_S + TOKEN_S * steps["prompt_tokens"][alone])


def test_the_floor_of_a_prompt_is_paid_only_where_nothing_decodes():
    result = run(toy(Chunked()), traffic([0.0, 0.005], prompt=100, output=[20, 1]))
    both = (result.steps["decoding"] == 1) & (result.steps["prompt_tokens"] == 100)
    assert result.steps["busy_s"][both] == pytest.approx([STEP_S + 100 * TOKEN_S])


def test_prompts_may_cost_what_verified_tokens_cost():
    toy_ = engine(step_s=lambda b: 0.001 * b, prompts_as_batch=True, prefill=Chunked(chunk_tokens=64))
    result = run(toy_, traffic([0.0, 0.001], prompt=[10, 100], output=[5, 1]))
    assert result.steps["busy_s"] == pytest.approx(0.001 * np.array([10, 65, 37, 1, 1]))


# -------------------------------------------------------------------------------------------------------- disaggregated

HAND_OFF_S = 0.25


def apart(replicas=1, **settings):
    return Disaggregated(replicas=replicas, hand_off=HAND_OFF_S, **settings)


def test_the_pool_delivers_the_first_token_and_hands_off_after_the_delay():
    result = run(toy(apart()), traffic(1.0, prompt=500, output=4))
    first_s = 1.0 + FLOOR_S + 500 * TOKEN_S
    assert result.requests["first_token_s"] == pytest.approx(first_s)
    assert result.requests["max_itl_s"] == pytest.approx(HAND_OFF_S + STEP_S)
    assert result.requests["last_token_s"] == pytest.approx(first_s + HAND_OFF_S + 3 * STEP_S)
    assert result.steps["replica"].tolist() == [1, 0, 0, 0]
    assert result.steps["prompt_tokens"].tolist() == [500, 0, 0, 0]


def test_a_prompt_of_one_token_out_never_reaches_a_decode_replica():
    result = run(toy(apart()), traffic(0.0, prompt=5, output=1))
    assert result.requests["status"].tolist() == ["finished"]
    assert result.requests["replica"].tolist() == [-1]
    assert result.requests["last_token_s"] == result.requests["first_token_s"]


def test_a_pool_step_takes_whole_prompts_up_to_its_limit_and_longer_ones_in_parts():
    prompts = [40, 40, 250]
    result = run(toy(apart(max_step_tokens=100)), at_once(3, prompt=prompts, output=1))
    assert result.steps["prompt_tokens"].tolist() == [100, 100, 100, 30]
    assert result.steps["first_tokens"].tolist() == [2, 0, 0, 1]


def test_two_prefill_engines_work_side_by_side():
    prefill = apart(2, max_step_tokens=100)
    result = run(toy(prefill), at_once(2, prompt=100, output=1))
    assert result.steps["replica"].tolist() == [1, 2]
    assert result.requests["first_token_s"] == pytest.approx([FLOOR_S + 100 * TOKEN_S] * 2)


def test_long_prompts_do_not_disturb_decoding_elsewhere():
    offered = traffic([0.0] * 4 + [1.0], prompt=[1] * 4 + [50_000], output=[300] * 4 + [1])
    requests = run(toy(apart(2)), offered).requests
    assert requests["max_itl_s"][:4] == pytest.approx(HAND_OFF_S + STEP_S)
    tpot_s = (requests["last_token_s"] - requests["first_token_s"])[:4] / 299
    assert tpot_s == pytest.approx((HAND_OFF_S + 299 * STEP_S) / 299)


def test_what_is_under_way_at_the_horizon_is_unfinished_wherever_it_is():
    """Waiting for the pool, in the pool, in transfer, decoding."""
    offered = traffic([0.0, 0.9, 0.95, 0.96], prompt=[10, 10, 2000, 10], output=500)
    result = run(toy(apart(max_step_tokens=2000)), offered, horizon_s=1.0)
    assert result.requests["status"].tolist() == ["unfinished"] * 4
    assert (result.requests["output_tokens"] > 0).tolist() == [True, True, False, False]
    assert result.requests["rounds"].tolist()[1:] == [0, 0, 0]


@pytest.mark.parametrize("prefill", [Chunked(), Exclusive(), apart()], ids=lambda one: one.kind)
def test_where_prompts_are_computed_changes_no_token_of_a_lone_request(prefill):
    requests = run(toy(prefill, policy=Fixed(k=3), acceptance=always(3, 0.7)), traffic(0.0, 10, 200)).requests
    base = run(toy(Chunked(), policy=Fixed(k=3), acceptance=always(3, 0.7)), traffic(0.0, 10, 200)).requests
    for name in ("rounds", "drafted_tokens", "accepted_draft_tokens"):
        assert requests[name].tolist() == base[name].tolist()
