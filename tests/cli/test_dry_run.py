"""``--dry-run`` prints the resolved scenario: read back, it is the same scenario. Labels and folders of policies."""

import itertools
from pathlib import Path

import pytest

from sim.batching import PREFILLS
from sim.loading import load_scenario
from sim.output import slugs
from sim.routing import ROUTERS
from sim.run import main
from sim.scenario import label_of
from sim.units import BYTES, SECONDS, format_bytes, format_duration, parse_bytes, parse_duration_s
from sim.verify import POLICIES, BatchTable, Dspark, DsparkAsync, Fixed, Mtp1, NoSpeculation, Oracle, Threshold
from sim.workload.base import ARRIVALS, LENGTHS
from tests.helpers.scenario import changed

ROOT = Path(__file__).parents[2]

# A plugin of each kind, with every key that it cannot do without and some that it can.
POLICY = {
    "none": "none",
    "mtp1": "{kind: mtp1, drafter: other}",
    "fixed": "{kind: fixed, k: 3, drafter: mtp}",
    "threshold": "{kind: threshold, min_confidence: 0.1, confidence: raw}",
    "batch_table": "{kind: batch_table, table: [[1, 5], [64, 0], [128, 2]], hysteresis: 8}",
    "dspark": "dspark",
    "dspark_async": "{kind: dspark_async, lag: 3, first_budget: 2}",
    "oracle": "oracle",
}
ARRIVAL = {
    "poisson": "{kind: poisson, rate_per_s: 1e-5}",
    "gamma": "{kind: gamma, rate_per_s: 0.1, cv: 2.5}",
    "on_off": "{kind: on_off, on_per_s: 9, mean_on: 0.3s, mean_off: 1.7min}",
    "diurnal": "{kind: diurnal, mean_per_s: 2, amplitude: 0.5, period: 24h, peak_at: 14.5h}",
    "peak": "{kind: peak, base_per_s: 0, peak_per_s: 80, from: 12345us, until: 0.7s}",
    "closed_loop": "{kind: closed_loop, users: 8, think_time: 1.1s, think: fixed, ramp: 0.1ms}",
    "replay": "{kind: replay, path: 'a b.csv', speed_up: 1.5, window: {from: 1.5min}, sample: 0.25, ties: spread}",
}
LENGTH = {
    "fixed": "{kind: fixed, tokens: 3}",
    "lognormal": "{kind: lognormal, median: 700, p95: 2000.5, min: 4, max: 9000}",
    "quantiles": "{kind: quantiles, probabilities: [0, 0.1, 1], tokens: [1, 10, 90]}",
}
PREFILL = {
    "chunked": "{kind: chunked, chunk_tokens: 256}",
    "exclusive": "exclusive",
    "disaggregated": "{kind: disaggregated, replicas: 2, hand_off: 20ms, max_step_tokens: 4096}",
}


def test_there_is_a_sample_of_every_kind():
    for samples, registry in ((POLICY, POLICIES), (ARRIVAL, ARRIVALS), (LENGTH, LENGTHS), (PREFILL, PREFILLS)):
        assert set(samples) == set(registry.known())


def with_kinds(arrivals: str, length: str, prefill: str, router: str) -> str:
    text = changed("[none, dspark]", "\n" + "".join(f"  - {policy}\n" for policy in POLICY.values()).rstrip())
    text = text.replace("replicas: 1", "replicas: 2").replace(
        "4GiB", f"1.5GiB\n  router: {router}\n  prefill: {prefill}"
    )
    text = text.replace("{kind: poisson, rate_per_s: 4}", arrivals).replace("{kind: fixed, tokens: 50}", length)
    text = text.replace("horizon: 2s", "horizon: 3h\nwarmup: 0.1s\nobjectives: {user_tokens_per_s: 80, ttft: 1.3s}")
    return text.partition("lengths:")[0] if "replay" in arrivals else text


KINDS = list(
    itertools.islice(
        zip(
            itertools.cycle(ARRIVAL.values()),
            itertools.cycle(LENGTH.values()),
            itertools.cycle(PREFILL.values()),
            itertools.cycle(ROUTERS.known()),
        ),
        len(ARRIVAL),
    )
)


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: kinds[0][:30])
def test_a_resolved_scenario_resolves_to_itself(run, here, kinds):
    text = with_kinds(*kinds)
    once = run(text, "--dry-run")
    assert (once.code, once.err) == (0, "")
    assert load_scenario(here / "s.yaml")[0] == load_scenario(write(here / "again.yaml", once.out))[0]
    assert run(once.out, "--dry-run") == once


@pytest.mark.parametrize("path", sorted((ROOT / "scenarios").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_scenario_resolves_to_itself(here, capsys, path):
    assert main([str(path), "--dry-run"]) == 0
    once = capsys.readouterr().out
    assert main([str(write(here / "again.yaml", once)), "--dry-run"]) == 0
    assert capsys.readouterr() == (once, "")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_filled_in(run):
    out = run(changed("4GiB", "4096MiB"), "--dry-run").out
    for line in (
        "seed: 0",
        "warmup: 0s",
        "  kv_cache: 4GiB",
        "  block_tokens: 64",
        "    kind: round_robin",
        "  window: 2s",
    ):
        assert line in out.splitlines()


@pytest.mark.parametrize("unit", SECONDS)
def test_a_duration_is_written_so_that_it_reads_back_the_same(unit):
    for amount in (*range(200), 0.1, 0.3, 0.7, 1.1, 12.345, 1e-7, 123456.789, 1 / 3):
        seconds = amount * SECONDS[unit]
        assert parse_duration_s(format_duration(seconds)) == seconds


@pytest.mark.parametrize("unit", BYTES)
def test_a_size_is_written_so_that_it_reads_back_the_same(unit):
    for amount in (1, 3, 96, 1000, 1023, 1025):
        assert parse_bytes(format_bytes(amount * BYTES[unit])) == amount * BYTES[unit]


def test_labels_are_short_and_name_what_differs():
    table = BatchTable(table=((1, 5), (64, 3), (128, 2)), hysteresis=8)
    assert [label_of(policy) for policy in POLICIES_TO_LABEL] == [
        "none",
        "mtp1",
        "fixed k=3",
        "fixed drafter=mtp k=3",
        "threshold min_confidence=0.6",
        "threshold confidence=raw min_confidence=1",
        "dspark",
        "dspark confidence=raw",
        "dspark_async lag=3 first_budget=2",
        "oracle",
    ]
    assert label_of(table) == "batch_table 1:5/64:3/128:2 hysteresis=8"
    assert label_of(BatchTable(table=((1, 5),))) == "batch_table 1:5"


POLICIES_TO_LABEL = (
    NoSpeculation(),
    Mtp1(),
    Fixed(k=3),
    Fixed(k=3, drafter="mtp"),
    Threshold(min_confidence=0.6),
    Threshold(min_confidence=1.0, confidence="raw"),
    Dspark(),
    Dspark(confidence="raw"),
    DsparkAsync(lag=3, first_budget=2),
    Oracle(),
)


def test_two_policies_never_share_a_label_or_a_folder():
    near = [Threshold(min_confidence=0.1 + i * 1e-9) for i in range(3)]
    near += [
        Threshold(min_confidence=0.1, drafter=name) for name in ("a", "A", "a b", "a_b", "a/b", "x" * 200, "x" * 201)
    ]
    tables = [BatchTable(table=rows) for rows in (((1, 2), (3, 4)), ((1, 2), (34, 4)), ((1, 23), (4, 4)))]
    labels = [label_of(policy) for policy in (*POLICIES_TO_LABEL, *near, *tables)]
    assert len(set(labels)) == len(labels)
    folders = slugs(labels)
    assert len({folder.lower() for folder in folders}) == len(labels)
    assert all(0 < len(folder) <= 100 and not set(folder) & set("/\\ :=*?") for folder in folders)
    assert slugs(["fixed k=3", "", "..", "../x"]) == ["fixed_k3", "_", "___2", "x"]


def test_near_thresholds_are_two_policies(run):
    text = changed(
        "[none, dspark]", "[{kind: threshold, min_confidence: 0.6}, {kind: threshold, min_confidence: 0.6000001}]"
    )
    assert run(text, "--dry-run").code == 0
