"""``python -m analysis.validate RUNG``: print predicted, observed and error; exit 1 where a bound is missed."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.validate.rungs import RUNGS, Check, Report, Settings, claims_section, failures
from profiles.recipes.sources import Shared
from sim.errors import Fault, InputError
from sim.output import write_json

log = logging.getLogger("analysis.validate")

#: Beside the repository, wherever that is.
SHARED = Path(__file__).resolve().parents[3] / "shared"


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    rungs = "\n".join(f"  {rung.name:8} {rung.summary}" for rung in RUNGS.values())
    out = argparse.ArgumentParser(
        prog="python -m analysis.validate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Set what the simulator predicts beside what others measured. Exit code: 0 every bound holds, "
        "1 one is missed, 2 the input is at fault.",
        epilog=f"rungs:\n{rungs}\n\nexample: python -m analysis.validate paper --json paper.json",
    )
    out.add_argument("rung", metavar="RUNG", help=f"one of: {', '.join(RUNGS)}")
    out.add_argument("--out", type=Path, metavar="DIR", help="folder of the plots (default: runs/validation/RUNG)")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the checks as JSON too")
    out.add_argument("--shared", type=Path, default=SHARED, metavar="PATH", help="reference data (default: ../shared)")
    out.add_argument("--seed", type=int, default=0, metavar="N", help="of the simulated runs (default: 0)")
    out.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: all cores)"
    )
    out.add_argument("--quick", action="store_true", help="fewer loads and shorter runs, for a first look")
    out.add_argument(
        "--assume",
        choices=("shipped", "refined"),
        help="paper: hold to the bounds what the shipped profiles predict (default), or what they would with draft "
        "passes by the drafters' architecture; both are shown",
    )
    out.add_argument(
        "--minutes",
        type=float,
        metavar="X",
        help="engine: what it may take, step times included (default: 30, --quick 3); each policy meets each load once "
        "whatever it says",
    )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run a rung and print its report."""
    options = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    for key in ("seed", "jobs"):
        least = 0 if key == "seed" else 1
        if getattr(options, key) < least:
            raise InputError(Fault(f"expected at least {least} (got {getattr(options, key)})", f"--{key}"))
    if options.minutes is not None and not 0 < options.minutes < math.inf:
        raise InputError(Fault(f"expected minutes above 0 (got {options.minutes:g})", "--minutes"))
    if options.rung not in RUNGS:
        raise InputError(Fault(f"unknown rung '{options.rung}'; known: {', '.join(RUNGS)}", "RUNG"))
    for key, rung in (("assume", "paper"), ("minutes", "engine")):
        if getattr(options, key) is not None and options.rung != rung:
            raise InputError(Fault(f"has no effect on rung '{options.rung}'; it is for '{rung}'", f"--{key}"))
    if not options.shared.is_dir():
        raise InputError(Fault("no such folder; --shared names the folder of reference data", str(options.shared)))
    out = options.out or Path("runs/validation") / options.rung
    _make_folder(out)
    if options.json is not None and not options.json.parent.is_dir():
        raise InputError(Fault("no such folder", str(options.json.parent)))
    settings = Settings(
        shared=Shared(options.shared),
        out=out,
        seed=options.seed,
        jobs=options.jobs,
        quick=options.quick,
        assume=options.assume or "shipped",
        minutes=options.minutes,
    )
    report = RUNGS[options.rung].run(settings)
    print(text_of(report))
    for plot in report.plots:
        log.info("%s", plot)
    if options.json is not None:
        write_json([dataclasses.asdict(check) for check in report.checks()], options.json)
    return 1 if failures(report.checks()) else 0


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(Fault(f"cannot write: {(error.strerror or str(error)).lower()}", str(path))) from None


def text_of(report: Report) -> str:
    """Return the report as it is printed: the sections, the claims, then which bounds hold."""
    sections = (*report.sections, *([claims_section(report.claims)] if report.claims else []))
    parts = ["\n".join([section.title, "=" * len(section.title), *section.lines]) for section in sections]
    bounded = [check for check in report.checks() if check.bound is not None]
    missed = failures(bounded)
    if bounded:
        lines = [f"{len(bounded) - len(missed)} of {len(bounded)} bounds hold"]
        parts.append("\n".join([*lines, *(f"missed: {verdict(check)}" for check in missed)]))
    return "\n\n".join(parts)


def verdict(check: Check) -> str:
    """Return a check with a bound in one line."""
    error = "no prediction" if check.error is None else f"{check.error:+.3g} {check.unit}"
    pair = (
        "" if check.predicted is None or check.observed is None else f" ({check.predicted:.4g}, {check.observed:.4g})"
    )
    return f"{check.name}: {error}{pair}, bound {check.bound:.3g}"
