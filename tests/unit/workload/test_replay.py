"""What is replayed of a trace, when, and that no row is lost without being counted."""

import json
import math

import numpy as np
import pytest

from sim.errors import ScenarioError, TraceError
from sim.rng import Streams
from sim.workload.build import Replay, build_requests
from sim.workload.domains import MixChange
from sim.workload.replay import MOVED_OR_READ, Window

HEAD = "arrived_s,prompt_tokens,output_tokens\n"
STREAMS = Streams(5)


def table_of(path, *, domains=None, horizon_s=math.inf, streams=STREAMS, strict=False, **options):
    replay = Replay(path=path.name, **options)
    table = build_requests(replay, None, domains, horizon_s, streams, path.parent, strict)
    lost = sum(count for reason, count in table.trace_rows.items() if reason not in MOVED_OR_READ)
    assert table.trace_rows["read"] == table.arrived_s.size + lost
    assert np.all(np.diff(table.arrived_s) >= 0)
    assert np.all((table.arrived_s >= 0) & (table.arrived_s < horizon_s))
    return table


@pytest.fixture
def own(write):
    return write("t.csv", HEAD + "0,10,1\n0.5,20,2\n4,30,3\n6.25,40,4\n")


def test_a_trace_is_replayed_as_it_is(own):
    table = table_of(own)
    assert table.arrived_s.tolist() == [0, 0.5, 4, 6.25]  # a request at time 0 is one
    assert table.prompt_tokens.tolist() == [10, 20, 30, 40]
    assert table.output_tokens.tolist() == [1, 2, 3, 4]
    assert table.trace_rows == {"read": 4}
    assert table.domains == ("-",)
    assert table.caveats == ()


def test_speed_up_divides_gaps(own):
    # guidellm's `rate` multiplied them: asking for 1000 times the rate gave a thousandth.
    assert table_of(own, speed_up=2.0).arrived_s.tolist() == [0, 0.25, 2, 3.125]
    assert table_of(own, speed_up=0.5).arrived_s.tolist() == [0, 1, 8, 12.5]


def test_speed_up_raises_the_rate_and_the_horizon_is_in_run_time(own):
    table = table_of(own, speed_up=2.0, horizon_s=3.125)
    assert table.arrived_s.tolist() == [0, 0.25, 2]  # the horizon itself is outside
    assert table.trace_rows == {"read": 4, "after_horizon": 1}


def test_a_window_is_in_trace_time_from_included_to_excluded(own):
    table = table_of(own, window=Window(from_=0.5, until=6.25))
    assert table.prompt_tokens.tolist() == [20, 30]
    assert table.arrived_s.tolist() == [0, 3.5]
    assert table.trace_rows == {"read": 4, "outside_window": 2}
    fast = table_of(own, window=Window(from_=0.5, until=6.25), speed_up=2.0)
    assert fast.prompt_tokens.tolist() == [20, 30]
    assert fast.arrived_s.tolist() == [0, 1.75]


def test_time_0_is_where_the_window_begins_not_its_first_request(own):
    assert table_of(own, window=Window(from_=3.0)).arrived_s.tolist() == [1, 3.25]
    assert table_of(own, window=Window(until=4.0)).arrived_s.tolist() == [0, 0.5]


def test_time_0_belongs_to_the_format(write):
    # Seconds of ours are from the start of a run, so that a run replays as itself; BurstGPT's are from some midnight.
    assert table_of(write("own.csv", HEAD + "2.5,1,1\n3,1,1\n")).arrived_s.tolist() == [2.5, 3]
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,m,4,1,5,x\n45,m,4,1,5,x\n"
    burst = table_of(write("burst.csv", text), ties="keep", window=Window(from_=30.0))
    assert burst.arrived_s.tolist() == [10]


def test_a_window_without_requests_is_refused(own):
    with pytest.raises(TraceError) as caught:
        table_of(own, window=Window(from_=60.0))
    assert str(caught.value) == (f"{own}: no request left of 4: 4 outside_window; its times run from 0 s to 6.25 s")


def test_a_sample_keeps_gaps_and_lengths_of_what_it_keeps(write):
    path = write("t.csv", HEAD + "".join(f"{row / 4},{row + 1},{row + 2}\n" for row in range(400)))
    whole, sampled = table_of(path), table_of(path, sample=0.25)
    row = sampled.prompt_tokens - 1
    np.testing.assert_array_equal(sampled.arrived_s, whole.arrived_s[row])
    np.testing.assert_array_equal(sampled.output_tokens, whole.output_tokens[row])
    assert sampled.trace_rows == {"read": 400, "not_sampled": 400 - sampled.arrived_s.size}
    assert sampled.caveats == ("a random 0.25 of the trace's requests was replayed",)
    # Each row has its own lot: a larger sample holds the smaller one, and a window does not shift it.
    assert set(row) <= set(table_of(path, sample=0.5).prompt_tokens - 1)
    late = table_of(path, sample=0.25, window=Window(from_=50.0))
    assert set(late.prompt_tokens - 1) == {kept for kept in row if kept >= 200}


COARSE = HEAD + "".join(f"{row // 3},{row + 1},1\n" for row in range(300))


def test_ties_must_be_chosen_where_times_are_coarse(write):
    path = write("t.csv", COARSE)
    with pytest.raises(ScenarioError) as caught:
        table_of(path)
    assert str(caught.value) == (
        f"arrivals.ties: missing: the times of {path} lie 1 s apart, and requests share them; choose 'spread' (each is "
        "moved by 0 to 1 s) or 'keep' (they arrive in bursts)"
    )


@pytest.mark.parametrize("ties", ["keep", "spread"])
def test_ties_have_no_place_where_times_are_fine(own, ties):
    with pytest.raises(ScenarioError) as caught:
        table_of(own, ties=ties)
    assert str(caught.value) == (
        f"arrivals.ties: has no effect: the times of {own} are not coarse; remove it (got '{ties}')"
    )


def test_ties_kept_arrive_together_in_the_order_of_the_file(write):
    table = table_of(write("t.csv", COARSE), ties="keep")
    assert table.arrived_s[:7].tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert table.prompt_tokens.tolist() == list(range(1, 301))
    assert table.trace_rows == {"read": 300}
    assert table.caveats == ("arrivals were recorded 1 s apart and kept so: bursts are an effect of the recording",)


def test_ties_spread_stay_within_the_grid_and_are_counted(write):
    table = table_of(write("t.csv", COARSE), ties="spread")
    moved_s = table.arrived_s - (table.prompt_tokens - 1) // 3
    assert np.all((moved_s >= 0) & (moved_s < 1))
    assert np.unique(table.arrived_s).size == 300
    assert table.trace_rows == {"read": 300, "spread": 300}
    assert table.caveats == ("arrivals were recorded 1 s apart; each was moved by a uniform 0 to 1 s",)


def test_the_grid_is_sped_up_with_everything_else(write):
    # aiperf #1129: a cap on gaps was not divided by the speed-up and acted ten times too long.
    path = write("t.csv", COARSE)
    np.testing.assert_allclose(
        table_of(path, ties="spread", speed_up=10.0).arrived_s, table_of(path, ties="spread").arrived_s / 10
    )


def test_disorder_is_sorted_with_each_row_kept_whole(write):
    table = table_of(write("t.csv", HEAD + "1.5,10,1\n1.25,20,2\n3,30,3\n"))
    assert table.arrived_s.tolist() == [1.25, 1.5, 3]
    assert table.prompt_tokens.tolist() == [20, 10, 30]
    assert table.output_tokens.tolist() == [2, 1, 3]
    assert table.trace_rows == {"read": 3, "out_of_order": 1}


def test_every_way_to_lose_a_row_at_once_still_adds_up(write):
    rows = "".join(f"{row / 4},{row % 7},{row % 11}\n" for row in range(400))
    path = write("t.csv", HEAD + rows + "junk\n50,x,1\n")
    table = table_of(path, sample=0.5, window=Window(from_=10.0, until=90.0), speed_up=2.0, horizon_s=30)
    assert set(table.trace_rows) == {
        "read",
        "zero_prompt",
        "zero_output",
        "wrong_columns",
        "not_a_number",
        "outside_window",
        "not_sampled",
        "after_horizon",
    } | ({"out_of_order"} & set(table.trace_rows))


def test_strict_reaches_the_reader(write):
    path = write("t.csv", HEAD + "0,1,1\n0.5,0,1\n")
    assert table_of(path).trace_rows == {"read": 2, "zero_prompt": 1}
    with pytest.raises(TraceError, match=r"t\.csv:3: prompt_tokens"):
        table_of(path, strict=True)


# ---------------------------------------------------------------------------------------------------------- domains


def test_domains_of_the_trace_are_those_of_the_requests(write):
    path = write("t.csv", HEAD.replace("\n", ",domain,tenant\n") + "2.5,1,1,code,b\n0.5,2,2,chat,a\n")
    table = table_of(path)
    assert [table.domains[index] for index in table.domain] == ["chat", "code"]
    assert [table.tenants[index] for index in table.tenant] == ["a", "b"]


def test_domains_given_twice_are_a_fault(write):
    path = write("t.csv", HEAD.replace("\n", ",domain\n") + "0,1,1,code\n")
    with pytest.raises(ScenarioError) as caught:
        table_of(path, domains={"math": 1.0})
    assert str(caught.value) == f"domains: has no effect: {path} has a domain for each request; remove it"


def test_domains_of_the_scenario_follow_run_time_and_the_row(write):
    path = write("t.csv", HEAD + "".join(f"{row / 4},{row + 1},1\n" for row in range(400)))
    schedule = (MixChange(at=0, mix={"math": 1.0}), MixChange(at=25, mix={"code": 1.0}))
    table = table_of(path, domains=schedule, speed_up=2.0)
    assert [table.domains[index] for index in table.domain] == ["math"] * 200 + ["code"] * 200
    mix = {"math": 0.5, "code": 0.5}
    whole, late = table_of(path, domains=mix), table_of(path, domains=mix, window=Window(from_=50.0))
    np.testing.assert_array_equal(late.domain, whole.domain[200:])


# ----------------------------------------------------------------------------------------------- a run replays itself


def test_requests_written_as_our_own_format_are_the_same_requests(write, seed):
    from sim.workload.build import Poisson
    from sim.workload.length_source import Lognormal, PromptAndOutput

    lengths = PromptAndOutput(prompt=Lognormal(median=900, p95=4000), output=Lognormal(median=90, sigma=1))
    drawn = build_requests(Poisson(rate_per_s=30), lengths, {"math": 0.3, "code": 0.7}, 20.0, Streams(seed))
    lines = (
        json.dumps(
            {
                "arrived_s": float(drawn.arrived_s[row]),
                "prompt_tokens": int(drawn.prompt_tokens[row]),
                "output_tokens": int(drawn.output_tokens[row]),
                "domain": drawn.domains[drawn.domain[row]],
            }
        )
        for row in range(drawn.arrived_s.size)
    )
    again = table_of(write("run.jsonl", "\n".join(lines)), horizon_s=20.0, strict=True)
    for name in ("arrived_s", "prompt_tokens", "output_tokens"):
        np.testing.assert_array_equal(getattr(again, name), getattr(drawn, name))
    assert [again.domains[index] for index in again.domain] == [drawn.domains[index] for index in drawn.domain]


# ---------------------------------------------------------------------------------------------- the files themselves


def test_mooncake_spread_is_poisson_again(shared_dir):
    path = shared_dir / "traces/mooncake-fast25/conversation_trace.jsonl.gz"

    def judge(ties):
        table = table_of(path, ties=ties)
        gaps_s = np.diff(table.arrived_s)
        counts = np.bincount(table.arrived_s.astype(int))[:3537]
        return gaps_s.std() / gaps_s.mean(), counts.var() / counts.mean(), table

    kept_cv, kept_idc, kept = judge("keep")
    assert kept_cv == pytest.approx(3.03, abs=0.01)
    assert kept_idc == pytest.approx(7.89, abs=0.1)
    assert "spread" not in kept.trace_rows
    spread_cv, spread_idc, spread = judge("spread")
    assert spread_cv == pytest.approx(1.01, abs=0.04)
    assert spread_idc == pytest.approx(1.05, abs=0.12)
    assert spread.trace_rows == {"read": 12031, "spread": 12031}
    assert spread.caveats[1] == "arrivals were recorded 3 s apart; each was moved by a uniform 0 to 3 s"


def test_azure_loses_nothing(shared_dir):
    path = shared_dir / "traces/azure-llm-2023/AzureLLMInferenceTrace_conv.csv"
    table = table_of(path, strict=True)
    assert table.trace_rows == {"read": 19366}
    assert table.arrived_s.size == 19366
    with pytest.raises(ScenarioError, match="has no effect"):
        table_of(path, ties="keep")
