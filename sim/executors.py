"""Who runs cells: this process, several processes of this machine, or a Ray cluster. The results are the same bytes.

An executor yields a `Done` a cell, in whatever order, and stops for nothing: a cell that fails is a `Done` with a
`Failure`. A process that dies (killed, out of memory) takes one cell with it, which is then run once more elsewhere.
Wall time is measured here and nowhere else; no result holds it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Protocol, Self

from tqdm import tqdm

from sim.cells import Cell, CellResult, Work, run_cell
from sim.errors import Fault, InputError
from sim.output import code_digest
from sim.processes import start_process

#: Gets the number of cells done so far, those under way counted by the share of their horizon.
OnProgress = Callable[[float], None]

#: How often a cell is begun before its process's death counts as its failure.
TRIES = 2
_SECONDS_BETWEEN_REPORTS = 0.2


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a cell gave nothing: a line, and the traceback where the fault is ours."""

    message: str
    detail: str = ""


class CellError(Exception):
    """A cell failed where none may."""


@dataclass(frozen=True, slots=True)
class Done:
    """A cell that was run, or failed; how long it took and how much processor time."""

    cell: Cell
    result: CellResult | None = None
    failure: Failure | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def unwrapped(self) -> CellResult:
        """Return the result; raises `InputError` for the input's fault, `CellError` for ours."""
        if self.result is not None:
            return self.result
        assert self.failure is not None
        if self.failure.detail:
            raise CellError(f"{self.cell}: {self.failure.message}\n{self.failure.detail}")
        raise InputError(Fault(self.failure.message))


class Executor(Protocol):
    """Runs cells; use it in a ``with`` block, which ends what still runs."""

    def __enter__(self) -> Self:
        """Begin."""
        ...

    def __exit__(self, *exception: object) -> None:
        """End all processes, at once."""
        ...

    def run(self, work: Work, cells: Sequence[Cell], on_progress: OnProgress) -> Iterator[Done]:
        """Run cells and yield each as it ends."""
        ...


@contextmanager
def progress_bar(name: str, total: int, before: int = 0) -> Iterator[OnProgress]:
    """Show on stderr, if that is a terminal, how many cells of ``total`` are done and how long the rest will take.

    ``before``: how many were done before, of which the rest's time is not told.
    """
    form = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} cells, {elapsed}<{remaining}"
    tqdm.monitor_interval = 0
    with tqdm(total=total, initial=before, desc=name, disable=not sys.stderr.isatty(), bar_format=form) as bar:

        def show(done: float) -> None:
            bar.update(min(before + done, total) - bar.n)

        yield show


def attempt(work: Work, cell: Cell, on_share: OnProgress | None = None) -> Done:
    """Run one cell here; whatever it raises becomes a `Failure`."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result, failure = None, None
    try:
        result = run_cell(work, cell, on_share)
    except InputError as error:
        failure = Failure(str(error))
    except Exception as error:  # one bad cell must not cost the others
        failure = Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
    return Done(cell, result, failure, time.perf_counter() - wall_s, time.process_time() - cpu_s)


# --------------------------------------------------------------------------------------------------------- this machine


@dataclass(slots=True, eq=False)
class _Worker:
    """A process, our end of its pipe, the cell it is at, how much of that is done, and the traffic it has ready."""

    process: Any
    pipe: Connection
    work: Work | None = None
    cell: Cell | None = None
    share: float = 0.0
    traffic: tuple[int | None, int] | None = None


@dataclass(slots=True)
class LocalExecutor:
    """Up to ``jobs`` processes of this machine; one job is this very process. Processes are kept between runs."""

    jobs: int
    _workers: list[_Worker] = field(default_factory=list)

    def __enter__(self) -> Self:
        """Begin; processes start when there is work."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End all processes; what they held was handed on."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()
        self._workers.clear()

    def run(self, work: Work, cells: Sequence[Cell], on_progress: OnProgress) -> Iterator[Done]:
        """Run cells; see `Executor`."""
        if self.jobs == 1 or (len(cells) == 1 and not self._workers):
            for index, cell in enumerate(cells):
                yield attempt(work, cell, lambda share, index=index: on_progress(index + share))  # type: ignore[misc]
                on_progress(index + 1)
            return
        waiting = list(cells)
        died: dict[Cell, int] = {}
        ended: list[Done] = []
        while True:
            for worker in self._idle(len(waiting)):
                if waiting:
                    _hand_over(worker, work, _next(worker, waiting, self._workers))
            yield from ended  # after handing over: no worker waits for what is done with them
            busy = {worker.pipe: worker for worker in self._workers if worker.cell is not None}
            if not busy:
                return
            messages = [self._receive(busy[pipe], died, waiting) for pipe in wait(list(busy), timeout=1.0)]  # type: ignore[index]
            ended = [message for message in messages if message is not None]
            under_way = [worker.share for worker in self._workers if worker.cell is not None]
            on_progress(len(cells) - len(waiting) - len(under_way) + sum(under_way))

    def _idle(self, wanted: int) -> list[_Worker]:
        """Return workers without a cell; starts processes while there are fewer than ``jobs`` and than ``wanted``."""
        idle = [worker for worker in self._workers if worker.cell is None]
        while len(idle) < wanted and len(self._workers) < self.jobs:
            idle.append(_start())
            self._workers.append(idle[-1])
        return idle

    def _receive(self, worker: _Worker, died: dict[Cell, int], waiting: list[Cell]) -> Done | None:
        """Take one message of a worker; a cell whose process died is put back into ``waiting``, or given up."""
        cell = worker.cell
        assert cell is not None
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            self._workers.remove(worker)
            worker.pipe.close()
            worker.process.join()
            died[cell] = died.get(cell, 0) + 1
            if died[cell] < TRIES:
                waiting.insert(0, cell)
                return None
            code = worker.process.exitcode or 0
            how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
            return Done(cell, failure=Failure(f"its process ended {how}, {TRIES} times; is there enough memory?"))
        if isinstance(message, Done):
            worker.cell = None
            return message
        worker.share = float(message)
        return None


def _start() -> _Worker:
    ours, theirs = Pipe()
    process = start_process(_serve, theirs)
    theirs.close()  # or the pipe would stay open when the process dies
    return _Worker(process, ours)


def _hand_over(worker: _Worker, work: Work, cell: Cell) -> None:
    try:
        if worker.work is not work:
            worker.pipe.send(work)
        worker.pipe.send(cell)
    except OSError:
        pass  # it died; what it leaves in the pipe says so
    worker.work, worker.cell, worker.share, worker.traffic = work, cell, 0.0, _traffic(cell)


def _next(worker: _Worker, waiting: list[Cell], workers: Sequence[_Worker]) -> Cell:
    """Take the next cell: of the traffic that this worker has ready, else of traffic that no other has."""
    theirs = {other.traffic for other in workers if other is not worker}
    index = next((index for index, cell in enumerate(waiting) if _traffic(cell) == worker.traffic), None)
    if index is None:
        index = next((index for index, cell in enumerate(waiting) if _traffic(cell) not in theirs), 0)
    return waiting.pop(index)


def _traffic(cell: Cell) -> tuple[int | None, int]:
    return cell.point, cell.replication


def _serve(pipe: Connection) -> None:
    """Be a worker: take cells from the pipe until it is closed."""
    work: Work | None = None
    reported_s = 0.0

    def report(share: float) -> None:
        nonlocal reported_s
        if time.perf_counter() - reported_s > _SECONDS_BETWEEN_REPORTS:
            reported_s = time.perf_counter()
            pipe.send(share)

    try:
        while True:
            message = pipe.recv()
            if isinstance(message, Work):
                work = message
                continue
            assert work is not None
            pipe.send(attempt(work, message, report))
    except (EOFError, OSError):
        return


# ----------------------------------------------------------------------------------------------------------------- Ray


@dataclass(slots=True)
class RayExecutor:
    """A Ray cluster: the one at ``address``, or without it one of ``jobs`` processors, started on this machine.

    The machines of a cluster need this package installed, the same source of it, and the scenario's files under the
    same paths.
    """

    address: str | None = None
    jobs: int | None = None
    #: Cells handed to Ray at a time.
    window: int = 1000
    _ray: Any = None

    def __enter__(self) -> Self:
        """Connect, or start; raises `InputError` where Ray is absent or does not answer."""
        try:
            self._ray = importlib.import_module("ray")
        except ImportError:
            hint = "Ray is not installed; python -m pip install 'dspark-sim[ray]'"
            raise InputError(Fault(f"{hint} (got 'ray')", "--executor")) from None
        quiet = {"include_dashboard": False} if self.address is None else {}
        try:
            self._ray.init(
                address=self.address or "local",
                num_cpus=self.jobs if self.address is None else None,
                log_to_driver=False,
                logging_level="error",
                **quiet,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            option = "--executor" if self.address is None else "--address"
            raise InputError(Fault(f"Ray does not answer: {first}", option)) from None
        return self

    def __exit__(self, *exception: object) -> None:
        """Disconnect; a cluster that was started here ends, and so do tasks under way."""
        self._ray.shutdown()

    def run(self, work: Work, cells: Sequence[Cell], on_progress: OnProgress) -> Iterator[Done]:
        """Run cells; see `Executor`."""
        ray = self._ray
        # A task whose process or machine is lost is begun anew; what it raised itself is in what it returned.
        task = ray.remote(num_cpus=1, max_retries=3)(_run_far)
        given, place, code = ray.put(work), str(Path.cwd()), code_digest()
        waiting = list(reversed(cells))
        running: dict[Any, Cell] = {}
        while waiting or running:
            while waiting and len(running) < self.window:
                cell = waiting.pop()
                running[task.remote(given, cell, place, code)] = cell
            ended, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
            for one in ended:
                cell = running.pop(one)
                try:
                    yield ray.get(one)
                except ray.exceptions.RayError as error:
                    yield Done(cell, failure=Failure(f"{type(error).__name__}: {error}", str(error)))
            on_progress(len(cells) - len(waiting) - len(running))


def _run_far(work: Work, cell: Cell, place: str, code: str) -> Done:
    """Run a cell in a process of Ray; the scenario's paths begin in ``place``, ``code`` is the sender's digest."""
    if code_digest() != code:
        return Done(cell, failure=Failure("a machine of the cluster has other source of sim or profiles than this one"))
    try:
        os.chdir(place)
    except OSError as error:
        return Done(cell, failure=Failure(f"a machine of the cluster has no folder {place}: {error.strerror}"))
    return attempt(work, cell)
