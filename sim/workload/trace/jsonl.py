"""JSONL to columns: one object a line."""

from __future__ import annotations

import json

from sim.errors import Fault, TraceError
from sim.workload.trace.columns import Columns, Gathered, RowFault, shown
from sim.workload.trace.formats import FormatName, find_format


def read_jsonl(text: str, name: FormatName, file: str) -> Columns:
    """Read the rows of a JSONL file; the first object decides which format it is."""
    gathered: Gathered | None = None
    faults: list[RowFault] = []
    for line, written in enumerate(text.split("\n"), start=1):
        if not written.strip():
            continue
        try:
            row = json.loads(written)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            faults.append(RowFault(line, None, "not_json", f"expected a JSON object (got {shown(written.strip())})"))
            continue
        if gathered is None:
            gathered = Gathered(find_format(name, "jsonl", list(row), file, line))
        gathered.add(line, row)
    if gathered is None:
        raise TraceError(Fault(faults[0].message, file, faults[0].line))
    gathered.faults += faults
    return gathered.columns()
