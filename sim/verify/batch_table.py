"""A table from running requests to draft length: what serving engines ship today."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, MinLen
from numpy.typing import NDArray

from sim.verify.base import POLICIES, Blind, Confidence, DrafterKind, Lengths, Rates, check_within_block


@POLICIES.register("batch_table")
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTable(Blind):
    """Draft and verify a length that depends on the running requests alone.

    ``table``: rows ``[requests, length]``; from so many running requests on, that length holds, up to the next row.
    The first row starts at 1. Length 0 turns drafting off, and with it the draft time.
    ``hysteresis``: a row stays until the running requests leave its range by that many; a replica starts in the
    first row.
    """

    kind: Literal["batch_table"] = "batch_table"
    table: Annotated[tuple[tuple[Annotated[int, Ge(1)], Annotated[int, Ge(0)]], ...], MinLen(1)]
    hysteresis: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        """Check that the rows cover every number of requests once."""
        starts = [requests for requests, _ in self.table]
        if starts[0] != 1:
            raise ValueError(f"table: expected the first row to start at 1 request (got {starts[0]})")
        for above, below in itertools.pairwise(starts):
            if below <= above:
                raise ValueError(f"table: expected requests to rise from row to row (got {below} after {above})")
        if all(length == 0 for _, length in self.table):
            raise ValueError("table: expected a length above 0 in some row; for no drafting at all use 'none' (got 0)")

    @property
    def starts(self) -> NDArray[np.int64]:
        """Running requests from which each row holds."""
        return np.array([requests for requests, _ in self.table], np.int64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Draft length of each row."""
        return np.array([length for _, length in self.table], np.int64)

    def check_drafter(self, trained_length: int, kind: DrafterKind) -> None:
        """Refuse a row above a block drafter's trained block; a chain can be drawn out."""
        for row, (_, length) in enumerate(self.table):
            check_within_block(f"table[{row}][1]", length, trained_length, kind)

    def draft_length(self, requests: int, trained_length: int) -> int:
        """Draft the length of the row that ``requests`` fall into, hysteresis aside."""
        return [length for first, length in self.table if first <= max(requests, 1)][-1]

    def start(self) -> TableReader:
        """Start in the first row."""
        return TableReader(self)


class TableReader:
    """Where one replica stands in the table."""

    __slots__ = ("_hysteresis", "_lengths", "_row", "_starts")

    def __init__(self, policy: BatchTable) -> None:
        self._starts = policy.starts
        self._lengths = policy.lengths
        self._hysteresis = policy.hysteresis
        self._row = 0

    def draft_length(self, requests: int, trained_length: int) -> int:
        """Draft the current row's length; asking twice for the same ``requests`` changes nothing."""
        from sim.verify import kernels

        self._row = kernels.table_row(self._row, requests, self._starts, self._hysteresis)
        return int(self._lengths[self._row])

    def verify_lengths(self, confidence: Confidence, steps_per_s: Rates) -> Lengths:
        """Verify the current row's length in every request, or all where fewer were drafted."""
        requests, drafted = confidence.shape
        return np.full(requests, min(self.draft_length(requests, drafted), drafted), np.int64)
