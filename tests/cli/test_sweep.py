"""``python -m sim.sweep``: a grid of cells that survives failures, kills and interrupts, the same whoever ran it."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import analysis.session
import sim.executors
import sim.output
from sim.cells import Cell, run_cell
from sim.sweep import main
from tests.cli.conftest import Ended
from tests.helpers.scenario import TINY, changed

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "sim.sweep", "s.yaml"]
GRID = ["--vary", "load=1..2:2", "--vary", "fleet.replicas=1,2"]
#: Cells that take long enough to be killed in.
SLOW = changed("horizon: 2s", "horizon: 10min").replace("name: tiny", "name: slow\nrecords: {steps: per_second}")
Sweep = Callable[..., Ended]


@pytest.fixture
def sweep(tiny_file, monkeypatch, capsys) -> Sweep:
    """Return a function that sweeps the tiny scenario in this process; it draws only where it is asked to."""
    draw = analysis.session.draw_frontiers

    def run_sweep(*options: str, plots: bool = False) -> Ended:
        monkeypatch.setattr(analysis.session, "draw_frontiers", draw if plots else lambda *_: None)
        capsys.readouterr()
        code = main(["s.yaml", *options, *([] if "--jobs" in options else ["--jobs", "1"])])
        return Ended(code, *capsys.readouterr())

    return run_sweep


def table(folder="runs/tiny-sweep"):
    return pq.read_table(Path(folder) / "cells.parquet").to_pylist()


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def process(*options: str, **more) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*COMMAND, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )


def test_a_row_a_cell(sweep):
    ended = sweep(*GRID, "--replications", "2", "--json", "s.json", plots=True)
    assert (ended.code, ended.err) == (0, "")
    rows = table()
    names = [(row["load"], row["fleet.replicas"], row["replication"], row["policy"]) for row in rows]
    assert names == [
        (load, replicas, replication, policy)
        for load in (1, 2)
        for replicas in (1, 2)
        for replication in (0, 1)
        for policy in ("none", "dspark")
    ]
    assert {row["failure"] for row in rows} == {None}
    # Two policies meet the same requests, twice the load is about twice as many.
    for none, dspark in zip(rows[::2], rows[1::2], strict=True):
        assert none["arrived"] == dspark["arrived"]
    assert sum(row["arrived"] for row in rows[:8]) < sum(row["arrived"] for row in rows[8:])
    assert "load, fleet.replicas" in ended.out
    assert ended.out.count("dspark  ") == 4
    made = {path.name for path in Path("runs/tiny-sweep").iterdir() if path.suffix in (".png", ".csv", ".parquet")}
    plots = {"frontier_fleet.replicas_1.png", "frontier_fleet.replicas_2.png"}
    assert made == plots | {"cells.parquet", "comparison.csv"}
    report = json.loads(Path("s.json").read_text())
    assert len(report["comparison"]) == 8
    assert report["timing"]["cells_run"] == len(report["timing"]["runs"]) == 16
    assert report["timing"]["wall_s"] > 0


def test_a_cell_is_what_sim_run_gives(sweep, run):
    run(TINY, "--set", "fleet.replicas=2", "--set", "arrivals.rate_per_s=8", "--replications", "2")
    sweep("--vary", "load=1,2", "--vary", "fleet.replicas=2", "--replications", "2")
    row = next(row for row in table() if (row["load"], row["replication"], row["policy"]) == (2, 1, "dspark"))
    summary = json.loads(Path("runs/tiny/dspark/summary.json").read_text())
    alone = summary["results"][0]["replications"][1]
    assert {name: row[name] for name in alone} == alone


def test_the_file_s_sweep_and_the_option_are_one(sweep, here):
    sweep("--vary", "fleet.replicas=1,2", "--out", "option")
    (here / "s.yaml").write_text(f"{TINY}sweep: {{key: fleet.replicas, values: [1, 2]}}\n")
    sweep("--out", "file")
    assert table("option") == table("file")
    sweep("--vary", "load=2", "--out", "replaced")
    assert {(row["load"], row["arrived"] > 0) for row in table("replaced")} == {(2, True)}


def test_a_trace_played_faster_than_it_is_long_is_told(sweep, here):
    (here / "trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:00:{second:02d}.{second:02d}00000,50,20\n" for second in range(20))
    )
    replay = changed("arrivals: {kind: poisson, rate_per_s: 4}", "arrivals: {kind: replay, path: trace.csv}")
    replay = replay[: replay.index("lengths:")].replace("horizon: 2s", "horizon: 10s")
    (here / "s.yaml").write_text(replay)
    ended = sweep("--vary", "load=1,4", "--policies", "none")
    assert ended.code == 0, ended.err
    assert [row["arrived"] for row in table()] == [10, 20]
    assert "caveat: with load=4 the trace ends at 5 s, before the measurement at 10 s" in ended.out
    assert "with load=1 " not in ended.out


def failing(monkeypatch, *cells: Cell, error: BaseException) -> None:
    def run_or_fail(work, cell, on_share=None):
        if cell in cells:
            raise error
        return run_cell(work, cell, on_share)

    monkeypatch.setattr(sim.executors, "run_cell", run_or_fail)


def test_a_failing_cell_is_reported_and_stops_nothing(sweep, monkeypatch, here):
    whole = sweep(*GRID, "--out", "whole")
    with monkeypatch.context() as patch:
        failing(patch, Cell(1, 2, 0), error=ZeroDivisionError("oops"))
        ended = sweep(*GRID, "--out", "mine")
    assert ended.code == 1
    scenario = "mine/failed/dspark_load2_fleet.replicas1_replication_0.json"
    assert ended.err == (
        "failed: policy=dspark, load=2, fleet.replicas=1, replication 0: ZeroDivisionError: oops "
        f"(its scenario: {scenario})\n"
    )
    told = json.loads(Path(scenario).read_text())
    assert told["scenario"]["policies"] == [{"kind": "dspark", "drafter": "dspark", "confidence": "calibrated"}]
    assert told["scenario"]["arrivals"]["rate_per_s"] == 8
    assert "run_or_fail" in "".join(told["traceback"])
    assert [row["failure"] for row in table("mine") if row["failure"]] == ["ZeroDivisionError: oops"]
    assert sum(row["arrived"] is not None for row in table("mine")) == 7
    assert "failed:  1 of 8 cells; see mine/failed/" in ended.out

    # It is not a finished sweep; resumed, only that cell runs.
    assert "holds an unfinished sweep (7 cells are done)" in sweep(*GRID, "--out", "mine").err
    failing(monkeypatch, *[Cell(policy, point, 0) for policy in (0, 1) for point in (0, 1, 3)], error=AssertionError())
    again = sweep(*GRID, "--out", "mine", "--resume")
    assert (again.code, again.out) == (0, whole.out.replace("whole/", "mine/"))
    assert bytes_of(here / "mine") == bytes_of(here / "whole")


def test_ctrl_c_keeps_what_is_finished(sweep, monkeypatch, here):
    sweep(*GRID, "--out", "whole")
    with monkeypatch.context() as patch:
        failing(patch, Cell(1, 1, 0), error=KeyboardInterrupt())
        ended = sweep(*GRID, "--out", "mine")
    assert (ended.code, ended.out) == (130, "")
    assert ended.err == "3 of 8 cells are finished; --resume goes on from there\ninterrupted\n"
    assert sweep(*GRID, "--out", "mine", "--resume").code == 0
    assert bytes_of(here / "mine") == bytes_of(here / "whole")


def test_another_scenario_is_not_resumed(sweep, here):
    sweep(*GRID)
    before = bytes_of(here / "runs")
    ended = sweep("--vary", "load=1..2:2", "--vary", "fleet.replicas=1,3", "--seed", "4", "--resume")
    assert ended.code == 2
    assert ended.err == (
        "runs/tiny-sweep: cannot resume, it was begun with something else: "
        "seed: 0, now 4; sweep[1].values[1]: 2, now 3\n"
    )
    assert bytes_of(here / "runs") == before


def test_cells_of_other_code_are_not_resumed(sweep, here, monkeypatch):
    sweep(*GRID)
    before = bytes_of(here / "runs")
    monkeypatch.setattr(sim.output, "code_digest", lambda: "another")
    ended = sweep(*GRID, "--resume")
    message = "cannot resume, it was begun with something else: the source of sim or profiles changed"
    assert (ended.code, ended.err) == (2, f"runs/tiny-sweep: {message}\n")
    assert bytes_of(here / "runs") == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--vary", "load=0..1:3"],
            "--vary load=0..1:3: sweep[0].values[0]: load: expected a factor above 0 (got 0.0)",
        ),
        (["--vary", "load=1", "--set", "load=2"], "--set: load: has no effect: --vary sets it"),
        (["--vary", "fleet.replica=1"], "--vary fleet.replica=1: sweep[0].values[0]: fleet.replica: unknown key; did"),
        (["--jobs", "0"], "--jobs: expected at least 1 (got 0)"),
        (["--address", "auto"], "--address: has no effect without --executor ray"),
        (["--executor", "ray", "--address", "auto", "--jobs", "2"], "--jobs: has no effect: the cluster has its"),
        (["--json", "no/where.json"], "no/where.json: cannot write: no such directory"),
    ],
)
def test_bad_options(sweep, here, options, message):
    ended = sweep(*options)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(message)
    assert sorted(path.name for path in here.iterdir()) == ["s.yaml"]


@pytest.mark.slow
def test_two_processes_that_were_killed_and_one_that_resumes_give_the_bytes_of_one(sweep, here):
    (here / "s.yaml").write_text(SLOW)
    sweep(*GRID, "--out", "whole")
    killed = process(*GRID, "--out", "mine", "--jobs", "2", cwd=here)
    while len(list((here / "mine/cells").glob("*.json"))) < 2 and killed.poll() is None:
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    done = len(list((here / "mine/cells").glob("*.json")))
    assert 2 <= done < 8
    assert sweep(*GRID, "--out", "mine", "--resume", "--json", "s.json").code == 0
    assert json.loads(Path("s.json").read_text())["timing"]["cells_reused"] == done
    assert bytes_of(here / "mine") == bytes_of(here / "whole")


def children(pid: int) -> list[int]:
    """Return all descendants of a process, as Linux tells them."""
    found, parents = [], {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended meanwhile
            continue
    last = [pid]
    while last:
        last = [child for child, parent in parents.items() if parent in last]
        found += last
    return found


def at_work(pid: int) -> bool:
    """Tell whether a process of Ray runs a cell; Ray writes that over its command line."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().startswith(b"ray::_run_far")
    except OSError:
        return False


needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="RAY IS NOT INSTALLED: python -m pip install 'dspark-sim[ray]'"
)


@pytest.mark.slow
@needs_ray
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds Ray's processes in /proc")
def test_ray_gives_the_same_bytes_though_a_worker_is_killed(sweep, here):
    (here / "s.yaml").write_text(SLOW)
    sweep(*GRID, "--out", "local")
    far = process(*GRID, "--out", "far", "--jobs", "2", "--executor", "ray", cwd=here)
    killed = []
    while not killed and far.poll() is None:
        killed = [pid for pid in children(far.pid) if at_work(pid)][:1]
        time.sleep(0.01)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    _, err = far.communicate()
    assert far.returncode == 0, err
    assert killed, "no process of Ray was seen at work"
    drawn = [path.unlink() for path in (here / "far").glob("frontier*")]
    assert len(drawn) == 4
    assert bytes_of(here / "far") == bytes_of(here / "local")


@pytest.fixture
def cluster(monkeypatch):
    """Start a Ray cluster of this machine alone, as an operator does; gives its address."""
    # Who connects must have both too.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # Ray puts sockets there, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        options = ["--node-ip-address", "127.0.0.1", "--port", address.partition(":")[2], "--num-cpus", "1"]
        quiet = ["--include-dashboard", "false", "--disable-usage-stats", "--temp-dir", folder]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options, *quiet]
        with (Path(folder) / "log").open("w+") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            try:
                while "Ray runtime started" not in (Path(folder) / "log").read_text():
                    assert head.poll() is None, (Path(folder) / "log").read_text()
                    time.sleep(0.1)
                yield address
                assert head.poll() is None, "the cluster did not outlive its client"
            finally:
                ours = [head.pid, *children(head.pid)]
                head.terminate()
                head.wait()
                for pid in ours:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@needs_ray
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds Ray's processes in /proc")
def test_a_cluster_that_is_there_already_gives_the_same_bytes_and_stays(sweep, here, cluster):
    options = ("--vary", "load=1,2", "--executor", "ray", "--address", cluster)
    sweep(*options[:2], "--out", "local")
    for out in ("far", "again"):  # a second client finds it as the first did
        ended = process(*options, "--out", out, cwd=here)
        _, err = ended.communicate()
        assert ended.returncode == 0, err
        assert len([path.unlink() for path in (here / out).glob("frontier*")]) == 2
        assert bytes_of(here / out) == bytes_of(here / "local")
