"""Greedy output is the target's own, for every drafter and policy; reduced precision may differ at a near-tie only."""

import pytest
import torch

from decoder.checkpoint import load_net, make_drafter
from decoder.identity import GAP_BOUNDS, Difference, first_difference
from decoder.sampling import Sampling
from decoder.session import Decoder, Request
from decoder.small_model import SmallModelDrafter
from decoder.stopping import Limits
from decoder.target import load_target
from sim.verify.batch_table import BatchTable
from sim.verify.dspark import Dspark
from sim.verify.dspark_async import DsparkAsync
from sim.verify.fixed import Fixed
from sim.verify.mtp1 import Mtp1
from sim.verify.none import NoSpeculation
from sim.verify.threshold import Threshold
from tests.decoder.law import CurveRates
from tests.decoder.reference import DRAFTS, TARGET_A, TARGET_B
from tests.decoder.test_caches import tiny_mtp

POLICIES = (
    Mtp1(),
    Fixed(k=5),
    Threshold(min_confidence=0.7),
    BatchTable(table=((1, 4), (2, 2))),
    Dspark(),
    DsparkAsync(lag=2, first_budget=2),
)
PROMPTS = ((253, 5, 9, 200, 31), (253, 77, 140, 8, 19, 60, 3))


def requests(new=10):
    return [
        Request(
            request_id=str(i),
            prompt_ids=prompt,
            limits=Limits(max_new_tokens=new),
            sampling=Sampling(temperature=0),
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def alone(target, new=10):
    return Decoder(target, None, NoSpeculation()).generate(requests(new))


@pytest.mark.parametrize("name", (*DRAFTS, "mtp", "small_model"))
def test_float32_and_float64(name, targets, targets64, drafters):
    """In float64 for the untrained head and the small model, whose many rejections cut the caches all the time."""
    if name in DRAFTS:
        target, drafter = targets[DRAFTS[name]], drafters[name]
    else:
        target = targets64[TARGET_A]
        drafter = tiny_mtp(target) if name == "mtp" else SmallModelDrafter(targets64[TARGET_B], 5)
    want = [g.output_ids for g in alone(target)]
    for policy in POLICIES:
        decoder = Decoder(target, drafter, policy, rates=WideRates())
        found = decoder.generate(requests(), concurrency=2)
        assert [g.output_ids for g in found] == want, policy.kind


class WideRates(CurveRates):
    """Two requests with a block of seven each."""

    def steps_per_s(self, requests, draft_length):
        import numpy as np

        batch = np.arange(1, requests * (1 + draft_length) + 1)
        return np.array([np.inf, *(1 / (1 + 0.08 * batch + 0.2 * (batch > 9)))])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", ("dspark_rnn_block7", "eagle3_ttt5", "dflash_block5"))
def test_reduced_precision(name, dtype, deepspec):
    folder = deepspec / "checkpoints"
    target = load_target(folder / DRAFTS[name], dtype=dtype)
    drafter = make_drafter(load_net(folder / name, target, dtype=dtype))
    found = Decoder(target, drafter, Fixed(k=drafter.trained_length)).generate(requests())
    for ours, want in zip(found, alone(target), strict=True):
        difference = first_difference(ours.output_ids, want.output_ids, want.top2_gaps, GAP_BOUNDS[dtype])
        assert difference is None or difference.excused, difference


def test_a_difference_is_excused_at_a_near_tie_only():
    gaps = [5.0, 0.01, 5.0]
    assert first_difference([1, 2, 3], [1, 2, 3], gaps, 0.1) is None
    assert first_difference([1, 9, 9], [1, 2, 3], gaps, 0.1) == Difference(1, 2, 9, 0.01, True)
    assert first_difference([1, 2, 9], [1, 2, 3], gaps, 0.1) == Difference(2, 3, 9, 5.0, False)
    assert first_difference([1, 2], [1, 2, 3], gaps, 0.1) == Difference(2, 3, None, float("inf"), False)
