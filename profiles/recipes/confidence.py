"""What figure 6 says about confidence: how far acceptance spreads, and how overconfident the raw scores are.

The law is the one of `sim.acceptance`. Token k of a block is accepted with chance ``Phi(m_k + x_k)`` where
``x_k = request_sd z + token_sd w_k``; ``z`` is drawn for each request, ``w_k`` for each place of its text. The confidence knows
that chance exactly (``noise_sd`` 0); its raw form has ``raw_temperature[k]`` times the logit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import brentq, least_squares
from scipy.special import expit, logit, ndtr, ndtri

from profiles.recipes.sources import HISTOGRAM, PRINTED, RELIABILITY, Floats, Shared

#: The positions that figure 6 shows.
POSITIONS = (1, 3, 5, 7)
DRAWS = 40_000


@dataclass(frozen=True, slots=True)
class Figure6:
    """What the panels of figure 6 show, by position: AUC as printed, means over the histogram, before calibration."""

    auc: Floats
    predicted: Floats
    observed: Floats
    binned_auc: Floats


@dataclass(frozen=True, slots=True)
class ConfidenceFit:
    """Spread and raw temperatures that reproduce figure 6, and how well they do."""

    request_sd: float
    token_sd: float
    raw_temperature: tuple[float, ...]
    model_auc: tuple[float, ...]
    reliability_rms: tuple[float, ...]


def read_figure6(shared: Shared) -> Figure6:
    """Read figure 6; survival and mean confidence are the bins weighted by the histogram."""
    predicted, observed, binned = [], [], []
    for k in POSITIONS:
        p, o = shared.columns(
            RELIABILITY, "predicted_acceptance", "observed_acceptance", draft_position=str(k), calibration="before"
        )
        (share,) = shared.columns(HISTOGRAM, "fraction_of_samples", draft_position=str(k))
        predicted.append(share @ p)
        observed.append(share @ o)
        binned.append(auc(o, share, in_order=True))
    (printed,) = shared.columns(PRINTED, "printed_auc")
    return Figure6(printed, np.array(predicted), np.array(observed), np.array(binned))


def auc(chance: Floats, weight: Floats, *, in_order: bool = False) -> float:
    """Return the area under the ROC curve of a score that orders like ``chance`` for an outcome drawn from it."""
    order = np.arange(chance.size) if in_order else np.argsort(chance, kind="stable")
    p, w = chance[order], weight[order]
    accepted, rejected = w * p, w * (1 - p)
    below = np.cumsum(rejected) - rejected / 2
    return float(accepted @ below / (accepted.sum() * rejected.sum()))


@cache
def _normals(positions: int) -> tuple[Floats, Floats]:
    """Return fixed standard normals: ``z [draws]`` and ``w [positions, draws]``."""
    rng = np.random.default_rng(6)
    return rng.standard_normal(DRAWS), rng.standard_normal((positions, DRAWS))


def draw_chances(survival: Floats, request_sd: float, token_sd: float) -> tuple[Floats, Floats]:
    """Draw rounds whose survival by position is ``survival``.

    Returns each draft token's chance of acceptance, ``[positions, rounds]``, and the weight of each round: requests
    are equally many, so one that accepts less takes more rounds.
    """
    z, w = _normals(survival.size)
    weight = np.ones(DRAWS)
    for _ in range(4):
        alive, steps = weight / weight.sum(), np.ones(DRAWS)
        chances, run = np.empty_like(w), np.ones(DRAWS)
        for k, target in enumerate(survival):
            x = request_sd * z + token_sd * w[k]
            m = _threshold(x, alive, float(target))
            chances[k] = ndtr(m + x)
            alive = alive * chances[k]
            run = run * ndtr((m + request_sd * z) / np.hypot(1.0, token_sd))
            steps += run
        weight = 1 / steps
    return chances, weight / weight.sum()


def _threshold(x: Floats, weight: Floats, target: float) -> float:
    """Solve ``weight @ Phi(m + x) = target`` for m, by Newton's method."""
    total = weight.sum()
    m = float(ndtri(target / total)) * float(np.sqrt(1 + x.var()))
    for _ in range(30):
        miss = float(weight @ ndtr(m + x)) - target
        if abs(miss) < 1e-9 * total:
            break
        m -= miss / float(weight @ np.exp(-0.5 * (m + x) ** 2)) * float(np.sqrt(2 * np.pi))
    return m


def fit_figure6(figure: Figure6) -> ConfidenceFit:
    """Fit the spread to the printed AUCs, then the raw temperatures to the mean of the raw scores.

    The total spread is what position 1 needs; how much of it a block shares (``request_sd``) is what the AUCs of the
    prefix survival at positions 3, 5 and 7 need. Survival between the shown positions is interpolated (geometric mean).
    """
    survival = np.exp(np.interp(np.arange(1, 8), POSITIONS, np.log(figure.observed)))
    panels = np.array(POSITIONS) - 1

    def aucs(request_sd: float, token_sd: float) -> Floats:
        chances, weight = draw_chances(survival, request_sd, token_sd)
        return np.array([auc(prefix, weight) for prefix in np.cumprod(chances, axis=0)[panels]])

    found = least_squares(lambda s: aucs(s[0], s[1]) - figure.auc, (0.6, 0.6), bounds=(0, 3), diff_step=1e-3)
    request_sd, token_sd = (round(float(s), 2) for s in found.x)

    chances, weight = draw_chances(survival, request_sd, token_sd)
    logits = logit(np.clip(chances, 1e-12, 1 - 1e-12))
    temperatures: list[float] = []
    run = np.ones(DRAWS)
    for k in panels:
        # Position k and the hidden one before it share one temperature; the mean of the raw prefix survival fixes it.
        hidden = list(range(len(temperatures), k + 1))
        target = figure.predicted[list(panels).index(k)]

        def misses(t: float, run: Floats = run, hidden: list[int] = hidden, target: float = target) -> float:
            return float(weight @ (run * expit(t * logits[hidden]).prod(axis=0))) - target

        t = round(float(brentq(misses, 0.3, 5.0)), 2)
        run = run * expit(t * logits[hidden]).prod(axis=0)
        temperatures += [t] * len(hidden)
    return ConfidenceFit(
        request_sd=request_sd,
        token_sd=token_sd,
        raw_temperature=tuple(temperatures),
        model_auc=tuple(float(a) for a in aucs(request_sd, token_sd)),
        reliability_rms=(),
    )
