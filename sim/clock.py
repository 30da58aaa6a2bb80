"""Simulated time with instants that are exact: an event can be put at a time, not only after a delay."""

from __future__ import annotations

from heapq import heappush

import simpy
from simpy.events import NORMAL, URGENT


class Clock(simpy.Environment):
    """A SimPy environment whose events can be put at an instant.

    ``now + (then - now)`` is not ``then`` in floating point. Step ends are computed by chains of additions, some of
    them inside
    one compiled call, and must not depend on how many events lay between.
    """

    def at(self, instant_s: float, *, first: bool = False) -> simpy.Event:
        """Return an event that happens at ``instant_s``, which is not before now.

        Of events at one instant, those marked ``first`` (arrivals) come before the others (step ends), and equal ones
        in
        order of creation.
        """
        event = simpy.Event(self)
        event._ok = True
        event._value = None
        heappush(self._queue, (max(instant_s, self._now), URGENT if first else NORMAL, next(self._eid), event))
        return event
