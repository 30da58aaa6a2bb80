"""Every format of measurement is read, and everything that is wrong with a file has its message."""

import json
from pathlib import Path
from typing import Any

import pytest

from profiles.measurements.acceptance import read_acceptance
from profiles.measurements.logs import read_log
from profiles.measurements.points import AcceptanceCounts
from profiles.measurements.rows import MeasurementError
from profiles.measurements.sweeps import read_sweep
from profiles.measurements.tables import read_times

#: A result of ``vllm bench serve --save-result``, the fields that count among others.
VLLM: dict[str, Any] = {
    "date": "20260401-120000",
    "backend": "vllm",
    "model_id": "Qwen/Qwen3-8B",
    "num_prompts": 320,
    "request_rate": "inf",
    "max_concurrency": 32,
    "duration": 100.0,
    "completed": 320,
    "failed": 0,
    "total_input_tokens": 163840,
    "total_output_tokens": 96000,
    "request_throughput": 3.2,
    "output_throughput": 2200.0,
    "mean_ttft_ms": 80.0,
    "mean_tpot_ms": 14.0,
    "mean_e2el_ms": 4266.0,
}
SPECULATED = {
    "spec_decode_acceptance_rate": 60.0,
    "spec_decode_acceptance_length": 2.8,
    "spec_decode_num_drafts": 30000,
    "spec_decode_draft_tokens": 90000,
    "spec_decode_accepted_tokens": 54000,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.6, 0.4],
}
SGLANG: dict[str, Any] = {
    "backend": "sglang",
    "request_rate": float("inf"),
    "max_concurrency": 16,
    "duration": 60.0,
    "completed": 160,
    "total_input_tokens": 16000,
    "total_output_tokens": 32000,
    "output_throughput": 900.0,
    "mean_e2e_latency_ms": 3000.0,
    "mean_ttft_ms": 60.0,
    "mean_tpot_ms": 15.0,
    "concurrency": 15.2,
    "accept_length": None,
}
AIPERF: dict[str, Any] = {
    "schema_version": "1.0",
    "output_token_throughput": {"unit": "tokens/sec", "avg": 700.0},
    "inter_token_latency": {"unit": "ms", "avg": 11.0, "p50": 10.9},
    "time_to_first_token": {"unit": "ms", "avg": 50.0},
    "input_sequence_length": {"unit": "tokens", "avg": 512.0},
    "output_sequence_length": {"unit": "tokens", "avg": 256.0},
    "input_config": {"loadgen": {"concurrency": 8}},
}
INFERENCEX: dict[str, Any] = {
    "hw": "h200",
    "conc": 16,
    "model": "deepseek-ai/DeepSeek-V3",
    "framework": "sglang",
    "precision": "fp8",
    "spec_decoding": "none",
    "disagg": False,
    "isl": 1024,
    "osl": 1024,
    "is_multinode": False,
    "tp": 8,
    "ep": 1,
    "dp_attention": "false",
    "tput_per_gpu": 200.0,
    "output_tput_per_gpu": 100.0,
    "mean_ttft": 0.12,
    "mean_tpot": 0.019,
    "mean_intvty": 52.631578947368425,
}
SITE = (
    "# Licensed under Apache License 2.0\n"
    "Model,ISL,OSL,Hardware,Framework,Precision,TP,Concurrency,Output Throughput/GPU (tok/s),Mean TTFT (ms),"
    "Mean TPOT (ms),Mean Interactivity (tok/s/user),Disaggregated,Spec Decoding,EP,DP Attention\n"
    "DeepSeek-V3,1024,1024,H200,sglang,fp8,8,16,100,0.12,0.019,52.63,false,none,1,false\n"
)
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 1000.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 3000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1800.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 800.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 600.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 400.0
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(text: str | dict[str, Any] | list[Any], name: str = "f") -> Path:
    path = Path(name)
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return path


def said(error: pytest.ExceptionInfo[MeasurementError]) -> str:
    return str(error.value)


# -------------------------------------------------------------------------------------------------------------- sweeps


def test_a_table(here: Path) -> None:
    sweep = read_sweep(
        put(
            "concurrency,output_tokens_per_s,user_tokens_per_s,ttft_ms,policy,k,accepted_length\n"
            "4,380,100,50,none,,\n\n# a remark\n4,500,140,,fixed,3,2.2\n8,900,,,mtp1,,1.8\n"
        )
    )
    plain, fixed, mtp = sweep.points
    assert sweep.tool == "table"
    assert (plain.concurrency, plain.tpot_s, plain.ttft_s, plain.draft_tokens) == (4, 0.01, 0.05, 0)
    assert (fixed.draft_tokens, fixed.accepted_length, fixed.place) == (3, 2.2, "f:5")
    assert (mtp.draft_tokens, mtp.tpot_s, mtp.output_tokens_per_s) == (1, None, 900)


def test_vllm_with_and_without_speculation(here: Path) -> None:
    (plain,) = read_sweep(put(VLLM)).points
    assert (plain.concurrency, plain.output_tokens_per_s, plain.tpot_s, plain.ttft_s) == (32, 2200, 0.014, 0.08)
    assert (plain.prompt_tokens, plain.output_tokens, plain.draft_tokens) == (512, 300, 0)
    first, second = read_sweep(put([VLLM, VLLM | SPECULATED])).points  # as summary.json of vllm bench sweep
    assert not first.speculates
    assert (second.draft_tokens, second.accepted_length) == (3, 2.8)
    lines = "\n".join(json.dumps(VLLM | {"max_concurrency": n}) for n in (32, 64))  # as --append-result writes
    assert [point.concurrency for point in read_sweep(put(lines)).points] == [32, 64]


def test_sglang(here: Path) -> None:
    lines = [SGLANG, SGLANG | {"accept_length": 2.4}]
    plain, fast = read_sweep(put("\n".join(map(json.dumps, lines)))).points
    assert (plain.concurrency, plain.tpot_s, plain.accepted_length, plain.draft_tokens) == (16, 0.015, 1.0, 0)
    assert (fast.accepted_length, fast.draft_tokens) == (2.4, None)
    (named,) = read_sweep(put(lines[1]), "fixed:3").points
    assert (named.accepted_length, named.draft_tokens) == (2.4, 3)


def test_aiperf_of_both_configurations(here: Path) -> None:
    newer = AIPERF | {"input_config": {"phases": [{"name": "warmup", "concurrency": 1}, {"concurrency": 8}]}}
    for export in (AIPERF, newer):
        (point,) = read_sweep(put(export)).points
        assert (point.concurrency, point.tpot_s, point.ttft_s) == (8, 0.011, 0.05)
        assert (point.prompt_tokens, point.output_tokens, point.output_tokens_per_s) == (512, 256, 700)


def test_inferencex_is_per_gpu_and_in_seconds_whatever_its_headings_say(here: Path) -> None:
    (result,) = read_sweep(put(INFERENCEX)).points
    (site,) = read_sweep(put(SITE)).points
    for point in (result, site):
        assert (point.concurrency, point.output_tokens_per_s, point.gpus, point.ttft_s) == (16, 800, 8, 0.12)
        assert point.tpot_s == pytest.approx(0.019, rel=1e-3)
    # should the site come to mean what its headings say
    (true_ms,) = read_sweep(put(SITE.replace(",0.12,0.019,", ",120,19,"))).points
    assert true_ms.ttft_s == pytest.approx(0.12)


def test_rows_of_one_engine_are_chosen_and_speculating_ones_set_aside(here: Path) -> None:
    rows = [INFERENCEX, INFERENCEX | {"hw": "b200"}, INFERENCEX | {"spec_decoding": "mtp"}]
    with pytest.raises(MeasurementError) as error:
        read_sweep(put(rows))
    assert said(error) == "f: several engines: hw is b200, h200; choose with --only 'hw=...'"
    sweep = read_sweep(put(rows), only={"hw": "h200"})
    assert len(sweep.points) == 1
    assert "1 of 2 rows speculate and are set aside" in sweep.remarks[0]


TABLE = "concurrency,output_tokens_per_s\n"
BROKEN_SWEEPS = {
    "empty": ("", "f: empty file"),
    "not text": (b"concurrency\n\xff\n", "f:2: not UTF-8 text (byte 0xff)"),
    "header only": (TABLE, "f:1: a header and no rows"),
    "remarks only": ("# nothing\n", "f: no header"),
    "no concurrency": ("requests,output_tokens_per_s\n1,2\n", "f:1: no column 'concurrency'"),
    "misspelt": ("concurrency,output_token_per_s\n1,2\n", "did you mean 'output_tokens_per_s'?"),
    "twice": ("concurrency,k,k\n1,2,3\n", "f:1: column 'k' appears twice"),
    "ragged": (TABLE + "1,50\n2\n", "f:3: 1 values for 2 columns"),
    "no number": (TABLE + "1,50\nfour,90\n", "f:3: concurrency: expected a number (got 'four')"),
    "not finite": (TABLE + "1,nan\n", "f:2: output_tokens_per_s: expected a number (got 'nan')"),
    "negative": (TABLE + "1,-5\n", "f:2: output_tokens_per_s: expected above 0 (got '-5')"),
    "no rate": ("concurrency,user_tokens_per_s\n4,\n", "f:2: output_tokens_per_s: needs output_tokens_per_s"),
    "contradiction": ("concurrency,user_tokens_per_s,tpot_ms\n4,100,20\n", "contradicts tpot_ms 20"),
    "per gpu": ("concurrency,output_tokens_per_s,user_tokens_per_s\n4,4000,100\n", "is one of them per GPU"),
    "other policy": ("concurrency,output_tokens_per_s,policy\n4,400,dspark\n", "unknown policy 'dspark'"),
    "fixed without k": ("concurrency,output_tokens_per_s,policy\n4,400,fixed\n", "f:2: k: missing"),
    "no k": ("concurrency,output_tokens_per_s,policy,k\n4,400,none,3\n", "f:2: k: expected 0 with policy none (got 3)"),
    "half a k": (TABLE.strip() + ",k\n4,400,1.5\n", "f:2: k: expected a whole number (got '1.5')"),
    "too good": (TABLE.strip() + ",k,accepted_length\n4,400,2,3.5\n", "accepted length 3.5 is outside 1 to 3"),
    "without": (TABLE.strip() + ",accepted_length\n4,400,2\n", "f:2: accepted_length: 2 without speculation"),
    "half a file": ('{"output_throughput": 22', "f:1: not JSON: expecting ',' delimiter"),
    "a line broken": (json.dumps(SGLANG) + '\n{"a":\n', "f:2: not JSON: expecting value"),
    "a number": ("[1, 2]", "f: expected a mapping, or a list of them (got [1, 2])"),
    "another file": ({"a": 1, "b": 2}, "f: not a result of vllm bench serve"),
    "failed run": ({"error_type": "E", "bench_overrides": {}}, "f: a benchmark that failed"),
    "open loop": (VLLM | {"max_concurrency": None, "request_rate": 4.0}, "requests were sent at a rate (4.0)"),
    "never so many": (VLLM | {"completed": 12}, "f: max_concurrency: only 12 requests were completed"),
    "none completed": (VLLM | {"completed": 0}, "f: completed: no request was completed"),
    "text for a number": (VLLM | {"mean_tpot_ms": [1]}, "f: mean_tpot_ms: expected a number (got [1])"),
    "no tpot": ({k: v for k, v in VLLM.items() if k != "mean_tpot_ms"}, "f: mean_tpot_ms: missing"),
    "in a list": ([VLLM, VLLM | {"output_throughput": 0}], "f: [1].output_throughput: expected above 0 (got 0)"),
    "rates": (
        VLLM | SPECULATED | {"spec_decode_per_position_acceptance_rates": [0.5, "x"]},
        "rates[1]: expected a number",
    ),
    "not streamed": ({k: v for k, v in AIPERF.items() if k != "inter_token_latency"}, "the run did not stream"),
    "unit": (
        AIPERF | {"inter_token_latency": {"unit": "min", "avg": 1}},
        "expected one of ns, us, ms, s, sec (got 'min')",
    ),
    "no load": (AIPERF | {"input_config": {}}, "input_config.loadgen.concurrency: missing: the load was not held"),
    "disaggregated": (INFERENCEX | {"disagg": True}, "f: disagg: prefill on other GPUs"),
    "all speculate": (INFERENCEX | {"spec_decoding": "mtp"}, "every row speculates, and neither accepted length"),
    "intvty": (INFERENCEX | {"mean_tpot": 0.5}, "f: mean_tpot: 0.5 contradicts mean_intvty 52.6"),
}


@pytest.mark.parametrize("case", BROKEN_SWEEPS)
def test_a_broken_sweep_says_what_is_wrong(case: str, here: Path) -> None:
    text, expected = BROKEN_SWEEPS[case]
    path = Path("f")
    if isinstance(text, bytes):
        path.write_bytes(text)
    else:
        put(text)
    with pytest.raises(MeasurementError) as error:
        read_sweep(path)
    assert expected in said(error)


def test_a_missing_file_and_a_folder(here: Path) -> None:
    for path, problem in ((Path("gone"), "no such file or directory"), (here, "is a directory")):
        with pytest.raises(MeasurementError) as error:
            read_sweep(path)
        assert said(error) == f"{path}: cannot read: {problem}"


def test_every_fault_of_a_file_is_told_up_to_a_dozen(here: Path) -> None:
    with pytest.raises(MeasurementError) as error:
        read_sweep(put(TABLE + "x,1\n" * 20))
    lines = said(error).splitlines()
    assert len(lines) == 13
    assert lines[-1] == "f: ... and 8 more like these"


def test_what_was_said_must_fit_the_file(here: Path) -> None:
    with pytest.raises(MeasurementError) as error:
        read_sweep(put(VLLM | SPECULATED), "none")
    assert said(error) == "f: 'none' was said on the command line; the file has k = 3"
    with pytest.raises(MeasurementError) as error:
        read_sweep(put(SGLANG | {"accept_length": 2.4}), "none")
    assert "the file has an accepted length of 2.4" in said(error)
    with pytest.raises(ValueError, match="unknown policy 'dspark'; known: none, mtp1, fixed:K"):
        read_sweep(put(VLLM), "dspark")


def test_short_and_failing_runs_are_remarked(here: Path) -> None:
    sweep = read_sweep(put(VLLM | {"completed": 64, "failed": 2}))
    assert "64 requests at 32 at once" in sweep.remarks[0]
    assert "2 requests failed" in sweep.remarks[1]


# ---------------------------------------------------------------------------------------------------------- acceptance


def test_prometheus_counters_and_their_difference(here: Path) -> None:
    path = put(METRICS)
    assert read_acceptance(path) == AcceptanceCounts(1000, (800, 600, 400), 3000)
    half = METRICS
    for count, earlier in ((" 1000.0", " 400.0"), ("3000.0", "1200.0"), ("1800.0", "600.0"), (" 800.0", " 300.0")):
        half = half.replace(count, earlier)
    half = half.replace('position="1"} 600.0', 'position="1"} 200.0').replace(
        'position="2"} 400.0', 'position="2"} 100.0'
    )
    assert read_acceptance(path, put(half, "before")) == AcceptanceCounts(600, (500, 400, 300), 1800)


def test_sglang_histograms_add_up(here: Path) -> None:
    answers = [
        {"text": "a", "meta_info": {"spec_accept_histogram": [2, 3, 5]}},
        {"spec_correct_drafts_histogram": [0, 4]},
    ]
    assert read_acceptance(put("\n".join(map(json.dumps, answers)))) == AcceptanceCounts(14, (12, 5))


def test_vllm_results_and_means_by_length(here: Path) -> None:
    counts = read_acceptance(put(VLLM | SPECULATED))
    assert isinstance(counts, AcceptanceCounts)
    assert counts.accepted == pytest.approx((24000, 18000, 12000))
    assert read_acceptance(put("k,accepted_length\n2,2.4\n1,1.8\n")) == {1: 1.8, 2: 2.4}


BROKEN_ACCEPTANCE = {
    "no speculation": ("vllm:num_requests_running 3.0\n", "was speculation on?"),
    "gauge only": (
        'sglang:spec_accept_length{a="b"} 2.5\n',
        "a mean accepted length at one draft length is one number",
    ),
    "not prometheus": (METRICS + "what is this\n", "f:11: not a line of Prometheus text (got 'what is this')"),
    "not a count": (METRICS.replace(" 800.0", " 800.5"), "expected a whole number (got '800.5')"),
    "no position": (METRICS.replace('position="1"', 'pos="1"'), "expected a label position="),
    "gap": (METRICS.replace('position="2"', 'position="5"'), "f: positions are 0, 1, 5; expected 0, 1, 2, ..."),
    "rising": (
        METRICS.replace("1800.0", "2100.0").replace("400.0", "700.0"),
        "700 accepted at draft position 3 are more",
    ),
    "more than drafts": (
        METRICS.replace("1800.0", "3000.0").replace(" 800.0", " 2000.0"),
        "are more than the 1000 drafts",
    ),
    "sum": (METRICS.replace("1800.0", "1700.0"), "add up to 1800, num_accepted_tokens is 1700"),
    "cut blocks": (METRICS.replace("3000.0", "2100.0"), "blocks were cut: 2.10 of 3 draft tokens were verified"),
    "two models": (
        METRICS.replace('model_name="m",position="2"', 'model_name="n",position="2"'),
        "several models: m, n",
    ),
    "no rates": (VLLM | {"spec_decode_acceptance_length": 2.0}, "is one number for k positions"),
    "one mean": (
        SGLANG | {"accept_length": 2.4},
        "spec_accept_histogram of the answers' meta_info",
    ),
    "nothing": ({"a": 1}, "no acceptance here"),
    "no round": ({"meta_info": {"spec_accept_histogram": [0, 0]}}, "no round with a draft token"),
    "hole": ("k,accepted_length\n1,1.8\n3,2.6\n", "f: k = 2 is missing: survival at a position is the difference"),
    "twice": ("k,accepted_length\n1,1.8\n1,1.9\n", "f:3: k: 1 appears twice"),
    "too long": ("k,accepted_length\n1,2.8\n", "f:2: accepted_length: expected at most 2 (got '2.8')"),
}


@pytest.mark.parametrize("case", BROKEN_ACCEPTANCE)
def test_broken_acceptance_says_what_is_wrong(case: str, here: Path) -> None:
    text, expected = BROKEN_ACCEPTANCE[case]
    with pytest.raises(MeasurementError) as error:
        read_acceptance(put(text))
    assert expected in said(error)


def test_a_restart_between_two_snapshots_is_seen(here: Path) -> None:
    with pytest.raises(MeasurementError) as error:
        read_acceptance(put(METRICS.replace(" 800.0", " 700.0").replace("1800.0", "1700.0")), put(METRICS, "before"))
    assert "fell from" in said(error)
    assert "the engine was restarted" in said(error)
    with pytest.raises(MeasurementError) as error:
        read_acceptance(put("k,accepted_length\n1,1.8\n"), put(METRICS, "before"))
    assert said(error) == "before: an earlier snapshot is of use with Prometheus counters only"


# ----------------------------------------------------------------------------------------------------- tables and logs


def test_a_table_of_times_takes_medians_and_sorts(here: Path) -> None:
    sizes, seconds = read_times(put("batch_tokens,step_ms\n8,3\n1,2\n8,5\n8,4\n"), "batch_tokens", "step_ms")
    assert sizes.tolist() == [1, 8]
    assert seconds.tolist() == [0.002, 0.004]
    with pytest.raises(MeasurementError) as error:
        read_times(put("batch_tokens,step_ms\n0,3\n1,0\n"), "batch_tokens", "step_ms")
    assert said(error).splitlines() == [
        "f:2: batch_tokens: expected at least 1 (got '0')",
        "f:3: step_ms: expected above 0 (got '0')",
    ]


BENCH = {
    "input_toks": 10,
    "output_toks": 5,
    "arrival_time": 1000.0,
    "queued_ts": 7.0,
    "first_token_ts": 7.5,
    "last_token_ts": 8.0,
}
RECORD = {
    "metadata": {"request_start_ns": 5_000_000_000, "request_end_ns": 7_000_000_000, "was_cancelled": False},
    "metrics": {
        "time_to_first_token": {"value": 500.0, "unit": "ms"},
        "input_sequence_length": {"value": 10, "unit": "tokens"},
        "output_sequence_length": {"value": 5, "unit": "tokens"},
    },
    "error": None,
}
DETAILED = {
    "start_times": [5.0, 6.0],
    "ttfts": [0.5, 0.0],
    "itls": [[0.5, 0.5, 0.5], []],
    "input_lens": [10, 10],
    "output_lens": [4, 0],
}


def test_logs_of_every_tool(here: Path) -> None:
    later = BENCH | {"arrival_time": 1001.0, "queued_ts": 8.5, "first_token_ts": 9.0, "last_token_ts": 9.5}
    log = read_log(put("\n".join(map(json.dumps, [later, BENCH]))))
    assert log.tool == "llmservingsim-bench"
    assert [one.arrived_s for one in log.requests] == [7.0, 8.0]  # the second queued half a second late
    failed = RECORD | {"error": {"type": "X"}, "metrics": None}
    log = read_log(put("\n".join(map(json.dumps, [RECORD, failed]))))
    (one,) = log.requests
    assert (one.arrived_s, one.first_token_s, one.last_token_s, one.output_tokens) == (5.0, 5.5, 7.0, 5)
    assert log.left_out == {"failed or cancelled": 1}
    log = read_log(put(DETAILED))
    assert (log.tool, log.requests[0].last_token_s, log.left_out) == ("vllm", 7.0, {"failed": 1})
    log = read_log(put("arrived,first_token,last_token,prompt_tokens,output_tokens\n2,3,4,5,6\n1,2,3,4,5\n"))
    assert [one.arrived_s for one in log.requests] == [1, 2]


BROKEN_LOGS = {
    "column": ("arrived,first_token,last_token,prompt_tokens\n1,2,3,4\n", "no column 'output_tokens'"),
    "order": (
        {"arrived": 2, "first_token": 1, "last_token": 3, "prompt_tokens": 1, "output_tokens": 2},
        "before arrival",
    ),
    "last": (
        {"arrived": 0, "first_token": 3, "last_token": 1, "prompt_tokens": 1, "output_tokens": 2},
        "before the first",
    ),
    "lengths": (
        {"arrived": 0, "first_token": 1, "last_token": 1, "prompt_tokens": 0, "output_tokens": 2},
        "at least 1",
    ),
    "itls": ({k: v for k, v in DETAILED.items() if k != "itls"}, "run the benchmark with --save-detailed"),
    "uneven": (DETAILED | {"ttfts": [0.5]}, "lists of different length: start_times 2, ttfts 1"),
    "none": (RECORD | {"error": {"type": "X"}}, "no request that ended well"),
    "not streamed": (RECORD | {"metrics": {}}, "the run did not stream"),
}


@pytest.mark.parametrize("case", BROKEN_LOGS)
def test_a_broken_log_says_what_is_wrong(case: str, here: Path) -> None:
    text, expected = BROKEN_LOGS[case]
    with pytest.raises(MeasurementError) as error:
        read_log(put(text))
    assert expected in said(error)
