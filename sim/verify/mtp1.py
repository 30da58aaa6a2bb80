"""One draft token, always: DeepSeek's earlier production setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import MinLen

from sim.verify.base import POLICIES, Blind, Confidence, Lengths, Rates


@POLICIES.register("mtp1")
@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp1(Blind):
    """Draft and verify one token of every request, with a drafter and an acceptance of its own."""

    kind: Literal["mtp1"] = "mtp1"
    drafter: Annotated[str, MinLen(1)] = "mtp"

    def draft_length(self, requests: int, trained_length: int) -> int:
        """Draft one token."""
        return 1

    def verify_lengths(self, confidence: Confidence, steps_per_s: Rates) -> Lengths:
        """Verify that one token."""
        return np.full(confidence.shape[0], min(1, confidence.shape[1]), np.int64)

    def start(self) -> Mtp1:
        """Nothing to remember."""
        return self
