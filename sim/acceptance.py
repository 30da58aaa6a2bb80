"""Which draft tokens survive: the acceptance process of DESIGN, as tables for the step loop.

Parametric law
--------------
For request r, output position i and draft depth k, with independent standard normals z (request) and w (place
in the text)::

    x      = request_sd z_r + token_sd w_{r,i}
    chance = Phi(m_k + x)                       accepted where the keyed uniform u_{r,i} < chance
    seen   = x + noise_sd n_{r,i}               what the confidence head sees
    calibrated confidence = E[chance | seen, prefix held], over the rounds of a run
    logit(raw confidence) = raw_temperature_k logit(calibrated confidence)

``m_k`` is solved so that the *rounds-weighted* survival equals the published one: a request of low acceptance needs
more rounds for the same output, so it weighs 1 / accepted_length(z) more in a share of rounds.

Chance, confidence and luck are pure functions of (seed, request key, output position): each position is judged at
most once, so every policy meets the same text and the same luck at the same place.

Bank
----
Where blocks were recorded at every position of real text, a request starts at the beginning of a text of its domain,
drawn for it, and walks on with its output position, whatever the policy: acceptance changes along an answer. A
request that is longer than its text goes on at the beginning of the next. Luck is keyed as above.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit, logit, ndtr, ndtri, roots_hermitenorm

from profiles.errors import Fault, ProfileError
from profiles.files import load_bank
from profiles.schema import Drafter, ParametricLaw, Spread

Floats = NDArray[np.float64]

#: Cells of the quantile table of the standard normal: one for each value of the top 12 bits of a hash.
NORMAL_CELLS = 4096
#: Points and half-width (in probits) of the tables of chance and confidence over x.
GRID_POINTS = 2049
GRID_REACH = 8.0
#: Beyond this many probits a chance is 0 or 1 to double precision.
CERTAIN = 40.0


def normal_quantiles() -> Floats:
    """Return the means of ``NORMAL_CELLS`` equally likely slices of a standard normal, ascending."""
    edges = ndtri(np.linspace(0.0, 1.0, NORMAL_CELLS + 1))
    density = np.exp(-0.5 * edges**2) / np.sqrt(2 * np.pi)
    density[[0, -1]] = 0.0
    return np.asarray((density[:-1] - density[1:]) * NORMAL_CELLS)


def solve_means(survival: tuple[float, ...], spread: Spread) -> Floats:
    """Solve ``m_k`` so that the share of rounds that survive position k is ``survival[k-1]``.

    Full blocks, requests of equal output length. Chances of exactly 0 and 1 are kept exact.
    """
    nodes, weights = roots_hermitenorm(64)
    weights = weights / weights.sum()
    widen = np.sqrt(1.0 + spread.token_sd**2)
    means = np.zeros(len(survival))
    rounds = weights.copy()
    effect = spread.request_sd * nodes

    def excess(mean: float, alive: Floats, target: float) -> float:
        return float(alive @ ndtr((mean + effect) / widen)) - target

    for _ in range(100):
        before = means.copy()
        alive = rounds.copy()
        for k, target in enumerate(survival):
            reached = float(alive.sum())
            if target <= 0.0 or reached <= 0.0:
                means[k] = -CERTAIN
            elif target >= reached * (1 - 1e-12):
                means[k] = CERTAIN
            else:
                means[k] = brentq(excess, -CERTAIN, CERTAIN, args=(alive, target), xtol=1e-13)
            alive = alive * ndtr((means[k] + effect) / widen)
        accepted_length = 1.0 + _survivals(means, spread, nodes).sum(axis=0)
        rounds = weights / accepted_length
        rounds /= rounds.sum()
        if np.abs(means - before).max() < 1e-11:
            break
    return means


def _survivals(means: Floats, spread: Spread, nodes: Floats) -> Floats:
    """Survival by position and request effect, ``[draft_length, nodes]``."""
    widen = np.sqrt(1.0 + spread.token_sd**2)
    return np.cumprod(ndtr((means[:, None] + spread.request_sd * nodes[None, :]) / widen), axis=0)


def _calibrated(means: Floats, spread: Spread, noise_sd: float, grid: Floats) -> Floats:
    """Chance of acceptance by position, given what is seen and that the prefix held, ``[draft_length, grid]``.

    Over the rounds of full blocks: a request of low acceptance has more of them, and a prefix that held is the sign of
    a request of high acceptance.
    """
    if noise_sd == 0.0:
        return np.asarray(ndtr(means[:, None] + grid))
    nodes, weights = roots_hermitenorm(64)
    effect = spread.request_sd * nodes
    survivals = _survivals(means, spread, nodes)
    alive = weights / (1.0 + survivals.sum(axis=0))
    variance = spread.token_sd**2 + noise_sd**2
    shrink = spread.token_sd**2 / variance
    # What is seen, given the request: normal around its effect; the chance then is a normal mean too.
    log_likely = -0.5 * (grid[:, None] - effect) ** 2 / variance
    place = effect + shrink * (grid[:, None] - effect)
    out = np.empty((means.size, grid.size))
    for k, mean in enumerate(means):
        if not alive.any():
            alive = weights  # no round gets here; any law will do
        with np.errstate(divide="ignore"):
            logs = log_likely + np.log(alive)
        share = np.exp(logs - logs.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        out[k] = (share * ndtr((mean + place) / np.sqrt(1 + spread.token_sd**2 * (1 - shrink)))).sum(axis=1)
        alive = weights / (1.0 + survivals.sum(axis=0)) * survivals[k]
    return out


@dataclass(frozen=True, slots=True)
class AcceptanceTables:
    """The acceptance of one drafter over all domains of a run, ready for the compiled step loop.

    Parametric: ``chance`` and ``confidence``, ``[domains, draft_length, GRID_POINTS]``, over x and over what is seen.
    ``sd``: ``[domains, 3]``: request, token and noise. Bank: the same two arrays are
    ``[1, draft_length, rows]`` and domain d owns rows ``bank[d] .. bank[d+1]``; among these its
    texts begin at ``texts[d]``.
    """

    draft_length: int
    is_block: bool
    is_bank: bool
    chance: Floats
    confidence: Floats
    sd: Floats
    bank: NDArray[np.int64]
    texts: tuple[NDArray[np.int64], ...] = ()

    def first_row(self, domain: int, draw: int) -> int:
        """Return where a request begins in the bank of its domain, 0 for a law; ``draw``: any number drawn for it."""
        return int(self.texts[domain][draw % self.texts[domain].size]) if self.is_bank else 0


def acceptance_tables(
    name: str, drafter: Drafter, domains: tuple[str, ...], confidence: str, profile_path: Path
) -> AcceptanceTables:
    """Build the tables of a drafter for the run's domains.

    ``confidence``: ``calibrated`` or ``raw``. A profile that knows one domain only, ``any``, serves every domain.
    Raises `ProfileError` for a domain that the profile does not know, and for a mix of laws and banks.
    """
    laws = []
    for domain in domains:
        law = drafter.domains.get(domain) or (drafter.domains.get("any") if set(drafter.domains) == {"any"} else None)
        if law is None:
            known = ", ".join(drafter.domains)
            raise ProfileError(
                Fault(f"unknown domain '{domain}'; known: {known}", str(profile_path), key=f"acceptance.{name}.domains")
            )
        laws.append(law)
    length = drafter.trained_length
    block = drafter.kind == "block"
    if all(isinstance(law, ParametricLaw) for law in laws):
        grid = np.linspace(-GRID_REACH, GRID_REACH, GRID_POINTS)
        chance = np.empty((len(laws), length, GRID_POINTS))
        seen = np.empty_like(chance)
        sd = np.empty((len(laws), 3))
        for d, law in enumerate(laws):
            assert isinstance(law, ParametricLaw)
            means = solve_means(law.survival.values, law.spread)
            noise = law.confidence.noise_sd
            chance[d] = ndtr(means[:, None] + grid)
            seen[d] = _calibrated(means, law.spread, noise, grid)
            if confidence == "raw":
                seen[d] = expit(np.array(law.confidence.raw_temperature)[:, None] * logit(seen[d]))
            sd[d] = law.spread.request_sd, law.spread.token_sd, noise
        return AcceptanceTables(length, block, False, chance, seen, sd, np.zeros(1, np.int64))
    banks = []
    for law in laws:
        if isinstance(law, ParametricLaw):
            raise ProfileError(
                Fault(f"drafter '{name}' mixes laws and banks over {', '.join(domains)}", str(profile_path))
            )
        banks.append(load_bank(law, profile_path, length))
    return AcceptanceTables(
        length,
        block,
        True,
        np.ascontiguousarray(np.concatenate([bank.chance for bank in banks]).T[None]),
        np.ascontiguousarray(
            np.concatenate([bank.confidence_raw if confidence == "raw" else bank.confidence for bank in banks]).T[None]
        ),
        np.zeros((1, 3)),
        np.cumsum([0] + [bank.position.size for bank in banks], dtype=np.int64),
        tuple(np.flatnonzero(np.diff(bank.request, prepend=bank.request[0] - 1)) for bank in banks),
    )
