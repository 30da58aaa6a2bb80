"""Calibration against DeepSpec's metrics, and the laws it must obey."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from decoder.calibration import (
    GRID,
    MIN_OUTCOMES,
    Calibration,
    CalibrationError,
    Outcomes,
    ece_table,
    fit_temperatures,
    judge,
    load_calibration,
    outcomes_of,
    save_calibration,
    summary,
    survival_of,
)
from decoder.session import Round

TOLERANCE = 1e-4  # the reference's, for ECE, AUC and Brier


@pytest.fixture(scope="module")
def synthetic(deepspec):
    tensors = load_file(deepspec / "confidence" / "synthetic.safetensors")
    survived = tensors["prefix_accept"].astype(bool)
    outcomes = Outcomes(tensors["confidence_logits"].astype(np.float64), survived, np.ones_like(survived))
    return outcomes, tensors


def check_qualities(found, want):
    names = {
        "ece": "ece",
        "auc": "auc",
        "brier": "brier",
        "mean_confidence": "pred_mean",
        "mean_outcome": "target_mean",
    }
    assert len(found) == len(want)
    for quality, expected in zip(found, want, strict=True):
        assert quality.outcomes == expected["total_weight"]
        for ours, theirs in names.items():
            if expected[theirs] is None:
                assert getattr(quality, ours) is None
            else:
                assert getattr(quality, ours) == pytest.approx(expected[theirs], abs=TOLERANCE)
        for bar, row in zip(quality.reliability, expected.get("reliability", ()), strict=False):
            assert bar.low == pytest.approx(row["range"][0])
            # A value next to an edge may fall to the other side, which moves two bars by one outcome.
            assert abs(bar.outcomes - row["weight"]) <= 1
            assert bar.mean_confidence == pytest.approx(row["avg_pred"], abs=0.05)


def test_raw_metrics(synthetic, deepspec):
    want = json.loads((deepspec / "confidence" / "metrics.json").read_text())
    found = judge(synthetic[0])
    check_qualities(found, want["raw"]["per_position"])
    means = summary(found)
    for ours, theirs in (("ece", "ece_mean"), ("auc", "auc_mean"), ("brier", "brier_mean")):
        assert means[ours] == pytest.approx(want["raw"]["summary"][theirs], abs=TOLERANCE)


def test_sequential_temperature_scaling(synthetic, deepspec):
    outcomes, tensors = synthetic
    want = json.loads((deepspec / "confidence" / "metrics.json").read_text())
    assert pytest.approx(tensors["temperature_grid"].tolist()) == list(GRID)
    temperatures = fit_temperatures(outcomes)
    assert temperatures == pytest.approx(tuple(tensors["sts_temperatures"]))
    np.testing.assert_allclose(ece_table(outcomes, temperatures), tensors["sts_ece_table"], atol=TOLERANCE)
    calibrated = judge(outcomes, temperatures)
    check_qualities(calibrated, want["calibrated_sts"]["per_position"])
    assert summary(calibrated)["ece"] < 0.25 * summary(judge(outcomes))["ece"]


def test_ragged_proposals(deepspec):
    want = json.loads((deepspec / "confidence" / "ragged.json").read_text())
    proposals, length = want["proposals"], want["block_size"]
    shape = (len(proposals), length)
    logits, survived, known = np.zeros(shape), np.zeros(shape, bool), np.zeros(shape, bool)
    for row, proposal in enumerate(proposals):
        n = len(proposal["confidence_logits"])
        logits[row, :n] = proposal["confidence_logits"]
        survived[row, :n] = proposal["prefix_accept"]
        known[row, :n] = True
    found = judge(Outcomes(logits, survived, known))
    check_qualities(found, want["per_position"])
    means = summary(found)
    for ours, theirs in (("ece", "ece_mean"), ("auc", "auc_mean"), ("brier", "brier_mean")):
        assert means[ours] == pytest.approx(want["summary"][theirs], abs=TOLERANCE)


def synthetic_outcomes(rng, blocks, chances, sharpness=1.0):
    """Independent steps whose true log odds are known; the logits shown are ``sharpness`` times those."""
    odds = np.log(chances / (1 - np.asarray(chances))) + rng.normal(0, 1, (blocks, len(chances)))
    step = rng.random(odds.shape) < 1 / (1 + np.exp(-odds))
    survived = np.cumprod(step, 1).astype(bool)
    return Outcomes(odds * sharpness, survived, np.ones_like(survived))


def test_overconfident_logits_are_cooled_by_their_factor(rng):
    outcomes = synthetic_outcomes(rng, 20_000, [0.8, 0.7, 0.6], sharpness=3)
    temperatures = fit_temperatures(outcomes)
    assert temperatures == pytest.approx((3, 3, 3), abs=0.6)
    raw, calibrated = summary(judge(outcomes)), summary(judge(outcomes, temperatures))
    assert calibrated["ece"] < 0.2 * raw["ece"]


def test_scaling_keeps_the_order_at_each_position(rng):
    logits = rng.normal(size=(50, 1))
    raw, cooled = survival_of(logits), survival_of(logits, [2.5])
    assert (np.argsort(raw[:, 0]) == np.argsort(cooled[:, 0])).all()


def test_confidences_multiply():
    odds = np.log(0.9 / 0.1)
    np.testing.assert_allclose(survival_of(np.full((1, 3), odds))[0], [0.9, 0.81, 0.729], atol=1e-6)


def make_round(verified, accepted, length=3, stopped=False):
    return Round(
        anchor_position=5,
        proposed=(1,) * length,
        confidence_logits=(0.5,) * length,
        confidence=(0.6,) * length,
        verify_length=verified,
        accepted_draft_tokens=accepted,
        bonus_token=None if stopped else 9,
        emitted_tokens=accepted + (not stopped),
        draft_s=0.0,
        verify_s=0.0,
    )


def test_what_was_not_verified_is_unknown():
    outcomes = outcomes_of([make_round(1, 1), make_round(1, 0), make_round(3, 1), make_round(3, 2, stopped=True)], 3)
    assert outcomes.known.tolist() == [
        [True, False, False],
        [True, False, False],  # rejected at once; deeper positions were not tried and stay unknown
        [True, True, True],
        [True, True, False],  # a stop was accepted at position 2
    ]
    assert outcomes.survived[2].tolist() == [True, False, False]


def test_trimming_does_not_bias_the_estimate(rng):
    """True survival .9, .72, .504; blocks cut at random to one token leave deeper estimates as they are, not at 0."""
    rounds = []
    for cut in rng.integers(1, 4, 6000):
        step = rng.random(3) < (0.9, 0.8, 0.7)
        accepted = int(np.cumprod(step)[:cut].sum())
        rounds.append(make_round(int(cut), accepted))
    found = judge(outcomes_of(rounds, 3))
    for quality, truth in zip(found, (0.9, 0.72, 0.504), strict=True):
        assert quality.mean_outcome == pytest.approx(truth, abs=5 * np.sqrt(0.25 / quality.outcomes))
    all_cut = judge(outcomes_of([make_round(1, 1)] * 50, 3))
    assert [quality.outcomes for quality in all_cut] == [50, 0, 0]
    assert all_cut[1].ece is None
    assert all_cut[1].mean_outcome is None


def test_too_little_data_is_refused_with_what_is_needed(rng):
    outcomes = synthetic_outcomes(rng, 100, [0.8, 0.7])
    with pytest.raises(CalibrationError, match=rf"position 2 has 100 known outcomes; at least {MIN_OUTCOMES}"):
        fit_temperatures(outcomes)
    with pytest.raises(CalibrationError, match="nothing was drafted"):
        fit_temperatures(outcomes_of([make_round(0, 0, length=0)], 0))


@pytest.mark.parametrize("grid", ([0.0, 1.0], [-1.0]))
def test_temperatures_of_zero_or_less_are_refused(rng, grid):
    with pytest.raises(CalibrationError, match="above 0"):
        fit_temperatures(synthetic_outcomes(rng, 500, [0.8]), grid)


def test_file_round_trip_and_faults(tmp_path):
    path = tmp_path / "calibration.json"
    calibration = Calibration(
        temperatures=(1.5, 2.0),
        drafter="dspark",
        domains=("code",),
        fitted_outcomes=(900, 900),
        sampling_temperature=1.0,
        seed=3,
    )
    save_calibration(calibration, path)
    assert load_calibration(path) == calibration
    path.write_text(path.read_text().replace("1.5", "-1.5"))
    with pytest.raises(CalibrationError, match=r"calibration.json: temperatures: expected numbers above 0; got -1.5"):
        load_calibration(path)
    path.write_text("{")
    with pytest.raises(CalibrationError, match="not JSON"):
        load_calibration(path)
    with pytest.raises(CalibrationError, match="cannot read"):
        load_calibration(tmp_path / "absent.json")
