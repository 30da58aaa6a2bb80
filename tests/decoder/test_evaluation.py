"""Rates and lengths: each has one definition, and none is invented where nothing was tried."""

import numpy as np
import pytest

from decoder.evaluation import Rate, accept_rates, acceptance, weak_positions
from decoder.session import Decoder, Round
from sim.verify.fixed import Fixed
from tests.decoder.test_calibration import make_round
from tests.decoder.test_rounds import V, request, soft
from tests.decoder.toys import TableDrafter, TableTarget


def test_conditional_and_survival():
    rounds = [make_round(3, 3), make_round(3, 1), make_round(3, 0), make_round(1, 1), make_round(3, 2, stopped=True)]
    conditional, survival = accept_rates(rounds, 3)
    assert [(r.held, r.tried) for r in conditional] == [(4, 5), (2, 3), (1, 1)]
    # The third of the stopped round and what the fourth left unverified are unknown.
    assert [(r.held, r.tried) for r in survival] == [(4, 5), (2, 4), (1, 3)]


def test_nothing_tried_is_no_rate():
    empty = acceptance([], 3)
    assert (empty.accepted_length, empty.draft_acceptance.value, empty.accepted_length_half_width) == (None, None, None)
    assert all(rate.value is None and rate.half_width is None for rate in (*empty.conditional, *empty.survival))


def test_positions_add_up_to_the_total():
    decoder = Decoder(TableTarget(soft(0.6)), TableDrafter(soft(0.4), 4), Fixed(k=4))
    found = decoder.generate([request(str(i), prompt=(i,), new=20, temperature=1.0) for i in range(6)])
    result = acceptance(found, 4)
    assert sum(rate.held for rate in result.conditional) == result.accepted_tokens
    assert result.output_tokens == sum(len(g.output_ids) for g in found)
    assert result.output_tokens == result.requests + round(result.accepted_length * result.rounds)
    assert result.accepted_tokens <= result.verified_tokens <= result.proposed_tokens
    assert 0 < result.accepted_length_half_width < 1


def test_longer_blocks_accept_a_smaller_share_and_yield_more():
    """The share of drafts accepted falls with k by arithmetic; both numbers are published, so that nobody is misled."""
    shares, lengths = [], []
    for k in (1, 3, 6):
        other = TableDrafter(np.full((V, V), 1 / V), k)
        decoder = Decoder(TableTarget(soft(0.5)), other, Fixed(k=k))
        found = decoder.generate([request(str(i), prompt=(i,), new=40, temperature=1.0) for i in range(10)])
        result = acceptance(found, k)
        shares.append(result.draft_acceptance.value)
        lengths.append(result.accepted_length)
    assert shares == sorted(shares, reverse=True)
    assert lengths == sorted(lengths)


def test_a_collapse_after_the_first_position_is_told():
    healthy = (Rate(800, 1000), Rate(700, 800), Rate(600, 700))
    broken = (Rate(800, 1000), Rate(40, 800), Rate(30, 40))
    assert weak_positions(healthy) == []
    assert weak_positions(broken) == [1]
    assert weak_positions((Rate(8, 10), Rate(0, 0))) == []
    assert weak_positions((Rate(4, 5), Rate(1, 4))) == []  # too few cases to tell


def test_wilson():
    assert Rate(50, 100).half_width == pytest.approx(0.0961, abs=1e-3)
    assert Rate(0, 10).half_width > 0


def test_a_round_says_what_was_judged():
    record = make_round(3, 1)
    assert isinstance(record, Round)
    assert record.judged == (True, False)
    assert make_round(3, 3).judged == (True, True, True)
    assert make_round(3, 2, stopped=True).judged == (True, True)
