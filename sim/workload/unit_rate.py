"""Poisson points at unit rate: what every law with a rate that varies in time is stretched from."""

from __future__ import annotations

import numpy as np

from sim.workload.base import Floats
from sim.workload.size import check_expected_requests

#: Points are drawn this many at a time, whatever the horizon, so that a longer one only adds points at the end.
_BLOCK = 8192


def draw_unit_points(until: float, *, rng: np.random.Generator) -> Floats:
    """Draw the points of a Poisson process of rate 1 in [0, until), ascending."""
    check_expected_requests(until)
    blocks: list[Floats] = []
    last = 0.0
    while last < until:
        block = last + np.cumsum(rng.standard_exponential(_BLOCK))
        blocks.append(block)
        last = float(block[-1])
    points = np.concatenate(blocks) if blocks else np.empty(0)
    return points[points < until]


def draw_piecewise_s(edges_s: Floats, rates_per_s: Floats, *, rng: np.random.Generator) -> Floats:
    """Draw Poisson arrivals at a rate that is constant between edges, by inversion of its running total; exact.

    Parameters
    ----------
    edges_s : array [pieces + 1], ascending
        Where the rate changes, from 0 to the horizon.
    rates_per_s : array [pieces], at least 0
        The rate from one edge to the next; a piece of rate 0 gets no arrival.

    Returns
    -------
    array [n]
        Arrival times in [0, horizon), ascending.
    """
    total = np.concatenate(([0.0], np.cumsum(rates_per_s * np.diff(edges_s))))
    points = draw_unit_points(float(total[-1]), rng=rng)
    # A point lies in [total[piece], total[piece + 1]), so the rate there is not 0.
    piece = np.searchsorted(total, points, side="right") - 1
    arrived_s: Floats = edges_s[piece] + (points - total[piece]) / rates_per_s[piece]
    before: Floats = arrived_s[arrived_s < edges_s[-1]]
    return before
