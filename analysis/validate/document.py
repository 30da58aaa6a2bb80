"""Write ``docs/validation.md`` from what the rungs print: ``python -m analysis.validate.document``.

A rung's part is its report as printed, with the command, the date and the versions; its checks lie beside the page as
JSON (``docs/validation/RUNG.json``), and the closed loops that ``paper`` simulated as a table
(``docs/validation/paper_runs.csv``, see `kept`). Above the parts stands the table of the twenty claims, judged from
all of them (`verdicts`). Of ``lab``, whose report is ``docs/lab/README.md``, only the claims are kept.

``--check`` compares the committed numbers with those that the code gives now: exit 1 where they differ. With
``--quick``, ``paper`` takes the kept runs, whose inputs it compares and a few of which it simulates again, and computes
all else anew: half a minute in place of minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from analysis.validate import verdicts
from analysis.validate.command import SHARED, text_of
from analysis.validate.kept import Runs, load_runs
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
#: In a plot of the page.
COLOURS = 64
#: Rungs whose report lies elsewhere: where, from the page.
ELSEWHERE = {"lab": "lab/README.md"}

#: What a rung's report does not say of itself: causes of what is missed, and what a number hangs on.
NOTES: dict[str, tuple[str, ...]] = {
    "engines": (
        "Left out, but not unseen: the form of the pooled law in (iv) was chosen among variants scored on these same "
        "points. The price of letting a request in came last and took the p90 with lengths left out from 21 to 15 %; "
        "those errors are somewhat too good for that (`engines_aic` gives the range of the variants).",
        "In (i), nothing of the later requests is fitted, but they were seen: while the rule that lets a cost into a "
        "fit looked at amounts alone, what context costs was left out, and p99 of running missed (11 and 26 % of "
        "seats). Now residuals decide, cost by cost (F of 5 or more, as for closed loops).",
    ),
}


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
    out.add_argument(
        "--quick",
        action="store_true",
        help="paper: take the runs that are kept, simulate but a few of them again",
    )
    out.add_argument("--claims", action="store_true", help="print the twenty claims in short; runs nothing")
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
    if options.claims:
        print("\n".join(verdicts.short_table(verdicts.judge_all(read_parts(options.docs)))))
        return 0
    differ: list[str] = []
    for name in names:
        out = Path("runs/validation") / name
        out.mkdir(parents=True, exist_ok=True)
        settings = Settings(
            shared=Shared(options.shared), out=out, seed=options.seed, jobs=options.jobs, draw=not options.check
        )
        own = check_part if options.check else write_part
        differ += [f"{name}: {line}" for line in own(options.docs, name, settings, options.quick)]
    if options.check:
        print("\n".join(differ) if differ else f"{', '.join(names)}: the numbers are those committed")
    elif differ:
        print("\n".join(differ), file=sys.stderr)
    else:
        write_page(options.docs)
    return 1 if differ else 0


def write_part(docs: Path, name: str, settings: Settings, quick: bool = False) -> list[str]:
    """Run a rung and keep its part; ``quick``: from the kept runs; where those are stale, nothing is written."""
    if name == "lab":
        keep(docs, name, Report(()), settings.seed, lab_claims=lab_claims())
        return []
    runs = _runs(docs, name, quick)
    report = RUNGS[name].run(dataclasses.replace(settings, run_cells=runs.run))
    if runs.differ:
        return runs.differ
    keep(docs, name, report, settings.seed)
    if runs.rows:
        runs.save(_kept(docs, name))
    return []


def check_part(docs: Path, name: str, settings: Settings, quick: bool = False) -> list[str]:
    """Return what differs between the part of a rung that is committed and what the code gives now."""
    part = committed(docs, name)
    if name == "lab":
        return [] if lab_claims() == part.get("lab_claims") else ["the claims are others"]
    runs = _runs(docs, name, quick)
    report = RUNGS[name].run(dataclasses.replace(settings, run_cells=runs.run))
    differ = runs.differ + differences(part["checks"], checks_of(report))
    now = [dataclasses.asdict(claim) for claim in report.claims]
    if now != part.get("claims", []):
        old = {claim["number"]: claim for claim in part.get("claims", [])}
        differ += [f"claim {one['number']} is another" for one in now if one != old.get(one["number"])]
    return differ


def _kept(docs: Path, name: str) -> Path:
    return docs / "validation" / f"{name}_runs.csv"


def _runs(docs: Path, name: str, quick: bool) -> Runs:
    """Return what simulates a rung's closed loops: the kept ones where ``quick``."""
    if name != "paper" or not quick:
        return Runs()
    return Runs(load_runs(_kept(docs, name), f"python -m analysis.validate.document {name}"))


def lab_claims() -> list[dict[str, str]]:
    """Return the lab's claims as plain data, from the banks that were recorded and the times that were taken."""
    from analysis.validate import lab
    from analysis.validate.lab_claims import claims
    from analysis.validate.lab_data import load_lab, qualities
    from profiles.files import SHIPPED

    found = load_lab(SHIPPED / "measured", lab.DOCS)
    if not found.by_temperature:
        raise InputError(Fault("no bank was recorded yet: make lab", str(SHIPPED / "measured")))
    quality = qualities(found.by_temperature.get(1.0, {}), lab.JUDGED)
    return [dataclasses.asdict(claim) for claim in claims(found, quality)]


def checks_of(report: Report) -> list[dict[str, Any]]:
    """Return a report's checks as plain data."""
    return [dataclasses.asdict(check) for check in report.checks()]


def committed(docs: Path, name: str) -> dict[str, Any]:
    """Return the part that is committed for a rung."""
    path = docs / "validation" / f"{name}.json"
    try:
        part = dict(json.loads(path.read_text(encoding="utf-8")))
        list(part["checks"])
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise InputError(
            Fault(f"no checks to read ({fault}): python -m analysis.validate.document {name}", str(path))
        ) from None
    return part


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


def keep(docs: Path, name: str, report: Report, seed: int, **more: Any) -> None:
    """Write a rung's part and its plots below ``docs/validation``."""
    folder = docs / "validation"
    folder.mkdir(exist_ok=True)
    plots = []
    for plot in report.plots:
        if plot.suffix == ".png":
            target = folder / f"{name}_{plot.name}"
            _shrink(plot, target)
            plots.append(target.name)
    part = {
        "rung": name,
        "date": datetime.now(UTC).date().isoformat(),
        "seed": seed,
        "versions": versions(),
        "plots": plots,
        "text": text_of(dataclasses.replace(report, claims=())).splitlines(),
        "checks": checks_of(report),
        "claims": [dataclasses.asdict(claim) for claim in report.claims],
        **more,
    }
    write_json(part, folder / f"{name}.json")
    log.info("%s", folder / f"{name}.json")


def _shrink(plot: Path, target: Path) -> None:
    """Copy a PNG in few colours: a third of its size."""
    from PIL import Image

    with Image.open(plot) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)


def read_parts(docs: Path) -> dict[str, dict[str, Any]]:
    """Return the parts that are there by rung, in the order of the ladder."""
    return {name: committed(docs, name) for name in RUNGS if (docs / "validation" / f"{name}.json").exists()}


def write_page(docs: Path) -> None:
    """Write the page from the parts that are there."""
    (docs / PAGE).write_text(page_of(read_parts(docs)), encoding="utf-8")
    log.info("%s", docs / PAGE)


def page_of(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page as Markdown; ``parts`` by rung."""
    lines = [
        "# Predicted and observed",
        "",
        "Written by `python -m analysis.validate.document`; with `--check` it compares what is committed with what the "
        "code gives now, with `--quick` in half a minute, as a test does. Each part is what its command prints: what "
        "was fitted is said first, bounds that do not hold stand at its end.",
        "",
        "| rung | bounds that hold | date |",
        "| --- | ---: | --- |",
    ]
    for name, part in parts.items():
        held = [check["holds"] for check in part["checks"] if check["holds"] is not None]
        score = f"{sum(held)} of {len(held)}" if held else "none set"
        lines.append(f"| [{name}]({ELSEWHERE.get(name, f'#{name}')}) | {score} | {part['date']} |")
    claims = verdicts.judge_all(parts)
    if claims:
        lines += ["", "## The twenty claims", "", *verdicts.claims_markdown(claims)]
    for name, part in parts.items():
        if name not in ELSEWHERE:
            lines += _part_lines(name, part)
    return "\n".join(lines) + "\n"


def _part_lines(name: str, part: Mapping[str, Any]) -> list[str]:
    used = ", ".join(f"{package} {version[:12]}" for package, version in part["versions"].items())
    summary = RUNGS[name].summary
    lines = [
        "",
        f"## {name}",
        "",
        f"{summary[0].upper()}{summary[1:]}. `python -m analysis.validate {name} --seed {part['seed']}`, "
        f"{part['date']}; {used}.",
        "",
    ]
    if name in NOTES:
        lines += [*(f"- {note}" for note in NOTES[name]), ""]
    lines += ["```text", *part["text"], "```"]
    for plot in part["plots"]:
        lines += ["", f"![{Path(plot).stem.replace('_', ' ')}](validation/{plot})"]
    return lines


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
