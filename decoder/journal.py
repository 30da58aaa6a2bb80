"""What a served run writes down: a row a step and a row a request, in the columns of the simulator's records.

Rows go to disk as they happen, a JSON line each, so that an engine that dies loses none; `Journal.columns` gives the
arrays that `sim.metrics` and the plots read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from decoder.errors import Fault, InputError

if TYPE_CHECKING:
    from decoder.served import Served

Columns = dict[str, NDArray[Any]]
STEPS, REQUESTS = "steps.jsonl", "requests.jsonl"


@dataclass(slots=True, kw_only=True)
class StepRow:
    """A step; the fields are `sim.records.STEP_COLUMNS`, whose comments say what they mean."""

    replica: int = 0
    steps: int = 1
    started_s: float
    ended_s: float = math.nan
    busy_s: float = math.nan
    draft_s: float = 0.0
    decoding: int
    decoding_s: float = math.nan
    prompt_tokens: int
    batch_tokens: int = 0
    drafted_tokens: int = 0
    verified_tokens: int = 0
    trimmed_tokens: int = 0
    accepted_draft_tokens: int = 0
    output_tokens: int = 0
    first_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    context_tokens: int = 0
    outside_steps: int = 0


@dataclass(slots=True, kw_only=True)
class RequestRow:
    """A request; the fields are `sim.records.REQUEST_COLUMNS`."""

    request: int
    tenant: str
    domain: str
    replica: int
    arrived_s: float
    admitted_s: float
    first_token_s: float
    last_token_s: float
    ended_s: float
    prompt_tokens: int
    asked_tokens: int
    output_tokens: int
    rounds: int
    drafted_tokens: int
    verified_tokens: int
    accepted_draft_tokens: int
    preemptions: int
    max_itl_s: float
    status: str
    reason: str


class Journal:
    """Rows of one run; with a ``folder``, on disk too. Requests are numbered in order of arrival."""

    def __init__(self, folder: Path | None = None) -> None:
        self.steps: list[StepRow] = []
        self._requests: dict[int, RequestRow] = {}
        self._open: dict[int, tuple[int, Served]] = {}
        self._arrived = 0
        self._steps_file = _append(folder, STEPS) if folder is not None else None
        self._requests_file = _append(folder, REQUESTS) if folder is not None else None

    def arrived(self, served: Served) -> None:
        """Number a request."""
        self._open[id(served)] = (self._arrived, served)
        self._arrived += 1

    def stepped(self, row: StepRow) -> None:
        """Add a step."""
        self.steps.append(row)
        _write(self._steps_file, row)

    def ended(self, served: Served) -> None:
        """Add a request that ended."""
        number, _ = self._open.pop(id(served))
        self._requests[number] = row = _request_row(number, served)
        _write(self._requests_file, row)

    def close(self) -> None:
        """Write the requests that are unfinished, and close the files."""
        for number, served in self._open.values():
            self._requests[number] = row = _request_row(number, served)
            _write(self._requests_file, row)
        self._open.clear()
        for file in (self._steps_file, self._requests_file):
            if file is not None:
                file.close()

    def columns(self) -> tuple[Columns, Columns]:
        """Return the columns of requests and of steps; those under way count as unfinished."""
        rows = dict(self._requests)
        rows.update({number: _request_row(number, served) for number, served in self._open.values()})
        return columns_of([rows[number] for number in sorted(rows)], RequestRow), columns_of(self.steps, StepRow)


def load_journal(folder: Path) -> tuple[Columns, Columns]:
    """Read what a run wrote to disk, however it ended; a line that was cut off is left out. Raises `InputError`."""
    requests = [RequestRow(**row) for row in _lines(folder / REQUESTS)]
    steps = [StepRow(**row) for row in _lines(folder / STEPS)]
    return columns_of(sorted(requests, key=lambda row: row.request), RequestRow), columns_of(steps, StepRow)


def columns_of(rows: Sequence[StepRow] | Sequence[RequestRow], kind: type[StepRow] | type[RequestRow]) -> Columns:
    """Turn rows into arrays of one length by name."""
    kinds = {"int": np.int64, "float": np.float64, "str": object}
    return {
        column.name: np.array([getattr(row, column.name) for row in rows], dtype=kinds[str(column.type)])
        for column in fields(kind)
    }


def _request_row(number: int, served: Served) -> RequestRow:
    output = len(served.output_ids)
    return RequestRow(
        request=number,
        tenant="-",
        domain=served.domain,
        replica=-1 if math.isnan(served.admitted_s) else 0,
        arrived_s=served.arrived_s,
        admitted_s=served.admitted_s,
        first_token_s=served.first_token_s,
        last_token_s=served.last_token_s,
        ended_s=served.ended_s,
        prompt_tokens=len(served.request.prompt_ids),
        asked_tokens=served.stop_after or served.request.limits.max_new_tokens,
        output_tokens=output,
        rounds=served.round_count,
        drafted_tokens=served.drafted_tokens,
        verified_tokens=served.verified_tokens,
        accepted_draft_tokens=served.accepted_draft_tokens,
        preemptions=served.preemptions,
        max_itl_s=float(served.max_itl_s) if output > 1 else math.nan,
        status=served.status,
        reason=served.reason,
    )


def _append(folder: Path, name: str) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / name).open("x", encoding="utf-8")
    except FileExistsError:
        raise InputError(Fault("exists; a run's rows are not written over", str(folder / name))) from None
    except OSError as fault:
        raise InputError(Fault(f"cannot write: {(fault.strerror or str(fault)).lower()}", str(folder))) from None


def _write(file: IO[str] | None, row: StepRow | RequestRow) -> None:
    if file is not None:
        # A line at a time: what a run did must outlive it. NaN is null.
        plain = {name: None if value != value else value for name, value in asdict(row).items()}
        file.write(json.dumps(plain) + "\n")
        file.flush()


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as fault:
        raise InputError(Fault(f"cannot read: {(fault.strerror or str(fault)).lower()}", str(path))) from None
    rows = [json.loads(line) for line in text.split("\n")[:-1]]
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]
