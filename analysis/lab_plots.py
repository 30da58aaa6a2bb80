"""Plots of the lab's measurements: lines with 95 % intervals, in panels side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist

from analysis.style import MUTED, new_figure, plot_style, save, say_no_data
from profiles.recipes.banks import Estimate

#: Okabe and Ito's colours, which stay apart for colour-blind readers, and a marker each.
LOOKS = (
    ("#d55000", "o"),
    ("#173a6b", "s"),
    ("#007f5b", "D"),
    ("#b8438f", "^"),
    ("#eab01e", "v"),
    ("#4fa3dc", "P"),
    ("#808080", "X"),
    ("#000000", "*"),
)
_FAMILIES = ("dspark", "dflash", "eagle3", "mtp", "dspark_equal", "small_model", "dspark_rnn", "dspark_gated")


@dataclass(frozen=True, slots=True)
class Line:
    """A named line: where, and what was found there."""

    name: str
    at: Sequence[float]
    values: Sequence[Estimate]


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of lines; ``diagonal`` marks where both axes agree."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    bottom: float | None = None
    top: float | None = None
    diagonal: bool = False


def look(name: str, nth: int) -> tuple[str, str]:
    """Return colour and marker of a line: a drafter keeps its own in every plot."""
    return LOOKS[_FAMILIES.index(name) if name in _FAMILIES else nth % len(LOOKS)]


def draw_panels(panels: Sequence[Panel], title: str, stem: Path) -> list[Path]:
    """Draw panels beside each other as ``stem``.png and .svg; a name looks the same in each."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    with plot_style():
        legend: dict[str, Artist] = {}
        # The legend is made from what is drawn, so the figure is made twice: once for its handles.
        for _ in range(2):
            figure = new_figure(
                2.1 + 3.1 * len(panels), 3.0, title=title, note="Bars: 95 % intervals.", legend=legend, signs={}
            )
            for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
                if not any(len(line.at) for line in panel.lines):
                    say_no_data(axes)
                for line in panel.lines:
                    colour, marker = look(line.name, names.index(line.name))
                    value = np.array([one.value for one in line.values])
                    below = np.array([one.value - one.low for one in line.values])
                    above = np.array([one.high - one.value for one in line.values])
                    legend[line.name] = axes.errorbar(
                        line.at,
                        value,
                        np.maximum(np.nan_to_num([below, above]), 0.0),
                        color=colour,
                        marker=marker,
                        markersize=4,
                        linewidth=1.3,
                        elinewidth=0.8,
                        capsize=1.5,
                    )[0]
                if panel.diagonal:
                    axes.plot([0, 1], [0, 1], color=MUTED, linestyle="--", linewidth=0.8)
                axes.set_title(panel.title)
                axes.set_xlabel(panel.x)
                axes.set_ylabel(panel.y)
                axes.set_ylim(panel.bottom, panel.top)
                if all(value == int(value) for line in panel.lines for value in line.at) and not panel.diagonal:
                    axes.set_xticks(sorted({value for line in panel.lines for value in line.at}))
        return save(figure, stem)
