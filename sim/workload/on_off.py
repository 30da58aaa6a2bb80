"""Arrivals in phases of activity and silence, such as a batch job or a single large client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from sim.units import PositiveDuration, Rate
from sim.workload.base import ARRIVALS, Floats
from sim.workload.size import check_expected_requests
from sim.workload.unit_rate import draw_piecewise_s

_BLOCK = 512


@ARRIVALS.register("on_off")
@dataclass(frozen=True, slots=True, kw_only=True)
class OnOff:
    """Poisson arrivals at ``on_per_s`` and ``off_per_s`` in turn; phases last exponential times of the given means."""

    kind: Literal["on_off"] = "on_off"
    on_per_s: Rate
    off_per_s: Annotated[float, Ge(0)] = 0.0
    mean_on: PositiveDuration
    mean_off: PositiveDuration

    def __post_init__(self) -> None:
        """Refuse phases that do not differ."""
        if self.off_per_s >= self.on_per_s:
            raise ValueError(f"off_per_s: must be below on_per_s {self.on_per_s:g} (got {self.off_per_s:g})")

    def expected_requests(self, horizon_s: float) -> float:
        """Return the mean number of arrivals in [0, horizon_s)."""
        on, off = self.mean_on, self.mean_off
        return (self.on_per_s * on + self.off_per_s * off) / (on + off) * horizon_s

    def draw_arrivals_s(self, horizon_s: float, *, rng: np.random.Generator) -> Floats:
        """Draw arrival times in [0, horizon_s), ascending; the run begins at a random moment of the cycle."""
        check_expected_requests(self.on_per_s * horizon_s)
        check_expected_requests(horizon_s / min(self.mean_on, self.mean_off))
        phases, points = rng.spawn(2)
        on_first = phases.random() < self.mean_on / (self.mean_on + self.mean_off)
        means_s = np.array([self.mean_on, self.mean_off] if on_first else [self.mean_off, self.mean_on])
        rates_per_s = np.array([self.on_per_s, self.off_per_s] if on_first else [self.off_per_s, self.on_per_s])
        edges = [np.zeros(1)]
        while edges[-1][-1] < horizon_s:
            # The phase under way at time 0 has an exponential rest like any other: that law has no memory.
            spans_s = phases.standard_exponential((_BLOCK // 2, 2)) * means_s
            edges.append(edges[-1][-1] + np.cumsum(spans_s))
        edges_s = np.concatenate(edges)
        edges_s = np.append(edges_s[edges_s < horizon_s], horizon_s)
        piece_rates_per_s = np.resize(rates_per_s, edges_s.size - 1)
        return draw_piecewise_s(edges_s, piece_rates_per_s, rng=points)
