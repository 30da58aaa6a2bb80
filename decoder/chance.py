"""Where luck enters decoding: the draws of one request.

Every draw is a pure function of the seed, the request and the place in its text, so a request's tokens do not depend on
its neighbours, on the order of work, or on being preempted and resumed. A `torch.Generator` could not promise that: its
next number depends on how many were taken before.

==========  ======================================  ===========================================================
draw        key                                     why the key never repeats with different meaning
==========  ======================================  ===========================================================
draft       position of the anchor, offset          a position may be drafted in several rounds, each with its own
                                                    anchor; sharing a number would tie a round's lengths to its tokens
acceptance  position of the judged token            what is judged is emitted or replaced: at most once a position
token       position of the emitted token           likewise
==========  ======================================  ===========================================================
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

#: Draft offsets share a 64-bit key with the anchor's position; no block is this long.
OFFSETS = 4096


class Luck(Protocol):
    """The draws of one request. Positions count from the first prompt token."""

    def draft(self, probs: Tensor, anchor_position: int, offset: int) -> int:
        """Draw draft token ``offset`` (from 0) after the anchor, from ``probs`` ``[vocabulary]``."""
        ...

    def accepts(self, chance: float, position: int) -> bool:
        """Return whether the draft token at ``position`` passes, with ``chance`` in [0, 1]."""
        ...

    def token(self, probs: Tensor, position: int) -> int:
        """Draw the target's own token at ``position`` from ``probs`` ``[vocabulary]``."""
        ...


def token_at(probs: Tensor, level: float) -> int:
    """Return the token whose share of the cumulative distribution holds ``level``, in [0, 1).

    The sum runs in float64 whatever the dtype: with 150,000 tokens, float32 would shift the law by more than the
    acceptance test can see. A token without probability is never returned.
    """
    cumulative = probs.to(torch.float64).cumsum(-1)
    total = float(cumulative[-1])
    if not 0 < total < math.inf:
        raise ValueError(f"not a distribution: its sum is {total}")
    index = int(torch.searchsorted(cumulative, level * total, right=True))
    if index >= probs.shape[-1]:
        # Rounding put the level on the total; the last token that has any probability owns it.
        index = int(torch.nonzero(probs)[-1])
    return index


@dataclass(frozen=True, slots=True)
class KeyedLuck:
    """Draws keyed by seed, request and position: a keyed hash, read as a uniform."""

    seed: int
    request_id: str

    def uniform(self, purpose: str, place: int) -> float:
        """Return the uniform in [0, 1) of a purpose at a place, with 53 bits."""
        name = f"{self.seed}\x1f{self.request_id}\x1f{purpose}\x1f{place}".encode()
        bits = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        return (bits >> 11) / 2**53

    def draft(self, probs: Tensor, anchor_position: int, offset: int) -> int:
        """Draw a draft token; see `Luck`."""
        return token_at(probs, self.uniform("draft", anchor_position * OFFSETS + offset))

    def accepts(self, chance: float, position: int) -> bool:
        """Judge a draft token; see `Luck`."""
        return self.uniform("acceptance", position) < chance

    def token(self, probs: Tensor, position: int) -> int:
        """Draw a token of the target; see `Luck`."""
        return token_at(probs, self.uniform("token", position))
