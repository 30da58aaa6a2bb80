"""Laws of lengths: their limits, and that nothing piles up there."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.workload.lengths import Fixed, Lognormal, Quantiles


def draw(law, n=20_000, seed=0):
    return law.draw_tokens(n, rng=np.random.default_rng(seed))


def test_fixed_draws_no_lots():
    rng = np.random.default_rng(0)
    assert Fixed(tokens=7).draw_tokens(3, rng=rng).tolist() == [7, 7, 7]
    assert rng.random() == np.random.default_rng(0).random()


def test_lognormal_has_its_median_and_p95():
    tokens = draw(Lognormal(median=1000, p95=4000))
    assert np.median(tokens) == pytest.approx(1000, rel=0.05)
    assert np.quantile(tokens, 0.95) == pytest.approx(4000, rel=0.05)
    assert Lognormal(median=1000, p95=4000).log_sigma == pytest.approx(0.8428, abs=1e-4)


def test_limits_draw_again_and_do_not_clip():
    law = Lognormal(median=1000, sigma=1, min=500, max=2000)
    free = draw(Lognormal(median=1000, sigma=1), 200_000)
    kept = free[(free >= 500) & (free <= 2000)]
    limited = draw(law)
    assert (limited.min(), limited.max()) == (500, 2000)
    # A clipped law would have a quarter of all lengths at each limit.
    assert np.mean(limited == 2000) < 0.005
    assert np.mean(limited == 500) < 0.005
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(limited, share) == pytest.approx(np.quantile(kept, share), rel=0.03)


def test_a_small_median_never_gives_0_tokens():
    tokens = draw(Lognormal(median=1, sigma=1))
    assert tokens.min() == 1
    # Below half a token is drawn again, in place of rounded up to one.
    assert np.mean(tokens == 1) == pytest.approx(0.5509, abs=0.02)


def test_quantiles_are_straight_between_the_points():
    law = Quantiles(probabilities=(0, 0.5, 0.9, 1), tokens=(10, 100, 100, 1100))
    tokens = draw(law)
    assert tokens.min() >= 10
    assert tokens.max() <= 1100
    assert np.quantile(tokens, 0.25) == pytest.approx(55, abs=2)
    assert np.mean(tokens == 100) == pytest.approx(0.4, abs=0.02)
    assert np.quantile(tokens, 0.95) == pytest.approx(600, abs=30)


LAWS = st.one_of(
    st.builds(Fixed, tokens=st.integers(1, 10**6)),
    st.builds(
        Lognormal,
        median=st.floats(1, 1e6),
        sigma=st.floats(0.01, 3),
        max=st.integers(2_000_000, 10**9),
    ),
    st.builds(
        lambda inner, tokens: Quantiles(
            probabilities=(0.0, *sorted(set(inner)), 1.0), tokens=tuple(sorted(tokens)[: len(set(inner)) + 2])
        ),
        st.lists(st.floats(0.01, 0.99), max_size=3),
        st.lists(st.integers(1, 10**6), min_size=5, max_size=5),
    ),
)


@given(LAWS, st.integers(0, 2**32), st.integers(0, 50), st.integers(0, 50))
def test_every_law_gives_whole_positive_lengths_one_lot_each(law, seed, fewer, more):
    tokens = draw(law, fewer + more, seed)
    assert tokens.dtype == np.int64
    assert tokens.shape == (fewer + more,)
    assert np.all(tokens >= 1)
    assert np.array_equal(draw(law, fewer, seed), tokens[:fewer])
