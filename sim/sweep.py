"""Run a scenario over a grid of loads, sizes or any other keys, on all cores or a Ray cluster.

python -m sim.sweep scenarios/flash_peak.yaml --vary load=0.2..1.4:7 --policies none,mtp1,dspark --replications 8
python -m sim.sweep scenarios/flash_peak.yaml --vary load=0.5..2:4:log --vary fleet.replicas=4,8 --resume

--vary KEY=A,B,C sets a key to each value; KEY=A..B:N to N values from A to B, evenly spaced, or with :log in equal
ratios. KEY is any key of the scenario, or `load`: a factor on the offered load, whatever the kind of arrivals (rates; a
replay's speed; a closed loop's users). Several --vary make a grid, in place of the scenario's own sweep.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from profiles.errors import exit_code_of
from sim.options import add_executor_options, add_scenario_options, check_json, executor_of, save_json, scenario_of

if TYPE_CHECKING:
    from sim.report import Outcome


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    out = argparse.ArgumentParser(
        prog="python -m sim.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("scenario", metavar="SCENARIO", help="a scenario file; see scenarios/")
    out.add_argument("--vary", action="append", default=[], metavar="KEY=VALUES", help="an axis of the grid; see above")
    add_scenario_options(out)
    add_executor_options(out)
    out.add_argument("--resume", action="store_true", help="go on with the sweep in --out, keeping what it finished")
    out.add_argument("--out", metavar="DIR", help="where results go (default: runs/<name>-sweep)")
    out.add_argument("--json", metavar="FILE", help="write the comparison, and what each cell took, as JSON too")
    return out


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 1 if a cell failed."""
    options = parser().parse_args(argv)
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    executor = executor_of(options)
    scenario, document = scenario_of(options, options.vary)
    out = Path("runs") / f"{scenario.name}-sweep" if options.out is None else Path(options.out)
    if options.json is not None:
        check_json(Path(options.json), out)
    from sim.report import comparison_rows, report_text
    from sim.sweeping import run_sweep

    swept = run_sweep(
        scenario, document, out, executor, strict=options.strict, resume=options.resume, load_draw=_load_draw
    )
    print(report_text(swept.outcome, "cells.parquet, comparison.csv, manifest.json"))
    if swept.failed:
        print(f"failed:  {len(swept.failed)} of {len(swept.outcome.cells)} cells; see {out}/failed/")
    if options.json is not None:
        timing = {"executor": options.executor, "jobs": options.jobs, **swept.timing()}
        data = {"scenario": scenario.name, "comparison": comparison_rows(swept.outcome), "timing": timing}
        save_json(data, Path(options.json))
    return 1 if swept.failed else 0


def _load_draw() -> Callable[[Outcome, Path], None]:
    from analysis.session import draw_frontiers

    return draw_frontiers


if __name__ == "__main__":
    sys.exit(main())
