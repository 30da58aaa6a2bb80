"""Executors: a cell that fails, or whose process dies, costs nothing but itself."""

import os
import signal

import pytest

import sim.executors
from profiles.reading import parse_document
from sim.cells import Cell, Work, run_cell
from sim.errors import Fault, InputError
from sim.executors import CellError, Done, Failure, LocalExecutor, RayExecutor, _next, _Worker, attempt
from tests.helpers.scenario import TINY, changed


def work(text=TINY):
    return Work(parse_document(f"{text}replications: 2\n", "s.yaml"))


def test_a_cell_that_fails_leaves_the_others(monkeypatch):
    def run_or_fail(one, cell, on_share):
        if cell == Cell(1, None, 0):
            raise ZeroDivisionError("ours")
        if cell == Cell(0, None, 1):
            raise InputError(Fault("theirs", "s.yaml", 3))
        return run_cell(one, cell, on_share)

    monkeypatch.setattr(sim.executors, "run_cell", run_or_fail)
    one, shares = work(), []
    with LocalExecutor(1) as executor:
        done = {done.cell: done for done in executor.run(one, one.cells(), shares.append)}
    assert list(done) == one.cells()
    assert [cell for cell, result in done.items() if result.failure] == [Cell(1, None, 0), Cell(0, None, 1)]
    assert done[Cell(0, None, 0)].unwrapped().metrics["arrived"] > 0
    with pytest.raises(CellError, match=r"ZeroDivisionError: ours[\s\S]*Traceback"):
        done[Cell(1, None, 0)].unwrapped()
    with pytest.raises(InputError, match=r"^s\.yaml:3: theirs$"):
        done[Cell(0, None, 1)].unwrapped()
    assert shares == sorted(shares)
    assert shares[-1] == 4


def test_a_worker_stays_with_the_traffic_that_it_has_ready():
    one, other = _Worker(None, None), _Worker(None, None)
    waiting = [Cell(policy, point, 0) for point in (0, 1) for policy in (0, 1)]
    order = []
    for worker in (one, other, one, other):
        order.append(_next(worker, waiting, [one, other]))
        worker.traffic = (order[-1].point, 0)
    assert order == [Cell(0, 0, 0), Cell(0, 1, 0), Cell(1, 0, 0), Cell(1, 1, 0)]
    assert not waiting


@pytest.mark.slow
def test_a_cell_whose_process_dies_is_run_once_more():
    long = work(changed("horizon: 2s", "horizon: 20min"))
    unlucky, doomed = long.cells()[:2]
    deaths, killed = {unlucky: 1, doomed: 2}, set()

    with LocalExecutor(2) as executor:

        def kill(_):
            for worker in executor._workers:
                if worker.cell and deaths[worker.cell] and worker.share > 0 and worker.process.pid not in killed:
                    killed.add(worker.process.pid)
                    deaths[worker.cell] -= 1
                    os.kill(worker.process.pid, signal.SIGKILL)

        done = {one.cell: one for one in executor.run(long, [unlucky, doomed], kill)}
    assert set(deaths.values()) == {0}
    assert done[unlucky].unwrapped().metrics == attempt(long, unlucky).unwrapped().metrics
    assert done[doomed].failure == Failure("its process ended by signal 9 (SIGKILL), 2 times; is there enough memory?")


def test_without_ray_there_is_a_hint(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(sim.executors.importlib, "import_module", absent)
    with pytest.raises(InputError, match=r"Ray is not installed; python -m pip install 'dspark-sim\[ray\]'"):
        RayExecutor().__enter__()


def test_done_without_anything_cannot_be():
    with pytest.raises(AssertionError):
        Done(Cell(0, None, 0)).unwrapped()
