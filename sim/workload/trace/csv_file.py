"""CSV to columns: with Arrow where it is well formed, row by row where it is not, to name the line of every fault."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from sim.errors import Fault, TraceError
from sim.workload.trace.arrow import encoded
from sim.workload.trace.columns import Columns, Gathered, Ticks, joined
from sim.workload.trace.content import decode
from sim.workload.trace.dates import dates_ns
from sim.workload.trace.formats import Format, FormatName, find_format

#: Bytes read at once: one bad row slows down its own part of the file, not all of it.
_PART_BYTES = 2**22

#: More than any header takes; the whole text is handed to the slow reader only where that is needed.
_HEAD_CHARACTERS = 2**20


def read_csv(content: bytes, name: FormatName, file: str) -> Columns:
    """Read a CSV with a header."""
    text = decode(content, file)
    rows = _rows(text[:_HEAD_CHARACTERS])
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
    if b'"' in content or header_line != 1 or b"\n" not in content:
        # Without quotes a line is a row, and a file can be cut anywhere between them.
        rows = _rows(text)
        while rows.line_num < header_line:
            next(rows)
        return _by_rows(rows, 0, header, format_)
    parts = []
    for first_line, part in _parts(content):
        columns = _at_once(part, first_line, header, format_)
        if columns is None:
            columns = _by_rows(_rows(part.decode()), first_line - 1, header, format_)
        parts.append(columns)
    return joined(parts)


def _rows(text: str) -> Any:
    return csv.reader(io.StringIO(text, newline=""))


def _parts(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Cut what follows the first line between lines; yield the line each part begins on, and at least one part."""
    begin, line = content.index(b"\n") + 1, 2
    while True:
        end = content.find(b"\n", begin + _PART_BYTES) + 1 or len(content)
        part = content[begin:end]
        yield line, part
        line += part.count(b"\n")
        begin = end
        if begin >= len(content):
            return


def _at_once(part: bytes, first_line: int, header: list[str], format_: Format) -> Columns | None:
    """Read rows that are all well formed with Arrow, some ten times faster; None for any other."""
    import pyarrow as pa
    import pyarrow.csv

    names = [key for key in (format_.time, format_.prompt, format_.output, format_.domain, format_.tenant) if key]
    names = [key for key in names if key in header]
    try:
        table = pa.csv.read_csv(
            pa.py_buffer(part),
            read_options=pa.csv.ReadOptions(use_threads=False, column_names=header, block_size=4 * _PART_BYTES),
            parse_options=pa.csv.ParseOptions(ignore_empty_lines=False, quote_char=False),
            convert_options=pa.csv.ConvertOptions(
                include_columns=names, column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
            ),
        )
        if table.num_rows != part.count(b"\n") + (not part.endswith(b"\n")):
            return None  # carriage returns alone
        prompt = table[format_.prompt].cast(pa.float64()).to_numpy()
        output = table[format_.output].cast(pa.float64()).to_numpy()
        if format_.clock == "date":
            ticks: Ticks = dates_ns(table[format_.time].to_pylist())
        else:
            ticks = table[format_.time].cast(pa.float64()).to_numpy()
    except (pa.ArrowInvalid, ValueError):
        return None
    line = np.arange(first_line, first_line + table.num_rows)
    domain, tenant = (encoded(table[key]) if key in names else None for key in (format_.domain, format_.tenant))
    return Columns(format_, line, ticks, prompt, output, domain, tenant, read=table.num_rows)


def _by_rows(rows: Any, lines_before: int, header: list[str], format_: Format) -> Columns:
    """Read row by row, from a reader of what follows ``lines_before`` lines: quotes, blank lines, faults."""
    gathered = Gathered(format_)
    while True:
        line = lines_before + rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as fault:
            gathered.fault(line, None, "not_csv", f"not CSV: {fault}")
            continue
        if row is None:
            return gathered.columns()
        if row and len(row) != len(header):
            gathered.fault(line, None, "wrong_columns", f"expected {len(header)} columns (got {len(row)})")
        elif row:
            gathered.add(line, dict(zip(header, row, strict=True)))
