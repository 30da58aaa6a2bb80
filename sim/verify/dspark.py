"""Algorithm 1 of the DSpark paper: by survival and load, stopping at the first candidate that does not pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sim.verify.base import POLICIES, Confidence, Drafting, Lengths, Rates, checked_offer


@POLICIES.register("dspark")
@dataclass(frozen=True, slots=True, kw_only=True)
class Dspark(Drafting):
    """Admit draft tokens by survival while each raises expected tokens × steps_per_s.

    Notes
    -----
    Source: DSpark paper, algorithm 1. Stopping at the first candidate that does not raise the product, rather than
    taking the best of all, keeps a cut free of later draft tokens (section 3.2.2). The price: on a jagged curve one
    token may not pay for the next graph size, and nothing is verified though more would pay.
    """

    kind: Literal["dspark"] = "dspark"

    def verify_lengths(self, confidence: Confidence, steps_per_s: Rates) -> Lengths:
        """Run algorithm 1."""
        from sim.verify import kernels

        confidence, steps_per_s = checked_offer(confidence, steps_per_s)
        lengths = np.empty(confidence.shape[0], np.int64)
        kernels.algorithm1(confidence, steps_per_s, lengths, *kernels.scratch(*confidence.shape))
        return lengths

    def start(self) -> Dspark:
        """Nothing to remember."""
        return self
