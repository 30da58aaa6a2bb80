"""Paged KV memory of a replica: blocks, free or in use, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import InvariantError


@dataclass(slots=True)
class KvPool:
    """A pool of ``total`` blocks of ``block_tokens`` tokens each; who holds how many is the holder's to know."""

    total: int
    block_tokens: int
    free: int = -1

    def __post_init__(self) -> None:
        """Start with every block free."""
        self.free = self.total

    @property
    def used(self) -> int:
        """Blocks in use."""
        return self.total - self.free

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_tokens)

    def take(self, blocks: int) -> None:
        """Take blocks out of the free ones; taking what is not there is our bug."""
        self.free -= blocks
        self.check()

    def give_back(self, blocks: int) -> None:
        """Return blocks to the free ones."""
        self.free += blocks
        self.check()

    def set_free(self, blocks: int) -> None:
        """Take over the number of free blocks from whoever took and gave back in the meantime."""
        self.free = blocks
        self.check()

    def check(self) -> None:
        """Raise `InvariantError` unless 0 <= free <= total."""
        if not 0 <= self.free <= self.total:
            raise InvariantError(f"KV pool: 0 <= free <= total fails: free {self.free}, total {self.total}")
