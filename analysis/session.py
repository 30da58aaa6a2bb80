"""Draw what one call of ``sim.run`` or ``sim.sweep`` gave."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from analysis.frontier import FrontierPoint, Interval, draw_frontier
from analysis.run_plots import draw_budget, draw_timeline
from sim.axes import LOAD, Axis, values_at
from sim.cells import Series
from sim.compare import estimate
from sim.output import slugs
from sim.report import Outcome
from sim.scenario import label_of


def draw_plots(outcome: Outcome, folder: Path) -> None:
    """Draw frontier, budget and timeline into ``folder``."""
    scenario = outcome.scenario
    goal = scenario.objectives.user_tokens_per_s
    note = _note(outcome)
    draw_frontiers(outcome, folder)
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


def draw_frontiers(outcome: Outcome, folder: Path) -> None:
    """Draw throughput per GPU against tokens/s per user into ``folder``: ``frontier``, a curve a policy over the load.

    Where several keys are varied, one of them is the load that a curve follows, and each setting of the others has its
    own plot, ``frontier_<setting>``.
    """
    scenario = outcome.scenario
    axes = scenario.axes
    along = _load_axis(axes)
    others = [axis for index, axis in enumerate(axes) if index != along]
    groups: dict[str, list[tuple[int | None, str | None]]] = {}
    for point in outcome.points:
        if point is None:
            groups.setdefault("", []).append((None, None))
            continue
        settings = [f"{axis.key}={value}" for axis, value in zip(axes, values_at(axes, point), strict=True)]
        load = settings.pop(along)
        groups.setdefault(", ".join(settings), []).append((point, load))
    # One load has a point a policy and no curve: its windows of time show what lies between calm and peak.
    clouds = None
    if scenario.sweep is None and all(one.series for one in outcome.cells):
        clouds = {
            label_of(policy): (one["user_tokens_per_s"], one["output_tokens_per_s_per_gpu"])
            for index, policy in enumerate(scenario.policies)
            for one in [outcome.first(index, None).series]
        }
    stems = slugs([f"frontier {setting.replace('=', ' ')}" if others else "frontier" for setting in groups])
    for stem, (setting, points) in zip(stems, groups.items(), strict=True):
        draw_frontier(
            _frontier_points(outcome, points),
            objective_user_tokens_per_s=scenario.objectives.user_tokens_per_s,
            title=f"{scenario.name}, {setting}" if setting else scenario.name,
            note=_note(outcome),
            stem=folder / stem,
            clouds=clouds,
        )


def _load_axis(axes: Sequence[Axis]) -> int:
    """Return which axis a curve follows: the load, else a key of the arrivals, else the one of most values."""
    keys = [axis.key for axis in axes]
    if LOAD in keys:
        return keys.index(LOAD)
    arrivals = [index for index, key in enumerate(keys) if key.startswith("arrivals.")]
    counts = [len(axis.values) for axis in axes]
    return arrivals[0] if arrivals else counts.index(max(counts, default=0)) if counts else 0


def _frontier_points(outcome: Outcome, points: Sequence[tuple[int | None, str | None]]) -> list[FrontierPoint]:
    def interval(policy: int, point: int | None, metric: str) -> Interval | None:
        one = estimate([metrics[metric] for metrics in outcome.replications(policy, point)])
        return None if one.value is None else Interval(one.value, one.low, one.high)

    found: list[FrontierPoint] = []
    for point, load in points:
        for index, policy in enumerate(outcome.scenario.policies):
            user = interval(index, point, "user_tokens_per_s_p50")
            throughput = interval(index, point, "output_tokens_per_s_per_gpu")
            if user is not None and throughput is not None:
                found.append(FrontierPoint(label_of(policy), load, user, throughput, policy.sees_outcome))
    return found


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
