"""Traffic for the engine: the simulator's own arrivals, with prompts of real text, in real time.

Open loop (a table of requests) or closed loop (users who wait, think and ask again); both are `sim.workload`'s. What
came of it is in the engine's journal, in the simulator's columns.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decoder.engine import Engine
from decoder.errors import Fault, InputError
from decoder.sampling import Sampling
from decoder.served import Served
from decoder.session import Request
from decoder.stopping import Limits
from sim.workload.base import RequestTable
from sim.workload.closed_loop import Users

#: A user whose request was rejected asks again after this long at least, as in the simulator.
RETRY_S = 1.0


class WallClock:
    """Seconds since the run began; give it to the engine and to `drive`.

    ``skips_idle``: time in which the engine has nothing to do passes at once. What an engine does depends on no clock
    while it is idle, so the run is the same and only takes less long.
    """

    def __init__(self, skips_idle: bool = False) -> None:
        self._skips_idle = skips_idle
        self._began_s = time.perf_counter()

    def restart(self) -> None:
        """Let the run begin now."""
        self._began_s = time.perf_counter()

    def __call__(self) -> float:
        """Return the seconds since the run began."""
        return time.perf_counter() - self._began_s

    def leave_out(self, seconds: float) -> None:
        """Take time that went into something else out of the run."""
        self._began_s += seconds

    def wait_until(self, instant_s: float) -> None:
        """Let time pass until an instant of the run."""
        ahead_s = max(instant_s - self(), 0.0)
        if self._skips_idle:
            self._began_s -= ahead_s
        else:
            time.sleep(ahead_s)


class Prompts:
    """Token ids of prompts by domain, cut and joined to whatever length the traffic asks for.

    A prompt of n tokens is the end of a text, with the texts after it set before it where it is too short: it ends as
    the target is used to being asked. Of the answer to a question without its beginning less may be accepted: where
    that matters, give texts of that length.
    """

    def __init__(self, texts: Mapping[str, Sequence[Sequence[int]]]) -> None:
        for domain, found in texts.items():
            if not any(found):
                raise InputError(Fault(f"domain '{domain}' has no prompt", key="domains"))
        self._texts = {domain: [tuple(text) for text in found if text] for domain, found in texts.items()}

    def take(self, domain: str, draw: int, tokens: int) -> tuple[int, ...]:
        """Return a prompt of exactly ``tokens`` tokens; raises `InputError` for an unknown domain.

        ``draw``: chooses the text, by its rest by how many there are, as the simulator chooses one of a bank.
        """
        if domain not in self._texts:
            raise InputError(Fault(f"no prompts of domain '{domain}'; known: {', '.join(self._texts)}", key="domains"))
        texts = self._texts[domain]
        ids: tuple[int, ...] = ()
        for index in itertools.count(draw):
            ids = texts[index % len(texts)] + ids
            if len(ids) >= tokens:
                break
        return ids[-tokens:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How every request of a run is to be decoded. Each ends where the traffic says, as if by a stop token there.

    ``draw_of``: what chooses a request's prompt, given what the request is keyed by in `sim.workload`.
    """

    sampling: Sampling
    seed: int = 0
    draw_of: Callable[[int], int] = lambda key: key


def drive(
    engine: Engine,
    traffic: RequestTable | Users,
    prompts: Prompts,
    asking: Asking,
    *,
    horizon_s: float,
    clock: Any,
    on_progress: Callable[[float], None] | None = None,
) -> None:
    """Serve traffic in real time until ``horizon_s``; what is unfinished then stays so and is counted.

    Parameters
    ----------
    engine : Engine
        Built with the same ``clock``.
    traffic : RequestTable or Users
        Arrivals that do not wait for answers, or users who do.
    horizon_s : float
        Infinite for a table: until all of it is served.
    clock : callable with ``wait_until``
        `WallClock`, or a test's own.
    on_progress : callable, optional
        Gets the seconds of the run after every step.
    """
    source = _Table(traffic) if isinstance(traffic, RequestTable) else _Loop(traffic, horizon_s)
    try:
        _drive(engine, source, prompts, asking, horizon_s, clock, on_progress)
    finally:
        engine.journal.close()


def _drive(
    engine: Engine,
    source: _Table | _Loop,
    prompts: Prompts,
    asking: Asking,
    horizon_s: float,
    clock: Any,
    on_progress: Callable[[float], None] | None,
) -> None:
    under_way: dict[Served, _Arrival] = {}
    answered: list[Served] = []

    def hear() -> None:
        for served in answered:
            source.ended(under_way.pop(served), served)
        answered.clear()

    while True:
        now = clock()
        if engine.idle or now >= horizon_s:
            hear()
        while source.next_s <= min(now, horizon_s) and source.next_s < horizon_s:
            arrival = source.pop()
            served = engine.submit(
                Request(
                    request_id=arrival.name,
                    prompt_ids=prompts.take(arrival.domain, asking.draw_of(arrival.key), arrival.prompt_tokens),
                    # Where the text ends is not the engine's to know; only its context limits it.
                    limits=Limits(max_new_tokens=engine.settings.max_context_tokens),
                    sampling=asking.sampling,
                    seed=asking.seed,
                ),
                arrived_s=arrival.arrived_s,
                stop_after=arrival.output_tokens,
                domain=arrival.domain,
            )
            under_way[served] = arrival
        if now >= horizon_s:
            break
        worked = engine.step()
        # Who asks again at once does so while the next step is under way, and waits for it, as in the simulator.
        hear()
        answered += [served for served in under_way if served.ended]
        if on_progress is not None:
            on_progress(clock())
        if not worked and engine.idle and not answered:
            if source.next_s == math.inf and (horizon_s == math.inf or isinstance(source, _Table)):
                break
            clock.wait_until(min(source.next_s, horizon_s))


@dataclass(frozen=True, slots=True)
class _Arrival:
    """``key``: what the request is keyed by in the simulator, too."""

    name: str
    key: int
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    domain: str
    user: int = -1
    turn: int = -1


class _Table:
    """The rows of a table, in order."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._row = 0

    @property
    def next_s(self) -> float:
        """When the next request arrives."""
        arrived_s = self._table.arrived_s
        return float(arrived_s[self._row]) if self._row < arrived_s.size else math.inf

    def pop(self) -> _Arrival:
        """Return the next request."""
        table, row = self._table, self._row
        self._row += 1
        return _Arrival(
            f"{row}",
            row,
            float(table.arrived_s[row]),
            int(table.prompt_tokens[row]),
            int(table.output_tokens[row]),
            table.domains[int(table.domain[row])],
        )

    def ended(self, arrival: _Arrival, served: Served) -> None:
        """Nobody waits for an answer."""


class _Loop:
    """Users, each with a request under way or the next one ahead."""

    def __init__(self, users: Users, horizon_s: float) -> None:
        if horizon_s == math.inf:
            raise InputError(Fault("users never stop asking: a closed loop needs an end (got inf)", key="horizon"))
        self._users = users
        self._ahead: list[tuple[float, int, _Arrival]] = []
        self._order = itertools.count()
        for user, start_s in enumerate(users.starts_s.tolist()):
            self._ask(user, 0, start_s)

    def _ask(self, user: int, turn: int, ready_s: float) -> None:
        asked = self._users.turn(user, turn, ready_s)
        arrival = _Arrival(
            f"{user}:{turn}",
            user << 32 | turn,
            asked.arrived_s,
            asked.prompt_tokens,
            asked.output_tokens,
            self._users.domains[asked.domain],
            user,
            turn,
        )
        heapq.heappush(self._ahead, (asked.arrived_s, next(self._order), arrival))

    @property
    def next_s(self) -> float:
        """When the next request arrives."""
        return self._ahead[0][0] if self._ahead else math.inf

    def pop(self) -> _Arrival:
        """Return the next request."""
        return heapq.heappop(self._ahead)[2]

    def ended(self, arrival: _Arrival, served: Served) -> None:
        """Let the user think and ask again."""
        wait_s = RETRY_S if served.status == "rejected" else 0.0
        self._ask(arrival.user, arrival.turn + 1, served.ended_s + wait_s)
