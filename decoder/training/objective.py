"""The seam between the training loop and what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from decoder.losses import LossWeights
from decoder.training.batches import Batch


class Objective(Protocol):
    """A drafter and its loss.

    ``kind`` is the drafter's name in reports; ``feature_layers`` the target layers whose outputs `Batch.features`
    holds, in this order (empty: none are read from disk).
    """

    kind: str
    feature_layers: tuple[int, ...]

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return what is trained, by name, always in the same order; float32."""
        ...

    def loss(self, batch: Batch, rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a step, a scalar to go backward from, and what is reported of it.

        Chance (which anchors) comes from ``rng`` alone, which belongs to the step. Of the numbers reported,
        ``positions`` is a count: draft positions that were judged. The others are means over them.
        """
        ...

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the drafter as a folder that `decoder.checkpoint.load_drafter` reads; it must not exist before."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """What a new drafter is to look like, and how it is judged; a drafter leaves alone what it has no use for.

    ``layers``, ``ffn``: depth and width of the MLPs. ``length``: draft tokens a round that are trained, the block of a
    parallel drafter, the unrolled steps of a chained one. ``draft_vocab``: tokens it can draft; None: all. ``anchors``:
    blocks a document and step. ``start``: what the layers begin as, chance or the target's own last layers.
    """

    drafter: str
    layers: int
    ffn: int
    length: int
    feature_layers: tuple[int, ...]
    draft_vocab: int | None = None
    markov_rank: int = 0
    head: Literal["vanilla", "gated", "rnn"] = "vanilla"
    anchors: int = 32
    start: Literal["seed", "target"] = "seed"
    weights: LossWeights = field(default_factory=LossWeights)
