"""Draft checkpoints in and out, and every way in which one may not fit its target."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder.checkpoint import (
    CheckpointError,
    load_drafter,
    load_net,
    make_drafter,
    make_net,
    save_net,
    tensor_shapes,
)
from decoder.config import MTP, DraftConfig, dump_config, parse_config
from decoder.errors import TargetError
from decoder.small_model import SmallModelDrafter
from decoder.target import load_target
from decoder.vocabulary import draft_ids
from tests.decoder.reference import DRAFTS, TARGET_A, TARGET_B


@pytest.fixture
def copy(deepspec, tmp_path):
    """Return a function that copies a checkpoint where it may be changed."""

    def make(name):
        folder = tmp_path / name
        shutil.copytree(deepspec / "checkpoints" / name, folder)
        for path in (folder, *folder.iterdir()):
            path.chmod(0o755)
        return folder

    return make


def edit(folder, **keys):
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def retensor(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", DRAFTS)
def test_written_as_it_was_read(name, deepspec, targets, tmp_path):
    source, target = deepspec / "checkpoints" / name, targets[DRAFTS[name]]
    save_net(load_net(source, target), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    original = load_file(source / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[key], original[key]) for key in original)
    found, want = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", source))
    assert {key: found[key] for key in want if want[key] is not None} == {
        key: value for key, value in want.items() if value is not None
    }
    load_net(tmp_path / "out", target)
    with pytest.raises(CheckpointError, match="exists already; nothing was written"):
        save_net(load_net(source, target), tmp_path / "out")


def test_a_failed_write_leaves_nothing(deepspec, targets, tmp_path, monkeypatch):
    net = load_net(deepspec / "checkpoints" / "dflash_block5", targets[TARGET_B])

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("decoder.checkpoint.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_net(net, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_tensors_left_to_the_target(copy, targets, tmp_path):
    """Embedding and head shared with the target: not in the file, same answers."""
    target = targets[TARGET_A]
    folder = copy("dspark_vanilla_block7")

    def strip(tensors):
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]

    retensor(folder, strip)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: missing\n.*lm_head.weight: missing"):
        load_net(folder, target)
    edit(folder, shared_with_target=["embed_tokens.weight", "lm_head.weight"])
    net = load_net(folder, target)
    assert torch.equal(net.embed_tokens.weight, target.embed_tokens)
    save_net(net, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(load_net(tmp_path / "out", target).lm_head.weight, target.lm_head)


@pytest.mark.parametrize(
    "change, message",
    (
        (lambda t: t.pop("fc.weight"), "model.safetensors: fc.weight: missing"),
        (lambda t: t.update({"extra.weight": torch.ones(2)}), "extra.weight: not used by this architecture"),
        (lambda t: t.update({"norm.weight": torch.ones(9)}), r"norm.weight: shape \[9\]; expected \[64\]"),
        (
            lambda t: t["markov_head.markov_w2.weight"].fill_(float("nan")),
            "markov_w2.weight: holds values that are not",
        ),
        (lambda t: t.pop("confidence_head.proj.bias"), "confidence_head.proj.bias: missing"),
    ),
)
def test_tensors_are_refused_by_name(change, message, copy, targets):
    folder = copy("dspark_rnn_block7")
    retensor(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_net(folder, targets[TARGET_A])


def test_every_tensor_at_fault_is_named(copy, targets):
    folder = copy("eagle3_ttt5")
    retensor(folder, lambda t: [t.pop(key) for key in list(t) if "mlp" in key])
    with pytest.raises(CheckpointError) as caught:
        load_net(folder, targets[TARGET_B])
    assert len(caught.value.faults) == 3


@pytest.mark.parametrize(
    "keys, message",
    (
        ({"mask_token_id": 256}, "mask_token_id: 256 lies outside the vocabulary of 256 tokens"),
        ({"hidden_size": 128}, "hidden_size: 128, but the target has width 64"),
        ({"num_target_layers": 6}, "num_target_layers: 6, but the target has layers: 4"),
        ({"target_layer_ids": [0, 1, 4]}, "target_layer_ids: layer 4 is asked for, but the target has layers 0 to 3"),
        ({"target_layer_ids": [-2]}, r"target_layer_ids: expected a list of layer numbers .*; got \[-2\]"),
        ({"vocab_size": 300}, "vocab_size: 300, but the target has a vocabulary of 256"),
        ({"block_size": ...}, "block_size: missing"),
        ({"block_size": 0}, "block_size: expected a whole number above 0; got 0"),
        ({"markov_head_type": "lstm"}, "markov_head_type: expected vanilla, gated or rnn; got 'lstm'"),
        ({"markov_rank": 0}, r"confidence_head_with_markov: needs a Markov head"),
        ({"architectures": ["Medusa"]}, "architectures: unknown draft architecture 'Medusa'; known: Qwen3DSparkModel"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: only rope_type 'default' is supported"),
        ({"draft_vocab_size": 257}, "draft_vocab_size: 257 is more than the vocabulary of 256 tokens"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu'; got 'gelu'"),
        ({"enable_confidence_head": "yes"}, "enable_confidence_head: expected true or false; got yes"),
        ({"shared_with_target": ["fc.weight"]}, "shared_with_target: 'fc.weight' cannot be shared"),
    ),
)
def test_configs_are_refused_by_key(keys, message, copy, targets):
    folder = copy("dspark_vanilla_block7")
    edit(folder, **keys)
    with pytest.raises(CheckpointError, match=rf"config.json: {message}"):
        load_net(folder, targets[TARGET_A])


def test_a_drafter_of_another_target_is_refused(deepspec, targets):
    with pytest.raises(CheckpointError, match="num_target_layers: 6, but the target has layers: 4"):
        load_drafter(deepspec / "checkpoints" / "dspark_rnn_block5", targets[TARGET_A])


def test_files_that_are_none(copy, targets, tmp_path):
    folder = copy("dflash_block7")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="not a safetensors file, or cut short"):
        load_net(folder, targets[TARGET_A])
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot read"):
        load_net(folder, targets[TARGET_A])
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json: not JSON"):
        load_drafter(folder, targets[TARGET_A])
    with pytest.raises(CheckpointError, match="no such folder"):
        load_drafter(tmp_path / "absent", targets[TARGET_A])


def test_an_mtp_head_round_trip(targets, tmp_path):
    config = DraftConfig(
        architecture=MTP,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        target_layer_ids=(3,),
        num_target_layers=4,
        ttt_length=3,
        shared_with_target=("embed_tokens.weight", "lm_head.weight"),
    )
    save_net(make_net(config), tmp_path / "mtp")
    drafter = load_drafter(tmp_path / "mtp", targets[TARGET_A])
    assert (drafter.kind, drafter.trained_length, drafter.chained) == ("mtp", 3, True)
    again = parse_config(dump_config(config))
    assert tensor_shapes(make_net(again)) == tensor_shapes(make_net(config))
    edit(tmp_path / "mtp", target_layer_ids=[1, 2])
    with pytest.raises(CheckpointError, match="an MTP head reads one layer"):
        load_drafter(tmp_path / "mtp", targets[TARGET_A])


REDUCED = torch.tensor([0, 1, 5, 9, 200, 255])


@pytest.fixture
def reduced(copy):
    """Return a checkpoint whose drafter says six tokens, head and embedding left to the target."""
    folder = copy("dspark_gated_block7")
    edit(folder, draft_vocab_size=6, shared_with_target=["embed_tokens.weight", "lm_head.weight"])

    def reduce(tensors):
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
        tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][REDUCED].contiguous()
        tensors["d2t"] = REDUCED - torch.arange(6)
        tensors["t2d"] = torch.zeros(256, dtype=torch.bool).index_fill(0, REDUCED, True)

    retensor(folder, reduce)
    return folder


def test_a_reduced_draft_vocabulary(reduced, deepspec, targets, tmp_path):
    """Its logits are those of the whole drafter, at the tokens that it has; written in bfloat16, the map is kept."""
    target = targets[TARGET_A]
    whole, net = load_net(deepspec / "checkpoints" / "dspark_gated_block7", target), load_net(reduced, target)
    hidden, prev = torch.randn(3, 64), torch.tensor([7, 200, 3])
    assert torch.equal(draft_ids(net), REDUCED)
    assert draft_ids(whole) is None
    torch.testing.assert_close(net.lm_head(hidden), whole.lm_head(hidden)[:, REDUCED])
    found, want = (part.markov_head.step(prev, hidden, None)[0] for part in (net, whole))
    torch.testing.assert_close(found, want[:, REDUCED])
    save_net(net, tmp_path / "out", torch.bfloat16)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["d2t"], REDUCED - torch.arange(6))
    assert written["fc.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    again = load_net(tmp_path / "out", target)
    assert torch.equal(draft_ids(again), REDUCED)
    assert torch.equal(again.lm_head.weight, target.lm_head[REDUCED])


@pytest.mark.parametrize(
    "change, message",
    (
        (lambda t: t.pop("d2t"), "d2t: missing"),
        (lambda t: t.update(d2t=t["d2t"].float()), "d2t: expected dtype int64; got float32"),
        (lambda t: t["d2t"][5:].add_(1), "d2t: draft id 5 becomes 256; the target has tokens 0 to 255"),
        (lambda t: t["d2t"][1:2].sub_(1), "d2t: two draft ids become the same token"),
        (lambda t: t["t2d"][3:4].fill_(True), "t2d: disagrees with d2t about token 3"),
        (lambda t: t.update(d2t=t["d2t"][:5].clone()), r"d2t: shape \[5\]; expected \[6\]"),
    ),
)
def test_maps_are_refused(change, message, reduced, targets):
    retensor(reduced, change)
    with pytest.raises(CheckpointError, match=rf"model.safetensors: {message}"):
        load_net(reduced, targets[TARGET_A])


def test_a_language_model_drafts_for_another(deepspec, targets, copy):
    drafter = load_drafter(deepspec / "checkpoints" / TARGET_B, targets[TARGET_A])
    assert isinstance(drafter, SmallModelDrafter)
    targets[TARGET_A].vocab_size = 300
    try:
        with pytest.raises(CheckpointError, match="the small model has 256 tokens, the target 300"):
            load_drafter(deepspec / "checkpoints" / TARGET_B, targets[TARGET_A])
    finally:
        targets[TARGET_A].vocab_size = 256


# Targets


def test_targets_are_refused_by_name(copy, tmp_path, deepspec):
    with pytest.raises(TargetError, match="no such folder"):
        load_target(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match=r"config.json: cannot read"):
        load_target(tmp_path / "empty")
    with pytest.raises(TargetError, match=r"expected a causal LM \(...ForCausalLM\); got Qwen3DSparkModel"):
        load_target(deepspec / "checkpoints" / "dflash_block5")
    folder = copy(TARGET_B)
    retensor(folder, lambda t: t.pop("model.layers.3.mlp.up_proj.weight"))
    with pytest.raises(TargetError, match=r"model.layers.3.mlp.up_proj.weight: missing"):
        load_target(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(TargetError, match=r"holds no \*.safetensors"):
        load_target(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(TargetError, match="not JSON"):
        load_target(folder)


def test_a_sliding_window_cannot_be_cut_back(copy):
    folder = copy(TARGET_B)
    edit(folder, use_sliding_window=True, sliding_window=8, max_window_layers=0, layer_types=["sliding_attention"] * 6)
    with pytest.raises(TargetError, match="cannot be cut back after a rejection"):
        load_target(folder)


def test_one_pass_drafts_a_block_of_any_length():
    """The parallel block costs one forward pass whatever its length."""
    from decoder.sampling import DraftSampler, Sampling, Shaper
    from tests.decoder.toys import TableTarget, tiny_config

    for length in (1, 4, 16):
        net = make_net(tiny_config("dspark_rnn", 6, length), dtype=torch.float64)
        calls = []
        net.layers[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        drafter = make_drafter(net)
        target = TableTarget(torch.full((6, 6), 1 / 6))
        drafting = drafter.start()
        read = target.forward([1, 2], target.new_cache(), drafter.feature_layers)
        drafting.advance([1, 2], read.features, 3)
        from decoder.chance import KeyedLuck

        sampler = DraftSampler(Shaper(Sampling(), 6, torch.device("cpu")), KeyedLuck(0, "r"), 2)
        drafting.propose(3, length, sampler)
        assert len(calls) == 1
        assert len(sampler.token_ids) == length


def test_a_llama_folder(tmp_path):
    from tests.decoder.test_caches import tiny_llama

    tiny_llama().model.float().save_pretrained(tmp_path / "llama")
    target = load_target(tmp_path / "llama")
    assert (target.num_layers, target.hidden_size, target.vocab_size, target.max_context_tokens) == (3, 64, 256, 256)
    read = target.forward([1, 2, 3], target.new_cache(), (-1, 0, 2), 2)
    assert (read.logits.shape, read.features.shape) == ((2, 256), (3, 192))
    assert torch.equal(read.features[:, :64], target.embed_tokens[[1, 2, 3]])
