"""The plots of the rung ``engines``: 95 setups, predicted against measured, and two vLLM runs second by second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.style import MUTED, plot_style, save
from analysis.validate.engines_logs import RUNS, SERIES, read_run, simulate_run
from profiles.recipes.sources import Floats

if TYPE_CHECKING:
    from analysis.validate.engines_aic import Alone, LeftOut, Series
    from analysis.validate.rungs import Settings

SEEN, TOLD = "#0072B2", "#D55E00"
#: Inside the shaded band an error is at most so large.
BAND = 0.2
TICKS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def draw_setups(
    asked: Sequence[Series], alone: Mapping[str, Alone], left: Sequence[LeftOut], folder: Path
) -> Iterator[Path]:
    """Draw TPOT of every point, in-sample and with its lengths left out."""
    fitted = [(one.points[:, 3], alone[one.name].fit.misses) for one in asked]
    out = [(one.series.points[one.series.of(one.lengths), 3], one.tpot) for one in left]
    with plot_style():
        figure = Figure(figsize=(8.6, 4.7), layout="constrained")
        figure.suptitle("TPOT of closed loops, predicted against measured (shaded: within 20 %)")
        for axes, found, title in zip(
            figure.subplots(1, 2, sharex=True, sharey=True),
            (fitted, out),
            ("profiles.fit, in-sample", "with other setups, lengths left out"),
            strict=True,
        ):
            measured, errors = (np.concatenate(parts) for parts in zip(*found, strict=True))
            _against(axes, measured, measured * (1 + errors))
            score = f"{measured.size:,} points, median |error| {100 * np.median(np.abs(errors)):.1f} %"
            axes.set_title(f"{title}\n{score}")
        yield from save(figure, folder / "setups")


def _against(axes: Axes, measured: Floats, predicted: Floats) -> None:
    ends = np.array([measured.min() / 1.3, measured.max() * 1.3])
    axes.fill_between(ends, (1 - BAND) * ends, (1 + BAND) * ends, color=MUTED, alpha=0.15, linewidth=0)
    axes.plot(ends, ends, color=MUTED, linewidth=0.8)
    axes.plot(measured, predicted, "o", color=SEEN, markersize=2.6, alpha=0.45, markeredgewidth=0)
    ticks = [tick for tick in TICKS_MS if ends[0] <= tick <= ends[1]]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("measured TPOT, ms")
    axes.set_ylabel("predicted TPOT, ms")


def draw_logs(settings: Settings) -> Iterator[Path]:
    """Draw running and waiting requests of both vLLM runs, logged and simulated."""
    with plot_style():
        figure = Figure(figsize=(9.4, 5.4), layout="constrained")
        figure.suptitle("vLLM's own count of requests, second by second, and the simulator's")
        for column, name in zip(figure.subplots(2, 2, sharex="col").T, RUNS, strict=True):
            run = read_run(settings.shared, name)
            _, told = simulate_run(run, run.fit, settings.out, settings.seed)
            seconds = run.series["t"]
            for axes, what in zip(column, SERIES, strict=True):
                axes.plot(seconds, run.series[what], color=SEEN, linewidth=1.6, label="vLLM")
                axes.plot(told["t"], told[what], color=TOLD, linewidth=1.0, drawstyle="steps-post", label="simulated")
                axes.axvspan(0, run.last_fitted_s, color=MUTED, alpha=0.15, linewidth=0, label="arrivals fitted")
                axes.set_ylabel(f"{what} requests")
                axes.set_xlim(0, max(seconds[-1], told["t"][-1]))
            column[0].set_title(f"{name} on {RUNS[name]}")
            column[0].legend(loc="lower center")
            column[1].set_xlabel("seconds from the first arrival")
        yield from save(figure, settings.out / "vllm_series")
