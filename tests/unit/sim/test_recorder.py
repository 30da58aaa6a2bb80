"""Step records: every step, or sums by second and replica, and the same metrics from both."""

import numpy as np
import pytest

from sim import recorder as recorder_module
from sim.batching import Chunked, Disaggregated, Exclusive
from sim.fleet import simulate
from sim.recorder import Recorder
from sim.records import STEP_COLUMNS
from sim.rng import Streams
from sim.routing import LeastRequests, RoundRobin
from sim.verify import Dspark, Fixed
from tests.helpers.fleet import accepts, always, at_once, engine, law, metrics_of, run, same_run, traffic


def row(**given):
    return tuple(given.get(name, 0) for name in STEP_COLUMNS)


def test_full_records_keep_every_step_in_order_of_its_end():
    recorder = Recorder("full")
    recorder.record(row(replica=1, steps=1, ended_s=2.0))
    recorder.record(row(replica=0, steps=1, ended_s=1.0))
    _, columns = recorder.close()
    assert columns["ended_s"].tolist() == [1.0, 2.0]
    assert columns["replica"].tolist() == [0, 1]


def test_a_step_belongs_to_the_second_in_which_it_ended():
    recorder = Recorder("per_second")
    for started_s, ended_s, tokens in ((0.2, 0.9, 1), (0.9, 1.0, 2), (1.0, 1.8, 4), (1.8, 2.5, 8)):
        recorder.record(row(replica=0, steps=1, started_s=started_s, ended_s=ended_s, output_tokens=tokens))
    _, columns = recorder.close()
    assert columns["steps"].tolist() == [1, 2, 1]
    assert columns["output_tokens"].tolist() == [1, 6, 8]
    assert columns["started_s"].tolist() == [0.2, 0.9, 1.8]
    assert columns["ended_s"].tolist() == [0.9, 1.8, 2.5]


def test_replicas_are_summed_apart():
    recorder = Recorder("per_second")
    for replica in (1, 0, 1):
        recorder.record(row(replica=replica, steps=1, ended_s=0.5, output_tokens=3))
    _, columns = recorder.close()
    assert columns["replica"].tolist() == [0, 1]
    assert columns["output_tokens"].tolist() == [3, 6]


def test_a_run_without_steps_has_columns_all_the_same():
    for steps in ("full", "per_second"):
        _, columns = Recorder(steps).close()
        assert tuple(columns) == STEP_COLUMNS
        assert all(column.size == 0 for column in columns.values())


UNEVEN = law([0.8, 0.6, 0.45], request_sd=0.5, token_sd=0.8, noise_sd=0.4)
PREFILLS = [Chunked(chunk_tokens=64), Exclusive(), Disaggregated(replicas=2, hand_off=0.02)]


@pytest.fixture
def offered(rng):
    n = 150
    return traffic(np.cumsum(rng.exponential(0.05, n)), rng.integers(1, 200, n), rng.integers(1, 60, n))


@pytest.mark.parametrize("prefill", PREFILLS, ids=lambda one: one.kind)
def test_sums_by_second_give_the_metrics_of_full_records(prefill, offered):
    toy = engine(Dspark(), accepts(UNEVEN), prefill=prefill, draft_s=0.001, known_to=20, max_running=8)
    full, summed = (run(toy, offered, replicas=2, steps=steps, horizon_s=12.0) for steps in ("full", "per_second"))
    for name, column in full.requests.items():
        np.testing.assert_array_equal(column, summed.requests[name])
    assert summed.steps["steps"].size < full.steps["steps"].size / 3
    for from_s, until_s in ((0.0, 12.0), (2.0, 10.0), (3.0, 4.0)):
        left, right = (metrics_of(one, until_s, from_s=from_s, replicas=2, pool=2) for one in (full, summed))
        for name, value in left.items():
            assert right[name] == (value if value is None else pytest.approx(value, rel=1e-9)), name


@pytest.mark.parametrize("prefill", PREFILLS, ids=lambda one: one.kind)
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("steps", ["full", "per_second"])
def test_records_are_the_same_whatever_the_size_of_a_block(prefill, rows, steps, offered, monkeypatch):
    def records():
        toy = engine(Fixed(k=3), accepts(UNEVEN), prefill=prefill, max_running=8)
        return simulate(toy, RoundRobin(), 2, offered, 12.0, Streams(0), Recorder(steps))

    large = records()
    monkeypatch.setattr(recorder_module, "BLOCK_ROWS", rows)
    small = records()
    if steps == "full":
        assert same_run(large, small)
    for name, column in large.steps.items():
        np.testing.assert_allclose(column, small.steps[name], rtol=1e-12)


def test_several_steps_a_call_or_one_the_records_are_the_same(offered):
    """Where a router must see every step's end, the fleet steps one by one; alone, a replica runs ahead."""
    toy = engine(Fixed(k=3), accepts(UNEVEN), max_running=8)
    ahead, bound = (run(toy, offered, router=router) for router in (RoundRobin(), LeastRequests()))
    assert same_run(ahead, bound)


def test_progress_is_told_in_slices_and_ends_at_the_horizon():
    told = []
    simulate(engine(), RoundRobin(), 1, at_once(3), 0.7, Streams(0), Recorder(), told.append)
    assert told == sorted(told)
    assert told[-1] == 0.7
    assert len(told) > 10


def test_watching_changes_nothing(offered):
    toy = engine(Fixed(k=3), always(3, 0.5), max_running=8)
    watched = simulate(toy, RoundRobin(), 2, offered, 12.0, Streams(0), Recorder(), lambda _: None)
    assert same_run(watched, run(toy, offered, replicas=2, horizon_s=12.0))
