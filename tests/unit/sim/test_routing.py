"""Routers: what each sees, how ties fall, and what a fleet makes of it."""

import numpy as np
import pytest

from sim.batching import Chunked
from sim.routing import ROUTERS, LeastKv, LeastRequests, PowerOfTwo, RoundRobin
from tests.helpers.fleet import at_once, engine, run, traffic

ALL = [RoundRobin(), LeastRequests(), LeastKv(), PowerOfTwo()]


def pick(router, requests, kv_blocks=None, rng=None):
    requests = np.array(requests)
    kv_blocks = np.zeros_like(requests) if kv_blocks is None else np.array(kv_blocks)
    return router.start().pick(requests, kv_blocks, rng=rng or np.random.default_rng(0))


def test_every_router_is_tested():
    assert set(ROUTERS.known()) == {router.kind for router in ALL}


def test_round_robin_takes_turns_whatever_the_state():
    route = RoundRobin().start()
    picks = [route.pick(np.array([9, 0, 5]), np.zeros(3), rng=np.random.default_rng(0)) for _ in range(7)]
    assert picks == [0, 1, 2, 0, 1, 2, 0]


def test_two_fleets_do_not_share_a_turn():
    one, other = RoundRobin().start(), RoundRobin().start()
    args = (np.zeros(3), np.zeros(3))
    assert one.pick(*args, rng=None) == other.pick(*args, rng=None) == 0


@pytest.mark.parametrize(("requests", "chosen"), [([3, 1, 2], 1), ([2, 1, 1], 1), ([0, 0, 0], 0), ([5, 5, 4], 2)])
def test_least_requests_and_its_ties(requests, chosen):
    assert pick(LeastRequests(), requests, [0, 99, 99]) == chosen


@pytest.mark.parametrize(
    ("requests", "kv_blocks", "chosen"),
    [([0, 9], [8, 7], 1), ([2, 1], [5, 5], 1), ([1, 1], [5, 5], 0), ([0, 0, 0], [3, 0, 0], 1)],
)
def test_least_kv_and_its_ties(requests, kv_blocks, chosen):
    assert pick(LeastKv(), requests, kv_blocks) == chosen


def test_power_of_two_draws_two_different_replicas_every_pair_alike(rng):
    """With one replica busier than all others it is never chosen: it is never drawn against itself."""
    picks = [pick(PowerOfTwo(), [9, 0, 0, 0], rng=rng) for _ in range(2000)]
    assert picks.count(0) == 0
    # Of pairs that tie the lower index wins: 1 beats 2 and 3 and wins against 0; 3 wins against 0 alone.
    shares = np.bincount(picks, minlength=4) / len(picks)
    np.testing.assert_allclose(shares, [0, 3 / 6, 2 / 6, 1 / 6], atol=0.06)


def test_power_of_two_takes_the_less_loaded_of_its_two(rng):
    assert {pick(PowerOfTwo(), [4, 3], rng=rng) for _ in range(50)} == {1}
    assert {pick(PowerOfTwo(), [3, 3], rng=rng) for _ in range(50)} == {0}


@pytest.mark.parametrize("router", ALL, ids=lambda router: router.kind)
def test_one_replica_is_every_routers_choice(router):
    assert pick(router, [7]) == 0


# ----------------------------------------------------------------------------------------------------------- in a fleet


@pytest.mark.parametrize("router", ALL, ids=lambda router: router.kind)
def test_all_routers_serve_all_requests_on_all_replicas(router, rng):
    arrived = np.cumsum(rng.exponential(0.02, 300))
    result = run(engine(max_running=8), traffic(arrived, 10, rng.integers(1, 60, 300)), replicas=3, router=router)
    assert (result.requests["status"] == "finished").all()
    assert set(result.requests["replica"]) == {0, 1, 2}


def test_a_burst_at_one_instant_is_spread_by_what_was_just_sent():
    for router in (RoundRobin(), LeastRequests(), LeastKv()):
        result = run(engine(), at_once(6), replicas=3, router=router)
        assert np.bincount(result.requests["replica"]).tolist() == [2, 2, 2]


def test_least_requests_counts_those_that_wait():
    offered = traffic([0.0, 0.001, 0.002, 0.003, 0.004], output=[500, 5, 5, 5, 5])
    result = run(engine(max_running=1), offered, replicas=2, router=LeastRequests())
    assert result.requests["replica"].tolist() == [0, 1, 0, 1, 0]


def test_a_replica_is_free_again_when_its_requests_are_gone():
    """One at a time, each long gone when the next comes: ties, so always the first replica."""
    result = run(engine(), traffic(np.arange(5.0), output=3), replicas=2, router=LeastRequests())
    assert result.requests["replica"].tolist() == [0] * 5
    result = run(engine(), traffic(np.arange(5.0), output=3), replicas=2, router=LeastKv())
    assert result.requests["replica"].tolist() == [0] * 5


def test_least_kv_avoids_a_long_context():
    offered = traffic([0.0, 0.05, 0.1, 0.15], prompt=[3000, 10, 10, 10], output=[200, 100, 100, 100])
    result = run(engine(prefill=Chunked(chunk_tokens=4096)), offered, replicas=2, router=LeastKv())
    assert result.requests["replica"].tolist() == [0, 1, 1, 1]


def test_memory_given_back_by_an_abort_counts_as_free():
    """Replica 0 aborts a prompt under way and has nothing left to do: it is as free as it was at the start."""
    toy = engine(prefill=Chunked(chunk_tokens=50), prompt_token_s=0.01, deadline_s=1.0)
    offered = traffic([0.0, 10.0, 20.0], prompt=[1000, 1, 1], output=2)
    result = run(toy, offered, replicas=2, router=LeastKv())
    assert result.requests["status"].tolist() == ["aborted", "finished", "finished"]
    assert result.requests["replica"].tolist() == [0, 0, 0]


def test_memory_given_back_by_a_failure_counts_as_free():
    toy = engine(block_tokens=1, kv_blocks=50)
    offered = traffic([0.0, 10.0, 20.0], prompt=20, output=[100, 2, 2])
    result = run(toy, offered, replicas=2, router=LeastKv())
    assert result.requests["status"].tolist() == ["failed", "finished", "finished"]
    assert result.requests["replica"].tolist() == [0, 0, 0]


def test_the_dice_of_a_router_do_not_touch_the_luck_of_a_request(rng):
    """The same requests under another router: the same work, elsewhere."""
    offered = traffic(np.cumsum(rng.exponential(0.02, 100)), 10, rng.integers(1, 60, 100))
    left, right = (run(engine(), offered, replicas=3, router=router) for router in (PowerOfTwo(), RoundRobin()))
    assert left.requests["replica"].tolist() != right.requests["replica"].tolist()
    assert left.requests["rounds"].tolist() == right.requests["rounds"].tolist()
