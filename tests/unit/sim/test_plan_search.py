"""The search for the smallest fleet: right where more never hurts, honest where it may; and how objectives are read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.compare import Estimate
from sim.errors import InputError
from sim.planning import Goal, parse_goal, smallest_fleet, sure_fleet


def drive(search, meets):
    """Answer a search by ``meets(size, judge)``; return its answer and the questions."""
    asked = []
    try:
        question = next(search)
        while True:
            asked.append(question)
            question = search.send(meets(*question))
    except StopIteration as end:
        return end.value, asked


@given(st.integers(1, 300), st.integers(1, 300))
def test_the_smallest_where_more_never_hurts(needed, most):
    answer, asked = drive(smallest_fleet(most), lambda size, _: size >= needed)
    assert answer == (needed if needed <= most else None)
    assert all(1 <= size <= most for size, _ in asked)
    assert len(asked) <= 24


@given(st.sets(st.integers(1, 40)), st.sets(st.integers(1, 40)), st.integers(1, 40))
def test_all_replications_have_judged_the_answer_and_one_less(first, mean, most):
    answer, asked = drive(smallest_fleet(most), lambda size, judge: size in (first if judge == "first" else mean))
    assert len(asked) == len(set(asked)) or len(asked) < 200
    if answer is None:
        assert (most, "mean") in asked
        assert most not in mean
        return
    assert answer in mean
    assert (answer, "mean") in asked
    assert answer == 1 or ((answer - 1, "mean") in asked and answer - 1 not in mean)


@given(st.integers(1, 100), st.integers(0, 20), st.integers(1, 100))
def test_a_sure_answer_lies_no_lower(needed, more, most):
    if needed <= most:
        sure, _ = drive(sure_fleet(needed, most), lambda size, _: size >= needed + more)
        assert sure == (needed + more if needed + more <= most else None)


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("user_tps_p50>=80", Goal("user_tokens_per_s_p50", ">=", 80)),
        ("user_tps_p10 >= 1e2", Goal("user_tokens_per_s_p10", ">=", 100)),
        ("ttft_p99<=2s", Goal("ttft_s_p99", "<=", 2)),
        (" ttft_s_p50 <= 80ms ", Goal("ttft_s_p50", "<=", 0.08)),
        ("tpot_p99<=12ms", Goal("tpot_s_p99", "<=", 0.012)),
        ("itl_p99<=1s", Goal("longest_itl_s_p99", "<=", 1)),
        ("goodput_ratio>=95%", Goal("goodput_ratio", ">=", 0.95)),
        ("goodput_ratio>=0.95", Goal("goodput_ratio", ">=", 0.95)),
        ("tps_per_gpu>=300", Goal("output_tokens_per_s_per_gpu", ">=", 300)),
        ("rejected<=0", Goal("rejected", "<=", 0)),
        ("busy_ratio<=80%", Goal("busy_ratio", "<=", 0.8)),
        ("busy_ratio>=20%", Goal("busy_ratio", ">=", 0.2)),
    ],
)
def test_objectives(text, goal):
    assert parse_goal(text) == goal
    assert parse_goal(str(goal)) == goal


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft_p99", "expected a metric, <= or >=, and a value"),
        ("ttft_p99<2s", "expected a metric, <= or >=, and a value"),
        ("ttft_p90<=2s", "unknown metric 'ttft_p90'; did you mean 'ttft_p99'? known: tps_per_gpu, "),
        ("ttft_p99<=2", "expected a duration such as '30s'"),
        ("ttft_p99>=2s", "'ttft_p99' is better when lower; write <= "),
        ("user_tps_p50<=80", "'user_tps_p50' is better when higher; write >="),
        ("user_tps_p50>=80%", "expected a number without % (got '80%')"),
        ("goodput_ratio>=95", "expected a share from 0 to 1, or per cent up to 100% (got '95')"),
        ("goodput_ratio>=x", "expected a number or per cent, such as 95% (got 'x')"),
        ("user_tps_p50>=nan", "expected a finite number, at least 0 (got 'nan')"),
    ],
)
def test_what_is_no_objective(text, message):
    with pytest.raises(InputError) as error:
        parse_goal(text)
    assert str(error.value).startswith(f"--objective {text}: {message}".rstrip())


def test_what_meets_an_objective():
    fast, soon = parse_goal("user_tps_p50>=80"), parse_goal("ttft_p99<=2s")
    assert fast.met_by(80)
    assert fast.met_by(float("inf"))
    assert not fast.met_by(79.9)
    assert not fast.met_by(None)
    assert soon.met_by(2)
    assert not soon.met_by(float("inf"))
    assert fast.surely_met_by(Estimate(85, 5))
    assert not fast.surely_met_by(Estimate(85, 6))
    assert not soon.surely_met_by(Estimate(1.9, 0.2))
    assert not soon.surely_met_by(Estimate(1.9, None))


def test_values_are_written_with_their_unit():
    soon = parse_goal("ttft_p99<=2s")
    assert (soon.shown(0.0123456), soon.shown(2.5), soon.shown(None), soon.shown(float("inf"))) == (
        "12.35ms",
        "2.5s",
        "-",
        "beyond",
    )
    assert soon.shown(1.5, 0.0251) == "1.500 ±0.025s"
    assert parse_goal("goodput_ratio>=95%").shown(0.5, 0.01) == "50.00 ±1.00%"
    assert parse_goal("user_tps_p50>=80").shown(1234.5, 10) == "1234 ±10"
