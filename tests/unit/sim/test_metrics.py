"""Every metric on columns written by hand, where the right number is plain."""

import math

import numpy as np
import pytest

from sim.batching import Disaggregated
from sim.metrics import Gpus, Objective, Window, measure, percentile, windows
from sim.records import REQUEST_COLUMNS, STEP_COLUMNS, STEP_FLOATS
from sim.verify import BatchTable, Fixed
from tests.helpers.fleet import always, at_once, engine, metrics_of, run, traffic

NAN = math.nan
ONE_GPU = Gpus(total=1, decode=1, replicas=1)
TIMES = ("arrived_s", "admitted_s", "first_token_s", "last_token_s", "ended_s", "max_itl_s")


def requests_of(*rows):
    """Return columns of requests; what a row leaves out is a finished request of one token at 0."""
    default = dict.fromkeys(REQUEST_COLUMNS, 0) | {
        "tenant": "-",
        "domain": "-",
        "status": "finished",
        "reason": "stop",
        "output_tokens": 1,
        "max_itl_s": NAN,
    }
    full = [default | row for row in rows]
    kinds = dict.fromkeys(TIMES, np.float64) | dict.fromkeys(("tenant", "domain", "status", "reason"), object)
    return {name: np.array([row[name] for row in full], kinds.get(name, np.int64)) for name in REQUEST_COLUMNS}


def steps_of(*rows):
    """Return columns of steps; what a row leaves out is a step of 1 s on replica 0."""
    default = dict.fromkeys(STEP_COLUMNS, 0) | {"steps": 1, "busy_s": 1.0}
    full = [default | row for row in rows]
    return {
        name: np.array([row[name] for row in full], np.float64 if name in STEP_FLOATS else np.int64)
        for name in STEP_COLUMNS
    }


def measured(requests=(), steps=(), from_s=0.0, until_s=100.0, gpus=ONE_GPU, **objective):
    return measure(requests_of(*requests), steps_of(*steps), Window(from_s, until_s), gpus, Objective(**objective))


def served(arrived_s, first_s, last_s, tokens, **more):
    return {
        "arrived_s": arrived_s,
        "admitted_s": arrived_s,
        "first_token_s": first_s,
        "last_token_s": last_s,
        "ended_s": last_s,
        "output_tokens": tokens,
        **more,
    }


def cut(status, arrived_s=0.0, first_s=NAN, last_s=NAN, tokens=0, ended_s=NAN):
    return served(arrived_s, first_s, last_s, tokens, status=status, ended_s=ended_s, admitted_s=NAN)


# ------------------------------------------------------------------------------------------------------------ latencies


def test_ttft_counts_the_queue_and_tpot_leaves_the_first_token_out():
    got = measured([served(10.0, 12.5, 14.5, 5)])
    assert (got["ttft_s_p50"], got["tpot_s_p50"], got["user_tokens_per_s_p50"]) == (2.5, 0.5, 2.0)


def test_tpot_is_of_tokens_however_they_came_in_bursts():
    """512 tokens in 96 bursts: (end - first) / 511."""
    got = measured([served(0.0, 1.0, 1.0 + 95 * 0.05, 512)])
    assert got["tpot_s_p50"] == pytest.approx(95 * 0.05 / 511)


def test_interactivity_is_the_inverse_of_tpot_not_output_over_end_to_end_time():
    got = measured([served(0.0, 9.0, 10.0, 11)])
    assert got["user_tokens_per_s_p50"] == pytest.approx(10.0)
    assert got["user_tokens_per_s_p50"] == pytest.approx(1 / got["tpot_s_p50"])


def test_one_token_out_has_no_tpot_but_a_ttft():
    got = measured([served(0.0, 1.0, 1.0, 1)])
    assert got["ttft_s_p50"] == 1.0
    for name in ("tpot_s_p50", "tpot_s_p99", "user_tokens_per_s_p50", "user_tokens_per_s_p10", "longest_itl_s_p99"):
        assert got[name] is None, name


def test_a_whole_answer_in_one_delivery_took_no_time_between_tokens():
    """A measured engine may deliver three tokens at once; the rate is infinite, without a warning."""
    got = measured([served(0.0, 1.0, 1.0, 3)])
    assert got["tpot_s_p50"] == 0.0
    assert got["user_tokens_per_s_p50"] == math.inf


def test_p10_of_interactivity_is_the_slow_tail():
    got = measured([served(0.0, 0.0, 1.0 / speed, 2) for speed in range(1, 12)])
    assert (got["user_tokens_per_s_p50"], got["user_tokens_per_s_p10"]) == pytest.approx((6.0, 2.0))


def test_requests_without_a_first_token_are_the_infinite_tail_of_ttft():
    got = measured([served(0.0, 1.0, 2.0, 5), cut("unfinished"), cut("aborted", ended_s=9.0)])
    assert got["ttft_s_p50"] == math.inf
    got = measured([served(0.0, 1.0, 2.0, 5), served(0.0, 3.0, 4.0, 5), cut("unfinished")])
    assert (got["ttft_s_p50"], got["ttft_s_p99"]) == (3.0, math.inf)


def test_a_rejected_request_never_waited_for_a_token():
    got = measured([served(0.0, 1.0, 2.0, 5), cut("rejected", ended_s=0.0)])
    assert got["ttft_s_p99"] == 1.0


def test_requests_that_were_never_admitted_are_the_infinite_tail_of_the_queue():
    """Leaving them out would make an overloaded fleet look better."""
    got = measured([served(0.0, 1.0, 2.0, 5, admitted_s=0.5), cut("unfinished"), cut("rejected", ended_s=0.0)])
    assert got["queue_wait_s_p99"] == math.inf
    got = measured([served(0.0, 1.0, 2.0, 5, admitted_s=0.5), cut("rejected", ended_s=0.0)])
    assert got["queue_wait_s_p99"] == 0.5


def test_an_unfinished_request_counts_with_what_it_has():
    got = measured([cut("unfinished", 0.0, 1.0, 3.0, 5)])
    assert (got["ttft_s_p50"], got["tpot_s_p50"], got["e2e_s_p50"]) == (1.0, 0.5, math.inf)
    assert (got["finished"], got["unfinished"], got["arrived"]) == (0, 1, 1)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, None),
        ([NAN, NAN], 50, None),
        ([3.0], 99, 3.0),
        ([1.0, 2.0], 50, 1.5),
        ([1.0, NAN, 2.0, 3.0], 50, 2.0),
        ([1.0, 2.0, math.inf], 50, 2.0),
        ([1.0, 2.0, math.inf], 51, math.inf),
        ([1.0, math.inf, math.inf], 50, math.inf),
        ([math.inf], 1, math.inf),
        ([5.0, 1.0, 3.0], 0, 1.0),
        ([5.0, 1.0, 3.0], 100, 5.0),
    ],
)
def test_percentiles(values, percent, expected):
    assert percentile(np.array(values), percent) == expected


def test_percentiles_agree_with_numpy_where_all_is_finite(rng):
    values = rng.lognormal(size=101)
    for percent in (1, 10, 33.3, 50, 99):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


# ---------------------------------------------------------------------------------------------------------- speculation


def test_accepted_length_is_1_where_everything_was_rejected():
    got = measured(
        steps=[
            {"ended_s": 1.0, "decoding": 4, "batch_tokens": 16, "drafted_tokens": 12, "verified_tokens": 12}
            | {"output_tokens": 4}
        ]
    )
    assert got["accepted_length"] == 1.0
    assert (got["wasted_draft_ratio"], got["accepted_draft_ratio"]) == (1.0, 0.0)
    assert (got["verify_tokens_per_request"], got["drafted_tokens_per_request"]) == (4.0, 3.0)


def test_where_no_draft_was_verified_rates_are_absent():
    got = measured(steps=[{"ended_s": 1.0, "decoding": 4, "batch_tokens": 4, "output_tokens": 4}])
    assert got["accepted_length"] == 1.0
    assert got["wasted_draft_ratio"] is None
    assert got["accepted_draft_ratio"] is None


def test_rates_are_of_what_was_verified_not_of_what_could_have_been():
    """Offered 2 of a block of 7, both accepted: a rate of 1."""
    row = {"ended_s": 1.0, "decoding": 1, "batch_tokens": 3, "drafted_tokens": 7, "verified_tokens": 2}
    got = measured(steps=[row | {"accepted_draft_tokens": 2, "output_tokens": 3}])
    assert (got["accepted_draft_ratio"], got["accepted_length"]) == (1.0, 3.0)


def test_the_first_token_of_a_prompt_is_no_round():
    got = measured(steps=[{"ended_s": 1.0, "decoding": 2, "batch_tokens": 2, "output_tokens": 5, "first_tokens": 3}])
    assert got["accepted_length"] == 1.0


def test_without_a_step_rates_are_absent_and_nothing_is_nan():
    got = measured()
    assert got["output_tokens_per_s_per_gpu"] == 0.0
    for name in ("accepted_length", "verify_tokens_per_request", "outside_profile_ratio", "draft_time_ratio"):
        assert got[name] is None
    assert not any(isinstance(value, float) and math.isnan(value) for value in got.values())


# --------------------------------------------------------------------------------------------------- windows and shares


def test_steps_count_where_they_end():
    steps = [{"started_s": end - 1.0, "ended_s": end, "output_tokens": 10} for end in (9.9, 10.0, 10.5, 19.99, 20.0)]
    got = measured(steps=steps, from_s=10.0, until_s=20.0)
    assert got["output_tokens_per_s_per_gpu"] == 3.0
    assert got["steps"] == 3


def test_requests_count_where_they_arrived_whatever_their_end():
    rows = [served(at, at + 30.0, at + 31.0, 2) for at in (9.99, 10.0, 19.99, 20.0)]
    got = measured(rows, from_s=10.0, until_s=20.0)
    assert (got["arrived"], got["finished"]) == (2, 2)
    assert got["ttft_s_p50"] == 30.0


def test_every_end_is_counted_and_they_add_up():
    ends = ["finished", "rejected", "aborted", "failed", "unfinished"]
    got = measured([served(0.0, 1.0, 2.0, 3), *(cut(end, ended_s=1.0) for end in ends[1:])])
    assert [got[end] for end in ends] == [1] * 5
    assert got["arrived"] == sum(got[end] for end in ends)


def test_throughput_is_a_gpu_with_the_prefill_pool_and_without():
    got = measured(steps=[{"ended_s": 1.0, "output_tokens": 1200}], gpus=Gpus(total=12, decode=8, replicas=2))
    assert got["output_tokens_per_s_per_gpu"] == 1.0
    assert got["output_tokens_per_s_per_decode_gpu"] == 1.5


def test_busy_time_is_of_the_decode_replicas():
    steps = [{"ended_s": 1.0, "busy_s": 30.0, "replica": replica} for replica in (0, 1, 2)]
    assert measured(steps=steps, gpus=Gpus(total=3, decode=2, replicas=2))["busy_ratio"] == pytest.approx(0.3)


# -------------------------------------------------------------------------------------------------------------- goodput


def test_goodput_counts_finished_requests_that_met_every_objective():
    rows = [
        served(0.0, 1.0, 2.0, 11),
        served(0.0, 3.0, 4.0, 11),
        served(0.0, 1.0, 6.0, 11),
        cut("unfinished", 0.0, 1.0, 2.0, 11),
        cut("aborted", 0.0, 1.0, 2.0, 11, ended_s=2.0),
        cut("rejected", ended_s=0.0),
    ]
    got = measured(rows, ttft_s=2.0, user_tokens_per_s=5.0)
    assert got["goodput_per_s"] == pytest.approx(1 / 100)
    assert got["goodput_ratio"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("objective", "met"),
    [
        ({"ttft_s": 1.0}, 1),
        ({"ttft_s": 0.999}, 0),
        ({"tpot_s": 0.1}, 1),
        ({"tpot_s": 0.0999}, 0),
        ({"e2e_s": 2.0}, 1),
        ({"e2e_s": 1.999}, 0),
        ({"user_tokens_per_s": 9.99}, 1),
        ({"user_tokens_per_s": 10.01}, 0),
    ],
)
def test_each_objective_bounds_its_own_metric(objective, met):
    assert measured([served(0.0, 1.0, 2.0, 11)], **objective)["goodput_ratio"] == met


def test_a_rate_asked_of_a_single_token_is_met():
    assert measured([served(0.0, 1.0, 1.0, 1)], user_tokens_per_s=50.0, tpot_s=0.01)["goodput_ratio"] == 1.0


def test_without_an_objective_there_is_no_goodput():
    got = measured([served(0.0, 1.0, 2.0, 3)])
    assert got["goodput_per_s"] is None
    assert got["goodput_ratio"] is None


def test_goodput_is_of_arrivals_in_the_window():
    rows = [served(at, at + 1.0, at + 2.0, 3) for at in (5.0, 15.0, 25.0)]
    got = measured(rows, from_s=10.0, until_s=20.0, e2e_s=10.0)
    assert (got["goodput_per_s"], got["goodput_ratio"]) == (0.1, 1.0)


# --------------------------------------------------------------------------------------------------------- time windows


def test_windows_cut_a_run_and_leave_out_what_is_not_there():
    steps = steps_of(
        {"ended_s": 1.0, "decoding": 2, "decoding_s": 2.0, "batch_tokens": 6, "output_tokens": 5, "first_tokens": 1},
        {"ended_s": 9.9, "decoding": 2, "decoding_s": 2.0, "batch_tokens": 2, "output_tokens": 2},
        {"ended_s": 25.0, "prompt_tokens": 9, "output_tokens": 1, "first_tokens": 1},
    )
    got = windows(requests_of({"arrived_s": 3.0}, {"arrived_s": 25.0}), steps, 30.0, 10.0, ONE_GPU)
    assert got["started_s"].tolist() == [0.0, 10.0, 20.0]
    assert got["arrivals_per_s"].tolist() == [0.1, 0.0, 0.1]
    np.testing.assert_array_equal(got["user_tokens_per_s"], [6 / 4, NAN, NAN])
    np.testing.assert_array_equal(got["accepted_length"], [6 / 4, NAN, NAN])
    np.testing.assert_array_equal(got["verify_tokens_per_request"], [2.0, NAN, NAN])
    np.testing.assert_array_equal(got["batch_tokens_per_step"], [4.0, NAN, NAN])
    assert got["output_tokens_per_s_per_gpu"] == pytest.approx([0.7, 0.0, 0.1])


@pytest.mark.parametrize("horizon_s", [25.0, 26.0, 29.9])
def test_a_window_that_the_horizon_cuts_is_left_out(horizon_s):
    """Half a window would show half the load."""
    steps = steps_of(*({"ended_s": at + 0.5, "output_tokens": 1} for at in range(int(horizon_s))))
    got = windows(requests_of(), steps, horizon_s, 10.0, ONE_GPU)
    assert got["output_tokens_per_s_per_gpu"].tolist() == [1.0, 1.0]


# ----------------------------------------------------------------------------------------------------------- whole runs


def test_a_preempted_request_has_one_ttft():
    result = run(engine(block_tokens=1, kv_blocks=100), at_once(2, prompt=20, output=60))
    assert result.requests["preemptions"].sum() == 1
    got = metrics_of(result, 100.0)
    assert got["ttft_s_p99"] == pytest.approx(0.04)
    assert got["preemptions"] == 1


def test_the_first_token_after_a_recomputation_is_no_round():
    result = run(engine(block_tokens=1, kv_blocks=100), at_once(2, prompt=20, output=60))
    assert metrics_of(result, 100.0)["accepted_length"] == 1.0
    assert result.steps["first_tokens"].sum() == 3


def test_per_position_counts_add_up_to_the_total():
    result = run(engine(Fixed(k=3), always(3, 0.6)), at_once(10, output=100))
    got = metrics_of(result, 100.0)
    out, rounds = result.requests["output_tokens"].sum() - 10, result.requests["rounds"].sum()
    assert got["accepted_length"] == pytest.approx(out / rounds)


def test_a_run_without_drafts_has_no_rates_and_an_accepted_length_of_1():
    toy = engine(BatchTable(table=((1, 0), (1000, 3))), always(3))
    got = metrics_of(run(toy, at_once(3)), 100.0)
    assert got["accepted_length"] == 1.0
    assert got["accepted_draft_ratio"] is None
    assert got["wasted_draft_ratio"] is None


def test_a_prefill_pool_counts_as_gpus():
    toy = engine(prefill=Disaggregated(replicas=2, hand_off=0.0))
    got = metrics_of(run(toy, at_once(4, output=25)), 1.0, replicas=1, pool=2)
    assert got["output_tokens_per_s_per_gpu"] == pytest.approx(100 / 3)
    assert got["output_tokens_per_s_per_decode_gpu"] == pytest.approx(100)


def test_output_is_what_came_not_what_was_asked():
    result = run(engine(max_context_tokens=20), traffic(0.0, prompt=10, output=500))
    assert metrics_of(result, 10.0)["output_tokens_per_s_per_gpu"] == 1.0


def test_throughput_and_decoding_follow_from_each_other():
    """Mean requests decoding, times what each gets, is what the fleet gives (first tokens aside)."""
    result = run(engine(Fixed(k=2), always(2, 0.5)), at_once(20, output=100))
    got = metrics_of(result, 10.0)
    series = windows(result.requests, result.steps, 10.0, 10.0, ONE_GPU)
    rate = series["user_tokens_per_s"][0] * got["decoding_per_gpu"]
    assert rate == pytest.approx(got["output_tokens_per_s_per_gpu"] - 20 / 10.0)
