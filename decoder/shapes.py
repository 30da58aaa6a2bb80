"""Targets and drafters of published dimensions with random weights: how long a step takes does not depend on values.

Dimensions are those of the Qwen3 models and of the DeepSpec DSpark checkpoints for them (block 7, five layers, Markov
rank 256). What such a drafter proposes is noise: acceptance has to come from elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from decoder.backbone import ParallelBackbone
from decoder.checkpoint import make_net
from decoder.config import DSPARK, DraftConfig
from decoder.dspark import BlockDrafter
from decoder.errors import Fault, InputError, TargetError
from decoder.target import HfTarget

#: Scale of the random weights, as the models were initialised.
_SCALE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Dimensions of a target, and of the drafter that was published for it."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151_936
    max_context_tokens: int = 40_960
    tied: bool = False
    feature_layers: tuple[int, ...] = (1, 9, 17, 25, 33)
    draft_layers: int = 5
    block: int = 7
    markov_rank: int = 256
    mask_token_id: int = 151_669

    @property
    def weight_count(self) -> int:
        """Weights of the target that a step multiplies with: all but the input embedding."""
        attention = 2 * self.hidden_size * self.head_dim * (self.heads + self.key_value_heads)
        per_layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.layers * per_layer + self.hidden_size * self.vocab_size


SHAPES = {
    "qwen3-4b": Shape(hidden_size=2560, intermediate_size=9728, layers=36, heads=32, tied=True),
    "qwen3-8b": Shape(hidden_size=4096, intermediate_size=12_288, layers=36, heads=32),
    "qwen3-14b": Shape(
        hidden_size=5120, intermediate_size=17_408, layers=40, heads=40, feature_layers=(1, 10, 19, 28, 37)
    ),
    # Small enough for any machine: it shows that the command works, and no engine's speed.
    "toy": Shape(
        hidden_size=64,
        intermediate_size=128,
        layers=2,
        heads=4,
        key_value_heads=2,
        head_dim=16,
        vocab_size=512,
        max_context_tokens=4096,
        feature_layers=(0, 1),
        draft_layers=1,
        block=3,
        markov_rank=8,
        mask_token_id=511,
    ),
}


def shape_of(name: str) -> Shape:
    """Return a shape by name; raises `InputError`."""
    if name not in SHAPES:
        raise InputError(Fault(f"unknown shape '{name}'; known: {', '.join(SHAPES)}", key="--shape"))
    return SHAPES[name]


def make_shape(
    shape: Shape, *, device: torch.device, dtype: torch.dtype, draft_length: int | None = None
) -> tuple[HfTarget, BlockDrafter]:
    """Return a target and a DSpark drafter of these dimensions, on the device from the start.

    ``draft_length``: block of the drafter (default: the published one). Raises `TargetError` where the memory is not
    there.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.initialization import no_init_weights

    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=shape.tied,
    )
    draft = DraftConfig(
        architecture=DSPARK,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.draft_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        target_layer_ids=shape.feature_layers,
        num_target_layers=shape.layers,
        rope_theta=1e6,
        max_position_embeddings=shape.max_context_tokens,
        block_size=draft_length or shape.block,
        mask_token_id=shape.mask_token_id,
        markov_rank=shape.markov_rank,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device), no_init_weights():
            model = Qwen3ForCausalLM(config)
        net = make_net(draft, device=device, dtype=dtype)
        _randomise(model)
        _randomise(net)
    except torch.OutOfMemoryError as fault:
        need = f"{shape.weight_count * dtype.itemsize / 2**30:.1f} GiB of weights, and the drafter's,"
        raise TargetError(Fault(f"{need} do not fit {device}: {str(fault).splitlines()[0]}", key="--shape")) from None
    finally:
        torch.set_default_dtype(before)
    assert isinstance(net, ParallelBackbone)
    return HfTarget(model), BlockDrafter(net)


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    for name, tensor in model.named_parameters():
        if "norm" in name:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, _SCALE)
