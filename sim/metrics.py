"""Every metric, defined once, on the columns a run wrote (`sim.records`). The README's glossary says the same in words.

A metric that does not exist (no drafts verified, no request with two tokens) is None, never NaN. A percentile that
falls
on a request whose value never came within the run (no first token yet) is infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.records import REQUEST_COLUMNS, STEP_COLUMNS, Columns

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
    gap = tpot_s(requests)
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


def measure(requests: Columns, steps: Columns, window: Window, gpus: Gpus, objective: Objective) -> Metrics:
    """Compute every metric of a run.

    Steps count where they *ended* in the window (their tokens are delivered then); requests where they *arrived* in it,
    whatever their end. Throughput is over all GPUs unless the name says otherwise.
    """
    inside = window.holds(steps["ended_s"])
    step = {name: column[inside].astype(np.float64) for name, column in steps.items()}
    sums = {name: float(column.sum()) for name, column in step.items()}
    arrived = window.holds(requests["arrived_s"])
    request = {name: column[arrived] for name, column in requests.items()}
    counts = {end: int((request["status"] == end).sum()) for end in _ENDS}
    speed, first = user_tokens_per_s(request), ttft_s(request)
    stayed = request["status"] != "rejected"
    tpot = tpot_s(request)
    met = int(meets(request, objective).sum())
    on_decode = step["replica"] < gpus.replicas
    delivered = sums["output_tokens"]
    rounds = sums["decoding"]
    return {
        "output_tokens_per_s_per_gpu": delivered / window.length_s / gpus.total,
        "output_tokens_per_s_per_decode_gpu": delivered / window.length_s / gpus.decode,
        "user_tokens_per_s_p50": percentile(speed, 50),
        "user_tokens_per_s_p10": percentile(speed, 10),
        "ttft_s_p50": percentile(first[stayed], 50),
        "ttft_s_p99": percentile(first[stayed], 99),
        "tpot_s_p50": percentile(tpot, 50),
        "tpot_s_p99": percentile(tpot, 99),
        "longest_itl_s_p99": percentile(request["max_itl_s"], 99),
        "queue_wait_s_p99": percentile(queue_wait_s(request)[stayed], 99),
        "e2e_s_p50": percentile(e2e_s(request), 50),
        "accepted_length": ratio(delivered - sums["first_tokens"], rounds),
        "verify_tokens_per_request": ratio(sums["batch_tokens"], rounds),
        "wasted_draft_ratio": ratio(sums["verified_tokens"] - sums["accepted_draft_tokens"], sums["verified_tokens"]),
        "accepted_draft_ratio": ratio(sums["accepted_draft_tokens"], sums["verified_tokens"]),
        "drafted_tokens_per_request": ratio(sums["drafted_tokens"], rounds),
        "goodput_per_s": met / window.length_s if objective.any() else None,
        "goodput_ratio": ratio(met, len(request["status"])) if objective.any() else None,
        "arrived": len(request["status"]),
        **counts,
        "preemptions": int(request["preemptions"].sum()),
        "decoding_per_gpu": sums["decoding_s"] / window.length_s / gpus.decode,
        "busy_ratio": float(step["busy_s"][on_decode].sum()) / window.length_s / gpus.replicas,
        "draft_time_ratio": ratio(sums["draft_s"], sums["busy_s"]),
        "steps": int(sums["steps"]),
        "outside_profile_ratio": ratio(sums["outside_steps"], sums["steps"]),
        "trimmed_tokens": int(sums["trimmed_tokens"]),
    }


def metric_names() -> list[str]:
    """Return the names of all metrics, in order."""
    nothing: Columns = {name: np.empty(0) for name in (*REQUEST_COLUMNS, *STEP_COLUMNS)}
    return list(measure(nothing, nothing, Window(0.0, 1.0), Gpus(1, 1, 1), Objective()))


_ENDS = ("finished", "rejected", "aborted", "failed", "unfinished")


def windows(requests: Columns, steps: Columns, horizon_s: float, width_s: float, gpus: Gpus) -> dict[str, Floats]:
    """Cut a run into whole windows of ``width_s``; one value a window, NaN where there is none.

    ``started_s``; ``arrivals_per_s``; ``decoding_per_gpu``: mean requests decoding; ``waiting``: mean over step ends,
    summed
    over replicas; ``user_tokens_per_s``: tokens delivered by decoding over request seconds in decode;
    ``output_tokens_per_s_per_gpu``; ``verify_tokens_per_request``; ``accepted_length``; ``batch_tokens_per_step``.
    """
    n = int(horizon_s / width_s * (1 + 1e-12))
    edges = width_s * np.arange(n + 1)
    slot = np.floor(steps["ended_s"] / width_s).astype(np.int64)
    keep = (slot >= 0) & (slot < n)

    def total(column: NDArray[Any]) -> Floats:
        return np.asarray(np.bincount(slot[keep], weights=column[keep], minlength=n)[:n], np.float64)

    def per(part: Floats, whole: Floats) -> Floats:
        value: Floats = np.divide(part, whole, out=np.full(n, np.nan), where=whole > 0)
        return value

    rounds, decoding_s, count = total(steps["decoding"]), total(steps["decoding_s"]), total(steps["steps"])
    decoded = total(steps["output_tokens"] - steps["first_tokens"])
    decode_steps = total(np.where(steps["decoding"].astype(np.int64) > 0, steps["steps"], 0))
    came = np.histogram(requests["arrived_s"], edges)[0]
    replicas = int(steps["replica"].max()) + 1 if steps["replica"].size else 1
    return {
        "started_s": np.asarray(edges[:-1], np.float64),
        "arrivals_per_s": came / width_s,
        "decoding_per_gpu": decoding_s / width_s / gpus.decode,
        "waiting": per(total(steps["waiting"]) * replicas, count),
        "user_tokens_per_s": per(decoded, decoding_s),
        "output_tokens_per_s_per_gpu": total(steps["output_tokens"]) / width_s / gpus.total,
        "verify_tokens_per_request": per(total(steps["batch_tokens"]), rounds),
        "accepted_length": per(decoded, rounds),
        "batch_tokens_per_step": per(total(steps["batch_tokens"]), decode_steps),
    }
