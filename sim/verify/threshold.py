"""A floor on the confidence of each draft token; load plays no part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from sim.verify.base import POLICIES, Confidence, Drafting, Lengths, Rates, checked_offer


@POLICIES.register("threshold")
@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(Drafting):
    """Verify the longest prefix whose every confidence reaches ``min_confidence``."""

    kind: Literal["threshold"] = "threshold"
    min_confidence: Annotated[float, Ge(0), Le(1)]

    def verify_lengths(self, confidence: Confidence, steps_per_s: Rates) -> Lengths:
        """Verify each request's prefix above the floor."""
        from sim.verify import kernels

        confidence, _ = checked_offer(confidence, steps_per_s)
        lengths = np.empty(confidence.shape[0], np.int64)
        kernels.leading(confidence, float(self.min_confidence), lengths)
        return lengths

    def start(self) -> Threshold:
        """Nothing to remember."""
        return self
