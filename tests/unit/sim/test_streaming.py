"""Records leave while the run goes: in groups, in order, the same bytes however they came, and memory stays level."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sim import fleet as fleet_module
from sim import recorder as recorder_module
from sim import records as records_module
from sim.errors import InputError
from sim.fleet import simulate
from sim.metrics import Gpus, Measurement, Objective, Timeline, Window, measure, windows
from sim.output import parquet_file
from sim.recorder import Recorder
from sim.records import RowGroups
from sim.rng import Streams
from sim.routing import LeastRequests, RoundRobin
from sim.verify import Dspark, NoSpeculation
from sim.workload.build import build_users
from sim.workload.closed_loop import ClosedLoop
from sim.workload.length_source import Fixed, PromptAndOutput
from tests.helpers.fleet import accepts, at_once, engine, law, run, same_run, traffic

UNEVEN = law([0.8, 0.6, 0.45], request_sd=0.5, token_sd=0.8, noise_sd=0.4)


@pytest.fixture
def small(monkeypatch):
    """Make blocks and groups so small that a short run fills many."""
    monkeypatch.setattr(recorder_module, "BLOCK_ROWS", 64)
    monkeypatch.setattr(records_module, "GROUP_ROWS", 100)
    monkeypatch.setattr(fleet_module, "LAID_OUT", 16)


@pytest.fixture
def offered(rng):
    n = 300
    return traffic(np.cumsum(rng.exponential(0.04, n)), rng.integers(1, 100, n), rng.integers(1, 60, n))


def test_groups_are_full_but_the_last_whatever_comes_in(monkeypatch):
    monkeypatch.setattr(records_module, "GROUP_ROWS", 10)
    for sizes in ([25], [9, 1, 15], [0, 3, 22], [10, 10, 5]):
        got = []
        rows = RowGroups([got.append])
        start = 0
        for size in sizes:
            rows.add({"a": np.arange(start, start + size)})
            start += size
        rows.close()
        assert [group["a"].size for group in got] == [10, 10, 5]
        assert np.concatenate([group["a"] for group in got]).tolist() == list(range(25))


def test_a_table_without_rows_is_one_group_and_one_of_whole_groups_has_no_empty_one(monkeypatch):
    monkeypatch.setattr(records_module, "GROUP_ROWS", 10)
    for size, groups in ((0, [0]), (20, [10, 10])):
        got = []
        rows = RowGroups([got.append])
        rows.add({"a": np.arange(size)})
        rows.close()
        assert [group["a"].size for group in got] == groups


def files_of(folder, toy, offered, router=None):
    """Run into Parquet files and return their bytes."""
    with parquet_file(folder / "steps") as steps, parquet_file(folder / "requests") as requests:
        recorder = Recorder("full", [steps], [requests])
        result = simulate(toy, router or RoundRobin(), 2, offered, 20.0, Streams(0), recorder)
    assert (result.requests, result.steps) == ({}, {})
    return [(folder / name).read_bytes() for name in ("steps", "requests")]


def test_the_bytes_are_the_same_however_rows_came(small, offered, tmp_path, monkeypatch):
    toy = engine(Dspark(), accepts(UNEVEN), max_running=8, draft_s=0.001)
    ahead = files_of(tmp_path, toy, offered)
    metadata = pq.ParquetFile(tmp_path / "steps").metadata
    assert [metadata.row_group(i).num_rows for i in range(3)] == [100, 100, 100]
    kept = run(toy, offered, replicas=2, horizon_s=20.0)
    for name, columns in (("steps", kept.steps), ("requests", kept.requests)):
        table = pq.read_table(tmp_path / name)
        assert table.num_rows > 250
        for column in table.column_names:
            np.testing.assert_array_equal(table[column].to_numpy(), columns[column])
    monkeypatch.setattr(recorder_module, "BLOCK_ROWS", 7)
    monkeypatch.setattr(fleet_module, "LAID_OUT", 1000)
    assert files_of(tmp_path, toy, offered) == ahead
    monkeypatch.setattr(recorder_module, "MOST_ROWS_AHEAD", 0)  # step by step
    assert files_of(tmp_path, toy, offered) == ahead
    assert files_of(tmp_path, toy, offered, LeastRequests())[0] != ahead[0]


def test_a_replica_that_runs_far_ahead_is_held_back(small, monkeypatch):
    """All requests at once: the first replica could go to its end while the other has not begun."""
    monkeypatch.setattr(recorder_module, "MOST_ROWS_AHEAD", 100)
    offered = at_once(400, output=50)
    toy = engine(NoSpeculation(), max_running=8)
    ahead = []

    class Watched(Recorder):
        def flush(self, now_s):
            super().flush(now_s)
            ahead.append(len(self._ahead))

    bound = simulate(toy, RoundRobin(), 2, offered, 1e4, Streams(0), Watched())
    assert bound.steps["steps"].size > 2000
    # Each replica may be a block past the limit.
    assert 100 < max(ahead) <= 100 + 2 * 64
    monkeypatch.setattr(recorder_module, "MOST_ROWS_AHEAD", 1 << 18)
    ahead.clear()
    free = simulate(toy, RoundRobin(), 2, offered, 1e4, Streams(0), Watched())
    assert max(ahead) > 1000
    assert same_run(bound, free)


def test_requests_come_in_order_of_arrival_though_an_early_one_stays_long(small):
    n = 200
    output = np.full(n, 2)
    output[3] = 5000
    arrived_s = 0.1 * np.arange(n)
    result = run(engine(NoSpeculation(), max_running=4), traffic(arrived_s, 1, output), horizon_s=15.0)
    assert result.requests["request"].tolist() == list(range(150))
    assert result.requests["arrived_s"].tolist() == arrived_s[:150].tolist()
    assert result.requests["status"][3] == "unfinished"


def test_metrics_of_passing_rows_are_those_of_kept_ones(small, offered):
    toy = engine(Dspark(), accepts(UNEVEN), max_running=8)
    window, gpus, objective = Window(2.0, 15.0), Gpus(2, 2, 2), Objective(ttft_s=0.5)
    measurement, timeline = Measurement(window, gpus, objective), Timeline(20.0, 1.0, gpus)
    sinks = [measurement.add_steps, timeline.add_steps], [measurement.add_requests, timeline.add_requests]
    simulate(toy, RoundRobin(), 2, offered, 20.0, Streams(0), Recorder("full", *sinks))
    kept = run(toy, offered, replicas=2, horizon_s=20.0)
    assert measurement.metrics() == measure(kept.requests, kept.steps, window, gpus, objective)
    for name, values in windows(kept.requests, kept.steps, 20.0, 1.0, gpus).items():
        np.testing.assert_array_equal(values, timeline.series()[name])


def users(count):
    """Return users who ask for the same again and again, a fifth of a second after each answer."""
    lengths = PromptAndOutput(prompt=Fixed(tokens=3), output=Fixed(tokens=3))
    return build_users(ClosedLoop(users=count, think_time=0.2, think="fixed"), lengths, None, Streams(0))


def peak_bytes(toy, offered, horizon_s, recorder):
    """Return the most memory that a run held at once, Arrow's included."""
    arrow = []
    tracemalloc.start()

    def look(_):
        arrow.append(pa.total_allocated_bytes())

    simulate(toy, RoundRobin(), 2, offered, horizon_s, Streams(0), recorder, look)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak + max(arrow) - min(arrow)


@pytest.mark.parametrize("loop", [False, True], ids=["table", "users"])
def test_memory_does_not_grow_with_finished_requests(small, tmp_path, loop):
    """Four times the requests, less than 24 bytes more for each; its record has 160 of them, a step's 104."""
    toy = engine(NoSpeculation(), max_running=8)

    def offered(n):
        return users(8) if loop else traffic(0.025 * np.arange(n), np.full(n, 3), np.full(n, 3))

    def streamed(n):
        with parquet_file(tmp_path / "steps") as steps, parquet_file(tmp_path / "requests") as requests:
            peak = peak_bytes(toy, offered(n), 0.025 * n, Recorder("full", [steps], [requests]))
        return peak, pq.ParquetFile(tmp_path / "requests").metadata.num_rows

    streamed(100)  # what is loaded once
    (short, few), (long, many) = streamed(1000), streamed(4000)
    assert many > 3.5 * few > 1000
    assert long - short < 24 * (many - few), (short, few, long, many)
    kept = [peak_bytes(toy, offered(n), 0.025 * n, Recorder()) for n in (250, 1000)]
    assert kept[1] - kept[0] > 200 * (few - few // 4)


def test_a_run_that_fails_leaves_no_file(tmp_path):
    def fail():
        with parquet_file(tmp_path / "deep/steps") as steps:
            steps({"a": np.arange(3)})
            assert [path.name for path in (tmp_path / "deep").iterdir()] == ["steps.part"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list((tmp_path / "deep").iterdir())


def test_a_disk_that_refuses_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write: file exists"), parquet_file(tmp_path / "file/steps"):
        raise AssertionError
    with pytest.raises(InputError, match="cannot write: no space left on device"), parquet_file(tmp_path / "steps"):
        raise OSError(28, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
