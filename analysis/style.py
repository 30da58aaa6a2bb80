"""How every plot looks: one colour and marker a policy, one frame for a figure, and files that appear whole.

No global state: figures are `matplotlib.figure.Figure` objects drawn inside `plot_style`, which puts
matplotlib's defaults and ours in force whatever the user's own settings are, and takes them back.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import matplotlib.style
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patheffects import AbstractPathEffect, withStroke
from matplotlib.textpath import text_to_path
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Dashes = Literal["solid"] | tuple[float, tuple[float, ...]]

PNG_DPI = 150
TITLE_SIZE, TEXT_SIZE, LEGEND_SIZE, SMALL_SIZE = 11.0, 9.0, 8.5, 7.5  # points
_LEGEND_IN = 2.1
MUTED = "#5c5c5c"
OBJECTIVE = "#303030"
OBJECTIVE_DASHES: Dashes = (0.0, (6.0, 3.0))
ORACLE_DASHES: Dashes = (0.0, (1.0, 1.6))

_SETTINGS: dict[str, Any] = {
    "font.size": TEXT_SIZE,
    "axes.titlesize": TEXT_SIZE,
    "axes.labelsize": TEXT_SIZE,
    "axes.edgecolor": "#808080",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.formatter.use_mathtext": False,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "xtick.color": "#606060",
    "ytick.color": "#606060",
    "xtick.labelcolor": "#303030",
    "ytick.labelcolor": "#303030",
    "legend.fontsize": LEGEND_SIZE,
    "legend.frameon": False,
    "text.parse_math": False,  # a dollar in a label is a dollar
    "svg.fonttype": "path",  # the same letters wherever it is shown
    "svg.hashsalt": "dspark-sim",  # ids that do not change from run to run
}


def plot_style() -> AbstractContextManager[None]:
    """Put our settings in force, over matplotlib's defaults, for the length of a ``with``."""
    return matplotlib.style.context(["default", _SETTINGS])


# ------------------------------------------------------------------------------------------------------------ policies


@dataclass(frozen=True, slots=True)
class Look:
    """How a policy is drawn, in every plot of every run."""

    color: str
    marker: str
    dashes: Dashes = "solid"
    rank: int = 0  # later ranks are drawn over earlier ones


# After Okabe and Ito: cool colours for policies that ignore load, warm ones for those that follow it; told apart with
# every common colour blindness (a test measures it), and by their markers.
_KINDS = {
    "none": Look("#9a9a9a", "X", rank=0),
    "mtp1": Look("#173a6b", "s", rank=1),
    "threshold": Look("#007f5b", "D", rank=3),
    "batch_table": Look("#eab01e", "v", rank=4),
    "dspark": Look("#d55000", "o", rank=7),
    "dspark_async": Look("#b8438f", "P", rank=6),
    "oracle": Look("#000000", "*", ORACLE_DASHES, rank=5),
}
_FIXED_SHADES = ("#b9e3ff", "#a2d6f8", "#8bc8f1", "#6db6e6", "#4fa3dc", "#318bca", "#1373b8")  # k = 1, ..., 7 and more
_STRANGERS = ("#6a5acd", "#8c6d31", "#4f9d9d", "#b56576")  # kinds of other distributions
_STRANGER_MARKERS = ("<", ">", "p", "h")
_VARIANT_DASHES: tuple[Dashes, ...] = ("solid", (0.0, (5.0, 1.6)), (0.0, (2.2, 1.4)), (0.0, (6.0, 1.6, 1.4, 1.6)))
_VARIANT_BLENDS = (0.0, -0.38, 0.38, -0.6)  # towards black, towards white


def look_of(policy: str) -> Look:
    """Return the look of a policy by its label alone: the kind and, for ``fixed``, k."""
    kind, *settings = policy.split() or [""]
    if kind == "fixed":
        most = len(_FIXED_SHADES)
        k = next((int(text[2:]) for text in settings if text.startswith("k=") and text[2:].isdigit()), most)
        return Look(_FIXED_SHADES[min(max(k, 1), most) - 1], "^", rank=2)
    if kind in _KINDS:
        return _KINDS[kind]
    lot = zlib.crc32(kind.encode())
    return Look(_STRANGERS[lot % len(_STRANGERS)], _STRANGER_MARKERS[lot // 7 % len(_STRANGER_MARKERS)], rank=5)


def looks(policies: Sequence[str]) -> dict[str, Look]:
    """Return the looks of the policies of one plot.

    Where several would look the same (one kind with other settings), the shortest label keeps the look of its kind;
    the others get another shade of its colour and other dashes.
    """
    found: dict[str, Look] = {}
    used: dict[Look, int] = {}
    for policy in sorted(dict.fromkeys(policies), key=lambda label: (len(label), label)):
        look = look_of(policy)
        nth = used.get(look, 0)
        used[look] = nth + 1
        blend = _VARIANT_BLENDS[nth % len(_VARIANT_BLENDS)]
        dashes = look.dashes if nth == 0 else _VARIANT_DASHES[nth % len(_VARIANT_DASHES)]
        color = _mix(look.color, "#ffffff" if blend > 0 else "#000000", abs(blend))
        found[policy] = replace(look, color=color, dashes=dashes) if nth else look
    return {policy: found[policy] for policy in dict.fromkeys(policies)}


def shown(policy: str, *, oracle: bool = False) -> str:
    """Return how a policy is called in legends: an upper bound is called that."""
    return f"{policy} (upper bound)" if oracle or policy.split()[:1] == ["oracle"] else policy


def nested_widths(lines: Mapping[str, Floats], width: float) -> dict[str, float]:
    """Return line widths: a line that another covers is wider than that one, so that both are seen.

    ``lines``: the values of each policy's line, all at the same places. Lines cover each other where they are the same
    (within 0.2 % of the largest value, and not 0) in at least half of the places.
    """
    found = looks(list(lines))
    order = sorted(lines, key=lambda policy: found[policy].rank)  # as they lie over each other; ties as given
    most = max((float(np.nanmax(values)) for values in lines.values() if not np.isnan(values).all()), default=1.0)

    def same(one: Floats, other: Floats) -> bool:
        if one.shape != other.shape or not one.size:
            return False
        return bool(np.mean((np.abs(one - other) <= 0.002 * most) & (one != 0)) >= 0.5)

    covers = {
        policy: sum(same(lines[policy], lines[upper]) for upper in order[nth + 1 :]) for nth, policy in enumerate(order)
    }
    return {policy: width + 1.8 * min(covers[policy], 2) for policy in lines}


def _mix(one: str, other: str, part: float) -> str:
    a, b = np.array(to_rgb(one)), np.array(to_rgb(other))
    red, green, blue = a + (b - a) * part
    return to_hex((float(red), float(green), float(blue)))


# -------------------------------------------------------------------------------------------------------------- figures


def new_figure(
    width_in: float,
    height_in: float,
    *,
    title: str,
    note: str,
    legend: Mapping[str, Artist],
    signs: Mapping[str, Artist],
) -> Figure:
    """Return a figure with a title above, the legend to the right and ``note`` in small print below.

    ``legend``: the policies. ``signs``: what the signs mean, in small print under them. All text is wrapped to its
    room; title, note and a long legend add to the height, so that the axes, the caller's to add, keep theirs.
    """
    heading = wrapped(title, width_in - 0.3, TITLE_SIZE, bold=True)
    small = wrapped(note, width_in - 0.3, SMALL_SIZE)
    labels = ["\n".join(wrapped(label, _LEGEND_IN - 0.55, LEGEND_SIZE)) for label in legend]
    meanings = ["\n".join(wrapped(label, _LEGEND_IN - 0.55, SMALL_SIZE)) for label in signs]
    legend_in = sum(0.1 + 0.15 * (1 + label.count("\n")) for label in [*labels, *meanings])
    head_in = 0.12 + 0.2 * len(heading) if heading else 0.05
    foot_in = 0.1 + 0.145 * len(small) if small else 0.05
    height_in = max(height_in, legend_in) + head_in + foot_in
    right_in = _LEGEND_IN if labels else 0.1
    figure = Figure(figsize=(width_in, height_in))
    FigureCanvasAgg(figure)
    room = (0.0, foot_in / height_in, 1.0 - right_in / width_in, 1.0 - (foot_in + head_in) / height_in)
    figure.set_layout_engine("constrained", rect=room, w_pad=0.1, h_pad=0.05, hspace=0.0)
    left, top = 0.15 / width_in, 1.0 - 0.1 / height_in
    figure.text(left, top, "\n".join(heading), va="top", size=TITLE_SIZE, weight="bold", linespacing=1.25)
    figure.text(left, 0.08 / height_in, "\n".join(small), va="bottom", size=SMALL_SIZE, color=MUTED, linespacing=1.3)
    if labels:
        box = figure.legend(
            [*legend.values(), *signs.values()],
            [*labels, *meanings],
            loc="upper left",
            bbox_to_anchor=(room[2], 1.0 - head_in / height_in),
            borderaxespad=0.0,
            borderpad=0.2,
            handlelength=2.4,
            labelspacing=0.65,
        )
        box.set_in_layout(False)
        for text in box.get_texts()[len(labels) :]:
            text.set(color=MUTED, size=SMALL_SIZE)
    return figure


def wrapped(text: str, width_in: float, size: float, *, bold: bool = False) -> list[str]:
    """Break ``text`` into lines no wider than ``width_in`` at ``size`` points; a word that is too long is cut."""
    room = width_in * 72 / size * 0.97  # a renderer's letters are a little wider
    space = _width(" ", bold)
    lines: list[str] = []
    for paragraph in text.strip().splitlines():
        line, used = "", 0.0
        for word in paragraph.split():
            for piece in _pieces(word, room, bold):
                width = _width(piece, bold)
                if line and used + space + width > room:
                    lines.append(line)
                    line, used = "", 0.0
                line, used = (f"{line} {piece}", used + space + width) if line else (piece, width)
        lines.append(line)
    return lines


def _pieces(word: str, room: float, bold: bool) -> Iterator[str]:
    """Cut a word into pieces that fit, after a sign such as / or = where there is one."""
    while len(word) > 1 and _width(word, bold) > room:
        widths = np.cumsum([_width(letter, bold) for letter in word])
        most = min(max(1, int(np.searchsorted(widths, room))), len(word) - 1)
        length = next((n for n in range(most, most // 2, -1) if word[n - 1] in "/=,;"), most)
        yield word[:length]
        word = word[length:]
    yield word


@lru_cache(maxsize=4096)
def _width(text: str, bold: bool) -> float:
    """Return the width of ``text`` in units of the font's size."""
    font = FontProperties(size=100, weight="bold" if bold else "normal")
    return float(text_to_path.get_text_width_height_descent(text, font, False)[0]) / 100


def say_no_data(axes: Axes) -> None:
    """Say in the middle of empty axes that there is nothing to draw, and drop their scale."""
    axes.set_yticks([])
    axes.text(
        0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color=MUTED, path_effects=[halo()]
    )


def halo() -> AbstractPathEffect:
    """Return the white rim that keeps small print readable over lines."""
    return withStroke(linewidth=2.5, foreground="white")


def finite(values: NDArray[np.generic]) -> Floats:
    """Return the values as floats, NaN where they are not finite: matplotlib leaves a gap there."""
    plain = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(plain), plain, np.nan)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; both are drawn before either appears, and they appear by rename.

    Call it inside `plot_style`. The same figure gives the same bytes: no dates, no versions, no random ids.
    """
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")  # once for both
    drawn: dict[Path, bytes] = {}
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=PNG_DPI, metadata=metadata)
        drawn[stem.with_name(f"{stem.name}.{kind}")] = buffer.getvalue()
    parts = {path: path.with_name(path.name + ".part") for path in drawn}
    try:
        for path, part in parts.items():
            part.write_bytes(drawn[path])
        for path, part in parts.items():
            part.replace(path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    return list(drawn)
