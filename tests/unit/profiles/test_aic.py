"""NVIDIA's predicted decode steps as profiles: both ends of a verify step, and the package behind them."""

import sys
import types
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from profiles.curves import StepCost, step_cost
from profiles.errors import InputError, exit_code_of
from profiles.files import find_profile, load_profile
from profiles.predict import _lender, main
from profiles.recipes.aic import CONTEXT, MACHINES, fit_attention, read_steps, scale_b300
from profiles.recipes.sources import Shared


@cache
def steps_of(name: str, end: str) -> StepCost:
    step_time = load_profile(find_profile(f"aic/{name}_{end}")).step_time
    assert step_time is not None
    return step_cost(step_time, 2048)


def cost(name: str, end: str, batch: int, requests: int, context: int) -> float:
    return steps_of(name, end).target_s(requests, batch, requests * context, 0)


@pytest.mark.parametrize("name", MACHINES)
def test_steps_of_one_token_are_those_of_the_table(name: str, shared_dir: Path) -> None:
    steps = read_steps(Shared(shared_dir), MACHINES[name])
    law = fit_attention(steps)
    assert law.rms < 0.035
    for context in (512, CONTEXT, 16384):
        column = int(np.flatnonzero(steps.contexts == context)[0])
        for row, tokens in enumerate(steps.tokens):
            whole = float(steps.rest_s[row] + steps.attention_s[row, column])
            got = cost(name, "lower", int(tokens), int(tokens), context)
            assert abs(got / whole - 1) <= law.worst * 1.01 + 1e-4, (context, tokens)
            if context == CONTEXT:
                assert cost(name, "upper", int(tokens), int(tokens), context) == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("name", MACHINES)
def test_verifying_lies_between_the_two_ends(name: str, shared_dir: Path) -> None:
    steps = read_steps(Shared(shared_dir), MACHINES[name])
    column = int(np.flatnonzero(steps.contexts == CONTEXT)[0])
    for requests, k in ((8, 3), (64, 5), (256, 3)):
        batch = requests * (1 + k)
        rest = float(np.interp(batch, steps.tokens, steps.rest_s))
        once, each = (float(np.interp(n, steps.tokens, steps.attention_s[:, column])) for n in (requests, batch))
        lower, upper = (cost(name, end, batch, requests, CONTEXT) for end in ("lower", "upper"))
        assert upper == pytest.approx(rest + each, rel=1e-4)
        assert lower == pytest.approx(rest + once, rel=0.14)
        assert lower < upper


def test_the_shipped_tables_lend_the_same_draft_time_as_the_reference_data(shared_dir: Path) -> None:
    ours, theirs = _lender(), scale_b300(Shared(shared_dir))
    assert ours.draft_floor_s == pytest.approx(theirs.draft_floor_s, rel=1e-3)
    assert ours.draft_request_s == pytest.approx(theirs.draft_request_s, rel=1e-3)
    assert np.allclose(ours.verify_s, theirs.verify_s, rtol=1e-4)


ARGUMENTS = [
    "mine", "--model", "Qwen/Qwen3-8B", "--system", "h200_sxm", "--backend", "vllm", "--gpus", "1",
    "--kv-bytes-per-token", "147456", "--max-context-tokens", "32768",
]  # fmt: skip


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for aiconfigurator-core: an engine of 5 ms + 10 us a token, attention 1 ms + 30 ns a context token."""

    class EngineHandle:
        @classmethod
        def compile(cls, model: str, system: str, backend: str, **layout: int) -> "EngineHandle":
            assert layout == {"nextn": 0, "tp_size": 1}
            if system == "abacus":
                raise RuntimeError("no such system\nand more")
            return cls()

        def decode_step_per_op(self, tokens: int, context: int, output: int) -> list[tuple[str, float, float, str]]:
            return [
                ("generation_gemm", 5.0 + 0.01 * tokens, 0.0, "silicon"),
                ("generation_attention", 1.0 + 30e-6 * tokens * context, 0.0, "silicon"),
            ]

    for name in ("aiconfigurator_core", "aiconfigurator_core.sdk", "aiconfigurator_core.sdk.engine"):
        module = types.ModuleType(name)
        module.EngineHandle = EngineHandle  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("package")
def test_predict_writes_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(ARGUMENTS) == 0
    assert "attention as a law: 0.0% rms" in capsys.readouterr().out
    lower, upper = (load_profile(Path(f"mine_{end}.json")).step_time for end in ("lower", "upper"))
    assert lower is not None
    assert upper is not None
    assert lower.per_context_token is not None
    assert lower.per_context_token.seconds == pytest.approx(30e-9)
    assert step_cost(lower, 64).target_s(16, 64, 16 * CONTEXT, 0) == pytest.approx(
        6e-3 + 0.64e-3 + 30e-9 * 16 * CONTEXT, rel=1e-4
    )
    assert step_cost(upper, 64).target_s(16, 64, 16 * CONTEXT, 0) == pytest.approx(
        6e-3 + 0.64e-3 + 30e-9 * 64 * CONTEXT, rel=1e-4
    )


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            ["--system", "abacus"],
            "aiconfigurator has no prediction for Qwen/Qwen3-8B on abacus with vllm, tp_size=1: no such",
        ),
        (["--layout", "tp=8"], "--layout: expected tp_size=N[,attention_dp_size=N]"),
        (["--gpus", "0"], "--gpus: expected at least 1 (got 0)"),
        (["--out", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_what_cannot_be_predicted_is_said(
    change: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code_of(lambda: main([*ARGUMENTS, *change])) == 2
    assert expected in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(InputError, match=r"needs the extra 'aic'"):
        main(ARGUMENTS)
