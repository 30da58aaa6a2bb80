"""Every kind of fault in a profile file, with the message its author reads."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profiles.errors import ProfileError
from profiles.files import find_profile, known_profiles, load_profile, save_profile

Json = dict[str, Any]

SOURCED = {"origin": "fitted", "source": "a test"}
PARAMETRIC = {
    "kind": "parametric",
    "survival": {"values": [0.8, 0.6], "provenance": SOURCED},
    "spread": {"request_sd": 0.1, "token_sd": 0.1, "provenance": SOURCED},
    "confidence": {"raw_temperature": [1, 1], "provenance": SOURCED},
}
GOOD: Json = {
    "format": "dspark-profile/1",
    "name": "toy",
    "description": "a toy",
    "step_time": {
        "verify": {"kind": "law", "floor_s": 0.01, "per_unit_s": 1e-5, "max_size": 100, "provenance": SOURCED},
        "prefill": {"kind": "linear", "floor_s": 0.01, "per_token_s": 1e-5, "provenance": SOURCED},
    },
    "acceptance": {"toy": {"kind": "block", "trained_length": 2, "domains": {"any": PARAMETRIC}}},
}


def verify(profile: Json) -> Json:
    found: Json = profile["step_time"]["verify"]
    return found


def law(profile: Json) -> Json:
    found: Json = profile["acceptance"]["toy"]["domains"]["any"]
    return found


def with_law(**changes: object) -> Callable[[Json], object]:
    return lambda profile: verify(profile).update(changes)


def with_prefill(**changes: object) -> Callable[[Json], object]:
    return lambda profile: profile["step_time"]["prefill"].update(changes)


def with_segments(*segments: Json) -> Callable[[Json], object]:
    table = {"kind": "table", "segments": list(segments), "provenance": SOURCED}
    return lambda profile: profile["step_time"].update(verify=table)


def segment(**changes: object) -> Json:
    return {"between": "round_up", "sizes": [1, 8], "seconds": [0.1, 0.2], **changes}


FAULTS: list[tuple[Callable[[Json], object], str]] = [
    # provenance
    (lambda p: verify(p).pop("provenance"), "6: step_time.verify.provenance: missing"),
    (
        with_law(provenance={"origin": "assumed"}),
        '11: step_time.verify.provenance: origin \'assumed\' needs a reason (got {"origin": "assumed"})',
    ),
    (
        with_law(provenance={"origin": "fitted", "reason": "so"}),
        '11: step_time.verify.provenance: origin \'fitted\' needs a source (got {"origin": "fitted", "reason": "so"})',
    ),
    (
        with_law(provenance={"origin": "guessed", "source": "x"}),
        "12: step_time.verify.provenance.origin: expected 'measured', 'fitted', 'transcribed', 'derived' or 'assumed' "
        "(got 'guessed')",
    ),
    # numbers
    (with_law(floor_s=float("nan")), "8: step_time.verify.floor_s: expected a number (got 'NaN')"),
    (with_law(floor_s=float("-inf")), "8: step_time.verify.floor_s: expected a number (got '-Infinity')"),
    (with_law(floor_s=-1), "8: step_time.verify.floor_s: expected at least 0 (got -1)"),
    (with_law(floor_s="3 ms"), "8: step_time.verify.floor_s: expected a number (got '3 ms')"),
    (with_law(floor_s=True), "8: step_time.verify.floor_s: expected a number (got true)"),
    (with_law(max_size=10.5), "10: step_time.verify.max_size: expected a whole number (got 10.5)"),
    (with_law(min_size=200), "6: step_time.verify: min_size must not exceed max_size: 200 and 100"),
    (with_law(beyond="guess"), "15: step_time.verify.beyond: expected 'refuse' or 'extrapolate' (got 'guess')"),
    # keys
    (
        with_law(flor_s=1),
        "15: step_time.verify.flor_s: unknown key; did you mean 'floor_s'? known: kind, floor_s, per_unit_s, "
        "saturating_s, saturation, min_size, max_size, beyond, provenance",
    ),
    (with_law(kind="lawn"), "6: step_time.verify: unknown kind 'lawn'; known: table, law"),
    (lambda p: p.pop("name"), "1: name: missing"),
    (lambda p: p.update(format="dspark-profile/2"), "2: format: expected 'dspark-profile/1' (got 'dspark-profile/2')"),
    (
        lambda p: (p.pop("step_time"), p.update(acceptance={})),
        "1: a profile needs step_time, acceptance or both",
    ),
    # prompts
    (
        with_prefill(per_request_s=-0.001),
        "24: step_time.prefill.per_request_s: expected above 0 (got -0.001)",
    ),
    (with_prefill(per_request_s=0), "24: step_time.prefill.per_request_s: expected above 0 (got 0)"),
    (with_prefill(per_request_s="1 ms"), "24: step_time.prefill.per_request_s: expected a number (got '1 ms')"),
    (with_prefill(per_token_s=-1e-5), "19: step_time.prefill.per_token_s: expected at least 0 (got -1e-05)"),
    (
        with_prefill(per_token_s=0),
        "16: step_time.prefill: a prompt must cost something: per_token_s is 0 and there is no per_request_s",
    ),
    (
        lambda p: p["step_time"].update(prefill={"kind": "as_verify", "per_request_s": 1, "provenance": SOURCED}),
        "18: step_time.prefill.per_request_s: unknown key; known: kind, provenance",
    ),
    # tables
    (with_segments(segment(sizes=[8, 1])), "9: step_time.verify.segments[0]: sizes must rise: 1 follows 8"),
    (with_segments(segment(sizes=[8, 8])), "9: step_time.verify.segments[0]: sizes must rise: 8 follows 8"),
    (
        with_segments(segment(sizes=[1, 2, 3])),
        "9: step_time.verify.segments[0]: sizes and seconds differ in length: 3 and 2",
    ),
    (
        with_segments(segment(seconds=[0, 0.2])),
        "16: step_time.verify.segments[0].seconds[0]: expected above 0 (got 0)",
    ),
    (
        with_segments(segment(sizes=[0, 8])),
        "12: step_time.verify.segments[0].sizes[0]: expected at least 1 (got 0)",
    ),
    (with_segments(segment(), segment()), "6: step_time.verify: segments overlap: 1 follows 8"),
    (with_segments(), "8: step_time.verify.segments: expected at least 1 item (got [])"),
    # acceptance
    (
        lambda p: law(p)["survival"].update(values=[0.5, 0.6]),
        "33: acceptance.toy.domains.any.survival: survival must not rise: 0.6 at position 2 follows 0.5",
    ),
    (
        lambda p: law(p)["survival"].update(values=[1.5, 0.6]),
        "35: acceptance.toy.domains.any.survival.values[0]: expected at most 1 (got 1.5)",
    ),
    (
        lambda p: law(p)["survival"].update(values=[0.5]),
        "27: acceptance.toy: domains.any.survival.values has length 1; trained_length is 2",
    ),
    (
        lambda p: law(p)["confidence"].update(raw_temperature=[1, 1, 1]),
        "27: acceptance.toy: domains.any.confidence.raw_temperature has length 3; trained_length is 2",
    ),
    (
        lambda p: law(p)["confidence"].update(raw_temperature=[0, 1]),
        "53: acceptance.toy.domains.any.confidence.raw_temperature[0]: expected above 0 (got 0)",
    ),
    (
        lambda p: p["acceptance"]["toy"].update(domains={}),
        "30: acceptance.toy.domains: expected at least 1 item (got {})",
    ),
    (
        lambda p: p["acceptance"]["toy"]["domains"].update(
            any={"kind": "bank", "file": "../x.npz", "sha256": "0" * 64, "provenance": SOURCED}
        ),
        "33: acceptance.toy.domains.any.file: expected text of the pattern ^[A-Za-z0-9_.-]+\\.npz$ (got '../x.npz')",
    ),
]


@pytest.mark.parametrize(("change", "message"), FAULTS, ids=[message[:60] for _, message in FAULTS])
def test_each_fault_has_its_message(change: Callable[[Json], object], message: str, tmp_path: Path) -> None:
    profile = copy.deepcopy(GOOD)
    change(profile)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile, indent=1))
    with pytest.raises(ProfileError) as fault:
        load_profile(path)
    assert str(fault.value) == f"{path}:{message}"


def test_every_fault_is_reported_at_once(tmp_path: Path) -> None:
    profile = copy.deepcopy(GOOD)
    verify(profile).update(floor_s=-1)
    law(profile)["survival"].pop("provenance")
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile, indent=1))
    with pytest.raises(ProfileError) as fault:
        load_profile(path)
    assert [found.key for found in fault.value.faults] == [
        "step_time.verify.floor_s",
        "acceptance.toy.domains.any.survival.provenance",
    ]


TEXT = json.dumps(GOOD, indent=1)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", ":1: empty file; expected a mapping of keys to values"),
        (b" \n\n", ":1: empty file; expected a mapping of keys to values"),
        (b"[1, 2]", ":1: expected a mapping of keys to values (got [1, 2])"),
        (
            TEXT[: TEXT.index("per_token_s")].encode(),
            ":19: syntax error: found unexpected end of the file, while scanning a quoted text (from line 19)",
        ),
        (
            TEXT[: TEXT.index('"per_token_s"')].encode(),
            ":19: syntax error: expected the node content, but found the end of the file, while parsing a flow node "
            "(from line 19)",
        ),
        (TEXT.replace("a toy", "\xff").encode("latin-1"), ":4: not UTF-8 text (byte 0xff)"),
        (TEXT.encode("utf-16"), ":1: not UTF-8 text (byte 0xff)"),
        (
            TEXT.replace(' "name": "toy",', ' "name": "toy",\n "name": "boy",').encode(),
            ":4: duplicate key 'name'",
        ),
    ],
    ids=["empty", "blank", "list", "cut in a word", "cut between", "latin-1", "utf-16", "duplicate key"],
)
def test_what_is_no_profile_at_all(raw: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(raw)
    with pytest.raises(ProfileError) as fault:
        load_profile(path)
    assert str(fault.value) == f"{path}{message}"


def test_a_truncated_file_is_never_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for length in range(0, len(TEXT) - 1, 37):
        path.write_text(TEXT[:length])
        with pytest.raises(ProfileError):
            load_profile(path)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "no.json", "no such file or directory"), (tmp_path, "is a directory")):
        with pytest.raises(ProfileError) as fault:
            load_profile(path)
        assert str(fault.value) == f"{path}: cannot read: {problem}"


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ProfileError) as fault:
        find_profile("paper/v4_flsh")
    known = ", ".join(known_profiles())
    hint = "did you mean 'paper/v4_flash'?"
    assert str(fault.value) == f"unknown profile 'paper/v4_flsh'; {hint} known: {known}, or a path that ends in .json"


def test_a_file_that_is_no_profile_is_not_taken_for_a_name(tmp_path):
    bank = tmp_path / "bank.npz"
    bank.write_bytes(b"")
    with pytest.raises(ProfileError, match=r"bank\.npz: is no profile: expected a file whose name ends in \.json$"):
        find_profile(str(bank))


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    first = tmp_path / "p.json"
    first.write_text(TEXT)
    profile = load_profile(first)
    second = tmp_path / "q.json"
    save_profile(profile, second)
    assert load_profile(second) == profile
    assert sorted(file.name for file in tmp_path.iterdir()) == ["p.json", "q.json"]
