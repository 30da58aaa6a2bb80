"""``python -m profiles.fit`` as a person types it: what it writes, says and refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from profiles import fit
from profiles.errors import exit_code_of
from profiles.files import SHIPPED, load_profile
from profiles.schema import LawCurve, TableCurve, provenances

ROOT = SHIPPED.parent
SWEEP = "concurrency,tpot_ms\n" + "".join(f"{n},{6 + 0.05 * n:g}\n" for n in (1, 2, 4, 8, 16, 32))
LENGTHS = "k,accepted_length\n1,1.8\n2,2.3\n3,2.6\n4,2.5\n"
STEPS = "batch_tokens,step_ms\n1,6\n64,7\n256,9\n"
DRAFTS = "requests,draft_ms\n1,1\n64,2\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("sweep.csv", SWEEP), ("lengths.csv", LENGTHS), ("steps.csv", STEPS), ("drafts.csv", DRAFTS)
    ):  # fmt: skip
        Path(name).write_text(text)


def run(*arguments: str, plots: bool = False) -> int:
    return exit_code_of(lambda: fit.main([*arguments, *([] if plots else ["--no-plots"])]))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run what must be refused: exit code 2, nothing on stdout, nothing written."""
    before = sorted(Path().iterdir())
    capsys.readouterr()
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert sorted(Path().iterdir()) == before
    return err


def test_a_sweep_becomes_a_profile_with_its_report_and_plot(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mine", "--sweep", "sweep.csv", "--json", "r.json", "--hardware", "1 x X", plots=True) == 0
    out, err = capsys.readouterr()
    profile = load_profile(Path("mine.json"))
    assert profile.step_time is not None
    assert isinstance(profile.step_time.verify, LawCurve)
    assert profile.step_time.verify.floor_s == pytest.approx(6e-3, rel=1e-3)
    assert profile.step_time.verify.per_unit_s == pytest.approx(50e-6, rel=1e-2)
    sources = provenances(profile)
    assert sources["step_time.verify"].origin == "fitted"
    assert sources["step_time.verify"].hardware == "1 x X"
    assert "python -m profiles.fit mine --sweep sweep.csv" in (sources["step_time.verify"].command or "")
    report = json.loads(Path("r.json").read_text())
    assert report["worst_percent"] < 0.2
    assert [row["concurrency"] for row in report["rows"]] == [1, 2, 4, 8, 16, 32]
    assert report["costs"]["floor_us"]["value"] == pytest.approx(6000, rel=1e-3)
    assert {"the time to draft", "acceptance"} <= {one["what"] for one in report["not_identified"]}
    assert all(one["settle"] for one in report["not_identified"])
    for path in ("runs/profiles/mine/fit.png", "runs/profiles/mine/fit.svg"):
        assert path in err
        assert Path(path).stat().st_size > 1000
    assert max(map(len, out.splitlines())) <= 120


def test_the_same_files_give_the_same_bytes() -> None:
    assert run("mine", "--sweep", "sweep.csv") == 0
    first = Path("mine.json").read_bytes()
    assert run("mine", "--sweep", "sweep.csv") == 0
    assert Path("mine.json").read_bytes() == first


def test_a_tail_that_falls_is_told_and_not_smoothed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mine", "--acceptance", "lengths.csv", "--lengths-of", "whole_block") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "survival of dspark, any: 0.800 0.500 0.300; 2.60 tokens a round" in out
    assert "accepted length 2.5 at k = 4 is no sum of survivals" in out
    assert load_profile(Path("mine.json")).acceptance["dspark"].trained_length == 3


def test_tables_are_read_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mine", "--step-table", "steps.csv", "--between", "round_up", "--draft-table", "drafts.csv") == 0
    step_time = load_profile(Path("mine.json")).step_time
    assert step_time is not None
    assert isinstance(step_time.verify, TableCurve)
    assert step_time.verify.segments[0].seconds == (0.006, 0.007, 0.009)
    assert (step_time.verify.beyond, step_time.verify.provenance.origin) == ("refuse", "measured")
    assert step_time.draft["dspark"].per == "round"


def test_a_sweep_on_top_of_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{n},{(6 + (n - 1) / 63) + 0.2 * n + 0.5:g}\n" for n in (1, 2, 4, 8, 16, 32))
    Path("sweep.csv").write_text("concurrency,tpot_ms\n" + rows)
    assert run("mine", "--sweep", "sweep.csv", "--step-table", "steps.csv") == 0
    step_time = load_profile(Path("mine.json")).step_time
    assert step_time is not None
    assert step_time.overhead is not None
    assert step_time.overhead.seconds == pytest.approx(0.5e-3, rel=0.05)
    assert step_time.per_request is not None
    assert step_time.per_request.seconds == pytest.approx(0.2e-3, rel=0.02)


def test_a_log_becomes_a_profile(shared_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = shared_dir / "traces/llmservingsim-bench/RTXPRO6000/Qwen3-32B/requests.jsonl"
    assert run("mine", "--log", str(log), "--until", "120", "--json", "r.json") == 0
    assert "tokens that a request got in its time, the worst 8 of" in capsys.readouterr().out
    report = json.loads(Path("r.json").read_text())
    assert report["rms_percent"] < 1.5
    step_time = load_profile(Path("mine.json")).step_time
    assert step_time is not None
    assert step_time.per_context_token is not None
    assert "verify drafts for free" in " ".join(report["remarks"])
    assert "a fit needs 20" in refused(capsys, "other", "--log", str(log), "--until", "20")
    assert run("whole", "--log", str(log)) == 0
    assert "verify drafts for free" not in " ".join(capsys.readouterr().out.split())


def test_a_bound_that_is_missed_is_exit_code_1() -> None:
    Path("sweep.csv").write_text(SWEEP.replace("16,6.8", "16,8.8"))
    assert run("mine", "--sweep", "sweep.csv", "--max-error", "50") == 0
    assert run("mine", "--sweep", "sweep.csv", "--max-error", "5") == 1


def test_what_the_engine_ran_may_be_said_in_front_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    fast = "concurrency,tpot_ms,accepted_length,policy,k\n" + "".join(
        f"{n},{(7 + 0.05 * n * (1 + k) + 0.01 * n) / a:g},{a},fixed,{k}\n"
        for n in (2, 8, 32)
        for k, a in ((2, 2.0), (4, 2.5))
    )
    Path("fast.csv").write_text(fast)
    assert run("mine", "--sweep", "none=sweep.csv", "fast.csv") == 0
    step_time = load_profile(Path("mine.json")).step_time
    assert step_time is not None
    draft = step_time.draft["dspark"].curve
    assert isinstance(draft, LawCurve)
    assert draft.floor_s == pytest.approx(1e-3, rel=0.1)
    assert "fixed:9" in refused(capsys, "other", "--sweep", "sweep.csv", "fixed:9=fast.csv")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["mine"], "nothing to fit: give --sweep, --log, --step-table or --acceptance"),
        (["mine", "--sweep", "gone.csv"], "gone.csv: cannot read: no such file or directory"),
        (["mine", "--sweep", "dspark=sweep.csv"], "--sweep: unknown policy 'dspark'; known: none, mtp1, fixed:K"),
        *(
            (
                [name, "--sweep", "sweep.csv"],
                f"NAME: expected letters, digits and _ . - /, no part of it beginning with . or - (got '{name}')",
            )
            for name in ("a b", "../a", "a/../b", "/a", "a/.b")
        ),
        (["a", "--sweep", "sweep.csv", "--no-plots", "--plots", "p"], "--plots: has no effect beside --no-plots"),
        (["paper/v4_flash", "--sweep", "sweep.csv"], "NAME: 'paper/v4_flash' is a shipped profile; take another name"),
        (["mine", "--sweep", "sweep.csv", "--log", "sweep.csv"], "--log: give --sweep or --log"),
        (["mine", "--sweep", "sweep.csv", "--request-share", "2"], "--request-share: expected 0 to 1 (got 2)"),
        (["mine", "--sweep", "sweep.csv", "--until", "9"], "--until: has no effect without --log"),
        (["mine", "--sweep", "sweep.csv", "--gpus", "8"], "give --gpus, --kv-bytes-per-token and --max-context-tokens"),
        (["mine", "--sweep", "sweep.csv", "--out", "x/y.json"], "x: no such folder"),
        (["mine", "--sweep", "sweep.csv", "--out", "y.txt"], "--out: a profile ends in .json (got 'y.txt')"),
        (["mine", "--sweep", "sweep.csv", "--only", "hw"], "--only: expected KEY=VALUE (got 'hw')"),
        (["mine", "--sweep", "sweep.csv", "--only", "k=3"], "sweep.csv: no row has k=3; there are "),
        (["mine", "--acceptance", "lengths.csv"], "Say what the runs did with --lengths-of: chain"),
        (["mine", "--acceptance", "lengths.csv", "--lengths-of", "short_block"], "are no survival; settle it with"),
        (["mine", "--acceptance", "lengths.csv", "--lengths-of", "chain", "--drafter", "x"], "--drafter-kind: is "
                                                                                             "'x' a block"),
        (["mine", "--acceptance", "lengths.csv", "--draft-like", "x"], "--draft-like: has no effect without a step "
                                                                       "time"),
        (["mine", "--sweep", "sweep.csv", "--draft-like", "nobody"], "unknown profile 'nobody'; known: "),
        (["mine", "--sweep", "sweep.csv", "--draft-like", "paper/qwen3_8b"], "paper/qwen3_8b has no draft time for "
                                                                             "'dspark'"),
        (["mine", "--sweep", "sweep.csv", "--draft-table", "steps.csv"], "steps.csv:1: no column 'requests'"),
        (["mine", "--log", "sweep.csv"], "sweep.csv:1: no column 'arrived'"),
        (["mine", "--log", "lengths.csv", "--step-table", "steps.csv"], "give --log or --step-table"),
    ],
)  # fmt: skip
def test_bad_input_has_one_message(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refused(capsys, *arguments)


def test_runs_that_cannot_be_told_apart_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("all.csv").write_text(
        "concurrency,tpot_ms,accepted_length,policy,k\n1,3,2,fixed,3\n2,3,2,fixed,3\n4,3,2,fixed,3\n"
    )
    assert "settle it with runs without speculation at the same concurrencies (1, 2, 4)" in refused(
        capsys, "mine", "--sweep", "all.csv"
    )
    one_k = ["--sweep", "sweep.csv", "all.csv"]
    assert "or assume how the slope over load divides (--request-share 0: all to tokens)" in refused(
        capsys, "mine", *one_k
    )
    assert run("mine", *one_k, "--request-share", "0") == 0


def test_it_runs_as_a_module_and_has_an_example() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "profiles.fit", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "example: python -m profiles.fit my_engine" in done.stdout


# ------------------------------------------------------------------------------------------------------------- tutorial


def commands(module: str) -> list[list[str]]:
    page = (ROOT / "docs/will_dspark_pay.md").read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.split()[3:] for line in re.findall(rf"^python -m {re.escape(module)} .*$", page, re.MULTILINE)]


@pytest.mark.parametrize("arguments", commands("profiles.fit"), ids=lambda words: words[0])
def test_the_tutorials_fits_give_the_committed_profiles_and_print_what_it_shows(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    committed = Path(arguments[arguments.index("--out") + 1])
    before = committed.read_bytes()
    try:
        assert run(*arguments) == 0
        assert committed.read_bytes() == before, f"{committed} is not what the tutorial's command gives"
    finally:
        committed.write_bytes(before)
    page = (ROOT / "docs/will_dspark_pay.md").read_text(encoding="utf-8")
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("residuals of the fit"):
            assert line in page


def test_the_tutorials_simulations_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from sim.run import main

    monkeypatch.chdir(ROOT)
    assert len(commands("sim.run")) >= 3
    for arguments in commands("sim.run"):
        assert main([*arguments, "--dry-run"]) == 0, capsys.readouterr().err
