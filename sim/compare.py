"""Policies side by side: means and 95 % intervals over replications, and differences paired by replication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from sim.metrics import Metrics

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over replications; ``half_width`` of its 95 % t-interval, None with one replication.

    ``value`` is None where the metric does not exist in some replication, infinite where it lies beyond the run.
    """

    value: float | None
    half_width: float | None

    @property
    def low(self) -> float | None:
        """Lower end of the interval."""
        return None if self.value is None or self.half_width is None else self.value - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end of the interval."""
        return None if self.value is None or self.half_width is None else self.value + self.half_width


def estimate(values: Sequence[float | int | None]) -> Estimate:
    """Estimate a mean from one value a replication."""
    known = [float(value) for value in values if value is not None]
    if not known or len(known) < len(values):
        return Estimate(None, None)
    mean = float(np.mean(known))
    if len(known) == 1 or not np.isfinite(mean):
        return Estimate(mean, None)
    quantile = float(stdtrit(len(known) - 1, 0.5 + CONFIDENCE / 2))
    return Estimate(mean, quantile * float(np.std(known, ddof=1)) / np.sqrt(len(known)))


def estimates(replications: Sequence[Metrics]) -> dict[str, Estimate]:
    """Estimate every metric."""
    return {name: estimate([metrics[name] for metrics in replications]) for name in replications[0]}


@dataclass(frozen=True, slots=True)
class Difference:
    """Change against the baseline, paired by replication, as a share of the baseline's mean.

    ``verdict``: ``higher`` or ``lower`` where the interval excludes 0, ``tie`` where it does not, ``one replication``
    where
    there is no interval to judge by, ``absent`` where the metric does not exist.
    """

    relative: Estimate
    verdict: str


def difference(ours: Sequence[float | int | None], baseline: Sequence[float | int | None]) -> Difference:
    """Compare a metric with the baseline's, replication by replication (common random numbers)."""
    pairs = [(a, b) for a, b in zip(ours, baseline, strict=True) if a is not None and b is not None]
    base = float(np.mean([b for _, b in pairs])) if pairs else 0.0
    if len(pairs) < len(ours) or base == 0.0 or not np.isfinite([value for pair in pairs for value in pair]).all():
        return Difference(Estimate(None, None), "absent")
    change = estimate([(a - b) / base for a, b in pairs])
    assert change.value is not None
    if change.value == 0.0 and not change.half_width:
        return Difference(change, "tie")
    if change.half_width is None:
        return Difference(change, "one replication")
    if abs(change.value) <= change.half_width:
        return Difference(change, "tie")
    return Difference(change, "higher" if change.value > 0 else "lower")
