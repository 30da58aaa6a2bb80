"""Cells of a scenario: a pure function of file and seed, each policy alone, and a replay of a run is the run."""

import json

import numpy as np
import pytest

from profiles.reading import parse_document
from sim.cells import Cell, Work, run_cell
from sim.executors import LocalExecutor
from sim.output import write_parquet
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


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(work):
    one, same, other = work(), work(), work(seed=6)
    for policy in range(3):
        left = run_cell(one, cell(policy)).records
        assert same_run(left, run_cell(same, cell(policy)).records)
        assert not same_run(left, run_cell(other, cell(policy)).records)


def test_replications_differ(work):
    both = work(rest=LENGTHS + "\nreplications: 2")
    left, right = (run_cell(both, cell(0, replication)).records for replication in (0, 1))
    assert not same_run(left, right)


def test_policies_meet_the_same_requests(work):
    three = work()
    requests = [run_cell(three, cell(policy)).records.requests for policy in range(3)]
    for name in ("arrived_s", "prompt_tokens", "asked_tokens"):
        np.testing.assert_array_equal(requests[0][name], requests[1][name])
        np.testing.assert_array_equal(requests[0][name], requests[2][name])


def test_a_policy_more_changes_nothing_of_the_others(work):
    alone, three = work("[dspark]"), work()
    assert same_run(run_cell(alone, cell(0)).records, run_cell(three, cell(2)).records)


def test_cells_of_two_scenarios_do_not_mix(work):
    """What is kept from one cell for the next belongs to its scenario."""
    first, second = work(), work(arrivals="{kind: poisson, rate_per_s: 3}")
    alone = [run_cell(one, cell(0)).records for one in (first, second)]
    again = [run_cell(one, cell(0)).records for one in (first, second)]
    assert same_run(alone[0], again[0])
    assert same_run(alone[1], again[1])
    assert alone[0].requests["request"].size > 1.5 * alone[1].requests["request"].size


@pytest.mark.parametrize("policy", ["none", "dspark"])
def test_a_replay_of_a_run_is_the_run(work, tmp_path, policy):
    """Arrivals, lengths, luck, steps and metrics: the records of our own format, byte for byte."""
    result = run_cell(work(f"[{policy}]"), cell())
    write_parquet(result.records.requests, tmp_path / "requests.parquet")
    # A trace says nothing of output beyond what came; give it what was asked.
    trace = {name: result.records.requests[name] for name in ("arrived_s", "prompt_tokens")}
    trace["output_tokens"] = result.records.requests["asked_tokens"]
    write_parquet(trace, tmp_path / "trace.parquet")
    replay = run_cell(work(f"[{policy}]", "{kind: replay, path: trace.parquet}", rest=""), cell())
    assert same_run(result.records, replay.records)
    assert replay.metrics == result.metrics


def test_a_replay_of_the_requests_file_itself_is_the_run(work, tmp_path):
    """Where all was served, what came is what was asked."""
    calm = work("[dspark]", "{kind: poisson, rate_per_s: 2}")
    result = run_cell(calm, cell())
    requests = result.records.requests
    write_parquet(requests, tmp_path / "requests.parquet")
    replay = run_cell(work("[dspark]", "{kind: replay, path: requests.parquet}", rest=""), cell())
    again = replay.records.requests
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
    left, right = (run_cell(loop, cell(policy)).records.requests for policy in (0, 1))
    assert left["arrived_s"].size != right["arrived_s"].size
    turns = min(left["arrived_s"].size, right["arrived_s"].size) // 2
    assert sorted(left["asked_tokens"][:6]) == sorted(right["asked_tokens"][:6])
    assert len(set(left["asked_tokens"]) & set(right["asked_tokens"])) > turns // 3


@pytest.mark.slow
def test_two_processes_give_the_bytes_of_one(work):
    three = work()
    cells = three.cells()

    def results(jobs):
        with LocalExecutor(jobs) as executor:
            return {one.cell: one.unwrapped() for one in executor.run(three, cells, lambda _: None)}

    alone, apart = results(1), results(2)
    assert alone.keys() == apart.keys()
    for key, one in alone.items():
        assert same_run(one.records, apart[key].records)
        assert one.metrics == apart[key].metrics
