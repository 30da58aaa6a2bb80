"""What every replica of a run shares: costs, tables, limits and the policy; all frozen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from profiles.curves import StepCost
from sim.acceptance import AcceptanceTables, normal_quantiles
from sim.batching.base import Prefill
from sim.kernels import request_draws
from sim.verify.base import Policy

Floats = NDArray[np.float64]

NORMALS = normal_quantiles()
NORMALS.setflags(write=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Settings of a replica's engine, in whole tokens, blocks and seconds.

    ``draft_s[r]``: seconds to draft for ``r`` requests, for each draft token where ``draft_per_token``.
    ``known_requests``:
    requests up to which the profile measured drafting.
    """

    policy: Policy
    cost: StepCost
    draft_s: Floats
    draft_per_token: bool
    known_requests: int
    acceptance: AcceptanceTables | None
    prefill: Prefill
    max_running: int
    max_batch_tokens: int
    max_waiting: int | None
    max_context_tokens: int
    block_tokens: int
    kv_blocks: int
    deadline_s: float
    luck_key: np.uint64

    @property
    def trained_length(self) -> int:
        """Draft tokens of a whole block; 0 without a drafter."""
        return self.acceptance.draft_length if self.acceptance is not None else 0

    def draws_of(self, request_key: np.uint64, domain: int) -> tuple[np.uint64, float, int]:
        """Return a request's luck key, its effect on acceptance (probits) and its place in a bank."""
        key, cell, place = request_draws(self.luck_key, request_key)
        sd = self.acceptance.sd[domain % len(self.acceptance.sd), 0] if self.acceptance is not None else 0.0
        return key, float(sd * NORMALS[cell]), int(place)
