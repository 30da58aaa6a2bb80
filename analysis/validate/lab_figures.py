"""The parts of the lab's report, in the forms of the paper: table 1 and figures 2 to 6, speed, claims."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from analysis.lab_plots import Line, Panel
from analysis.validate.lab_claims import ABSENT, Claim
from analysis.validate.lab_data import DOMAIN_ORDER, Floats, Followed, Lab, Quality, chosen
from analysis.validate.rungs import Check, Section, said, summarize, table
from profiles.recipes.banks import (
    Estimate,
    Rounds,
    bootstrap,
    conditional_estimates,
    expected_length,
    follow,
    length_estimate,
)

GRID_PROSE = (
    "Temperature 1. The drafters of the grid were trained for as many steps each, fewer than those above, and with "
    "AdamW where those had Muon: they are compared with each other."
)
THRESHOLDS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(slots=True)
class Part:
    """A part of the report: prose, tables, plots and checks."""

    title: str
    prose: str = ""
    head: Sequence[str] = ()
    rows: list[list[str]] = field(default_factory=list)
    panels: Sequence[Panel] = ()
    plot: str = ""
    checks: list[Check] = field(default_factory=list)

    def section(self) -> Section:
        """Return it for a terminal."""
        lines = [*said(self.prose), *(("",) if self.prose and self.rows else ())]
        if self.rows:
            lines += table(self.head, self.rows)
        return Section(self.title, tuple(lines), tuple(self.checks))

    def markdown(self) -> str:
        """Return it for the report file."""
        parts = [f"## {self.title}", self.prose]
        if self.rows:
            bar = ["---", *["---:"] * (len(self.head) - 1)]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in (list(self.head), bar, *self.rows)))
        if self.panels:
            parts.append(f"![{self.title}]({self.plot}.png)")
        return "\n\n".join(part for part in parts if part)


def _shown(estimate: Estimate, digits: int = 2) -> str:
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


def _rate(estimate: Estimate) -> str:
    """A chance with half of its interval; a dash where no round got there."""
    return "-" if math.isnan(estimate.value) else f"{estimate.value:.3f} ±{estimate.half_width:.3f}"


def table_1(lab: Lab) -> Part:
    """Accepted length by drafter and domain."""
    rows, checks = [], []
    texts = [(f"t={temperature:g}", own) for temperature, own in sorted(lab.by_temperature.items(), reverse=True)]
    for label, drafters in (*texts, ("corpus text", lab.corpus)):
        for name, one in drafters.items():
            cells = [
                _shown(length_estimate(one.rounds(domain))) if domain in one.banks else "-" for domain in DOMAIN_ORDER
            ]
            whole = length_estimate(one.rounds())
            rows.append([f"{name}, {label}", str(one.draft_length), *cells, _shown(whole)])
            checks.append(summarize(f"accepted length, {name}, {label}", whole.value, "tokens/round"))
    prose = (
        "Accepted length, tokens a round with the bonus token (the paper's table 1): rounds followed along every "
        "held-out text. In brackets 95 % intervals, a bootstrap over texts. The second column is the number of draft "
        "tokens: rows of different ones are not alike. Corpus text, where there is any, was written by people and read "
        "by the target; all else the target wrote."
    )
    return Part("Accepted length (table 1)", prose, ("drafter", "drafts", *DOMAIN_ORDER, "all"), rows, checks=checks)


def figure_2(lab: Lab, temperature: float = 1.0) -> Part:
    """Conditional acceptance by position."""
    drafters = lab.by_temperature.get(temperature, {})
    panels, rows = [], []
    for domain in DOMAIN_ORDER:
        lines = []
        for name, one in drafters.items():
            if domain not in one.banks:
                continue
            rates = conditional_estimates(one.rounds(domain))
            lines.append(Line(name, [k + 1.0 for k in range(len(rates))], rates))
            rows.append([f"{name}, {domain}", *map(_rate, rates)])
        panels.append(Panel(domain, "draft position", "conditional acceptance", lines, bottom=0.0, top=1.0))
    width = max((len(row) for row in rows), default=1)
    rows = [[*row, *[""] * (width - len(row))] for row in rows]
    return Part(
        f"Conditional acceptance by position (figure 2), temperature {temperature:g}",
        "Chance that a draft token is accepted, given that the ones before it were; of rounds. ± half of the 95 % "
        "interval.",
        ("drafter, domain", *(str(k) for k in range(1, width))),
        rows,
        panels,
        f"conditional_t{temperature:g}",
    )


def figure_3(lab: Lab) -> Part | None:
    """Accepted length by depth."""
    return _by_number(lab, "d", "Accepted length by depth (figure 3)", "layers of the drafter", "depth")


def figure_4(lab: Lab) -> Part | None:
    """Accepted length and round time by draft length."""
    part = _by_number(lab, "b", "Accepted length by draft length (figure 4)", "draft tokens a round", "draft_length")
    if part is None:
        return None
    lines = []
    for kind in ("dspark", "dflash"):
        times = {
            int(name.rpartition("_b")[2]): speed["by_domain"]["all"]
            for name, speed in lab.speed.items()
            if re.fullmatch(rf"{kind}_b\d+", name)
        }
        if times:
            at = sorted(times)
            rates = [Estimate(*(1e3 * times[b][key] for key in ("round_s", "round_low_s", "round_high_s"))) for b in at]
            lines.append(Line(kind, [float(b) for b in at], rates))
    if lines:
        part.panels = [
            *part.panels,
            Panel("one stream on this machine", "draft tokens a round", "ms a round", lines, 0.0),
        ]
    return part


def _by_number(lab: Lab, letter: str, title: str, axis: str, plot: str) -> Part | None:
    found: dict[str, dict[int, Followed]] = {}
    for name, one in lab.grid.items():
        match = re.fullmatch(rf"(.+)_{letter}(\d+)", name)
        if match:
            found.setdefault(match[1], {})[int(match[2])] = one
    if not found:
        return None
    rows, panels = [], []
    for domain in DOMAIN_ORDER:
        lines = []
        for kind, by_number in sorted(found.items()):
            own = {n: by_number[n] for n in sorted(by_number) if domain in by_number[n].by_domain}
            lengths = [length_estimate(one.rounds(domain)) for one in own.values()]
            lines.append(Line(kind, [float(n) for n in own], lengths))
            rows += [[f"{kind}, {domain}", str(n), _shown(length)] for n, length in zip(own, lengths, strict=True)]
        panels.append(Panel(domain, axis, "accepted length, tokens/round", lines, bottom=1.0))
    return Part(title, GRID_PROSE, ("drafter, domain", axis, "accepted length"), rows, panels, plot)


def heads(lab: Lab) -> Part | None:
    """Accepted length by Markov head."""
    kinds = {"vanilla": "dspark_d2", "gated": "dspark_gated", "rnn": "dspark_rnn"}
    rows = [
        [head, *(_shown(length_estimate(lab.grid[name].rounds(d))) for d in (*DOMAIN_ORDER, None))]
        for head, name in kinds.items()
        if name in lab.grid
    ]
    prose = "DSpark of two layers and a block of 5, temperature 1: accepted length."
    return Part("Markov heads", prose, ("head", *DOMAIN_ORDER, "all"), rows)


def figure_5(lab: Lab) -> Part | None:
    """Threshold sweep of DSpark, on the texts that calibration did not see."""
    one = lab.find("dspark")
    if one is None:
        return None
    rows, panels = [], []
    for domain, bank in one.banks.items():
        half = chosen(bank, bank.request % 2 == 1)
        lengths, ratios = [], []
        for floor in THRESHOLDS:
            verify = np.cumprod(half.confidence >= floor, axis=1).sum(axis=1)
            rounds = follow(half, verify)
            lengths.append(length_estimate(rounds))
            ratios.append(
                bootstrap(
                    len(rounds.request),
                    partial(_used, rounds),
                )
            )
            rows.append([domain, f"{floor:g}", _shown(lengths[-1]), _shown(ratios[-1])])
        at = list(THRESHOLDS)
        panels.append(
            Panel(
                domain,
                "floor on calibrated confidence",
                "tokens/round; share of verified",
                [Line("accepted length", at, lengths), Line("accepted / verified", at, ratios)],
                bottom=0.0,
            )
        )
    prose = (
        "DSpark, temperature 1, texts that calibration did not see: verify the longest prefix whose confidence stays "
        "at the floor or above. Accepted length, and accepted over verified tokens, both with the bonus token. Exact "
        "for what is accepted; behind a refused token the confidences are those of the text's tokens, not of the "
        "drafts that would stand there."
    )
    return Part("Threshold sweep (figure 5)", prose, ("domain", "floor", "length", "ratio"), rows, panels, "thresholds")


def _used(rounds: Rounds, w: Floats) -> Floats:
    """Return accepted over verified tokens, the bonus token in both."""
    return np.asarray(w @ rounds.emitted / (w @ (rounds.verified + rounds.rounds)))


def figure_6(found: Mapping[float, Mapping[str, Quality]]) -> Part:
    """Reliability before and after calibration."""
    rows, panels = [], []
    for temperature, by_name in found.items():
        for name, quality in by_name.items():
            for before, after in zip(quality.before, quality.after, strict=True):
                rows.append(
                    [
                        f"{name}, t={temperature:g}",
                        str(before.position + 1),
                        str(before.outcomes),
                        *(
                            "-" if score is None else f"{score:.3f}"
                            for score in (
                                before.mean_confidence,
                                before.mean_outcome,
                                before.ece,
                                after.ece,
                                before.auc,
                            )
                        ),
                    ]
                )
    shown = found.get(1.0, {}).get("dspark")
    if shown is not None:
        for before, after in zip(shown.before, shown.after, strict=True):
            lines = [
                Line(
                    label,
                    [bar.mean_confidence for bar in quality.reliability],
                    [
                        Estimate(bar.mean_outcome, *_wilson(bar.mean_outcome, bar.outcomes))
                        for bar in quality.reliability
                    ],
                )
                for label, quality in (("raw", before), ("calibrated", after))
            ]
            panels.append(
                Panel(f"position {before.position + 1}", "survival predicted", "survival seen", lines, 0.0, 1.0, True)
            )
    return Part(
        "Reliability of the confidence (figure 6)",
        "Survival up to each position on texts that calibration did not see: mean raw prediction, what was seen, ECE "
        "(20 bins) raw and calibrated, AUC of the raw one. The plot is DSpark's at temperature 1; its bars treat "
        "positions as independent, which those of one text are not. A drafter without a head shows its top "
        "probability.",
        ("drafter", "position", "outcomes", "predicted", "seen", "ECE raw", "ECE calibrated", "AUC"),
        rows,
        panels,
        "reliability",
    )


def _wilson(rate: float, n: int) -> tuple[float, float]:
    z = 1.96
    middle, half = (
        (rate + z * z / (2 * n)) / (1 + z * z / n),
        z / (1 + z * z / n) * np.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)),
    )
    return float(middle - half), float(middle + half)


def speed_part(lab: Lab) -> Part:
    """Wall-clock speed of one stream."""
    rows = []
    for name, speed in lab.speed.items():
        if name in lab.grid:
            continue
        for domain, row in speed["by_domain"].items():
            rows.append(
                [
                    f"{name}, {domain}",
                    str(speed["draft_length"]),
                    f"{row['none_tokens_per_s']:.1f}",
                    f"{row['tokens_per_s']:.1f}",
                    f"{row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]",
                    f"{1e3 * row['none_round_s']:.1f}",
                    f"{1e3 * row['draft_s']:.1f}",
                    f"{1e3 * row['verify_s']:.1f}",
                ]
            )
    machines = sorted(
        {
            f"{one['device']}, {one['cores']} cores, {one['threads']} threads, {one['dtype']}, torch {one['torch']}, "
            f"{one['date']}"
            for one in lab.speed.values()
        }
    )
    prose = (
        "Tokens/s of one stream after its first token, with the drafter and without, decoded in turns; milliseconds "
        f"of a step without, of drafting and of verifying. Machine: {'; '.join(machines) or 'nothing was timed yet'}."
    )
    head = ("drafter, domain", "drafts", "none tok/s", "with tok/s", "ratio", "step ms", "draft ms", "verify ms")
    return Part("Speed of one stream", prose, head, rows)


def claims_part(found: Sequence[Claim]) -> Part:
    """The claims and their verdicts."""
    counts = {
        kind: sum(one.verdict == kind for one in found) for kind in ("holds", "does not hold", "undecided", ABSENT)
    }
    prose = (
        "Each claim at temperature 1 with all domains together unless it says otherwise; ours with the 95 % interval "
        "over texts. A claim holds, or does not, where the whole interval says so. "
        + ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)
        + "."
    )
    return Part(
        "The paper's offline claims",
        prose,
        ("claim", "paper", "here", "verdict"),
        [[one.what, one.paper, one.ours, one.verdict] for one in found],
    )


def chances_part(lab: Lab) -> Part:
    """What the simulator, which draws by chance, makes of the banks."""
    rows, checks = [], []
    for temperature, drafters in sorted(lab.by_temperature.items(), reverse=True):
        for name, one in drafters.items():
            for domain, bank in one.banks.items():
                seen = length_estimate(follow(bank))
                drawn = expected_length(bank)
                rows.append(
                    [
                        f"{name}, {domain}, t={temperature:g}",
                        _shown(seen, 3),
                        f"{drawn:.3f}",
                        f"{drawn - seen.value:+.3f}",
                    ]
                )
                checks.append(
                    summarize(
                        f"by chance - recorded, {name}, {domain}, {temperature:g}", drawn - seen.value, "tokens/round"
                    )
                )
    prose = (
        "The simulator draws acceptance by the chance at each place, 1 - TV; the recorded outcomes are those of the "
        "text's own tokens. A prefix that was accepted is not any prefix, so the two may differ past position 1 by "
        "more than luck."
    )
    return Part(
        "Recorded outcomes against chances",
        prose,
        ("drafter, domain", "recorded", "by chance", "difference"),
        rows,
        checks=checks,
    )
