"""Paged key/value memory: blocks that requests hold, and the rows that lie in them.

The pool counts; the storages (of the target, of the drafter) hold the numbers. Both read the same block ids, since a
row of one is a row of the other: the token at position i of a request's text lies in its block ``i // block_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoder.errors import Fault, InputError
from sim.errors import InvariantError

#: Rows of a block, or a divisor of them, that flash attention can read on CUDA.
KERNEL_BLOCK_TOKENS = 256


@dataclass(slots=True, eq=False)
class Pages:
    """The blocks of one request, in order of its text."""

    ids: list[int] = field(default_factory=list)


class BlockPool:
    """``blocks`` blocks of ``block_tokens`` rows each, free or held by exactly one request."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._free = list(range(blocks))[::-1]

    @property
    def free(self) -> int:
        """Free blocks."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return self.blocks - len(self._free)

    def blocks_for(self, rows: int) -> int:
        """Return the blocks that hold ``rows`` rows."""
        return -(-rows // self.block_tokens)

    def missing(self, pages: Pages, rows: int) -> int:
        """Return the blocks that a request lacks to hold ``rows`` rows."""
        return max(self.blocks_for(rows) - len(pages.ids), 0)

    def grow(self, pages: Pages, rows: int) -> None:
        """Give a request the blocks that it lacks to hold ``rows`` rows; more than are free is our bug."""
        missing = self.missing(pages, rows)
        if missing > self.free:
            raise InvariantError(f"KV pool: {missing} blocks taken of {self.free} free")
        pages.ids += [self._free.pop() for _ in range(missing)]

    def trim(self, pages: Pages, rows: int) -> None:
        """Take back the blocks behind the first ``rows`` rows."""
        keep = self.blocks_for(rows)
        self._free += pages.ids[keep:][::-1]
        del pages.ids[keep:]

    def check(self, held: Iterable[Pages]) -> None:
        """Raise `InvariantError` unless every block is free or held, once."""
        ids = sorted([*self._free, *(block for pages in held for block in pages.ids)])
        if ids != list(range(self.blocks)):
            raise InvariantError(f"KV pool: free + held = {len(ids)} blocks, each once, fails for {self.blocks}")


class PagedKv:
    """Keys and values of each layer, ``[blocks + 1, block_tokens, key/value heads, head_dim]``.

    The last block belongs to nobody: rows that only pad a step are written there.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        head_dim: int,
        pool: BlockPool,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (pool.blocks + 1, pool.block_tokens, heads, head_dim)
        self.bytes_per_token = 2 * layers * heads * head_dim * dtype.itemsize
        #: Whether flash attention reads these blocks itself: on CUDA, in half precision, 256 rows a block or multiples.
        self.has_kernel = device.type == "cuda" and dtype.itemsize == 2 and pool.block_tokens % KERNEL_BLOCK_TOKENS == 0
        try:
            self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
            self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        except RuntimeError as fault:  # torch's own out-of-memory error is one; on a CPU it is nothing more
            if "memory" not in str(fault):
                raise
            total = self.bytes_per_token * pool.blocks * pool.block_tokens
            raise InputError(
                Fault(
                    f"{pool.blocks} blocks of {pool.block_tokens} tokens need {total / 2**30:.1f} GiB of memory on "
                    f"{device}, which are not free",
                    key="kv_blocks",
                )
            ) from None

    def scrub(self, blocks: Sequence[int]) -> None:
        """Write zeros over blocks that may hold NaN: attention multiplies by 0 what it does not see."""
        for storage in (*self.keys, *self.values):
            storage[list(blocks)] = 0

    def flat(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values by row, each ``[rows, key/value heads, head_dim]``."""
        return self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)
