"""Two measured vLLM runs, request by request: the start of each is fitted, the rest is predicted.

300 requests arrive within half a minute and are drained, without speculation. The law of a step is fitted to the first
quarter of the requests that ended, while only what was seen by then is looked at; the whole run is then simulated from
time 0, from arrivals and lengths alone, under the limits that the engine was started with. Only requests that arrived
after all of the fitted ones are scored.

What the whole run says of the same costs stands beside, as a look back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from analysis.validate.rungs import Check, Section, Settings, said, summarize, table
from profiles.files import save_profile
from profiles.fitting.request_log import RequestLogFit, fit_request_log
from profiles.fitting.to_profile import Origin, step_time_of
from profiles.measurements.logs import read_log
from profiles.measurements.points import LoggedRequest
from profiles.reading import parse_document
from profiles.recipes.sources import Floats, Shared, cite
from profiles.schema import Profile
from sim.build import build_engine
from sim.cells import Work, prepare
from sim.fleet import simulate
from sim.loading import checked
from sim.output import write_csv
from sim.recorder import Recorder
from sim.records import Columns

FOLDER = "traces/llmservingsim-bench/RTXPRO6000"
RUNS = {"Llama-3.1-8B": "1 x RTX PRO 6000", "Qwen3-32B": "2 x RTX PRO 6000, tensor parallel"}
#: The share of the requests that is fitted: those that ended first.
FITTED_SHARE = 0.25
#: Costs of a law as they are printed: name, label with unit, units a second.
LAW = (
    ("floor", "step, ms", 1e3),
    ("batch_token", "request, us", 1e6),
    ("context_token", "context token, ns", 1e9),
    ("prompt_token", "prompt token, us", 1e6),
    ("admission", "admission, ms", 1e3),
)
SERIES = ("running", "waiting")
#: Largest errors: medians and 99th percentiles in per cent of what was observed.
MEDIAN_BOUND, P99_BOUND = 5.0, 10.0


@dataclass(frozen=True, slots=True)
class Lives:
    """Requests by column, in seconds from the first arrival."""

    arrived_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    output_tokens: Floats

    def metrics(self, keep: NDArray[np.bool_]) -> dict[str, Floats]:
        """Return TTFT, TPOT and end-to-end time of the requests of a mask."""
        arrived, first, last = (column[keep] for column in (self.arrived_s, self.first_token_s, self.last_token_s))
        return {
            "TTFT": first - arrived,
            "TPOT": (last - first) / (self.output_tokens[keep] - 1),
            "end to end": last - arrived,
        }


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run: what was logged, what the engine was told, its series, and what was fitted.

    ``fit``: to its start. ``whole``: to all of it, as a look back.
    """

    name: str
    requests: tuple[LoggedRequest, ...]
    max_running: int
    max_batch_tokens: int
    series: dict[str, Floats]
    fit: RequestLogFit
    whole: RequestLogFit

    @property
    def began_s(self) -> float:
        """Return when the first request arrived, on the log's clock."""
        return self.requests[0].arrived_s

    @property
    def last_fitted_s(self) -> float:
        """Return when the last of the fitted requests arrived."""
        return max(one.arrived_s for one in self.fit.requests) - self.began_s

    def lives(self) -> Lives:
        """Return what was observed."""
        names = ("arrived_s", "first_token_s", "last_token_s")
        arrived, first, last = (
            np.array([getattr(one, name) for one in self.requests]) - self.began_s for name in names
        )
        return Lives(arrived, first, last, np.array([float(one.output_tokens) for one in self.requests]))


def read_run(shared: Shared, name: str) -> Run:
    """Read a run and fit its start."""
    folder = shared.root / FOLDER / name
    requests = read_log(folder / "requests.jsonl").requests
    told = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["engine_kwargs"]
    columns = ("t", *SERIES)
    series = dict(zip(columns, shared.columns(f"{FOLDER}/{name}/timeseries.csv", *columns), strict=True))
    ended = sorted(one.last_token_s for one in requests)
    until_s = ended[round(FITTED_SHARE * len(ended)) - 1]
    return Run(
        name,
        requests,
        told["max_num_seqs"],
        told["max_num_batched_tokens"],
        series,
        fit=fit_request_log(requests, until_s),
        whole=fit_request_log(requests),
    )


def simulate_run(run: Run, fit: RequestLogFit, out: Path, seed: int) -> tuple[Lives, dict[str, Floats]]:
    """Simulate a run from time 0 with the steps of a fit; returns its requests and, by step, `vllm_counts`."""
    out.mkdir(parents=True, exist_ok=True)
    origin = Origin(source=cite(f"{FOLDER}/{run.name}/requests.jsonl"), hardware=RUNS[run.name])
    profile = Profile(
        format="dspark-profile/1",
        name=run.name.lower(),
        description="Fitted to a measured run.",
        step_time=step_time_of(fit, origin, request_share=None),
        acceptance={},
    )
    save_profile(profile, out / f"{profile.name}.json")
    rows = [
        {
            "arrived_s": one.arrived_s - run.began_s,
            "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.output_tokens,
        }
        for one in run.requests
    ]
    write_csv(rows, out / f"{profile.name}.csv")
    horizon_s = 2 * float(run.lives().last_token_s.max())
    text = f"""
name: logs
seed: {seed}
horizon: {horizon_s:.6g}s
fleet:
  {{replicas: 1, profile: ./{profile.name}.json, kv_cache: 100TiB, kv_bytes_per_token: 1000, gpus_per_replica: 1,
    max_context_tokens: 1048576, max_running: {run.max_running}, max_batch_tokens: {run.max_batch_tokens},
    prefill: {{kind: chunked, chunk_tokens: {run.max_batch_tokens}}}}}
policies: [none]
arrivals: {{kind: replay, path: {profile.name}.csv}}
"""
    document = parse_document(text, str(out / "logs.yaml"))
    checked(document)
    ready = prepare(Work(document), None, 0)
    engine = build_engine(ready.scenario, document, ready.plant, 0, ready.traffic.domains, ready.streams)
    result = simulate(engine, ready.scenario.fleet.router, 1, ready.traffic, horizon_s, ready.streams, Recorder("full"))
    requests, steps = result.requests, result.steps
    lives = Lives(*(np.asarray(requests[name], np.float64) for name in Lives.__slots__))
    return lives, vllm_counts(requests, steps)


def vllm_counts(requests: Columns, steps: Columns) -> dict[str, Floats]:
    """Return ``t``, ``running`` and ``waiting`` at each step's end, counted as vLLM does.

    There a request waits until a step holds some of its prompt (the scheduler of vLLM V1: it leaves the queue only
    while the step has tokens left); the simulator counts it as running once it has a seat. For one replica that
    computes prompts in order of arrival and preempts nobody.
    """
    prompts = np.cumsum(requests["prompt_tokens"])
    # A prompt is begun once more tokens are computed than all earlier prompts hold.
    begun = np.searchsorted(prompts - requests["prompt_tokens"], np.cumsum(steps["prompt_tokens"]))
    running = begun - np.searchsorted(np.sort(requests["ended_s"]), steps["ended_s"], side="right")
    waiting = steps["running"] + steps["waiting"] - running
    counts = {"t": steps["ended_s"], "running": running, "waiting": waiting}
    return {name: np.asarray(column, np.float64) for name, column in counts.items()}


def at_seconds(series: dict[str, Floats], name: str, seconds: Floats) -> Floats:
    """Return a stepwise series at given instants: 0 before its first."""
    place = np.searchsorted(series["t"], seconds, side="right") - 1
    return np.where(place >= 0, series[name][np.maximum(place, 0)], 0.0)


def run_section(run: Run, out: Path, seed: int) -> Section:
    """Score one run."""
    observed = run.lives()
    predicted, series = simulate_run(run, run.fit, out, seed)
    later = observed.arrived_s > run.last_fitted_s
    rows: list[list[str]] = []
    checks: list[Check] = []
    ours, theirs = predicted.metrics(later), observed.metrics(later)
    for metric, values in theirs.items():
        unit, factor = ("ms", 1e3) if metric == "TPOT" else ("s", 1.0)
        for label, quantile, bound in (("median", 50, MEDIAN_BOUND), ("p99", 99, P99_BOUND)):
            told, seen = (factor * float(np.percentile(one, quantile)) for one in (ours[metric], values))
            error = 100 * (told / seen - 1)
            name = f"{run.name}, {metric} {label}"
            checks.append(_percent(name, told, seen, error, bound))
            rows.append([f"{metric} {label} ({unit})", f"{told:.2f}", f"{seen:.2f}", f"{error:+.1f}", f"{bound:.0f}"])
        typical = float(np.median(np.abs(ours[metric] / values - 1)))
        checks.append(summarize(f"{run.name}, {metric}: median |error| request by request", 100 * typical, "%"))
        rows.append([f"{metric}, request by request: median |error|", "", "", f"{100 * typical:.1f}", ""])
    for name in SERIES:
        apart, told_mean, seen_mean = seats_apart(run, series, name)
        for label, quantile, bound in (("median", 50, MEDIAN_BOUND), ("p99", 99, P99_BOUND)):
            error = float(np.percentile(apart, quantile))
            checks.append(summarize(f"{run.name}, {name}: {label} |error| by second", error, "% of seats", bound))
            numbers = (f"{told_mean:.1f}", f"{seen_mean:.1f}") if quantile == 50 else ("", "")
            rows.append([f"{name}: mean; {label} |error|, % of seats", *numbers, f"{error:.1f}", f"{bound:.0f}"])
    hosts = run.fit.inside.get("admission")
    if run.fit.cost_s["admission"] > 0:
        admission = ""
    elif hosts is None:
        admission = " Letting a request in costs nothing that the fit could find beside its tokens."
    else:
        admission = f" Letting a request in has no cost that could be told apart from others ({', '.join(hosts)})."
    lines = [
        *said(
            f"Fitted to the {len(run.fit.requests)} requests that ended in the first "
            f"{run.fit.until_s - run.began_s:.1f} s (residuals {run.fit.rms:.1%} rms); they arrived within "
            f"{run.last_fitted_s:.1f} s.{admission} Given: arrivals, lengths, {run.max_running} seats, "
            f"{run.max_batch_tokens:,} tokens a step. Predicted: the {int(later.sum())} requests that arrived later, "
            "and the engine's own count of running and waiting requests, second by second."
        ),
        "",
        *table(("metric", "predicted", "observed", "error %", "bound %"), rows),
        "",
        *said(
            "Waiting is, as vLLM counts, until the first of the prompt is computed; the engine never ran out of cache "
            "here. What was fitted and, as a look back, what the whole run would have said:"
        ),
        "",
        *table(
            ("fitted to", *(label for _, label, _ in LAW), "p99 of running, %"),
            _laws(run, series, out, seed),
        ),
    ]
    return Section(f"(i) {run.name} on {RUNS[run.name]}, vLLM 0.19.0", tuple(lines), tuple(checks))


def seats_apart(run: Run, series: dict[str, Floats], name: str) -> tuple[Floats, float, float]:
    """Return how far a predicted series is off, second by second after the fitted requests arrived, and both means.

    In per cent of the engine's seats: a waiting queue that is empty half of the time has no scale of its own.
    """
    seconds = run.series["t"]
    after = seconds > run.last_fitted_s
    predicted, seen = at_seconds(series, name, seconds)[after], run.series[name][after]
    return 100 * np.abs(predicted - seen) / run.max_running, float(predicted.mean()), float(seen.mean())


def _laws(run: Run, series: dict[str, Floats], out: Path, seed: int) -> list[list[str]]:
    """Return what fits to the start and to all of a run find, and what comes of it: rows of a table."""
    rows = []
    for label, fit in (("its start", run.fit), ("the whole run", run.whole)):
        counts = series if fit is run.fit else simulate_run(run, fit, out / "whole_run", seed)[1]
        costs = []
        for name, _, factor in LAW:
            value, error = (factor * one[name] for one in (fit.cost_s, fit.error_s))
            costs.append(f"{value:.3g}" + f" ± {error:.2g}" * (error > 0) if value else "-")
        rows.append([label, *costs, f"{np.percentile(seats_apart(run, counts, 'running')[0], 99):.1f}"])
    return rows


def log_sections(settings: Settings) -> list[Section]:
    """Score both runs."""
    return [run_section(read_run(settings.shared, name), settings.out, settings.seed) for name in RUNS]


def _percent(name: str, predicted: float, observed: float, error: float, bound: float) -> Check:
    return Check(
        name=name,
        predicted=predicted,
        observed=observed,
        error=error,
        bound=bound,
        unit="%",
        holds=abs(error) <= bound,
    )
