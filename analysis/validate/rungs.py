"""A rung of the ladder: what it is given, what it reports, and which rungs there are."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from profiles.recipes.sources import Shared
from sim.table import aligned

if TYPE_CHECKING:
    from analysis.validate.closed_loop import Runner

WIDTH = 118


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A number predicted, the same number observed, and how far apart they are.

    ``error`` is predicted - observed, or a summary of many such (then both are None), and ``bound`` what its size
    must not exceed, all three in ``unit``. ``holds`` is None where there is no bound.
    """

    name: str
    predicted: float | None
    observed: float | None
    error: float | None
    bound: float | None
    unit: str
    holds: bool | None


def compare(name: str, predicted: float | None, observed: float | None, unit: str, bound: float | None = None) -> Check:
    """Compare a prediction with what was observed; a missing prediction fails its bound."""
    error = predicted - observed if predicted is not None and observed is not None else None
    return _checked(name, predicted, observed, error, unit, bound)


def summarize(name: str, error: float, unit: str, bound: float | None = None) -> Check:
    """Report an error over many points."""
    return _checked(name, None, None, error, unit, bound)


def _checked(
    name: str, predicted: float | None, observed: float | None, error: float | None, unit: str, bound: float | None
) -> Check:
    error = None if error is None else float(error)
    holds = None if bound is None else error is not None and abs(error) <= bound
    return Check(name=name, predicted=predicted, observed=observed, error=error, bound=bound, unit=unit, holds=holds)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report: ``lines`` as they are printed (tables, and what they mean), and its checks."""

    title: str
    lines: tuple[str, ...]
    checks: tuple[Check, ...] = ()


Verdict = Literal["holds here", "holds in direction", "does not hold", "cannot be judged"]


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim about DSpark, what is claimed, what we find and where, and the verdict; ``why`` where it is not plain."""

    number: int
    claim: str
    claimed: str
    ours: str
    source: str
    verdict: Verdict
    why: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What a rung found: sections in order, the plots it wrote, and what it says of the twenty claims."""

    sections: tuple[Section, ...]
    plots: tuple[Path, ...] = ()
    claims: tuple[Claim, ...] = ()

    def checks(self) -> list[Check]:
        """Return the checks of all sections."""
        return [check for section in self.sections for check in section.checks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What every rung is given.

    ``quick``: fewer loads and shorter runs, for a first look. ``jobs``: processes at most. ``assume``: which of two
    predictions is held to the bounds; both are shown. ``minutes``: what a rung that runs against the clock may take;
    None: its own default. ``run_cells``: what simulates the closed loops of ``paper`` (`closed_loop.run_cells` where
    it is None); `kept` has one that remembers. ``draw``: whether ``paper`` and ``engines`` draw their plots.
    """

    shared: Shared
    out: Path
    seed: int = 0
    jobs: int = 1
    quick: bool = False
    assume: Literal["shipped", "refined"] = "shipped"
    minutes: float | None = None
    run_cells: Runner | None = None
    draw: bool = True


@dataclass(frozen=True, slots=True)
class Rung:
    """A rung by name, and the function that runs it; its module is imported only when it is asked for."""

    name: str
    summary: str
    run: Callable[[Settings], Report]


def _paper(settings: Settings) -> Report:
    from analysis.validate.paper import run

    return run(settings)


def _lab(settings: Settings) -> Report:
    from analysis.validate.lab import run

    return run(settings)


def _law(settings: Settings) -> Report:
    from analysis.validate.law import run

    return run(settings)


def _engines(settings: Settings) -> Report:
    from analysis.validate.engines import run

    return run(settings)


def _engine(settings: Settings) -> Report:
    from analysis.validate.engine import run

    return run(settings)


#: Every rung; a new one is a module with a ``run`` and an entry here.
RUNGS = {
    rung.name: rung
    for rung in (
        Rung("paper", "figures 2 to 8 of the DSpark paper, and what is claimed", _paper),
        Rung("lab", "the paper's offline figures and claims, measured on the lab's target", _lab),
        Rung("engine", "this machine's own engine, from step times measured on it", _engine),
        Rung("engines", "other people's engines: logs, tables and 1,680 closed-loop points", _engines),
        Rung("law", "the parametric law of acceptance against recorded banks, in the simulator", _law),
    )
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Lay out a table; its first column is text."""
    return tuple(aligned([list(head), *map(list, rows)]))


def said(text: str) -> tuple[str, ...]:
    """Break prose into lines."""
    return tuple(textwrap.wrap(text, WIDTH))


def failures(checks: Sequence[Check]) -> list[Check]:
    """Return the checks that do not hold."""
    return [check for check in checks if check.holds is False]


def claims_section(claims: Sequence[Claim]) -> Section:
    """Lay claims out as a table, and say why where a verdict is not plain."""
    rows = [[f"{c.number:2d} {c.claim}", c.claimed, c.ours, c.source, c.verdict] for c in claims]
    lines = [
        *table(("claim", "claimed", "ours", "from", "verdict"), rows),
        "",
        counted(claims),
        *(line for c in claims if c.why for line in said(f"{c.number}: {c.why}")),
    ]
    return Section("The twenty claims", tuple(lines))


def counted(claims: Sequence[Claim]) -> str:
    """Return how many claims have which verdict."""
    counts = Counter(claim.verdict for claim in claims)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict) if counts[verdict])
