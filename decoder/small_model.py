"""Classic two-model speculation: a smaller language model of the same vocabulary drafts token after token."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from decoder.confidence import top_probability_logit
from decoder.drafter import Reads
from decoder.errors import CheckpointError, Fault
from decoder.sampling import DraftSampler
from decoder.target import Target, TargetCache


class SmallModelDrafter:
    """A language model that drafts for a larger one; it reads nothing of the target but its tokens."""

    kind = "small_model"
    chained = True
    feature_layers: tuple[int, ...] = ()
    #: The top probability, as for every drafter without a confidence head.
    confidence_reads: Reads = "past"

    def __init__(self, model: Target, trained_length: int = 4) -> None:
        self.model = model
        #: Nothing was trained for a length; what a policy gets that asks for the whole block.
        self.trained_length = trained_length

    def check_target(self, target: Target) -> None:
        """Raise `CheckpointError` where the two models do not share a vocabulary."""
        if self.model.vocab_size != target.vocab_size:
            raise CheckpointError(
                Fault(
                    f"the small model has {self.model.vocab_size} tokens, the target {target.vocab_size}; they must "
                    "share one vocabulary",
                    key="vocab_size",
                )
            )

    def start(self) -> SmallModelRequestDrafter:
        """Return the drafter of a new request."""
        return SmallModelRequestDrafter(self, self.model.new_cache(), 0)


class SmallModelRequestDrafter:
    """The small model's cache of one request.

    ===========  ================================================================
    cache rows   committed tokens, then tokens of the last block (``_ahead``)
    ``tokens``   committed rows alone
    ===========  ================================================================

    Rows of draft tokens that were accepted are kept by `advance`; the rest is cut there.
    """

    def __init__(self, drafter: SmallModelDrafter, cache: TargetCache, tokens: int) -> None:
        self.drafter = drafter
        self.cache = cache
        self._tokens = tokens
        self._ahead: list[int] = []

    @property
    def tokens(self) -> int:
        """Committed tokens that are cached."""
        return self._tokens

    def advance(self, token_ids: Sequence[int], features: Tensor, next_id: int) -> None:
        """Keep the rows that were drafted right and append the others."""
        kept = 0
        while kept < min(len(self._ahead), len(token_ids)) and self._ahead[kept] == token_ids[kept]:
            kept += 1
        self.cache.crop(self._tokens + kept)
        if kept < len(token_ids):
            self.drafter.model.forward(token_ids[kept:], self.cache)
        self._tokens += len(token_ids)
        self._ahead = []

    def propose(self, anchor_id: int, length: int, sampler: DraftSampler) -> list[float]:
        """Draft ``length`` tokens."""
        self.cache.crop(self._tokens)
        self._ahead = []
        confidence_logits = []
        token = anchor_id
        for _ in range(length):
            logits = self.drafter.model.forward([token], self.cache, logit_rows=1).logits[0]
            self._ahead.append(token)
            confidence_logits.append(top_probability_logit(logits))
            token = sampler.draw(logits)
        return confidence_logits

    def fork(self, tokens: int) -> SmallModelRequestDrafter:
        """Return a drafter for a text that shares the first ``tokens`` tokens."""
        return SmallModelRequestDrafter(self.drafter, self.cache.fork(tokens), tokens)
