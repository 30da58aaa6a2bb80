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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decoder.session import Decoder, Generation, Request, Round
from profiles.recipes.banks import bootstrap


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


@dataclass(frozen=True, slots=True)
class Timing:
    """One stream decoded alone: ``tokens`` after the first, the ``seconds`` they took, and the parts of its rounds."""

    request_id: str
    tokens: int
    seconds: float
    rounds: int
    draft_s: float
    verify_s: float


def time_stream(
    decoder: Decoder, request: Request, clock: Callable[[], float] = time.perf_counter
) -> tuple[Generation, Timing]:
    """Decode one request alone and time it from its first token on: prefill is the same with any drafter."""
    generation = decoder.admit(request)
    began = clock()
    while not generation.finished:
        decoder.step([generation])
    seconds = clock() - began
    rounds = generation.rounds
    return generation, Timing(
        request.request_id,
        len(generation.output_ids) - 1,
        seconds,
        len(rounds),
        sum(record.draft_s for record in rounds),
        sum(record.verify_s for record in rounds),
    )


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens/s of one stream with and without a drafter; ``ratio`` with its 95 % interval over prompts.

    ``draft_s``, ``verify_s``, ``round_s``: means of a round with the drafter; the rest of a round is bookkeeping.
    ``round_low_s``, ``round_high_s``: 95 % interval over prompts. ``none_round_s``: of a round without.
    """

    prompts: int
    tokens_per_s: float
    none_tokens_per_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    draft_s: float
    verify_s: float
    round_s: float
    round_low_s: float
    round_high_s: float
    none_round_s: float


def speed(timings: Sequence[tuple[Timing, Timing]]) -> Speed:
    """Sum up streams that were decoded with a drafter and without, in that order."""
    table = np.array(
        [[mine.tokens, mine.seconds, mine.rounds, none.tokens, none.seconds] for mine, none in timings], np.float64
    )

    def ratio(w: NDArray[np.float64]) -> NDArray[np.float64]:
        tokens, seconds, _, none_tokens, none_seconds = (w @ table).T
        return np.asarray(tokens / seconds / (none_tokens / none_seconds))

    def round_s(w: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray((w @ table[:, 1]) / (w @ table[:, 2]))

    tokens, seconds, rounds, none_tokens, none_seconds = table.sum(0)
    gain, length = bootstrap(len(table), ratio), bootstrap(len(table), round_s)
    return Speed(
        prompts=len(table),
        tokens_per_s=float(tokens / seconds),
        none_tokens_per_s=float(none_tokens / none_seconds),
        ratio=gain.value,
        ratio_low=gain.low,
        ratio_high=gain.high,
        draft_s=sum(mine.draft_s for mine, _ in timings) / float(rounds),
        verify_s=sum(mine.verify_s for mine, _ in timings) / float(rounds),
        round_s=length.value,
        round_low_s=length.low,
        round_high_s=length.high,
        none_round_s=float(none_seconds / none_tokens),
    )


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
