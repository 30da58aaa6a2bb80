"""Markov heads: a cheap sequential part that lets a draft token see the one before it.

Each adds a bias ``W2 z`` to the backbone's logits, where ``z`` has the head's rank and depends on the previous token's
embedding ``e = W1[x]``:

=========  =====================================================================================
vanilla    z = e
gated      z = sigmoid(G [h; e] + g) * e, with h the backbone's state at this position
rnn        z = tanh(o), where [f; c; o] = J [s; e; h] + j and s becomes f' s + (1 - f') tanh(c), f' = sigmoid(f)
=========  =====================================================================================

The recurrent state ``s`` starts at zero in every block.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from decoder.config import DraftConfig


class MarkovHead(Protocol):
    """A head as the drafter uses it, one position after another."""

    markov_w1: nn.Embedding
    markov_w2: nn.Linear
    recurrent: bool

    def mix(self, prev_ids: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return ``z`` of a position, ``[..., rank]``, and the state for the next one; see `step`.

        A head that is not ``recurrent`` takes all positions at once.
        """
        ...

    def step(self, prev_ids: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the logit bias of a position, ``W2 z``, and the state for the next one.

        Parameters
        ----------
        prev_ids : tensor [...]
            Token before the position (the anchor before the first).
        hidden : tensor [..., hidden_size]
            The backbone's state at the position, after the final norm.
        state : tensor [..., rank], optional
            None at the first position of a block.

        Returns
        -------
        tensor [..., draft vocabulary], and the next state (None for heads without one)
        """
        ...


class _Embedded(nn.Module):
    recurrent = False

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        # Any token can stand before a position, whatever can be drafted there.
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocabulary, bias=False)

    def mix(self, prev_ids: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return ``z``; see `MarkovHead`."""
        return self.markov_w1(prev_ids), None

    def step(self, prev_ids: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the bias; see `MarkovHead`."""
        z, after = self.mix(prev_ids, hidden, state)
        return self.markov_w2(z), after


class VanillaMarkovHead(_Embedded):
    """The previous token alone."""


class GatedMarkovHead(_Embedded):
    """The previous token, weighed by the position's state."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def gate(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Return the gate, ``[..., rank]`` in (0, 1)."""
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], -1)))

    def mix(self, prev_ids: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return ``z``; see `MarkovHead`."""
        embedding = self.markov_w1(prev_ids)
        return self.gate(embedding, hidden) * embedding, None


class RnnMarkovHead(_Embedded):
    """All tokens of the block so far, in a recurrent state."""

    recurrent = True

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(config.hidden_size + 2 * config.markov_rank, 3 * config.markov_rank)

    def mix(self, prev_ids: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return ``z`` and the state after this position; see `MarkovHead`."""
        embedding = self.markov_w1(prev_ids)
        before = torch.zeros_like(embedding) if state is None else state
        keep, candidate, output = self.joint_proj(torch.cat([before, embedding, hidden], -1)).chunk(3, -1)
        kept = torch.sigmoid(keep)
        after = kept * before + (1 - kept) * torch.tanh(candidate)
        return torch.tanh(output), after


def make_markov_head(config: DraftConfig) -> VanillaMarkovHead | GatedMarkovHead | RnnMarkovHead | None:
    """Return the head that a config asks for; None at rank 0."""
    if config.markov_rank == 0:
        return None
    if config.markov_head_type == "gated":
        return GatedMarkovHead(config)
    return RnnMarkovHead(config) if config.markov_head_type == "rnn" else VanillaMarkovHead(config)
