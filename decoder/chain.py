"""Drafting token after token: each step reads the state that the step before it left (EAGLE-3, MTP).

Row i of the cache pairs the target's features of token i with token i+1, so that the last committed row already holds
the anchor, and its output drafts the first token. Rows made while drafting hold the drafter's own states in place of
the target's, and are cut after the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from decoder.confidence import top_probability_logit
from decoder.config import DraftConfig
from decoder.drafter import Reads
from decoder.kv_cache import KvCache
from decoder.sampling import DraftSampler
from decoder.vocabulary import draft_ids


class ChainNet(Protocol):
    """One step of a chained draft model, over several rows at once."""

    config: DraftConfig

    def fuse(self, features: Tensor) -> Tensor:
        """Turn the target's features ``[rows, layers * hidden_size]`` into states, ``[rows, hidden_size]``."""
        ...

    def rows(
        self,
        token_ids: Tensor,
        states: Tensor,
        positions: Tensor,
        cache: KvCache,
        mask: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Append rows to ``cache`` and return their states, ``[rows, hidden_size]``.

        They are causal among themselves, unless ``mask`` (bool, ``[rows, all rows of the cache]``) says where each may
        look. ``wanted``: numbers of the rows whose states are returned; the others are appended alone.
        """
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of the token after each row, ``[rows, draft vocabulary]``."""
        ...


class ChainDrafter:
    """A chained draft model; it may draft further than it was trained to, at falling acceptance."""

    chained = True
    confidence_reads: Reads = "past"

    def __init__(self, net: ChainNet) -> None:
        self.net = net
        self.draft_ids = draft_ids(net)
        self.kind = net.config.kind
        self.trained_length = net.config.ttt_length
        self.feature_layers = net.config.target_layer_ids

    def start(self) -> ChainRequestDrafter:
        """Return the drafter of a new request."""
        return ChainRequestDrafter(self, KvCache(self.net.config.num_hidden_layers), None)


class ChainRequestDrafter:
    """The rows of one request, and the state of the last; see `RequestDrafter`."""

    def __init__(self, drafter: ChainDrafter, cache: KvCache, last_state: Tensor | None) -> None:
        self.drafter = drafter
        self.cache = cache
        self._last_state = last_state

    @property
    def tokens(self) -> int:
        """Committed tokens that are cached."""
        return self.cache.tokens

    @torch.inference_mode()
    def advance(self, token_ids: Sequence[int], features: Tensor, next_id: int) -> None:
        """Append rows of the target's features, each beside the token after it."""
        self._last_state = self._append([*token_ids[1:], next_id], self.drafter.net.fuse(features))[-1:]

    def _append(self, token_ids: Sequence[int], states: Tensor) -> Tensor:
        start = self.cache.tokens
        positions = torch.arange(start, start + len(token_ids), device=states.device)
        return self.drafter.net.rows(torch.tensor(token_ids, device=states.device), states, positions, self.cache)

    @torch.inference_mode()
    def propose(self, anchor_id: int, length: int, sampler: DraftSampler) -> list[float]:
        """Draft ``length`` tokens; the anchor was already taken in by `advance`."""
        if self._last_state is None:
            raise ValueError("nothing was committed: a chain starts from the state of the last token")
        committed, state = self.cache.tokens, self._last_state
        confidence_logits = []
        try:
            for k in range(length):
                logits = self.drafter.net.logits(state)[0]
                confidence_logits.append(top_probability_logit(logits))
                token = sampler.draw(logits, self.drafter.draft_ids)
                if k + 1 < length:
                    state = self._append([token], state)
        finally:
            self.cache.crop(committed)
        return confidence_logits

    def fork(self, tokens: int) -> ChainRequestDrafter:
        """Return a drafter for a text that shares ``tokens`` tokens and the next; it must advance before it drafts."""
        return ChainRequestDrafter(self.drafter, self.cache.fork(tokens), None)
