"""Every metric, defined once, on the columns a run wrote (`sim.records`). The README's glossary says the same in words.

A metric that does not exist (no drafts verified, no request with two tokens) is None, never NaN. A percentile that
falls on a request whose value never came within the run (no first token yet) is infinite.
Rows are taken in as they come and not kept; percentiles are exact, for which five numbers a measured request are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.records import Columns, groups

Floats = NDArray[np.float64]
Metrics = dict[str, float | int | None]


@dataclass(frozen=True, slots=True)
class Window:
    """The measurement window [from_s, until_s): warm-up and cool-down lie outside."""

    from_s: float
    until_s: float

    @property
    def length_s(self) -> float:
        """Seconds in the window."""
        return self.until_s - self.from_s

    def holds(self, instants_s: Floats) -> NDArray[np.bool_]:
        """Tell which instants lie inside."""
        return np.asarray((instants_s >= self.from_s) & (instants_s < self.until_s))


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of a fleet: all of them (prefill pools included), and those that decode; ``replicas`` decode replicas."""

    total: int
    decode: int
    replicas: int


@dataclass(frozen=True, slots=True)
class Objective:
    """Bounds that each request should meet; None is no bound. Seconds, and tokens per second."""

    user_tokens_per_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def any(self) -> bool:
        """Whether there is any bound."""
        return any(bound is not None for bound in (self.user_tokens_per_s, self.ttft_s, self.tpot_s, self.e2e_s))


def ttft_s(requests: Columns) -> Floats:
    """``first_token_s - arrived_s``, queue included; infinite where no token came."""
    value: Floats = requests["first_token_s"] - requests["arrived_s"]
    return np.where(np.isnan(value), np.inf, value)


def tpot_s(requests: Columns) -> Floats:
    """``(last_token_s - first_token_s) / (output_tokens - 1)``; NaN below two tokens."""
    gaps = requests["output_tokens"] - 1
    span: Floats = requests["last_token_s"] - requests["first_token_s"]
    value: Floats = np.divide(span, gaps, out=np.full(gaps.size, np.nan), where=gaps > 0)
    return value


def user_tokens_per_s(requests: Columns) -> Floats:
    """``1 / tpot_s``: interactivity; NaN below two tokens, infinite where all came in one delivery."""
    return _rate(tpot_s(requests))


def _rate(gap: Floats) -> Floats:
    rate: Floats = np.divide(1.0, gap, out=np.full(gap.size, np.inf), where=gap != 0.0)
    return rate


def queue_wait_s(requests: Columns) -> Floats:
    """``admitted_s - arrived_s``; infinite where the request was never admitted."""
    value: Floats = requests["admitted_s"] - requests["arrived_s"]
    return np.where(np.isnan(value), np.inf, value)


def e2e_s(requests: Columns) -> Floats:
    """``ended_s - arrived_s`` of finished requests; infinite for all others."""
    value: Floats = requests["ended_s"] - requests["arrived_s"]
    return np.where(requests["status"] == "finished", value, np.inf)


def meets(requests: Columns, objective: Objective) -> NDArray[np.bool_]:
    """Tell which requests finished and met every objective; a rate asked of one token is met."""
    met = requests["status"] == "finished"
    if objective.user_tokens_per_s is not None:
        met &= ~(user_tokens_per_s(requests) < objective.user_tokens_per_s)
    if objective.ttft_s is not None:
        met &= ttft_s(requests) <= objective.ttft_s
    if objective.tpot_s is not None:
        met &= ~(tpot_s(requests) > objective.tpot_s)
    if objective.e2e_s is not None:
        met &= e2e_s(requests) <= objective.e2e_s
    return np.asarray(met, dtype=np.bool_)


def percentile(values: Floats, percent: float) -> float | None:
    """Interpolated percentile over the values that exist; None where none does."""
    known = np.sort(values[~np.isnan(values)])
    if not known.size:
        return None
    at = (known.size - 1) * percent / 100
    low, part = int(at), at - int(at)
    if part == 0.0 or math.isinf(known[low]):
        return float(known[low])
    return float(known[low] + part * (known[low + 1] - known[low]))


def ratio(part: float, whole: float) -> float | None:
    """``part / whole``; None where there is no whole."""
    return part / whole if whole else None


_ENDS = ("finished", "rejected", "aborted", "failed", "unfinished")
_SUMMED = (
    "steps",
    "busy_s",
    "draft_s",
    "decoding",
    "decoding_s",
    "batch_tokens",
    "drafted_tokens",
    "verified_tokens",
    "trimmed_tokens",
    "accepted_draft_tokens",
    "output_tokens",
    "first_tokens",
    "outside_steps",
)


class Measurement:
    """Every metric of a run, from its rows as they come.

    Steps count where they *ended* in the window (their tokens are delivered then); requests where they *arrived* in it,
    whatever their end. Throughput is over all GPUs unless the name says otherwise.
    """

    def __init__(self, window: Window, gpus: Gpus, objective: Objective) -> None:
        self._window, self._gpus, self._objective = window, gpus, objective
        self._sums = dict.fromkeys((*_SUMMED, "busy_s on decode"), 0.0)
        self._counts = dict.fromkeys(("arrived", *_ENDS, "preemptions", "met"), 0)
        self._values: dict[str, list[Floats]] = {name: [] for name in ("tpot", "itl", "ttft", "wait", "e2e")}

    def add_steps(self, steps: Columns) -> None:
        """Take in rows of steps."""
        inside = self._window.holds(steps["ended_s"])
        for name in _SUMMED:
            self._sums[name] += float(steps[name][inside].astype(np.float64).sum())
        on_decode = inside & (steps["replica"] < self._gpus.replicas)
        self._sums["busy_s on decode"] += float(steps["busy_s"][on_decode].sum())

    def add_requests(self, requests: Columns) -> None:
        """Take in rows of requests."""
        arrived = self._window.holds(requests["arrived_s"])
        request = {name: column[arrived] for name, column in requests.items()}
        status = request["status"]
        for end in _ENDS:
            self._counts[end] += int((status == end).sum())
        self._counts["arrived"] += status.size
        self._counts["preemptions"] += int(request["preemptions"].sum())
        self._counts["met"] += int(meets(request, self._objective).sum())
        stayed = status != "rejected"
        for name, values in (
            ("tpot", tpot_s(request)),
            ("itl", request["max_itl_s"]),
            ("ttft", ttft_s(request)[stayed]),
            ("wait", queue_wait_s(request)[stayed]),
            ("e2e", e2e_s(request)),
        ):
            self._values[name].append(values)

    def metrics(self) -> Metrics:
        """Return every metric."""
        window, gpus, sums, counts = self._window, self._gpus, self._sums, self._counts
        values = {name: np.concatenate([np.empty(0), *parts]) for name, parts in self._values.items()}
        speed = _rate(values["tpot"])
        delivered, rounds, verified = sums["output_tokens"], sums["decoding"], sums["verified_tokens"]
        has_objective = self._objective.any()
        return {
            "output_tokens_per_s_per_gpu": delivered / window.length_s / gpus.total,
            "output_tokens_per_s_per_decode_gpu": delivered / window.length_s / gpus.decode,
            "user_tokens_per_s_p50": percentile(speed, 50),
            "user_tokens_per_s_p10": percentile(speed, 10),
            "ttft_s_p50": percentile(values["ttft"], 50),
            "ttft_s_p99": percentile(values["ttft"], 99),
            "tpot_s_p50": percentile(values["tpot"], 50),
            "tpot_s_p99": percentile(values["tpot"], 99),
            "longest_itl_s_p99": percentile(values["itl"], 99),
            "queue_wait_s_p99": percentile(values["wait"], 99),
            "e2e_s_p50": percentile(values["e2e"], 50),
            "accepted_length": ratio(delivered - sums["first_tokens"], rounds),
            "verify_tokens_per_request": ratio(sums["batch_tokens"], rounds),
            "wasted_draft_ratio": ratio(verified - sums["accepted_draft_tokens"], verified),
            "accepted_draft_ratio": ratio(sums["accepted_draft_tokens"], verified),
            "drafted_tokens_per_request": ratio(sums["drafted_tokens"], rounds),
            "goodput_per_s": counts["met"] / window.length_s if has_objective else None,
            "goodput_ratio": ratio(counts["met"], counts["arrived"]) if has_objective else None,
            "arrived": counts["arrived"],
            **{end: counts[end] for end in _ENDS},
            "preemptions": counts["preemptions"],
            "decoding_per_gpu": sums["decoding_s"] / window.length_s / gpus.decode,
            "busy_ratio": sums["busy_s on decode"] / window.length_s / gpus.replicas,
            "draft_time_ratio": ratio(sums["draft_s"], sums["busy_s"]),
            "steps": int(sums["steps"]),
            "outside_profile_ratio": ratio(sums["outside_steps"], sums["steps"]),
            "trimmed_tokens": int(sums["trimmed_tokens"]),
        }


def measure(requests: Columns, steps: Columns, window: Window, gpus: Gpus, objective: Objective) -> Metrics:
    """Return the metrics of rows that are all there; see `Measurement`."""
    measurement = Measurement(window, gpus, objective)
    for group in groups(steps):
        measurement.add_steps(group)
    for group in groups(requests):
        measurement.add_requests(group)
    return measurement.metrics()


def metric_names() -> list[str]:
    """Return the names of all metrics, in order."""
    return list(Measurement(Window(0.0, 1.0), Gpus(1, 1, 1), Objective()).metrics())


_TIMELINE = ("steps", "decoding", "decoding_s", "batch_tokens", "output_tokens", "first_tokens", "waiting")


class Timeline:
    """A run cut into whole windows of ``width_s``, from its rows as they come; one value a window."""

    def __init__(self, horizon_s: float, width_s: float, gpus: Gpus) -> None:
        self._width_s, self._gpus = width_s, gpus
        n = int(horizon_s / width_s * (1 + 1e-12))
        self._edges = width_s * np.arange(n + 1)
        self._totals = {name: np.zeros(n) for name in (*_TIMELINE, "decode_steps")}
        self._came = np.zeros(n, np.int64)
        self._replicas = 1

    def add_steps(self, steps: Columns) -> None:
        """Take in rows of steps."""
        slot = np.floor(steps["ended_s"] / self._width_s).astype(np.int64)
        keep = (slot >= 0) & (slot < self._came.size)
        slot = slot[keep]
        for name in _TIMELINE:
            np.add.at(self._totals[name], slot, steps[name][keep].astype(np.float64))
        decodes = keep & (steps["decoding"] > 0)
        np.add.at(self._totals["decode_steps"], slot[decodes[keep]], steps["steps"][decodes].astype(np.float64))
        if steps["replica"].size:
            self._replicas = max(self._replicas, int(steps["replica"].max()) + 1)

    def add_requests(self, requests: Columns) -> None:
        """Take in rows of requests."""
        self._came += np.histogram(requests["arrived_s"], self._edges)[0]

    def series(self) -> dict[str, Floats]:
        """Return the values, NaN where there is none.

        ``started_s``; ``arrivals_per_s``; ``decoding_per_gpu``: mean requests decoding; ``waiting``: mean over step
        ends, summed over replicas; ``user_tokens_per_s``: tokens delivered by decoding over request seconds in decode;
        ``output_tokens_per_s_per_gpu``; ``verify_tokens_per_request``; ``accepted_length``; ``batch_tokens_per_step``.
        """
        total, width_s, gpus = self._totals, self._width_s, self._gpus

        def per(part: Floats, whole: Floats) -> Floats:
            value: Floats = np.divide(part, whole, out=np.full(whole.size, np.nan), where=whole > 0)
            return value

        decoded = total["output_tokens"] - total["first_tokens"]
        return {
            "started_s": np.asarray(self._edges[:-1], np.float64),
            "arrivals_per_s": self._came / width_s,
            "decoding_per_gpu": total["decoding_s"] / width_s / gpus.decode,
            "waiting": per(total["waiting"] * self._replicas, total["steps"]),
            "user_tokens_per_s": per(decoded, total["decoding_s"]),
            "output_tokens_per_s_per_gpu": total["output_tokens"] / width_s / gpus.total,
            "verify_tokens_per_request": per(total["batch_tokens"], total["decoding"]),
            "accepted_length": per(decoded, total["decoding"]),
            "batch_tokens_per_step": per(total["batch_tokens"], total["decode_steps"]),
        }


def windows(requests: Columns, steps: Columns, horizon_s: float, width_s: float, gpus: Gpus) -> dict[str, Floats]:
    """Return the series of rows that are all there; see `Timeline`."""
    timeline = Timeline(horizon_s, width_s, gpus)
    for group in groups(steps):
        timeline.add_steps(group)
    for group in groups(requests):
        timeline.add_requests(group)
    return timeline.series()
