"""One step loop in four guises: compiled or with the policy in Python, several steps a call or one; the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.batching import Chunked, Disaggregated, Exclusive
from sim.routing import RoundRobin
from sim.routing.routers import Turns
from sim.verify import BatchTable, Dspark, DsparkAsync, Fixed, Mtp1, NoSpeculation, Oracle, Threshold
from sim.workload.base import RequestTable
from tests.helpers.fleet import accepts, engine, law, run, same_run, traffic

POLICIES: dict[str, Any] = {
    "none": NoSpeculation(),
    "mtp1": Mtp1(drafter="toy"),
    "fixed": Fixed(k=2, drafter="toy"),
    "threshold": Threshold(min_confidence=0.55, drafter="toy"),
    "batch_table": BatchTable(table=((1, 4), (3, 2), (6, 0)), hysteresis=1, drafter="toy"),
    "dspark": Dspark(drafter="toy"),
    "dspark_async": DsparkAsync(lag=2, first_budget=1, drafter="toy"),
    "oracle": Oracle(drafter="toy"),
}


def in_python(policy: Any) -> Any:
    """Return the same policy as somebody else's class, which the compiled loop does not know."""
    cls = type(policy)
    stranger = type(f"Their{cls.__name__}", (cls,), {"__slots__": ()})
    return stranger(**{name: getattr(policy, name) for name in cls.__dataclass_fields__ if name != "kind"})


@dataclass(slots=True)
class OneByOne(Turns):
    """Takes turns, and does not say whose is next: a replica must come back after every step."""

    def arrivals_ahead(self, index: int, replicas: int) -> int | None:
        """Keep it secret."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Secretive(RoundRobin):
    """Round robin without foresight."""

    def start(self) -> Turns:
        """Begin at replica 0."""
        return OneByOne()


CASES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tight_memory": {"kv_blocks": 24, "block_tokens": 4},
    "few_seats": {"max_running": 3, "max_waiting": 4},
    "deadline": {"deadline_s": 0.9, "max_running": 4},
    "small_batch": {"max_batch_tokens": 9, "max_running": 6, "prefill": Chunked(chunk_tokens=3)},
    "exclusive": {"prefill": Exclusive(), "max_running": 5},
    "dear_admission": {
        "prompt_request_s": 0.017,
        "kv_blocks": 24,
        "block_tokens": 4,
        "prefill": Chunked(chunk_tokens=3),
    },
    "prompt_rows": {
        "prompt_rows_s": tuple(0.002 * np.arange(20) + 0.011 * (np.arange(20) > 11)),
        "prompt_beside_s": 0.009,
        "prefill": Chunked(chunk_tokens=6),
    },
    "context_limit": {"max_context_tokens": 30},
    "prompts_as_batch": {"prompts_as_batch": True, "prompt_beside_s": 0.009, "prefill": Chunked(chunk_tokens=8)},
    "pool": {
        "prefill": Disaggregated(replicas=1, hand_off=0.013, max_step_tokens=16),
        "prompt_request_s": 0.017,
        "kv_blocks": 40,
        "block_tokens": 4,
    },
}


def jagged(sizes: np.ndarray) -> np.ndarray:
    """A step curve with graph sizes of 4 tokens and one that is cheaper than its neighbour."""
    padded = np.ceil(sizes / 4)
    return np.asarray(0.01 + 0.002 * padded - 0.003 * (padded == 3))


def offered(seed: int, n: int) -> RequestTable:
    rng = np.random.default_rng(seed)
    # Some arrivals at one instant, some at the end of a step.
    arrived_s = np.sort(np.round(rng.exponential(0.06, n).cumsum(), rng.integers(1, 4)))
    return traffic(arrived_s, rng.integers(1, 12, n), rng.integers(1, 25, n), rng.integers(0, 2, n), ("code", "chat"))


def toy(policy: Any, case: dict[str, Any]) -> Any:
    tables = accepts(
        law([0.8, 0.6, 0.5, 0.35], request_sd=0.5, token_sd=0.4),
        law([0.6, 0.4, 0.2, 0.1], request_sd=0.3, token_sd=0.6, noise_sd=0.4),
        domains=("code", "chat"),
    )
    settings = {"step_s": jagged, "draft_s": lambda r: 0.001 + 0.0004 * r, "per_context_token_s": 1e-5} | case
    return engine(policy, tables, **settings)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", POLICIES)
def test_every_guise_of_the_loop_writes_the_same(kind: str, case: str) -> None:
    policy, requests = POLICIES[kind], offered(len(kind) + 7 * len(case), 40)
    runs = [
        run(toy(guise, CASES[case]), requests, replicas=2, router=router)
        for guise in (policy, in_python(policy))
        for router in (RoundRobin(), Secretive())
    ]
    assert all(same_run(runs[0], other) for other in runs[1:])


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(sorted(POLICIES)), case=st.sampled_from(sorted(CASES)))
def test_foresight_changes_nothing(seed: int, kind: str, case: str) -> None:
    requests, policy = offered(seed, 25), POLICIES[kind]
    ahead = run(toy(policy, CASES[case]), requests, replicas=2, horizon_s=1.7)
    blind = run(toy(policy, CASES[case]), requests, replicas=2, horizon_s=1.7, router=Secretive())
    assert same_run(ahead, blind)


def test_the_comparison_can_fail() -> None:
    requests = offered(3, 40)
    one, other = (run(toy(Fixed(k=k, drafter="toy"), {}), requests, replicas=2) for k in (1, 2))
    assert not same_run(one, other)
