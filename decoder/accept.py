"""The acceptance test: which draft tokens stand, and what the target says after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from decoder.chance import Luck


@dataclass(frozen=True, slots=True)
class Verdict:
    """``accepted_draft_tokens`` of a block, and the ``bonus_token`` that follows them."""

    accepted_draft_tokens: int
    bonus_token: int


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return what the target wanted and the draft did not offer, ``[vocabulary]``, normalised.

    Where rounding leaves nothing (the two are equal but for it, and a rejection has a chance of some 1e-7), the
    target's own distribution takes its place.
    """
    left = (target_probs - draft_probs).clamp_min(0)
    total = left.sum()
    return left / total if float(total) > 0 else target_probs


def judge(
    draft_ids: Sequence[int], draft_probs: Tensor, target_probs: Tensor, luck: Luck, first_position: int
) -> Verdict:
    """Test draft tokens in order; stop at the first that fails.

    Parameters
    ----------
    draft_ids : sequence [verify_length]
        Possibly empty.
    draft_probs : tensor [at least verify_length, vocabulary]
        The distribution each draft token was drawn from.
    target_probs : tensor [verify_length + 1, vocabulary]
        Row k is the target's distribution after the first k draft tokens.
    luck : Luck
    first_position : int
        Position in the text of the first draft token.

    Notes
    -----
    Token k passes with chance min(1, target / draft). The first that fails is replaced by a draw from the residual;
    if none fails, the bonus is drawn from the last target row (Leviathan et al. 2023, algorithm 1). Tokens after a
    failure are not judged, so their luck stays unused.
    """
    for k, token in enumerate(draft_ids):
        draft, target = float(draft_probs[k, token]), float(target_probs[k, token])
        if not draft > 0:
            raise ValueError(f"draft token {k} has no chance under the distribution it is said to come from")
        if not luck.accepts(min(1.0, target / draft), first_position + k):
            return Verdict(k, luck.token(residual(target_probs[k], draft_probs[k]), first_position + k))
    length = len(draft_ids)
    return Verdict(length, luck.token(target_probs[length], first_position + length))
