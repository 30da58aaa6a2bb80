"""From logits to the one distribution that is both sampled from and used in the acceptance test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder.chance import Luck
from decoder.errors import Fault, NotFiniteError, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request wants its tokens drawn; the defaults draw from the model's own distribution.

    Applied in this order: repetition penalty, temperature, top-k, top-p, min-p. ``temperature`` 0 is greedy, a
    one-hot on the largest logit (the lowest id where several are largest). ``top_k`` 0, ``top_p`` 1, ``min_p`` 0
    and ``repetition_penalty`` 1 change nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        faults = []
        for key, allowed, holds in (
            ("temperature", "a finite number of at least 0", math.isfinite(self.temperature) and self.temperature >= 0),
            ("top_k", "a whole number of at least 0 (0: all tokens)", self.top_k >= 0 and self.top_k % 1 == 0),
            ("top_p", "above 0 and at most 1", 0 < self.top_p <= 1),
            ("min_p", "at least 0 and below 1", 0 <= self.min_p < 1),
            (
                "repetition_penalty",
                "a finite number above 0",
                math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            ),
        ):
            if not holds:
                faults.append(Fault(f"expected {allowed}; got {getattr(self, key)}", key=key))
        if faults:
            raise RequestError(*faults)

    @property
    def greedy(self) -> bool:
        """Whether the same prompt always yields the same text: temperature 0, or a single candidate."""
        return self.temperature == 0 or self.top_k == 1


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of distributions: float64 stays, everything else becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_finite(logits: Tensor, what: str) -> None:
    """Raise `NotFiniteError` unless every row holds a distribution; -inf marks a token as impossible."""
    bad = torch.isnan(logits).any(-1) | ~torch.isfinite(logits.amax(-1))
    if bool(bad.any()):
        row = int(torch.nonzero(bad.reshape(-1))[0])
        raise NotFiniteError(f"{what}: logits are not finite in row {row} of {bad.numel()}")


def largest(logits: Tensor) -> Tensor:
    """Return the id of the largest logit in each row, the lowest one of a tie (``argmax`` promises none)."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    ties = logits == logits.amax(-1, keepdim=True)
    return torch.where(ties, ids, logits.shape[-1]).amin(-1)


def one_hot(ids: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Return the distribution that is certain of ``ids`` ``[rows]``, ``[rows, vocabulary]``."""
    return torch.nn.functional.one_hot(ids, vocabulary).to(dtype)


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens that were ``seen`` (bool, shape of ``logits``) less likely: divide above 0, multiply below."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def shape(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Return the distribution that a request draws from.

    Parameters
    ----------
    logits : tensor [rows, vocabulary]
        Raw; any floating dtype.
    sampling : Sampling
    seen : tensor [rows, vocabulary], bool, optional
        Tokens that the repetition penalty applies to; needed where the penalty is not 1.

    Returns
    -------
    tensor [rows, vocabulary], float32 (float64 for float64 logits)
        Each row sums to 1. A token at a cut-off stays in when its id is lower than its equals'.
    """
    x = logits.to(working_dtype(logits.dtype))
    if sampling.repetition_penalty != 1:
        if seen is None:
            raise ValueError("a repetition penalty needs the tokens that were seen")
        x = penalize(x, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return one_hot(largest(x), x.shape[-1], x.dtype)
    x = x / sampling.temperature
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
        ordered, order = torch.sort(x, dim=-1, descending=True, stable=True)
        keep = torch.ones_like(ordered, dtype=torch.bool)
        if sampling.top_k:
            keep[..., sampling.top_k :] = False
        if sampling.top_p < 1:
            probs = torch.softmax(ordered.masked_fill(~keep, -math.inf), -1)
            keep &= probs.cumsum(-1) - probs < sampling.top_p
        if sampling.min_p > 0:
            keep &= ordered - ordered[..., :1] >= math.log(sampling.min_p)
        keep[..., 0] = True
        x = x.masked_fill(~torch.zeros_like(keep).scatter(-1, order, keep), -math.inf)
    return torch.softmax(x, -1)


class Shaper:
    """One request's way from logits to distributions: its sampling, and the tokens its penalty has seen.

    Both models of a round use it, so that draft and target are shaped alike. The set of seen tokens grows only by
    `commit`: a rejected draft token leaves no trace.
    """

    def __init__(self, sampling: Sampling, vocabulary: int, device: torch.device) -> None:
        self.sampling = sampling
        self.vocabulary = vocabulary
        self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Count tokens of the prompt or the output as seen."""
        if token_ids and self.sampling.repetition_penalty != 1:
            self._seen[list(token_ids)] = True

    def probs(
        self, logits: Tensor, drafts: Sequence[int] = (), what: str = "target", token_ids: Tensor | None = None
    ) -> Tensor:
        """Shape ``logits`` where row k follows the first k of ``drafts``; return ``[rows, vocabulary]``.

        With fewer rows than that, they are the last ones: a single row follows all ``drafts``. ``token_ids``: the
        token of each logit, where these are of a reduced vocabulary; all other tokens are impossible.
        """
        check_finite(logits, what)
        seen = None
        if self.sampling.repetition_penalty != 1:
            rows = logits.shape[0]
            seen = self._seen.expand(rows, -1).clone()
            for row in range(rows):
                count = len(drafts) - rows + 1 + row
                if count > 0:
                    seen[row, list(drafts[:count])] = True
            seen = seen if token_ids is None else seen[:, token_ids]
        probs = shape(logits, self.sampling, seen)
        if token_ids is None:
            return probs
        return probs.new_zeros(probs.shape[0], self.vocabulary).index_copy_(1, token_ids, probs)


class DraftSampler:
    """Draws one block of draft tokens and keeps the very distributions it drew them from.

    The acceptance test reads ``probs`` from here, so it cannot meet another distribution than the one sampled.

    Parameters
    ----------
    shaper : Shaper
    luck : Luck
    anchor_position : int
        Where the block's anchor sits in the text.
    greedy : bool
        Propose the most likely token at any temperature; its distribution is then a one-hot, and is tested as such.
    """

    def __init__(self, shaper: Shaper, luck: Luck, anchor_position: int, greedy: bool = False) -> None:
        self._shaper = shaper
        self._luck = luck
        self._anchor_position = anchor_position
        self._greedy = greedy
        self.token_ids: list[int] = []
        self._rows: list[Tensor] = []

    def draw(self, logits: Tensor, token_ids: Tensor | None = None) -> int:
        """Draw the next draft token from the drafter's ``logits`` ``[vocabulary]``.

        ``token_ids``: the target token of each logit, where the draft vocabulary is reduced.
        """
        row = self._shaper.probs(logits[None], self.token_ids, "drafter", token_ids)
        if self._greedy:
            row = one_hot(largest(row), row.shape[-1], row.dtype)
        token = self._luck.draft(row[0], self._anchor_position, len(self.token_ids))
        self.token_ids.append(token)
        self._rows.append(row)
        return token

    @property
    def probs(self) -> Tensor:
        """Distributions of the tokens drawn, ``[draft tokens, vocabulary]``."""
        return torch.cat(self._rows)
