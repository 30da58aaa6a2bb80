"""Poisson arrivals at a rate that follows the clock: the cycle of a day, a flash peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge
from pydantic import Field

from sim.units import Duration, PositiveDuration, Rate, Share
from sim.workload.base import ARRIVALS, Floats
from sim.workload.unit_rate import draw_piecewise_s, draw_unit_points


@ARRIVALS.register("diurnal")
@dataclass(frozen=True, slots=True, kw_only=True)
class Diurnal:
    """A sine around ``mean_per_s`` that is highest at ``peak_at``, and every ``period`` before and after.

    ``amplitude`` is the swing as a share of the mean: 0.5 is a peak of 1.5 times and a trough of half the mean.
    """

    kind: Literal["diurnal"] = "diurnal"
    mean_per_s: Rate
    amplitude: Share
    period: PositiveDuration
    peak_at: Duration

    def rate_per_s(self, at_s: Floats) -> Floats:
        """Return the rate at each time."""
        phase = 2 * np.pi * (at_s - self.peak_at) / self.period
        rate: Floats = self.mean_per_s * (1 + self.amplitude * np.cos(phase))
        return rate

    def expected_requests(self, horizon_s: float) -> float:
        """Return the mean number of arrivals in [0, horizon_s)."""
        turn = 2 * np.pi / self.period
        swing = np.sin(turn * (horizon_s - self.peak_at)) + np.sin(turn * self.peak_at)
        return float(self.mean_per_s * (horizon_s + self.amplitude / turn * swing))

    def draw_arrivals_s(self, horizon_s: float, *, rng: np.random.Generator) -> Floats:
        """Draw arrival times in [0, horizon_s), ascending, by exact thinning (Lewis and Shedler 1979)."""
        candidates, lots = rng.spawn(2)
        highest_per_s = self.mean_per_s * (1 + self.amplitude)
        at_s = draw_unit_points(highest_per_s * horizon_s, rng=candidates) / highest_per_s
        at_s = at_s[at_s < horizon_s]
        return at_s[lots.random(at_s.size) * highest_per_s < self.rate_per_s(at_s)]


@ARRIVALS.register("peak")
@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """``base_per_s``, except for ``peak_per_s`` in [from, until)."""

    kind: Literal["peak"] = "peak"
    base_per_s: Annotated[float, Ge(0)]
    peak_per_s: Rate
    from_: Annotated[Duration, Field(alias="from")]
    until: Duration

    def __post_init__(self) -> None:
        """Refuse a peak that is none."""
        if self.peak_per_s <= self.base_per_s:
            raise ValueError(f"peak_per_s: must be above base_per_s {self.base_per_s:g} (got {self.peak_per_s:g})")
        if self.until <= self.from_:
            raise ValueError(f"until: must be after from {self.from_:g} s (got {self.until:g} s)")

    def expected_requests(self, horizon_s: float) -> float:
        """Return the mean number of arrivals in [0, horizon_s)."""
        edges_s, rates_per_s = self._pieces(horizon_s)
        return float(np.sum(rates_per_s * np.diff(edges_s)))

    def draw_arrivals_s(self, horizon_s: float, *, rng: np.random.Generator) -> Floats:
        """Draw arrival times in [0, horizon_s), ascending."""
        return draw_piecewise_s(*self._pieces(horizon_s), rng=rng)

    def _pieces(self, horizon_s: float) -> tuple[Floats, Floats]:
        edges_s = np.minimum([0.0, self.from_, self.until, horizon_s], horizon_s)
        return edges_s, np.array([self.base_per_s, self.peak_per_s, self.base_per_s])
