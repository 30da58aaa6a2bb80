"""Draw what one call of ``sim.run`` gave."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from analysis.frontier import FrontierPoint, Interval, draw_frontier
from analysis.run_plots import draw_budget, draw_timeline
from sim.cells import Series
from sim.compare import estimate
from sim.report import Outcome
from sim.scenario import label_of


def draw_plots(outcome: Outcome, folder: Path) -> None:
    """Draw frontier, budget and timeline into ``folder``."""
    scenario = outcome.scenario
    goal = scenario.objectives.user_tokens_per_s

    def interval(policy: int, point: int | None, metric: str) -> Interval | None:
        one = estimate([metrics[metric] for metrics in outcome.replications(policy, point)])
        return None if one.value is None else Interval(one.value, one.low, one.high)

    points: list[FrontierPoint] = []
    for point in outcome.points:
        for index, policy in enumerate(scenario.policies):
            user = interval(index, point, "user_tokens_per_s_p50")
            throughput = interval(index, point, "output_tokens_per_s_per_gpu")
            if user is not None and throughput is not None:
                points.append(
                    FrontierPoint(label_of(policy), outcome.point_label(point), user, throughput, policy.sees_outcome)
                )
    note = _note(outcome)
    # One load has a point a policy and no curve: its windows of time show what lies between calm and peak.
    clouds = None
    if scenario.sweep is None:
        clouds = {
            label_of(policy): (one["user_tokens_per_s"], one["output_tokens_per_s_per_gpu"])
            for index, policy in enumerate(scenario.policies)
            for one in [outcome.first(index, None).series]
        }
    draw_frontier(
        points,
        objective_user_tokens_per_s=goal,
        title=scenario.name,
        note=note,
        stem=folder / "frontier",
        clouds=clouds,
    )
    last = outcome.points[-1]
    series = {label_of(policy): outcome.first(index, last).series for index, policy in enumerate(scenario.policies)}
    at = outcome.point_label(last)
    title = scenario.name if at is None else f"{scenario.name}, {at}"
    every = [
        (label_of(policy), outcome.first(index, point).series)
        for point in outcome.points
        for index, policy in enumerate(scenario.policies)
        if policy.drafter is not None
    ]
    draw_budget(_joined(every), requests_per="GPU", title=scenario.name, note=note, stem=folder / "budget")
    draw_timeline(
        series,
        objective_user_tokens_per_s=goal,
        measured=(scenario.window.from_s, scenario.window.until_s),
        title=title,
        note=note,
        stem=folder / "timeline",
    )


def _joined(series: Sequence[tuple[str, Series]]) -> dict[str, Series]:
    """Put the windows of a policy's swept values behind each other."""
    out: dict[str, Series] = {}
    for label, one in series:
        if label in out:
            out[label] = {name: np.concatenate([out[label][name], one[name]]) for name in one}
        else:
            out[label] = dict(one)
    return out


def _note(outcome: Outcome) -> str:
    names = ", ".join(one.profile.name for one in outcome.plant.loaded())
    origins = [provenance.origin for provenance in outcome.plant.provenances().values()]
    assumed = f"{origins.count('assumed')} of its {len(origins)} values are assumed"
    return f"Simulated from {names}; {assumed}. Seed {outcome.scenario.seed}."
