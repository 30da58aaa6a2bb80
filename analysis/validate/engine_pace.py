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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from profiles.schema import Profile

if TYPE_CHECKING:
    from decoder.load import WallClock
    from decoder.step_times import Point, Visits

#: A reference step is run so often, by the run's clock.
EVERY_S = 1.0


@dataclass(slots=True)
class PaceReader:
    """Reads the pace during one run; hand it to `decoder.serve.serve_cell` as ``on_progress``.

    ``visits``: to the grid, on an engine of their own. ``clock``: the run's. ``seen``: reference steps, with their
    seconds.
    """

    visits: Visits
    clock: WallClock
    seen: list[tuple[Point, float]] = field(default_factory=list)
    _next_s: float = 0.0

    def __call__(self, now_s: float) -> None:
        """Run a reference step if it is time to; the run does not see the time that this takes."""
        if now_s < self._next_s:
            return
        began_s = time.perf_counter()
        self.seen.append(self.visits.visit_next())
        self._next_s = now_s + EVERY_S
        self.clock.leave_out(time.perf_counter() - began_s)

    @property
    def ratios(self) -> NDArray[np.float64]:
        """Seconds of each reference step over the median of all visits to its point so far."""
        samples = self.visits.samples
        return np.array([step_s / np.median(samples[point].step_s) for point, step_s in self.seen], np.float64)

    @property
    def level(self) -> float:
        """The median of `ratios`; 1 where nothing was read."""
        return float(np.median(self.ratios)) if self.seen else 1.0


def pace_of(reader: PaceReader, readers: Sequence[PaceReader]) -> float:
    """Return how many seconds steps took during a run for each second of their medians in the grid.

    A run lasts as long as the sum of its steps, the slow ones of an unquiet machine included, so a mean is wanted. But
    one pause of the machine among a run's few reference steps would say too much. So a run has a level of its own, and
    by how much a mean step exceeds that is taken from ``readers``, those of all runs.
    """
    found = [one.ratios / one.level for one in readers if one.seen]
    return reader.level * float(np.concatenate(found).mean()) if found else 1.0


def at_pace(profile: Profile, pace: float) -> Profile:
    """Return a profile all of whose seconds are ``pace`` times as long."""

    def scaled(node: Any, is_time: bool) -> Any:
        if isinstance(node, dict):
            return {key: scaled(value, key == "seconds" or key.endswith("_s")) for key, value in node.items()}
        if isinstance(node, list):
            return [scaled(value, is_time) for value in node]
        return pace * node if is_time else node

    return Profile.model_validate_json(json.dumps(scaled(profile.model_dump(mode="json", exclude_none=True), False)))
