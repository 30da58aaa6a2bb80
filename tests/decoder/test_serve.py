"""A scenario on the real engine: the simulator's file in, the simulator's records, table and plots out."""

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from decoder.checkpoint import save_net
from decoder.serve import check_scenario, main
from profiles.files import SHIPPED
from sim.loading import load_scenario
from sim.records import REQUEST_COLUMNS, STEP_COLUMNS
from sim.run import main as simulate
from tests.decoder.engines import drafter_of, transformer

SCENARIO = """
name: lab
seed: 3
horizon: 1500ms
fleet:
  replicas: 1
  step_profile: engines/qwen3_8b_h20
  acceptance_profile: paper/qwen3_8b
  kv_cache: 64KiB
  kv_bytes_per_token: 64
  gpus_per_replica: 1
  max_context_tokens: 96
  block_tokens: 4
  max_running: 4
  max_batch_tokens: 64
  prefill: {kind: chunked, chunk_tokens: 16}
policies: [none, {kind: fixed, k: 3, drafter: dflash}]
arrivals: {kind: closed_loop, users: 2}
domains: {code: 0.5, chat: 0.5}
lengths: {prompt: {kind: fixed, tokens: 6}, output: {kind: fixed, tokens: 7}}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Write a target, a drafter, prompts and a scenario."""
    folder = tmp_path_factory.mktemp("serve")
    transformer().model.float().save_pretrained(folder / "target")
    save_net(drafter_of("dflash").net.float(), folder / "dflash")
    prompts = [{"domain": "code", "prompt_ids": [1, 2, 3]}, {"domain": "chat", "prompt_ids": [4, 5]}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (folder / "lab.yaml").write_text(SCENARIO)
    return folder


def arguments(made, *more):
    folders = [str(made / "lab.yaml"), "--target", str(made / "target"), "--drafter", f"dflash={made / 'dflash'}"]
    return [*folders, "--prompts", str(made / "prompts.jsonl"), *more]


def test_a_scenario_runs_on_the_engine(made, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(arguments(made, "--out", str(out), "--json", str(tmp_path / "r.json"))) == 0
    printed = capsys.readouterr().out
    assert "fixed drafter=dflash k=3" in printed
    assert "served by the engine" in printed
    homes = [path for path in out.iterdir() if path.is_dir()]
    assert len(homes) == 2
    for home in homes:
        requests, steps = (pq.read_table(home / f"{name}.parquet") for name in ("requests", "steps"))
        assert tuple(requests.column_names) == REQUEST_COLUMNS
        assert tuple(steps.column_names) == STEP_COLUMNS
        done = requests.filter(np.array(requests["status"].to_pylist()) == "finished")
        assert set(done["output_tokens"].to_pylist()) == {7}
        assert set(requests["prompt_tokens"].to_pylist()) == {6}
        assert len(done) > 2
    assert json.loads((out / "manifest.json").read_text())["engine"] == "decoder"
    assert len(json.loads((tmp_path / "r.json").read_text())["comparison"]) == 2
    assert (out / "timeline.png").exists()
    assert not out.with_name("run.rows").exists()


@pytest.mark.parametrize(
    "more, message",
    (
        (["--set", "fleet.replicas=2"], r"fleet.replicas: one engine is one replica \(got 2\)"),
        (["--drafter", "x"], "no such folder|neither"),
        (["--calibration", "mtp=x"], "--calibration: expected NAME=FILE, a drafter's name first"),
        (["--threads", "0"], r"--threads: expected at least 1 \(got 0\)"),
        (["--texts", "0"], r"--texts: expected at least 1 \(got 0\)"),
        (["--temperature", "-1"], r"--temperature: expected at least 0 \(got -1\.0\)"),
        (["--temperature", "nan"], r"--temperature: expected at least 0 \(got nan\)"),
        (["--graph-sizes", "a,b"], r"--graph-sizes: expected whole numbers with commas between \(got 'a,b'\)"),
        (["--graph-sizes", "8,4"], r"--graph-sizes: expected numbers of at least 1 that rise \(got '8,4'\)"),
        (["--graph-sizes", "0"], r"--graph-sizes: expected numbers of at least 1 that rise \(got '0'\)"),
        (["--graph-sizes", "1,65"], r"--graph-sizes: 65 has no effect: no step exceeds 64 tokens"),
    ),
)
def test_what_does_not_fit_is_said(made, tmp_path, capsys, more, message):
    assert main(arguments(made, "--out", str(tmp_path / "run"), *more)) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_without_a_scenario_one_is_named_that_it_can_serve(capsys):
    assert main([]) == 2
    assert "SCENARIO: missing: a scenario file of one replica" in capsys.readouterr().err
    scenario, _ = load_scenario(SHIPPED.parent / "scenarios" / "smollm2_engine.yaml")
    check_scenario(scenario)


def test_a_drafter_that_policies_need_must_be_given(made, tmp_path, capsys):
    given = [part for part in arguments(made, "--out", str(tmp_path / "run")) if "dflash" not in part]
    given.remove("--drafter")
    assert main(given) == 2
    assert "--drafter: policies draft with 'dflash'; given: none" in capsys.readouterr().err


def test_what_preemption_costs_is_what_the_simulator_says(made, tmp_path, capsys):
    """The same rows in all, a preempted request's last token being read a step later.

    The simulator reads all tokens of a preempted request again and draws the next one from the last. The engine must
    not draw there: the next token would have been judged against a draft, and the text would show that its request was
    preempted. So it reads all tokens but the last, which is the first row of the round that follows.
    """
    (tmp_path / "two.csv").write_text("arrived_s,prompt_tokens,output_tokens\n0,6,14\n0,6,14\n")
    scenario = SCENARIO.replace("  acceptance_profile: paper/qwen3_8b\n", "").replace("64KiB", "1792B")
    head, _, tail = scenario.partition("policies:")
    assert tail
    text = f"{head}policies: [none]\narrivals: {{kind: replay, path: two.csv, ties: keep}}\n"
    (tmp_path / "lab.yaml").write_text(text.replace("horizon: 1500ms", "horizon: 60s"))
    file = str(tmp_path / "lab.yaml")
    more = ["--target", str(made / "target"), "--prompts", str(made / "prompts.jsonl"), "--out"]
    assert main([file, *more, str(tmp_path / "engine")]) == 0
    assert simulate([file, "--out", str(tmp_path / "simulated")]) == 0
    capsys.readouterr()
    found = []
    for name in ("engine", "simulated"):
        home = tmp_path / name / "none"
        requests, steps = (pq.read_table(home / f"{rows}.parquet") for rows in ("requests", "steps"))
        assert requests["output_tokens"].to_pylist() == [14, 14]
        assert requests["preemptions"].to_pylist() == [0, 1]
        found.append({column: np.array(steps[column]) for column in ("prompt_tokens", "batch_tokens", "output_tokens")})
    ours, theirs = found
    # Nothing differs but the step of the return, and the one row that goes over to the next.
    assert ours["prompt_tokens"].sum() == theirs["prompt_tokens"].sum() - 1
    assert ours["batch_tokens"].sum() == theirs["batch_tokens"].sum() + 1
    differ = np.flatnonzero(ours["prompt_tokens"][: theirs["prompt_tokens"].size] != theirs["prompt_tokens"])
    assert differ.size == 1
    back = differ[0]
    assert ours["output_tokens"][back] == theirs["output_tokens"][back] - 1
    assert len(ours["prompt_tokens"]) == len(theirs["prompt_tokens"]) + 1
