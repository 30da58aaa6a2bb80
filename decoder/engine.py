"""The serving engine: many requests at once, one pass of the target a step, a verification length for each request.

A step, in parts that are timed apart::

    schedule    end who is late, admit, take prompt chunks, reserve KV for 1 + draft tokens, or preempt the youngest
    draft       every decoding request drafts a block
    decide      policy -> verify_length of each request, trimmed to the batch limit from the tail
    verify      one pass over all rows: of each request its anchor and verified drafts, of each prompt its chunk
    commit      accepted prefix and the target's own token; rejected rows are given back; prompts yield first tokens

A request is in one of three places: *waiting* (no KV), *in prefill* (KV for all it has to read), or *decoding*. The
order of a step, of admission and of preemption is that of `sim.replica`, so that a run can be predicted; one thing
differs: a preempted request recomputes all tokens but its last and draws none on its return, so that its text goes on
exactly as if nothing had happened. ``tokens - 1`` rows are cached of a decoding request, the last token being the
anchor of its next round.

What is emitted does not depend on neighbours, order or preemption where the lengths do not: every draw is keyed by
request and position.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.batch_target import BatchOutput, BatchTarget
from decoder.batched_drafting import BatchDrafter, Committed, DraftState
from decoder.batched_sampling import BatchSampler, Drafts, Drawer, Verdicts, judge_rows, shaped, tokens_at
from decoder.chance import KeyedLuck
from decoder.confidence import confidence_of
from decoder.drafter import check_length
from decoder.engine_rates import FlatStepRates, StepRates
from decoder.errors import Fault, RequestError
from decoder.journal import Journal, StepRow
from decoder.paged_kv import BlockPool, Pages
from decoder.ragged import Segment
from decoder.sampling import Shaper
from decoder.session import Request, Round, check_policy
from decoder.stopping import Decode, cut
from sim.errors import InvariantError
from sim.verify.base import Policy

Ints = NDArray[np.int64]


class Prefill(Protocol):
    """Decides a step's shares; the simulator's `sim.batching` has them."""

    def share(self, decoding: int, prompts_pending: bool, max_batch_tokens: int) -> tuple[bool, int]:
        """Return whether the step decodes, and its prompt tokens at most."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits of an engine, in whole requests, tokens and seconds.

    ``max_batch_tokens``: rows of a step, prompts included. ``max_waiting``: requests that may wait; None: any number.
    ``deadline_s``: from arrival; a request past it is aborted. ``max_context_tokens``: at most the target's.
    ``greedy_draft``: propose the likeliest token at any temperature.
    """

    prefill: Prefill
    max_running: int
    max_batch_tokens: int
    max_waiting: int | None = None
    max_context_tokens: int
    deadline_s: float = np.inf
    greedy_draft: bool = False


@dataclass(slots=True, eq=False)
class Served:
    """A request while the engine has it, and afterwards what became of it.

    ``stop_after``: output tokens after which the text ends, as if its last token were a stop token; no part of the
    engine sees it before it happens. ``status`` and ``reason`` are those of the simulator's records, and "cancelled".
    ``rows``: cached rows of the text. ``to_read``: rows that prefill has to reach.
    """

    request: Request
    shaper: Shaper
    luck: KeyedLuck
    arrived_s: float
    stop_after: int | None = None
    domain: str = "-"
    output_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    status: str = "unfinished"
    reason: str = "horizon"
    error: str | None = None
    admitted_s: float = np.nan
    first_token_s: float = np.nan
    last_token_s: float = np.nan
    ended_s: float = np.nan
    max_itl_s: float = np.nan
    drafted_tokens: int = 0
    verified_tokens: int = 0
    accepted_draft_tokens: int = 0
    round_count: int = 0
    preemptions: int = 0
    pages: Pages | None = None
    draft: DraftState | None = None
    rows: int = 0
    to_read: int = 0

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        return [*self.request.prompt_ids, *self.output_ids]

    @property
    def tokens(self) -> int:
        """Length of prompt and output."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.status != "unfinished"

    def token(self, index: int) -> int:
        """Return one token of the text."""
        prompt = self.request.prompt_ids
        return prompt[index] if index < len(prompt) else self.output_ids[index - len(prompt)]


class Chunk(NamedTuple):
    """``rows`` rows of a prompt, or of what a preempted request has to read again."""

    served: Served
    start: int
    rows: int


@dataclass(slots=True, eq=False)
class Plan:
    """What a step holds. ``drafted``: draft tokens a request, for which KV is reserved already."""

    started_s: float
    decoding: list[Served]
    chunks: list[Chunk]
    drafted: int
    context_tokens: int
    #: Pages of each decoding request at this moment; other ones later mean that it lost its place meanwhile.
    pages: list[Pages]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the step."""
        return sum(chunk.rows for chunk in self.chunks)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """What was drafted: tokens, logits and confidences ``[requests, drafted]``; ``caps``: longest verifications."""

    drafts: Drafts
    drawers: tuple[Drawer, ...]
    token_ids: list[list[int]]
    confidence_logits: NDArray[np.float64]
    confidence: NDArray[np.float64]
    caps: Ints
    sane: list[bool]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step's parts, and how its target pass ran: see `BatchOutput`.

    ``advance_s``: the drafter's taking in of what was committed. On CUDA a part's work may still be under way when it
    ends; a clock that synchronizes tells them apart.
    """

    schedule_s: float
    draft_s: float
    decide_s: float
    verify_s: float
    commit_s: float
    advance_s: float
    graph_tokens: int
    padded_tokens: int


class Engine:
    """Serves requests on one target.

    Parameters
    ----------
    target : BatchTarget
    drafter : BatchDrafter, optional
        None only with a policy that never drafts.
    policy : Policy
        Refused where it is not proven lossless for what the drafter's confidence reads.
    pool : BlockPool
        Blocks of both models' storages.
    settings : Settings
    rates : StepRates
    temperatures : sequence [trained length], optional
        From calibration.
    decode : callable, optional
        Token ids to text; needed by stop strings.
    journal : Journal, optional
        Gets a row a step and a row a request.
    clock : callable
        Seconds since the run began.
    """

    def __init__(
        self,
        target: BatchTarget,
        drafter: BatchDrafter | None,
        policy: Policy,
        pool: BlockPool,
        settings: Settings,
        *,
        rates: StepRates | None = None,
        temperatures: Sequence[float] | None = None,
        decode: Decode | None = None,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_policy(policy, drafter.drafter if drafter is not None else None)
        _check_settings(settings, target)
        if temperatures is not None and drafter is not None and len(temperatures) < drafter.drafter.trained_length:
            raise RequestError(
                Fault(
                    f"{len(temperatures)} temperatures for a block of {drafter.drafter.trained_length}",
                    key="temperatures",
                )
            )
        self.target = target
        self.drafter = drafter if policy.drafter is not None else None
        self.policy = policy
        self.pool = pool
        self.settings = settings
        self.rates = rates or FlatStepRates()
        self.temperatures = tuple(temperatures) if temperatures is not None else None
        self.decode = decode
        self.journal = journal or Journal()
        self.clock = clock
        self.waiting: deque[Served] = deque()
        self.in_prefill: deque[Served] = deque()
        self.decoding: list[Served] = []
        self.last_times: StepTimes | None = None
        self._advance_s = 0.0
        self.verifier = policy.start()
        self._layers = self.drafter.drafter.feature_layers if self.drafter else ()

    @property
    def trained_length(self) -> int:
        """Draft tokens of a whole block; 0 without a drafter."""
        return self.drafter.drafter.trained_length if self.drafter else 0

    @property
    def idle(self) -> bool:
        """Whether nothing waits, is read or is decoded."""
        return not (self.waiting or self.in_prefill or self.decoding)

    # What comes from outside

    def submit(
        self,
        request: Request,
        *,
        arrived_s: float | None = None,
        stop_after: int | None = None,
        domain: str = "-",
    ) -> Served:
        """Take in an arrival: it waits, or it is rejected at once (queue full, prompt too long).

        Raises `RequestError` where a request asks for what no engine could do. ``arrived_s``: when it came, if that was
        before now. ``stop_after``: see `Served`.
        """
        self._check(request, stop_after)
        now = self.clock()
        served = Served(
            request,
            Shaper(request.sampling, self.target.vocab_size, self.target.device),
            KeyedLuck(request.seed, request.request_id),
            now if arrived_s is None else arrived_s,
            stop_after,
            domain,
        )
        served.shaper.commit(request.prompt_ids)
        self.journal.arrived(served)
        limit = self.settings.max_waiting
        if not self._fits(len(request.prompt_ids)):
            self._end(served, "rejected", "prompt_too_long", now)
        elif limit is not None and len(self.waiting) >= limit:
            self._end(served, "rejected", "queue_full", now)
        else:
            self.waiting.append(served)
        return served

    def cancel(self, served: Served) -> None:
        """End a request wherever it is; a step that is under way commits nothing of it."""
        if served.ended:
            return
        for place in (self.waiting, self.in_prefill, self.decoding):
            if served in place:
                place.remove(served)
        self._end(served, "aborted", "cancelled", self.clock())

    def preempt(self, served: Served) -> None:
        """Send a running request back to be computed again, first in line."""
        for place in (self.in_prefill, self.decoding):
            if served in place:
                place.remove(served)
                self._drop(served)
                served.preemptions += 1
                self.waiting.appendleft(served)

    def _check(self, request: Request, stop_after: int | None) -> None:
        faults = []
        name = f"request '{request.request_id}'"
        limits = request.limits
        if not request.prompt_ids:
            faults.append(Fault(f"{name}: the prompt is empty"))
        outside = [token for token in request.prompt_ids if not 0 <= token < self.target.vocab_size]
        if outside:
            faults.append(
                Fault(f"{name}: prompt token {outside[0]} lies outside the vocabulary of {self.target.vocab_size}")
            )
        if limits.max_new_tokens < 1:
            faults.append(Fault(f"{name}: max_new_tokens must be at least 1; got {limits.max_new_tokens}"))
        if stop_after is not None and stop_after < 1:
            faults.append(Fault(f"{name}: stop_after must be at least 1; got {stop_after}"))
        if limits.stop_strings and self.decode is None:
            faults.append(Fault(f"{name}: stop strings need a tokenizer; this target folder has none"))
        if "" in limits.stop_strings:
            faults.append(Fault(f"{name}: a stop string is empty"))
        if request.grammar is not None:
            faults.append(Fault(f"{name}: structured output (a grammar) is not supported"))
        if request.draft_tree_width != 1:
            faults.append(Fault(f"{name}: tree drafts are not supported; a draft is one chain or block"))
        if faults:
            raise RequestError(*faults)

    def _fits(self, prompt_tokens: int) -> bool:
        """Whether a prompt leaves an output token of context, and KV memory for itself and one round."""
        rows = prompt_tokens + 1 + self.trained_length
        return prompt_tokens < self.settings.max_context_tokens and self.pool.blocks_for(rows) <= self.pool.blocks

    # A step

    def step(self) -> bool:
        """Run one step; False where there was nothing to run."""
        clock = self.clock
        plan = self.schedule()
        if plan is None:
            return False
        scheduled_s = clock()
        blocks = self.draft(plan)
        drafted_s = clock()
        lengths = self.decide(plan, blocks)
        decided_s = clock()
        step = self.verify(plan, blocks, lengths)
        verified_s = clock()
        row = self.commit(plan, blocks, step)
        ended_s = clock()
        self.last_times = StepTimes(
            scheduled_s - plan.started_s,
            drafted_s - scheduled_s,
            decided_s - drafted_s,
            verified_s - decided_s,
            ended_s - verified_s - self._advance_s,
            self._advance_s,
            step.output.graph_tokens,
            step.output.padded_tokens,
        )
        # What the drafter takes in is part of its price.
        row.draft_s = drafted_s - scheduled_s + self._advance_s if plan.drafted else 0.0
        row.ended_s = ended_s
        row.busy_s = ended_s - row.started_s
        row.decoding_s = row.busy_s * row.decoding
        self.journal.stepped(row)
        return True

    def run(self) -> None:
        """Step until nothing is left."""
        while self.step():
            pass

    # Schedule

    def schedule(self) -> Plan | None:
        """Settle what the next step holds, with all the memory it may need; None where there is nothing to run."""
        started_s = self.clock()
        while True:
            self._abort_late(started_s)
            self._admit(started_s)
            decoding = len(self.decoding)
            decodes, budget = self.settings.prefill.share(
                decoding, bool(self.in_prefill), self.settings.max_batch_tokens
            )
            chunks = self._chunks(budget)
            if not ((decoding and decodes) or chunks):
                return None
            running = list(self.decoding) if decodes else []
            drafted = self._draft_length(len(running))
            lacking = sum(self._missing(served, 1 + drafted) for served in running)
            if lacking <= self.pool.free:
                break
            self._preempt_youngest(started_s)
        pages = []
        for served in running:
            assert served.pages is not None
            self.pool.grow(served.pages, served.rows + 1 + drafted)
            pages.append(served.pages)
        return Plan(started_s, running, chunks, drafted, sum(served.rows for served in running), pages)

    def _draft_length(self, requests: int) -> int:
        if self.drafter is None or not requests:
            return 0
        length = self.verifier.draft_length(requests, self.trained_length)
        check_length(self.drafter.drafter, length)
        if length and not self.drafter.drafter.chained:
            return self.trained_length
        return length

    def _missing(self, served: Served, rows: int) -> int:
        assert served.pages is not None
        return self.pool.missing(served.pages, served.rows + rows)

    def _abort_late(self, now: float) -> None:
        deadline_s = self.settings.deadline_s
        if deadline_s == np.inf:
            return
        for place in (self.waiting, self.in_prefill):
            for served in [served for served in place if now > served.arrived_s + deadline_s]:
                place.remove(served)
                self._end(served, "aborted", "deadline", now)

    def _admit(self, now: float) -> None:
        """Admit from the head of the queue while a seat and KV for what is to read and a first round are free."""
        # Memory that decoding needs for its own next round is not given away.
        spare = self.pool.free - sum(self._missing(served, 1 + self.trained_length) for served in self.decoding)
        while self.waiting and len(self.decoding) + len(self.in_prefill) < self.settings.max_running:
            served = self.waiting[0]
            to_read = served.tokens - bool(served.output_ids)
            with_round = self.pool.blocks_for(to_read + 1 + self.trained_length)
            if with_round > spare:
                if not (self.decoding or self.in_prefill):
                    # Grown past the whole memory: computing it again would not help.
                    self.waiting.popleft()
                    self._end(served, "failed", "kv_exhausted", now)
                    continue
                return
            self.waiting.popleft()
            spare -= with_round
            served.pages = Pages()
            self.pool.grow(served.pages, to_read)
            served.draft = self.drafter.start(served.pages) if self.drafter else None
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
            self.decoding.pop()
            self._end(youngest, "failed", "kv_exhausted", now)
        else:
            self.preempt(youngest)

    # Draft and decide

    def draft(self, plan: Plan) -> Blocks:
        """Draft for every decoding request, in order of admission."""
        requests, drafted = len(plan.decoding), plan.drafted
        drawers = tuple(Drawer(served.shaper, served.luck, served.tokens - 1) for served in plan.decoding)
        sampler = BatchSampler(drawers, drafted, self.target.device, self.settings.greedy_draft)
        logits = torch.zeros(requests, drafted)
        if drafted and self.drafter is not None:
            states = [served.draft for served in plan.decoding if served.draft is not None]
            anchors = [served.output_ids[-1] for served in plan.decoding]
            logits = self.drafter.propose(states, anchors, drafted, sampler)
        drafts = sampler.drafts()
        # The one place in a round where the device is waited for before the target's pass.
        raw = logits.to("cpu", torch.float64).numpy()
        token_ids: list[list[int]] = drafts.ids.tolist()
        sane = [fine and bool(np.isfinite(row).all()) for fine, row in zip(drafts.finite.tolist(), raw, strict=True)]
        # A round emits the accepted tokens and one more; what cannot be emitted is not verified, and where nothing can
        # be verified no budget should be spent.
        caps = np.array([min(max(self._room(served) - 1, 0), drafted) for served in plan.decoding], np.int64)
        shown = np.zeros((requests, drafted))
        if drafted:
            read = np.where(np.isfinite(raw), raw, 0.0)
            temperatures = self._temperatures(drafted) if self.policy.confidence == "calibrated" else None
            shown = np.where(np.arange(drafted) < caps[:, None], confidence_of(read, temperatures), 0.0)
        return Blocks(drafts, drawers, token_ids, raw, shown, caps, sane)

    def _temperatures(self, positions: int) -> tuple[float, ...] | None:
        if self.temperatures is None:
            return None
        # A chain that drafts further than it was calibrated for keeps the last position's temperature.
        return (*self.temperatures, *(self.temperatures[-1],) * max(positions - len(self.temperatures), 0))

    def _room(self, served: Served) -> int:
        by_length = served.request.limits.max_new_tokens - len(served.output_ids)
        return min(by_length, self.settings.max_context_tokens - served.tokens)

    def decide(self, plan: Plan, blocks: Blocks) -> tuple[Ints, int]:
        """Return how many draft tokens of each block to verify, and how many the batch limit cut."""
        requests = len(plan.decoding)
        if not plan.drafted:
            return np.zeros(requests, np.int64), 0
        left = self.settings.max_batch_tokens - plan.prompt_tokens
        rates = self.rates.steps_per_s(requests, plan.drafted, plan.context_tokens, plan.prompt_tokens, left)
        chosen = self.verifier.verify_lengths(blocks.confidence, rates)
        if chosen.shape != (requests,) or bool(((chosen < 0) | (chosen > plan.drafted)).any()):
            raise InvariantError(
                f"policy '{self.policy.kind}' returned lengths {chosen} for {requests} requests of {plan.drafted}"
            )
        lengths = np.minimum(chosen, blocks.caps)
        over = int(lengths.sum()) + requests - left
        trimmed = max(over, 0)
        # From the tail of the admission order, whatever was drafted: a cut must not depend on the tokens it cuts.
        for index in range(requests - 1, -1, -1):
            if over <= 0:
                break
            cut_off = min(int(lengths[index]), over)
            lengths[index] -= cut_off
            over -= cut_off
        return lengths, trimmed

    # Verify

    def verify(self, plan: Plan, blocks: Blocks, decided: tuple[Ints, int]) -> _Verified:
        """Read all rows of the step in one pass of the target."""
        lengths, trimmed = decided
        # Between drafting and here a request may have been cancelled or preempted; its block is then void. One that
        # comes back drafts the same again, since its luck is keyed by position.
        keep = [
            index
            for index, served in enumerate(plan.decoding)
            if served.pages is plan.pages[index] and not served.ended and blocks.sane[index]
        ]
        for index, served in enumerate(plan.decoding):
            if not blocks.sane[index] and served.pages is plan.pages[index]:
                self._fail(served, "drafter: a distribution or a confidence is not finite")
        chunks = [chunk for chunk in plan.chunks if chunk.served.pages is not None and not chunk.served.ended]
        segments: list[Segment] = []
        ids: list[int] = []
        wanted: list[int] = []
        for index in keep:
            served, length = plan.decoding[index], int(lengths[index])
            assert served.pages is not None
            wanted += range(len(ids), len(ids) + 1 + length)
            segments.append(Segment(served.pages.ids, served.rows, 1 + length))
            ids += [served.output_ids[-1], *blocks.token_ids[index][:length]]
        first_tokens = []
        for chunk in chunks:
            served = chunk.served
            assert served.pages is not None
            segments.append(Segment(served.pages.ids, chunk.start, chunk.rows))
            ids += [served.token(place) for place in range(chunk.start, chunk.start + chunk.rows)]
            if chunk.start + chunk.rows == served.to_read and not served.output_ids:
                wanted.append(len(ids) - 1)
                first_tokens.append(served)
        if segments:
            output = self.target.forward(ids, segments, self._layers, wanted)
        else:
            nothing = torch.zeros(0, self.target.vocab_size, device=self.target.device)
            output = BatchOutput(nothing, nothing[:, :0])
        return _Verified(keep, lengths, trimmed, chunks, first_tokens, output)

    # Commit

    def commit(self, plan: Plan, blocks: Blocks, step: _Verified) -> StepRow:
        """Emit what stands, give back what does not, and hand the drafter what was committed."""
        kept = [plan.decoding[index] for index in step.keep]
        lengths = [int(step.lengths[index]) for index in step.keep]
        shapers = [served.shaper for served, length in zip(kept, lengths, strict=True) for _ in range(1 + length)]
        prefixes = [
            blocks.token_ids[index][:k]
            for index, length in zip(step.keep, lengths, strict=True)
            for k in range(1 + length)
        ]
        shapers += [served.shaper for served in step.first_tokens]
        prefixes += [[] for _ in step.first_tokens]
        verdicts = Verdicts([], [], [])
        firsts: list[tuple[int, bool]] = []
        if shapers:
            probs, finite = shaped(step.output.logits, shapers, prefixes)
            rows = len(shapers) - len(step.first_tokens)
            if kept:
                drafts, drawers = _picked(blocks, step.keep)
                verdicts = judge_rows(lengths, drafts, probs[:rows], finite[:rows], drawers)
            firsts = self._draw_first(step.first_tokens, probs[rows:], finite[rows:])
        now = self.clock()
        row = StepRow(started_s=plan.started_s, decoding=len(plan.decoding), prompt_tokens=plan.prompt_tokens)
        row.context_tokens, row.trimmed_tokens = plan.context_tokens, step.trimmed
        row.batch_tokens = len(kept) + sum(lengths)
        committed: list[Committed] = []
        first_row = 0
        for served, index, length, accepted, token, sane in zip(
            kept, step.keep, lengths, verdicts.accepted, verdicts.tokens, verdicts.finite, strict=True
        ):
            rows_of_request = range(first_row, first_row + 1 + length)
            first_row += 1 + length
            if served.ended or served.pages is not plan.pages[index]:
                continue
            if not sane:
                self._fail(served, "target: logits are not finite")
                continue
            one = self._commit_round(plan, blocks, served, index, length, accepted, token, rows_of_request, now, row)
            if one is not None:
                committed.append(one)
        first_of = dict(zip(map(id, step.first_tokens), firsts, strict=True))
        for chunk in step.chunks:
            chunk_rows = range(first_row, first_row + chunk.rows)
            first_row += chunk.rows
            one = self._commit_chunk(chunk, chunk_rows, first_of.get(id(chunk.served)), now, row)
            if one is not None:
                committed.append(one)
        began_s = self.clock()
        if self.drafter is not None and committed:
            self.drafter.advance(committed, step.output.features)
        self._advance_s = self.clock() - began_s
        row.running = len(self.decoding) + len(self.in_prefill)
        row.waiting = len(self.waiting)
        row.kv_blocks = self.pool.used
        return row

    def _draw_first(
        self, served: Sequence[Served], probs: torch.Tensor, finite: torch.Tensor
    ) -> list[tuple[int, bool]]:
        if not served:
            return []
        levels = [one.luck.uniform("token", len(one.request.prompt_ids)) for one in served]
        tokens = tokens_at(probs, torch.tensor(levels, dtype=torch.float64, device=probs.device))
        return list(zip(tokens.tolist(), finite.tolist(), strict=True))

    def _commit_round(
        self,
        plan: Plan,
        blocks: Blocks,
        served: Served,
        index: int,
        length: int,
        accepted: int,
        token: int,
        rows: range,
        now: float,
        row: StepRow,
    ) -> Committed | None:
        """Commit one request's round; what the drafter is to take in, None where the request ended."""
        anchor = served.output_ids[-1]
        proposed = blocks.token_ids[index]
        offered = [*proposed[:accepted], token]
        emitted, reason = self._emit(served, offered, now)
        delivered = min(accepted, emitted)
        served.rounds.append(
            Round(
                anchor_position=blocks.drawers[index].anchor_position,
                proposed=tuple(proposed),
                confidence_logits=tuple(blocks.confidence_logits[index].tolist()),
                confidence=tuple(blocks.confidence[index].tolist()),
                verify_length=length,
                accepted_draft_tokens=delivered,
                bonus_token=token if emitted > accepted else None,
                emitted_tokens=emitted,
                draft_s=0.0,
                verify_s=0.0,
            )
        )
        served.round_count += 1
        served.drafted_tokens += plan.drafted
        served.verified_tokens += length
        served.accepted_draft_tokens += delivered
        row.drafted_tokens += plan.drafted
        row.verified_tokens += length
        row.accepted_draft_tokens += delivered
        row.output_tokens += emitted
        served.rows += emitted
        if reason is not None:
            self.decoding.remove(served)
            self._end(served, *reason, now)
            return None
        assert served.pages is not None
        self.pool.trim(served.pages, served.rows)
        if served.draft is None:
            return None
        return Committed(served.draft, [anchor, *offered[: emitted - 1]], served.output_ids[-1], rows[:emitted])

    def _commit_chunk(
        self, chunk: Chunk, rows: range, first: tuple[int, bool] | None, now: float, row: StepRow
    ) -> Committed | None:
        """Count down a prompt; its last chunk delivers a token, or takes up the text where it was left."""
        served = chunk.served
        if served.ended or served.pages is None or served.rows != chunk.start:
            return None
        end = chunk.start + chunk.rows
        served.rows = end
        if end == served.to_read:
            self.in_prefill.remove(served)
            reason = None
            if first is not None:
                if not first[1]:
                    self._fail(served, "target: logits are not finite")
                    return None
                _, reason = self._emit(served, [first[0]], now)
                row.output_tokens += 1
                row.first_tokens += 1
            elif now > served.arrived_s + self.settings.deadline_s:
                reason = ("aborted", "deadline")
            if reason is not None:
                self._end(served, *reason, now)
                return None
            self.decoding.append(served)
        if served.draft is None:
            return None
        ids = [served.token(place) for place in range(chunk.start, end)]
        return Committed(served.draft, ids, served.token(end), rows)

    def _emit(self, served: Served, offered: Sequence[int], now: float) -> tuple[int, tuple[str, str] | None]:
        """Append what may follow; return how many, and how the request ends, if it does."""
        ending = cut(
            served.output_ids,
            offered,
            served.request.limits,
            self.settings.max_context_tokens - served.tokens,
            self.decode,
        )
        emitted, reason = ending.emitted, None
        if served.stop_after is not None and len(served.output_ids) + emitted >= served.stop_after:
            emitted, reason = served.stop_after - len(served.output_ids), ("finished", "stop")
        elif ending.reason is not None:
            reason = ("finished", "context_limit" if ending.reason == "context" else ending.reason)
        elif now > served.arrived_s + self.settings.deadline_s:
            reason = ("aborted", "deadline")
        emitted_ids = list(offered[:emitted])
        served.output_ids += emitted_ids
        served.shaper.commit(emitted_ids)
        if np.isnan(served.first_token_s):
            served.first_token_s = now
        else:
            served.max_itl_s = np.fmax(served.max_itl_s, now - served.last_token_s)
        served.last_token_s = now
        return emitted, reason

    # Ends

    def _fail(self, served: Served, why: str) -> None:
        if served in self.decoding:
            self.decoding.remove(served)
        served.error = f"request '{served.request.request_id}' failed at token {served.tokens}: {why}"
        self._end(served, "failed", "not_finite", self.clock())

    def _drop(self, served: Served) -> None:
        if served.pages is not None:
            self.pool.trim(served.pages, 0)
        served.pages, served.draft, served.rows = None, None, 0

    def _end(self, served: Served, status: str, reason: str, now: float) -> None:
        self._drop(served)
        served.status, served.reason, served.ended_s = status, reason, now
        self.journal.ended(served)

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


@dataclass(frozen=True, slots=True, eq=False)
class _Verified:
    """What the target said of a step: logits of kept rounds, then of first tokens; features of every row."""

    keep: list[int]
    lengths: Ints
    trimmed: int
    chunks: list[Chunk]
    first_tokens: list[Served]
    output: BatchOutput


def _picked(blocks: Blocks, keep: Sequence[int]) -> tuple[Drafts, tuple[Drawer, ...]]:
    """Return drafts and drawers of some requests."""
    drafts = blocks.drafts
    if len(keep) == len(blocks.drawers):
        return drafts, blocks.drawers
    rows = torch.tensor(list(keep), device=drafts.ids.device)
    picked = Drafts(
        drafts.ids[rows],
        drafts.chances[rows],
        tuple(row[rows] for row in drafts.rows),
        drafts.token_ids,
        drafts.finite[rows],
    )
    return picked, tuple(blocks.drawers[index] for index in keep)


def _check_settings(settings: Settings, target: BatchTarget) -> None:
    faults = [
        Fault(f"expected at least 1 (got {value})", key=key)
        for key, value in (
            ("max_running", settings.max_running),
            ("max_batch_tokens", settings.max_batch_tokens),
            ("max_context_tokens", settings.max_context_tokens),
        )
        if value < 1
    ]
    if settings.max_batch_tokens < settings.max_running:
        faults.append(
            Fault(
                f"expected at least max_running, {settings.max_running}: every running request adds a token to a step "
                f"(got {settings.max_batch_tokens})",
                key="max_batch_tokens",
            )
        )
    if settings.max_context_tokens > target.max_context_tokens:
        faults.append(
            Fault(
                f"expected at most the target's {target.max_context_tokens} (got {settings.max_context_tokens})",
                key="max_context_tokens",
            )
        )
    if not settings.deadline_s > 0:
        faults.append(Fault(f"expected seconds above 0 (got {settings.deadline_s})", key="deadline_s"))
    if faults:
        raise RequestError(*faults)
