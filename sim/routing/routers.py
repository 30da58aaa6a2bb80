"""The built-in routers. Ties go to the lowest index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sim.routing.base import ROUTERS

Ints = NDArray[np.int64]


@ROUTERS.register("round_robin")
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin:
    """Replicas in turn, whatever their state."""

    kind: Literal["round_robin"] = "round_robin"

    def start(self) -> Turns:
        """Begin at replica 0."""
        return Turns()


@dataclass(slots=True)
class Turns:
    """Whose turn it is."""

    next: int = 0

    def pick(self, requests: Ints, kv_blocks: Ints, *, rng: np.random.Generator) -> int:
        """Return the replica whose turn it is."""
        turn = self.next % requests.size
        self.next = turn + 1
        return turn

    def arrivals_ahead(self, index: int, replicas: int) -> int | None:
        """Count the turns."""
        return (index - self.next) % replicas


class LooksAtState:
    """A router whose picks depend on what the replicas hold."""

    __slots__ = ()

    def arrivals_ahead(self, index: int, replicas: int) -> int | None:
        """Not known ahead."""
        return None


@ROUTERS.register("least_requests")
@dataclass(frozen=True, slots=True, kw_only=True)
class LeastRequests(LooksAtState):
    """The replica with the fewest requests, waiting or running."""

    kind: Literal["least_requests"] = "least_requests"

    def start(self) -> LeastRequests:
        """Keep no memory."""
        return self

    def pick(self, requests: Ints, kv_blocks: Ints, *, rng: np.random.Generator) -> int:
        """Return the replica with the fewest requests."""
        return int(np.argmin(requests))


@ROUTERS.register("least_kv")
@dataclass(frozen=True, slots=True, kw_only=True)
class LeastKv(LooksAtState):
    """The replica with the fewest KV blocks in use; among equals, the one with the fewest requests."""

    kind: Literal["least_kv"] = "least_kv"

    def start(self) -> LeastKv:
        """Keep no memory."""
        return self

    def pick(self, requests: Ints, kv_blocks: Ints, *, rng: np.random.Generator) -> int:
        """Return the replica with the least KV in use."""
        return int(np.lexsort((requests, kv_blocks))[0])


@ROUTERS.register("power_of_two")
@dataclass(frozen=True, slots=True, kw_only=True)
class PowerOfTwo(LooksAtState):
    """Of two replicas drawn at random, the one with fewer requests (Mitzenmacher 2001)."""

    kind: Literal["power_of_two"] = "power_of_two"

    def start(self) -> PowerOfTwo:
        """Keep no memory."""
        return self

    def pick(self, requests: Ints, kv_blocks: Ints, *, rng: np.random.Generator) -> int:
        """Draw two different replicas and return the less loaded."""
        n = requests.size
        if n == 1:
            return 0
        one = int(rng.integers(n))
        other = (one + 1 + int(rng.integers(n - 1))) % n
        return min(one, other, key=lambda replica: (requests[replica], replica))
