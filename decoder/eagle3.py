"""EAGLE-3: one layer that reads the next token's embedding beside features of several target layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from decoder.config import DraftConfig
from decoder.kv_cache import KvCache
from decoder.layers import Attention, Mlp, RmsNorm, Rotary
from decoder.vocabulary import register_map


class Eagle3Layer(nn.Module):
    """Attention over [embedding; state], each under its own norm; the state alone is the residual stream."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)
        self.hidden_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def inputs(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Return what attention reads, ``[..., 2 * hidden_size]``."""
        return torch.cat([self.input_layernorm(embeddings), self.hidden_norm(states)], -1)


class Eagle3Net(nn.Module):
    """The draft model; the attribute names are those of the published tensors."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(config.hidden_size * len(config.target_layer_ids), config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocabulary, bias=False)
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        register_map(self, config)

    def fuse(self, features: Tensor) -> Tensor:
        """Project the target's features; see `ChainNet`."""
        out: Tensor = self.fc(features.to(self.fc.weight.dtype))
        return out

    def rows(
        self,
        token_ids: Tensor,
        states: Tensor,
        positions: Tensor,
        cache: KvCache,
        mask: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Append rows; see `ChainNet`."""
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        x = layer.inputs(self.embed_tokens(token_ids), states)[None]
        cos, sin = self.rotary(positions[None], x.dtype)
        keys, values = cache.append(0, *layer.self_attn.keys_values(x, cos, sin))
        if mask is None:
            mask = causal_mask(x.shape[1], keys.shape[-2], x.device)
        states = states[None]
        if wanted is not None:
            states, x, cos, sin, mask = pick(wanted, states, x, cos, sin, mask)
        y = states + layer.self_attn(x, cos, sin, keys, values, mask)
        out: Tensor = (y + layer.mlp(layer.post_attention_layernorm(y)))[0]
        return out

    def logits(self, states: Tensor) -> Tensor:
        """Return logits; see `ChainNet`."""
        out: Tensor = self.lm_head(self.norm(states))
        return out


def causal_mask(new: int, total: int, device: torch.device) -> Tensor | None:
    """Return where the last ``new`` of ``total`` rows may look, ``[new, total]``; None for one row: anywhere."""
    if new == 1:
        return None
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)


def pick(wanted: Tensor, *parts: Tensor | None) -> Any:
    """Return rows ``wanted`` of tensors ``[..., rows, width]``; what is None stays so."""
    return [None if part is None else part[..., wanted, :] for part in parts]
