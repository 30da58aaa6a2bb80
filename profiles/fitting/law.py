"""The law of a step as all fits give it: a cost for each thing that a step holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiles.fitting.least_squares import Floats

#: The costs, in order of precedence: what cannot be told apart is inside one that comes before. ``floor`` is paid once
#: a step, ``draft`` once a step that drafts, ``admission`` once a request that is let in, the others by their number.
COSTS = (
    "floor",
    "batch_token",
    "draft",
    "draft_request",
    "request",
    "context_token",
    "prompt_token",
    "admission",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Costs of a step, and how far they are from what they were fitted to.

    ``cost_s``: seconds of each of `COSTS`, 0 where it was not found. ``error_s``: standard errors, NaN where not known.
    ``inside``: costs that could not be told apart, with those that they hide in. On top come ``saturating_s (1 -
    exp(-batch tokens / saturation_tokens))``, where experts are still being loaded, or ``bend_token_s`` for each batch
    token past ``bend_tokens``, where a step stops being bound by reading the weights. ``misses``: by row of the data,
    ``predicted / observed - 1``. ``batch_tokens``: smallest and largest batch that was seen.
    """

    cost_s: dict[str, float]
    error_s: dict[str, float]
    inside: dict[str, tuple[str, ...]]
    misses: Floats
    batch_tokens: tuple[int, int]
    saturating_s: float = 0.0
    saturation_tokens: float = 1.0
    bend_token_s: float = 0.0
    bend_tokens: float = 0.0

    @property
    def rms(self) -> float:
        """Root mean square of the relative residuals."""
        return float(np.sqrt(np.mean(self.misses**2)))

    @property
    def worst(self) -> float:
        """Largest relative residual, as a size."""
        return float(np.abs(self.misses).max())
