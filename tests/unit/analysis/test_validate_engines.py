import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis.validate.engines_aic import (
    START,
    START_SD,
    Alone,
    LeftOut,
    Series,
    every_second,
    fit_law,
    load_points,
    predict_alone,
    prefill_ms,
    read_series,
    simulate_points,
    tpot_ms,
    ttft_ms,
    twins,
)
from analysis.validate.engines_cells import Loop, errors_percent, simulate_loop
from analysis.validate.engines_dcut import fixed_blocks, published_length
from analysis.validate.engines_flash import Steps, bisect, losing, pays
from analysis.validate.engines_logs import FITTED_SHARE, RUNS, at_seconds, read_run, run_section, vllm_counts
from analysis.validate.engines_plots import _against, draw_setups
from analysis.validate.rungs import Settings
from profiles.files import save_profile
from profiles.fitting import closed_loop
from profiles.fitting.closed_loop import amounts_of, fit_closed_loop
from profiles.measurements.points import LoadPoint
from profiles.recipes.sources import Shared
from profiles.schema import LawCurve, LinearPrefill, Profile, Provenance, SourcedSeconds, StepTime
from sim.batching import Chunked
from tests.helpers.fleet import at_once, engine, run

ASSUMED = Provenance(origin="assumed", reason="made up for a test")

POINTS = np.array([[n, p, o, 0.0, 0.0] for n in (4, 16, 64) for p, o in ((1024, 1024), (1024, 8192), (8192, 1024))])


@pytest.fixture
def shared(shared_dir):
    return Shared(shared_dir)


def made_up(shift=0.0):
    law = START + shift
    points = POINTS.copy()
    points[:, 3], points[:, 4] = tpot_ms(law, points), ttft_ms(law, points)
    return law, points


# -------------------------------------------------------------------------------------------------------- closed loops


def test_a_law_is_found_again_from_its_own_points():
    _, points = made_up(0.3)
    found = fit_law(points, START, np.diag(1e-6 / START_SD**2))
    assert np.allclose(tpot_ms(found, points), points[:, 3], rtol=1e-3)
    assert not np.allclose(tpot_ms(START, points), points[:, 3], rtol=1e-2)


def test_without_points_the_prior_is_what_comes_out():
    found = fit_law(np.zeros((0, 5)), START, np.diag(1 / START_SD**2))
    assert np.allclose(found, START)


def test_a_wait_has_the_prompt_and_rounds():
    law, points = made_up()
    longer = points[:1] * np.array([1, 2, 1, 1, 1])
    own = np.exp(START[5]) * points[0, 1] / 1e3 * (1 + np.exp(START[8]) * (points[0, 0] - 1))
    rounds = np.exp(START[9]) * (tpot_ms(law, longer) - tpot_ms(law, points[:1]))
    assert ttft_ms(law, longer) - ttft_ms(law, points[:1]) == pytest.approx(own + rounds)


def test_a_lone_request_waits_for_no_prefill_between_its_tokens():
    law, points = made_up()
    alone = points[:1] * np.array([0, 1, 1, 1, 1]) + np.array([1, 0, 0, 0, 0])
    free = law - np.where(np.isin(np.arange(law.size), (5, 6)), 50.0, 0.0)
    assert tpot_ms(law, alone) == pytest.approx(tpot_ms(free, alone), rel=1e-12)
    assert ttft_ms(law, alone) - ttft_ms(free, alone) == pytest.approx(prefill_ms(law, alone))
    two = alone + np.array([1, 0, 0, 0, 0])
    assert tpot_ms(law, two) - tpot_ms(free, two) == pytest.approx(prefill_ms(law, two) / two[:, 2])


def test_series_that_repeat_points_are_twins():
    one = Series("1", made_up()[1], frozenset({"a"}), 1.0, "one")
    same, other = dataclasses.replace(one, name="2"), dataclasses.replace(one, name="3", points=made_up(0.5)[1])
    assert twins([one, same, other]) == {"1": {"1", "2"}, "2": {"1", "2"}, "3": {"3"}}


def test_every_second_load_leaves_the_lightest():
    assert every_second(POINTS)[POINTS[:, 0] == 16].all()
    assert not every_second(POINTS)[POINTS[:, 0] != 16].any()


def test_left_out_points_do_not_reach_the_fit(shared):
    (series,) = [one for one in read_series(shared) if one.name == "97"]
    out = series.of((8192.0, 1024.0))
    changed = series.points.copy()
    changed[out, 3:] *= 7.0
    errors = predict_alone(series.points, out, bent=False)
    assert np.allclose((1 + predict_alone(changed, out, bent=False)) * 7.0, 1 + errors)


def test_a_law_as_a_profile_simulates_what_it_calculates(tmp_path):
    """Prompts far from the mean too, where a price of letting requests in cannot hide in the price of a token."""
    loads = [[n, p, 256.0] for n in (8, 64, 256) for p in (256.0, 1024.0, 4096.0)]
    cost = {"floor": 5e-3, "batch_token": 1e-4, "prompt_token": 1e-5, "admission": 20e-3}
    points = np.array([[*row, 0.0, 1.0] for row in loads])
    amounts = amounts_of(load_points(points, seen=False))
    points[:, 3] = 1e3 * sum(value * amounts[name] for name, value in cost.items())
    fit = fit_closed_loop(load_points(points, seen=False), bent=False)
    law = dataclasses.replace(fit, cost_s=dict.fromkeys(fit.cost_s, 0.0) | cost)
    series, settings = Series("1", points, frozenset(), 1.0, "made up"), Settings(shared=Shared(tmp_path), out=tmp_path)
    found = simulate_points(series, law, settings)
    assert len(found) == 3
    simulated, calculated = zip(*(one[1:] for one in found), strict=True)
    assert np.abs(errors_percent(simulated, calculated)).max() < 0.3


#: Costs of an engine whose prefill counts, and lengths and loads that tell them apart.
KNOWN = {"floor": 5e-3, "batch_token": 1e-4, "context_token": 2e-8, "prompt_token": 1e-5, "admission": 5e-3}
KNOWN_LENGTHS, FEW_AND_MANY = ((256, 64), (2048, 64), (4096, 256)), (1, 2, 4, 16)


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """Simulate closed loops of the known engine; each with its TPOT and, apart, with its throughput."""
    folder = tmp_path_factory.mktemp("loops")
    step_time = StepTime(
        verify=LawCurve(
            floor_s=KNOWN["floor"], per_unit_s=KNOWN["batch_token"], min_size=1, max_size=16, provenance=ASSUMED
        ),
        per_context_token=SourcedSeconds(seconds=KNOWN["context_token"], provenance=ASSUMED),
        prefill=LinearPrefill(
            floor_s=KNOWN["floor"] + KNOWN["batch_token"],
            per_token_s=KNOWN["prompt_token"],
            per_request_s=KNOWN["admission"],
            provenance=ASSUMED,
        ),
    )
    profile = Profile(format="dspark-profile/1", name="known", description="-", step_time=step_time, acceptance={})
    save_profile(profile, folder / "known.json")
    tpot, throughput = [], []
    for users, (prompt, output) in itertools.product(FEW_AND_MANY, KNOWN_LENGTHS):
        answer_s = output * (6e-3 + 1e-3 * users)
        loop = Loop(
            profile="./known.json",
            policy="none",
            users=users,
            prompt_tokens=prompt,
            output_tokens=output,
            warmup_s=3 * answer_s,
            horizon_s=30 * answer_s,
            max_batch_tokens=65_536,
            prefill="{kind: chunked, chunk_tokens: 65536}",
        )
        told = simulate_loop(loop, beside=folder)
        point = LoadPoint(users, prompt_tokens=prompt, output_tokens=output)
        tpot.append(dataclasses.replace(point, tpot_s=told["tpot_s_p50"], ttft_s=told["ttft_s_p50"]))
        tokens_per_s = told["output_tokens_per_s_per_gpu"]
        throughput.append(dataclasses.replace(point, output_tokens_per_s=tokens_per_s))
    return tpot, throughput


def unseen(points):
    return [dataclasses.replace(one, ttft_s=None) for one in points]


def found_again(points):
    """Return the worst miss of a fit, and by how much the worst cost that these runs tell apart is off, relative."""
    fit = fit_closed_loop(points, bent=False)
    # Throughput counts a request as decoding in the round of its prefill too: of 64, one too many.
    told = KNOWN if points[0].tpot_s is not None else ("floor", "prompt_token")
    return fit.worst, max(abs(fit.cost_s[name] / KNOWN[name] - 1) for name in told)


def test_a_simulated_loop_gives_its_costs_back(loops):
    tpot, throughput = loops
    for points, scatter, off in ((tpot, 0.003, 0.1), (unseen(tpot), 0.001, 0.05), (throughput, 0.01, 0.05)):
        worst, cost = found_again(points)
        assert worst < scatter
        assert cost < off


@pytest.mark.parametrize(("observed", "off"), [(0, 0.2), (1, 0.05)], ids=["TPOT", "throughput"])
def test_whose_prefill_a_round_holds_shows(loops, observed, off, monkeypatch):
    """The mutant: a request's own prompt between its tokens, or left out of its throughput."""
    monkeypatch.setattr(closed_loop, "_whole", lambda points: np.full(len(points), observed == 0))
    worst, cost = found_again(unseen(loops[observed]))
    assert worst > 0.02
    assert cost > off


def test_a_prompt_is_priced_by_the_lone_requests_wait(loops):
    """One combination of lengths: what prefill costs is the first wait, and none of it is in a lone request's steps."""
    points = [one for one in loops[0] if one.prompt_tokens == 2048]
    fit = fit_closed_loop(points, bent=False)
    assert fit.worst < 0.005
    # The wait does not tell a prompt's tokens from letting it in.
    assert 2048 * fit.cost_s["prompt_token"] == pytest.approx(
        2048 * KNOWN["prompt_token"] + KNOWN["admission"], rel=0.02
    )
    assert fit.cost_s["floor"] == pytest.approx(KNOWN["floor"], rel=0.01)


def test_the_series_are_those_of_the_readme(shared):
    series = read_series(shared)
    assert (len(series), sum(len(one.points) for one in series)) == (95, 1680)
    assert "76" in twins(series)["55"]


# ------------------------------------------------------------------------------------------------------------ one table


def test_simulated_loop_is_requests_over_step():
    metrics = simulate_loop(
        Loop(
            profile="engines/qwen3_8b_h20",
            policy="none",
            users=16,
            prompt_tokens=1,
            output_tokens=512,
            warmup_s=5.0,
            horizon_s=25.0,
        )
    )
    # 6.71 ms at 16 tokens and 0.147 ms a request; prompts of one token take little.
    assert metrics["output_tokens_per_s_per_gpu"] == pytest.approx(16 / (6.706e-3 + 16 * 0.147e-3), rel=0.02)


def test_published_lengths_are_table_1_and_figure_4(shared):
    assert published_length(shared, 8) == pytest.approx(np.mean([5.33, 4.91, 4.64, 4.36, 3.11]))
    assert published_length(shared, 16) > published_length(shared, 8)


def test_fixed_blocks_are_steps_times_one_length(shared):
    for block in fixed_blocks(shared):
        errors = errors_percent(block.predicted(block.fitted), block.observed)
        assert errors[2] == pytest.approx(0.0, abs=1e-9)
        assert np.abs(errors).max() < 5
    assert np.abs(errors_percent(block.predicted(1.1 * block.fitted), block.observed)).min() > 5


# ------------------------------------------------------------------------------------------------------------ crossings


def test_losing_stretches():
    assert losing(lambda load: load not in (3, 4, 7), 7) == [(3, 4), (7, 7)]
    assert losing(lambda _: True, 5) == []


@pytest.mark.parametrize(("turns", "found"), [(6, 6), (2, 2), (11, None), (1, None)])
def test_bisect(turns, found):
    assert bisect(lambda load: load < turns, 1, 10) == found


def test_the_graph_limit_ends_a_fixed_length(shared):
    steps = Steps(shared)
    for k, last in ((3, 256), (4, 204), (5, 170)):
        assert pays(steps.tokens_per_s, k, last)
        assert not pays(steps.tokens_per_s, k, last + 1)


# ----------------------------------------------------------------------------------------------------------------- logs


def test_a_series_is_held_between_steps():
    series = {"t": np.array([1.0, 2.0]), "running": np.array([5.0, 7.0])}
    assert at_seconds(series, "running", np.array([0.5, 1.0, 1.9, 9.0])).tolist() == [0, 5, 5, 7]


def test_a_request_waits_until_its_prompt_is_begun():
    """A step computes 100 prompt tokens; all four have a seat from the first on."""
    toy = engine(prefill=Chunked(chunk_tokens=100))
    result = run(toy, at_once(4, prompt=[100, 50, 150, 20], output=[9, 1, 9, 9]))
    assert (result.steps["running"][:4] == [4, 3, 3, 3]).all()
    counts = vllm_counts(result.requests, result.steps)
    assert counts["running"][:4].tolist() == [1, 2, 2, 3]
    assert counts["waiting"][:4].tolist() == [3, 1, 1, 0]
    assert (counts["running"][4:] == result.steps["running"][4:]).all()
    assert counts["running"][-1] == counts["waiting"][-1] == 0


@pytest.mark.parametrize("name", RUNS)
def test_the_start_of_a_run_predicts_the_rest(name, shared, tmp_path):
    """Contexts are longest at the end, when seats empty: their cost must have been found at the start."""
    run = read_run(shared, name)
    assert len(run.fit.requests) == pytest.approx(FITTED_SHARE * len(run.requests), abs=2)
    section = run_section(run, tmp_path, 0)
    errors = {check.name: check.error for check in section.checks}
    assert abs(errors[f"{name}, TTFT median"]) < 5
    assert errors[f"{name}, running: p99 |error| by second"] < 10
    slower = dataclasses.replace(run, fit=dataclasses.replace(run.fit, cost_s={**run.fit.cost_s, "batch_token": 3e-4}))
    assert any(check.holds is False for check in run_section(slower, tmp_path, 0).checks)


# ------------------------------------------------------------------------------------------------------------ the plots


def test_every_point_is_drawn_at_what_was_measured_and_predicted(tmp_path):
    _, points = made_up()
    one = Series("1", points, frozenset(), 1.0, "a setup")
    errors = np.linspace(-0.3, 0.3, len(points))
    axes = Figure().subplots()
    _against(axes, points[:, 3], points[:, 3] * (1 + errors))
    drawn = axes.lines[-1]
    np.testing.assert_allclose(drawn.get_ydata() / drawn.get_xdata(), 1 + errors)
    alone = {"1": Alone(SimpleNamespace(misses=errors), errors, errors)}
    left = [LeftOut(one, lengths, errors[one.of(lengths)], errors[one.of(lengths)], 0.0) for lengths in one.lengths()]
    files = list(draw_setups([one], alone, left, tmp_path))
    assert [file.name for file in files] == ["setups.png", "setups.svg"]
    assert min(file.stat().st_size for file in files) > 5_000
