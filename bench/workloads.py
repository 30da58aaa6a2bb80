"""Five workloads that other simulators were timed on, and the engine that serves them.

Prompt 1,024 and output 256 tokens; round robin; at most 256 running requests and 2,048 batch tokens a step; prefill in
chunks of 512 tokens.
A step takes 7 ms + 20 us a batch token, drafting 1 ms + 17 us a request; V4-Flash's survival with a request effect.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from profiles.curves import NO_ROWS, StepCost
from profiles.files import find_profile, load_profile
from sim.acceptance import acceptance_tables
from sim.batching import Chunked
from sim.engine import Engine
from sim.fleet import simulate
from sim.output import parquet_file
from sim.recorder import Recorder
from sim.records import Columns, Sink
from sim.rng import Streams
from sim.routing import RoundRobin
from sim.verify import Policy
from sim.workload.base import RequestTable

PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 256
MAX_RUNNING, MAX_BATCH_TOKENS = 256, 2048


@dataclass(frozen=True, slots=True)
class Workload:
    """``requests`` arriving at ``rate_per_s`` (None: all at once) at ``replicas``."""

    name: str
    requests: int
    rate_per_s: float | None
    replicas: int
    aggregated: bool = False


WORKLOADS = (
    Workload("W1", 2_000, 20.0, 4),
    Workload("W2", 2_000, None, 4),
    Workload("W3", 20_000, 20.0, 4),
    Workload("W4", 20_000, 200.0, 40),
    Workload("W5", 1_000_000, 2_000.0, 400, aggregated=True),
)
#: W4, five times as long: for the memory of finished requests.
LONG = Workload("W4 x 5", 100_000, 200.0, 40)


def table(workload: Workload) -> RequestTable:
    """Return the requests of a workload; the first arrives at 0."""
    n = workload.requests
    arrived_s = np.zeros(n)
    if workload.rate_per_s is not None:
        arrived_s = np.random.default_rng(42).exponential(1 / workload.rate_per_s, n).cumsum()
        arrived_s -= arrived_s[0]
    zeros = np.zeros(n, np.int64)
    return RequestTable(arrived_s, np.full(n, PROMPT_TOKENS), np.full(n, OUTPUT_TOKENS), zeros, zeros, domains=("-",))


def engine(policy: Policy) -> Engine:
    """Return the engine of all workloads under a policy."""
    path = find_profile("paper/v4_flash")
    drafter = load_profile(path).acceptance["dspark"]
    tables = acceptance_tables("dspark", drafter, ("-",), "calibrated", path) if policy.drafter else None
    sizes = np.arange(MAX_BATCH_TOKENS + 1)
    requests = np.arange(MAX_RUNNING + 1)
    return Engine(
        policy=policy,
        cost=StepCost(
            verify_s=np.where(sizes > 0, 7e-3 + 20e-6 * sizes, 0.0),
            known_from=1,
            known_to=MAX_BATCH_TOKENS,
            per_request_s=0.0,
            per_context_token_s=0.0,
            overhead_s=0.0,
            prefill_as_verify=True,
            prefill_floor_s=0.0,
            prefill_rows_s=NO_ROWS,
            prefill_token_s=0.0,
            prefill_request_s=0.0,
        ),
        draft_s=np.where(requests > 0, 1e-3 + 17e-6 * requests, 0.0),
        draft_per_token=False,
        known_requests=MAX_RUNNING,
        acceptance=tables,
        prefill=Chunked(chunk_tokens=512),
        max_running=MAX_RUNNING,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_waiting=None,
        max_context_tokens=1 << 20,
        block_tokens=64,
        kv_blocks=1 << 24,
        deadline_s=np.inf,
        luck_key=Streams(42).key("luck"),
        text_key=Streams(42).key("luck"),
    )


def run(workload: Workload, engine: Engine, requests: RequestTable, folder: Path | None = None) -> int:
    """Serve a workload to its last token and return the number of steps; with a ``folder``, its records go there."""
    horizon_s = float(requests.arrived_s[-1]) + 3600.0
    steps, finished = 0, 0

    def count_steps(rows: Columns) -> None:
        nonlocal steps
        steps += int(rows["steps"].sum())

    def count_finished(rows: Columns) -> None:
        nonlocal finished
        finished += int((rows["status"] == "finished").sum())

    with ExitStack() as files:
        steps_to: list[Sink] = [count_steps]
        requests_to: list[Sink] = [count_finished]
        if folder is not None:
            steps_to.append(files.enter_context(parquet_file(folder / "steps.parquet")))
            requests_to.append(files.enter_context(parquet_file(folder / "requests.parquet")))
        recorder = Recorder("per_second" if workload.aggregated else "full", steps_to, requests_to)
        simulate(engine, RoundRobin(), workload.replicas, requests, horizon_s, Streams(42), recorder)
    assert finished == workload.requests
    return steps
