"""Targets, drafters, confidences and curves so small that every outcome can be enumerated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: ``(request, position, context) -> confidence``. The context is the token before the block and those draft tokens
#: that the confidence reads: the ones before its own, and its own too where that is what is being judged.
ConfidenceTable = Callable[[int, int, tuple[int, ...]], float]

Probs = tuple[tuple[float, ...], ...]

GOLDEN_RATIO = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Toy:
    """Requests that share a target and a drafter, both with a memory of one token.

    ``target_probs[last][next]``, ``draft_probs[last][next]``; ``before`` is the last token of each request's prompt.
    """

    name: str
    target_probs: Probs
    draft_probs: Probs
    draft_length: int
    before: tuple[int, ...]
    confidence: ConfidenceTable

    @property
    def tokens(self) -> int:
        """Size of the vocabulary."""
        return len(self.target_probs)

    @property
    def requests(self) -> int:
        """Requests at the start."""
        return len(self.before)

    @property
    def max_batch_tokens(self) -> int:
        """Tokens of a batch in which everything is verified."""
        return self.requests * (1 + self.draft_length)


def appendix_confidence(request: int, position: int, context: tuple[int, ...]) -> float:
    """DSpark paper, appendix A: .8 at first; after that .9 if the token last read is the first one, 0 if not."""
    if len(context) == 1:
        return 0.8
    return 0.9 if context[-1] == 0 else 0.0


def scattered_confidence(request: int, position: int, context: tuple[int, ...]) -> float:
    """Values from 0 to 1 in twentieths without a pattern, another for every request, position and context."""
    code = 4 * position + request + 1
    for token in context:
        code = 5 * code + token + 1
    return round(20 * (code * GOLDEN_RATIO % 1.0)) / 20


def coarse_confidence(request: int, position: int, context: tuple[int, ...]) -> float:
    """0, a half or 1: ties between requests and along them."""
    return (0.5, 1.0, 0.5, 0.0, 1.0)[(3 * sum(context) + position + len(context)) % 5]


APPENDIX_TARGET: Probs = ((0.7, 0.3), (0.7, 0.3))
APPENDIX_DRAFT: Probs = ((0.5, 0.5), (0.5, 0.5))
MARKOV_TARGET: Probs = ((0.7, 0.3), (0.2, 0.8))
MARKOV_DRAFT: Probs = ((0.45, 0.55), (0.6, 0.4))
#: Tokens that only one of the two ever produces.
GAPPED_TARGET: Probs = ((0.6, 0.4, 0.0), (0.0, 0.5, 0.5), (0.3, 0.3, 0.4))
GAPPED_DRAFT: Probs = ((0.5, 0.0, 0.5), (0.3, 0.7, 0.0), (0.25, 0.25, 0.5))

APPENDIX_A = Toy("appendix_a", APPENDIX_TARGET, APPENDIX_DRAFT, 2, (0,), appendix_confidence)

TOYS = (
    APPENDIX_A,
    Toy("appendix_a_pair", APPENDIX_TARGET, APPENDIX_DRAFT, 2, (0, 1), appendix_confidence),
    Toy("pair", MARKOV_TARGET, MARKOV_DRAFT, 2, (0, 1), scattered_confidence),
    Toy("ties", MARKOV_TARGET, MARKOV_DRAFT, 2, (0, 0), coarse_confidence),
    Toy("gaps", GAPPED_TARGET, GAPPED_DRAFT, 2, (0, 2), scattered_confidence),
    Toy("long_block", MARKOV_TARGET, MARKOV_DRAFT, 3, (0, 1), scattered_confidence),
    Toy("three", MARKOV_TARGET, MARKOV_DRAFT, 2, (0, 1, 0), scattered_confidence),
)

#: Step time in units of a one-token step at 1, 2, ... batch tokens; infinite where the engine cannot run the batch.
CURVES: dict[str, tuple[float, ...]] = {
    "appendix": (1.0, 2.0, 1 / 0.45, 2.5, 2.6, 2.7, 2.8, 2.9, 3.0),
    "flat": (1.0,) * 9,
    "sloped": (1.1, 1.2, 1.35, 1.5, 1.65, 1.8, 1.95, 2.1, 2.25),
    "grid": (1.0, 1.0, 1.3, 1.3, 1.6, 1.6, 1.9, 1.9, 2.2),
    "jagged": (1.0, 1.0, 1.9, 1.6, 1.7, 1.75, 2.1, 1.9, 2.0),
    "limited": (1.0, 1.05, 1.1, 1.15, 1.2, np.inf, np.inf, np.inf, np.inf),
}


def steps_per_s(curve: str, max_batch_tokens: int) -> NDArray[np.float64]:
    """Return a curve's rates at 0..max_batch_tokens, index 0 being infinite."""
    return np.concatenate(([np.inf], 1.0 / np.array(CURVES[curve][:max_batch_tokens])))
