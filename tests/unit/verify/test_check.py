"""Every mark of every policy, every engine fault, and the command that judges a stranger's policy."""

import json
import sys
import textwrap

import pytest

from sim.verify import (
    BatchTable,
    Dspark,
    DsparkAsync,
    Fixed,
    Mtp1,
    NoSpeculation,
    Oracle,
    Policy,
    Threshold,
)
from sim.verify.check import BOUND, Judgement, judge, judge_case, main
from sim.verify.toys import APPENDIX_A, TOYS

TOY = {toy.name: toy for toy in TOYS}
SMALL = [TOY["appendix_a_pair"], TOY["pair"], TOY["ties"]]
BLIND = [NoSpeculation(), Mtp1(), Fixed(k=1), Fixed(k=2), BatchTable(table=((1, 2), (2, 1)), hysteresis=1)]
READERS = [Threshold(min_confidence=0.5), Dspark(), DsparkAsync(lag=1), DsparkAsync(lag=1, first_budget=1)]


def verdict(policy: Policy, **kwargs) -> Judgement:
    """The first case that fails, or the last one."""
    for judgement in judge(policy, **kwargs):
        if not judgement.holds:
            break
    return judgement


# ------------------------------------------------------------------------------------------------- marks


@pytest.mark.parametrize("policy", [*BLIND, *READERS], ids=str)
def test_lossless_with_a_confidence_that_reads_the_past(policy: Policy) -> None:
    assert "past" in policy.lossless_with
    assert verdict(policy, reading="past").holds


@pytest.mark.parametrize("policy", [DsparkAsync(lag=2), DsparkAsync(lag=2, first_budget=1)], ids=str)
def test_lossless_with_a_longer_lag(policy: Policy) -> None:
    judged = list(judge(policy, reading="past", toys=SMALL))
    assert all(judgement.holds and judgement.rounds == 3 for judgement in judged)


@pytest.mark.parametrize("policy", BLIND, ids=str)
def test_lossless_with_any_confidence_where_none_is_looked_at(policy: Policy) -> None:
    assert policy.lossless_with == {"past", "own_token"}
    assert verdict(policy, reading="own_token", toys=SMALL).holds


@pytest.mark.parametrize("policy", [*READERS, DsparkAsync(lag=2)], ids=str)
def test_not_lossless_with_a_confidence_that_reads_its_own_token(policy: Policy) -> None:
    assert policy.lossless_with == {"past"}
    found = verdict(policy, reading="own_token")
    assert not found.holds
    assert found.leak is not None


def test_the_oracle_is_not_lossless_and_says_so() -> None:
    assert Oracle().lossless_with == set()
    assert not verdict(Oracle(), reading="outcome").holds


def test_lag_is_what_makes_a_global_search_lossless() -> None:
    case = {"reading": "past", "rounds": 2}
    lagged = judge_case(DsparkAsync(lag=1), APPENDIX_A, "appendix", engine="as_told", **case)
    unlagged = judge_case(DsparkAsync(lag=1), APPENDIX_A, "appendix", engine="freshest", **case)
    assert lagged.holds
    assert not unlagged.holds
    assert unlagged.shown.request == 0
    assert (unlagged.shown.target, unlagged.shown.engine) == pytest.approx((0.7, 0.85))
    # Draft token 1 is verified if it is A and is not if it is B.
    assert (unlagged.leak.request, unlagged.leak.position, unlagged.leak.one.number) == (0, 1, 1)
    assert [way.draws[0][0][0] for way in (unlagged.leak.one, unlagged.leak.other)] == [0, 1]
    assert [way.actions for way in (unlagged.leak.one, unlagged.leak.other)] == [(2,), (0,)]


# ------------------------------------------------------------------------------------------- engine faults


@pytest.mark.parametrize("engine", ["drop_batch", "redraft"])
@pytest.mark.parametrize("policy", [Threshold(min_confidence=0.5), Dspark()], ids=str)
def test_engine_faults_are_caught(policy: Policy, engine: str) -> None:
    found = verdict(policy, engine=engine)
    assert not found.holds
    assert found.leak is not None


def test_redrafting_is_caught_with_a_lagged_search_too() -> None:
    """Its total is fixed, its parts are not: which request no longer fits depends on what was drafted."""
    assert not verdict(DsparkAsync(lag=1, first_budget=1), engine="redraft").holds


@pytest.mark.parametrize("engine", ["trim_tail", "drop_batch", "redraft", "freshest"])
@pytest.mark.parametrize("policy", [Fixed(k=2), BatchTable(table=((1, 2), (2, 2)))], ids=str)
def test_engine_faults_do_not_touch_lengths_that_are_known_beforehand(policy: Policy, engine: str) -> None:
    for toy in ("pair", "three"):
        assert judge_case(policy, TOY[toy], "flat", reading="own_token", engine=engine, rounds=2).holds


def test_trimming_the_tail_is_lossless_where_a_length_looks_at_one_request() -> None:
    assert verdict(Threshold(min_confidence=0.5), engine="trim_tail").holds


@pytest.mark.parametrize("policy", [Dspark(), DsparkAsync(lag=1, first_budget=2)], ids=str)
def test_trimming_the_tail_is_not_lossless_where_requests_compete(policy: Policy) -> None:
    """Request 0 gives way to request 1 for what 1 drafted, which then makes room for 1 itself."""
    assert not verdict(policy, engine="trim_tail").holds


@pytest.mark.parametrize("policy", [Dspark(), DsparkAsync(lag=1, first_budget=2)], ids=str)
def test_so_these_keep_within_the_engines_limit_themselves(policy: Policy) -> None:
    """Curve ``limited``: the rate is 0 above 5 tokens. Nothing is left to trim, and the law is kept."""
    for toy in ("appendix_a_pair", "pair", "ties", "three"):
        judgement = judge_case(policy, TOY[toy], "limited", reading="past", engine="as_told", rounds=2)
        assert judgement.holds


# --------------------------------------------------------------------------------------------- the command


def check(capsys, *argv: str) -> tuple[int, str]:
    code = main(argv)
    return code, capsys.readouterr().out


def test_lossless_is_exit_code_0(capsys) -> None:
    code, out = check(capsys, "fixed", "--set", "k=1")
    assert code == 0
    assert out.count("lossless: the output law is the target's, within 1e-09, in all 37 cases") == 2
    assert "marked lossless with a confidence that reads: own_token, past" in out


def test_a_counterexample_is_told(capsys) -> None:
    code, out = check(capsys, "dspark_async", "--set", "lag=1", "--engine", "freshest")
    assert code == 1
    assert out.endswith(
        textwrap.dedent("""\
        NOT lossless: model appendix_a, curve appendix
          the chance that request 0 starts with A is 0.85; the target's is 0.7
          round 1, request 0: whether its draft token 1 is verified depends on what it drafted there or later:
            request 0 drafts AA, confidence 0.8 0.9: verified 2
            request 0 drafts BA, confidence 0.8 0: verified 0
        """)
    )


def test_json_is_a_list_of_checks(capsys, tmp_path) -> None:
    file = tmp_path / "checks.json"
    code, _ = check(capsys, "threshold", "--set", "min_confidence=0.5", "--engine", "drop_batch", "--json", str(file))
    checks = json.loads(file.read_text())
    assert code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checks.json"]
    for item in checks:
        assert list(item) == ["name", "predicted", "observed", "error", "bound", "unit", "holds"]
        assert item["holds"] == (item["error"] <= item["bound"] == BOUND)
        assert item["error"] == pytest.approx(abs(item["observed"] - item["predicted"]))
    assert [item["holds"] for item in checks] == [True] * (len(checks) - 1) + [False]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder on the path; returns a function that writes a module into ``my_package`` there."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> None:
        (tmp_path / "my_package" / "my_policy.py").write_text(textwrap.dedent(text))

    yield write
    for name in ("my_package", "my_package.my_policy"):
        sys.modules.pop(name, None)


MINE = """
    from dataclasses import dataclass

    import numpy as np

    from sim.verify.base import Drafting

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Half(Drafting):
        kind: str = "half"
        floor: float = 0.5

        def verify_lengths(self, confidence, steps_per_s):
            {body}

        def start(self):
            return self
"""
PREFIX = "return np.cumprod(confidence >= self.floor, axis=1).sum(axis=1)"
WHOLE = "return np.where((confidence >= self.floor).all(axis=1), confidence.shape[1], 0)"


def test_a_strangers_policy_is_judged(capsys, package) -> None:
    package(MINE.format(body=PREFIX))
    assert check(capsys, "my_package.my_policy")[0] == 0


def test_a_strangers_mistake_is_found(capsys, package) -> None:
    """All or nothing: whether token 1 is verified depends on a confidence that read it."""
    package(MINE.format(body=WHOLE))
    code, out = check(capsys, "my_package.my_policy:Half", "--set", "floor=0.6")
    assert code == 1
    assert "the chance that request 0 starts with A is 0.85; the target's is 0.7" in out


def fault(argv: list[str]) -> str:
    from sim.errors import InputError

    with pytest.raises(InputError) as found:
        main(argv)
    return str(found.value)


def test_bad_input(package) -> None:
    package(MINE.format(body="return [9, 9, 9]"))
    kinds = "none, mtp1, fixed, threshold, batch_table, dspark, dspark_async, oracle"
    assert fault(["dsprak"]).startswith(f"unknown policy 'dsprak'; did you mean 'dspark'? known: {kinds}")
    assert fault(["fixed"]) == "--set: k: missing"
    assert fault(["fixed", "--set", "k"]) == "--set: expected key=value (got 'k')"
    assert fault(["fixed", "--set", "k=two"]) == "--set: k: expected a whole number (got 'two')"
    assert fault(["fixed", "--set", "k=2", "--set", "j=2"]).startswith("--set: j: unknown key; known: ")
    assert fault(["dspark", "--reads", "outcome"]).startswith("--reads: expected outcome for a policy that sees")
    assert fault(["oracle", "--reads", "past"]).startswith("--reads: expected outcome for a policy that sees")
    assert fault(["my_package.absent"]).startswith("unknown policy 'my_package.absent'")
    assert fault(["my_package.my_policy:Full"]) == "my_package.my_policy has no class 'Full'; policies there: Half"
    assert fault(["my_package.my_policy:Half", "--set", "roof=1"]).startswith("--set: roof: unknown key; known:")
    assert fault(["my_package.my_policy"]) == (
        "my_package.my_policy: verify_lengths: expected 1 whole numbers (got shape (3,), int64)"
    )


def test_a_module_that_cannot_be_imported(package) -> None:
    package("import nothing_of_that_name")
    assert fault(["my_package.my_policy"]) == (
        "cannot import my_package.my_policy: ModuleNotFoundError: No module named 'nothing_of_that_name'"
    )


def test_a_module_without_a_policy(package) -> None:
    package("class Thing: pass")
    assert fault(["my_package.my_policy"]) == "my_package.my_policy does not hold one policy; policies there: none"
    assert fault(["my_package.my_policy:Thing"]) == (
        "my_package.my_policy:Thing is no policy: it lacks"
        " check_drafter, confidence, draft_length, drafter, kind, lossless_with, sees_outcome, start"
    )


def test_json_that_cannot_be_written(tmp_path) -> None:
    missing = tmp_path / "absent" / "checks.json"
    assert fault(["none", "--json", str(missing)]) == f"{missing}: cannot write: no such file or directory"


@pytest.mark.parametrize("argv", [["fixed", "--rounds", "0"], ["fixed", "--engine", "broken"], []])
def test_usage_errors_are_exit_code_2(argv, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert "Traceback" not in capsys.readouterr().err


def test_help_has_an_example(capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "python -m sim.verify.check my_package.my_policy:MyPolicy" in capsys.readouterr().out
