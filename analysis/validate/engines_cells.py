"""A constant number of users at one engine, as a scenario: what the parts of the rung ``engines`` simulate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from profiles.reading import parse_document
from profiles.recipes.sources import Floats
from sim.cells import Cell, Work, run_cell
from sim.loading import checked
from sim.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """``users`` who each have a request under way at one replica, which has room for all of them.

    ``profile`` (or steps and acceptance of two), ``policy``, ``domains``: as a scenario says them. The measurement
    begins after ``warmup_s`` and lasts to ``horizon_s``.
    """

    profile: str
    policy: str
    users: int
    prompt_tokens: int
    output_tokens: int
    warmup_s: float
    horizon_s: float
    acceptance: str | None = None
    domains: str | None = None
    max_batch_tokens: int = 8192
    prefill: str = "{kind: chunked}"


def scenario_text(loop: Loop, seed: int) -> str:
    """Return the loop as a scenario file."""
    profiles = f"profile: {loop.profile}"
    if loop.acceptance is not None:
        profiles = f"step_profile: {loop.profile}, acceptance_profile: {loop.acceptance}"
    domains = "" if loop.domains is None else f"domains: {loop.domains}"
    ramp = f", ramp: {loop.warmup_s / 3:.6g}s" if loop.users > 1 else ""
    return f"""
name: engines
seed: {seed}
horizon: {loop.horizon_s:.6g}s
warmup: {loop.warmup_s:.6g}s
fleet:
  {{replicas: 1, {profiles}, kv_cache: 100TiB, kv_bytes_per_token: 1000, gpus_per_replica: 1,
    max_context_tokens: 1048576, max_running: {loop.users}, max_batch_tokens: {loop.max_batch_tokens},
    prefill: {loop.prefill}}}
policies: [{loop.policy}]
arrivals: {{kind: closed_loop, users: {loop.users}{ramp}}}
lengths:
  prompt: {{kind: fixed, tokens: {loop.prompt_tokens}}}
  output: {{kind: fixed, tokens: {loop.output_tokens}}}
{domains}
"""


def simulate_loop(loop: Loop, seed: int = 0, beside: Path = Path()) -> Metrics:
    """Simulate a loop; profiles are named as in a scenario that lies in ``beside``."""
    document = parse_document(scenario_text(loop, seed), str(beside / "engines.yaml"))
    checked(document)
    return run_cell(Work(document), Cell(0, None, 0)).metrics


def errors_percent(predicted: ArrayLike, observed: ArrayLike) -> Floats:
    """Return each error in per cent of what was observed."""
    return np.asarray(100 * (np.asarray(predicted) / np.asarray(observed) - 1))
