"""Which requests are where, what KV they hold, and what the next step holds of them; the order is `sim.replica`'s."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from decoder.batched_drafting import BatchDrafter
from decoder.paged_kv import BlockPool, Pages
from decoder.served import Chunk, Plan, Served, Settings
from sim.errors import InvariantError


class Scheduler:
    """Requests that wait, are read or are decoded, in order, and the blocks that they hold.

    ``on_ended`` is told of every request that ends; ``scrub`` of blocks that come back and may hold NaN.
    """

    def __init__(
        self,
        pool: BlockPool,
        settings: Settings,
        drafter: BatchDrafter | None,
        on_ended: Callable[[Served], None],
        scrub: Callable[[Sequence[int]], None],
    ) -> None:
        self.pool = pool
        self.settings = settings
        self.waiting: deque[Served] = deque()
        self.in_prefill: deque[Served] = deque()
        self.decoding: list[Served] = []
        self._drafter = drafter
        self._trained_length = drafter.drafter.trained_length if drafter else 0
        self._on_ended = on_ended
        self._scrub = scrub

    @property
    def inside(self) -> int:
        """Requests that wait, are read or are decoded."""
        return len(self.waiting) + len(self.in_prefill) + len(self.decoding)

    def submit(self, served: Served, now: float) -> None:
        """Let an arrival wait, or reject it at once."""
        limit = self.settings.max_waiting
        if not self._fits(len(served.request.prompt_ids)):
            self.end(served, "rejected", "prompt_too_long", now)
        elif limit is not None and len(self.waiting) >= limit:
            self.end(served, "rejected", "queue_full", now)
        else:
            self.waiting.append(served)

    def _fits(self, prompt_tokens: int) -> bool:
        """Whether a prompt leaves an output token of context, and KV memory for itself and one round."""
        rows = prompt_tokens + 1 + self._trained_length
        return prompt_tokens < self.settings.max_context_tokens and self.pool.blocks_for(rows) <= self.pool.blocks

    def plan(self, now: float, draft_length: Callable[[int], int]) -> Plan | None:
        """Settle what the next step holds, with all the memory it may need; None where there is nothing to run.

        ``draft_length``: draft tokens of each of so many decoding requests. KV for them is reserved, and whoever must
        make room is preempted, before anything is drafted.
        """
        while True:
            self._abort_late(now)
            self._admit(now)
            decoding = len(self.decoding)
            decodes, budget = self.settings.prefill.share(
                decoding, bool(self.in_prefill), self.settings.max_batch_tokens
            )
            chunks = self._chunks(budget)
            if not ((decoding and decodes) or chunks):
                return None
            running = list(self.decoding) if decodes else []
            drafted = draft_length(len(running)) if running else 0
            lacking = sum(self._missing(served, 1 + drafted) for served in running)
            if lacking <= self.pool.free:
                break
            self._preempt_youngest(now)
        pages = []
        for served in running:
            assert served.pages is not None
            self.pool.grow(served.pages, served.rows + 1 + drafted)
            pages.append(served.pages)
        return Plan(now, running, chunks, drafted, sum(served.rows for served in running), pages)

    def _missing(self, served: Served, rows: int) -> int:
        assert served.pages is not None
        return self.pool.missing(served.pages, served.rows + rows)

    def _abort_late(self, now: float) -> None:
        deadline_s = self.settings.deadline_s
        if deadline_s == np.inf:
            return
        for place in (self.waiting, self.in_prefill):
            for served in [served for served in place if now > served.arrived_s + deadline_s]:
                self.end(served, "aborted", "deadline", now)

    def _admit(self, now: float) -> None:
        """Admit from the head of the queue while a seat and KV for what is to read and a first round are free."""
        # Memory that decoding needs for its own next round is not given away.
        spare = self.pool.free - sum(self._missing(served, 1 + self._trained_length) for served in self.decoding)
        while self.waiting and len(self.decoding) + len(self.in_prefill) < self.settings.max_running:
            served = self.waiting[0]
            to_read = served.tokens - bool(served.output_ids)
            with_round = self.pool.blocks_for(to_read + 1 + self._trained_length)
            if with_round > spare:
                if not (self.decoding or self.in_prefill):
                    # Grown past the whole memory: computing it again would not help.
                    self.end(served, "failed", "kv_exhausted", now)
                    continue
                return
            self.waiting.popleft()
            spare -= with_round
            served.pages = Pages()
            self.pool.grow(served.pages, to_read)
            served.draft = self._drafter.start(served.pages) if self._drafter else None
            served.rows, served.to_read = 0, to_read
            if np.isnan(served.admitted_s):
                served.admitted_s = now
            self.in_prefill.append(served)

    def _chunks(self, budget: int) -> list[Chunk]:
        """List the prompt rows of the step, first come first served."""
        chunks = []
        for served in self.in_prefill:
            if budget <= 0:
                break
            count = min(served.to_read - served.rows, budget)
            chunks.append(Chunk(served, served.rows, count))
            budget -= count
        return chunks

    def _preempt_youngest(self, now: float) -> None:
        """Send the youngest request back; the last one left fails instead."""
        youngest = (self.in_prefill or self.decoding)[-1]
        if not self.in_prefill and len(self.decoding) == 1:
            self.end(youngest, "failed", "kv_exhausted", now)
        else:
            self.preempt(youngest)

    def preempt(self, served: Served) -> None:
        """Send a running request back to be computed again, first in line."""
        self.remove(served)
        self._drop(served, clean=False)
        served.preemptions += 1
        self.waiting.appendleft(served)

    def start_decoding(self, served: Served) -> None:
        """Let a request that has read all it had to read decode."""
        self.in_prefill.remove(served)
        self.decoding.append(served)

    def remove(self, served: Served) -> None:
        """Take a request out of wherever it is."""
        for place in (self.waiting, self.in_prefill, self.decoding):
            if served in place:
                place.remove(served)

    def _drop(self, served: Served, clean: bool) -> None:
        """Give back what a request holds; ``clean``: every row of it was judged."""
        if served.pages is not None:
            if not clean:
                self._scrub(served.pages.ids)
            self.pool.trim(served.pages, 0)
        served.pages, served.draft, served.rows = None, None, 0

    def end(self, served: Served, status: str, reason: str, now: float) -> None:
        """End a request wherever it is, and give back what it holds."""
        self.remove(served)
        self._drop(served, clean=status == "finished")
        served.status, served.reason, served.ended_s = status, reason, now
        self._on_ended(served)

    def check(self) -> None:
        """Raise `InvariantError` unless blocks add up and every decoding request caches all its tokens but the last."""
        running = [*self.in_prefill, *self.decoding]
        self.pool.check(served.pages for served in running if served.pages is not None)
        for served in running:
            name = f"request '{served.request.request_id}'"
            if served.pages is None or len(served.pages.ids) < self.pool.blocks_for(served.rows):
                raise InvariantError(f"{name}: its blocks hold its {served.rows} rows fails")
            if served in self.decoding and served.rows != served.tokens - 1:
                raise InvariantError(f"{name}: rows = tokens - 1 fails: {served.rows} and {served.tokens - 1}")
            if served.draft is not None and served.draft.rows != served.rows:
                raise InvariantError(f"{name}: drafter's rows = rows fails: {served.draft.rows} and {served.rows}")
