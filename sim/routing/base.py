"""Which replica an arrival goes to."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.registry import Registry

ROUTERS = Registry("router", "dspark_sim.routers")


class Route(Protocol):
    """Picks a replica; may remember its earlier picks."""

    def pick(self, requests: NDArray[np.int64], kv_blocks: NDArray[np.int64], *, rng: np.random.Generator) -> int:
        """Return the index of a replica.

        ``requests``: requests that each replica holds, waiting or running, ``[replicas]``; ``kv_blocks``: KV blocks
        it has in
        use, ``[replicas]``.
        """
        ...

    def arrivals_ahead(self, index: int, replicas: int) -> int | None:
        """Return how many arrivals go elsewhere before one goes to ``index``; None where replicas' state decides."""
        ...


class Router(Protocol):
    """Frozen settings of a router."""

    @property
    def kind(self) -> str:
        """Name in the registry."""
        ...

    def start(self) -> Route:
        """Return what picks for one fleet; a router without memory returns itself."""
        ...
