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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.batch_target import BatchOutput, BatchTarget
from decoder.batched_drafting import BatchDrafter, Committed
from decoder.batched_sampling import BatchSampler, Drafts, Drawer, Verdicts, judge_rows, shaped, tokens_at
from decoder.chance import KeyedLuck
from decoder.confidence import confidence_of
from decoder.drafter import check_length
from decoder.engine_rates import FlatStepRates, StepRates
from decoder.errors import Fault, RequestError
from decoder.journal import Journal, StepRow
from decoder.paged_kv import BlockPool
from decoder.ragged import Segment
from decoder.sampling import Shaper
from decoder.scheduler import Scheduler
from decoder.served import Chunk, Plan, Served, Settings, check_settings
from decoder.session import Request, Round, check_policy, request_faults
from decoder.stopping import Decode, cut
from sim.errors import InvariantError
from sim.verify.base import Policy

Ints = NDArray[np.int64]


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
        check_settings(settings, target.max_context_tokens)
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
        self.scheduler = Scheduler(pool, settings, self.drafter, lambda served: self.journal.ended(served), self._scrub)
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
        return self.scheduler.inside == 0

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
        faults = request_faults(request, self.target.vocab_size, self.decode)
        if stop_after is not None and stop_after < 1:
            faults.append(Fault(f"request '{request.request_id}': stop_after must be at least 1; got {stop_after}"))
        if faults:
            raise RequestError(*faults)
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
        self.scheduler.submit(served, now)
        return served

    def cancel(self, served: Served) -> None:
        """End a request wherever it is; a step that is under way commits nothing of it."""
        if not served.ended:
            self.scheduler.end(served, "aborted", "cancelled", self.clock())

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
        return self.scheduler.plan(self.clock(), self._draft_length)

    def _draft_length(self, requests: int) -> int:
        if self.drafter is None:
            return 0
        length = self.verifier.draft_length(requests, self.trained_length)
        check_length(self.drafter.drafter, length)
        if length and not self.drafter.drafter.chained:
            return self.trained_length
        return length

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
        rates = self.rates.steps_per_s(
            requests, plan.drafted, plan.context_tokens, plan.prompt_tokens, plan.admitted, left
        )
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
        row.running = len(self.scheduler.decoding) + len(self.scheduler.in_prefill)
        row.waiting = len(self.scheduler.waiting)
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
            self.scheduler.end(served, *reason, now)
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
                self.scheduler.end(served, *reason, now)
                return None
            self.scheduler.start_decoding(served)
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

    def _scrub(self, blocks: Sequence[int]) -> None:
        self.target.scrub(blocks)
        if self.drafter is not None:
            self.drafter.scrub(blocks)

    def _fail(self, served: Served, why: str) -> None:
        served.error = f"request '{served.request.request_id}' failed at token {served.tokens}: {why}"
        self.scheduler.end(served, "failed", "not_finite", self.clock())

    def check(self) -> None:
        """Raise `InvariantError` unless requests, their rows and their blocks add up."""
        self.scheduler.check()


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
