import dataclasses
import json
from itertools import islice

import numpy as np
import pytest
from scipy.stats import norm

from analysis.validate import offline, serving
from analysis.validate.claims import dynamic_gain
from analysis.validate.closed_loop import Cell, Steady, build_engine, run_cell, run_cells
from analysis.validate.command import main
from analysis.validate.plateaus import Plateau, find_plateaus
from analysis.validate.serving import (
    REFINED,
    SHIPPED,
    Assumptions,
    Prediction,
    Request,
    draft_passes,
    engine_of,
    predict,
)
from profiles.recipes.confidence import ConfidenceFit
from profiles.recipes.offline import accepted_length
from profiles.recipes.serving import build_serving, fit_step_law
from profiles.recipes.sources import Shared
from sim.acceptance import solve_means
from sim.verify import DsparkAsync, Fixed, Mtp1
from sim.verify.check import judge

LAW = ConfidenceFit(0.6, 0.5, (1.8, 1.5, 1.2), (), ())


@pytest.fixture(scope="module")
def shared(shared_dir):
    return Shared(shared_dir)


# -------------------------------------------------------------------------------------------------------------- offline


def test_a_longer_block_holds_the_last_conditional_acceptance():
    conditional = np.array([0.9, 0.8])
    assert offline.extended(conditional, 4).tolist() == [0.9, 0.8, 0.8, 0.8]
    assert offline.extended(conditional, 1).tolist() == [0.9]
    assert accepted_length(offline.extended(conditional, 3)) == pytest.approx(1 + 0.9 + 0.72 + 0.576)


def draw_threshold(means, floor, temperature, n, rng):
    """Draw rounds of requests of equal output and apply the floor, token by token."""
    z = rng.standard_normal(n)
    chance = norm.cdf(means[:, None] + LAW.request_sd * z + LAW.token_sd * rng.standard_normal((means.size, n)))
    score = 1 / (1 + ((1 - chance) / chance) ** temperature[:, None])
    passes = np.cumprod(score >= floor, axis=0)
    accepted = np.cumprod((rng.random(chance.shape) < chance) * (score >= floor), axis=0)
    return z, passes.sum(axis=0), accepted.sum(axis=0)


@pytest.mark.parametrize("floor", [0.0, 0.5, 0.9])
def test_the_yield_under_a_floor_is_what_drawn_rounds_give(floor, rng):
    means, temperature = np.array([1.2, 0.9, 0.6]), np.array([1.8, 1.5, 1.2])
    accepted, verified = offline.threshold_yield(means, LAW, floor, temperature)
    z, v, a = draw_threshold(means, floor, temperature, 400_000, rng)
    # A request's share of rounds is one over its accepted length: estimated in slices of its effect.
    slices = np.digitize(z, norm.ppf(np.arange(1, 40) / 40))
    mean_a, mean_v = (np.bincount(slices, x) / np.bincount(slices) for x in (a, v))
    weight = 1 / (1 + mean_a)
    assert accepted == pytest.approx(weight @ mean_a / weight.sum(), abs=0.01)
    assert verified == pytest.approx(weight @ mean_v / weight.sum(), abs=0.01)


def test_no_floor_yields_the_survival_that_the_means_were_solved_for(shared):
    survival = (0.8, 0.6, 0.45)
    means = solve_means(survival, offline._spread(LAW))
    accepted, verified = offline.threshold_yield(means, LAW, 0.0, np.ones(3))
    assert (accepted, verified) == (pytest.approx(sum(survival), abs=1e-6), pytest.approx(3.0))


def test_figure_4_is_fitted_at_the_trained_block_and_near_elsewhere(shared):
    points = offline.longer_drafts(shared)
    assert len(points) == 24
    error = {at: [p.predicted / p.observed - 1 for p in points if p.at == at] for at in (4, 8, 12, 16)}
    assert np.abs(error[8]).max() < 0.003
    assert max(error[4]) < 0 < min(error[12])
    assert max(np.abs(error[at]).max() for at in (4, 12, 16)) < 0.08


def test_temperatures_from_mean_scores_leave_less_than_half_of_figure_6s_error(shared):
    for one in offline.calibrations(shared):
        assert one.before == pytest.approx(one.printed_before, abs=0.06)
        assert one.after < 0.7 * one.before


# -------------------------------------------------------------------------------------------------------------- serving


def test_the_shipped_draft_pass_is_the_default(shared):
    profile = build_serving(shared, "V4-Pro")
    own = draft_passes(shared, "V4-Pro", SHIPPED, 64)
    shipped = build_engine(profile, DsparkAsync(), 64).draft_s
    np.testing.assert_allclose(own.dspark_s, shipped, rtol=1e-4)
    assert not own.mtp_s.any()


@pytest.mark.parametrize("model", ["V4-Flash", "V4-Pro"])
def test_taking_mtps_pass_out_leaves_its_own_steps_alone(shared, model):
    law = fit_step_law(shared, model)
    profile = build_serving(shared, model)
    passes = draft_passes(shared, model, REFINED, 400)
    engine = engine_of(profile, REFINED, passes, Mtp1(), 100, 0)
    step_s = engine.cost.target_s(100, 200, 0, 0) + engine.draft_s[100]
    assert step_s == pytest.approx(float(law.step_s(np.array(100.0))), rel=1e-3)
    dspark = engine_of(profile, REFINED, passes, DsparkAsync(), 100, 0)
    assert dspark.cost.target_s(100, 200, 0, 0) == engine.cost.target_s(100, 200, 0, 0) < step_s
    assert (np.diff(dspark.cost.verify_s[1:]) >= 0).all()


def test_pros_draft_pass_goes_with_a_layer_of_its_target(shared):
    whole, layer = (
        draft_passes(shared, "V4-Pro", Assumptions(draft_by_layer=by_layer), 50).dspark_s for by_layer in (False, True)
    )
    np.testing.assert_allclose(layer[1:] / whole[1:], 43 / 61)
    flash = [draft_passes(shared, "V4-Flash", Assumptions(draft_by_layer=by_layer), 9) for by_layer in (False, True)]
    np.testing.assert_array_equal(flash[0].dspark_s, flash[1].dspark_s)


def test_between_loads_time_per_token_is_straight():
    steady = Steady(10.0, 100.0, 6.0, 3.0, 0.0, 0.0, 60.0, 60.0, 60.0)
    slower = dataclasses.replace(steady, requests=30.0, user_tokens_per_s=50.0, verify_tokens=4.0)
    line = Prediction("V4-Flash", (steady, slower))
    assert float(line.at("user_tokens_per_s", 20.0)) == pytest.approx(1 / 0.015)
    assert float(line.at("verify_tokens", 20.0)) == 5.0
    assert np.isnan(line.at("user_tokens_per_s", np.array([9.0, 31.0]))).all()
    assert line.curve.requests_at(1 / 0.015) == pytest.approx(20.0, abs=0.01)


def test_survival_moves_to_an_accepted_length(shared):
    moved = serving.survival_of(shared, "V4-Flash", 3.36)
    assert 1 + sum(moved.values) == pytest.approx(3.36, abs=1e-6)
    assert serving.survival_of(shared, "V4-Flash", None).values[0] == 0.807


def test_a_closed_loop_of_mtp1_is_its_step_law(shared):
    engine = build_engine(build_serving(shared, "V4-Flash"), Mtp1(), 40)
    steady = run_cell(Cell(engine, 40, 40_000, 128))
    assert 38 < steady.requests <= 40
    assert steady.verify_tokens == 2.0
    assert steady.accepted_length == pytest.approx(1.85, abs=0.03)
    law = fit_step_law(shared, "V4-Flash")
    assert steady.user_tokens_per_s == pytest.approx(1.85 / float(law.step_s(np.array(steady.requests))), rel=0.02)


@pytest.mark.slow
def test_jobs_change_nothing(shared):
    engine = build_engine(build_serving(shared, "V4-Flash"), Fixed(k=5), 8)
    cells = [Cell(engine, 8, 4_000, 64, seed) for seed in (0, 1)]
    alone, pooled = (run_cells(cells, jobs, "test") for jobs in (1, 2))
    for one, other in zip(alone, pooled, strict=True):
        np.testing.assert_equal(dataclasses.asdict(one), dataclasses.asdict(other))


def test_a_scheduler_that_prices_all_of_the_step_is_the_compiled_one(shared):
    """Unpriced with no draft time to hide is the policy it wraps."""
    free = dataclasses.replace(SHIPPED, draft_scale=1e-9)
    profile = serving.profile_of(shared, "V4-Flash", free)
    policy = DsparkAsync(first_budget=5)
    hidden = dataclasses.replace(free, priced_draft=False)
    runs = [run_cell(Cell(engine_of(profile, one, None, policy, 60, 0), 60, 20_000, 64)) for one in (free, hidden)]
    assert runs[0].verify_tokens == pytest.approx(runs[1].verify_tokens, abs=1e-3)


def test_hiding_the_draft_time_shortens_the_budget(shared):
    asked = [
        Request("V4-Flash", assumed, (120,), (), 20_000, 64)
        for assumed in (SHIPPED, dataclasses.replace(SHIPPED, priced_draft=False))
    ]
    priced, blind = predict(shared, asked, seed=0, jobs=1, what="test")
    assert blind.dspark.runs[0].verify_tokens < priced.dspark.runs[0].verify_tokens - 0.1


# ----------------------------------------------------------------------------------------------------- plateaus, claims


def test_plateaus_of_a_staircase():
    requests = np.arange(10.0, 31.0)
    tokens = np.where(requests < 16, 64.0, np.where(requests < 20, 16.0 * (requests - 12), 128.0))
    assert find_plateaus(requests, tokens) == [Plateau(10, 16, 64, 64), Plateau(20, 30, 128, 128)]


def test_a_straight_line_has_no_plateau():
    requests = np.arange(10.0, 200.0, 5)
    assert find_plateaus(requests, 4 * requests) == []
    assert find_plateaus(requests, 20 * requests**0.45) == []
    assert len(find_plateaus(requests, 20 * requests**0.35)) == 1


def test_dynamic_lengths_gain_nothing_where_all_rounds_are_alike():
    chances = np.array([[0.9, 0.9], [0.8, 0.8], [0.7, 0.7]])
    weight = np.array([0.5, 0.5])
    assert dynamic_gain(np.cumprod(chances, axis=0) @ weight, chances, weight) == pytest.approx([0.0, 0.0])
    spread = np.array([[1.0, 0.4], [1.0, 0.4], [1.0, 0.4]])
    gain = dynamic_gain(np.cumprod(spread, axis=0) @ weight, spread, weight)
    assert gain[0] == pytest.approx(100 * (1 / 0.7 - 1))


# ---------------------------------------------------------------------------------------------------------------- whole


@pytest.mark.slow
def test_the_whole_rung_in_short(shared_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("analysis.validate.telemetry.QUICK_LOADS", (5, 100, 212))
    monkeypatch.setattr("analysis.validate.telemetry.QUICK_TOKENS", 6_000)
    monkeypatch.setattr("analysis.validate.plateaus.QUICK_LOADS", (64, 128))
    monkeypatch.setattr("analysis.validate.plateaus.TOKENS", 6_000)
    monkeypatch.setattr("analysis.validate.claims.judge", lambda policy: islice(judge(policy), 2))
    options = ["--quick", "--jobs", "1", "--out", str(tmp_path), "--json", str(tmp_path / "checks.json")]
    code = main(["paper", *options, "--shared", str(shared_dir)])
    out = capsys.readouterr().out
    checks = json.loads((tmp_path / "checks.json").read_text())
    assert code == int(any(check["holds"] is False for check in checks))
    assert all(list(check) == ["name", "predicted", "observed", "error", "bound", "unit", "holds"] for check in checks)
    assert len({check["name"] for check in checks}) == len(checks)
    plots = {path.stem for path in tmp_path.glob("*.png")}
    assert plots == {"offline", "serving_v4_flash", "serving_v4_pro", "sensitivities", "plateaus"}
    assert "\n20 latency improves" in out
    assert "bounds hold" in out
