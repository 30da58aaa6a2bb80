"""Cells of a scenario: a pure function of file and seed, each policy alone, and a replay of a run is the run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from profiles.reading import parse_document
from sim.cells import Cell, Work, run_cell
from sim.executors import LocalExecutor
from sim.fleet import RunResult
from sim.output import parquet_file
from tests.helpers.fleet import same_run

PROFILE = {
    "format": "dspark-profile/1",
    "name": "toy",
    "description": "A toy of the tests.",
    "step_time": {
        "verify": {"kind": "law", "floor_s": 0.01, "per_unit_s": 1e-4, "max_size": 4096},
        "prefill": {"kind": "linear", "floor_s": 0.002, "per_token_s": 1e-5},
        "draft": {
            "dspark": {"per": "round", "curve": {"kind": "law", "floor_s": 0.001, "per_unit_s": 1e-5, "max_size": 64}}
        },
    },
    "acceptance": {
        "dspark": {
            "kind": "block",
            "trained_length": 3,
            "domains": {
                "any": {
                    "kind": "parametric",
                    "survival": {"values": [0.8, 0.6, 0.45]},
                    "spread": {"request_sd": 0.5, "token_sd": 0.7},
                    "confidence": {"noise_sd": 0.4, "raw_temperature": [1.5, 1.5, 1.5]},
                }
            },
        }
    },
}
SOURCE = {"origin": "assumed", "reason": "a toy of the tests"}

SCENARIO = """
name: toy
seed: {seed}
horizon: 20s
warmup: 2s
fleet:
  {{replicas: 2, profile: toy.json, kv_cache: 2MiB, gpus_per_replica: 1, kv_bytes_per_token: 100,
    max_context_tokens: 2000, max_running: 32, max_batch_tokens: 1024, router: {router}}}
policies: {policies}
arrivals: {arrivals}
{rest}
"""
LENGTHS = """lengths:
  prompt: {kind: lognormal, median: 60, sigma: 0.6}
  output: {kind: lognormal, median: 50, sigma: 0.6}"""


def with_sources(node):
    """Give every value of a profile that needs one its provenance."""
    if isinstance(node, dict):
        node = {key: with_sources(value) for key, value in node.items()}
        if {"floor_s", "values", "request_sd", "noise_sd"} & set(node):
            node["provenance"] = SOURCE
    return node


@pytest.fixture
def work(tmp_path):
    (tmp_path / "toy.json").write_text(json.dumps(with_sources(PROFILE)))

    def scenario(policies="[none, {kind: fixed, k: 2}, dspark]", arrivals="{kind: poisson, rate_per_s: 8}", **more):
        given = {"seed": 5, "router": "power_of_two", "rest": LENGTHS} | more
        text = SCENARIO.format(policies=policies, arrivals=arrivals, **given)
        return Work(parse_document(text, str(tmp_path / "toy.yaml")))

    return scenario


def cell(policy=0, replication=0):
    return Cell(policy, None, replication)


def read(path):
    """Return a Parquet file's columns, as a run keeps them."""
    table = pq.read_table(path)
    return {name: column.to_numpy() for name, column in zip(table.column_names, table.columns, strict=True)}


def records(work, cell):
    """Run a cell and return the records that it wrote."""
    folder = Path(work.document.file).parent / "records"
    shutil.rmtree(folder, ignore_errors=True)
    metrics = run_cell(replace(work, records=folder), cell).metrics
    assert metrics == run_cell(work, cell).metrics
    (home,) = {path.parent for path in folder.rglob("*.parquet")}
    assert sorted(path.name for path in home.iterdir()) == ["requests.parquet", "steps.parquet"]
    return RunResult(read(home / "requests.parquet"), read(home / "steps.parquet"))


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(work):
    one, same, other = work(), work(), work(seed=6)
    for policy in range(3):
        left = records(one, cell(policy))
        assert same_run(left, records(same, cell(policy)))
        assert not same_run(left, records(other, cell(policy)))


def test_replications_differ(work):
    both = work(rest=LENGTHS + "\nreplications: 2")
    left, right = (records(both, cell(0, replication)) for replication in (0, 1))
    assert not same_run(left, right)


def test_another_luck_has_other_drafts_accepted_of_the_same_requests(work):
    two = work("[none, dspark]")
    for policy, same in ((0, True), (1, False)):
        first, again, other = (run_cell(two, cell(policy), luck=luck).metrics for luck in (1, 1, 2))
        assert first == again
        assert (first == other) is same
        assert first["arrived"] == other["arrived"]
        assert other["accepted_length"] == pytest.approx(first["accepted_length"], rel=0.1)
    assert run_cell(two, cell(1), luck=0).metrics == run_cell(two, cell(1)).metrics


def test_policies_meet_the_same_requests(work):
    three = work()
    requests = [records(three, cell(policy)).requests for policy in range(3)]
    for name in ("arrived_s", "prompt_tokens", "asked_tokens"):
        np.testing.assert_array_equal(requests[0][name], requests[1][name])
        np.testing.assert_array_equal(requests[0][name], requests[2][name])


def test_a_policy_more_changes_nothing_of_the_others(work):
    alone, three = work("[dspark]"), work()
    assert same_run(records(alone, cell(0)), records(three, cell(2)))


def test_cells_of_two_scenarios_do_not_mix(work):
    """What is kept from one cell for the next belongs to its scenario."""
    first, second = work(), work(arrivals="{kind: poisson, rate_per_s: 3}")
    alone = [records(one, cell(0)) for one in (first, second)]
    again = [records(one, cell(0)) for one in (first, second)]
    assert same_run(alone[0], again[0])
    assert same_run(alone[1], again[1])
    assert alone[0].requests["request"].size > 1.5 * alone[1].requests["request"].size


@pytest.mark.parametrize("policy", ["none", "dspark"])
def test_a_replay_of_a_run_is_the_run(work, tmp_path, policy):
    """Arrivals, lengths, luck, steps and metrics: the records of our own format, byte for byte."""
    drawn = work(f"[{policy}]")
    result = records(drawn, cell())
    # A trace says nothing of output beyond what came; give it what was asked.
    trace = {name: result.requests[name] for name in ("arrived_s", "prompt_tokens")}
    with parquet_file(tmp_path / "trace.parquet") as write:
        write(trace | {"output_tokens": result.requests["asked_tokens"]})
    replay = work(f"[{policy}]", "{kind: replay, path: trace.parquet}", rest="")
    assert same_run(result, records(replay, cell()))
    assert run_cell(replay, cell()).metrics == run_cell(drawn, cell()).metrics


def test_a_replay_of_the_requests_file_itself_is_the_run(work, tmp_path):
    """Where all was served, what came is what was asked."""
    calm = work("[dspark]", "{kind: poisson, rate_per_s: 2}")
    requests = records(calm, cell()).requests
    with parquet_file(tmp_path / "requests.parquet") as write:
        write(requests)
    again = records(work("[dspark]", "{kind: replay, path: requests.parquet}", rest=""), cell()).requests
    served = requests["status"] == "finished"
    assert served.mean() > 0.8
    np.testing.assert_array_equal(again["arrived_s"], requests["arrived_s"])
    np.testing.assert_array_equal(again["asked_tokens"][served], requests["output_tokens"][served])


def test_sums_by_second_give_the_same_comparison(work):
    full, summed = work(), work(rest=LENGTHS + "\nrecords: {steps: per_second}")
    for policy in (0, 2):
        left, right = (run_cell(one, cell(policy)).metrics for one in (full, summed))
        for name, value in left.items():
            assert right[name] == (value if value is None else pytest.approx(value, rel=1e-9)), name


def test_the_loop_of_users_is_the_same_under_every_policy(work):
    """Users under another policy make the same turns, only at other times."""
    loop = work("[none, dspark]", "{kind: closed_loop, users: 6, think_time: 1s, think: fixed}", router="round_robin")
    left, right = (records(loop, cell(policy)).requests for policy in (0, 1))
    assert left["arrived_s"].size != right["arrived_s"].size
    turns = min(left["arrived_s"].size, right["arrived_s"].size) // 2
    assert sorted(left["asked_tokens"][:6]) == sorted(right["asked_tokens"][:6])
    assert len(set(left["asked_tokens"]) & set(right["asked_tokens"])) > turns // 3


@pytest.mark.slow
def test_two_processes_give_the_bytes_of_one(work, tmp_path):
    three = work()
    cells = three.cells()

    def results(jobs):
        with LocalExecutor(jobs) as executor:
            there = replace(three, records=tmp_path / str(jobs))
            return {one.cell: one.unwrapped() for one in executor.run(there, cells, lambda _: None)}

    alone, apart = results(1), results(2)
    assert alone.keys() == apart.keys()
    for key, one in alone.items():
        assert one.metrics == apart[key].metrics
    files = [path.relative_to(tmp_path / "1") for path in (tmp_path / "1").rglob("*.parquet")]
    assert len(files) == 6
    for file in files:
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes()
