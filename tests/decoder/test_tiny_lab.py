"""The whole lab in little: a target from nothing, text that it writes, a drafter trained on it, what that is worth."""

import functools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from decoder import collect, train
from decoder.checkpoint import load_drafter
from decoder.errors import TargetError
from decoder.identity import GAP_BOUNDS, first_difference
from decoder.lab.prompts import standard_library
from decoder.lab.targets import target_folder
from decoder.lab.tiny import TRAINING, TinySize, make_tiny
from decoder.lab.writing import make_prompt
from decoder.loading import parse_policy
from decoder.sampling import Sampling
from decoder.session import Decoder, Request
from decoder.stopping import Limits
from decoder.target import load_target
from decoder.training.loop import METRICS, read_metrics

pytestmark = pytest.mark.slow

#: A twentieth of `tiny`.
SIZE = TinySize(
    vocab_size=512,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=32,
    train_tokens=80_000,
    batch_tokens=2048,
    learning_rate=5e-3,
)
BLOCK = 4
STEPS = 60
#: Texts on which trained and untrained drafter are compared, and how many of them the trained one must win. Were it no
#: better than the margin on more texts than not, it would win 28 of 30 with a chance of (1 + 30 + 435) / 2^30 < 1e-6.
TEXTS, WINS = 30, 28
MARGIN = 0.25


def train_arguments(lab: Path, name: str, steps: int = STEPS, *more: str) -> list[str]:
    shape = ["--layers-of-draft", "1", "--ffn", "128", "--block", str(BLOCK), "--markov-rank", "8"]
    loop = ["--steps", str(steps), "--warmup-steps", "10", "--anchors", "16", "--threads", "1"]
    where = ["--target", "tiny", "--lab", str(lab), "--out", str(lab / name)]
    return [*where, "--drafter", "dspark", *shape, *loop, *more]


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Path:
    """Return a lab with a small `tiny`, text that it wrote, and a drafter that learned from that."""
    lab = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decoder.lab.tiny.TinySize", functools.partial(TinySize, **SIZE_FIELDS))
        target_folder("tiny", lab)
    asked = ["--target", "tiny", "--lab", str(lab), "--domains", "code", "--tokens", "12000", "--group", "96"]
    assert collect.main([*asked, "--max-new-tokens", "48", "--threads", "1"]) == 0
    assert train.main(train_arguments(lab, "dspark")) == 0
    return lab


SIZE_FIELDS = {name: getattr(SIZE, name) for name in SIZE.__dataclass_fields__}


@pytest.fixture(scope="module")
def target(lab):
    return load_target(lab / "tiny" / "target")


@pytest.fixture(scope="module")
def prompts(lab) -> list[tuple[int, ...]]:
    """Return prompts that neither target nor drafter was trained on."""
    tokenizer = AutoTokenizer.from_pretrained(lab / "tiny" / "target")
    documents = [document for document in standard_library() if document.split == "held_out"][:TEXTS]
    return [make_prompt(document, tokenizer, "written").token_ids for document in documents]


def decode(target, drafter, prompts, temperature):
    policy = parse_policy("none" if drafter is None else f"{{kind: fixed, k: {BLOCK}}}")
    requests = [
        Request(
            request_id=str(n),
            prompt_ids=ids,
            limits=Limits(max_new_tokens=24),
            sampling=Sampling(temperature=temperature),
        )
        for n, ids in enumerate(prompts)
    ]
    return Decoder(target, drafter, policy).generate(requests)


def test_the_target_learns(lab):
    losses = json.loads((lab / "tiny" / "target" / TRAINING).read_text())["losses_nats_per_token"]
    assert len(losses) == SIZE.train_tokens // SIZE.batch_tokens
    # It starts from knowing nothing.
    assert losses[0] == pytest.approx(np.log(SIZE.vocab_size), abs=0.3)
    assert np.mean(losses[-8:]) < losses[0] - 1.0


def test_the_drafter_learns(lab):
    lines = read_metrics(lab / "dspark")
    assert len(lines) == STEPS
    for name, fall in (("loss", 0.2), ("tv", 0.2), ("ce", 1.0)):
        before, after = (np.mean([line[name] for line in part]) for part in (lines[:5], lines[-10:]))
        assert after < before - fall, name


def test_greedy_output_is_the_targets_own(lab, target, prompts):
    drafter = load_drafter(lab / "dspark", target)
    alone = decode(target, None, prompts[:6], 0.0)
    drafted = decode(target, drafter, prompts[:6], 0.0)
    assert sum(record.accepted_draft_tokens for found in drafted for record in found.rounds) > 0
    for found, want in zip(drafted, alone, strict=True):
        gap = first_difference(found.output_ids, want.output_ids, want.top2_gaps, GAP_BOUNDS[target.dtype])
        assert gap is None or gap.excused, gap


def test_a_trained_drafter_is_accepted_more_than_an_untrained_one(lab, target, prompts):
    """A sign test on accepted lengths of texts at temperature 1; see TEXTS for what can pass by luck."""
    # One step, too small to matter.
    assert train.main(train_arguments(lab, "untrained", 1, "--learning-rate", "1e-12")) == 0

    def accepted_lengths(name):
        found = decode(target, load_drafter(lab / name, target), prompts, 1.0)
        return [np.mean([record.emitted_tokens for record in text.rounds]) for text in found]

    trained, untrained = accepted_lengths("dspark"), accepted_lengths("untrained")
    wins = sum(a > b + MARGIN for a, b in zip(trained, untrained, strict=True))
    assert wins >= WINS, (np.mean(trained), np.mean(untrained))


def test_a_killed_run_ends_with_the_same_bytes(lab):
    arguments = train_arguments(lab, "killed", STEPS, "--save-every", "0")
    log = lab / "killed" / METRICS
    process = subprocess.Popen([sys.executable, "-m", "decoder.train", *arguments], stderr=subprocess.DEVNULL)
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= STEPS // 10):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert len(read_metrics(lab / "killed")) < STEPS
    assert not (lab / "killed" / "model.safetensors").exists()

    assert train.main(arguments) == 0
    assert len(read_metrics(lab / "killed")) == STEPS
    for name in ("model.safetensors", "config.json"):
        assert (lab / "killed" / name).read_bytes() == (lab / "dspark" / name).read_bytes(), name


def test_a_seed_gives_the_same_target(tmp_path, monkeypatch):
    few = [document for document in standard_library() if document.split == "train"][:100]
    monkeypatch.setattr("decoder.lab.tiny.load_documents", lambda *_: few)
    small = {**SIZE_FIELDS, "train_tokens": 4 * 512, "batch_tokens": 512}
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        make_tiny(tmp_path / name, TinySize(**small), seed=seed)
    one, two, three = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two", "three")
    )
    assert one == two
    assert one["model.safetensors"] != three["model.safetensors"]
    assert one["tokenizer.json"] == three["tokenizer.json"]


def test_a_library_without_source_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("decoder.lab.tiny.load_documents", lambda *_: [])
    with pytest.raises(TargetError, match="standard library has no source text to train on"):
        make_tiny(tmp_path / "target")
    assert not (tmp_path / "target").exists()
