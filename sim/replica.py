"""One engine of the fleet: continuous batching, a round of speculation a step, one SimPy event a step.

``plan`` (reserve, admit, draft, choose lengths) → let the step's time pass → ``commit``. A request is in one of three
places: *waiting* (no KV), *in prefill* (KV for its whole prompt), or in a *slot* (decoding).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import simpy

from sim.engine import NORMALS, Engine
from sim.errors import InvariantError
from sim.kernels import (
    ACCEPTED_TOKENS,
    ADMITTED,
    ARRIVED,
    BLOCKS,
    CACHED,
    CONTEXT,
    DOMAIN,
    EMITTED,
    ENDED,
    ENDED_SLOTS,
    FIRST,
    FREED,
    LAST,
    LIMIT,
    MAX_ITL,
    OUT,
    OUT_TOKENS,
    PLACE,
    PREEMPTED,
    REPORT_FIELDS,
    ROOM,
    ROW,
    SLOT_FIELDS,
    clip_lengths,
    commit,
    draw_drafts,
    fill_rates,
    missing_blocks,
    take_blocks,
)
from sim.kv import KvPool
from sim.recorder import Recorder
from sim.request import (
    ABORTED,
    CONTEXT_LIMIT,
    DEADLINE,
    FAILED,
    FINISHED,
    KV_EXHAUSTED,
    PROMPT_TOO_LONG,
    QUEUE_FULL,
    REJECTED,
    STOP,
    RequestLog,
)

Recompute = Callable[[int], None]


@dataclass(slots=True)
class InPrefill:
    """A request whose prompt is being computed; ``blocks`` of KV are its own already."""

    row: int
    left_tokens: int
    blocks: int


class Replica:
    """An engine with its queue, its slots and its KV memory.

    ``requests_held`` and ``kv_held`` are the fleet's arrays over replicas; a replica keeps its own entry true.
    ``recompute``
    is where a preempted request goes in a disaggregated fleet; elsewhere it waits here, first in line.
    """

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        engine: Engine,
        log: RequestLog,
        recorder: Recorder,
        requests_held: np.ndarray,
        kv_held: np.ndarray,
        recompute: Recompute | None = None,
    ) -> None:
        self.env = env
        self.index = index
        self.engine = engine
        self.log = log
        self.recorder = recorder
        self.recompute = recompute
        self.kv = KvPool(engine.kv_blocks, engine.block_tokens)
        self.waiting: deque[int] = deque()
        self.in_prefill: deque[InPrefill] = deque()
        self.verifier = engine.policy.start()
        self._requests_held = requests_held
        self._kv_held = kv_held
        self._work_arrived: simpy.Event | None = None

        capacity, longest = engine.max_running, max(engine.trained_length, 1)
        self.slots = np.zeros((SLOT_FIELDS, capacity), np.int64)
        self.decoding = 0
        self._context = 0
        self._keys = np.zeros(capacity, np.uint64)
        self._effect = np.zeros(capacity)
        self._seen = np.zeros(capacity * longest)
        self._fate = np.zeros(capacity, np.int64)
        self._none = np.zeros(capacity, np.int64)
        self._ended = np.zeros(capacity, np.int64)
        self._report = np.zeros(REPORT_FIELDS, np.int64)
        self._rates = np.zeros(capacity * (1 + longest) + 1)

    # ------------------------------------------------------------------ what comes from outside

    def submit(self, row: int) -> None:
        """Take in an arrival: it waits, or it is rejected (queue full, prompt too long)."""
        self.log.replica[row] = self.index
        if not self._fits(row):
            self._end(row, REJECTED, PROMPT_TOO_LONG, held=False)
        elif self.engine.max_waiting is not None and len(self.waiting) >= self.engine.max_waiting:
            self._end(row, REJECTED, QUEUE_FULL, held=False)
        else:
            self._queue(row)

    def receive(self, row: int) -> None:
        """Take in a request that was prefilled elsewhere."""
        self.log.replica[row] = self.index
        self._queue(row)

    def _queue(self, row: int) -> None:
        self.waiting.append(row)
        self._requests_held[self.index] += 1
        if self._work_arrived is not None:
            self._work_arrived.succeed()
            self._work_arrived = None

    def _fits(self, row: int) -> bool:
        """Whether a prompt leaves room for an output token in the context, and has KV memory for a round."""
        return fits(self.engine, int(self.log.prompt_tokens[row]))

    # ------------------------------------------------------------------ the step loop

    def run(self) -> Generator[simpy.Event, None, None]:
        """Serve for ever; hand this to ``env.process``."""
        env, engine = self.env, self.engine
        cost, verifier = engine.cost, self.verifier
        chunks: list[tuple[InPrefill, int]] = []
        while True:
            if not (self.decoding or self.in_prefill or self.waiting):
                self._work_arrived = env.event()
                yield self._work_arrived
            now = env.now
            self._abort_late(now)

            # Reserve for a whole draft before drafting, so that no draft is thrown away for lack of memory.
            share = engine.prefill.share(self.decoding, bool(self.in_prefill), engine.max_batch_tokens)
            ahead = drafted = 0
            preempted = False
            if share.decodes and self.decoding:
                if engine.acceptance is not None:
                    drafted = verifier.draft_length(self.decoding, engine.trained_length)
                    ahead = engine.trained_length if engine.acceptance.is_block and drafted else drafted
                preempted = self._reserve(ahead)
            if not preempted:
                self._admit(now)
            share = engine.prefill.share(self.decoding, bool(self.in_prefill), engine.max_batch_tokens)
            n = self.decoding if share.decodes else 0
            if n == 0:
                ahead = drafted = 0
            prompt_tokens = self._take_chunks(share.prompt_tokens, chunks)
            if n == 0 and prompt_tokens == 0:
                continue  # everything that waited was past its deadline

            # Draft, choose, price.
            context = self._context
            draft_s = 0.0
            verified = trimmed = 0
            lengths = self._none
            as_verify = prompt_tokens if cost.prefill_as_verify else 0
            other_s = cost.overhead_s + cost.per_request_s * n
            if n:
                other_s += cost.per_context_token_s * context
            if not cost.prefill_as_verify:
                other_s += cost.prefill_token_s * prompt_tokens
                if n == 0:
                    other_s += cost.prefill_floor_s
            if ahead:
                draft_s = float(engine.draft_s[n]) * (ahead if engine.draft_per_token else 1)
                other_s += draft_s
                lengths, verified, trimmed = self._choose(n, ahead, prompt_tokens, as_verify, other_s)
            elif n:
                self._fate[:n] = 0
            batch = n + verified
            step_s = other_s + float(cost.verify_s[batch + as_verify])
            if step_s <= 0.0:
                raise InvariantError(f"a step of {batch} batch and {prompt_tokens} prompt tokens takes no time")

            yield env.timeout(step_s)

            # Commit.
            ended_s = env.now
            out = accepted = 0
            if n:
                out, accepted = self._commit(n, ahead, ended_s, lengths)
            first = self._finish_prompts(chunks, ended_s)
            outside = (batch + as_verify > cost.known_to) or (ahead > 0 and n > engine.known_requests)
            self.recorder.record(
                (
                    self.index,
                    1,
                    now,
                    ended_s,
                    step_s,
                    draft_s,
                    n,
                    n * step_s,
                    prompt_tokens,
                    batch,
                    n * ahead,
                    verified,
                    trimmed,
                    accepted,
                    out + first,
                    first,
                    self.decoding + len(self.in_prefill),
                    len(self.waiting),
                    self.kv.used,
                    context if n else 0,
                    outside,
                )
            )
            self._kv_held[self.index] = self.kv.used

    # ------------------------------------------------------------------ plan

    def _abort_late(self, now: float) -> None:
        """End what waits or is in prefill past its deadline; slots are judged when they commit."""
        deadline_s, arrived = self.engine.deadline_s, self.log.times[ARRIVED]
        if deadline_s == np.inf:
            return
        while self.waiting and now > arrived[self.waiting[0]] + deadline_s:
            self._end(self.waiting.popleft(), ABORTED, DEADLINE)
        late = [request for request in self.in_prefill if now > arrived[request.row] + deadline_s]
        for request in late:
            self.in_prefill.remove(request)
            self.kv.give_back(request.blocks)
            self._end(request.row, ABORTED, DEADLINE)

    def _reserve(self, ahead: int) -> bool:
        """Reserve KV for 1 + ``ahead`` tokens of every slot; preempt the youngest until it fits."""
        preempted = False
        while self.decoding and missing_blocks(self.decoding, ahead, self.kv.block_tokens, self.slots) > self.kv.free:
            preempted = True
            if not self._preempt_youngest():
                break
        if self.decoding:
            self.kv.take(take_blocks(self.decoding, ahead, self.kv.block_tokens, self.slots))
        return preempted

    def _preempt_youngest(self) -> bool:
        """Send the youngest request back to be computed again; the last one left fails instead."""
        if self.in_prefill:
            request = self.in_prefill.pop()
            row = request.row
            self.kv.give_back(request.blocks)
        else:
            self.decoding -= 1
            row = int(self.slots[ROW, self.decoding])
            self._context -= int(self.slots[CACHED, self.decoding])
            self.kv.give_back(int(self.slots[BLOCKS, self.decoding]))
            if self.decoding == 0:
                self._end(row, FAILED, KV_EXHAUSTED)
                return False
        self.log.counts[PREEMPTED, row] += 1
        if self.recompute is None:
            self.waiting.appendleft(row)
        else:
            self._requests_held[self.index] -= 1
            self.recompute(row)
        return True

    def _admit(self, now: float) -> None:
        """Admit from the head of the queue while a seat and KV for prompt and first round are free."""
        engine, log, kv = self.engine, self.log, self.kv
        if not self.waiting or self.decoding + len(self.in_prefill) >= engine.max_running:
            return
        # Memory that decoding needs for its own next round is not given away.
        spare = kv.free - missing_blocks(self.decoding, engine.trained_length, kv.block_tokens, self.slots)
        while self.waiting and self.decoding + len(self.in_prefill) < engine.max_running:
            row = self.waiting[0]
            if now > log.times[ARRIVED, row] + engine.deadline_s:
                self._end(self.waiting.popleft(), ABORTED, DEADLINE)
                continue
            tokens = int(log.prompt_tokens[row] + log.counts[OUT, row])
            if kv.blocks_for(min(tokens + 1 + engine.trained_length, engine.max_context_tokens)) > spare:
                if self.decoding + len(self.in_prefill) == 0:
                    # Grown past the whole memory: computing it again would not help.
                    self._end(self.waiting.popleft(), FAILED, KV_EXHAUSTED)
                    continue
                return
            self.waiting.popleft()
            blocks = kv.blocks_for(tokens)
            kv.take(blocks)
            spare -= kv.blocks_for(min(tokens + 1 + engine.trained_length, engine.max_context_tokens))
            if np.isnan(log.times[ADMITTED, row]):
                log.times[ADMITTED, row] = now
            if self.recompute is None:
                self.in_prefill.append(InPrefill(row, tokens, blocks))
            else:
                # Computed elsewhere, its last output token being its next input.
                self._open_slot(row, blocks)

    def _take_chunks(self, budget: int, chunks: list[tuple[InPrefill, int]]) -> int:
        """List the prompt tokens of this step, first come first served; returns their number."""
        chunks.clear()
        left = budget
        for request in self.in_prefill:
            if left <= 0:
                break
            tokens = min(request.left_tokens, left)
            chunks.append((request, tokens))
            left -= tokens
        return budget - left if chunks else 0

    def _choose(
        self, n: int, ahead: int, prompt_tokens: int, as_verify: int, other_s: float
    ) -> tuple[np.ndarray, int, int]:
        """Draft and let the policy choose; returns lengths ``[n]``, their sum and what the batch limit cut."""
        engine, tables = self.engine, self.engine.acceptance
        assert tables is not None
        seen = self._seen[: n * ahead].reshape(n, ahead)
        draw_drafts(
            n,
            ahead,
            self.slots,
            self._keys,
            self._effect,
            tables.chance,
            tables.confidence,
            tables.sd,
            NORMALS,
            tables.is_bank,
            tables.bank,
            seen,
            self._fate,
        )
        if engine.policy.sees_outcome:
            seen[:] = np.arange(ahead)[None, :] < self._fate[:n, None]
        limit = engine.max_batch_tokens - prompt_tokens
        highest = n * (1 + ahead)
        rates = self._rates[: highest + 1]
        fill_rates(n, highest, limit, as_verify, other_s, engine.cost.verify_s, rates)
        lengths = self.verifier.verify_lengths(seen, rates)
        if lengths.shape != (n,) or lengths.dtype != np.int64:
            raise InvariantError(
                f"policy '{engine.policy.kind}' returned {lengths.dtype} {lengths.shape}; expected int64 ({n},)"
            )
        verified, trimmed = clip_lengths(n, ahead, limit - n, self.slots, lengths)
        if verified < 0:
            raise InvariantError(
                f"policy '{engine.policy.kind}' chose length {lengths[trimmed]} for a request; allowed: 0..{ahead}"
            )
        return lengths, verified, trimmed

    # ------------------------------------------------------------------ commit

    def _commit(self, n: int, ahead: int, now: float, lengths: np.ndarray) -> tuple[int, int]:
        log, report = self.log, self._report
        self.decoding = commit(
            n,
            now,
            self.engine.deadline_s,
            ahead,
            self.kv.block_tokens,
            self.slots,
            self._keys,
            self._effect,
            self._fate,
            lengths,
            log.counts,
            log.times,
            self._ended,
            report,
        )
        self.kv.give_back(int(report[FREED]))
        self._context = int(report[CONTEXT])
        for mark in self._ended[: report[ENDED_SLOTS]].tolist():
            if mark >= 0:
                self._finish(mark)
            else:
                self._end(-1 - mark, ABORTED, DEADLINE)
        return int(report[OUT_TOKENS]), int(report[ACCEPTED_TOKENS])

    def _finish_prompts(self, chunks: list[tuple[InPrefill, int]], now: float) -> int:
        """Count down prompts; a prompt's last chunk delivers a token. Returns the tokens delivered."""
        delivered = 0
        for request, tokens in chunks:
            request.left_tokens -= tokens
            if request.left_tokens:
                break
            self.in_prefill.popleft()
            row = request.row
            delivered += 1
            if deliver_first(self.log, row, now) >= self._limit(row):
                self.kv.give_back(request.blocks)
                self._finish(row)
            elif now > self.log.times[ARRIVED, row] + self.engine.deadline_s:
                self.kv.give_back(request.blocks)
                self._end(row, ABORTED, DEADLINE)
            else:
                self._open_slot(row, request.blocks)
        return delivered

    def _limit(self, row: int) -> int:
        return output_limit(self.engine, self.log, row)

    def _open_slot(self, row: int, blocks: int) -> None:
        log, slots, i = self.log, self.slots, self.decoding
        prompt, emitted, domain = int(log.prompt_tokens[row]), int(log.counts[OUT, row]), int(log.domain[row])
        key, effect, place = self.engine.draws_of(log.request_key[row], domain)
        slots[ROW, i] = row
        slots[EMITTED, i] = emitted
        slots[LIMIT, i] = self._limit(row)
        slots[CACHED, i] = prompt + emitted - 1
        slots[BLOCKS, i] = blocks
        slots[ROOM, i] = self.engine.max_context_tokens - prompt - emitted
        slots[DOMAIN, i] = domain
        slots[PLACE, i] = place
        self._keys[i] = key
        self._effect[i] = effect
        self._context += prompt + emitted - 1
        self.decoding += 1

    def _finish(self, row: int) -> None:
        cut = self._limit(row) < self.log.output_tokens[row]
        self._end(row, FINISHED, CONTEXT_LIMIT if cut else STOP)

    def _end(self, row: int, status: int, reason: int, held: bool = True) -> None:
        if held:
            self._requests_held[self.index] -= 1
        self.log.times[ENDED, row] = self.env.now
        self.log.end(row, status, reason)

    def check(self) -> None:
        """Raise `InvariantError` unless blocks held by requests are the blocks in use, and requests add up."""
        self.kv.check()
        held = int(self.slots[BLOCKS, : self.decoding].sum()) + sum(request.blocks for request in self.in_prefill)
        if held != self.kv.used:
            raise InvariantError(f"replica {self.index}: KV blocks held {held} = used {self.kv.used} fails")
        inside = self.decoding + len(self.in_prefill) + len(self.waiting)
        if inside != self._requests_held[self.index]:
            raise InvariantError(
                f"replica {self.index}: requests held {self._requests_held[self.index]} = inside {inside} fails"
            )
        context = int(self.slots[CACHED, : self.decoding].sum())
        if context != self._context:
            raise InvariantError(f"replica {self.index}: context {self._context} = cached tokens {context} fails")


def fits(engine: Engine, prompt_tokens: int) -> bool:
    """Whether a prompt leaves an output token of context, and KV memory for itself and one round."""
    tokens = min(prompt_tokens + 1 + engine.trained_length, engine.max_context_tokens)
    return prompt_tokens < engine.max_context_tokens and -(-tokens // engine.block_tokens) <= engine.kv_blocks


def output_limit(engine: Engine, log: RequestLog, row: int) -> int:
    """Return the output tokens at which a request ends: its own, or what its context has room for."""
    return min(int(log.output_tokens[row]), engine.max_context_tokens - int(log.prompt_tokens[row]))


def deliver_first(log: RequestLog, row: int, now: float) -> int:
    """Deliver the token that ends a prompt (the first one, or the next after a recomputation)."""
    if np.isnan(log.times[FIRST, row]):
        log.times[FIRST, row] = now
    else:
        log.times[MAX_ITL, row] = max(log.times[MAX_ITL, row], now - log.times[LAST, row])
    log.times[LAST, row] = now
    log.counts[OUT, row] += 1
    return int(log.counts[OUT, row])
