"""Policies in a fleet: what speculation costs and gains, and that one policy does not touch another's luck."""

import dataclasses

import numpy as np
import pytest

from sim.verify import POLICIES, BatchTable, Dspark, DsparkAsync, Fixed, Mtp1, NoSpeculation, Oracle, Threshold
from tests.helpers.fleet import Spy, accepts, always, at_once, engine, law, metrics_of, run, same_run, traffic

UNEVEN = law([0.8, 0.62, 0.45, 0.35, 0.25], request_sd=0.5, token_sd=0.8, noise_sd=0.4)
DRAFTING = [
    Mtp1(),
    Fixed(k=3),
    Threshold(min_confidence=0.6),
    BatchTable(table=((1, 5), (6, 2), (12, 0)), hysteresis=1),
    Dspark(),
    DsparkAsync(lag=2, first_budget=2),
    Oracle(),
]


def flat_then_steep(batch):
    """Flat up to 64 batch tokens, then 0.1 ms a token."""
    return 0.01 + 1e-4 * np.maximum(batch - 64, 0)


def tpot_s(result):
    requests = result.requests
    return (requests["last_token_s"] - requests["first_token_s"]) / (requests["output_tokens"] - 1)


def test_every_policy_is_tested():
    assert {policy.kind for policy in DRAFTING} | {"none"} == set(POLICIES.known())


# ------------------------------------------------------------------------------------------------------- price and gain


@pytest.mark.parametrize("requests", [1, 8, 16])
def test_on_the_flat_part_of_the_curve_rejected_drafts_cost_nothing(requests):
    none = run(engine(step_s=flat_then_steep), at_once(requests, output=30))
    fixed = run(engine(Fixed(k=3), always(3, 0.0), step_s=flat_then_steep), at_once(requests, output=30))
    assert tpot_s(fixed) == pytest.approx(tpot_s(none))


@pytest.mark.parametrize("requests", [17, 32, 64])
def test_past_the_flat_part_rejected_drafts_slow_everyone_down(requests):
    none = run(engine(step_s=flat_then_steep), at_once(requests, output=30))
    fixed = run(engine(Fixed(k=3), always(3, 0.0), step_s=flat_then_steep), at_once(requests, output=30))
    assert (tpot_s(fixed) > tpot_s(none)).all()
    assert tpot_s(fixed) == pytest.approx(0.01 + 1e-4 * (4 * requests - 64))


def test_speculation_gains_at_most_k_plus_1_times():
    offered = at_once(16, output=121)
    none = metrics_of(run(engine(step_s=flat_then_steep), offered), 10.0)
    for k in (1, 2, 5):
        for chance in (0.3, 0.9, 1.0):
            toy = engine(Fixed(k=k), always(k, chance), step_s=flat_then_steep, draft_s=0.0)
            gain = metrics_of(run(toy, offered), 10.0)["user_tokens_per_s_p50"] / none["user_tokens_per_s_p50"]
            assert 0 < gain <= (k + 1) * (1 + 1e-9)


@pytest.mark.parametrize("policy", DRAFTING, ids=lambda policy: policy.kind)
def test_draft_time_is_paid_whenever_something_is_drafted(policy):
    toy = engine(policy, accepts(UNEVEN), draft_s=0.003)
    steps = run(toy, at_once(15, output=np.arange(10, 160, 10).tolist())).steps
    drafts = steps["drafted_tokens"] > 0
    assert drafts.any()
    assert (steps["draft_s"][drafts] == 0.003).all()
    assert (steps["draft_s"][~drafts] == 0.0).all()


def test_none_is_the_same_bytes_with_a_drafter_in_the_profile_and_without():
    offered = at_once(5, output=[10, 20, 30, 40, 50])
    with_one = engine(NoSpeculation(), accepts(UNEVEN), draft_s=0.1)
    assert same_run(run(with_one, offered), run(engine(), offered))


def test_a_table_that_never_drafts_takes_the_time_of_none():
    offered = traffic(np.linspace(0, 1, 20), prompt=30, output=50)
    table = BatchTable(table=((1, 0), (1000, 5)))
    toy = engine(table, accepts(UNEVEN), step_s=flat_then_steep, draft_s=0.1)
    assert same_run(run(toy, offered), run(engine(step_s=flat_then_steep), offered))


def test_a_table_drafts_by_the_running_requests_and_stops_paying_when_it_stops_drafting():
    toy = engine(BatchTable(table=((1, 2), (4, 1), (6, 0))), always(2, 0.0, kind="chain"), draft_s=0.001)
    steps = run(toy, at_once(8, output=[2, 3, 4, 5, 6, 7, 8, 9])).steps
    assert steps["decoding"].tolist() == [0, 8, 7, 6, 5, 4, 3, 2, 1]
    assert (steps["drafted_tokens"][1:] / steps["decoding"][1:]).tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert steps["draft_s"][1:4].sum() == 0.0


# ------------------------------------------------------------------------------------------------- what confidence does


def test_with_zero_confidence_dspark_verifies_nothing():
    result = run(engine(Dspark(), always(5, 0.0), step_s=flat_then_steep), at_once(4, output=20))
    assert result.requests["drafted_tokens"].sum() > 0
    assert result.requests["verified_tokens"].sum() == 0


def test_with_full_confidence_and_a_flat_curve_dspark_verifies_the_block():
    result = run(engine(Dspark(), always(5)), at_once(4, output=13))
    np.testing.assert_array_equal(result.requests["verified_tokens"], 5 * result.requests["rounds"])


def test_dspark_verifies_less_when_the_batch_grows():
    def verified(requests):
        toy = engine(Dspark(), accepts(UNEVEN), step_s=lambda batch: 0.01 + 2e-4 * batch, max_running=256)
        return metrics_of(run(toy, at_once(requests, output=60)), 100.0)["verify_tokens_per_request"]

    few, some, many = verified(2), verified(32), verified(200)
    assert few > some > many > 1


def test_a_floor_of_0_verifies_the_block_and_one_above_every_chance_nothing():
    drafter = always(4, 0.7)
    block = run(engine(Threshold(min_confidence=0.0), drafter), traffic(0.0, output=50)).requests
    np.testing.assert_array_equal(block["verified_tokens"], 4 * block["rounds"])
    assert run(engine(Threshold(min_confidence=0.71), drafter), traffic(0.0)).requests["verified_tokens"].sum() == 0


def test_raw_confidence_can_hurt():
    """Overconfident by a temperature of 3, dspark verifies more than pays; calibrated it does not."""
    model = law([0.7, 0.45, 0.28, 0.17, 0.1], raw_temperature=4.0, request_sd=0.3)

    def tokens_per_s(confidence):
        toy = engine(Dspark(), accepts(model, confidence=confidence), step_s=lambda batch: 0.002 + 3e-4 * batch)
        result = run(toy, at_once(48, output=150))
        return metrics_of(result, float(result.steps["ended_s"][-1]) * 0.9)["output_tokens_per_s_per_gpu"]

    assert tokens_per_s("raw") < 0.99 * tokens_per_s("calibrated")


def test_the_oracle_wastes_only_what_lies_behind_the_end_and_nobody_beats_it_on_a_flat_curve():
    offered = at_once(8, output=120)
    oracle = run(engine(Oracle(), accepts(UNEVEN)), offered)
    wasted = oracle.requests["verified_tokens"] - oracle.requests["accepted_draft_tokens"]
    assert (wasted < 5).all()
    for policy in (Dspark(), Fixed(k=5), Fixed(k=2)):
        other = run(engine(policy, accepts(UNEVEN)), offered)
        assert (other.requests["rounds"] >= oracle.requests["rounds"]).all()


def test_dspark_async_spends_its_first_budget_while_it_has_no_past():
    toy = engine(DsparkAsync(lag=3, first_budget=2), always(5, 0.0))
    steps = run(toy, at_once(4, output=10)).steps
    assert (steps["verified_tokens"][1:] / steps["decoding"][1:]).tolist() == [2, 2, 2, 0, 0, 0, 0, 0, 0]


# ------------------------------------------------------------------------------------------- the same luck at one place


def fates_by_place(tables, requests, output, seed=0):
    """Return the draft tokens that a block at each place would have accepted, ``[output, requests]``.

    A policy that verifies nothing stands at every place once.
    """
    spy = Spy(take=0, sees_outcome=True)
    run(engine(spy, tables, seed=seed, draft_s=0.001), at_once(requests, output=output))
    fates = np.array([seen.sum(axis=1) for seen in spy.seen]).astype(int)
    return np.vstack([np.zeros((1, requests), int), fates])


def walked(fates, k):
    """Return rounds and accepted draft tokens of each request by a walk over its text."""
    output, requests = fates.shape
    rounds, accepted = np.zeros(requests, int), np.zeros(requests, int)
    for request in range(requests):
        place = 1
        while place < output:
            got = min(fates[place, request], k, output - place)
            rounds[request] += 1
            accepted[request] += got
            place += got + 1
    return rounds, accepted


@pytest.mark.parametrize("k", [1, 2, 5])
def test_any_fixed_length_meets_the_luck_that_lies_at_each_place(k):
    """One map of the text predicts every round of every request under every length, to the token."""
    tables = accepts(UNEVEN)
    fates = fates_by_place(tables, 12, 150)
    requests = run(engine(Fixed(k=k), tables), at_once(12, output=150)).requests
    rounds, accepted = walked(fates, k)
    np.testing.assert_array_equal(requests["rounds"], rounds)
    np.testing.assert_array_equal(requests["accepted_draft_tokens"], accepted)


def test_the_map_is_another_one_under_another_seed():
    tables = accepts(UNEVEN)
    assert (fates_by_place(tables, 12, 150, seed=1) != fates_by_place(tables, 12, 150)).mean() > 0.3


def test_luck_is_the_same_whatever_the_order_of_service():
    """One at a time, in twos, all together, on two replicas: the same rounds."""
    tables = accepts(UNEVEN)
    offered = at_once(8, output=80)
    base = run(engine(Fixed(k=3), tables), offered).requests["rounds"]
    for seats, replicas in ((1, 1), (2, 1), (3, 2)):
        requests = run(engine(Fixed(k=3), tables, max_running=seats), offered, replicas=replicas).requests
        np.testing.assert_array_equal(requests["rounds"], base)


@pytest.mark.parametrize("k", [1, 3])
def test_what_takes_the_slot_of_an_aborted_request_meets_its_own_luck(k):
    """The first is aborted amid decoding, the others move up and a new one comes in: none inherits anything."""
    tables = accepts(UNEVEN)
    offered = traffic([0.0, 0.1, 0.2, 0.65], output=[500, 60, 60, 60])
    crowded = run(engine(Fixed(k=k), tables, max_running=3, deadline_s=0.6), offered).requests
    assert crowded["status"].tolist() == ["aborted", "finished", "finished", "finished"]
    alone = run(engine(Fixed(k=k), tables), traffic([0.0, 0.1, 0.2, 0.65], output=[1, 60, 60, 60])).requests
    for name in ("rounds", "accepted_draft_tokens"):
        assert crowded[name][1:].tolist() == alone[name][1:].tolist()


def test_a_load_aware_policy_meets_the_same_luck_too():
    tables = accepts(UNEVEN)
    fates = fates_by_place(tables, 6, 100)

    class Watched(Spy):
        def __init__(self):
            super().__init__(sees_outcome=False)
            self.lengths = []

        def verify_lengths(self, confidence, steps_per_s):
            self.lengths.append(Dspark().verify_lengths(confidence, steps_per_s))
            return self.lengths[-1].copy()

    watched = Watched()
    result = run(engine(watched, tables, step_s=lambda b: 0.01 + 5e-4 * b), at_once(6, output=100))
    place, got = np.ones(6, int), []
    for lengths in watched.lengths:
        there = np.flatnonzero(place < 100)
        accepted = np.minimum(np.minimum(fates[place[there], there], lengths), 100 - place[there])
        got.append(int(accepted.sum()))
        place[there] += accepted + 1
    assert (place >= 100).all()
    assert result.steps["accepted_draft_tokens"].tolist()[1:] == got


def test_raw_and_calibrated_confidence_meet_the_same_luck():
    model = law([0.8, 0.6, 0.4], request_sd=0.4, token_sd=0.5, noise_sd=0.3, raw_temperature=2.0)
    maps = [fates_by_place(accepts(model, confidence=confidence), 5, 60) for confidence in ("raw", "calibrated")]
    np.testing.assert_array_equal(*maps)


def test_noise_on_a_confidence_does_not_touch_the_luck():
    quiet, noisy = (law([0.8, 0.6], request_sd=0.4, token_sd=0.5, noise_sd=sd) for sd in (0.0, 1.0))
    np.testing.assert_array_equal(fates_by_place(accepts(quiet), 5, 60), fates_by_place(accepts(noisy), 5, 60))


# ------------------------------------------------------------------------------------- compiled and in Python: the same


def in_python(policy):
    """Return the same policy as somebody else's class, which the engine asks in Python, step by step."""
    theirs = type("Theirs", (type(policy),), {"__slots__": ()})
    return theirs(**{one.name: getattr(policy, one.name) for one in dataclasses.fields(policy)})


@pytest.mark.parametrize("policy", [NoSpeculation(), *DRAFTING], ids=lambda policy: policy.kind)
@pytest.mark.parametrize("memory", [10_000, 130])
def test_a_policy_gives_the_same_bytes_compiled_and_in_python(policy, memory, rng):
    n = 60
    offered = traffic(np.cumsum(rng.exponential(0.02, n)), rng.integers(1, 80, n), rng.integers(1, 80, n))
    settings = {
        "step_s": flat_then_steep,
        "draft_s": lambda requests: 0.001 + 1e-4 * requests,
        "per_context_token_s": 1e-7,
        "block_tokens": 4,
        "kv_blocks": memory,
        "max_running": 16,
        "max_batch_tokens": 48,
        "deadline_s": 2.0,
    }
    compiled, asked = (run(engine(one, accepts(UNEVEN), **settings), offered) for one in (policy, in_python(policy)))
    assert same_run(compiled, asked)
    assert (compiled.requests["preemptions"].sum() > 0) == (memory < 1000)
