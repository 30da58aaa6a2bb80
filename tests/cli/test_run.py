"""``python -m sim.run``: what it prints and what it writes."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from profiles.files import known_profiles
from sim.run import main
from sim.verify import POLICIES
from tests.helpers.scenario import TINY, changed

ROOT = Path(__file__).parents[2]
PLOTS = {f"{name}.{kind}" for name in ("frontier", "budget", "timeline") for kind in ("png", "svg")}
TRACE = "arrived_s,prompt_tokens,output_tokens\n" + "".join(f"{i / 7:.3f},{40 + i},{10 + i}\n" for i in range(9))
REPLAY = changed("{kind: poisson, rate_per_s: 4}", "{kind: replay, path: t.csv}").partition("lengths:")[0]


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_run_prints_a_table_and_fills_a_folder(run, here):
    ended = run(TINY, plots=True)
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0].startswith("tiny: 1 replica on ")
    table = [line for line in lines if line.startswith(("policy ", "none ", "dspark "))]
    assert [line.split()[0] for line in table] == ["policy", "none", "dspark"]
    assert "runs/tiny/" in ended.out
    assert set(tree(here / "runs")) == {
        f"tiny/{name}"
        for name in {
            "manifest.json",
            "comparison.csv",
            *PLOTS,
            *(
                f"{policy}/{name}"
                for policy in ("none", "dspark")
                for name in ("requests.parquet", "steps.parquet", "summary.json")
            ),
        }
    }
    rows = list(csv.DictReader((here / "runs/tiny/comparison.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["policy"] for row in rows] == ["none", "dspark"]
    requests = [pq.read_table(here / f"runs/tiny/{policy}/requests.parquet") for policy in ("none", "dspark")]
    assert requests[0]["arrived_s"] == requests[1]["arrived_s"]
    assert requests[0].num_rows == float(rows[0]["arrived"]) > 0


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(run, here):
    text = TINY + "replications: 2\n"
    first = run(text, plots=True)
    (here / "runs/tiny").rename(here / "first")
    assert run(text, plots=True).out == first.out
    assert tree(here / "runs/tiny") == tree(here / "first")
    assert run(text, "--seed", "1").out != first.out
    assert load(here / "runs/tiny/manifest.json")["seed"] == 1


def test_the_manifest_says_all_that_the_results_depend_on_and_nothing_else(run, here):
    run(TINY, plots=True)
    manifest = load(here / "runs/tiny/manifest.json")
    assert list(manifest) == [
        "format",
        "scenario",
        "seed",
        "profiles",
        "provenance",
        "versions",
        "trace_rows",
        "caveats",
    ]
    assert manifest["format"] == "dspark-run/1"
    assert manifest["scenario"]["fleet"]["max_running"] == 256
    assert list(manifest["profiles"]) == ["paper/v4_flash"]
    assert {"python", "numpy", "dspark-sim"} <= set(manifest["versions"])
    assert all(one["origin"] for one in manifest["provenance"].values())
    for name, content in tree(here / "runs/tiny").items():
        assert str(here).encode() not in content, f"{name} names a folder of this machine"
        assert str(ROOT).encode() not in content, f"{name} names a folder of this machine"


def test_a_trace_is_found_from_where_the_command_is_given(here, capsys, monkeypatch):
    monkeypatch.setattr("analysis.session.draw_plots", lambda *_: None)
    (here / "scenarios").mkdir()
    (here / "traces").mkdir()
    (here / "scenarios/s.yaml").write_text(REPLAY)
    (here / "traces/mine.csv").write_text(TRACE)
    assert main(["scenarios/s.yaml", "--trace", "traces/mine.csv", "--jobs", "1", "--strict"]) == 0
    assert "trace rows: 9 read" in capsys.readouterr().out
    manifest = load(here / "runs/tiny/manifest.json")
    assert manifest["scenario"]["arrivals"]["path"] == "../traces/mine.csv"
    assert main(["scenarios/s.yaml", "--trace", str(here / "traces/mine.csv"), "--dry-run"]) == 0
    assert f"path: {here}/traces/mine.csv" in capsys.readouterr().out


def test_an_unusable_row_is_counted_or_refused(run, refused, here):
    (here / "t.csv").write_text(TRACE + "1.9,0,5\n")
    assert "trace rows: 10 read, 1 zero_prompt" in run(REPLAY, "--out", "counted").out
    assert refused(REPLAY, "--strict") == [
        "t.csv:11: prompt_tokens: expected a whole number of tokens from 1 to 1000000000 (got 0)"
    ]
    (here / "t.csv").unlink()
    (fault,) = refused(REPLAY)
    assert fault.endswith(": arrivals.path: no such file (got 't.csv')")
    assert refused(REPLAY, "--trace", "gone.csv") == ["--trace: arrivals.path: no such file (got 'gone.csv')"]


def test_settings_are_laid_over_the_file_one_after_the_other(run):
    options = "--set fleet.replicas=2 --set fleet.router.kind=least_kv --set policies[1].confidence=raw --seed 3"
    out = run(TINY, *options.split(), "--set", "horizon=4s", "--set", "fleet.replicas=3", "--dry-run").out
    for line in ("seed: 3", "horizon: 4s", "  replicas: 3", "    kind: least_kv", "  confidence: raw"):
        assert line in out.splitlines()
    assert run(TINY, "--replications", "3", "--set", "name=2024-01-01", "--dry-run").out.startswith(
        "name: '2024-01-01'\nseed: 0\nreplications: 3\n"
    )


def test_policies_are_chosen_by_kind_and_by_label(run):
    text = changed("[none, dspark]", "[{kind: fixed, k: 3}, {kind: fixed, k: 2}, dspark]")

    def chosen(names: str) -> list[str]:
        out = run(text, "--policies", names, "--dry-run").out
        section = out[out.index("policies:") : out.index("arrivals:")].splitlines()[1:]
        return [line for line in section if "kind" in line or " k:" in line]

    assert chosen("fixed") == ["- kind: fixed", "  k: 3", "- kind: fixed", "  k: 2"]
    assert chosen("dspark, fixed k=2") == ["- kind: dspark", "- kind: fixed", "  k: 2"]
    assert chosen("none,mtp1") == ["- kind: none", "- kind: mtp1"]


def test_json_holds_the_numbers_of_the_table(run, here):
    ended = run(TINY, "--json", "c.json")
    comparison = load(here / "c.json")["comparison"]
    assert load(here / "c.json")["scenario"] == "tiny"
    assert [row["policy"] for row in comparison] == ["none", "dspark"]
    for row in comparison:
        (line,) = (line for line in ended.out.splitlines() if line.startswith(row["policy"] + " "))
        assert line.split()[1] == f"{row['output_tokens_per_s_per_gpu']:.0f}"
        assert all(value is None or isinstance(value, str) or math.isfinite(value) for value in row.values())
    assert run(TINY, "--json", "runs/tiny/again.json").code == 0
    assert load(here / "runs/tiny/again.json") == load(here / "c.json")


def test_an_earlier_run_is_replaced_and_an_empty_folder_filled(run, here):
    (here / "mine").mkdir()
    assert run(TINY, "--out", "mine").code == 0
    assert run(TINY, "--out", "mine", "--policies", "none").code == 0
    assert (here / "mine/none").is_dir()
    assert not (here / "mine/dspark").exists()
    assert [path.name for path in here.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError], ids=["Ctrl-C", "a bug"])
def test_what_stops_half_way_leaves_the_earlier_run_as_it_was(run, here, monkeypatch, fault):
    run(TINY)
    before = tree(here)

    def fail(*_: object) -> None:
        raise fault("stop")

    monkeypatch.setattr("sim.session.write_csv", fail)
    if fault is RuntimeError:  # ours: it keeps its traceback
        with pytest.raises(RuntimeError):
            run(TINY, "--seed", "1")
    else:
        ended = run(TINY, "--seed", "1")
        assert (ended.code, ended.out, ended.err) == (130, "", "interrupted\n")
    assert tree(here) == before


def test_a_sweep_and_replications_have_a_folder_each(run, here):
    text = TINY + "replications: 2\nsweep: {key: arrivals.rate_per_s, values: [2, 4]}\n"
    ended = run(text, "--policies", "none")
    assert ended.code == 0
    assert "arrivals.rate_per_s" in ended.out
    assert {path for path in tree(here / "runs/tiny/none") if path.endswith("steps.parquet")} == {
        f"rate_per_s_{value}/replication_{i}/steps.parquet" for value in (2, 4) for i in (0, 1)
    }


def test_no_arrival_at_all_is_a_result_too(run):
    ended = run(changed("rate_per_s: 4", "rate_per_s: 0.000001"))
    assert (ended.code, ended.err) == (0, "")
    assert "nan" not in ended.out.lower()


@pytest.mark.parametrize(
    ("words", "key"), [(["s.yaml"], "SCENARIO"), (["--dry-run"], "--dry-run"), (["--set", "seed=3"], "--set")]
)
def test_list_stands_alone(words, key, capsys):
    assert main(["--list", *words]) == 2
    assert capsys.readouterr().err == f"{key}: has no effect beside --list\n"


def test_list_names_policies_profiles_and_scenarios_with_their_questions(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["policies", "profiles", "scenarios"]
    for kind in POLICIES.known():
        assert any(line.split()[0] == kind and len(line.split()) > 3 for line in lines if line.startswith("  "))
    for name in known_profiles():
        assert f"  {name}" in lines
    for path in (ROOT / "scenarios").glob("*.yaml"):
        (line,) = (line for line in lines if f"scenarios/{path.name} " in line)
        assert line.endswith("?")


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "python -m sim.run scenarios/flash_peak.yaml" in capsys.readouterr().out
