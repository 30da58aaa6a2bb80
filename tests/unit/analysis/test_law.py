"""The law that is fitted to a bank: it finds what a bank was drawn from, and takes its place in the simulator."""

import dataclasses

import numpy as np
import pytest

from analysis.validate.law import Pair, frontier_section, load_pairs, markdown, simulate_pairs
from profiles.files import find_profile, load_profile
from profiles.recipes.banks import expected_length, fit_law, follow
from tests.helpers.banks import made_bank, save_banks

MEANS = [0.6, 0.5, 0.4]
ONES = (1.0,) * len(MEANS)


@pytest.mark.parametrize(("request_sd", "token_sd"), [(0.4, 0.8), (0.0, 0.5), (0.7, 0.3)])
def test_the_spread_that_a_bank_was_drawn_with_is_found(request_sd, token_sd):
    bank = made_bank(MEANS, texts=300, positions=60, request_sd=request_sd, token_sd=token_sd)
    law = fit_law(bank, ONES, "a test")
    # Between 300 texts a standard deviation is known to 1/sqrt(600) = 4 %: three times that.
    assert law.spread.request_sd == pytest.approx(request_sd, abs=0.05 + 0.12 * request_sd)
    assert law.spread.token_sd == pytest.approx(token_sd, abs=0.1)
    assert law.confidence.noise_sd < 0.25
    np.testing.assert_allclose(law.survival.values, follow(bank).survival)


def test_noise_of_the_confidence_is_found():
    bank = made_bank(MEANS, texts=200, positions=60, noise_sd=0.8)
    assert fit_law(bank, ONES, "a test").confidence.noise_sd == pytest.approx(0.8, abs=0.2)


def test_a_bank_of_certainties_has_the_widest_spread():
    bank = made_bank(MEANS, texts=50)
    sure = dataclasses.replace(bank, chance=bank.accepted.astype(float))
    law = fit_law(sure, ONES, "a test")
    assert np.hypot(law.spread.request_sd, law.spread.token_sd) == pytest.approx(5.0, abs=0.01)
    assert law.confidence.noise_sd > 0.5


def test_following_by_chance_and_by_outcomes_agree_where_chances_say_it_all():
    bank = made_bank(MEANS, texts=400, positions=60, request_sd=0.5)
    rounds = follow(bank)
    residual = rounds.emitted - rounds.accepted_length * rounds.rounds
    sd = np.sqrt((residual**2).sum()) / rounds.rounds.sum()
    assert abs(expected_length(bank) - rounds.accepted_length) < 4.9 * sd  # false alarm: 1e-6


def test_law_and_bank_meet_in_the_simulator_and_a_wrong_law_does_not(tmp_path):
    path = save_banks(tmp_path, "toy_t1", {"dspark": {"code": made_bank(MEANS, texts=100)}})
    (pair,) = load_pairs(tmp_path)
    assert (pair.name, pair.path) == ("code, t=1", path)
    wrong = fit_law(made_bank([mean - 0.4 for mean in MEANS], texts=100), ONES, "a test")
    steps = load_profile(find_profile("engines/qwen3_8b_h20")).step_time
    right, off = (
        frontier_section(simulate_pairs([one], steps, seed=1, jobs=1, tokens=8_000, loads=(16,)))
        for one in (pair, Pair("wrong", pair.drafter, path, wrong))
    )
    medians = [next(check for check in one.checks if "median" in check.name).error for one in (right, off)]
    assert medians[0] < 3.0
    assert medians[1] > 6.0
    text = markdown([right])
    assert text.startswith("# Is the law")
    assert all(line in text for line in right.lines)
