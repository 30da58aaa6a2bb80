"""DSpark's production form: the best batch of some steps ago, spent on the draft tokens of this one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from sim.verify.base import (
    POLICIES,
    Confidence,
    DrafterKind,
    Drafting,
    Lengths,
    Rates,
    check_within_block,
    checked_offer,
)


@POLICIES.register("dspark_async")
@dataclass(frozen=True, slots=True, kw_only=True)
class DsparkAsync(Drafting):
    """Search the whole curve with confidences ``lag`` steps old; rank by those of now.

    The budget is the best batch of step t - lag, less the requests of step t, within what was drafted and what the
    engine can run. Being fixed before the round, it cannot depend on the round's draft tokens, and the search need
    not stop early as `dspark` must. The first ``lag`` steps have nothing to look back on and verify ``first_budget``
    draft tokens a request.

    Notes
    -----
    Source: DSpark paper, as quoted in vLLM's pull request 47808 (section 5.2): its engine looks two steps back.
    """

    kind: Literal["dspark_async"] = "dspark_async"
    lag: Annotated[int, Ge(1)] = 2
    first_budget: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        """Refuse what would bias the output."""
        if self.lag < 1:
            raise ValueError(
                f"lag: expected at least 1, since a budget from this round's own confidences is not lossless"
                f" (got {self.lag})"
            )

    def check_drafter(self, trained_length: int, kind: DrafterKind) -> None:
        """Refuse a first budget that no round can spend."""
        check_within_block("first_budget", self.first_budget, trained_length, "block")

    def start(self) -> LaggedSearch:
        """Start without a past."""
        return LaggedSearch(self)


class LaggedSearch:
    """What one replica remembers: the best batch tokens of the last ``lag`` steps, oldest first."""

    __slots__ = ("_best_batches", "_first_budget", "_lag")

    def __init__(self, policy: DsparkAsync) -> None:
        self._lag = policy.lag
        self._first_budget = policy.first_budget
        self._best_batches: deque[int] = deque()

    def draft_length(self, requests: int, trained_length: int) -> int:
        """Draft the whole trained block."""
        return trained_length

    def verify_lengths(self, confidence: Confidence, steps_per_s: Rates) -> Lengths:
        """Spend the budget of ``lag`` steps ago by survival; remember this step's best batch."""
        from sim.verify import kernels

        confidence, steps_per_s = checked_offer(confidence, steps_per_s)
        requests = confidence.shape[0]
        if len(self._best_batches) == self._lag:
            wanted = self._best_batches.popleft() - requests
        else:
            wanted = self._first_budget * requests
        lengths = np.empty(requests, np.int64)
        self._best_batches.append(
            kernels.lagged(confidence, steps_per_s, wanted, lengths, *kernels.scratch(*confidence.shape))
        )
        return lengths
