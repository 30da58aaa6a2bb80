"""From sections to requests: reproducible, and no stream ever shifts another."""

import math

import numpy as np
import pytest

from sim.errors import ScenarioError
from sim.rng import Streams
from sim.workload.base import ARRIVALS, LENGTHS
from sim.workload.build import ClosedLoop, Diurnal, Gamma, OnOff, Peak, Poisson, Replay, build_requests
from sim.workload.domains import MixChange
from sim.workload.length_source import Fixed, Lognormal, PairsOfTrace, PromptAndOutput, Quantiles

OPEN = [
    Poisson(rate_per_s=20),
    Gamma(rate_per_s=20, cv=3),
    OnOff(on_per_s=40, off_per_s=2, mean_on=5, mean_off=5),
    Diurnal(mean_per_s=20, amplitude=1, period=60, peak_at=10),
    Peak(base_per_s=10, peak_per_s=40, from_=20, until=40),
]
LENGTHS_ = PromptAndOutput(
    prompt=Lognormal(median=900, p95=4000, max=8000),
    output=Quantiles(probabilities=(0, 0.5, 1), tokens=(1, 100, 900)),
)
MIX = {"math": 0.2, "code": 0.3, "chat": 0.5}
COLUMNS = ("arrived_s", "prompt_tokens", "output_tokens", "domain", "tenant")


def each_open(test):
    return pytest.mark.parametrize("arrivals", OPEN, ids=lambda arrivals: arrivals.kind)(test)


def same(one, other, columns=COLUMNS):
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)


def test_every_kind_is_registered():
    assert set(ARRIVALS.known()) == {"poisson", "gamma", "on_off", "diurnal", "peak", "closed_loop", "replay"}
    assert set(LENGTHS.known()) == {"fixed", "lognormal", "quantiles"}


@each_open
def test_a_table_is_well_formed_and_read_only(arrivals):
    table = build_requests(arrivals, LENGTHS_, MIX, 60.0, Streams(1))
    n = table.arrived_s.size
    assert n > 500
    assert all(getattr(table, name).shape == (n,) for name in COLUMNS)
    assert np.all(np.diff(table.arrived_s) >= 0)
    assert table.arrived_s[0] >= 0
    assert table.arrived_s[-1] < 60
    assert table.prompt_tokens.min() >= 1
    assert table.output_tokens.min() >= 1
    assert set(table.domain) == {0, 1, 2}
    assert table.domains == ("math", "code", "chat")
    assert (table.tenants, table.trace_rows, table.caveats) == (("-",), {}, ())
    for name in COLUMNS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(table, name)[0] = 0


@each_open
def test_the_same_seed_gives_the_same_table_and_another_one_does_not(arrivals):
    table = build_requests(arrivals, LENGTHS_, MIX, 60.0, Streams(1))
    assert same(table, build_requests(arrivals, LENGTHS_, MIX, 60.0, Streams(1)))
    for other in (Streams(2), Streams(1, replication=1)):
        changed = build_requests(arrivals, LENGTHS_, MIX, 60.0, other)
        assert not same(table, changed, ("arrived_s",))


@each_open
def test_a_longer_horizon_only_adds_requests(arrivals):
    short = build_requests(arrivals, LENGTHS_, MIX, 45.0, Streams(1))
    long = build_requests(arrivals, LENGTHS_, MIX, 60.0, Streams(1))
    n = short.arrived_s.size
    assert long.arrived_s[n] >= 45
    np.testing.assert_allclose(long.arrived_s[:n], short.arrived_s, rtol=1e-12)
    for name in ("prompt_tokens", "output_tokens", "domain"):
        np.testing.assert_array_equal(getattr(long, name)[:n], getattr(short, name))


@each_open
def test_lengths_and_domains_do_not_shift_arrivals_nor_each_other(arrivals):
    table = build_requests(arrivals, LENGTHS_, MIX, 60.0, Streams(1))
    other_prompt = PromptAndOutput(prompt=Fixed(tokens=7), output=LENGTHS_.output)
    changed = build_requests(arrivals, other_prompt, MIX, 60.0, Streams(1))
    assert same(table, changed, ("arrived_s", "output_tokens", "domain"))
    assert not same(table, changed, ("prompt_tokens",))
    other_output = PromptAndOutput(prompt=LENGTHS_.prompt, output=Lognormal(median=9, sigma=2, min=3, max=20))
    assert same(
        table, build_requests(arrivals, other_output, MIX, 60.0, Streams(1)), ("arrived_s", "prompt_tokens", "domain")
    )
    no_domains = build_requests(arrivals, LENGTHS_, None, 60.0, Streams(1))
    assert same(table, no_domains, ("arrived_s", "prompt_tokens", "output_tokens"))
    assert no_domains.domains == ("-",)
    schedule = (MixChange(at=0, mix=MIX), MixChange(at=30, mix={"chat": 1.0}))
    changing = build_requests(arrivals, LENGTHS_, schedule, 60.0, Streams(1))
    before = table.arrived_s < 30
    np.testing.assert_array_equal(changing.domain[before], table.domain[before])
    assert set(changing.domain[~before]) == {2}


def test_a_stream_more_shifts_nothing():
    streams = Streams(1)
    table = build_requests(OPEN[0], LENGTHS_, MIX, 60.0, streams)
    streams.get("something new").random(100)
    assert same(table, build_requests(OPEN[0], LENGTHS_, MIX, 60.0, streams))


def test_a_mutant_that_shares_a_stream_would_be_seen():
    """The sibling of the tests above: with one stream for all, another prompt law shifts the outputs."""

    class OneStream(Streams):
        __slots__ = ("only",)

        def get(self, *name):
            if not hasattr(self, "only"):
                object.__setattr__(self, "only", Streams.get(self, "all"))
            return self.only

    table = build_requests(OPEN[0], LENGTHS_, MIX, 60.0, OneStream(1))
    other_prompt = PromptAndOutput(prompt=Fixed(tokens=7), output=LENGTHS_.output)
    changed = build_requests(OPEN[0], other_prompt, MIX, 60.0, OneStream(1))
    assert same(table, changed, ("arrived_s",))
    assert not same(table, changed, ("output_tokens",))


def test_no_arrival_is_an_empty_table():
    table = build_requests(Peak(base_per_s=0, peak_per_s=9, from_=60, until=70), LENGTHS_, MIX, 60.0, Streams(1))
    assert [getattr(table, name).size for name in COLUMNS] == [0] * 5


@pytest.mark.parametrize(
    "arrivals, expected",
    [
        (Poisson(rate_per_s=1e9), "6e+10"),
        (Gamma(rate_per_s=1e9, cv=2), "6e+10"),
        (OnOff(on_per_s=1e9, mean_on=1, mean_off=1), "6e+10"),
        (Diurnal(mean_per_s=1e9, amplitude=0, period=9, peak_at=0), "6e+10"),
        (Peak(base_per_s=0, peak_per_s=1e9, from_=0, until=30), "3e+10"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_load_beyond_reason_is_refused_before_it_is_drawn(arrivals, expected):
    with pytest.raises(ScenarioError) as caught:
        build_requests(arrivals, LENGTHS_, MIX, 60.0, Streams(1))
    assert str(caught.value) == f"arrivals: offers about {expected} requests within the horizon; at most 50000000"


def test_pairs_of_a_trace_stay_together(write):
    rows = "".join(f"{row / 4},{row + 1},{2 * row + 5}\n" for row in range(50))
    path = write("t.csv", "arrived_s,prompt_tokens,output_tokens\n" + rows + "99,0,1\n")
    lengths = PairsOfTrace(path="t.csv")
    table = build_requests(OPEN[0], lengths, MIX, 60.0, Streams(1), path.parent)
    np.testing.assert_array_equal(table.output_tokens, 2 * table.prompt_tokens + 3)
    assert set(table.prompt_tokens) == set(range(1, 51))
    assert table.trace_rows == {"lengths_read": 51, "lengths_zero_prompt": 1}
    assert same(table, build_requests(OPEN[0], LENGTHS_, MIX, 60.0, Streams(1)), ("arrived_s", "domain"))


def test_pairs_of_mooncake_bring_its_caveat(shared_dir):
    lengths = PairsOfTrace(path="traces/mooncake-fast25/synthetic_trace.jsonl.gz")
    table = build_requests(Poisson(rate_per_s=1), lengths, None, 60.0, Streams(1), shared_dir)
    assert table.caveats[0].startswith("no prefix cache is simulated: 64.0%")


def test_lengths_that_a_replay_would_ignore_are_our_bug_by_then():
    with pytest.raises(ValueError, match="a replay takes its lengths from the trace"):
        build_requests(Replay(path="t"), LENGTHS_, None, math.inf, Streams(1))
    with pytest.raises(ValueError, match="arrivals of kind 'poisson' need lengths"):
        build_requests(OPEN[0], None, None, 60.0, Streams(1))


def test_expected_requests_is_the_integral_of_the_rate():
    horizon_s = 47.0
    at_s = (np.arange(1_000_000) + 0.5) * horizon_s / 1_000_000
    diurnal = OPEN[3]
    assert diurnal.expected_requests(horizon_s) == pytest.approx(diurnal.rate_per_s(at_s).mean() * horizon_s)
    assert diurnal.rate_per_s(np.array([10.0, 40.0, 70.0])).tolist() == pytest.approx([40, 0, 40])
    assert OPEN[4].expected_requests(10) == 100
    assert OPEN[4].expected_requests(30) == 200 + 400
    assert OPEN[4].expected_requests(60) == 400 + 800
    assert OPEN[2].expected_requests(60) == 21 * 60
    assert ClosedLoop(users=3).starts_s().tolist() == [0, 0, 0]
