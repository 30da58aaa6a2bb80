"""How well a confidence knows what will be accepted: ECE, AUC, Brier score, and the bars of a reliability diagram."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ECE_BINS = 20
AUC_BINS = 1000


@dataclass(frozen=True, slots=True)
class Bin:
    """One bar of a reliability diagram."""

    low: float
    high: float
    mean_confidence: float
    mean_outcome: float
    outcomes: int


@dataclass(frozen=True, slots=True)
class PositionQuality:
    """Calibration of the survival at one position (0-based); ``auc`` is None where all outcomes agree."""

    position: int
    outcomes: int
    ece: float | None
    auc: float | None
    brier: float | None
    mean_confidence: float | None
    mean_outcome: float | None
    reliability: tuple[Bin, ...]


def judge_survival(confidence: NDArray[np.float64], survived: NDArray[np.bool_], position: int = 0) -> PositionQuality:
    """Return ECE (20 equal bins), AUC (1,000-bin histogram, ties count half) and Brier score.

    ``confidence`` ``[outcomes]`` in [0, 1] is the predicted survival. Where there is no outcome, every score is None.
    """
    n = confidence.size
    if n == 0:
        return PositionQuality(position, 0, None, None, None, None, None, ())
    outcome = survived.astype(np.float64)
    where = np.minimum((confidence * ECE_BINS).astype(np.int64), ECE_BINS - 1)
    counts = np.bincount(where, minlength=ECE_BINS)
    sums = np.bincount(where, confidence, ECE_BINS), np.bincount(where, outcome, ECE_BINS)
    bars = tuple(
        Bin(i / ECE_BINS, (i + 1) / ECE_BINS, sums[0][i] / counts[i], sums[1][i] / counts[i], int(counts[i]))
        for i in range(ECE_BINS)
        if counts[i]
    )
    return PositionQuality(
        position=position,
        outcomes=n,
        ece=float(np.abs(sums[0] - sums[1]).sum() / n),
        auc=_auc(confidence, survived),
        brier=float(((confidence - outcome) ** 2).mean()),
        mean_confidence=float(confidence.mean()),
        mean_outcome=float(outcome.mean()),
        reliability=bars,
    )


def _auc(confidence: NDArray[np.float64], survived: NDArray[np.bool_]) -> float | None:
    where = np.minimum((confidence * AUC_BINS).astype(np.int64), AUC_BINS - 1)
    yes = np.bincount(where[survived], minlength=AUC_BINS).astype(np.float64)
    no = np.bincount(where[~survived], minlength=AUC_BINS).astype(np.float64)
    if yes.sum() == 0 or no.sum() == 0:
        return None
    below = np.cumsum(no) - no
    return float((yes * (below + 0.5 * no)).sum() / (yes.sum() * no.sum()))
