"""Draw a profile: what steps cost, how many draft tokens survive, how far to trust the confidence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray
from scipy.special import expit, logit, ndtr

from analysis.style import plot_style, save
from profiles.curves import evaluate, known_range
from profiles.files import load_bank
from profiles.schema import Bank, Curve, DomainLaw, Drafter, ParametricLaw, Profile, StepTime, TableCurve, conditional
from sim.acceptance import solve_means

Floats = NDArray[np.float64]

#: Okabe and Ito's colours, which stay apart for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
#: Draft costs may coincide: each next line is broken, so that it does not hide the one before.
DASHES = ("-", "--", "-.", (0, (1, 2)))


def draw_profile(profile: Profile, path: Path, folder: Path) -> Iterator[Path]:
    """Draw a profile into ``folder`` as PNG and SVG, the same bytes each time; yields the files as they appear.

    Parameters
    ----------
    path : Path
        The profile's file: banks lie beside it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with plot_style():
        figures = {}
        if profile.step_time is not None:
            figures["step_time"] = _draw_step_time(profile.name, profile.step_time)
        if profile.acceptance:
            figures["acceptance"] = _draw_acceptance(profile, path)
            figures["confidence"] = _draw_confidence(profile, path)
        for name, figure in figures.items():
            yield from save(figure, folder / name)


# ---------------------------------------------------------------------------------------------------------------- time


def _draw_step_time(name: str, step_time: StepTime) -> Figure:
    drafts = {drafter: cost for drafter, cost in step_time.draft.items() if _costs_something(cost.curve)}
    cliff = isinstance(step_time.verify, TableCurve) and len(step_time.verify.segments) > 1
    panels = 1 + cliff + bool(drafts)
    figure = Figure(figsize=(4.6 * panels, 3.6), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(1, panels)))
    figure.suptitle(f"{name}: time of a step (dotted: outside the known range)")

    verify = axes.pop(0)
    last = known_range(step_time.verify)[1]
    if isinstance(step_time.verify, TableCurve) and cliff:
        last = step_time.verify.segments[0].sizes[-1]
    _draw_curve(verify, step_time.verify, COLOURS[0], "verify", last)
    _label(verify, "verify, up to the graph limit" if cliff else "verify", "batch tokens")
    if cliff:
        whole = axes.pop(0)
        _draw_curve(whole, step_time.verify, COLOURS[0], "verify", known_range(step_time.verify)[1])
        whole.set_xscale("log", base=2)
        whole.set_yscale("log")
        for axis in (whole.xaxis, whole.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        whole.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value in (20, 50, 200) else ""))
        _label(whole, "verify, whole range", "batch tokens")
    if drafts:
        panel = axes.pop(0)
        for colour, dashes, (drafter, cost) in zip(COLOURS[1:], DASHES, drafts.items(), strict=False):
            per = "a round" if cost.per == "round" else "a draft token"
            _draw_curve(panel, cost.curve, colour, f"{drafter}, {per}", known_range(cost.curve)[1], dashes)
        _label(panel, "draft", "requests drafted")
        panel.legend()
    free = [drafter for drafter in step_time.draft if drafter not in drafts]
    if free:
        verify.annotate(
            f"drafting with {', '.join(free)}: no time beside this",
            (0.98, 0.03),
            xycoords="axes fraction",
            ha="right",
            color=COLOURS[6],
        )
    return figure


def _costs_something(curve: Curve) -> bool:
    return isinstance(curve, TableCurve) or curve.floor_s + curve.per_unit_s + curve.saturating_s > 0


def _draw_curve(axes: Axes, curve: Curve, colour: str, label: str, last: int, dashes: Any = "-") -> None:
    """Draw a curve at every size up to ``last``; dots where a table has values.

    Dotted below the smallest known size and, where the profile extrapolates, a fifth beyond the largest.
    """
    first, known_to = known_range(curve)
    drawn_to = int(1.2 * last) if last == known_to and curve.beyond == "extrapolate" else last
    ms = 1e3 * evaluate(curve, drawn_to, label).seconds
    every = np.arange(drawn_to + 1)
    axes.plot(every[first : last + 1], ms[first : last + 1], color=colour, linestyle=dashes, label=label)
    for unknown in (slice(1, first + 1), slice(last, drawn_to + 1)):
        axes.plot(every[unknown], ms[unknown], color=colour, linestyle=":")
    if isinstance(curve, TableCurve):
        sizes, seconds = (
            np.concatenate([getattr(part, what) for part in curve.segments]) for what in ("sizes", "seconds")
        )
        axes.plot(sizes[sizes <= last], 1e3 * seconds[sizes <= last], ".", color=colour, markersize=4)


def _label(axes: Axes, title: str, size: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(size)
    axes.set_ylabel("time (ms)")
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)


# ---------------------------------------------------------------------------------------------------------- acceptance


def _draw_acceptance(profile: Profile, path: Path) -> Figure:
    drafters = profile.acceptance
    figure = Figure(figsize=(1.2 + 3.2 * len(drafters), 5.6), layout="constrained")
    grid = figure.subplots(2, len(drafters), sharey="row", squeeze=False)
    figure.suptitle(f"{profile.name}: draft tokens that are accepted")
    for (above, below), (name, drafter) in zip(grid.T, drafters.items(), strict=True):
        positions = np.arange(1, drafter.trained_length + 1)
        for colour, (domain, law) in zip(COLOURS, drafter.domains.items(), strict=False):
            survival = _survival(law, drafter, path)
            label = f"{domain}: {1 + sum(survival):.2f} tokens a round"
            above.plot(positions, survival, "o-", color=colour, markersize=4, label=label)
            below.plot(positions, conditional(survival), "o-", color=colour, markersize=4)
        above.set_title(f"{name} ({drafter.kind} of {drafter.trained_length})")
        above.legend(loc="lower left" if drafter.trained_length == 1 else "upper right")
        below.set_xlabel("draft position k")
        for axes in (above, below):
            axes.set_ylim(0, 1.02)
            axes.set_xticks(positions)
            axes.set_xlim(0.6, drafter.trained_length + 0.4)
    grid[0, 0].set_ylabel("survival: first k all accepted")
    grid[1, 0].set_ylabel("accepted, given the prefix was")
    return figure


def _survival(law: DomainLaw, drafter: Drafter, path: Path) -> tuple[float, ...]:
    if isinstance(law, ParametricLaw):
        return law.survival.values
    bank = load_bank(law, path, drafter.trained_length)
    return tuple(float(s) for s in np.cumprod(bank.chance, axis=1).mean(axis=0))


# ---------------------------------------------------------------------------------------------------------- confidence


def _draw_confidence(profile: Profile, path: Path) -> Figure:
    """Draw what a confidence means: acceptance by raw score, and how the calibrated chance is spread."""
    drafters = profile.acceptance
    figure = Figure(figsize=(1.2 + 3.2 * len(drafters), 6.0), layout="constrained")
    grid = figure.subplots(2, len(drafters), squeeze=False)
    figure.suptitle(f"{profile.name}: what confidence is worth")
    for (above, below), (name, drafter) in zip(grid.T, drafters.items(), strict=True):
        above.plot((0, 1), (0, 1), color=COLOURS[6], linestyle="--", linewidth=1, label="calibrated")
        domain, law = next(iter(drafter.domains.items()))
        for colour, positions, raw, accepted in _reliability(law, drafter, path):
            above.plot(raw, accepted, color=colour, label=f"raw, k = {positions}")
        above.set_title(
            f"{name}, {domain}" if isinstance(law, Bank) or len(drafter.domains) == 1 else f"{name}, all domains"
        )
        above.set_xlabel("confidence of a draft token")
        above.legend(loc="upper left")
        for colour, (domain, law) in zip(COLOURS, drafter.domains.items(), strict=False):
            chance, share = _chances(law, drafter, path)
            below.plot(chance, share, color=colour, label=domain)
        below.set_xlabel("calibrated confidence of the first draft token")
        below.legend(loc="upper left")
        for axes in (above, below):
            axes.set_xlim(0, 1)
            axes.set_ylim(0, 1)
        above.set_aspect("equal")
    grid[0, 0].set_ylabel("share accepted, given the prefix was")
    grid[1, 0].set_ylabel("share of rounds with at most that")
    return figure


def _reliability(law: DomainLaw, drafter: Drafter, path: Path) -> Iterator[tuple[str, str, Floats, Floats]]:
    """Yield colour, positions, raw confidence and acceptance; positions of equal temperature together."""
    if isinstance(law, ParametricLaw):
        raw = np.linspace(0.001, 0.999, 500)
        temperatures = law.confidence.raw_temperature
        for colour, t in zip(COLOURS, dict.fromkeys(temperatures), strict=False):
            at = [str(k) for k, other in enumerate(temperatures, start=1) if other == t]
            yield colour, ", ".join(at), raw, expit(logit(raw) / t)
        return
    bank = load_bank(law, path, drafter.trained_length)
    for colour, k in zip(
        COLOURS, dict.fromkeys((0, drafter.trained_length // 2, drafter.trained_length - 1)), strict=False
    ):
        bins = np.minimum((bank.confidence_raw[:, k] * 20).astype(np.int64), 19)
        count = np.bincount(bins, minlength=20)
        some = count > 0
        raw = np.bincount(bins, bank.confidence_raw[:, k], 20)[some] / count[some]
        yield colour, str(k + 1), raw, np.bincount(bins, bank.chance[:, k], 20)[some] / count[some]


def _chances(law: DomainLaw, drafter: Drafter, path: Path) -> tuple[Floats, Floats]:
    """Return the distribution of the calibrated confidence at position 1: values, share at most that."""
    if isinstance(law, Bank):
        confidence = np.sort(load_bank(law, path, drafter.trained_length).confidence[:, 0])
        return confidence, (np.arange(confidence.size) + 1) / confidence.size
    spread = law.spread
    variance = spread.request_sd**2 + spread.token_sd**2
    noise = law.confidence.noise_sd**2
    if variance == 0.0:
        return np.array([0.0, *[law.survival.values[0]] * 2, 1.0]), np.array([0.0, 0.0, 1.0, 1.0])
    shrink = variance / (variance + noise)
    seen = np.linspace(-4.0, 4.0, 801) * np.sqrt(variance + noise)
    mean = solve_means(law.survival.values, spread)[0]
    chance = ndtr((mean + shrink * seen) / np.sqrt(1 + (1 - shrink) * variance))
    return chance, ndtr(seen / np.sqrt(variance + noise))
