"""What a person reads whose trace cannot be used: file, line, key, what was found, what is allowed."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sim.errors import TraceError
from sim.workload.trace.trace import load_trace

OWN = "arrived_s,prompt_tokens,output_tokens\n"
TOKENS = "expected a whole number of tokens from 1 to 1000000000"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
KNOWN_TABLES = (
    "known: azure (TIMESTAMP, ContextTokens, GeneratedTokens); burstgpt (Timestamp, Request tokens, Response tokens, "
    "Model); run (arrived_s, prompt_tokens, asked_tokens); own (arrived_s, prompt_tokens, output_tokens)"
)


def refusal(path, *args, **options):
    with pytest.raises(TraceError) as caught:
        load_trace(path, *args, **options)
    return [str(fault).removeprefix(f"{path.parent}/") for fault in caught.value.faults]


# ------------------------------------------------------------------------------------------------- the whole file


def test_missing(tmp_path):
    assert refusal(tmp_path / "t.csv") == ["t.csv: cannot read: no such file or directory"]


def test_a_folder(tmp_path):
    (tmp_path / "t.csv").mkdir()
    assert refusal(tmp_path / "t.csv") == ["t.csv: cannot read: is a directory"]


@pytest.mark.parametrize(
    "content", [b"", b" \n\r\n", gzip.compress(b"", mtime=0), "\ufeff".encode(), "\ufeff\n".encode()]
)
def test_empty(write, content):
    assert refusal(write("t.csv", content)) == ["t.csv: empty file; expected a trace"]


def test_a_header_and_nothing_else(write):
    assert refusal(write("t.csv", OWN)) == ["t.csv: no rows; expected at least one request"]


def test_truncated_and_damaged_gzip(write):
    content = gzip.compress((OWN + "0,1,1\n" * 1000).encode())
    assert refusal(write("t.gz", content[:-20])) == ["t.gz: truncated gzip file"]
    assert refusal(write("t.gz", content[:30] + b"\xff" * 8 + content[38:])) == ["t.gz: damaged gzip file"]


def test_mis_encoded(write):
    assert refusal(write("t.csv", OWN.encode() + b"0,1,1\n0,\xe9,1\n")) == ["t.csv:3: not UTF-8 text (byte 0xe9)"]
    assert refusal(write("t.csv", OWN.encode("utf-16"))) == ["t.csv:1: not UTF-8 text (byte 0xff)"]


def test_unknown_header(write):
    path = write("t.csv", "time,prompt,output\n1,2,3\n")
    assert refusal(path) == [f"t.csv:1: unknown columns: time, prompt, output; {KNOWN_TABLES}"]


def test_a_header_in_milliseconds_is_not_guessed_at(write):
    path = write("t.csv", "arrived_ms,prompt_tokens,output_tokens\n1,2,3\n")
    assert refusal(path) == [f"t.csv:1: unknown columns: arrived_ms, prompt_tokens, output_tokens; {KNOWN_TABLES}"]


def test_a_file_without_header(write):
    path = write("t.csv", "0.5,10,20\n0.7,10,20\n")
    assert refusal(path) == [f"t.csv:1: unknown columns: 0.5, 10, 20; {KNOWN_TABLES}"]


def test_a_column_twice(write):
    path = write("t.csv", "arrived_s,prompt_tokens,prompt_tokens,output_tokens\n0,1,2,3\n")
    assert refusal(path) == ["t.csv:1: column 'prompt_tokens' appears twice"]


def test_unknown_fields(write):
    path = write("t.jsonl", '{"arrival_ms": 0.0, "input_length": 906, "output_length": 446}')
    assert refusal(path) == [
        "t.jsonl:1: unknown fields: arrival_ms, input_length, output_length; known: bailian (timestamp, input_length, "
        "output_length, hash_ids, chat_id, parent_chat_id); ragpulse (timestamp, input_length, output_length, "
        "hash_ids, session_id); mooncake (timestamp, input_length, output_length, hash_ids); own (arrived_s, "
        "prompt_tokens, output_tokens)"
    ]


def test_mooncake_with_a_further_field_may_have_another_unit(write):
    text = json.dumps({"timestamp": 1, "input_length": 9, "output_length": 9, "hash_ids": [1], "turn": 1})
    assert "unknown fields" in refusal(write("t.jsonl", text))[0]
    assert load_trace(write("t.jsonl", text), "mooncake").recorded_s.tolist() == [0.001]


def test_a_format_that_was_asked_for_and_is_not_there(write):
    assert refusal(write("t.csv", OWN + "0,1,1\n"), "azure") == [
        "t.csv:1: not of format 'azure': missing columns TIMESTAMP, ContextTokens, GeneratedTokens "
        "(got arrived_s, prompt_tokens, output_tokens)"
    ]
    assert refusal(write("t.csv", OWN + "0,1,1\n"), "mooncake") == [
        "t.csv: format 'mooncake' is not a CSV or Parquet file, which this is; formats of such: azure, burstgpt, run, "
        "own"
    ]


def test_damaged_parquet(write, tmp_path):
    pq.write_table(pa.table({"arrived_s": [0.0], "prompt_tokens": [1], "output_tokens": [1]}), tmp_path / "good")
    content = (tmp_path / "good").read_bytes()
    assert refusal(write("t.parquet", content[:-8])) == ["t.parquet: damaged Parquet file"]
    assert refusal(write("t.parquet", b"PAR1")) == ["t.parquet: damaged Parquet file"]


def test_parquet_of_another_type_or_format(tmp_path):
    pq.write_table(pa.table({"arrived_s": ["0"], "prompt_tokens": [1], "output_tokens": [1]}), tmp_path / "t")
    assert refusal(tmp_path / "t") == ["t: arrived_s: expected a column of numbers (got string)"]
    table = pa.table({"arrived_s": [0.0], "prompt_tokens": [1], "output_tokens": [1], "domain": [7]})
    pq.write_table(table, tmp_path / "t")
    assert refusal(tmp_path / "t") == ["t: domain: expected a column of text (got int64)"]
    pq.write_table(pa.table({"TIMESTAMP": ["x"], "ContextTokens": [1], "GeneratedTokens": [1]}), tmp_path / "t")
    assert refusal(tmp_path / "t") == ["t: format 'azure' is read from CSV only, this is Parquet"]
    pq.write_table(pa.table({"a": [1]}), tmp_path / "t")
    assert refusal(tmp_path / "t") == [f"t: unknown columns: a; {KNOWN_TABLES}"]


def test_a_clock_that_starts_anew(write):
    long = OWN + "0,1,1\n100,1,1\n39.5,1,1\n"
    assert refusal(write("t.csv", long)) == [
        "t.csv:4: arrived_s: time falls back from 100 s to 39.5 s: the clock starts anew here; replay the parts one by "
        "one, or add up their times"
    ]
    # A minute is disorder; a short recording that is repeated is not.
    assert load_trace(write("t.csv", long.replace("39.5", "40"))).rows == {"read": 3, "out_of_order": 1}
    short = OWN + 2 * "".join(f"{row * 1.25},1,1\n" for row in range(12))
    assert refusal(write("t.csv", short)) == [
        "t.csv:14: arrived_s: time falls back from 13.75 s to 0 s: the clock starts anew here; replay the parts one by "
        "one, or add up their times"
    ]


# ---------------------------------------------------------------------------------------------------------- rows


ROWS = [
    (OWN, "0,1", "t.csv:2: expected 3 columns (got 2)", "wrong_columns"),
    (OWN, "0,1,1,1", "t.csv:2: expected 3 columns (got 4)", "wrong_columns"),
    (OWN, "zero,1,1", "t.csv:2: arrived_s: expected a number (got 'zero')", "not_a_number"),
    (OWN, "0,,1", "t.csv:2: prompt_tokens: expected a number (got '')", "not_a_number"),
    (OWN, "0,1_000,1", "t.csv:2: prompt_tokens: expected a number (got '1_000')", "not_a_number"),
    (OWN, "0,1,0x10", "t.csv:2: output_tokens: expected a number (got '0x10')", "not_a_number"),
    (OWN, "nan,1,1", "t.csv:2: arrived_s: expected a finite number (got nan)", "not_a_time"),
    (OWN, "inf,1,1", "t.csv:2: arrived_s: expected a finite number (got inf)", "not_a_time"),
    (OWN, "-0.5,1,1", "t.csv:2: arrived_s: expected a time of at least 0 (got -0.5)", "not_a_time"),
    (OWN, "0,nan,1", f"t.csv:2: prompt_tokens: {TOKENS} (got nan)", "not_tokens"),
    (OWN, "0,0,1", f"t.csv:2: prompt_tokens: {TOKENS} (got 0)", "zero_prompt"),
    (OWN, "0,1,0", f"t.csv:2: output_tokens: {TOKENS} (got 0)", "zero_output"),
    (OWN, "0,-3,1", f"t.csv:2: prompt_tokens: {TOKENS} (got -3)", "not_tokens"),
    (OWN, "0,1,2.5", f"t.csv:2: output_tokens: {TOKENS} (got 2.5)", "not_tokens"),
    (OWN, "0,1e12,1", f"t.csv:2: prompt_tokens: {TOKENS} (got 1000000000000)", "not_tokens"),
    (
        AZURE,
        "16/11/2023 18:15,1,1",
        "t.csv:2: TIMESTAMP: expected a time such as '2023-11-16 18:15:46.6805900' (got '16/11/2023 18:15')",
        "not_a_time",
    ),
    (
        AZURE,
        "2023-13-16 18:15:46.0,1,1",
        "t.csv:2: TIMESTAMP: expected a time such as '2023-11-16 18:15:46.6805900' (got '2023-13-16 18:15:46.0')",
        "not_a_time",
    ),
]


@pytest.mark.parametrize("header, row, message, reason", ROWS)
def test_a_bad_row_is_counted_by_reason_and_strict_refuses_it(write, header, row, message, reason):
    good = "7,1,1\n" if header == OWN else "2023-11-16 18:15:46.0,1,1\n"
    assert load_trace(write("t.csv", header + row + "\n" + good)).rows == {"read": 2, reason: 1}
    assert refusal(write("t.csv", header + row + "\n" + good), strict=True) == [message]
    # Nothing but such rows is no trace, whatever was asked.
    assert refusal(write("t.csv", header + row + "\n")) == [message]


JSON_ROWS = [
    ('{"arrived_s": 0', "t.jsonl:2: expected a JSON object (got '{\"arrived_s\": 0')", "not_json"),
    ("[1, 2]", "t.jsonl:2: expected a JSON object (got '[1, 2]')", "not_json"),
    ("[" * 5000, f"t.jsonl:2: expected a JSON object (got '{'[' * 56}...)", "not_json"),
    ('{"arrived_s": 0, "prompt_tokens": 1}', "t.jsonl:2: output_tokens: missing", "missing_value"),
    (
        '{"arrived_s": 0, "prompt_tokens": "1", "output_tokens": 1}',
        "t.jsonl:2: prompt_tokens: expected a number (got '1')",
        "not_a_number",
    ),
    (
        '{"arrived_s": 0, "prompt_tokens": true, "output_tokens": 1}',
        "t.jsonl:2: prompt_tokens: expected a number (got true)",
        "not_a_number",
    ),
    (
        '{"arrived_s": NaN, "prompt_tokens": 1, "output_tokens": 1}',
        "t.jsonl:2: arrived_s: expected a finite number (got nan)",
        "not_a_time",
    ),
    (
        '{"arrived_s": 0, "prompt_tokens": 1, "output_tokens": null}',
        "t.jsonl:2: output_tokens: missing",
        "missing_value",
    ),
    (
        f'{{"arrived_s": 0, "prompt_tokens": 1, "output_tokens": 1{"0" * 400}}}',
        f"t.jsonl:2: output_tokens: expected a number (got 1{'0' * 56}...)",
        "not_a_number",
    ),
]


@pytest.mark.parametrize("row, message, reason", JSON_ROWS)
def test_a_bad_object_is_counted_by_reason_and_strict_refuses_it(write, row, message, reason):
    good = '{"arrived_s": 7, "prompt_tokens": 1, "output_tokens": 1}\n'
    path = write("t.jsonl", good + row + "\n")
    assert load_trace(path).rows == {"read": 2, reason: 1}
    assert refusal(path, strict=True) == [message]


def test_mooncake_needs_its_block_ids(write):
    row = '{"timestamp": 1, "input_length": 9, "output_length": 9, "hash_ids": [0]}\n'
    path = write("t.jsonl", row + row.replace("[0]", '{"a": [1]}') + row.replace("[0]", "[[0]]"))
    assert load_trace(path).rows == {"read": 3, "bad_prefix_ids": 2}
    assert refusal(path, strict=True) == [
        't.jsonl:2: hash_ids: expected a list of whole numbers (got {"a": [1]})',
        "t.jsonl:3: hash_ids: expected a list of whole numbers (got [[0]])",
    ]


def test_a_file_cut_off_in_the_middle_of_a_row(write):
    path = write("t.csv", OWN + "0,1,1\n1.5,20,3\n2.5,2")
    assert load_trace(path).rows == {"read": 3, "wrong_columns": 1}
    assert refusal(path, strict=True) == ["t.csv:4: expected 3 columns (got 2)"]


def test_parquet_names_rows_in_place_of_lines(tmp_path):
    table = pa.table({"arrived_s": [0.0, None, 2.5], "prompt_tokens": [1, None, 0], "output_tokens": [1, 1, 1]})
    pq.write_table(table, tmp_path / "t")
    assert load_trace(tmp_path / "t").rows == {"read": 3, "missing_value": 1, "zero_prompt": 1}
    assert refusal(tmp_path / "t", strict=True) == [
        "t: row 2: arrived_s: missing",
        f"t: row 3: prompt_tokens: {TOKENS} (got 0)",
    ]


def test_disorder_is_refused_by_strict(write):
    path = write("t.csv", OWN + "5.5,1,1\n5.25,1,1\n")
    assert refusal(path, strict=True) == ["t.csv:3: arrived_s: earlier than a row before it"]


def test_a_time_below_0_neither_restarts_the_clock_nor_moves_its_zero(write):
    path = write("t.csv", OWN + "100,1,1\n-5,1,1\n100.5,1,1\n")
    assert load_trace(path).rows == {"read": 3, "not_a_time": 1}
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    trace = load_trace(write("b.csv", head + "-5,m,1,1,2,x\n100,m,1,1,2,x\n140,m,1,1,2,x\n"))
    assert trace.recorded_s.tolist() == [0, 40]
    assert trace.rows == {"read": 3, "not_a_time": 1}


def test_many_faults_are_shown_in_order_and_cut(write):
    path = write("t.csv", OWN + "0,1,1\n" + "0,0,1\n0,x,1\n" * 10)
    faults = refusal(path, strict=True)
    assert faults[0] == f"t.csv:3: prompt_tokens: {TOKENS} (got 0)"
    assert faults[1] == "t.csv:4: prompt_tokens: expected a number (got 'x')"
    assert faults[10] == "t.csv: 10 more rows that cannot be used"
    assert len(faults) == 11


def test_one_row_with_two_faults_is_one_row(write):
    path = write("t.csv", OWN + "0,1,1\n-1,0,0\n")
    assert load_trace(path).rows == {"read": 2, "not_a_time": 1}
