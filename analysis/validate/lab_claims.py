"""The paper's offline claims, each judged by the interval of what the lab measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from analysis.validate.lab_data import Floats, Followed, Lab, Measured, Quality
from profiles.recipes.banks import Estimate, Rounds, bootstrap, common, conditional_estimates, length_estimate

#: "Adds little": the whole interval within this of equal.
LITTLE = 0.02
ABSENT = "not measured"
#: Draft positions: the first, and all after it together, each weighted by the rounds that judged it. The last one alone
#: says little where most rounds end before it.
FIRST, LATER = slice(0, 1), slice(1, None)

#: The paper's figures, ranges over its domains (a test reads them off again): figure 2 at position 1 and over 2 to 7,
#: table 1 over three Qwen3 models, figure 4 at 8 and 16 (its RNN at 4 to 16), figure 3, figure 6, figure 4's latencies.
PAPER = {
    "start": "+0.07 to +0.18",
    "decay": "-0.06 to -0.05",
    "chain": "+0.01 to +0.11",
    "later": "+0.06 to +0.09",
    "dflash": "+16 to +18 %",
    "eagle3": "+27 to +31 %",
    "growth": "+4 to +14 points",
    "depth": "+6 to +7 %",
    "rnn": "-0 to +7 %",
    "code": "+47 %",
    "math": "+60 %",
    "mended": "+0.03 to +0.06",
    "round": "+0.2 to +1.3 %",
}


def ratio_of_lengths(one: Rounds, other: Rounds) -> Estimate:
    """Estimate accepted length of ``one`` over that of ``other``, on the texts that both have."""
    a, b = common(one, other)
    return bootstrap(
        len(a.request),
        lambda w: (w @ a.emitted / (w @ a.rounds)) / (w @ b.emitted / (w @ b.rounds)),
    )


def ratio_of_domains(one: Rounds, other: Rounds) -> Estimate:
    """Estimate accepted length on some texts over that on others."""
    n, m = len(one.request), len(other.request)

    def ratio(w: Floats) -> Floats:
        a, b = w[:, :n], w[:, n:]
        return np.asarray((a @ one.emitted / (a @ one.rounds)) / (b @ other.emitted / (b @ other.rounds)))

    return bootstrap(n + m, ratio)


def difference_at(one: Rounds, positions: slice, other: Rounds, others: slice) -> Estimate:
    """Estimate conditional acceptance of ``one`` at some positions minus that of ``other`` at others."""
    a, b = common(one, other)

    def at(w: Floats, rounds: Rounds, positions: slice) -> Floats:
        return np.asarray(w @ rounds.held[:, positions].sum(1) / (w @ rounds.judged[:, positions].sum(1)))

    return bootstrap(len(a.request), lambda w: at(w, a, positions) - at(w, b, others))


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the paper: its figure, ours with its interval, and the verdict that the interval gives."""

    what: str
    paper: str
    ours: str
    verdict: str


def verdict_above(estimate: Estimate, bound: float) -> str:
    """Judge "more than ``bound``"."""
    if estimate.above(bound):
        return "holds"
    return "does not hold" if estimate.below(bound) else "undecided"


def _claim(
    what: str, paper: str, estimate: Callable[[], Estimate], verdict: Callable[[Estimate], str], unit: str, *needed: Any
) -> Claim:
    if any(one is None for one in needed):
        return Claim(what, paper, "-", ABSENT)
    found = estimate()
    scale = 100 if "%" in unit else 1
    numbers = (scale * value for value in (found.value, found.low, found.high))
    ours = "{:+.1f} [{:+.1f}, {:+.1f}]" if "%" in unit else "{:+.3f} [{:+.3f}, {:+.3f}]"
    if unit.startswith("plain"):
        ours = ours.replace("+", "")
    return Claim(what, paper, f"{ours.format(*numbers)} {unit.removeprefix('plain').strip()}".strip(), verdict(found))


def _minus_one(estimate: Estimate) -> Estimate:
    return Estimate(estimate.value - 1, estimate.low - 1, estimate.high - 1)


def claims(lab: Lab, calibration: Mapping[str, Quality]) -> list[Claim]:
    """Judge the paper's offline claims at temperature 1, all domains together unless said."""
    dspark, dflash, eagle3 = lab.find("dspark"), lab.find("dflash"), lab.find("eagle3")
    rnn, gated, deep = (lab.grid.get(name) for name in ("dspark_rnn", "dspark_gated", "dflash_d5"))
    # What is compared was trained for as many steps: the kinds with each other, and the grid of depths, lengths and
    # heads (AdamW), whose base has two layers, within itself. What ships may have been trained for more.
    equal, base = lab.find("dspark_equal") or dspark, lab.grid.get("dspark_d2")

    def all_of(one: Followed | None) -> Rounds:
        assert one is not None
        return one.rounds()

    def gain(one: Followed | None, other: Followed | None) -> Callable[[], Estimate]:
        return lambda: _minus_one(ratio_of_lengths(all_of(one), all_of(other)))

    def positive(estimate: Estimate) -> str:
        return verdict_above(estimate, 0.0)

    def negative(estimate: Estimate) -> str:
        return {"holds": "does not hold", "does not hold": "holds"}.get(positive(estimate), "undecided")

    def little(estimate: Estimate) -> str:
        if estimate.low > -LITTLE and estimate.high < LITTLE:
            return "holds"
        return "does not hold" if estimate.low > LITTLE or estimate.high < -LITTLE else "undecided"

    found = [
        _claim(
            "DFlash starts above EAGLE-3 (conditional acceptance, position 1)",
            PAPER["start"],
            lambda: difference_at(all_of(dflash), FIRST, all_of(eagle3), FIRST),
            positive,
            "",
            dflash,
            eagle3,
        ),
        _claim(
            "DFlash decays over the block (later positions - first)",
            PAPER["decay"],
            lambda: difference_at(all_of(dflash), LATER, all_of(dflash), FIRST),
            negative,
            "",
            dflash,
        ),
        _claim(
            "EAGLE-3 does not decay (later positions - first)",
            PAPER["chain"],
            lambda: difference_at(all_of(eagle3), LATER, all_of(eagle3), FIRST),
            positive,
            "",
            eagle3,
        ),
        _claim(
            "DSpark holds the later positions better than DFlash",
            PAPER["later"],
            lambda: difference_at(all_of(equal), LATER, all_of(dflash), LATER),
            positive,
            "",
            equal,
            dflash,
        ),
        _claim(
            "DSpark over DFlash, accepted length", PAPER["dflash"], gain(equal, dflash), positive, "%", equal, dflash
        ),
        _claim(
            "DSpark over EAGLE-3, accepted length", PAPER["eagle3"], gain(equal, eagle3), positive, "%", equal, eagle3
        ),
        _longer_blocks(lab),
        _claim(
            "DSpark of 2 layers over DFlash of 5, accepted length",
            PAPER["depth"],
            gain(base, deep),
            positive,
            "%",
            base,
            deep,
        ),
        _claim("RNN head over vanilla: within 2 %", PAPER["rnn"], gain(rnn, base), little, "%", rnn, base),
        _claim("gated head over vanilla: within 2 %", "-", gain(gated, base), little, "%", gated, base),
    ]
    for domain, paper in (("code", PAPER["code"]), ("math", PAPER["math"])):
        has = dspark is not None and {domain, "chat"} <= set(dspark.by_domain)
        found.append(
            _claim(
                f"{domain} drafts better than chat (DSpark, accepted length)",
                paper,
                partial(_over_chat, dspark, domain),
                positive,
                "%",
                dspark if has else None,
            )
        )
    quality = calibration.get("dspark")
    found += [
        _claim(
            "raw confidence is overconfident (mean survival predicted - seen)",
            "above 0",
            lambda: quality.excess,  # type: ignore[union-attr]
            positive,
            "",
            quality,
        ),
        _claim(
            "STS mends it (mean ECE before - after)",
            PAPER["mended"],
            lambda: quality.mended,  # type: ignore[union-attr]
            positive,
            "",
            quality,
        ),
    ]
    found += [_sequential_part(lab), *_aims(lab, dspark)]
    return found


def _over_chat(dspark: Followed | None, domain: str) -> Estimate:
    assert dspark is not None
    return _minus_one(ratio_of_domains(dspark.rounds(domain), dspark.rounds("chat")))


def _longer_blocks(lab: Lab) -> Claim:
    """Whether DSpark's gain over DFlash grows from the shortest block measured to the longest."""
    lengths = [b for b in (4, 8, 12, 16) if {f"dspark_b{b}", f"dflash_b{b}"} <= set(lab.grid)]
    what = "DSpark's gain over DFlash grows with block length (percentage points, longest - shortest)"
    if len(lengths) < 2:
        return Claim(what, PAPER["growth"], "-", ABSENT)
    short, long = lengths[0], lengths[-1]
    parts = common(*(lab.grid[f"{kind}_b{b}"].rounds() for b in (short, long) for kind in ("dspark", "dflash")))

    def growth(w: Floats) -> Floats:
        a, b, c, d = (w @ part.emitted / (w @ part.rounds) for part in parts)
        return np.asarray(c / d - a / b)

    return _claim(
        f"{what}: {short} to {long}",
        PAPER["growth"],
        lambda: bootstrap(len(parts[0].request), growth),
        lambda estimate: verdict_above(estimate, 0.0),
        "% points",
    )


def _sequential_part(lab: Lab) -> Claim:
    what, paper = "the sequential part adds about 1 % of a round (DSpark's round over DFlash's)", PAPER["round"]
    rows = [lab.speed.get(name, {}).get("by_domain", {}).get("all") for name in ("dspark", "dflash")]
    if not all(rows):
        return Claim(what, paper, "-", ABSENT)
    mine, other = rows
    assert mine is not None
    assert other is not None
    value = mine["round_s"] / other["round_s"] - 1
    spread = np.hypot(
        (mine["round_high_s"] - mine["round_low_s"]) / 2 / mine["round_s"],
        (other["round_high_s"] - other["round_low_s"]) / 2 / other["round_s"],
    )
    estimate = Estimate(value, value - spread, value + spread)

    def judge(one: Estimate) -> str:
        if one.high < 0.03:
            return "holds"
        return "does not hold" if one.low > 0.03 else "undecided"

    return _claim(what, paper, lambda: estimate, judge, "%")


def _aims(lab: Lab, dspark: Measured | None) -> list[Claim]:
    """The lab's own aims."""
    out = [
        _claim(
            "aim: DSpark's conditional acceptance at position 1 is at least .65",
            "aim",
            lambda: conditional_estimates(dspark.rounds())[0],  # type: ignore[union-attr]
            lambda estimate: verdict_above(estimate, 0.65),
            "plain",
            dspark,
        ),
        _claim(
            "aim: DSpark's accepted length is at least 2.2",
            "aim",
            lambda: length_estimate(dspark.rounds()),  # type: ignore[union-attr]
            lambda estimate: verdict_above(estimate, 2.2),
            "plain",
            dspark,
        ),
    ]
    row = lab.speed.get("dspark", {}).get("by_domain", {}).get("all")
    out.append(
        _claim(
            "aim: one stream with DSpark is at least 1.3 times as fast as without",
            "aim",
            lambda: Estimate(row["ratio"], row["ratio_low"], row["ratio_high"]),
            lambda estimate: verdict_above(estimate, 1.3),
            "plain",
            row,
        )
    )
    return out
