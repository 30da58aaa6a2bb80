"""The three plots of a run: what they show, the same bytes each time, and that thin data do not break them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

import analysis.frontier
import analysis.run_plots
from analysis.frontier import FrontierPoint, Interval, draw_frontier
from analysis.run_plots import draw_budget, draw_timeline, running_median, time_unit
from analysis.style import OBJECTIVE, look_of


def a_sweep() -> list[FrontierPoint]:
    points = []
    for policy, tokens in (("none", 1.0), ("mtp1", 1.8), ("fixed k=1", 1.8), ("dspark", 3.2), ("oracle", 4.0)):
        for load in (1, 16, 64):
            x = tokens * 60 / (1 + load / 50)
            ends = (x * 0.98, x * 1.02) if policy == "dspark" else (None, None)
            points.append(
                FrontierPoint(policy, str(load), Interval(x, *ends), Interval(x * load, None, None), policy == "oracle")
            )
    return points


def a_run(windows: int, policies=("none", "mtp1", "dspark", "oracle")) -> dict[str, dict[str, np.ndarray]]:
    at = np.arange(windows) * 10.0
    run = {}
    for nth, policy in enumerate(policies):
        decoding = 100 + 60 * np.sin(at / 80) - 9 * nth
        run[policy] = {
            "started_s": at,
            "arrivals_per_s": 20 + np.cos(at / 50),
            "decoding_per_gpu": decoding,
            "waiting": np.maximum(decoding - 130, 0),
            "user_tokens_per_s": 60.0 + 20 * nth - decoding / 10,
            "verify_tokens_per_request": 1.0 + nth + (0.002 * decoding if policy == "dspark" else 0 * decoding),
        }
    return run


def absent(run):
    return {policy: {name: values * np.nan for name, values in columns.items()} for policy, columns in run.items()}


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Return a function that draws without writing and hands back the figure."""
    figures: list[Figure] = []

    def keep(figure, stem):
        figures.append(figure)
        return []

    for module in (analysis.frontier, analysis.run_plots):
        monkeypatch.setattr(module, "save", keep)

    def call(draw, data, **options):
        draw(data, title="t", note="n", stem=tmp_path / "x", **options)
        return figures[-1]

    return call


FRONTIER = {"objective_user_tokens_per_s": 80.0}
BUDGET = {"requests_per": "GPU"}
TIMELINE = {"objective_user_tokens_per_s": 80.0, "measured": (20.0, 300.0)}


def texts(figure: Figure) -> list[str]:
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return [*legends, *(text.get_text() for axes in figure.axes for text in axes.texts)]


# ---------------------------------------------------------------------------------------------------------------- bytes


def draw_all(folder: Path) -> None:
    draw_frontier(a_sweep()[6:], title="sweep", note="assumed", stem=folder / "frontier", **FRONTIER)
    draw_budget(a_run(20, ("none", "dspark")), title="run", note="assumed", stem=folder / "budget", **BUDGET)
    draw_timeline(a_run(20, ("none", "dspark")), title="run", note="assumed", stem=folder / "timeline", **TIMELINE)


def test_every_plot_has_the_same_bytes_here_and_in_another_process(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    code = (
        "import pathlib, runpy, sys; runpy.run_path(sys.argv[1])['draw_all'](pathlib.Path(sys.argv[2]));"
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    other = subprocess.Popen([sys.executable, "-W", "error", "-c", code, __file__, str(there)], cwd=root)
    draw_all(here)
    assert other.wait(60) == 0
    names = sorted(path.name for path in here.iterdir())
    assert names == sorted(f"{stem}.{kind}" for stem in ("budget", "frontier", "timeline") for kind in ("png", "svg"))
    for name in names:
        assert (here / name).read_bytes() == (there / name).read_bytes(), name


# ------------------------------------------------------------------------------------------------------------- frontier


def markers(figure: Figure, policy: str):
    """Return the markers drawn of a policy: (x, y, size, filled)."""
    look = look_of(policy)
    lines = [
        line for line in figure.axes[0].lines if line.get_marker() == look.marker and line.get_linestyle() == "None"
    ]
    own = [line for line in lines if look.color in (line.get_markeredgecolor(), line.get_markerfacecolor())]
    return [
        (*(float(value[0]) for value in line.get_data()), line.get_markersize(), line.get_markerfacecolor() != "white")
        for line in own
    ]


def test_frontier_names_its_axes_with_units_and_emphasises_what_is_on_it(drawn):
    figure = drawn(draw_frontier, a_sweep(), **FRONTIER)
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "tokens/s per user (p50 over requests)",
        "output tokens/s per GPU",
    )
    assert [filled for *_, filled in markers(figure, "dspark")] == [True] * 3
    assert [filled for *_, filled in markers(figure, "none")] == [False] * 3
    assert [filled for *_, filled in markers(figure, "oracle")] == [False] * 3
    assert {"oracle (upper bound)", "objective: 80 tokens/s per user", "load 1", "load 64"} <= set(texts(figure))
    assert len(axes.collections) == 1  # the one kind of interval there is: dspark's, of interactivity


def test_points_that_coincide_are_nested(drawn):
    figure = drawn(draw_frontier, a_sweep(), **FRONTIER)
    inner, outer = markers(figure, "fixed k=1"), markers(figure, "mtp1")
    assert [place[:2] for place in inner] == [place[:2] for place in outer]
    assert all(b[2] >= a[2] + 3 for a, b in zip(inner, outer, strict=True))


def test_a_missing_point_interrupts_the_curve(drawn):
    points = [
        FrontierPoint("dspark", str(n), Interval(x, None, None), Interval(9.0, None, None))
        for n, x in ((1, 90.0), (2, None), (3, 70.0))
    ]
    figure = drawn(draw_frontier, points, **FRONTIER)
    curve = figure.axes[0].lines[0]
    assert np.isnan(curve.get_xdata()).tolist() == [False, True, False]
    assert len(markers(figure, "dspark")) == 2


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_frontier_without_points_says_so(drawn, value):
    point = FrontierPoint("none", None, Interval(value, None, None), Interval(3.0, None, None))
    assert "no data" in texts(drawn(draw_frontier, [point], **FRONTIER))
    assert "no data" in texts(drawn(draw_frontier, [], objective_user_tokens_per_s=None))


def test_one_point_is_enough(drawn):
    point = FrontierPoint("none", None, Interval(50.0, 49.0, float("inf")), Interval(0.0, None, None))
    figure = drawn(draw_frontier, [point], objective_user_tokens_per_s=None)
    low, high = figure.axes[0].get_xlim()
    assert low < 50 < high
    assert "no data" not in texts(figure)


# --------------------------------------------------------------------------------------------------------------- budget


def test_budget_has_a_dot_a_window_and_a_line_through_the_middle(drawn):
    figure = drawn(draw_budget, a_run(40), **BUDGET)
    axes = figure.axes[0]
    assert axes.get_xlabel() == "requests decoding per GPU"
    assert "verified tokens per request" in axes.get_ylabel()
    assert [len(dots.get_offsets()) for dots in axes.collections] == [40] * 4
    assert [line.get_color() for line in axes.lines] == [look_of(p).color for p in ("none", "mtp1", "dspark", "oracle")]
    assert np.unique(axes.lines[1].get_ydata()).tolist() == [2.0]


def test_a_running_median_follows_and_does_not_cross_where_nothing_is_known():
    x = np.concatenate([np.linspace(0, 20, 30), np.linspace(80, 100, 30)])
    at, median = running_median(x, 5 - x / 50)
    known = ~np.isnan(at)
    assert np.allclose(median[known], 5 - at[known] / 50, atol=0.05)
    assert np.isnan(at).sum() == 1
    assert not ((at > 21) & (at < 79)).any()
    for few in (0, 1, 11):
        assert running_median(x[:few], x[:few])[0].size == 0
    assert running_median(np.ones(50), np.ones(50))[0].size == 0


@pytest.mark.parametrize("run", [{}, a_run(0), absent(a_run(20))], ids=["no policy", "no window", "no value"])
def test_a_budget_without_data_says_so(drawn, run):
    assert "no data" in texts(drawn(draw_budget, run, **BUDGET))


def test_a_budget_of_one_window_is_a_dot(drawn):
    figure = drawn(draw_budget, a_run(1), **BUDGET)
    assert "no data" not in texts(figure)
    assert "line: running median" not in texts(figure)


# ------------------------------------------------------------------------------------------------------------- timeline


def panel(figure: Figure, label: str):
    return next(axes for axes in figure.axes if axes.get_ylabel().replace("\n", " ").startswith(label))


def test_timeline_has_a_panel_a_quantity_and_one_time_axis(drawn):
    figure = drawn(draw_timeline, a_run(40), **TIMELINE)
    assert [axes.get_ylabel().replace("\n", " ") for axes in figure.axes] == [
        "offered load (arrivals/s)",
        "requests decoding per GPU",
        "requests waiting (whole fleet)",
        "tokens/s per user",
        "verified tokens per request",
    ]
    assert figure.axes[-1].get_xlabel() == "time (min)"
    assert all(axes.patches[0].get_x() == pytest.approx(20 / 60) for axes in figure.axes)  # the shade
    assert "objective: 80" in texts(figure)
    speed = [line for line in panel(figure, "tokens/s").lines if line.get_color() == look_of("dspark").color]
    assert speed[0].get_xdata()[0] == pytest.approx(5 / 60)  # the middle of the first window


def test_a_load_offered_to_all_alike_is_drawn_once(drawn):
    run = a_run(40)
    assert {line.get_color() for line in panel(drawn(draw_timeline, run, **TIMELINE), "offered").lines} == {OBJECTIVE}
    run["none"]["arrivals_per_s"] = run["none"]["arrivals_per_s"] + 1  # closed loop: each policy makes its own
    colors = {line.get_color() for line in panel(drawn(draw_timeline, run, **TIMELINE), "offered").lines}
    assert colors == {look_of(policy).color for policy in run}


def test_waiting_has_a_panel_only_where_somebody_waits(drawn):
    run = a_run(40)
    for columns in run.values():
        columns["waiting"] = np.where(columns["waiting"] > 0, 0.0, np.nan)
    assert len(drawn(draw_timeline, run, **TIMELINE).axes) == 4


def test_a_panel_without_values_says_so_and_the_others_are_drawn(drawn):
    run = a_run(40)
    for columns in run.values():
        columns["user_tokens_per_s"] = columns["user_tokens_per_s"] * np.nan
    figure = drawn(draw_timeline, run, **TIMELINE)
    assert [axes.get_ylabel() for axes in figure.axes if axes.texts and axes.texts[0].get_text() == "no data"] == [
        "tokens/s\nper user"
    ]


def test_a_window_between_absent_ones_is_a_dot(drawn):
    run = a_run(5, ("dspark",))
    run["dspark"]["user_tokens_per_s"][[1, 3, 4]] = np.nan
    line, dots = panel(drawn(draw_timeline, run, **TIMELINE), "tokens/s").lines[:2]
    assert dots.get_marker() == "o"
    assert dots.get_ydata().tolist() == [line.get_ydata()[0], line.get_ydata()[2]]


@pytest.mark.parametrize("run", [{}, a_run(0), absent(a_run(20)), a_run(1)], ids=["none", "empty", "NaN", "one window"])
def test_thin_timelines_are_drawn(drawn, run):
    figure = drawn(draw_timeline, run, **TIMELINE)
    assert ("no data" in texts(figure)) == (run.get("none", {}).get("waiting", np.empty(0)).size != 1)


@pytest.mark.parametrize("longest_s, unit", [(0, "s"), (299, "s"), (300, "min"), (7200, "min"), (86400, "h")])
def test_time_has_the_unit_that_fits(longest_s, unit):
    assert time_unit(longest_s)[0] == unit
