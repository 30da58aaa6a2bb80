"""The machine's pace while the engine serves: steps of the measured grid, run between its own, over their medians.

Machines that are shared are fast at one minute and slow at the next. A prediction is for the machine as it was while
the engine served, and these reference steps say how that was: they are no part of what is served, no request of the
run is in them, and the run's clock stands still meanwhile. They count as visits to the grid, so the medians are of the
same hours as the runs; and they are of all its points in turn, since a median of one point may be off by as much as
the machine's pace is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from profiles.schema import Profile

if TYPE_CHECKING:
    from decoder.load import WallClock
    from decoder.step_times import Point, Samples, Visits

#: A reference step is run after so many of the run's. Not after so many seconds: that would look more often at slow
#: steps (0.9 % more than their share, 23 runs on an unquiet machine, 2026-12-03).
EVERY_STEPS = 8


@dataclass(slots=True)
class PaceReader:
    """Reads the pace during one run; hand it to `decoder.serve.serve_cell` as ``on_progress``.

    ``visits``: to the grid, on an engine of their own. ``clock``: the run's. ``seen``: reference steps, with their
    seconds.
    """

    visits: Visits
    clock: WallClock
    seen: list[tuple[Point, float]] = field(default_factory=list)
    _steps: int = 0

    def __call__(self, now_s: float) -> None:
        """Run a reference step if it is time to; the run does not see the time that this takes."""
        self._steps += 1
        if self._steps % EVERY_STEPS != 1:
            return
        began_s = time.perf_counter()
        if not self.seen:
            self.visits.begin_stretch()
        self.seen.append(self.visits.visit_next())
        self.clock.leave_out(time.perf_counter() - began_s)


def paces_of_runs(runs: Sequence[Sequence[tuple[Point, float]]], samples: Mapping[Point, Samples]) -> list[float]:
    """Return, for each run, how many seconds its steps took for each second of their medians in the grid.

    A run lasts as long as the sum of its steps, the slow ones of an unquiet machine included, so a mean is wanted. But
    one pause of the machine among a run's few reference steps would say too much. So a run has a level of its own, the
    median of its reference steps over those of the grid, and by how much a mean step exceeds that is taken from all
    runs together. ``runs``: what was ``seen`` during each; where that is nothing the pace is 1. ``samples``: of the
    grid, levelled.
    """
    usual_s = {point: float(np.median(found.step_s)) for point, found in samples.items()}
    ratios = [np.array([step_s / usual_s[point] for point, step_s in seen]) for seen in runs]
    levels = [float(np.median(found)) if found.size else 1.0 for found in ratios]
    beyond = [found / level for found, level in zip(ratios, levels, strict=True) if found.size]
    mean = float(np.concatenate(beyond).mean()) if beyond else 1.0
    return [level * mean for level in levels]


def at_pace(profile: Profile, pace: float) -> Profile:
    """Return a profile all of whose seconds are ``pace`` times as long."""

    def scaled(node: Any, is_time: bool) -> Any:
        if isinstance(node, dict):
            return {key: scaled(value, key == "seconds" or key.endswith("_s")) for key, value in node.items()}
        if isinstance(node, list):
            return [scaled(value, is_time) for value in node]
        return pace * node if is_time else node

    return Profile.model_validate_json(json.dumps(scaled(profile.model_dump(mode="json", exclude_none=True), False)))
