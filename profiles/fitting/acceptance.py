"""Survival by position from counts, and from mean accepted lengths where those are differences of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from profiles.errors import Fault, ProfileError
from profiles.measurements.points import AcceptanceCounts

Floats = NDArray[np.float64]

#: What a run with a smaller k did: a chain drafted k tokens; a block drafter drafted its whole block and the target
#: verified the first k; a block drafter drafted a shorter block, whose tokens are others.
Kind = Literal["chain", "whole_block", "short_block"]
Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class SurvivalFit:
    """``survival[k-1]``: share of rounds whose first k draft tokens were all accepted, with 95 % bounds.

    ``low``, ``high``: Wilson's interval, NaN where no counts are known. It takes rounds for independent; rounds of one
    text are not, so the truth may be further off. ``left_out``: accepted lengths by k that are no survival.
    """

    survival: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    left_out: dict[int, float]

    @property
    def accepted_length(self) -> float:
        """Tokens a round of the whole block yields, bonus included."""
        return 1.0 + sum(self.survival)


def survival_of_counts(counts: AcceptanceCounts) -> SurvivalFit:
    """Return the shares of accepted prefixes with their intervals."""
    n = counts.rounds
    shares = np.array(counts.accepted) / n
    middle = (shares + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * np.sqrt(shares * (1 - shares) / n + Z95**2 / (4 * n**2))
    return SurvivalFit(
        tuple(map(float, np.minimum.accumulate(np.minimum(shares, 1.0)))),
        tuple(map(float, np.maximum(middle - half, 0.0))),
        tuple(map(float, np.minimum(middle + half, 1.0))),
        {},
    )


def survival_of_lengths(lengths: Mapping[int, float], kind: Kind | None) -> SurvivalFit:
    """Return the differences of mean accepted lengths at k = 1, 2, ..., as far as they are survival.

    They are where the first k tokens are the same whatever k is: with a chain, and with a block that is drafted whole
    and verified in part. The first k at which a difference is negative or rises ends it: the rest is left out and
    told, not smoothed.

    Raises
    ------
    ProfileError
        Where ``kind`` is not said, or is ``short_block``: shortening a block changes all its tokens.
    """
    if kind is None:
        raise ProfileError(
            Fault(
                "accepted lengths by k: their differences are survival only if the first k tokens are the same "
                "whatever k "
                "is. Say what the runs did with --lengths-of: chain (the drafter goes token by token), whole_block "
                "(the "
                "block was drafted whole, k of it verified) or short_block (a block of k was drafted)"
            )
        )
    if kind == "short_block":
        raise ProfileError(
            Fault(
                "a block drafted for k tokens is another block for each k (every position sees the whole block), so "
                "that "
                "differences of accepted lengths are no survival; settle it with acceptance counts by position at the "
                "trained block"
            )
        )
    survival: list[float] = []
    before, last = 1.0, 1.0
    for k in sorted(lengths):
        share = lengths[k] - last
        if not 0 <= share <= before + 1e-9:
            break
        survival.append(round(share, 9))
        before, last = share, lengths[k]
    if not survival:
        raise ProfileError(Fault(f"accepted length {lengths[min(lengths)]:g} at k = 1 is no 1 + a share"))
    unknown = (float("nan"),) * len(survival)
    return SurvivalFit(tuple(survival), unknown, unknown, {k: lengths[k] for k in sorted(lengths) if k > len(survival)})
