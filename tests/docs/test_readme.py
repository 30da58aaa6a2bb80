"""What the documents tell a person to type is a known command with known options, and what they point to exists."""

import argparse
import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from profiles.files import known_profiles
from sim.verify import POLICIES

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path for path in ROOT.rglob("*.md") if not {".venv", "runs", "node_modules"} & set(path.relative_to(ROOT).parts)
)
#: Commands of a block that are not ours.
OTHERS = {"cd", "git", "pip"}


class Parsed(Exception):
    """The options were understood; the command is not to run."""


def commands_of(text: str) -> list[str]:
    """Return the lines of ``sh`` blocks, and what stands between backticks and begins like one of our commands."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(
        r"`((?:python -m|make) [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )
    return [line for line in (*lines, *inline) if line and not line.startswith("#")]


def modules_with_a_command() -> list[str]:
    """Return the names of all modules that can be run."""
    files = [path for folder in ("sim", "profiles", "analysis", "decoder") for path in (ROOT / folder).rglob("*.py")]
    runnable = [path for path in files if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")]
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in runnable)


def targets() -> set[str]:
    """Return the verbs of the Makefile."""
    (line,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return set(line.split())


def check(command: str, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace | None:
    """Fail unless a command line is known; returns what its parser made of it."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        names = [word for word in words[1:] if "=" not in word]
        assert set(names) <= targets(), f"{command}: the Makefile has no such verb"
        return None
    if words[0] in OTHERS or words == [".", ".venv/bin/activate"]:
        return None
    assert words[:2] == ["python", "-m"], f"{command}: expected python -m, make, or one of {sorted(OTHERS)}"
    module = importlib.import_module(words[2])
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{words[2]}.__main__")
    real = argparse.ArgumentParser.parse_args
    found: list[argparse.Namespace] = []

    def parse_and_stop(self: argparse.ArgumentParser, *args: object, **kwargs: object) -> argparse.Namespace:
        found.append(real(self, *args, **kwargs))  # type: ignore[arg-type]
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    try:
        module.main(words[3:])
    except Parsed:
        pass
    except SystemExit as ended:
        pytest.fail(f"{command}: not understood (exit code {ended.code})")
    finally:
        monkeypatch.undo()
    assert found, f"{command}: parsed nothing"
    return found[0]


README = [
    (page.relative_to(ROOT), command) for page in PAGES for command in commands_of(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "command"), README, ids=[command[:70] for _, command in README])
def test_a_command_of_a_page_is_known(page, command, monkeypatch, capsys):
    options = check(command, monkeypatch)
    if options is None:
        return
    words = shlex.split(command)
    for word in words[3:]:
        if word.startswith("scenarios/"):
            assert (ROOT / word).is_file(), f"{page}: {word} does not exist"
    if words[2] == "profiles.show":
        assert options.name in (None, *known_profiles())
    if words[2] == "sim.verify.check" and "." not in options.policy:
        assert options.policy in POLICIES.known()
    if words[2] == "sim.run" and options.scenario:  # its settings fit the scenario too
        monkeypatch.chdir(ROOT)
        assert importlib.import_module("sim.run").main([*words[3:], "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("module", modules_with_a_command())
def test_the_examples_of_a_module_are_known(module, monkeypatch):
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    lines = [line.strip() for text in texts if isinstance(text, str) for line in text.replace("\\\n", " ").splitlines()]
    for line in lines:
        if line.startswith("python -m ") and " " in line.removeprefix("python -m "):
            check(line.partition(" > ")[0].partition(" | ")[0], monkeypatch)


def test_links_and_pictures_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target} does not exist"


def test_the_harness_sees_what_is_wrong(monkeypatch, capsys):
    text = "```sh\nmake dmo\n# a remark\npython -m sim.run x.yaml \\\n  --sed 3\n```\n`make tset` `no command`\n"
    assert commands_of(text) == ["make dmo", "python -m sim.run x.yaml    --sed 3", "make tset"]
    for command in ("make dmo", "python -m sim.run x.yaml --sedd 3", "rm -r x"):
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check(command, monkeypatch)
    with pytest.raises(ModuleNotFoundError):
        check("python -m sim.rum", monkeypatch)
    assert check("python -m sim.run x.yaml --seed 3", monkeypatch).seed == 3
