"""Prompts ride along with decode steps, a chunk at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sim.batching.base import PREFILLS, StepShare
from sim.units import Count


@PREFILLS.register("chunked")
@dataclass(frozen=True, slots=True, kw_only=True)
class Chunked:
    """Up to ``chunk_tokens`` prompt tokens join every step, after one token for each decoding request.

    Verified draft tokens get what is left of the batch.
    """

    kind: Literal["chunked"] = "chunked"
    chunk_tokens: Count = 512

    def share(self, decoding: int, prompts_pending: bool, max_batch_tokens: int) -> StepShare:
        """Decode always; prompts up to a chunk."""
        return StepShare(True, min(self.chunk_tokens, max_batch_tokens - decoding) if prompts_pending else 0)
