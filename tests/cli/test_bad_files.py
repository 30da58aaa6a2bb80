"""What is no scenario at all: unreadable files, texts that are no YAML, YAML that is more than data."""

from itertools import pairwise
from pathlib import Path

import pytest

from sim.run import main
from tests.helpers.scenario import TINY, changed

NOT_DATA = "is not allowed: a file is data, not code"

FILES = {
    "empty": ("", ":1: empty file; expected a mapping of keys to values"),
    "blank": (" \n\n", ":1: empty file; expected a mapping of keys to values"),
    "comments": ("# Question: what?\n", ":1: empty file; expected a mapping of keys to values"),
    "null": ("~\n", ":1: empty file; expected a mapping of keys to values"),
    "number": ("3\n", ":1: expected a mapping of keys to values (got 3)"),
    "list": ("[1, 2]\n", ":1: expected a mapping of keys to values (got [1, 2])"),
    "text": ("simulate this\n", ":1: expected a mapping of keys to values (got 'simulate this')"),
    "two documents": (TINY + "---\n" + TINY, ":12: more than one document; expected one"),
    "open list": (
        TINY.replace("dspark]", "dspark"),
        ":8: syntax error: expected ',' or ']', but got ':', while parsing a list (from line 7)",
    ),
    "open quote": (
        changed("name: tiny", "name: 'tiny"),
        ":12: syntax error: found unexpected end of the file, while scanning a quoted text (from line 1)",
    ),
    "cut in a mapping": (
        TINY[: TINY.index("rate_per_s")],
        ":8: syntax error: expected the node content, but found the end of the file, while parsing a flow node "
        "(from line 8)",
    ),
    "indent": (
        changed("horizon", "  horizon"),
        ":2: syntax error: unexpected ': '; indent evenly, and put quotes around text that holds it",
    ),
    "colon": (
        changed("tiny", "a: b"),
        ":1: syntax error: unexpected ': '; indent evenly, and put quotes around text that holds it",
    ),
    "tab": (changed("  replicas", "\treplicas"), ":4: syntax error: a tab where only spaces may stand"),
    "no alias": (changed("tiny", "*tiny"), ":1: syntax error: found undefined alias 'tiny'"),
    "nul": (changed("tiny", "ti\0ny"), ":1: character 0x0000 is not allowed"),
    "escape": (changed("horizon: 2s", "horizon: \x1b"), ":2: character 0x001b is not allowed"),
    "surrogate": (changed("tiny", '"\\ud800"'), ":1: name: half of a surrogate pair is no character"),
    "duplicate": (TINY + "name: other\n", ":12: duplicate key 'name'"),
    "duplicate inside": (changed("rate_per_s: 4", "rate_per_s: 4, rate_per_s: 5"), ":8: duplicate key 'rate_per_s'"),
    "number as key": (TINY + "domains: {1: 1}\n", ":12: domains: a key must be text; put quotes around it (got 1)"),
    "null as key": (TINY + "~: 1\n", ":12: a key must be text; put quotes around it (got null)"),
    "tag": (changed("tiny", "!person tiny"), f":1: name: a tag '!person' {NOT_DATA}"),
    "tag on a mapping": (changed("{kind: poisson", "!law {kind: poisson"), f":8: arrivals: a tag '!law' {NOT_DATA}"),
    "tag on a list": (changed("[none", "!all [none"), f":7: policies: a tag '!all' {NOT_DATA}"),
    "code": (
        changed("tiny", "!!python/object/apply:os.system [ls]"),
        f":1: name: a tag '!!python/object/apply:os.system' {NOT_DATA}",
    ),
    "code in a mapping": (
        changed("{kind: poisson", "!!python/object:os.system {kind: poisson"),
        f":8: arrivals: a tag '!!python/object:os.system' {NOT_DATA}",
    ),
    "text by tag": (changed("tiny", "!!str 3"), f":1: name: a tag '!!str' {NOT_DATA}"),
    "set": (changed("[none, dspark]", "!!set {none, dspark}"), f":7: policies: a tag {NOT_DATA}"),
    "binary": (changed("tiny", "!!binary dGlueQ=="), f":1: name: a tag {NOT_DATA}"),
    "depth": ("name: " + "[" * 40 + "]" * 40, ":1: nested more than 32 levels deep"),
    "digits": (changed("replicas: 1", "replicas: " + "9" * 5000), ": a number has too many digits"),
    "latin-1": (changed("tiny", "t\xefny").encode("latin-1"), ":1: not UTF-8 text (byte 0xef)"),
    "utf-16": (TINY.encode("utf-16"), ":1: not UTF-8 text (byte 0xff)"),
    "png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", ":1: not UTF-8 text (byte 0x89)"),
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_scenario_has_its_message(refused, name):
    content, message = FILES[name]
    assert refused(content) == [f"s.yaml{message}"]


@pytest.mark.parametrize("cut", range(1, len(TINY) - 1, 23))
def test_a_truncated_scenario_is_refused_or_still_whole(run, cut):
    ended = run(TINY[:cut], "--dry-run")
    assert ended.code in (0, 2)
    assert (ended.out == "") == (ended.code == 2)
    assert all(line.startswith("s.yaml:") for line in ended.err.splitlines())


def test_an_alias_bomb_is_refused(refused, monkeypatch):
    monkeypatch.setattr("profiles.reading.MAX_VALUES", 5000)
    letters = "abcdefgh"
    lines = ["a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in pairwise(letters)]
    (fault,) = refused("\n".join(lines))
    assert fault.endswith("more than 5000 values, aliases included")


def test_a_list_that_holds_itself_is_refused(refused):
    (fault,) = refused(changed("[none, dspark]", "&all [*all, none]"))
    assert fault.startswith("s.yaml:7: policies[0]: expected a name, or a mapping with the key 'kind'")


def test_an_alias_is_read_and_a_fault_in_it_is_placed(refused, run):
    text = changed("{kind: fixed, tokens: 50}", "&law {kind: fixed, tokens: 50}")
    text = text.replace("{kind: fixed, tokens: 20}", "*law")
    assert "tokens: 50" in run(text, "--dry-run").out
    assert refused(text.replace("tokens: 50", "tokens: 0")) == [
        "s.yaml:10: lengths.prompt.tokens: expected at least 1 (got 0)",
        "s.yaml:10: lengths.output.tokens: expected at least 1 (got 0)",
    ]


def test_byte_order_mark_line_ends_and_json_are_read(run):
    for text in ("\ufeff" + TINY, TINY.replace("\n", "\r\n")):
        assert run(text, "--dry-run").out == run(TINY, "--dry-run").out
    as_json = (
        '{"name": "j", "horizon": "2s", "fleet": {"replicas": 1, "profile": "paper/v4_flash", "kv_cache": "1GiB"},'
    )
    as_json += '\n "policies": ["none"],\n "arrivals": {"kind": "replay", "path": "t.csv"}}'
    assert run(as_json, "--dry-run").out.startswith("name: j\n")


def test_lines_are_counted_with_carriage_returns(refused):
    assert refused(TINY.replace("\n", "\r\n").replace("tokens: 20", "tokens: 0")) == [
        "s.yaml:11: lengths.output.tokens: expected at least 1 (got 0)"
    ]


def test_a_file_that_cannot_be_opened(here, capsys, monkeypatch):
    (here / "folder").mkdir()
    assert main(["no.yaml"]) == 2
    assert main(["folder"]) == 2
    assert capsys.readouterr() == (
        "",
        "no.yaml: cannot read: no such file or directory\nfolder: cannot read: is a directory\n",
    )

    (here / "scenarios").mkdir()
    (here / "scenarios/flash_peak.yaml").touch()
    for name in ("flash_peak", "scenarios/flash_peek.yaml"):
        assert main([name]) == 2
        hint = "did you mean 'scenarios/flash_peak.yaml'?"
        assert capsys.readouterr().err == f"{name}: cannot read: no such file or directory; {hint}\n"

    (here / "s.yaml").touch()

    def locked(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", locked)
    assert main(["s.yaml"]) == 2
    assert capsys.readouterr() == ("", "s.yaml: cannot read: permission denied\n")


def test_a_file_without_end_is_not_read_whole(capsys, monkeypatch):
    monkeypatch.setattr("profiles.reading.MAX_INPUT_BYTES", 1000)
    assert main(["/dev/zero"]) == 2
    assert capsys.readouterr() == ("", "/dev/zero: file too large: expected at most 1000 bytes\n")
