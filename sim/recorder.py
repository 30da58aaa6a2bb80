"""Collects the rows of a run and hands them on in their final order while the run goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sim.records import STEP_COLUMNS, STEP_FLOATS, Columns, RowGroups, Sink, joined

BLOCK_ROWS = 1 << 15
#: Rows of steps that may lie ahead of simulated time before replicas are held back to let it catch up.
MOST_ROWS_AHEAD = 1 << 18
_INDEX = {name: column for column, name in enumerate(STEP_COLUMNS)}
_KEPT = [_INDEX["replica"], _INDEX["started_s"], _INDEX["ended_s"]]


class Recorder:
    """Rows of one run: of steps, and of requests that will not change any more.

    ``steps``: ``full`` gives a row a step, ``per_second`` one a second and replica; a step belongs to the second in
    which it *ended*, when its tokens are delivered. Rows of steps come in order of their end, then of replica; rows of
    requests in order of arrival. Without sinks all rows are kept, and `close` returns them; with sinks, memory does not
    depend on their number.
    """

    def __init__(
        self,
        steps: Literal["full", "per_second"] = "full",
        steps_to: Sequence[Sink] = (),
        requests_to: Sequence[Sink] = (),
    ) -> None:
        self.steps = steps
        #: Rows written so far of the block under way, ``[BLOCK_ROWS, columns]``; kernels write there.
        self.block: NDArray[np.float64] = np.empty((BLOCK_ROWS, len(STEP_COLUMNS)))
        self.used: NDArray[np.int64] = np.zeros(1, np.int64)
        self._kept: tuple[list[Columns], list[Columns]] | None = None if steps_to or requests_to else ([], [])
        if self._kept is not None:
            requests_to, steps_to = ([kept.append] for kept in self._kept)
        self.step_rows = RowGroups(steps_to)
        self.request_rows = RowGroups(requests_to)
        #: Rows that ended at an instant which simulated time has not passed, in order.
        self._ahead: NDArray[np.float64] = np.empty((0, len(STEP_COLUMNS)))
        # A step's counts fit 32 bits; sums over a second may not.
        whole = np.int32 if steps == "full" else np.int64
        self._kinds = {name: np.float64 if name in STEP_FLOATS else whole for name in STEP_COLUMNS}

    @property
    def is_far_ahead(self) -> bool:
        """Whether so many rows lie ahead of simulated time that replicas should go step by step."""
        return len(self._ahead) > MOST_ROWS_AHEAD

    def record(self, row: tuple[float, ...]) -> None:
        """Add a step that ends now; the tuple follows `STEP_COLUMNS`."""
        self.block[self.used[0]] = row
        self.used[0] += 1
        if self.used[0] == BLOCK_ROWS:
            self.flush(row[_INDEX["ended_s"]])

    def add_first_tokens(self, delivered: int, *, running: int, kv_blocks: int) -> None:
        """Add to the last row the tokens that prompts delivered at its end, and what the replica then holds."""
        row = self.block[self.used[0] - 1]
        row[_INDEX["output_tokens"]] += delivered
        row[_INDEX["first_tokens"]] += delivered
        row[_INDEX["running"]] = running
        row[_INDEX["kv_blocks"]] = kv_blocks

    def flush(self, now_s: float) -> None:
        """Begin a new block; hand on what ended before ``now_s``, the simulated time: no earlier row can come."""
        rows = np.concatenate([self._ahead, self.block[: self.used[0]]])
        self.used[0] = 0
        rows = rows[np.lexsort((rows[:, _INDEX["replica"]], rows[:, _INDEX["ended_s"]]))]
        until_s = now_s if self.steps == "full" else np.floor(now_s)
        done = int(np.searchsorted(rows[:, _INDEX["ended_s"]], until_s))
        self._ahead = rows[done:].copy()
        rows = rows[:done]
        if self.steps == "per_second":
            rows = _per_second(rows)
        self.step_rows.add({name: rows[:, _INDEX[name]].astype(kind) for name, kind in self._kinds.items()})

    def close(self) -> tuple[Columns, Columns]:
        """Hand on what is left; returns all rows of requests and of steps where they were kept, or else nothing."""
        self.flush(np.inf)
        self.step_rows.close()
        self.request_rows.close()
        if self._kept is None:
            return {}, {}
        requests, steps = self._kept
        return joined(requests), joined(steps)


def _per_second(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum step rows, in order of their end, by second and replica."""
    if not len(rows):
        return rows
    second = np.floor(rows[:, _INDEX["ended_s"]]).astype(np.int64)
    replica = rows[:, _INDEX["replica"]].astype(np.int64)
    order = np.lexsort((replica, second))
    rows, second, replica = rows[order], second[order], replica[order]
    first = np.flatnonzero(np.r_[True, (np.diff(second) != 0) | (np.diff(replica) != 0)])
    out = np.add.reduceat(rows, first)
    out[:, _KEPT] = rows[first][:, _KEPT]
    out[:, _INDEX["ended_s"]] = np.maximum.reduceat(rows[:, _INDEX["ended_s"]], first)
    return np.asarray(out)
