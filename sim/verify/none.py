"""No speculation: the target alone, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sim.verify.base import POLICIES, Confidence, DrafterKind, Lengths, Rates, Reads


@POLICIES.register("none")
@dataclass(frozen=True, slots=True, kw_only=True)
class NoSpeculation:
    """Plain autoregressive decoding; there is no drafter, so no draft time is paid."""

    kind: Literal["none"] = "none"

    @property
    def drafter(self) -> str | None:
        """Nothing is ever drafted."""
        return None

    @property
    def confidence(self) -> Literal["calibrated", "raw"]:
        """Of no account here."""
        return "calibrated"

    @property
    def lossless_with(self) -> frozenset[Reads]:
        """Safe with every confidence, since none is looked at."""
        return frozenset({"past", "own_token"})

    @property
    def sees_outcome(self) -> bool:
        """Only the oracle does."""
        return False

    def check_drafter(self, trained_length: int, kind: DrafterKind) -> None:
        """Any drafter will do: it is left alone."""

    def draft_length(self, requests: int, trained_length: int) -> int:
        """Draft nothing."""
        return 0

    def verify_lengths(self, confidence: Confidence, steps_per_s: Rates) -> Lengths:
        """Verify nothing."""
        return np.zeros(confidence.shape[0], np.int64)

    def start(self) -> NoSpeculation:
        """Nothing to remember."""
        return self
