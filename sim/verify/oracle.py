"""An upper bound: what a policy could do that knew the outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sim.verify.base import POLICIES, Blind, Confidence, Lengths, Rates, Reads, checked_offer


@POLICIES.register("oracle")
@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle(Blind):
    """Verify what will be accepted, as far as that raises throughput; no engine can do it.

    Its confidence is the outcome, 1 where a draft token will be accepted and 0 where not, and it searches the whole
    curve.
    """

    kind: Literal["oracle"] = "oracle"

    @property
    def lossless_with(self) -> frozenset[Reads]:
        """Never lossless: a token that would be rejected is not even tried."""
        return frozenset()

    @property
    def sees_outcome(self) -> bool:
        """The one policy that does."""
        return True

    def verify_lengths(self, confidence: Confidence, steps_per_s: Rates) -> Lengths:
        """Take the best batch of this very step."""
        from sim.verify import kernels

        confidence, steps_per_s = checked_offer(confidence, steps_per_s)
        lengths = np.empty(confidence.shape[0], np.int64)
        kernels.exhaustive(confidence, steps_per_s, lengths, *kernels.scratch(*confidence.shape))
        return lengths

    def start(self) -> Oracle:
        """Nothing to remember."""
        return self
