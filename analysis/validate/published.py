"""The paper's figures 7 and 8 as numbers: clouds of telemetry, lines fitted to them, marked points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from profiles.recipes.serving import Model
from profiles.recipes.sources import Floats, Shared

FOLDER = "reference/dspark_paper"
SPEED = f"{FOLDER}/derived_tps_vs_requests_per_gpu.csv"
BUDGET = f"{FOLDER}/fig8_verification_budget_scatter_summary.csv"
BATCH = f"{FOLDER}/derived_token_batch_vs_concurrency.csv"
HISTOGRAM = f"{FOLDER}/derived_token_batch_histogram.csv"
ANCHORS = f"{FOLDER}/fig7_anchor_points.csv"

MODELS: tuple[Model, ...] = ("V4-Flash", "V4-Pro")
#: Tokens/s per user at which the paper compares: the lenient and the strict promise.
LENIENT: dict[Model, float] = {"V4-Flash": 80.0, "V4-Pro": 35.0}
STRICT: dict[Model, float] = {"V4-Flash": 120.0, "V4-Pro": 50.0}
#: The parabolas of figure 8, exact: constant, slope, curvature over requests per GPU, and the range drawn.
PARABOLA: dict[Model, tuple[float, float, float]] = {
    "V4-Flash": (5.184395, -0.01283742, 2.163784e-5),
    "V4-Pro": (5.490671, -0.01951898, 4.789695e-5),
}
#: Preferred batches that the clouds of figure 8 show (tokens per GPU, read to about 2).
PLATEAUS: dict[Model, tuple[int, ...]] = {"V4-Flash": (432, 576, 736), "V4-Pro": (256, 416, 512, 704)}
#: A bin of fewer points is not dense: its median is a matter of luck.
DENSE_POINTS = 50


@dataclass(frozen=True, slots=True)
class Cloud:
    """Telemetry by requests per GPU, ascending: 10th percentile, median and 90th percentile of each bin.

    ``points``: how many there are at least.
    """

    requests: Floats
    p10: Floats
    median: Floats
    p90: Floats
    points: Floats

    def dense(self, from_requests: float = 5.0, to_requests: float = 205.0, least: int = DENSE_POINTS) -> Cloud:
        """Return the bins with enough points, between two loads; bins are named by their median, give or take 1."""
        keep = (self.points >= least) & (self.requests > from_requests - 1) & (self.requests < to_requests + 1)
        return Cloud(*(column[keep] for column in (self.requests, self.p10, self.median, self.p90, self.points)))


def speed_cloud(shared: Shared, model: Model, method: Literal["MTP", "DSpark"]) -> Cloud:
    """Return tokens/s per user (figure 7, binned by requests per GPU)."""
    names = ("requests_per_gpu_median", "tps_p10", "tps_median", "tps_p90", "markers_at_least")
    return Cloud(*shared.columns(SPEED, *names, target_model=model, method=method))


def budget_cloud(shared: Shared, model: Model) -> Cloud:
    """Return DSpark's verified tokens a request, bonus included (figure 8)."""
    stem = "verification_budget_tokens_per_request"
    low, high, p10, median, p90, points = shared.columns(
        BUDGET,
        "concurrent_requests_bin_low",
        "concurrent_requests_bin_high",
        f"{stem}_p10",
        f"{stem}_median",
        f"{stem}_p90",
        "markers_at_least",
        target_model=model,
        method="DSpark",
    )
    return Cloud((low + high) / 2, p10, median, p90, points)


def batch_cloud(shared: Shared, model: Model) -> Cloud:
    """Return DSpark's batch tokens per GPU (figure 8's requests times budget)."""
    low, high, p10, median, p90, points = shared.columns(
        BATCH,
        "concurrent_requests_bin_low",
        "concurrent_requests_bin_high",
        "token_batch_p10",
        "token_batch_median",
        "token_batch_p90",
        "markers_at_least",
        target_model=model,
    )
    return Cloud((low + high) / 2, p10, median, p90, points)


def batch_histogram(shared: Shared, model: Model) -> tuple[Floats, Floats]:
    """Return batch tokens (the middle of each bin) and the share of the cloud there."""
    low, high, share = shared.columns(
        HISTOGRAM, "token_batch_bin_low", "token_batch_bin_high", "fraction_of_scatter_mass", target_model=model
    )
    return (low + high) / 2, share


def parabola(model: Model, requests: Floats) -> Floats:
    """Return figure 8's fitted budget, tokens a request."""
    constant, slope, curvature = PARABOLA[model]
    return np.asarray(constant + slope * requests + curvature * requests**2)


def line_requests(shared: Shared, model: Model, user_tokens_per_s: float) -> dict[str, float]:
    """Return the requests per GPU of each method where figure 7's fitted lines give that speed."""
    found = {}
    for row in shared.rows(ANCHORS, target_model=model):
        if float(row["tps_token_per_s_per_user"]) == user_tokens_per_s:
            found[row["method"]] = float(row["throughput_token_per_s_per_gpu"]) / user_tokens_per_s
    return found


# ------------------------------------------------------------------------------------------------------------ crossings


@dataclass(frozen=True, slots=True)
class Curve:
    """Tokens/s per user over requests per GPU, straight between points; requests ascend."""

    requests: Floats
    speed: Floats

    @property
    def throughput(self) -> Floats:
        """Tokens/s per GPU."""
        return self.requests * self.speed

    def requests_at(self, speed: float) -> float | None:
        """Return the most requests per GPU at which every user still gets ``speed``; None if that lies outside."""
        for i in range(self.requests.size - 1, 0, -1):
            fast, slow = self.speed[i - 1], self.speed[i]
            if slow <= speed <= fast and fast > slow:
                part = float((fast - speed) / (fast - slow))
                return float(self.requests[i - 1] + part * (self.requests[i] - self.requests[i - 1]))
        return None

    def speed_at_throughput(self, throughput: float) -> float | None:
        """Return the fastest speed at which ``throughput`` per GPU is reached; None if that lies outside."""
        carried = self.throughput
        for i in range(1, carried.size):
            low, high = carried[i - 1], carried[i]
            if low <= throughput <= high and high > low:
                part = float((throughput - low) / (high - low))
                # Along the piece both requests and speed are straight; throughput bends by little.
                return float(self.speed[i - 1] + part * (self.speed[i] - self.speed[i - 1]))
        return None


@dataclass(frozen=True, slots=True)
class Matched:
    """Two curves compared at one speed: requests per GPU of each, gains of the second over the first in per cent."""

    requests: tuple[float | None, float | None]
    throughput_gain: float | None
    speed_gain: float | None


def match(first: Curve, second: Curve, speed: float) -> Matched:
    """Compare throughput at ``speed``, and speed at the throughput that the first has there."""
    own, other = first.requests_at(speed), second.requests_at(speed)
    faster = second.speed_at_throughput(own * speed) if own is not None else None
    return Matched(
        (own, other),
        None if own is None or other is None else 100 * (other / own - 1),
        None if faster is None else 100 * (faster / speed - 1),
    )
