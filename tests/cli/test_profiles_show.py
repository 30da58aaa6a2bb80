"""``python -m profiles.show`` and ``python -m profiles.build`` as a person types them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from profiles import build
from profiles.errors import exit_code_of
from profiles.files import SHIPPED, digest, find_profile, known_profiles, load_profile
from profiles.schema import provenances
from profiles.show import main

ROOT = SHIPPED.parent


def command(module: str, *arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False, cwd=cwd
    )


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_without_a_name_it_lists_the_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out if not line.startswith(" ")] == known_profiles()


@pytest.mark.parametrize("name", known_profiles())
def test_every_value_is_shown_with_its_source(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--no-plots"]) == 0
    out, err = capsys.readouterr()
    found = provenances(load_profile(find_profile(name)))
    text = " ".join(out.split())
    assumed = [value for value, source in found.items() if source.origin == "assumed"]
    for value, source in found.items():
        assert value in text
        for part in (source.source, source.note, source.reason):
            assert part is None or " ".join(part.split()) in text
    assert out.splitlines()[-1] == f"{len(assumed)} of {len(found)} values are assumed"
    warning = (
        f"warning: {len(assumed)} of {len(found)} values are assumed; metrics that rest on them are no measurements\n"
    )
    assert err == (warning if assumed else "")
    assert max(map(len, out.splitlines())) <= 120


def test_the_numbers_of_v4_flash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper/v4_flash", "--no-plots"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "verify: law, 13.01 + 2.991 (1 - exp(-n/19.08)) + 0.02651 n ms, n = 9 to 687 batch tokens; beyond: extrapolate"
        in lines
    )
    for expected in (
        "batch tokens 1 2 4 8 16 32 64 128 256 512 687",
        "ms ~14.37 ~14.37 ~14.37 ~14.37 15.13 16.29 17.59 19.39 22.78 29.57 34.21",
        "whole step, ms none dspark k=5 mtp k=1",
        "any survival 0.807 0.673 0.571 0.477 0.407",
        "conditional 0.807 0.834 0.848 0.835 0.853",
        "accepted length 1.807 2.480 3.051 3.528 3.935",
        "any survival* 0.850",
        "replica: 1* GPU, 3,500* KV bytes a token, context up to 1,048,576* tokens",
    ):
        assert expected in [" ".join(line.split()) for line in lines], expected


def test_a_step_beyond_a_refusing_table_is_a_dash(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = json.loads(find_profile("engines/v4_flash_b300_tp4").read_text())
    profile["step_time"]["verify"]["segments"].pop()
    path = tmp_path / "graphs_only.json"
    path.write_text(json.dumps(profile))
    assert main([str(path), "--no-plots"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "256 requests 11.30 -" in lines


def test_a_price_of_letting_requests_in_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = json.loads(find_profile("paper/v4_flash").read_text())
    profile["step_time"]["prefill"]["per_request_s"] = 0.0125
    path = tmp_path / "dear.json"
    path.write_text(json.dumps(profile))
    assert main([str(path), "--no-plots"]) == 0
    assert " us a prompt token, 12.5 ms a request let in; a step of prompts alone" in capsys.readouterr().out


def test_json_holds_the_same_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["engines/v4_flash_b300_tp4", "--no-plots", "--json", "report.json"]) == 0
    capsys.readouterr()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["profile"] == "engines/v4_flash_b300_tp4"
    points = {point["batch_tokens"]: point["ms"] for point in report["step_time"]["verify"]["points"]}
    assert points[1024] == pytest.approx(20.63)
    assert points[2048] == pytest.approx(103.6)
    assert report["acceptance"]["dspark"]["domains"]["any"]["accepted_length_tokens"][-1] == pytest.approx(3.935)
    assert report["steps"][0] == {"requests": 1, "none_ms": pytest.approx(5.11), "dspark_5_ms": pytest.approx(6.23)}
    assert not list(tmp_path.glob("*.part"))


def test_plots_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        assert main(["engines/qwen3_8b_h20", "--out", folder]) == 0
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["step_time.png", "step_time.svg"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_plots_go_where_runs_are_kept(tmp_path: Path) -> None:
    assert main(["paper/v4_flash"]) == 0
    names = sorted(path.name for path in (tmp_path / "runs/profiles/paper/v4_flash").iterdir())
    assert names == [f"{plot}.{kind}" for plot in ("acceptance", "confidence", "step_time") for kind in ("png", "svg")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["paper/v4"],
            f"unknown profile 'paper/v4'; did you mean 'paper/v4_pro'? known: {', '.join(known_profiles())}, "
            "or a path that ends in .json",
        ),
        (["gone.json"], "gone.json: cannot read: no such file or directory"),
        (["empty.json"], "empty.json:1: empty file; expected a mapping of keys to values"),
        (["paper/v4_pro", "--no-plots", "--out", "there"], "--out: has no effect beside --no-plots"),
        (["--no-plots"], "--out, --json and --no-plots need the NAME of a profile"),
        (["paper/v4_pro", "--out", "empty.json"], "empty.json: cannot write: file exists"),
        (["paper/v4_pro", "--json", "no/report.json"], "no/report.json: cannot write: no such file or directory"),
    ],
)
def test_faults_exit_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty.json").touch()
    assert exit_code_of(lambda: main(arguments)) == 2
    assert capsys.readouterr().err.splitlines()[-1] == message
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["empty.json"]


def test_as_a_command_it_exits_and_prints_without_a_traceback() -> None:
    shown = command("profiles.show", "paper/v4_pro", "--no-plots")
    assert (shown.returncode, shown.stdout.splitlines()[0]) == (0, "paper/v4_pro")
    failed = command("profiles.show", "nothing.json")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == "nothing.json: cannot read: no such file or directory\n"


def test_printing_loads_no_plotting() -> None:
    code = (
        "import sys; from profiles.show import main; main(['paper/v4_pro', '--no-plots']); "
        "sys.exit(any(name in sys.modules for name in ('matplotlib', 'pandas', 'scipy')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr


def test_build_writes_the_shipped_bytes(shared_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "engines/qwen3_8b_h20"
    assert build.main([name, "--shared", str(shared_dir), "--out", "out"]) == 0
    assert capsys.readouterr() == ("", f"out/{name}.json\n")
    assert (tmp_path / f"out/{name}.json").read_bytes() == find_profile(name).read_bytes()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "paper/v4_pro",
            "none/reference/dspark_paper/derived_mtp_step_time.csv: cannot read: no such file or directory; "
            "--shared names the folder it is in",
        ),
        ("paper/v5", f"unknown profile 'paper/v5'; known: {', '.join(sorted(build.PROFILES))}"),
    ],
)
def test_build_faults_exit_with_2(name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(lambda: build.main([name, "--shared", "none", "--out", "out"])) == 2
    assert capsys.readouterr().err == f"{message}\n"
    assert not (tmp_path / "out").exists()


def test_a_recorded_bank_is_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two texts of 50 positions, blocks of 2; every draft token has the chance that its confidence says."""
    chance = np.tile(np.linspace(0.5, 0.9, 100)[:, None], (1, 2))
    np.savez(
        tmp_path / "toy.npz",
        confidence_raw=np.sqrt(chance),
        confidence=chance,
        chance=chance,
        accepted=chance > 0.7,
        request=np.repeat([0, 1], 50),
        position=np.tile(np.arange(50), 2),
    )
    bank = {
        "kind": "bank",
        "file": "toy.npz",
        "sha256": digest(tmp_path / "toy.npz"),
        "provenance": {"origin": "measured", "source": "a test", "hardware": "none"},
    }
    drafter = {"kind": "chain", "trained_length": 2, "confidence_reads": "own_token", "domains": {"code": bank}}
    profile = {"format": "dspark-profile/1", "name": "toy", "description": "a toy", "acceptance": {"toy": drafter}}
    (tmp_path / "toy.json").write_text(json.dumps(profile))
    assert main(["toy.json", "--out", "plots"]) == 0
    out = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "drafter toy: chain, trained for 2 tokens; confidence reads its own token" in out
    assert f"code survival {chance[:, 0].mean():.3f} {(chance[:, 0] ** 2).mean():.3f}" in out
    assert "code: bank of 100 positions of 2 texts" in out
    assert "0 of 1 values are assumed" in out
    assert len(list((tmp_path / "plots").iterdir())) == 4
