"""Columns of a trace in the making: numbers, names, the line of every row and of every fault.

A row of the wrong form (cut short, not a number, not JSON) becomes a `RowFault`; whether that is counted or fatal is
for the caller. Values that are numbers but make no sense are judged in `trace`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.workload.base import Floats, Ints
from sim.workload.trace.dates import EXPECTED_DATE, date_ns
from sim.workload.trace.formats import Format

Ticks = NDArray[np.float64] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowFault:
    """A row that cannot be used: ``reason`` is what it is counted under, the rest is for a person."""

    line: int
    key: str | None
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Texts:
    """A column of names that recur: ``index[row]`` into ``names``; an empty name where a row has none."""

    index: Ints
    names: tuple[str, ...]


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
    domain: Texts | None
    tenant: Texts | None
    read: int
    faults: list[RowFault] = field(default_factory=list)
    numbered_by_row: bool = False
    repeated_ratio: float | None = None


def joined(parts: Sequence[Columns]) -> Columns:
    """Put the parts of one file together, in order."""
    if len(parts) == 1:
        return parts[0]
    ticks: Any = np.concatenate([part.ticks for part in parts])
    return Columns(
        parts[0].format,
        np.concatenate([part.line for part in parts]),
        ticks,
        np.concatenate([part.prompt for part in parts]),
        np.concatenate([part.output for part in parts]),
        _joined_texts([part.domain for part in parts]),
        _joined_texts([part.tenant for part in parts]),
        read=sum(part.read for part in parts),
        faults=[fault for part in parts for fault in part.faults],
    )


def _joined_texts(parts: Sequence[Texts | None]) -> Texts | None:
    known: dict[str, int] = {}
    indices = []
    for part in parts:
        if part is None:
            return None
        own = np.array([known.setdefault(name, len(known)) for name in part.names], np.int64)
        indices.append(own[part.index])
    return Texts(np.concatenate(indices), tuple(known))


def _number(text: str) -> float:
    """Read a decimal number; Python's own reader would take ``1_000`` and other scripts' digits too."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return float(text)


class _BadRow(Exception):
    """The row at hand was noted as a fault."""


def shown(value: Any) -> str:
    """Show a value as it was written, cut to what fits a line."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Gathered:
    """Columns in the making, from rows that are mappings of text (CSV) or of JSON values."""

    def __init__(self, format_: Format) -> None:
        self.format = format_
        self.faults: list[RowFault] = []
        self._line: list[int] = []
        self._ticks: list[float] = []
        self._tokens: tuple[list[float], list[float]] = ([], [])
        self._texts: dict[str, dict[str, int]] = {part: {} for part in (format_.domain, format_.tenant) if part}
        self._indices: dict[str, list[int]] = {part: [] for part in self._texts}
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
        for part, text in zip(self._texts, texts, strict=True):
            known = self._texts[part]
            self._indices[part].append(known.setdefault(text, len(known)))
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
        raise self._bad(line, key, "not_a_number", f"expected a number (got {shown(value)})")

    def _time(self, line: int, row: dict[str, Any]) -> float:
        key = self.format.time
        if self.format.clock != "date":
            return self._count(line, row, key, quoted=self.format.clock == "quoted")
        value = self._value(line, row, key)
        try:
            return date_ns(value)
        except ValueError:
            raise self._bad(line, key, "not_a_time", f"{EXPECTED_DATE} (got {shown(value)})") from None

    def _prefix_ids(self, line: int, row: dict[str, Any]) -> list[int]:
        key = self.format.prefix_ids
        if key is None:
            return []
        ids = self._value(line, row, key)
        if not isinstance(ids, list) or not all(type(block) is int for block in ids):
            raise self._bad(line, key, "bad_prefix_ids", f"expected a list of whole numbers (got {shown(ids)})")
        return ids

    def _text_column(self, part: str | None) -> Texts | None:
        return Texts(np.array(self._indices[part], np.int64), tuple(self._texts[part])) if part else None

    def columns(self) -> Columns:
        """Return what was gathered."""
        is_date = self.format.clock == "date"
        return Columns(
            self.format,
            np.array(self._line, np.int64),
            np.array(self._ticks, np.int64) if is_date else np.array(self._ticks, np.float64),
            np.array(self._tokens[0], np.float64),
            np.array(self._tokens[1], np.float64),
            self._text_column(self.format.domain),
            self._text_column(self.format.tenant),
            read=len(self._line) + len(self.faults),
            faults=self.faults,
            repeated_ratio=1 - len(self._distinct) / self._blocks if self._blocks else None,
        )
