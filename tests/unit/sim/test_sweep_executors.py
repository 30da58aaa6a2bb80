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
        done = {done.cell: done for done in executor.run(one, one.cells(), shares.append, light=True)}
    assert list(done) == one.cells()
    assert [cell for cell, result in done.items() if result.failure] == [Cell(1, None, 0), Cell(0, None, 1)]
    assert done[Cell(0, None, 0)].unwrapped().records.requests == {}
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
@pytest.mark.parametrize("deaths", [1, 2])
def test_a_cell_whose_process_dies_is_run_once_more(deaths):
    long = work(changed("horizon: 2s", "horizon: 20min"))
    cells, killed = long.cells()[:2], []

    with LocalExecutor(2) as executor:

        def kill(_):
            victim = next(
                (worker for worker in executor._workers if worker.cell == cells[0] and worker.share > 0), None
            )
            if victim is not None and len(killed) < deaths and victim.process.pid not in killed:
                killed.append(victim.process.pid)
                os.kill(victim.process.pid, signal.SIGKILL)

        done = {one.cell: one for one in executor.run(long, cells, kill, light=True)}
    assert len(killed) == deaths
    assert done[cells[1]].unwrapped().metrics == attempt(long, cells[1], light=True).unwrapped().metrics
    if deaths == 1:
        assert done[cells[0]].unwrapped().metrics == attempt(long, cells[0], light=True).unwrapped().metrics
    else:
        assert done[cells[0]].failure == Failure(
            "its process ended by signal 9 (SIGKILL), 2 times; is there enough memory?"
        )


def test_without_ray_there_is_a_hint(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(sim.executors.importlib, "import_module", absent)
    with pytest.raises(InputError, match=r"Ray is not installed; python -m pip install 'dspark-sim\[ray\]'"):
        RayExecutor().__enter__()


def test_done_without_anything_cannot_be():
    with pytest.raises(AssertionError):
        Done(Cell(0, None, 0)).unwrapped()
