"""Every intermediate tensor of DeepSpec's draft blocks, reproduced."""

import json

import pytest
import torch
from safetensors.torch import load_file

from decoder.chance import KeyedLuck
from decoder.checkpoint import make_net, tensor_shapes
from decoder.config import parse_config
from decoder.sampling import DraftSampler, Sampling, Shaper, shape
from tests.decoder.reference import DRAFTS, assert_near, case

BLOCKS = [name for name in DRAFTS if "eagle3" not in name]
CASES = ("case0", "case1", "case2")


def greedy_sampler(vocabulary: int, anchor_position: int) -> DraftSampler:
    shaper = Shaper(Sampling(temperature=0), vocabulary, torch.device("cpu"))
    return DraftSampler(shaper, KeyedLuck(0, "greedy"), anchor_position)


@pytest.mark.parametrize("which", CASES)
@pytest.mark.parametrize("name", BLOCKS)
def test_block(name, which, deepspec, targets, drafters):
    want = case(load_file(deepspec / "vectors" / name / "block.safetensors"), which)
    target, drafter = targets[DRAFTS[name]], drafters[name]
    net = drafter.net
    prompt, anchor = want["prompt_ids"].tolist(), int(want["anchor_id"])

    read = target.forward(prompt, target.new_cache(), drafter.feature_layers, 1)
    assert int(read.logits.argmax()) == anchor
    assert_near(read.features, want["context_features"])
    assert_near(net.project(read.features), want["context_projected"])

    seen = {}
    hooks = [
        layer.register_forward_hook(lambda _, args, out, i=i: seen.update({i: (args[0][0], out[0])}))
        for i, layer in enumerate(net.layers)
    ]
    drafting = drafter.start()
    drafting.advance(prompt, read.features, anchor)
    hidden = drafting.hidden(anchor)
    for hook in hooks:
        hook.remove()

    block = net.block_ids(want["anchor_id"], drafter.trained_length)[0]
    assert block.tolist() == want["draft_input_ids"].tolist()
    positions = want["position_ids"]
    assert positions.tolist() == list(range(len(prompt) + drafter.trained_length))
    cos, sin = net.rotary(positions[None, len(prompt) :], hidden.dtype)
    for i, layer in enumerate(net.layers):
        before, after = seen[i]
        assert_near(after, want[f"layer{i}.output"])
        keys, values = layer.self_attn.keys_values(layer.input_layernorm(before)[None], cos, sin)
        assert_near(torch.cat([drafting.cache.keys[i], keys], -2)[0], want[f"layer{i}.key_cache"])
        assert_near(torch.cat([drafting.cache.values[i], values], -2)[0], want[f"layer{i}.value_cache"])
    assert_near(hidden, want["block_hidden"])
    assert_near(net.lm_head(hidden), want["base_logits"])

    sampler = greedy_sampler(target.vocab_size, len(prompt))
    confidence_logits = drafting.propose(anchor, drafter.trained_length, sampler)
    assert sampler.token_ids == want["greedy_tokens"].tolist()
    if net.confidence_head is not None:
        assert_near(torch.tensor(confidence_logits), want["greedy_confidence_logits"])

    greedy_prev = torch.cat([want["anchor_id"], want["greedy_tokens"][:-1]])
    check_heads(net, hidden, greedy_prev, want, "greedy")
    assert_near(shape(want["greedy_logits"], Sampling()), want["greedy_probs_t1"])
    if "forced_logits" in want:
        assert int(want["forced_prev_ids"][0]) == anchor
        check_heads(net, hidden, want["forced_prev_ids"], want, "forced")


def check_heads(net, hidden, prev_ids, want, path):
    """Compare logits, confidences, gates and states along previous tokens."""
    logits, confidence, gates, states = [], [], [], []
    state = None
    for k, prev in enumerate(prev_ids):
        row, embedding = net.lm_head(hidden[k]), None
        if net.markov_head is not None:
            bias, state = net.markov_head.step(prev, hidden[k], state)
            row, embedding = row + bias, net.markov_head.markov_w1(prev)
            if hasattr(net.markov_head, "gate"):
                gates.append(net.markov_head.gate(embedding, hidden[k]))
            if state is not None:
                states.append(state)
        logits.append(row)
        if net.confidence_head is not None:
            confidence.append(net.confidence_head(hidden[k], embedding))
    assert_near(torch.stack(logits), want[f"{path}_logits"])
    for found, key in ((confidence, "confidence_logits"), (gates, "gates"), (states, "rnn_states")):
        assert bool(found) or f"{path}_{key}" not in want, "a reference tensor was not reproduced"
        if found and f"{path}_{key}" in want:
            assert_near(torch.stack(found), want[f"{path}_{key}"])


@pytest.mark.parametrize("which", CASES)
def test_eagle3(which, deepspec, targets, drafters):
    name = "eagle3_ttt5"
    want = case(load_file(deepspec / "vectors" / name / "block.safetensors"), which)
    target, drafter = targets[DRAFTS[name]], drafters[name]
    net = drafter.net
    prompt, anchor = want["prompt_ids"].tolist(), int(want["anchor_id"])
    read = target.forward(prompt, target.new_cache(), drafter.feature_layers, 1)
    assert int(read.logits.argmax()) == anchor
    assert_near(read.features, want["context_features"])
    assert_near(net.fuse(read.features), want["context_projected"])
    assert want["shifted_ids"].tolist() == [*prompt[1:], anchor]

    made = []
    hook = net.norm.register_forward_hook(lambda _, args, out: made.append(args[0]))
    drafting = drafter.start()
    drafting.advance(prompt, read.features, anchor)
    assert_near(drafting.cache.keys[0][0], want["prefill_key_cache"])
    assert_near(drafting.cache.values[0][0], want["prefill_value_cache"])
    whole = net.rows(want["shifted_ids"], net.fuse(read.features), torch.arange(len(prompt)), drafter.start().cache)
    assert_near(whole, want["prefill_hidden"])

    sampler = greedy_sampler(target.vocab_size, len(prompt))
    drafting.propose(anchor, 6, sampler)  # one more than recorded, for the last row of step_hidden
    hook.remove()
    assert sampler.token_ids[:5] == want["greedy_tokens"].tolist()
    assert_near(torch.cat(made), want["step_hidden"])
    assert_near(net.logits(want["step_hidden"][:5]), want["step_logits"])
    assert drafting.tokens == len(prompt)


@pytest.mark.parametrize("size", ("4b", "8b", "14b"))
@pytest.mark.parametrize("kind, tail", (("dspark", "block7"), ("dflash", "block7"), ("eagle3", "ttt7")))
def test_published_layouts(kind, tail, size, deepspec):
    want = json.loads((deepspec / "configs" / f"{kind}_qwen3_{size}_{tail}.json").read_text())
    config = parse_config(want["config"])
    assert config.kind == kind
    assert config.trained_length == 7
    net = make_net(config, device="meta")
    assert tensor_shapes(net) == want["tensors"]
    assert sum(tensor.numel() for tensor in net.parameters()) == want["total_parameters"]
