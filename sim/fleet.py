"""A run: arrivals, a router, replicas, for one policy; the place where simulated time passes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import simpy

from sim.batching.disaggregated import Disaggregated
from sim.clock import Clock
from sim.engine import Engine
from sim.errors import InvariantError
from sim.kernels import (
    ACCEPTED,
    ADMITTED,
    ARRIVED,
    DRAFTED,
    ENDED,
    FIRST,
    LAST,
    MAX_ITL,
    OUT,
    PREEMPTED,
    ROUNDS,
    VERIFIED,
)
from sim.prefill_pool import PrefillPool
from sim.recorder import Recorder
from sim.records import Columns
from sim.replica import Replica
from sim.request import FINISHED, REASONS, REJECTED, STATUSES, RequestLog
from sim.rng import Streams
from sim.routing.base import Router
from sim.workload.base import RequestTable
from sim.workload.closed_loop import Users

#: A user whose request was rejected asks again after this long at least, lest no time pass between two rejections.
RETRY_S = 1.0
SLICES = 200


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run wrote down: columns of requests and steps, names of domains and tenants, offered rows that came."""

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
    env = Clock()
    log = RequestLog.of_table(traffic) if isinstance(traffic, RequestTable) else RequestLog(2 * traffic.count)
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
        if ahead is None:
            return -np.inf
        row = log.size + ahead
        return min(float(log.times[ARRIVED, row]), horizon_s) if row < log.capacity else horizon_s

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
    tenants = traffic.tenants if isinstance(traffic, RequestTable) else ("-",)
    result = RunResult(_request_columns(log, traffic.domains, tenants), recorder.columns())
    inside = int(requests_held.sum()) + (pool.inside if pool else 0)
    offered = int((traffic.arrived_s < horizon_s).sum()) if isinstance(traffic, RequestTable) else log.size
    check_conservation(result, inside, offered)
    return result


def _arrive(
    env: Clock, log: RequestLog, table: RequestTable, horizon_s: float, submit: Callable[[int], None]
) -> Generator[simpy.Event, None, None]:
    for row, arrived_s in enumerate(table.arrived_s.tolist()):
        if arrived_s >= horizon_s:
            return
        if arrived_s > env.now:
            yield env.at(arrived_s, first=True)
        log.size = row + 1
        submit(row)


def _start_users(env: Clock, log: RequestLog, users: Users, horizon_s: float, submit: Callable[[int], None]) -> None:
    """Let every user ask, wait for the end, think, and ask again."""
    asked: list[tuple[int, int]] = []

    def ask(user: int, turn: int, ready_s: float) -> Generator[simpy.Event, None, None]:
        request = users.turn(user, turn, ready_s)
        if request.arrived_s >= horizon_s:
            return
        yield env.at(request.arrived_s, first=True)
        row = log.add(env.now, request.prompt_tokens, request.output_tokens, request.domain, user << 32 | turn)
        asked.append((user, turn))
        submit(row)

    def on_ended(row: int) -> None:
        user, turn = asked[row]
        env.process(ask(user, turn + 1, env.now + (RETRY_S if log.status[row] == REJECTED else 0.0)))

    log.on_ended = on_ended
    for user, start_s in enumerate(users.starts_s.tolist()):
        env.process(ask(user, 0, start_s))


def _request_columns(log: RequestLog, domains: tuple[str, ...], tenants: tuple[str, ...]) -> Columns:
    n = log.size
    times, counts = log.times[:, :n], log.counts[:, :n]
    return {
        "request": np.arange(n, dtype=np.int64),
        "tenant": np.array(tenants, dtype=object)[log.tenant[:n]],
        "domain": np.array(domains, dtype=object)[log.domain[:n]],
        "replica": log.replica[:n].copy(),
        "arrived_s": times[ARRIVED].copy(),
        "admitted_s": times[ADMITTED].copy(),
        "first_token_s": times[FIRST].copy(),
        "last_token_s": times[LAST].copy(),
        "ended_s": times[ENDED].copy(),
        "prompt_tokens": log.prompt_tokens[:n].copy(),
        "asked_tokens": log.output_tokens[:n].copy(),
        "output_tokens": counts[OUT].copy(),
        "rounds": counts[ROUNDS].copy(),
        "drafted_tokens": counts[DRAFTED].copy(),
        "verified_tokens": counts[VERIFIED].copy(),
        "accepted_draft_tokens": counts[ACCEPTED].copy(),
        "preemptions": counts[PREEMPTED].copy(),
        "max_itl_s": np.where(counts[OUT] > 1, times[MAX_ITL], np.nan),
        "status": np.array(STATUSES, dtype=object)[log.status[:n]],
        "reason": np.array(REASONS, dtype=object)[log.reason[:n]],
    }


def check_conservation(result: RunResult, inside: int, offered: int) -> None:
    """Raise `InvariantError` unless requests and tokens of a run add up; says which equation failed."""
    requests, steps = result.requests, result.steps
    status = requests["status"]
    ends = {name: int((status == name).sum()) for name in STATUSES}

    def equal(what: str, left: float, right: float) -> None:
        if left != right:
            raise InvariantError(f"{what} fails: {left} and {right}")

    equal("arrivals offered = arrivals recorded", offered, status.size)
    equal("unfinished at the horizon = requests inside the fleet", ends["unfinished"], inside)
    equal("tokens delivered by steps = tokens of requests", *_sums(steps, requests, "output_tokens"))
    for name in ("drafted_tokens", "verified_tokens", "accepted_draft_tokens"):
        equal(f"{name} of steps = of requests", *_sums(steps, requests, name))
    tokens, first = requests["output_tokens"], requests["first_token_s"]
    done = status == STATUSES[FINISHED]
    arrived, last = requests["arrived_s"], requests["last_token_s"]
    started = ~np.isnan(first)
    equal("requests with tokens = requests with a first token", int((tokens > 0).sum()), int(started.sum()))
    equal("finished requests without a token", int((done & ~started).sum()), 0)
    ordered = (arrived <= first) & (first <= last) & ~(last > requests["ended_s"])
    equal("arrived <= first token <= last token <= end", int(ordered[started].sum()), int(started.sum()))
    equal("requests with more tokens than asked", int((tokens > requests["asked_tokens"]).sum()), 0)
    accepted, verified, drafted = (
        requests[name] for name in ("accepted_draft_tokens", "verified_tokens", "drafted_tokens")
    )
    wrong = (accepted > verified) | (verified > drafted)
    equal("requests with accepted > verified or verified > drafted", int(wrong.sum()), 0)


def _sums(steps: Columns, requests: Columns, name: str) -> tuple[int, int]:
    return int(steps[name].sum()), int(requests[name].sum())
