"""Whether speculative text is the target's own, and if not, whether rounding can be the reason.

Greedy decoding emits the largest logit. A pass over eight tokens rounds differently from a pass over one, so in reduced
precision two nearly equal logits may change places; everything after that is another text. Such a first difference is
excused only where the gap between the two largest logits is below a stated bound, and it is reported either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: Largest gap between the top two logits that rounding is granted, by dtype of the models.
GAP_BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two outputs part: ``token`` counts from 0 in the output; ``gap`` is the target's, between its top two."""

    token: int
    expected_id: int | None
    found_id: int | None
    gap: float
    excused: bool


def first_difference(
    found_ids: Sequence[int], expected_ids: Sequence[int], gaps: Sequence[float], bound: float
) -> Difference | None:
    """Return where ``found_ids`` first differs from ``expected_ids``, the target's own greedy output; None: nowhere.

    ``gaps`` belong to ``expected_ids``. An output that is shorter than the other differs where it ends, and that is
    never excused: no gap explains a missing token.
    """
    for token, (found, expected) in enumerate(zip(found_ids, expected_ids, strict=False)):
        if found != expected:
            return Difference(token, expected, found, gaps[token], gaps[token] < bound)
    if len(found_ids) == len(expected_ids):
        return None
    token = min(len(found_ids), len(expected_ids))
    expected_id = expected_ids[token] if token < len(expected_ids) else None
    found_id = found_ids[token] if token < len(found_ids) else None
    return Difference(token, expected_id, found_id, float("inf"), False)
