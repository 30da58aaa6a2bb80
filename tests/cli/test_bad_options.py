"""A command line at fault: what is printed names the option."""

import pytest

from sim.run import main
from tests.helpers.scenario import TINY, changed

FLEET = (
    "known: replicas, profile, step_profile, acceptance_profile, kv_cache, gpus_per_replica, kv_bytes_per_token, "
    "max_context_tokens, block_tokens, max_running, max_batch_tokens, max_waiting, prefill, router"
)
KNOWN = "known: none, dspark, mtp1, fixed, threshold, batch_table, dspark_async, oracle"
FOREIGN = "exists and is not a run's folder; give another --out"

OPTIONS = [
    ("--set fleet.replicas", "--set: expected key=value such as fleet.replicas=16 (got 'fleet.replicas')"),
    ("--set =3", "--set: expected key=value such as fleet.replicas=16 (got '=3')"),
    ("--set fleet..x=3", "--set: expected key=value such as fleet.replicas=16 (got 'fleet..x=3')"),
    ("--set fleet.replcas=3", f"--set: fleet.replcas: unknown key; did you mean 'replicas'? {FLEET}"),
    ("--set fleet.replicas=", "--set: fleet.replicas: expected a whole number (got null)"),
    ("--set fleet.replicas='3'", "--set: fleet.replicas: expected a whole number (got '3')"),
    ("--set fleet.replicas=0", "--set: fleet.replicas: expected at least 1 (got 0)"),
    ("--set fleet=3", "--set: fleet: expected a mapping of keys to values (got 3)"),
    ("--set fleet[0]=3", "--set: fleet[0]: no such key"),
    ("--set name=[1", "--set: name: not a YAML value (got '[1')"),
    ("--set name=!x", "--set: name: not a YAML value (got '!x')"),
    ("--set policies[9]=none", "--set: policies[9]: no such key"),
    ("--set policies[9].k=3", "--set: policies[9].k: no such key"),
    ("--set policies[1].k=3", "--set: policies[1].k: unknown key; known: kind, drafter, confidence"),
    ("--set policies=[]", "--set: policies: expected at least 1 item (got [])"),
    ("--set policies=[none,none]", "--set: policies[1]: same as policies[0] ('none')"),
    ("--set arrivals.rate_per_s=.nan", "--set: arrivals.rate_per_s: expected a finite number (got .nan)"),
    ("--set fleet.kv_cache=1B", "--set: fleet.kv_cache: holds no block: one takes 224000B (got 1B)"),
    ("--seed -1", "--seed: expected at least 0 (got -1)"),
    ("--replications 0", "--replications: expected at least 1 (got 0)"),
    ("--jobs 0", "--jobs: expected at least 1 (got 0)"),
    ("--policies dsprak", f"--policies: unknown policy 'dsprak'; did you mean 'dspark'? {KNOWN}"),
    ("--policies none,", f"--policies: unknown policy ''; {KNOWN}"),
    ("--policies none,none", "--policies: 'none' is given twice"),
    ("--policies fixed", "--policies: 'fixed' needs k; write it into the scenario"),
    ("--trace t.csv", "--trace: has no effect: s.yaml replays no trace, its arrivals are of kind 'poisson'"),
    ("--strict", "--strict: has no effect: s.yaml reads no trace"),
    ("--json no/such/file.json", "no/such/file.json: cannot write: no such directory"),
    ("--json .", ".: cannot write: is a directory"),
    ("--out s.yaml", f"s.yaml: {FOREIGN}"),
    ("--out s.yaml/x", "s.yaml/x: cannot write: not a directory"),
    ("--out .", f".: {FOREIGN}"),
    ("--out /", f"/: {FOREIGN}"),
    (f"--out {'x' * 300}", f"{'x' * 300}: cannot write: file name too long"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[options[:40] for options, _ in OPTIONS])
def test_a_fault_in_an_option_has_its_message(refused, options, message):
    assert refused(TINY, *options.split()) == [message]


def test_a_setting_of_the_swept_key_has_no_effect(refused):
    assert refused(TINY + "sweep: {key: fleet.replicas, values: [1, 2]}\n", "--set", "fleet.replicas=3") == [
        "--set: fleet.replicas: has no effect: the scenario sweeps it; set sweep.values"
    ]


def test_a_fault_of_the_file_keeps_its_line_beside_settings(refused):
    text = changed("[none, dspark]", "[none, {kind: fixed, k: 9}]")
    assert refused(text, "--set", "fleet.replicas=2", "--policies", "fixed") == [
        "s.yaml:7: policies[0].k: expected at most the drafter's trained block of 5 (got 9)"
    ]


def test_no_scenario_and_no_number(here, capsys):
    assert main([]) == 2
    assert capsys.readouterr() == (
        "",
        "SCENARIO: missing: a scenario file, for example scenarios/flash_peak.yaml\n",
    )
    with pytest.raises(SystemExit) as ended:
        main(["s.yaml", "--seed", "three"])
    assert ended.value.code == 2
    assert "argument --seed: invalid int value: 'three'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "manifest", [None, "{", "[]", '{"name": "some app", "format": 2}', '{"format": "other/1"}'], ids=str
)
def test_a_folder_of_something_else_is_left_alone(refused, here, manifest):
    (here / "mine").mkdir()
    (here / "mine" / "thesis.tex").write_text("my life's work")
    if manifest is not None:
        (here / "mine" / "manifest.json").write_text(manifest)
    assert refused(TINY, "--out", "mine") == [f"mine: {FOREIGN}"]
    assert (here / "mine" / "thesis.tex").read_text() == "my life's work"


def test_an_empty_working_folder_is_not_replaced(tiny_file, here, monkeypatch, capsys):
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    assert main(["../s.yaml", "--out", "."]) == 2
    assert capsys.readouterr() == ("", ".: is or holds the folder that we are in; give another --out\n")


def test_a_folder_that_cannot_be_written(refused, monkeypatch):
    def locked(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", locked)
    assert refused(TINY, "--out", "mine") == ["mine: cannot write: permission denied"]
