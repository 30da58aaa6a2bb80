"""Preferred batches: on a jagged step table the production policy pins batch tokens while requests grow, then jumps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.validate.closed_loop import Cell, Runner, build_engine, run_cells
from analysis.validate.published import MODELS, PLATEAUS, Cloud, batch_cloud
from analysis.validate.rungs import Check, Section, compare, said, table
from profiles.recipes.b300 import build_b300
from profiles.recipes.serving import Model
from profiles.recipes.sources import Floats, Shared
from sim.verify import Dspark, DsparkAsync, Policy

#: Requests at the engine of four GPUs.
LOADS = tuple(range(8, 257, 4))
QUICK_LOADS = (16, 64, 68, 72, 128, 200)
GRAPH_LIMIT = 1024
TOKENS, OUTPUT_TOKENS = 40_000, 128
POLICIES: dict[str, Policy] = {"dspark_async": DsparkAsync(first_budget=5), "dspark": Dspark()}


@dataclass(frozen=True, slots=True)
class Plateau:
    """A stretch of loads over which batch tokens hardly grow: its ends, and the batch at either."""

    from_requests: float
    to_requests: float
    from_tokens: float
    to_tokens: float


def find_plateaus(requests: Floats, tokens: Floats, *, slope: float = 0.4, growth: float = 0.06) -> list[Plateau]:
    """Find maximal stretches where ``d ln tokens / d ln requests`` stays up to ``slope`` in size.

    ``requests`` ascend. A stretch counts if requests grow by the share ``growth`` along it; a batch that is spread over
    requests in fixed shares would have slope 1 everywhere.
    """
    steps = np.diff(np.log(tokens)) / np.diff(np.log(requests))
    flat = np.abs(steps) <= slope
    found = []
    start = 0
    while start < flat.size:
        end = start
        while end < flat.size and flat[end]:
            end += 1
        if end > start and requests[end] / requests[start] - 1 >= growth:
            found.append(Plateau(*map(float, (requests[start], requests[end], tokens[start], tokens[end]))))
        start = end + 1
    return found


@dataclass(frozen=True, slots=True)
class Pinned:
    """Batch tokens of a policy by requests: median and 10th, 90th percentile over steps."""

    requests: Floats
    p10: Floats
    median: Floats
    p90: Floats
    verify_tokens: Floats
    speed: Floats


@dataclass(frozen=True, slots=True)
class Jagged:
    """The measured table and what each policy did on it; graph sizes ``sizes``."""

    sizes: Floats
    verify_s: Floats
    pinned: dict[str, Pinned]
    clouds: dict[Model, Cloud]


def simulate_jagged(shared: Shared, *, seed: int, jobs: int, quick: bool, run: Runner = run_cells) -> Jagged:
    """Run both policies on the table measured on 4 x B300, up to its graph limit."""
    profile = build_b300(shared)
    loads = QUICK_LOADS if quick else LOADS
    cells = [
        Cell(
            build_engine(profile, policy, load, max_batch_tokens=GRAPH_LIMIT, seed=seed),
            load,
            TOKENS,
            OUTPUT_TOKENS,
            seed,
        )
        for policy in POLICIES.values()
        for load in loads
    ]
    runs = iter(run(cells, jobs, "plateaus"))
    pinned = {}
    for name in POLICIES:
        own = [next(runs) for _ in loads]
        pinned[name] = Pinned(
            np.array(loads, np.float64),
            *(
                np.array([getattr(one, value) for one in own])
                for value in ("batch_p10", "batch_p50", "batch_p90", "verify_tokens", "user_tokens_per_s")
            ),
        )
    assert profile.step_time is not None
    verify = profile.step_time.verify
    assert verify.kind == "table"
    graph = verify.segments[0]
    clouds = {model: batch_cloud(shared, model) for model in MODELS}
    return Jagged(np.array(graph.sizes, np.float64), np.array(graph.seconds), pinned, clouds)


def edges(jagged: Jagged) -> list[int]:
    """Return the graph sizes that are cheaper than, or as cheap as, the one before them: where a batch likes to be."""
    falls = np.flatnonzero(np.diff(jagged.verify_s) <= 0) + 1
    return [int(size) for size in jagged.sizes[falls]]


def section(jagged: Jagged) -> Section:
    """Report plateaus simulated and observed, and how algorithm 1 collapses."""
    own = jagged.pinned["dspark_async"]
    simulated = find_plateaus(own.requests, own.median)
    rows = [_row("dspark_async on 4 x B300", plateau) for plateau in simulated]
    checks: list[Check] = []
    for model, cloud in jagged.clouds.items():
        dense = cloud.points >= 20
        found = find_plateaus(cloud.requests[dense], cloud.median[dense])
        rows += [_row(f"{model}'s cloud, per GPU", plateau) for plateau in found]
        for level in PLATEAUS[model]:
            near = [p for p in found if p.from_tokens - 0.04 * level <= level <= p.to_tokens + 0.04 * level]
            seen = min(near, key=lambda p: abs(p.to_tokens - level)).to_tokens if near else None
            checks.append(
                compare(f"{model}: plateau that the cloud's medians show near {level}", seen, level, "tokens")
            )
    at_edge = float(np.mean([np.isin(round(median), jagged.sizes) for median in own.median]))
    cheap = edges(jagged)
    collapse = jagged.pinned["dspark"]
    shown = [load for load in (16, 32, 64, 96, 128, 192, 256) if load in own.requests]
    compared = []
    for load in shown:
        i = int(np.flatnonzero(own.requests == load)[0])
        compared.append(
            [
                str(load),
                f"{own.median[i]:.0f}",
                f"{own.verify_tokens[i]:.2f}",
                f"{own.speed[i]:.1f}",
                f"{collapse.median[i]:.0f}",
                f"{collapse.verify_tokens[i]:.2f}",
                f"{collapse.speed[i]:.1f}",
            ]
        )
    nothing = int(np.sum(collapse.verify_tokens < 1.02))
    lines = [
        *said(
            f"Step table measured on 4 x B300 (TP4), padded to graph sizes up to {GRAPH_LIMIT} tokens, not smoothed: "
            f"{len(cheap)} sizes are no dearer than the one below. Loads there are per engine of four GPUs, in the "
            "clouds per GPU: shapes are compared, not levels. A plateau: batch tokens grow less than 0.4 times as fast "
            "as requests do, while those grow by 6 % or more."
        ),
        *table(("plateaus", "from requests", "to", "batch tokens", "to"), rows),
        "",
        *said(
            f"dspark_async's median batch is a graph size at {100 * at_edge:.0f} % of the loads. The clouds' preferred "
            "batches are "
            + "; ".join(f"{'/'.join(map(str, levels))} ({model})" for model, levels in PLATEAUS.items())
            + ": multiples of 16, read off sharp edges of the cloud, so that medians show the broad ones only."
        ),
        "",
        *table(
            ("requests", "async: batch", "verified", "tok/s/user", "algorithm 1: batch", "verified", "tok/s/user"),
            compared,
        ),
        *said(
            "Algorithm 1 with its early stop fills the graph size that the requests alone need and stops there, since "
            f"one token never pays for the next size: it verifies nothing (less than 0.02 of a token) at {nothing} of "
            f"{collapse.requests.size} loads."
        ),
    ]
    checks.append(compare("dspark_async on 4 x B300: loads whose batch is a graph size", 100 * at_edge, None, "%"))
    checks.append(
        compare(
            "dspark on 4 x B300: loads at which it verifies nothing", 100 * nothing / collapse.requests.size, None, "%"
        )
    )
    return Section("Plateaus: a jagged step table (figure 8)", tuple(lines), tuple(checks))


def _row(name: str, plateau: Plateau) -> list[str]:
    return [
        name,
        f"{plateau.from_requests:.0f}",
        f"{plateau.to_requests:.0f}",
        f"{plateau.from_tokens:.0f}",
        f"{plateau.to_tokens:.0f}",
    ]
