"""The enumeration itself, on cases that can be worked out by hand."""

import numpy as np
import pytest

from sim.verify import BatchTable, Dspark, DsparkAsync, Fixed, NoSpeculation, Oracle, Policy
from sim.verify.law import ENGINES, Case, Enumeration, confidences, draws, emissions, target_law
from sim.verify.memory import Memories, PolicyFault, fingerprint
from sim.verify.toys import APPENDIX_A, CURVES, TOYS, Toy, steps_per_s


def law_of(policy: Policy, toy: Toy, *, curve: str = "flat", engine: str = "as_told", reading="past", rounds=2):
    rates = steps_per_s(curve, toy.max_batch_tokens)
    return Enumeration(Case(policy, toy, rates, ENGINES[engine], reading, rounds)).law()


def first_token(law: np.ndarray, toy: Toy, request: int = 0) -> list[float]:
    others = tuple(axis for axis in range(law.ndim) if axis != request)
    return law.sum(axis=others).reshape(toy.tokens, -1).sum(axis=1).tolist()


def test_appendix_a_unlagged_global_search_is_lossy() -> None:
    law = law_of(DsparkAsync(lag=1), APPENDIX_A, curve="appendix", engine="freshest")
    assert first_token(law, APPENDIX_A) == pytest.approx([0.85, 0.15])


@pytest.mark.parametrize(
    "policy",
    [Dspark(), Fixed(k=1), Fixed(k=2), NoSpeculation(), DsparkAsync(lag=1), DsparkAsync(lag=1, first_budget=1)],
    ids=str,
)
def test_appendix_a_is_kept_by_algorithm_1_and_any_fixed_budget(policy: Policy) -> None:
    law = law_of(policy, APPENDIX_A, curve="appendix")
    assert first_token(law, APPENDIX_A) == pytest.approx([0.7, 0.3])


def test_appendix_a_throughputs() -> None:
    """1.0, .9 and 1.134 where the first draft token is A; 1.0, .9 and .81 where it is B."""
    rates = steps_per_s("appendix", 3)
    assert rates[1:] == pytest.approx([1.0, 0.5, 0.45])
    for first, expected in ((0, [1.0, 0.9, 1.134]), (1, [1.0, 0.9, 0.81])):
        c = confidences(APPENDIX_A, 0, 0, ((first, None), (0, None)), 2, "past")
        tokens = 1 + np.concatenate(([0.0], np.cumsum(np.cumprod(c))))
        assert tokens * rates[1:] == pytest.approx(expected)
        assert Dspark().verify_lengths(np.array([c]), rates).tolist() == [0]
        assert Oracle().verify_lengths(np.array([c]), rates).tolist() == [2 if first == 0 else 0]


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)
def test_laws_are_laws(toy: Toy) -> None:
    assert target_law(toy, 3).sum() == pytest.approx(1.0)
    assert law_of(Fixed(k=2), toy).sum() == pytest.approx(1.0)
    for probs in (*toy.target_probs, *toy.draft_probs):
        assert sum(probs) == pytest.approx(1.0)
    for last in range(toy.tokens):
        for reading in ("past", "outcome"):
            assert sum(chance for _, chance in draws(toy, last, toy.draft_length, reading)) == pytest.approx(1.0)
        for draw, _ in draws(toy, last, toy.draft_length, "past"):
            for verified in range(toy.draft_length + 1):
                assert sum(chance for _, chance in emissions(toy, last, draw, verified)) == pytest.approx(1.0)


def test_the_target_law_by_hand() -> None:
    toy = next(toy for toy in TOYS if toy.name == "pair")
    law = target_law(toy, 2)
    assert law[0, 3] == pytest.approx((0.7 * 0.7) * (0.8 * 0.8))  # AA after A, BB after B
    assert law.shape == (4, 4)


def test_emissions_by_hand() -> None:
    """P = (.7, .3), q = (.5, .5): A is always accepted, B with .6, and a rejected B becomes A."""
    draw = ((1, None), (0, None))
    emitted = dict(emissions(APPENDIX_A, 0, draw, 2))
    assert emitted == pytest.approx({(0,): 0.4, (1, 0, 0): 0.6 * 0.7, (1, 0, 1): 0.6 * 0.3})
    assert dict(emissions(APPENDIX_A, 0, draw, 0)) == pytest.approx({(0,): 0.7, (1,): 0.3})
    assert dict(emissions(APPENDIX_A, 0, draw, None)) == {(): 1.0}


def test_the_equality_rule_would_accept_less() -> None:
    """Ratio rule: the sum of min(p, q) is .8; drawing from p and comparing would accept the sum of pq, .5."""
    accepted = sum(
        chance * share
        for draw, chance in draws(APPENDIX_A, 0, 1, "past")
        for emitted, share in emissions(APPENDIX_A, 0, draw, 1)
        if len(emitted) == 2
    )
    assert accepted == pytest.approx(0.8)


def test_what_a_confidence_reads() -> None:
    toy = next(toy for toy in TOYS if toy.name == "long_block")
    ones = [confidences(toy, 0, 0, ((0, None), (0, None), (token, None)), 3, "past") for token in (0, 1)]
    assert ones[0] == ones[1]
    ones = [confidences(toy, 0, 0, ((0, None), (0, None), (token, None)), 3, "own_token") for token in (0, 1)]
    assert ones[0][:2] == ones[1][:2]
    assert ones[0][2] != ones[1][2]
    assert confidences(toy, 0, 0, ((0, True), (1, False)), 3, "outcome") == (1.0, 0.0, 0.0)


def test_engines_by_hand() -> None:
    """Four draft tokens were asked for at most, so there is room for two."""
    acts = {name: engine.act for name, engine in ENGINES.items()}
    assert acts["as_told"]((2, 1), 2) == (2, 1)
    assert acts["trim_tail"]((1, 2), 2) == (1, 1)
    assert acts["trim_tail"]((2, 2), 2) == (2, 0)
    assert acts["drop_batch"]((2, 1), 2) == (0, 0)
    assert acts["drop_batch"]((1, 1), 2) == (1, 1)
    assert acts["redraft"]((1, 2), 2) == (1, None)
    assert acts["redraft"]((1, 1), 2) == (1, 1)


def test_requests_leave_when_they_have_their_tokens() -> None:
    """A table that drafts for one request alone must come to draft once the other has left."""
    toy = next(toy for toy in TOYS if toy.name == "pair")
    policy = BatchTable(table=((1, 2), (2, 0)))
    enumeration = Enumeration(Case(policy, toy, steps_per_s("flat", 6), ENGINES["as_told"], "past", 4))
    assert np.abs(enumeration.law() - target_law(toy, 5)).max() < 1e-12
    assert {len(ways[0].running) for ways in enumeration._ways.values()} == {2}
    policy = Fixed(k=2)
    enumeration = Enumeration(Case(policy, toy, steps_per_s("flat", 6), ENGINES["as_told"], "past", 4))
    assert np.abs(enumeration.law() - target_law(toy, 5)).max() < 1e-12
    assert {len(ways[0].running) for ways in enumeration._ways.values()} == {0, 1, 2}


def test_curves_reach_every_toy() -> None:
    for toy in TOYS:
        for curve in CURVES:
            assert steps_per_s(curve, toy.max_batch_tokens).size == toy.max_batch_tokens + 1


def test_fingerprints_tell_states_apart() -> None:
    lagged = DsparkAsync(lag=2).start()
    before = fingerprint(lagged)
    lagged.verify_lengths(np.ones((1, 2)), np.ones(4))
    assert fingerprint(lagged) != before
    assert fingerprint(DsparkAsync(lag=2).start()) == before
    assert fingerprint([1, 2]) != fingerprint((1, 2))
    assert fingerprint(1) != fingerprint(1.0)
    assert fingerprint({"a": np.arange(3)}) == fingerprint({"a": np.arange(3)})
    with pytest.raises(PolicyFault, match=r"^expected a memory of .* \(got Generator\)$"):
        fingerprint(np.random.default_rng(0))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda c: np.full(len(c), 3), r"expected lengths in 0..2 \(got \[3\]\)"),
        (lambda c: np.full(len(c), -1), r"expected lengths in 0..2 \(got \[-1\]\)"),
        (lambda c: np.full(len(c), 0.5), r"expected 1 whole numbers \(got shape \(1,\), float64\)"),
        (lambda c: np.zeros(5, int), r"expected 1 whole numbers \(got shape \(5,\), int64\)"),
        (lambda c: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda c: np.array([c.fill(1.0) or 0]), "expected the arrays it is given to stay as they are"),
    ],
)
def test_a_policy_that_breaks_the_seam_is_told(answer, message) -> None:
    class Wrong(Fixed):
        def start(self):
            return self

        def verify_lengths(self, confidence, steps_per_s):
            return answer(confidence)

    memories = Memories(Wrong(k=2), 2, np.ones(4))
    start = memories.start()
    with pytest.raises(PolicyFault, match=message):
        memories.decide(start, ((0.5, 0.5),))


def test_dice_are_noticed() -> None:
    dice = iter(range(100))

    class Restless(Fixed):
        def start(self):
            return self

        def verify_lengths(self, confidence, steps_per_s):
            return np.array([next(dice) % 2])

    memories = Memories(Restless(k=2), 2, np.ones(4))
    with pytest.raises(PolicyFault, match="the same lengths for the same input"):
        memories.decide(memories.start(), ((0.5, 0.5),))
