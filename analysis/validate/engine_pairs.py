"""A policy under a load, predicted and observed, repeat by repeat; and how much of a difference is noise.

A repeat has arrivals of its own, and a prediction of its own for them; it meets the machine as it is then, and texts
whose luck is their own. So how far the repeats depart from their common error holds all that a prediction cannot know:
the machine's unrest, and that the engine's texts are not the bank's.

The common error is that of the mean over repeats. The mean of the repeats' errors would lie too high, the more so the
noisier the repeats are: an observation that chance has halved doubles its ratio, one that chance has doubled only
halves it.
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
#: Simulations of each run. What is left of their own chance in the mean is a fifth of one's, and unseen beside the
#: engine's.
LUCKS = 24


@dataclass(frozen=True, slots=True)
class Ratio:
    """A mean over another, less 1, in per cent; ``departures``: each repeat's from it, as `noise` takes them.

    ``percent`` is infinite where the upper mean alone is, or the lower one is 0.
    """

    percent: float
    departures: tuple[float, ...]


@dataclass(slots=True)
class Pair:
    """What was predicted and what the engine did, a repeat each; both had the same arrivals.

    ``paces``: the machine's, for which the prediction is: seconds for each second of the profile (`engine_pace`).
    ``priced``, ``taken``: seconds that the engine's own steps should have taken, at that pace, and did
    (`engine_steps`).
    """

    load: str
    policy: str
    predicted: list[Metrics] = field(default_factory=list)
    observed: list[Metrics] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)
    priced: list[Metrics] = field(default_factory=list)
    taken: list[Metrics] = field(default_factory=list)

    def told(self, name: str) -> float | None:
        """Return the mean prediction of a metric; None where no repeat has one."""
        return _mean(self.predicted, name)

    def seen(self, name: str) -> float | None:
        """Return the mean observation of a metric."""
        return _mean(self.observed, name)

    def error(self, name: str) -> Ratio | None:
        """Return predicted over observed."""
        return ratio(self.predicted, self.observed, name)

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
                **({"priced_s": self.priced[repeat], "taken_s": self.taken[repeat]} if self.priced else {}),
            }
            for repeat, (told, seen, pace) in enumerate(zip(self.predicted, self.observed, self.paces, strict=True))
        ]


def mean_metrics(found: Sequence[Metrics]) -> Metrics:
    """Return the mean of each metric, of those that have it; the median where some are infinite, the mean being so."""
    means: Metrics = {}
    for name in found[0]:
        values = np.array([value for one in found if (value := one[name]) is not None], np.float64)
        means[name] = None if not values.size else float((np.mean if np.isfinite(values).all() else np.median)(values))
    return means


def ratio(ours: Sequence[Metrics], theirs: Sequence[Metrics], name: str) -> Ratio | None:
    """Return the mean of ours over that of theirs, of the repeats in which both have the metric; None where none has.

    Source: ratio estimator, its variance linearized (Cochran, Sampling Techniques, 1977, chapter 6).
    """
    pairs = zip((one[name] for one in ours), (one[name] for one in theirs), strict=False)
    both = np.array([pair for pair in pairs if None not in pair], np.float64)
    if not both.size:
        return None
    above, below = (float(value) for value in both.mean(axis=0))
    if math.isfinite(above) and math.isfinite(below) and below:
        departures = both @ (100 / below, -100 * above / below**2)
        return Ratio(100 * (above / below - 1), tuple(departures.tolist()))
    # What never came in some repeats and did in others could have come in any number of them.
    agreed = all(len(set(np.isfinite(side).tolist())) == 1 for side in both.T)
    percent = 0.0 if above == below else 100 * (above / below - 1) if below else math.inf
    return Ratio(percent, (0.0 if agreed else math.inf,) * len(both))


def noise(samples: Iterable[Sequence[float]]) -> float | None:
    """Return half the confidence interval of a mean of repeats, their spread being pooled over ``samples``.

    None where nothing was repeated; infinite where a value is. A sample of zeros is of what does not vary (accepted
    length without drafts) and says nothing of the spread of others. Repeats are counted as the shortest sample's, so
    the interval is at least as wide as any one's. Source: Student's t, with as many degrees of freedom as there are
    repeats beyond the first of each sample.
    """
    from scipy.stats import t

    arrays = [np.array(sample, np.float64) for sample in samples if len(sample) > 1]
    if not arrays:
        return None
    if not all(np.isfinite(array).all() for array in arrays):
        return math.inf
    arrays = [array for array in arrays if array.any()]
    if not arrays:
        return 0.0
    freedom = sum(array.size - 1 for array in arrays)
    squares = sum(float(np.square(array - array.mean()).sum()) for array in arrays)
    repeats = min(array.size for array in arrays)
    return float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt(squares / freedom / repeats)


def _mean(metrics: Sequence[Metrics], name: str) -> float | None:
    values = [float(value) for one in metrics if (value := one[name]) is not None]
    return float(np.mean(values)) if values else None
