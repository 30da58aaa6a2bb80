"""Prompts first: while any is pending, decoding waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sim.batching.base import PREFILLS, StepShare


@PREFILLS.register("exclusive")
@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusive:
    """A step holds prompts alone, up to the batch limit, or decodes alone."""

    kind: Literal["exclusive"] = "exclusive"

    def share(self, decoding: int, prompts_pending: bool, max_batch_tokens: int) -> StepShare:
        """Prompts alone while any is pending."""
        return StepShare(False, max_batch_tokens) if prompts_pending else StepShare(True, 0)
