"""Drafting with a parallel block: DFlash draws its positions independently, DSpark one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoder.backbone import ParallelBackbone
from decoder.confidence import top_probability_logit
from decoder.drafter import Reads, check_length
from decoder.kv_cache import KvCache
from decoder.sampling import DraftSampler
from decoder.vocabulary import draft_ids


class BlockDrafter:
    """DSpark or DFlash, as the checkpoint has it."""

    chained = False
    #: Both the head and the stand-in for it read nothing after token k-1.
    confidence_reads: Reads = "past"

    def __init__(self, net: ParallelBackbone) -> None:
        self.net = net
        self.draft_ids = draft_ids(net)
        self.kind = net.config.kind
        self.trained_length = net.config.block_size
        self.feature_layers = net.config.target_layer_ids

    def start(self) -> BlockRequestDrafter:
        """Return the drafter of a new request."""
        return BlockRequestDrafter(self, KvCache(self.net.config.num_hidden_layers))


class BlockRequestDrafter:
    """The context rows of one request; see `RequestDrafter`."""

    def __init__(self, drafter: BlockDrafter, cache: KvCache) -> None:
        self.drafter = drafter
        self.cache = cache

    @property
    def tokens(self) -> int:
        """Committed tokens that are cached."""
        return self.cache.tokens

    @torch.inference_mode()
    def advance(self, token_ids: Sequence[int], features: Tensor, next_id: int) -> None:
        """Append context rows; the tokens themselves are not read, only the target's features of them."""
        net = self.drafter.net
        start = self.cache.tokens
        positions = torch.arange(start, start + len(token_ids), device=features.device)
        features = features.to(net.fc.weight.dtype)
        for layer, (keys, values) in enumerate(net.context_rows(features[None], positions[None])):
            self.cache.append(layer, keys, values)

    @torch.inference_mode()
    def hidden(self, anchor_id: int) -> Tensor:
        """Return the states that the heads read for a block after ``anchor_id``, ``[block, hidden_size]``."""
        net = self.drafter.net
        length = self.drafter.trained_length
        device = net.fc.weight.device
        ids = net.block_ids(torch.tensor([anchor_id], device=device), length)
        positions = torch.arange(self.cache.tokens, self.cache.tokens + length, device=device)[None]
        context = list(zip(self.cache.keys, self.cache.values, strict=True))
        out: Tensor = net(ids, positions, context)[0]
        return out

    @torch.inference_mode()
    def propose(self, anchor_id: int, length: int, sampler: DraftSampler) -> list[float]:
        """Draft the trained block; the first ``length`` tokens of it are drawn."""
        check_length(self.drafter, length)
        net = self.drafter.net
        hidden = self.hidden(anchor_id)
        base_logits = net.lm_head(hidden)
        confidence_logits = []
        prev, state = anchor_id, None
        for k in range(length):
            logits, embedding = base_logits[k], None
            if net.markov_head is not None:
                prev_id = torch.tensor(prev, device=hidden.device)
                bias, state = net.markov_head.step(prev_id, hidden[k], state)
                logits = logits + bias
                embedding = net.markov_head.markov_w1(prev_id)
            if net.confidence_head is not None:
                confidence_logits.append(float(net.confidence_head(hidden[k], embedding)))
            else:
                confidence_logits.append(top_probability_logit(logits))
            prev = sampler.draw(logits, self.drafter.draft_ids)
        return confidence_logits

    def fork(self, tokens: int) -> BlockRequestDrafter:
        """Return a drafter for a text that shares the first ``tokens`` tokens."""
        return BlockRequestDrafter(self.drafter, self.cache.fork(tokens))
