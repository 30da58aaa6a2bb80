"""Traffic is what it says: arrivals, lengths, domains and thinning, each verdict with a mutant that it must convict.

A verdict is a p-value; a correct program fails one with the chance `FALSE_ALARM`. Samples are sized so that the mutant
beside it is found out on every seed: its p-value lies many orders below.
"""

import numpy as np
import pytest
from scipy import stats

from sim.rng import Streams
from sim.workload.build import ClosedLoop, Diurnal, Gamma, OnOff, Peak, Poisson, Replay, build_requests, build_users
from sim.workload.domains import DomainLaw
from sim.workload.length_source import Fixed, Lognormal, PromptAndOutput, Quantiles

pytestmark = pytest.mark.stats

FALSE_ALARM = 1e-6  # chance that a correct program fails one verdict


def acquit(p_value: float) -> None:
    assert p_value > FALSE_ALARM


def convict(p_value: float) -> None:
    assert p_value < FALSE_ALARM


def same_law(sample, cdf) -> float:
    return float(stats.kstest(sample, cdf).pvalue)


def same_count(count, expected) -> float:
    """Two-sided p-value of a Poisson count."""
    return float(min(1.0, 2 * min(stats.poisson.cdf(count, expected), stats.poisson.sf(count - 1, expected))))


def same_counts(counts, expected) -> float:
    """P-value of independent Poisson counts, by chi-square; expected counts well above 5."""
    return float(stats.chi2.sf(np.sum((counts - expected) ** 2 / expected), len(expected)))


def same_shares(counts, shares) -> float:
    return float(stats.chisquare(counts, np.asarray(shares) * np.sum(counts)).pvalue)


def same_mean(sample, mean) -> float:
    return float(stats.ttest_1samp(sample, mean).pvalue)


# ---------------------------------------------------------------------------------------------------------- Poisson


def poisson_arrivals_s(rng, rate_per_s=10.0, horizon_s=4000.0):
    return Poisson(rate_per_s=rate_per_s).draw_arrivals_s(horizon_s, rng=rng)


def clipped_arrivals_s(rng):
    """vidur's generator: gaps beyond three means are cut, which offers 5 % more load than asked."""
    gaps_s = np.minimum(rng.exponential(0.1, 50_000), 0.3)
    arrived_s = np.cumsum(gaps_s)
    return arrived_s[arrived_s < 4000]


def test_poisson_gaps_are_exponential(rng):
    acquit(same_law(np.diff(poisson_arrivals_s(rng)), stats.expon(scale=0.1).cdf))


def test_clipped_gaps_are_not(rng):
    convict(same_law(np.diff(clipped_arrivals_s(rng)), stats.expon(scale=0.1).cdf))


def test_poisson_offers_the_load_asked_for(rng):
    acquit(same_count(poisson_arrivals_s(rng).size, 40_000))


def test_a_clipped_generator_does_not(rng):
    convict(same_count(clipped_arrivals_s(rng).size, 40_000))


def test_poisson_counts_of_windows_are_independent_poisson(rng):
    counts = np.bincount((poisson_arrivals_s(rng) / 4).astype(int), minlength=1000)
    acquit(same_counts(counts, np.full(1000, 40.0)))


def test_bursty_counts_of_windows_are_not(rng):
    arrived_s = Gamma(rate_per_s=10, cv=1.5).draw_arrivals_s(4000.0, rng=rng)
    convict(same_counts(np.bincount((arrived_s / 4).astype(int), minlength=1000), np.full(1000, 40.0)))


def test_the_first_poisson_arrival_is_a_gap_after_time_0(rng):
    first_s = [float(poisson_arrivals_s(rng, 10.0, 5.0)[0]) for _ in range(2000)]
    acquit(same_law(first_s, stats.expon(scale=0.1).cdf))
    convict(same_law(np.zeros(2000), stats.expon(scale=0.1).cdf))  # one that always begins with a request


# ------------------------------------------------------------------------------------------------------------ Gamma


def gamma_gaps_s(rng, cv):
    return np.diff(Gamma(rate_per_s=10, cv=cv).draw_arrivals_s(4000.0, rng=rng))


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gamma_gaps_have_mean_and_cv(rng, cv):
    law = stats.gamma(cv**-2, scale=cv**2 / 10)
    # Times are floats: at 4000 s they cannot tell gaps below a picosecond apart, and at cv 3 these are 4 % of all.
    least_s = 1e-9

    def longer_cdf(at_s):
        return (law.cdf(at_s) - law.cdf(least_s)) / law.sf(least_s)

    def p_value(gaps_s):
        longer_s = gaps_s[gaps_s > least_s]
        share = stats.binomtest(longer_s.size, gaps_s.size, law.sf(least_s)).pvalue
        return min(share, same_law(longer_s, longer_cdf))

    acquit(p_value(gamma_gaps_s(rng, cv)))
    convict(p_value(gamma_gaps_s(rng, 1.15 * cv)))


def stationary_cdf(cv, rate_per_s):
    """Law of the time from a random moment to the next arrival: the integral of 1 - F over the mean gap."""
    shape, scale = cv**-2, cv**2 / rate_per_s
    gap, longer = stats.gamma(shape, scale=scale), stats.gamma(shape + 1, scale=scale)
    return lambda at_s: rate_per_s * at_s * gap.sf(at_s) + longer.cdf(at_s)


def test_gamma_begins_in_the_middle_of_a_gap(rng):
    law = Gamma(rate_per_s=10, cv=2)
    first_s = [float(law.draw_arrivals_s(60.0, rng=rng)[0]) for _ in range(1000)]
    acquit(same_law(first_s, stationary_cdf(2, 10)))
    fresh_s = rng.gamma(0.25, 0.4, 1000)  # a process that begins with a whole gap
    convict(same_law(fresh_s, stationary_cdf(2, 10)))


def test_gamma_offers_the_load_asked_for_over_a_short_horizon(rng):
    law = Gamma(rate_per_s=10, cv=5)
    counts = [law.draw_arrivals_s(10.0, rng=rng).size for _ in range(1500)]
    acquit(same_mean(counts, 100))
    # A fresh gap at time 0 offers (cv² − 1)/2 = 12 requests more.
    fresh = [int(np.searchsorted(np.cumsum(rng.gamma(0.04, 2.5, 2000)), 10.0)) for _ in range(1500)]
    convict(same_mean(fresh, 100))


# ----------------------------------------------------------------------------------------------------------- on/off


def test_on_off_begins_in_either_phase_by_its_share_of_time(rng):
    law = OnOff(on_per_s=1000, mean_on=1e6, mean_off=3e6)
    begins_on = sum(law.draw_arrivals_s(0.1, rng=rng).size > 0 for _ in range(4000))
    acquit(same_shares([begins_on, 4000 - begins_on], [0.25, 0.75]))
    convict(same_shares([4000, 0], [0.25, 0.75]))  # one that always begins with load


def off_phases_s(arrived_s):
    gaps_s = np.diff(arrived_s)
    return gaps_s[gaps_s > 0.05] - 0.05  # at 1000 per second no gap of a phase that is on is as long


def test_on_off_phases_are_exponential(rng):
    law = OnOff(on_per_s=1000, mean_on=0.5, mean_off=2)
    silences_s = off_phases_s(law.draw_arrivals_s(5000.0, rng=rng))
    acquit(same_law(silences_s, stats.expon(scale=2).cdf))
    convict(same_law(silences_s, stats.expon(scale=3).cdf))


def test_on_off_offers_its_mean_load(rng):
    law = OnOff(on_per_s=30, off_per_s=5, mean_on=1, mean_off=3)
    counts = [law.draw_arrivals_s(10.0, rng=rng).size for _ in range(1000)]
    acquit(same_mean(counts, law.expected_requests(10.0)))
    always_on_first = [law.draw_arrivals_s(9.0, rng=rng).size + rng.poisson(30) for _ in range(1000)]
    convict(same_mean(always_on_first, law.expected_requests(10.0)))


# ------------------------------------------------------------------------------------------------- varying with time


DIURNAL = Diurnal(mean_per_s=20, amplitude=0.8, period=1000, peak_at=300)


def expected_in_bins(law, edges_s):
    return np.diff([law.expected_requests(edge) for edge in edges_s])


def test_diurnal_follows_its_rate(rng):
    edges_s = np.linspace(0, 2500, 51)
    counts = np.histogram(DIURNAL.draw_arrivals_s(2500.0, rng=rng), edges_s)[0]
    acquit(same_counts(counts, expected_in_bins(DIURNAL, edges_s)))
    late = Diurnal(mean_per_s=20, amplitude=0.8, period=1000, peak_at=350)
    convict(same_counts(counts, expected_in_bins(late, edges_s)))
    flat = Diurnal(mean_per_s=20, amplitude=0.65, period=1000, peak_at=300)
    convict(same_counts(counts, expected_in_bins(flat, edges_s)))


def test_diurnal_thins_to_exactly_its_mean(rng):
    assert DIURNAL.expected_requests(1000) == pytest.approx(20_000)
    acquit(same_count(DIURNAL.draw_arrivals_s(1000.0, rng=rng).size, 20_000))
    candidates = Poisson(rate_per_s=36).draw_arrivals_s(1000.0, rng=rng)
    # A thinning that compares with the mean in place of the highest rate keeps too much.
    kept = candidates[rng.random(candidates.size) < np.minimum(DIURNAL.rate_per_s(candidates) / 20, 1)]
    convict(same_count(kept.size, 20_000))


PEAK = Peak(base_per_s=20, peak_per_s=80, from_=100, until=200)


def test_peak_holds_from_its_first_moment_to_its_last(rng):
    edges_s = np.array([0, 50, 99, 100, 101, 150, 199, 200, 201, 250, 300.0])
    rates_per_s = np.array([20, 20, 20, 80, 80, 80, 80, 20, 20, 20])
    counts = np.sum([np.histogram(PEAK.draw_arrivals_s(300.0, rng=rng), edges_s)[0] for _ in range(20)], axis=0)
    acquit(same_counts(counts, 20 * rates_per_s * np.diff(edges_s)))
    late = Peak(base_per_s=20, peak_per_s=80, from_=100.5, until=200.5)
    counts = np.sum([np.histogram(late.draw_arrivals_s(300.0, rng=rng), edges_s)[0] for _ in range(20)], axis=0)
    convict(same_counts(counts, 20 * rates_per_s * np.diff(edges_s)))


def test_peak_is_uniform_within(rng):
    arrived_s = PEAK.draw_arrivals_s(300.0, rng=rng)
    inside_s = arrived_s[(arrived_s >= 100) & (arrived_s < 200)]
    acquit(same_law(inside_s, stats.uniform(100, 100).cdf))
    convict(same_law(100 + 100 * ((inside_s - 100) / 100) ** 1.2, stats.uniform(100, 100).cdf))


# ----------------------------------------------------------------------------------------------------------- replay


@pytest.fixture
def replayed(tmp_path, seed):
    rows = "".join(f"{row // 4},{row + 1},1\n" for row in range(40_000))
    (tmp_path / "t.csv").write_text("arrived_s,prompt_tokens,output_tokens\n" + rows)

    def replay(**options):
        settings = Replay(path="t.csv", **{"ties": "keep", **options})
        return build_requests(settings, None, None, np.inf, Streams(seed), tmp_path)

    return replay


def test_a_sample_is_its_share_of_the_rows(replayed):
    kept = replayed(sample=0.25).arrived_s.size
    acquit(stats.binomtest(kept, 40_000, 0.25).pvalue)
    convict(stats.binomtest(replayed(sample=0.27).arrived_s.size, 40_000, 0.25).pvalue)


def test_a_sample_thins_every_row_by_its_own_lot(replayed):
    kept = replayed(sample=0.5)
    by_tie = np.bincount(np.bincount(kept.arrived_s.astype(int), minlength=10_000), minlength=5)
    acquit(same_shares(by_tie, stats.binom.pmf(range(5), 4, 0.5)))
    every_other = np.array([0, 0, 10_000, 0, 0])  # two of every four
    convict(same_shares(every_other, stats.binom.pmf(range(5), 4, 0.5)))


def test_ties_are_spread_uniformly(replayed):
    table = replayed(ties="spread")
    moved_s = table.arrived_s - (table.prompt_tokens - 1) // 4
    acquit(same_law(moved_s, stats.uniform.cdf))
    convict(same_law(moved_s**1.05, stats.uniform.cdf))


# --------------------------------------------------------------------------------------------------- what they carry


def test_lognormal_lengths_have_their_law_between_the_limits(rng):
    law = Lognormal(median=1000, sigma=1, min=200, max=4000)
    whole = stats.lognorm(1, scale=1000)
    edges = np.array([200, 300, 500, 800, 1200, 1800, 2500, 3200, 4001]) - 0.5
    shares = np.diff(whole.cdf(edges)) / (whole.cdf(4000.5) - whole.cdf(199.5))
    acquit(same_shares(np.histogram(law.draw_tokens(20_000, rng=rng), edges)[0], shares))
    clipped = np.clip(np.rint(whole.rvs(20_000, random_state=rng)), 200, 4000)
    convict(same_shares(np.histogram(clipped, edges)[0], shares))


def test_quantile_lengths_have_their_table(rng):
    law = Quantiles(probabilities=(0, 0.5, 0.9, 1), tokens=(1, 1001, 2001, 9001))
    edges = np.array([1, 1001, 2001, 9002]) - 0.5
    acquit(same_shares(np.histogram(law.draw_tokens(20_000, rng=rng), edges)[0], [0.4995 + 0.00025, 0.4, 0.10025]))
    other = Quantiles(probabilities=(0, 0.53, 0.9, 1), tokens=(1, 1001, 2001, 9001))
    convict(same_shares(np.histogram(other.draw_tokens(20_000, rng=rng), edges)[0], [0.49975, 0.4, 0.10025]))


def test_domains_have_their_shares(rng):
    shares = {"math": 0.2, "code": 0.3, "chat": 0.5}
    domain = DomainLaw(shares).domains_at(np.zeros(20_000), rng.random(20_000))
    acquit(same_shares(np.bincount(domain, minlength=3), list(shares.values())))
    convict(same_shares(np.bincount(domain, minlength=3), [0.25, 0.3, 0.45]))


def test_users_think_exponentially_and_apart(seed):
    lengths = PromptAndOutput(prompt=Lognormal(median=900, sigma=1), output=Fixed(tokens=1))
    users = build_users(ClosedLoop(users=2, think_time=2.0), lengths, None, Streams(seed))
    turns = [[users.turn(user, turn, 0.0) for turn in range(1, 4001)] for user in range(2)]
    thinks_s = [np.array([turn.think_s for turn in each]) for each in turns]
    acquit(same_law(thinks_s[0], stats.expon(scale=2).cdf))
    convict(same_law(thinks_s[0], stats.expon(scale=2.6).cdf))
    prompts = [np.array([turn.prompt_tokens for turn in each]) for each in turns]
    acquit(stats.spearmanr(prompts[0], prompts[1]).pvalue)  # users are independent of each other,
    acquit(stats.spearmanr(thinks_s[0], prompts[0]).pvalue)  # pauses of lengths,
    acquit(stats.spearmanr(prompts[0][1:], prompts[0][:-1]).pvalue)  # and turns of the turns before
    convict(stats.spearmanr(prompts[0], prompts[0] + 0.1 * prompts[1]).pvalue)
