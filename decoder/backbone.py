"""The parallel block: every draft position in one forward pass, whatever the block's length.

The block is the anchor at its true position followed by mask tokens. Its rows look at each other freely, and at the
target's features of all tokens before the anchor, which enter attention as keys and values only. The context's keys and
values do not depend on the block, so they are computed once and cached.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from decoder.confidence import ConfidenceHead
from decoder.config import DraftConfig
from decoder.layers import Attention, Mlp, RmsNorm, Rotary
from decoder.markov import make_markov_head
from decoder.vocabulary import register_map

KeysValues = tuple[Tensor, Tensor]


class BlockLayer(nn.Module):
    """One layer: attention over context and block, then the MLP."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: KeysValues, mask: Tensor | None) -> Tensor:
        """Map the residual stream of the block, ``[batch, block, hidden_size]``."""
        normed = self.input_layernorm(x)
        keys, values = self.self_attn.keys_values(normed, cos, sin)
        keys, values = torch.cat([context[0], keys], -2), torch.cat([context[1], values], -2)
        x = x + self.self_attn(normed, cos, sin, keys, values, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class ParallelBackbone(nn.Module):
    """DFlash, or DSpark with its heads; the attribute names are those of the published tensors."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        if config.mask_token_id is None:
            raise ValueError("a parallel drafter needs a mask token")
        self.config = config
        self.mask_token_id = config.mask_token_id
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(config.hidden_size * len(config.target_layer_ids), config.hidden_size, bias=False)
        self.hidden_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocabulary, bias=False)
        self.markov_head = make_markov_head(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        register_map(self, config)

    def project(self, features: Tensor) -> Tensor:
        """Return what the layers see of target features ``[batch, tokens, layers * hidden_size]``."""
        out: Tensor = self.hidden_norm(self.fc(features))
        return out

    def context_rows(self, features: Tensor, positions: Tensor) -> list[KeysValues]:
        """Return each layer's keys and values of committed tokens.

        Parameters
        ----------
        features : tensor [batch, tokens, layers * hidden_size]
            Hidden states of the target, concatenated over ``target_layer_ids``.
        positions : tensor [batch, tokens]
        """
        context = self.project(features)
        cos, sin = self.rotary(positions, context.dtype)
        return [layer.self_attn.keys_values(context, cos, sin) for layer in self.layers]  # type: ignore[operator, union-attr]

    def block_ids(self, anchor_ids: Tensor, length: int) -> Tensor:
        """Return the input of blocks: ``anchor_ids`` ``[batch]``, then masks, ``[batch, length]``."""
        masks = anchor_ids.new_full((*anchor_ids.shape, length - 1), self.mask_token_id)
        return torch.cat([anchor_ids[..., None], masks], -1)

    def forward(
        self, input_ids: Tensor, positions: Tensor, context: Sequence[KeysValues], mask: Tensor | None = None
    ) -> Tensor:
        """Return the state after the final norm, input of all heads, ``[batch, rows, hidden_size]``.

        Parameters
        ----------
        input_ids, positions : tensor [batch, rows]
            One block, or several packed side by side (then a mask keeps them apart).
        context : per layer, keys and values [batch, key/value heads, context tokens, head_dim]
        mask : tensor [batch, 1, rows, context tokens + rows], bool, optional
            True where a row may look; None: everywhere, as in decoding.
        """
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary(positions, x.dtype)
        for layer, rows in zip(self.layers, context, strict=True):
            x = layer(x, cos, sin, rows, mask)
        out: Tensor = self.norm(x)
        return out
