"""Requests one by one: when each came, when its first and last token left, how long it was.

- CSV or JSONL ``arrived, first_token, last_token, prompt_tokens, output_tokens`` (seconds on one clock).
- llmservingsim-bench's ``requests.jsonl``: arrivals on the wall clock, the rest on the engine's; the smallest gap
between
  arrival and queueing sets the two together.
- AIPerf's ``profile_export.jsonl``.
- ``vllm bench serve --save-detailed``: start times, TTFT and gaps of each request.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from profiles.errors import Fault
from profiles.measurements.points import LoggedRequest
from profiles.measurements.rows import (
    MeasurementError,
    Row,
    check_columns,
    collect,
    csv_rows,
    json_rows,
    looks_like_json,
    read_text,
)

COLUMNS = ("arrived", "first_token", "last_token", "prompt_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Log:
    """The requests of a file in order of arrival, what wrote it, and rows that could not be used, by reason."""

    tool: str
    requests: tuple[LoggedRequest, ...]
    left_out: dict[str, int]


def read_log(path: Path) -> Log:
    """Read a log of requests; failed ones are left out and counted. Raises `MeasurementError`."""
    text, file = read_text(path), str(path)
    left_out: dict[str, int] = {}
    if looks_like_json(text):
        rows = json_rows(text, file)
        first = rows[0]
        if first.has("queued_ts"):
            tool, requests = "llmservingsim-bench", _bench(rows)
        elif first.has("metadata"):
            good = [row for row in rows if not row.has("error") and row.text("metadata.was_cancelled") != "True"]
            left_out = {"failed or cancelled": len(rows) - len(good)} if len(good) < len(rows) else {}
            tool, requests = "aiperf", collect(good, _aiperf)
        elif first.has("itls") or first.has("ttfts"):
            tool, (requests, left_out) = "vllm", _vllm(first)
        else:
            tool, requests = "table", collect(rows, _plain)
    else:
        columns, rows = csv_rows(text, file)
        check_columns(columns, COLUMNS, (), file)
        tool, requests = "table", collect(rows, _plain)
    if not requests:
        raise MeasurementError(Fault("no request that ended well", file))
    return Log(tool, tuple(sorted(requests, key=lambda one: one.arrived_s)), left_out)


def _checked(request: LoggedRequest, row: Row) -> LoggedRequest:
    # Clocks are read in different threads: a microsecond is not an order.
    if request.first_token_s < request.arrived_s - 1e-4:
        raise row.fault(f"first token at {request.first_token_s:.6g} s, before arrival at {request.arrived_s:.6g} s")
    if request.last_token_s < request.first_token_s:
        raise row.fault(f"last token at {request.last_token_s:.6g} s, before the first, {request.first_token_s:.6g} s")
    return request


def _plain(row: Row) -> LoggedRequest:
    return _checked(
        LoggedRequest(
            row.number("arrived"),
            row.number("first_token"),
            row.number("last_token"),
            int(row.number("prompt_tokens", least=1, whole=True)),
            int(row.number("output_tokens", least=1, whole=True)),
        ),
        row,
    )


def _bench(rows: list[Row]) -> list[LoggedRequest]:
    apart = min(collect(rows, lambda row: row.number("queued_ts") - row.number("arrival_time")))

    def read(row: Row) -> LoggedRequest:
        request = LoggedRequest(
            row.number("arrival_time") + apart,
            row.number("first_token_ts"),
            row.number("last_token_ts"),
            int(row.number("input_toks", least=1, whole=True)),
            int(row.number("output_toks", least=1, whole=True)),
        )
        return _checked(request, row)

    return collect(rows, read)


def _aiperf(row: Row) -> LoggedRequest:
    if not row.has("metrics.time_to_first_token"):
        raise row.fault("missing: the run did not stream; use --streaming", "metrics.time_to_first_token")
    if (unit := row.text("metrics.time_to_first_token.unit")) != "ms":
        raise row.fault(f"expected ms (got '{unit}')", "metrics.time_to_first_token.unit")
    arrived = row.number("metadata.request_start_ns", above=0) / 1e9
    return _checked(
        LoggedRequest(
            arrived,
            arrived + row.number("metrics.time_to_first_token.value", least=0) / 1e3,
            row.number("metadata.request_end_ns", above=0) / 1e9,
            int(row.number("metrics.input_sequence_length.value", least=1, whole=True)),
            int(row.number("metrics.output_sequence_length.value", least=1, whole=True)),
        ),
        row,
    )


def _vllm(row: Row) -> tuple[list[LoggedRequest], dict[str, int]]:
    names = ("start_times", "ttfts", "input_lens", "output_lens")
    columns = {name: row.numbers(name, least=-1e300 if name == "start_times" else 0.0) for name in names}
    gaps = row.values.get("itls")
    if not isinstance(gaps, list):
        raise row.fault("missing; run the benchmark with --save-detailed", "itls")
    if len({len(gaps), *map(len, columns.values())}) > 1:
        sizes = ", ".join(f"{name} {len(values)}" for name, values in (*columns.items(), ("itls", gaps)))
        raise row.fault(f"lists of different length: {sizes}")
    requests, failed = [], 0
    for start, ttft, prompt, output, gap in zip(*(columns[name] for name in names), gaps, strict=True):
        if output < 1 or prompt < 1 or ttft <= 0 or not isinstance(gap, list):
            failed += 1
            continue
        first = start + ttft
        requests.append(LoggedRequest(start, first, first + float(sum(gap)), int(prompt), int(output)))
    return requests, {"failed": failed} if failed else {}
