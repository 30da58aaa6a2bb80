"""`python -m decoder.bank`: from text and checkpoints to a profile that the simulator reads."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from decoder import evaluate
from decoder.bank import main
from decoder.checkpoint import make_net, save_net
from decoder.config import DSPARK, MTP, DraftConfig
from decoder.lab.store import Meta, open_folder, save_shard, shard_path
from decoder.lab.targets import target_sha256
from decoder.lab.writing import Prompt, write_group
from decoder.target import load_target
from profiles.files import load_bank, load_profile
from profiles.recipes.banks import follow

LAYERS = (0, 1, 2)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A target of 16 dimensions, two drafters with random weights, and texts of two domains at both temperatures."""
    root = tmp_path_factory.mktemp("lab")
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(root / "target")
    target = load_target(root / "target")
    shape = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    dspark = DraftConfig(
        architecture=DSPARK,
        target_layer_ids=(0, 1),
        block_size=4,
        mask_token_id=0,
        markov_rank=3,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        **shape,
    )
    save_net(make_net(dspark), root / "dspark")
    save_net(make_net(DraftConfig(architecture=MTP, target_layer_ids=(2,), ttt_length=1, **shape)), root / "mtp")
    prompts = [Prompt(f"{domain}{n}", domain, tuple(range(4, 6 + n))) for n in range(4) for domain in ("code", "math")]
    for temperature in (0.0, 1.0):
        folder = root / f"t{temperature:g}"
        meta = Meta(
            target="toy",
            target_sha256=target_sha256(root / "target"),
            layers=LAYERS,
            hidden_size=16,
            text="written",
            temperature=temperature,
            max_new_tokens=60,
            split="held_out",
            seed=0,
            dtype="float32",
            versions={},
        )
        open_folder(folder, meta)
        texts = write_group(
            target, prompts, layers=LAYERS, eos_ids=frozenset(), max_new_tokens=60, temperature=temperature, seed=0
        )
        save_shard(shard_path(folder, 0), texts)
    open_folder(root / "corpus", dataclasses.replace(meta, text="corpus", temperature=0.0))
    save_shard(shard_path(root / "corpus", 0), texts)
    return root


def record(lab, out, *options, temperature=1):
    base = ["--target", str(lab / "target"), "--text", str(lab / f"t{temperature}"), "--out", str(out)]
    return main([*base, "--min-outcomes", "20", *options])


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_bank_is_recorded_and_read_back(lab, tmp_path, temperature, capsys):
    out = tmp_path / "measured"
    dspark = ("--drafter", str(lab / "dspark"))
    assert record(lab, out, *dspark, "--json", str(tmp_path / "r.json"), temperature=temperature) == 0
    path = out / f"target_t{temperature}.json"
    profile = load_profile(path)
    drafter = profile.acceptance["dspark"]
    assert (drafter.kind, drafter.trained_length, set(drafter.domains)) == ("block", 4, {"code", "math"})
    report = json.loads((tmp_path / "r.json").read_text())
    for row in report:
        law = drafter.domains[row["domain"]]
        bank = load_bank(law, path, 4)
        assert len(bank.position) == row["positions"] == 4 * (60 - 4)
        assert row["accepted_length_tokens"] == pytest.approx(follow(bank).accepted_length)
        # Nothing but the rounding of hidden states to float16.
        assert row["chance_error_worst"] < (0.02 if temperature else 1e-9)
        if temperature == 0:
            assert set(np.unique(bank.chance)) <= {0.0, 1.0}
            np.testing.assert_array_equal(bank.chance == 1, bank.accepted)
        else:
            sd = (bank.chance * (1 - bank.chance)).sum(0) ** 0.5
            # Neighbouring blocks share luck where they share a position: at most 4 of them.
            assert (np.abs(bank.accepted.sum(0) - bank.chance.sum(0)) < 5 * 2 * sd).all()
    assert capsys.readouterr().out.count("dspark") == 2


def test_text_that_people_wrote_is_judged_at_temperature_1_by_its_chances(lab, tmp_path):
    record(lab, tmp_path, "--drafter", str(lab / "dspark"), "--text", str(lab / "corpus"))
    path = tmp_path / "target_corpus.json"
    bank = load_bank(load_profile(path).acceptance["dspark"].domains["code"], path, 4)
    assert ((bank.chance > 0) & (bank.chance < 1)).all()
    assert 0 < bank.accepted.mean() < 1


def test_drafters_are_added_one_by_one(lab, tmp_path):
    out = tmp_path / "measured"
    record(lab, out, "--drafter", f"first={lab / 'dspark'}")
    before = (out / "target_t1_first_code.npz").read_bytes()
    record(lab, out, "--drafter", str(lab / "mtp"), "--draft-length", "3")
    profile = load_profile(out / "target_t1.json")
    assert sorted(profile.acceptance) == ["first", "mtp"]
    mtp = profile.acceptance["mtp"]
    assert (mtp.kind, mtp.trained_length) == ("chain", 3)
    for drafter in profile.acceptance.values():
        for law in drafter.domains.values():
            load_bank(law, out / "target_t1.json", drafter.trained_length)
    record(lab, out, "--drafter", f"first={lab / 'dspark'}")
    assert (out / "target_t1_first_code.npz").read_bytes() == before, "same text, same seed, same bytes"


def test_one_stream_is_timed_against_none_on_the_lab_s_prompts(lab, tmp_path, capsys):
    options = ["--target", str(lab / "target"), "--drafter", str(lab / "dspark"), "--prompts", str(lab / "t1")]
    options += ["--per-domain", "2", "--max-new-tokens", "12", "--against-none", "--json", str(tmp_path / "s.json")]
    assert evaluate.main([*options, "--temperature", "0"]) == 0
    report = json.loads((tmp_path / "s.json").read_text())
    rows = report["speed"]["by_domain"]
    assert {domain: row["prompts"] for domain, row in rows.items()} == {"code": 2, "math": 2, "all": 4}
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / row["none_tokens_per_s"])
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert 0 < row["draft_s"] + row["verify_s"] < row["round_s"]
    assert report["domains"]["all"]["output_tokens"] == 4 * 12
    assert evaluate.main([*options, "--temperature", "0", "--per-domain", "1"]) == 0
    rows = json.loads((tmp_path / "s.json").read_text())["speed"]["by_domain"]
    assert (rows["code"]["ratio_low"], rows["code"]["round_high_s"]) == (None, None), "one prompt has no interval"
    assert rows["all"]["ratio_low"] is not None
    assert "tokens/s of one stream" in capsys.readouterr().out
    assert evaluate.main([*options, "--concurrency", "2"]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--drafter", "nowhere"), "no such folder"),
        (("--drafter", "a b=LAB/mtp"), "expected a name of letters"),
        (("--drafter", "LAB/mtp", "--drafter", "LAB/mtp"), "'mtp' is given twice"),
        (("--drafter", "LAB/mtp", "--texts", "0"), "--texts: expected at least 1 (got 0)"),
        (("--drafter", "LAB/mtp", "--draft-length", "60"), "hold 0 places for a block of 60; calibration needs 20"),
        (("--drafter", "LAB/mtp", "--min-outcomes", "99999"), "calibration needs 99999"),
        (("--drafter", "LAB/mtp", "--text", "LAB/nothing"), "holds no text"),
    ],
)
def test_bad_input_is_said_and_nothing_is_written(lab, tmp_path, options, message, capsys):
    out = tmp_path / "measured"
    assert record(lab, out, *(option.replace("LAB", str(lab)) for option in options)) == 2
    assert message in capsys.readouterr().err
    assert not list(out.glob("*"))


def test_text_of_another_target_is_refused(lab, tmp_path, capsys):
    assert record(lab, tmp_path, "--drafter", str(lab / "mtp"), "--target", str(lab / "mtp")) == 2
    assert "was made with toy" in capsys.readouterr().err


def test_a_profile_of_other_text_is_not_added_to(lab, tmp_path, capsys):
    out = tmp_path / "measured"
    record(lab, out, "--drafter", str(lab / "mtp"))
    same = ("--name", "target_t1")
    assert record(lab, out, "--drafter", str(lab / "dspark"), *same, temperature=0) == 2
    assert "give another --name or --out" in capsys.readouterr().err
    assert sorted(load_profile(out / "target_t1.json").acceptance) == ["mtp"]
