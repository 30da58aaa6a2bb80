"""The acceptance process, exact parts: edges of the law, one luck a place, the walk through a recorded bank."""

import hashlib

import numpy as np
import pytest
from scipy.special import logit, ndtr

from profiles.errors import ProfileError
from profiles.schema import Bank, Drafter, Spread
from sim.acceptance import NORMAL_CELLS, acceptance_tables, normal_quantiles, solve_means
from sim.verify import Fixed
from tests.helpers.fleet import TOY, Spy, accepts, always, at_once, engine, law, run, traffic

UNEVEN = {"request_sd": 0.5, "token_sd": 0.8}


def seen_and_fates(tables, requests=4, output=40, take=0, **offered):
    """Return confidences and fates of full blocks, ``[steps, requests, draft_length]`` and ``[steps, requests]``."""
    table = traffic(np.zeros(requests), output=output, **offered)
    notes = []
    for sees_outcome in (False, True):
        spy = Spy(take=take, sees_outcome=sees_outcome)
        run(engine(spy, tables), table)
        notes.append(np.array(spy.seen))
    return notes[0], notes[1].sum(axis=2).astype(int)


# -------------------------------------------------------------------------------------------------------------- the law


def test_the_table_of_normals_has_mean_0_and_nearly_variance_1():
    normals = normal_quantiles()
    assert normals.size == NORMAL_CELLS
    assert (np.diff(normals) > 0).all()
    assert normals.mean() == pytest.approx(0.0, abs=1e-12)
    assert normals.var() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("spread", [(0.0, 0.0), (0.7, 0.0), (0.0, 1.0), (0.8, 0.6)])
def test_chances_of_0_and_1_stay_exact(spread):
    spread = dict(zip(("request_sd", "token_sd"), spread, strict=True))
    _, fates = seen_and_fates(accepts(law([1.0, 1.0, 1.0], **spread)), 20)
    assert (fates == 3).all()
    _, fates = seen_and_fates(accepts(law([0.0, 0.0], **spread)), 20)
    assert (fates == 0).all()
    _, fates = seen_and_fates(accepts(law([1.0, 0.5, 0.0], **spread)), 20)
    assert set(np.unique(fates)) == {1, 2}


def test_equal_survival_means_a_certain_token():
    _, fates = seen_and_fates(accepts(law([0.6, 0.6, 0.3], **UNEVEN)), 50)
    assert set(np.unique(fates)) == {0, 2, 3}


def test_without_spread_the_means_are_those_of_the_conditional_chances():
    means = solve_means((0.9, 0.72, 0.36), Spread(request_sd=0.0, token_sd=0.0, provenance=TOY))
    assert ndtr(means) == pytest.approx([0.9, 0.8, 0.5])


def test_without_spread_every_confidence_is_the_chance():
    seen, _ = seen_and_fates(accepts(law([0.9, 0.72, 0.36])))
    np.testing.assert_allclose(seen, np.broadcast_to([0.9, 0.8, 0.5], seen.shape), atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_raw_confidence_is_the_calibrated_one_at_another_temperature(temperature):
    model = law([0.8, 0.6, 0.4], raw_temperature=temperature, noise_sd=0.3, **UNEVEN)
    calibrated, fates = seen_and_fates(accepts(model))
    raw, same_fates = seen_and_fates(accepts(model, confidence="raw"))
    np.testing.assert_array_equal(fates, same_fates)
    np.testing.assert_allclose(logit(raw), temperature * logit(calibrated), atol=2e-3)
    if temperature > 1:
        assert (np.abs(raw - 0.5) >= np.abs(calibrated - 0.5) - 1e-6).all()


def test_each_place_of_a_text_has_one_luck_however_deep_in_a_block_it_is_met():
    """With one chance at every depth, a block is accepted as far as the single tokens at its places are."""
    _, fates = seen_and_fates(always(4, 0.7), requests=6, output=200)
    single = fates >= 1
    for depth in range(1, 4):
        there = np.logical_and.reduce([single[k : len(single) - 4 + k] for k in range(depth + 1)])
        np.testing.assert_array_equal(fates[: len(there)] > depth, there)


def test_nothing_of_the_outcome_is_in_the_confidence_of_a_policy():
    """Two seeds of luck in the draw alone would leave these equal; here all chances are the same: so are they."""
    seen, fates = seen_and_fates(always(3, 0.6), requests=20)
    assert np.ptp(seen) < 1e-9
    assert np.ptp(fates) == 3


def test_two_requests_have_different_luck_and_the_same_request_the_same():
    _, fates = seen_and_fates(always(3, 0.6), requests=3, output=100)
    assert (fates[:, 0] != fates[:, 1]).any()
    _, again = seen_and_fates(always(3, 0.6), requests=2, output=100)
    np.testing.assert_array_equal(fates[:, :2], again)


def test_a_domain_that_the_drafter_does_not_know_is_refused(tmp_path):
    drafter = Drafter(kind="block", trained_length=1, domains={"math": law([0.5]), "code": law([0.5])})
    with pytest.raises(ProfileError, match=r"unknown domain 'chat'; known: math, code"):
        acceptance_tables("toy", drafter, ("math", "chat"), "calibrated", tmp_path / "p.json")


# ------------------------------------------------------------------------------------------------------------- the bank

BLOCK = 3


def saved_bank(folder, name, chance, first=0.0, texts=None):
    """Write a bank whose calibrated confidences tell row and depth: ``first + (row * BLOCK + depth) / 1000``.

    ``texts``: rows of each text (default: one holds all).
    """
    rows = len(chance)
    texts = texts or (rows,)
    confidence = first + np.arange(rows * BLOCK).reshape(rows, BLOCK) / 1000
    np.savez(
        folder / name,
        confidence=confidence,
        confidence_raw=1 - confidence,
        chance=np.asarray(chance, np.float64),
        accepted=np.asarray(chance) > 0.5,
        request=np.repeat(np.arange(len(texts)), texts),
        position=np.concatenate([np.arange(text) for text in texts]),
    )
    sha256 = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return Bank(file=name, sha256=sha256, provenance=TOY)


def bank_tables(folder, confidence="calibrated", **banks):
    drafter = Drafter(kind="block", trained_length=BLOCK, domains=banks)
    return acceptance_tables("toy", drafter, tuple(banks), confidence, folder / "p.json")


#: Acceptance by row: how many draft tokens of a block drafted there hold.
HOLDS = [3, 0, 1, 2, 0, 3, 1]
CHANCE = [[1.0] * held + [0.0] * (BLOCK - held) for held in HOLDS]


def rows_of(seen, first=0.0):
    return np.rint((seen[..., 0] - first) * 1000 / BLOCK).astype(int)


def test_a_request_walks_the_bank_from_the_beginning_of_a_text_and_wraps_around(tmp_path):
    """Texts are drawn evenly, however long they are, and a request's first anchor is its text's first token."""
    tables = bank_tables(tmp_path, any=saved_bank(tmp_path, "bank.npz", CHANCE, texts=(5, 1, 1)))
    seen, fates = seen_and_fates(tables, requests=60, output=30, domains=("any",))
    rows = rows_of(seen)
    # Of 60 draws of 1/3, fewer than 8 or more than 35 come in 1 of 2,000 runs.
    starts = np.bincount(rows[0], minlength=len(HOLDS))
    assert starts[[0, 5, 6]].sum() == 60
    assert all(8 <= count <= 35 for count in starts[[0, 5, 6]])
    np.testing.assert_array_equal(rows[1:], (rows[:-1] + 1) % len(HOLDS))
    np.testing.assert_array_equal(fates, np.array(HOLDS)[rows])
    np.testing.assert_allclose(seen, np.array(rows)[..., None] * BLOCK / 1000 + np.arange(BLOCK) / 1000)


def test_a_policy_that_cuts_elsewhere_meets_the_data_of_where_it_stands(tmp_path):
    """A round of a accepted tokens moves a + 1 places on, whatever was verified in the recording."""
    tables = bank_tables(tmp_path, any=saved_bank(tmp_path, "bank.npz", CHANCE))
    for take in (1, 2, 3):
        spy = Spy(take=take)
        run(engine(spy, tables), traffic(0.0, output=60, domains=("any",)))
        rows = rows_of(np.array(spy.seen)[:, 0])
        moved = np.minimum(np.array(HOLDS)[rows[:-1]], take) + 1
        np.testing.assert_array_equal(rows[1:], (rows[:-1] + moved) % len(HOLDS))


def test_raw_and_calibrated_confidence_are_both_in_the_bank(tmp_path):
    bank = saved_bank(tmp_path, "bank.npz", CHANCE)
    calibrated, fates = seen_and_fates(bank_tables(tmp_path, any=bank), domains=("any",))
    raw, same_fates = seen_and_fates(bank_tables(tmp_path, "raw", any=bank), domains=("any",))
    np.testing.assert_allclose(raw, 1 - calibrated)
    np.testing.assert_array_equal(fates, same_fates)


def test_a_preempted_request_goes_on_where_it_was_in_its_text(tmp_path):
    """Rows tell places. Computing a text anew draws a token without a draft: rows may be left out, none comes twice."""
    tables = bank_tables(tmp_path, any=saved_bank(tmp_path, "bank.npz", np.zeros((60, BLOCK))))
    spy = Spy(take=0)
    result = run(engine(spy, tables, block_tokens=1, kv_blocks=60), at_once(6, prompt=4, output=40))
    assert result.requests["preemptions"].sum() > 0
    times = np.bincount(np.concatenate([rows_of(seen) for seen in spy.seen]), minlength=60)
    assert times.max() == 6
    assert times[38] > 0 == times[39:].sum()


def test_each_domain_keeps_to_its_own_bank(tmp_path):
    tables = bank_tables(
        tmp_path,
        code=saved_bank(tmp_path, "code.npz", [[1.0] * BLOCK] * 5, texts=(3, 2)),
        chat=saved_bank(tmp_path, "chat.npz", [[0.0] * BLOCK] * 9, first=0.5, texts=(2, 7)),
    )
    seen, fates = seen_and_fates(tables, requests=40, domain=[0, 1] * 20, domains=("code", "chat"))
    assert set(rows_of(seen[0, ::2])) == {0, 3}
    assert set(rows_of(seen[0, 1::2], 0.5)) == {0, 2}
    assert (seen[:, ::2] < 0.1).all()
    assert (seen[:, 1::2] >= 0.5).all()
    assert (fates[:, ::2] == BLOCK).all()
    assert (fates[:, 1::2] == 0).all()
    assert set(np.unique(rows_of(seen[:, 1::2], 0.5))) == set(range(9))


def test_a_chain_drafter_walks_with_a_shorter_draft(tmp_path):
    drafter = Drafter(kind="chain", trained_length=BLOCK, domains={"any": saved_bank(tmp_path, "b.npz", CHANCE)})
    tables = acceptance_tables("toy", drafter, ("any",), "calibrated", tmp_path / "p.json")
    result = run(engine(Fixed(k=1), tables), traffic(0.0, output=200, domains=("any",)))
    requests = result.requests
    assert requests["drafted_tokens"].tolist() == requests["rounds"].tolist()
    assert 0 < requests["accepted_draft_tokens"][0] < requests["rounds"][0]


def test_luck_decides_between_chances_of_a_bank_the_same_way_under_every_policy(tmp_path):
    tables = bank_tables(tmp_path, any=saved_bank(tmp_path, "bank.npz", np.full((50, BLOCK), 0.5)))
    _, fates = seen_and_fates(tables, requests=5, output=120, domains=("any",))
    spy = Spy(sees_outcome=True)
    run(engine(spy, tables), traffic(np.zeros(1), output=120, domains=("any",)))
    met = [int(one.sum()) for one in spy.seen]
    place = np.concatenate(([0], np.cumsum(np.array(met) + 1)[:-1]))
    assert met == fates[place, 0].tolist()


def test_a_bank_that_was_altered_is_refused(tmp_path):
    bank = saved_bank(tmp_path, "bank.npz", CHANCE)
    saved_bank(tmp_path, "bank.npz", CHANCE[::-1])
    with pytest.raises(ProfileError, match=r"bank\.npz: sha256 is [0-9a-f]{64}; the profile says [0-9a-f]{64}"):
        bank_tables(tmp_path, any=bank)


def test_laws_and_banks_do_not_mix(tmp_path):
    drafter = Drafter(
        kind="block",
        trained_length=BLOCK,
        domains={"code": saved_bank(tmp_path, "bank.npz", CHANCE), "chat": law([0.5, 0.4, 0.3])},
    )
    with pytest.raises(ProfileError, match="mixes laws and banks over code, chat"):
        acceptance_tables("toy", drafter, ("code", "chat"), "calibrated", tmp_path / "p.json")


def test_one_output_length_of_many_requests_is_read_from_one_bank(tmp_path):
    tables = bank_tables(tmp_path, any=saved_bank(tmp_path, "bank.npz", CHANCE))
    result = run(engine(Fixed(k=3), tables), at_once(50, output=71))
    share = np.mean(HOLDS)
    got = result.requests["accepted_draft_tokens"].sum() / result.requests["rounds"].sum()
    assert 0.3 * share < got < 2.5 * share
