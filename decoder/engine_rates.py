"""Steps per second as the engine's policies see them: for this step's requests, context, prompts and draft time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from profiles.curves import Evaluated, StepCost, draft_cost, step_cost
from profiles.schema import StepTime

Rates = NDArray[np.float64]


class StepRates(Protocol):
    """Where ``steps_per_s`` comes from; see `sim.verify.base.Verifier`."""

    def steps_per_s(
        self, requests: int, drafted: int, context_tokens: int, prompt_tokens: int, admitted: int, max_batch_tokens: int
    ) -> Rates:
        """Return the rate at 0, 1, ... ``requests * (1 + drafted)`` batch tokens; 0 where there can be no such batch.

        ``admitted``: requests whose prompt begins in this step. ``max_batch_tokens``: what is left for decoding in it.
        Index 0 is infinite and of no use.
        """
        ...


@dataclass(frozen=True, slots=True)
class FlatStepRates:
    """Every batch costs the same."""

    step_time_s: float = 1.0

    def steps_per_s(
        self, requests: int, drafted: int, context_tokens: int, prompt_tokens: int, admitted: int, max_batch_tokens: int
    ) -> Rates:
        """Return one rate for every size that can be."""
        seconds = np.full(requests * (1 + drafted) + 1, self.step_time_s)
        return _rates(seconds, requests, max_batch_tokens)


class ProfileStepRates:
    """The rates of a profile's step time, as the simulator computes them.

    Raises `ProfileError` where the profile does not know such batches, or has no draft cost for ``drafter``.
    """

    def __init__(self, step_time: StepTime, drafter: str, max_batch_tokens: int, max_requests: int) -> None:
        self._cost: StepCost = step_cost(step_time, max_batch_tokens, drafter)
        draft: tuple[Evaluated, bool] = draft_cost(step_time, drafter, max_requests)
        self._draft_s, self._a_token_each = draft[0].seconds, draft[1]

    def steps_per_s(
        self, requests: int, drafted: int, context_tokens: int, prompt_tokens: int, admitted: int, max_batch_tokens: int
    ) -> Rates:
        """Return 1 / (draft time + target time) at each size that can be."""
        cost = self._cost
        other_s = cost.overhead_s + cost.per_request_s * requests + cost.per_context_token_s * context_tokens
        other_s += float(self._draft_s[requests]) * (drafted if self._a_token_each else 1)
        sizes = np.arange(requests * (1 + drafted) + 1)
        as_verify = prompt_tokens if cost.prefill_as_verify else 0
        seconds = cost.verify_s[np.minimum(sizes + as_verify, cost.verify_s.size - 1)]
        seconds = seconds + cost.prompts_s(sizes, prompt_tokens, admitted)
        return _rates(other_s + seconds, requests, max_batch_tokens)


def _rates(seconds: Rates, requests: int, max_batch_tokens: int) -> Rates:
    sizes = np.arange(seconds.size)
    with np.errstate(divide="ignore"):
        rates = np.where((sizes >= requests) & (sizes <= max_batch_tokens), 1.0 / seconds, 0.0)
    rates[0] = np.inf
    return rates
