"""Draw what `profiles.fit` fitted: observed against the law, and how far off it is with a load left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.profile_plots import COLOURS
from analysis.style import MUTED, plot_style, save
from profiles.fitting.closed_loop import alike

Report = dict[str, Any]


def draw_fit(report: Report, folder: Path) -> Iterator[Path]:
    """Draw the report of a fit into ``folder`` as ``fit.png`` and ``fit.svg``; yields the files."""
    folder.mkdir(parents=True, exist_ok=True)
    with plot_style():
        figure = Figure(figsize=(9.2, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        rows = report["rows"]
        summary = f"{report['rms_percent']:.1f} % rms, {report['worst_percent']:.1f} % worst"
        figure.suptitle(f"{report['profile']}: fitted to {len(rows)} rows, {summary}")
        if "concurrency" in rows[0]:
            _draw_runs(left, right, rows)
        else:
            _draw_requests(left, right, rows)
        yield from save(figure, folder / "fit")


def _draw_runs(left: Axes, right: Axes, rows: list[Report]) -> None:
    """Draw rounds by load, a colour each combination of draft length and lengths; errors beside them."""
    prompts, outputs = (alike([row[key] for row in rows]) for key in ("prompt_tokens", "output_tokens"))
    series: dict[tuple[Any, ...], list[Report]] = {}
    for row, prompt, output in zip(rows, prompts, outputs, strict=True):
        series.setdefault((row["k"], prompt, output), []).append(row)
    for number, part in enumerate(series.values()):
        colour = COLOURS[number % len(COLOURS)]
        part = sorted(part, key=lambda row: float(row["concurrency"]))
        loads = [row["concurrency"] for row in part]
        left.plot(
            loads, [row["observed_round_ms"] for row in part], "o", color=colour, markersize=4, label=_label(part)
        )
        left.plot(loads, [row["fitted_round_ms"] for row in part], "-", color=colour, linewidth=1.2)
        right.plot(loads, [row["error_percent"] for row in part], "o", color=colour, markersize=4)
        unseen = [np.nan if (e := row["error_left_out_percent"]) is None else e for row in part]
        right.plot(loads, unseen, "x", color=colour, markersize=5)
    left.set_ylabel("mean round (ms); dots measured, line fitted")
    left.legend()
    right.axhline(0.0, color=MUTED, linewidth=0.8)
    right.set_ylabel("error (%); dots fitted, crosses left out")
    for axes in (left, right):
        axes.set_xlabel("requests at once")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.set_ylim(bottom=0)


def _label(rows: list[Report]) -> str:
    """Name a series by its draft length and the mean lengths of its requests."""
    k, lengths = rows[0]["k"], ""
    if all(row["prompt_tokens"] and row["output_tokens"] for row in rows):
        prompt, output = (np.mean([row[key] for row in rows]) for key in ("prompt_tokens", "output_tokens"))
        lengths = f", {prompt:,.0f} + {output:,.0f} tokens"
    return ("no speculation" if not k else f"k = {k}") + lengths


def _draw_requests(left: Axes, right: Axes, rows: list[Report]) -> None:
    """Draw the tokens that requests got against what the law gives them in their time; errors by arrival."""
    got = np.array([row["output_tokens"] for row in rows])
    left.plot(got, [row["fitted_output_tokens"] for row in rows], ".", color=COLOURS[0], markersize=4)
    left.plot((0, got.max()), (0, got.max()), "--", color=MUTED, linewidth=0.8)
    left.set_xlabel("output tokens")
    left.set_ylabel("tokens that the law gives in that time")
    right.plot([row["arrived_s"] for row in rows], [row["error_percent"] for row in rows], ".", color=COLOURS[0])
    right.axhline(0.0, color=MUTED, linewidth=0.8)
    right.set_xlabel("arrival (s)")
    right.set_ylabel("error (%), all fitted")
