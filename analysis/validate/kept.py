"""Closed loops that were simulated, kept as a table: what is made of them can be checked without simulating them again.

A run stands in the table by its group and its place in it, with what identifies its input and with what it gave
(`Steady`). Taking runs from the table, every input is compared, and a few runs of each group are simulated all the
same: a change of the simulator, of a profile or of the reference data shows in one or the other.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from analysis.validate.closed_loop import Cell, Steady, run_cell, run_cells
from sim.errors import Fault, InputError

#: Runs of a group that are simulated again.
AGAIN = 3
#: Two machines round differently, and a fit follows.
TOLERANCE = 1e-5
#: A step a little longer is a different run where the batch sits between two sizes.
SIMULATED_TOLERANCE = 1e-3

#: What is compared as numbers; the sums are over an engine's whole tables.
INPUTS = ("load", "tokens", "output_tokens", "seed", "verify_s", "draft_s", "chances")
RESULTS = tuple(one.name for one in dataclasses.fields(Steady))
COLUMNS = ("group", "run", "policy", *INPUTS, *RESULTS)

Row = dict[str, str]


def inputs_of(cell: Cell) -> dict[str, float]:
    """Return what identifies a run, but for its policy."""
    engine = cell.engine
    tables = engine.acceptance
    return {
        "load": float(cell.requests),
        "tokens": float(cell.tokens),
        "output_tokens": float(cell.output_tokens),
        "seed": float(cell.seed),
        "verify_s": float(engine.cost.verify_s.sum()),
        "draft_s": float(engine.draft_s.sum()),
        "chances": float(tables.chance.sum() + tables.confidence.sum()) if tables is not None else 0.0,
    }


def row_of(group: str, run: int, cell: Cell, found: Steady) -> Row:
    """Return a run as a row, in nine digits."""
    numbers = {**inputs_of(cell), **dataclasses.asdict(found)}
    return {
        "group": group,
        "run": str(run),
        "policy": cell.engine.policy.kind,
        **{name: f"{value:.9g}" for name, value in numbers.items()},
    }


def steady_of(row: Row) -> Steady:
    """Return what a run gave."""
    return Steady(**{name: float(row[name]) for name in RESULTS})


@dataclass(slots=True)
class Runs:
    """Simulates cells and keeps what they gave; with ``known``, takes it from there and says what differs.

    ``rows``: by group. ``differ``: a line for each input, and each run simulated again, that is not the known one.
    """

    known: Mapping[str, Sequence[Row]] | None = None
    rows: dict[str, list[Row]] = field(default_factory=dict)
    differ: list[str] = field(default_factory=list)

    def run(self, cells: Sequence[Cell], jobs: int, what: str) -> list[Steady]:
        """Do as `run_cells` does."""
        if self.known is None:
            found = run_cells(cells, jobs, what)
            self.rows[what] = [row_of(what, run, *pair) for run, pair in enumerate(zip(cells, found, strict=True))]
            return found
        known = self.known.get(what, ())
        if len(known) != len(cells):
            raise InputError(Fault(f"{len(known)} runs are kept of the {len(cells)} that are wanted", what))
        for cell, row in zip(cells, known, strict=True):
            self._compare(row, cell.engine.policy.kind, inputs_of(cell), TOLERANCE)
        # Evenly over the group, of those whose policy is compiled: the others take seconds each.
        quick = [run for run, cell in enumerate(cells) if not cell.engine.chooses_in_python]
        again = [quick[(2 * i + 1) * len(quick) // (2 * AGAIN)] for i in range(AGAIN)] if quick else []
        for run in again:
            row, found_again = known[run], run_cell(cells[run])
            self._compare(row, row["policy"], dataclasses.asdict(found_again), SIMULATED_TOLERANCE)
        return [steady_of(row) for row in known]

    def _compare(self, row: Row, policy: str, numbers: Mapping[str, float], tolerance: float) -> None:
        where = f"{row['group']}, run {row['run']}"
        if row["policy"] != policy:
            self.differ.append(f"{where}: policy is {policy}, kept {row['policy']}")
        for name, value in numbers.items():
            if not math.isclose(value, float(row[name]), rel_tol=tolerance, abs_tol=1e-9):
                self.differ.append(f"{where}: {name} is {value:.8g}, kept {float(row[name]):.8g}")

    def save(self, path: Path) -> None:
        """Write the table by rename."""
        part = path.with_name(path.name + ".part")
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            for rows in self.rows.values():
                writer.writerows(rows)
        part.replace(path)


def load_runs(path: Path, remedy: str) -> dict[str, list[Row]]:
    """Read a table, by group; raises `InputError` naming the file and ``remedy``."""
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise InputError(Fault(f"expected the columns {', '.join(COLUMNS)}: {remedy}", str(path), line=1))
            found: dict[str, list[Row]] = {}
            for row in reader:
                for name in (*INPUTS, *RESULTS):
                    _number(row, name, path, reader.line_num, remedy)
                found.setdefault(row["group"], []).append(row)
    except OSError as fault:
        raise InputError(Fault(f"no runs to read ({fault.strerror}): {remedy}", str(path))) from None
    return found


def _number(row: Row, name: str, path: Path, line: int, remedy: str) -> None:
    try:
        float(row[name])
    except (TypeError, ValueError):
        raise InputError(
            Fault(f"expected a number (got {row[name]!r}): {remedy}", str(path), line=line, key=name)
        ) from None
