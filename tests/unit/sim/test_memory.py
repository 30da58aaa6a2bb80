"""KV memory: blocks add up, a round is reserved in full, the youngest gives way and loses nothing."""

import numpy as np
import pytest

from sim.batching import Chunked, Disaggregated
from sim.errors import InvariantError
from sim.kv import KvPool
from sim.verify.fixed import Fixed
from sim.verify.none import NoSpeculation
from tests.helpers.fleet import Spy, always, at_once, engine, run, traffic


def test_blocks_are_free_or_in_use():
    pool = KvPool(total=10, block_tokens=4)
    pool.take(7)
    assert (pool.used, pool.free) == (7, 3)
    pool.give_back(2)
    assert (pool.used, pool.free) == (5, 5)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_tokens_fill_blocks(tokens, blocks):
    assert KvPool(10, 4).blocks_for(tokens) == blocks


@pytest.mark.parametrize("change", [lambda pool: pool.take(11), lambda pool: pool.give_back(1)])
def test_blocks_that_are_not_there_are_our_bug(change):
    with pytest.raises(InvariantError, match="0 <= free <= total"):
        change(KvPool(10, 4))


# ---------------------------------------------------------------------------------------------------------- reservation


def together(policy, acceptance, kv_blocks, output=20):
    """Two requests of 10 prompt tokens, a block a token."""
    toy = engine(policy, acceptance, block_tokens=1, kv_blocks=kv_blocks)
    return run(toy, at_once(2, prompt=10, output=output))


def test_a_round_is_reserved_in_full_though_nothing_is_accepted():
    """Room for the accepted tokens alone would keep both to the end: 2 (10 + 19 + 1) = 60."""
    rejected = always(4, 0.0)
    plain, drafting = together(NoSpeculation(), None, 60), together(Fixed(k=4), rejected, 60)
    assert plain.requests["preemptions"].tolist() == [0, 0]
    assert drafting.requests["preemptions"].tolist()[0] == 0
    assert drafting.requests["preemptions"].tolist()[1] > 0
    # Enough for the last round of both: 2 (10 + 18 + 1 + 4).
    assert together(Fixed(k=4), rejected, 66).requests["preemptions"].tolist() == [0, 0]
    assert together(Fixed(k=4), rejected, 65).requests["preemptions"].tolist() == [0, 1]


def test_reserved_blocks_return_when_their_tokens_are_rejected():
    toy = engine(Fixed(k=4), always(4, 0.0), block_tokens=1, kv_blocks=1000)
    steps = run(toy, traffic(0.0, prompt=10, output=6)).steps
    assert steps["kv_blocks"].tolist() == [10, 11, 12, 13, 14, 0]


def test_accepted_tokens_stay_in_memory():
    toy = engine(Fixed(k=4), always(4), block_tokens=1, kv_blocks=1000)
    steps = run(toy, traffic(0.0, prompt=10, output=16)).steps
    assert steps["kv_blocks"].tolist() == [10, 15, 20, 0]


def test_a_block_drafter_reserves_its_block_however_little_is_verified():
    toy = engine(Fixed(k=1), always(5, 0.0), block_tokens=1, kv_blocks=2 * 10 + 2 * 6 + 1)
    result = run(toy, at_once(2, prompt=10, output=5))
    assert result.requests["preemptions"].tolist() == [0, 1]


def test_a_chain_drafter_reserves_what_it_drafts():
    toy = engine(Fixed(k=1), always(5, 0.0, kind="chain"), block_tokens=1, kv_blocks=2 * 10 + 2 * 6 + 1)
    result = run(toy, at_once(2, prompt=10, output=5))
    assert result.requests["preemptions"].tolist() == [0, 0]


def test_admission_leaves_room_for_a_first_round():
    """Two prompts fit, their first rounds do not: the second waits."""
    toy = engine(Fixed(k=4), always(4), block_tokens=1, kv_blocks=29)
    result = run(toy, at_once(2, prompt=10, output=6))
    assert result.requests["preemptions"].tolist() == [0, 0]
    assert result.requests["admitted_s"][1] == result.requests["ended_s"][0]


def test_the_context_limit_bounds_what_is_reserved():
    """At 12 of 12 tokens no more can be cached, drafts or not."""
    toy = engine(Fixed(k=4), always(4, 0.0), block_tokens=1, kv_blocks=12, max_context_tokens=12)
    result = run(toy, traffic(0.0, prompt=7, output=50))
    assert result.requests["reason"].tolist() == ["context_limit"]
    assert result.steps["kv_blocks"].max() <= 12


# ----------------------------------------------------------------------------------------------------------- preemption


def test_the_youngest_gives_way_and_the_others_never_notice():
    toy = engine(block_tokens=1, kv_blocks=100)
    result = run(toy, at_once(3, prompt=20, output=50))
    alone = run(toy, traffic(0.0, prompt=20, output=50))
    preempted = result.requests["preemptions"]
    assert preempted[0] == 0
    assert preempted[2] > 0
    assert result.requests["output_tokens"].tolist() == [50] * 3
    span = result.requests["last_token_s"] - result.requests["first_token_s"]
    assert span[0] < span[2]
    assert alone.requests["rounds"][0] == result.requests["rounds"][0]


def test_a_preempted_request_keeps_its_first_token_and_its_first_admission():
    toy = engine(block_tokens=1, kv_blocks=100)
    crowded = run(toy, at_once(2, prompt=20, output=60)).requests
    roomy = run(engine(block_tokens=1, kv_blocks=1000), at_once(2, prompt=20, output=60)).requests
    assert crowded["preemptions"].tolist() == [0, 1]
    for name in ("first_token_s", "admitted_s"):
        assert crowded[name].tolist() == roomy[name].tolist()


def test_a_preempted_prompt_is_begun_and_paid_for_anew():
    free, dear = (
        run(engine(block_tokens=1, kv_blocks=100, prompt_request_s=price), at_once(2, prompt=20, output=60))
        for price in (0.0, 5.0)
    )
    assert dear.requests["preemptions"].tolist() == [0, 1]
    assert dear.steps["busy_s"].sum() == pytest.approx(free.steps["busy_s"].sum() + 3 * 5.0)


def test_the_gap_of_a_preemption_is_the_longest_gap():
    toy = engine(block_tokens=1, kv_blocks=100)
    requests = run(toy, at_once(2, prompt=20, output=60)).requests
    assert requests["max_itl_s"][0] < 0.15
    assert requests["max_itl_s"][1] > requests["ended_s"][0] / 4


def test_a_prompt_under_way_gives_way_before_anyone_who_decodes():
    toy = engine(block_tokens=1, kv_blocks=130, prefill=Chunked(chunk_tokens=1))
    offered = traffic([0.0, 0.25], prompt=[5, 70], output=[100, 2])
    result = run(toy, offered)
    assert result.requests["preemptions"].tolist() == [0, 1]
    assert result.requests["status"].tolist() == ["finished"] * 2


@pytest.mark.parametrize("prefill", [Chunked(), Disaggregated(replicas=1, hand_off=0.03)], ids=lambda one: one.kind)
def test_a_preempted_request_meets_the_same_luck_at_the_same_place(prefill):
    """A policy that verifies nothing shows the fate of a block at every place; a recomputed token has none."""
    drafter = always(3, 0.6)

    def fates(kv_blocks):
        spy = Spy(take=0, sees_outcome=True)
        toy = engine(spy, drafter, block_tokens=1, kv_blocks=kv_blocks, prefill=prefill)
        result = run(toy, at_once(2, prompt=20, output=60))
        return result.requests, [seen.sum(axis=1).astype(int).tolist() for seen in spy.seen]

    calm, undisturbed = fates(10_000)
    crowded, disturbed = fates(100)
    assert calm["preemptions"].tolist() == [0, 0]
    assert crowded["preemptions"][1] > 0
    assert crowded["output_tokens"].tolist() == calm["output_tokens"].tolist()
    older = [fates[0] for fates in undisturbed]
    younger = [fates[1] for fates in undisturbed if len(fates) > 1]
    # The older one stands first, and after its end the younger one.
    assert [fates[0] for fates in disturbed][: len(older)] == older
    rest = [fates[1] for fates in disturbed if len(fates) > 1] + [fates[0] for fates in disturbed[len(older) :]]
    assert len(rest) + crowded["preemptions"][1] == len(younger)
    place = 0
    for fate in rest:
        while fate != younger[place]:
            place += 1
        place += 1
    assert place <= len(younger)


def test_preemption_happens_before_drafting():
    """No draft is thrown away: what was drafted in a step is what its rounds count."""
    toy = engine(Fixed(k=4), always(4, 0.3), block_tokens=4, kv_blocks=40)
    result = run(toy, at_once(6, prompt=20, output=60))
    assert result.requests["preemptions"].sum() > 0
    np.testing.assert_array_equal(result.requests["drafted_tokens"], 4 * result.requests["rounds"])
    assert result.requests["status"].tolist() == ["finished"] * 6


def test_a_lone_request_that_outgrows_the_memory_fails_and_the_next_goes_on():
    toy = engine(block_tokens=1, kv_blocks=50)
    result = run(toy, at_once(2, prompt=20, output=[100, 10]))
    assert result.requests["status"].tolist() == ["failed", "finished"]
    assert result.requests["reason"].tolist() == ["kv_exhausted", "stop"]
    assert 20 < result.requests["output_tokens"][0] <= 32


@pytest.mark.parametrize("prefill", [Chunked(), Disaggregated(replicas=2, hand_off=0.01)], ids=lambda one: one.kind)
def test_a_preempted_request_that_outgrew_the_memory_fails(prefill):
    toy = engine(block_tokens=1, kv_blocks=50, prefill=prefill)
    result = run(toy, at_once(2, prompt=[5, 20], output=[20, 100]))
    assert result.requests["status"].tolist() == ["finished", "failed"]


def test_many_preemptions_lose_nothing(rng):
    n = 60
    offered = traffic(np.cumsum(rng.exponential(0.03, n)), rng.integers(1, 60, n), rng.integers(1, 120, n))
    toy = engine(Fixed(k=3), always(3, 0.6), block_tokens=4, kv_blocks=120)
    result = run(toy, offered, replicas=2)
    assert result.requests["preemptions"].sum() > 20
    assert (result.requests["status"] == "finished").all()
