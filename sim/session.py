"""One call of ``sim.run``: all cells of a scenario, their files and plots, and the comparison."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from profiles.reading import Document
from sim.build import profile_digests
from sim.cells import Cell, CellResult, Work, check_engines, policy_folders
from sim.executors import LocalExecutor, progress_bar
from sim.output import new_folder, versions, write_csv, write_json
from sim.report import Outcome, comparison_rows, policy_summary
from sim.scenario import Scenario, resolved

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
    plants = check_engines(work, dict.fromkeys(cell.point for cell in cells))

    with new_folder(out) as folder:
        results: dict[Cell, CellResult] = {}
        with progress_bar(scenario.name, len(cells)) as show, LocalExecutor(jobs) as executor:
            for done in executor.run(replace(work, records=folder), cells, show):
                results[done.cell] = done.unwrapped()
        outcome = Outcome(scenario, plants[0], out, tuple(results[cell] for cell in cells))
        for index, home in enumerate(policy_folders(scenario)):
            write_json(policy_summary(outcome, index), folder / home / "summary.json")
        write_json(_manifest(outcome, scenario), folder / "manifest.json")
        write_csv(comparison_rows(outcome), folder / "comparison.csv")
        draw(outcome, folder)
    return outcome


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
