"""A recorded load as a simulator can use it: seconds, tokens, and a count of every row that could not be used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.errors import Fault, ScenarioError, TraceError
from sim.workload.base import Floats, Ints
from sim.workload.trace.columns import Columns, RowFault, Texts
from sim.workload.trace.content import PARQUET_MAGIC, decode, read_content
from sim.workload.trace.csv_file import read_csv
from sim.workload.trace.formats import FormatName
from sim.workload.trace.jsonl import read_jsonl
from sim.workload.trace.parquet import read_parquet

#: Tokens beyond this are a slip, not a prompt.
MAX_TOKENS = 1_000_000_000

#: A fall back in time beyond this is a restart of the clock, not rows that were written late.
MAX_DISORDER_S = 60.0

_MAX_FAULTS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Trace:
    """The usable rows of a trace, in the order of the file.

    ``recorded_s``: when each row arrived, in seconds from the trace's time 0 (its format says which: the earliest row,
    or the 0 of its time column). ``line``: 1-based, a row number for Parquet. ``domain``: None where the file names
    none. ``grid_s``: the resolution of its times where that is so coarse that rows share them, else 0. ``rows``: how
    many were ``read``, and how many of them were left out or ``out_of_order``, by reason. ``caveats``: what a reader of
    results must know.
    """

    file: str
    format: str
    recorded_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    domain: Ints | None
    domains: tuple[str, ...]
    tenant: Ints
    tenants: tuple[str, ...]
    line: Ints
    grid_s: float
    rows: dict[str, int]
    caveats: tuple[str, ...]


def trace_file(base_dir: Path, path: str, key: str) -> Path:
    """Return where a scenario's trace lies; raises `ScenarioError`, with its key and no file, where it is not there."""
    found = base_dir / path
    if not found.exists():
        raise ScenarioError(Fault(f"no such file (got '{path}')", key=key))
    return found


def load_trace(path: Path, format: FormatName = "auto", *, strict: bool = False) -> Trace:
    """Read a trace.

    Raises TraceError where the file as a whole is of no use: unreadable, empty, of no known format, without a usable
    row, or with a clock that starts anew. A row that cannot be used is left out and counted under its reason; with
    ``strict``, it is an error that names file, line, key and value, and so is a row out of order.
    """
    file = str(path)
    columns = _read(read_content(path), format, file)
    faults = columns.faults + _senseless(columns)
    faulty = np.isin(columns.line, np.array([fault.line for fault in faults], np.int64))
    seconds = _seconds(columns)
    timed = np.isfinite(seconds) & (seconds >= 0)  # a time that makes no sense is a bad row, not a restart
    _check_clock(columns, seconds, timed, file)
    usable = ~faulty
    late = usable & timed & (seconds < _latest_before(seconds, timed))
    if strict:
        faults += [_late(columns, int(row)) for row in np.flatnonzero(late)]
        if faults:
            raise _refusal(faults, columns, file)
    if not usable.any():
        if not faults:
            raise TraceError(Fault("no rows; expected at least one request", file))
        raise _refusal(faults, columns, file)
    rows = Counter(fault.reason for fault in sorted(faults, key=lambda fault: fault.line))
    if late.any():
        rows["out_of_order"] = int(late.sum())
    domain, domains = _indexed(columns.domain, usable)
    tenant, tenants = _indexed(columns.tenant, usable)
    return Trace(
        file=file,
        format=columns.format.name,
        recorded_s=seconds[usable],
        prompt_tokens=columns.prompt[usable].astype(np.int64),
        output_tokens=columns.output[usable].astype(np.int64),
        domain=domain,
        domains=domains,
        tenant=np.zeros(int(usable.sum()), np.int64) if tenant is None else tenant,
        tenants=tenants or ("-",),
        line=columns.line[usable],
        grid_s=_grid_s(columns, seconds[usable]),
        rows={"read": columns.read, **rows},
        caveats=_caveats(columns),
    )


def _read(content: bytes, format: FormatName, file: str) -> Columns:
    """Read a file by what it begins with; its name says nothing."""
    if content.startswith(PARQUET_MAGIC):
        return read_parquet(content, format, file)
    if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return read_jsonl(decode(content, file), format, file)
    return read_csv(content, format, file)


def _seconds(columns: Columns) -> Floats:
    """Return times in seconds from the trace's time 0; exact to the digit in the file, also for dates."""
    ticks, format_ = columns.ticks, columns.format
    if format_.origin == "first_row" and ticks.size:
        # Subtracted while still whole nanoseconds: a float of seconds since 1970 would keep six digits only.
        known = ticks[np.isfinite(ticks) & (ticks >= 0)]
        ticks = ticks - (known.min() if known.size else 0)
    return ticks / format_.ticks_per_s


def _senseless(columns: Columns) -> list[RowFault]:
    """Find rows whose numbers make no sense; one fault a row."""
    format_ = columns.format
    faults: dict[int, RowFault] = {}

    def note(wrong: NDArray[np.bool_], values: NDArray[np.generic], key: str, reason: str, expected: str) -> None:
        for row in np.flatnonzero(wrong):
            line = int(columns.line[row])
            faults.setdefault(line, RowFault(line, key, reason, f"expected {expected} (got {float(values[row]):.15g})"))

    ticks = columns.ticks
    if ticks.dtype == np.float64:
        note(~np.isfinite(ticks), ticks, format_.time, "not_a_time", "a finite number")
        note(ticks < 0, ticks, format_.time, "not_a_time", "a time of at least 0")
    whole = f"a whole number of tokens from 1 to {MAX_TOKENS}"
    for key, values, zero in (
        (format_.prompt, columns.prompt, "zero_prompt"),
        (format_.output, columns.output, format_.zero_output),
    ):
        note(values == 0, values, key, zero, whole)
        possible = (values >= 1) & (values <= MAX_TOKENS)
        possible[possible] &= values[possible] == np.rint(values[possible])
        note(~possible, values, key, "not_tokens", whole)
    return list(faults.values())


def _latest_before(seconds: Floats, timed: NDArray[np.bool_]) -> Floats:
    """Return the latest time of all rows before each."""
    known = np.where(timed, seconds, -np.inf)
    return np.maximum.accumulate(np.concatenate(([-np.inf], known[:-1])))


def _check_clock(columns: Columns, seconds: Floats, timed: NDArray[np.bool_], file: str) -> None:
    """Refuse a file whose clock starts anew: sorted, its recordings would lie over each other and multiply the rate."""
    if not timed.any():
        return
    before = _latest_before(seconds, timed)
    fall_s = np.where(timed & np.isfinite(before), before - seconds, 0.0)
    span_s = before - seconds[timed][0]
    # In a short recording half of it is a restart already, once there are rows enough to speak of a span.
    is_span = np.arange(seconds.size) >= 10
    restart = (fall_s > MAX_DISORDER_S) | (is_span & (fall_s > span_s / 2) & (fall_s > 1))
    if restart.any():
        row = int(np.argmax(restart))
        message = (
            f"time falls back from {before[row]:.9g} s to {seconds[row]:.9g} s: the clock starts anew here; "
            "replay the parts one by one, or add up their times"
        )
        raise TraceError(_located(columns, file, int(columns.line[row]), columns.format.time, message))


def _late(columns: Columns, row: int) -> RowFault:
    message = "earlier than a row before it"
    return RowFault(int(columns.line[row]), columns.format.time, "out_of_order", message)


def _located(columns: Columns, file: str, line: int, key: str | None, message: str) -> Fault:
    if columns.numbered_by_row:
        return Fault(message, file, key=f"row {line}" + (f": {key}" if key else ""))
    return Fault(message, file, line, key)


def _refusal(faults: list[RowFault], columns: Columns, file: str) -> TraceError:
    ordered = sorted(faults, key=lambda fault: fault.line)
    shown = [_located(columns, file, fault.line, fault.key, fault.message) for fault in ordered[:_MAX_FAULTS_SHOWN]]
    if len(ordered) > _MAX_FAULTS_SHOWN:
        shown.append(Fault(f"{len(ordered) - _MAX_FAULTS_SHOWN} more rows that cannot be used", file))
    return TraceError(*shown)


def _indexed(texts: Texts | None, usable: NDArray[np.bool_]) -> tuple[Ints | None, tuple[str, ...]]:
    """Return the names of usable rows as indices, in order of first mention.

    Nothing and '-' both say that nobody said; where no row says anything, it is as if there were no column.
    """
    if texts is None or set(texts.names) <= {"", "-"}:
        return None, ()
    index = texts.index[usable]
    used, first_row = np.unique(index, return_index=True)
    names = tuple(dict.fromkeys(texts.names[old] or "-" for old in used[np.argsort(first_row)]))
    new = np.zeros(len(texts.names), np.int64)
    new[used] = [names.index(texts.names[old] or "-") for old in used]
    return new[index], names


def _grid_s(columns: Columns, seconds: Floats) -> float:
    """Return the resolution of the times where rows share them because of it, else 0.

    Known for some formats. Otherwise looked for: our own format is coarse if all its times are whole seconds and some
    are shared; Mooncake's if more than a tenth of its rows share a time, and then its grid is the usual gap between two
    times (its conversation trace has batches every 3 s, give or take a millisecond; its synthetic one has single rows).
    """
    if columns.format.grid_s is not None:
        return columns.format.grid_s
    times, counts = np.unique(seconds, return_counts=True)
    shared = counts[counts > 1].sum() / seconds.size
    if columns.format.name == "own":
        return 1.0 if shared > 0 and bool(np.all(times == np.rint(times))) else 0.0
    return round(float(np.median(np.diff(times))), 2) if shared > 0.1 and times.size > 1 else 0.0


def _caveats(columns: Columns) -> tuple[str, ...]:
    caveats = columns.format.caveats
    if columns.repeated_ratio is not None:
        caveats += (
            f"no prefix cache is simulated: {columns.repeated_ratio:.1%} of this trace's prompt blocks occur earlier "
            "in it and could have been served from a cache, so prefill load and TTFT are overstated",
        )
    return caveats
