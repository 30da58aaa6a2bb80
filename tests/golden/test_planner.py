"""Planner numbers on a measured, jagged step-time table, against a search that tries every budget.

The table: V4-Flash on 4 x B300 (TP4), step time by verified tokens and draft time by requests, digitized from a figure
of the vLLM blog post on adaptive verification (2026-08-14), in ms. Batch tokens round up to a graph size; beyond 1,024
there is no graph. One survival curve for every request.
"""

import csv

import numpy as np
import pytest

from sim.verify import Dspark, DsparkAsync, Oracle, kernels

SURVIVAL = (0.72, 0.50, 0.35, 0.24, 0.165, 0.115, 0.08)
REQUESTS = (1, 16, 64, 128, 256)

# fmt: off
VERIFY_MS = {
    1: 5.11, 2: 5.16, 4: 5.12, 8: 5.35, 16: 5.59, 24: 6.08, 32: 6.26, 40: 6.83, 48: 6.94, 56: 7.13, 64: 7.9, 72: 8.21,
    80: 8.51, 88: 8.7, 96: 8.77, 104: 9.05, 112: 9.2, 120: 9.47, 128: 9.43, 136: 9.9, 144: 9.9, 152: 11.32, 160: 11.3,
    168: 11.39, 176: 10.41, 184: 10.53, 192: 10.51, 200: 10.78, 208: 10.73, 216: 11.02, 224: 10.98, 232: 11.27,
    240: 11.2, 248: 11.51, 256: 11.3, 272: 12.52, 288: 12.62, 304: 13.9, 320: 14.11, 336: 14.58, 352: 13.54, 368: 13.93,
    384: 13.82, 400: 14.28, 416: 14.31, 432: 14.67, 448: 15.67, 464: 15.99, 480: 15.99, 496: 16.22, 512: 15.03,
    528: 15.6, 544: 15.57, 560: 15.86, 576: 15.93, 592: 16.66, 608: 17.08, 624: 17.25, 640: 17.36, 656: 17.69,
    672: 17.76, 688: 15.99, 704: 16.06, 720: 16.26, 736: 16.39, 752: 17.15, 768: 17.22, 784: 17.9, 800: 17.9,
    816: 18.09, 832: 18.16, 848: 18.58, 864: 18.58, 880: 18.69, 896: 19.16, 912: 19.48, 928: 19.56, 944: 19.68,
    960: 19.64, 976: 20.09, 992: 20.17, 1008: 20.26, 1024: 20.63,
}
# fmt: on
DRAFT_MS = {1: 0.88, 16: 1.32, 64: 2.27, 128: 3.14, 256: 5.38}

VARIANTS = {
    "made monotone, draft time charged": (True, True, (7, 5, 3, 5.25, 2.94)),
    "as written, draft time charged": (False, True, (7, 7, 3, 4.5, 2.94)),
    "as written, no draft time": (False, False, (7, 5, 3, 4.5, 1.875)),
}


def rates(requests: int, monotone: bool, charge_draft: bool) -> np.ndarray:
    """Steps a second (per ms, here) at every batch of ``requests``; 0 beyond the graph limit."""
    sizes, ms = np.array(list(VERIFY_MS)), np.array(list(VERIFY_MS.values()))
    if monotone:
        ms = np.maximum.accumulate(ms)
    out = np.zeros(requests * (1 + len(SURVIVAL)) + 1)
    batch = np.arange(1, min(len(out) - 1, 1024) + 1)
    out[batch] = 1 / (ms[np.searchsorted(sizes, batch)] + (DRAFT_MS[requests] if charge_draft else 0.0))
    out[0] = np.inf
    return out


def confidences(requests: int) -> np.ndarray:
    return np.tile(np.array(SURVIVAL) / np.array((1.0, *SURVIVAL[:-1])), (requests, 1))


def mean_length_by_search(requests: int, steps_per_s: np.ndarray) -> float:
    """Best mean number of draft tokens a request, by trying every budget."""
    taken = np.sort(np.repeat(SURVIVAL, requests))[::-1]
    tokens = requests + np.concatenate(([0.0], np.cumsum(taken)))
    throughput = [tokens[n] * steps_per_s[requests + n] for n in range(len(tokens))]
    return int(np.argmax(throughput)) / requests


@pytest.mark.parametrize("variant", VARIANTS)
def test_best_mean_length(variant: str) -> None:
    monotone, charge_draft, published = VARIANTS[variant]
    for requests, length in zip(REQUESTS, published, strict=True):
        steps_per_s = rates(requests, monotone, charge_draft)
        assert mean_length_by_search(requests, steps_per_s) == pytest.approx(length, abs=0.005)
        chosen = Oracle().verify_lengths(confidences(requests), steps_per_s)
        assert chosen.mean() == pytest.approx(length, abs=0.005)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_lagged_search_gets_there_a_step_later(variant: str) -> None:
    monotone, charge_draft, published = VARIANTS[variant]
    for requests, length in zip(REQUESTS, published, strict=True):
        steps_per_s, verifier = rates(requests, monotone, charge_draft), DsparkAsync(lag=1).start()
        means = [verifier.verify_lengths(confidences(requests), steps_per_s).mean() for _ in range(3)]
        assert means == pytest.approx([0, length, length], abs=0.005)


@pytest.mark.parametrize("variant", VARIANTS)
def test_algorithm_1_stops_at_the_first_step_of_the_curve(variant: str) -> None:
    """One more token never pays for the next graph size, so all but a lone request verify nothing."""
    monotone, charge_draft, _ = VARIANTS[variant]
    means = [Dspark().verify_lengths(confidences(n), rates(n, monotone, charge_draft)).mean() for n in REQUESTS]
    assert means == [7, 0, 0, 0, 0]


def test_nothing_goes_beyond_the_graph_limit() -> None:
    requests = 256
    steps_per_s = rates(requests, monotone=False, charge_draft=True)
    lengths = np.zeros(requests, np.int64)
    kernels.lagged(np.ones((requests, 7)), steps_per_s, 10_000, lengths, *kernels.scratch(requests, 7))
    assert requests + lengths.sum() == 1024


def test_the_table_is_the_shared_one(shared_dir) -> None:
    with (shared_dir / "reference/engines/v4_flash_b300_tp4_step_cost.csv").open() as file:
        rows = [(row["kind"], int(row["size"]), float(row["ms"])) for row in csv.DictReader(file)]
    assert {size: ms for kind, size, ms in rows if kind == "verify_graph_tokens"} == VERIFY_MS
    assert {size: ms for kind, size, ms in rows if kind == "draft_requests" and size in REQUESTS} == DRAFT_MS
