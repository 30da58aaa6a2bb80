"""A policy under a load, predicted and observed, repeat by repeat; and how much of a difference is noise.

A repeat has arrivals of its own, and a prediction of its own for them; it meets the machine as it is then, and texts
whose luck is their own. So the spread of the errors between repeats holds all that a prediction cannot know: the
machine's unrest, and that the engine's texts are not the bank's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sim.metrics import Metrics

#: Two-sided confidence of what is called noise.
CONFIDENCE = 0.95


@dataclass(slots=True)
class Pair:
    """What was predicted and what the engine did, a repeat each; both had the same arrivals.

    ``paces``: the machine's, for which the prediction is: seconds for each second of the profile (`engine_pace`).
    """

    load: str
    policy: str
    predicted: list[Metrics] = field(default_factory=list)
    observed: list[Metrics] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)

    def told(self, name: str) -> float | None:
        """Return the mean prediction of a metric; None where no repeat has one."""
        return _mean(self.predicted, name)

    def seen(self, name: str) -> float | None:
        """Return the mean observation of a metric."""
        return _mean(self.observed, name)

    def errors_percent(self, name: str) -> list[float]:
        """Return predicted over observed, less 1, in per cent, of every repeat that has both."""
        return relative_percent(self.predicted, self.observed, name)

    def error_percent(self, name: str) -> float | None:
        """Return the mean error; infinite where one side alone never came; None without a repeat that has both."""
        errors = self.errors_percent(name)
        return float(np.mean(errors)) if errors else None

    def rows(self) -> list[dict[str, Any]]:
        """Return every repeat as plain data."""
        return [
            {
                "load": self.load,
                "policy": self.policy,
                "repeat": repeat,
                "pace": pace,
                "predicted": told,
                "observed": seen,
            }
            for repeat, (told, seen, pace) in enumerate(zip(self.predicted, self.observed, self.paces, strict=True))
        ]


def relative_percent(ours: Sequence[Metrics], theirs: Sequence[Metrics], name: str) -> list[float]:
    """Return ours over theirs, less 1, in per cent, of every repeat in which both have the metric."""
    found = []
    for one, other in zip(ours, theirs, strict=False):
        a, b = one[name], other[name]
        if a is not None and b is not None:
            found.append(0.0 if a == b else 100 * (float(a) / float(b) - 1) if b else math.inf)
    return found


def noise(samples: Iterable[Sequence[float]]) -> float | None:
    """Return half the confidence interval of a mean of repeats, their spread being pooled over ``samples``.

    None where nothing was repeated; infinite where a value is. Repeats are counted as the shortest sample's, so the
    interval is at least as wide as any one's. Source: Student's t, with as many degrees of freedom as there are
    repeats beyond the first of each sample.
    """
    from scipy.stats import t

    arrays = [np.array(sample, np.float64) for sample in samples if len(sample) > 1]
    if not arrays:
        return None
    if not all(np.isfinite(array).all() for array in arrays):
        return math.inf
    freedom = sum(array.size - 1 for array in arrays)
    squares = sum(float(np.square(array - array.mean()).sum()) for array in arrays)
    repeats = min(array.size for array in arrays)
    return float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt(squares / freedom / repeats)


def _mean(metrics: Sequence[Metrics], name: str) -> float | None:
    values = [float(value) for one in metrics if (value := one[name]) is not None]
    return float(np.mean(values)) if values else None
