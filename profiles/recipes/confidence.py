"""What figure 6 says about confidence: how far acceptance spreads, and how overconfident the raw scores are.

The law is that of `sim.acceptance`: draft token k is accepted with chance ``Phi(m_k + x)``, where ``x = request_sd z +
token_sd w`` with ``z`` drawn for each request and ``w`` for each place of its text. The confidence knows that chance
exactly (``noise_sd`` 0); its raw form has ``raw_temperature[k-1]`` times the logit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import brentq, least_squares
from scipy.special import expit, logit, ndtr, ndtri, roots_hermitenorm

from profiles.recipes.sources import HISTOGRAM, PRINTED, RELIABILITY, Floats, Shared, cite
from profiles.schema import ConfidenceQuality, Provenance, Spread

#: The positions that figure 6 shows, and the bins of its panels.
POSITIONS = (1, 3, 5, 7)
BINS = 20
#: Simulated rounds, evenly spread: AUCs are good to about 0.001.
DRAWS = 50_000


@dataclass(frozen=True, slots=True)
class Figure6:
    """What the panels show, before calibration.

    By position: ``auc`` as printed; ``histogram``, ``observed_by_bin`` ``[positions, bins]``; ``predicted`` and
    ``observed``: mean raw score and survival, the bins weighted by the histogram.
    """

    auc: Floats
    histogram: Floats
    observed_by_bin: Floats
    predicted: Floats
    observed: Floats


@dataclass(frozen=True, slots=True)
class ConfidenceFit:
    """Spread and raw temperatures that reproduce figure 6, and how well they do.

    ``model_auc``: to hold against the printed ones. ``reliability_rms``: distance of the two reliability curves
    before calibration, weighted by the histogram. Both by shown position.
    """

    request_sd: float
    token_sd: float
    raw_temperature: tuple[float, ...]
    model_auc: tuple[float, ...]
    reliability_rms: tuple[float, ...]


def read_figure6(shared: Shared) -> Figure6:
    """Read figure 6 from the reference data."""
    (auc_printed,) = shared.columns(PRINTED, "printed_auc")
    histogram, predicted, observed = [], [], []
    for k in map(str, POSITIONS):
        p, o = shared.columns(
            RELIABILITY, "predicted_acceptance", "observed_acceptance", draft_position=k, calibration="before"
        )
        (share,) = shared.columns(HISTOGRAM, "fraction_of_samples", draft_position=k)
        histogram.append(share)
        predicted.append(float(share @ p))
        observed.append(o)
    means = [float(share @ o) for share, o in zip(histogram, observed, strict=True)]
    return Figure6(auc_printed, np.array(histogram), np.array(observed), np.array(predicted), np.array(means))


def auc(chance: Floats, weight: Floats) -> float:
    """Return the area under the ROC curve of a score that orders like ``chance``, for outcomes drawn from it."""
    order = np.argsort(chance, kind="stable")
    accepted, rejected = weight[order] * chance[order], weight[order] * (1 - chance[order])
    below = np.cumsum(rejected) - rejected / 2
    return float(accepted @ below / (accepted.sum() * rejected.sum()))


def solve_means(survival: Floats, request_sd: float, token_sd: float) -> Floats:
    """Solve ``m_k`` for a survival by position over rounds of full blocks.

    Requests are of equal output, so one that accepts less takes more rounds and weighs more.
    """
    z, weight = _nodes()
    widen = np.hypot(1.0, token_sd)
    rounds = np.ones_like(z)
    means = np.zeros(survival.size)
    for _ in range(60):
        alive = weight * rounds
        alive = alive / alive.sum()
        for k, target in enumerate(survival):

            def miss(m: float, alive: Floats = alive, target: float = float(target)) -> float:
                return float(alive @ ndtr((m + request_sd * z) / widen)) - target

            means[k] = brentq(miss, -12.0, 12.0, xtol=1e-9)
            alive = alive * ndtr((means[k] + request_sd * z) / widen)
        before, rounds = rounds, 1 / (1 + _survivals(means, request_sd, token_sd, z).sum(axis=0))
        if np.abs(rounds - before).max() < 1e-7:
            break
    return means


def _survivals(means: Floats, request_sd: float, token_sd: float, z: Floats) -> Floats:
    """Return survival by position and request effect, ``[positions, z]``."""
    return np.asarray(np.cumprod(ndtr((means[:, None] + request_sd * z) / np.hypot(1.0, token_sd)), axis=0))


def draw_chances(survival: Floats, request_sd: float, token_sd: float) -> tuple[Floats, Floats]:
    """Draw rounds of that survival: each draft token's chance ``[positions, rounds]``, and each round's weight."""
    means = solve_means(survival, request_sd, token_sd)
    z, w = _normals(survival.size)
    weight = 1 / (1 + _survivals(means, request_sd, token_sd, z).sum(axis=0))
    return ndtr(means[:, None] + request_sd * z + token_sd * w), weight / weight.sum()


def fit_figure6(figure: Figure6) -> ConfidenceFit:
    """Fit the spread to the printed AUCs, then the raw temperatures to the mean of the raw scores.

    The total spread is what the AUC at position 1 needs; the part that a block shares (``request_sd``) is what the
    AUCs of the prefix survival at 3, 5 and 7 need. Between the shown positions survival is interpolated (geometric
    mean), and a hidden position has the temperature of the shown one after it.
    """
    survival = np.exp(np.interp(np.arange(1, 8), POSITIONS, np.log(figure.observed)))
    panels = np.array(POSITIONS) - 1

    def aucs(request_sd: float, token_sd: float) -> Floats:
        chances, weight = draw_chances(survival, request_sd, token_sd)
        return np.array([auc(prefix, weight) for prefix in np.cumprod(chances, axis=0)[panels]])

    found = least_squares(
        lambda sd: aucs(sd[0], sd[1]) - figure.auc, (0.6, 0.6), bounds=(0, 3), diff_step=1e-2, xtol=1e-3, ftol=1e-3
    )
    request_sd, token_sd = (round(float(sd), 2) for sd in found.x)

    chances, weight = draw_chances(survival, request_sd, token_sd)
    logits = logit(np.clip(chances, 1e-12, 1 - 1e-12))
    prefix = np.cumprod(chances, axis=0)
    temperatures: list[float] = []
    rms: list[float] = []
    run = np.ones(DRAWS)
    for panel, k in enumerate(panels):
        positions = slice(len(temperatures), int(k) + 1)

        def miss(t: float, run: Floats = run, here: Floats = logits[positions], panel: int = panel) -> float:
            return float(weight @ (run * expit(t * here).prod(axis=0)) - figure.predicted[panel])

        temperature = round(float(brentq(miss, 0.3, 5.0, xtol=1e-4)), 2)
        temperatures += [temperature] * (positions.stop - positions.start)
        run = run * expit(temperature * logits[positions]).prod(axis=0)
        bins = np.minimum((run * BINS).astype(np.int64), BINS - 1)
        mass = np.bincount(bins, weight, BINS)
        curve = np.bincount(bins, weight * prefix[k], BINS) / np.maximum(mass, 1e-300)
        share = np.where(mass > 0, figure.histogram[panel], 0.0)
        rms.append(float(np.sqrt(share @ (curve - figure.observed_by_bin[panel]) ** 2 / share.sum())))
    return ConfidenceFit(
        request_sd, token_sd, tuple(temperatures), tuple(map(float, aucs(request_sd, token_sd))), tuple(rms)
    )


@cache
def read_fit(shared: Shared) -> ConfidenceFit:
    """Read and fit figure 6, once for all profiles."""
    return fit_figure6(read_figure6(shared))


@cache
def _normals(positions: int) -> tuple[Floats, Floats]:
    """Return evenly spread standard normals: ``z [draws]`` and ``w [positions, draws]``.

    An additive recurrence by powers of the root of ``x^(d+1) = x + 1``: no dice, the same on every machine.
    """
    dimensions = positions + 1
    root = float(brentq(lambda x: x ** (dimensions + 1) - x - 1, 1.0, 2.0, xtol=1e-15))
    steps = root ** -np.arange(1.0, dimensions + 1)
    even = (0.5 + steps[:, None] * np.arange(1.0, DRAWS + 1)) % 1.0
    normals = np.asarray(ndtri(even))
    return normals[0], normals[1:]


@cache
def _nodes() -> tuple[Floats, Floats]:
    nodes, weights = roots_hermitenorm(64)
    return nodes, weights / weights.sum()


def spread_of(fit: ConfidenceFit, borrowed_by: str | None) -> Spread:
    """Make the spread section; ``borrowed_by`` names who borrows it, None for what figure 6 is about."""
    shared = "what a block shares is taken to be the request's, though it may be a stretch of its text"
    borrowed = f"no spread is published for {borrowed_by}: that of Qwen3-4B, DSpark, Alpaca is used"
    return Spread(
        request_sd=fit.request_sd,
        token_sd=fit.token_sd,
        provenance=Provenance(
            origin="fitted" if borrowed_by is None else "assumed",
            source=cite(PRINTED, RELIABILITY, HISTOGRAM),
            note="fitted to the printed AUCs .818 .812 .864 .907 of positions 1, 3, 5, 7 in figure 6; the law gives "
            f"{_list(fit.model_auc)}",
            reason=shared if borrowed_by is None else f"{borrowed}; {shared}",
        ),
    )


def trained_head_of(fit: ConfidenceFit, length: int, borrowed_by: str | None) -> ConfidenceQuality:
    """Make the confidence section of a trained head; ``borrowed_by`` as in `spread_of`."""
    noise = "noise that is independent by token looks like chance itself: not identifiable, set to 0"
    borrowed = f"no confidence is published for {borrowed_by}: that of Qwen3-4B, DSpark, Alpaca is used"
    return ConfidenceQuality(
        noise_sd=0.0,
        raw_temperature=fit.raw_temperature[:length],
        provenance=Provenance(
            origin="fitted" if borrowed_by is None else "assumed",
            source=cite(RELIABILITY, HISTOGRAM),
            note="temperatures that give figure 6's mean raw score at positions 1, 3, 5, 7 (a hidden position has "
            "that of the next shown one); the reliability curves before calibration then differ by "
            f"{_list(fit.reliability_rms)} rms",
            reason=noise if borrowed_by is None else f"{borrowed}; {noise}",
        ),
    )


def _list(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.3f}".removeprefix("0") for value in values)
