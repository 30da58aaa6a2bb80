"""Engine rates by batch size, as a policy sees them while decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from profiles.curves import draft_cost, step_cost
from profiles.schema import StepTime


class Rates(Protocol):
    """Where ``steps_per_s`` comes from."""

    def steps_per_s(self, requests: int, draft_length: int) -> NDArray[np.float64]:
        """Return steps per second at 0, 1, ... ``requests * (1 + draft_length)`` batch tokens (index 0: infinite)."""
        ...


@dataclass(frozen=True, slots=True)
class FlatRates:
    """Every batch costs the same: a load-aware policy then verifies whatever might be accepted."""

    step_time_s: float = 1.0

    def steps_per_s(self, requests: int, draft_length: int) -> NDArray[np.float64]:
        """Return one rate for every size."""
        rates = np.full(requests * (1 + draft_length) + 1, 1.0 / self.step_time_s)
        rates[0] = np.inf
        return rates


@dataclass(frozen=True, slots=True)
class ProfileRates:
    """Rates of a profile's step time; ``drafter`` names whose draft time is part of the step."""

    step_time: StepTime
    drafter: str

    def steps_per_s(self, requests: int, draft_length: int) -> NDArray[np.float64]:
        """Return 1 / (draft time + target time) at each size; raises `ProfileError` outside the profile's range."""
        cost = step_cost(self.step_time, requests * (1 + draft_length))
        draft, a_token_each = draft_cost(self.step_time, self.drafter, requests)
        draft_s = float(draft.seconds[requests]) * (draft_length if a_token_each else 1)
        target_s = cost.overhead_s + cost.per_request_s * requests + cost.verify_s
        rates = 1.0 / (draft_s + np.where(np.arange(target_s.size) > 0, target_s, np.nan))
        rates[0] = np.inf
        return rates
