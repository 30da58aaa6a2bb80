"""What the engine knows of a request from its arrival to its end, and what a step is planned to hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from decoder.batched_drafting import DraftState
from decoder.chance import KeyedLuck
from decoder.errors import Fault, RequestError
from decoder.paged_kv import Pages
from decoder.sampling import Shaper
from decoder.session import Request, Round


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

    @property
    def admitted(self) -> int:
        """Requests whose prompt begins in the step."""
        return sum(chunk.start == 0 for chunk in self.chunks)


def check_settings(settings: Settings, max_context_tokens: int) -> None:
    """Raise `RequestError` where limits cannot be, or not with a target of ``max_context_tokens``."""
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
    if settings.max_context_tokens > max_context_tokens:
        faults.append(
            Fault(
                f"expected at most the target's {max_context_tokens} (got {settings.max_context_tokens})",
                key="max_context_tokens",
            )
        )
    if not settings.deadline_s > 0:
        faults.append(Fault(f"expected seconds above 0 (got {settings.deadline_s})", key="deadline_s"))
    if faults:
        raise RequestError(*faults)
