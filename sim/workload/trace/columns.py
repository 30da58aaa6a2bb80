"""From CSV, JSONL or Parquet to columns of numbers, with the line of every row and of every fault.

A row of the wrong form (cut short, not a number, not JSON) becomes a `RowFault`; whether that is counted or fatal is
for the caller. Values that are numbers but make no sense are judged in `trace`.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import Fault, TraceError
from sim.workload.base import Floats, Ints
from sim.workload.trace.content import PARQUET_MAGIC, decode
from sim.workload.trace.formats import Format, FormatName, find_format

Ticks = NDArray[np.float64] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowFault:
    """A row that cannot be used: ``reason`` is what it is counted under, the rest is for a person."""

    line: int
    key: str | None
    reason: str
    message: str


@dataclass(slots=True)
class Columns:
    """The well-formed rows of one file, in its order.

    ``ticks``: times in the format's unit, whole nanoseconds since 1970 for dates. ``line``: 1-based line, or row of a
    Parquet file. ``domain``, ``tenant``: None where the file has no such column. ``read``: all rows, faulty ones
    included. ``repeated_ratio``: share of prompt blocks that occurred before; None without block ids.
    """

    format: Format
    line: Ints
    ticks: Ticks
    prompt: Floats
    output: Floats
    domain: list[str] | None
    tenant: list[str] | None
    read: int
    faults: list[RowFault] = field(default_factory=list)
    numbered_by_row: bool = False
    repeated_ratio: float | None = None


def read_columns(content: bytes, name: FormatName, file: str) -> Columns:
    """Read the rows of a trace whose bytes are ``content``; raise TraceError where no row can be read at all."""
    if content.startswith(PARQUET_MAGIC):
        return _read_parquet(content, name, file)
    if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return _read_jsonl(decode(content, file), name, file)
    return _read_csv(content, name, file)


# ------------------------------------------------------------------------------------------------------------ times


_DATE = re.compile(r"\s*(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?\s*", re.ASCII)
_NOT_A_DATE = "expected a time such as '2023-11-16 18:15:46.6805900'"


def _date_ns(text: str) -> int:
    """Return nanoseconds since 1970; a time without an offset is taken as UTC. Raises ValueError."""
    match = _DATE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    # numpy, since Python's own parser keeps six digits of a second and Azure's files have seven.
    seconds = int(np.datetime64(f"{match[1]}T{match[2]}", "s").astype(np.int64))
    offset_s = 0
    if match[4]:
        offset_s = (int(match[5]) * 60 + int(match[6])) * (60 if match[4] == "+" else -60)
    return (seconds - offset_s) * 1_000_000_000 + int((match[3] or "").ljust(9, "0"))


def _dates_ns(texts: Sequence[str]) -> Ints:
    """Return nanoseconds since 1970 of many times; raises ValueError if one of them is none."""
    matches = [_DATE.fullmatch(text) for text in texts]
    if not all(matches):
        raise ValueError("not all are times")
    seconds = np.array([f"{match[1]}T{match[2]}" for match in matches if match], "datetime64[s]").astype(np.int64)
    parts = [(match[3] or "", match[4] or "", match[5] or "0", match[6] or "0") for match in matches if match]
    fraction_ns = np.array([int(digits.ljust(9, "0")) for digits, *_ in parts], np.int64)
    offset_s = np.array([(int(h) * 60 + int(m)) * (-60 if sign == "-" else 60) for _, sign, h, m in parts], np.int64)
    out: Ints = (seconds - offset_s) * 1_000_000_000 + fraction_ns
    return out


def _number(text: str) -> float:
    """Read a decimal number; Python's own reader would take ``1_000`` and other scripts' digits too."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return float(text)


# -------------------------------------------------------------------------------------------------------------- CSV


def _read_csv(content: bytes, name: FormatName, file: str) -> Columns:
    text = decode(content, file)
    rows = csv.reader(io.StringIO(text, newline=""))
    try:
        header = next((row for row in rows if row), None)
    except csv.Error as fault:
        raise TraceError(Fault(f"not CSV: {fault}", file, 1)) from None
    if header is None:
        raise TraceError(Fault("empty file; expected a trace", file))
    header_line = rows.line_num
    header = [column.strip() for column in header]
    for column in header:
        if header.count(column) > 1:
            raise TraceError(Fault(f"column '{column}' appears twice", file, header_line))
    format_ = find_format(name, "table", header, file, header_line)
    columns = _csv_at_once(content, header_line, header, format_)
    return columns if columns is not None else _csv_by_rows(rows, header, format_)


def _csv_at_once(content: bytes, header_line: int, header: list[str], format_: Format) -> Columns | None:
    """Read a CSV that is well formed all through with Arrow, some ten times faster; None for any other."""
    import pyarrow as pa
    import pyarrow.csv

    if b'"' in content or header_line != 1:
        return None
    names = [part for part in (format_.time, format_.prompt, format_.output, format_.domain, format_.tenant) if part]
    names = [part for part in names if part in header]
    try:
        table = pa.csv.read_csv(
            pa.py_buffer(content),
            read_options=pa.csv.ReadOptions(use_threads=False, column_names=header, skip_rows=1, block_size=2**24),
            parse_options=pa.csv.ParseOptions(ignore_empty_lines=False, quote_char=False),
            convert_options=pa.csv.ConvertOptions(
                include_columns=names, column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
            ),
        )
        lines = content.count(b"\n") + (not content.endswith(b"\n"))
        if table.num_rows != lines - 1:
            return None  # lone carriage returns: let the slow reader say where
        prompt = table[format_.prompt].cast(pa.float64()).to_numpy()
        output = table[format_.output].cast(pa.float64()).to_numpy()
        if format_.clock == "date":
            ticks: Ticks = _dates_ns(table[format_.time].to_pylist())
        else:
            ticks = table[format_.time].cast(pa.float64()).to_numpy()
    except (pa.ArrowInvalid, ValueError):
        return None
    line = np.arange(2, table.num_rows + 2)
    domain, tenant = (table[part].to_pylist() if part in names else None for part in (format_.domain, format_.tenant))
    return Columns(format_, line, ticks, prompt, output, domain, tenant, read=table.num_rows)


def _csv_by_rows(rows: Any, header: list[str], format_: Format) -> Columns:
    """Read a CSV row by row: quotes, blank lines, and the line of every fault."""
    gathered = _Gathered(format_)
    for line, row in _numbered(rows, gathered):
        if len(row) != len(header):
            message = f"expected {len(header)} columns (got {len(row)})"
            gathered.fault(line, None, "wrong_columns", message)
        else:
            gathered.add(line, dict(zip(header, row, strict=True)))
    return gathered.columns()


def _numbered(rows: Any, gathered: _Gathered) -> Iterator[tuple[int, list[str]]]:
    """Yield rows that are not blank with the line each begins on."""
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as fault:
            gathered.fault(line, None, "not_csv", f"not CSV: {fault}")
            continue
        if row:
            yield line, row


# ------------------------------------------------------------------------------------------------------------ JSONL


def _read_jsonl(text: str, name: FormatName, file: str) -> Columns:
    gathered: _Gathered | None = None
    faults: list[RowFault] = []
    for line, written in enumerate(text.split("\n"), start=1):
        if not written.strip():
            continue
        try:
            row = json.loads(written)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            faults.append(RowFault(line, None, "not_json", f"expected a JSON object (got {_shown(written.strip())})"))
            continue
        if gathered is None:
            gathered = _Gathered(find_format(name, "jsonl", list(row), file, line))  # the first object decides
        gathered.add(line, row)
    if gathered is None:
        raise TraceError(Fault(faults[0].message, file, faults[0].line))
    gathered.faults += faults
    return gathered.columns()


# ---------------------------------------------------------------------------------------------------------- Parquet


def _read_parquet(content: bytes, name: FormatName, file: str) -> Columns:
    import pyarrow as pa
    import pyarrow.parquet

    try:
        source = pa.parquet.ParquetFile(pa.py_buffer(content))
        format_ = find_format(name, "table", source.schema_arrow.names, file, None)
        if format_.name != "own":
            raise TraceError(Fault(f"format '{format_.name}' is read from CSV only, this is Parquet", file))
        wanted = (format_.time, format_.prompt, format_.output, format_.domain, format_.tenant)
        names = [part for part in wanted if part and part in source.schema_arrow.names]
        table = source.read(columns=names)
        faults: list[RowFault] = []
        numbers: dict[str, Floats] = {}
        whole = np.ones(table.num_rows, bool)  # rows without a gap so far: one fault a row
        for part in names[:3]:
            column = table[part]
            if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
                raise TraceError(Fault(f"expected a column of numbers (got {column.type})", file, key=part))
            numbers[part] = column.cast(pa.float64()).to_numpy()
            absent = column.is_null().to_numpy() & whole
            whole &= ~absent
            faults += [RowFault(int(row) + 1, part, "missing_value", "missing") for row in np.flatnonzero(absent)]
        texts: dict[str, list[str]] = {}
        for part in names[3:]:
            column = table[part]
            if pa.types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
                raise TraceError(Fault(f"expected a column of text (got {column.type})", file, key=part))
            texts[part] = column.fill_null("").to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError):
        raise TraceError(Fault("damaged Parquet file", file)) from None
    kept = np.flatnonzero(whole)
    time, prompt, output = (numbers[part][kept] for part in names[:3])
    domain, tenant = (
        [texts[part][row] for row in kept] if part and part in texts else None
        for part in (format_.domain, format_.tenant)
    )
    line = kept.astype(np.int64) + 1
    return Columns(format_, line, time, prompt, output, domain, tenant, table.num_rows, faults, numbered_by_row=True)


# ------------------------------------------------------------------------------------------------- rows to columns


class _BadRow(Exception):
    """The row at hand was noted as a fault."""


def _shown(value: Any) -> str:
    """Show a value as it was written, cut to what fits a line."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Gathered:
    """Columns in the making, from rows that are mappings of text (CSV) or of JSON values."""

    def __init__(self, format_: Format) -> None:
        self.format = format_
        self.faults: list[RowFault] = []
        self.read = 0
        self._line: list[int] = []
        self._ticks: list[float] = []
        self._tokens: tuple[list[float], list[float]] = ([], [])
        self._texts: dict[str, list[str]] = {part: [] for part in (format_.domain, format_.tenant) if part}
        self._blocks = 0
        self._distinct: set[int] = set()

    def fault(self, line: int, key: str | None, reason: str, message: str) -> None:
        """Note a row that cannot be used."""
        self.faults.append(RowFault(line, key, reason, message))

    def add(self, line: int, row: dict[str, Any]) -> None:
        """Add a row, or note what is wrong with it."""
        format_ = self.format
        try:
            ticks = self._time(line, row)
            prompt, output = self._count(line, row, format_.prompt), self._count(line, row, format_.output)
            texts = [str(row.get(part) or "") for part in self._texts]
            ids = self._prefix_ids(line, row)
        except _BadRow:
            return
        self._line.append(line)
        self._ticks.append(ticks)
        self._tokens[0].append(prompt)
        self._tokens[1].append(output)
        for column, text in zip(self._texts.values(), texts, strict=True):
            column.append(text)
        self._blocks += len(ids)
        self._distinct.update(ids)

    def _value(self, line: int, row: dict[str, Any], key: str) -> Any:
        if row.get(key) is None:
            raise self._bad(line, key, "missing_value", "missing")
        return row[key]

    def _bad(self, line: int, key: str, reason: str, message: str) -> _BadRow:
        self.fault(line, key, reason, message)
        return _BadRow()

    def _count(self, line: int, row: dict[str, Any], key: str, *, quoted: bool = False) -> float:
        value = self._value(line, row, key)
        is_text = isinstance(value, str)
        try:
            if is_text is (quoted or self.format.container == "table") and not isinstance(value, bool):
                return _number(value) if is_text else float(value)
        except (ValueError, TypeError, OverflowError):
            pass
        raise self._bad(line, key, "not_a_number", f"expected a number (got {_shown(value)})")

    def _time(self, line: int, row: dict[str, Any]) -> float:
        key = self.format.time
        if self.format.clock != "date":
            return self._count(line, row, key, quoted=self.format.clock == "quoted")
        value = self._value(line, row, key)
        try:
            return _date_ns(value)
        except ValueError:
            raise self._bad(line, key, "not_a_time", f"{_NOT_A_DATE} (got {_shown(value)})") from None

    def _prefix_ids(self, line: int, row: dict[str, Any]) -> list[int]:
        key = self.format.prefix_ids
        if key is None:
            return []
        ids = self._value(line, row, key)
        if not isinstance(ids, list) or not all(type(block) is int for block in ids):
            raise self._bad(line, key, "bad_prefix_ids", f"expected a list of whole numbers (got {_shown(ids)})")
        return ids

    def columns(self) -> Columns:
        """Return what was gathered."""
        is_date = self.format.clock == "date"
        return Columns(
            self.format,
            np.array(self._line, np.int64),
            np.array(self._ticks, np.int64) if is_date else np.array(self._ticks, np.float64),
            np.array(self._tokens[0], np.float64),
            np.array(self._tokens[1], np.float64),
            self._texts.get(self.format.domain or ""),
            self._texts.get(self.format.tenant or ""),
            read=len(self._line) + len(self.faults),
            faults=self.faults,
            repeated_ratio=1 - len(self._distinct) / self._blocks if self._blocks else None,
        )
