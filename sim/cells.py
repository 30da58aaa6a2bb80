"""A cell: one policy, one point of what is swept, one replication. Cells are independent: `sim.executors` runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from profiles.reading import Document, parse_path, short
from sim.axes import LOAD, label_at, size, values_at
from sim.build import Plant, build_engine, build_plant
from sim.conflicts import at_swept_point
from sim.errors import ScenarioError
from sim.fleet import simulate
from sim.metrics import Measurement, Metrics, Timeline
from sim.output import parquet_file, slugs
from sim.recorder import Recorder
from sim.records import Sink
from sim.rng import Streams
from sim.scenario import Scenario, at_point, label_of, parsed
from sim.workload.base import RequestTable
from sim.workload.build import build_requests, build_users
from sim.workload.closed_loop import ClosedLoop, Users
from sim.workload.replay import Replay

Series = dict[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Cell:
    """``policy``: index into the scenario's policies; ``point``: which point of its sweep (None without one)."""

    policy: int
    point: int | None
    replication: int


@dataclass(frozen=True, slots=True)
class CellResult:
    """What a cell gave: metrics and time windows."""

    cell: Cell
    metrics: Metrics
    series: Series
    trace_rows: dict[str, int]
    caveats: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """A scenario ready to be cut into cells.

    ``strict`` refuses a trace with unusable rows. ``records``: a folder for the records of all cells, each in its
    `cell_folder`; None: they are measured as they pass by, and not kept.
    """

    document: Document
    strict: bool = False
    records: Path | None = None

    def cells(self) -> list[Cell]:
        """List all cells, policies innermost, so that a stop leaves whole comparisons."""
        scenario = parsed(self.document)
        points: list[int | None] = [None] if scenario.sweep is None else list(range(size(scenario.axes)))
        return [
            Cell(policy, point, replication)
            for point in points
            for replication in range(scenario.replications)
            for policy in range(len(scenario.policies))
        ]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the cells of one point and replication share."""

    scenario: Scenario
    document: Document
    plant: Plant
    streams: Streams
    traffic: RequestTable | Users


#: What was prepared last.
_prepared: list[tuple[Work, int | None, int, Prepared]] = []


def prepare(work: Work, point: int | None, replication: int) -> Prepared:
    """Build what a point and replication need; raises `InputError` for what does not fit."""
    document = work.document if point is None else at_point(work.document, parsed(work.document).axes, point)
    scenario = parsed(document)
    streams = Streams(scenario.seed, replication)
    plant = build_plant(scenario, document)
    base = Path(document.file).parent
    traffic: RequestTable | Users
    try:
        if isinstance(scenario.arrivals, ClosedLoop):
            assert scenario.lengths is not None
            traffic = build_users(scenario.arrivals, scenario.lengths, scenario.domains, streams, base, work.strict)
        else:
            traffic = build_requests(
                scenario.arrivals, scenario.lengths, scenario.domains, scenario.horizon, streams, base, work.strict
            )
    except ScenarioError as error:
        # Such a fault knows its key; where that was written, the document knows.
        raise ScenarioError(
            *(document.fault(one.message, parse_path(one.key or "") or ()) for one in error.faults)
        ) from None
    arrived_s = traffic.arrived_s if isinstance(traffic, RequestTable) else np.zeros(0)
    if arrived_s.size and not scenario.window.holds(arrived_s).any():
        last = f"the last of {arrived_s.size} at {arrived_s[-1]:g} s"
        message = (
            f"nothing to measure: no request arrives from {scenario.window.from_s:g} s to "
            f"{scenario.window.until_s:g} s ({last})"
        )
        raise ScenarioError(document.fault(message, ("warmup" if scenario.warmup else "arrivals",)))
    if point is not None and isinstance(traffic, RequestTable):
        traffic = dataclasses.replace(traffic, caveats=(*traffic.caveats, *_early_end(work, scenario, traffic, point)))
    return Prepared(scenario, document, plant, streams, traffic)


def _early_end(work: Work, scenario: Scenario, traffic: RequestTable, point: int) -> Iterator[str]:
    """Say where a trace that is played faster runs out before the measurement ends, which is no higher load there."""
    axes = parsed(work.document).axes
    if LOAD not in (axis.key for axis in axes) or not isinstance(scenario.arrivals, Replay):
        return
    last_s = float(traffic.arrived_s[-1]) if traffic.arrived_s.size else 0.0
    until_s = scenario.window.until_s
    if "after_horizon" not in traffic.trace_rows and last_s < 0.98 * until_s:
        yield f"with {label_at(axes, point)} the trace ends at {last_s:.0f} s, before the measurement at {until_s:g} s"


def run_cell(work: Work, cell: Cell, on_share: Callable[[float], None] | None = None, *, luck: int = 0) -> CellResult:
    """Simulate one cell; a pure function of the work, the cell and the luck.

    ``on_share`` is called with the share of the horizon that is done. Another ``luck`` has other drafts accepted of the
    same requests, which follow the same texts.
    """
    ready = _shared(work, cell.point, cell.replication)
    scenario, plant = ready.scenario, ready.plant
    engine = build_engine(scenario, ready.document, plant, cell.policy, ready.traffic.domains, ready.streams)
    if luck:
        engine = dataclasses.replace(engine, luck_key=ready.streams.key("luck", luck))
    measurement = Measurement(scenario.window, plant.gpus, scenario.objectives.bounds())
    timeline = Timeline(scenario.horizon, scenario.records.window, plant.gpus)
    steps_to: list[Sink] = [measurement.add_steps, timeline.add_steps]
    requests_to: list[Sink] = [measurement.add_requests, timeline.add_requests]
    with ExitStack() as files:
        if work.records is not None:
            home = work.records / cell_folder(parsed(work.document), cell)
            requests_to.append(files.enter_context(parquet_file(home / "requests.parquet")))
            steps_to.append(files.enter_context(parquet_file(home / "steps.parquet")))
        simulate(
            engine,
            scenario.fleet.router,
            scenario.fleet.replicas,
            ready.traffic,
            scenario.horizon,
            ready.streams,
            Recorder(scenario.records.steps, steps_to, requests_to),
            None if on_share is None else lambda simulated_s: on_share(simulated_s / scenario.horizon),
        )
    trace_rows, caveats = dict(ready.traffic.trace_rows), tuple(ready.traffic.caveats)
    return CellResult(cell, measurement.metrics(), timeline.series(), trace_rows, caveats)


def policy_folders(scenario: Scenario) -> list[str]:
    """Return the folder of each policy."""
    return slugs([label_of(policy) for policy in scenario.policies])


def cell_folder(scenario: Scenario, cell: Cell) -> Path:
    """Return the folder of a cell: its policy's, then swept point and replication, where there are several."""
    folder = Path(policy_folders(scenario)[cell.policy])
    if cell.point is not None:
        names = [axis.key.split(".")[-1] for axis in scenario.axes]
        points = [values_at(scenario.axes, point) for point in range(size(scenario.axes))]
        labels = [
            "_".join(f"{name}_{short(one)}" for name, one in zip(names, values, strict=True)) for values in points
        ]
        folder /= slugs(labels)[cell.point]
    return folder / f"replication_{cell.replication}" if scenario.replications > 1 else folder


def check_engines(work: Work, points: Iterable[int | None]) -> list[Plant]:
    """Build every engine once, so that a fault of the last policy shows before the first cell runs.

    Returns the plant of each point; raises `InputError` with a fault placed where the point's values were written.
    """
    scenario = parsed(work.document)
    plants = []
    for point in points:
        try:
            ready = _shared(work, point, 0)
            for index in range(len(ready.scenario.policies)):
                build_engine(ready.scenario, ready.document, ready.plant, index, ready.traffic.domains, ready.streams)
        except ScenarioError as error:
            if point is None:
                raise
            faults = [at_swept_point(fault, scenario.axes, point, work.document) for fault in error.faults]
            raise ScenarioError(*faults) from None
        plants.append(ready.plant)
    return plants


def _shared(work: Work, point: int | None, replication: int) -> Prepared:
    """Keep the last preparation: neighbouring cells differ in their policy alone."""
    if _prepared:
        last_work, *last, ready = _prepared[0]
        same = last_work.document is work.document and last_work.strict == work.strict
        if last == [point, replication] and same:
            return ready
    ready = prepare(work, point, replication)
    _prepared[:] = [(work, point, replication, ready)]
    return ready
