"""One call of ``sim.sweep``: every cell of a scenario, kept as it ends; then one table of all, and plots."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from profiles.reading import Document
from sim.axes import label_at, values_at
from sim.cell_store import FORMAT, MANIFEST, CellStore, dependences, open_store
from sim.cells import Cell, CellResult, Work, check_engines
from sim.executors import Done, Executor, Failure, progress_bar
from sim.metrics import metric_names
from sim.output import slugs, write_csv, write_json, write_rows
from sim.report import Outcome, comparison_rows
from sim.scenario import Scenario, at_point, label_of, parsed, resolved

_FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep gave: its outcome, in which failed cells have metrics of None, what failed, and what it took.

    ``reused``: cells that an earlier call had finished. ``runs``: those of this call. ``wall_s``: of all of them.
    """

    outcome: Outcome
    failed: dict[Cell, Failure]
    reused: int
    runs: tuple[Done, ...]
    wall_s: float

    def timing(self) -> dict[str, Any]:
        """Return what the cells took: ``speed_up`` is processor seconds in cells per second of waiting."""
        cpu_s = sum(done.cpu_s for done in self.runs)
        return {
            "cells_run": len(self.runs),
            "cells_reused": self.reused,
            "wall_s": self.wall_s,
            "cells_wall_s": sum(done.wall_s for done in self.runs),
            "cells_cpu_s": cpu_s,
            "speed_up": cpu_s / self.wall_s if self.runs else None,
            "runs": [
                cell_names(self.outcome.scenario, done.cell) | {"wall_s": done.wall_s, "cpu_s": done.cpu_s}
                for done in self.runs
            ],
        }


def run_sweep(
    scenario: Scenario,
    document: Document,
    out: Path,
    executor: Executor,
    *,
    strict: bool,
    resume: bool,
    load_draw: Callable[[], Callable[[Outcome, Path], None]],
) -> Swept:
    """Run all cells of a scenario that ``out`` does not hold yet, then write what they gave together.

    Everything that can be refused is refused before the first cell runs. Each cell's result appears under ``out`` by
    rename as it ends, so that an interrupted sweep can be resumed. A cell that fails is reported and stops nothing.
    ``load_draw`` returns what draws the plots of an outcome into a folder; it is called aside, while cells run.
    """
    work = Work(document, strict)
    cells = work.cells()
    points = list(dict.fromkeys(cell.point for cell in cells))
    plants = check_engines(work, points)
    asked = dependences(work, dict(zip(points, plants, strict=True)))
    runs: list[Done] = []
    failed: dict[Cell, Failure] = {}
    with executor, ThreadPoolExecutor(1) as aside:
        store = open_store(out, asked, resume=resume)
        shutil.rmtree(out / _FAILED, ignore_errors=True)
        results = {cell: result for cell in cells if (result := store.load(cell)) is not None}
        reused = len(results)
        missing = [cell for cell in cells if cell not in results]
        loading = aside.submit(load_draw)
        began_s = time.perf_counter()
        try:
            with progress_bar(scenario.name, len(cells), reused) as show:
                for done in executor.run(work, missing, show):
                    runs.append(done)
                    if done.failure is None:
                        store.save(done.unwrapped())
                    else:
                        failed[done.cell] = done.failure
                        _report_failure(work, done.cell, done.failure, out)
        except KeyboardInterrupt:
            kept = reused + len(runs) - len(failed)
            print(f"{kept} of {len(cells)} cells are finished; --resume goes on from there", file=sys.stderr)
            raise
        wall_s = time.perf_counter() - began_s
    outcome = Outcome(scenario, plants[0], out, tuple(_loaded(store, cell, cell in failed) for cell in cells))
    write_rows([_row(outcome, one, failed) for one in outcome.cells], out / "cells.parquet")
    write_csv(comparison_rows(outcome), out / "comparison.csv")
    loading.result()(outcome, out)
    write_json(_manifest(outcome, store, asked, failed), out / MANIFEST)
    return Swept(outcome, failed, reused, tuple(sorted(runs, key=lambda done: cells.index(done.cell))), wall_s)


def cell_names(scenario: Scenario, cell: Cell) -> dict[str, Any]:
    """Return what a cell is: its policy, each varied key's value, its replication."""
    values = () if cell.point is None else values_at(scenario.axes, cell.point)
    varied = {axis.key: value for axis, value in zip(scenario.axes, values, strict=cell.point is not None)}
    return {"policy": label_of(scenario.policies[cell.policy]), **varied, "replication": cell.replication}


def _loaded(store: CellStore, cell: Cell, has_failed: bool) -> CellResult:
    """Return a cell's result as it was written, so that it is the same whoever ran it; all None where it failed."""
    result = None if has_failed else store.load(cell)
    return result or CellResult(cell, dict.fromkeys(metric_names()), {}, {}, ())


def _row(outcome: Outcome, one: CellResult, failed: dict[Cell, Failure]) -> dict[str, Any]:
    scenario = outcome.scenario
    names = cell_names(scenario, one.cell)
    failure = failed.get(one.cell)
    return {
        **names,
        "upper_bound": scenario.policies[one.cell.policy].sees_outcome,
        **one.metrics,
        "failure": None if failure is None else failure.message,
    }


def _report_failure(work: Work, cell: Cell, failure: Failure, out: Path) -> None:
    """Say at once which cell failed, and keep the scenario that it had."""
    scenario = parsed(work.document)
    names = cell_names(scenario, cell)
    said = ", ".join(f"{key} {value}" if key == "replication" else f"{key}={value}" for key, value in names.items())
    point = "" if cell.point is None else label_at(scenario.axes, cell.point) + " "
    (name,) = slugs([f"{names['policy']} {point}replication {cell.replication}"])
    path = out / _FAILED / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    document = work.document if cell.point is None else at_point(work.document, scenario.axes, cell.point)
    own = resolved(parsed(document))
    own["policies"] = [own["policies"][cell.policy]]
    write_json(
        {"cell": names, "message": failure.message, "traceback": failure.detail.splitlines(), "scenario": own}, path
    )
    tqdm.write(f"failed: {said}: {failure.message} (its scenario: {path})", file=sys.stderr)


def _manifest(outcome: Outcome, store: CellStore, asked: dict[str, Any], failed: dict[Cell, Failure]) -> dict[str, Any]:
    cells = outcome.cells
    return {
        "format": FORMAT,
        "digest": store.digest,
        **asked,
        "provenance": {
            path: provenance.model_dump(mode="json", exclude_none=True)
            for path, provenance in outcome.plant.provenances().items()
        },
        "cells": len(cells),
        "failed": [
            cell_names(outcome.scenario, cell) | {"message": failed[cell].message}
            for cell in (one.cell for one in cells)
            if cell in failed
        ],
        "caveats": list(dict.fromkeys(caveat for one in cells for caveat in one.caveats)),
    }
