"""Distributions, draws and the acceptance test, each alone."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoder.accept import judge, residual
from decoder.chance import KeyedLuck, token_at
from decoder.errors import NotFiniteError, RequestError
from decoder.sampling import DraftSampler, Sampling, Shaper, shape
from decoder.session import Decoder, Request
from decoder.stopping import Limits
from sim.verify.fixed import Fixed
from sim.verify.none import NoSpeculation
from tests.decoder.law import shaped, target_law
from tests.decoder.toys import TableDrafter, TableTarget, tiny_drafter

FALSE_ALARM = 1e-6  # chance that a correct program fails one verdict
CPU = torch.device("cpu")


def assert_law(counts, probs, power_against=None):
    """Chi-square goodness of fit; with ``power_against``, also that this other law would have been refused."""
    counts, probs = np.asarray(counts, float), np.asarray(probs, float)
    assert counts[probs == 0].sum() == 0, "something impossible occurred"
    held = probs > 0
    total = counts.sum()
    statistic = ((counts[held] - total * probs[held]) ** 2 / (total * probs[held])).sum()
    limit = scipy.stats.chi2.isf(FALSE_ALARM, held.sum() - 1)
    assert statistic < limit, f"chi-square {statistic:.1f} above {limit:.1f}"
    if power_against is not None:
        other = np.asarray(power_against, float)[held]
        missed = total * ((other - probs[held]) ** 2 / probs[held]).sum()
        assert scipy.stats.ncx2.cdf(limit, held.sum() - 1, missed) < 1e-3, "too few draws to tell the laws apart"


@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=9),
    st.floats(0.1, 4) | st.just(0.0),
    st.integers(0, 9),
    st.floats(0.05, 1),
    st.floats(0, 0.9),
    st.floats(0.3, 3),
    st.sets(st.integers(0, 8)),
)
def test_shape_equals_the_naive_rule(logits, temperature, top_k, top_p, min_p, penalty, seen):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    seen = {token for token in seen if token < len(logits)}
    # A distribution whose logs are the logits, since the naive rule starts from probabilities.
    logits = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1)
    mask = torch.zeros(1, len(logits), dtype=torch.bool)
    mask[0, sorted(seen)] = True
    found = shape(logits[None], sampling, mask)[0]
    want = shaped(logits.exp().numpy(), sampling, seen)
    assert found.sum() == pytest.approx(1)
    near_a_cut = {top_p, min_p} - {1.0, 0.0}
    if near_a_cut and np.flatnonzero(found.numpy()).tolist() != np.flatnonzero(want).tolist():
        return  # rounding decides at a cut; the exact cases below have none
    np.testing.assert_allclose(found.numpy(), want, atol=1e-9)


@pytest.mark.parametrize(
    "sampling, kept",
    (
        (Sampling(top_k=2), [0, 1]),
        (Sampling(top_p=0.5), [0]),
        (Sampling(top_p=0.51), [0, 1]),
        (Sampling(min_p=0.4), [0, 1]),
        (Sampling(top_k=3, top_p=0.8), [0, 1]),
        (Sampling(temperature=0), [0]),
    ),
)
def test_cuts(sampling, kept):
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]], dtype=torch.float64).log()
    assert torch.nonzero(shape(logits, sampling)[0]).flatten().tolist() == kept


@pytest.mark.parametrize("sampling", (Sampling(temperature=0), Sampling(top_k=1), Sampling(top_p=1e-9)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
def test_a_tie_goes_to_the_lowest_id(sampling, dtype):
    logits = torch.full((3, 50_000), -1.0, dtype=dtype)
    for row, ids in enumerate(((7, 11, 49_999), (49_998, 49_999), (0, 1))):
        logits[row, list(ids)] = 1.0
    assert shape(logits, sampling).argmax(-1).tolist() == [7, 49_998, 0]
    assert (shape(logits, sampling).max(-1).values == 1).all()


def test_temperature_zero_divides_nothing():
    with np.errstate(all="raise"):
        probs = shape(torch.tensor([[1e30, -1e30, 0.0]]), Sampling(temperature=0))
    assert probs.tolist() == [[1, 0, 0]]


def test_penalty_counts_drafts_in_order_and_only_the_committed():
    """In the block "a a a" the second position sees the first, and nothing rejected is remembered."""
    shaper = Shaper(Sampling(repetition_penalty=2), 2, CPU)
    logits = torch.tensor([[2.0, 0.0]], dtype=torch.float64).repeat(3, 1)
    rows = shaper.probs(logits, [0, 0])
    fresh, penalized = torch.softmax(logits[0], -1), torch.softmax(torch.tensor([1.0, 0.0], dtype=torch.float64), -1)
    torch.testing.assert_close(rows, torch.stack([fresh, penalized, penalized]))
    torch.testing.assert_close(shaper.probs(logits[:1])[0], fresh)
    sampler = DraftSampler(shaper, KeyedLuck(0, "x"), 0, greedy=True)
    for _ in range(2):
        sampler.draw(logits[0])
    assert sampler.token_ids == [0, 0]
    shaper.commit([0])
    torch.testing.assert_close(shaper.probs(logits[:1])[0], penalized)


@pytest.mark.parametrize(
    "settings, key",
    (
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 1.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ),
)
def test_impossible_settings_are_refused_by_name(settings, key):
    with pytest.raises(RequestError, match=f"^{key}: expected .*; got"):
        Sampling(**settings)


def test_every_fault_is_reported_at_once():
    with pytest.raises(RequestError) as caught:
        Sampling(temperature=-1, top_p=0, repetition_penalty=0)
    assert len(caught.value.faults) == 3


@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_logits_that_are_not_finite_are_no_distribution(bad):
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    for sampling in (Sampling(), Sampling(temperature=0), Sampling(top_k=1)):
        with pytest.raises(NotFiniteError, match="row 1 of 3"):
            Shaper(sampling, 4, CPU).probs(logits)
    with pytest.raises(NotFiniteError):
        Shaper(Sampling(), 4, CPU).probs(torch.full((1, 4), -math.inf))
    # One impossible token is no fault.
    assert Shaper(Sampling(), 2, CPU).probs(torch.tensor([[0.0, -math.inf]])).tolist() == [[1, 0]]


def test_greedy_is_named_as_such():
    assert Sampling(temperature=1, top_k=1).greedy
    assert Sampling(temperature=0).greedy
    assert not Sampling(temperature=1, top_k=2).greedy


# Draws


@given(st.floats(0, 1, exclude_max=True), st.lists(st.just(0.0) | st.floats(1e-6, 1), min_size=1, max_size=8))
def test_a_draw_never_returns_the_impossible(level, weights):
    weights[len(weights) // 2] += 0.5
    probs = torch.tensor(weights, dtype=torch.float32)
    probs = probs / probs.sum()
    token = token_at(probs, level)
    assert probs[token] > 0
    below = float(probs[:token].double().sum() / probs.double().sum())
    assert below <= level + 1e-9


@pytest.mark.parametrize("probs", ([0.0, 0.0], [math.nan, 1.0]))
def test_a_draw_from_nothing_is_an_error(probs):
    with pytest.raises(ValueError, match="not a distribution"):
        token_at(torch.tensor(probs), 0.5)


def test_the_distribution_tested_is_the_one_sampled():
    """bfloat16 logits with two near-equal tokens: q handed to the test is bit for bit the q that was drawn from."""

    class Watching(KeyedLuck):
        drawn: list = []  # noqa: RUF012

        def draft(self, probs, anchor_position, offset):
            self.drawn.append(probs.clone())
            return super().draft(probs, anchor_position, offset)

    luck = Watching(1, "r")
    sampler = DraftSampler(Shaper(Sampling(), 3, CPU), luck, 0)
    logits = torch.tensor([1.0, 1.0078125, -2.0], dtype=torch.bfloat16)
    for _ in range(4):
        sampler.draw(logits)
    assert sampler.probs.dtype == torch.float32
    assert torch.equal(sampler.probs, torch.stack(luck.drawn))


@pytest.mark.stats
def test_draws_follow_bfloat16_logits(seed):
    logits = torch.tensor([1.0, 1.0078125, -2.0, 0.5], dtype=torch.bfloat16)
    probs = shape(logits[None], Sampling())[0]
    luck, draws = KeyedLuck(seed, "r"), 20_000
    counts = np.bincount([luck.token(probs, position) for position in range(draws)], minlength=4)
    expected = torch.softmax(logits.double(), -1).numpy()
    skewed = expected + np.array([0.04, -0.04, 0, 0])
    assert_law(counts, expected, power_against=skewed)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_law(counts, skewed)


def outputs(decoder, requests, length):
    """Decode many toy requests and count their outputs as numbers in base 3."""
    found = decoder.generate(requests)
    return [sum(token * 3**k for k, token in enumerate(g.output_ids[:length])) for g in found]


TABLE = [[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [1 / 3, 1 / 3, 1 / 3]]


@pytest.mark.stats
@pytest.mark.parametrize(
    "kind, sampling, count",
    (
        ("table", Sampling(), 700),
        ("table", Sampling(temperature=0.6, top_p=0.8), 700),
        ("dspark_rnn", Sampling(), 250),
    ),
    ids=str,
)
def test_sampled_output_follows_the_target(kind, sampling, count, seed):
    target = TableTarget(TABLE)
    drafter = TableDrafter([[0.2, 0.5, 0.3]] * 3, 2) if kind == "table" else tiny_drafter(kind, 3, 2)
    decoder = Decoder(target, drafter, Fixed(k=2))
    length = 3
    requests = [
        Request(request_id=str(i), prompt_ids=(0,), limits=Limits(max_new_tokens=length), sampling=sampling, seed=seed)
        for i in range(count)
    ]
    counts = np.bincount(outputs(decoder, requests, length), minlength=27)
    law = np.zeros(27)
    for output, chance in target_law(target, sampling, (0,), length).items():
        law[sum(token * 3**k for k, token in enumerate(output))] = chance
    assert_law(counts, law)


@pytest.mark.stats
def test_the_chi_square_has_teeth(seed):
    """Draft tokens drawn from a skewed copy of the distribution that is tested: refused."""

    class Skewed(KeyedLuck):
        def draft(self, probs, anchor_position, offset):
            skewed = probs.clone()
            skewed[0] += 2
            return super().draft(skewed / skewed.sum(), anchor_position, offset)

    target = TableTarget(TABLE)
    decoder = Decoder(
        target, TableDrafter([[0.2, 0.5, 0.3]] * 3, 2), Fixed(k=2), luck=lambda r: Skewed(r.seed, r.request_id)
    )
    requests = [
        Request(request_id=str(i), prompt_ids=(0,), limits=Limits(max_new_tokens=3), seed=seed) for i in range(700)
    ]
    counts = np.bincount(outputs(decoder, requests, 3), minlength=27)
    law = np.zeros(27)
    for output, chance in target_law(target, Sampling(), (0,), 3).items():
        law[sum(token * 3**k for k, token in enumerate(output))] = chance
    with pytest.raises(AssertionError, match="chi-square"):
        assert_law(counts, law)


def test_sampling_is_not_silently_greedy():
    """300 seeds over three equal tokens: all three occur, and in the draft path too."""
    flat = [[1 / 3] * 3] * 3
    for drafter, policy in ((None, NoSpeculation()), (TableDrafter(flat, 2), Fixed(k=2))):
        decoder = Decoder(TableTarget(flat), drafter, policy)
        seen = set()
        for seed in range(300):
            request = Request(request_id="r", prompt_ids=(0,), limits=Limits(max_new_tokens=2), seed=seed)
            seen.add(tuple(decoder.generate([request])[0].output_ids))
        assert len(seen) == 9


# The acceptance test


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6), st.lists(st.floats(0.01, 1), min_size=2, max_size=6))
def test_residual_and_ratio_rebuild_the_target(target, draft):
    n = min(len(target), len(draft))
    p = torch.tensor(target[:n], dtype=torch.float64)
    q = torch.tensor(draft[:n], dtype=torch.float64)
    p, q = p / p.sum(), q / q.sum()
    accepted = torch.minimum(p, q)
    rebuilt = accepted + (1 - accepted.sum()) * residual(p, q)
    torch.testing.assert_close(rebuilt, p, atol=1e-12, rtol=0)


class Fixed01:
    """Luck that accepts as told."""

    def __init__(self, outcomes):
        self.outcomes = list(outcomes)
        self.asked = []

    def accepts(self, chance, position):
        self.asked.append((round(chance, 9), position))
        return self.outcomes[len(self.asked) - 1]

    def token(self, probs, position):
        self.drawn = (probs, position)
        return int(probs.argmax())


def test_nothing_after_a_rejection_is_judged():
    q = torch.full((4, 2), 0.5, dtype=torch.float64)
    p = torch.tensor([[0.4, 0.6]] * 5, dtype=torch.float64)
    luck = Fixed01([True, False, True, True])
    verdict = judge([0, 0, 0, 0], q, p, luck, 10)
    assert verdict.accepted_draft_tokens == 1
    assert luck.asked == [(0.8, 10), (0.8, 11)]
    assert luck.drawn[1] == 11
    assert luck.drawn[0].tolist() == pytest.approx([0, 1])


def test_the_bonus_comes_from_the_row_after_the_last_accepted():
    q = torch.full((2, 3), 1 / 3, dtype=torch.float64)
    p = torch.eye(3, dtype=torch.float64)
    assert judge([0, 1], q, p, Fixed01([True, True]), 0).bonus_token == 2
    assert judge([], q, p[:1], Fixed01([]), 0).bonus_token == 0


def test_a_draft_token_without_probability_is_a_bug_that_is_raised():
    with pytest.raises(ValueError, match="no chance"):
        judge([0], torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]] * 2), KeyedLuck(0, "r"), 0)


def test_luck_is_keyed_and_even(seed):
    luck = KeyedLuck(seed, "request 17")
    assert luck.uniform("token", 5) == KeyedLuck(seed, "request 17").uniform("token", 5)
    others = {
        luck.uniform("token", 6),
        luck.uniform("acceptance", 5),
        KeyedLuck(seed, "request 18").uniform("token", 5),
        KeyedLuck(seed + 1, "request 17").uniform("token", 5),
    }
    assert luck.uniform("token", 5) not in others
    assert len(others) == 4
    values = np.array([luck.uniform("draft", place) for place in range(20_000)])
    assert scipy.stats.kstest(values, "uniform").pvalue > FALSE_ALARM
    assert scipy.stats.kstest((values[1:] - values[:-1]) % 1, "uniform").pvalue > FALSE_ALARM
