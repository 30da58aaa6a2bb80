"""Laws of the selection: equal to the paper's pseudocode, exact in ties, blind to the order of unequal requests."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sim.verify import kernels

# Coarse values make ties likely, between requests and along them; fine ones make sums of unlike size.
COARSE = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
FINE = st.floats(0.0, 1.0, allow_subnormal=False)


@st.composite
def offers(draw, rates=None):
    """Return confidences and a curve long enough for them; ``steps_per_s`` is jagged unless ``rates`` says else."""
    requests, positions = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    elements = draw(st.sampled_from([COARSE, FINE]))
    confidence = draw(arrays(np.float64, (requests, positions), elements=elements))
    size = requests * (1 + positions) + 1
    jagged = st.sampled_from([0.25, 0.5, 0.75, 1.0]) if rates is None else rates
    steps_per_s = draw(arrays(np.float64, size, elements=jagged | st.floats(0.01, 100.0)))
    steps_per_s[0] = np.inf
    return confidence, steps_per_s


def run(kernel, confidence, *args):
    """Call a kernel that writes lengths; scratch is poisoned first, so that nothing old can be read."""
    lengths = np.full(confidence.shape[0], -9)
    values, work = kernels.scratch(*confidence.shape)
    values.fill(np.nan)
    work.fill(-7)
    kernel(confidence, *args, lengths, values, work)
    return lengths


def ranking(confidence):
    """All candidates (survival, request, position), by survival, then request, then position."""
    found = []
    for r, row in enumerate(confidence.tolist()):
        a = 1.0
        for k, c in enumerate(row, start=1):
            a *= c
            found.append((a, r, k))
    return sorted(found, key=lambda candidate: (-candidate[0], candidate[1], candidate[2]))


def algorithm_1(confidence, steps_per_s):
    """DSpark paper, algorithm 1, line by line."""
    requests = len(confidence)
    lengths = [0] * requests
    B = requests
    tau = float(requests)
    theta = tau * steps_per_s[B]
    for a, r, k in ranking(confidence):
        B = B + 1
        new_tau = tau + a
        new_theta = new_tau * steps_per_s[B]
        if not new_theta > theta:
            break
        tau, theta = new_tau, new_theta
        lengths[r] = k
    return lengths


def best_of_all(confidence, steps_per_s):
    """The batch of highest expected tokens × rate, the smallest of equal ones, by trying each."""
    requests, taken = len(confidence), [candidate[0] for candidate in ranking(confidence)]
    throughputs = []
    tau = float(requests)
    for n, a in enumerate([0.0, *taken]):
        tau += a
        throughputs.append(tau * steps_per_s[requests + n])
    return requests + int(np.argmax(throughputs))


@given(offers())
@example((np.ones((3, 4)), np.full(16, 1.0)))
@example((np.full((9, 7), np.nextafter(1.0, 0.0)), np.full(73, 1.0)))
def test_algorithm1_is_the_papers(offer):
    confidence, steps_per_s = offer
    assert run(kernels.algorithm1, confidence, steps_per_s).tolist() == algorithm_1(confidence, steps_per_s)


@given(offers(rates=st.floats(0.5, 0.51)))
def test_algorithm1_is_the_papers_where_it_goes_on_for_long(offer):
    confidence, steps_per_s = offer
    steps_per_s[1:] = np.sort(steps_per_s[1:])[::-1]
    assert run(kernels.algorithm1, confidence, steps_per_s).tolist() == algorithm_1(confidence, steps_per_s)


@pytest.mark.parametrize(("requests", "positions"), [(64, 5), (256, 7)])
def test_algorithm1_is_the_papers_at_full_size(requests, positions, rng):
    for _ in range(60):
        confidence = rng.beta(4, 1, (requests, positions))
        if rng.random() < 0.5:
            confidence = np.round(confidence * 8) / 8
        batch = np.arange(requests * (1 + positions) + 1)
        steps_per_s = 1 / (7 + rng.uniform(0.001, 0.05) * batch)
        assert run(kernels.algorithm1, confidence, steps_per_s).tolist() == algorithm_1(confidence, steps_per_s)
        budget = int(rng.integers(requests * positions + 1))
        lengths = [0] * requests
        for _, r, k in ranking(confidence)[:budget]:
            lengths[r] = k
        assert run(kernels.top_k, confidence, budget).tolist() == lengths


@given(offers(), st.data())
def test_top_k_is_exact_in_ties(offer, data):
    confidence, _ = offer
    budget = data.draw(st.integers(0, confidence.size))
    lengths = [0] * len(confidence)
    for _, r, k in ranking(confidence)[:budget]:
        lengths[r] = k
    assert run(kernels.top_k, confidence, budget).tolist() == lengths


@given(offers())
def test_rank_is_a_stable_sort(offer):
    confidence, _ = offer
    values, work = kernels.scratch(*confidence.shape)
    kernels.rank(confidence, values, work)
    expected = ranking(confidence)
    assert values.tolist() == [a for a, _, _ in expected]
    assert work[: confidence.size].tolist() == [r for _, r, _ in expected]


@given(offers())
def test_search_is_exhaustive(offer):
    confidence, steps_per_s = offer
    best = best_of_all(confidence, steps_per_s)
    requests = len(confidence)
    assert run(kernels.exhaustive, confidence, steps_per_s).sum() == best - requests
    lengths = np.zeros(requests, np.int64)
    assert kernels.lagged(confidence, steps_per_s, 0, lengths, *kernels.scratch(*confidence.shape)) == best
    assert not lengths.any()


@given(offers(), st.integers(-5, 80))
def test_lagged_spends_what_is_wanted_as_far_as_it_can(offer, wanted):
    confidence, steps_per_s = offer
    requests, positions = confidence.shape
    steps_per_s[requests + 3 :] = 0.0  # the engine takes no more than two draft tokens
    lengths = np.zeros(requests, np.int64)
    kernels.lagged(confidence, steps_per_s, wanted, lengths, *kernels.scratch(requests, positions))
    spent = max(0, min(wanted, 2, requests * positions))
    assert lengths.tolist() == run(kernels.top_k, confidence, spent).tolist()


UNLIKE = arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 4)), elements=st.floats(0.1, 0.9), unique=True)


@given(UNLIKE, offers(), st.randoms(use_true_random=False))
def test_order_of_requests_matters_to_ties_alone(confidence, offer, shuffler):
    steps_per_s = np.resize(offer[1], confidence.size + len(confidence) + 1)
    survivals = [a for a, _, _ in ranking(confidence)]
    assume(len(set(survivals)) == len(survivals))
    order = list(range(len(confidence)))
    shuffler.shuffle(order)
    shuffled = np.ascontiguousarray(confidence[order])
    for kernel, args in ((kernels.algorithm1, (steps_per_s,)), (kernels.top_k, (confidence.size // 2,))):
        assert run(kernel, shuffled, *args).tolist() == run(kernel, confidence, *args)[order].tolist()


@given(offers(), st.randoms(use_true_random=False))
def test_order_of_equal_requests_does_not_change_what_is_spent(offer, shuffler):
    confidence, steps_per_s = offer
    order = list(range(len(confidence)))
    shuffler.shuffle(order)
    shuffled = np.ascontiguousarray(confidence[order])
    one, other = (run(kernels.algorithm1, rows, steps_per_s) for rows in (confidence, shuffled))
    spent = [
        sorted(np.cumprod(rows, axis=1)[r, k] for r in range(len(rows)) for k in range(lengths[r]))
        for rows, lengths in ((confidence, one), (shuffled, other))
    ]
    assert spent[0] == spent[1]


@given(offers())
def test_a_later_confidence_never_changes_an_earlier_decision(offer):
    """Why algorithm 1 is lossless: whether draft token k is verified does not depend on what comes after it."""
    confidence, steps_per_s = offer
    lengths = run(kernels.algorithm1, confidence, steps_per_s)
    for r, k in itertools.product(range(confidence.shape[0]), range(confidence.shape[1])):
        for other in (0.0, 0.5, 1.0):
            changed = confidence.copy()
            changed[r, k:] = other
            again = run(kernels.algorithm1, changed, steps_per_s)
            assert min(again[r], k) == min(lengths[r], k)


@given(st.integers(1, 40), st.integers(1, 8))
def test_no_confidence_no_drafts_full_confidence_full_block(requests, positions):
    flat = np.ones(requests * (1 + positions) + 1)
    for confidence, length in ((np.zeros((requests, positions)), 0), (np.ones((requests, positions)), positions)):
        assert run(kernels.algorithm1, confidence, flat).tolist() == [length] * requests
        assert run(kernels.exhaustive, confidence, flat).tolist() == [length] * requests


@given(st.integers(1, 40), st.integers(1, 8), st.floats(0.0, 0.2))
def test_no_confidence_no_drafts_on_any_falling_curve(requests, positions, slope):
    falling = 1 / (1 + slope * np.arange(requests * (1 + positions) + 1))
    assert not run(kernels.algorithm1, np.zeros((requests, positions)), falling).any()


@given(st.lists(st.integers(0, 7), min_size=1, max_size=12))
def test_lengths_of_any_mix_come_out(lengths):
    """Ragged batches are ordinary: 0, 3 and 7 in one step, in any order."""
    confidence = np.array([[1.0] * length + [0.0] * (7 - length) for length in lengths])
    flat = np.ones(len(lengths) * 8 + 1)
    assert run(kernels.algorithm1, confidence, flat).tolist() == lengths
    assert run(kernels.top_k, confidence, sum(lengths)).tolist() == lengths


@given(offers())
def test_survival_is_the_running_product(offer):
    confidence, _ = offer
    out = np.empty_like(confidence)
    kernels.survival(confidence, out)
    assert out.tolist() == np.cumprod(confidence, axis=1).tolist()


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_any_bits_keep_the_kernels_inside_their_arrays(requests, positions, data):
    """A caller's NaN is a caller's fault (`checked_offer` says so), but it must not write out of bounds."""
    wild = st.floats(allow_nan=True, allow_infinity=True)
    confidence = data.draw(arrays(np.float64, (requests, positions), elements=wild))
    values, work = np.full(requests * positions + 4, -1.0), np.full(2 * requests * positions + 5, -1)
    lengths = np.zeros(requests, np.int64)
    flat = np.ones(requests * (1 + positions) + 1)
    kernels.algorithm1(confidence, flat, lengths, values, work)
    kernels.top_k(confidence, requests * positions, lengths, values, work)
    assert lengths.tolist() == [positions] * requests
    assert (values[requests * positions :] == -1.0).all()
    assert (work[2 * requests * positions + 1 :] == -1).all()


PURE = """
import numpy as np
from sim.verify import Dspark, DsparkAsync, Threshold
rng = np.random.default_rng(5)
lagged = DsparkAsync(lag=1, first_budget=2).start()
for _ in range(4):
    confidence = rng.random((13, 5))
    rates = 1 / (5 + np.ceil(np.arange(13 * 6 + 1) / 8))
    for policy in (Dspark(), lagged, Threshold(min_confidence=0.4)):
        print(policy.verify_lengths(confidence, rates).tolist())
"""


def test_the_same_lengths_whatever_the_hash_seed_and_threads():
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PURE],
            capture_output=True,
            check=True,
            env={"PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": str(1 + seed), "NUMBA_NUM_THREADS": "2"},
        ).stdout
        for seed in range(2)
    }
    assert len(outputs) == 1
    assert len(outputs.pop()) > 100
