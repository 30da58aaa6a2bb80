"""The draws of many rows are those of each row alone: same luck, same token, same verdict."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.accept import judge
from decoder.batched_sampling import BatchSampler, Drawer, judge_rows, shaped, tokens_at
from decoder.chance import KeyedLuck, token_at
from decoder.sampling import DraftSampler, Sampling, Shaper

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0),
    Sampling(temperature=0.5, top_k=3),
    Sampling(top_p=0.5),
    Sampling(repetition_penalty=2.0),
)
CPU = torch.device("cpu")


def drawers(count, vocabulary, samplings, seed=0):
    out = []
    for row in range(count):
        shaper = Shaper(samplings[row % len(samplings)], vocabulary, CPU)
        shaper.commit([row % vocabulary])
        out.append(Drawer(shaper, KeyedLuck(seed, f"r{row}"), 7 * row))
    return out


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_token_of_each_row(rng, dtype):
    probs = torch.from_numpy(rng.dirichlet(np.full(9, 0.3), 400)).to(dtype)
    probs[::3, 4:] = 0
    probs[::5] = torch.nn.functional.one_hot(torch.arange(80) % 9, 9).to(dtype)
    levels = rng.random(400)
    levels[:3], levels[3:6] = 0.0, np.nextafter(1, 0)
    found = tokens_at(probs, torch.from_numpy(levels)).tolist()
    assert found == [token_at(row, level) for row, level in zip(probs, levels, strict=True)]
    assert all(probs[row, token] > 0 for row, token in enumerate(found))


@settings(max_examples=40)
@given(st.data())
def test_a_round_judged_at_once_is_judged_as_by_itself(data):
    """Ragged lengths, a reduced draft vocabulary, every sampling, rows that are not finite."""
    seed = data.draw(st.integers(0, 10**6))
    vocabulary = 7
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    token_ids = torch.tensor([0, 2, 3, 6]) if data.draw(st.booleans()) else None
    greedy = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(seed)
    drawn = drawers(len(lengths), vocabulary, SAMPLINGS, seed)
    sampler = BatchSampler(drawn, 3, CPU, greedy)
    width = vocabulary if token_ids is None else len(token_ids)
    logits = 2 * torch.randn(3, len(lengths), width, generator=generator, dtype=torch.float64)
    for k in range(3):
        sampler.draw(logits[k], token_ids)
    drafts = sampler.drafts()
    target = 2 * torch.randn(sum(lengths) + len(lengths), vocabulary, generator=generator, dtype=torch.float64)
    prefixes, owners, expected, row = [], [], [], 0
    for index, (one, length) in enumerate(zip(drawn, lengths, strict=True)):
        alone = DraftSampler(one.shaper, one.luck, one.anchor_position, greedy)
        for k in range(3):
            alone.draw(logits[k, index], token_ids)
        assert drafts.ids[index].tolist() == alone.token_ids
        assert drafts.chances[index].tolist() == [float(alone.probs[k, t]) for k, t in enumerate(alone.token_ids)]
        probs = one.shaper.probs(target[row : row + 1 + length], alone.token_ids[:length])
        verdict = judge(alone.token_ids[:length], alone.probs, probs, one.luck, one.anchor_position + 1)
        expected.append((verdict.accepted_draft_tokens, verdict.bonus_token))
        prefixes += [alone.token_ids[:k] for k in range(1 + length)]
        owners += [one.shaper] * (1 + length)
        row += 1 + length
    bad = data.draw(st.sampled_from([None, 0, row - 1]))
    if bad is not None:
        target[bad, 3] = torch.nan
    probs, finite = shaped(target, owners, prefixes)
    found = judge_rows(lengths, drafts, probs, finite, drawn)
    firsts = np.cumsum([0, *(1 + length for length in lengths)])
    for index, want in enumerate(expected):
        broken = bad is not None and firsts[index] <= bad < firsts[index + 1]
        assert found.finite[index] is not broken
        if not broken:
            assert (found.accepted[index], found.tokens[index]) == want


def test_a_draft_that_its_own_distribution_excludes_is_refused():
    drawn = drawers(1, 3, (Sampling(),))
    sampler = BatchSampler(drawn, 1, CPU)
    sampler.draw(torch.tensor([[0.0, -torch.inf, -torch.inf]]))
    drafts = sampler.drafts()
    drafts.chances[0, 0] = 0.0
    with pytest.raises(ValueError, match="no chance"):
        judge_rows([1], drafts, torch.full((2, 3), 1 / 3), torch.ones(2, dtype=torch.bool), drawn)
