"""Fits find the law that made the data, say how far off they are, and refuse what the data do not determine."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from profiles.errors import InputError, ProfileError
from profiles.files import find_profile, load_profile, save_profile
from profiles.fitting.acceptance import survival_of_counts, survival_of_lengths
from profiles.fitting.closed_loop import fit_closed_loop, leave_out, running
from profiles.fitting.least_squares import fit_costs, tell_apart
from profiles.fitting.request_log import fit_request_log
from profiles.fitting.to_profile import Origin, draft_like, drafter_of, not_identified, step_time_of
from profiles.measurements.logs import read_log
from profiles.measurements.points import AcceptanceCounts, LoadPoint, LoggedRequest
from profiles.schema import LawCurve, LinearPrefill, PrefillAsVerify, StepTime

LOADS = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = ((1024, 1024), (8192, 1024), (1024, 256))


def point(n: float, prompt: float = 512, output: float = 256, k: int = 0, accepted: float = 1.0) -> LoadPoint:
    """Return what an engine gives of 6 ms, 20 us a batch token, 30 us a request, drafts of 1 ms + 40 us."""
    let_in = (n - 1) * accepted / output
    step = 6e-3 + 20e-6 * n * (1 + k) + 30e-6 * n + 20e-9 * n * (prompt + output / 2) + 15e-6 * let_in * prompt
    step += (1e-3 + 40e-6 * n) * (k > 0)
    return LoadPoint(
        concurrency=n,
        tpot_s=step / accepted,
        ttft_s=20e-3 + 15e-6 * prompt,
        prompt_tokens=prompt,
        output_tokens=output,
        accepted_length=accepted,
        draft_tokens=k,
    )


# ------------------------------------------------------------------------------------------------------- least squares


def test_costs_are_found_and_an_outlier_does_not_bend_them(rng: np.random.Generator) -> None:
    n = np.geomspace(1, 256, 40)
    seconds = (5e-3 + 30e-6 * n) * np.exp(rng.normal(0, 0.005, n.size))
    seconds[7] *= 2
    fit = fit_costs({"floor": np.ones_like(n), "slope": n}, seconds)
    assert fit.cost["floor"] == pytest.approx(5e-3, rel=0.02)
    assert fit.cost["slope"] == pytest.approx(30e-6, rel=0.03)
    assert fit.worst == pytest.approx(0.5, abs=0.02)


def test_standard_errors_cover(rng: np.random.Generator) -> None:
    n = np.geomspace(1, 256, 12)
    amounts = {"floor": np.ones_like(n), "slope": n}
    found = []
    for _ in range(200):
        fit = fit_costs(amounts, (5e-3 + 30e-6 * n) * (1 + rng.normal(0, 0.01, n.size)))
        found.append((fit.cost["slope"] / 30e-6 - 1, fit.error["slope"] / 30e-6))
    errors, stated = np.array(found).T
    # The scatter of the estimates is what each of them says of itself.
    assert stated.mean() == pytest.approx(errors.std(), rel=0.25)


def test_a_cost_below_zero_is_none() -> None:
    n = np.array([1.0, 2, 4, 8])
    fit = fit_costs({"floor": np.ones_like(n), "slope": n}, 5e-3 - 1e-4 * n)
    assert fit.cost["slope"] == 0.0
    assert np.isnan(fit.error["slope"])


def test_what_is_a_mixture_of_others_is_not_told_apart() -> None:
    n = np.array([1.0, 2, 4, 8])
    amounts = {"floor": np.ones_like(n), "token": n, "request": n, "never": np.zeros_like(n), "square": n**2}
    keep, inside = tell_apart(amounts, np.ones_like(n))
    assert keep == ["floor", "token", "square"]
    assert inside == {"request": ("token",), "never": ()}


# --------------------------------------------------------------------------------------------------------- closed loop


def test_without_speculation_the_step_is_found_and_what_hides_is_named() -> None:
    points = [point(n) for n in LOADS]
    fit = fit_closed_loop(points)
    assert fit.worst < 0.003
    # nobody is let in beside a lone request: what prefill there is starts at two
    assert fit.cost_s["floor"] == pytest.approx(6e-3, rel=0.01)
    # tokens, requests, contexts and prefill all go with the number of requests
    whole = 20e-6 + 30e-6 + 20e-9 * 640 + 15e-6 * 2
    rest = (fit.cost_s[name] for name in ("context_token", "prompt_token", "admission"))
    slope = fit.cost_s["batch_token"] + sum(a * b for a, b in zip(rest, (640, 2, 1 / 256), strict=True))
    assert slope == pytest.approx(whole, rel=0.01)
    assert {"request", "context_token", "prompt_token", "admission"} <= set(fit.inside)
    whats = {one.what for one in not_identified(fit, None, drafted=False)}
    assert {"the cost of a request beside its tokens", "the time to draft"} <= whats
    assert all(one.settle for one in not_identified(fit, None, drafted=False))


def test_several_lengths_tell_contexts_and_prompts_apart() -> None:
    points = [point(n, *lengths) for n in LOADS for lengths in LENGTHS]
    fit = fit_closed_loop(points)
    assert fit.worst < 0.01
    assert fit.cost_s["prompt_token"] == pytest.approx(15e-6, rel=0.1)
    assert fit.cost_s["context_token"] == pytest.approx(20e-9, rel=0.1)
    (other,) = fit.predict_tpot_s([point(48, 4096, 512)])
    assert other == pytest.approx(point(48, 4096, 512).tpot_s, rel=0.02)


def by_throughput(one: LoadPoint) -> LoadPoint:
    """Return a run of `point` of which only throughput is known: its own prompt is part of that."""
    assert one.tpot_s is not None
    assert one.prompt_tokens is not None
    assert one.output_tokens is not None
    tokens_per_s = one.concurrency / (one.tpot_s + 15e-6 * one.prompt_tokens / one.output_tokens)
    return dataclasses.replace(one, tpot_s=None, ttft_s=None, output_tokens_per_s=tokens_per_s)


@pytest.mark.parametrize("every", [1, 2], ids=["throughput alone", "TPOT of every second run"])
def test_throughput_holds_a_requests_own_prompt_and_tpot_does_not(every: int) -> None:
    points = [point(n, *lengths) for n in LOADS for lengths in (*LENGTHS, (4096, 64))]
    points = [by_throughput(one) if index % every == 0 else one for index, one in enumerate(points)]
    fit = fit_closed_loop([dataclasses.replace(one, ttft_s=None) for one in points], bent=False)
    assert fit.worst < 0.002
    assert fit.cost_s["prompt_token"] == pytest.approx(15e-6, rel=0.02)
    assert fit.cost_s["floor"] == pytest.approx(6e-3, rel=0.005)
    other = point(2, 4096, 128)
    assert fit.predict_tpot_s([by_throughput(other)]) == pytest.approx(other.tpot_s, rel=0.002)
    whole = by_throughput(other)
    assert whole.output_tokens_per_s is not None
    assert fit.predict_s([whole]) == pytest.approx(2 / whole.output_tokens_per_s, rel=0.002)


def test_two_draft_lengths_tell_tokens_requests_and_drafts_apart() -> None:
    points = [point(n, *lengths) for n in LOADS for lengths in LENGTHS]
    points += [point(n, k=k, accepted=a) for n in LOADS for k, a in ((2, 2.2), (5, 3.1))]
    fit = fit_closed_loop(points)
    assert fit.worst < 0.01
    for name, true in (("batch_token", 20e-6), ("request", 30e-6), ("draft", 1e-3), ("draft_request", 40e-6)):
        assert fit.cost_s[name] == pytest.approx(true, rel=0.15), name
    assert "request" not in fit.inside


def test_with_a_measured_table_one_draft_length_is_enough() -> None:
    verify_s = 6e-3 + 20e-6 * np.arange(400)
    points = [point(n, *lengths) for n in LOADS for lengths in LENGTHS]
    points += [point(n, k=5, accepted=3.1) for n in LOADS]
    fit = fit_closed_loop(points, verify_s=verify_s)
    assert fit.worst < 0.01
    for name, true in (("request", 30e-6), ("draft", 1e-3), ("draft_request", 40e-6)):
        assert fit.cost_s[name] == pytest.approx(true, rel=0.15), name
    with pytest.raises(ProfileError, match="the table of step time ends at 99 batch tokens; a run has 384"):
        fit_closed_loop(points, verify_s=verify_s[:100])


def test_experts_that_are_still_being_loaded_are_seen() -> None:
    points = [
        dataclasses.replace(p, tpot_s=(p.tpot_s or 0) + 8e-3 * -np.expm1(-n / 12)) for n in LOADS for p in [point(n)]
    ]
    fit = fit_closed_loop(points)
    assert fit.saturating_s == pytest.approx(8e-3, rel=0.1)
    assert fit.saturation_tokens == pytest.approx(12, rel=0.3)
    assert fit.rms < fit_closed_loop(points, bent=False).rms / 3


def test_a_load_left_out_is_predicted_and_requests_that_queue_do_not_decode() -> None:
    points = [point(n) for n in LOADS]
    errors = leave_out(points)
    assert np.abs(errors).max() < 0.05
    full = dataclasses.replace(point(256), ttft_s=point(256).output_tokens * point(256).tpot_s)  # type: ignore[operator]
    assert running([*points, full])[-1] == pytest.approx(128, rel=0.05)


REFUSED = {
    "two loads": ([point(1), point(8)], "needs runs without speculation at 3 concurrencies or more (got 1, 8)"),
    "all speculate": ([point(n, k=2, accepted=2) for n in LOADS], "every run speculates: the time to draft is inside"),
    "no accepted length": (
        [*(point(n) for n in LOADS), dataclasses.replace(point(8, k=2), accepted_length=None)],
        "settle it with the engine's acceptance counters over this run",
    ),
    "no k": (
        [*(point(n) for n in LOADS), dataclasses.replace(point(8, accepted=2.0), draft_tokens=None)],
        "how many tokens a round verifies is not known; give k",
    ),
    "other loads": (
        [*(point(n) for n in LOADS), *(point(n, k=2, accepted=2) for n in (3, 6))],
        "one of each at the same load separates the time to draft from the step",
    ),
    "one load drafted": (
        [*(point(n) for n in LOADS), point(8, k=2, accepted=2), point(8, k=4, accepted=2)],
        "settle it with a second concurrency",
    ),
    "one k": (
        [*(point(n) for n in LOADS), *(point(n, k=2, accepted=2) for n in LOADS)],
        "the same concurrencies at a second k",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_identified_is_refused_with_what_would_settle_it(case: str) -> None:
    points, expected = REFUSED[case]
    with pytest.raises(ProfileError) as error:
        fit_closed_loop(points)
    assert expected in str(error.value)


def test_a_chain_drafter_is_refused_even_at_two_lengths_and_an_assumption_lets_it_through() -> None:
    points = [point(n) for n in LOADS] + [point(n, k=k, accepted=2.0) for n in LOADS for k in (2, 4)]
    with pytest.raises(ProfileError, match=r"each draft token is a pass of its own .*--draft-table"):
        fit_closed_loop(points, draft_per_token=True)
    fit = fit_closed_loop(points, draft_per_token=True, request_share=0.0)
    assert fit.cost_s["request"] == 0.0
    assert fit.cost_s["draft_request"] > 0


def test_real_engines_are_fitted_as_well_as_they_repeat_themselves(shared_dir: Path) -> None:
    import csv

    with (shared_dir / "reference/aic/measured_closed_loop.csv").open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if int(row["series_id"]) < 40]
    series: dict[str, list[LoadPoint]] = {}
    for row in rows:
        n, prompt, output, ttft, tpot = (
            float(row[name]) for name in ("concurrency", "prompt_tokens", "output_tokens", "ttft_ms", "tpot_ms")
        )
        one = LoadPoint(n, tpot_s=tpot / 1e3, ttft_s=ttft / 1e3, prompt_tokens=prompt, output_tokens=output)
        series.setdefault(row["series_id"], []).append(one)
    misses = np.abs(np.concatenate([fit_closed_loop(points).misses for points in series.values()]))
    assert np.median(misses) < 0.02
    assert np.quantile(misses, 0.9) < 0.10


# --------------------------------------------------------------------------------------------------------- request log


def simulated_log(rng: np.random.Generator, count: int = 120) -> list[LoggedRequest]:
    """Serve requests: a step takes 10 ms + 100 us a request + 50 ns a context token, a prompt 20 us a token."""
    arrived = np.cumsum(rng.exponential(0.05, count))
    prompt, output = rng.integers(50, 3000, count), rng.integers(20, 200, count)
    now, waiting, running_, made, first, last = 0.0, list(range(count)), [], [0] * count, {}, {}
    while len(last) < count:
        if not running_ and waiting and arrived[waiting[0]] > now:
            now = float(arrived[waiting[0]])
        now += 10e-3 + 100e-6 * len(running_) + 50e-9 * sum(int(prompt[r]) + made[r] for r in running_)
        if waiting and arrived[waiting[0]] <= now:
            new = waiting.pop(0)
            now += 20e-6 * int(prompt[new])
            first[new], made[new] = now, 1
            running_.append(new)
        for r in running_:
            if first[r] == now:
                continue
            made[r] += 1
        for r in [r for r in running_ if made[r] >= output[r]]:
            running_.remove(r)
            last[r] = now
    return [LoggedRequest(float(arrived[r]), first[r], last[r], int(prompt[r]), int(output[r])) for r in range(count)]


def test_a_log_gives_the_law_of_the_engine_that_wrote_it(rng: np.random.Generator) -> None:
    fit = fit_request_log(simulated_log(rng))
    assert fit.rms < 0.02
    assert fit.cost_s["floor"] == pytest.approx(10e-3, rel=0.05)
    assert fit.cost_s["prompt_token"] == pytest.approx(20e-6, rel=0.15)
    # What a request costs by itself and by its context go together in many a log; a step of 20 requests is known.
    step = fit.cost_s["floor"] + 20 * fit.cost_s["batch_token"] + 20 * 1600 * fit.cost_s["context_token"]
    assert step == pytest.approx(10e-3 + 20 * 100e-6 + 20 * 1600 * 50e-9, rel=0.02)


def test_residuals_decide_whether_contexts_have_a_cost_of_their_own() -> None:
    """Contexts are nearly a mixture of the other amounts: few noisy rows could not tell, many quiet ones can."""
    log = simulated_log(np.random.default_rng(0))
    fit = fit_request_log(log)
    assert fit.cost_s["context_token"] == pytest.approx(50e-9, rel=0.1)
    assert fit.cost_s["batch_token"] == pytest.approx(100e-6, rel=0.1)
    assert "context_token" not in fit.inside
    noise = np.random.default_rng(1).normal(1, 0.05, len(log))
    noisy = [
        dataclasses.replace(one, last_token_s=one.first_token_s + by * (one.last_token_s - one.first_token_s))
        for one, by in zip(log, noise, strict=True)
    ]
    fit = fit_request_log(noisy)
    assert fit.cost_s["context_token"] == 0
    assert "batch_token" in fit.inside["context_token"]


def test_a_log_is_refused_where_it_is_short_or_steady(rng: np.random.Generator) -> None:
    log = simulated_log(rng, 40)
    with pytest.raises(ProfileError, match="requests of 8 tokens or more ended in time; a fit needs 20"):
        fit_request_log(log, until_s=log[2].arrived_s)
    alone = [LoggedRequest(i, i + 0.1, i + 0.9, 10, 50) for i in range(30)]
    with pytest.raises(ProfileError, match="a level is known and no slope"):
        fit_request_log(alone)


@pytest.mark.parametrize(("model", "bytes_per_token"), [("Llama-3.1-8B", 131072)])
def test_a_measured_log_is_fitted_to_a_per_cent(model: str, bytes_per_token: int, shared_dir: Path) -> None:
    log = read_log(shared_dir / f"traces/llmservingsim-bench/RTXPRO6000/{model}/requests.jsonl")
    fit = fit_request_log(log.requests)
    assert fit.rms < 0.01
    assert fit.worst < 0.05
    # A context token costs what reading its keys and values takes, at about the bandwidth of that GPU (1.8 TB/s).
    assert 1.2e12 < bytes_per_token / fit.cost_s["context_token"] < 2.2e12


def test_the_search_goes_to_its_end(shared_dir: Path) -> None:
    """Seconds of another length are the same law, but round otherwise, as another processor does."""
    log = read_log(shared_dir / "traces/llmservingsim-bench/RTXPRO6000/Qwen3-32B/requests.jsonl")
    until_s = float(np.median([one.last_token_s for one in log.requests]))
    costs = []
    for scale in (1.0, 8 / 7, 9 / 7, 10 / 7):
        times = ("arrived_s", "first_token_s", "last_token_s")
        scaled = [
            dataclasses.replace(one, **{name: scale * getattr(one, name) for name in times}) for one in log.requests
        ]
        fit = fit_request_log(scaled, until_s=scale * until_s)
        costs.append({name: cost / scale for name, cost in fit.cost_s.items()})
    for cost in costs[1:]:
        assert cost == pytest.approx(costs[0], rel=1e-6)


# ---------------------------------------------------------------------------------------------------------- acceptance


def test_counts_give_survival_with_intervals_that_cover(rng: np.random.Generator) -> None:
    true = np.array([0.8, 0.5, 0.3])
    inside = []
    for _ in range(400):
        depth = (rng.random((500, 1)) < true).sum(axis=1)
        counts = AcceptanceCounts(500, tuple(float((depth >= k).sum()) for k in (1, 2, 3)))
        fit = survival_of_counts(counts)
        inside.append((np.array(fit.low) <= true) & (true <= np.array(fit.high)))
    assert 0.92 < np.mean(inside) < 0.98
    assert survival_of_counts(AcceptanceCounts(10, (8.0, 5.0))).accepted_length == pytest.approx(2.3)


def test_differences_of_accepted_lengths_and_a_tail_that_falls() -> None:
    lengths = {1: 1.84, 2: 2.51, 3: 3.01, 4: 3.36, 5: 3.61, 6: 3.77, 8: 3.47}
    fit = survival_of_lengths({k: v for k, v in lengths.items() if k <= 5}, "whole_block")
    assert fit.survival == pytest.approx((0.84, 0.67, 0.50, 0.35, 0.25))
    assert fit.left_out == {}
    falls = survival_of_lengths({**{k: v for k, v in lengths.items() if k <= 5}, 6: 3.47}, "chain")
    assert (len(falls.survival), falls.left_out) == (5, {6: 3.47})
    rises = survival_of_lengths({1: 1.5, 2: 1.8, 3: 2.2}, "chain")  # .5, .3, .4: not smoothed to .35
    assert rises.survival == pytest.approx((0.5, 0.3))
    assert rises.left_out == {3: 2.2}


def test_differences_are_refused_where_they_are_no_survival() -> None:
    with pytest.raises(ProfileError, match=r"Say what the runs did with --lengths-of: chain .* whole_block"):
        survival_of_lengths({1: 1.5}, None)
    with pytest.raises(ProfileError, match="settle it with acceptance counts by position at the trained block"):
        survival_of_lengths({1: 1.5}, "short_block")


# ------------------------------------------------------------------------------------------------------- into profiles

ORIGIN = Origin(source="mine.csv", hardware="1 x X")


def test_a_step_time_says_what_it_rests_on() -> None:
    fit = fit_closed_loop([point(n) for n in LOADS])
    step_time = step_time_of(fit, ORIGIN, request_share=None)
    assert isinstance(step_time, StepTime)
    assert isinstance(step_time.verify, LawCurve)
    assert (step_time.verify.min_size, step_time.verify.max_size) == (1, 64)
    assert "100% of the slope over load is charged to tokens" in (step_time.verify.provenance.reason or "")
    assert isinstance(step_time.prefill, LinearPrefill)
    bare = [dataclasses.replace(p, ttft_s=None, prompt_tokens=None, output_tokens=None) for p in fit.points]
    prefill = step_time_of(fit_closed_loop(bare), ORIGIN, request_share=None).prefill
    assert isinstance(prefill, PrefillAsVerify)
    assert prefill.provenance.origin == "assumed"


def test_letting_a_request_in_keeps_its_own_price() -> None:
    fit = fit_closed_loop([point(n) for n in LOADS])
    dear = dataclasses.replace(fit, cost_s=fit.cost_s | {"prompt_token": 2e-5, "admission": 0.003}, inside={})
    prefill = step_time_of(dear, ORIGIN, request_share=None).prefill
    assert isinstance(prefill, LinearPrefill)
    assert (prefill.per_token_s, prefill.per_request_s) == (2e-5, 0.003)
    alone = dataclasses.replace(dear, cost_s=dear.cost_s | {"prompt_token": 0.0}, inside={"admission": ("floor",)})
    prefill = step_time_of(alone, ORIGIN, request_share=None).prefill
    assert isinstance(prefill, LinearPrefill)
    assert (prefill.per_token_s, prefill.per_request_s) == (0.0, 0.003)
    assert prefill.provenance.reason == (
        "of the cost of letting a request in and the floor of a step only a mixture is known: they share it evenly"
    )
    free = dataclasses.replace(alone, cost_s=alone.cost_s | {"admission": 0.0})
    assert isinstance(step_time_of(free, ORIGIN, request_share=None).prefill, PrefillAsVerify)


def test_half_of_the_slope_may_be_given_to_requests() -> None:
    points = [dataclasses.replace(point(n), ttft_s=None, prompt_tokens=None, output_tokens=None) for n in LOADS]
    whole = fit_closed_loop(points)
    half = fit_closed_loop(points, request_share=0.5)
    assert half.cost_s["request"] == pytest.approx(half.cost_s["batch_token"])
    assert half.cost_s["request"] * 2 == pytest.approx(whole.cost_s["batch_token"])
    assert half.misses == pytest.approx(whole.misses, abs=1e-9)


def test_anothers_draft_time_is_scaled_and_called_an_assumption() -> None:
    fit = fit_closed_loop([point(n) for n in LOADS])
    verify = step_time_of(fit, ORIGIN, request_share=None).verify
    cost = draft_like("engines/qwen3_8b_h20", "dspark", verify, 64)
    assert cost.curve.provenance.origin == "assumed"
    assert "engines/qwen3_8b_h20's draft time is taken, times" in (cost.curve.provenance.reason or "")
    assert cost.prefill is None
    with pytest.raises(InputError, match="engines/qwen3_8b_h20 has no draft time for 'mtp'"):
        draft_like("engines/qwen3_8b_h20", "mtp", verify, 64)


def test_what_anothers_drafter_takes_for_prompts_is_scaled_as_its_drafting_is(tmp_path) -> None:
    lender = load_profile(find_profile("engines/qwen3_8b_h20"))
    draft = lender.step_time.draft["dspark"]
    provenance = draft.curve.provenance
    prompts = LinearPrefill(floor_s=2e-3, per_token_s=4e-6, per_request_s=8e-3, provenance=provenance)
    own = {"dspark": draft.model_copy(update={"prefill": prompts})}
    whole = lender.model_copy(update={"step_time": lender.step_time.model_copy(update={"draft": own})})
    save_profile(whole, tmp_path / "lender.json")
    verify = step_time_of(fit_closed_loop([point(n) for n in LOADS]), ORIGIN, request_share=None).verify
    cost = draft_like(str(tmp_path / "lender.json"), "dspark", verify, 64)
    assert isinstance(draft.curve, LawCurve)
    factor = cost.curve.per_unit_s / draft.curve.per_unit_s
    assert factor != pytest.approx(1, abs=0.01)
    scaled = (cost.prefill.floor_s, cost.prefill.per_token_s, cost.prefill.per_request_s)
    assert scaled == pytest.approx((2e-3 * factor, 4e-6 * factor, 8e-3 * factor), rel=1e-3)
    assert cost.prefill.provenance.origin == "assumed"


def test_a_drafter_borrows_spread_and_says_so() -> None:
    fit = survival_of_counts(AcceptanceCounts(1000, tuple(float(900 - 80 * k) for k in range(9))))
    drafter = drafter_of(fit, ORIGIN, "block", "code", "dspark", 1000)
    law = drafter.domains["code"]
    assert law.kind == "parametric"
    assert len(law.confidence.raw_temperature) == drafter.trained_length == 9
    assert law.survival.provenance.origin == "measured"
    assert law.spread.provenance.origin == law.confidence.provenance.origin == "assumed"
