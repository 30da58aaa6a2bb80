"""``python -m sim.plan``: the smallest fleet that meets what was asked, and what stands in the way of a smaller one."""

import json
from pathlib import Path

import pytest

import sim.executors
from sim.cells import Cell, CellResult
from sim.metrics import metric_names
from sim.plan import main
from tests.cli.conftest import Ended
from tests.helpers.scenario import TINY

FAST, SOON = ["--objective", "user_tps_p50>=80"], ["--objective", "ttft_p99<=2s"]


@pytest.fixture
def plan(tiny_file, capsys):
    def run_plan(*options: str) -> Ended:
        capsys.readouterr()
        return Ended(main(["s.yaml", "--jobs", "1", *options]), *capsys.readouterr())

    return run_plan


@pytest.fixture
def fake(monkeypatch):
    """Return a function that replaces simulation by a law: metrics of a policy, a size and a replication."""
    ran = []

    def use(law) -> list[tuple[int, int, int]]:
        def run_cell(work, cell: Cell, on_share=None):
            ran.append(key := (cell.policy, cell.point + 1, cell.replication))
            metrics = dict.fromkeys(metric_names(), 0) | {"arrived": 10, "finished": 10} | law(*key)
            return CellResult(cell, metrics, {}, {}, ())

        monkeypatch.setattr(sim.executors, "run_cell", run_cell)
        return ran

    return use


def lines(ended: Ended) -> dict[str, list[str]]:
    """Return the table's rows by policy."""
    return {row.split()[0]: row.split() for row in ended.out.splitlines()[3:] if row} | {}


def test_answer_interval_and_what_binds(plan, fake):
    # `none` needs 5 replicas for its speed, `dspark` 3 for its first token.
    def law(policy, size, replication):
        speed = (20, 45)[policy] * size - replication
        return {"user_tokens_per_s_p50": float(speed), "ttft_s_p99": (1.0, 5.0)[policy] / size + 0.01 * replication}

    ran = fake(law)
    ended = plan(*FAST, *SOON, "--replications", "2", "--json", "p.json", "--max-replicas", "20")
    assert (ended.code, ended.err) == (0, "")
    none, dspark = json.loads(Path("p.json").read_text())
    assert (none["replicas"], none["gpus"], none["binding"]) == (5, 5, ["user_tokens_per_s_p50"])
    assert (dspark["replicas"], dspark["binding"]) == (3, ["ttft_s_p99"])
    assert [one["below"]["mean"] for one in dspark["objectives"]] == pytest.approx([89.5, 2.505])
    assert [one["at"]["mean"] for one in none["objectives"]] == pytest.approx([99.5, 0.205])
    assert none["sure_replicas"] == 5
    rows = lines(ended)
    assert rows["none"][1:4] == ["5", "5", "5"]
    assert rows["dspark"][1:4] == ["3", "3", "3"]
    assert "user_tps_p50 79.5 at 4" in ended.out
    assert "ttft_p99 2.505s at 2" in ended.out
    # All replications judged the answer and one less; nothing ran twice.
    assert {(0, 5, 1), (0, 4, 1), (1, 3, 1), (1, 2, 1)} <= set(ran)
    assert len(ran) == len(set(ran))


def test_replications_outvote_the_first(plan, fake):
    fake(lambda policy, size, replication: {"user_tokens_per_s_p50": float(30 * size - 50 * (replication > 0))})
    ended = plan(*FAST, "--replications", "3", "--policies", "none")
    assert lines(ended)["none"][1:4] == ["4", "4", "7"]  # the first alone would do with 3


def test_a_larger_fleet_that_does_worse_is_reported(plan, fake):
    good = {3: 90.0, 4: 70.0, 5: 70.0, 6: 90.0, 7: 90.0}
    fake(
        lambda policy, size, replication: {
            "user_tokens_per_s_p50": good.get(size, 20.0) + 15 * replication * (size == 3)
        }
    )
    ended = plan(*FAST, "--replications", "2", "--policies", "none", "--max-replicas", "8")
    assert lines(ended)["none"][1:4] == ["3", "3", "6"]
    assert "not monotone: none misses an objective again with 4, 5 replicas" in ended.out


def test_no_fleet_is_an_answer_too(plan, fake):
    fake(lambda policy, size, replication: {"user_tokens_per_s_p50": 60.0 + 40 * policy})
    ended = plan(*FAST, "--max-replicas", "4")
    assert ended.code == 0
    assert lines(ended)["none"][1:4] == ["-", "-", "-"]
    assert lines(ended)["dspark"][1:4] == ["1", "1", "1"]
    assert "none: no fleet that was tried meets every objective (1, 3, 4 replicas)" in ended.out
    assert plan(*FAST, "--max-replicas", "4", "--policies", "none").code == 1


def test_a_metric_that_does_not_exist_meets_nothing(plan, fake):
    fake(lambda policy, size, replication: {"user_tokens_per_s_p50": None if size < 3 else 90.0, "rejected": 1})
    ended = plan(*FAST, "--policies", "none", "--replications", "1")
    assert lines(ended)["none"][1] == "3"
    assert "user_tps_p50 - at 2" in ended.out
    assert "none: 10 % of requests were turned away, gave up or failed at the answer" in ended.out


def test_a_real_fleet(plan, here):
    (here / "s.yaml").write_text(TINY.replace("rate_per_s: 4", "rate_per_s: 200"))
    ended = plan("--objective", "ttft_p99<=200ms", "--policies", "none", "--replications", "2", "--max-replicas", "8",
                 "--set", "fleet.max_running=16")  # fmt: skip
    assert ended.code == 0
    (row,) = [line for line in ended.out.splitlines() if line.startswith("none ")]
    assert int(row.split()[1]) > 1
    assert "* rests on an assumed value: paper/v4_flash: step_time.prefill" in ended.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--objective: missing: an objective"),
        (
            [*FAST, "--objective", "user_tokens_per_s_p50>=90"],
            "--objective user_tokens_per_s_p50>=90: 'user_tps_p50' is",
        ),
        (["--objective", "tps>=90"], "--objective tps>=90: unknown metric 'tps'; "),
        (["--objective", "goodput_ratio>=90%"], "--objective goodput_ratio>=90%: 'goodput_ratio' counts requests that"),
        ([*FAST, "--max-replicas", "0"], "--max-replicas: expected 1 to 10000 (got 0)"),
        ([*FAST, "--set", "sweep={key: load, values: [1]}"], "--set: sweep: a plan is for one traffic"),
        ([*FAST, "--json", "no/where.json"], "no/where.json: cannot write: no such directory"),
    ],
)
def test_bad_options(plan, options, message):
    ended = plan(*options)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(message)
