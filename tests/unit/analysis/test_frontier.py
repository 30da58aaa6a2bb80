"""What is on the frontier, the table read off it and the area under it, on cases made by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.frontier import FrontierPoint, Interval, area_under, curves, frontier_table, pareto


def point(x: float | None, y: float | None, policy: str = "dspark", load: str | None = None, oracle: bool = False):
    return FrontierPoint(policy, load, Interval(x, None, None), Interval(y, None, None), oracle)


def front(*places: tuple[float | None, float | None]) -> list[bool]:
    return pareto([point(x, y) for x, y in places])


def test_one_point_is_the_frontier():
    assert front((80.0, 1000.0)) == [True]
    assert front() == []


def test_both_directions_are_better_upwards():
    assert front((100.0, 1000.0), (50.0, 2000.0), (40.0, 1500.0), (90.0, 900.0)) == [True, True, False, False]


def test_equal_points_are_both_kept_and_a_tie_in_one_direction_is_decided_by_the_other():
    assert front((80.0, 1000.0), (80.0, 1000.0)) == [True, True]
    assert front((80.0, 1000.0), (80.0, 1200.0)) == [False, True]
    assert front((80.0, 1000.0), (90.0, 1000.0)) == [False, True]


@pytest.mark.parametrize("absent", [None, math.nan, math.inf, -math.inf])
def test_what_does_not_exist_is_never_on_it_and_beats_nothing(absent):
    assert front((absent, 9e9), (80.0, 1000.0), (999.0, absent), (absent, absent)) == [False, True, False, False]


def test_an_upper_bound_is_compared_with_nothing():
    assert pareto([point(200.0, 9000.0, "oracle", oracle=True), point(80.0, 1000.0)]) == [False, True]


@given(st.lists(st.tuples(*[st.one_of(st.none(), st.just(math.nan), st.integers(0, 4).map(float))] * 2), max_size=12))
def test_laws_of_the_frontier(places):
    on = front(*places)
    known = {place for place in places if all(value is not None and value == value for value in place)}
    kept = {place for place, keep in zip(places, on, strict=True) if keep}
    assert kept <= known
    assert bool(kept) == bool(known)
    for place in known:  # everything is matched or beaten by something kept, and nothing kept is beaten
        assert any(a >= place[0] and b >= place[1] for a, b in kept)
    assert not any(p != q and p[0] >= q[0] and p[1] >= q[1] for p in known for q in kept)


# --------------------------------------------------------------------------------------------------------------- curves


def test_points_are_joined_in_order_of_load():
    def order(*loads):
        return [one.load for one in curves([point(1.0, 1.0, load=load) for load in loads])["dspark"]]

    assert order("64", "8", "128") == ["8", "64", "128"]
    assert order("arrivals.users=64", "arrivals.users=8") == ["arrivals.users=8", "arrivals.users=64"]
    assert order("high", "low") == ["high", "low"]
    assert order(None, None) == [None, None]


# ---------------------------------------------------------------------------------------------------------------- table

SWEEP = [
    point(100.0, 1000.0, load="1"),
    point(80.0, 3000.0, load="2"),
    point(60.0, 4000.0, load="4"),
    point(50.0, 2000.0, "mtp1", load="1"),
]


def test_the_table_interpolates_along_a_policys_own_curve_and_stops_at_its_ends():
    table = frontier_table(SWEEP, [50.0, 60.0, 70.0, 90.0, 100.0, 101.0])
    assert table["dspark"] == {50.0: None, 60.0: 4000.0, 70.0: 3500.0, 90.0: 2000.0, 100.0: 1000.0, 101.0: None}
    assert table["mtp1"] == {50.0: 2000.0, 60.0: None, 70.0: None, 90.0: None, 100.0: None, 101.0: None}


def test_the_table_takes_the_best_of_a_curve_that_turns_back():
    turning = [point(100.0, 1000.0, load="1"), point(60.0, 4000.0, load="2"), point(90.0, 3000.0, load="3")]
    assert frontier_table(turning, [90.0, 80.0])["dspark"] == {90.0: 3000.0, 80.0: pytest.approx(4000 - 2000 / 3)}


def test_the_table_does_not_bridge_a_missing_point():
    broken = [point(100.0, 1000.0, load="1"), point(None, 5.0, load="2"), point(60.0, 4000.0, load="3")]
    assert frontier_table(broken, [100.0, 80.0, 60.0])["dspark"] == {100.0: 1000.0, 80.0: None, 60.0: 4000.0}
    assert frontier_table([], [80.0]) == {}


# ----------------------------------------------------------------------------------------------------------------- area


def test_area_of_one_point_is_its_rectangle():
    assert area_under([point(80.0, 1000.0)]) == {"dspark": 80_000.0}
    assert area_under([point(80.0, 1000.0)], from_user_tokens_per_s=50.0) == {"dspark": 30_000.0}
    assert area_under([point(80.0, 1000.0)], from_user_tokens_per_s=90.0) == {"dspark": 0.0}


def test_area_of_a_curve_is_a_rectangle_and_trapezoids():
    assert area_under(SWEEP)["dspark"] == 60 * 4000 + 20 * 3500 + 20 * 2000
    assert area_under(SWEEP, from_user_tokens_per_s=70.0)["dspark"] == 10 * 3250 + 20 * 2000


def test_a_point_that_the_policys_own_curve_beats_adds_no_area():
    assert area_under([*SWEEP, point(55.0, 3900.0, load="8")])["dspark"] == area_under(SWEEP)["dspark"]


def test_area_is_absent_where_there_is_no_point():
    assert area_under([point(None, None), point(math.nan, 3.0)]) == {"dspark": None}
    assert area_under([]) == {}
