"""How well a confidence knows what will be accepted, and Sequential Temperature Scaling to mend it.

What is judged is *survival*: the product of confidences up to position k against whether the first k draft tokens were
all accepted. A position that was not verified is unknown, never a rejection.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from decoder.confidence import confidence_of
from decoder.errors import Fault, InputError
from decoder.session import Round
from profiles.recipes.quality import ECE_BINS, PositionQuality, judge_survival

#: Known outcomes that fitting asks for at each position: 20 to a bin, on average.
MIN_OUTCOMES = 20 * ECE_BINS
#: Temperatures tried, left to right: 0.3, 0.4, ... 5.0.
GRID = tuple(round(0.1 * step, 1) for step in range(3, 51))


class CalibrationError(InputError):
    """Confidences cannot be calibrated with what was given; exit code 2."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Blocks with their confidence logits and what became of them.

    ``logits`` ``[blocks, draft_length]``; ``survived``: whether all draft tokens up to here were accepted; ``known``:
    whether this position was verified. Unknown entries of the other two mean nothing.
    """

    logits: NDArray[np.float64]
    survived: NDArray[np.bool_]
    known: NDArray[np.bool_]

    def __post_init__(self) -> None:
        if not self.logits.shape == self.survived.shape == self.known.shape or self.logits.ndim != 2:
            raise ValueError("logits, survived and known must share one shape [blocks, draft_length]")
        if not np.isfinite(self.logits[self.known]).all():
            raise CalibrationError(Fault("a confidence logit is not a finite number"))

    @property
    def draft_length(self) -> int:
        """Positions of a block."""
        return int(self.logits.shape[1])

    def split(self, fitted_share: float, rng: np.random.Generator) -> tuple[Outcomes, Outcomes]:
        """Return two parts by block, drawn at random: one to fit on, one to judge by."""
        order = rng.permutation(len(self.logits))
        cut = round(fitted_share * len(order))
        return self._take(np.sort(order[:cut])), self._take(np.sort(order[cut:]))

    def _take(self, rows: NDArray[np.int64]) -> Outcomes:
        return Outcomes(self.logits[rows], self.survived[rows], self.known[rows])


def outcomes_of(rounds: Iterable[Round], draft_length: int) -> Outcomes:
    """Collect the outcomes of decoded rounds; rounds that drafted nothing are left out.

    After a rejection every deeper position that was *verified* is known to have failed. One that was not verified
    stays unknown even then: counting it would record failures alone.
    """
    rounds = [record for record in rounds if record.confidence_logits]
    shape = (len(rounds), draft_length)
    logits, survived, known = np.zeros(shape), np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    for row, record in enumerate(rounds):
        width = min(len(record.confidence_logits), draft_length)
        logits[row, :width] = record.confidence_logits[:width]
        survived[row, : record.accepted_draft_tokens] = True
        # A stop ends what is known: the tokens after it were never emitted, and count as nothing.
        cut_by_stop = record.bonus_token is None
        known[row, : record.accepted_draft_tokens if cut_by_stop else record.verify_length] = True
    return Outcomes(logits, survived, known)


def survival_of(logits: NDArray[np.float64], temperatures: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Return running products of the confidences, ``[blocks, draft_length]``."""
    return np.asarray(np.cumprod(confidence_of(logits, temperatures), 1), np.float64)


def judge(outcomes: Outcomes, temperatures: Sequence[float] | None = None) -> tuple[PositionQuality, ...]:
    """Judge every position of ``outcomes``, with raw confidences or with calibrated ones."""
    survival = survival_of(outcomes.logits, temperatures)
    return tuple(
        judge_survival(survival[outcomes.known[:, k], k], outcomes.survived[outcomes.known[:, k], k], k)
        for k in range(outcomes.draft_length)
    )


def summary(qualities: Sequence[PositionQuality]) -> dict[str, float | None]:
    """Return means over positions, weighted by outcomes; a score that no position has is None."""
    means: dict[str, float | None] = {}
    for name in ("ece", "auc", "brier", "mean_confidence", "mean_outcome"):
        pairs = [(getattr(quality, name), quality.outcomes) for quality in qualities]
        held = [(value, weight) for value, weight in pairs if value is not None]
        total = sum(weight for _, weight in held)
        means[name] = sum(value * weight for value, weight in held) / total if total else None
    return means


def ece_table(outcomes: Outcomes, temperatures: Sequence[float], grid: Sequence[float] = GRID) -> NDArray[np.float64]:
    """Return the ECE of the survival at each position for each temperature of the grid, ``[draft_length, grid]``.

    Earlier positions are at their ``temperatures``.
    """
    survival = np.ones(len(outcomes.logits))
    table = np.empty((outcomes.draft_length, len(grid)))
    for k, temperature in enumerate(temperatures):
        table[k] = _ece_row(outcomes, survival, k, grid)
        survival = survival * _column(outcomes, k, temperature)
    return table


def _column(outcomes: Outcomes, k: int, temperature: float) -> NDArray[np.float64]:
    return confidence_of(outcomes.logits[:, k : k + 1], [temperature])[:, 0]


def _ece_row(outcomes: Outcomes, survival: NDArray[np.float64], k: int, grid: Sequence[float]) -> NDArray[np.float64]:
    """Return the ECE at position ``k`` for each temperature, given the ``survival`` before it."""
    rows = outcomes.known[:, k]
    scores = [
        judge_survival((survival * _column(outcomes, k, temperature))[rows], outcomes.survived[rows, k]).ece
        for temperature in grid
    ]
    return np.array(scores, np.float64)


def fit_temperatures(
    outcomes: Outcomes, grid: Sequence[float] = GRID, min_outcomes: int = MIN_OUTCOMES
) -> tuple[float, ...]:
    """Fit one temperature a position, left to right, each to the lowest ECE of the survival up to it.

    On ties the lowest temperature wins. Raises `CalibrationError` where a position has fewer known outcomes than
    ``min_outcomes``, and says how many are needed.

    Notes
    -----
    Source: DSpark paper, section 3.2.1. Dividing a logit keeps the order of confidences at each position.
    """
    if not grid or min(grid) <= 0:
        raise CalibrationError(Fault(f"temperatures must be above 0; the grid starts at {min(grid, default=None)}"))
    if outcomes.draft_length == 0:
        raise CalibrationError(Fault("nothing was drafted: there is no confidence to calibrate"))
    faults = []
    for k in range(outcomes.draft_length):
        have = int(outcomes.known[:, k].sum())
        if have < min_outcomes:
            faults.append(
                Fault(
                    f"position {k + 1} has {have} known outcomes; at least {min_outcomes} are needed: decode about "
                    f"{min_outcomes / max(have, 1):.0f} times as much, verifying whole blocks"
                )
            )
    if faults:
        raise CalibrationError(*faults)
    temperatures: list[float] = []
    survival = np.ones(len(outcomes.logits))
    for k in range(outcomes.draft_length):
        temperatures.append(float(grid[int(np.argmin(_ece_row(outcomes, survival, k, grid)))]))
        survival = survival * _column(outcomes, k, temperatures[k])
    return tuple(temperatures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Temperatures with what they were fitted on; the file that ``decoder.calibrate`` writes.

    ``domains``: what the outcomes came from; decoding other text is a shift that the numbers do not cover.
    """

    temperatures: tuple[float, ...]
    drafter: str
    domains: tuple[str, ...]
    fitted_outcomes: tuple[int, ...]
    sampling_temperature: float
    seed: int


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration as JSON; it appears by rename."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(asdict(calibration), indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def load_calibration(path: Path) -> Calibration:
    """Read a calibration; raises `CalibrationError` that names file and key."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise CalibrationError(Fault(f"cannot read: {(fault.strerror or str(fault)).lower()}", str(path))) from None
    except ValueError as fault:
        raise CalibrationError(Fault(f"not JSON: {fault}", str(path))) from None
    expected = set(Calibration.__dataclass_fields__)
    if not isinstance(raw, dict) or set(raw) != expected:
        raise CalibrationError(Fault(f"expected the keys {', '.join(sorted(expected))}", str(path)))
    values = raw["temperatures"]
    if not isinstance(values, list) or not values:
        raise CalibrationError(Fault("expected a list of numbers", str(path), key="temperatures"))
    for value in values:
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise CalibrationError(Fault(f"expected numbers above 0; got {value}", str(path), key="temperatures"))
    return Calibration(
        temperatures=tuple(float(value) for value in values),
        drafter=str(raw["drafter"]),
        domains=tuple(str(domain) for domain in raw["domains"]),
        fitted_outcomes=tuple(int(count) for count in raw["fitted_outcomes"]),
        sampling_temperature=float(raw["sampling_temperature"]),
        seed=int(raw["seed"]),
    )
