"""Each published format, read by its own names and unit, with the quirks that ../shared/traces/README.md lists."""

import csv
import gzip
import io
import itertools
import json
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import TraceError
from sim.workload.trace import csv_file
from sim.workload.trace.formats import FORMATS
from sim.workload.trace.trace import load_trace

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:15:51.2224671,879,55"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:01+00:00,2399,6\n"
    "2024-05-10 02:00:01.500000+02:00,76,15\n"
)
MOONCAKE = "\n".join(
    json.dumps({"timestamp": ms, "input_length": 600, "output_length": 5, "hash_ids": ids})
    for ms, ids in [(0, [0, 1]), (0, [0, 2]), (3001, [0, 3]), (3001, [0, 1]), (6000, [0, 4])]
)
BURSTGPT_1 = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,0,1087,API log\n"
    "45,GPT-4,417,276,693,Conversation log\n"
    "45,GPT-4,417,276,693,Conversation log\n"
)
BURSTGPT_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log\n"
    "19440161.0,,2,ChatGPT,36,29,65,API log\n"
)
RAGPULSE = "\n".join(
    json.dumps(
        {
            "timestamp": second,
            "input_length": 3112,
            "output_length": 192,
            "hash_ids": {"sys_prompt": [1], "history": []},
            "session_id": "a",
        }
    )
    for second in ("82", "93", "93")
)
BAILIAN = json.dumps(
    {
        "chat_id": 1,
        "parent_chat_id": -1,
        "timestamp": 61.114,
        "input_length": 40,
        "output_length": 7,
        "type": "text",
        "turn": 1,
        "hash_ids": [1, 2, 3],
    }
)
OWN = "arrived_s,prompt_tokens,output_tokens,domain,tenant\n0.0,10,5,math,a\n0.25,11,6,code,\n7,12,7,math,a\n"


def test_azure_2023_has_seven_digits_crlf_and_no_last_line_end(write):
    trace = load_trace(write("t.csv", AZURE_2023))
    assert trace.format == "azure"
    # To the seventh digit, which Python's own parser would cut off.
    assert trace.recorded_s.tolist() == [0.0, 4.314579, 4.5418771]
    assert trace.prompt_tokens.tolist() == [374, 396, 879]
    assert trace.output_tokens.tolist() == [44, 109, 55]
    assert trace.rows == {"read": 3}
    assert trace.grid_s == 0
    assert trace.caveats == (
        "this trace does not say which prompts were served from a prefix cache; every prompt is computed whole",
    )


def test_azure_2024_has_offsets_and_may_lack_a_fraction(write):
    assert load_trace(write("t.csv", AZURE_2024)).recorded_s.tolist() == [0.0, 0.99007, 1.49007]


def test_a_further_column_is_no_fault(write):
    text = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 00:00:00.009930+00:00,2,100,5\n"
    assert load_trace(write("t.csv", text)).prompt_tokens.tolist() == [100]


def test_mooncake_counts_milliseconds(write):
    trace = load_trace(write("t.jsonl", MOONCAKE))
    assert trace.format == "mooncake"
    assert trace.recorded_s.tolist() == [0.0, 0.0, 3.001, 3.001, 6.0]
    assert trace.prompt_tokens.tolist() == [600] * 5


def test_mooncake_says_what_a_prefix_cache_would_have_done(write):
    assert load_trace(write("t.jsonl", MOONCAKE)).caveats == (
        "no prefix cache is simulated: 50.0% of this trace's prompt blocks occur earlier in it and could have been "
        "served from a cache, so prefill load and TTFT are overstated",
    )


def test_mooncake_batches_are_seen_as_a_grid_and_single_rows_are_not(write):
    assert load_trace(write("t.jsonl", MOONCAKE)).grid_s == 3.0
    single = MOONCAKE.replace('"timestamp": 0', '"timestamp": 17', 1).replace("3001", "3002", 1)
    assert load_trace(write("t.jsonl", single)).grid_s == 0.0


def test_burstgpt_is_read_by_name_whatever_stands_between(write):
    first = load_trace(write("1.csv", BURSTGPT_1))
    third = load_trace(write("3.csv", BURSTGPT_3))
    assert (first.format, third.format) == ("burstgpt", "burstgpt")
    assert third.prompt_tokens.tolist() == [906, 36]
    assert third.output_tokens.tolist() == [446, 29]
    # Counted from local midnight of a first day long past: time 0 is the first row.
    assert first.recorded_s.tolist() == [0.0, 40.0, 40.0]
    assert third.recorded_s.tolist() == [0.0, 51.0]
    assert third.tenants == ("GPT-4", "ChatGPT")
    assert third.tenant.tolist() == [0, 1]
    assert first.grid_s == third.grid_s == 1.0


def test_burstgpt_failures_are_counted_and_equal_rows_are_two_requests(write):
    trace = load_trace(write("t.csv", BURSTGPT_1))
    assert trace.rows == {"read": 4, "failed_request": 1}
    assert trace.prompt_tokens.tolist() == [472, 417, 417]
    with pytest.raises(TraceError) as caught:
        load_trace(write("t.csv", BURSTGPT_1), strict=True)
    assert str(caught.value).endswith(
        "t.csv:3: Response tokens: expected a whole number of tokens from 1 to 1000000000 (got 0)"
    )


def test_the_first_row_is_time_0_even_if_it_failed(write):
    text = BURSTGPT_1.replace("472,18", "472,0")
    assert load_trace(write("t.csv", text)).recorded_s.tolist() == [40.0, 40.0]


def test_ragpulse_is_not_taken_for_mooncake(write):
    trace = load_trace(write("t.jsonl", RAGPULSE + "\n\n"))
    assert trace.format == "ragpulse"
    assert trace.recorded_s.tolist() == [82.0, 93.0, 93.0]
    assert trace.grid_s == 1.0


def test_bailian_is_not_taken_for_mooncake(write):
    trace = load_trace(write("t.jsonl", BAILIAN))
    assert trace.format == "bailian"
    assert trace.recorded_s.tolist() == [61.114]


def test_own_csv_keeps_its_zero_and_names_domains_and_tenants(write):
    trace = load_trace(write("t.csv", OWN.replace("0.0,", "2.5,", 1).replace("0.25,", "2.75,")))
    assert trace.format == "own"
    assert trace.recorded_s.tolist() == [2.5, 2.75, 7.0]
    assert trace.domains == ("math", "code")
    assert trace.domain.tolist() == [0, 1, 0]
    assert trace.tenants == ("a", "-")
    assert trace.tenant.tolist() == [0, 1, 0]


def test_own_needs_neither_domain_nor_tenant(write):
    trace = load_trace(write("t.csv", "output_tokens,arrived_s,prompt_tokens\n5,0.5,10\n"))
    assert trace.domain is None
    assert (trace.domains, trace.tenants) == ((), ("-",))
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([10], [5])


def test_own_whole_seconds_with_ties_are_coarse(write):
    head = "arrived_s,prompt_tokens,output_tokens\n"
    assert load_trace(write("t.csv", head + "0,1,1\n1,1,1\n1,1,1\n")).grid_s == 1.0
    assert load_trace(write("t.csv", head + "0,1,1\n1,1,1\n2,1,1\n")).grid_s == 0.0
    assert load_trace(write("t.csv", head + "0,1,1\n0,1,1\n2.5,1,1\n")).grid_s == 0.0


def test_where_nobody_says_a_domain_there_is_none(write):
    text = "arrived_s,prompt_tokens,output_tokens,domain,tenant\n0.5,1,1,-,\n1.75,1,1,,-\n"
    trace = load_trace(write("t.csv", text))
    assert trace.domain is None
    assert (trace.tenants, trace.tenant.tolist()) == (("-",), [0, 0])


def test_names_of_rows_that_are_left_out_are_not_named(write):
    text = "arrived_s,prompt_tokens,output_tokens,domain\n0.5,0,1,math\n1.75,1,1,code\n2,1,1,\n2.5,1,1,-\n"
    trace = load_trace(write("t.csv", text))
    assert trace.domains == ("code", "-")
    assert trace.domain.tolist() == [0, 1, 1]


def test_records_of_a_run_are_read_as_what_was_asked_for(tmp_path):
    # What came out of an overloaded run (a rejected request got nothing) is not the load that went in.
    rows = {
        "request": [0, 1, 2],
        "tenant": pa.array(["-", "-", "-"]).dictionary_encode(),
        "domain": pa.array(["math", "code", "math"]).dictionary_encode(),
        "arrived_s": [0.0, 0.0, 2.0],
        "prompt_tokens": [5, 6, 7],
        "asked_tokens": [10, 20, 30],
        "output_tokens": [10, 0, 4],
    }
    pq.write_table(pa.table(rows), tmp_path / "requests.parquet")
    trace = load_trace(tmp_path / "requests.parquet", strict=True)
    assert trace.format == "run"
    assert trace.output_tokens.tolist() == [10, 20, 30]
    assert trace.domains == ("math", "code")
    assert trace.grid_s == 0  # simulated times are exact: users who start together do


def test_own_csv_jsonl_and_parquet_say_the_same(write, tmp_path):
    rows = [
        {"arrived_s": 0.0, "prompt_tokens": 10, "output_tokens": 5, "domain": "math", "tenant": "a"},
        {"arrived_s": 0.25, "prompt_tokens": 11, "output_tokens": 6, "domain": "code", "tenant": None},
        {"arrived_s": 7.0, "prompt_tokens": 12, "output_tokens": 7, "domain": "math", "tenant": "a"},
    ]
    from_csv = load_trace(write("t.csv", OWN))
    from_jsonl = load_trace(write("t.jsonl", "\n".join(json.dumps(row) for row in rows)))
    table = pa.Table.from_pylist([{"request_id": 1, **row} for row in rows])
    pq.write_table(table, tmp_path / "plain.parquet")
    names = pa.array(["math", "code", "math"]).dictionary_encode()
    table = table.set_column(table.column_names.index("domain"), "domain", names)
    pq.write_table(table, tmp_path / "dictionary.parquet")
    for other in (from_jsonl, load_trace(tmp_path / "plain.parquet"), load_trace(tmp_path / "dictionary.parquet")):
        for name in ("recorded_s", "prompt_tokens", "output_tokens", "domain", "tenant"):
            assert getattr(other, name).tolist() == getattr(from_csv, name).tolist(), name
        assert (other.domains, other.tenants, other.rows) == (from_csv.domains, from_csv.tenants, from_csv.rows)


@pytest.mark.parametrize("text", [AZURE_2023, AZURE_2024, BURSTGPT_1, OWN, MOONCAKE, RAGPULSE])
def test_gzip_is_read_whatever_the_name(write, text):
    plain, zipped = load_trace(write("plain", text)), load_trace(write("zipped", text, zipped=True))
    assert zipped.recorded_s.tolist() == plain.recorded_s.tolist()
    assert zipped.rows == plain.rows


def test_a_byte_order_mark_is_no_part_of_the_header(write):
    assert load_trace(write("t.csv", "\ufeff" + OWN)).rows == {"read": 3}
    assert load_trace(write("t.jsonl", "\ufeff" + MOONCAKE)).rows == {"read": 5}


def test_quotes_and_blank_lines_keep_line_numbers(write):
    text = 'arrived_s,prompt_tokens,output_tokens,domain\n\n0,1,1,"a\nb"\n\n2,1,1,"c"\n'
    trace = load_trace(write("t.csv", text))
    assert trace.line.tolist() == [3, 6]
    assert trace.domains == ("a\nb", "c")


def test_small_disorder_is_counted_and_left_to_be_sorted(write):
    trace = load_trace(write("t.csv", "arrived_s,prompt_tokens,output_tokens\n1.5,1,1\n1.25,2,2\n3.5,3,3\n"))
    assert trace.rows == {"read": 3, "out_of_order": 1}
    assert trace.recorded_s.tolist() == [1.5, 1.25, 3.5]


# ------------------------------------------------------------------------------ both readers of CSV say the same


CELLS = st.sampled_from(
    [
        "1",
        "2",
        "3.0",
        "0",
        "-1",
        "2.5",
        "nan",
        "inf",
        "1e3",
        "1e400",
        " 4",
        "+5",
        ".5",
        "5.",
        "",
        "x",
        "1_0",
        "0x1",
        "٣",
    ]
)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=6), st.sampled_from(["\n", "\r\n"]))
def test_the_fast_reader_of_csv_and_the_exact_one_agree(rows, end):
    header = ["arrived_s", "prompt_tokens", "output_tokens"]
    own = next(format_ for format_ in FORMATS if format_.name == "own" and format_.container == "table")
    text = end.join(",".join(row) for row in rows)
    fast = csv_file._at_once(text.encode(), 2, header, own)
    if fast is None:
        return
    exact = csv_file._by_rows(csv.reader(io.StringIO(text, newline="")), 1, header, own)
    assert exact.faults == []
    for name in ("line", "ticks", "prompt", "output"):
        np.testing.assert_array_equal(getattr(fast, name), getattr(exact, name), err_msg=name)


def same_trace(one, other):
    for name in ("recorded_s", "prompt_tokens", "output_tokens", "tenant", "line"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    assert (one.domain is None) == (other.domain is None)
    assert one.domain is None or one.domain.tolist() == other.domain.tolist()
    assert (one.rows, one.tenants, one.domains) == (other.rows, other.tenants, other.domains)
    return True


@pytest.mark.parametrize("part_bytes", [1, 60, 200])
def test_a_csv_read_in_parts_is_the_same(write, monkeypatch, part_bytes):
    rows = "".join(f"{row / 4},{row + 1},{row % 5},{'abc'[row % 3]},{'xy'[row % 7 == 6]}\n" for row in range(40))
    rows = rows.replace("5.0,", "bad,").replace("7.25,30,4", "7.25,30,4,,")
    path = write("t.csv", "arrived_s,prompt_tokens,output_tokens,domain,tenant\n\n" + rows)
    whole = load_trace(path)
    assert whole.rows == {"read": 40, "zero_output": 7, "not_a_number": 1, "wrong_columns": 1}
    monkeypatch.setattr(csv_file, "_PART_BYTES", part_bytes)
    assert same_trace(load_trace(path), whole)


@pytest.mark.parametrize("text", [AZURE_2023, AZURE_2024, BURSTGPT_1, BURSTGPT_3, OWN])
def test_the_fast_reader_reads_what_is_well_formed(write, text, monkeypatch):
    path = write("t.csv", text)
    by_rows = csv_file._by_rows
    monkeypatch.setattr(csv_file, "_by_rows", None)  # would fail if it were called
    fast = load_trace(path)
    monkeypatch.setattr(csv_file, "_by_rows", by_rows)
    monkeypatch.setattr(csv_file, "_at_once", lambda *_: None)
    assert same_trace(fast, load_trace(path))


def test_a_well_formed_csv_is_read_fast(write, monkeypatch):
    lines = (f"{second},ChatGPT,{second % 900 + 1},{second % 700 + 1},9,API log" for second in range(40_000))
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path = write("t.csv", "\n".join(itertools.chain([head], lines)))

    def seconds_to_load():
        began = time.perf_counter()
        load_trace(path)
        return time.perf_counter() - began

    fast_s = min(seconds_to_load() for _ in range(3))
    monkeypatch.setattr(csv_file, "_at_once", lambda *_: None)
    # A ratio, since machines differ: about 15 in practice.
    assert seconds_to_load() > 3 * fast_s


# ---------------------------------------------------------------------------------------------- the files themselves


def cv(times_s):
    gaps_s = np.diff(np.sort(times_s))
    return gaps_s.std() / gaps_s.mean()


@pytest.mark.parametrize(
    "service, rows, span_s, arrivals_cv, prompt_mean, output_mean, output_min",
    [("code", 8819, 3435.9, 13.15, 2048, 27.9, 6), ("conv", 19366, 3501.7, 1.094, 1155, 211, 7)],
)
def test_azure_2023(shared_dir, service, rows, span_s, arrivals_cv, prompt_mean, output_mean, output_min):
    trace = load_trace(shared_dir / f"traces/azure-llm-2023/AzureLLMInferenceTrace_{service}.csv", strict=True)
    assert trace.rows == {"read": rows}
    assert trace.recorded_s[0] == 0
    assert trace.recorded_s[-1] == pytest.approx(span_s, abs=0.05)
    assert np.all(np.diff(trace.recorded_s) > 0)  # no two equal times, once all digits are kept
    assert cv(trace.recorded_s) == pytest.approx(arrivals_cv, abs=0.005)
    assert trace.prompt_tokens.mean() == pytest.approx(prompt_mean, abs=0.5)
    assert trace.output_tokens.mean() == pytest.approx(output_mean, abs=0.5)
    assert trace.output_tokens.min() == output_min
    assert trace.grid_s == 0


@pytest.mark.parametrize(
    "name, rows, span_s, grid_s, repeated",
    [("conversation", 12031, 3537, 3, "36.6%"), ("synthetic", 3993, 1022, 0, "64.0%")],
)
def test_mooncake(shared_dir, name, rows, span_s, grid_s, repeated):
    trace = load_trace(shared_dir / f"traces/mooncake-fast25/{name}_trace.jsonl.gz", strict=True)
    assert trace.rows == {"read": rows}
    assert trace.recorded_s[-1] == pytest.approx(span_s, abs=0.5)
    assert trace.grid_s == grid_s
    assert f"{repeated} of this trace's prompt blocks" in trace.caveats[0]


def test_burstgpt_heads(shared_dir):
    first = load_trace(shared_dir / "traces/burstgpt-sample/BurstGPT_1.head.csv", strict=True)
    third = load_trace(shared_dir / "traces/burstgpt-sample/BurstGPT_3.head.csv", strict=True)
    assert first.recorded_s.tolist() == [0, 40, 113]
    assert third.recorded_s.tolist() == [0, 51, 82, 144]
    assert third.prompt_tokens[0] == 906


def test_ragpulse_starts_again_after_a_week(shared_dir, write):
    path = shared_dir / "traces/ragpulse/0_trace.jsonl.gz"
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value) == (
        f"{path}:3801: timestamp: time falls back from 604453 s to 0 s: the clock starts anew here; replay the parts "
        "one by one, or add up their times"
    )
    week = b"\n".join(gzip.decompress(path.read_bytes()).split(b"\n")[:3800])
    assert load_trace(write("week1.jsonl", week), strict=True).rows == {"read": 3800}
