"""Packed linear layers compute what the stock ones do."""

import copy

import pytest
import torch
from torch import nn

from decoder.checkpoint import load_drafter
from decoder.lab.targets import target_sha256
from decoder.packed import PackedLinear, can_pack, pack_linears, pack_models
from decoder.sampling import Sampling
from decoder.session import Decoder, Request
from decoder.stopping import Limits
from decoder.target import HfTarget, load_target
from decoder.training.batches import TrainingText
from decoder.training.block import make_block
from decoder.training.objective import DraftShape
from sim.verify.fixed import Fixed
from tests.decoder.labs import LAYERS, make_lab

pytestmark = pytest.mark.skipif(not can_pack(), reason="this build of torch has no packed kernel")


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("rows", (1, 2, 7, 8, 9, 130))
def test_a_packed_layer_is_the_layer(bias, rows):
    torch.manual_seed(rows)
    layer = nn.Linear(33, 47, bias=bias)
    x = torch.randn(2, rows, 33)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(layer)(x), layer(x), rtol=1e-5, atol=1e-5)


def test_only_float32_is_packed():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, dtype=torch.float64), nn.Sequential(nn.Linear(5, 6)))
    assert pack_linears(model) == 2
    assert [type(part) for part in (model[0], model[1], model[2][0])] == [PackedLinear, nn.Linear, PackedLinear]
    assert pack_linears(model) == 0  # once is enough


def test_a_packed_decoder_emits_the_same_tokens(tmp_path):
    """Greedy, and with a drafter whose own layers are packed too; the lab's toy target is sure of itself."""
    lab = make_lab(tmp_path)
    folder = lab / "toy" / "target"
    target = load_target(folder)
    text = TrainingText([lab / "toy" / "text" / "written-t1-train"], target_sha256(folder), target.lm_head)
    shape = DraftShape(drafter="dspark", layers=1, ffn=16, length=3, feature_layers=LAYERS, markov_rank=4)
    make_block(shape, target, text, None, 0).save(tmp_path / "drafter", torch.float32)
    texts = []
    for packed in (False, True):
        own: HfTarget = copy.deepcopy(target)
        drafter = load_drafter(tmp_path / "drafter", own)
        if packed:
            pack_models(own, drafter)
            assert isinstance(own.model.lm_head, PackedLinear)
            assert isinstance(drafter.net.fc, PackedLinear)
        request = Request(
            request_id="r", prompt_ids=(5, 9, 11), limits=Limits(max_new_tokens=24), sampling=Sampling(temperature=0.0)
        )
        (found,) = Decoder(own, drafter, Fixed(k=3)).generate([request])
        texts.append(found.output_ids)
    assert texts[0] == texts[1]
