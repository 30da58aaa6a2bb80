"""Engines that compute prompts alone and hand the requests on to decode replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import simpy

from sim.batching.disaggregated import Disaggregated
from sim.clock import Clock
from sim.engine import Engine
from sim.kernels import ADMITTED, ARRIVED, ENDED, OUT
from sim.recorder import Recorder
from sim.replica import deliver_first, fits, output_limit
from sim.request import (
    ABORTED,
    CONTEXT_LIMIT,
    DEADLINE,
    FINISHED,
    PROMPT_TOO_LONG,
    QUEUE_FULL,
    REJECTED,
    STOP,
    RequestLog,
)


@dataclass(slots=True)
class Prompt:
    """A prompt under way: its request and the tokens left to compute."""

    row: int
    left_tokens: int


class PrefillPool:
    """One queue before several prefill engines; a prompt stays with the engine that began it."""

    def __init__(
        self,
        env: Clock,
        settings: Disaggregated,
        engine: Engine,
        log: RequestLog,
        recorder: Recorder,
        first_index: int,
        hand_on: Callable[[int], None],
    ) -> None:
        self.env = env
        self.settings = settings
        self.engine = engine
        self.log = log
        self.recorder = recorder
        self.hand_on = hand_on
        self.waiting: deque[int] = deque()
        self.under_way: list[deque[Prompt]] = [deque() for _ in range(settings.replicas)]
        self.in_transfer = 0
        self._idle: list[simpy.Event | None] = [None] * settings.replicas
        self._first_index = first_index

    def submit(self, row: int) -> None:
        """Take in an arrival: it waits, or it is rejected (queue full, prompt too long)."""
        if not fits(self.engine, int(self.log.prompt_tokens[row])):
            self._end(row, REJECTED, PROMPT_TOO_LONG)
        elif self.engine.max_waiting is not None and len(self.waiting) >= self.engine.max_waiting:
            self._end(row, REJECTED, QUEUE_FULL)
        else:
            self.waiting.append(row)
            self._wake()

    def recompute(self, row: int) -> None:
        """Take a request that a decode replica preempted; it goes first."""
        self.waiting.appendleft(row)
        self._wake()

    def _wake(self) -> None:
        for engine, event in enumerate(self._idle):
            if event is not None:
                self._idle[engine] = None
                event.succeed()
                return

    def run(self, index: int) -> Generator[simpy.Event, None, None]:
        """Serve for ever as engine ``index`` of the pool; hand this to ``env.process``."""
        cost, own = self.engine.cost, self.under_way[index]
        while True:
            now = self.env.now
            self._abort_late(own, now)
            begun = len(own)
            budget = self.settings.max_step_tokens - sum(prompt.left_tokens for prompt in own)
            while self.waiting and budget > 0:
                row = self.waiting.popleft()
                if now > self.log.times[ARRIVED, row] + self.engine.deadline_s:
                    self._end(row, ABORTED, DEADLINE)
                    continue
                tokens = int(self.log.prompt_tokens[row] + self.log.counts[OUT, row])
                own.append(Prompt(row, tokens))
                budget -= tokens
                if np.isnan(self.log.times[ADMITTED, row]):
                    self.log.times[ADMITTED, row] = now
            if not own:
                self._idle[index] = event = self.env.event()
                yield event
                continue
            left = self.settings.max_step_tokens
            chunks = []
            for prompt in own:
                tokens = min(prompt.left_tokens, left)
                if tokens:
                    chunks.append((prompt, tokens))
                    left -= tokens
            prompt_tokens = self.settings.max_step_tokens - left
            # Each of those just taken in has a chunk: it came while there was budget left.
            step_s = cost.target_s(0, 0, 0, prompt_tokens, len(own) - begun)
            yield self.env.timeout(step_s)
            delivered = self._finish(own, chunks)
            outside = cost.is_outside(0, prompt_tokens)
            self.recorder.record(
                (
                    self._first_index + index,
                    1,
                    now,
                    self.env.now,
                    step_s,
                    0.0,
                    0,
                    0.0,
                    prompt_tokens,
                    0,
                    0,
                    0,
                    0,
                    0,
                    delivered,
                    delivered,
                    len(own),
                    len(self.waiting),
                    0,
                    0,
                    outside,
                )
            )

    def _abort_late(self, own: deque[Prompt], now: float) -> None:
        """End prompts under way past their deadline, as a decode replica does with its own."""
        late = [prompt for prompt in own if now > self.log.times[ARRIVED, prompt.row] + self.engine.deadline_s]
        for prompt in late:
            own.remove(prompt)
            self._end(prompt.row, ABORTED, DEADLINE)

    def _finish(self, own: deque[Prompt], chunks: list[tuple[Prompt, int]]) -> int:
        delivered = 0
        now = self.env.now
        for prompt, tokens in chunks:
            prompt.left_tokens -= tokens
            if prompt.left_tokens:
                break
            own.popleft()
            delivered += 1
            row = prompt.row
            limit = output_limit(self.engine, self.log, row)
            if deliver_first(self.log, row, now) >= limit:
                self._end(row, FINISHED, CONTEXT_LIMIT if limit < self.log.output_tokens[row] else STOP)
            elif now > self.log.times[ARRIVED, row] + self.engine.deadline_s:
                self._end(row, ABORTED, DEADLINE)
            else:
                self.in_transfer += 1
                self.env.process(self._transfer(row))
        return delivered

    def _transfer(self, row: int) -> Generator[simpy.Event, None, None]:
        yield self.env.timeout(self.settings.hand_off)
        self.in_transfer -= 1
        self.hand_on(row)

    def _end(self, row: int, status: int, reason: int) -> None:
        self.log.times[ENDED, row] = self.env.now
        self.log.end(row, status, reason)

    @property
    def inside(self) -> int:
        """Requests in the pool: waiting, under way or in transfer."""
        return len(self.waiting) + sum(len(own) for own in self.under_way) + self.in_transfer
