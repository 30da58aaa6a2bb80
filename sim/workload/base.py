"""The seam between traffic and whoever serves it: a table of requests, or users who wait for answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.registry import Registry

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ARRIVALS = Registry("arrivals kind", "dspark_sim.arrivals")
LENGTHS = Registry("lengths kind", "dspark_sim.lengths")


@dataclass(frozen=True, slots=True)
class RequestTable:
    """Offered requests in order of arrival, a row each; arrays are read-only.

    ``arrived_s``: ascending, from the start of the run; ``prompt_tokens``, ``output_tokens``: at least 1; ``domain``:
    index into ``domains``; ``tenant``: index into ``tenants``.
    """

    arrived_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    domain: Ints
    tenant: Ints
    domains: tuple[str, ...]
    tenants: tuple[str, ...] = ("-",)
    #: Rows of a trace that were dropped, clipped, spread or rescaled, by reason; empty for synthetic traffic.
    trace_rows: dict[str, int] = field(default_factory=dict)
    #: What a reader of the results must know (for instance: prompts with shared prefixes, no prefix cache).
    caveats: tuple[str, ...] = ()


class OpenArrivals(Protocol):
    """Arrivals that do not wait for answers."""

    kind: str

    def draw_arrivals_s(self, horizon_s: float, *, rng: np.random.Generator) -> Floats:
        """Draw arrival times in [0, horizon_s), ascending."""
        ...


class TokenLengths(Protocol):
    """A law of prompt or output lengths."""

    kind: str

    def draw_tokens(self, n: int, *, rng: np.random.Generator) -> Ints:
        """Draw ``n`` lengths in tokens, each at least 1."""
        ...
