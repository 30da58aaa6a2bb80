"""One engine of the fleet: continuous batching, a round of speculation a step, at most one SimPy event a step.

``plan`` (admit, take prompts) → `sim.kernels.advance` (reserve, draft, choose, price) → let the step's time pass →
deliver.
A request is in one of three places: *waiting* (no KV), *in prefill* (KV for its whole prompt), or in a *slot*
(decoding). Where nothing can reach the replica for a while, one call takes several steps; the results are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import simpy

from sim import kernels as k
from sim.clock import Clock
from sim.engine import Engine
from sim.errors import InvariantError
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

#: No limit to the steps of one call.
MANY = 1 << 40


@dataclass(slots=True)
class InPrefill:
    """A request whose prompt is being computed; ``blocks`` of KV are its own already.

    ``begun``: some of its prompt is computed. One that has only its seat is what vLLM still counts as waiting.
    """

    row: int
    left_tokens: int
    blocks: int
    begun: bool = False


class Replica:
    """An engine with its queue, its slots and its KV memory.

    ``requests_held`` and ``kv_held`` are the fleet's arrays over replicas; a replica keeps its own entry true (KV:
    the blocks
    of the step under way). ``recompute`` is where a preempted request goes in a disaggregated fleet; elsewhere it
    waits here, first in line. ``next_arrival_s`` tells before which instant nothing can reach this replica; -inf
    where that is not known.
    """

    def __init__(
        self,
        clock: Clock,
        index: int,
        engine: Engine,
        log: RequestLog,
        recorder: Recorder,
        requests_held: np.ndarray,
        kv_held: np.ndarray,
        recompute: Callable[[int], None] | None = None,
        next_arrival_s: Callable[[int], float] | None = None,
    ) -> None:
        self.clock = clock
        self.index = index
        self.engine = engine
        self.log = log
        self.recorder = recorder
        self.kv = KvPool(engine.kv_blocks, engine.block_tokens)
        self.waiting: deque[int] = deque()
        self.in_prefill: deque[InPrefill] = deque()
        self.verifier = engine.policy.start()
        self._recompute = recompute
        self._next_arrival_s = next_arrival_s
        self._in_python = engine.chooses_in_python
        self._requests_held = requests_held
        self._work_arrived: simpy.Event | None = None
        self._chunks: list[tuple[InPrefill, int]] = []

        capacity, longest = engine.max_running, max(engine.trained_length, 1)
        at = k.StateLayout(capacity, longest, engine.lag)
        self._ints = ints = np.zeros(at.size_i, np.int64)
        self._floats = np.zeros(at.size_f)
        # The same memory, of which Python reads and writes single numbers in half the time.
        self._state, self._kv_held = ints.data, kv_held.data
        self._instants = self._floats.data.cast("B").cast("d")
        self._state[k.S_CAPACITY], self._state[k.S_LONGEST], self._state[k.S_INDEX] = capacity, longest, index
        self._instants[k.F_UNTIL] = -np.inf
        self._state[k.S_FREE] = self.kv.free
        self.slots = ints[at.slots : at.fate].reshape(k.SLOT_FIELDS, capacity)
        self._fate = ints[at.fate : at.lengths]
        self._lengths = ints[at.lengths : at.ended]
        self._ended = ints[at.ended : at.work]
        self._seen = self._floats[at.seen : at.values]
        self._rates = self._floats[at.rates :]

    @property
    def decoding(self) -> int:
        """Slots in use."""
        return self._state[k.S_DECODING]

    # ------------------------------------------------------------------ what comes from outside

    def submit(self, row: int) -> None:
        """Take in an arrival: it waits, or it is rejected (queue full, prompt too long)."""
        self.log.replica[row] = self.index
        if not fits(self.engine, int(self.log.prompt_tokens[row])):
            self._end(row, REJECTED, PROMPT_TOO_LONG, self.clock.now, held=False)
        elif self.engine.max_waiting is not None and len(self.waiting) >= self.engine.max_waiting:
            self._end(row, REJECTED, QUEUE_FULL, self.clock.now, held=False)
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

    # ------------------------------------------------------------------ the step loop

    def run(self) -> Generator[simpy.Event, None, None]:
        """Serve for ever; hand this to ``env.process``."""
        state, instants, clock = self._state, self._instants, self.clock
        while True:
            # A step's boundary: nothing is under way.
            if not (state[k.S_DECODING] or self.in_prefill or self.waiting):
                self._kv_held[self.index] = 0
                self._work_arrived = clock.event()
                yield self._work_arrived
                instants[k.F_NOW] = clock.now
            if not self._plan():
                continue
            reason = self._advance()
            while reason == k.UNDER_WAY_UNTIL_END:
                self._kv_held[self.index] = self.kv.total - state[k.S_FREE]
                yield clock.at(instants[k.F_END])
                reason = self._advance()
            if reason == k.LACKS_MEMORY:
                self._sync()
                self._preempt_youngest()
            elif reason == k.RECORDS_FULL:
                self.recorder.flush(clock.now)

    def _advance(self) -> int:
        """Run the kernel from the phase the replica is in, until a step is under way or Python code must act."""
        engine, state, recorder, log = self.engine, self._state, self.recorder, self.log
        most, stop_at_end = MANY, False
        if self.waiting:
            # Who waits may come in, or be aborted, at any step's end; at an end of a request, while seats are taken.
            stop_at_end = True
            if state[k.S_DECODING] < engine.max_running or engine.deadline_s < np.inf:
                most = 1
        if self._in_python or self.in_prefill:
            most = 1
        if self._next_arrival_s is not None:
            self._instants[k.F_UNTIL] = self._next_arrival_s(self.index)
        state[k.S_WAITING] = len(self.waiting)
        state[k.S_IN_PREFILL] = len(self.in_prefill)
        while True:
            reason = k.advance(
                self._ints,
                self._floats,
                engine.ints,
                engine.floats,
                log.counts,
                log.times,
                engine.kv_blocks,
                recorder.block,
                recorder.used,
                most,
                stop_at_end,
            )
            if reason != k.CHOOSE:
                break
            self._choose()
        if reason == k.WRONG_LENGTH:
            raise InvariantError(
                f"policy '{engine.policy.kind}' chose length {state[k.S_WRONG]}; allowed: 0..{state[k.S_AHEAD]}"
            )
        if state[k.S_ENDED]:
            self._settle_ended()
        if self._chunks and reason in (k.STOPPED, k.RECORDS_FULL):
            self._sync()
            self._finish_prompts(self._instants[k.F_NOW])
        return int(reason)

    def _sync(self) -> None:
        """Tell the pool what the kernel took and freed."""
        self.kv.set_free(self._state[k.S_FREE])

    def _choose(self) -> None:
        """Let a policy that is not compiled choose."""
        n, drafted = self._state[k.S_STEP_DECODING], self._state[k.S_AHEAD]
        seen = self._seen[: n * drafted].reshape(n, drafted)
        if self.engine.policy.sees_outcome:
            seen[:] = np.arange(drafted)[None, :] < self._fate[:n, None]
        lengths = self.verifier.verify_lengths(seen, self._rates[: n * (1 + drafted) + 1])
        if lengths.shape != (n,) or lengths.dtype != np.int64:
            raise InvariantError(
                f"policy '{self.engine.policy.kind}' returned {lengths.dtype} {lengths.shape}; expected int64 ({n},)"
            )
        self._lengths[:n] = lengths

    # ------------------------------------------------------------------ plan

    def _plan(self) -> bool:
        """Settle what the next step holds; False where there is nothing to run after all."""
        engine, state, now = self.engine, self._state, self._instants[k.F_NOW]
        self._chunks.clear()
        self._sync()
        if self.waiting or self.in_prefill:
            self._abort_late(now)
            self._admit(now)
            self._kv_held[self.index] = self.kv.used
        decoding = state[k.S_DECODING]
        share = engine.prefill.share(decoding, bool(self.in_prefill), engine.max_batch_tokens)
        state[k.S_SHARES] = share.decodes
        state[k.S_PROMPT] = self._take_chunks(share.prompt_tokens) if self.in_prefill else 0
        state[k.S_ADMITTED] = sum(not request.begun for request, _ in self._chunks) if self._chunks else 0
        state[k.S_FREE] = self.kv.free
        if self._in_python and decoding and share.decodes:
            state[k.S_AHEAD] = self.verifier.draft_length(decoding, engine.trained_length)
        return bool((decoding and share.decodes) or state[k.S_PROMPT])

    def _abort_late(self, now: float) -> None:
        """End what waits or is in prefill past its deadline; slots are judged when they deliver."""
        deadline_s, arrived = self.engine.deadline_s, self.log.times[k.ARRIVED]
        if deadline_s == np.inf:
            return
        while self.waiting and now > arrived[self.waiting[0]] + deadline_s:
            self._end(self.waiting.popleft(), ABORTED, DEADLINE, now)
        late = [request for request in self.in_prefill if now > arrived[request.row] + deadline_s]
        for request in late:
            self.in_prefill.remove(request)
            self.kv.give_back(request.blocks)
            self._end(request.row, ABORTED, DEADLINE, now)

    def _admit(self, now: float) -> None:
        """Admit from the head of the queue while a seat and KV for prompt and first round are free."""
        engine, log, kv = self.engine, self.log, self.kv
        decoding = self.decoding
        if not self.waiting or decoding + len(self.in_prefill) >= engine.max_running:
            return
        # Memory that decoding needs for its own next round is not given away.
        spare = kv.free - int(k.missing_blocks(decoding, engine.trained_length, kv.block_tokens, self.slots))
        while self.waiting and decoding + len(self.in_prefill) < engine.max_running:
            row = self.waiting[0]
            if now > log.times[k.ARRIVED, row] + engine.deadline_s:
                self._end(self.waiting.popleft(), ABORTED, DEADLINE, now)
                continue
            tokens = int(log.prompt_tokens[row] + log.counts[k.OUT, row])
            if self._recompute is not None:
                tokens -= 1  # computed elsewhere: its last output token, its next input, is not cached
            with_round = kv.blocks_for(min(tokens + 1 + engine.trained_length, engine.max_context_tokens))
            if with_round > spare:
                if decoding + len(self.in_prefill) == 0:
                    # Grown past the whole memory: computing it again would not help.
                    self._end(self.waiting.popleft(), FAILED, KV_EXHAUSTED, now)
                    continue
                return
            self.waiting.popleft()
            blocks = kv.blocks_for(tokens)
            kv.take(blocks)
            spare -= with_round
            if np.isnan(log.times[k.ADMITTED, row]):
                log.times[k.ADMITTED, row] = now
            if self._recompute is None:
                self.in_prefill.append(InPrefill(row, tokens, blocks))
            else:
                # Computed elsewhere, its last output token being its next input.
                self._open_slot(row, blocks)
                decoding += 1

    def _take_chunks(self, budget: int) -> int:
        """List the prompt tokens of the next step, first come first served; returns their number."""
        left = budget
        for request in self.in_prefill:
            if left <= 0:
                break
            tokens = min(request.left_tokens, left)
            self._chunks.append((request, tokens))
            left -= tokens
        return budget - left

    def _preempt_youngest(self) -> None:
        """Send the youngest request back to be computed again; the last one left fails instead."""
        state, log, now = self._state, self.log, self._instants[k.F_NOW]
        if self.in_prefill:
            request = self.in_prefill.pop()
            row = request.row
            self.kv.give_back(request.blocks)
        else:
            last = self.decoding - 1
            row = int(self.slots[k.ROW, last])
            state[k.S_DECODING] = last
            state[k.S_CONTEXT] -= int(self.slots[k.CACHED, last])
            self.kv.give_back(int(self.slots[k.BLOCKS, last]))
            if last == 0:
                self._end(row, FAILED, KV_EXHAUSTED, now)
        state[k.S_FREE] = self.kv.free
        if log.status[row] == FAILED:
            return
        log.counts[k.PREEMPTED, row] += 1
        if self._recompute is None:
            self.waiting.appendleft(row)
        else:
            self._requests_held[self.index] -= 1
            self._recompute(row)

    # ------------------------------------------------------------------ deliver

    def _settle_ended(self) -> None:
        """Note the ends that the kernel listed."""
        times = self.log.times[k.ENDED]
        for mark in self._ended[: self._state[k.S_ENDED]].tolist():
            if mark >= 0:
                self._finish(mark, float(times[mark]))
            else:
                self._end(-1 - mark, ABORTED, DEADLINE, float(times[-1 - mark]))
        self._state[k.S_ENDED] = 0

    def _finish_prompts(self, now: float) -> None:
        """Count down prompts; a prompt's last chunk delivers a token."""
        delivered = 0
        for request, tokens in self._chunks:
            request.begun = True
            request.left_tokens -= tokens
            if request.left_tokens:
                break
            self.in_prefill.popleft()
            row = request.row
            delivered += 1
            if deliver_first(self.log, row, now) >= output_limit(self.engine, self.log, row):
                self.kv.give_back(request.blocks)
                self._finish(row, now)
            elif now > self.log.times[k.ARRIVED, row] + self.engine.deadline_s:
                self.kv.give_back(request.blocks)
                self._end(row, ABORTED, DEADLINE, now)
            else:
                self._open_slot(row, request.blocks)
        self._chunks.clear()
        self._state[k.S_FREE] = self.kv.free
        if delivered:
            self.recorder.add_first_tokens(
                delivered, running=self.decoding + len(self.in_prefill), kv_blocks=self.kv.used
            )

    def _open_slot(self, row: int, blocks: int) -> None:
        log, slots, i = self.log, self.slots, self.decoding
        prompt, emitted = int(log.prompt_tokens[row]), int(log.counts[k.OUT, row])
        key, cell = k.request_draws(self.engine.luck_key, log.request_key[row])
        text = k.text_draw(self.engine.text_key, log.request_key[row])
        tables = self.engine.acceptance
        slots[k.ROW, i] = row
        slots[k.EMITTED, i] = emitted
        slots[k.LIMIT, i] = output_limit(self.engine, log, row)
        slots[k.CACHED, i] = prompt + emitted - 1
        slots[k.BLOCKS, i] = blocks
        slots[k.ROOM, i] = self.engine.max_context_tokens - prompt - emitted
        slots[k.DOMAIN, i] = log.domain[row]
        slots[k.FIRST_ROW, i] = 0 if tables is None else tables.first_row(log.domain[row], text)
        slots[k.KEY, i] = np.uint64(key).view(np.int64)
        slots[k.EFFECT, i] = cell
        self._state[k.S_CONTEXT] += prompt + emitted - 1
        self._state[k.S_DECODING] = i + 1

    def _finish(self, row: int, now: float) -> None:
        cut = output_limit(self.engine, self.log, row) < self.log.output_tokens[row]
        self._end(row, FINISHED, CONTEXT_LIMIT if cut else STOP, now)

    def _end(self, row: int, status: int, reason: int, now: float, held: bool = True) -> None:
        if held:
            self._requests_held[self.index] -= 1
        self.log.times[k.ENDED, row] = now
        self.log.end(row, status, reason)

    def check(self) -> None:
        """Raise `InvariantError` unless blocks held by requests are the blocks in use, and requests add up."""
        self._sync()
        held = int(self.slots[k.BLOCKS, : self.decoding].sum()) + sum(request.blocks for request in self.in_prefill)
        if held != self.kv.used:
            raise InvariantError(f"replica {self.index}: KV blocks held {held} = used {self.kv.used} fails")
        inside = self.decoding + len(self.in_prefill) + len(self.waiting)
        if inside != self._requests_held[self.index]:
            raise InvariantError(
                f"replica {self.index}: requests held {self._requests_held[self.index]} = inside {inside} fails"
            )
        context = int(self.slots[k.CACHED, : self.decoding].sum())
        if context != self._state[k.S_CONTEXT]:
            raise InvariantError(
                f"replica {self.index}: context {self._state[k.S_CONTEXT]} = cached tokens {context} fails"
            )


def fits(engine: Engine, prompt_tokens: int) -> bool:
    """Whether a prompt leaves an output token of context, and KV memory for itself and one round."""
    tokens = min(prompt_tokens + 1 + engine.trained_length, engine.max_context_tokens)
    return prompt_tokens < engine.max_context_tokens and -(-tokens // engine.block_tokens) <= engine.kv_blocks


def output_limit(engine: Engine, log: RequestLog, row: int) -> int:
    """Return the output tokens at which a request ends: its own, or what its context has room for."""
    return min(int(log.output_tokens[row]), engine.max_context_tokens - int(log.prompt_tokens[row]))


def deliver_first(log: RequestLog, row: int, now: float) -> int:
    """Deliver the token that ends a prompt (the first one, or the next after a recomputation)."""
    if np.isnan(log.times[k.FIRST, row]):
        log.times[k.FIRST, row] = now
    else:
        log.times[k.MAX_ITL, row] = max(log.times[k.MAX_ITL, row], now - log.times[k.LAST, row])
    log.times[k.LAST, row] = now
    log.counts[k.OUT, row] += 1
    return int(log.counts[k.OUT, row])
