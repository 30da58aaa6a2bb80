"""The batched engine emits what one request at a time would: any drafter, order, neighbours, preemption, padding.

Kinds from ../shared/reference/faults.md that concern batches: slots, cancellation, preemption, padding, ragged steps,
chunked prefill, row mix-ups, NaN in one row. The target is a real transformer of random weights, in float64.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from decoder import ragged
from decoder.batch_target import HfBatchTarget
from decoder.errors import InputError, RequestError
from decoder.paged_kv import BlockPool, PagedKv
from decoder.sampling import Sampling
from decoder.session import Decoder
from sim.batching import Chunked, Exclusive
from sim.verify import BatchTable, Dspark, DsparkAsync, Fixed, Mtp1, NoSpeculation, Oracle, Threshold
from tests.decoder.engines import (
    KINDS,
    V,
    alone,
    assert_same,
    drafter_of,
    engine_of,
    request,
    requests,
    serve,
    transformer,
)

# Equality with one request at a time


#: One of each way to draft a batch.
WAYS = ("dspark_rnn", "eagle3", "mtp", "small_transformer", "small_model")


@pytest.mark.parametrize("kind, temperature", [*((kind, 1.0) for kind in KINDS), ("dspark_gated", 0.0), ("mtp", 0.0)])
def test_batched_is_one_at_a_time(kind, temperature):
    target, drafter = transformer(), drafter_of(kind)
    asked = requests(temperature=temperature)
    served = serve(engine_of(target, drafter, Fixed(k=4)), asked)
    assert {one.status for one in served} == {"finished"}
    assert_same(served, alone(target, drafter, Fixed(k=4), asked))


POLICIES = (NoSpeculation(), Mtp1(), Fixed(k=2), Threshold(min_confidence=0.4))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.kind)
def test_neighbours_and_order_do_not_matter(policy):
    """Any neighbours, in any order, with few seats: the same tokens, where ℓ does not depend on neighbours."""
    target, drafter = transformer(), drafter_of("dspark_rnn")
    asked = requests(3)
    expected = {one.request.request_id: one.output_ids for one in alone(target, drafter, policy, asked)}
    for order, seats in (((0, 1, 2), 1), ((2, 0, 1), 2), ((1, 2, 0), 3)):
        served = serve(engine_of(target, drafter, policy, max_running=seats), [asked[i] for i in order])
        assert {one.request.request_id: one.output_ids for one in served} == expected


@pytest.mark.parametrize("kind", WAYS)
def test_preemption_changes_nothing(kind):
    """KV for a fraction of the load: requests are thrown out and computed again, and their texts do not show it."""
    target, drafter = transformer(), drafter_of(kind)
    asked = [request(f"r{i}", [i + 1] * (2 + i), new=14) for i in range(3)]
    served = serve(engine_of(target, drafter, Fixed(k=4), blocks=8), asked)
    assert sum(one.preemptions for one in served) >= 2
    assert_same(served, alone(target, drafter, Fixed(k=4), asked))


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("steps", (1, 2))
def test_preemption_between_draft_and_verify(kind, steps):
    """Dropped after drafting: its block is void, its neighbour's is not; none lost, none doubled on its return."""
    target, drafter = transformer(), drafter_of(kind)
    asked = requests(2)
    engine = engine_of(target, drafter, Fixed(k=4))
    served = [engine.submit(one) for one in asked]
    for _ in range(steps):
        engine.step()
    plan = engine.schedule()
    blocks = engine.draft(plan)
    before = list(served[0].output_ids)
    engine.scheduler.preempt(served[0])
    engine.commit(plan, blocks, engine.verify(plan, blocks, engine.decide(plan, blocks)))
    engine.check()
    assert served[0].output_ids == before
    assert len(served[1].rounds) == steps
    engine.run()
    assert_same(served, alone(target, drafter, Fixed(k=4), asked))


@pytest.mark.parametrize(
    "prefill", (Chunked(chunk_tokens=1), Chunked(chunk_tokens=3), Chunked(chunk_tokens=64), Exclusive())
)
@pytest.mark.parametrize("kind", ("dspark_gated", "eagle3", "small_transformer"))
def test_prefill_in_chunks_gives_the_same_drafts(prefill, kind):
    target, drafter = transformer(), drafter_of(kind)
    asked = requests(3)
    served = serve(engine_of(target, drafter, Fixed(k=4), prefill=prefill), asked)
    assert_same(served, alone(target, drafter, Fixed(k=4), asked))


def test_each_row_of_a_mixed_batch_is_as_if_alone():
    """Greedy, sampled, cut and penalized requests side by side; the penalty sees a block's own drafts."""
    target, drafter = transformer(), drafter_of("dspark_vanilla")
    samplings = (
        Sampling(),
        Sampling(temperature=0),
        Sampling(temperature=1, top_k=1),
        Sampling(temperature=2, top_k=3),
        Sampling(top_p=0.6),
        Sampling(min_p=0.2, temperature=0.5),
        Sampling(repetition_penalty=1.8),
        Sampling(repetition_penalty=1.8, temperature=0),
    )
    asked = [request(f"r{i}", (4, 5), new=14, sampling=sampling) for i, sampling in enumerate(samplings)]
    served = serve(engine_of(target, drafter, Fixed(k=4)), asked)
    assert_same(served, alone(target, drafter, Fixed(k=4), asked))


def test_greedy_drafts_are_tested_as_one_hots():
    target, drafter = transformer(), drafter_of("dspark_vanilla")
    asked = requests(3)
    served = serve(engine_of(target, drafter, Fixed(k=4), greedy_draft=True), asked)
    assert_same(served, alone(target, drafter, Fixed(k=4), asked, greedy_draft=True))


# Policies that look at the load


@pytest.mark.parametrize(
    "policy",
    (
        Dspark(),
        DsparkAsync(lag=1, first_budget=2),
        DsparkAsync(lag=2),
        BatchTable(table=((1, 4), (3, 1), (4, 0))),
    ),
    ids=lambda policy: f"{policy.kind}{getattr(policy, 'lag', '')}",
)
def test_load_dependent_lengths_replayed_alone_give_the_same_text(policy):
    """Each request, decoded alone with the lengths that the engine chose for it, says the same."""
    target, drafter = transformer(), drafter_of("dspark_rnn")
    asked = requests(4)
    engine = engine_of(target, drafter, policy, rates=Jagged(), max_batch_tokens=12, max_running=4)
    served = serve(engine, asked)
    chosen = {length for one in served for length in (r.verify_length for r in one.rounds)}
    assert len(chosen) > 1
    decoder = Decoder(target, drafter, Fixed(k=4))
    for one, ask in zip(served, asked, strict=True):
        generation = decoder.admit(ask)
        for found in one.rounds:
            blocks = decoder.draft([generation])
            decoder.verify(blocks, [min(found.verify_length, blocks[0].cap)])
        assert generation.output_ids == one.output_ids
        assert [r.emitted_tokens for r in generation.rounds] == [r.emitted_tokens for r in one.rounds]


class Jagged:
    """Rates with steps up and down, so that load-aware policies have something to choose between."""

    def steps_per_s(self, requests, drafted, context_tokens, prompt_tokens, admitted, max_batch_tokens):
        sizes = np.arange(requests * (1 + drafted) + 1)
        rates = 1.0 / (1 + 0.2 * (sizes // 3) + 0.05 * sizes)
        rates[sizes > max_batch_tokens] = 0
        rates[0] = np.inf
        return rates


def test_the_batch_limit_trims_from_the_tail():
    target, drafter = transformer(), drafter_of("dspark_vanilla")
    engine = engine_of(target, drafter, Fixed(k=4), max_batch_tokens=11, max_running=4)
    served = [engine.submit(request(f"r{i}", (i + 1,), new=40)) for i in range(4)]
    while len(engine.scheduler.decoding) < 4:
        engine.step()
    plan = engine.schedule()
    lengths, trimmed = engine.decide(plan, engine.draft(plan))
    assert lengths.tolist() == [4, 3, 0, 0]
    assert trimmed == 9
    assert [one.request.request_id for one in plan.decoding] == [one.request.request_id for one in served]


class Ragged(Fixed):
    """Lengths that differ within a step, by request."""

    def verify_lengths(self, confidence, steps_per_s):
        return np.array([0, 4, 0, 3], np.int64)[: len(confidence)]


def test_lengths_need_not_be_equal_in_a_step():
    """Rows without drafts beside rows with a whole block, in any order."""
    target, drafter = transformer(), drafter_of("dspark_gated")
    asked = [request(f"r{i}", (i + 1,), new=9) for i in range(4)]
    by_length = {0: NoSpeculation(), 3: Fixed(k=3), 4: Fixed(k=4)}
    for order in ((0, 1, 2, 3), (3, 0, 2, 1), (2, 3, 1, 0)):
        engine = engine_of(target, drafter, Ragged(k=4))
        served = [engine.submit(asked[i]) for i in order]
        engine.step()
        engine.step()
        for seat, one in enumerate(served):
            length = (0, 4, 0, 3)[seat]
            (found,) = one.rounds
            assert found.verify_length == length
            want = alone(target, drafter, by_length[length], [one.request])[0]
            assert one.output_ids == want.output_ids[: len(one.output_ids)]
            assert len(one.output_ids) == 1 + want.rounds[0].emitted_tokens


# Padding


@pytest.mark.parametrize("sizes", ((64,), (1, 2, 4, 8, 16, 32), (3,)))
def test_padding_to_graph_sizes_changes_nothing(sizes):
    target, drafter = transformer(), drafter_of("dspark_rnn")
    asked = requests(4)
    engine = engine_of(target, drafter, Fixed(k=4), graph_sizes=sizes)
    served = [engine.submit(one) for one in asked]
    padded, plain = 0, 0
    while engine.step():
        engine.check()
        times, rows = engine.last_times, engine.journal.steps[-1]
        work = rows.batch_tokens + rows.prompt_tokens
        assert times.graph_tokens == next((size for size in sizes if size >= work), 0)
        assert times.padded_tokens == max(times.graph_tokens - work, 0)
        padded += times.padded_tokens
        plain += times.graph_tokens == 0
    assert padded > 0 or plain > 0
    assert_same(served, alone(target, drafter, Fixed(k=4), asked))


@pytest.mark.parametrize("sizes", ((4, 2), (0, 3), (2, 2)))
def test_graph_sizes_are_checked(sizes):
    with pytest.raises(InputError, match="graph_sizes: expected sizes of at least 1 that rise"):
        engine_of(transformer(), None, NoSpeculation(), graph_sizes=sizes)


# Cancellation and identity


@pytest.mark.parametrize("kind", WAYS)
def test_a_cancelled_request_gets_nothing_and_leaves_nothing(kind):
    """Cancelled between draft and verify; its seat and its very id go to another, who is as if alone."""
    target, drafter = transformer(), drafter_of(kind)
    engine = engine_of(target, drafter, Fixed(k=4), max_running=2)
    gone, kept = (engine.submit(one) for one in requests(2))
    for _ in range(2):
        engine.step()
    plan = engine.schedule()
    blocks = engine.draft(plan)
    before = list(gone.output_ids)
    engine.cancel(gone)
    heir = request("r0", (9, 9, 9), new=12, seed=5)
    took = engine.submit(heir)
    engine.commit(plan, blocks, engine.verify(plan, blocks, engine.decide(plan, blocks)))
    engine.check()
    assert gone.output_ids == before
    assert (gone.status, gone.reason) == ("aborted", "cancelled")
    engine.run()
    assert_same([kept, took], alone(target, drafter, Fixed(k=4), [requests(2)[1], heir]))


def test_cancelled_while_waiting_or_in_prefill():
    engine = engine_of(transformer(), None, NoSpeculation(), max_running=1, prefill=Chunked(chunk_tokens=2))
    first, second = (engine.submit(one) for one in (request("a", [1] * 9), request("b")))
    engine.step()
    assert first in engine.scheduler.in_prefill
    engine.cancel(first)
    engine.cancel(second)
    engine.cancel(second)
    assert engine.idle
    assert engine.pool.free == engine.pool.blocks
    assert not engine.step()


def test_a_cancelled_chunk_under_way_is_not_delivered():
    engine = engine_of(transformer(), None, NoSpeculation())
    gone = engine.submit(request("a", [1] * 9))
    plan = engine.schedule()
    blocks = engine.draft(plan)
    step = engine.verify(plan, blocks, engine.decide(plan, blocks))
    engine.cancel(gone)
    engine.commit(plan, blocks, step)
    engine.check()
    assert gone.output_ids == []
    assert engine.idle


# Faults of single rows


class Broken(HfBatchTarget):
    """NaN in the row of one token."""

    bad = 9

    def forward(self, token_ids, segments, feature_layers, logit_rows):
        output = super().forward(token_ids, segments, feature_layers, logit_rows)
        bad = torch.tensor([token_ids[at] == self.bad for at in logit_rows])
        return replace(output, logits=torch.where(bad[:, None], math.nan, output.logits))


def test_nan_fails_its_request_by_name_and_no_other():
    target, drafter = transformer(), drafter_of("dspark_vanilla")
    asked = [request("bad", (1, 9)), *(one for one in requests(3))]
    expected = alone(target, drafter, Fixed(k=4), asked[1:])
    engine = engine_of(target, drafter, Fixed(k=4), batch_target=Broken)
    bad, *others = serve(engine, asked)
    assert (bad.status, bad.output_ids) == ("failed", [])
    assert bad.error == "request 'bad' failed at token 2: target: logits are not finite"
    for one, want in zip(others, expected, strict=True):
        meets = 9 in want.output_ids[:-1] or any(9 in r.proposed for r in want.rounds)
        assert one.output_ids == want.output_ids or (meets and one.status == "failed")


@pytest.mark.parametrize("how", ("failed", "preempted", "cancelled"))
def test_nan_stays_out_of_blocks_that_others_get_next(how):
    """A text that turns the cache into NaN leaves none behind: attention multiplies what it does not see by 0."""
    clean, poisoned = transformer(), transformer()
    with torch.no_grad():
        poisoned.model.get_input_embeddings().weight[9] = math.nan
    asked = [one for one in requests(6) if 9 not in one.prompt_ids]
    expected = {one.request.request_id: one.output_ids for one in alone(clean, None, NoSpeculation(), asked)}
    engine = engine_of(poisoned, None, NoSpeculation(), blocks=12, prefill=Chunked(chunk_tokens=4), max_running=2)
    bad = engine.submit(request("bad", [9] * 14))
    engine.step()
    if how == "preempted":
        engine.scheduler.preempt(bad)
    if how != "failed":
        engine.cancel(bad)
    others = serve(engine, asked)
    assert bad.output_ids == []
    assert bad.status == ("failed" if how == "failed" else "aborted")
    for one in others:
        text = expected[one.request.request_id]
        if one.status == "failed":  # it wrote the token itself
            assert one.output_ids[-1] == 9
        assert one.output_ids == text[: len(one.output_ids)]
    assert any(one.status == "finished" for one in others)


def test_nan_stays_out_of_a_shorter_neighbour_in_the_same_call():
    """What fills up a shorter text's table of blocks is not another's: here block 0 holds NaN."""
    pool = BlockPool(4, 4)
    kv = PagedKv(1, 2, 8, pool, dtype=torch.float32, device=torch.device("cpu"))
    for rows in kv.flat(0):
        rows.normal_()
        rows[:4] = math.nan
    query = torch.randn(3, 4, 8)
    short, long = ragged.Segment([3], 1, 1), ragged.Segment([0, 1, 2], 8, 2)
    together = ragged.Ragged((long, short), 4, 4, torch.device("cpu")).attend(query, kv, 0, 0.5)
    own = ragged.Ragged((short,), 4, 4, torch.device("cpu")).attend(query[2:], kv, 0, 0.5)
    assert bool(together[:2].isnan().all())
    torch.testing.assert_close(together[2:], own)


@pytest.mark.parametrize("part", ("lm_head.weight", "confidence_head.proj.bias"))
def test_nan_in_the_drafter_fails_by_name_too(part):
    drafter = drafter_of("dspark_vanilla")
    with torch.no_grad():
        dict(drafter.net.named_parameters())[part].fill_(math.nan)
    for one in serve(engine_of(transformer(), drafter, Fixed(k=3)), requests(2)):
        assert one.status == "failed"
        assert one.error.endswith("drafter: a distribution or a confidence is not finite")
        assert len(one.output_ids) == 1


# Ends


def test_stops_limits_and_context():
    target, drafter = transformer(context=30), drafter_of("dspark_rnn")
    free = alone(target, drafter, Fixed(k=4), [request("s", (3, 4), new=20)])[0].output_ids
    stop = free[6]
    asked = [
        request("s", (3, 4), new=20, stop_token_ids=frozenset({stop})),
        request("s", (3, 4), new=7),
        request("c", [5] * 25, new=99),
        request("c", [5] * 29, new=99),
    ]
    served = [serve(engine_of(target, drafter, Fixed(k=4)), [one])[0] for one in asked]
    assert served[0].output_ids == free[: free.index(stop) + 1]
    assert [one.reason for one in served] == ["stop", "length", "context_limit", "context_limit"]
    assert [one.tokens for one in served[2:]] == [30, 30]
    assert_same(served, alone(target, drafter, Fixed(k=4), asked))


@pytest.mark.parametrize("new", (1, 2, 5, 6))
def test_a_text_that_ends_as_if_by_a_stop_token(new):
    """What is behind the end was verified, since no one knew; it is neither emitted nor counted."""
    target, drafter = transformer(), drafter_of("dspark_rnn")
    free = alone(target, drafter, Fixed(k=4), [request("s", new=40)])[0]
    (found,) = serve(engine_of(target, drafter, Fixed(k=4)), [request("s", new=40)], stop_after=new)
    assert found.output_ids == free.output_ids[:new]
    assert (found.status, found.reason) == ("finished", "stop")
    assert sum(r.emitted_tokens for r in found.rounds) == new - 1
    assert all(r.accepted_draft_tokens <= r.emitted_tokens for r in found.rounds)
    assert all(r.verify_length == 4 for r in found.rounds)


def test_rejections_deadlines_and_memory():
    target = transformer()
    engine = engine_of(target, None, NoSpeculation(), max_running=1, max_waiting=2, max_context_tokens=20, blocks=4)
    asked = [request("long", [1] * 20), request("big", [1] * 16), request("a"), request("b"), request("c")]
    served = serve(engine, asked)
    assert [(one.status, one.reason) for one in served] == [
        ("rejected", "prompt_too_long"),
        ("rejected", "prompt_too_long"),
        ("finished", "length"),
        ("finished", "length"),
        ("rejected", "queue_full"),
    ]
    (grown,) = serve(engine_of(target, None, NoSpeculation(), blocks=4), [request("g", [1] * 10, new=40)])
    assert (grown.status, grown.reason, grown.tokens) == ("failed", "kv_exhausted", 17)


def test_deadlines_wherever_a_request_is():
    now = iter(range(10**6))
    engine = engine_of(transformer(), None, NoSpeculation(), max_running=2, deadline_s=40.0, clock=lambda: next(now))
    served = [engine.submit(request(f"r{i}", [1] * 3, new=60)) for i in range(4)]
    while engine.step():
        engine.check()
    assert {(one.status, one.reason) for one in served} == {("aborted", "deadline")}
    assert [bool(one.output_ids) for one in served] == [True, True, False, False]


def test_decoding_goes_on_while_a_long_prompt_is_read():
    """Chunks let others decode in every step; exclusive prefill holds them up for the whole prompt."""
    target = transformer()
    gaps = {}
    for name, prefill in (("chunked", Chunked(chunk_tokens=8)), ("exclusive", Exclusive())):
        engine = engine_of(target, None, NoSpeculation(), prefill=prefill, max_batch_tokens=8, max_running=4)
        first = engine.submit(request("a", new=40))
        for _ in range(3):
            engine.step()
        engine.submit(request("b", [2] * 60, new=2))
        lengths = []
        while engine.scheduler.in_prefill or engine.scheduler.waiting:
            engine.step()
            lengths.append(len(first.output_ids))
        gaps[name] = np.diff(lengths).min() if len(lengths) > 1 else 0
    assert gaps == {"chunked": 1, "exclusive": 0}


# Refusals


def test_what_cannot_run_is_refused_by_name():
    target, drafter = transformer(), drafter_of("dspark_vanilla")
    with pytest.raises(RequestError, match="'oracle' is shown the outcome"):
        engine_of(target, drafter, Oracle())
    with pytest.raises(RequestError, match="drafts, but no drafter was given"):
        engine_of(target, None, Fixed(k=1))
    with pytest.raises(RequestError, match="max_batch_tokens: expected at least max_running, 8"):
        engine_of(target, drafter, Fixed(k=1), max_batch_tokens=7)
    with pytest.raises(RequestError, match="max_context_tokens: expected at most the target's 96"):
        engine_of(target, drafter, Fixed(k=1), max_context_tokens=97)
    engine = engine_of(target, drafter, Fixed(k=1))
    for wrong, message in (
        (request("r", ()), "the prompt is empty"),
        (request("r", (V,)), "outside the vocabulary"),
        (request("r", new=0), "max_new_tokens must be at least 1"),
        (request("r", stop_strings=("x",)), "stop strings need a tokenizer"),
    ):
        with pytest.raises(RequestError, match=f"request 'r': .*{message}|{message}"):
            engine.submit(wrong)
    assert engine.idle
