"""A replica of one seat is a queue with one server: exact by Lindley, and on average by Pollaczek-Khinchine.

Service is either a prompt alone (a step as long as the prompt) or a prompt and its decoding, a step a token; lengths
are fixed (M/D/1) or geometric in ticks of a thousandth of their mean (M/M/1 but for the grid, whose formula is exact).
"""

import math

import numpy as np
import pytest
from scipy import stats

from sim.batching import Chunked, Exclusive
from tests.helpers.fleet import engine, run, traffic

FALSE_ALARM = 1e-6  # chance that a correct program fails one verdict
TICK_S = 1e-3
LOAD = 0.7


def prompts_only():
    """Serve a request in one step, a tick a prompt token."""
    return engine(prefill=Exclusive(), max_running=1, max_batch_tokens=65_536, prompt_token_s=TICK_S)


def step_by_step(step_s=0.1):
    """Serve a request in as many steps as it has tokens, the first for its prompt."""
    return engine(prefill=Chunked(chunk_tokens=1), max_running=1, step_s=step_s, prompt_token_s=step_s)


def lindley(arrived_s, service_s):
    """Return when each service begins, first come first served: its arrival or the end of the one before."""
    start_s, free_s = np.empty(arrived_s.size), 0.0
    for i, (arrived, service) in enumerate(zip(arrived_s, service_s, strict=True)):
        start_s[i] = max(arrived, free_s)
        free_s = start_s[i] + service
    return start_s


def poisson(rate_per_s, n, rng):
    return np.cumsum(rng.exponential(1 / rate_per_s, n))


# ----------------------------------------------------------------------------------------------- every request, exactly


@pytest.mark.parametrize("load", [0.3, 0.9, 1.3])
def test_every_service_begins_when_lindley_says(load, rng):
    """Below saturation, near it and above: no time is lost between two services, and none is won."""
    arrived_s = poisson(load, 1500, rng)
    prompts = rng.geometric(TICK_S, 1500)
    requests = run(prompts_only(), traffic(arrived_s, prompts, 1), horizon_s=1e6).requests
    start_s = lindley(arrived_s, prompts * TICK_S)
    np.testing.assert_allclose(requests["admitted_s"], start_s, rtol=1e-12)
    np.testing.assert_allclose(requests["ended_s"], start_s + prompts * TICK_S, rtol=1e-12)


def test_step_by_step_it_is_the_same_queue(rng):
    arrived_s, tokens = poisson(0.8, 800, rng), rng.geometric(0.1, 800)
    requests = run(step_by_step(), traffic(arrived_s, 1, tokens), horizon_s=1e6).requests
    start_s = lindley(arrived_s, tokens * 0.1)
    np.testing.assert_allclose(requests["admitted_s"], start_s, rtol=1e-9)
    np.testing.assert_allclose(requests["first_token_s"], start_s + 0.1, rtol=1e-9)
    np.testing.assert_allclose(requests["ended_s"], start_s + tokens * 0.1, rtol=1e-9)


@pytest.mark.parametrize("lost_s", [1e-3, -1e-3])
def test_a_thousandth_lost_or_won_between_services_would_show(lost_s, rng):
    """The fault that cost a simulator a fifth of its capacity: no time, or too much, between steps."""
    arrived_s = poisson(0.9, 500, rng)
    prompts = rng.geometric(TICK_S, 500)
    requests = run(prompts_only(), traffic(arrived_s, prompts, 1), horizon_s=1e6).requests
    mutant_s = lindley(arrived_s, prompts * TICK_S + lost_s)
    assert not np.allclose(requests["admitted_s"], mutant_s, rtol=1e-12)


def test_several_servers_are_several_queues(rng):
    """Round robin to three replicas: every third arrival, each queue by itself."""
    arrived_s = poisson(2.4, 900, rng)
    prompts = rng.geometric(TICK_S, 900)
    requests = run(prompts_only(), traffic(arrived_s, prompts, 1), horizon_s=1e6, replicas=3).requests
    for index in range(3):
        mine = slice(index, None, 3)
        start_s = lindley(arrived_s[mine], prompts[mine] * TICK_S)
        np.testing.assert_allclose(requests["admitted_s"][mine], start_s, rtol=1e-12)


def test_as_many_seats_as_requests_is_no_queue(rng):
    """Steps of one length and seats for all (M/D/inf at a step's grid): each waits for a step's end at most."""
    arrived_s = poisson(5.0, 500, rng)
    toy = engine(
        max_running=500, step_s=0.01, prompt_token_s=0.0, prefill=Chunked(chunk_tokens=500), prompt_floor_s=0.01
    )
    requests = run(toy, traffic(arrived_s, 1, 100), horizon_s=1e6).requests
    assert (requests["admitted_s"] - arrived_s <= 0.01 + 1e-9).all()
    np.testing.assert_allclose(requests["ended_s"] - requests["admitted_s"], 1.0, rtol=1e-9)


# ----------------------------------------------------------------------------------------------------------- on average


def replications(rng, rate_per_s, draw_prompts, runs, each):
    """Return the mean wait of each of several independent runs, after the first tenth."""
    waits = []
    for _ in range(runs):
        arrived_s = poisson(rate_per_s, each, rng)
        requests = run(prompts_only(), traffic(arrived_s, draw_prompts(each), 1), horizon_s=1e7).requests
        waits.append(float((requests["admitted_s"] - arrived_s)[each // 10 :].mean()))
    return np.array(waits)


def p_value(sample, mean):
    return float(stats.ttest_1samp(sample, mean).pvalue)


def pollaczek_khinchine(rate_per_s, mean_s, mean_square_s):
    return rate_per_s * mean_square_s / (2 * (1 - rate_per_s * mean_s))


def geometric(rng, scale=1.0):
    return lambda n: rng.geometric(TICK_S / scale, n)


def fixed(scale=1.0):
    return lambda n: np.full(n, round(scale / TICK_S))


MD1_WAIT_S = pollaczek_khinchine(LOAD, 1.0, 1.0)
MM1_WAIT_S = pollaczek_khinchine(LOAD, 1.0, 2.0 - TICK_S)


def test_the_formulas_are_the_known_ones():
    assert pytest.approx(LOAD / (2 * (1 - LOAD))) == MD1_WAIT_S
    assert pytest.approx(LOAD / (1 - LOAD), rel=1e-3) == MM1_WAIT_S


def test_md1_waits_as_long_as_theory_says(rng):
    assert p_value(replications(rng, LOAD, fixed(), 24, 500), MD1_WAIT_S) > FALSE_ALARM


def test_md1_served_a_tenth_slower_is_found_out(rng):
    assert p_value(replications(rng, LOAD, fixed(1.1), 24, 500), MD1_WAIT_S) < FALSE_ALARM


def test_mm1_waits_as_long_as_theory_says(rng):
    assert p_value(replications(rng, LOAD, geometric(rng), 24, 500), MM1_WAIT_S) > FALSE_ALARM


def test_md1_is_not_mm1(rng):
    assert p_value(replications(rng, LOAD, fixed(), 24, 500), MM1_WAIT_S) < FALSE_ALARM


def test_the_share_that_need_not_wait_is_one_less_the_load(rng):
    """And the share that stays longer than t in an M/M/1 is exp(-(1 - load) t)."""
    free, long = [], []
    for _ in range(24):
        arrived_s = poisson(LOAD, 500, rng)
        requests = run(prompts_only(), traffic(arrived_s, rng.geometric(TICK_S, 500), 1), horizon_s=1e7).requests
        free.append(float((requests["admitted_s"] == arrived_s)[50:].mean()))
        long.append(float((requests["ended_s"] - arrived_s > 4.0)[50:].mean()))
    assert p_value(np.array(free), 1 - LOAD) > FALSE_ALARM
    assert p_value(np.array(long), math.exp(-(1 - LOAD) * 4.0)) > FALSE_ALARM
    assert p_value(np.array(free), 0.0) < FALSE_ALARM
