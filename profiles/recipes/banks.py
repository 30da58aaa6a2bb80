"""What a recorded bank says: rounds followed along its texts, with intervals, and a law fitted to it.

A round drafts at a place, moves on by the accepted tokens and one more, and the next one begins there; so a place that
accepts little is met more often than its share of the text. The numbers of the paper are of rounds, and so are these.
What is uncertain is which texts were recorded: intervals are of a bootstrap over texts, the same draws for every
drafter, so that differences on the same texts are judged by their own spread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri, roots_hermitenorm

from profiles.files import BankArrays
from profiles.schema import ConfidenceQuality, ParametricLaw, Provenance, Spread, Survival

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DRAWS = 2000
LEVEL = 0.95
#: Widest spread that a law may have, in probits (the schema's bound): what it says of places is then 0 or 1.
WIDEST_SD = 5.0


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds along the texts of a bank, summed by text; a text without a round is left out.

    ``request`` ``[texts]``: its number. ``rounds``, ``emitted``, ``verified`` ``[texts]``: rounds, tokens that they
    emitted (bonus included), draft tokens that they verified. ``judged``, ``held`` ``[texts, draft_length]``: rounds
    that judged draft token k, and in which it was accepted.
    """

    request: Ints
    rounds: Floats
    emitted: Floats
    verified: Floats
    judged: Floats
    held: Floats

    @property
    def accepted_length(self) -> float:
        """Tokens a round, bonus included."""
        return float(self.emitted.sum() / self.rounds.sum())

    @property
    def conditional(self) -> Floats:
        """Conditional acceptance by position, NaN where none was judged, ``[draft_length]``."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.held.sum(0) / self.judged.sum(0))

    @property
    def survival(self) -> Floats:
        """Share of rounds whose first k draft tokens were accepted, whole blocks verified, ``[draft_length]``."""
        return np.asarray(self.held.sum(0) / self.rounds.sum())


def follow(bank: BankArrays, verify_length: Ints | None = None) -> Rounds:
    """Follow each text of a bank from its first place, round by round, with the outcomes that were recorded.

    ``verify_length`` ``[positions]``: draft tokens verified in a round at each place; None: whole blocks. The last
    round of a text is the last that begins where a whole block was recorded.
    """
    positions, length = bank.accepted.shape
    lengths = np.full(positions, length) if verify_length is None else verify_length
    would = np.cumprod(bank.accepted, axis=1).sum(axis=1)
    accepted = np.minimum(would, lengths)
    requests, starts = np.unique(bank.request, return_index=True)
    ends = np.append(starts[1:], positions)
    visited = np.zeros(positions, np.bool_)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        at = start
        while at < end:
            visited[at] = True
            at += 1 + int(accepted[at])
    k = np.arange(length)
    judged = visited[:, None] & (k < lengths[:, None]) & (k <= would[:, None])
    held = visited[:, None] & (k < accepted[:, None])

    def by_text(values: NDArray[np.generic]) -> Floats:
        return np.asarray(np.add.reduceat(values.astype(np.float64), starts, axis=0))

    return Rounds(
        request=requests,
        rounds=by_text(visited),
        emitted=by_text(np.where(visited, accepted + 1, 0)),
        verified=by_text(np.where(visited, lengths, 0)),
        judged=by_text(judged),
        held=by_text(held),
    )


def expected_length(bank: BankArrays) -> float:
    """Return the accepted length, tokens a round, of rounds that are drawn by ``chance``: what the simulator meets.

    Exact: the chance that a round begins at each place, followed from the first place of every text.
    """
    positions, length = bank.chance.shape
    survival = np.cumprod(bank.chance, axis=1)
    # Chance of a round that accepts 0, 1, ... draft tokens.
    share = -np.diff(np.concatenate([np.ones((positions, 1)), survival, np.zeros((positions, 1))], axis=1), axis=1)
    begins = np.zeros(positions + length + 1)
    _, starts = np.unique(bank.request, return_index=True)
    ends = np.append(starts[1:], positions)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        begins[start : start + length + 1] = 0.0  # what reached beyond the text before
        begins[start] = 1.0
        for at in range(start, end):
            begins[at + 1 : at + 2 + length] += begins[at] * share[at]
    rounds = begins[:positions]
    return float(rounds @ (1 + survival.sum(axis=1)) / rounds.sum())


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2

    def above(self, other: float) -> bool:
        """Whether the whole interval lies above."""
        return self.low > other

    def below(self, other: float) -> bool:
        """Whether the whole interval lies below."""
        return self.high < other


def bootstrap(texts: int, statistic: Callable[[Floats], Floats], seed: int = 0, draws: int = DRAWS) -> Estimate:
    """Estimate a statistic of ``texts`` texts; ``statistic`` maps weights ``[draws, texts]`` to numbers ``[draws]``.

    The same seed gives the same draws, whatever the statistic. A draw in which it does not exist (NaN) is left out; one
    text has no interval (NaN).
    """
    weights = np.random.default_rng(seed).multinomial(texts, np.full(texts, 1 / texts), size=draws).astype(np.float64)
    tail = 100 * (1 - LEVEL) / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        found = statistic(weights)
        whole = float(statistic(np.ones((1, texts)))[0])
    if texts < 2 or not np.isfinite(found).any():
        return Estimate(whole, np.nan, np.nan)
    low, high = np.nanpercentile(found, [tail, 100 - tail])
    return Estimate(whole, float(low), float(high))


def length_estimate(rounds: Rounds) -> Estimate:
    """Estimate the accepted length."""
    return bootstrap(len(rounds.request), lambda w: (w @ rounds.emitted) / (w @ rounds.rounds))


def conditional_estimates(rounds: Rounds) -> list[Estimate]:
    """Estimate conditional acceptance by position."""

    def at(k: int) -> Estimate:
        return bootstrap(len(rounds.request), lambda w: (w @ rounds.held[:, k]) / (w @ rounds.judged[:, k]))

    return [at(k) for k in range(rounds.held.shape[1])]


def common(*all_rounds: Rounds) -> list[Rounds]:
    """Keep the texts that all of them have, in one order."""
    kept = all_rounds[0].request
    for rounds in all_rounds[1:]:
        kept = np.intersect1d(kept, rounds.request)
    out = []
    for rounds in all_rounds:
        at = np.searchsorted(rounds.request, kept)
        parts = (rounds.rounds, rounds.emitted, rounds.verified, rounds.judged, rounds.held)
        out.append(Rounds(kept, *(part[at] for part in parts)))
    return out


# -------------------------------------------------------------------------------------------------------------- the law


def chance_moments(mean: float, sd: float) -> float:
    """Return ``E[Phi(m + sd z)^2]`` where ``m`` is such that ``E[Phi(m + sd z)] = mean``."""
    nodes, weights = roots_hermitenorm(96)
    m = float(ndtri(np.clip(mean, 1e-9, 1 - 1e-9))) * np.hypot(1.0, sd)
    chance = ndtr(m + sd * nodes)
    return float(weights @ chance**2 / weights.sum())


def spread_for(mean: float, second: float) -> float:
    """Return the standard deviation (probits) whose chances have this mean and mean square; at most `WIDEST_SD`."""
    if second <= mean**2 * (1 + 1e-9):
        return 0.0
    if second >= chance_moments(mean, WIDEST_SD):
        return WIDEST_SD
    return float(brentq(lambda sd: chance_moments(mean, sd) - second, 0.0, WIDEST_SD, xtol=1e-6))


def fit_law(bank: BankArrays, raw_temperature: tuple[float, ...], source: str) -> ParametricLaw:
    """Fit the parametric law of `sim.acceptance` to a bank.

    Survival: that of rounds. Spread, from the chances of draft token 1 at every place: the whole from their mean
    square, the part between texts from the variance of the texts' means beyond what texts of their length have anyway.
    Noise of the confidence: so much that its order tells accepted tokens from refused ones as well as the recorded
    one's does (AUC, position 1). ``raw_temperature``: what the calibration divided logits by, which the law multiplies
    with.
    """
    rounds = follow(bank)
    survival = np.minimum.accumulate(rounds.survival)
    first = bank.chance[:, 0]
    mean, second = float(first.mean()), float((first**2).mean())
    total_sd = spread_for(mean, second)
    _, text, counts = np.unique(bank.request, return_inverse=True, return_counts=True)
    means = np.bincount(text, first) / counts
    within = np.bincount(text, (first - means[text]) ** 2) / np.maximum(counts - 1, 1) / counts
    between = float(max(np.average((means - mean) ** 2, weights=counts) - np.average(within, weights=counts), 0.0))
    # In chances, around the mean; to probits by the slope of the law there.
    request_sd = min(_between_sd(mean, total_sd, between), total_sd)
    token_sd = float(np.sqrt(max(total_sd**2 - request_sd**2, 0.0)))
    noise_sd = _noise_sd(mean, request_sd, token_sd, order_quality(bank.confidence[:, 0], first))
    provenance = Provenance(
        origin="fitted",
        source=source,
        note="survival of the rounds along the recorded texts; spread from the chances of draft token 1 (mean square, "
        "and variance between texts); noise from the AUC of its confidence; raw temperatures are the calibration's",
    )
    return ParametricLaw(
        survival=Survival(values=tuple(float(s) for s in survival), provenance=provenance),
        spread=Spread(request_sd=round(request_sd, 3), token_sd=round(token_sd, 3), provenance=provenance),
        confidence=ConfidenceQuality(
            noise_sd=round(noise_sd, 3), raw_temperature=raw_temperature, provenance=provenance
        ),
    )


def _between_sd(mean: float, total_sd: float, between: float) -> float:
    """Return the spread between texts, in probits, whose texts' mean chances vary by ``between``."""
    nodes, weights = roots_hermitenorm(96)
    weights = weights / weights.sum()
    m = float(ndtri(np.clip(mean, 1e-9, 1 - 1e-9))) * np.hypot(1.0, total_sd)

    def variance(sd: float) -> float:
        rest = np.hypot(1.0, np.sqrt(max(total_sd**2 - sd**2, 0.0)))
        chance = ndtr((m + sd * nodes) / rest)
        return float(weights @ chance**2 - (weights @ chance) ** 2)

    if between <= 0 or total_sd == 0:
        return 0.0
    if variance(total_sd) <= between:
        return total_sd
    return float(brentq(lambda sd: variance(sd) - between, 0.0, total_sd, xtol=1e-6))


def order_quality(score: Floats, chance: Floats) -> float:
    """Return the AUC of a score against outcomes of these chances, ties counting half."""
    values, group = np.unique(score, return_inverse=True)
    yes = np.bincount(group, chance, values.size)
    no = np.bincount(group, 1 - chance, values.size)
    below = np.cumsum(no) - no / 2
    total = float(yes.sum() * no.sum())
    return float(yes @ below) / total if total > 0 else 0.5


def _noise_sd(mean: float, request_sd: float, token_sd: float, auc: float) -> float:
    """Return the noise (probits) with which the law's confidence has this AUC at position 1; at most `WIDEST_SD`."""
    total = float(np.hypot(request_sd, token_sd))
    if total == 0.0:
        return 0.0
    steps = (np.arange(400) + 0.5) / 400
    x, noise = np.meshgrid(ndtri(steps) * total, ndtri(steps))
    m = float(ndtri(np.clip(mean, 1e-9, 1 - 1e-9))) * np.hypot(1.0, total)
    chance = ndtr(m + x).ravel()

    def quality(sd: float) -> float:
        return order_quality(np.round((x + sd * noise).ravel(), 3), chance)

    if quality(0.0) <= auc:
        return 0.0
    if quality(WIDEST_SD) >= auc:
        return WIDEST_SD
    return float(brentq(lambda sd: quality(sd) - auc, 0.0, WIDEST_SD, xtol=1e-3))
