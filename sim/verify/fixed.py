"""A fixed number of draft tokens, whatever the load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from sim.verify.base import POLICIES, Blind, Confidence, DrafterKind, Lengths, Rates, check_within_block


@POLICIES.register("fixed")
@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(Blind):
    """Verify ``k`` draft tokens of every request, as MTP-3, EAGLE-3 or DFlash at a fixed length."""

    kind: Literal["fixed"] = "fixed"
    k: Annotated[int, Ge(1)]

    def check_drafter(self, trained_length: int, kind: DrafterKind) -> None:
        """Refuse more than a block drafter's trained block; a chain can be drawn out."""
        check_within_block("k", self.k, trained_length, kind)

    def draft_length(self, requests: int, trained_length: int) -> int:
        """Draft k tokens."""
        return self.k

    def verify_lengths(self, confidence: Confidence, steps_per_s: Rates) -> Lengths:
        """Verify k tokens, or all where fewer were drafted."""
        return np.full(confidence.shape[0], min(self.k, confidence.shape[1]), np.int64)

    def start(self) -> Fixed:
        """Nothing to remember."""
        return self
