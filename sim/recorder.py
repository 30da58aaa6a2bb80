"""Collects step rows in blocks of an array; keeps every step, or sums them by second and replica."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sim.records import STEP_COLUMNS, STEP_FLOATS, Columns

BLOCK_ROWS = 1 << 15
_INDEX = {name: column for column, name in enumerate(STEP_COLUMNS)}
_KINDS = [np.float64 if name in STEP_FLOATS else np.int32 for name in STEP_COLUMNS]
_KEPT = [_INDEX["replica"], _INDEX["started_s"], _INDEX["ended_s"]]


@dataclass(slots=True)
class Recorder:
    """Step rows of one run. ``steps``: ``full`` keeps a row a step, ``per_second`` one a second and replica.

    A step belongs to the second in which it *ended*, when its tokens are delivered.
    """

    steps: Literal["full", "per_second"] = "full"
    #: Rows written so far of the block under way, ``[BLOCK_ROWS, columns]``; kernels write there.
    block: NDArray[np.float64] = field(default_factory=lambda: np.empty((BLOCK_ROWS, len(STEP_COLUMNS))))
    used: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    _blocks: list[list[NDArray[Any]]] = field(default_factory=list)
    _sums: list[NDArray[np.float64]] = field(default_factory=list)

    def record(self, row: tuple[float, ...]) -> None:
        """Add a step; the tuple follows `STEP_COLUMNS`."""
        self.block[self.used[0]] = row
        self.used[0] += 1
        if self.used[0] == BLOCK_ROWS:
            self.flush()

    def add_first_tokens(self, delivered: int, *, running: int, kv_blocks: int) -> None:
        """Add to the last row the tokens that prompts delivered at its end, and what the replica then holds."""
        row = self.block[self.used[0] - 1]
        row[_INDEX["output_tokens"]] += delivered
        row[_INDEX["first_tokens"]] += delivered
        row[_INDEX["running"]] = running
        row[_INDEX["kv_blocks"]] = kv_blocks

    def flush(self) -> None:
        """Put the block away and begin a new one."""
        rows = self.block[: self.used[0]]
        if self.steps == "full":
            # A step's counts fit 32 bits; half the memory of a long run is worth the copy.
            self._blocks.append([rows[:, column].astype(kind) for column, kind in enumerate(_KINDS)])
        else:
            self._sums.append(_per_second(rows))
            if len(self._sums) == 64:
                self._sums = [_per_second(np.concatenate(self._sums))]
        self.used[0] = 0

    def columns(self) -> Columns:
        """Return all step rows as columns, in order of their end, then of replica; the recorder is empty then."""
        self.flush()
        if self.steps == "per_second":
            rows = _per_second(np.concatenate(self._sums))
            self._sums = []
            return {
                name: rows[:, column].astype(np.float64 if name in STEP_FLOATS else np.int64)
                for name, column in _INDEX.items()
            }
        ended_s = np.concatenate([block[_INDEX["ended_s"]] for block in self._blocks])
        replica = np.concatenate([block[_INDEX["replica"]] for block in self._blocks])
        order = np.lexsort((replica, ended_s)).astype(np.int32)
        out: Columns = {}
        for column, name in enumerate(STEP_COLUMNS):
            whole = np.concatenate([block[column] for block in self._blocks])
            for block in self._blocks:
                block[column] = block[column][:0]
            out[name] = whole[order]
        self._blocks = []
        return out


def _per_second(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum step rows by second of their end and replica."""
    if not len(rows):
        return rows.copy()
    second = np.floor(rows[:, _INDEX["ended_s"]]).astype(np.int64)
    replica = rows[:, _INDEX["replica"]].astype(np.int64)
    order = np.lexsort((rows[:, _INDEX["ended_s"]], replica, second))
    rows, second, replica = rows[order], second[order], replica[order]
    first = np.flatnonzero(np.r_[True, (np.diff(second) != 0) | (np.diff(replica) != 0)])
    out = np.add.reduceat(rows, first)
    out[:, _KEPT] = rows[first][:, _KEPT]
    out[:, _INDEX["ended_s"]] = np.maximum.reduceat(rows[:, _INDEX["ended_s"]], first)
    return np.asarray(out)
