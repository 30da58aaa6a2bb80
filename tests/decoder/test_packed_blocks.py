"""Several blocks in one masked pass: what training does, against DeepSpec's teacher-forced logits."""

import pytest
import torch
from safetensors.torch import load_file

from tests.decoder.reference import assert_near

TRAINED = ("dspark_vanilla_block7", "dspark_gated_block7", "dspark_rnn_block7", "dflash_block7", "dspark_gated_block5")


def packed_mask(anchors, length, context):
    """Return where each block row may look: the context before its anchor, and its own block."""
    owner = torch.arange(len(anchors)).repeat_interleave(length)
    before = torch.arange(context)[None] < anchors[owner][:, None]
    return torch.cat([before, owner[:, None] == owner[None]], 1)[None, None]


@pytest.mark.parametrize("name", TRAINED)
def test_teacher_forced_logits(name, deepspec, drafters):
    want = load_file(deepspec / "vectors" / name / "training.safetensors")
    net = drafters[name].net
    length = drafters[name].trained_length
    for row in range(2):
        kept = want["block_keep_mask"][row]
        anchors = want["anchor_positions"][row][kept]
        tokens = want["input_ids"][row]
        context = net.context_rows(want["target_hidden_states"][row : row + 1], torch.arange(len(tokens))[None])
        ids = net.block_ids(tokens[anchors], length).reshape(1, -1)
        positions = (anchors[:, None] + torch.arange(length)).reshape(1, -1)
        hidden = net(ids, positions, context, packed_mask(anchors, length, len(tokens)))[0].view(-1, length, 64)
        # The token before position k is the text's own; past its end nothing is judged.
        prev = tokens[(anchors[:, None] + torch.arange(length)).clamp_max(len(tokens) - 1)]
        judged = want["eval_mask"][row][kept]
        logits, confidence, state = [], [], None
        for k in range(length):
            bias, embedding = 0.0, None
            if net.markov_head is not None:
                bias, state = net.markov_head.step(prev[:, k], hidden[:, k], state)
                embedding = net.markov_head.markov_w1(prev[:, k])
            logits.append(net.lm_head(hidden[:, k]) + bias)
            if net.confidence_head is not None:
                confidence.append(net.confidence_head(hidden[:, k], embedding))
        assert judged.any()
        assert_near(torch.stack(logits, 1)[judged], want["draft_logits"][row][kept][judged])
        if confidence:
            assert_near(torch.stack(confidence, 1)[judged], want["confidence_pred"][row][kept][judged])
