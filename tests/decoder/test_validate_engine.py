"""The rung `engine`, whole, on a target so small that it tells nothing: that it runs, pairs like with like, sums up."""

import dataclasses
import json
import math
import re
import shlex
import time

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.validate import engine as rung
from analysis.validate.command import main
from analysis.validate.engine_pace import EVERY_STEPS, PaceReader, at_pace, paces_of_runs
from analysis.validate.engine_pairs import Pair, mean_metrics, noise, ratio
from analysis.validate.engine_report import COMPARED, make_report
from analysis.validate.engine_steps import load_steps, priced, prices, taken
from decoder import measure
from decoder.checkpoint import save_net
from decoder.lab.prompts import DOMAINS
from decoder.lab.targets import target_sha256
from decoder.load import Prompts, WallClock
from decoder.sampling import Sampling
from decoder.serve import Plant, serve_cell
from decoder.shapes import SHAPES, make_shape
from decoder.step_times import Point, Samples
from profiles.curves import draft_cost, step_cost
from profiles.errors import InputError
from profiles.files import SHIPPED, load_profile, save_profile
from sim.acceptance import AcceptanceTables
from sim.cells import Cell, prepare, run_cell
from sim.output import write_json

STEPS = SHIPPED / "engines" / "qwen3_8b_h20.json"


@pytest.fixture
def acceptance(monkeypatch):
    """Acceptance of another drafter of the same block: what comes out is no judgement of the simulator."""
    monkeypatch.setattr(rung, "BANK", SHIPPED / "paper" / "qwen3_8b.json")


def plant():
    target, drafter = make_shape(SHAPES["toy"], device=torch.device("cpu"), dtype=torch.float32, draft_length=7)
    prompts = Prompts({domain: [(1, 2, 3, 4)] for domain in ("code", "math", "chat")})
    return Plant(target, {"dspark": drafter}, {}, prompts, Sampling())


def test_it_runs_and_compares_like_with_like(tmp_path, acceptance):
    profile = tmp_path / "profile.json"
    grid = shlex.split("--requests 1,4 --lengths 0,7 --contexts 8,40 --prompts 8,32 --repeats 3 --steps 1")
    what = shlex.split("--shape toy --draft-length 7 --drafter-name dspark")
    assert measure.main([*what, *grid, "--out", str(profile)]) == 0
    plan = dataclasses.replace(
        rung.plan_of(quick=True, block=7),
        busy_s=1.0,
        prompt_tokens=8,
        output_tokens=6,
        users=2,
        max_running=4,
        repeats=2,
        forced=1,
        kv_cache="4MiB",
    )
    trial = rung.Trial(plan, profile, plant(), 1, math.inf)
    written, visits = [], []

    def learn():
        """Once all is served, steps turn out to take three times as long as was known before."""
        visits.append(len(trial.runs))
        if len(trial.runs) == 16:
            save_profile(at_pace(load_profile(profile), 3.0), profile)

    def on_run(one):
        written.append(one.rows())
        write_json(one.rows(), tmp_path / "runs.json")

    trial.measure, trial.on_run = learn, on_run
    # What an earlier rung left there is not priced beside it.
    stale = tmp_path / "records" / "50" / "none" / "repeat_1" / "other" / "steps.parquet"
    stale.parent.mkdir(parents=True)
    stale.touch()
    trial.run(rung.loads_of(plan, profile, seed=1))
    assert visits == [0, 4, 8, 12, 16]
    assert not stale.exists()
    assert len(load_steps(stale.parents[1])) > 0
    # The predictions that are compared are of what is known in the end.
    for before, last in zip(*written[-2:], strict=True):
        assert before["observed"] == last["observed"]
        slower = last["predicted"]["user_tokens_per_s_p50"] / before["predicted"]["user_tokens_per_s_p50"]
        assert slower < 0.6, (before["load"], before["policy"])
    assert [(load, len(pairs)) for load, pairs in trial.pairs.items()] == [("50%", 3), ("2 users", 3)]
    for pairs in trial.pairs.values():
        for pair in pairs.values():
            assert len(pair.observed) == len(pair.predicted) == len(pair.priced) == len(pair.taken) == 2
            # What is taken is of the engine's own steps, and priced by what is known in the end.
            assert all(one["prompts"] > 0 and one["plain"] > one["draft"] for one in pair.taken)
            assert (pair.taken[0]["draft"] > 0) is (pair.policy != "none")
        none = pairs["none"]
        assert none.told("accepted_length") == none.seen("accepted_length") == 1
        assert none.error("accepted_length").percent == 0
    # A repeat has arrivals of its own, the same on both sides and under every policy.
    open_loop = trial.pairs["50%"].values()
    arrived = [[one["arrived"] for one in side] for pair in open_loop for side in (pair.predicted, pair.observed)]
    assert all(each == arrived[0] for each in arrived)
    # A forced budget is kept to, in the engine as in the simulator, wherever a text does not end sooner.
    for forced in trial.forced.values():
        assert len(forced) == 1
        for name, pair in forced.items():
            budget = 1 + int(name.removeprefix("budget "))
            for side in (pair.predicted, pair.observed):
                assert all(0.6 * budget < one["verify_tokens_per_request"] <= budget for one in side)
    report = make_report(trial, load_profile(profile), minutes=0.1)
    text = " ".join(" ".join(line for section in report.sections for line in section.lines).split())
    assert "repeats: 2 at 50%, 2 at 2 users" in text
    assert "For want of time" not in text
    checks = {check.name: check for check in report.checks()}
    assert "2 users, none: throughput" in checks
    assert checks["2 users, none: steps without prompts, priced over taken"].error > 50
    assert "2 users, none: of these, drafting, priced over taken" not in checks
    assert any(name.startswith("50%: verification budget of dspark_async") for name in checks)
    assert sum("faster by, in throughput" in name for name in checks) == 2
    fixed = next(check for name, check in checks.items() if name.startswith("2 users, fixed") and "accepted" in name)
    assert 1 < fixed.observed < 4
    rows = json.loads((tmp_path / "runs.json").read_text())
    assert len(rows) == 2 * (3 + 1) * 2
    assert rows == json.loads(json.dumps(trial.rows()).replace("Infinity", '"inf"'))


def test_the_command_measures_serves_and_writes(tmp_path, acceptance, monkeypatch, capsys):
    """From a target's folder to checks, within a limit that leaves room for what is owed alone."""
    made = plant()
    made.target.model.save_pretrained(tmp_path / "target")
    save_net(made.drafters["dspark"].net, tmp_path / "drafter")
    for name, value in (("TARGET", str(tmp_path / "target")), ("TRAINED", tmp_path / "drafter"), ("SHORTEST_S", 1.2)):
        monkeypatch.setattr(rung, name, value)
    monkeypatch.setattr(rung, "make_plant", lambda home: made)
    out, written = tmp_path / "out", tmp_path / "checks.json"
    more = ["--quick", "--minutes", "0.001", "--shared", str(tmp_path)]
    assert main(["engine", *more, "--out", str(out), "--json", str(written)]) in (0, 1)
    printed = " ".join(capsys.readouterr().out.split())
    assert "repeats: 1 at 50%, 1 at 4 users" in printed
    assert "For want of time fewer were forced at 50% (0 of 2), 4 users (0 of 2)." in printed
    assert {"50%, none: throughput", "4 users, none: TTFT p50"} <= {
        one["name"] for one in json.loads(written.read_text())
    }
    assert len(json.loads((out / "runs.json").read_text())) == 6
    assert load_profile(out / "profile.json").step_time.draft["dspark"].per == "round"
    # Three passes of two steps before all, and whatever was visited to read the pace: one step a run at least.
    note = load_profile(out / "profile.json").step_time.verify.provenance.note
    least, most = map(int, re.search(r"medians of (\d+) to (\d+) steps a point", note).groups())
    assert 6 <= least <= most
    assert most > 6
    assert "between steps" in (out / "profile.txt").read_text()


class Hours:
    """A clock by which a run of the engine takes an hour; ``ran``: load, policy and repeat of each."""

    def __init__(self, monkeypatch, chosen=2.2):
        self.now, self.ran, self.chosen = 0.0, [], chosen
        monkeypatch.setattr(rung.Trial, "_serve", self.serve)

    def serve(self, to, name, load, policies, index, repeat, policy=None):
        self.now += 3600.0
        policy = policy or policies[index].removeprefix("{kind: ").partition(",")[0]
        self.ran.append((name, policy, repeat))
        pair = to.setdefault(policy, Pair(name, policy))
        for side in (pair.predicted, pair.observed):
            side.append({metric: 1 + self.chosen for metric, *_ in COMPARED})
        pair.paces.append(1.0)

    def trial(self, hours, block=5):
        trial = rung.Trial(rung.plan_of(True, block), STEPS, None, 0, 3600 * hours, lambda: self.now)
        trial.run({name: rung.Load("-", 1.0) for name in "ab"})
        return trial


@pytest.mark.parametrize(
    "hours, forced, repeats",
    (
        # Six runs are owed, whatever the limit.
        (1, (0, 0), (1, 1)),
        (6, (0, 0), (1, 1)),
        (7, (1, 0), (1, 1)),
        (10, (2, 2), (1, 1)),
        (14.5, (2, 2), (1, 1)),
        (15, (2, 2), (2, 1)),
        (20, (2, 2), (2, 2)),
    ),
)
def test_what_is_owed_comes_first_and_what_fits_follows(monkeypatch, hours, forced, repeats):
    clock = Hours(monkeypatch)
    trial = clock.trial(hours)
    assert tuple(len(trial.forced[load]) for load in "ab") == forced
    assert tuple(len(trial.pairs[load]["none"].observed) for load in "ab") == repeats
    assert clock.now <= 3600 * max(hours, 6)
    # What was left out is said.
    text = "\n".join(make_report(trial, load_profile(STEPS), 1.0).sections[-1].lines)
    assert ("For want of time fewer were forced at" in text) is (forced != (2, 2))


@pytest.mark.parametrize(
    "chosen, budgets", ((2.2, [1, 3]), (2.6, [2, 4]), (0.1, [1, 2]), (0.0, [1, 2]), (5.0, [3, 4]), (4.4, [3, 5]))
)
def test_forced_budgets_lie_around_the_chosen_one(chosen, budgets):
    assert rung.budgets_around(chosen, 5, 2) == budgets


def metrics(value):
    return {name: value for name, *_ in COMPARED}


def reported(monkeypatch, *pairs, forced=()):
    trial = Hours(monkeypatch).trial(1)
    trial.pairs, trial.forced = {}, {}
    for to, found in ((trial.pairs, pairs), (trial.forced, forced)):
        for policy, predicted, observed in found:
            pair = Pair(
                "a",
                policy,
                [metrics(predicted)] * len(observed),
                [metrics(value) for value in observed],
                [1.0] * len(observed),
            )
            to.setdefault("a", {})[policy] = pair
    report = make_report(trial, load_profile(STEPS), 1.0)
    return {check.name: check for check in report.checks()}


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
def test_an_error_within_bound_or_noise_holds(monkeypatch, observed, holds):
    checks = reported(monkeypatch, ("none", 10.0, observed))
    assert checks["a, none: throughput"].holds is holds
    assert checks["a, none: TTFT p99"].holds is None


def test_regret_is_what_following_the_simulator_costs(monkeypatch):
    checks = reported(monkeypatch, ("x", 12.0, (10.0,)), ("y", 11.0, (20.0,)))
    (regret,) = [check for name, check in checks.items() if "regret" in name]
    assert regret.error == pytest.approx(50)


@pytest.mark.parametrize(
    "observed, holds",
    (((12.0, 12.1), False), ((9.0, 9.1), True), ((9.0, 13.0), True), ((12.0,), None)),
)
def test_a_forced_budget_refutes_only_where_it_is_faster_by_more_than_noise(monkeypatch, observed, holds):
    own = ("dspark_async", 10.0, (10.0, 10.0)[: len(observed)])
    checks = reported(monkeypatch, own, forced=(("budget 1", 10.0, observed),))
    assert checks["a, budget 1: faster by, in throughput"].holds is holds


def test_noise_is_the_interval_of_a_mean():
    """In so many of a hundred cases as said, the mean of repeats strays from the truth by more."""
    rng = np.random.default_rng(1)
    strayed = []
    for _ in range(2000):
        samples = rng.normal(0.0, 3.0, (4, 3))
        strayed.append(abs(samples[0].mean()) > noise(samples.tolist()))
    assert 0.03 < np.mean(strayed) < 0.07
    assert noise([[1.0], [2.0]]) is None
    assert noise([[1.0, 1.0], [3.0]]) == 0
    assert noise([[0.0, 0.0, 0.0]]) == 0
    varied = [[-1.0, 0.0, 1.0], [2.0, 0.0, -2.0]]
    assert noise([[0.0, 0.0, 0.0], *varied]) == noise(varied)


def test_an_error_is_of_means_and_noise_does_not_lift_it():
    """The mean of ratios would be 4 % too high where an observation strays by 20 %, however many repeats there are."""
    rng = np.random.default_rng(3)
    seen = [{"x": value} for value in rng.normal(10.0, 2.0, 3000)]
    told = [{"x": 10.0}] * 3000
    assert np.mean([one["x"] / other["x"] for one, other in zip(told, seen, strict=True)]) > 1.03
    found = ratio(told, seen, "x")
    assert found.percent == pytest.approx(0, abs=1)
    assert noise([found.departures]) == pytest.approx(1.96 * 20 / math.sqrt(3000), rel=0.05)


def test_noise_covers_the_true_ratio_as_often_as_said():
    """Where both sides share the arrivals and have luck and pace of their own."""
    rng = np.random.default_rng(4)
    covered = []
    for _ in range(1000):
        shared = rng.uniform(8, 12, 4)
        told = [{"x": 1.1 * value} for value in shared]
        seen = [[{"x": value * rng.normal(1, 0.1)} for value in shared] for _ in range(5)]
        ratios = [ratio(told, one, "x") for one in seen]
        covered.append(abs(ratios[0].percent - 10) <= noise([one.departures for one in ratios]))
    assert 0.92 < np.mean(covered) < 0.98


def test_a_ratio_is_of_repeats_that_have_both():
    ours, theirs = [{"x": None}, {"x": 2.0}, {"x": 4}], [{"x": 1.0}, {"x": 1.0}, {"x": 2}]
    found = ratio(ours, theirs, "x")
    assert (found.percent, found.departures) == (100, (0, 0))
    assert ratio(ours[:1], theirs[:1], "x") is None
    never = ratio([{"x": 1.0}] * 2, [{"x": math.inf}] * 2, "x")
    assert (never.percent, never.departures) == (-100, (0, 0))
    assert ratio([{"x": 1.0}] * 2, [{"x": math.inf}, {"x": 1.0}], "x").departures == (math.inf, math.inf)
    assert ratio([{"x": math.inf}], [{"x": math.inf}], "x").percent == 0


def test_metrics_of_several_simulations_are_their_mean():
    found = [{"a": 1, "b": 1.0, "c": None, "d": None}, {"a": 2, "b": math.inf, "c": None, "d": 3.0}]
    found.append({"a": 6, "b": 2.0, "c": None, "d": 5.0})
    assert mean_metrics(found) == {"a": 3, "b": 2, "c": None, "d": 4}


def test_scenarios_of_the_whole_plan_are_valid(acceptance):
    for quick in (False, True):
        plan = rung.plan_of(quick, block=7)
        policies = [*plan.policies, *map(rung.forcing, range(8))]
        work = rung.work_of(plan, STEPS, rung.Load("{kind: closed_loop, users: 2}", 9.0), policies, 0)
        assert len(work.cells()) == len(policies)


def test_runs_are_as_long_as_the_time_allows():
    plan = rung.plan_of(quick=False, block=5)
    assert plan.within(0.0).busy_s == rung.SHORTEST_S
    assert plan.within(1e6).busy_s == rung.LONGEST_S
    some = plan.within(2000.0)
    repeat_s = some.runs * (some.busy_s * (1 + rung.READING) + rung.SETTING_UP_S)
    assert rung.PLANNED_REPEATS * repeat_s == pytest.approx(2000, rel=0.01)


def test_a_bank_that_is_missing_or_of_other_weights_is_refused(tmp_path, monkeypatch):
    home = tmp_path / "drafter"
    home.mkdir()
    (home / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(rung, "BANK", tmp_path / "bank.json")
    with pytest.raises(InputError, match=r"no bank of smollm2 was recorded yet: python -m decoder\.bank --"):
        rung.checked_bank(home)
    profile = load_profile(SHIPPED / "paper" / "qwen3_8b.json")
    law = next(iter(profile.acceptance["dspark"].domains.values()))

    def recorded(digest, name="dspark"):
        told = law.survival.provenance.model_copy(update={"note": f"drafter dspark, weights sha256 {digest}; x"})
        bank = {"kind": "bank", "file": "b.npz", "sha256": "0" * 64, "provenance": told.model_dump()}
        drafter = {"kind": "block", "trained_length": 5, "domains": {"code": bank}}
        document = {**profile.model_dump(mode="json", exclude_none=True), "acceptance": {name: drafter}}
        save_profile(type(profile).model_validate(document), tmp_path / "bank.json")

    recorded(target_sha256(home)[:16])
    assert rung.checked_bank(home).trained_length == 5
    recorded("0" * 16)
    with pytest.raises(InputError, match=r"domains\.code: is of other weights than .*; record it again: python"):
        rung.checked_bank(home)
    recorded("0" * 16, "mtp")
    with pytest.raises(InputError, match=r"knows no drafter 'dspark'; record it: python -m decoder\.bank"):
        rung.checked_bank(home)


def test_a_drafter_that_was_never_trained_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(rung, "TRAINED", tmp_path / "dspark")
    monkeypatch.setattr("decoder.lab.targets.SHIPPED", tmp_path)
    with pytest.raises(InputError, match=r"no drafter was trained for smollm2 yet: python -m decoder\.train"):
        rung.drafter_home()


def test_steps_are_priced_as_they_were_and_prompts_apart():
    profile = load_profile(SHIPPED / "measured" / "cpu_lab.json")
    steps = pd.DataFrame(
        {
            "decoding": [2, 3, 0, 2],
            "batch_tokens": [4, 3, 0, 4],
            "context_tokens": [200, 300, 0, 210],
            "prompt_tokens": [0, 0, 64, 20],
            "drafted_tokens": [10, 0, 0, 10],
            "busy_s": [0.4, 0.3, 0.2, 0.1],
            "draft_s": [0.2, 0.0, 0.0, 0.05],
        }
    )
    assert taken(steps) == pytest.approx({"plain": 0.7, "draft": 0.2, "prompts": 0.3})
    cost = step_cost(profile.step_time, 64)
    draft_s = draft_cost(profile.step_time, "dspark", 3)[0].seconds[2]
    rows = [tuple(map(int, row)) for row in steps.iloc[:, :4].itertuples(index=False)]
    plain = [cost.target_s(*row) - cost.overhead_s for row in rows]
    target, draft = prices(steps, profile, "dspark")
    assert target == pytest.approx(plain)
    assert draft == pytest.approx([draft_s, 0, 0, draft_s])
    assert priced(steps, profile, "dspark") == pytest.approx(
        {"plain": plain[0] + plain[1] + draft_s, "draft": draft_s, "prompts": plain[2] + plain[3] + draft_s}
    )
    # A chain's price is of a token.
    chained = load_profile(SHIPPED / "paper" / "v4_flash.json")
    token_s = draft_cost(chained.step_time, "mtp", 3)[0].seconds[2]
    assert prices(steps, chained, "mtp")[1] == pytest.approx([5 * token_s, 0, 0, 5 * token_s])


@pytest.mark.parametrize("minutes", ("0", "-1", "inf", "nan"))
def test_minutes_are_a_time(minutes):
    with pytest.raises(InputError, match="--minutes: expected minutes above 0"):
        main(["engine", "--minutes", minutes])


@pytest.mark.parametrize(
    ("options", "said"),
    (
        (["paper", "--minutes", "3"], "--minutes: has no effect on rung 'paper'; it is for 'engine'"),
        (["engine", "--assume", "refined"], "--assume: has no effect on rung 'engine'; it is for 'paper'"),
        (["law", "--assume", "shipped"], "--assume: has no effect on rung 'law'; it is for 'paper'"),
    ),
)
def test_an_option_of_another_rung_is_refused(options, said):
    with pytest.raises(InputError) as refused:
        main(options)
    assert str(refused.value) == said


def test_the_pace_is_read_every_few_steps_and_the_run_does_not_see_it(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    short, long = Point(4, 0, 80), Point(0, 0, 0, 40)
    steps = iter(((short, 1.1), (long, 5.2), (short, 2.0)))
    stretches = []

    class Found:
        def begin_stretch(self):
            stretches.append(now[0])

        def visit_next(self):
            now[0] += 0.5
            return next(steps)

    clock = WallClock()
    reader = PaceReader(Found(), clock)
    clock.restart()
    for _ in range(2 * EVERY_STEPS + 1):
        now[0] += 0.1
        reader(clock())
    assert next(steps, None) is None
    assert reader.seen == [(short, 1.1), (long, 5.2), (short, 2.0)]
    # The whole run is a stretch of time; what lies between runs is none of it.
    assert len(stretches) == 1
    assert clock() == pytest.approx(0.1 * (2 * EVERY_STEPS + 1))


def test_a_pace_is_over_the_grid_s_medians():
    short, long = Point(4, 0, 80), Point(0, 0, 0, 40)
    samples = {short: Samples([1.0] * 3), long: Samples([4.0] * 3)}
    assert paces_of_runs([], samples) == []
    assert paces_of_runs([[], []], {}) == [1.0, 1.0]
    seen = [(short, 1.3), (long, 5.2), (short, 1.3)]
    assert paces_of_runs([seen, [], [(long, 3.2)]], samples) == pytest.approx([1.3, 1.0, 0.8])


def test_a_pause_of_the_machine_counts_but_not_for_its_own_run_alone():
    """Of twenty runs, at levels of their own, each fifth step takes half as long again, and one step very much."""
    levels = np.random.default_rng(0).uniform(0.8, 1.3, 20)
    point = Point(1, 0, 80)
    runs = [[(point, level * (1.5 if k % 5 == 0 else 1.0)) for k in range(20)] for level in levels]
    runs[3][7] = (point, 40.0 * levels[3])
    mean = 1.1 + 39 / 400
    assert paces_of_runs(runs, {point: Samples([1.0] * 3)}) == pytest.approx((levels * mean).tolist())


def test_the_bank_is_of_the_questions_that_are_served():
    makefile = (SHIPPED.parent / "Makefile").read_text(encoding="utf-8")
    span = f"{rung.PROMPT_TOKENS}..{rung.LONGEST_PROMPT_TOKENS}"
    assert f"SERVED := {span}\n" in makefile
    assert f"--prompt-tokens $(SERVED) --per-domain {rung.QUESTIONS} " in makefile
    assert rung.TEXT.endswith(f"-{span}-ignore_eos")
    for law in load_profile(rung.BANK).acceptance[rung.DRAFTER].domains.values():
        of = f"prompts of {span} tokens cut to the fewest, the first {rung.QUESTIONS} of each domain, "
        assert of + "answers going on past their end" in law.provenance.source


def test_a_bank_has_as_many_texts_of_every_question_served(monkeypatch):
    known = load_profile(rung.BANK).acceptance[rung.DRAFTER]
    rung.check_questions(known)
    monkeypatch.setattr(rung, "QUESTIONS", rung.QUESTIONS + 1)
    said = r"domains\.\w+: holds 144 texts; expected a multiple of the 49 questions served"
    with pytest.raises(InputError, match=r"smollm2_engine\.json: acceptance\.dspark\." + said):
        rung.check_questions(known)


@pytest.mark.parametrize(
    "arrivals, horizon_s", (("{kind: poisson, rate_per_s: 2}", 40.0), ("{kind: closed_loop, users: 4}", 6.0))
)
def test_a_request_asks_the_question_whose_text_it_follows_when_simulated(monkeypatch, arrivals, horizon_s):
    """Each question's prompt ends in its number. In a closed loop the faster side asks more."""
    plan = rung.plan_of(quick=False, block=5)
    work = rung.work_of(plan, STEPS, rung.Load(arrivals, horizon_s), plan.policies, 3)
    cell, ready = Cell(2, None, 1), prepare(work, None, 1)
    followed, asked = {}, {}

    class Followed(AcceptanceTables):
        def first_row(self, domain, draw):
            row = super().first_row(domain, draw)
            followed[ready.traffic.domains[domain], draw] = self.texts[domain].tolist().index(row) % rung.QUESTIONS
            return row

    class Asked(Prompts):
        def take(self, domain, draw, tokens):
            ids = super().take(domain, draw, tokens)
            asked[domain, draw] = ids[-1]
            return ids

    monkeypatch.setattr("sim.acceptance.AcceptanceTables", Followed)
    run_cell(work, cell, luck=7)
    questions = Asked({domain: [(number,) for number in range(rung.QUESTIONS)] for domain in DOMAINS})
    target, drafter = make_shape(SHAPES["toy"], device=torch.device("cpu"), dtype=torch.float32, draft_length=5)
    plant = Plant(target, {"dspark": drafter}, {}, questions, Sampling())
    serve_cell(plant, ready, cell, work, clock=WallClock(skips_idle=True))
    both = followed.keys() & asked.keys()
    assert len(both) > 20
    assert {key: asked[key] for key in both} == {key: followed[key] for key in both}


def test_a_profile_at_a_pace_takes_so_much_longer_in_every_part():
    profile = load_profile(SHIPPED / "measured" / "cpu_lab.json")
    ours, slow = (step_cost(one.step_time, 64) for one in (profile, at_pace(profile, 1.25)))
    for step in ((4, 12, 400, 0), (4, 12, 400, 64), (0, 0, 0, 64)):
        assert slow.target_s(*step) == pytest.approx(1.25 * ours.target_s(*step))
    assert slow.overhead_s == pytest.approx(1.25 * ours.overhead_s)
    drafting = [draft_cost(one.step_time, "dspark", 4)[0].seconds for one in (profile, at_pace(profile, 1.25))]
    np.testing.assert_allclose(drafting[1], 1.25 * drafting[0])
    assert at_pace(profile, 1.0) == profile
