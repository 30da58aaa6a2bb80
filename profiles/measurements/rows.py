"""A measurement file as rows of values asked for by name; what is wrong is said with file, line, key and value."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from profiles.errors import Fault, InputError
from profiles.reading import MAX_INPUT_BYTES, known_text, short

T = TypeVar("T")

#: Faults of one file that are shown; a file of the wrong kind has one a row.
MAX_FAULTS = 12


class MeasurementError(InputError):
    """A measurement file cannot be read, or does not hold what it should."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run or request of a file. ``prefix`` is the path of its mapping in the file, ``line`` where it stands."""

    file: str
    line: int | None
    values: Mapping[str, Any]
    prefix: str = ""

    @property
    def place(self) -> str:
        """Return file and line as messages show them."""
        return self.file if self.line is None else f"{self.file}:{self.line}"

    def fault(self, message: str, key: str | None = None) -> MeasurementError:
        """Return the error that says ``message`` about ``key``."""
        return MeasurementError(Fault(message, self.file, self.line, f"{self.prefix}{key}" if key else None))

    def has(self, key: str) -> bool:
        """Whether a value was written: neither missing nor empty nor null."""
        return self._at(key) not in (None, "")

    def _at(self, key: str) -> Any:
        value: Any = self.values
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value

    def number(
        self,
        key: str,
        *,
        above: float | None = None,
        least: float | None = None,
        most: float | None = None,
        whole: bool = False,
    ) -> float:
        """Return a number; raises `MeasurementError` where it is missing, no number, or out of bounds."""
        if not self.has(key):
            raise self.fault("missing", key)
        value = self._at(key)
        number = _as_number(value)
        if number is None:
            raise self.fault(f"expected a number (got {short(value)})", key)
        wanted = []
        if whole and not number.is_integer():
            wanted.append("a whole number")
        if above is not None and not number > above:
            wanted.append(f"above {above:g}")
        if least is not None and not number >= least:
            wanted.append(f"at least {least:g}")
        if most is not None and not number <= most:
            wanted.append(f"at most {most:g}")
        if wanted:
            raise self.fault(f"expected {' and '.join(wanted)} (got {short(value)})", key)
        return number

    def maybe(self, key: str, **bounds: Any) -> float | None:
        """Return a number, None where it is missing, empty or null."""
        return self.number(key, **bounds) if self.has(key) else None

    def text(self, key: str) -> str:
        """Return a value as text, empty where it is missing."""
        value = self._at(key)
        return "" if value is None else str(value).strip()

    def numbers(self, key: str, *, least: float = 0.0) -> list[float]:
        """Return a list of numbers."""
        value = self._at(key)
        if not isinstance(value, list):
            raise self.fault("missing" if value is None else f"expected a list (got {short(value)})", key)
        found = [_as_number(item) for item in value]
        for index, (item, number) in enumerate(zip(value, found, strict=True)):
            if number is None or number < least:
                raise self.fault(f"expected a number, at least {least:g} (got {short(item)})", f"{key}[{index}]")
        return [number for number in found if number is not None]


def _as_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def collect(rows: Iterable[Row], read: Callable[[Row], T]) -> list[T]:
    """Read every row; raises the faults of all of them at once (the first `MAX_FAULTS`)."""
    found: list[T] = []
    faults: list[Fault] = []
    for row in rows:
        try:
            found.append(read(row))
        except MeasurementError as error:
            faults += error.faults
    if len(faults) > MAX_FAULTS:
        rest = len(faults) - MAX_FAULTS
        faults = [*faults[:MAX_FAULTS], Fault(f"... and {rest} more like these", faults[0].file)]
    if faults:
        raise MeasurementError(*faults)
    return found


def read_text(path: Path) -> str:
    """Read a text file; raises `MeasurementError` where it is missing, empty, too large or not UTF-8."""
    file = str(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_INPUT_BYTES + 1)
    except OSError as fault:
        raise MeasurementError(Fault(f"cannot read: {(fault.strerror or str(fault)).lower()}", file)) from None
    if len(raw) > MAX_INPUT_BYTES:
        raise MeasurementError(Fault(f"file too large: expected at most {MAX_INPUT_BYTES} bytes", file))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        line = raw[: fault.start].count(b"\n") + 1
        raise MeasurementError(Fault(f"not UTF-8 text (byte {raw[fault.start]:#04x})", file, line)) from None
    if not text.strip():
        raise MeasurementError(Fault("empty file", file))
    return text


def csv_rows(text: str, file: str) -> tuple[list[str], list[Row]]:
    """Return the columns and rows of a CSV text; lines that begin with ``#`` are remarks.

    Raises `MeasurementError` at a column named twice, at a row of more or fewer values than columns, without rows.
    """
    numbered = [(n, line) for n, line in enumerate(text.splitlines(), start=1)]
    lines = [(n, line) for n, line in numbered if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise MeasurementError(Fault("no header", file))
    parsed = [(n, next(csv.reader(io.StringIO(line)))) for n, line in lines]
    head_line, columns = parsed[0][0], [name.strip() for name in parsed[0][1]]
    for name in columns:
        if columns.count(name) > 1:
            raise MeasurementError(Fault(f"column '{name}' appears twice", file, head_line))
    if len(parsed) == 1:
        raise MeasurementError(Fault("a header and no rows", file, head_line))
    faults = [
        Fault(f"{len(cells)} values for {len(columns)} columns", file, n)
        for n, cells in parsed[1:]
        if len(cells) != len(columns)
    ]
    if faults:
        raise MeasurementError(*faults[:MAX_FAULTS])
    rows = [
        Row(file, n, {name: cell.strip() for name, cell in zip(columns, cells, strict=True)}) for n, cells in parsed[1:]
    ]
    return columns, rows


def check_columns(columns: Sequence[str], required: Sequence[str], optional: Sequence[str], file: str) -> None:
    """Raise `MeasurementError` where a column is missing or unknown."""
    known = [*required, *optional]
    faults = [
        Fault(f"no column '{name}'; columns are {', '.join(columns)}", file, 1)
        for name in required
        if name not in columns
    ]
    for name in columns:
        if name not in known:
            faults.append(Fault(f"unknown column '{name}'; {known_text(name, known)}", file, 1))
    if faults:
        raise MeasurementError(*faults)


def json_rows(text: str, file: str) -> list[Row]:
    """Return the mappings of a JSON text: one, a list of them, or one a line (JSONL)."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as whole:
        return _jsonl_rows(text, file, whole)
    except RecursionError:
        raise MeasurementError(Fault("nested too deep", file)) from None
    if isinstance(data, dict):
        return [Row(file, None, data)]
    if isinstance(data, list) and data and all(isinstance(item, dict) for item in data):
        return [Row(file, None, item, f"[{index}].") for index, item in enumerate(data)]
    raise MeasurementError(Fault(f"expected a mapping, or a list of them (got {short(data)})", file))


def _jsonl_rows(text: str, file: str, whole: json.JSONDecodeError) -> list[Row]:
    rows: list[Row] = []
    for n, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except json.JSONDecodeError as fault:
            # One mapping over many lines, broken, or one a line of which this is broken: say the more likely.
            place, problem = (n, fault.msg) if rows else (whole.lineno, whole.msg)
            raise MeasurementError(Fault(f"not JSON: {problem.lower()}", file, place)) from None
        if not isinstance(data, dict):
            raise MeasurementError(Fault(f"expected a mapping on every line (got {short(data)})", file, n))
        rows.append(Row(file, n, data))
    return rows


def looks_like_json(text: str) -> bool:
    """Whether a text begins as JSON does."""
    return text.lstrip()[:1] in "{["
