"""The losses against DeepSpec's vectors, term by term and gradient by gradient, and against the literal formulas."""

import json

import pytest
import torch
from safetensors.torch import load_file

from decoder.checkpoint import load_net
from decoder.losses import LossWeights
from decoder.training.batches import Batch
from decoder.training.block import BlockObjective
from tests.decoder.reference import DRAFTS
from tests.decoder.test_packed_blocks import TRAINED

RELATIVE = 1e-5


def close(found, want, relative=RELATIVE, absolute=1e-6):
    assert abs(float(found) - want) <= absolute + relative * abs(want), (float(found), want)


def reference_batch(want, head):
    """Return DeepSpec's two sequences as a batch; their loss mask says what was answered."""
    ids, final = want["input_ids"], want["target_last_hidden_states"]
    return Batch(
        token_ids=ids[:, :-1],
        next_ids=ids[:, 1:],
        features=want["target_hidden_states"][:, :-1],
        final=final[:, :-1],
        log_norms=torch.logsumexp(final[:, :-1] @ head.T, -1),
        answer=want["loss_mask"][:, 1:].bool(),
        rows=torch.tensor([35, 35]),
        prompts=torch.tensor([6, 22]),
    )


@pytest.mark.parametrize("name", TRAINED)
def test_every_term_metric_and_gradient(name, deepspec, targets):
    want = load_file(deepspec / "vectors" / name / "training.safetensors")
    said = json.loads((deepspec / "vectors" / name / "training.json").read_text())
    target = targets[DRAFTS[name]]
    net = load_net(deepspec / "checkpoints" / name, target)
    weights = LossWeights(ce=said["ce_loss_alpha"], tv=said["l1_loss_alpha"], confidence=said["confidence_head_alpha"])
    objective = BlockObjective(net, target.lm_head, said["num_anchors"], weights)
    batch = reference_batch(want, target.lm_head)
    loss, metrics = objective.loss_at(batch, want["anchor_positions"], want["block_keep_mask"])
    loss.backward()
    close(loss.detach(), said["loss"])
    terms, metric = said["terms"], said["metrics"]
    close(metrics["ce"], terms["ce_loss_num"] / terms["ce_loss_den"])
    if terms["l1_loss_den"]:  # DFlash trains without, and measures none
        close(metrics["tv"], terms["l1_loss_num"] / terms["l1_loss_den"])
    if net.confidence_head is not None:
        close(metrics["confidence"], terms["confidence_loss_num"] / terms["confidence_loss_den"])
        close(metrics["confidence_bias"], metric["confidence_bias"], absolute=1e-5)
    close(metrics["accepted_length"], metric["tau_probabilistic"])
    for k in range(net.config.block_size):
        close(metrics[f"accept@{k}"], metric[f"accept_rate@{k}"])
    assert metrics["positions"] == int(want["eval_mask"].sum())
    parameters = objective.parameters()
    assert parameters.keys() == said["grad_norms"].keys()
    for key, norm in said["grad_norms"].items():
        close(parameters[key].grad.norm(), norm, relative=2e-5)
    recorded = [key for key in want if key.startswith("grad.")]
    assert recorded
    for key in recorded:
        found, wanted = parameters[key.removeprefix("grad.")].grad, want[key]
        assert float((found - wanted).abs().max()) <= 1e-5, key
