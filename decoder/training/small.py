"""Training a small language model that drafts for the target: all of a text's rows at once.

Every row of an answer that can be drafted is judged where it stands, against the target's distribution over the whole
vocabulary: of the two losses, total variation is distillation and cross entropy learns from what was written.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from decoder.lab.targets import no_progress_bars
from decoder.losses import LossWeights, judge
from decoder.small_model import SmallModelDrafter
from decoder.target import HfTarget, load_target
from decoder.training.batches import Batch, TrainingText
from decoder.training.objective import DraftShape
from decoder.training.start import target_dimensions

#: The target's heads for each of the small model's.
_NARROWER = 3
#: Documents whose hidden states say how large the target's are.
_MEASURED_DOCUMENTS = 8
#: Logits of a new model, beside the target's: hardly sure of anything, or it starts sure of the token it just read.
_GAIN = 0.1


class SmallModelObjective:
    """A small language model on its way; see `Objective`.

    Parameters
    ----------
    model : Qwen3ForCausalLM, or another causal LM of `transformers`
        float32.
    target_head : tensor [vocabulary, hidden_size of the target]
    weights : LossWeights
        Positions are not weighed: a row is the first draft token of one round and the last of another. There is no
        confidence head.
    length : int
        Draft tokens a round, in what is reported.
    """

    kind = "small_model"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, model: nn.Module, target_head: Tensor, weights: LossWeights, length: int) -> None:
        self.model = model.train().requires_grad_(True)
        self._target_head = target_head
        self.weights = weights
        self.length = length

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return all weights; an embedding that is the head too counts once."""
        return dict(self.model.named_parameters())

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the model as a Hugging Face folder; see `Objective`."""
        with no_progress_bars():
            copy.deepcopy(self.model).to(dtype).save_pretrained(folder)  # type: ignore[operator]

    def loss(self, batch: Batch, rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        """Return the loss over all rows that can be drafted; nothing is drawn."""
        # Padding stands on the right, behind everything that could look at it: the causal mask is enough.
        states = self.model.model(input_ids=batch.token_ids, use_cache=False).last_hidden_state  # type: ignore[operator]
        place = torch.arange(batch.answer.shape[1], device=batch.answer.device)
        # The answer's first token comes from the prefill.
        judged = batch.answer & (place >= batch.prompts[:, None])
        count = int(judged.sum())
        each = states.new_full((count,), 1 / count)
        found = judge(
            states[judged],
            self.model.lm_head.weight,  # type: ignore[union-attr, arg-type]
            batch.final[judged],
            self._target_head,
            batch.log_norms[judged],
            batch.next_ids[judged],
            self.weights.ce * each,
            self.weights.tv * each,
            ce_of=self.weights.ce_of,
        )
        accept = found.accept.new_zeros(judged.shape[0], judged.shape[1] + self.length)
        accept[:, : judged.shape[1]][judged] = found.accept
        survival = accept.unfold(1, self.length, 1)[:, : judged.shape[1]][judged].cumprod(-1)
        metrics = {
            "loss": float(found.loss.detach()),
            "ce": float(found.ce.mean()),
            "tv": float(2 * (1 - found.accept).mean()),
            "accepted_length": 1 + float(survival.sum(-1).mean()),
            "accept@0": float(found.accept.mean()),
            "positions": float(count),
        }
        return found.loss, metrics


def make_small(
    shape: DraftShape, target: HfTarget, text: TrainingText, init: Path | None, seed: int
) -> SmallModelObjective:
    """Return a small language model to be trained: a new one, or the one in the folder ``init``.

    Raises `InputError` where that has another vocabulary than the target.
    """
    if init is not None:
        small = load_target(init, device=str(target.device))
        SmallModelDrafter(small).check_target(target)
        return SmallModelObjective(small.model, target.lm_head, shape.weights, shape.length)
    model = new_model(shape, target, text, seed).to(target.device)
    return SmallModelObjective(model, target.lm_head, shape.weights, shape.length)


@torch.no_grad()
def new_model(shape: DraftShape, target: HfTarget, text: TrainingText, seed: int) -> nn.Module:
    """Return a model with a third of the target's heads, whose tokens begin where the target's are.

    Its embedding, which is its head too, is the target's head along the directions in which that is largest, each in
    the units of the target's final states: half a million tokens are too few to learn a vocabulary from nothing.
    """
    dimensions = target_dimensions(target)
    heads = max(1, dimensions["num_attention_heads"] // _NARROWER)
    width = heads * dimensions["head_dim"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=target.vocab_size,
                hidden_size=width,
                intermediate_size=shape.ffn,
                num_hidden_layers=shape.layers,
                num_attention_heads=heads,
                num_key_value_heads=heads,
                head_dim=dimensions["head_dim"],
                max_position_embeddings=dimensions["max_position_embeddings"],
                rms_norm_eps=dimensions["rms_norm_eps"],
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=None,
                dtype=torch.float32,
            )
        )
    head = target.lm_head.detach().float().cpu()
    directions = torch.linalg.eigh(head.T @ head).eigenvectors[:, -width:]
    batch = text.batch(range(min(_MEASURED_DOCUMENTS, len(text))), ())
    final = batch.final[torch.arange(batch.answer.shape[1]) < batch.rows[:, None]]
    sizes = (final @ directions).square().mean(0).sqrt()
    model.model.embed_tokens.weight.copy_(_GAIN * (head @ directions) * sizes)
    return model
