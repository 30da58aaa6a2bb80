"""Throughput per GPU against tokens/s per user: what is on the frontier, in numbers and as a plot.

Both directions are better upwards. A point with a value that does not exist (None, NaN) or lies beyond the run
(infinite) is never on the frontier, beats no other, and interrupts the curve that it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from analysis.style import (
    MUTED,
    OBJECTIVE,
    OBJECTIVE_DASHES,
    ORACLE_DASHES,
    SMALL_SIZE,
    Dashes,
    Look,
    halo,
    looks,
    new_figure,
    plot_style,
    save,
    say_no_data,
    shown,
)

XY = tuple[float, float]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and the ends of its interval, None where there is none (one replication)."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One policy at one load.

    ``user_tokens_per_s``: interactivity, the median over requests. ``throughput``: output tokens/s per GPU.
    ``load``: the swept value as people write it, None where nothing is swept. ``oracle``: an upper bound, compared
    with nothing.
    """

    policy: str
    load: str | None
    user_tokens_per_s: Interval
    throughput: Interval
    oracle: bool = False

    @property
    def xy(self) -> XY | None:
        """Interactivity and throughput; None where either is missing or not finite."""
        x, y = self.user_tokens_per_s.value, self.throughput.value
        return (float(x), float(y)) if x is not None and y is not None and math.isfinite(x + y) else None


def pareto(points: Sequence[FrontierPoint]) -> list[bool]:
    """Tell for each point whether it is on the frontier of all of them.

    It is unless another point is at least as good in both directions and better in one. Equal points are both on it.
    Oracle points are left out: neither on it nor in anyone's way.
    """
    places = [None if point.oracle else point.xy for point in points]
    rivals = [place for place in places if place is not None]
    return [place is not None and not any(_beats(rival, place) for rival in rivals) for place in places]


def _beats(one: XY, other: XY) -> bool:
    return one != other and one[0] >= other[0] and one[1] >= other[1]


def curves(points: Sequence[FrontierPoint]) -> dict[str, list[FrontierPoint]]:
    """Return each policy's points in order of load: by number if all have one (``64``, ``key=64``), else as given."""
    found: dict[str, list[FrontierPoint]] = {}
    for point in points:
        found.setdefault(point.policy, []).append(point)
    return {policy: _by_load(own) for policy, own in found.items()}


def _by_load(points: list[FrontierPoint]) -> list[FrontierPoint]:
    try:
        numbers = [float((point.load or "").rpartition("=")[2]) for point in points]
    except ValueError:
        return points
    return [points[index] for index in sorted(range(len(points)), key=numbers.__getitem__)]


def frontier_table(points: Sequence[FrontierPoint], buckets: Iterable[float]) -> dict[str, dict[float, float | None]]:
    """Return the best throughput per GPU of each policy at each interactivity of ``buckets`` (tokens/s per user).

    Read off the policy's own curve, linear between neighbouring loads; None where the curve does not reach.
    Nothing is extrapolated and a missing point is not bridged.
    """
    asked = list(buckets)
    return {policy: {at: _best_at(own, at) for at in asked} for policy, own in curves(points).items()}


def _pieces(curve: Sequence[FrontierPoint]) -> list[tuple[XY, XY]]:
    """Return the straight pieces of a curve; a point without neighbours is a piece of length 0."""
    places = [point.xy for point in curve]
    pieces = [(one, other) for one, other in pairwise(places) if one and other]
    return [*pieces, *((place, place) for place in places if place)]


def _best_at(curve: Sequence[FrontierPoint], at: float) -> float | None:
    best = None
    for (x0, y0), (x1, y1) in _pieces(curve):
        if min(x0, x1) <= at <= max(x0, x1):
            y = max(y0, y1) if x0 == x1 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)
            best = y if best is None else max(best, y)
    return best


def area_under(points: Sequence[FrontierPoint], from_user_tokens_per_s: float = 0.0) -> dict[str, float | None]:
    """Return, a policy, the area under the throughput it reaches while a user gets *at least* x tokens/s.

    One number a policy, in (tokens/s per user) x (tokens/s per GPU), from ``from_user_tokens_per_s`` to the policy's
    fastest point, beyond which it adds nothing. Straight between neighbours on the policy's own frontier; left of the
    slowest of them its throughput holds, since a user who gets more than x gets x. All policies are thus measured
    from the same speed on, whichever speeds their loads happened to give. None where a policy has no point.
    """
    return {policy: _area(own, from_user_tokens_per_s) for policy, own in curves(points).items()}


def _area(curve: Sequence[FrontierPoint], start: float) -> float | None:
    places = [point.xy for point in curve if point.xy is not None]
    if not places:
        return None
    front = sorted(place for place in set(places) if not any(_beats(rival, place) for rival in places))
    xs, ys = (np.array(column) for column in zip(*front, strict=True))
    stops = np.concatenate([[start], xs[xs > start]])
    return float(np.trapezoid(np.interp(stops, xs, ys), stops))


# ---------------------------------------------------------------------------------------------------------------- plot


def draw_frontier(
    points: Sequence[FrontierPoint],
    *,
    objective_user_tokens_per_s: float | None,
    title: str,
    note: str,
    stem: Path,
    clouds: Mapping[str, tuple[Floats, Floats]] | None = None,
) -> list[Path]:
    """Draw throughput per GPU against tokens/s per user, a curve a policy; write ``stem``.png and ``stem``.svg.

    Points on the frontier of all policies are filled, the others hollow. ``note`` says in small print what is assumed.
    ``clouds``: of each policy, tokens/s per user and output tokens/s per GPU in windows of time, drawn as dots.
    """
    clouds = {} if clouds is None else {policy: _finite_pairs(*cloud) for policy, cloud in clouds.items()}
    on_front = {id(point) for point, on in zip(points, pareto(points), strict=True) if on}
    with plot_style():
        drawn = curves(points)
        found = looks(list(drawn))
        joined = any(len(own) > 1 for own in drawn.values())
        legend: dict[str, Artist] = {
            shown(policy, oracle=_bounds(own)): _legend_entry(found[policy], oracle=_bounds(own), joined=joined)
            for policy, own in drawn.items()
        }
        signs = _signs(points, on_front)
        if clouds:
            signs["dot: one window of time"] = Line2D(
                [], [], linestyle="none", marker="o", markersize=3.5, color=MUTED, alpha=0.5
            )
        figure = new_figure(8.2, 4.4, title=title, note=note, legend=legend, signs=signs)
        axes = figure.add_subplot()
        axes.set_xlabel("tokens/s per user (p50 over requests)")
        axes.set_ylabel("output tokens/s per GPU")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        sizes = _sizes(points)
        for policy, own in drawn.items():
            _draw_curve(axes, own, found[policy], on_front, sizes)
        if any(point.xy for point in points):
            for policy, (x, y) in clouds.items():
                axes.plot(
                    x, y, linestyle="none", marker="o", markersize=3.5, alpha=0.35, mew=0, color=found[policy].color
                )
            _frame(axes, points, objective_user_tokens_per_s, clouds)
            _name_loads(axes, points)
        else:
            say_no_data(axes)
        if objective_user_tokens_per_s is not None:
            _draw_objective(axes, objective_user_tokens_per_s)
        return save(figure, stem)


def _bounds(own: Sequence[FrontierPoint]) -> bool:
    return any(point.oracle for point in own)


def _legend_entry(look: Look, *, oracle: bool, joined: bool) -> Line2D:
    dashes: Dashes | Literal["none"] = "none" if not joined else ORACLE_DASHES if oracle else look.dashes
    return Line2D([], [], color=look.color, linestyle=dashes, linewidth=1.8, marker=look.marker, markersize=6)


def _draw_curve(
    axes: Axes, own: Sequence[FrontierPoint], look: Look, on_front: set[int], sizes: Mapping[int, float]
) -> None:
    """Draw one policy: its curve, its intervals, its points."""
    oracle = _bounds(own)
    zorder = 3.0 + look.rank / 10
    axes.plot(
        *zip(*(point.xy or (math.nan, math.nan) for point in own), strict=True),
        color=look.color,
        linestyle=ORACLE_DASHES if oracle else look.dashes,
        linewidth=1.2 if oracle else 1.8,
        zorder=zorder,
    )
    known = [point for point in own if point.xy is not None]
    for name, intervals in (
        ("xerr", [point.user_tokens_per_s for point in known]),
        ("yerr", [point.throughput for point in known]),
    ):
        arms = [(point.xy, _arms(interval)) for point, interval in zip(known, intervals, strict=True)]
        there = [(*place, *arm) for place, arm in arms if place is not None and arm is not None]
        if there:
            x, y, below, above = np.array(there).T
            error: dict[str, Any] = {name: [below, above]}
            axes.errorbar(
                x, y, **error, fmt="none", ecolor=look.color, elinewidth=0.9, capsize=2.0, capthick=0.9, zorder=zorder
            )
    for point in known:
        on = id(point) in on_front
        axes.plot(
            *zip(point.xy or (), strict=False),
            linestyle="none",
            marker=look.marker,
            markersize=sizes[id(point)],
            markerfacecolor=look.color if on else "white",
            markeredgecolor="black" if on else look.color,
            markeredgewidth=0.8 if on else 1.1,
            zorder=6 - sizes[id(point)] / 100,  # of coincident points the smaller lies on top
            clip_on=False,
        )


def _arms(interval: Interval) -> tuple[float, float] | None:
    """Return how far an interval reaches down and up, 0 where an end is missing; None where both are."""
    assert interval.value is not None
    down, up = (
        abs(end - interval.value) if end is not None and math.isfinite(end) else 0.0
        for end in (interval.low, interval.high)
    )
    return (down, up) if down or up else None


def _sizes(points: Sequence[FrontierPoint]) -> dict[int, float]:
    """Return a marker size for each point (by id): those that coincide are nested, so that each stays visible."""
    places = {id(point): point.xy for point in points if point.xy is not None}
    width, height = (max(c) - min(c) or 1.0 for c in zip(*places.values(), strict=True)) if places else (1.0, 1.0)
    groups: list[list[int]] = []
    for key, (x, y) in places.items():
        for group in groups:
            u, v = places[group[0]]
            if abs(x - u) <= 0.002 * width and abs(y - v) <= 0.003 * height:
                group.append(key)
                break
        else:
            groups.append([key])
    return {key: 6.0 + 4.0 * (len(group) - 1 - nth) for group in groups for nth, key in enumerate(group)}


def _finite_pairs(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    keep = np.isfinite(x) & np.isfinite(y)
    return x[keep], y[keep]


def _frame(
    axes: Axes,
    points: Sequence[FrontierPoint],
    objective: float | None,
    clouds: Mapping[str, tuple[Floats, Floats]],
) -> None:
    """Set the limits: throughput from 0, interactivity around the points, clouds, intervals and the objective."""
    known = [point for point in points if point.xy]
    speeds = [*_ends(point.user_tokens_per_s for point in known), *([] if objective is None else [objective])]
    speeds += [float(value) for x, _ in clouds.values() if x.size for value in (x.min(), x.max())]
    tops = _ends(point.throughput for point in known) + [float(y.max()) for _, y in clouds.values() if y.size]
    low, high = min(speeds), max(speeds)
    pad = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    axes.set_xlim(max(0.0, low - pad), high + pad)
    axes.set_ylim(0.0, 1.07 * max(tops) or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 2.5, 5, 10]))


def _ends(intervals: Iterable[Interval]) -> list[float]:
    ends = (end for one in intervals for end in (one.value, one.low, one.high))
    return [end for end in ends if end is not None and math.isfinite(end)]


def _name_loads(axes: Axes, points: Sequence[FrontierPoint]) -> None:
    """Write the first and the last load beside the ends of the outermost curve: which way the load grows."""
    areas = {policy: area for policy, area in area_under(points).items() if area is not None}
    if not areas:
        return
    own = [point for point in curves(points)[max(areas, key=areas.__getitem__)] if point.xy and point.load]
    if len(own) < 3:
        return
    for point in (own[0], own[-1]):
        assert point.xy is not None
        assert point.load is not None
        left = point.xy[0] < max(axes.get_xlim()) * 0.6
        axes.annotate(
            point.load.rpartition(".")[2] if "=" in point.load else f"load {point.load}",
            point.xy,
            (-7, 5) if left else (2, 8),
            textcoords="offset points",
            ha="right" if left else "center",
            size=SMALL_SIZE,
            color=MUTED,
            zorder=7,
            path_effects=[halo()],
        )


def _draw_objective(axes: Axes, value: float) -> None:
    """Draw the objective as a line, named above the axes where no curve is."""
    axes.axvline(value, color=OBJECTIVE, linewidth=1.0, linestyle=OBJECTIVE_DASHES, zorder=2.5)
    low, high = axes.get_xlim()
    part = (value - low) / (high - low)
    axes.text(
        value,
        1.01,
        f"objective: {value:g} tokens/s per user",
        transform=axes.get_xaxis_transform(),
        ha="left" if part < 0.2 else "right" if part > 0.8 else "center",
        va="bottom",
        size=SMALL_SIZE,
        color=OBJECTIVE,
    )


def _signs(points: Sequence[FrontierPoint], on_front: set[int]) -> dict[str, Artist]:
    """Return the legend's entries for what the signs mean, those that occur."""
    known = [point for point in points if point.xy and not point.oracle]
    sign = partial(Line2D, [], [], linestyle="none", marker="o", markersize=6, color=MUTED)
    found: dict[str, Artist] = {}
    if len(known) > 1:
        found["filled: no point of any policy is better in both directions"] = sign(markeredgecolor="black")
    if any(id(point) not in on_front for point in known):
        found["hollow: some point is"] = sign(markerfacecolor="white")
    if any(_arms(interval) for point in points if point.xy for interval in (point.user_tokens_per_s, point.throughput)):
        found["bars: intervals"] = Line2D([], [], linestyle="none", marker="|", markersize=9, color=MUTED)
    return found
