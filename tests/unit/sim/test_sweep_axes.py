"""What is varied: how axes are read, how they multiply, what is said of those that cannot be."""

import pytest

from profiles.reading import parse_document
from sim.axes import Axis, indices_at, label_at, parse_axis, size, values_at
from sim.cells import Cell, Work
from sim.errors import InputError
from sim.loading import checked, with_axes
from sim.scenario import at_point, parsed
from tests.helpers.scenario import TINY


def axis(text):
    return parse_axis(text)["values"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("load=0.2..1.4:7", [0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4]),
        ("load=1.4..0.2:3", [1.4, 0.8, 0.2]),
        ("load=0.1..10:3:log", [0.1, 1.0, 10.0]),
        ("fleet.replicas=1..64:7:log", [1, 2, 4, 8, 16, 32, 64]),
        ("fleet.replicas=4,8", [4, 8]),
        ("fleet.replicas = 4", [4]),
        ("horizon=30s, 1min", ["30s", "1min"]),
        ("fleet.max_waiting=100,null", [100, None]),
        ("fleet.prefill=exclusive,{kind: chunked}", ["exclusive", {"kind": "chunked"}]),
        ("arrivals.path=../a.csv,../b.csv", ["../a.csv", "../b.csv"]),
    ],
)  # fmt: skip
def test_values(text, values):
    assert axis(text) == values
    assert [type(value) for value in axis(text)] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("load", "expected KEY=VALUES such as"),
        ("load=", "expected KEY=VALUES such as"),
        ("load=1..2", "how many values? write 1..2:7 for seven"),
        ("load=1..2:1", "expected 2 to 100000 values in a range"),
        ("load=1..2:999999999", "expected 2 to 100000 values in a range"),
        ("load=1..1:3", "expected two different ends"),
        ("load=0..1:3:log", "a logarithmic range needs ends above 0"),
        ("load=1..2:3:lin", "expected a range such as"),
        ("load=1,,2", "expected values separated by commas"),
        ("load={1", "expected values separated by commas"),
    ],
)
def test_what_is_no_axis(text, message):
    with pytest.raises(InputError) as error:
        parse_axis(text)
    assert str(error.value).startswith(f"--vary {text}: {message}")


def test_points_are_the_product_and_the_last_axis_runs_fastest():
    axes = (Axis(key="a", values=(1, 2)), Axis(key="b", values=("x", "y", "z")))
    assert size(axes) == 6
    assert [values_at(axes, point) for point in range(6)] == [(a, b) for a in (1, 2) for b in "xyz"]
    assert [indices_at(axes, point) for point in (0, 1, 3)] == [(0, 0), (0, 1), (1, 0)]
    assert label_at(axes, 5) == "a=2, b=z"
    assert size(()) == 1
    assert values_at((), 0) == ()


def document(*texts):
    return with_axes(parse_document(TINY, "s.yaml"), texts)


def test_a_point_is_the_scenario_with_its_values_and_no_sweep():
    swept = document("fleet.replicas=2,3", "load=0.5,2")
    scenario = checked(swept)
    part = parsed(at_point(swept, scenario.axes, 3))
    assert (part.fleet.replicas, part.arrivals.rate_per_s, part.sweep) == (3, 8, None)


def test_the_file_s_own_sweep_is_the_same_as_the_option():
    option = checked(document("fleet.replicas=2,3"))
    for section in ("{key: fleet.replicas, values: [2, 3]}", "[{key: fleet.replicas, values: [2, 3]}]"):
        assert checked(parse_document(f"{TINY}sweep: {section}\n", "s.yaml")).axes == option.axes


def test_load_scales_what_another_axis_sets_whatever_their_order():
    for texts in (("load=2,3", "arrivals.rate_per_s=5"), ("arrivals.rate_per_s=5", "load=2,3")):
        swept = document(*texts)
        points = [parsed(at_point(swept, checked(swept).axes, point)) for point in range(2)]
        assert [one.arrivals.rate_per_s for one in points] == [10, 15]


def test_cells_take_all_policies_of_a_point_together():
    cells = Work(document("load=1,2")).cells()
    assert cells == [Cell(0, 0, 0), Cell(1, 0, 0), Cell(0, 1, 0), Cell(1, 1, 0)]
    assert Work(parse_document(TINY, "s.yaml")).cells() == [Cell(0, None, 0), Cell(1, None, 0)]


@pytest.mark.parametrize(
    ("texts", "faults"),
    [
        (["seed=1,2"], ["--vary seed=1,2: sweep[0].key: not a key that can be swept (got 'seed')"]),
        (["load=1,2", "load=3,4"], ["--vary load=3,4: sweep[1].key: is swept twice (got 'load')"]),
        (["load=1,1"], ["--vary load=1,1: sweep[0].values[1]: same as values[0] (got 1)"]),
        (["load=0,1"], ["--vary load=0,1: sweep[0].values[0]: load: expected a factor above 0 (got 0)"]),
        (["load=x"], ["--vary load=x: sweep[0].values[0]: load: expected a factor above 0 (got 'x')"]),
        # Of a grid, only the axis that is at fault is named, and once.
        (
            ["load=1,2,3", "fleet.replicas=1,0"],
            ["--vary fleet.replicas=1,0: sweep[1].values[1]: fleet.replicas: expected at least 1 (got 0)"],
        ),
        (
            ["warmup=0s,1s", "horizon=1s,3s"],
            [
                "--vary: sweep: with warmup = '1s', horizon = '1s': warmup: warmup and cooldown (1 s + 0 s) leave "
                "nothing of the horizon (1 s) to measure"
            ],
        ),
        (["load=1..9:400", "fleet.replicas=1..400:400"], [
            "--vary: sweep: makes 160000 combinations of values; at most 100000"
        ]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_sweep(texts, faults):
    with pytest.raises(InputError) as error:
        checked(document(*texts))
    assert str(error.value).splitlines() == faults
