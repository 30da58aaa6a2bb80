"""What a measurement says, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One closed-loop run: a constant number of requests under way at one engine.

    ``output_tokens_per_s``: of the whole engine. ``tpot_s``: mean seconds a token of a request after its first;
    ``ttft_s``: mean wait for the first. ``accepted_length``: tokens a round yields, bonus included; 1 without
    speculation, None where the file does not say. ``draft_tokens``: k, 0 without speculation, None where it is not
    known. ``place``: the file and line it came from.
    """

    concurrency: float
    output_tokens_per_s: float | None = None
    tpot_s: float | None = None
    ttft_s: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    accepted_length: float | None = 1.0
    draft_tokens: int | None = 0
    gpus: int | None = None
    place: str = ""

    @property
    def speculates(self) -> bool:
        """Whether drafts were verified."""
        return self.draft_tokens != 0


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One finished request of a log: instants in seconds on the log's own clock, lengths in tokens."""

    arrived_s: float
    first_token_s: float
    last_token_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Rounds of a drafter and how many of them accepted the first 1, 2, ... draft tokens.

    ``rounds``: drafts that were verified. ``drafted``: draft tokens sent to the target in all; ``rounds`` times the
    length of ``accepted`` where every block was verified whole.
    """

    rounds: float
    accepted: tuple[float, ...]
    drafted: float | None = None
