"""Two policies side by side: intervals, pairs and verdicts."""

import math

import numpy as np
import pytest
from scipy import stats

from sim.compare import difference, estimate, estimates


def test_an_estimate_is_a_mean_and_a_t_interval():
    values = [9.0, 10.0, 12.0]
    got = estimate(values)
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert (got.low, got.value, got.high) == pytest.approx((low, np.mean(values), high))


def test_one_replication_has_no_interval():
    got = estimate([5.0])
    assert (got.value, got.half_width, got.low, got.high) == (5.0, None, None, None)


@pytest.mark.parametrize("values", [[None], [None, None], [1.0, None, 2.0]])
def test_what_is_absent_in_a_replication_is_absent(values):
    assert estimate(values).value is None


def test_what_lies_beyond_the_run_stays_there():
    got = estimate([1.0, math.inf])
    assert (got.value, got.half_width) == (math.inf, None)


def test_estimates_are_of_every_metric():
    got = estimates([{"a": 1.0, "b": None}, {"a": 3.0, "b": None}])
    assert (got["a"].value, got["b"].value) == (2.0, None)


@pytest.mark.parametrize(
    ("ours", "baseline", "verdict"),
    [
        ([110, 111, 109], [100, 100, 100], "higher"),
        ([90, 91, 89], [100, 100, 100], "lower"),
        ([101, 99, 100.5], [100, 100, 100], "tie"),
        ([100, 100], [100, 100], "tie"),
        ([100], [100], "tie"),
        ([110], [100], "one replication"),
        ([110, 110], [100, 100], "higher"),
        ([None, 1], [1, 1], "absent"),
        ([1, 1], [None, None], "absent"),
        ([1, 1], [0, 0], "absent"),
        ([math.inf, 1], [1, 1], "absent"),
        ([1, 1], [math.inf, math.inf], "absent"),
    ],
)
def test_verdicts(ours, baseline, verdict):
    assert difference(ours, baseline).verdict == verdict


def test_a_difference_is_paired_so_that_what_both_share_falls_out():
    """Loads differ by half from replication to replication, the policies by 1 % in each."""
    baseline = [100.0, 150.0, 200.0, 250.0]
    got = difference([1.01 * value for value in baseline], baseline)
    assert got.verdict == "higher"
    assert got.relative.value == pytest.approx(0.01)
    shuffled = difference([1.01 * value for value in reversed(baseline)], baseline)
    assert shuffled.verdict == "tie"


def test_nan_never_passes_for_a_number():
    assert difference([math.nan, 1.0], [1.0, 1.0]).verdict == "absent"


def test_an_interval_covers_as_often_as_it_says(rng):
    draws = rng.normal(3.0, 1.0, (4000, 5))
    covered = sum((one := estimate(row.tolist())).low <= 3.0 <= one.high for row in draws)
    assert abs(covered / 4000 - 0.95) < 4.9 * math.sqrt(0.95 * 0.05 / 4000)  # a correct program fails once in a million
