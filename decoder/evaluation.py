"""From decoded rounds to numbers: accepted length, acceptance by position, and how sure each number is.

==================  =========================================================================================
accepted length     output tokens of rounds / rounds; the bonus token counts, what a stop or limit cut does not
conditional [k]     accepted at k / judged at k: reached by an accepted prefix, verified, and not cut by a stop
survival [k]        rounds whose first k were accepted / rounds whose first k were verified and not cut
draft acceptance    accepted draft tokens / verified draft tokens; falls with longer blocks though length rises
==================  =========================================================================================

A rate without a case is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decoder.session import Generation, Round


@dataclass(frozen=True, slots=True)
class Rate:
    """Cases that held among those that were tried; ``half_width`` is half of the 95 % interval (Wilson's)."""

    held: int
    tried: int

    @property
    def value(self) -> float | None:
        """Share that held; None where nothing was tried."""
        return self.held / self.tried if self.tried else None

    @property
    def half_width(self) -> float | None:
        """Half of Wilson's 95 % interval."""
        if not self.tried:
            return None
        z, n, p = 1.96, self.tried, self.held / self.tried
        return z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What rounds yielded; lengths are in tokens a round, positions count from 1 in reports and from 0 here."""

    requests: int
    rounds: int
    output_tokens: int
    proposed_tokens: int
    verified_tokens: int
    accepted_tokens: int
    accepted_length: float | None
    accepted_length_half_width: float | None
    draft_acceptance: Rate
    conditional: tuple[Rate, ...]
    survival: tuple[Rate, ...]
    draft_s: float
    verify_s: float


def accept_rates(rounds: Sequence[Round], draft_length: int) -> tuple[tuple[Rate, ...], tuple[Rate, ...]]:
    """Return conditional acceptance and survival at each of ``draft_length`` positions."""
    judged = [record.judged for record in rounds]
    conditional = tuple(
        Rate(sum(len(j) > k and j[k] for j in judged), sum(len(j) > k for j in judged)) for k in range(draft_length)
    )
    survival = []
    for k in range(draft_length):
        # A stop ends what is known of a block; otherwise everything that was verified is.
        known = [
            record
            for record in rounds
            if (record.accepted_draft_tokens if record.bonus_token is None else record.verify_length) > k
        ]
        survival.append(Rate(sum(record.accepted_draft_tokens > k for record in known), len(known)))
    return conditional, tuple(survival)


def acceptance(generations: Sequence[Generation], draft_length: int) -> Acceptance:
    """Sum up generations; the interval of the accepted length treats requests as independent, not rounds."""
    rounds = [record for generation in generations for record in generation.rounds]
    emitted = sum(record.emitted_tokens for record in rounds)
    conditional, survival = accept_rates(rounds, draft_length)
    accepted = sum(record.accepted_draft_tokens for record in rounds)
    verified = sum(record.verify_length for record in rounds)
    return Acceptance(
        requests=len(generations),
        rounds=len(rounds),
        output_tokens=sum(len(generation.output_ids) for generation in generations),
        proposed_tokens=sum(len(record.proposed) for record in rounds),
        verified_tokens=verified,
        accepted_tokens=accepted,
        accepted_length=emitted / len(rounds) if rounds else None,
        accepted_length_half_width=_ratio_half_width(generations),
        draft_acceptance=Rate(accepted, verified),
        conditional=conditional,
        survival=survival,
        draft_s=sum(record.draft_s for record in rounds),
        verify_s=sum(record.verify_s for record in rounds),
    )


def _ratio_half_width(generations: Sequence[Generation]) -> float | None:
    """Return half of the 95 % interval of emitted tokens a round, a ratio over requests."""
    pairs = [(sum(r.emitted_tokens for r in g.rounds), len(g.rounds)) for g in generations if g.rounds]
    if len(pairs) < 2:
        return None
    emitted, rounds = np.array(pairs, np.float64).T
    residuals = emitted - emitted.sum() / rounds.sum() * rounds
    return float(1.96 * np.sqrt(len(pairs) / (len(pairs) - 1) * (residuals**2).sum()) / rounds.sum())


def weak_positions(conditional: Sequence[Rate], factor: float = 0.5) -> list[int]:
    """Return positions (from 0) whose acceptance is suspiciously below the one before.

    A drafter whose weights or features are wired wrongly often gets the first token right and nothing after it.
    """
    found = []
    for k in range(1, len(conditional)):
        before, here = conditional[k - 1], conditional[k]
        if before.value is None or here.value is None or before.half_width is None or here.half_width is None:
            continue
        if here.value + here.half_width < factor * (before.value - before.half_width):
            found.append(k)
    return found
