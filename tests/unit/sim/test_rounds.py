"""A round of speculation: what is drafted, verified, delivered and counted."""

import numpy as np
import pytest

from sim.batching import Chunked
from sim.errors import InvariantError
from sim.verify.fixed import Fixed
from sim.verify.mtp1 import Mtp1
from sim.verify.none import NoSpeculation
from tests.helpers.fleet import Spy, accepts, always, at_once, engine, law, metrics_of, run, traffic

STEP_S = 0.01


def counted(result, *names):
    return [result.requests[name].tolist() for name in names]


# --------------------------------------------------------------------------------------------- zero and full acceptance


@pytest.mark.parametrize("k", [1, 3, 7])
def test_full_acceptance_gives_k_plus_1_tokens_a_round_and_no_more(k):
    result = run(engine(Fixed(k=k), always(k)), traffic(0.0, output=1 + 12 * (k + 1)))
    assert counted(result, "rounds", "accepted_draft_tokens") == [[12], [12 * k]]
    span_s = result.requests["last_token_s"] - result.requests["first_token_s"]
    assert span_s == pytest.approx(12 * STEP_S)
    assert metrics_of(result, 10.0)["accepted_length"] == k + 1


@pytest.mark.parametrize("k", [1, 3, 7])
def test_zero_acceptance_gives_a_token_a_round(k):
    result = run(engine(Fixed(k=k), always(k, 0.0)), traffic(0.0, output=50))
    assert counted(result, "rounds", "accepted_draft_tokens", "verified_tokens") == [[49], [0], [49 * k]]
    measured = metrics_of(result, 10.0)
    assert measured["accepted_length"] == 1.0
    assert measured["wasted_draft_ratio"] == 1.0
    assert measured["accepted_draft_ratio"] == 0.0


def test_nothing_counts_after_the_first_rejection():
    """Survival 1, 0, 0: the first draft token always holds, the second never, whatever the third would do."""
    result = run(engine(Fixed(k=3), accepts(law([1.0, 0.0, 0.0]))), traffic(0.0, output=21))
    assert counted(result, "rounds", "accepted_draft_tokens") == [[10], [10]]


def test_domains_have_acceptances_of_their_own():
    tables = accepts(law([1.0, 1.0]), law([0.0, 0.0]), domains=("math", "chat"))
    offered = traffic([0.0] * 4, output=31, domain=[0, 1, 1, 0], domains=("math", "chat"))
    result = run(engine(Fixed(k=2), tables), offered)
    assert result.requests["domain"].tolist() == ["math", "chat", "chat", "math"]
    assert result.requests["rounds"].tolist() == [10, 30, 30, 10]


# ---------------------------------------------------------------------------------------------------- where output ends


@pytest.mark.parametrize(
    ("output", "rounds", "accepted"),
    [(1, 0, 0), (2, 1, 1), (3, 1, 2), (4, 1, 3), (5, 1, 3), (6, 2, 4), (9, 2, 6), (10, 3, 7)],
)
def test_a_stop_inside_a_block_cuts_there(output, rounds, accepted):
    """Nothing behind it is delivered or counted: the round's own token is the first to go."""
    result = run(engine(Fixed(k=3), always(3)), traffic(0.0, output=output))
    assert counted(result, "output_tokens", "rounds", "accepted_draft_tokens") == [[output], [rounds], [accepted]]


def test_accepted_length_is_of_delivered_tokens():
    """Out of 1 + 4 + 4 tokens, one delivers only its first 7: (3 + 3) / 2 tokens a round."""
    result = run(engine(Fixed(k=3), always(3)), traffic(0.0, output=7))
    assert metrics_of(result, 10.0)["accepted_length"] == (7 - 1) / 2


@pytest.mark.parametrize(("short", "tokens", "verified"), [(3, 3, 1), (2, 2, 0), (1, 1, 0), (10, 10, 7 + 0)])
def test_the_context_limit_bounds_drafts_and_ends_normally(short, tokens, verified):
    """A prompt ``short`` of the limit: at most the rest is verified, and the request is finished."""
    toy = engine(Fixed(k=7), always(7), max_context_tokens=4096)
    result = run(toy, traffic(0.0, prompt=4096 - short, output=1000))
    assert counted(result, "output_tokens", "status", "reason") == [[tokens], ["finished"], ["context_limit"]]
    assert result.requests["verified_tokens"].tolist() == [verified]


def test_an_output_that_just_fits_the_context_stops_by_itself():
    toy = engine(Fixed(k=7), always(7), max_context_tokens=100)
    result = run(toy, traffic([0.0, 0.0], prompt=90, output=[10, 11]))
    assert counted(result, "output_tokens", "reason") == [[10, 10], ["stop", "context_limit"]]


# ---------------------------------------------------------------------------------------------------------- batch limit


def test_a_batch_over_the_limit_is_trimmed_from_the_tail_of_the_admission_order():
    """Four requests ask for 3 drafts each and the batch holds 4 + 5: the first gets 3, the second 2."""
    spy = Spy()
    toy = engine(spy, always(3), max_running=4, max_batch_tokens=9, prefill=Chunked(chunk_tokens=9))
    result = run(toy, at_once(4, output=[2, 2, 2, 2]))
    assert result.requests["verified_tokens"].tolist() == [3, 2, 0, 0]
    assert result.steps["trimmed_tokens"].tolist() == [0, 7]
    assert result.steps["batch_tokens"].tolist() == [0, 9]


def test_a_trimmed_batch_still_gives_everyone_a_token():
    toy = engine(Fixed(k=3), always(3), max_running=8, max_batch_tokens=8, prefill=Chunked(chunk_tokens=8))
    result = run(toy, at_once(8, output=20))
    assert result.requests["verified_tokens"][:7].sum() == 0 or result.steps["trimmed_tokens"].sum() > 0
    assert (result.requests["status"] == "finished").all()


def test_zero_three_and_seven_drafts_share_a_step():
    class Ragged(Spy):
        def verify_lengths(self, confidence, steps_per_s):
            return np.array([0, 3, 7], np.int64)[: confidence.shape[0]]

    result = run(engine(Ragged(), always(7)), at_once(3, output=[9, 9, 9]), horizon_s=0.0131 + STEP_S - 0.01)
    assert result.requests["verified_tokens"].tolist() == [0, 3, 7]
    assert result.requests["accepted_draft_tokens"].tolist() == [0, 3, 7]
    assert result.requests["output_tokens"].tolist() == [2, 5, 9]


# ------------------------------------------------------------------------------------------------ drafting and its cost


def test_a_block_drafter_drafts_and_pays_its_block_however_little_is_verified():
    result = run(engine(Fixed(k=1), always(5), draft_s=0.004), traffic(0.0, output=21))
    assert counted(result, "rounds", "drafted_tokens", "verified_tokens") == [[10], [50], [10]]
    assert result.steps["draft_s"][1:] == pytest.approx(0.004)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_chain_drafter_pays_for_each_token(k):
    toy = engine(Fixed(k=k), always(5, kind="chain"), draft_s=0.004, draft_per_token=True)
    result = run(toy, traffic(0.0, output=1 + 4 * (k + 1)))
    assert counted(result, "rounds", "drafted_tokens") == [[4], [4 * k]]
    assert result.steps["draft_s"][1:] == pytest.approx(0.004 * k)


def test_mtp1_drafts_one():
    result = run(engine(Mtp1(), always(3, kind="chain")), traffic(0.0, output=21))
    assert counted(result, "rounds", "drafted_tokens", "verified_tokens") == [[10], [10], [10]]


def test_drafting_costs_by_the_requests_that_draft():
    toy = engine(Fixed(k=2), always(2, 0.0), draft_s=lambda requests: 0.001 * requests)
    steps = run(toy, at_once(3, output=[3, 4, 5])).steps
    assert steps["draft_s"] == pytest.approx([0, 0.003, 0.003, 0.002, 0.001])


def test_a_policy_is_shown_the_rates_of_the_very_step():
    """1 / (overhead + draft + per request + per context token + prompt + verify(b)); 0 beyond the batch limit."""
    spy = Spy(take=1)
    toy = engine(
        spy,
        always(3, 0.0),
        step_s=lambda b: 0.01 + 0.001 * b,
        overhead_s=0.002,
        draft_s=lambda requests: 0.003 * requests,
        per_request_s=0.0005,
        per_context_token_s=1e-6,
        prompt_token_s=1e-4,
        max_running=2,
        max_batch_tokens=15,
        prefill=Chunked(chunk_tokens=10),
    )
    result = run(toy, traffic([0.0, 0.001], prompt=[4, 10], output=[5, 3]))
    beside, both = spy.rates[0], spy.rates[1]
    assert result.steps["prompt_tokens"].tolist()[:2] == [4, 10]
    other_s = 0.002 + 0.003 + 0.0005 + 4e-6 + 10e-4
    assert beside == pytest.approx([np.inf] + [1 / (other_s + 0.01 + 0.001 * b) for b in (1, 2, 3, 4)])
    other_s = 0.002 + 0.006 + 0.001 + 1e-6 * (5 + 10)
    assert both == pytest.approx([np.inf, 0] + [1 / (other_s + 0.01 + 0.001 * b) for b in range(2, 9)])
    assert 1 / both[4] == pytest.approx(result.steps["busy_s"][2])


def test_rates_are_0_where_the_batch_limit_lies():
    spy = Spy(take=0)
    toy = engine(spy, always(3), max_running=2, max_batch_tokens=5, prefill=Chunked(chunk_tokens=5))
    run(toy, at_once(2, output=2))
    assert (spy.rates[0][2:6] > 0).all()
    assert (spy.rates[0][6:] == 0).all()


# ------------------------------------------------------------------------------------------------ what a policy may say


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (np.array([4, 0]), "chose length 4.*allowed: 0..3"),
        (np.array([-1, 0]), "chose length -1.*allowed: 0..3"),
        (np.array([1.0, 1.0]), r"float64.*expected int64 \(2,\)"),
        (np.array([1]), r"\(1,\).*expected int64 \(2,\)"),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths, message):
    class Wrong(Spy):
        def verify_lengths(self, confidence, steps_per_s):
            return lengths

    with pytest.raises(InvariantError, match=message):
        run(engine(Wrong(), always(3)), at_once(2))


def test_a_policy_cannot_reach_back_into_a_step_by_keeping_its_lengths():
    """What was returned may be changed later; the step is what it was."""

    class Keeper(Spy):
        kept = None

        def verify_lengths(self, confidence, steps_per_s):
            if self.kept is not None:
                self.kept[:] = 0
            self.kept = np.full(confidence.shape[0], 3, np.int64)
            return self.kept

    result = run(engine(Keeper(), always(3)), traffic(0.0, output=41))
    assert result.requests["rounds"].tolist() == [10]


def test_none_pays_nothing_for_a_drafter_in_the_profile():
    with_drafter = run(engine(NoSpeculation(), always(3), draft_s=0.01), at_once(3, output=[10, 20, 30]))
    assert with_drafter.steps["draft_s"].sum() == 0
    assert with_drafter.requests["drafted_tokens"].sum() == 0


def test_a_token_gap_is_a_delivery_gap_however_many_tokens_a_delivery_holds():
    result = run(engine(Fixed(k=3), always(3)), traffic(0.0, output=41))
    assert result.requests["max_itl_s"] == pytest.approx(STEP_S)
    tpot_s = (result.requests["last_token_s"] - result.requests["first_token_s"]) / 40
    assert tpot_s == pytest.approx(STEP_S / 4)
