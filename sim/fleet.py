"""A run: arrivals, a router, replicas, for one policy; the place where simulated time passes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import simpy

from sim.batching.disaggregated import Disaggregated
from sim.clock import Clock
from sim.engine import Engine
from sim.invariants import Books
from sim.prefill_pool import PrefillPool
from sim.recorder import Recorder
from sim.records import Columns
from sim.replica import Replica
from sim.request import REJECTED, RequestLog
from sim.rng import Streams
from sim.routing.base import Router
from sim.workload.base import RequestTable
from sim.workload.closed_loop import Users

#: A user whose request was rejected asks again after this long at least, lest no time pass between two rejections.
RETRY_S = 1.0
SLICES = 200
#: Requests of a table that are laid out at a time, before they arrive.
LAID_OUT = 4096


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run wrote down, where its recorder kept it: columns of requests and of steps."""

    requests: Columns
    steps: Columns


def simulate(
    engine: Engine,
    router: Router,
    replicas: int,
    traffic: RequestTable | Users,
    horizon_s: float,
    streams: Streams,
    recorder: Recorder,
    on_progress: Callable[[float], None] | None = None,
) -> RunResult:
    """Simulate a fleet of ``replicas`` engines from time 0 to ``horizon_s``.

    ``on_progress`` is called with the simulated seconds after each of `SLICES` slices. Every run ends with a check
    that requests, tokens and KV blocks add up; `InvariantError` means a bug of ours.
    """
    env, books = Clock(), Books()
    recorder.step_rows.sinks += (books.add_steps,)
    recorder.request_rows.sinks += (books.add_requests,)
    log = _log_of(traffic, recorder)
    requests_held = np.zeros(replicas, np.int64)
    kv_held = np.zeros(replicas, np.int64)
    route, dice = router.start(), streams.get("router")

    def choose() -> Replica:
        return fleet[route.pick(requests_held, kv_held, rng=dice)]

    def hand_on(row: int) -> None:
        choose().receive(row)

    pool: PrefillPool | None = None
    if isinstance(engine.prefill, Disaggregated):
        pool = PrefillPool(env, engine.prefill, engine, log, recorder, replicas, hand_on)
        for index in range(engine.prefill.replicas):
            env.process(pool.run(index))

    def next_arrival_s(index: int) -> float:
        """Before this instant nothing reaches replica ``index``."""
        ahead = 0 if replicas == 1 else route.arrivals_ahead(index, replicas)
        if ahead is None or recorder.is_far_ahead:
            return -np.inf
        number = log.arrived + ahead
        return min(float(arrived_s[number]), horizon_s) if number < arrived_s.size else horizon_s

    arrived_s = traffic.arrived_s if isinstance(traffic, RequestTable) else np.empty(0)
    is_open = isinstance(traffic, RequestTable) and pool is None
    fleet = [
        Replica(
            env,
            index,
            engine,
            log,
            recorder,
            requests_held,
            kv_held,
            pool.recompute if pool else None,
            next_arrival_s if is_open else None,
        )
        for index in range(replicas)
    ]
    for replica in fleet:
        env.process(replica.run())

    def submit(row: int) -> None:
        if pool is not None:
            pool.submit(row)
        else:
            choose().submit(row)

    if isinstance(traffic, RequestTable):
        env.process(_arrive(env, log, traffic, horizon_s, submit))
    else:
        _start_users(env, log, traffic, horizon_s, submit)

    for piece in range(1, SLICES + 1):
        env.run(until=horizon_s * piece / SLICES if piece < SLICES else horizon_s)
        if on_progress is not None:
            on_progress(env.now)
    for replica in fleet:
        replica.check()
    log.hand_on(all_of_them=True)
    result = RunResult(*recorder.close())
    inside = int(requests_held.sum()) + (pool.inside if pool else 0)
    offered = int((arrived_s < horizon_s).sum()) if isinstance(traffic, RequestTable) else log.arrived
    books.check(inside, offered)
    return result


def _log_of(traffic: RequestTable | Users, recorder: Recorder) -> RequestLog:
    capacity = min(traffic.arrived_s.size, 2 * LAID_OUT) if isinstance(traffic, RequestTable) else 2 * traffic.count
    tenants = traffic.tenants if isinstance(traffic, RequestTable) else ("-",)
    return RequestLog(capacity, traffic.domains, tenants, recorder.request_rows.add)


def _arrive(
    env: Clock, log: RequestLog, table: RequestTable, horizon_s: float, submit: Callable[[int], None]
) -> Generator[simpy.Event, None, None]:
    for start in range(0, table.arrived_s.size, LAID_OUT):
        stop = min(start + LAID_OUT, table.arrived_s.size)
        rows = log.lay_out(table, start, stop)
        for row, arrived_s in zip(rows, table.arrived_s[start:stop].tolist(), strict=True):
            if arrived_s >= horizon_s:
                return
            if arrived_s > env.now:
                yield env.at(arrived_s, first=True)
            log.arrive(row)
            submit(row)


def _start_users(env: Clock, log: RequestLog, users: Users, horizon_s: float, submit: Callable[[int], None]) -> None:
    """Let every user ask, wait for the end, think, and ask again."""

    def ask(user: int, turn: int, ready_s: float) -> Generator[simpy.Event, None, None]:
        request = users.turn(user, turn, ready_s)
        if request.arrived_s >= horizon_s:
            return
        yield env.at(request.arrived_s, first=True)
        row = log.add(env.now, request.prompt_tokens, request.output_tokens, request.domain, user << 32 | turn)
        submit(row)

    def on_ended(row: int) -> None:
        user, turn = divmod(int(log.request_key[row]), 1 << 32)
        env.process(ask(user, turn + 1, env.now + (RETRY_S if log.status[row] == REJECTED else 0.0)))

    log.on_ended = on_ended
    for user, start_s in enumerate(users.starts_s.tolist()):
        env.process(ask(user, 0, start_s))
