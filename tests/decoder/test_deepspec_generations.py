"""Every recorded generation of DeepSpec, round by round: greedy ones decoded anew, sampled ones replayed."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from decoder.sampling import Sampling
from decoder.session import Decoder, Request
from decoder.stopping import Limits
from sim.verify.fixed import Fixed
from sim.verify.none import NoSpeculation
from sim.verify.threshold import Threshold
from tests.decoder.reference import DRAFTS, SAMPLED, Replay, assert_near, case

GREEDY = ("greedy0", "greedy1", "greedy_stop_in_draft", "greedy_stop_in_bonus", "greedy_stop_first")
THRESHOLD = ("greedy_threshold", "greedy_threshold_high")
#: Rounds are not clipped in the reference: its last one may run past the length limit by a block and a bonus token.
OVERRUN = 8


def load_run(deepspec, name, run):
    meta = json.loads((deepspec / "vectors" / name / "meta.json").read_text())["generation"][run]
    tensors = case(load_file(deepspec / "vectors" / name / "generation.safetensors"), run)
    return meta, tensors


def make_request(meta, tensors, extra=0):
    return Request(
        request_id="recorded",
        prompt_ids=tuple(tensors["prompt_ids"].tolist()),
        limits=Limits(max_new_tokens=meta["max_new_tokens"] + extra, stop_token_ids=frozenset(meta["stop_token_ids"])),
        sampling=Sampling(temperature=meta["temperature"]),
    )


def runs():
    for name in DRAFTS:
        for run in GREEDY[:2] if name == "eagle3_ttt5" else GREEDY:
            yield name, run
        for run in THRESHOLD if name.startswith("dspark") else ():
            yield name, run


def decode(decoder, request, rounds, drafter):
    """Run exactly ``rounds`` rounds; collect each one's block states and the rows that were cached before it."""
    generation = decoder.admit(request)
    facts = []
    for _ in range(rounds):
        states = []
        hook = drafter.net.norm.register_forward_hook(lambda *args, states=states: states.append(args[-1]))
        cached = generation.drafting.tokens
        decoder.step([generation])
        hook.remove()
        generation.check()
        facts.append((cached, states))
    return generation, facts


@pytest.mark.parametrize("name, run", list(runs()))
def test_greedy(name, run, deepspec, targets, drafters):
    meta, want = load_run(deepspec, name, run)
    target, drafter = targets[DRAFTS[name]], drafters[name]
    threshold = meta["confidence_threshold"]
    policy = Threshold(min_confidence=threshold) if threshold else Fixed(k=drafter.trained_length)

    whole = Decoder(target, drafter, policy).generate([make_request(meta, want)])[0]
    assert whole.token_ids == want["output_ids"].tolist()
    assert whole.finish_reason == ("stop" if meta["stop_token_ids"] else "length")
    assert want["target_greedy_ids"].tolist() == whole.token_ids
    if run in ("greedy0", "greedy_stop_in_draft"):
        alone = Decoder(target, None, NoSpeculation()).generate([make_request(meta, want)])[0]
        assert alone.token_ids == whole.token_ids
    if meta["rounds"] == 0:
        assert whole.rounds == []
        return

    request = make_request(meta, want, OVERRUN)
    generation, facts = decode(Decoder(target, drafter, policy), request, meta["rounds"], drafter)
    assert len(generation.rounds) == meta["rounds"]
    check_rounds(generation, facts, want, drafter)


def check_rounds(generation, facts, want, drafter):
    for i, (found, (cached, states)) in enumerate(zip(generation.rounds, facts, strict=True)):
        submitted, accepted = int(want["round_submitted"][i]), int(want["round_accepted"][i])
        assert found.anchor_position == int(want["round_start"][i])
        assert generation.token_ids[found.anchor_position] == int(want["round_anchor_id"][i])
        # Ours appends a round's rows when it ends, the reference when the next begins.
        assert cached == found.anchor_position
        if not drafter.chained:
            assert cached == int(want["round_context_cached"][i] + want["round_context_new"][i])
        assert found.verify_length == submitted
        assert list(found.proposed[:submitted]) == want["round_proposed_ids"][i, :submitted].tolist()
        assert found.accepted_draft_tokens == accepted == int(want["accepted_draft_lengths"][i])
        assert found.emitted_tokens == int(want["acceptance_lengths"][i])
        if found.bonus_token is not None:
            assert found.bonus_token == int(want["round_next_id"][i])
        if "round_block_hidden" in want and not drafter.chained:
            assert_near(states[0][0], want["round_block_hidden"][i])
        if getattr(drafter.net, "confidence_head", None) is not None:
            assert_near(torch.tensor(found.confidence_logits), want["round_confidence_logits"][i])
    assert np.mean([found.emitted_tokens for found in generation.rounds]) == pytest.approx(
        float(want["acceptance_lengths"].double().mean())
    )


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled(name, deepspec, targets, drafters):
    meta, want = load_run(deepspec, name, "sampled")
    target, drafter = targets[DRAFTS[name]], drafters[name]
    replay = Replay(want, len(want["prompt_ids"]))
    decoder = Decoder(target, drafter, Fixed(k=drafter.trained_length), luck=lambda request: replay)
    generation, facts = decode(decoder, make_request(meta, want, OVERRUN), meta["rounds"], drafter)
    recorded = want["output_ids"].tolist()
    assert generation.token_ids[: len(recorded)] == recorded
    check_rounds(generation, facts, want, drafter)
    assert replay.checked == meta["rounds"] * (drafter.trained_length + 1)


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_target_rows(name, deepspec, targets, drafters):
    """The target's own distributions, row by row, of each recorded round."""
    meta, want = load_run(deepspec, name, "sampled")
    target = targets[DRAFTS[name]]
    text = want["output_ids"].tolist()
    for i, start in enumerate(want["round_start"].tolist()):
        cache = target.new_cache()
        target.forward(text[:start], cache)
        block = [int(want["round_anchor_id"][i]), *want["round_proposed_ids"][i].tolist()]
        logits = target.forward(block, cache, logit_rows=len(block)).logits
        probs = torch.softmax(logits / meta["temperature"], -1)
        assert_near(probs, want["round_target_probs"][i])
