"""What a run writes down: the columns of ``requests.parquet`` and ``steps.parquet``, as plain arrays.

Facts only: every metric is computed from these by `sim.metrics`. A measured run of the real engine writes
the same columns. Rows come in groups while the run goes, so that nobody must hold them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Arrays of one length by name; NaN or None where there is no value.
Columns = Mapping[str, NDArray[Any]]

#: Takes rows, a group at a time.
Sink = Callable[[Columns], None]

#: Rows of a group (the last one of a table has what is left): 7 MB of steps.
GROUP_ROWS = 1 << 16

#: A row an engine step (or, aggregated, a row a second and replica: counts and spans are sums over its steps).
STEP_COLUMNS = (
    "replica",  # index; prefill engines of a disaggregated fleet follow the decode replicas
    "steps",  # 1; more in an aggregated row
    "started_s",  # start of the step (of the first one)
    "ended_s",  # end of the step (of the last one)
    "busy_s",  # its duration (their sum)
    "draft_s",  # of this, drafting
    "decoding",  # requests that decoded
    "decoding_s",  # requests that decoded times the duration of the step: request seconds
    "prompt_tokens",  # prompt tokens computed
    "batch_tokens",  # tokens verified: bonus and draft tokens of the decoding requests
    "drafted_tokens",  # draft tokens proposed
    "verified_tokens",  # draft tokens verified
    "trimmed_tokens",  # draft tokens that the policy chose and the batch limit cut
    "accepted_draft_tokens",  # draft tokens delivered
    "output_tokens",  # tokens delivered, first tokens of prompts included
    "first_tokens",  # of these, tokens that a prompt's last chunk delivered
    "running",  # requests admitted at its end, decoding or in prefill (sum over steps)
    "waiting",  # requests waiting at its end (sum over steps)
    "kv_blocks",  # KV blocks in use at its end (sum over steps)
    "context_tokens",  # tokens in the caches of the decoding requests at its start (sum over steps)
    "outside_steps",  # 1 where the batch lay outside what the profile measured (sum)
)
STEP_FLOATS = frozenset({"started_s", "ended_s", "busy_s", "draft_s", "decoding_s"})

#: A row a request that arrived. Times are seconds from the start of the run, NaN (null) where it did not happen.
REQUEST_COLUMNS = (
    "request",  # row number, in order of arrival
    "tenant",
    "domain",
    "replica",  # decode replica, -1 if it never got to one
    "arrived_s",
    "admitted_s",  # first admission
    "first_token_s",
    "last_token_s",
    "ended_s",
    "prompt_tokens",
    "asked_tokens",  # output tokens it would have
    "output_tokens",  # output tokens delivered
    "rounds",
    "drafted_tokens",
    "verified_tokens",
    "accepted_draft_tokens",
    "preemptions",
    "max_itl_s",  # longest gap between two deliveries
    "status",
    "reason",
)


class RowGroups:
    """Hands rows on to every sink in groups of `GROUP_ROWS`, however they come in; a table without rows is one group.

    So neither bytes on disk nor the order in which floats are summed depend on when rows came.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self.sinks = tuple(sinks)
        self._parts: list[Columns] = []
        self._rows = 0
        self._is_begun = False

    def add(self, columns: Columns) -> None:
        """Take in rows."""
        self._parts.append(columns)
        self._rows += _rows(columns)
        if self._rows < GROUP_ROWS:
            return
        whole = joined(self._parts)
        ends = range(GROUP_ROWS, self._rows + 1, GROUP_ROWS)
        for end in ends:
            self._hand_on({name: column[end - GROUP_ROWS : end] for name, column in whole.items()})
        self._rows -= len(ends) * GROUP_ROWS
        self._parts = [{name: column[ends[-1] :].copy() for name, column in whole.items()}]

    def close(self) -> None:
        """Hand on what is left."""
        if self._parts and (self._rows or not self._is_begun):
            self._hand_on(joined(self._parts))
        self._parts = []

    def _hand_on(self, group: Columns) -> None:
        self._is_begun = True
        for sink in self.sinks:
            sink(group)


def groups(columns: Columns) -> Iterator[Columns]:
    """Cut columns into groups of `GROUP_ROWS`, as they would have come out of a run."""
    for start in range(0, max(_rows(columns), 1), GROUP_ROWS):
        yield {name: column[start : start + GROUP_ROWS] for name, column in columns.items()}


def joined(parts: list[Columns]) -> Columns:
    """Join rows of the same columns; ``parts`` is emptied, a column at a time, to save memory."""
    held = [dict(part) for part in parts]
    parts.clear()
    return {name: np.concatenate([part.pop(name) for part in held]) for name in list(held[0])} if held else {}


def _rows(columns: Columns) -> int:
    return int(next(iter(columns.values())).size)
