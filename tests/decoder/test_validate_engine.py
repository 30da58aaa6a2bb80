"""The rung `engine`, whole, on a target so small that it tells nothing: that it runs, pairs like with like, sums up."""

import dataclasses
import math
import shlex

import pytest
import torch

from analysis.validate import engine as rung
from decoder import measure
from decoder.load import Prompts
from decoder.sampling import Sampling
from decoder.serve import Plant
from decoder.shapes import SHAPES, make_shape
from profiles.files import SHIPPED


def test_it_runs_and_compares_like_with_like(tmp_path, monkeypatch):
    # Acceptance of another drafter of the same block: what comes out is no judgement of the simulator.
    monkeypatch.setattr(rung, "BANK", SHIPPED / "paper" / "qwen3_8b.json")
    profile = tmp_path / "profile.json"
    grid = shlex.split("--requests 1,4 --lengths 0,7 --contexts 8,40 --prompts 8,32 --repeats 3 --steps 1")
    what = shlex.split("--shape toy --draft-length 7 --drafter-name dspark")
    assert measure.main([*what, *grid, "--out", str(profile)]) == 0
    target, drafter = make_shape(SHAPES["toy"], device=torch.device("cpu"), dtype=torch.float32, draft_length=7)
    prompts = Prompts({domain: [(1, 2, 3, 4)] for domain in ("code", "math", "chat")})
    plant = Plant(target, {"dspark": drafter}, {}, prompts, Sampling())
    monkeypatch.setattr(rung, "_serving", lambda: plant)
    plan = dataclasses.replace(
        rung.plan_of(quick=True, block=7),
        horizon_s=1.2,
        warmup_s=0.1,
        prompt_tokens=8,
        output_tokens=6,
        users=2,
        max_running=4,
        repeats=2,
        kv_cache="4MiB",
    )
    pairs = list(rung._pairs(plan, profile, seed=1))
    assert [pair.load for pair in pairs] == ["50%"] * 3 + ["2 users"] * 3
    none = [pair for pair in pairs if pair.policy == "none"]
    for pair in none:
        assert len(pair.observed) == 2
        assert pair.predicted["accepted_length"] == 1
        assert all(one["accepted_length"] == 1 for one in pair.observed)
        assert pair.error_percent("accepted_length") == 0
    # The same arrivals on both sides.
    assert none[0].predicted["arrived"] == none[0].observed[0]["arrived"] == none[0].observed[1]["arrived"]
    report = rung.report(plan, pairs, "it was busy")
    text = "\n".join(line for section in report.sections for line in section.lines)
    assert "marked as disturbed: it was busy" in text
    names = [check.name for check in report.checks()]
    assert "2 users, none: throughput" in names
    assert any(name.startswith("50%: verification budget of dspark_async") for name in names)
    fixed = next(
        check for check in report.checks() if check.name.startswith("2 users, fixed") and "accepted" in check.name
    )
    assert 1 < fixed.observed < 4
    assert fixed.error == pytest.approx(100 * (fixed.predicted / fixed.observed - 1))


def pair(observed, predicted=10.0, policy="none", load="a"):
    def metrics(value):
        return {name: value for name, *_ in rung.COMPARED}

    return rung.Pair(load, policy, metrics(predicted), tuple(metrics(value) for value in observed))


@pytest.mark.parametrize(
    "observed, holds",
    (
        ((10.4, 10.4), True),
        ((8.0, 8.0), False),
        ((8.0, 12.8), True),
        ((8.0,), False),
        ((math.inf, math.inf), False),
        ((10.0, math.inf), True),
    ),
)
def test_an_error_within_bound_or_noise_holds(observed, holds):
    plan = rung.plan_of(quick=False, block=5)
    checks = {check.name: check for check in rung.report(plan, [pair(observed)], None).checks()}
    assert checks["a, none: throughput"].holds is holds
    assert checks["a, none: TTFT p99"].holds is None


def test_regret_is_what_following_the_simulator_costs():
    pairs = [pair((10.0,), 12.0, "x"), pair((20.0,), 11.0, "y")]
    (regret,) = [check for check in rung.report(rung.plan_of(True, 5), pairs, None).checks() if "regret" in check.name]
    assert regret.error == pytest.approx(50)


def test_scenarios_of_the_whole_plan_are_valid(monkeypatch):
    monkeypatch.setattr(rung, "BANK", SHIPPED / "paper" / "qwen3_8b.json")
    for quick in (False, True):
        plan = rung.plan_of(quick, block=7)
        work = rung.work_of(plan, SHIPPED / "engines" / "qwen3_8b_h20.json", "{kind: closed_loop, users: 2}", 0)
        assert len(work.cells()) == len(plan.policies)
