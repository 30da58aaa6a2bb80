"""Drafting for many requests in one pass: the drafters' own networks over blocks of keys and values.

A row of the drafter is a row of the target: both lie in the same blocks of their own storages. What a round drafts is
written behind the committed rows and simply not counted; the next round writes over it.

`make_batch_drafter` takes any drafter behind the seam of `drafter`: the parallel block, the chains and the small model
have a batched form; one that is not known drafts request after request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from decoder.backbone import BlockLayer, ParallelBackbone
from decoder.batch_target import HfBatchTarget
from decoder.batched_sampling import BatchSampler
from decoder.chain import ChainDrafter
from decoder.confidence import SURE
from decoder.drafter import Drafter, RequestDrafter, check_length
from decoder.dspark import BlockDrafter
from decoder.eagle3 import Eagle3Layer, Eagle3Net
from decoder.errors import NotFiniteError
from decoder.layers import Attention, rotate
from decoder.mtp import MtpLayer, MtpNet
from decoder.paged_kv import BlockPool, PagedKv, Pages
from decoder.ragged import Ragged, Segment
from decoder.sampling import DraftSampler, working_dtype
from decoder.small_model import SmallModelDrafter
from decoder.target import HfTarget


@dataclass(slots=True, eq=False)
class DraftState:
    """What a drafter keeps of one request: ``rows`` committed rows in ``pages``, and what its kind needs beside them.

    Gone when the request leaves or is preempted; a slot has nothing of its own.
    """

    pages: Pages
    rows: int = 0
    #: Chains: the state of the last committed row, ``[hidden_size]``.
    last_state: Tensor | None = None
    #: Small model: draft tokens of the last round whose rows are cached, behind the committed ones.
    ahead: tuple[int, ...] = ()
    #: A drafter without a batched form: its own view of the request.
    own: RequestDrafter | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """Rows of one request that were committed: their tokens, the one after each, and which rows of the features."""

    state: DraftState
    token_ids: Sequence[int]
    next_id: int
    feature_rows: range


class BatchDrafter(Protocol):
    """A drafter over many requests; ``bytes_per_token``: what it keeps of each in the blocks of the pool."""

    @property
    def drafter(self) -> Drafter:
        """The drafter behind it."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token, in every layer."""
        ...

    def start(self, pages: Pages) -> DraftState:
        """Return the state of a new request."""
        ...

    def scrub(self, blocks: Sequence[int]) -> None:
        """Forget what blocks hold."""
        ...

    def advance(self, committed: Sequence[Committed], features: Tensor) -> None:
        """Take in committed rows of several requests; ``features`` ``[rows, layers * hidden_size]``."""
        ...

    def propose(
        self, states: Sequence[DraftState], anchors: Sequence[int], length: int, sampler: BatchSampler
    ) -> Tensor:
        """Draw ``length`` tokens for every request; return confidence logits ``[requests, length]``.

        The blocks of each request hold its committed rows and ``1 + length`` more.
        """
        ...


def make_batch_drafter(drafter: Drafter, pool: BlockPool, device: torch.device) -> BatchDrafter:
    """Return a drafter's batched form."""
    if isinstance(drafter, BlockDrafter):
        return BlockBatch(drafter, pool)
    if isinstance(drafter, ChainDrafter):
        return ChainBatch(drafter, pool)
    if isinstance(drafter, SmallModelDrafter) and isinstance(drafter.model, HfTarget):
        return SmallModelBatch(drafter, HfBatchTarget(drafter.model, pool))
    return OneByOne(drafter, device)


def top_logits(logits: Tensor) -> Tensor:
    """Return the log odds of the likeliest token of each row, ``[rows]``; see `top_probability_logit`."""
    probs = torch.softmax(logits.to(working_dtype(logits.dtype)), -1)
    top = probs.amax(-1)
    return torch.log(top / (probs.sum(-1) - top)).clamp(-SURE, SURE)


def _attend(
    attention: Attention, normed: Tensor, cos: Tensor, sin: Tensor, ragged: Ragged, kv: PagedKv, layer: int
) -> Tensor:
    """Store a layer's new rows and attend from them; ``normed`` ``[1, rows, width]``, as what comes out."""
    keys, values = attention.keys_values(normed, cos, sin)
    ragged.write(kv, layer, keys[0].transpose(0, 1), values[0].transpose(0, 1))
    split = (*normed.shape[:-1], attention.heads, attention.head_dim)
    queries = rotate(attention.q_norm(attention.q_proj(normed).view(split)).transpose(1, 2), cos, sin)
    mixed = ragged.attend(queries[0].transpose(0, 1), kv, layer, attention.head_dim**-0.5)
    out: Tensor = attention.o_proj(mixed.flatten(1)[None])
    return out


def _storage(net: Any, pool: BlockPool) -> PagedKv:
    config = net.config
    weight = net.lm_head.weight
    return PagedKv(
        config.num_hidden_layers,
        config.num_key_value_heads,
        config.head_dim,
        pool,
        dtype=next(net.layers.parameters()).dtype,
        device=weight.device,
    )


class _Paged:
    """What batched drafters share: where their rows lie, and passes over them."""

    def __init__(self, pool: BlockPool, kv: PagedKv) -> None:
        self.pool = pool
        self.kv = kv
        self.device = kv.keys[0].device
        self.bytes_per_token = kv.bytes_per_token

    def start(self, pages: Pages) -> DraftState:
        """Return the state of a new request."""
        return DraftState(pages)

    @torch.inference_mode()
    def scrub(self, blocks: Sequence[int]) -> None:
        """Forget what blocks hold; see `PagedKv`."""
        self.kv.scrub(blocks)

    def _pass(self, states: Sequence[DraftState], counts: Sequence[int], after: int = 0, causal: bool = True) -> Ragged:
        """Lay out a pass of ``counts`` new rows each, ``after`` rows behind the committed ones."""
        segments = tuple(
            Segment(state.pages.ids, state.rows + after, count) for state, count in zip(states, counts, strict=True)
        )
        return Ragged(segments, self.pool.block_tokens, self.pool.blocks, self.device, causal)


def _picked(features: Tensor, committed: Sequence[Committed]) -> Tensor:
    """Return the features of committed rows, in their order."""
    rows = [row for one in committed for row in one.feature_rows]
    return features if rows == list(range(features.shape[0])) else features[rows]


class BlockBatch(_Paged):
    """DSpark and DFlash; see `dspark`."""

    def __init__(self, drafter: BlockDrafter, pool: BlockPool) -> None:
        super().__init__(pool, _storage(drafter.net, pool))
        self.drafter = drafter

    @torch.inference_mode()
    def advance(self, committed: Sequence[Committed], features: Tensor) -> None:
        """Append context rows; see `BatchDrafter`."""
        net = self.drafter.net
        ragged = self._pass([one.state for one in committed], [len(one.token_ids) for one in committed])
        picked = _picked(features, committed).to(net.fc.weight.dtype)
        for layer, (keys, values) in enumerate(net.context_rows(picked[None], ragged.positions[None])):
            ragged.write(self.kv, layer, keys[0].transpose(0, 1), values[0].transpose(0, 1))
        for one in committed:
            one.state.rows += len(one.token_ids)

    def hidden(self, anchor_ids: Tensor, ragged: Ragged) -> Tensor:
        """Return the states that the heads read, ``[requests, block, hidden_size]``."""
        net: ParallelBackbone = self.drafter.net
        ids = net.block_ids(anchor_ids, self.drafter.trained_length)
        x = net.embed_tokens(ids.flatten())[None]
        cos, sin = net.rotary(ragged.positions[None], x.dtype)
        for index, layer in enumerate(net.layers):
            assert isinstance(layer, BlockLayer)
            x = x + _attend(layer.self_attn, layer.input_layernorm(x), cos, sin, ragged, self.kv, index)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out: Tensor = net.norm(x)
        return out.view(*ids.shape, -1)

    @torch.inference_mode()
    def propose(
        self, states: Sequence[DraftState], anchors: Sequence[int], length: int, sampler: BatchSampler
    ) -> Tensor:
        """Draft the trained block; the first ``length`` tokens of it are drawn."""
        check_length(self.drafter, length)
        net = self.drafter.net
        ragged = self._pass(states, [self.drafter.trained_length] * len(states), causal=False)
        prev = torch.tensor(list(anchors), device=self.device)
        hidden = self.hidden(prev, ragged)
        base_logits = net.lm_head(hidden[:, :length])
        state, confidence = None, []
        for k in range(length):
            logits, embedding = base_logits[:, k], None
            if net.markov_head is not None:
                bias, state = net.markov_head.step(prev, hidden[:, k], state)
                logits = logits + bias
                embedding = net.markov_head.markov_w1(prev)
            if net.confidence_head is not None:
                confidence.append(net.confidence_head(hidden[:, k], embedding))
            else:
                confidence.append(top_logits(logits))
            prev = sampler.draw(logits, self.drafter.draft_ids)
        return torch.stack(confidence, 1)


class ChainBatch(_Paged):
    """EAGLE-3 and MTP; see `chain`."""

    def __init__(self, drafter: ChainDrafter, pool: BlockPool) -> None:
        net: Any = drafter.net
        layers: Callable[[Tensor, Tensor, Ragged], Tensor]
        if isinstance(net, Eagle3Net):
            layers = self._eagle3
        elif isinstance(net, MtpNet):
            layers = self._mtp
        else:
            raise TypeError(f"no batched form of {type(net).__name__}")
        super().__init__(pool, _storage(net, pool))
        self.drafter = drafter
        self._rows = layers

    def blank_state(self) -> Tensor:
        """Return a state that says nothing, ``[hidden_size]``: for timing, where values do not matter."""
        return torch.zeros(self.drafter.net.config.hidden_size, dtype=self.kv.keys[0].dtype, device=self.device)

    def _eagle3(self, token_ids: Tensor, states: Tensor, ragged: Ragged) -> Tensor:
        net: Any = self.drafter.net
        layer = net.layers[0]
        assert isinstance(layer, Eagle3Layer)
        x = layer.inputs(net.embed_tokens(token_ids), states)[None]
        cos, sin = net.rotary(ragged.positions[None], x.dtype)
        y = states[None] + _attend(layer.self_attn, x, cos, sin, ragged, self.kv, 0)
        out: Tensor = (y + layer.mlp(layer.post_attention_layernorm(y)))[0]
        return out

    def _mtp(self, token_ids: Tensor, states: Tensor, ragged: Ragged) -> Tensor:
        net: Any = self.drafter.net
        x = net.eh_proj(torch.cat([net.enorm(net.embed_tokens(token_ids)), net.hnorm(states)], -1))[None]
        cos, sin = net.rotary(ragged.positions[None], x.dtype)
        for index, layer in enumerate(net.layers):
            assert isinstance(layer, MtpLayer)
            x = x + _attend(layer.self_attn, layer.input_layernorm(x), cos, sin, ragged, self.kv, index)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out: Tensor = x[0]
        return out

    @torch.inference_mode()
    def advance(self, committed: Sequence[Committed], features: Tensor) -> None:
        """Append rows of the target's features, each beside the token after it."""
        ragged = self._pass([one.state for one in committed], [len(one.token_ids) for one in committed])
        after = [token for one in committed for token in (*one.token_ids[1:], one.next_id)]
        fused = self.drafter.net.fuse(_picked(features, committed))
        states = self._rows(torch.tensor(after, device=self.device), fused, ragged)
        for one, first in zip(committed, ragged.firsts, strict=True):
            one.state.rows += len(one.token_ids)
            # A copy: a view would keep the whole pass alive.
            one.state.last_state = states[first + len(one.token_ids) - 1].clone()

    @torch.inference_mode()
    def propose(
        self, states: Sequence[DraftState], anchors: Sequence[int], length: int, sampler: BatchSampler
    ) -> Tensor:
        """Draft token after token; the anchors were taken in by `advance`."""
        last = [state.last_state for state in states]
        hidden = torch.stack([row for row in last if row is not None])
        confidence = []
        for k in range(length):
            logits = self.drafter.net.logits(hidden)
            confidence.append(top_logits(logits))
            tokens = sampler.draw(logits, self.drafter.draft_ids)
            if k + 1 < length:
                hidden = self._rows(tokens, hidden, self._pass(states, [1] * len(states), after=k))
        return torch.stack(confidence, 1)


class SmallModelBatch:
    """A smaller language model; see `small_model`."""

    def __init__(self, drafter: SmallModelDrafter, model: HfBatchTarget) -> None:
        self.drafter = drafter
        self.model = model
        self.bytes_per_token = model.kv.bytes_per_token

    def start(self, pages: Pages) -> DraftState:
        """Return the state of a new request."""
        return DraftState(pages)

    def scrub(self, blocks: Sequence[int]) -> None:
        """Forget what blocks hold."""
        self.model.scrub(blocks)

    def advance(self, committed: Sequence[Committed], features: Tensor) -> None:
        """Keep rows that were drafted right and read the others."""
        unread: list[tuple[DraftState, Sequence[int]]] = []
        for one in committed:
            state, kept = one.state, 0
            while kept < min(len(state.ahead), len(one.token_ids)) and state.ahead[kept] == one.token_ids[kept]:
                kept += 1
            state.rows += kept
            state.ahead = ()
            if kept < len(one.token_ids):
                unread.append((state, one.token_ids[kept:]))
        if unread:
            segments = [Segment(state.pages.ids, state.rows, len(ids)) for state, ids in unread]
            self.model.forward([token for _, ids in unread for token in ids], segments, (), ())
        for state, ids in unread:
            state.rows += len(ids)

    def propose(
        self, states: Sequence[DraftState], anchors: Sequence[int], length: int, sampler: BatchSampler
    ) -> Tensor:
        """Draft token after token."""
        tokens, read, confidence = list(anchors), [], []
        for k in range(length):
            segments = [Segment(state.pages.ids, state.rows + k, 1) for state in states]
            logits = self.model.forward(tokens, segments, (), range(len(tokens))).logits
            read.append(tokens)
            confidence.append(top_logits(logits))
            tokens = sampler.draw(logits).tolist()
        for index, state in enumerate(states):
            state.ahead = tuple(step[index] for step in read)
        return torch.stack(confidence, 1)


class OneByOne:
    """A drafter that is known by its seam alone: each request drafts for itself, with a cache of its own."""

    bytes_per_token = 0

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        self.drafter = drafter
        self.device = device

    def start(self, pages: Pages) -> DraftState:
        """Return the state of a new request."""
        return DraftState(pages, own=self.drafter.start())

    def scrub(self, blocks: Sequence[int]) -> None:
        """Nothing lies in blocks."""

    def advance(self, committed: Sequence[Committed], features: Tensor) -> None:
        """Hand each request its rows."""
        for one in committed:
            assert one.state.own is not None
            rows = features[one.feature_rows.start : one.feature_rows.stop]
            one.state.own.advance(one.token_ids, rows, one.next_id)
            one.state.rows += len(one.token_ids)

    def propose(
        self, states: Sequence[DraftState], anchors: Sequence[int], length: int, sampler: BatchSampler
    ) -> Tensor:
        """Draft for one request after the other."""
        alone, sane, confidence = [], [], []
        for state, anchor, drawer in zip(states, anchors, sampler.drawers, strict=True):
            assert state.own is not None
            alone.append(DraftSampler(drawer.shaper, drawer.luck, drawer.anchor_position, sampler.greedy))
            try:
                confidence.append(state.own.propose(anchor, length, alone[-1]))
                sane.append(True)
            except NotFiniteError:
                confidence.append([0.0] * length)
                sane.append(False)
        sampler.adopt(alone, sane)
        return torch.tensor(confidence, device=self.device)
