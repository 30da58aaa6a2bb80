"""What a session reports: the table, ``comparison.csv``, each policy's ``summary.json`` and the plots."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.axes import label_at, values_at
from sim.build import Plant
from sim.cells import Cell, CellResult
from sim.compare import Difference, difference, estimates
from sim.metrics import Metrics
from sim.scenario import Scenario, label_of, resolved
from sim.table import COLUMNS, Row, comparison_table

#: Which values a metric rests on, by the start of their path in a profile; all rest on the verify time.
_RESTS_ON = {
    "ttft_s_p50": ("step_time.prefill",),
    "ttft_s_p99": ("step_time.prefill",),
    "goodput_per_s": ("step_time.prefill",),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished session: scenario, plant, output folder and the results of all cells, in order of `Work.cells`."""

    scenario: Scenario
    plant: Plant
    out: Path
    cells: tuple[CellResult, ...]

    @property
    def points(self) -> list[int | None]:
        """Points of the sweep (indices), or one None."""
        return list(dict.fromkeys(result.cell.point for result in self.cells))

    def replications(self, policy: int, point: int | None) -> list[Metrics]:
        """Return a policy's metrics at a point, a replication each."""
        return [one.metrics for one in self.cells if (one.cell.policy, one.cell.point) == (policy, point)]

    def first(self, policy: int, point: int | None) -> CellResult:
        """Return replication 0 of a policy at a point."""
        return next(one for one in self.cells if one.cell == Cell(policy, point, 0))

    @property
    def baseline(self) -> int:
        """What policies are compared with: ``mtp1``, what the paper compares with, or else the first policy."""
        kinds = [policy.kind for policy in self.scenario.policies]
        return kinds.index("mtp1") if "mtp1" in kinds else 0

    def point_label(self, point: int | None) -> str | None:
        """Name a point: ``load=0.2, fleet.replicas=4``."""
        return None if point is None else label_at(self.scenario.axes, point)

    def differences(self, policy: int, point: int | None) -> dict[str, Difference]:
        """Compare every metric of a policy with the baseline's, paired by replication."""
        ours, base = self.replications(policy, point), self.replications(self.baseline, point)
        return {name: difference([one[name] for one in ours], [one[name] for one in base]) for name in ours[0]}


def assumed_metrics(plant: Plant) -> dict[str, str]:
    """Return the metrics that rest on an assumed value, with that value's path."""
    assumed = {path for path, provenance in plant.provenances().items() if provenance.origin == "assumed"}
    found = {}
    for metric, roots in _RESTS_ON.items():
        for path in sorted(assumed):
            if any(path.split(": ", 1)[1].startswith(root) for root in roots):
                found[metric] = path
    return found


def report_text(outcome: Outcome, files: str = "comparison.csv, manifest.json, a folder a policy") -> str:
    """Return what is printed on stdout; ``files`` names what the output folder holds."""
    scenario = outcome.scenario
    window, repeats = scenario.window, scenario.replications
    varied = {axis.key.partition(".")[0] for axis in scenario.axes}
    facts = []
    if "fleet" not in varied:
        replicas, gpus = scenario.fleet.replicas, outcome.plant.gpus.total
        facts.append(f"{replicas} replica{'s' * (replicas > 1)} on {gpus} GPU{'s' * (gpus > 1)}")
    if not varied & {"horizon", "warmup", "cooldown"}:
        facts.append(f"measured from {window.from_s:g} s to {window.until_s:g} s of {scenario.horizon:g} s")
    facts.append(f"{repeats} replications, ± 95 %" if repeats > 1 else "one replication: no intervals")
    lines = [f"{scenario.name}: {', '.join(facts)}"]
    starred = assumed_metrics(outcome.plant)
    rows = [
        Row(
            label_of(policy) + (" (upper bound)" if policy.sees_outcome else ""),
            None if point is None else ", ".join(str(value) for value in values_at(scenario.axes, point)),
            estimates(outcome.replications(index, point)),
            outcome.differences(index, point),
            index == outcome.baseline,
        )
        for point in outcome.points
        for index, policy in enumerate(scenario.policies)
    ]
    lines += ["", comparison_table(rows, ", ".join(axis.key for axis in scenario.axes) or None, starred)]
    baseline = label_of(scenario.policies[outcome.baseline])
    lines += ["", f"Δ: against {baseline}, paired by replication. Ends count requests that arrived in the window."]
    if starred:
        lines.append("* rests on an assumed value: " + ", ".join(sorted(set(starred.values()))))
    lines += _assumed_lines(outcome)
    outside = [one for one in outcome.cells if one.metrics["outside_profile_ratio"]]
    if outside:
        worst = max(float(one.metrics["outside_profile_ratio"] or 0) for one in outside)
        names = dict.fromkeys(label_of(scenario.policies[one.cell.policy]) for one in outside)
        lines.append(f"outside the profile's range: up to {100 * worst:.0f} % of steps ({', '.join(names)})")
    rows_by_reason = outcome.cells[0].trace_rows
    if rows_by_reason:
        lines.append("trace rows: " + ", ".join(f"{count} {reason}" for reason, count in rows_by_reason.items()))
    lines += [f"caveat: {text}" for text in dict.fromkeys(text for one in outcome.cells for text in one.caveats)]
    plots = sorted(path.name for path in outcome.out.iterdir() if path.suffix == ".png")
    lines += ["", f"results: {outcome.out}/ ({files})"]
    if plots:
        lines.append("plots:   " + ", ".join(f"{outcome.out}/{name}" for name in plots))
    return "\n".join(lines)


def _assumed_lines(outcome: Outcome) -> list[str]:
    """Say what each profile assumes, domains together; a reason beside another origin is an assumption in part."""
    found: dict[str, dict[str, None]] = {}
    for name, provenance in outcome.plant.provenances().items():
        profile, path = name.split(": ", 1)
        if provenance.origin == "assumed" or provenance.reason is not None:
            part = "" if provenance.origin == "assumed" else " (in part)"
            short = re.sub(r"\.domains\.[^.]+", "", path).removesuffix(".curve") + part
            found.setdefault(profile, {})[short] = None
    return [
        f"assumed in {profile}: {', '.join(paths)} (why: python -m profiles.show {profile})"
        for profile, paths in found.items()
    ]


def comparison_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the comparison, a row a policy and swept value: every metric, its interval, and its change."""
    rows = []
    for point in outcome.points:
        for index, policy in enumerate(outcome.scenario.policies):
            row: dict[str, Any] = {
                "policy": label_of(policy),
                "upper_bound": policy.sees_outcome,
                "swept": outcome.point_label(point),
                "replications": outcome.scenario.replications,
            }
            for name, one in estimates(outcome.replications(index, point)).items():
                row[name] = one.value
                row[f"{name}_half_width"] = one.half_width
            for name, change in outcome.differences(index, point).items():
                if name in {column.metric for column in COLUMNS}:
                    row[f"{name}_change_ratio"] = change.relative.value
                    row[f"{name}_change_half_width"] = change.relative.half_width
                    row[f"{name}_verdict"] = change.verdict
            rows.append(row)
    return rows


def policy_summary(outcome: Outcome, index: int) -> dict[str, Any]:
    """Return one policy's summary: settings, metrics at every swept value and replication, what is assumed."""
    policy = outcome.scenario.policies[index]
    return {
        "policy": label_of(policy),
        "settings": resolved(outcome.scenario)["policies"][index],
        "upper_bound": policy.sees_outcome,
        "lossless_with_confidence_that_reads": sorted(policy.lossless_with),
        "window_s": [outcome.scenario.window.from_s, outcome.scenario.window.until_s],
        "gpus": outcome.plant.gpus.total,
        "results": [
            {
                "swept": outcome.point_label(point),
                "estimates": {
                    name: {"mean": one.value, "half_width_95": one.half_width}
                    for name, one in estimates(outcome.replications(index, point)).items()
                },
                "replications": outcome.replications(index, point),
            }
            for point in outcome.points
        ],
        "assumed": {
            path: provenance.reason
            for path, provenance in outcome.plant.provenances().items()
            if provenance.origin == "assumed"
        },
        "provenance": {path: provenance.origin for path, provenance in outcome.plant.provenances().items()},
        "rests_on_assumed": assumed_metrics(outcome.plant),
        "trace_rows": outcome.cells[0].trace_rows,
        "caveats": list(outcome.cells[0].caveats),
    }
