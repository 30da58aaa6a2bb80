"""Blocks at every place of a text: what the decoder would draft there, judged exactly."""

import numpy as np
import pytest
import torch

from decoder.confidence import confidence_of
from decoder.evaluation import accept_rates
from decoder.lab.bank import Judged, judge_text, places_of
from decoder.lab.store import Text
from decoder.session import Decoder
from profiles.files import BankArrays
from profiles.recipes.banks import follow
from sim.verify.fixed import Fixed
from tests.decoder.test_rounds import request
from tests.decoder.toys import DRAFTER_KINDS, REDUCED_KINDS, TableTarget, tiny_drafter

V, LENGTH, PROMPT = 6, 3, 4


def soft_table(seed=2, sharp=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(sharp * torch.randn(V, V, generator=generator, dtype=torch.float64), -1)


def make_text(table, tokens=40, seed=3, greedy=False):
    """Let a table write: a prompt of PROMPT tokens, then what it says."""
    rng = np.random.default_rng(seed)
    ids = list(rng.integers(0, V, PROMPT))
    while len(ids) < tokens:
        row = table[ids[-1]].numpy()
        ids.append(int(row.argmax()) if greedy else int(rng.choice(V, p=row)))
    ids = torch.tensor(ids)
    return Text("toy", "code", PROMPT, ids[:-1], ids[1:], torch.zeros(0))


class Dictated:
    """A sampler that draws what the text says, and keeps what it was shown, over the whole vocabulary."""

    def __init__(self, token_ids):
        self.token_ids = list(token_ids)
        self.logits = []

    def draw(self, logits, token_ids=None):
        whole = torch.full((V,), -torch.inf, dtype=logits.dtype)
        whole[torch.arange(V) if token_ids is None else token_ids] = logits
        self.logits.append(whole)
        return int(self.token_ids[len(self.logits) - 1])


def judged_by(kind, *, temperature=1.0, text=None):
    target, drafter = TableTarget(soft_table()), tiny_drafter(kind, V, LENGTH)
    text = text or make_text(soft_table(), greedy=temperature == 0)
    features = target.forward(text.token_ids.tolist(), target.new_cache(), drafter.feature_layers).features
    probs = target.table[text.token_ids[PROMPT:]]
    judged = judge_text(text, drafter, features, probs, temperature=temperature, draft_length=LENGTH)
    return judged, target, drafter, text, features


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("kind", (*DRAFTER_KINDS, *REDUCED_KINDS))
def test_a_place_is_what_the_decoder_drafts_there(kind, temperature):
    judged, target, drafter, text, features = judged_by(kind, temperature=temperature)
    tokens = [*text.token_ids.tolist(), int(text.next_ids[-1])]
    places = list(places_of(text, LENGTH))
    assert len(judged.place) == len(places) == len(tokens) - PROMPT - LENGTH
    for row in (0, 1, 17, len(places) - 1):
        anchor = places[row]
        drafting = drafter.start()
        drafting.advance(tokens[:anchor], features[:anchor], tokens[anchor])
        sampler = Dictated(tokens[anchor + 1 :])
        confidence = drafting.propose(tokens[anchor], LENGTH, sampler)
        np.testing.assert_allclose(judged.confidence_logits[row], confidence, atol=1e-9)
        for k, logits in enumerate(sampler.logits):
            p = target.table[tokens[anchor + k]]
            if temperature == 0:
                want = token_want = float(int(logits.argmax()) == tokens[anchor + k + 1])
            else:
                q = torch.softmax(logits, -1)
                want = float(torch.minimum(p, q).sum())
                token = tokens[anchor + k + 1]
                token_want = min(1.0, float(q[token] / p[token]))
            assert judged.chance[row, k] == pytest.approx(want, abs=1e-9)
            assert judged.token_chance[row, k] == pytest.approx(token_want, abs=1e-9)


def test_blocks_do_not_look_at_each_other(monkeypatch):
    """One pass or many: the same numbers."""
    whole, *_ = judged_by("dspark_gated")
    monkeypatch.setattr("decoder.lab.bank.ROWS_AT_ONCE", 5)
    pieces, *_ = judged_by("dspark_gated")
    for name in ("confidence_logits", "chance", "token_chance"):
        np.testing.assert_allclose(getattr(whole, name), getattr(pieces, name), atol=1e-12)
    np.testing.assert_array_equal(whole.outcome, pieces.outcome)


def test_the_chance_is_the_mean_over_what_the_target_might_have_said():
    """1 - TV = sum over x of p(x) min(1, q(x)/p(x)): only the first draft token's own distribution is left alone."""
    target = TableTarget(soft_table())
    text = make_text(soft_table())
    chances, weighed = [], 0.0
    for token in range(V):
        next_ids = text.next_ids.clone()
        next_ids[PROMPT] = token
        token_ids = text.token_ids.clone()
        token_ids[PROMPT + 1] = token
        judged, *_ = judged_by("dspark_rnn", text=Text("toy", "code", PROMPT, token_ids, next_ids, torch.zeros(0)))
        chances.append(judged.chance[0, 0])
        weighed += float(target.table[text.token_ids[PROMPT], token]) * judged.token_chance[0, 0]
    np.testing.assert_allclose(chances, chances[0])
    assert weighed == pytest.approx(chances[0], abs=1e-12)


def test_outcomes_follow_their_chance():
    judged: Judged
    text = make_text(soft_table(), tokens=4000)
    judged, *_ = judged_by("dflash", text=text)
    rows = slice(None, None, LENGTH)  # blocks that share no position share no luck
    expected, variance = judged.token_chance[rows].sum(), (judged.token_chance * (1 - judged.token_chance))[rows].sum()
    assert abs(judged.outcome[rows].sum() - expected) < 4.9 * variance**0.5  # false alarm: 1e-6


def bank_of(judged: Judged) -> BankArrays:
    confidence = confidence_of(judged.confidence_logits)
    zeros = np.zeros(len(judged.place), np.int64)
    return BankArrays(confidence, confidence, judged.chance, judged.outcome, zeros, judged.place)


def test_rounds_along_a_bank_are_the_decoder_s_rounds():
    """Accepted length and conditional acceptance of rounds followed along a text, against rounds that were decoded."""
    table = soft_table(sharp=1.5)
    target, drafter = TableTarget(table, max_context_tokens=10_000), tiny_drafter("small_model", V, LENGTH)
    text = make_text(table, tokens=6000)
    judged = judge_text(
        text, drafter, torch.zeros(0), table[text.token_ids[PROMPT:]], temperature=1.0, draft_length=LENGTH
    )
    rounds = follow(bank_of(judged))
    decoder = Decoder(target, drafter, Fixed(k=LENGTH))
    decoded = [
        record
        for generation in decoder.run([request(str(i), prompt=(i,), new=1000, temperature=1.0) for i in range(6)])
        for record in generation.rounds
        if len(record.proposed) == LENGTH
    ]
    for k, rate in enumerate(accept_rates(decoded, LENGTH)[0]):
        tried = rounds.judged[:, k].sum(), rate.tried
        found = rounds.held[:, k].sum() / tried[0], rate.held / rate.tried
        pooled = (rounds.held[:, k].sum() + rate.held) / sum(tried)
        sd = (pooled * (1 - pooled) * (1 / tried[0] + 1 / tried[1])) ** 0.5
        assert abs(found[0] - found[1]) < 5.0 * sd, f"position {k + 1}"  # false alarm: 1e-6
    assert rounds.emitted.sum() == rounds.held.sum() + rounds.rounds.sum()


def test_reading_chances_one_place_late_would_be_seen():
    """The sibling of the test above: a bank that is one place off differs by more than its bound."""
    table = soft_table(sharp=1.5)
    drafter, text = tiny_drafter("small_model", V, LENGTH), make_text(table, tokens=6000)
    late = torch.roll(table[text.token_ids[PROMPT:]], 1, 0)
    right, wrong = (
        judge_text(text, drafter, torch.zeros(0), probs, temperature=1.0, draft_length=LENGTH)
        for probs in (table[text.token_ids[PROMPT:]], late)
    )
    assert abs(follow(bank_of(right)).conditional[0] - follow(bank_of(wrong)).conditional[0]) > 0.1
