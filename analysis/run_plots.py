"""Plots of a run over time, from the windows that `sim.metrics.windows` cuts: the budget and the timeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from analysis.style import (
    MUTED,
    OBJECTIVE,
    OBJECTIVE_DASHES,
    SMALL_SIZE,
    Floats,
    Look,
    finite,
    halo,
    looks,
    nested_widths,
    new_figure,
    plot_style,
    save,
    say_no_data,
    shown,
)

Series = Mapping[str, Mapping[str, Floats]]

MANY_DOTS = 4000  # beyond this they go into the SVG as an image
LEAST_FOR_MEDIAN = 12  # windows

# -------------------------------------------------------------------------------------------------------------- budget


def draw_budget(series: Series, *, requests_per: str, title: str, note: str, stem: Path) -> list[Path]:
    """Draw verified tokens a request against requests decoding, a dot a window; write ``stem``.png and ``stem``.svg.

    ``series``: per policy, what `sim.metrics.windows` returns. ``requests_per``: of what ``decoding_per_gpu`` counts
    the requests, such as "GPU". A line follows the running median where a policy has windows enough.
    """
    dots = {policy: _dots(columns) for policy, columns in series.items()}
    medians = {policy: running_median(x, y) for policy, (x, y) in dots.items()}
    with plot_style():
        found = looks(list(series))
        signs: dict[str, Artist] = {
            "dot: one window of time": Line2D([], [], color=MUTED, marker="o", markersize=3, linestyle="none")
        }
        if any(y.size for _, y in medians.values()):
            signs["line: running median"] = Line2D([], [], color=MUTED, linewidth=2)
        figure = new_figure(
            8.2,
            4.1,
            title=title,
            note=note,
            legend=_legend(found, linewidth=2.2, marker="o", markersize=4),
            signs=signs,
        )
        axes = figure.add_subplot()
        axes.set_xlabel(f"requests decoding per {requests_per}")
        axes.set_ylabel("verified tokens per request and step\n(bonus token included)")
        many = sum(x.size for x, _ in dots.values()) > MANY_DOTS
        widths = nested_widths({policy: _levels(y) for policy, (_, y) in medians.items()}, 2.2)
        for policy, look in found.items():
            order = look.rank / 10
            x, y = dots[policy]
            axes.scatter(x, y, s=9, color=look.color, alpha=0.28, linewidths=0, zorder=3 + order, rasterized=many)
            x, y = medians[policy]
            axes.plot(x, y, color=look.color, linestyle=look.dashes, linewidth=widths[policy], zorder=5 + order)
        highest = [(float(x.max()), float(y.max())) for x, y in dots.values() if y.size]
        if highest:
            right, top = (max(column) for column in zip(*highest, strict=True))
            axes.set(xlim=(0.0, right * 1.04 or 1.0), ylim=(0.0, top * 1.08 or 1.0))
        else:
            axes.set_xticks([])
            say_no_data(axes)
        return save(figure, stem)


def _legend(found: Mapping[str, Look], **line: Any) -> dict[str, Artist]:
    return {
        shown(policy): Line2D([], [], color=look.color, linestyle=look.dashes, **line) for policy, look in found.items()
    }


def _dots(columns: Mapping[str, Floats]) -> tuple[Floats, Floats]:
    """Return the windows where both values exist, by requests decoding."""
    x, y = finite(columns["decoding_per_gpu"]), finite(columns["verify_tokens_per_request"])
    known = ~np.isnan(x) & ~np.isnan(y)
    order = np.argsort(x[known], kind="stable")
    return x[known][order], y[known][order]


def _levels(values: Floats) -> Floats:
    """Return lowest, middle and highest value: what tells lines apart that have no places in common."""
    return np.nanquantile(values, [0.0, 0.5, 1.0]) if values.size else np.full(3, np.nan)


def running_median(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return the medians of x and y in a window that slides over x (sorted); NaN where more than a third has no values.

    The window is a twelfth to a third of their range, the more values the narrower, and asks for 3 of them. Empty where
    there are fewer than `LEAST_FOR_MEDIAN` values.
    """
    if x.size < LEAST_FOR_MEDIAN or x[-1] == x[0]:
        return np.empty(0), np.empty(0)
    span = float(x[-1] - x[0])
    holes = x[1:][np.diff(x) > span / 3]  # where each ends
    parts = min(max(x.size // 10, 3), 12)
    found: list[tuple[float, float]] = []
    for start in x[0] + span / parts * np.arange(0, parts - 0.75, 0.5):
        inside = (x >= start) & (x <= start + span / parts * (1 + 1e-9))
        if inside.sum() < 3:
            continue
        middle = (float(np.median(x[inside])), float(np.median(y[inside])))
        if found and ((holes > found[-1][0]) & (holes <= middle[0])).any():
            found.append((np.nan, np.nan))
        found.append(middle)
    columns = np.array(found).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


# ------------------------------------------------------------------------------------------------------------ timeline

_PANELS = (
    ("arrivals_per_s", "offered load\n(arrivals/s)"),
    ("decoding_per_gpu", "requests decoding\nper GPU"),
    ("waiting", "requests waiting\n(whole fleet)"),
    ("user_tokens_per_s", "tokens/s\nper user"),
    ("verify_tokens_per_request", "verified tokens\nper request"),
)


def draw_timeline(
    series: Series,
    *,
    objective_user_tokens_per_s: float | None,
    measured: tuple[float, float],
    title: str,
    note: str,
    stem: Path,
) -> list[Path]:
    """Draw load, requests, speed and budget over time, one above the other; write ``stem``.png and ``stem``.svg.

    ``series``: per policy, what `sim.metrics.windows` returns. ``measured``: the measurement window, s, shaded. The
    waiting requests have a panel where there are any.
    """
    panels = [(name, label) for name, label in _PANELS if name != "waiting" or _any_waiting(series)]
    alike = len(series) > 1 and _same_load(series)
    ends_s = [float(columns["started_s"][-1]) for columns in series.values() if columns["started_s"].size]
    unit, unit_s = time_unit(max([*ends_s, measured[1]]))
    with plot_style():
        found = looks(list(series))
        signs: dict[str, Artist] = {"shaded: measurement window": Patch(color=_SHADE_IN_LEGEND)}
        if alike:
            signs["load, the same for all policies"] = Line2D([], [], color=OBJECTIVE, linewidth=1.4)
        figure = new_figure(
            8.2, 0.4 + 1.3 * len(panels), title=title, note=note, legend=_legend(found, linewidth=2), signs=signs
        )
        column = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for (name, label), axes in zip(panels, column, strict=True):
            axes.set_ylabel(label)
            axes.axvspan(measured[0] / unit_s, measured[1] / unit_s, color=_SHADE, linewidth=0, zorder=0)
            axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            drawn = {next(iter(series)): _ALL} if name == "arrivals_per_s" and alike else found
            _draw_panel(axes, name, series, drawn, unit_s)
            if name == "user_tokens_per_s" and objective_user_tokens_per_s is not None:
                _draw_objective(axes, objective_user_tokens_per_s)
            axes.margins(x=0.01)
            axes.set_ylim(0.0, axes.get_ylim()[1] * 1.05)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        column[-1].set_xlim(left=0.0)
        figure.align_ylabels(list(column))
        column[-1].set_xlabel(f"time ({unit})")
        return save(figure, stem)


_ALL = Look(OBJECTIVE, "o")  # what holds for all policies
_SHADE, _SHADE_IN_LEGEND = "#eef3f8", "#dbe6f0"


def time_unit(longest_s: float) -> tuple[str, float]:
    """Return the unit of a time axis and its length in seconds."""
    for unit, unit_s, least in (("h", 3600.0, 4.0), ("min", 60.0, 5.0)):
        if longest_s >= least * unit_s:
            return unit, unit_s
    return "s", 1.0


def _any_waiting(series: Series) -> bool:
    return any(bool((finite(columns["waiting"]) > 0).any()) for columns in series.values())


def _same_load(series: Series) -> bool:
    loads = [columns["arrivals_per_s"] for columns in series.values()]
    return all(np.array_equal(load, loads[0]) for load in loads)


def _draw_panel(axes: Axes, name: str, series: Series, found: Mapping[str, Look], unit_s: float) -> None:
    """Draw one column of each policy in ``found`` over time."""
    values = {policy: finite(series[policy][name]) for policy in found}
    widths = nested_widths(values, 1.4)
    for policy, look in found.items():
        at, value = _middles(series[policy]["started_s"]) / unit_s, values[policy]
        order = 3 + look.rank / 10
        axes.plot(at, value, color=look.color, linestyle=look.dashes, linewidth=widths[policy], zorder=order)
        known = np.concatenate([[False], ~np.isnan(value), [False]])
        alone = known[1:-1] & ~known[:-2] & ~known[2:]  # a line needs two
        axes.plot(
            at[alone], value[alone], color=look.color, linestyle="none", marker=look.marker, markersize=4, zorder=order
        )
    if all(np.isnan(value).all() for value in values.values()):
        say_no_data(axes)


def _middles(started_s: Floats) -> Floats:
    """Return the middles of windows of equal width; of a single window, whose width is unknown, its start."""
    return started_s + (started_s[1] - started_s[0]) / 2 if started_s.size > 1 else started_s


def _draw_objective(axes: Axes, value: float) -> None:
    axes.axhline(value, color=OBJECTIVE, linewidth=1.0, linestyle=OBJECTIVE_DASHES, zorder=2.5)
    axes.annotate(
        f"objective: {value:g}",
        (1.0, value),
        (-2, 2),
        xycoords=axes.get_yaxis_transform(),
        textcoords="offset points",
        ha="right",
        va="bottom",
        size=SMALL_SIZE,
        color=OBJECTIVE,
        path_effects=[halo()],
    )
