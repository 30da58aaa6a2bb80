"""One pass over rows of several requests, side by side: nothing is padded to the longest of them.

A `Segment` is a request's share of a pass: so many new rows after so many that are cached. `Ragged` lays segments out
once a pass and then serves every layer: it writes the new keys and values into their blocks, and lets each query see
the rows of its own request.

On CUDA in half precision, attention over blocks is `torch.nn.attention.varlen` (flash attention with a block table).
Elsewhere queries of similar count are laid beside each other for one call a layer; only that call sees padding, in
attention alone. A call costs more than padding to `SHORT` queries does: on two cores (AVX2, 2026-12-03), a step of
SmolLM2-135M that verifies 12 tokens of 4 requests took 72 ms where they share one call, and 2.8 ms more for each call
beyond it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from decoder.paged_kv import PagedKv

#: Requests with up to so many rows share a call of attention, whatever their number: blocks of 7 and the anchor.
SHORT = 8


class Segment(NamedTuple):
    """``rows`` new rows of a request whose blocks are ``ids``; ``start`` rows lie before them."""

    ids: Sequence[int]
    start: int
    rows: int


class _Group:
    """Segments whose attention shares a call: queries and rows padded to the longest of the group."""

    def __init__(
        self,
        segments: Sequence[Segment],
        firsts: Sequence[int],
        block_tokens: int,
        causal: bool,
        device: torch.device,
    ) -> None:
        counts = np.array([segment.rows for segment in segments])
        starts = np.array([segment.start for segment in segments])
        queries, rows = int(counts.max()), int((starts + counts).max())
        blocks = -(-rows // block_tokens)
        # Filled up with a block of its own: another's may hold NaN, and attention multiplies what it does not see by 0.
        table = np.array([[segment.ids[0]] * blocks for segment in segments], np.int64)
        for index, segment in enumerate(segments):
            held = min(len(segment.ids), blocks)
            table[index, :held] = segment.ids[:held]
        offsets = np.arange(queries)
        real = offsets < counts[:, None]
        # What a row may see: itself and everything before it, or, in a block without a mask, the whole block. Rows that
        # only pad see what the first sees, lest there be nothing to see; no one reads what they find.
        seen = starts[:, None] + np.where(real, offsets, 0) + 1 if causal else np.tile(starts + counts, (queries, 1)).T
        # Whole blocks are read: what lies behind a text is finite and not seen.
        self.table = torch.from_numpy(table).flatten().to(device)
        self.visible = torch.from_numpy(np.arange(blocks * block_tokens) < seen[:, :, None])[:, None].to(device)
        take = np.array(firsts)[:, None] + np.where(real, offsets, 0)
        self.shape = take.shape
        #: Row of the pass that each padded query is, the padded queries that are real, and their rows.
        self.take = torch.from_numpy(take.flatten()).to(device)
        self.real = torch.from_numpy(np.flatnonzero(real)).to(device)
        self.put = torch.from_numpy(take[real]).to(device)
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    def mask(self, repeats: int, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores, ``[segments, 1, repeats * queries, rows]``."""
        if (repeats, dtype) not in self._masks:
            minus = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
            minus = minus.masked_fill(~self.visible, -torch.inf)
            self._masks[repeats, dtype] = minus.repeat(1, 1, repeats, 1)
        return self._masks[repeats, dtype]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
        """Attend from rows of ``query`` ``[rows, heads, head_dim]`` to a layer's blocks; write them into ``out``."""
        heads, width = query.shape[1:]
        shared = keys.shape[2]
        repeats = heads // shared
        segments, queries = self.shape
        # The query heads that share a key head stand as rows of one query, so that keys are read once, not repeated.
        asked = query.index_select(0, self.take).view(segments, queries, shared, repeats, width).permute(0, 2, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            asked.reshape(segments, shared, repeats * queries, width),
            self._rows(keys),
            self._rows(values),
            attn_mask=self.mask(repeats, query.dtype),
            scale=scale,
        )
        mixed = mixed.view(segments, shared, repeats, queries, width).permute(0, 3, 1, 2, 4)
        mixed = mixed.reshape(segments * queries, heads, width)
        out.index_copy_(0, self.put, mixed.index_select(0, self.real))

    def _rows(self, blocks: Tensor) -> Tensor:
        """Return the rows of each segment's blocks, ``[segments, key/value heads, rows, head_dim]``."""
        found = blocks.index_select(0, self.table)
        return found.view(self.shape[0], -1, *found.shape[2:]).transpose(1, 2)


@dataclass(slots=True)
class _Tables:
    """What the CUDA kernel reads; fixed buffers where a graph was captured over them."""

    cu_queries: Tensor
    cu_rows: Tensor
    rows: Tensor
    blocks: Tensor
    max_queries: int
    max_rows: int


@dataclass(slots=True, eq=False)
class Ragged:
    """A pass, laid out.

    ``positions`` ``[rows]``: places in the texts; ``storage_rows`` ``[rows]``: where the new rows go. ``padded``: rows
    in all, those that only fill up a graph's size included; they stand last, belong to no request and write to the
    block that is nobody's.
    """

    segments: tuple[Segment, ...]
    block_tokens: int
    blocks: int
    device: torch.device
    causal: bool = True
    padded: int | None = None
    #: First row of each segment.
    firsts: tuple[int, ...] = field(init=False)
    rows: int = field(init=False)
    positions: Tensor = field(init=False)
    storage_rows: Tensor = field(init=False)
    tables: _Tables | None = field(init=False, default=None)
    _groups: list[_Group] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Lay out the segments."""
        counts = np.array([segment.rows for segment in self.segments], np.int64)
        self.firsts = tuple(int(first) for first in np.cumsum(counts) - counts)
        self.rows = int(counts.sum())
        padded = self.rows if self.padded is None else self.padded
        if padded < self.rows:
            raise ValueError(f"{self.rows} rows do not fit {padded}")
        positions = np.zeros(padded, np.int64)
        storage = np.full(padded, self.blocks * self.block_tokens, np.int64)
        for segment, first in zip(self.segments, self.firsts, strict=True):
            places = np.arange(segment.start, segment.start + segment.rows)
            positions[first : first + segment.rows] = places
            ids = np.asarray(segment.ids, np.int64)
            storage[first : first + segment.rows] = ids[places // self.block_tokens] * self.block_tokens + (
                places % self.block_tokens
            )
        self.positions = torch.from_numpy(positions).to(self.device)
        self.storage_rows = torch.from_numpy(storage).to(self.device)

    def _grouped(self) -> list[_Group]:
        # Short counts share a call, and longer ones within a factor of two.
        alike: dict[int, list[int]] = defaultdict(list)
        for index, segment in enumerate(self.segments):
            if segment.rows:
                alike[(max(segment.rows, SHORT) - 1).bit_length()].append(index)
        return [
            _Group(
                [self.segments[i] for i in group],
                [self.firsts[i] for i in group],
                self.block_tokens,
                self.causal,
                self.device,
            )
            for group in alike.values()
        ]

    def _tables(self) -> _Tables:
        counts = [segment.rows for segment in self.segments]
        rows = [segment.start + segment.rows for segment in self.segments]
        widest = max((len(segment.ids) for segment in self.segments), default=1)
        blocks = np.zeros((len(self.segments), widest), np.int32)
        for index, segment in enumerate(self.segments):
            blocks[index, : len(segment.ids)] = segment.ids

        def there(values: object) -> Tensor:
            return torch.as_tensor(np.asarray(values, np.int32), device=self.device)

        return _Tables(
            there(np.cumsum([0, *counts])),
            there(np.cumsum([0, *rows])),
            there(rows),
            there(blocks),
            max(counts, default=1),
            max(rows, default=1),
        )

    @classmethod
    def fixed(
        cls,
        size: int,
        segments: int,
        queries: int,
        rows: int,
        block_tokens: int,
        blocks: int,
        device: torch.device,
    ) -> Ragged:
        """Return a pass of fixed buffers for a CUDA graph, empty: ``size`` rows, all of them padding.

        ``segments``, ``queries``, ``rows``: requests, new rows of each, and rows of each in all, at most.
        """
        out = cls((), block_tokens, blocks, device, padded=size)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        table = zeros(segments, -(-rows // block_tokens))
        out.tables = _Tables(zeros(segments + 1), zeros(segments + 1), zeros(segments), table, queries, rows)
        return out

    def refill(self, other: Ragged) -> None:
        """Take over another pass's contents, in place; segments that it lacks are empty."""
        assert self.tables is not None
        tables = other._tables()
        self.positions.copy_(other.positions, non_blocking=True)
        self.storage_rows.copy_(other.storage_rows, non_blocking=True)
        count = len(other.segments)
        for mine, theirs in (
            (self.tables.cu_queries, tables.cu_queries),
            (self.tables.cu_rows, tables.cu_rows),
        ):
            mine[: count + 1] = theirs
            mine[count + 1 :] = theirs[-1]
        self.tables.rows.zero_()[:count] = tables.rows
        self.tables.blocks[:count, : tables.blocks.shape[1]] = tables.blocks

    def write(self, kv: PagedKv, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the new rows of a layer, each ``[rows, key/value heads, head_dim]``."""
        all_keys, all_values = kv.flat(layer)
        all_keys.index_copy_(0, self.storage_rows, keys)
        all_values.index_copy_(0, self.storage_rows, values)

    def attend(self, query: Tensor, kv: PagedKv, layer: int, scale: float) -> Tensor:
        """Let ``query`` ``[rows, heads, head_dim]`` see its own requests' rows; same shape out."""
        if kv.has_kernel:
            return self._attend_kernel(query, kv, layer, scale)
        if self._groups is None:
            self._groups = self._grouped()
        out = torch.zeros_like(query)
        for group in self._groups:
            group.attend(query, kv.keys[layer], kv.values[layer], scale, out)
        return out

    def _attend_kernel(self, query: Tensor, kv: PagedKv, layer: int, scale: float) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if self.tables is None:
            self.tables = self._tables()
        tables = self.tables
        mixed = varlen_attn(
            query,
            kv.keys[layer],
            kv.values[layer],
            tables.cu_queries,
            tables.cu_rows,
            tables.max_queries,
            tables.max_rows,
            scale=scale,
            window_size=(-1, 0) if self.causal else (-1, -1),
            enable_gqa=True,
            seqused_k=tables.rows,
            block_table=tables.blocks,
        )
        assert isinstance(mixed, Tensor)
        return mixed
