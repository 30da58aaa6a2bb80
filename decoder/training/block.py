"""Training a parallel block (DSpark, DFlash): blocks at random anchors, many in one masked pass.

A block is trained as it drafts: the anchor and the masks after it see each other and the context rows before the
anchor, nothing of other blocks. Its position k is judged where the target predicted the token after anchor + k, with
the text's own tokens before it (teacher forcing), which is all that the Markov head reads. Blocks of one document share
its context rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from decoder.backbone import ParallelBackbone
from decoder.checkpoint import load_net, make_net, save_net
from decoder.config import DSPARK, SHAREABLE, DraftConfig
from decoder.errors import Fault, InputError
from decoder.losses import LossWeights, confidence_loss, judge, position_weights
from decoder.target import HfTarget
from decoder.training.batches import Batch, TrainingText
from decoder.training.objective import DraftShape
from decoder.training.start import copy_target_layers, pass_last_feature, start_net, target_dimensions
from decoder.vocabulary import draft_ids, label_ids, rows_of


def make_block(shape: DraftShape, target: HfTarget, text: TrainingText, init: Path | None, seed: int) -> BlockObjective:
    """Return a new DSpark or DFlash drafter to be trained, or the one in the folder ``init``."""
    if init is not None:
        net = load_net(init, target, device=target.device)
        if not isinstance(net, ParallelBackbone) or net.config.kind != shape.drafter:
            found = net.config.kind
            raise InputError(Fault(f"holds a drafter of kind {found}; --drafter says {shape.drafter}", str(init)))
        scale = text.feature_scale(net.config.target_layer_ids)
        return BlockObjective(net, target.lm_head, shape.anchors, shape.weights, scale)
    dspark = shape.drafter == "dspark"
    config = DraftConfig(
        architecture=DSPARK,
        **target_dimensions(target),
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        target_layer_ids=shape.feature_layers,
        block_size=shape.length,
        mask_token_id=text.rarest_token(),
        markov_rank=shape.markov_rank if dspark else 0,
        markov_head_type=shape.head,
        enable_confidence_head=dspark,
        confidence_head_with_markov=dspark,
        draft_vocab_size=shape.draft_vocab,
        shared_with_target=SHAREABLE,
    )
    net = make_net(config)
    assert isinstance(net, ParallelBackbone)
    start_net(net, target, text, seed)
    scale = text.feature_scale(shape.feature_layers)
    if shape.start == "target":
        copy_target_layers(net, target, text)
        pass_last_feature(net.fc, scale)
    with torch.no_grad():
        net.fc.weight.div_(scale)  # so that all features weigh alike
    return BlockObjective(net.to(target.device), target.lm_head, shape.anchors, shape.weights, scale)


class BlockObjective:
    """A block drafter on its way; see `Objective`.

    Parameters
    ----------
    net : ParallelBackbone
        float32; its embedding and head stay as they are.
    target_head : tensor [vocabulary, hidden_size]
    anchors : int
        Blocks a document, or as many as it has room for.
    weights : LossWeights
    scale : tensor [layers * hidden_size], optional
        The size of each feature. Features are trained on divided by it, since a step of Adam is as long for a weight on
        a large feature as for one on a small; what is saved reads them as they are.
    """

    def __init__(
        self,
        net: ParallelBackbone,
        target_head: Tensor,
        anchors: int,
        weights: LossWeights,
        scale: Tensor | None = None,
    ) -> None:
        self.net = net
        self.kind = net.config.kind
        self.feature_layers = net.config.target_layer_ids
        self.anchors = anchors
        self.weights = weights
        device = net.fc.weight.device
        token_ids = draft_ids(net)
        self._labels = label_ids(token_ids, net.config.vocab_size).to(device)
        self._target_head = rows_of(target_head, token_ids).to(device)
        self._positions = position_weights(weights.positions, net.config.block_size).to(device)
        self._scale = torch.ones(net.fc.in_features) if scale is None else scale
        self._scale = self._scale.to(device)
        with torch.no_grad():
            net.fc.weight.mul_(self._scale)
        net.train().requires_grad_(True)
        net.embed_tokens.requires_grad_(False)
        net.lm_head.requires_grad_(False)

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return what is trained: everything but embedding and head."""
        return {name: value for name, value in self.net.named_parameters() if value.requires_grad}

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the drafter; see `Objective`."""
        trained = self.net.fc.weight.detach().clone()
        with torch.no_grad():
            self.net.fc.weight.div_(self._scale)
            try:
                save_net(self.net, folder, dtype)
            finally:
                self.net.fc.weight.copy_(trained)

    def loss(self, batch: Batch, rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        """Return the loss over random blocks; see `Objective`."""
        anchors, kept = draw_anchors(batch, self.anchors, rng)
        return self.loss_at(batch, anchors, kept)

    def loss_at(self, batch: Batch, anchors: Tensor, kept: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return the loss over the blocks at ``anchors`` ``[documents, blocks]`` that are ``kept``."""
        net = self.net
        length = net.config.block_size
        rows = anchors[..., None] + torch.arange(length, device=anchors.device)
        # What is judged was written without a gap from the anchor on, and the target's state of it is at hand.
        last = batch.answer.shape[1] - 1
        judged = batch.answer.gather(1, rows.clamp_max(last).flatten(1)).view_as(rows) & (rows <= last)
        judged = judged.cumprod(-1).bool() & kept[..., None]
        hidden = block_states(net, batch, batch.features / self._scale, anchors)
        document = torch.arange(len(anchors), device=anchors.device)[:, None, None].expand_as(rows)[judged]
        row = rows[judged]
        prev_ids = batch.token_ids.gather(1, rows.clamp_max(last).flatten(1)).view_as(rows)
        mixed = mixed_states(net, prev_ids, hidden)
        states = hidden[judged]
        weights = self._positions.expand_as(rows)[judged]
        low = None if mixed is None else mixed[judged]
        ce, tv = self.weights.ce * weights, self.weights.tv * weights
        found = judge(
            states,
            net.lm_head.weight,
            batch.final[document, row],
            self._target_head,
            batch.log_norms[document, row],
            self._labels[batch.next_ids[document, row]],
            ce,
            tv,
            None if low is None or net.markov_head is None else (low, net.markov_head.markov_w2.weight),
            self.weights.ce_of,
        )
        total = weights.sum()
        loss = found.loss
        terms = {"ce": (weights * found.ce).sum() / total, "tv": (weights * 2 * (1 - found.accept)).sum() / total}
        if net.confidence_head is not None:
            embedding = None if net.markov_head is None else net.markov_head.markov_w1(prev_ids[judged])
            logits = net.confidence_head(states, embedding)
            bce = confidence_loss(logits, found.accept, weights)
            loss = loss + self.weights.confidence * bce
            bias = (torch.sigmoid(logits.detach().float()) - found.accept) * weights
            terms |= {"confidence": bce.detach() / total, "confidence_bias": bias.sum() / total}
        loss = loss / total
        accept = torch.zeros(rows.shape, dtype=found.accept.dtype, device=rows.device)
        accept[judged] = found.accept
        blocks = judged[..., 0].sum()
        counts = judged.sum((0, 1))
        metrics = {
            "loss": float(loss.detach()),
            **{name: float(value) for name, value in terms.items()},
            "accepted_length": 1 + float(accept.cumprod(-1).sum() / blocks),
            **{
                f"accept@{k}": float(part)
                for k, part in enumerate(accept.sum((0, 1)) / counts.clamp_min(1))
                if int(counts[k])
            },
            "positions": float(judged.sum()),
        }
        return loss, metrics


def draw_anchors(batch: Batch, anchors: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draw up to ``anchors`` rows of each document's answer, ascending.

    Returns ``[documents, most drawn]``: rows, and which of them are real. An anchor is a token that the target wrote,
    and is followed by another.
    """
    first, last = batch.prompts.tolist(), batch.rows.tolist()
    drawn = [np.sort(start + rng.permutation(end - start)[:anchors]) for start, end in zip(first, last, strict=True)]
    most = max(map(len, drawn))
    rows = torch.zeros(len(drawn), most, dtype=torch.int64)
    kept = torch.zeros(len(drawn), most, dtype=torch.bool)
    for at, part in enumerate(drawn):
        rows[at, : len(part)] = torch.from_numpy(part)
        kept[at, : len(part)] = True
    return rows.to(batch.token_ids.device), kept.to(batch.token_ids.device)


def block_states(net: ParallelBackbone, batch: Batch, features: Tensor, anchors: Tensor) -> Tensor:
    """Return what the heads read for blocks at ``anchors``, ``[documents, blocks, block, hidden_size]``."""
    documents, blocks = anchors.shape
    length, device = net.config.block_size, anchors.device
    context_rows = features.shape[1]
    context = net.context_rows(features, torch.arange(context_rows, device=device)[None])
    ids = net.block_ids(batch.token_ids.gather(1, anchors), length).flatten(1)
    positions = (anchors[..., None] + torch.arange(length, device=device)).flatten(1)
    owner = torch.arange(blocks, device=device).repeat_interleave(length)
    before = torch.arange(context_rows, device=device) < anchors[:, owner, None]
    same = (owner[:, None] == owner).expand(documents, -1, -1)
    mask = torch.cat([before, same], -1)[:, None]
    hidden: Tensor = net(ids, positions, context, mask)
    return hidden.view(documents, blocks, length, -1)


def mixed_states(net: ParallelBackbone, prev_ids: Tensor, hidden: Tensor) -> Tensor | None:
    """Return the Markov head's ``z`` at every position, ``[..., block, rank]``; None without such a head."""
    head = net.markov_head
    if head is None:
        return None
    if not head.recurrent:
        return head.mix(prev_ids, hidden, None)[0]
    out, state = [], None
    for k in range(hidden.shape[-2]):
        z, state = head.mix(prev_ids[..., k], hidden[..., k, :], state)
        out.append(z)
    return torch.stack(out, -2)
