"""The twenty claims, judged by all that was found: by the rung ``paper``, and by what lab and engine measured.

Each claim starts as the rung ``paper`` leaves it. Where its judge is the lab or an engine, a function here reads what
those reported (``docs/validation/RUNG.json``); until they did, the claim stays as it was and says which command will
settle it. No number of ours is typed here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from analysis.validate.rungs import Claim, Verdict, counted
from sim.errors import Fault, InputError

COMMANDS = {
    "lab": "make lab, then python -m analysis.validate.document lab",
    "engine": "python -m analysis.validate.document engine",
    "engines": "python -m analysis.validate.document engines",
}
#: What `lab_claims` calls its claims.
OVER_EAGLE3 = "DSpark over EAGLE-3, accepted length"
OVER_DFLASH = "DSpark over DFlash, accepted length"
SEQUENTIAL = "the sequential part adds about 1 % of a round (DSpark's round over DFlash's)"
OVERCONFIDENT = "raw confidence is overconfident (mean survival predicted - seen)"
MENDED = "STS mends it (mean ECE before - after)"
CODE, MATH = (f"{domain} drafts better than chat (DSpark, accepted length)" for domain in ("code", "math"))
LATER = "DSpark holds the later positions better than DFlash"
DECAYS = "DFlash decays over the block (later positions - first)"
SHALLOW = "DSpark of 2 layers over DFlash of 5, accepted length"
ONE_STREAM = "aim: one stream with DSpark is at least 1.3 times as fast as without"

#: From good to bad, with "cannot be judged" before the last: what several measurements say together is the worst.
ORDER: tuple[Verdict, ...] = ("holds here", "holds in direction", "cannot be judged", "does not hold")
#: Gain over fixed lengths that counts as the claim's "up to 30 %".
FULL_GAIN_PERCENT = 25.0
#: Draft tokens a request below which a gain per verified token says nothing.
LEAST_VERIFIED = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """A claim of the lab's: the paper's figure, ours with its 95 % interval, and the lab's verdict."""

    what: str
    paper: str
    ours: str
    verdict: str

    @property
    def interval(self) -> tuple[float, float]:
        """Return the ends of our interval."""
        low, high = re.findall(NUMBER, self.ours)[1:3]
        return float(low), float(high)

    def graded(self, bare: bool = False) -> Verdict:
        """Return the verdict: our interval meets the paper's range, or only its sign, which is all where ``bare``."""
        if self.verdict != "holds":
            return "does not hold" if self.verdict == "does not hold" else "cannot be judged"
        claimed = [float(number) for number in re.findall(NUMBER, self.paper)]
        low, high = self.interval
        bare = bare or self.paper.startswith("above")
        near = bare or (bool(claimed) and low <= max(claimed) and high >= min(claimed))
        return "holds here" if near else "holds in direction"


NUMBER = r"[+-]?\d+(?:\.\d+)?"


@dataclass(frozen=True, slots=True)
class Found:
    """What the rungs reported: the lab's claims by name, and checks by rung and name. What is absent is empty."""

    lab: Mapping[str, Row]
    checks: Mapping[str, Mapping[str, Mapping[str, Any]]]

    def rows(self, *names: str) -> list[Row]:
        """Return claims of the lab that were measured."""
        found = [row for name in names if (row := self.lab.get(name)) is not None]
        return [row for row in found if row.ours != "-" and "nan" not in row.ours]


def judge_all(parts: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    """Return the claims in order; ``parts``: what `document` keeps of each rung, by its name."""
    if "paper" not in parts:
        return []
    claims = [read_claim(one) for one in parts["paper"]["claims"]]
    lab = {row["what"]: Row(**row) for row in parts.get("lab", {}).get("lab_claims", ())}
    checks = {name: {check["name"]: check for check in part["checks"]} for name, part in parts.items()}
    found = Found(lab, checks)
    return [JUDGES[claim.number](claim, found) if claim.number in JUDGES else claim for claim in claims]


def read_claim(data: Mapping[str, Any]) -> Claim:
    """Return a claim that was kept; raises `InputError` where it is not one."""
    try:
        claim = Claim(**data)
    except TypeError as fault:
        raise InputError(
            Fault(f"not a claim ({fault}): python -m analysis.validate.document paper", "claims")
        ) from None
    if claim.verdict not in get_args(Verdict):
        raise InputError(Fault(f"unknown verdict '{claim.verdict}'; known: {', '.join(get_args(Verdict))}", "claims"))
    return claim


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of several together."""
    return max(verdicts, key=ORDER.index)


def _unmeasured(claim: Claim, rung: str) -> Claim:
    """Leave a verdict that was reached without the rung; a number that is only the paper's own is not ours."""
    if claim.verdict != "cannot be judged":
        return _with(claim, why=f"by the {rung}: not measured yet ({COMMANDS[rung]})")
    return dataclasses.replace(
        claim,
        ours="not measured yet",
        source=rung,
        why=f"{COMMANDS[rung]}. The paper's own ({claim.source}): {claim.ours}",
    )


def _with(claim: Claim, why: str = "", **changes: Any) -> Claim:
    return dataclasses.replace(claim, **changes, why="; ".join(part for part in (claim.why, why) if part))


def _by_lab(claim: Claim, found: Found, names: Sequence[str], why: str, bare: bool = False) -> Claim:
    """Judge by claims of the lab, all of which must have been measured."""
    rows = found.rows(*names)
    if len(rows) < len(names):
        return _unmeasured(claim, "lab")
    return dataclasses.replace(
        claim,
        ours="; ".join(row.ours for row in rows),
        source="lab",
        verdict=worst([row.graded(bare) for row in rows]),
        why=f"{why}; the paper's own: {claim.ours}",
    )


# --------------------------------------------------------------------------------------------------- a claim a function


def over_eagle3(claim: Claim, found: Found) -> Claim:
    """5: by the lab, whose target is small: a number near the paper's would be luck, its sign would not."""
    return _by_lab(claim, found, [OVER_EAGLE3], "equal training, all domains, temperature 1, 95 % interval over texts")


def over_dflash(claim: Claim, found: Found) -> Claim:
    """6: by the lab."""
    return _by_lab(claim, found, [OVER_DFLASH], "equal training, all domains, temperature 1, 95 % interval over texts")


def other_family(claim: Claim, found: Found) -> Claim:
    """7: by the lab, whose target is of a family that is not in the paper, but a hundredth of Gemma's size.

    That it gains there too supports the claim; that it does not says nothing of Gemma.
    """
    judged = _by_lab(
        claim,
        found,
        [OVER_EAGLE3, OVER_DFLASH],
        "over EAGLE-3 and DFlash, on the lab's target of another family; it is too small to refute the claim",
    )
    capped: dict[Verdict, Verdict] = {"holds here": "holds in direction", "does not hold": "cannot be judged"}
    return dataclasses.replace(judged, verdict=capped.get(judged.verdict, judged.verdict))


def parallel_latency(claim: Claim, found: Found) -> Claim:
    """8: by the lab's one stream; the claim is of a batch of 128, so that it holds in direction at best."""
    judged = _by_lab(claim, found, [SEQUENTIAL], "one stream on the lab's machine, not a batch of 128")
    near = judged.verdict == "holds here"
    return dataclasses.replace(judged, verdict="holds in direction") if near else judged


def dynamic(claim: Claim, found: Found) -> Claim:
    """9: by the engine, beside the law of acceptance."""
    gains = dynamic_gains(found.checks.get("engine", {}))
    if not gains:
        return _unmeasured(claim, "engine")
    low, high = min(gains.values()), max(gains.values())
    by_engine: Verdict = (
        "holds here" if high >= FULL_GAIN_PERCENT else "holds in direction" if high > 0 else "does not hold"
    )
    return _with(
        claim,
        ours=f"{claim.ours}; engine: {low:+.0f} to {high:+.0f} %",
        source=f"{claim.source}, engine",
        verdict=worst([claim.verdict, by_engine]),
        why=f"the engine's: draft tokens accepted against a straight line through none and the fixed lengths, at as "
        f"many verified, over {len(gains)} runs of dynamic policies; without an interval",
    )


def dynamic_gains(checks: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return, by load and dynamic policy, what it accepts beyond fixed lengths at as many verified tokens, in per cent.

    From what the engine was observed to do. Bonus tokens are not counted. None, at no tokens, and the fixed lengths are
    joined by straight lines: what turning between two lengths by a coin would give.
    """
    seen: dict[str, dict[str, dict[str, float]]] = {}
    for name, check in checks.items():
        match = re.fullmatch(r"(.+?), (.+): (accepted length|verified tokens)", name)
        if match and check["observed"] is not None:
            seen.setdefault(match[1], {}).setdefault(match[2], {})[match[3]] = check["observed"] - 1
    gains = {}
    for load, policies in seen.items():
        whole = {name: row for name, row in policies.items() if len(row) == 2}
        fixed = sorted(
            (row["verified tokens"], row["accepted length"])
            for name, row in whole.items()
            if name.startswith(("fixed", "mtp1"))
        )
        if not fixed:
            continue
        verified, accepted = np.array([(0.0, 0.0), *fixed]).T
        for name, row in whole.items():
            tokens = row["verified tokens"]
            if name.startswith("dspark") and LEAST_VERIFIED <= tokens <= verified[-1]:
                plain = float(np.interp(tokens, verified, accepted))
                gains[f"{load}, {name}"] = 100 * (row["accepted length"] / plain - 1)
    return gains


def fixed_under_load(claim: Claim, found: Found) -> Claim:
    """11: the table's crossing, simulated (rung ``engines``)."""
    crossings = {
        match[1]: check
        for name, check in found.checks.get("engines", {}).items()
        if (match := re.fullmatch(r"V4-Flash, fixed (k=\d+): load from which none is faster", name))
    }
    if not crossings:
        return _unmeasured(claim, "engines")
    texts = [
        f"{k} {'never' if check['predicted'] is None else format(check['predicted'], '.0f')}"
        for k, check in crossings.items()
    ]
    return _with(
        claim,
        ours=f"{claim.ours} (table); simulated: {', '.join(texts)}",
        source=f"{claim.source}, simulation",
        why="simulated: the load from which none is faster, rung `engines`",
    )


def budget(claim: Claim, found: Found) -> Claim:
    """12: the engine's own budgets, from its lightest load to its heaviest, beside figure 8's."""
    seen = [
        check["observed"]
        for name, check in found.checks.get("engine", {}).items()
        if "%, dspark_async" in name and name.endswith(": verified tokens") and check["observed"] is not None
    ]
    if len(seen) < 2:
        return _with(claim, why=f"by the engine: not measured yet ({COMMANDS['engine']})")
    return _with(
        claim,
        ours=f"{claim.ours}; engine: {seen[0]:.1f} to {seen[-1]:.1f}",
        source=f"{claim.source}, engine",
        verdict=claim.verdict if seen[-1] < seen[0] else worst([claim.verdict, "does not hold"]),
        why="the engine's: from its lightest load to its heaviest",
    )


def calibrated(claim: Claim, found: Found) -> Claim:
    """14: by the lab: is raw confidence too high, and does calibration lower ECE."""
    return _by_lab(claim, found, [OVERCONFIDENT, MENDED], "mean survival predicted less seen; mean ECE taken away")


def domains(claim: Claim, found: Found) -> Claim:
    """15: by the lab."""
    return _by_lab(claim, found, [CODE, MATH], "DSpark's accepted length on code and on math over that on chat")


def splicing(claim: Claim, found: Found) -> Claim:
    """16: by the lab, from conditional acceptance: late positions fall without a first-order head, and less with it."""
    return _by_lab(
        claim,
        found,
        [DECAYS, LATER],
        "conditional acceptance: DFlash's later positions less its first; DSpark's later less DFlash's later",
    )


def shallow(claim: Claim, found: Found) -> Claim:
    """19: by the lab; the claim is the order alone."""
    return _by_lab(claim, found, [SHALLOW], "accepted length, 95 % interval over texts", bare=True)


def latency(claim: Claim, found: Found) -> Claim:
    """20: one stream of the lab over none, beside the simulation."""
    rows = found.rows(ONE_STREAM)
    if not rows:
        return _with(claim, why=f"one stream of the lab: not measured yet ({COMMANDS['lab']})")
    (row,) = rows
    low, high = row.interval
    by_lab: Verdict = "holds in direction" if low > 1 else "does not hold" if high < 1 else claim.verdict
    return _with(
        claim,
        ours=f"{claim.ours}; one stream of the lab {row.ours}x",
        source=f"{claim.source}, lab",
        verdict=worst([claim.verdict, by_lab]),
        why="the lab's: decode speed with DSpark over without, one stream on its machine",
    )


JUDGES: dict[int, Callable[[Claim, Found], Claim]] = {
    5: over_eagle3,
    6: over_dflash,
    7: other_family,
    8: parallel_latency,
    9: dynamic,
    11: fixed_under_load,
    12: budget,
    14: calibrated,
    15: domains,
    16: splicing,
    19: shallow,
    20: latency,
}


# ----------------------------------------------------------------------------------------------------------- the tables


def claims_markdown(claims: Sequence[Claim]) -> list[str]:
    """Return the whole table, and why."""
    rows = [[f"{c.number}", c.claim, c.claimed, c.ours, c.source, c.verdict] for c in claims]
    return [
        *_markdown(("#", "claim", "claimed", "ours", "from", "verdict"), rows),
        "",
        f"{counted(claims)}. Each verdict is computed (`analysis/validate/claims.py`, `verdicts.py`):",
        "",
        *(f"- {c.number}: {c.why}." for c in claims if c.why),
    ]


def short_table(claims: Sequence[Claim]) -> list[str]:
    """Return the table as the README has it."""
    return _markdown(("claim", "claimed", "ours", "verdict"), [[c.claim, c.claimed, c.ours, c.verdict] for c in claims])


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in (head, ["---"] * len(head), *rows)]
