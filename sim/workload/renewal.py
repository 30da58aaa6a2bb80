"""Arrivals whose gaps are drawn one after the other, independent and alike: Poisson and Gamma."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Gt

from sim.units import Rate
from sim.workload.base import ARRIVALS, Floats
from sim.workload.size import check_expected_requests
from sim.workload.unit_rate import draw_unit_points

_BLOCK = 8192


@ARRIVALS.register("poisson")
@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Independent users in large number: exponential gaps, none of them clipped."""

    kind: Literal["poisson"] = "poisson"
    rate_per_s: Rate

    def expected_requests(self, horizon_s: float) -> float:
        """Return the mean number of arrivals in [0, horizon_s)."""
        return self.rate_per_s * horizon_s

    def draw_arrivals_s(self, horizon_s: float, *, rng: np.random.Generator) -> Floats:
        """Draw arrival times in [0, horizon_s), ascending."""
        arrived_s = draw_unit_points(self.rate_per_s * horizon_s, rng=rng) / self.rate_per_s
        return arrived_s[arrived_s < horizon_s]


@ARRIVALS.register("gamma")
@dataclass(frozen=True, slots=True, kw_only=True)
class Gamma:
    """Gaps of a Gamma law: ``cv`` above 1 is burstier than Poisson, below 1 more even.

    ``cv`` is the standard deviation of a gap over its mean.
    """

    kind: Literal["gamma"] = "gamma"
    rate_per_s: Rate
    cv: Annotated[float, Gt(0)]

    def __post_init__(self) -> None:
        """Refuse what the Gamma generator cannot draw: shapes so small that gaps underflow to 0, or absurdly even."""
        if not 0.01 <= self.cv <= 30:
            raise ValueError(f"cv: must be from 0.01 to 30 (got {self.cv:g})")

    def expected_requests(self, horizon_s: float) -> float:
        """Return the mean number of arrivals in [0, horizon_s)."""
        return self.rate_per_s * horizon_s

    def draw_arrivals_s(self, horizon_s: float, *, rng: np.random.Generator) -> Floats:
        """Draw arrival times in [0, horizon_s), ascending.

        The run begins at a random moment of a process that has been going on for ever. A process begun
        with a fresh gap would offer (cv² − 1)/2 requests too many over any horizon: 12 at cv 5.
        """
        check_expected_requests(self.expected_requests(horizon_s))
        shape, scale_s = self.cv**-2, self.cv**2 / self.rate_per_s
        # A random moment falls into a gap with a chance proportional to its length, and uniformly within it.
        last = float(rng.gamma(shape + 1) * scale_s * rng.random())
        blocks = [np.array([last])]
        while last < horizon_s:
            block = last + np.cumsum(rng.standard_gamma(shape, _BLOCK) * scale_s)
            blocks.append(block)
            last = float(block[-1])
        arrived_s = np.concatenate(blocks)
        return arrived_s[arrived_s < horizon_s]
