"""The plots of the rung ``paper``: what was observed in grey and points, what is predicted in lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.style import MUTED, finite, look_of, plot_style, save
from analysis.validate.claims import Evidence
from analysis.validate.offline import DRAFTERS, Calibration, Point, Sweep
from analysis.validate.plateaus import Jagged
from analysis.validate.published import LENIENT, MODELS, PLATEAUS, STRICT, Cloud, parabola, speed_cloud
from analysis.validate.telemetry import BUDGET_MEDIAN, SPEED_MEDIAN, Outcome, errors_of
from profiles.recipes.offline import DOMAINS
from profiles.recipes.serving import Model
from profiles.recipes.sources import Shared

#: Okabe and Ito's colours, which stay apart for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
MTP, DSPARK = look_of("mtp1").color, look_of("dspark_async").color
DASHES = {"shipped": (0.0, (2.0, 1.2)), "refined": (0.0, (8.0, 1.0))}


def draw_all(evidence: Evidence, folder: Path) -> Iterator[Path]:
    """Draw every plot; yields the files as they appear."""
    with plot_style():
        yield from save(_offline(evidence.longer, evidence.sweeps, evidence.calibrations), folder / "offline")
        for model in MODELS:
            name = model.lower().replace("-", "_")
            yield from save(_serving(evidence.shared, evidence.outcome, model), folder / f"serving_{name}")
        yield from save(_sensitivities(evidence.outcome), folder / "sensitivities")
        yield from save(_plateaus(evidence.jagged), folder / "plateaus")


def _three(title: str) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(12.9, 4.2), layout="constrained")
    figure.suptitle(title)
    return figure, list(figure.subplots(1, 3))


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


# -------------------------------------------------------------------------------------------------------------- offline


def _offline(longer: list[Point], sweeps: list[Sweep], calibrations: list[Calibration]) -> Figure:
    figure = Figure(figsize=(9.4, 7.4), layout="constrained")
    figure.suptitle("Offline, Qwen3-4B: predicted (lines), observed (points)")
    axes = list(figure.subplots(2, 2).flat)
    for name, dashes in zip(DRAFTERS, ("-", "--"), strict=True):
        for colour, domain in zip(COLOURS, DOMAINS, strict=False):
            own = [point for point in longer if point.group == f"{domain}, {name}"]
            at = [point.at for point in own]
            axes[0].plot(at, [point.predicted for point in own], dashes, color=colour, label=f"{domain}, {name}")
            axes[0].plot(at, [p.observed for p in own], "o" if dashes == "-" else "s", color=colour, markersize=4.5)
    axes[0].set_xticks([4, 8, 12, 16])
    _label(axes[0], "figure 4 (fitted at 8)", "draft length, anchor counted", "accepted length, tokens/round")
    for index, (what, y) in enumerate((("accepted", "accepted, tokens/step"), ("rate", "acceptance rate, %")), start=1):
        for colour, sweep in zip(COLOURS, sweeps, strict=False):
            points: tuple[Point, ...] = getattr(sweep, what)
            at = [point.at for point in points]
            axes[index].plot(at, [point.predicted for point in points], color=colour, label=sweep.domain)
            axes[index].plot(at, [point.observed for point in points], "o", color=colour, markersize=4.5)
        _label(axes[index], "figure 5 (fitted at 0)", "floor on confidence", y)
    for colour, one in zip(COLOURS, calibrations, strict=False):
        axes[3].plot(one.scores, one.curve, color=colour, label=f"position {one.position}")
        axes[3].plot(one.scores, one.observed, "o", color=colour, markersize=3.5)
    axes[3].plot([0, 1], [0, 1], color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
    _label(
        axes[3],
        "figure 6: raw scores, and what the law says they are worth",
        "raw score of the prefix",
        "share accepted",
    )
    for one_axes in (axes[0], axes[1], axes[3]):
        one_axes.legend(fontsize=7)
    return figure


# -------------------------------------------------------------------------------------------------------------- serving


def _serving(shared: Shared, outcome: Outcome, model: Model) -> Figure:
    figure, axes = _three(f"{model}: telemetry (bands and points: p10 to p90, median) and predictions (lines)")
    mtp, dspark = speed_cloud(shared, model, "MTP"), speed_cloud(shared, model, "DSpark")
    pairs = outcome.pairs[model]
    for cloud, colour, name in ((mtp, MTP, "MTP-1, telemetry"), (dspark, DSPARK, "DSpark, telemetry")):
        _cloud(axes[0], cloud, colour, name)
        axes[2].plot(
            cloud.median, cloud.requests * cloud.median, "o", color=colour, markersize=3.5, alpha=0.6, label=name
        )
    mtp_run = pairs["shipped"].mtp.curve
    axes[0].plot(mtp_run.requests, mtp_run.speed, color=MTP, linewidth=1.5, label="MTP-1, fitted")
    axes[2].plot(mtp_run.speed, mtp_run.throughput, color=MTP, linewidth=1.5, label="MTP-1, fitted")
    for name, pair in pairs.items():
        curve = pair.dspark.curve
        label = f"DSpark, predicted ({name})"
        axes[0].plot(curve.requests, curve.speed, color=DSPARK, linestyle=DASHES[name], linewidth=1.7, label=label)
        axes[2].plot(curve.speed, curve.throughput, color=DSPARK, linestyle=DASHES[name], linewidth=1.7, label=label)
        axes[1].plot(
            pair.dspark.over_load("requests"),
            pair.dspark.over_load("verify_tokens"),
            color=DSPARK,
            linestyle=DASHES[name],
            linewidth=1.7,
            label=label,
        )
    _cloud(axes[1], outcome.seen[model].budget, DSPARK, "DSpark, telemetry")
    loads = np.linspace(5, 205, 100)
    axes[1].plot(loads, parabola(model, loads), color=MUTED, linewidth=1.0, label="the paper's parabola")
    axes[1].axhline(2, color=MTP, linewidth=1.5, label="MTP-1")
    axes[1].set_ylim(1.8, 7.2)
    for one in axes[:2]:
        one.set_xlim(0, 212)
    axes[0].set_ylim(0)
    axes[2].set_ylim(0)
    for speed in (LENIENT[model], STRICT[model]):
        axes[2].axvline(speed, color=MUTED, linewidth=0.8, linestyle=(0, (6, 3)))
    _label(axes[0], "speed", "requests per GPU", "tokens/s per user")
    _label(axes[1], "verification budget", "requests per GPU", "tokens verified a request, bonus included")
    _label(axes[2], "frontier (dashed: the paper's promises)", "tokens/s per user", "tokens/s per GPU")
    for one in axes:
        one.legend(fontsize=7)
    return figure


def _cloud(axes: Axes, cloud: Cloud, colour: str, name: str) -> None:
    keep = (cloud.requests >= 4) & (cloud.requests <= 212)
    axes.fill_between(cloud.requests[keep], cloud.p10[keep], cloud.p90[keep], color=colour, alpha=0.15, linewidth=0)
    axes.plot(cloud.requests[keep], cloud.median[keep], "o", color=colour, markersize=3.5, alpha=0.6, label=name)


def _sensitivities(outcome: Outcome) -> Figure:
    names = list(next(iter(outcome.sensitivities.values())))
    figure = Figure(figsize=(9.6, 1.6 + 0.24 * len(names)), layout="constrained")
    figure.suptitle("DSpark predicted against the dense cloud: median error, one assumption changed at a time")
    axes = list(figure.subplots(1, 2, sharey=True))
    rows = np.arange(len(names))
    for colour, marker, (model, found) in zip(COLOURS, "os", outcome.sensitivities.items(), strict=False):
        errors = [errors_of(found[name], outcome.seen[model]) for name in names]
        axes[0].plot([one.speed_bias for one in errors], rows, marker, color=colour, label=model)
        axes[1].plot([one.budget_bias for one in errors], rows, marker, color=colour, label=model)
    for one, bound in zip(axes, (SPEED_MEDIAN, BUDGET_MEDIAN), strict=True):
        one.axvspan(-bound, bound, color=MUTED, alpha=0.12, linewidth=0)
        one.axvline(0, color=MUTED, linewidth=0.8)
    axes[0].set_yticks(rows, names)
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=7)
    _label(axes[0], "speed (shaded: the bound)", "median error, %", "")
    _label(axes[1], "verification budget", "median error, tokens a request", "")
    return figure


# ------------------------------------------------------------------------------------------------------------- plateaus


def _plateaus(jagged: Jagged) -> Figure:
    figure, axes = _three("Batch tokens while requests grow: preferred sizes")
    own, collapsed = jagged.pinned["dspark_async"], jagged.pinned["dspark"]
    for name, pinned in (("dspark_async", own), ("dspark", collapsed)):
        colour = look_of(name).color
        axes[0].fill_between(pinned.requests, pinned.p10, pinned.p90, step="mid", color=colour, alpha=0.2, linewidth=0)
        label = "dspark_async" if name == "dspark_async" else "dspark (algorithm 1, early stop)"
        axes[0].plot(pinned.requests, pinned.median, ".-", color=colour, linewidth=1.2, markersize=4, label=label)
    for factor in (1, 6):
        axes[0].plot(
            own.requests, np.minimum(factor * own.requests, 1024), color=MUTED, linewidth=0.8, linestyle=(0, (2, 2))
        )
    axes[0].legend(fontsize=7)
    _label(
        axes[0],
        "simulated, measured table of 4 x B300",
        "requests at the engine",
        "batch tokens (dashed: 1 and 6 a request)",
    )
    axes[1].plot(jagged.sizes, 1e3 * jagged.verify_s, ".-", color=MUTED, markersize=3, linewidth=0.9)
    _label(axes[1], "that table, not smoothed", "batch tokens", "verify time, ms")
    for colour, (model, cloud) in zip(COLOURS, jagged.clouds.items(), strict=False):
        axes[2].fill_between(cloud.requests, cloud.p10, cloud.p90, color=colour, alpha=0.2, linewidth=0)
        axes[2].plot(cloud.requests, finite(cloud.median), ".-", color=colour, markersize=4, linewidth=1.0, label=model)
        _levels(axes[2], model, colour)
    axes[2].set_xlim(0, 235)
    axes[2].legend(fontsize=7, loc="upper left")
    _label(axes[2], "telemetry (lines: its preferred sizes)", "requests per GPU", "batch tokens per GPU")
    return figure


def _levels(axes: Axes, model: Model, colour: str) -> None:
    for level in PLATEAUS[model]:
        axes.axhline(level, color=colour, linewidth=0.7, linestyle=(0, (4, 2)))
        axes.annotate(
            str(level),
            (1, level),
            (-3, 1),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            size=7,
            color=colour,
        )
