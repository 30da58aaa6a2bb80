"""Drafter × policy × sampling leaves the target's law as it is: shown by exact enumeration, to 1e-9.

Every way chance can fall is run through the decoder's own steps. The last tests feed the same judge what must not pass.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

import decoder.accept
import decoder.session
from decoder.sampling import DraftSampler, Sampling
from sim.verify.base import Drafting
from sim.verify.batch_table import BatchTable
from sim.verify.dspark import Dspark
from sim.verify.dspark_async import DsparkAsync
from sim.verify.fixed import Fixed
from sim.verify.mtp1 import Mtp1
from sim.verify.none import NoSpeculation
from sim.verify.threshold import Threshold
from tests.decoder.law import CurveRates, Rounds, joint_law, target_law, worst_difference
from tests.decoder.toys import DRAFTER_KINDS, REDUCED_KINDS, TableDrafter, TableTarget, paths, tiny_drafter

EXACT = 1e-9
#: The third token is the mask: the target never says it, the drafters do.
TABLE = [[0.72, 0.28, 0.0], [0.35, 0.65, 0.0], [0.5, 0.5, 0.0]]
BLOCK = 2
TEMPERATURES = (0.0, 0.6, 1.0, 1.7)
POLICIES = {
    "none": NoSpeculation(),
    "mtp1": Mtp1(),
    "fixed": Fixed(k=BLOCK),
    "threshold": Threshold(min_confidence=0.45),
    "batch_table": BatchTable(table=((1, 2), (2, 0))),
    "dspark": Dspark(),
    "dspark_async": DsparkAsync(lag=1, first_budget=1),
}


@cache
def rounds_of(kind: str, sampling: Sampling, greedy_draft: bool = False, max_new_tokens: int = 4) -> Rounds:
    target = TableTarget(TABLE)
    drafter = tiny_drafter(kind, target.vocab_size, BLOCK)
    return Rounds(target, drafter, sampling, greedy_draft=greedy_draft, max_new_tokens=max_new_tokens)


def error_of(rounds: Rounds, policy, requests: int = 1, rates=None) -> float:
    alone = target_law(rounds.target, rounds.sampling, rounds.prompt, rounds.max_new_tokens)
    return worst_difference(joint_law(rounds, policy, requests, rates), alone, requests)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", DRAFTER_KINDS)
def test_one_request(kind, policy, temperature):
    assert error_of(rounds_of(kind, Sampling(temperature=temperature)), POLICIES[policy]) < EXACT


@pytest.mark.parametrize("policy", ("fixed", "threshold", "batch_table", "dspark", "dspark_async"))
@pytest.mark.parametrize("kind", ("dspark_vanilla", "dspark_rnn", "eagle3"))
def test_two_requests(kind, policy):
    """A request's cut may read its neighbour's tokens, and the joint law must still be a product."""
    rounds = rounds_of(kind, Sampling(), max_new_tokens=3)
    assert error_of(rounds, POLICIES[policy], requests=2) < EXACT


@pytest.mark.parametrize("kind", DRAFTER_KINDS)
def test_greedy_drafts_at_a_temperature(kind):
    """An argmax draft is one-hot, and is tested as such."""
    assert error_of(rounds_of(kind, Sampling(), greedy_draft=True), POLICIES["fixed"]) < EXACT


@pytest.mark.parametrize("sampling", (Sampling(), Sampling(temperature=0), Sampling(top_k=2, repetition_penalty=1.7)))
@pytest.mark.parametrize("kind", REDUCED_KINDS)
def test_a_reduced_draft_vocabulary(kind, sampling):
    """What the drafter cannot say, the target says in its place, as often as it would alone."""
    for policy in ("fixed", "dspark"):
        assert error_of(rounds_of(kind, sampling), POLICIES[policy]) < EXACT
    blocks = rounds_of(kind, sampling).blocks((0,), BLOCK)
    assert {token for _, block in blocks for token in block.token_ids} <= {0, 2}
    assert all(not block.probs[:, 1].any() for _, block in blocks)


WIDE = [[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]]


@pytest.mark.parametrize(
    "sampling",
    (
        Sampling(top_k=2),
        Sampling(top_k=1),
        Sampling(top_p=0.6),
        Sampling(top_p=0.5, temperature=0.7),
        Sampling(min_p=0.4),
        Sampling(repetition_penalty=1.8),
        Sampling(repetition_penalty=0.6, temperature=0.8),
        Sampling(repetition_penalty=1.5, top_k=3, top_p=0.9, min_p=0.05, temperature=1.3),
        Sampling(repetition_penalty=2.5, temperature=0),
    ),
    ids=str,
)
def test_shaped_distributions(sampling):
    target = TableTarget(WIDE)
    for kind in ("dspark_gated", "small_model"):
        rounds = Rounds(target, tiny_drafter(kind, 4, BLOCK), sampling, max_new_tokens=3, prompt=(3, 1))
        assert error_of(rounds, POLICIES["fixed"]) < EXACT


def test_the_whole_loop():
    """`Decoder.generate` itself, from prompt to last token, along every path."""
    target = TableTarget([[0.7, 0.3], [0.4, 0.6]])
    rounds = Rounds(target, TableDrafter([[0.5, 0.5], [0.2, 0.8]], BLOCK), Sampling(), max_new_tokens=3)
    law: dict = {}
    for chance, generations in paths(
        lambda script: rounds.decoder(POLICIES["fixed"], script).generate([rounds.request])
    ):
        outputs = tuple(tuple(generation.output_ids) for generation in generations)
        law[outputs] = law.get(outputs, 0.0) + chance
    assert worst_difference(law, target_law(target, Sampling(), (0,), 3)) < EXACT


# What must be caught


def mutant_error(monkeypatch, policy=POLICIES["fixed"], kind="dspark_vanilla", sampling=None, **patches):
    for name, value in patches.items():
        module, _, attribute = name.rpartition("__")
        monkeypatch.setattr({"accept": decoder.accept, "session": decoder.session}[module], attribute, value)
    target = TableTarget(TABLE)
    rounds = Rounds(target, tiny_drafter(kind, 3, BLOCK), sampling or Sampling(), max_new_tokens=3)
    return error_of(rounds, policy)


def test_no_mutant(monkeypatch):
    assert mutant_error(monkeypatch) < EXACT


def test_argmax_draft_tested_as_if_sampled(monkeypatch):
    class Argmax(DraftSampler):
        def draw(self, logits, token_ids=None):
            row = self._shaper.probs(logits[None], self.token_ids)
            self.token_ids.append(int(row.argmax()))
            self._rows.append(row)
            return self.token_ids[-1]

    assert mutant_error(monkeypatch, session__DraftSampler=Argmax) > 1e-2


def test_draft_ids_taken_for_tokens(monkeypatch):
    honest = DraftSampler.draw

    def wrong(self, logits, token_ids=None):
        token = honest(self, logits, token_ids)
        self._rows[-1] = self._rows[-1][:, [2, 1, 0]]  # draft ids that became other tokens
        return token

    monkeypatch.setattr(DraftSampler, "draw", wrong)
    assert mutant_error(monkeypatch, kind="dflash_reduced") > 1e-2


def test_missing_residual(monkeypatch):
    assert mutant_error(monkeypatch, accept__residual=lambda target, draft: target) > 1e-2


def test_bonus_from_the_wrong_row(monkeypatch):
    honest = decoder.accept.judge

    def wrong(ids, draft, target, luck, position):
        return honest(ids, draft, torch.cat([target[:-1], target[:1]]), luck, position)

    assert mutant_error(monkeypatch, session__judge=wrong) > 1e-2


def test_residual_from_the_wrong_row(monkeypatch):
    honest = decoder.accept.judge

    def wrong(ids, draft, target, luck, position):
        return honest(ids, draft, target.roll(1, 0), luck, position)

    assert mutant_error(monkeypatch, session__judge=wrong) > 1e-2


def test_draft_distribution_of_other_precision(monkeypatch):
    honest = decoder.accept.judge

    def wrong(ids, draft, target, luck, position):
        return honest(ids, draft.to(torch.bfloat16).to(draft.dtype), target, luck, position)

    assert mutant_error(monkeypatch, session__judge=wrong) > 1e-5


def test_draft_distribution_without_its_cut(monkeypatch):
    """The test is fed q of temperature 1 while drafts were drawn at another temperature."""
    honest = decoder.accept.judge

    def wrong(ids, draft, target, luck, position):
        flat = draft.sqrt() / draft.sqrt().sum(-1, keepdim=True)
        return honest(ids, flat, target, luck, position)

    assert mutant_error(monkeypatch, session__judge=wrong, sampling=Sampling(temperature=0.5)) > 1e-2


def test_equality_in_place_of_the_ratio_keeps_the_law_but_accepts_less():
    """p = (.7, .3), q = (.5, .5): emitting the target's draw while it equals the draft accepts Σpq, the ratio Σmin."""
    p, q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    rounds = Rounds(TableTarget([p, p]), TableDrafter([q, q], 1), Sampling(), max_new_tokens=3)
    accepted = {True: 0.0, False: 0.0}
    for index, (chance, block) in enumerate(rounds.blocks((0,), 1)):
        for end, output in rounds.outcomes((0,), index, 1, 1):
            accepted[len(output) == 3 or output[1] == block.token_ids[0]] += chance * end
    assert accepted[True] == pytest.approx(np.minimum(p, q).sum()) == pytest.approx(0.8)
    assert (p * q).sum() == pytest.approx(0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalSearch(Drafting):
    """The forbidden policy: the best batch by this round's own confidences."""

    kind: str = "global_search"

    def verify_lengths(self, confidence, steps_per_s):
        best, lengths = -1.0, np.zeros(len(confidence), np.int64)
        survival = np.cumprod(confidence, 1)
        ranked = sorted((-survival[r, k], r, k) for r, k in np.ndindex(*survival.shape) if survival[r, k] > 0)
        for count in range(len(ranked) + 1):
            chosen = ranked[:count]
            expected = len(confidence) - sum(item[0] for item in chosen)
            value = expected * steps_per_s[len(confidence) + count]
            if value > best:
                best = value
                lengths = np.bincount([item[1] for item in chosen], minlength=len(confidence)).astype(np.int64)
        return lengths

    def start(self):
        return self


def appendix_a() -> Rounds:
    """The paper's example: p = (.7, .3), q = (.5, .5), confidence .8, then .9 after token 0 and 0 after token 1."""
    target = TableTarget([[0.7, 0.3], [0.7, 0.3]])
    drafter = TableDrafter(
        [[0.5, 0.5], [0.5, 0.5]], 2, lambda tokens: 0.8 if len(tokens) == 1 else 0.9 * (tokens[-1] == 0)
    )
    return Rounds(target, drafter, Sampling(), max_new_tokens=4)


APPENDIX_RATES = CurveRates((1.0, 0.5, 0.45))


def second_token_chance(policy) -> float:
    """Chance of token 0 where the first round judges or draws it."""
    law = joint_law(appendix_a(), policy, rates=APPENDIX_RATES)
    return sum(chance for (output,), chance in law.items() if output[1] == 0)


def test_unlagged_global_search_is_caught():
    """Output law .85/.15 instead of .70/.30 (paper, appendix A)."""
    assert second_token_chance(GlobalSearch()) == pytest.approx(0.85, abs=1e-6)
    assert error_of(appendix_a(), GlobalSearch(), rates=APPENDIX_RATES) > 0.02


@pytest.mark.parametrize("policy", (Dspark(), DsparkAsync(lag=1), DsparkAsync(lag=2), *(Fixed(k=k) for k in (1, 2))))
def test_what_is_fixed_before_the_draft_is_exact(policy):
    assert second_token_chance(policy) == pytest.approx(0.7, abs=1e-6)
    assert error_of(appendix_a(), policy, rates=APPENDIX_RATES) < EXACT


def test_early_stop_drafts_nothing_in_the_example():
    rounds = appendix_a()
    decoder = rounds.decoder(Dspark(), rates=APPENDIX_RATES)
    for _, block in rounds.blocks((0,), 2):
        assert decoder.decide([block]) == [0]


def test_a_confidence_that_reads_its_own_token_is_refused_and_would_be_caught():
    target = TableTarget([[0.7, 0.3], [0.7, 0.3]])
    table = [[0.5, 0.5], [0.5, 0.5]]
    policy = Threshold(min_confidence=0.5)

    def peeking(says):
        return TableDrafter(table, 2, lambda tokens: 0.9 if tokens[-1] == 0 else 0.1, says, peeks=True)

    with pytest.raises(decoder.session.RequestError, match="not proven lossless with a confidence that reads 'own_"):
        decoder.session.Decoder(target, peeking("own_token"), policy)
    lying = Rounds(target, peeking("past"), Sampling(), max_new_tokens=3)
    assert error_of(lying, policy) > 1e-2


@pytest.mark.parametrize("policy", ("threshold", "dspark", "dspark_async"))
def test_the_policies_had_something_to_decide(policy):
    """The exactness above would be worth little if every round were cut alike."""
    seen = set()
    for kind in ("dspark_vanilla", "dspark_rnn", "eagle3"):
        rounds = rounds_of(kind, Sampling())
        for output in ((0,), (1,), (0, 1), (1, 1)):
            blocks = [block for _, block in rounds.blocks(output, BLOCK)]
            for left in blocks:
                for right in blocks:
                    deciding = rounds.decoder(POLICIES[policy], rates=CurveRates())
                    deciding.decide([left, right])
                    seen.add(tuple(deciding.decide([left, right])))
    assert len({length for lengths in seen for length in lengths}) == BLOCK + 1
    assert len(seen) > BLOCK + 1
