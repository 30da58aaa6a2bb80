"""The loop where real engines went wrong: stops, limits, cancellation, preemption, neighbours, caches, counters.

Each test is a kind from ../shared/reference/faults.md. The targets are tables, so that the right answer is known.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from decoder.sampling import Sampling
from decoder.session import Decoder, Request, RequestError
from decoder.stopping import Cut, Limits, cut
from sim.verify.batch_table import BatchTable
from sim.verify.dspark import Dspark
from sim.verify.fixed import Fixed
from sim.verify.none import NoSpeculation
from sim.verify.oracle import Oracle
from sim.verify.threshold import Threshold
from tests.decoder.law import CurveRates
from tests.decoder.toys import DRAFTER_KINDS, LAYERS, TableDrafter, TableTarget, tiny_drafter

V = 12


def cycle(period=V):
    """A target that counts: after token t comes t + 1."""
    table = np.zeros((V, V))
    for token in range(V):
        table[token, (token + 1) % period] = 1
    return table


def soft(sharp=0.7, vocabulary=V):
    """Count, but not always."""
    table = np.full((vocabulary, vocabulary), (1 - sharp) / (vocabulary - 1))
    for token in range(vocabulary):
        table[token, (token + 1) % vocabulary] = sharp
    return table


def wrong(after: int):
    """A drafter of the counting target that errs after one token."""
    table = cycle()
    table[after] = np.roll(table[after], 1)
    return table


def request(name="r", prompt=(0,), new=8, temperature=0.0, seed=0, **limits):
    sampling = limits.pop("sampling", Sampling(temperature=temperature))
    return Request(
        request_id=name,
        prompt_ids=tuple(prompt),
        limits=Limits(max_new_tokens=new, **limits),
        sampling=sampling,
        seed=seed,
    )


def counting(k=7, drafter_table=None, policy=None, **options):
    target = TableTarget(cycle(), max_context_tokens=options.pop("context", 64))
    drafter = TableDrafter(cycle() if drafter_table is None else drafter_table, k)
    return Decoder(target, drafter, policy or Fixed(k=k), **options)


def alone(target, asked, **options):
    return Decoder(target, None, NoSpeculation(), **options).generate([asked])[0]


# Stops and limits


def test_stop_inside_an_accepted_block():
    """Accepted [1, 2, 3, STOP 4, 5, ...]: output ends with 4; nothing after it is emitted, cached or counted."""
    decoder = counting(k=7)
    found = decoder.generate([request(new=30, stop_token_ids=frozenset({4}))])[0]
    assert found.output_ids == [1, 2, 3, 4]
    assert found.finish_reason == "stop"
    (only,) = found.rounds
    assert (only.accepted_draft_tokens, only.bonus_token, only.emitted_tokens) == (3, None, 3)
    assert len(found.logprobs) == len(found.top2_gaps) == 4
    assert found.cache.tokens == found.drafting.tokens == found.tokens - 1
    found.check()


def test_stop_that_is_the_bonus():
    found = counting(k=3).generate([request(new=30, stop_token_ids=frozenset({5}))])[0]
    assert found.output_ids == [1, 2, 3, 4, 5]
    assert (found.finish_reason, found.rounds[0].bonus_token) == ("stop", 5)


def test_stop_that_is_the_first_token():
    found = counting().generate([request(stop_token_ids=frozenset({1}))])[0]
    assert (found.output_ids, found.finish_reason, found.rounds) == ([1], "stop", [])
    found.check()


def test_stop_is_looked_for_before_length():
    """8 tokens out, cap 10, offered [STOP, t, t']: 9 tokens, reason stop. Past the cap: exactly 10, reason length."""
    limits = Limits(max_new_tokens=10, stop_token_ids=frozenset({9}))
    before = list(range(8))
    assert cut(before, [9, 1, 2], limits, 99, None) == Cut(1, "stop")
    assert cut(before, [1, 9, 2], limits, 99, None) == Cut(2, "stop")  # on the cap itself
    assert cut(before, [1, 2, 9], limits, 99, None) == Cut(2, "length")
    assert cut(before, [1], limits, 99, None) == Cut(1, None)
    assert cut(before, [1, 2], limits, 99, None) == Cut(2, "length")
    assert cut(before, [1, 2], limits, 1, None) == Cut(1, "context")


@pytest.mark.parametrize("new", range(1, 18))
def test_length_limit_inside_a_block(new):
    found = counting(k=7).generate([request(new=new)])[0]
    assert len(found.output_ids) == new
    assert found.finish_reason == "length"
    assert sum(record.emitted_tokens for record in found.rounds) == new - 1
    # What the limit would cut off is not verified in the first place.
    assert all(record.emitted_tokens == record.verify_length + 1 for record in found.rounds)
    found.check()


@pytest.mark.parametrize("kind", DRAFTER_KINDS)
@pytest.mark.parametrize("room", range(1, 6))
def test_context_limit(kind, room):
    """A prompt that ends just before the context does: drafting past it is no crash, and every slot is used."""
    target = TableTarget(soft(), max_context_tokens=10)
    decoder = Decoder(target, tiny_drafter(kind, V, 4), Fixed(k=4))
    found = decoder.generate([request(prompt=[1] * (10 - room), new=99, temperature=1.0)])[0]
    assert found.tokens == 10
    assert found.finish_reason == "context"
    found.check()


def test_prompt_at_the_context_limit_is_refused():
    decoder = counting(context=10)
    with pytest.raises(RequestError, match="'r': a prompt of 10 tokens leaves no room for output in a context of 10"):
        decoder.generate([request(prompt=[0] * 10)])


def spell(ids):
    return "".join("abcdefghijkl"[token] for token in ids)


@pytest.mark.parametrize("string, ends", (("bc", 2), ("def", 5), ("efghi", 8), ("b", 1), ("lab", None)))
def test_stop_string_anywhere_in_a_block(string, ends):
    """Text "bcdefghi...": found wherever it begins and ends, and text, tokens and logprobs are cut together."""
    decoder = counting(k=7, decode=spell)
    found = decoder.generate([request(new=9, stop_strings=("zz", string))])[0]
    if ends is None:
        assert (found.finish_reason, len(found.output_ids)) == ("length", 9)
    else:
        assert found.finish_reason == "stop"
        assert spell(found.output_ids) == "bcdefghijk"[:ends]
        assert len(found.output_ids) == len(found.logprobs) == ends
    found.check()


def test_stop_string_over_rounds_and_before_a_stop_token():
    decoder = counting(k=2, decode=spell)
    found = decoder.generate([request(new=9, stop_strings=("cdefg",), stop_token_ids=frozenset({8}))])[0]
    assert spell(found.output_ids) == "bcdefg"
    found = decoder.generate([request(new=9, stop_strings=("hi",), stop_token_ids=frozenset({3}))])[0]
    assert spell(found.output_ids) == "bcd"


# Counters


def test_accepted_length_counts_what_was_emitted():
    """All rejected: 1. All accepted: k + 1. Cut by a stop: only what came out."""
    never = counting(k=3, drafter_table=np.roll(cycle(), 2, axis=1)).generate([request(new=9)])[0]
    assert [record.emitted_tokens for record in never.rounds] == [1] * 8
    always = counting(k=3).generate([request(new=9)])[0]
    assert [record.emitted_tokens for record in always.rounds] == [4, 4]
    stopped = counting(k=3).generate([request(new=30, stop_token_ids=frozenset({7}))])[0]
    cut_off = 2  # the block was 6, 7, 8 and the bonus 9
    assert len(stopped.output_ids) == 1 + sum(4 for _ in stopped.rounds) - cut_off


def test_nothing_after_the_first_rejection_counts():
    """The draft is wrong at its second token and right, by itself, at the third."""
    found = counting(k=3, drafter_table=wrong(2)).generate([request(new=4)])[0]
    first = found.rounds[0]
    assert first.proposed[0] == 2
    assert first.accepted_draft_tokens == 1
    assert first.judged == (True, False)


def test_what_was_offered_is_the_denominator():
    found = counting(k=7, policy=Threshold(min_confidence=0.0)).generate([request(new=4)])[0]
    assert [(r.verify_length, r.accepted_draft_tokens) for r in found.rounds] == [(2, 2)]
    assert len(found.rounds[0].proposed) == 2


def test_zero_drafts_for_a_whole_run():
    policy = Threshold(min_confidence=1.0)
    found = counting(k=3, policy=policy).generate([request(new=6)])[0]
    assert [(r.verify_length, r.emitted_tokens, r.judged) for r in found.rounds] == [(0, 1, ())] * 5
    assert found.output_ids == [1, 2, 3, 4, 5, 6]


def test_drafting_switched_off_costs_no_draft_and_loses_no_context():
    """Length 0 at two running requests: no draft is made; when one request is left, drafting goes on undisturbed."""
    policy = BatchTable(table=((1, 3), (2, 0)))
    decoder = counting(k=3, policy=policy)
    short, long = decoder.generate([request("a", new=4), request("b", new=12)], concurrency=2)
    assert short.output_ids == [1, 2, 3, 4]
    assert [r.draft_s for r in short.rounds] == [0.0] * 3
    assert [len(r.proposed) for r in long.rounds] == [0, 0, 0, 3, 3]
    assert all(r.accepted_draft_tokens == r.verify_length for r in long.rounds)


def test_lengths_need_not_be_equal_in_a_step():
    class Ragged(Fixed):
        def verify_lengths(self, confidence, steps_per_s):
            return np.array([0, 7, 0, 3], np.int64)[: len(confidence)]

    requests = [request(str(i), prompt=(i,), new=9) for i in range(4)]
    decoder = counting(k=7, policy=Ragged(k=7))
    generations = [decoder.admit(r) for r in requests]
    decoder.step(generations)
    assert [g.rounds[0].emitted_tokens for g in generations] == [1, 8, 1, 4]
    for generation in generations:
        generation.check()


def test_the_target_reads_exactly_what_is_verified():
    decoder = counting(k=7, policy=Fixed(k=3))
    generation = decoder.admit(request(new=20))
    decoder.target.forward_tokens.clear()
    decoder.step([generation])
    assert decoder.target.forward_tokens == [4]


# Draft length


@pytest.mark.parametrize("kind", ("dspark_vanilla", "dflash"))
def test_more_than_the_trained_block_is_refused(kind):
    drafter = tiny_drafter(kind, V, 4)
    with pytest.raises(RequestError, match=r"'fixed' with a \w+ drafter: k: expected at most .* block of 4 \(got 5\)"):
        Decoder(TableTarget(soft()), drafter, Fixed(k=5))
    with pytest.raises(RequestError, match="5 draft tokens a round were asked"):
        drafter.start().propose(0, 5, None)


@pytest.mark.parametrize("kind", ("eagle3", "mtp", "small_model"))
def test_a_chain_may_go_further(kind):
    decoder = Decoder(TableTarget(soft()), tiny_drafter(kind, V, 2), Fixed(k=6))
    generation = decoder.admit(request(new=20, temperature=1.0))
    decoder.step([generation])
    assert len(generation.rounds[0].proposed) == 6
    generation.check()


@pytest.mark.parametrize("kind", DRAFTER_KINDS)
def test_a_shorter_verification_is_the_beginning_of_the_same_block(kind):
    target, drafter = TableTarget(soft()), tiny_drafter(kind, V, 5)
    whole, short = (Decoder(target, drafter, Fixed(k=k)).admit(request(new=9, temperature=1.0)) for k in (5, 2))
    blocks = [Decoder(target, drafter, Fixed(k=k)).draft([g])[0] for k, g in ((5, whole), (2, short))]
    assert blocks[1].token_ids == blocks[0].token_ids[:2]
    assert blocks[1].confidence_logits == pytest.approx(blocks[0].confidence_logits[:2])


def test_confidence_drives_what_is_verified():
    drafter = TableDrafter(cycle(), 4, confidence=lambda tokens: 0.0)
    decoder = Decoder(TableTarget(cycle()), drafter, Dspark(), rates=CurveRates())
    assert decoder.decide(decoder.draft([decoder.admit(request(new=9))])) == [0]
    sure = TableDrafter(cycle(), 4, confidence=lambda tokens: 1.0)
    decoder = Decoder(TableTarget(cycle()), sure, Dspark(), rates=CurveRates())
    assert decoder.decide(decoder.draft([decoder.admit(request(new=9))])) == [4]


# Chance


def sampled(decoder, names, concurrency, seed=0, new=8):
    requests = [request(name, prompt=(i,), new=new, temperature=1.0, seed=seed) for i, name in enumerate(names)]
    return {g.request.request_id: g for g in decoder.generate(requests, concurrency=concurrency)}


def soft_decoder(kind="dspark_rnn", policy=None):
    return Decoder(TableTarget(soft(0.5)), tiny_drafter(kind, V, 4), policy or Fixed(k=4))


def test_same_seed_same_run_and_other_seeds_differ():
    runs = [sampled(soft_decoder(), "ab", 1, seed) for seed in (1, 1, 2, 3, 4, 5)]
    texts = [tuple(run["a"].output_ids) for run in runs]
    assert texts[0] == texts[1]
    facts = [[(r.proposed, r.confidence, r.verify_length) for r in run["a"].rounds] for run in runs[:2]]
    assert facts[0] == facts[1]
    assert len(set(texts)) == 5
    assert runs[0]["a"].output_ids != runs[0]["b"].output_ids


@pytest.mark.parametrize("kind", DRAFTER_KINDS)
def test_neighbours_do_not_matter(kind):
    """One at a time, four at a time, in another order: the same tokens, when ℓ does not depend on neighbours."""
    names = "abcd"
    single = sampled(soft_decoder(kind), names, 1)
    together = sampled(soft_decoder(kind), names, 4)
    for name in names:
        assert single[name].output_ids == together[name].output_ids
        assert single[name].rounds[0].confidence == together[name].rounds[0].confidence


def test_slots_can_be_swapped():
    decoder = soft_decoder()
    undisturbed = sampled(decoder, "ab", 2)
    left, right = (decoder.admit(request(n, prompt=(i,), new=8, temperature=1.0)) for i, n in enumerate("ab"))
    order = [left, right]
    while not (left.finished and right.finished):
        decoder.step(order)
        order = order[::-1]
        for generation in order:
            generation.check()
    assert left.output_ids == undisturbed["a"].output_ids
    assert right.output_ids == undisturbed["b"].output_ids


def test_rows_do_not_mix():
    """Four requests whose texts live in disjoint parts of the vocabulary stay there."""
    table = np.zeros((V, V))
    for part in range(4):
        table[3 * part : 3 * part + 3, 3 * part : 3 * part + 3] = 1 / 3
    decoder = Decoder(TableTarget(table), tiny_drafter("dspark_gated", V, 4), Fixed(k=4))
    requests = [request(str(p), prompt=(3 * p,), new=12, temperature=1.0) for p in range(4)]
    for part, found in enumerate(decoder.generate(requests, concurrency=4)):
        assert {token // 3 for token in found.output_ids} == {part}


def test_each_row_of_a_mixed_batch_is_as_if_alone():
    """Temperatures unset, 0 and 1 side by side; the greedy row meets a tie and takes the lowest id."""
    table = np.full((V, V), 1 / V)
    samplings = (Sampling(), Sampling(temperature=0), Sampling(temperature=1), Sampling(temperature=3, top_k=2))
    decoder = Decoder(TableTarget(table), tiny_drafter("dspark_vanilla", V, 3), Fixed(k=3))
    requests = [request(str(i), new=7, sampling=s) for i, s in enumerate(samplings)]
    together = decoder.generate(requests, concurrency=4)
    assert together[1].output_ids == [0] * 7
    for asked, found in zip(requests, together, strict=True):
        assert decoder.generate([asked])[0].output_ids == found.output_ids


def test_temperature_reaches_the_verifier():
    """p ≠ q: acceptance differs between temperatures."""
    rates = []
    for temperature in (0.3, 3.0):
        decoder = Decoder(TableTarget(soft(0.6)), TableDrafter(np.full((V, V), 1 / V), 4), Fixed(k=4))
        found = decoder.generate([request(str(i), new=30, temperature=temperature) for i in range(6)])
        rounds = [r for g in found for r in g.rounds]
        rates.append(sum(r.accepted_draft_tokens for r in rounds) / sum(r.verify_length for r in rounds))
    assert rates[0] + 0.2 < rates[1]


def test_drafts_as_good_as_the_target_are_all_accepted():
    """q = p: sampled drafts give k + 1 tokens a round; greedy ones, tested as one-hots, at most as many."""
    lengths = {}
    for greedy in (False, True):
        decoder = Decoder(TableTarget(soft(0.4)), TableDrafter(soft(0.4), 3), Fixed(k=3), greedy_draft=greedy)
        found = decoder.generate([request(new=41, temperature=1.0)])[0]
        lengths[greedy] = np.mean([r.emitted_tokens for r in found.rounds])
    assert lengths[False] == 4
    assert lengths[True] < 4


def test_nothing_outside_the_nucleus_is_emitted():
    """The draft's favourite lies outside the target's nucleus."""
    table = np.tile([0.6, 0.3, 0.1], (3, 1))
    drafter = TableDrafter(np.tile([0.05, 0.05, 0.9], (3, 1)), 3)
    decoder = Decoder(TableTarget(table), drafter, Fixed(k=3))
    found = decoder.generate([request(str(i), new=50, sampling=Sampling(top_p=0.7)) for i in range(4)])
    assert {token for g in found for token in g.output_ids} == {0, 1}


# Faults of single requests


class BrokenTarget(TableTarget):
    """NaN after one token."""

    def __init__(self, table, bad):
        super().__init__(table)
        self.logits[bad] = math.nan


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_nan_fails_its_request_by_name_and_no_other(temperature):
    decoder = Decoder(BrokenTarget(cycle(6), 9), TableDrafter(cycle(6), 3), Fixed(k=3))
    requests = [request("good", new=9, temperature=temperature), request("bad", prompt=(9,), temperature=temperature)]
    good, bad = decoder.generate(requests, concurrency=2)
    assert good.output_ids == [1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert bad.finish_reason == "failed"
    assert bad.error == "request 'bad' failed at token 1: target: logits are not finite in row 0 of 1"
    assert bad.output_ids == []


def test_nan_in_the_middle_of_a_text_emits_no_token_of_that_round():
    table = cycle()
    decoder = Decoder(BrokenTarget(table, 6), TableDrafter(table, 3), Fixed(k=3))
    good, bad = decoder.generate([request("good", prompt=(7,), new=6), request("bad", new=30)], concurrency=2)
    assert bad.output_ids == [1, 2, 3, 4, 5]
    assert (bad.finish_reason, good.finish_reason) == ("failed", "length")
    assert "'bad' failed at token 6" in bad.error


@pytest.mark.parametrize("part", ("lm_head.weight", "confidence_head.proj.bias"))
def test_nan_in_the_drafter_fails_by_name_too(part):
    drafter = tiny_drafter("dspark_vanilla", V, 3)
    with torch.no_grad():
        dict(drafter.net.named_parameters())[part].fill_(math.nan)
    found = Decoder(TableTarget(soft()), drafter, Fixed(k=3)).generate([request("r", new=5)])[0]
    assert found.finish_reason == "failed"
    assert found.error.startswith("request 'r' failed at token 2: drafter: ")


def test_a_cancelled_request_gets_nothing_of_the_round_under_way():
    decoder = soft_decoder()
    kept, gone = (decoder.admit(request(n, prompt=(i,), temperature=1.0)) for i, n in enumerate("ab"))
    expected = sampled(soft_decoder(), "ab", 1)
    blocks = decoder.draft([kept, gone])
    lengths = decoder.decide(blocks)
    decoder.cancel(gone)
    before = list(gone.output_ids)
    # Another request of the same name takes the place while the round is still out.
    successor = decoder.admit(request("b", prompt=(5,), temperature=1.0, seed=3))
    decoder.verify(blocks, lengths)
    assert gone.output_ids == before
    assert (gone.finish_reason, gone.rounds) == ("cancelled", [])
    while not (kept.finished and successor.finished):
        decoder.step([g for g in (kept, successor) if not g.finished])
    assert kept.output_ids == expected["a"].output_ids
    lone = soft_decoder().generate([request("b", prompt=(5,), temperature=1.0, seed=3)])[0]
    assert successor.output_ids == lone.output_ids
    assert [r.confidence for r in successor.rounds] == [r.confidence for r in lone.rounds]


def test_a_finished_request_stays_finished():
    decoder = counting()
    found = decoder.generate([request(new=3)])[0]
    decoder.cancel(found)
    decoder.step([found])
    assert (found.finish_reason, len(found.output_ids)) == ("length", 3)


@pytest.mark.parametrize("kind", DRAFTER_KINDS)
@pytest.mark.parametrize("late", (False, True))
def test_preemption_between_draft_and_verify(kind, late):
    """Dropped after drafting and recomputed: the same tokens as undisturbed, none lost, none doubled."""
    undisturbed = sampled(soft_decoder(kind), "a", 1, new=14)["a"]
    decoder = soft_decoder(kind)
    generation = decoder.admit(request("a", new=14, temperature=1.0))
    if late:
        decoder.step([generation])
    blocks = decoder.draft([generation])
    decoder.preempt(generation)
    decoder.verify(blocks, decoder.decide(blocks))
    assert len(generation.rounds) == int(late)
    decoder.step([generation])  # a preempted request does not run
    decoder.restore(generation)
    while not generation.finished:
        generation.check()
        decoder.step([generation])
    assert generation.output_ids == undisturbed.output_ids
    assert [r.proposed for r in generation.rounds] == [r.proposed for r in undisturbed.rounds]


# Caches


@pytest.mark.parametrize("kind", DRAFTER_KINDS)
@pytest.mark.parametrize("chunk", (1, 2, 3, 64))
def test_prefill_in_chunks_gives_the_same_drafts(kind, chunk):
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    target, drafter = TableTarget(soft()), tiny_drafter(kind, V, 4)
    whole, parts = (Decoder(target, drafter, Fixed(k=4), prefill_chunk_tokens=c) for c in (1000, chunk))
    asked = request(prompt=prompt, temperature=1.0)
    found = [d.draft([d.admit(asked)])[0] for d in (whole, parts)]
    assert found[0].token_ids == found[1].token_ids
    assert found[0].confidence_logits == pytest.approx(found[1].confidence_logits, abs=1e-12)
    assert whole.generate([asked])[0].output_ids == parts.generate([asked])[0].output_ids


@pytest.mark.parametrize("kind", DRAFTER_KINDS)
def test_the_next_turn_of_a_conversation(kind):
    """Go on after a stop inside a block, from the caches: as if the whole text had been read anew."""
    decoder = soft_decoder(kind)
    first = decoder.generate([request("a", new=40, temperature=1.0, stop_token_ids=frozenset({6}))])[0]
    assert first.finish_reason == "stop"
    turn = request("a2", prompt=(*first.token_ids, 8, 2), new=9, temperature=1.0)
    reused, anew = decoder.admit(turn, reuse=first), decoder.admit(turn)
    assert reused.reused_tokens == first.tokens - 1
    for generation in (reused, anew):
        while not generation.finished:
            decoder.step([generation])
            generation.check()
    assert reused.output_ids == anew.output_ids
    assert [r.proposed for r in reused.rounds] == [r.proposed for r in anew.rounds]


@pytest.mark.parametrize("kind", DRAFTER_KINDS)
def test_a_prefix_hit_keeps_the_drafter_s_features(kind):
    """The same prompt twice, the second from cache: same tokens and drafts, and as long a hit as without a drafter."""
    decoder = soft_decoder(kind)
    asked = request("a", prompt=[3, 1, 4, 1, 5], temperature=1.0)
    first = decoder.admit(asked)
    decoder.step([first])
    again = decoder.admit(asked, reuse=first)
    plain = Decoder(decoder.target, None, NoSpeculation())
    assert again.reused_tokens == plain.admit(asked, reuse=plain.admit(asked)).reused_tokens == 4
    while not again.finished:
        decoder.step([again])
    assert again.output_ids == decoder.generate([asked])[0].output_ids
    other = decoder.admit(request("b", prompt=[3, 1, 7], temperature=1.0), reuse=first)
    assert other.reused_tokens == 1
    other.check()


def test_acceptance_does_not_depend_on_context_length():
    """A drafter seeded one position off would lose as the text grows; on a position-free toy nothing may change."""
    found = counting(k=3).generate([request(prompt=[0] * n, new=9) for n in (1,)])[0]
    for tokens in (5, 17, 50):
        longer = counting(k=3).generate([request(prompt=[0] * tokens, new=9)])[0]
        assert [r.emitted_tokens for r in longer.rounds] == [r.emitted_tokens for r in found.rounds]


# Log-probabilities


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_logprobs_are_those_of_one_full_forward(temperature):
    decoder = soft_decoder()
    found = decoder.generate([request(prompt=(1, 2), new=20, temperature=temperature)])[0]
    text = found.token_ids
    logits = decoder.target.forward(text[:-1], decoder.target.new_cache(), logit_rows=len(text) - 1).logits
    rows = torch.log_softmax(logits, -1)[1:]
    want = [float(row[token]) for row, token in zip(rows, found.output_ids, strict=True)]
    assert found.logprobs == pytest.approx(want, abs=1e-12)


# Refusals


@pytest.mark.parametrize(
    "change, message",
    (
        ({"grammar": "root ::= 'a'"}, "structured output .* is not supported"),
        ({"draft_tree_width": 4}, "tree drafts are not supported"),
        ({"prompt_ids": ()}, "the prompt is empty"),
        ({"prompt_ids": (1, V)}, f"prompt token {V} lies outside the vocabulary of {V}"),
        ({"limits": Limits(max_new_tokens=0)}, "max_new_tokens must be at least 1; got 0"),
        ({"limits": Limits(max_new_tokens=3, stop_strings=("a",))}, "stop strings need a tokenizer"),
    ),
)
def test_requests_are_refused_by_name(change, message):
    fields = {"request_id": "r", "prompt_ids": (1,), "limits": Limits(max_new_tokens=3), **change}
    with pytest.raises(RequestError, match=f"request 'r': .*{message}|{message}"):
        counting().generate([Request(**fields)])


def test_policies_that_cannot_run_here_are_refused():
    with pytest.raises(RequestError, match="'oracle' is shown the outcome"):
        counting(policy=Oracle())
    with pytest.raises(RequestError, match="'fixed' drafts, but no drafter was given"):
        Decoder(TableTarget(cycle()), None, Fixed(k=1))
    with pytest.raises(RequestError, match="2 temperatures for a block of 7"):
        counting(k=7, temperatures=(1.0, 2.0))
    with pytest.raises(RequestError, match="same id"):
        counting().generate([request("x"), request("x")])


def test_calibration_changes_what_a_policy_sees_and_raw_policies_do_not_see_it():
    drafter = TableDrafter(cycle(), 2, confidence=lambda tokens: 0.9)
    shown = {}
    for reads in ("calibrated", "raw"):
        policy = Threshold(min_confidence=0.5, confidence=reads)
        decoder = Decoder(TableTarget(cycle()), drafter, policy, temperatures=(2.0, 1.0))
        shown[reads] = decoder.draft([decoder.admit(request())])[0].confidence.tolist()
    assert shown["raw"] == pytest.approx([0.9, 0.9], abs=1e-6)
    assert shown["calibrated"] == pytest.approx([0.75, 0.9], abs=1e-6)


def test_toys_agree_on_their_layers():
    assert all(layer < LAYERS for kind in DRAFTER_KINDS for layer in tiny_drafter(kind, V, 2).feature_layers)


def test_every_combination_keeps_its_books():
    """All drafters and policies: after every round every equation of `check` holds."""
    policies = (
        NoSpeculation(),
        Fixed(k=3),
        Threshold(min_confidence=0.4),
        Dspark(),
        BatchTable(table=((1, 2), (2, 1))),
    )
    for kind, policy in itertools.product(DRAFTER_KINDS, policies):
        decoder = Decoder(TableTarget(soft()), tiny_drafter(kind, V, 3), policy)
        running = [decoder.admit(request(n, prompt=(i,), new=7, temperature=1.0)) for i, n in enumerate("ab")]
        while not all(g.finished for g in running):
            decoder.step(running)
            for generation in running:
                generation.check()
