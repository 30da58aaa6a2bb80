"""What holds in any queue: Little's law, the interactive law, and no more than the capacity."""

import numpy as np
import pytest
from scipy import stats

from sim.batching import Chunked, Disaggregated, Exclusive
from sim.rng import Streams
from sim.verify import Fixed as FixedPolicy
from sim.workload.build import build_users
from sim.workload.closed_loop import ClosedLoop
from sim.workload.length_source import Fixed, Lognormal, PromptAndOutput, Quantiles
from tests.helpers.fleet import always, engine, metrics_of, run, traffic

FALSE_ALARM = 1e-6  # chance that a correct program fails one verdict
TICK_S = 1e-3


# --------------------------------------------------------------------------------------------------------- Little's law


def mean_inside(steps, replicas, until_s):
    """Time average of the requests inside, from what the steps saw at their ends."""
    total = 0.0
    for index in range(replicas):
        mine = steps["replica"] == index
        inside = (steps["running"] + steps["waiting"])[mine]
        total += float((inside[:-1] * np.diff(steps["ended_s"][mine])).sum())
    return total / until_s


@pytest.mark.parametrize("prefill", [Chunked(chunk_tokens=256), Exclusive()], ids=lambda one: one.kind)
@pytest.mark.parametrize("seats", [2, 64])
def test_requests_inside_are_arrivals_times_stay(prefill, seats, rng):
    """L = λ W, with L from the steps and W from the requests, in a fleet that batches, drafts and queues."""
    n = 400
    arrived_s = np.cumsum(rng.exponential(0.25, n))
    toy = engine(
        FixedPolicy(k=2),
        always(2, 0.5),
        prefill=prefill,
        step_s=lambda batch: 0.004 + 1e-4 * batch,
        prompt_token_s=2e-5,
        max_running=seats,
    )
    result = run(toy, traffic(arrived_s, rng.integers(1, 400, n), rng.integers(1, 600, n)), replicas=2)
    stay_s = result.requests["ended_s"] - arrived_s
    until_s = float(result.requests["ended_s"].max())
    inside = mean_inside(result.steps, 2, until_s)
    expected = n / until_s * stay_s.mean()
    assert inside == pytest.approx(expected, rel=0.03)
    if seats == 2:  # not so where the queue is forgotten
        in_service_s = result.requests["ended_s"] - result.requests["admitted_s"]
        assert inside != pytest.approx(n / until_s * in_service_s.mean(), rel=0.03)


def test_request_seconds_of_steps_are_those_of_requests(rng):
    """Little's law for the decoding alone is exact: every step counts every request that is in it."""
    n = 200
    result = run(
        engine(FixedPolicy(k=2), always(2, 0.5), prefill=Chunked()),
        traffic(np.cumsum(rng.exponential(0.05, n)), 20, rng.integers(1, 100, n)),
        replicas=3,
    )
    span_s = result.requests["last_token_s"] - result.requests["first_token_s"]
    assert result.steps["decoding_s"].sum() == pytest.approx(span_s.sum(), rel=1e-9)


# --------------------------------------------------------------------------------------------------------- closed loops


def closed(users, think_s, think, prompt, output, seed=0):
    settings = ClosedLoop(users=users, think_time=think_s, think=think)
    return build_users(settings, PromptAndOutput(prompt=prompt, output=output), None, Streams(seed))


def interactive(result, horizon_s):
    """Return throughput and mean response of a closed loop."""
    done = result.requests["status"] == "finished"
    response_s = (result.requests["ended_s"] - result.requests["arrived_s"])[done]
    return done.sum() / horizon_s, float(response_s.mean())


@pytest.mark.parametrize(("users", "seats"), [(1, 8), (8, 8), (40, 8)])
def test_users_are_throughput_times_response_and_think_time(users, seats):
    """N = X (R + Z), from an empty fleet to one that is five times overbooked."""
    think_s, horizon_s = 0.5, 300.0
    result = run(
        engine(max_running=seats),
        closed(users, think_s, "fixed", Fixed(tokens=1), Fixed(tokens=30)),
        horizon_s=horizon_s,
    )
    per_s, response_s = interactive(result, horizon_s)
    # What is under way at the end belongs to no one: a turn a user at most.
    slack = 2 / (per_s * horizon_s / users)
    assert per_s * (response_s + think_s) == pytest.approx(users, rel=slack)
    # Think time counted from start to start, as if the answer were part of the pause.
    if response_s > slack * think_s * 4:
        assert per_s * max(think_s, response_s) != pytest.approx(users, rel=slack)


def test_closed_loops_keep_to_their_bounds():
    """X <= N / (R alone + Z) and X <= seats / service; near either where the other is far."""
    service_s = 0.001 + 29 * 0.01
    for users, seats in ((1, 4), (4, 4), (8, 4), (100, 4)):
        result = run(
            engine(max_running=seats, prompt_token_s=0.001),
            closed(users, 0.5, "fixed", Fixed(tokens=1), Fixed(tokens=30)),
            horizon_s=200.0,
        )
        per_s, _ = interactive(result, 200.0)
        bounds = users / (service_s + 0.5), seats / service_s
        # A last turn of each may just have ended where its pause has not.
        assert per_s - users / 200.0 <= min(bounds)
        if users == 1 or users == 100:
            assert per_s == pytest.approx(min(bounds), rel=0.05)


def repairman(users, service_s, think_s):
    """Throughput of users with exponential thoughts and one exponential server, by mean value analysis."""
    inside = 0.0
    for n in range(1, users + 1):
        response_s = service_s * (1 + inside)
        per_s = n / (response_s + think_s)
        inside = per_s * response_s
    return per_s


def test_a_closed_loop_of_exponential_users_has_the_throughput_of_mean_value_analysis():
    """Service is a prompt, exponential as far as a quantile table is."""
    # A quantile table of 200 straight pieces; its mean is taken from the table itself.
    probabilities = np.linspace(0, 1, 201)
    tokens = np.maximum(np.rint(-1000 * np.log1p(-np.minimum(probabilities, 0.9995))), 1).astype(int)
    prompt = Quantiles(probabilities=tuple(probabilities.tolist()), tokens=tuple(tokens.tolist()))
    mean_s = float((tokens[1:] + tokens[:-1]).mean() / 2 * TICK_S)
    toy = engine(prefill=Exclusive(), max_running=1, max_batch_tokens=65_536, prompt_token_s=TICK_S)
    per_s = []
    for seed in range(16):
        result = run(toy, closed(4, 3.0, "exponential", prompt, Fixed(tokens=1), seed), horizon_s=600.0)
        late = result.requests["ended_s"] > 60.0
        per_s.append(float(late.sum() / 540.0))
    p_value = stats.ttest_1samp(per_s, repairman(4, mean_s, 3.0)).pvalue
    assert p_value > FALSE_ALARM
    assert stats.ttest_1samp(per_s, repairman(4, mean_s * 1.25, 3.0)).pvalue < FALSE_ALARM


# ------------------------------------------------------------------------------------------------------------- capacity


@pytest.mark.parametrize("seats", [1, 16])
def test_an_overloaded_fleet_gives_its_capacity_and_no_more(seats, rng):
    """A decode replica of so many seats and a flat curve: seats / step tokens a second, the pool being no bound."""
    n = 40 * seats
    toy = engine(prefill=Disaggregated(replicas=4, hand_off=0.0), prompt_token_s=1e-6, max_running=seats, step_s=0.01)
    offered = traffic(np.sort(rng.uniform(0, 10, n)), 1, 201)
    result = run(toy, offered, horizon_s=40.0)
    got = metrics_of(result, 35.0, from_s=15.0, pool=4)["output_tokens_per_s_per_decode_gpu"]
    assert got == pytest.approx(seats / 0.01, rel=1e-3)


def test_speculation_raises_the_capacity_by_its_accepted_length(rng):
    """On a flat curve; the mean of 1 + k tokens a round where all is accepted, the block's survival where not."""
    for chance in (0.0, 0.5, 1.0):
        toy = engine(
            FixedPolicy(k=3), always(3, chance), prefill=Disaggregated(replicas=4, hand_off=0.0), prompt_token_s=1e-6,
            max_running=8,
        )  # fmt: skip
        result = run(toy, traffic(np.zeros(400), 1, 401), horizon_s=20.0)
        got = metrics_of(result, 20.0, from_s=2.0, pool=4)["output_tokens_per_s_per_decode_gpu"]
        accepted_length = 1 + chance + chance**2 + chance**3
        assert got == pytest.approx(8 / 0.01 * accepted_length, rel=0.03)


def test_below_capacity_what_is_offered_is_served(rng):
    arrived_s = np.sort(rng.uniform(0, 100, 500))
    result = run(engine(), traffic(arrived_s, 1, 50), horizon_s=130.0)
    assert (result.requests["status"] == "finished").all()
    got = metrics_of(result, 100.0)["output_tokens_per_s_per_gpu"]
    assert got == pytest.approx(500 * 50 / 100, rel=0.05)


def test_lognormal_lengths_are_served_in_full(rng):
    lengths = Lognormal(median=30, sigma=0.8).draw_tokens(300, rng=rng)
    result = run(engine(), traffic(np.sort(rng.uniform(0, 50, 300)), 1, lengths), horizon_s=1000.0)
    assert result.steps["output_tokens"].sum() == lengths.sum()
