"""A multi-token-prediction head in DeepSeek's style: state and next embedding, normed and merged, then one layer.

Chained by feeding its own output back in place of the target's state; the same head serves every step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from decoder.config import DraftConfig
from decoder.eagle3 import causal_mask, pick
from decoder.kv_cache import KvCache
from decoder.layers import Attention, Mlp, RmsNorm, Rotary
from decoder.vocabulary import register_map


class MtpLayer(nn.Module):
    """A plain decoder layer."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class MtpNet(nn.Module):
    """The head: ``layer(eh_proj [norm(embedding of token i+1); norm(state of token i)])``.

    The first step reads the target's state of one layer (``target_layer_ids`` has one entry; the last layer's is the
    state after the target's final norm). Source: DeepSeek-V3 report, section 2.2.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.enorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([MtpLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocabulary, bias=False)
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        register_map(self, config)

    def fuse(self, features: Tensor) -> Tensor:
        """Take the target's state as it is; see `ChainNet`."""
        return features.to(self.eh_proj.weight.dtype)

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
        merged = torch.cat([self.enorm(self.embed_tokens(token_ids)), self.hnorm(states)], -1)
        x = self.eh_proj(merged)[None]
        cos, sin = self.rotary(positions[None], x.dtype)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, MtpLayer)
            normed = layer.input_layernorm(x)
            keys, values = cache.append(index, *layer.self_attn.keys_values(normed, cos, sin))
            if mask is None:
                mask = causal_mask(x.shape[1], keys.shape[-2], x.device)
            if wanted is not None and index == len(self.layers) - 1:
                x, normed, cos, sin, mask = pick(wanted, x, normed, cos, sin, mask)
            x = x + layer.self_attn(normed, cos, sin, keys, values, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out: Tensor = x[0]
        return out

    def logits(self, states: Tensor) -> Tensor:
        """Return logits; see `ChainNet`."""
        out: Tensor = self.lm_head(self.norm(states))
        return out
