"""A cell: one policy, one swept value, one replication. Cells are independent and run on all cores."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles.reading import Document, parse_path
from sim.build import Plant, build_engine, build_plant
from sim.errors import ScenarioError
from sim.fleet import RunResult, simulate
from sim.metrics import Metrics, measure, windows
from sim.recorder import Recorder
from sim.rng import Streams
from sim.scenario import Scenario, at_value, parsed
from sim.workload.base import RequestTable
from sim.workload.build import build_requests, build_users
from sim.workload.closed_loop import ClosedLoop, Users

Series = dict[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Cell:
    """``policy``, ``value``: indices into the scenario's policies and swept values (None without a sweep)."""

    policy: int
    value: int | None
    replication: int


@dataclass(frozen=True, slots=True)
class CellResult:
    """What a cell gave: metrics, time windows, and the records themselves."""

    cell: Cell
    metrics: Metrics
    series: Series
    records: RunResult
    trace_rows: dict[str, int]
    caveats: tuple[str, ...]

    def light(self) -> CellResult:
        """Return the result without its records, for keeping many."""
        return dataclasses.replace(self, records=RunResult({}, {}))


@dataclass(frozen=True, slots=True)
class Work:
    """A scenario ready to be cut into cells; ``strict`` refuses a trace with unusable rows."""

    document: Document
    strict: bool = False

    def cells(self) -> list[Cell]:
        """List all cells, policies innermost, so that a stop leaves whole comparisons."""
        scenario = parsed(self.document)
        values: list[int | None] = [None] if scenario.sweep is None else list(range(len(scenario.sweep.values)))
        return [
            Cell(policy, value, replication)
            for value in values
            for replication in range(scenario.replications)
            for policy in range(len(scenario.policies))
        ]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the cells of one swept value and replication share."""

    scenario: Scenario
    document: Document
    plant: Plant
    streams: Streams
    traffic: RequestTable | Users


#: What was prepared last.
_prepared: list[tuple[Work, int | None, int, Prepared]] = []


def prepare(work: Work, value: int | None, replication: int) -> Prepared:
    """Build what a swept value and replication need; raises `InputError` for what does not fit."""
    sweep = parsed(work.document).sweep
    document = work.document if sweep is None or value is None else at_value(work.document, sweep, value)
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
    return Prepared(scenario, document, plant, streams, traffic)


def run_cell(work: Work, cell: Cell, on_progress: Callable[[float], None] | None = None) -> CellResult:
    """Simulate one cell; a pure function of the work and the cell."""
    ready = _shared(work, cell.value, cell.replication)
    scenario, plant = ready.scenario, ready.plant
    engine = build_engine(scenario, ready.document, plant, cell.policy, ready.traffic.domains, ready.streams)
    records = simulate(
        engine,
        scenario.fleet.router,
        scenario.fleet.replicas,
        ready.traffic,
        scenario.horizon,
        ready.streams,
        Recorder(scenario.records.steps),
        on_progress,
    )
    metrics = measure(records.requests, records.steps, scenario.window, plant.gpus, scenario.objectives.bounds())
    series = windows(records.requests, records.steps, scenario.horizon, scenario.records.window, plant.gpus)
    return CellResult(cell, metrics, series, records, dict(ready.traffic.trace_rows), tuple(ready.traffic.caveats))


def _shared(work: Work, value: int | None, replication: int) -> Prepared:
    """Keep the last preparation: neighbouring cells differ in their policy alone."""
    if _prepared:
        last_work, *last, ready = _prepared[0]
        if last_work.document is work.document and last_work.strict == work.strict and last == [value, replication]:
            return ready
    ready = prepare(work, value, replication)
    _prepared[:] = [(work, value, replication, ready)]
    return ready


# ---------------------------------------------------------------------------------------------------- on several cores

_worker_work: Work | None = None
_worker_done: Any = None


def _begin_worker(work: Work, done: Any) -> None:
    global _worker_work, _worker_done
    _worker_work, _worker_done = work, done


def _work_on(cell: Cell) -> CellResult:
    assert _worker_work is not None
    before = 0.0

    def progress(simulated_s: float) -> None:
        nonlocal before
        with _worker_done.get_lock():
            _worker_done.value += simulated_s - before
        before = simulated_s

    return run_cell(_worker_work, cell, progress)


def run_cells(
    work: Work, cells: Sequence[Cell], jobs: int, on_progress: Callable[[float], None]
) -> Iterator[CellResult]:
    """Run cells on up to ``jobs`` processes and yield each as it ends, in whatever order.

    ``on_progress`` gets the simulated seconds done so far, over all cells. The results are the same bytes for
    any number of jobs.
    """
    if jobs == 1 or len(cells) == 1:
        done = 0.0
        for cell in cells:
            base = done
            yield run_cell(work, cell, lambda simulated_s, base=base: on_progress(base + simulated_s))  # type: ignore[misc]
            done += parsed(work.document).horizon
        return
    context = multiprocessing.get_context("spawn")
    shared = context.Value("d", 0.0)
    with ProcessPoolExecutor(
        min(jobs, len(cells)), mp_context=context, initializer=_begin_worker, initargs=(work, shared)
    ) as pool:
        futures: set[Future[CellResult]] = {pool.submit(_work_on, cell) for cell in cells}
        try:
            while futures:
                ended, futures = wait(futures, timeout=0.1, return_when=FIRST_COMPLETED)
                on_progress(shared.value)
                for future in ended:
                    yield future.result()
        finally:
            for future in futures:
                future.cancel()
