"""The acceptance process as a fleet meets it: survival, spread, confidence; each verdict with a mutant it must convict.

A verdict is a z-score over requests, which are independent of each other (their rounds are not). A correct program
fails one with the chance `FALSE_ALARM`.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from scipy.special import ndtr, roots_hermitenorm
from scipy.stats import norm, rankdata

from profiles.schema import Spread
from sim.acceptance import GRID_POINTS, GRID_REACH, solve_means
from sim.batching import Chunked
from tests.helpers.fleet import TOY, Spy, accepts, always, at_once, engine, law, run

FALSE_ALARM = 1e-6  # chance that a correct program fails one verdict
LIMIT = norm.isf(FALSE_ALARM / 2)

SURVIVAL = (0.8, 0.62, 0.48, 0.36, 0.27)


def z_score(by_request):
    """Standardise a sum over independent requests whose mean should be 0."""
    return float(by_request.sum() / np.sqrt((by_request**2).sum()))


def acquit(by_request):
    assert abs(z_score(by_request)) < LIMIT


def convict(by_request):
    assert abs(z_score(by_request)) > LIMIT


def watch(tables, requests, output, take, seed, sees_outcome):
    spy = Spy(take=take, sees_outcome=sees_outcome)
    most = requests * (1 + tables.draft_length)
    # All prompts in the first step, so that all requests stand at the same place ever after.
    toy = engine(
        spy,
        tables,
        max_running=requests,
        max_batch_tokens=most,
        prefill=Chunked(chunk_tokens=requests),
        seed=seed,
    )
    run(toy, at_once(requests, output=output))
    return spy.seen


def at_every_place(tables, requests, output, seed):
    """Return what a block shows and what becomes of it at every place: ``[requests, places, draft_length]`` each."""
    seen, held = (
        np.array(watch(tables, requests, output, 0, seed, outcome)).transpose(1, 0, 2) for outcome in (False, True)
    )
    return seen, held.astype(bool)


# ------------------------------------------------------------------------------------------------------------- survival

WIDE = {"request_sd": 0.8, "token_sd": 0.7}


def survival_of_rounds(tables, seed, requests=400, output=300):
    """Return rounds of each request and how many of them survived each position, full blocks verified."""
    rounds, survived = np.zeros(requests), np.zeros((requests, len(SURVIVAL)))
    place = np.ones(requests, int)
    for held in watch(tables, requests, output, None, seed, sees_outcome=True):
        there = np.flatnonzero(place < output)
        rounds[there] += 1
        survived[there] += held
        place[there] += held.sum(axis=1).astype(int) + 1
    return rounds, survived


def with_means(means, tables):
    """Return tables with other means, the rest as it is."""
    grid = np.linspace(-GRID_REACH, GRID_REACH, GRID_POINTS)
    return dataclasses.replace(tables, chance=ndtr(np.asarray(means)[None, :, None] + grid))


@pytest.mark.parametrize("spread", [{}, {"token_sd": 1.0}, {"request_sd": 0.8}, WIDE], ids=lambda one: "-".join(one))
def test_the_share_of_rounds_that_survive_is_the_published_one(spread, seed):
    rounds, survived = survival_of_rounds(accepts(law(SURVIVAL, **spread)), seed)
    for k, share in enumerate(SURVIVAL):
        acquit(survived[:, k] - share * rounds)


def test_means_that_forget_that_slow_requests_have_more_rounds_are_found_out(seed):
    nodes, weights = roots_hermitenorm(64)
    weights /= weights.sum()
    widen = np.sqrt(1 + WIDE["token_sd"] ** 2)
    grid = np.linspace(-4, 6, 20001)
    means, alive = [], weights
    for share in SURVIVAL:
        reached = ndtr((grid[:, None] + WIDE["request_sd"] * nodes) / widen) @ alive
        means.append(grid[np.argmin(abs(reached - share))])
        alive = alive * ndtr((means[-1] + WIDE["request_sd"] * nodes) / widen)
    rounds, survived = survival_of_rounds(with_means(means, accepts(law(SURVIVAL, **WIDE))), seed, 1500)
    convict(survived[:, -1] - SURVIVAL[-1] * rounds)


def test_a_survival_that_is_5_percent_off_is_found_out(seed):
    rounds, survived = survival_of_rounds(accepts(law([0.95 * share for share in SURVIVAL], token_sd=1.0)), seed)
    for k, share in enumerate(SURVIVAL):
        convict(survived[:, k] - share * rounds)


def test_accepted_length_is_1_and_the_sum_of_survivals(seed):
    rounds, survived = survival_of_rounds(accepts(law(SURVIVAL, **WIDE)), seed)
    acquit(survived.sum(axis=1) - sum(SURVIVAL) * rounds)


# ----------------------------------------------------------------------------------------------------- luck and its kin


def test_luck_is_a_fair_die_at_every_place_and_for_every_request(seed):
    """Chance 0.6 everywhere: singly, with the next place, with the next request, with another seed."""
    _, held = at_every_place(always(2, 0.6), 400, 200, seed)
    _, others = at_every_place(always(2, 0.6), 400, 200, seed + 1)
    one = held[:, :, 0]
    acquit((one - 0.6).sum(axis=1))
    acquit((one[:, 1:] * one[:, :-1] - 0.36).sum(axis=1))
    acquit((one[1::2] * one[::2] - 0.36).sum(axis=1))
    acquit((one * others[:, :, 0] - 0.36).sum(axis=1))
    convict((one - 0.6 * 1.05).sum(axis=1))
    convict((one * one - 0.36).sum(axis=1))  # a die thrown once for two


@pytest.mark.parametrize("request_sd", [0.0, 0.9])
def test_rounds_of_one_request_are_alike_as_far_as_the_spread_says(request_sd, seed):
    """The share of pairs of places of one request that both hold: the mean square of the request's own chance."""
    means = solve_means(SURVIVAL, Spread(request_sd=request_sd, token_sd=0.5, provenance=TOY))
    nodes, weights = roots_hermitenorm(64)
    own = ndtr((means[0] + request_sd * nodes) / np.sqrt(1.25))
    pairs_hold = float((weights / weights.sum()) @ own**2)
    _, held = at_every_place(accepts(law(SURVIVAL, request_sd=request_sd, token_sd=0.5)), 4000, 60, seed)
    places = held.shape[1]
    count = held[:, :, 0].sum(axis=1)
    pairs = count * (count - 1) / (places * (places - 1))
    acquit(pairs - pairs_hold)
    if request_sd:
        convict(pairs - float((weights / weights.sum()) @ own) ** 2)


def test_requests_of_one_run_differ_more_than_their_luck_alone(seed):
    """Variance of the accepted share against a binomial's: as it should be without spread between requests."""

    def excess(request_sd):
        _, held = at_every_place(accepts(law(SURVIVAL, request_sd=request_sd)), 500, 100, seed)
        share = held[:, :, 0].mean(axis=1)
        mean = share.mean()
        return (share - mean) ** 2 - mean * (1 - mean) / held.shape[1]

    acquit(excess(0.0))
    convict(excess(0.6))


# ----------------------------------------------------------------------------------------------------------- confidence


def calibration(seen, held, low, high):
    """Return, by request, outcome less confidence over the blocks whose confidence lies in [low, high)."""
    there = (seen >= low) & (seen < high)
    return ((held - seen) * there).sum(axis=1)


def bins(seen):
    edges = np.quantile(seen, np.linspace(0, 1, 9))
    edges[-1] += 1e-9
    return list(itertools.pairwise(edges))


def first_tokens_of_rounds(tables, requests, output, seed):
    """Return request, confidence and outcome of the first draft token of every round of a run."""
    place, found = np.ones(requests, int), []
    shown, outcome = (watch(tables, requests, output, None, seed, sees_outcome) for sees_outcome in (False, True))
    for confidence, held in zip(shown, outcome, strict=True):
        there = np.flatnonzero(place < output)
        found.append((there, confidence[:, 0], held[:, 0]))
        place[there] += held.sum(axis=1).astype(int) + 1
    return (np.concatenate(column) for column in zip(*found, strict=True))


@pytest.mark.parametrize("noise_sd", [0.0, 0.5, 1.5])
def test_calibrated_confidence_is_the_chance_in_every_bin(noise_sd, seed):
    requests = 800
    request, seen, held = first_tokens_of_rounds(accepts(law(SURVIVAL, noise_sd=noise_sd, **WIDE)), requests, 200, seed)
    for low, high in bins(seen):
        there = (seen >= low) & (seen < high)
        acquit(np.bincount(request[there], weights=(held - seen)[there], minlength=requests))


@pytest.mark.parametrize("k", [0, 4])
def test_calibrated_confidence_is_the_chance_in_the_rounds_of_a_run(k, seed):
    """Slow requests have more rounds, and a prefix that held is the sign of a good one; calibration knows both."""
    tables = accepts(law(SURVIVAL, noise_sd=0.7, **WIDE))
    requests, output = 1000, 300
    place, excess = np.ones(requests, int), np.zeros(requests)
    shown, outcome = (watch(tables, requests, output, None, seed, sees_outcome) for sees_outcome in (False, True))
    for confidence, held in zip(shown, outcome, strict=True):
        there = np.flatnonzero(place < output)
        reached = held[:, :k].all(axis=1)
        excess[there] += (held[:, k] - confidence[:, k]) * reached
        place[there] += held.sum(axis=1).astype(int) + 1
    acquit(excess)


@pytest.mark.parametrize("noise_sd", [0.0, 0.7])
def test_calibrated_confidence_is_the_chance_at_every_position_given_that_the_prefix_held(noise_sd, seed):
    tables = accepts(law(SURVIVAL, noise_sd=noise_sd, token_sd=1.0))
    seen, held = at_every_place(tables, 800, 100, seed)
    for k in range(1, len(SURVIVAL)):
        reached = held[:, :, k - 1]
        confidence = np.where(reached, seen[:, :, k], -1.0)
        for low, high in bins(seen[:, :, k][reached]):
            acquit(calibration(confidence, held[:, :, k], low, high))


def test_raw_confidence_is_overconfident_as_configured(seed):
    """At temperature 2 the high ones promise too much and the low ones too little."""
    tables = accepts(law(SURVIVAL, raw_temperature=2.0, noise_sd=0.3, **WIDE), confidence="raw")
    seen, held = at_every_place(tables, 800, 100, seed)
    high = calibration(seen[:, :, 0], held[:, :, 0], 0.8, 1.1)
    low = calibration(seen[:, :, 0], held[:, :, 0], 0.0, 0.3)
    convict(high)
    convict(low)
    assert high.sum() < 0 < low.sum()


def auc(seen, held):
    """Chance that an accepted block was trusted more than a rejected one."""
    ranks = rankdata(seen)
    yes = held.sum()
    return (ranks[held].sum() - yes * (yes + 1) / 2) / (yes * (held.size - yes))


def test_noise_makes_confidence_worse_at_telling_the_good_from_the_bad(seed):
    quality = []
    for noise_sd in (0.0, 0.5, 1.0, 3.0):
        seen, held = at_every_place(accepts(law(SURVIVAL, noise_sd=noise_sd, **WIDE)), 400, 100, seed)
        quality.append(auc(seen[:, :, 0].ravel(), held[:, :, 0].ravel()))
    assert quality == sorted(quality, reverse=True)
    assert quality[0] > 0.7
    assert 0.5 < quality[-1] < 0.9 * quality[0]


def test_confidence_given_to_policies_is_monotone_in_what_it_sees(seed):
    """Raw and calibrated rank alike, whatever the temperature."""
    model = law(SURVIVAL, raw_temperature=1.7, noise_sd=0.4, **WIDE)
    calibrated, _ = at_every_place(accepts(model), 50, 50, seed)
    raw, _ = at_every_place(accepts(model, confidence="raw"), 50, 50, seed)
    np.testing.assert_array_equal(np.argsort(raw[..., 0].ravel()), np.argsort(calibrated[..., 0].ravel()))
