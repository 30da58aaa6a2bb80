"""The run's table of requests under way; a request that ended is handed on, and its place is used again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sim.kernels import (
    ACCEPTED,
    ADMITTED,
    ARRIVED,
    COUNT_FIELDS,
    DRAFTED,
    ENDED,
    FIRST,
    LAST,
    MAX_ITL,
    OUT,
    PREEMPTED,
    ROUNDS,
    TIME_FIELDS,
    VERIFIED,
)
from sim.records import Columns, Sink
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


class RequestLog:
    """Columns of the requests that arrived and were not handed on yet; grows while these become more.

    A *row* is a place in the columns, given to one request after another. ``times [TIME_FIELDS, capacity]`` and
    ``counts [COUNT_FIELDS, capacity]`` are written by the kernels; ``request_key`` is what a request's luck is keyed
    by: its number, or its user and turn. Requests are handed to ``sink`` in order of arrival, so that those that ended
    wait here for the ones before them.
    """

    def __init__(self, capacity: int, domains: tuple[str, ...], tenants: tuple[str, ...], sink: Sink) -> None:
        self.capacity = 0
        #: Requests that arrived so far.
        self.arrived = 0
        #: Called with the row of every request that ended.
        self.on_ended: Callable[[int], None] | None = None
        self.times: Floats = np.empty((TIME_FIELDS, 0))
        self.counts: Ints = np.empty((COUNT_FIELDS, 0), np.int64)
        self.prompt_tokens = self.output_tokens = self.domain = self.tenant = np.empty(0, np.int64)
        self.replica = self.status = self.reason = np.empty(0, np.int64)
        self.request_key: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._domains, self._tenants = np.array(domains, dtype=object), np.array(tenants, dtype=object)
        self._sink = sink
        self._handed_on = 0
        self._in_order: list[int] = []
        self._free: list[int] = []
        self._grow(max(capacity, 1))

    def lay_out(self, table: RequestTable, start: int, stop: int) -> list[int]:
        """Put rows ``start`` to ``stop`` of a table into places, in which they wait for their `arrive`."""
        n = stop - start
        if len(self._free) < n:
            self._make_room(n)
        rows = self._free[-n:][::-1]
        del self._free[-n:]
        self.times[ARRIVED, rows] = table.arrived_s[start:stop]
        for name in ("prompt_tokens", "output_tokens", "domain", "tenant"):
            getattr(self, name)[rows] = getattr(table, name)[start:stop]
        self.request_key[rows] = np.arange(start, stop, dtype=np.uint64)
        return rows

    def arrive(self, row: int) -> None:
        """Note that the request in a place arrived."""
        self._in_order.append(row)
        self.arrived += 1

    def add(self, arrived_s: float, prompt: int, output: int, domain: int, request_key: int) -> int:
        """Take in a request that arrives now; returns its row."""
        if not self._free:
            self._make_room(1)
        row = self._free.pop()
        self.times[ARRIVED, row] = arrived_s
        self.prompt_tokens[row] = prompt
        self.output_tokens[row] = output
        self.domain[row] = domain
        self.request_key[row] = request_key
        self.arrive(row)
        return row

    def end(self, row: int, status: int, reason: int) -> None:
        """Note how a request ended and tell whoever waits for it."""
        self.status[row] = status
        self.reason[row] = reason
        if self.on_ended is not None:
            self.on_ended(row)

    def hand_on(self, *, all_of_them: bool = False) -> None:
        """Hand on the requests that ended, up to the first in order of arrival that did not; or all of them."""
        rows = np.array(self._in_order, np.int64)
        if not all_of_them:
            goes_on = self.status[rows] == UNFINISHED
            rows = rows[: goes_on.argmax()] if goes_on.any() else rows
        self._sink(self._columns(rows))
        self._handed_on += rows.size
        del self._in_order[: rows.size]
        self._clear(rows)
        self._free += rows.tolist()

    def _make_room(self, wanted: int) -> None:
        """Free ``wanted`` places, and so many that room need not be made again soon."""
        self.hand_on()
        if len(self._free) < max(wanted, self.capacity // 4):
            self._grow(max(2 * self.capacity, self.capacity + wanted))

    def _grow(self, capacity: int) -> None:
        old, self.capacity = self.capacity, capacity
        for name in _COLUMNS:
            column = getattr(self, name)
            grown = np.empty((*column.shape[:-1], capacity), column.dtype)
            grown[..., :old] = column
            setattr(self, name, grown)
        self._clear(np.arange(old, capacity))
        self._free += range(capacity - 1, old - 1, -1)

    def _clear(self, rows: Ints) -> None:
        """Make places ready for new requests."""
        self.times[:, rows] = np.nan
        self.times[MAX_ITL, rows] = 0.0
        self.counts[:, rows] = 0
        self.replica[rows] = -1
        self.tenant[rows] = 0
        self.status[rows] = UNFINISHED
        self.reason[rows] = HORIZON

    def _columns(self, rows: Ints) -> Columns:
        """Return what became of requests, as `sim.records.REQUEST_COLUMNS`."""
        times, counts = self.times[:, rows], self.counts[:, rows]
        return {
            "request": np.arange(self._handed_on, self._handed_on + rows.size, dtype=np.int64),
            "tenant": self._tenants[self.tenant[rows]],
            "domain": self._domains[self.domain[rows]],
            "replica": self.replica[rows],
            "arrived_s": times[ARRIVED],
            "admitted_s": times[ADMITTED],
            "first_token_s": times[FIRST],
            "last_token_s": times[LAST],
            "ended_s": times[ENDED],
            "prompt_tokens": self.prompt_tokens[rows],
            "asked_tokens": self.output_tokens[rows],
            "output_tokens": counts[OUT],
            "rounds": counts[ROUNDS],
            "drafted_tokens": counts[DRAFTED],
            "verified_tokens": counts[VERIFIED],
            "accepted_draft_tokens": counts[ACCEPTED],
            "preemptions": counts[PREEMPTED],
            "max_itl_s": np.where(counts[OUT] > 1, times[MAX_ITL], np.nan),
            "status": np.array(STATUSES, dtype=object)[self.status[rows]],
            "reason": np.array(REASONS, dtype=object)[self.reason[rows]],
        }


_COLUMNS = (
    "times",
    "counts",
    "prompt_tokens",
    "output_tokens",
    "domain",
    "tenant",
    "replica",
    "status",
    "reason",
    "request_key",
)
