"""The run's table of requests: what was offered and what became of each, a row a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sim.kernels import ARRIVED, COUNT_FIELDS, MAX_ITL, TIME_FIELDS
from sim.workload.base import RequestTable

UNFINISHED, FINISHED, REJECTED, ABORTED, FAILED = range(5)
STATUSES = ("unfinished", "finished", "rejected", "aborted", "failed")

#: Why a request ended as it did.
REASONS = (
    "horizon",  # unfinished: the run ended first
    "stop",  # finished: its whole output was delivered
    "context_limit",  # finished: prompt and output filled the context
    "queue_full",  # rejected
    "prompt_too_long",  # rejected: no room for an output token in the context, or no KV memory for the prompt
    "deadline",  # aborted
    "kv_exhausted",  # failed: alone on its replica and out of KV memory
)
HORIZON, STOP, CONTEXT_LIMIT, QUEUE_FULL, PROMPT_TOO_LONG, DEADLINE, KV_EXHAUSTED = range(len(REASONS))

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class RequestLog:
    """Columns of all requests that arrived; grows where users wait for answers before they ask again.

    ``times [TIME_FIELDS, capacity]`` and ``counts [COUNT_FIELDS, capacity]`` are written by the kernels;
    ``request_key`` is what a request's luck is keyed by: its row, or its user and turn.
    """

    capacity: int
    size: int = 0
    times: Floats = field(init=False)
    counts: Ints = field(init=False)
    prompt_tokens: Ints = field(init=False)
    output_tokens: Ints = field(init=False)
    domain: Ints = field(init=False)
    tenant: Ints = field(init=False)
    replica: Ints = field(init=False)
    status: Ints = field(init=False)
    reason: Ints = field(init=False)
    request_key: NDArray[np.uint64] = field(init=False)
    #: Called with the row of every request that ended.
    on_ended: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        """Allocate the columns."""
        n = self.capacity
        self.times = np.full((TIME_FIELDS, n), np.nan)
        self.times[MAX_ITL] = 0.0
        self.counts = np.zeros((COUNT_FIELDS, n), np.int64)
        for name in ("prompt_tokens", "output_tokens", "domain", "tenant", "status", "reason"):
            setattr(self, name, np.zeros(n, np.int64))
        self.replica = np.full(n, -1, np.int64)
        self.request_key = np.zeros(n, np.uint64)

    @classmethod
    def of_table(cls, table: RequestTable) -> RequestLog:
        """Lay out the rows of a table; a row counts as arrived once `arrive` was called for it."""
        n = table.arrived_s.size
        log = cls(max(n, 1))
        log.times[ARRIVED, :n] = table.arrived_s
        log.prompt_tokens[:n] = table.prompt_tokens
        log.output_tokens[:n] = table.output_tokens
        log.domain[:n] = table.domain
        log.tenant[:n] = table.tenant
        log.request_key[:n] = np.arange(n, dtype=np.uint64)
        return log

    def add(self, arrived_s: float, prompt: int, output: int, domain: int, request_key: int) -> int:
        """Append a request; returns its row."""
        if self.size == self.capacity:
            self._grow()
        row = self.size
        self.size += 1
        self.times[ARRIVED, row] = arrived_s
        self.prompt_tokens[row] = prompt
        self.output_tokens[row] = output
        self.domain[row] = domain
        self.request_key[row] = request_key
        return row

    def _grow(self) -> None:
        grown = RequestLog(2 * self.capacity)
        for name in ("times", "counts"):
            getattr(grown, name)[:, : self.size] = getattr(self, name)
            setattr(self, name, getattr(grown, name))
        for name in (
            "prompt_tokens",
            "output_tokens",
            "domain",
            "tenant",
            "replica",
            "status",
            "reason",
            "request_key",
        ):
            getattr(grown, name)[: self.size] = getattr(self, name)
            setattr(self, name, getattr(grown, name))
        self.capacity = grown.capacity

    def end(self, row: int, status: int, reason: int) -> None:
        """Note how a request ended and tell whoever waits for it."""
        self.status[row] = status
        self.reason[row] = reason
        if self.on_ended is not None:
            self.on_ended(row)
