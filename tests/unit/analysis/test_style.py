"""Looks that stay, colours that the colour-blind can tell apart, and files that appear whole."""

import itertools

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from analysis.style import look_of, looks, nested_widths, new_figure, plot_style, save, shown, wrapped

POLICIES = [
    "none",
    "mtp1",
    "fixed k=1",
    "fixed k=3",
    "fixed k=5",
    "fixed k=7",
    "threshold min_confidence=0.6",
    "batch_table table=1:5/64:3",
    "dspark",
    "dspark_async lag=2",
    "oracle",
]

# Machado, Oliveira and Fernandes (2009), severity 1; on linear RGB.
SIGHTS = {
    "ordinary": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def lab(color: str, sight: str) -> np.ndarray:
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(SIGHTS[sight]) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen
    f = np.cbrt(np.maximum(xyz / [0.9505, 1.0, 1.089], 0.008856))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHTS)
def test_policies_differ_in_colour_for_every_sight(sight):
    for one, other in itertools.combinations(POLICIES, 2):
        apart = np.linalg.norm(lab(look_of(one).color, sight) - lab(look_of(other).color, sight))
        assert apart > 10, (one, other)


def test_a_policy_looks_the_same_whoever_it_is_compared_with():
    found = looks(POLICIES)
    for policy in POLICIES:
        assert found[policy] == look_of(policy) == looks([policy])[policy]
    assert len({look.marker for look in found.values()}) == 8  # a marker a kind


def test_settings_of_one_kind_are_told_apart_and_the_plain_one_keeps_its_look():
    labels = ["dspark confidence=raw", "dspark", "dspark drafter=eagle3", "fixed k=3 drafter=mtp", "fixed k=3"]
    found = looks(labels)
    assert list(found) == labels
    assert found["dspark"] == look_of("dspark")
    assert found["fixed k=3"] == look_of("fixed k=3")
    assert len({(look.color, look.dashes) for look in found.values()}) == len(labels)


def test_a_strangers_policy_has_a_look_too():
    assert look_of("my_policy strength=3") == look_of("my_policy strength=4")
    assert look_of("") == look_of("")
    assert look_of("fixed k=many").marker == "^"


def test_an_upper_bound_is_called_that():
    assert shown("oracle") == "oracle (upper bound)"
    assert shown("mine", oracle=True) == "mine (upper bound)"
    assert shown("dspark") == "dspark"


def test_a_covered_line_is_wider_than_what_covers_it():
    level = np.full(10, 2.0)
    widths = nested_widths({"mtp1": level, "fixed k=1": level, "dspark": level + 1, "none": np.zeros(10)}, 1.0)
    assert widths["mtp1"] > widths["fixed k=1"] == widths["dspark"] == widths["none"] == 1.0
    nothing = np.full(3, np.nan)
    assert nested_widths({"mtp1": nothing, "none": nothing, "dspark": np.empty(0)}, 1.0)["none"] == 1.0


def test_text_is_wrapped_to_its_room():
    assert wrapped("", 3.0, 9.0) == []
    assert wrapped("one two", 9.0, 9.0) == ["one two"]
    lines = wrapped("word " * 30 + "batch_table=1:7/16:5/64:3/256:1/" * 3, 2.0, 9.0)
    assert len(lines) > 5
    assert "".join("".join(lines).split()) == "word" * 30 + "batch_table=1:7/16:5/64:3/256:1/" * 3
    assert wrapped("abc", 0.001, 9.0) == ["a", "b", "c"]


def figure_of(title: str) -> Figure:
    figure = new_figure(3.0, 2.0, title=title, note="", legend={}, signs={})
    figure.add_subplot()
    return figure


def test_files_appear_whole_and_nothing_else_is_left(tmp_path):
    with plot_style():
        files = save(figure_of("a"), tmp_path / "run.v2")
    assert [path.name for path in files] == ["run.v2.png", "run.v2.svg"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.v2.png", "run.v2.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert files[1].read_bytes().rstrip().endswith(b"</svg>")


def test_a_figure_that_cannot_be_drawn_leaves_what_was_there(tmp_path, monkeypatch):
    (tmp_path / "plot.png").write_text("earlier")
    draw = Figure.savefig

    def fail_on_svg(self, *args, format, **options):
        if format == "svg":
            raise ValueError("no")
        return draw(self, *args, format=format, **options)

    monkeypatch.setattr(Figure, "savefig", fail_on_svg)
    with plot_style(), pytest.raises(ValueError, match="no"):
        save(figure_of("a"), tmp_path / "plot")
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]
    assert (tmp_path / "plot.png").read_text() == "earlier"


def test_a_disk_that_fails_leaves_no_part(tmp_path):
    (tmp_path / "plot.svg.part").mkdir()  # cannot be written to
    with plot_style(), pytest.raises(OSError, match=r"plot\.svg\.part"):
        save(figure_of("a"), tmp_path / "plot")
    assert [path.name for path in tmp_path.iterdir()] == ["plot.svg.part"]


def test_settings_are_ours_whatever_the_users_are_and_are_taken_back():
    with mpl.rc_context({"font.size": 31.0, "axes.grid": False}):
        with plot_style():
            assert mpl.rcParams["font.size"] == 9.0
            assert mpl.rcParams["axes.grid"]
        assert mpl.rcParams["font.size"] == 31.0
