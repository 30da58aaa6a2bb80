"""A reduced draft vocabulary: the drafter scores some of the target's tokens, and never proposes another.

Draft ids count the tokens that can be drafted. The map is in the checkpoint, as published EAGLE-3 drafters have it:

=======  ===========================  ========================================================
tensor   shape, dtype                 meaning
=======  ===========================  ========================================================
``d2t``  ``[draft vocabulary]`` int64  offset: target id = draft id + ``d2t[draft id]``
``t2d``  ``[vocabulary]`` bool         whether a target token can be drafted
=======  ===========================  ========================================================
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from decoder.config import DraftConfig
from decoder.errors import Fault

MAP = ("d2t", "t2d")


def register_map(net: nn.Module, config: DraftConfig) -> None:
    """Give a draft model the buffers of its map, where it has one; at first it holds the lowest token ids."""
    if config.draft_vocab_size is not None:
        net.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        net.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)


def set_draft_ids(net: nn.Module, token_ids: Tensor) -> None:
    """Write the target ids of all draft ids, ``[draft vocabulary]``, ascending, into the map of a draft model."""
    d2t, t2d = net.get_buffer("d2t"), net.get_buffer("t2d")
    token_ids = token_ids.to(d2t.device)
    d2t.copy_(token_ids - torch.arange(len(d2t), device=d2t.device))
    t2d.zero_()[token_ids] = True


def draft_ids(net: object) -> Tensor | None:
    """Return the target id of each draft id, ``[draft vocabulary]``; None where a net scores the whole vocabulary."""
    d2t: Tensor | None = getattr(net, "d2t", None)
    return None if d2t is None else target_ids(d2t)


def target_ids(d2t: Tensor) -> Tensor:
    """Return the target id of each draft id from the offsets in a checkpoint."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def rows_of(tensor: Tensor, token_ids: Tensor | None) -> Tensor:
    """Return the rows of the target's head ``[vocabulary, ...]`` that a draft vocabulary has."""
    return tensor if token_ids is None else tensor[token_ids.to(tensor.device)]


def label_ids(token_ids: Tensor | None, vocabulary: int) -> Tensor:
    """Return the draft id of each target token, ``[vocabulary]``; -1 where it cannot be drafted."""
    if token_ids is None:
        return torch.arange(vocabulary)
    labels = token_ids.new_full((vocabulary,), -1)
    labels[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
    return labels


def map_faults(tensors: Mapping[str, Tensor], vocabulary: int, file: str) -> list[Fault]:
    """Return what is wrong with a map of the right shapes: another dtype, ids outside, twice, or unlike ``t2d``."""
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        return [
            Fault(f"expected dtype {wanted}; got {tensors[key].dtype}".replace("torch.", ""), file, key=key)
            for key, wanted in (("d2t", torch.int64), ("t2d", torch.bool))
            if tensors[key].dtype != wanted
        ]
    ids = target_ids(d2t)
    outside = (ids < 0) | (ids >= vocabulary)
    if bool(outside.any()):
        at = int(outside.nonzero()[0])
        return [
            Fault(f"draft id {at} becomes {int(ids[at])}; the target has tokens 0 to {vocabulary - 1}", file, key="d2t")
        ]
    if len(set(ids.tolist())) < len(ids):
        return [Fault("two draft ids become the same token", file, key="d2t")]
    found = torch.zeros_like(t2d)
    found[ids] = True
    if not torch.equal(found, t2d):
        at = int((found != t2d).nonzero()[0])
        return [Fault(f"disagrees with d2t about token {at}", file, key="t2d")]
    return []
