"""Curves evaluated: what a step costs at every size, and where that is not known."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from profiles.curves import draft_cost, evaluate, known_range, step_cost
from profiles.errors import ProfileError
from profiles.schema import (
    DraftCost,
    LawCurve,
    LinearPrefill,
    Prefill,
    PrefillAsVerify,
    Provenance,
    RowsPrefill,
    Segment,
    SourcedSeconds,
    StepTime,
    TableCurve,
)

SOURCED = Provenance(origin="fitted", source="a test")


def table(*segments: Segment, beyond: str = "refuse") -> TableCurve:
    return TableCurve(segments=segments, beyond=beyond, provenance=SOURCED)  # type: ignore[arg-type]


GRAPHS = Segment(between="round_up", sizes=(2, 4, 8), seconds=(0.02, 0.05, 0.03))
EAGER = Segment(between="linear", sizes=(16, 32), seconds=(0.4, 0.8))
LINE = Segment(between="linear", sizes=(2, 4, 8), seconds=(0.02, 0.05, 0.03))


def test_graph_sizes_are_padded_to_and_jags_are_kept() -> None:
    assert evaluate(table(GRAPHS), 8, "x").seconds.tolist() == [0, 0.02, 0.02, 0.05, 0.05, 0.03, 0.03, 0.03, 0.03]


def test_between_measured_sizes_a_linear_segment_interpolates() -> None:
    seconds = evaluate(table(LINE), 8, "x").seconds
    np.testing.assert_allclose(seconds, [0, 0.02, 0.02, 0.035, 0.05, 0.045, 0.04, 0.035, 0.03])


def test_past_a_segment_the_next_one_rules_alone() -> None:
    seconds = evaluate(table(GRAPHS, EAGER), 32, "x").seconds
    assert seconds[8] == 0.03
    assert seconds[9:17].tolist() == [0.4] * 8  # the cliff: no straight line from 0.03 to 0.4
    assert seconds[24] == pytest.approx(0.6)


def test_no_work_takes_no_time_and_a_step_has_a_floor() -> None:
    law = LawCurve(floor_s=0.01, per_unit_s=0.001, min_size=5, max_size=50, provenance=SOURCED)
    for curve, floor in ((table(GRAPHS), 0.02), (law, 0.015)):
        seconds = evaluate(curve, 8, "x").seconds
        assert seconds[0] == 0.0
        assert seconds[1] == pytest.approx(floor)


def test_a_law_is_its_formula() -> None:
    law = LawCurve(
        floor_s=0.01, saturating_s=0.004, saturation=20.0, per_unit_s=0.001, max_size=100, provenance=SOURCED
    )
    sizes = np.arange(1, 101)
    expected = 0.01 + 0.004 * (1 - np.exp(-sizes / 20.0)) + 0.001 * sizes
    np.testing.assert_allclose(evaluate(law, 100, "x").seconds[1:], expected)


def test_beyond_the_range_a_profile_refuses() -> None:
    with pytest.raises(ProfileError) as fault:
        evaluate(table(GRAPHS), 9, "step_time.verify (batch tokens)")
    assert str(fault.value) == (
        "step_time.verify (batch tokens) is known up to 8; 9 was asked for and the profile does not extrapolate"
    )


def test_beyond_the_range_a_law_goes_on_with_its_last_slope() -> None:
    law = LawCurve(
        floor_s=0.01,
        saturating_s=0.004,
        saturation=20.0,
        per_unit_s=0.001,
        max_size=10,
        beyond="extrapolate",
        provenance=SOURCED,
    )
    found = evaluate(law, 30, "x")
    slope = 0.001 + 0.004 / 20 * np.exp(-10 / 20)
    np.testing.assert_allclose(np.diff(found.seconds[10:]), slope)
    assert (found.known_from, found.known_to) == (1, 10)


def test_beyond_a_table_the_last_segments_slope_goes_on_but_never_down() -> None:
    rising = evaluate(table(GRAPHS, EAGER, beyond="extrapolate"), 34, "x").seconds
    assert rising[34] == pytest.approx(0.8 + 2 * 0.4 / 16)
    falling = Segment(between="linear", sizes=(1, 2), seconds=(0.5, 0.1))
    assert evaluate(table(falling, beyond="extrapolate"), 9, "x").seconds[9] == pytest.approx(0.1)
    single = Segment(between="linear", sizes=(4,), seconds=(0.5,))
    assert evaluate(table(single, beyond="extrapolate"), 9, "x").seconds[1:].tolist() == [0.5] * 9


def test_evaluated_arrays_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        evaluate(table(GRAPHS), 8, "x").seconds[1] = 0.0


def test_known_range() -> None:
    assert known_range(table(GRAPHS, EAGER)) == (2, 32)


LAW = LawCurve(floor_s=0.01, per_unit_s=0.001, max_size=100, provenance=SOURCED)
PREFILL = LinearPrefill(floor_s=0.005, per_token_s=0.0001, provenance=SOURCED)


def sourced(seconds: float) -> SourcedSeconds:
    return SourcedSeconds(seconds=seconds, provenance=SOURCED)


def test_a_step_adds_up() -> None:
    step_time = StepTime(
        verify=LAW,
        prefill=PREFILL,
        per_request=sourced(0.002),
        per_context_token=sourced(1e-6),
        overhead=sourced(0.003),
    )
    cost = step_cost(step_time, 50)
    decoding = 0.003 + 0.002 * 4 + 1e-6 * 5000 + (0.01 + 0.001 * 12)
    assert cost.target_s(4, 12, 5000, 0) == pytest.approx(decoding)
    assert cost.target_s(4, 12, 5000, 30) == pytest.approx(decoding + 0.0001 * 30)
    assert cost.target_s(0, 0, 0, 30) == pytest.approx(0.003 + 0.005 + 0.0001 * 30)


ROWS = RowsPrefill(floor_s=0.005, sizes=(10, 20), seconds=(0.03, 0.04), provenance=SOURCED)


def test_prompt_tokens_may_be_rows_of_the_pass_that_verifies() -> None:
    cost = step_cost(StepTime(verify=LAW, prefill=ROWS), 50)
    decoding = 0.01 + 0.001 * 5
    # From 5 rows (15 ms): between the sizes, at the last, and beyond it at the mean rate of 2 ms a row.
    for tokens, rows_s in ((5, 0.030), (10, 0.035), (15, 0.040), (17, 0.044)):
        assert cost.target_s(4, 5, 0, tokens) == pytest.approx(decoding + rows_s - 0.015)
        np.testing.assert_allclose(cost.prompts_s(np.array([0, 5]), tokens, 0)[1], rows_s - 0.015)
    assert cost.target_s(4, 5, 0, 0) == pytest.approx(decoding)
    assert cost.target_s(0, 0, 0, 5) == pytest.approx(0.005 + 0.015)
    assert [cost.is_outside(12, tokens) for tokens in (0, 1, 8, 9)] == [False, False, False, True]
    assert not cost.is_outside(30, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": (10,)}, "sizes and seconds differ in length: 1 and 2"),
        ({"sizes": (20, 10)}, "sizes must rise: 10 follows 20"),
        ({"seconds": (0.03, 0.02)}, "seconds must not fall, or a prompt would save time: 0.02 follows 0.03"),
    ],
)
def test_rows_of_prompts_are_a_table_that_rises(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RowsPrefill(**(ROWS.model_dump() | changes))


def test_letting_a_request_in_may_cost_by_itself() -> None:
    dear = PREFILL.model_copy(update={"per_request_s": 0.004})
    with_it, without = (step_cost(StepTime(verify=LAW, prefill=prefill), 50) for prefill in (dear, PREFILL))
    for step in ((4, 12, 0, 30), (0, 0, 0, 30)):
        assert with_it.target_s(*step, 3) == pytest.approx(without.target_s(*step, 3) + 3 * 0.004)
        assert with_it.target_s(*step, 0) == without.target_s(*step)


AS_VERIFY = PrefillAsVerify(provenance=SOURCED)


def test_prompts_may_cost_what_verified_tokens_cost() -> None:
    cost = step_cost(StepTime(verify=LAW, prefill=AS_VERIFY), 50)
    assert cost.target_s(4, 12, 0, 30) == pytest.approx(0.01 + 0.001 * 42)
    assert cost.target_s(0, 0, 0, 30) == pytest.approx(0.01 + 0.001 * 30)


def test_prompts_may_add_to_a_step_that_decodes_whatever_their_rows() -> None:
    with_it, without = (
        step_cost(StepTime(verify=LAW, prefill=prefill), 50)
        for prefill in (ROWS.model_copy(update={"beside_s": 0.007}), ROWS)
    )
    assert with_it.target_s(4, 5, 0, 10) == pytest.approx(without.target_s(4, 5, 0, 10) + 0.007)
    for step in ((4, 5, 0, 0), (0, 0, 0, 10)):
        assert with_it.target_s(*step) == without.target_s(*step)


@pytest.mark.parametrize("prefill", [PREFILL, ROWS, AS_VERIFY])
def test_a_drafter_that_takes_prompts_in_has_its_price(prefill: Prefill) -> None:
    own = LinearPrefill(floor_s=0.3, per_token_s=0.02, per_request_s=0.001, provenance=SOURCED)
    step_time = StepTime(verify=LAW, prefill=prefill, draft={"block": DraftCost(per="round", curve=LAW, prefill=own)})
    alone, both = step_cost(step_time, 80), step_cost(step_time, 80, "block")
    for tokens in (3, 16, 40):
        assert both.target_s(4, 12, 0, tokens, 2) == pytest.approx(
            alone.target_s(4, 12, 0, tokens, 2) + 0.02 * tokens + 0.002
        )
        assert both.target_s(0, 0, 0, tokens) == pytest.approx(alone.target_s(0, 0, 0, tokens) + 0.3 + 0.02 * tokens)
    assert both.target_s(4, 12, 0, 0) == alone.target_s(4, 12, 0, 0)


def test_draft_cost_is_by_drafter() -> None:
    step_time = StepTime(verify=LAW, prefill=PREFILL, draft={"chain": DraftCost(per="token", curve=LAW)})
    found, per_token = draft_cost(step_time, "chain", 3)
    assert per_token
    np.testing.assert_allclose(found.seconds, [0, 0.011, 0.012, 0.013])
    with pytest.raises(ProfileError) as fault:
        draft_cost(step_time, "block", 3)
    assert str(fault.value) == "step_time.draft: no draft cost for drafter 'block'; known: chain"
