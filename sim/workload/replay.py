"""Replay of a recorded load: which rows of a trace, at what pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Gt, Le
from pydantic import Field

from profiles.reading import STRICT
from sim.errors import Fault, ScenarioError, TraceError
from sim.rng import Streams
from sim.units import Duration, PositiveDuration
from sim.workload.base import ARRIVALS, RequestTable
from sim.workload.domains import DomainLaw, MixChange
from sim.workload.trace.formats import FormatName
from sim.workload.trace.trace import Trace, load_trace, trace_file

#: Entries of `RequestTable.trace_rows` that are no loss: rows in the file, and rows that were moved in time.
MOVED_OR_READ = frozenset({"read", "out_of_order", "spread"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The part [from, until) of a trace, in the trace's own time, before any speed-up."""

    from_: Annotated[Duration, Field(alias="from")] = 0.0
    until: PositiveDuration | None = None

    def __post_init__(self) -> None:
        """Refuse a window that is empty or leaves nothing out."""
        if self.until is None and self.from_ == 0:
            raise ValueError("give from (above 0s), until, or both (got neither)")
        if self.until is not None and self.until <= self.from_:
            raise ValueError(f"until: must be after from {self.from_:g} s (got {self.until:g} s)")


Window.__pydantic_config__ = STRICT  # type: ignore[attr-defined]


@ARRIVALS.register("replay")
@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The arrivals, lengths and, where it names them, domains of a trace file.

    ``path``: relative to the scenario. ``format``: found by header or field names unless said. ``speed_up``: 2 plays
    the trace at twice its rate, every gap halved. ``window``: a part of it; time 0 of the run is where the window
    begins, or else the trace's own time 0. ``sample``: the share of rows to keep, each by its own lot, gaps as they
    are. ``ties``: for a trace whose times are so coarse that requests share them: ``spread`` moves each by a uniform
    share of the grid, ``keep`` lets them arrive in bursts, in the order of the file. One must be chosen for such a
    trace, and has no place with any other.
    """

    kind: Literal["replay"] = "replay"
    path: Annotated[str, Field(min_length=1)]
    format: FormatName = "auto"
    speed_up: Annotated[float, Gt(0)] = 1.0
    window: Window | None = None
    sample: Annotated[float, Gt(0), Le(1)] = 1.0
    ties: Literal["keep", "spread"] | None = None


def replay_requests(
    replay: Replay,
    domains: Mapping[str, float] | Sequence[MixChange] | None,
    horizon_s: float,
    streams: Streams,
    base_dir: Path,
    strict: bool = False,
) -> RequestTable:
    """Return the requests of a trace that arrive in [0, horizon_s).

    The order of things: times of a coarse grid are spread; the window is cut; rows are sampled; time is divided by
    ``speed_up``; the horizon is cut. Every row that is left out is counted in ``trace_rows``. Lots are drawn for every
    row of the file, so that a request keeps its own whatever the window.
    """
    trace = load_trace(trace_file(base_dir, replay.path, "arrivals.path"), replay.format, strict=strict)
    _check_ties(replay, trace)
    if trace.domain is not None and domains is not None:
        message = f"has no effect: {trace.file} has a domain for each request; remove it"
        raise ScenarioError(Fault(message, key="domains"))
    rows = dict(trace.rows)
    recorded_s = trace.recorded_s
    if replay.ties == "spread":
        recorded_s = recorded_s + trace.grid_s * streams.get("replay", "spread").random(recorded_s.size)
    from_s = replay.window.from_ if replay.window else 0.0
    until_s = np.inf if replay.window is None or replay.window.until is None else replay.window.until
    left = np.ones(recorded_s.size, bool)

    def leave_out(wrong: np.ndarray[tuple[int], np.dtype[np.bool_]], reason: str) -> None:
        nonlocal left
        lost = int((left & wrong).sum())
        if lost:
            rows[reason] = rows.get(reason, 0) + lost
            left = left & ~wrong

    leave_out((recorded_s < from_s) | (recorded_s >= until_s), "outside_window")
    if replay.sample < 1:
        leave_out(streams.get("replay", "sample").random(recorded_s.size) >= replay.sample, "not_sampled")
    arrived_s = (recorded_s - from_s) / replay.speed_up
    leave_out(arrived_s >= horizon_s, "after_horizon")
    if not left.any():
        lost = ", ".join(f"{count} {reason}" for reason, count in rows.items() if reason not in MOVED_OR_READ)
        span = f"its times run from {trace.recorded_s.min():g} s to {trace.recorded_s.max():g} s"
        raise TraceError(Fault(f"no request left of {rows['read']}: {lost}; {span}", trace.file))
    if replay.ties == "spread":
        rows["spread"] = int(left.sum())
    order = np.flatnonzero(left)
    order = order[np.argsort(arrived_s[order], kind="stable")]
    if trace.domain is not None:
        domain, names = trace.domain[order], trace.domains
    else:
        law = DomainLaw(domains)
        uniforms = streams.get("domains").random(recorded_s.size)[order]
        domain, names = law.domains_at(arrived_s[order], uniforms), law.names
    return RequestTable(
        arrived_s=arrived_s[order],
        prompt_tokens=trace.prompt_tokens[order],
        output_tokens=trace.output_tokens[order],
        domain=domain,
        tenant=trace.tenant[order],
        domains=names,
        tenants=trace.tenants,
        trace_rows=rows,
        caveats=trace.caveats + _caveats(replay, trace),
    )


def _check_ties(replay: Replay, trace: Trace) -> None:
    if trace.grid_s and replay.ties is None:
        message = (
            f"missing: the times of {trace.file} lie {trace.grid_s:g} s apart, and requests share them; "
            f"choose 'spread' (each is moved by 0 to {trace.grid_s:g} s) or 'keep' (they arrive in bursts)"
        )
        raise ScenarioError(Fault(message, key="arrivals.ties"))
    if not trace.grid_s and replay.ties is not None:
        message = f"has no effect: the times of {trace.file} are not coarse; remove it (got '{replay.ties}')"
        raise ScenarioError(Fault(message, key="arrivals.ties"))


def _caveats(replay: Replay, trace: Trace) -> tuple[str, ...]:
    caveats: tuple[str, ...] = ()
    if replay.ties == "spread":
        caveats += (
            f"arrivals were recorded {trace.grid_s:g} s apart; each was moved by a uniform 0 to {trace.grid_s:g} s",
        )
    if replay.ties == "keep":
        caveats += (
            f"arrivals were recorded {trace.grid_s:g} s apart and kept so: bursts are an effect of the recording",
        )
    if replay.sample < 1:
        caveats += (f"a random {replay.sample:.4g} of the trace's requests was replayed",)
    return caveats
