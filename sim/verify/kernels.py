"""How draft tokens of many requests are ranked and cut: compiled, without allocation, exact in ties.

Every candidate (request r, position k) has a survival: the running product of r's confidences up to k. Candidates are
ranked by survival, highest first, equal ones by request and then position. Since survival never rises along a request,
a cut of that ranking leaves every request a prefix, and a length is a count.

For the Python policies and for the simulator's own kernels alike. Arrays are C-contiguous: ``confidence`` float64
[requests, draft_length], ``steps_per_s`` float64, ``lengths`` int64 [at least requests]; scratch is the caller's:
``values`` float64 [at least requests × draft_length], ``work`` int64 [at least 2 × requests × draft_length + 1].
Sizes are not checked here; `sim.verify.base.check_offer` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile a function at its first call, once for all runs where there is a folder to keep what was compiled."""
    try:
        return cast(F, numba.njit(cache=True)(function))
    except RuntimeError:  # neither beside the source nor under HOME may be written: numba has no place for a cache
        return cast(F, numba.njit(function))


def scratch(requests: int, draft_length: int) -> tuple[Floats, Ints]:
    """Return ``values`` and ``work`` for up to this many requests and positions."""
    candidates = requests * draft_length
    return np.empty(candidates), np.empty(2 * candidates + 1, np.int64)


@compiled
def is_chance(confidence: Floats) -> bool:
    """Whether every entry lies in [0, 1]; NaN does not."""
    for row in range(confidence.shape[0]):
        for position in range(confidence.shape[1]):
            if not 0.0 <= confidence[row, position] <= 1.0:
                return False
    return True


@compiled
def survival(confidence: Floats, out: Floats) -> None:
    """Write the running product of each row to ``out``."""
    for request in range(confidence.shape[0]):
        a = 1.0
        for position in range(confidence.shape[1]):
            a *= confidence[request, position]
            out[request, position] = a


@compiled
def rank(confidence: Floats, values: Floats, work: Ints) -> None:
    """Rank all n candidates: their survival into ``values[:n]``, their request into ``work[:n]``.

    A counting sort into n buckets of equal width, then one insertion pass, which moves nothing out of its bucket.
    Both are stable, and candidates enter by request and position, so ties come out in that order.
    """
    requests, draft_length = confidence.shape
    n = requests * draft_length
    starts = work[n : 2 * n + 1]
    starts[:] = 0
    for request in range(requests):
        a = 1.0
        for position in range(draft_length):
            a *= confidence[request, position]
            starts[_bucket(a, n) + 1] += 1
    for bucket in range(1, n + 1):
        starts[bucket] += starts[bucket - 1]
    for request in range(requests):
        a = 1.0
        for position in range(draft_length):
            a *= confidence[request, position]
            bucket = _bucket(a, n)
            i = starts[bucket]
            starts[bucket] = i + 1
            values[i] = a
            work[i] = request
    for i in range(1, n):
        a = values[i]
        if a > values[i - 1]:
            request = work[i]
            j = i
            while j > 0 and a > values[j - 1]:
                values[j] = values[j - 1]
                work[j] = work[j - 1]
                j -= 1
            values[j] = a
            work[j] = request


@compiled
def _bucket(a: float, n: int) -> int:
    """Bucket of a survival, highest first; whatever ``a`` is (NaN, above 1), inside 0..n-1."""
    if a >= 1.0:
        return 0
    if a > 0.0:
        return n - 1 - min(int(a * n), n - 1)
    return n - 1


@compiled
def algorithm1(confidence: Floats, steps_per_s: Floats, lengths: Ints, values: Floats, work: Ints) -> None:
    """Admit candidates by rank while each raises expected tokens × steps_per_s; write ``lengths``.

    Source: DSpark paper, algorithm 1. It stops at the first candidate that does not raise the product.
    """
    requests, draft_length = confidence.shape
    lengths[:requests] = 0
    if requests == 0 or draft_length == 0:
        return
    expected_tokens = float(requests)
    throughput = expected_tokens * steps_per_s[requests]
    best = confidence[0, 0]
    for request in range(1, requests):
        best = max(best, confidence[request, 0])
    if not (expected_tokens + best) * steps_per_s[requests + 1] > throughput:
        return  # the first candidate does not pay, as on a jagged curve: nothing to rank
    rank(confidence, values, work)
    for i in range(requests * draft_length):
        raised = (expected_tokens + values[i]) * steps_per_s[requests + i + 1]
        if not raised > throughput:
            break
        expected_tokens += values[i]
        throughput = raised
        lengths[work[i]] += 1


@compiled
def best_batch(values: Floats, requests: int, candidates: int, steps_per_s: Floats) -> int:
    """Return the batch tokens at which expected tokens × steps_per_s is largest; the smallest of equal ones.

    ``values[:candidates]``: survival by rank.
    """
    expected_tokens = float(requests)
    best, highest = requests, expected_tokens * steps_per_s[requests]
    for i in range(candidates):
        expected_tokens += values[i]
        throughput = expected_tokens * steps_per_s[requests + i + 1]
        if throughput > highest:
            best, highest = requests + i + 1, throughput
    return best


@compiled
def runnable(wanted: int, requests: int, most: int, steps_per_s: Floats) -> int:
    """Return the draft tokens to admit when ``wanted`` are: within 0..most, and at a batch whose rate is not 0."""
    budget = max(0, min(wanted, most))
    while budget > 0 and not steps_per_s[requests + budget] > 0.0:
        budget -= 1
    return budget


@compiled
def admit(budget: int, requests: int, work: Ints, lengths: Ints) -> None:
    """Write the lengths that the first ``budget`` candidates of a ranking amount to."""
    lengths[:requests] = 0
    for i in range(budget):
        lengths[work[i]] += 1


@compiled
def top_k(confidence: Floats, budget: int, lengths: Ints, values: Floats, work: Ints) -> None:
    """Admit the ``budget`` candidates of highest survival; write ``lengths``."""
    rank(confidence, values, work)
    admit(budget, confidence.shape[0], work, lengths)


@compiled
def lagged(confidence: Floats, steps_per_s: Floats, wanted: int, lengths: Ints, values: Floats, work: Ints) -> int:
    """Spend a budget fixed before this round; return the batch tokens that would have been best in it.

    ``wanted`` draft tokens, as far as `runnable`, go to the candidates of highest survival. The return value is what
    a later step's budget comes from.
    """
    requests, draft_length = confidence.shape
    candidates = requests * draft_length
    rank(confidence, values, work)
    admit(runnable(wanted, requests, candidates, steps_per_s), requests, work, lengths)
    return best_batch(values, requests, candidates, steps_per_s)


@compiled
def exhaustive(confidence: Floats, steps_per_s: Floats, lengths: Ints, values: Floats, work: Ints) -> None:
    """Admit up to the best batch of this very step; write ``lengths``. Lossy unless the outcome is known anyway."""
    requests, draft_length = confidence.shape
    candidates = requests * draft_length
    rank(confidence, values, work)
    admit(best_batch(values, requests, candidates, steps_per_s) - requests, requests, work, lengths)


@compiled
def leading(confidence: Floats, floor: float, lengths: Ints) -> None:
    """Write how many positions of each row, from the first on, reach ``floor``."""
    for request in range(confidence.shape[0]):
        length = 0
        while length < confidence.shape[1] and confidence[request, length] >= floor:
            length += 1
        lengths[request] = length


@compiled
def table_row(row: int, requests: int, starts: Ints, hysteresis: int) -> int:
    """Return the row of a table by running requests, given the row of the step before.

    ``starts[i]``: running requests from which row i holds. The old row stays until the requests leave its range by
    ``hysteresis``. A replica that has served nothing yet is in row 0.
    """
    rising = row + 1 < starts.shape[0] and requests >= starts[row + 1] + hysteresis
    falling = requests < starts[row] - hysteresis
    if not rising and not falling:
        return row
    found = 0
    while found + 1 < starts.shape[0] and starts[found + 1] <= requests:
        found += 1
    return found
