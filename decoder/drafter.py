"""The seam between the decoding loop and a draft model.

A `Drafter` is a model, shared by all requests. Its `start` gives what follows one request's text: a `RequestDrafter`,
which holds a cache of the committed tokens and nothing about any other request.

A round, as the loop drives it::

    logits = drafting.propose(anchor_id, length, sampler)     # sampler.token_ids, sampler.probs
    ...                                                       # decide, verify, judge
    drafting.advance(committed_ids, features, next_anchor_id)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from decoder.errors import Fault, RequestError
from decoder.sampling import DraftSampler
from sim.verify.base import Reads

__all__ = ["Drafter", "Reads", "RequestDrafter", "check_length"]


class RequestDrafter(Protocol):
    """A drafter's view of one request."""

    @property
    def tokens(self) -> int:
        """Committed tokens that are cached: all those before the anchor."""
        ...

    def advance(self, token_ids: Sequence[int], features: Tensor, next_id: int) -> None:
        """Take in tokens that were committed.

        Parameters
        ----------
        token_ids : sequence of int
            The tokens after those taken in before.
        features : tensor [tokens, layers * hidden_size]
            The target's hidden states at these tokens, concatenated over the drafter's ``feature_layers``.
        next_id : int
            The token that follows them: of the prompt, or the next anchor.
        """
        ...

    def propose(self, anchor_id: int, length: int, sampler: DraftSampler) -> list[float]:
        """Draw ``length`` draft tokens from ``sampler``; return the logit of each one's confidence.

        Committed rows stay as they were; `tokens` does not move.
        """
        ...

    def fork(self, tokens: int) -> RequestDrafter:
        """Return a drafter of its own for another text that shares the first ``tokens`` tokens and the one after."""
        ...


class Drafter(Protocol):
    """A draft model.

    ``kind`` is its name in reports; ``feature_layers`` the target layers it reads (-1: the embedding's output).
    ``trained_length``: draft tokens a round it was trained for. A block drafter always drafts exactly these, since a
    shorter block has other logits, and cannot draft more; a ``chained`` one drafts as many as asked.
    ``confidence_reads``: what its confidence of token k depends on.
    """

    kind: str
    chained: bool
    trained_length: int
    feature_layers: tuple[int, ...]
    confidence_reads: Reads

    def start(self) -> RequestDrafter:
        """Return the drafter of a new request, with an empty cache."""
        ...


def check_length(drafter: Drafter, length: int) -> None:
    """Raise `RequestError` where a drafter cannot draft ``length`` tokens a round."""
    if length > drafter.trained_length and not drafter.chained:
        raise RequestError(
            Fault(
                f"{length} draft tokens a round were asked of a {drafter.kind} drafter that was trained on blocks of "
                f"{drafter.trained_length}; allowed: 0 to {drafter.trained_length}",
                key="draft_length",
            )
        )
