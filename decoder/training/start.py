"""Where training starts: the dimensions a drafter takes over from its target, and weights from a seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from decoder.checkpoint import DraftNet
from decoder.layers import Attention, Mlp
from decoder.target import HfTarget
from decoder.training.batches import TrainingText
from decoder.vocabulary import draft_ids, rows_of, set_draft_ids

#: Standard deviation of a new matrix, times the square root of its columns.
_GAIN = 0.6


def target_dimensions(target: HfTarget) -> dict[str, Any]:
    """Return the fields of a `DraftConfig` that a drafter has in common with its target."""
    config = target.model.config.get_text_config(decoder=True)
    heads = int(config.num_attention_heads)
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or target.hidden_size // heads),
        "num_target_layers": target.num_layers,
        "rms_norm_eps": float(config.rms_norm_eps),
        "rope_theta": float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 1e4),
        "max_position_embeddings": target.max_context_tokens,
    }


@torch.no_grad()
def start_net(net: DraftNet, target: HfTarget, text: TrainingText, seed: int) -> None:
    """Give a new draft model its embedding and head (the target's), its draft vocabulary, and weights from ``seed``.

    Matrices are normal with a deviation that keeps the size of what passes through; those that write into the residual
    stream, the second of a Markov head and the confidence head are zero, so that at first every layer passes on what it
    was given, and no gradient comes from a confidence that knows nothing yet. The norm before the head starts as the
    target's own.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.normal_(0.0, _GAIN / module.in_features**0.5, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding) and name != "embed_tokens":
            module.weight.normal_(0.0, 1.0 / module.embedding_dim**0.5, generator=generator)
    for name, module in net.named_modules():
        if isinstance(module, Attention):
            module.o_proj.weight.zero_()
        elif isinstance(module, Mlp):
            module.down_proj.weight.zero_()
        elif name in ("markov_head.markov_w2", "confidence_head.proj") and isinstance(module, nn.Linear):
            module.weight.zero_()
    if net.config.draft_vocab_size is not None:
        set_draft_ids(net, text.frequent_tokens(net.config.draft_vocab_size))
    net.embed_tokens.weight = nn.Parameter(target.embed_tokens.detach().float(), requires_grad=False)
    net.lm_head.weight = nn.Parameter(rows_of(target.lm_head, draft_ids(net)).detach().float(), requires_grad=False)
    final_norm = getattr(getattr(target.model, "model", None), "norm", None)
    weight = getattr(final_norm, "weight", None)
    if weight is not None and weight.shape == net.norm.weight.shape:
        net.norm.weight.copy_(weight)
