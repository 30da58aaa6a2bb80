"""Write ``docs/validation.md`` from what the rungs print: ``python -m analysis.validate.document``.

A rung's page is its report as printed, with the command, the date and the versions, and its checks beside it as JSON
(``docs/validation/RUNG.json``). ``--check`` runs the rungs again and compares: exit 1 where a number that the code
gives now is not the one committed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from analysis.validate.command import SHARED, text_of
from analysis.validate.rungs import RUNGS, Report, Settings
from profiles.recipes.sources import Shared
from sim.errors import Fault, InputError, exit_code_of
from sim.output import versions, write_json

log = logging.getLogger("analysis.validate")

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = "validation.md"
#: Rungs that give the same numbers on every machine, and so can be checked.
REPRODUCIBLE = ("paper", "engines")
#: Two machines round differently, and a fit follows.
TOLERANCE = 1e-3


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    out = argparse.ArgumentParser(
        prog="python -m analysis.validate.document",
        description="Run rungs and write docs/validation.md, or check what is committed. Exit code: 0 done, or the "
        "numbers are the same; 1 they are not; 2 the input is at fault.",
        epilog="example: python -m analysis.validate.document engines",
    )
    out.add_argument("rungs", nargs="*", metavar="RUNG", help=f"which to run (default: {' '.join(REPRODUCIBLE)})")
    out.add_argument("--check", action="store_true", help="compare with the committed numbers, write nothing")
    out.add_argument("--docs", type=Path, default=DOCS, metavar="DIR", help="where the page lies (default: docs)")
    out.add_argument("--shared", type=Path, default=SHARED, metavar="PATH", help="reference data (default: ../shared)")
    out.add_argument("--seed", type=int, default=0, metavar="N", help="of the simulated runs (default: 0)")
    out.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: all)")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run, then write or compare."""
    options = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    names = options.rungs or list(REPRODUCIBLE)
    for name in names:
        if name not in RUNGS:
            raise InputError(Fault(f"unknown rung '{name}'; known: {', '.join(RUNGS)}", "RUNG"))
    for folder in (options.docs, options.shared):
        if not folder.is_dir():
            raise InputError(Fault("no such folder", str(folder)))
    differ: list[str] = []
    for name in names:
        out = Path("runs/validation") / name
        out.mkdir(parents=True, exist_ok=True)
        settings = Settings(shared=Shared(options.shared), out=out, seed=options.seed, jobs=options.jobs)
        report = RUNGS[name].run(settings)
        if options.check:
            differ += [f"{name}: {line}" for line in differences(committed(options.docs, name), checks_of(report))]
        else:
            write_part(options.docs, name, report, options.seed)
    if options.check:
        print("\n".join(differ) if differ else f"{', '.join(names)}: the numbers are those committed")
        return 1 if differ else 0
    write_page(options.docs)
    return 0


def checks_of(report: Report) -> list[dict[str, Any]]:
    """Return a report's checks as plain data."""
    return [dataclasses.asdict(check) for check in report.checks()]


def committed(docs: Path, name: str) -> list[dict[str, Any]]:
    """Return the checks committed for a rung."""
    path = docs / "validation" / f"{name}.json"
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["checks"])
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise InputError(
            Fault(f"no checks to read ({fault}): python -m analysis.validate.document {name}", str(path))
        ) from None


def differences(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each check that came, went, or whose numbers or verdict are others."""
    old, new = ({check["name"]: check for check in checks} for checks in (before, now))
    lines = [f"{name}: not committed" for name in new if name not in old]
    lines += [f"{name}: committed, but no longer reported" for name in old if name not in new]
    for name in old.keys() & new.keys():
        for key in ("predicted", "observed", "error", "bound", "holds"):
            if not _same(old[name][key], new[name][key]):
                lines.append(f"{name}: {key} is {new[name][key]}, committed {old[name][key]}")
    return sorted(lines)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(a == b)


def write_part(docs: Path, name: str, report: Report, seed: int) -> None:
    """Write a rung's report, its checks and its plots below ``docs/validation``."""
    folder = docs / "validation"
    folder.mkdir(exist_ok=True)
    plots = []
    for plot in report.plots:
        if plot.suffix == ".png":
            target = folder / f"{name}_{plot.name}"
            target.write_bytes(plot.read_bytes())
            plots.append(target.name)
    part = {
        "rung": name,
        "date": datetime.now(UTC).date().isoformat(),
        "seed": seed,
        "versions": versions(),
        "plots": plots,
        "text": text_of(report).splitlines(),
        "checks": checks_of(report),
    }
    write_json(part, folder / f"{name}.json")
    log.info("%s", folder / f"{name}.json")


def write_page(docs: Path) -> None:
    """Write the page from the parts that are there, in the order of the ladder."""
    parts = [
        json.loads(path.read_text(encoding="utf-8"))
        for name in RUNGS
        if (path := docs / "validation" / f"{name}.json").exists()
    ]
    (docs / PAGE).write_text(page_of(parts), encoding="utf-8")
    log.info("%s", docs / PAGE)


def page_of(parts: Sequence[dict[str, Any]]) -> str:
    """Return the page as Markdown."""
    lines = [
        "# Predicted and observed",
        "",
        "Written by `python -m analysis.validate.document`; `--check` compares it with what the code gives now. Each "
        "part is what its command prints: what was fitted is said first, bounds that do not hold stand at its end.",
        "",
        "| rung | bounds that hold | date |",
        "| --- | ---: | --- |",
    ]
    for part in parts:
        held = [check["holds"] for check in part["checks"] if check["holds"] is not None]
        lines.append(f"| [{part['rung']}](#{part['rung']}) | {sum(held)} of {len(held)} | {part['date']} |")
    for part in parts:
        used = ", ".join(f"{name} {version[:12]}" for name, version in part["versions"].items())
        lines += [
            "",
            f"## {part['rung']}",
            "",
            f"{RUNGS[part['rung']].summary[0].upper()}{RUNGS[part['rung']].summary[1:]}. "
            f"`python -m analysis.validate {part['rung']} --seed {part['seed']}`, {part['date']}; {used}.",
            "",
            "```text",
            *part["text"],
            "```",
        ]
        for plot in part["plots"]:
            lines += ["", f"![{Path(plot).stem.replace('_', ' ')}](validation/{plot})"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
