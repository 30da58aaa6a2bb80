"""Each policy by hand, its settings, and what it refuses."""

import dataclasses

import numpy as np
import pytest

from profiles.errors import InputError
from profiles.reading import parse_document, validate
from sim.verify import (
    POLICIES,
    BatchTable,
    Dspark,
    DsparkAsync,
    Fixed,
    Mtp1,
    NoSpeculation,
    Oracle,
    Policy,
    Threshold,
)

EACH = [
    NoSpeculation(),
    Mtp1(),
    Fixed(k=2),
    Threshold(min_confidence=0.5),
    BatchTable(table=((1, 3), (4, 1)), hysteresis=1),
    Dspark(),
    DsparkAsync(lag=1, first_budget=1),
    Oracle(),
]
CONFIDENCE = np.array([[0.9, 0.8, 0.7], [0.6, 0.4, 0.9], [0.2, 1.0, 1.0]])
FLAT = np.ones(3 * 4 + 1)


def read(cls: type, yaml: str) -> object:
    return validate(cls, parse_document(yaml, "policy.yaml"))


def test_all_kinds_are_registered_in_order() -> None:
    known = list(POLICIES.known())
    assert known[:8] == ["none", "mtp1", "fixed", "threshold", "batch_table", "dspark", "dspark_async", "oracle"]


@pytest.mark.parametrize("policy", EACH, ids=lambda policy: policy.kind)
def test_keeps_the_seam(policy: Policy) -> None:
    assert isinstance(policy, Policy)
    assert type(policy) is POLICIES.known()[policy.kind]
    assert dataclasses.is_dataclass(policy)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.kind = "other"  # type: ignore[misc]
    assert (policy.drafter is None) == (policy.kind == "none")
    assert policy.sees_outcome == (policy.kind == "oracle")
    verifier = policy.start()
    drafted = verifier.draft_length(3, 3)
    assert 0 <= drafted <= 3
    lengths = verifier.verify_lengths(CONFIDENCE[:, : max(drafted, 1)], FLAT)
    assert lengths.dtype == np.int64
    assert lengths.shape == (3,)
    assert verifier.verify_lengths(np.empty((0, 3)), FLAT).shape == (0,)


@pytest.mark.parametrize("policy", EACH, ids=lambda policy: policy.kind)
def test_two_replicas_share_no_memory(policy: Policy) -> None:
    one, other = policy.start(), policy.start()
    alone = policy.start()
    for requests in (3, 2, 1):
        one.draft_length(requests, 3)
        one.verify_lengths(CONFIDENCE[:requests], FLAT)
    assert other.draft_length(3, 3) == alone.draft_length(3, 3)
    assert other.verify_lengths(CONFIDENCE, FLAT).tolist() == alone.verify_lengths(CONFIDENCE, FLAT).tolist()


def test_none_drafts_nothing() -> None:
    assert NoSpeculation().draft_length(1, 7) == 0
    assert not NoSpeculation().verify_lengths(CONFIDENCE, FLAT).any()


def test_mtp1_has_its_own_drafter_and_one_token() -> None:
    assert Mtp1().drafter == "mtp"
    assert Mtp1().draft_length(500, 1) == 1
    assert Mtp1().verify_lengths(CONFIDENCE[:, :1], FLAT).tolist() == [1, 1, 1]


def test_fixed_verifies_k_or_what_was_drafted() -> None:
    assert Fixed(k=2).draft_length(9, 7) == 2
    assert Fixed(k=2).verify_lengths(CONFIDENCE, FLAT).tolist() == [2, 2, 2]
    assert Fixed(k=5).verify_lengths(CONFIDENCE, FLAT).tolist() == [3, 3, 3]


def test_a_block_drafter_is_asked_for_its_block_at_most() -> None:
    """Beyond the trained block acceptance collapses, silently; a chain can be drawn out."""
    Fixed(k=5).check_drafter(5, "block")
    Fixed(k=7).check_drafter(5, "chain")
    with pytest.raises(ValueError, match=r"^k: expected at most the drafter's trained block of 5 \(got 7\)$"):
        Fixed(k=7).check_drafter(5, "block")
    with pytest.raises(ValueError, match=r"^table\[1\]\[1\]: expected at most .* block of 5 \(got 6\)$"):
        BatchTable(table=((1, 5), (9, 6))).check_drafter(5, "block")
    for policy in EACH:
        policy.check_drafter(3, "block")


def test_threshold_takes_the_prefix_above_its_floor() -> None:
    assert Threshold(min_confidence=0.6).verify_lengths(CONFIDENCE, FLAT).tolist() == [3, 1, 0]
    assert Threshold(min_confidence=0.0).verify_lengths(CONFIDENCE, FLAT).tolist() == [3, 3, 3]
    assert Threshold(min_confidence=1.0).verify_lengths(CONFIDENCE, FLAT).tolist() == [0, 0, 0]


def test_a_table_goes_by_running_requests() -> None:
    reader = BatchTable(table=((1, 7), (16, 5), (64, 3), (256, 0))).start()
    lengths = {requests: reader.draft_length(requests, 7) for requests in (1, 15, 16, 63, 64, 255, 256, 1000, 15, 0)}
    assert lengths == {1: 7, 15: 7, 16: 5, 63: 5, 64: 3, 255: 3, 256: 0, 1000: 0, 0: 7}


def test_hysteresis_holds_a_row() -> None:
    reader = BatchTable(table=((1, 3), (10, 2), (20, 1)), hysteresis=2).start()
    steps = [(9, 3), (11, 3), (12, 2), (9, 2), (8, 2), (7, 3), (21, 1), (22, 1), (18, 1), (17, 2), (40, 1), (1, 3)]
    assert [reader.draft_length(requests, 3) for requests, _ in steps] == [length for _, length in steps]


def test_asking_a_table_twice_changes_nothing() -> None:
    reader = BatchTable(table=((1, 3), (2, 2), (3, 1)), hysteresis=1).start()
    for requests in (1, 2, 3, 2, 1):
        length = reader.draft_length(requests, 3)
        assert reader.draft_length(requests, 3) == length
        assert reader.verify_lengths(CONFIDENCE[:requests], FLAT).tolist() == [length] * requests


def test_a_table_verifies_no_more_than_was_drafted() -> None:
    assert BatchTable(table=((1, 7),)).start().verify_lengths(CONFIDENCE, FLAT).tolist() == [3, 3, 3]


def test_dspark_stops_where_the_curve_does_not_pay() -> None:
    # Survivals by rank: .9 .72 .6 .504 .24 .216 .2 .2 .2
    assert Dspark().verify_lengths(CONFIDENCE, FLAT).tolist() == [3, 3, 3]
    step_s = np.arange(13) * 0.1 + 1.0
    assert Dspark().verify_lengths(CONFIDENCE, 1 / step_s).tolist() == [3, 1, 0]


def test_dspark_takes_the_first_request_of_equals() -> None:
    rates = np.array([np.inf, 1, 1, 1, 1, 0.1])
    assert Dspark().verify_lengths(np.full((2, 1), 0.5), rates[:5]).tolist() == [1, 1]
    assert Dspark().verify_lengths(np.full((2, 1), 0.5), np.array([np.inf, 1, 1, 1, 0.1])).tolist() == [1, 0]
    assert Dspark().verify_lengths(
        np.array([[1.0, 1.0], [1.0, 1.0]]), np.array([np.inf, 1, 1, 1, 1, 0.1, 0.1])
    ).tolist() == [
        2,
        0,
    ]


def test_a_candidate_that_leaves_throughput_as_it_is_is_not_taken() -> None:
    # One request: 1 token at rate 1, or 1.5 tokens at rate 1 / 1.5.
    assert Dspark().verify_lengths(np.array([[0.5]]), np.array([np.inf, 1.5, 1.0])).tolist() == [0]


def test_the_lagged_budget_is_that_of_exactly_lag_steps_ago() -> None:
    """Confidences size the budget once, ``lag`` steps later; those of now only rank."""
    sure, unsure = np.array([[1.0, 1.0]]), np.array([[0.0, 0.0]])
    flat = np.ones(4)
    for lag in (1, 2, 3):
        verifier = DsparkAsync(lag=lag, first_budget=1).start()
        offered = [sure, unsure, sure, sure, unsure, unsure, sure, unsure, sure]
        spent = [int(verifier.verify_lengths(confidence, flat)[0]) for confidence in offered]
        earlier = [1] * lag + [2 if confidence is sure else 0 for confidence in offered[:-lag]]
        assert spent == earlier


def test_the_lagged_budget_counts_this_steps_requests() -> None:
    verifier = DsparkAsync(lag=1).start()
    flat = np.ones(100)
    assert verifier.verify_lengths(np.ones((2, 3)), flat).tolist() == [0, 0]  # best batch: 8
    assert verifier.verify_lengths(np.ones((5, 3)), flat).tolist() == [3, 0, 0, 0, 0]  # 8 - 5; best now: 20
    assert verifier.verify_lengths(np.ones((1, 3)), flat).tolist() == [3]  # 19 wanted, 3 there; best now: 4
    assert verifier.verify_lengths(np.ones((6, 3)), flat).tolist() == [0] * 6  # 4 - 6 is less than nothing


def test_the_first_budget_is_a_request() -> None:
    assert DsparkAsync(lag=1, first_budget=2).start().verify_lengths(CONFIDENCE, FLAT).tolist() == [3, 3, 0]
    assert DsparkAsync(lag=1, first_budget=9).start().verify_lengths(CONFIDENCE, FLAT).tolist() == [3, 3, 3]


def test_the_lagged_budget_keeps_to_what_the_engine_can_run() -> None:
    rates = FLAT.copy()
    rates[3 + 5 :] = 0.0
    assert DsparkAsync(lag=1, first_budget=3).start().verify_lengths(CONFIDENCE, rates).sum() == 4


def test_the_oracle_takes_what_will_be_accepted() -> None:
    outcome = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert Oracle().verify_lengths(outcome, FLAT).tolist() == [1, 0, 3]


@pytest.mark.parametrize("policy", [Threshold(min_confidence=0.5), Dspark(), DsparkAsync(), Oracle()])
def test_a_confidence_that_is_no_chance_is_refused(policy: Policy) -> None:
    """A NaN row must surface, not become a length."""
    for wrong in (np.nan, -0.1, 1.5, np.inf):
        confidence = CONFIDENCE.copy()
        confidence[1, 2] = wrong
        with pytest.raises(
            ValueError, match=r"^confidence\[1, 2\]: expected a chance in 0..1 \(got (nan|-0.1|1.5|inf)\)"
        ):
            policy.start().verify_lengths(confidence, FLAT)


def test_too_short_a_curve_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^steps_per_s: expected at least 13 rates, index 0 included \(got 12\)$"):
        Dspark().verify_lengths(CONFIDENCE, FLAT[:-1])
    with pytest.raises(ValueError, match="expected an array"):
        Dspark().verify_lengths(CONFIDENCE[0], FLAT)


def test_other_layouts_and_types_of_the_same_numbers_do() -> None:
    rates = 1 / (1 + 0.1 * np.arange(13))
    expected = Dspark().verify_lengths(CONFIDENCE, rates).tolist()
    assert Dspark().verify_lengths(np.asfortranarray(CONFIDENCE), rates).tolist() == expected
    assert Dspark().verify_lengths(CONFIDENCE.astype(np.float32), rates).tolist() == expected
    frozen = CONFIDENCE.copy()
    frozen.setflags(write=False)
    assert Dspark().verify_lengths(frozen, rates).tolist() == expected


@pytest.mark.parametrize(
    ("kind", "yaml", "message"),
    [
        ("fixed", "kind: fixed", "policy.yaml:1: k: missing"),
        ("fixed", "k: 0", "policy.yaml:1: k: expected at least 1 (got 0)"),
        ("fixed", "k: '3'", "policy.yaml:1: k: expected a whole number (got '3')"),
        (
            "threshold",
            "min_confidence: 1.5",
            "policy.yaml:1: min_confidence: expected at most 1 (got 1.5)",
        ),
        ("threshold", "min_confidence: .nan", "policy.yaml:1: min_confidence: expected"),
        ("dspark", "confidence: cooked", "policy.yaml:1: confidence: expected 'calibrated' or 'raw' (got 'cooked')"),
        ("dspark_async", "lag: 0", "policy.yaml:1: lag: expected at least 1 (got 0)"),
        (
            "dspark_async",
            "first_budget: -1",
            "policy.yaml:1: first_budget: expected at least 0 (got -1)",
        ),
        ("batch_table", "table: [[2, 7]]", "table: expected the first row to start at 1 request (got 2)"),
        ("batch_table", "table: [[1, 7], [1, 3]]", "table: expected requests to rise from row to row (got 1 after 1)"),
        ("batch_table", "table: [[1, 0]]", "table: expected a length above 0 in some row; for no drafting at all use"),
        ("batch_table", "table: []", "policy.yaml:1: table:"),
        (
            "batch_table",
            "{table: [[1, 7]], hysteresis: -1}",
            "hysteresis: expected at least 0 (got -1)",
        ),
    ],
)
def test_settings_that_are_refused(kind: str, yaml: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        read(POLICIES.known()[kind], yaml)
    assert message in str(refused.value)


@pytest.mark.parametrize("kind", ["none", "mtp1", "fixed", "batch_table", "oracle"])
def test_a_confidence_that_would_not_be_read_is_no_setting(kind: str) -> None:
    """An option without effect is an error."""
    with pytest.raises(InputError, match="confidence"):
        read(POLICIES.known()[kind], "{confidence: raw, k: 2, table: [[1, 1]]}")


def test_no_lag_is_refused_from_python_too() -> None:
    with pytest.raises(ValueError, match=r"lag: expected at least 1, .* not lossless \(got 0\)"):
        DsparkAsync(lag=0)


def test_settings_are_read() -> None:
    assert read(BatchTable, "{table: [[1, 7], [16, 5]], hysteresis: 4}") == BatchTable(
        table=((1, 7), (16, 5)), hysteresis=4
    )
    assert read(Threshold, "{min_confidence: 1, confidence: raw, drafter: eagle3}") == Threshold(
        min_confidence=1.0, confidence="raw", drafter="eagle3"
    )
