"""Users who wait for an answer, think, and ask again: the load follows the speed of whoever serves it.

`ClosedLoop` is what the scenario says; `Users` is the source that a fleet or a load driver asks, knowing no clock of
its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Le

from sim.rng import Streams
from sim.units import Duration
from sim.workload.base import ARRIVALS, Floats, Ints
from sim.workload.domains import DomainLaw
from sim.workload.length_source import LengthSource

#: Turns of one user drawn at a time.
_BLOCK = 32


@ARRIVALS.register("closed_loop")
@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """``users`` who each have one request under way or are thinking.

    ``think_time`` is the mean pause from the end of an answer to the next request; ``think`` says whether each pause is
    that long or exponential around it (the latter where nothing is said). Users begin evenly spaced over ``ramp``, each
    with a request.
    """

    kind: Literal["closed_loop"] = "closed_loop"
    users: Annotated[int, Ge(1), Le(1_000_000)]
    think_time: Duration = 0.0
    think: Literal["fixed", "exponential"] | None = None
    ramp: Duration = 0.0

    def __post_init__(self) -> None:
        """Refuse a law of pauses where there are none."""
        if self.think is not None and self.think_time == 0:
            raise ValueError(f"think: has no effect without think_time; remove it (got '{self.think}')")

    def starts_s(self) -> Floats:
        """Return when each user begins, ``[users]``, ascending."""
        return self.ramp * np.arange(self.users) / self.users

    def draw_thinks_s(self, n: int, *, rng: np.random.Generator) -> Floats:
        """Draw ``n`` pauses."""
        if self.think == "fixed":
            return np.full(n, self.think_time)
        return self.think_time * rng.standard_exponential(n)


class Turn(NamedTuple):
    """One request of a user, ``think_s`` after the user was ready; ``domain`` indexes `Users.domains`."""

    arrived_s: float
    think_s: float
    prompt_tokens: int
    output_tokens: int
    domain: int


@dataclass(slots=True)
class _Block:
    """Turns of one user, drawn at once."""

    first_turn: int
    think_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    domain_uniform: Floats


class Users:
    """All users of a closed loop.

    What a turn holds is a pure function of the seed, the user and the turn (and, for its domain under a schedule, of
    the time it arrives): two fleets, or two policies, meet the same users, in whatever order they serve them, and user
    7 is the same among 10 users and among 1,000. Memory is one block of turns a user.

    ``starts_s``: when each user is ready for turn 0. ``domains``: names. ``trace_rows``, ``caveats``: as in
    `RequestTable`.
    """

    def __init__(self, settings: ClosedLoop, lengths: LengthSource, domains: DomainLaw, streams: Streams) -> None:
        self.settings = settings
        self.count = settings.users
        self.starts_s = settings.starts_s()
        self.domains = domains.names
        self.trace_rows = lengths.trace_rows
        self.caveats = lengths.caveats
        self._lengths = lengths
        self._law = domains
        self._streams = streams
        self._blocks: list[_Block | None] = [None] * settings.users

    def turn(self, user: int, turn: int, ready_s: float) -> Turn:
        """Return a user's next request.

        Parameters
        ----------
        user : int, in 0..count - 1
        turn : int, at least 0
            How many requests this user made before.
        ready_s : float
            When the user began (turn 0, which needs no thought) or the previous answer ended.
        """
        block = self._blocks[user]
        first_turn = turn - turn % _BLOCK
        if block is None or block.first_turn != first_turn:
            block = self._blocks[user] = self._draw_block(user, first_turn)
        i = turn - first_turn
        think_s = float(block.think_s[i])
        arrived_s = ready_s + think_s
        domain = self._law.domain_at(arrived_s, float(block.domain_uniform[i]))
        return Turn(arrived_s, think_s, int(block.prompt_tokens[i]), int(block.output_tokens[i]), domain)

    def _draw_block(self, user: int, first_turn: int) -> _Block:
        name = ("user", user, "turn", first_turn)
        prompt_tokens, output_tokens = self._lengths.draw(_BLOCK, self._streams, *name)
        think_s = self.settings.draw_thinks_s(_BLOCK, rng=self._streams.get("think", *name))
        if first_turn == 0:
            think_s[0] = 0.0
        uniforms = self._streams.get("domains", *name).random(_BLOCK)
        return _Block(first_turn, think_s, prompt_tokens, output_tokens, uniforms)
