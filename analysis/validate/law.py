"""The rung ``law``: is the parametric law of acceptance good enough in the place of the bank that it was fitted to?

Both are simulated alike: one engine, a constant number of requests, the same users and the same luck. What is fitted is
the law (`profiles.recipes.banks.fit_law`); what is compared, the frontier, is not looked at by the fit. Step times are
those of another machine, `STEPS`, and only make a difference in acceptance visible as one in speed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis.validate.closed_loop import Cell, Steady, build_engine, run_cells
from analysis.validate.rungs import Report, Section, Settings, said, summarize, table
from profiles.files import SHIPPED, find_profile, load_bank, load_profile
from profiles.recipes.banks import fit_law
from profiles.schema import Bank, Drafter, ParametricLaw, Profile, StepTime
from sim.compare import difference
from sim.errors import Fault, InputError
from sim.verify import Policy
from sim.verify.dspark import Dspark
from sim.verify.fixed import Fixed
from sim.verify.threshold import Threshold

STEPS = "engines/qwen3_8b_h20"
DRAFTER = "dspark"
REQUESTS = (4, 16, 64)
REPLICATIONS = 3
TOKENS, QUICK_TOKENS = 100_000, 20_000
#: Good enough: half of the points are closer than this. Policies at the same load differ by more.
MEDIAN_BOUND_PERCENT = 3.0


@dataclass(frozen=True, slots=True)
class Pair:
    """A bank and the law fitted to it; ``name`` says of what."""

    name: str
    drafter: Drafter
    path: Path
    law: ParametricLaw


def load_pairs(folder: Path) -> list[Pair]:
    """Return DSpark's banks in a folder of profiles, by temperature and domain, each with its law."""
    pairs = []
    for path in sorted(folder.glob("*_t[01].json")):
        drafter = load_profile(path).acceptance.get(DRAFTER)
        for domain, law in (drafter.domains if drafter else {}).items():
            assert drafter is not None
            if not isinstance(law, Bank):
                continue
            bank = load_bank(law, path, drafter.trained_length)
            fitted = fit_law(bank, _temperatures(law, drafter.trained_length), f"{path.name}, {domain}")
            alone = drafter.model_copy(update={"domains": {"any": law}})
            pairs.append(Pair(f"{domain}, t={path.stem[-1]}", alone, path, fitted))
    return pairs


def _temperatures(bank: Bank, length: int) -> tuple[float, ...]:
    """Read the calibration's temperatures from a bank's provenance; ones where it does not say."""
    found = re.search(r"temperatures ([\d. ]+),", bank.provenance.note or "")
    values = tuple(float(text) for text in found[1].split()) if found else ()
    return values if len(values) == length else (1.0,) * length


def policies(draft_length: int) -> dict[str, Policy]:
    """Return what is compared: a block always verified whole, a static floor, and the scheduler."""
    return {
        f"fixed k={draft_length}": Fixed(k=draft_length),
        "threshold 0.6": Threshold(min_confidence=0.6),
        "dspark": Dspark(),
    }


@dataclass(frozen=True, slots=True)
class Point:
    """One policy at one load of one bank: tokens/s per user, a value a replication, with the bank and with the law."""

    pair: str
    policy: str
    requests: int
    bank: tuple[Steady, ...]
    law: tuple[Steady, ...]

    @property
    def speeds(self) -> tuple[list[float], list[float]]:
        """Tokens/s per user by replication: law, bank."""
        return [one.user_tokens_per_s for one in self.law], [one.user_tokens_per_s for one in self.bank]


def simulate_pairs(
    pairs: Sequence[Pair], steps: StepTime, *, seed: int, jobs: int, tokens: int, loads: Sequence[int] = REQUESTS
) -> list[Point]:
    """Simulate every policy at every load, with each bank and with its law."""
    keys, cells = [], []
    for pair in pairs:
        for name, policy in policies(pair.drafter.trained_length).items():
            for requests in loads:
                keys.append((pair.name, name, requests))
                for drafter in (pair.drafter, pair.drafter.model_copy(update={"domains": {"any": pair.law}})):
                    profile = Profile(
                        format="dspark-profile/1",
                        name=str(pair.path.resolve()),  # a bank lies beside it
                        description="A bank, or its law, with another machine's step times.",
                        step_time=steps,
                        acceptance={DRAFTER: drafter},
                    )
                    for replication in range(REPLICATIONS):
                        own = seed + replication
                        engine = build_engine(profile, policy, requests, seed=own)
                        cells.append(Cell(engine, requests, tokens, seed=own))
    found = run_cells(cells, jobs, "law")
    points = []
    for index, (pair_name, policy_name, requests) in enumerate(keys):
        at = 2 * REPLICATIONS * index
        middle, end = at + REPLICATIONS, at + 2 * REPLICATIONS
        points.append(Point(pair_name, policy_name, requests, tuple(found[at:middle]), tuple(found[middle:end])))
    return points


def fitted_section(pairs: Sequence[Pair]) -> Section:
    """Say what was fitted."""
    rows = [
        [
            pair.name,
            " ".join(f"{s:.2f}" for s in pair.law.survival.values),
            f"{pair.law.spread.request_sd:.2f}",
            f"{pair.law.spread.token_sd:.2f}",
            f"{pair.law.confidence.noise_sd:.2f}",
        ]
        for pair in pairs
    ]
    head = ("bank", "survival", "between texts", "within", "noise")
    return Section("Fitted: the law of each bank (spreads in probits)", table(head, rows))


def frontier_section(points: Sequence[Point]) -> Section:
    """Report how far the law's frontier is from the bank's."""
    rows, checks, sizes, told_apart = [], [], [], 0
    for point in points:
        law, bank = point.speeds
        change = difference(law, bank)
        assert change.relative.value is not None
        value, half = 100 * change.relative.value, 100 * (change.relative.half_width or 0.0)
        sizes.append(abs(value))
        told_apart += change.verdict in ("higher", "lower")
        lengths = [np.mean([one.accepted_length for one in runs]) for runs in (point.bank, point.law)]
        rows.append(
            [
                f"{point.pair}, {point.policy}",
                str(point.requests),
                f"{np.mean(bank):.1f}",
                f"{np.mean(law):.1f}",
                f"{value:+.2f} ±{half:.2f}",
                *(f"{length:.2f}" for length in lengths),
            ]
        )
        checks.append(
            summarize(f"law - bank, {point.pair}, {point.policy}, {point.requests} requests: tokens/s/user", value, "%")
        )
    median, worst = float(np.median(sizes)), float(np.max(sizes))
    checks.append(summarize("law - bank: median |difference|", median, "%", MEDIAN_BOUND_PERCENT))
    checks.append(summarize("law - bank: worst |difference|", worst, "%"))
    same, loads = _order(points)
    checks.append(summarize("loads at which law and bank name the same fastest policy", 100.0 * same / loads, "%"))
    lines = [
        *table(("bank, policy", "requests", "bank", "law", "difference %", "accepted", "by law"), rows),
        "",
        *said(
            f"Tokens/s per user at one engine, mean of {REPLICATIONS} replications; difference with its 95 % interval, "
            f"paired (throughput per GPU differs alike: requests are the same). Median |difference| {median:.1f} %, "
            f"worst {worst:.1f} %; {told_apart} of {len(points)} differ by more than chance. Law and bank name the "
            f"same fastest policy at {same} of {loads} loads."
        ),
    ]
    return Section("Predicted: the frontier by law, against the bank's", tuple(lines), tuple(checks))


def _order(points: Sequence[Point]) -> tuple[int, int]:
    groups: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        groups.setdefault((point.pair, point.requests), []).append(point)
    same = 0
    for group in groups.values():
        best = [max(group, key=lambda one: sum(one.speeds[which])).policy for which in (0, 1)]
        same += best[0] == best[1]
    return same, len(groups)


def run(settings: Settings) -> Report:
    """Fit, simulate, compare."""
    folder = SHIPPED / "measured"
    pairs = load_pairs(folder)
    if not pairs:
        raise InputError(Fault(f"no bank of {DRAFTER} was recorded yet: python -m decoder.bank", str(folder)))
    steps = load_profile(find_profile(STEPS)).step_time
    assert steps is not None
    tokens = QUICK_TOKENS if settings.quick else TOKENS
    points = simulate_pairs(pairs, steps, seed=settings.seed, jobs=settings.jobs, tokens=tokens)
    sections = (fitted_section(pairs), frontier_section(points))
    path = settings.out / "law.md"
    part = path.with_name(".law.md.part")
    part.write_text(markdown(sections), encoding="utf-8")
    part.replace(path)
    return Report(sections, (path,))


def markdown(sections: Sequence[Section]) -> str:
    """Return the report as a file."""
    head = (
        "# Is the law of acceptance good enough in the place of a bank?\n\n"
        "Generated by `python -m analysis.validate law --out docs/lab`; nothing here is typed."
    )
    parts = [f"## {section.title}\n\n```text\n{chr(10).join(section.lines)}\n```" for section in sections]
    return "\n\n".join([head, *parts]) + "\n"
