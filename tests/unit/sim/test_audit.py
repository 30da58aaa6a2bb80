"""The auditor of the tests finds forged books: every line of a run altered by one is seen."""

import numpy as np
import pytest

from sim.errors import InvariantError
from sim.fleet import RunResult
from sim.invariants import Books
from sim.verify import Fixed
from tests.helpers.fleet import always, audit, engine, run, traffic

TOY = engine(
    Fixed(k=2), always(2, 0.5), max_running=4, max_waiting=3, block_tokens=4, kv_blocks=60, max_context_tokens=200
)
HORIZON_S = 3.0


@pytest.fixture(scope="module")
def books():
    rng = np.random.default_rng(3)
    offered = traffic(np.cumsum(rng.exponential(0.05, 60)), rng.integers(1, 60, 60), rng.integers(1, 60, 60))
    result = run(TOY, offered, horizon_s=HORIZON_S)
    assert {"finished", "rejected", "unfinished"} <= set(result.requests["status"])
    assert result.requests["preemptions"].sum() > 0
    return result, offered


def forged(result, table, name, row, value):
    columns = {"requests": dict(result.requests), "steps": dict(result.steps)}
    columns[table][name] = columns[table][name].copy()
    columns[table][name][row] += value
    return RunResult(columns["requests"], columns["steps"])


def finished(result, n=3):
    """Return a finished request that drafted and was neither first nor preempted."""
    requests = result.requests
    right = (requests["status"] == "finished") & (requests["rounds"] > 3) & (requests["preemptions"] == 0)
    return np.flatnonzero(right)[n]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("arrived_s", 1e-6),
        ("admitted_s", 1e3),
        ("first_token_s", -1e3),
        ("last_token_s", 1e-6),
        ("ended_s", 1e-6),
        ("prompt_tokens", 1),
        ("asked_tokens", 1),
        ("output_tokens", -1),
        ("rounds", 1),
        ("drafted_tokens", 1),
        ("verified_tokens", -1),
        ("accepted_draft_tokens", 1),
        ("max_itl_s", 1e3),
        ("max_itl_s", -1e3),
    ],
)
def test_a_request_altered_is_found_out(books, name, value):
    result, offered = books
    with pytest.raises(AssertionError):
        audit(forged(result, "requests", name, finished(result), value), TOY, offered, horizon_s=HORIZON_S, replicas=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("started_s", -1e-3),
        ("ended_s", 1e-3),
        ("busy_s", 1e-6),
        ("draft_s", 1e-6),
        ("decoding", 1),
        ("decoding_s", 1e-3),
        ("batch_tokens", 1),
        ("prompt_tokens", -1),
        ("drafted_tokens", 1),
        ("verified_tokens", 1),
        ("accepted_draft_tokens", -1),
        ("output_tokens", 1),
        ("running", 1),
        ("waiting", -1),
        ("kv_blocks", 1000),
        ("outside_steps", 1),
    ],
)
def test_a_step_altered_is_found_out(books, name, value):
    result, offered = books
    steps = result.steps
    row = np.flatnonzero((steps["prompt_tokens"] > 0) & (steps["decoding"] > 1) & (steps["waiting"] > 0))[2]
    with pytest.raises(AssertionError):
        audit(forged(result, "steps", name, row, value), TOY, offered, horizon_s=HORIZON_S, replicas=1)


def test_a_request_that_was_forgotten_is_found_out(books):
    result, offered = books
    keep = np.arange(result.requests["request"].size) != finished(result)
    shorter = RunResult({name: column[keep] for name, column in result.requests.items()}, result.steps)
    with pytest.raises(AssertionError):
        audit(shorter, TOY, offered, horizon_s=HORIZON_S, replicas=1)


@pytest.mark.parametrize("end", ["rejected", "aborted", "failed", "unfinished"])
def test_another_end_is_found_out(books, end):
    result, offered = books
    requests = dict(result.requests)
    requests["status"] = requests["status"].copy()
    requests["status"][finished(result)] = end
    with pytest.raises(AssertionError):
        audit(RunResult(requests, result.steps), TOY, offered, horizon_s=HORIZON_S, replicas=1)


@pytest.mark.parametrize(
    ("table", "name", "value", "equation"),
    [
        ("requests", "output_tokens", 1, "tokens delivered by steps = tokens of requests"),
        ("steps", "accepted_draft_tokens", 1, "accepted_draft_tokens of steps = of requests"),
        ("requests", "first_token_s", -1e3, "arrived <= first token <= last token <= end"),
        ("requests", "drafted_tokens", 0, None),
    ],
)
def test_the_simulators_own_check_says_which_equation_failed(books, table, name, value, equation):
    result, _ = books
    inside = int((result.requests["status"] == "unfinished").sum())
    altered = forged(result, table, name, finished(result), value)
    own = Books()
    own.add_requests(altered.requests)
    own.add_steps(altered.steps)
    if equation is None:
        own.check(inside, result.requests["status"].size)
        return
    with pytest.raises(InvariantError, match=equation):
        own.check(inside, result.requests["status"].size)
