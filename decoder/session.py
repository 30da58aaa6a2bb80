"""The decoding loop: rounds of draft, decide, verify and commit over the requests that run together.

One forward pass a request: exactness before speed. What a round does to a request::

    tokens      prompt + output                      the last one, the anchor, is in no cache
    caches      target: tokens - 1     drafter: tokens - 1
    draft       anchor -> draft tokens d1..dk        with the distribution each was drawn from
    decide      policy -> verify_length l            cut to what length and context limits leave
    verify      target reads anchor, d1..dl          l + 1 rows of logits and features
    commit      accepted prefix and one bonus token  cut at a stop; both caches back to tokens - 1
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoder.accept import judge
from decoder.chance import KeyedLuck, Luck
from decoder.confidence import confidence_of
from decoder.drafter import Drafter, RequestDrafter, check_length
from decoder.errors import Fault, NotFiniteError, RequestError
from decoder.rates import FlatRates, Rates
from decoder.sampling import DraftSampler, Sampling, Shaper
from decoder.stopping import Decode, FinishReason, Limits, cut
from decoder.target import Target, TargetCache, TargetOutput
from sim.errors import InvariantError
from sim.verify.base import Policy

PREFILL_CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be decoded. ``grammar`` and ``draft_tree_width`` exist to be refused by name."""

    request_id: str
    prompt_ids: tuple[int, ...]
    limits: Limits
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    grammar: str | None = None
    draft_tree_width: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of one request.

    ``proposed``: draft tokens; ``confidence_logits``: raw, of each; ``confidence``: what the policy was shown.
    ``verify_length``: draft tokens sent to the target. ``accepted_draft_tokens``: those that were accepted *and*
    emitted. ``bonus_token``: the target's own token, None where a stop came before it. ``emitted_tokens``: what the
    round added to the output. Positions after ``verify_length`` are unknown, not rejected; so are those after the
    first rejection.
    """

    anchor_position: int
    proposed: tuple[int, ...]
    confidence_logits: tuple[float, ...]
    confidence: tuple[float, ...]
    verify_length: int
    accepted_draft_tokens: int
    bonus_token: int | None
    emitted_tokens: int
    draft_s: float
    verify_s: float

    @property
    def judged(self) -> tuple[bool, ...]:
        """Outcome of the draft tokens whose outcome is known: accepted ones, then the first rejected, if any."""
        rejected = self.accepted_draft_tokens < self.verify_length and self.bonus_token is not None
        return (True,) * self.accepted_draft_tokens + (False,) * rejected


class Generation:
    """A request while it is decoded; its state belongs to it alone and to no slot."""

    def __init__(self, request: Request, shaper: Shaper, luck: Luck) -> None:
        self.request = request
        self.shaper = shaper
        self.luck = luck
        self.output_ids: list[int] = []
        #: Log-probability of each output token under the target's own distribution (temperature 1, nothing cut).
        self.logprobs: list[float] = []
        #: Gap between the two largest target logits where each output token was decided.
        self.top2_gaps: list[float] = []
        self.rounds: list[Round] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.reused_tokens = 0
        self.cache: TargetCache | None = None
        self.drafting: RequestDrafter | None = None

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        return [*self.request.prompt_ids, *self.output_ids]

    @property
    def tokens(self) -> int:
        """Length of prompt and output."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def finished(self) -> bool:
        """Whether nothing more will be emitted."""
        return self.finish_reason is not None

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Finish, once; a later end changes nothing."""
        if self.finish_reason is None:
            self.finish_reason, self.error = reason, error

    def check(self) -> None:
        """Raise unless both caches hold exactly the tokens before the anchor and every list has an entry a token."""
        facts: dict[str, tuple[int, int]] = {
            "logprobs = output tokens": (len(self.logprobs), len(self.output_ids)),
        }
        if self.cache is not None:
            facts["target cache = tokens - 1"] = (self.cache.tokens, self.tokens - 1)
        if self.drafting is not None:
            facts["drafter cache = tokens - 1"] = (self.drafting.tokens, self.tokens - 1)
        if self.finish_reason not in ("failed", "cancelled") and self.output_ids:
            emitted = 1 + sum(record.emitted_tokens for record in self.rounds)
            facts["output = 1 + emitted in rounds"] = (len(self.output_ids), emitted)
        for name, (left, right) in facts.items():
            if left != right:
                raise InvariantError(f"request '{self.request.request_id}': {name} fails: {left} and {right}")


@dataclass(frozen=True, slots=True)
class Block:
    """What was drafted for one request in a round; ``cap`` is the longest verification that its limits leave."""

    generation: Generation
    token_ids: tuple[int, ...]
    probs: Tensor | None
    confidence_logits: tuple[float, ...]
    confidence: NDArray[np.float64]
    cap: int
    draft_s: float


class Decoder:
    """Decodes requests with a target, perhaps a drafter, and a policy that decides what is verified.

    Parameters
    ----------
    target : Target
    drafter : Drafter, optional
        None only with a policy that never drafts.
    policy : Policy
        Refused where it is not proven lossless for what the drafter's confidence reads, or is shown the outcome.
    rates : Rates
        Steps per second by batch tokens, as load-aware policies see them. The default says that every batch costs the
        same.
    temperatures : sequence [trained length], optional
        From calibration: divides each position's confidence logit, for policies that read the calibrated confidence.
    greedy_draft : bool
        Propose the most likely tokens at any temperature (lossless too, with a one-hot in the acceptance test).
    decode : callable, optional
        Token ids to text; needed by stop strings.
    luck : callable
        A request's draws; keyed by seed, request and position unless a test replays others.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy,
        *,
        rates: Rates | None = None,
        temperatures: Sequence[float] | None = None,
        greedy_draft: bool = False,
        decode: Decode | None = None,
        prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
        luck: Callable[[Request], Luck] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_policy(policy, drafter)
        if temperatures is not None and drafter is not None and len(temperatures) < drafter.trained_length:
            raise RequestError(
                Fault(f"{len(temperatures)} temperatures for a block of {drafter.trained_length}", key="temperatures")
            )
        if prefill_chunk_tokens < 1:
            raise RequestError(Fault(f"expected at least 1; got {prefill_chunk_tokens}", key="prefill_chunk_tokens"))
        self.target = target
        self.drafter = drafter if policy.drafter is not None else None
        self.policy = policy
        self.rates = rates or FlatRates()
        self.temperatures = tuple(temperatures) if temperatures is not None else None
        self.greedy_draft = greedy_draft
        self.decode = decode
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self._luck = luck or (lambda request: KeyedLuck(request.seed, request.request_id))
        self._clock = clock
        self._verifier = policy.start()
        self._feature_layers = self.drafter.feature_layers if self.drafter else ()

    # Admission

    def check(self, request: Request) -> None:
        """Raise `RequestError` with every reason why a request cannot be decoded."""
        faults = request_faults(request, self.target.vocab_size, self.decode)
        if len(request.prompt_ids) >= self.target.max_context_tokens:
            faults.append(
                Fault(
                    f"request '{request.request_id}': a prompt of {len(request.prompt_ids)} tokens leaves no room for "
                    f"output in a context of {self.target.max_context_tokens}"
                )
            )
        if faults:
            raise RequestError(*faults)

    def admit(self, request: Request, reuse: Generation | None = None) -> Generation:
        """Prefill a request and draw its first token.

        ``reuse``: a generation whose beginning the prompt shares; its cached rows are taken over, of the target and
        the drafter alike. It may be one that has finished (the next turn of a conversation) or is still running.
        """
        self.check(request)
        shaper = Shaper(request.sampling, self.target.vocab_size, self.target.device)
        generation = Generation(request, shaper, self._luck(request))
        generation.cache = self.target.new_cache()
        generation.drafting = self.drafter.start() if self.drafter else None
        if reuse is not None:
            self._take_over(generation, reuse)
        generation.shaper.commit(request.prompt_ids)
        try:
            last = self._prefill(generation, request.prompt_ids, None)
            probs = generation.shaper.probs(last.logits)
            first = generation.luck.token(probs[0], len(request.prompt_ids))
            self._emit(generation, [first], last.logits)
            if generation.drafting is not None:
                rest = request.prompt_ids[generation.drafting.tokens :]
                generation.drafting.advance(rest, last.features, first)
        except NotFiniteError as fault:
            self._fail(generation, fault)
        return generation

    def _take_over(self, generation: Generation, origin: Generation) -> None:
        if origin.cache is None or (generation.drafting is not None and origin.drafting is None):
            return
        prompt, text = generation.request.prompt_ids, origin.token_ids
        differ = (i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b)
        same = next(differ, min(len(prompt), len(text)))
        # A chained drafter's row also holds the token after it: one row less than tokens shared. At least one prompt
        # token is left to be read, since its logits are needed.
        keep = max(min(same - 1, origin.cache.tokens, len(prompt) - 1), 0)
        generation.reused_tokens = keep
        generation.cache = origin.cache.fork(keep)
        if generation.drafting is not None and origin.drafting is not None:
            generation.drafting = origin.drafting.fork(keep)

    def _prefill(self, generation: Generation, token_ids: Sequence[int], next_id: int | None) -> TargetOutput:
        """Read tokens that are not yet cached, in chunks; return what the target said of the last chunk.

        The drafter takes in every chunk, except the last where ``next_id``, the token after it, is still to be drawn.
        """
        assert generation.cache is not None
        output = None
        for start in range(generation.cache.tokens, len(token_ids), self.prefill_chunk_tokens):
            chunk = token_ids[start : start + self.prefill_chunk_tokens]
            end = start + len(chunk)
            after = token_ids[end] if end < len(token_ids) else next_id
            output = self.target.forward(chunk, generation.cache, self._feature_layers, int(after is None))
            if generation.drafting is not None and after is not None:
                generation.drafting.advance(chunk, output.features, after)
        assert output is not None
        return output

    # Preemption and cancellation

    def preempt(self, generation: Generation) -> None:
        """Drop a request's caches; `restore` computes them again."""
        generation.cache = None
        generation.drafting = None

    def restore(self, generation: Generation) -> None:
        """Recompute the caches of a preempted request; its text goes on as if nothing had happened."""
        generation.cache = self.target.new_cache()
        generation.drafting = self.drafter.start() if self.drafter else None
        self._prefill(generation, generation.token_ids[:-1], generation.token_ids[-1])

    def cancel(self, generation: Generation) -> None:
        """End a request; a round of it that is under way commits nothing."""
        generation.end("cancelled")

    # A round

    def draft(self, running: Sequence[Generation]) -> list[Block]:
        """Draft for every running request, in order of admission."""
        running = [generation for generation in running if not generation.finished and generation.cache is not None]
        length = 0
        if self.drafter is not None and running:
            length = self._verifier.draft_length(len(running), self.drafter.trained_length)
            check_length(self.drafter, length)
        blocks = []
        for generation in running:
            try:
                blocks.append(self._draft_one(generation, length))
            except NotFiniteError as fault:
                self._fail(generation, fault)
        return blocks

    def _draft_one(self, generation: Generation, length: int) -> Block:
        # A round emits the accepted tokens and one more. What cannot be emitted is not verified, and what a chain need
        # not draft it does not; both are known before anything is drafted.
        cap = min(self._room(generation) - 1, length)
        shown = np.zeros(length)
        if cap <= 0 or self.drafter is None or generation.drafting is None:
            return Block(generation, (), None, (), shown, 0, 0.0)
        started_s = self._clock()
        anchor_position = generation.tokens - 1
        sampler = DraftSampler(generation.shaper, generation.luck, anchor_position, self.greedy_draft)
        asked = cap if self.drafter.chained else length
        logits = generation.drafting.propose(generation.output_ids[-1], asked, sampler)
        if not np.isfinite(logits).all():
            raise NotFiniteError("drafter: a confidence is not finite")
        calibrated = self.policy.confidence == "calibrated"
        temperatures = self._temperatures(len(logits)) if calibrated else None
        # Beyond the cap nothing can be verified, so no budget should be spent there.
        shown[:cap] = confidence_of(logits[:cap], temperatures)
        return Block(
            generation,
            tuple(sampler.token_ids),
            sampler.probs,
            tuple(logits),
            shown,
            cap,
            self._clock() - started_s,
        )

    def _temperatures(self, positions: int) -> tuple[float, ...] | None:
        if self.temperatures is None:
            return None
        # A chain that drafts further than it was calibrated for keeps the last position's temperature.
        return (*self.temperatures, *(self.temperatures[-1],) * max(positions - len(self.temperatures), 0))

    def _room(self, generation: Generation) -> int:
        by_length = generation.request.limits.max_new_tokens - len(generation.output_ids)
        return min(by_length, self.target.max_context_tokens - generation.tokens)

    def decide(self, blocks: Sequence[Block]) -> list[int]:
        """Ask the policy how many draft tokens of each block to verify."""
        if not blocks or blocks[0].confidence.size == 0:
            return [0] * len(blocks)
        confidence = np.stack([block.confidence for block in blocks])
        rates = self.rates.steps_per_s(len(blocks), confidence.shape[1])
        lengths = self._verifier.verify_lengths(confidence, rates)
        if lengths.shape != (len(blocks),) or bool(((lengths < 0) | (lengths > confidence.shape[1])).any()):
            raise ValueError(f"policy '{self.policy.kind}' returned lengths {lengths} for {confidence.shape}")
        return [min(int(length), block.cap) for length, block in zip(lengths, blocks, strict=True)]

    def verify(self, blocks: Sequence[Block], lengths: Sequence[int]) -> None:
        """Verify and commit every block whose request still wants it."""
        for block, length in zip(blocks, lengths, strict=True):
            generation = block.generation
            # Between drafting and here a request may have been cancelled or preempted; its block is then void. A
            # preempted request drafts the same block again, since its luck is keyed by position.
            if generation.finished or generation.cache is None or generation.cache.tokens != generation.tokens - 1:
                continue
            try:
                self._verify_one(block, length)
            except NotFiniteError as fault:
                self._fail(generation, fault)

    def _verify_one(self, block: Block, length: int) -> None:
        generation = block.generation
        assert generation.cache is not None
        started_s = self._clock()
        anchor_position = generation.tokens - 1
        anchor, drafts = generation.output_ids[-1], block.token_ids[:length]
        read = (anchor, *drafts)
        output = self.target.forward(read, generation.cache, self._feature_layers, len(read))
        target_probs = generation.shaper.probs(output.logits, drafts)
        draft_probs = block.probs if block.probs is not None else target_probs[:0]
        verdict = judge(drafts, draft_probs.to(target_probs), target_probs, generation.luck, anchor_position + 1)
        offered = [*drafts[: verdict.accepted_draft_tokens], verdict.bonus_token]
        emitted = self._emit(generation, offered, output.logits)
        generation.cache.crop(generation.tokens - 1)
        if generation.drafting is not None:
            generation.drafting.advance(
                [anchor, *offered[: emitted - 1]], output.features[:emitted], generation.output_ids[-1]
            )
        accepted = min(verdict.accepted_draft_tokens, emitted)
        generation.rounds.append(
            Round(
                anchor_position=anchor_position,
                proposed=block.token_ids,
                confidence_logits=block.confidence_logits,
                confidence=tuple(block.confidence[: len(block.token_ids)].tolist()),
                verify_length=length,
                accepted_draft_tokens=accepted,
                bonus_token=verdict.bonus_token if emitted > verdict.accepted_draft_tokens else None,
                emitted_tokens=emitted,
                draft_s=block.draft_s,
                verify_s=self._clock() - started_s,
            )
        )

    def _emit(self, generation: Generation, offered: Sequence[int], logits: Tensor) -> int:
        """Append what the limits let through; row k of ``logits`` decided token k. Return how many."""
        ending = cut(
            generation.output_ids,
            offered,
            generation.request.limits,
            self.target.max_context_tokens - generation.tokens,
            self.decode,
        )
        emitted = list(offered[: ending.emitted])
        rows = logits[: ending.emitted].to(torch.float64)
        logprobs = torch.log_softmax(rows, -1)
        generation.logprobs += [float(logprobs[k, token]) for k, token in enumerate(emitted)]
        top2 = rows.topk(2, -1).values
        generation.top2_gaps += [float(gap) for gap in top2[:, 0] - top2[:, 1]]
        generation.output_ids += emitted
        generation.shaper.commit(emitted)
        if ending.reason is not None:
            generation.end(ending.reason)
        return ending.emitted

    def _fail(self, generation: Generation, fault: NotFiniteError) -> None:
        place = generation.tokens
        generation.end("failed", f"request '{generation.request.request_id}' failed at token {place}: {fault}")
        # What the caches hold is no longer known; a failed request is not continued.
        generation.cache = generation.drafting = None

    def step(self, running: Sequence[Generation]) -> None:
        """Run one round of all requests that are not finished."""
        blocks = self.draft(running)
        self.verify(blocks, self.decide(blocks))

    def run(
        self, requests: Sequence[Request], *, concurrency: int = 1, progress: Callable[[int], None] | None = None
    ) -> Iterator[Generation]:
        """Decode requests, ``concurrency`` at a time in lockstep, and yield each as it finishes.

        ``progress`` gets the tokens of each step. Every request is checked before any is decoded.
        """
        for request in requests:
            self.check(request)
        if len({request.request_id for request in requests}) != len(requests):
            raise RequestError(Fault("two requests have the same id", key="request_id"))
        waiting = list(requests)[::-1]
        running: list[Generation] = []
        while waiting or running:
            before = sum(len(generation.output_ids) for generation in running)
            while waiting and len(running) < concurrency:
                running.append(self.admit(waiting.pop()))
            self.step(running)
            if progress is not None:
                progress(sum(len(generation.output_ids) for generation in running) - before)
            yield from (generation for generation in running if generation.finished)
            running = [generation for generation in running if not generation.finished]

    def generate(self, requests: Sequence[Request], *, concurrency: int = 1) -> list[Generation]:
        """Decode requests, ``concurrency`` at a time; return them in the order they were given."""
        done = {found.request.request_id: found for found in self.run(requests, concurrency=concurrency)}
        return [done[request.request_id] for request in requests]


def request_faults(request: Request, vocab_size: int, decode: Decode | None) -> list[Fault]:
    """Return every reason why no decoder could decode a request; its room in the context is another question."""
    faults = []
    name = f"request '{request.request_id}'"
    prompt, limits = request.prompt_ids, request.limits
    if not prompt:
        faults.append(Fault(f"{name}: the prompt is empty"))
    outside = [token for token in prompt if not 0 <= token < vocab_size]
    if outside:
        faults.append(Fault(f"{name}: prompt token {outside[0]} lies outside the vocabulary of {vocab_size}"))
    if limits.max_new_tokens < 1:
        faults.append(Fault(f"{name}: max_new_tokens must be at least 1; got {limits.max_new_tokens}"))
    if limits.stop_strings and decode is None:
        faults.append(Fault(f"{name}: stop strings need a tokenizer; this target folder has none"))
    if "" in limits.stop_strings:
        faults.append(Fault(f"{name}: a stop string is empty"))
    if request.grammar is not None:
        faults.append(Fault(f"{name}: structured output (a grammar) is not supported"))
    if request.draft_tree_width != 1:
        faults.append(Fault(f"{name}: tree drafts are not supported; a draft is one chain or block"))
    return faults


def check_policy(policy: Policy, drafter: Drafter | None) -> None:
    """Raise `RequestError` where a policy cannot be run, or not without bias, with a drafter."""
    if policy.sees_outcome:
        raise RequestError(
            Fault(f"policy '{policy.kind}' is shown the outcome before it happens; only the simulator can do that")
        )
    if policy.drafter is None:
        return
    if drafter is None:
        raise RequestError(Fault(f"policy '{policy.kind}' drafts, but no drafter was given"))
    if drafter.confidence_reads not in policy.lossless_with:
        proven = ", ".join(sorted(policy.lossless_with)) or "none"
        raise RequestError(
            Fault(
                f"policy '{policy.kind}' is not proven lossless with a confidence that reads "
                f"'{drafter.confidence_reads}' (proven: {proven})"
            )
        )
    try:
        policy.check_drafter(drafter.trained_length, "chain" if drafter.chained else "block")
    except ValueError as fault:
        raise RequestError(Fault(f"policy '{policy.kind}' with a {drafter.kind} drafter: {fault}")) from None
