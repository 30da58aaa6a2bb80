"""A constant number of requests at one replica, decoding only: what the paper's telemetry is compared with.

Each user asks again the moment an answer ends, so that ``requests`` are in the engine all the time; prompts are one
token and cost nothing. The fleet behind the telemetry met an open load, whose requests vary within every point.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from profiles.curves import NO_ROWS, draft_cost, step_cost
from profiles.schema import Profile
from sim.acceptance import acceptance_tables
from sim.batching import Chunked
from sim.engine import Engine
from sim.fleet import simulate
from sim.recorder import Recorder
from sim.rng import Streams
from sim.routing import RoundRobin
from sim.verify import Policy
from sim.workload.closed_loop import ClosedLoop, Users
from sim.workload.domains import DomainLaw

Ints = NDArray[np.int64]

#: Long enough that the last round of an answer, cut at its end, takes only 0.3 % off the accepted length.
OUTPUT_TOKENS = 512
#: Answers a user gets before anything is counted: a crowd that has just begun holds fewer slow requests than later.
WARM_UP = 3
#: Tokens counted in a full run: some 1,200 requests, so that their differences leave about 0.7 % in a mean.
TOKENS = 600_000


@dataclass(frozen=True, slots=True)
class _Alike:
    """Requests of one prompt token and ``output_tokens``."""

    output_tokens: int
    trace_rows: dict[str, int] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()

    def draw(self, n: int, streams: Streams, *name: str | int) -> tuple[Ints, Ints]:
        return np.ones(n, np.int64), np.full(n, self.output_tokens, np.int64)


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine with ``requests`` in it, until about ``tokens`` are counted."""

    engine: Engine
    requests: int
    tokens: int = TOKENS
    output_tokens: int = OUTPUT_TOKENS
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Steady:
    """What a cell gave, after the warm-up.

    ``requests``: mean number decoding, over time. ``user_tokens_per_s``: tokens over request seconds, as throughput
    over requests is. ``verify_tokens``: tokens a request verifies in a step, bonus included. ``accepted_length``:
    tokens of a round. ``draft_ratio``: share of time spent drafting. ``outside_ratio``: share of steps whose batch the
    profile did not measure. ``batch_p10``, ``batch_p50``, ``batch_p90``: percentiles of a step's tokens.
    """

    requests: float
    user_tokens_per_s: float
    verify_tokens: float
    accepted_length: float
    draft_ratio: float
    outside_ratio: float
    batch_p10: float
    batch_p50: float
    batch_p90: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.accepted_length / self.user_tokens_per_s


def build_engine(
    profile: Profile, policy: Policy, requests: int, *, max_batch_tokens: int | None = None, seed: int = 0
) -> Engine:
    """Build a decode-only engine for exactly ``requests`` from a profile with step time and acceptance.

    ``max_batch_tokens`` None: no limit but whole blocks of all requests.
    """
    assert profile.step_time is not None
    tables = None
    draft_s, per_token, known = np.zeros(requests + 1), False, requests
    if policy.drafter is not None:
        cost, per_token = draft_cost(profile.step_time, policy.drafter, requests)
        draft_s, known = cost.seconds, cost.known_to
        drafter = profile.acceptance[policy.drafter]
        tables = acceptance_tables(policy.drafter, drafter, ("-",), policy.confidence, Path(profile.name))
    longest = requests * (1 + (tables.draft_length if tables else 0))
    most = longest if max_batch_tokens is None else min(max_batch_tokens, longest)
    verify = step_cost(profile.step_time, most)
    if most < longest:
        padded = np.pad(verify.verify_s, (0, longest - most), mode="edge")
        verify = dataclasses.replace(verify, verify_s=padded)
    return Engine(
        policy=policy,
        cost=dataclasses.replace(
            verify,
            prefill_as_verify=False,
            prefill_floor_s=0.0,
            prefill_rows_s=NO_ROWS,
            prefill_token_s=0.0,
            prefill_request_s=0.0,
        ),
        draft_s=draft_s,
        draft_per_token=per_token,
        known_requests=known,
        acceptance=tables,
        prefill=Chunked(),
        max_running=requests,
        max_batch_tokens=most,
        max_waiting=None,
        max_context_tokens=1 << 30,
        block_tokens=64,
        kv_blocks=1 << 40,
        deadline_s=np.inf,
        luck_key=Streams(seed).key("luck"),
        text_key=Streams(seed).key("luck"),
    )


def run_cell(cell: Cell) -> Steady:
    """Simulate one cell; the same users and the same luck for every engine."""
    engine, n = cell.engine, cell.requests
    # A guess at the length of a step and at what it yields is enough to set how long to run.
    trained = engine.trained_length
    tokens_a_step = n * (1 + 0.5 * trained)
    step_s = engine.cost.target_s(n, min(int(tokens_a_step), engine.max_batch_tokens), 0, 0) + float(engine.draft_s[n])
    user_per_s = tokens_a_step / n / step_s
    answer_s = cell.output_tokens / user_per_s
    warm_up_s = WARM_UP * answer_s
    horizon_s = warm_up_s + cell.tokens / (n * user_per_s)
    streams = Streams(cell.seed)
    users = Users(ClosedLoop(users=n, ramp=answer_s), _Alike(cell.output_tokens), DomainLaw(None), streams)
    result = simulate(engine, RoundRobin(), 1, users, horizon_s, streams, Recorder("full"))
    after = result.steps["started_s"] >= warm_up_s
    step = {name: column[after] for name, column in result.steps.items()}
    total = {name: float(column.sum()) for name, column in step.items()}
    decoded = total["output_tokens"] - total["first_tokens"]
    p10, p50, p90 = map(float, np.percentile(step["batch_tokens"], (10, 50, 90)))
    return Steady(
        requests=total["decoding_s"] / total["busy_s"],
        user_tokens_per_s=decoded / total["decoding_s"],
        verify_tokens=total["batch_tokens"] / total["decoding"],
        accepted_length=decoded / total["decoding"],
        draft_ratio=total["draft_s"] / total["busy_s"],
        outside_ratio=total["outside_steps"] / total["steps"],
        batch_p10=p10,
        batch_p50=p50,
        batch_p90=p90,
    )


def run_cells(cells: Sequence[Cell], jobs: int, what: str) -> list[Steady]:
    """Simulate cells on up to ``jobs`` processes; the results, in order, are the same for any number of them."""
    with tqdm(total=len(cells), desc=what, unit="run", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        if jobs == 1 or len(cells) < 2:
            found = []
            for cell in cells:
                found.append(run_cell(cell))
                bar.update()
            return found
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, len(cells)), mp_context=context) as pool:
            futures = [pool.submit(run_cell, cell) for cell in cells]
            try:
                for future in as_completed(futures):
                    future.result()
                    bar.update()
            finally:
                for future in futures:
                    future.cancel()
            return [future.result() for future in futures]


#: Simulates cells, on up to so many processes, for what: `run_cells`, or one that keeps what they gave (`kept`).
Runner = Callable[[Sequence[Cell], int, str], list[Steady]]
