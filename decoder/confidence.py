"""Confidence of a draft token: the chance that it is accepted, given that the tokens before it were."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from decoder.config import DraftConfig
from decoder.sampling import working_dtype

#: Logits beyond this are as sure as float64 can tell apart from certainty after a product of a block.
SURE = 30.0


class ConfidenceHead(nn.Module):
    """``w . [h_k; W1[x_(k-1)]] + b``: reads the position's state and the token before it, never token k itself."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: Tensor, prev_embedding: Tensor | None) -> Tensor:
        """Return the confidence logit of positions, ``[...]``, from ``hidden`` ``[..., hidden_size]``."""
        if self.with_markov:
            if prev_embedding is None:
                raise ValueError("this confidence head reads the Markov embedding of the previous token")
            hidden = torch.cat([hidden, prev_embedding], -1)
        out: Tensor = self.proj(hidden).squeeze(-1)
        return out


def top_probability_logit(logits: Tensor) -> float:
    """Return the log odds of the drafter's most likely token, from its raw ``logits`` ``[vocabulary]``.

    The confidence of drafters without a head. It reads the distribution before token k is drawn, at temperature 1
    whatever the request's, and so not token k; the probability of the token drawn would, and no load-aware policy is
    lossless with that.
    """
    probs = torch.softmax(logits.to(working_dtype(logits.dtype)), -1)
    top = probs.max()
    rest = probs.sum() - top
    return float(torch.log(top / rest).clamp(-SURE, SURE)) if float(rest) > 0 else SURE


def confidence_of(logits: ArrayLike, temperatures: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Return confidences from their logits ``[..., draft tokens]``, divided by each position's temperature where given.

    The sigmoid runs in float32, as the published code's does.
    """
    scaled = torch.from_numpy(np.asarray(logits, dtype=np.float32))
    if temperatures is not None:
        if len(temperatures) < scaled.shape[-1]:
            raise ValueError(f"{len(temperatures)} temperatures for {scaled.shape[-1]} positions")
        scaled = scaled / torch.tensor(temperatures[: scaled.shape[-1]], dtype=torch.float32)
    return np.asarray(torch.sigmoid(scaled).numpy(), dtype=np.float64)
