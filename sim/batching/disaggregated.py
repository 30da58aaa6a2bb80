"""Prompts on a pool of their own; decode replicas get them finished."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sim.batching.base import PREFILLS, StepShare
from sim.units import BatchTokens, Duration, Machines


@PREFILLS.register("disaggregated")
@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregated:
    """``replicas`` prefill engines compute prompts first come first served and hand them off.

    A prefill engine takes up to ``max_step_tokens`` prompt tokens a step. The first output token is delivered
    when the prompt is done; the request then needs ``hand_off`` (KV transfer, the drafter's features with it) before a
    decode replica may admit it. Prefill engines have the GPUs of a decode replica each.
    """

    kind: Literal["disaggregated"] = "disaggregated"
    replicas: Machines
    hand_off: Duration
    max_step_tokens: BatchTokens = 8192

    def share(self, decoding: int, prompts_pending: bool, max_batch_tokens: int) -> StepShare:
        """A decode replica never sees a prompt."""
        return StepShare(True, 0)
