"""The command ``python -m sim.run``, called in this process on scenarios so small that they end at once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import analysis.session
from sim.run import main
from tests.helpers.scenario import TINY


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str


Run = Callable[..., Ended]
Refused = Callable[..., list[str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tiny_file(here: Path) -> Path:
    """Write the tiny scenario to ``s.yaml`` of the working folder."""
    path = here / "s.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that writes a scenario to ``s.yaml`` and runs it with the options given.

    Plots, which take longer than all else, are drawn where they are asked for.
    """
    draw_plots = analysis.session.draw_plots

    def run_scenario(scenario: str | bytes, *options: str, plots: bool = False) -> Ended:
        monkeypatch.setattr(analysis.session, "draw_plots", draw_plots if plots else lambda *_: None)
        (here / "s.yaml").write_bytes(scenario.encode() if isinstance(scenario, str) else scenario)
        capsys.readouterr()
        code = main(["s.yaml", *options, *([] if "--jobs" in options else ["--jobs", "1"])])
        return Ended(code, *capsys.readouterr())

    return run_scenario


@pytest.fixture
def refused(run: Run, here: Path) -> Refused:
    """Return a function that lists what is wrong with a scenario, and sees to it that nothing else came of it."""

    def faults(scenario: str | bytes, *options: str) -> list[str]:
        (here / "s.yaml").touch()
        before = sorted(here.rglob("*"))
        ended = run(scenario, *options)
        assert ended.code == 2, ended
        assert ended.out == ""
        assert "Traceback" not in ended.err
        assert sorted(here.rglob("*")) == before, "something was left behind"
        return ended.err.splitlines()

    return faults
