"""``python -m decoder.generate | evaluate | calibrate`` as a person types them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import decoder.session
from decoder import calibrate, evaluate, generate
from decoder.calibration import load_calibration
from decoder.loading import parse_policy
from tests.decoder.reference import TARGET_A, TARGET_B

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "253,5,9,200,31"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def models(deepspec):
    return [
        "--target",
        str(deepspec / "checkpoints" / TARGET_A),
        "--drafter",
        str(deepspec / "checkpoints" / "dspark_vanilla_block7"),
    ]


@pytest.fixture
def prompts(tmp_path):
    """Four prompts of two domains."""
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"domain": domain, "prompt_ids": [253, first, first + 7, 20]}
        for domain, first in (("code", 5), ("math", 60), ("code", 90), ("math", 130))
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return path


@pytest.fixture(scope="module")
def spoken(deepspec, tmp_path_factory):
    """Return a copy of a target with a tokenizer of 256 words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("spoken") / "target"
    shutil.copytree(deepspec / "checkpoints" / TARGET_A, folder)
    folder.chmod(0o755)
    words = {f"w{i}": i for i in range(255)} | {"[UNK]": 255}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.mark.parametrize("name", ("generate", "evaluate", "calibrate"))
def test_help_shows_an_example(name):
    done = subprocess.run(
        [sys.executable, "-m", f"decoder.{name}", "--help"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0
    assert f"python -m decoder.{name} --target" in done.stdout
    for option in ("--seed", "--device", "--dtype", "--json"):
        assert option in done.stdout


def test_generate_in_its_own_process(models, capsys):
    """Twice the same bytes, from another process too, and not a warning on stderr."""
    options = [*models, "--prompt-ids", PROMPT, "--temperature", "1.3", "--max-new-tokens", "12", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "decoder.generate", *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert generate.main(options) == 0
    assert capsys.readouterr().out == done.stdout


def test_generate_tells_tokens_apart(models, capsys, tmp_path):
    options = ["--prompt-ids", PROMPT, "--temperature", "0", "--max-new-tokens", "12", "--json", "out.json", "--rounds"]
    assert generate.main([*models, *options]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "[168 ]59 ~100 ~[3 ]100 101 102 100 26 123 ~79 ~[122 ]123 [79 ]"
    assert out[2] == "accepted draft tokens, [the target's own], ~the first refused of a round~"
    assert "tokens a round (bonus token included)" in out[-2]
    report = json.loads(Path("out.json").read_text())
    assert report["output_ids"] == [168, 59, 3, 100, 101, 102, 100, 26, 123, 122, 123, 79]
    assert sum(row["emitted_tokens"] for row in report["rounds"]) == 11
    assert report["finish_reason"] == "length"
    assert report["accepted_length_tokens"] == pytest.approx(11 / len(report["rounds"]))


def test_generate_without_a_drafter(models, capsys):
    assert generate.main([*models[:2], "--prompt-ids", PROMPT, "--max-new-tokens", "3"]) == 0
    assert "2 rounds, 1.00 tokens a round" in capsys.readouterr().out


def test_seeds(models, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        options = ["--prompt-ids", PROMPT, "--max-new-tokens", "30", "--seed", seed, "--temperature", "1.5"]
        assert generate.main([*models, *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_generate_text(spoken, deepspec, capsys):
    drafter = deepspec / "checkpoints" / "dspark_gated_block7"
    options = [
        "--target",
        str(spoken),
        "--drafter",
        str(drafter),
        "--prompt",
        "w253 w5 w9 w200 w31",
        "--temperature",
        "0",
    ]
    assert generate.main([*options, "--max-new-tokens", "12", "--json", "out.json"]) == 0
    assert json.loads(Path("out.json").read_text())["text"].startswith("w168w59w3w100")
    assert generate.main([*options, "--stop", "w100w101", "--json", "out.json"]) == 0
    report = json.loads(Path("out.json").read_text())
    assert (report["text"], report["finish_reason"]) == ("w168w59w3w100w101", "stop")
    capsys.readouterr()


def test_a_check_that_fails_exits_1(models, capsys, monkeypatch):
    honest = decoder.session.judge

    def wrong(ids, draft, target, luck, position):
        return honest(ids, draft, target.roll(1, 0), luck, position)

    # The target alone stays right: its single row rolls onto itself.
    monkeypatch.setattr(decoder.session, "judge", wrong)
    options = ["--prompt-ids", PROMPT, "--temperature", "0", "--max-new-tokens", "12", "--check", "--json", "out.json"]
    assert generate.main([*models, *options]) == 1
    assert "NOT a near-tie" in capsys.readouterr().out
    assert json.loads(Path("out.json").read_text())["check"]["holds"] is False


@pytest.mark.parametrize(
    "options, message",
    (
        (["--temperature", "-1"], "temperature: expected a finite number of at least 0; got -1.0"),
        (["--top-p", "0"], "top_p: expected above 0 and at most 1; got 0.0"),
        (["--repetition-penalty", "0"], "repetition_penalty: expected a finite number above 0; got 0.0"),
        (["--max-new-tokens", "0"], "request 'prompt': max_new_tokens must be at least 1; got 0"),
        (["--device", "tpu"], "--device: expected cpu, cuda or cuda:N (got 'tpu')"),
        (["--threads", "0"], "--threads: expected at least 1 (got 0)"),
        (["--policy", "dsprak"], "--policy: unknown policy 'dsprak'; known: none, mtp1, fixed"),
        (["--policy", "{kind: fixed, k: 9}"], "k: expected at most the drafter's trained block of 7 (got 9)"),
        (["--policy", "{kind: fixed, kk: 9}"], "--policy:1: kk: unknown key"),
        (["--policy", "{kind: dspark_async, lag: 0}"], "lag: expected at least 1 (got 0)"),
        (["--policy", "oracle"], "policy 'oracle' is shown the outcome before it happens"),
        (["--profile", "nowhere"], "unknown profile 'nowhere'"),
        (["--calibration", "absent.json"], "absent.json: cannot read: no such file or directory"),
        (["--stop", "x"], "request 'prompt': stop strings need a tokenizer"),
        (["--grammar", "a.gbnf"], "request 'prompt': structured output (a grammar) is not supported"),
        (["--draft-tree-width", "3"], "request 'prompt': tree drafts are not supported"),
        (["--check"], "--check: needs --temperature 0"),
        (["--prompt-ids", "1,x"], "--prompt-ids: expected whole numbers with commas between (got '1,x')"),
        (["--prompt-ids", "999"], "request 'prompt': prompt token 999 lies outside the vocabulary of 256"),
        (["--json", "absent/out.json", "--max-new-tokens", "2"], "absent/out.json: cannot write: no such file"),
    ),
)
def test_faults_exit_2_with_one_message(options, message, models, capsys):
    prompt = [] if "--prompt-ids" in options else ["--prompt-ids", PROMPT]
    assert generate.main([*models, *prompt, *options]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_cuda_is_refused_where_there_is_none(models, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert generate.main([*models, "--prompt-ids", PROMPT, "--device", "cuda"]) == 2
    assert "--device: this machine, or this build of torch, has no CUDA device" in capsys.readouterr().err


def test_text_without_a_tokenizer(models, capsys):
    assert generate.main([*models, "--prompt", "hello"]) == 2
    assert "--prompt: the target folder has no tokenizer" in capsys.readouterr().err


def test_policies_as_scenarios_write_them():
    assert parse_policy("dspark").kind == "dspark"
    assert parse_policy("{kind: threshold, min_confidence: 0.6}").min_confidence == 0.6
    assert parse_policy("{kind: batch_table, table: [[1, 3], [4, 1]]}").table == ((1, 3), (4, 1))


def test_load_aware_policies_see_a_profile(models, capsys):
    options = ["--prompt-ids", PROMPT, "--max-new-tokens", "20", "--temperature", "0", "--policy", "dspark"]
    assert generate.main([*models, *options, "--profile", "paper/v4_flash", "--profile-drafter", "dspark"]) == 0
    assert "draft tokens accepted" in capsys.readouterr().out
    assert generate.main([*models, *options, "--profile", "paper/v4_flash", "--profile-drafter", "medusa"]) == 2
    assert "no draft cost for drafter 'medusa'" in capsys.readouterr().err


# evaluate


def test_evaluate(models, prompts, capsys):
    options = ["--prompts", str(prompts), "--temperature", "0", "--max-new-tokens", "24", "--thresholds", "0,0.9"]
    assert evaluate.main([*models, *options, "--json", "out.json", "--out", "plots"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(Path("out.json").read_text())
    assert list(report["domains"]) == ["code", "math", "all"]
    whole, parts = report["domains"]["all"], [report["domains"][name] for name in ("code", "math")]
    for key in ("rounds", "output_tokens", "accepted_draft_tokens", "requests"):
        assert whole[key] == sum(part[key] for part in parts)
    # Per position and in total, the same tokens are counted.
    assert sum(row["held"] for row in whole["conditional_acceptance"]) == whole["accepted_draft_tokens"]
    assert whole["output_tokens"] == 4 + round(whole["accepted_length_tokens"] * whole["rounds"])
    survival = [row["value"] for row in whole["survival"]]
    assert survival == sorted(survival, reverse=True)
    low, high = ([row for row in report["thresholds"] if row["domain"] == "all"][i] for i in (0, 1))
    assert high["verified_tokens_per_round"] < low["verified_tokens_per_round"]
    assert high["acceptance_ratio"] > low["acceptance_ratio"]
    assert high["accepted_tokens_per_round"] <= low["accepted_tokens_per_round"]
    assert f"{whole['accepted_length_tokens']:.2f}" in out
    names = {path.name for path in Path("plots").iterdir()}
    assert {"survival.png", "conditional_acceptance.svg", "threshold_acceptance_ratio.png"} <= names
    assert "wrote" in err


def test_evaluate_with_nothing_verified_has_no_rates(models, prompts, capsys):
    options = ["--prompts", str(prompts), "--max-new-tokens", "5", "--policy", "{kind: threshold, min_confidence: 1.0}"]
    assert evaluate.main([*models, *options, "--json", "out.json"]) == 0
    whole = json.loads(Path("out.json").read_text())["domains"]["all"]
    assert whole["accepted_length_tokens"] == 1
    assert whole["draft_acceptance"]["value"] is None
    assert all(row["value"] is None for row in whole["conditional_acceptance"])
    assert "nan" not in capsys.readouterr().out


def test_evaluate_says_that_top_k_1_is_greedy(models, prompts, capsys):
    options = ["--prompts", str(prompts), "--max-new-tokens", "4", "--top-k", "1", "--json", "out.json"]
    assert evaluate.main([*models, *options]) == 0
    assert json.loads(Path("out.json").read_text())["greedy"] is True
    assert "top-k 1 makes every draw greedy" in capsys.readouterr().err


def test_evaluate_keeps_what_was_finished_on_ctrl_c(models, prompts, capsys, monkeypatch):
    honest = decoder.session.Decoder.admit

    def admit(self, request, reuse=None):
        if request.request_id == "prompt 3":
            raise KeyboardInterrupt
        return honest(self, request, reuse)

    monkeypatch.setattr(decoder.session.Decoder, "admit", admit)
    assert evaluate.main([*models, "--prompts", str(prompts), "--max-new-tokens", "6", "--json", "out.json"]) == 130
    assert "the 2 of 4 prompts that finished" in capsys.readouterr().err
    report = json.loads(Path("out.json").read_text())
    assert report["interrupted"] is True
    assert report["domains"]["all"]["requests"] == 2


@pytest.mark.parametrize(
    "line, message",
    (
        ('{"domain": "x"}', "prompts.jsonl:1: expected an object with either"),
        ('{"prompt_ids": [1], "prompt": "a"}', "prompts.jsonl:1: expected an object with either"),
        (
            '{"prompt_ids": [1], "topic": 3}',
            "prompts.jsonl:1: unknown key; known: domain, prompt, prompt_ids (got 'topic')",
        ),
        ('{"prompt_ids": ["1"]}', "prompts.jsonl:1: prompt_ids: expected a list of whole numbers"),
        ('{"prompt_ids": [1], "domain": ""}', "prompts.jsonl:1: domain: expected a name"),
        ("{", "prompts.jsonl:1: not JSON"),
        ("", "prompts.jsonl: holds no prompt"),
        ('{"prompt_ids": [999]}', "request 'prompt 1': prompt token 999 lies outside"),
    ),
)
def test_bad_prompt_files(line, message, models, prompts, capsys):
    prompts.write_text(line)
    assert evaluate.main([*models, "--prompts", str(prompts)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    (
        (["--thresholds", "0,2"], "--thresholds: expected numbers from 0 to 1 (got 2)"),
        (["--thresholds", "a"], "--thresholds: expected numbers with commas between"),
        (["--concurrency", "0"], "--concurrency: expected at least 1 (got 0)"),
    ),
)
def test_evaluate_faults(options, message, models, prompts, capsys):
    assert evaluate.main([*models, "--prompts", str(prompts), *options]) == 2
    assert message in capsys.readouterr().err


def test_evaluate_needs_a_drafter_and_calibrate_too(models, prompts, capsys):
    assert evaluate.main([*models[:2], "--prompts", str(prompts)]) == 2
    assert calibrate.main([*models[:2], "--prompts", str(prompts), "--out", "c.json"]) == 2
    assert capsys.readouterr().err.count("--drafter: missing") == 2


# calibrate


def test_calibrate_and_use_it(models, prompts, capsys):
    options = ["--prompts", str(prompts), "--max-new-tokens", "60", "--ignore-eos", "--out", "c.json"]
    assert calibrate.main([*models, *options]) == 2
    err = capsys.readouterr().err
    assert "position 7 has" in err
    assert "at least 400 are needed" in err
    assert not Path("c.json").exists()
    few = ["--min-outcomes", "5", "--plots", "plots", "--json", "out.json"]
    assert calibrate.main([*models, *options, *few]) == 0
    out = capsys.readouterr().out
    assert "mean ECE" in out
    found = load_calibration(Path("c.json"))
    assert (len(found.temperatures), found.drafter, found.domains) == (7, "dspark", ("code", "math"))
    assert Path("plots/reliability_1.png").exists()
    assert json.loads(Path("out.json").read_text())["calibration"]["temperatures"] == list(found.temperatures)
    assert generate.main([*models, "--prompt-ids", PROMPT, "--calibration", "c.json", "--max-new-tokens", "9"]) == 0
    capsys.readouterr()


def test_a_calibration_of_another_drafter_is_refused(models, prompts, capsys, deepspec):
    options = ["--prompts", str(prompts), "--max-new-tokens", "60", "--out", "c.json", "--min-outcomes", "1"]
    assert calibrate.main([*models, *options, "--ignore-eos"]) == 0
    other = [*models[:3], str(deepspec / "checkpoints" / "dflash_block7")]
    assert generate.main([*other, "--prompt-ids", PROMPT, "--calibration", "c.json"]) == 2
    assert "c.json: drafter: was fitted for a dspark drafter; this one is dflash" in capsys.readouterr().err
    assert calibrate.main([*models, *options, "--held-out", "1"]) == 2
    assert "--held-out: expected a share between 0 and 1" in capsys.readouterr().err


def test_a_drafter_for_another_target(models, deepspec, capsys):
    other = ["--target", str(deepspec / "checkpoints" / TARGET_B), *models[2:]]
    assert generate.main([*other, "--prompt-ids", PROMPT]) == 2
    assert "num_target_layers: 4, but the target has layers: 6" in capsys.readouterr().err
