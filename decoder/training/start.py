"""Where training starts: the dimensions a drafter takes over from its target, and weights from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decoder.checkpoint import DraftNet
from decoder.errors import Fault, TargetError
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


#: What a layer of the target must have to be copied.
_LAYER = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)

#: Of features beside the last, next to a random projection.
_QUIET = 0.3

#: Documents of the text that are read to learn how large a layer's queries, keys and inner values are.
_MEASURED_DOCUMENTS = 8


@torch.no_grad()
def copy_target_layers(net: DraftNet, target: HfTarget, text: TrainingText) -> None:
    """Let a new draft model's layers begin as the target's last ones, which know already how to read such states.

    Where a draft layer reads two states side by side, each half is read as the target's layer reads its one. A target
    without norms on queries and keys gets the mean size of either as the norm's weight. Of MLPs that are wider than the
    draft model's, the inner values that add most to the output over some documents of ``text`` are kept.

    Raises `TargetError` where the target has too few layers, or is built in another way.
    """
    decoder = getattr(target.model, "model", None)
    ours: list[Any] = list(net.layers)
    theirs: list[Any] = list(getattr(decoder, "layers", ()))[-len(ours) :]
    if len(theirs) < len(ours):
        raise TargetError(Fault(f"has no {len(ours)} layers to start from", key="--start"))
    for layer in theirs:
        modules = dict(layer.named_modules())
        missing = [name for name in _LAYER if getattr(modules.get(name), "weight", None) is None]
        if missing:
            raise TargetError(Fault(f"has layers without {missing[0]}; a drafter can start from 'seed'", key="--start"))
    for mine, layer, sizes in zip(ours, theirs, _layer_sizes(theirs, decoder, text), strict=True):
        attention = mine.self_attn
        read = layer.input_layernorm.weight.float()  # into the matrices: context rows pass no norm of their layer
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight.float() * read
            halves = attention.q_proj.in_features // weight.shape[1]
            getattr(attention, name).weight.copy_(weight.repeat(1, halves) / halves)
        attention.o_proj.weight.copy_(layer.self_attn.o_proj.weight)
        for name in ("q_norm", "k_norm"):
            norm = getattr(layer.self_attn, name, None)
            getattr(attention, name).weight.copy_(sizes[name] if norm is None else norm.weight)
        mine.post_attention_layernorm.weight.copy_(layer.post_attention_layernorm.weight)
        down = layer.mlp.down_proj.weight.float()
        added = sizes["inner"] * down.square().sum(0).sqrt()
        kept = added.topk(min(len(added), mine.mlp.gate_proj.out_features)).indices.sort().values
        mine.mlp.gate_proj.weight[: len(kept)] = layer.mlp.gate_proj.weight[kept].float()
        mine.mlp.up_proj.weight[: len(kept)] = layer.mlp.up_proj.weight[kept].float()
        mine.mlp.down_proj.weight[:, : len(kept)] = down[:, kept]


@torch.no_grad()
def pass_last_feature(fc: nn.Linear, scale: Tensor) -> None:
    """Let the last feature pass a projection as it is, for layers that were the target's; the others join in quietly.

    ``scale`` ``[layers * hidden_size]``: the size of each feature; the projection reads features divided by it.
    """
    width = fc.out_features
    fc.weight.mul_(_QUIET)
    fc.weight[:, -width:] = torch.diag(scale[-width:] / scale[-width:].square().mean().sqrt())


def _layer_sizes(theirs: Sequence[Any], decoder: Any, text: TrainingText) -> list[dict[str, Tensor]]:
    """Return the root mean square of queries and keys, scalars, and of each inner value of the MLP, layer by layer."""
    squares: list[dict[str, list[Tensor]]] = [{"q_norm": [], "k_norm": [], "inner": []} for _ in theirs]
    kept = torch.empty(0)

    def note(found: list[Tensor], values: Tensor) -> None:
        found.append(values.float()[kept].square())

    hooks = []
    for layer, found in zip(theirs, squares, strict=True):
        for name, module in (("q_norm", layer.self_attn.q_proj), ("k_norm", layer.self_attn.k_proj)):
            hooks.append(module.register_forward_hook(lambda _, __, out, found=found[name]: note(found, out)))
        hooks.append(
            layer.mlp.down_proj.register_forward_pre_hook(lambda _, x, found=found["inner"]: note(found, x[0]))
        )
    try:
        for document in text.usable[:_MEASURED_DOCUMENTS]:
            batch = text.batch([document], ())
            kept = batch.answer.to(decoder.device)
            decoder(input_ids=batch.token_ids.to(decoder.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [
        {
            name: (torch.cat(parts).mean(0) if name == "inner" else torch.cat(parts).mean()).sqrt().cpu()
            for name, parts in found.items()
        }
        for found in squares
    ]
