"""Training a chain (EAGLE-3, MTP): unrolled, each step reading what the step before it left.

From an anchor at row a of a document the drafter is run as it drafts: its committed rows hold the target's features of
the tokens before the anchor, and its own rows after them hold its own states, step k beside the text's token a + k
(teacher forcing). Step k is judged where the target predicted the token after a + k, and gradients flow back through
all steps. Chains of one document share its committed rows and do not look at each other. With a length of one nothing
is unrolled, which is how MTP heads are published.

Source: EAGLE-3, section 3.1 ("training-time test"); DeepSeek-V3 report, section 2.2.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from decoder.checkpoint import check_target, load_net, make_net, save_net
from decoder.config import EAGLE3, MTP, SHAREABLE, DraftConfig
from decoder.eagle3 import Eagle3Net
from decoder.errors import Fault, InputError
from decoder.kv_cache import KvCache
from decoder.losses import LossWeights, judge, position_weights
from decoder.mtp import MtpNet
from decoder.target import HfTarget
from decoder.training.batches import Batch, TrainingText
from decoder.training.block import draw_anchors
from decoder.training.objective import DraftShape
from decoder.training.start import copy_target_layers, pass_last_feature, start_net, target_dimensions
from decoder.vocabulary import draft_ids, label_ids, rows_of


class ChainObjective:
    """A chained drafter on its way; see `Objective`.

    Parameters
    ----------
    net : Eagle3Net or MtpNet
        float32; its embedding and head stay as they are. Its config's ``ttt_length`` steps are unrolled.
    target_head : tensor [vocabulary, hidden_size]
    anchors : int
        Chains a document, or as many as it has room for.
    weights : LossWeights
        A chain has no confidence head; that weight is not used.
    scale : tensor [layers * hidden_size], optional
        EAGLE-3: the size of each feature, as in `BlockObjective`. An MTP head reads through a norm of its own.
    """

    def __init__(
        self,
        net: Eagle3Net | MtpNet,
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
        token_ids = draft_ids(net)
        device = net.norm.weight.device
        self._labels = label_ids(token_ids, net.config.vocab_size).to(device)
        self._target_head = rows_of(target_head, token_ids).to(device)
        self._positions = position_weights(weights.positions, net.config.ttt_length).to(device)
        self._scale = None if scale is None else scale.to(device)
        if isinstance(net, Eagle3Net) and self._scale is not None:
            with torch.no_grad():
                net.fc.weight.mul_(self._scale)
        net.train().requires_grad_(True)
        net.embed_tokens.requires_grad_(False)
        net.lm_head.requires_grad_(False)

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return what is trained: everything but embedding and head."""
        return {name: value for name, value in self.net.named_parameters() if value.requires_grad}

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the drafter, which reads features as they are; see `Objective`."""
        net = copy.deepcopy(self.net)
        if isinstance(net, Eagle3Net) and self._scale is not None:
            with torch.no_grad():
                net.fc.weight.div_(self._scale)
        save_net(net, folder, dtype)

    def loss(self, batch: Batch, rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        """Return the loss over random chains; see `Objective`."""
        anchors, kept = draw_anchors(batch, self.anchors, rng)
        return self.loss_at(batch, anchors, kept)

    def loss_at(self, batch: Batch, anchors: Tensor, kept: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return the loss over the chains at ``anchors`` ``[documents, chains]`` that are ``kept``."""
        length = self.net.config.ttt_length
        features = batch.features if self._scale is None else batch.features / self._scale
        states, document, row, step = [], [], [], []
        for index in range(len(anchors)):
            mine = anchors[index][kept[index]]
            if not len(mine):
                continue
            end = int(batch.rows[index])
            rows = features[index, :end], batch.token_ids[index, :end]
            for k, state in enumerate(chain_states(self.net, *rows, mine, length)):
                judged = mine + k < end
                states.append(state[judged])
                row.append(mine[judged] + k)
                document.append(torch.full_like(row[-1], index))
                step.append(torch.full_like(row[-1], k))
        at = torch.cat(document), torch.cat(row)
        steps = torch.cat(step)
        weights = self._positions[steps]
        found = judge(
            self.net.norm(torch.cat(states)),
            self.net.lm_head.weight,
            batch.final[at],
            self._target_head,
            batch.log_norms[at],
            self._labels[batch.next_ids[at]],
            self.weights.ce * weights,
            self.weights.tv * weights,
            ce_of=self.weights.ce_of,
        )
        total = weights.sum()
        loss = found.loss / total
        # Survival of a step needs the steps before it: chains side by side, what was not judged is 0.
        accept = found.accept.new_zeros(*batch.answer.shape, length)
        accept[at[0], at[1] - steps, steps] = found.accept
        counts = torch.bincount(steps, minlength=length)
        metrics = {
            "loss": float(loss.detach()),
            "ce": float((weights * found.ce).sum() / total),
            "tv": float((weights * 2 * (1 - found.accept)).sum() / total),
            "accepted_length": 1 + float(accept.cumprod(-1).sum() / counts[0]),
            **{f"accept@{k}": float(accept[..., k].sum() / n) for k, n in enumerate(counts.tolist()) if n},
            "positions": float(len(steps)),
        }
        return loss, metrics


def chain_states(
    net: Eagle3Net | MtpNet, features: Tensor, token_ids: Tensor, anchors: Tensor, length: int
) -> list[Tensor]:
    """Return the states of each step of the chains at ``anchors`` in one document, ``length`` of ``[chains, hidden]``.

    Parameters
    ----------
    features : tensor [rows, layers * hidden_size]
    token_ids : tensor [rows]
    anchors : tensor [chains]
        Rows of the anchors, ascending, each at least 1. Steps past the last row are of no use.
    """
    before, last = int(anchors[-1]), len(token_ids) - 1
    cache = KvCache(net.config.num_hidden_layers)
    positions = torch.arange(before, device=anchors.device)
    # Row a - 1 holds the anchor at a.
    state = net.rows(token_ids[1 : before + 1], net.fuse(features[:before]), positions, cache, wanted=anchors - 1)
    states = [state]
    # A chain sees the rows up to its anchor, and its own.
    sees = positions < anchors[:, None]
    own = torch.eye(len(anchors), dtype=torch.bool, device=anchors.device)
    for k in range(1, length):
        sees = torch.cat([sees, own], 1)
        state = net.rows(token_ids[(anchors + k).clamp_max(last)], state, anchors + k - 1, cache, sees)
        states.append(state)
    return states


def make_chain(shape: DraftShape, target: HfTarget, text: TrainingText, init: Path | None, seed: int) -> ChainObjective:
    """Return a new EAGLE-3 or MTP drafter to be trained, or the one in the folder ``init``.

    Raises `InputError` where shape and target, or shape and ``init``, do not fit.
    """
    if init is not None:
        net = load_net(init, target, device=target.device)
        if not isinstance(net, Eagle3Net | MtpNet) or net.config.kind != shape.drafter:
            found = net.config.kind
            raise InputError(Fault(f"holds a drafter of kind {found}; --drafter says {shape.drafter}", str(init)))
        text.check_layers(net.config.target_layer_ids)
        return ChainObjective(net, target.lm_head, shape.anchors, shape.weights, _scale(net, text))
    if shape.drafter == "eagle3" and shape.layers != 1:
        raise InputError(Fault(f"EAGLE-3 has one layer (got {shape.layers})", key="--layers-of-draft"))
    config = DraftConfig(
        architecture=EAGLE3 if shape.drafter == "eagle3" else MTP,
        **target_dimensions(target),
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        target_layer_ids=shape.feature_layers,
        ttt_length=shape.length,
        draft_vocab_size=shape.draft_vocab,
        shared_with_target=SHAREABLE,
    )
    check_target(config, target, "--drafter")
    text.check_layers(shape.feature_layers)
    net = make_net(config)
    assert isinstance(net, Eagle3Net | MtpNet)
    start_net(net, target, text, seed)
    scale = text.feature_scale(shape.feature_layers)
    if shape.start == "target":
        copy_target_layers(net, target, text)
        if isinstance(net, Eagle3Net):
            pass_last_feature(net.fc, scale)
    with torch.no_grad():
        if isinstance(net, Eagle3Net):
            net.fc.weight.div_(scale)  # so that all features weigh alike
        else:
            net.hnorm.weight.copy_(scale.square().mean().sqrt() / scale)  # the same, after the norm
    return ChainObjective(net.to(target.device), target.lm_head, shape.anchors, shape.weights, _scale(net, text))


def _scale(net: Eagle3Net | MtpNet, text: TrainingText) -> Tensor | None:
    return text.feature_scale(net.config.target_layer_ids) if isinstance(net, Eagle3Net) else None
