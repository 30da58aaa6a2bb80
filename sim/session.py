"""One call of ``sim.run``: all cells of a scenario, their files and plots, and the comparison."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from profiles.reading import Document, short
from sim.build import Plant, build_engine, profile_digests
from sim.cells import Cell, CellResult, Work, prepare, run_cells
from sim.errors import ScenarioError
from sim.output import new_folder, slugs, versions, write_csv, write_json, write_parquet
from sim.report import Outcome, comparison_rows, policy_summary
from sim.scenario import Scenario, at_swept_value, label_of, resolved

log = logging.getLogger(__name__)


def run_session(
    scenario: Scenario,
    document: Document,
    out: Path,
    *,
    jobs: int,
    strict: bool,
    draw: Callable[[Outcome, Path], None],
) -> Outcome:
    """Run a scenario into the folder ``out`` and return what came out.

    Everything that can be refused is refused before the first cell runs. The folder appears by rename when all is
    done; an earlier run of the same name is replaced. ``draw`` draws the plots of an outcome into a folder.
    """
    work = Work(document, strict)
    cells = work.cells()
    # Build every engine once, so that a fault of the last policy shows before the first one runs.
    plants: list[Plant] = []
    for value in dict.fromkeys(cell.value for cell in cells):
        try:
            ready = prepare(work, value, 0)
            for index in range(len(scenario.policies)):
                build_engine(ready.scenario, ready.document, ready.plant, index, ready.traffic.domains, ready.streams)
        except ScenarioError as error:
            if scenario.sweep is None or value is None:
                raise
            faults = [at_swept_value(fault, scenario.sweep, value, document) for fault in error.faults]
            raise ScenarioError(*faults) from None
        plants.append(ready.plant)

    with new_folder(out) as folder:
        results: dict[Cell, CellResult] = {}
        total_s = scenario.horizon * len(cells)
        bar = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
        tqdm.monitor_interval = 0
        with tqdm(total=total_s, desc=scenario.name, disable=not sys.stderr.isatty(), bar_format=bar) as progress:

            def show(done_s: float) -> None:
                progress.update(done_s - progress.n)

            for result in run_cells(work, cells, jobs, show):
                _write_records(result, scenario, folder)
                results[result.cell] = result.light()
        outcome = Outcome(scenario, plants[0], out, tuple(results[cell] for cell in cells))
        for index, home in enumerate(policy_folders(scenario)):
            write_json(policy_summary(outcome, index), folder / home / "summary.json")
        write_json(_manifest(outcome, scenario), folder / "manifest.json")
        write_csv(comparison_rows(outcome), folder / "comparison.csv")
        draw(outcome, folder)
    return outcome


def _write_records(result: CellResult, scenario: Scenario, folder: Path) -> None:
    home = folder / policy_folders(scenario)[result.cell.policy]
    for part in cell_parts(scenario, result.cell):
        home = home / part
    write_parquet(result.records.requests, home / "requests.parquet")
    write_parquet(result.records.steps, home / "steps.parquet")


def policy_folders(scenario: Scenario) -> list[str]:
    """Return the folder of each policy."""
    return slugs([label_of(policy) for policy in scenario.policies])


def cell_parts(scenario: Scenario, cell: Cell) -> Sequence[str]:
    """Return the sub-folders of a cell under its policy's: swept value and replication, where there are several."""
    parts = []
    if scenario.sweep is not None and cell.value is not None:
        name = scenario.sweep.key.split(".")[-1]
        parts.append(slugs([f"{name}_{short(value)}" for value in scenario.sweep.values])[cell.value])
    if scenario.replications > 1:
        parts.append(f"replication_{cell.replication}")
    return parts


def _manifest(outcome: Outcome, scenario: Scenario) -> dict[str, object]:
    return {
        "format": "dspark-run/1",
        "scenario": resolved(scenario),
        "seed": scenario.seed,
        "profiles": profile_digests(outcome.plant),
        "provenance": {
            path: provenance.model_dump(mode="json", exclude_none=True)
            for path, provenance in outcome.plant.provenances().items()
        },
        "versions": versions(),
        "trace_rows": outcome.cells[0].trace_rows,
        "caveats": list(outcome.cells[0].caveats),
    }
