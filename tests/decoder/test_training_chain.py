"""Training chained drafters and small models: unrolled as they draft, and with the gradients of the plain formula."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from decoder.chain import ChainDrafter
from decoder.checkpoint import load_drafter, make_net
from decoder.errors import InputError
from decoder.kv_cache import KvCache
from decoder.lab.store import Meta, open_folder, save_shard, shard_path
from decoder.lab.targets import target_sha256
from decoder.lab.writing import Prompt, write_group
from decoder.losses import LossWeights, position_weights
from decoder.small_model import SmallModelDrafter
from decoder.target import HfTarget, load_target
from decoder.training.batches import Batch, TrainingText
from decoder.training.chain import ChainObjective, chain_states, make_chain
from decoder.training.objective import DraftShape
from decoder.training.small import SmallModelObjective, make_small
from decoder.vocabulary import draft_ids, label_ids, set_draft_ids
from tests.decoder.toys import WIDTH, tiny_config

V, LENGTH = 11, 3
WEIGHTS = LossWeights(ce=0.3, tv=0.7)


class Dictated:
    """A sampler that draws what the text says, and keeps the logits it was shown."""

    def __init__(self, token_ids):
        self.token_ids = list(token_ids)
        self.logits = []

    def draw(self, logits, token_ids=None):
        self.logits.append(logits)
        return int(self.token_ids[len(self.logits) - 1])


def random_net(kind, *, reduced=None, seed=1):
    """Return a net with large random weights, float64; ``reduced`` are the tokens that it can draft."""
    config = replace(tiny_config(kind, V, LENGTH), draft_vocab_size=None if reduced is None else len(reduced))
    net = make_net(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in net.named_parameters():
            if "norm" not in name:
                value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.6)
    if reduced is not None:
        set_draft_ids(net, torch.tensor(reduced))
    return net


def random_batch(layers, head, seed=2):
    """Two documents of 14 and 9 rows, with prompts of 3 and 4 tokens, padded to 14 rows."""
    generator = torch.Generator().manual_seed(seed)
    rows, prompts = torch.tensor([14, 9]), torch.tensor([3, 4])
    tokens = torch.randint(0, V, (2, 15), generator=generator)
    features = torch.randn(2, 14, layers * WIDTH, generator=generator, dtype=torch.float64)
    final = torch.randn(2, 14, WIDTH, generator=generator, dtype=torch.float64)
    place = torch.arange(14)
    return Batch(
        token_ids=tokens[:, :-1],
        next_ids=tokens[:, 1:],
        features=features,
        final=final,
        log_norms=torch.logsumexp(final @ head.T, -1),
        answer=(place >= prompts[:, None] - 1) & (place < rows[:, None]),
        rows=rows,
        prompts=prompts,
    )


def head_of(width=WIDTH):
    return torch.randn(V, width, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def terms(logits, p, label, reduced):
    """Return cross entropy (0 where the label cannot be drafted), sum |p - q| and sum min(p, q), the plain way."""
    q = torch.softmax(logits, -1)
    if reduced is not None:
        q = torch.zeros(V, dtype=q.dtype).index_copy(0, torch.tensor(reduced), q)
    ce = -q[label].log() if reduced is None or label in reduced else q.sum() * 0
    return ce, (p - q).abs().sum(), torch.minimum(p, q).sum().detach()


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_unrolled_is_what_the_decoder_drafts(kind):
    net = random_net(kind)
    batch = random_batch(len(net.config.target_layer_ids), head_of())
    for document, anchors in ((0, [3, 5, 6, 11]), (1, [4, 8])):
        end = int(batch.rows[document])
        features, token_ids = batch.features[document, :end], batch.token_ids[document, :end]
        states = chain_states(net, features, token_ids, torch.tensor(anchors), LENGTH)
        tokens = token_ids.tolist()
        for row, anchor in enumerate(anchors):
            drafting = ChainDrafter(net).start()
            drafting.advance(tokens[:anchor], features[:anchor], tokens[anchor])
            sampler = Dictated([*tokens[anchor + 1 :], 0])
            drafting.propose(tokens[anchor], min(LENGTH, end - anchor), sampler)
            for k, logits in enumerate(sampler.logits):
                torch.testing.assert_close(net.logits(states[k])[row], logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("reduced", [None, [0, 2, 3, 5, 6, 7, 10]])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_loss_and_gradients_are_those_of_one_chain_at_a_time(kind, reduced):
    net, head = random_net(kind, reduced=reduced), head_of()
    batch = random_batch(len(net.config.target_layer_ids), head)
    objective = ChainObjective(net, head, 4, WEIGHTS)
    anchors, kept = torch.tensor([[3, 5, 6, 12], [4, 8, 0, 0]]), torch.tensor([[True] * 4, [True, True, False, False]])
    loss, metrics = objective.loss_at(batch, anchors, kept)
    found = torch.autograd.grad(loss, list(objective.parameters().values()))

    wanted, total, survivals, accepts = 0.0, 0.0, [], [[] for _ in range(LENGTH)]
    for document in range(2):
        tokens = batch.token_ids[document]
        for anchor in anchors[document][kept[document]].tolist():
            cache = KvCache(net.config.num_hidden_layers)
            features = net.fuse(batch.features[document, :anchor])
            state = net.rows(tokens[1 : anchor + 1], features, torch.arange(anchor), cache)[-1:]
            survival, alive = 0.0, 1.0
            for k in range(min(LENGTH, int(batch.rows[document]) - anchor)):
                if k:
                    state = net.rows(tokens[[anchor + k]], state, torch.tensor([anchor + k - 1]), cache)
                p = torch.softmax(batch.final[document, anchor + k] @ head.T, -1)
                label = int(batch.next_ids[document, anchor + k])
                ce, tv, accept = terms(net.logits(state)[0], p, label, reduced)
                weight = float(position_weights("published", LENGTH)[k])
                wanted = wanted + weight * (WEIGHTS.ce * ce + WEIGHTS.tv * tv)
                total += weight
                alive *= float(accept)
                survival += alive
                accepts[k].append(float(accept))
            survivals.append(survival)
    wanted = wanted / total
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)  # positions are weighed in float32
    for name, mine, plain in zip(
        objective.parameters(), found, torch.autograd.grad(wanted, list(objective.parameters().values())), strict=True
    ):
        assert float(plain.abs().max()) > 0, name
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-7, msg=name)
    assert metrics["accepted_length"] == pytest.approx(1 + np.mean(survivals))
    assert metrics["positions"] == sum(map(len, accepts))
    for k in range(LENGTH):
        assert metrics[f"accept@{k}"] == pytest.approx(np.mean(accepts[k]))


def test_small_model_loss_and_gradients_are_those_of_the_plain_formula():
    target_head = head_of()
    batch = random_batch(0, target_head)
    objective = SmallModelObjective(small_model(), target_head, WEIGHTS, LENGTH)
    loss, metrics = objective.loss(batch, np.random.default_rng(0))
    found = torch.autograd.grad(loss, list(objective.parameters().values()))
    wanted, count, accepts = 0.0, 0, []
    for document in range(2):
        n = int(batch.rows[document])
        logits = objective.model(input_ids=batch.token_ids[document : document + 1, :n]).logits[0]
        for row in range(int(batch.prompts[document]), n):
            p = torch.softmax(batch.final[document, row] @ target_head.T, -1)
            ce, tv, accept = terms(logits[row], p, int(batch.next_ids[document, row]), None)
            wanted, count = wanted + WEIGHTS.ce * ce + WEIGHTS.tv * tv, count + 1
            accepts.append(float(accept))
    torch.testing.assert_close(loss, wanted / count, rtol=1e-9, atol=0)
    plain = torch.autograd.grad(wanted / count, list(objective.parameters().values()))
    for name, mine, want in zip(objective.parameters(), found, plain, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-9, atol=1e-10, msg=name)
    assert metrics["accept@0"] == pytest.approx(np.mean(accepts))
    first, second = accepts[: 14 - 3], accepts[14 - 3 :]
    lengths = [np.cumprod(part[at : at + LENGTH]).sum() for part in (first, second) for at in range(len(part))]
    assert metrics["accepted_length"] == pytest.approx(1 + np.mean(lengths))


def small_model():
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=V,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    # `keep_float64` belongs to targets that prove something; here both sides round alike.
    return Qwen3ForCausalLM(config).double()


def test_features_of_unlike_size_are_trained_alike_and_saved_as_they_are(tmp_path):
    net = random_net("eagle3")
    batch = random_batch(2, head_of())
    scale = torch.tensor([300.0, 0.2], dtype=torch.float64).repeat_interleave(WIDTH)
    plain = ChainObjective(copy.deepcopy(net), head_of(), 4, WEIGHTS)
    with torch.no_grad():
        net.fc.weight.div_(scale)
    objective = ChainObjective(net, head_of(), 4, WEIGHTS, scale)
    torch.testing.assert_close(net.fc.weight, plain.net.fc.weight)
    anchors, kept = torch.tensor([[3, 5], [4, 8]]), torch.ones(2, 2, dtype=torch.bool)
    loss, _ = objective.loss_at(replace(batch, features=batch.features * scale), anchors, kept)
    torch.testing.assert_close(loss, plain.loss_at(batch, anchors, kept)[0])
    objective.save(tmp_path / "drafter", torch.float64)
    saved = load_file(tmp_path / "drafter" / "model.safetensors")["fc.weight"]
    torch.testing.assert_close(saved, plain.net.fc.weight / scale)


# From text on disk to a drafter on disk


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Path:
    """Return a lab with a target that is tiny and sure of itself, and 24 texts that it wrote."""
    lab = tmp_path_factory.mktemp("lab")
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=48,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=1.0,
    )
    Qwen3ForCausalLM(config).save_pretrained(lab / "target")
    target = load_target(lab / "target")
    generator = torch.Generator().manual_seed(8)
    prompts = [
        Prompt(f"d{n}", "code", tuple(torch.randint(4, 48, (3 + n % 4,), generator=generator).tolist()))
        for n in range(24)
    ]
    texts = write_group(
        target, prompts, layers=(0, 1, 2), eos_ids=frozenset([1]), max_new_tokens=24, temperature=1.0, seed=0
    )
    meta = Meta(
        target="target",
        target_sha256=target_sha256(lab / "target"),
        layers=(0, 1, 2),
        hidden_size=24,
        text="written",
        temperature=1.0,
        max_new_tokens=24,
        split="train",
        seed=0,
        dtype="float32",
        versions={},
    )
    open_folder(lab / "text", meta)
    save_shard(shard_path(lab / "text", 0), texts)
    return lab


@pytest.fixture
def target(lab) -> HfTarget:
    return load_target(lab / "target")


@pytest.fixture
def text(lab, target) -> TrainingText:
    return TrainingText([lab / "text"], target_sha256(lab / "target"), target.lm_head)


def shape_of(drafter, **changes):
    layers = {"eagle3": (0, 1, 2), "mtp": (2,), "small_model": ()}[drafter]
    return DraftShape(
        **{
            "drafter": drafter,
            "layers": 1,
            "ffn": 32,
            "length": LENGTH,
            "feature_layers": layers,
            "draft_vocab": None if drafter == "small_model" else 40,
            "anchors": 6,
            **changes,
        }
    )


def made(drafter, target, text, init=None, **changes):
    make = make_small if drafter == "small_model" else make_chain
    return make(shape_of(drafter, **changes), target, text, init, 0)


@pytest.mark.parametrize("drafter", ["eagle3", "mtp", "small_model"])
def test_a_drafter_learns_and_drafts(drafter, target, text, tmp_path):
    """Thirty steps on three documents: they are learned, and what was written to disk drafts with what was learned."""
    objective = made(drafter, target, text, weights=LossWeights(ce=0.5, tv=0.5))
    batch = text.batch(range(3), objective.feature_layers)
    optimizer = torch.optim.Adam(objective.parameters().values(), 1e-2)
    lengths = []
    for _ in range(30):
        loss, metrics = objective.loss(batch, np.random.default_rng(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lengths.append(metrics["accepted_length"])
    assert lengths[-1] > lengths[0] + 0.2

    objective.save(tmp_path / "drafter", torch.float32)
    loaded = load_drafter(tmp_path / "drafter", target)
    again = made(drafter, target, text, init=tmp_path / "drafter", weights=LossWeights(ce=0.5, tv=0.5))
    with torch.no_grad():
        want, _ = objective.loss(batch, np.random.default_rng(0))
        torch.testing.assert_close(again.loss(batch, np.random.default_rng(0))[0], want)
    assert loaded.kind == drafter
    if isinstance(loaded, SmallModelDrafter):
        return
    assert loaded.trained_length == LENGTH
    torch.testing.assert_close(draft_ids(loaded.net), text.frequent_tokens(40))
    tokens = batch.token_ids[0].tolist()
    anchor = int(batch.prompts[0])
    drafting, sampler = loaded.start(), Dictated(tokens[anchor + 1 :])
    drafting.advance(tokens[:anchor], batch.features[0, :anchor], tokens[anchor])
    drafting.propose(tokens[anchor], 1, sampler)
    p = torch.softmax(batch.final[0, anchor] @ target.lm_head.T, -1)[draft_ids(loaded.net)]
    accept = torch.minimum(p, torch.softmax(sampler.logits[0], -1)).sum()
    with torch.no_grad():
        one = torch.zeros(3, 1, dtype=torch.bool)
        one[0] = True
        _, metrics = objective.loss_at(batch, torch.full((3, 1), anchor), one)
    assert metrics["accept@0"] == pytest.approx(float(accept), abs=1e-5)


@pytest.mark.parametrize("drafter", ["eagle3", "mtp", "small_model"])
def test_cross_entropy_is_of_what_was_asked_for(drafter, target, text):
    """`judge` is held to the formulas elsewhere; here, that each objective asks it for the same."""
    losses = {}
    for ce_of in ("text", "target"):
        objective = made(drafter, target, text, weights=LossWeights(ce=1.0, tv=0.0, ce_of=ce_of))
        batch = text.batch(range(3), objective.feature_layers)
        losses[ce_of] = float(objective.loss(batch, np.random.default_rng(0))[0].detach())
    # The text was written by the target: both mean the same, up to the chance of what was drawn.
    assert losses["text"] != losses["target"]
    assert losses["text"] == pytest.approx(losses["target"], rel=0.2)


@pytest.mark.parametrize("drafter", ["eagle3", "mtp", "small_model"])
def test_a_seed_gives_the_same_drafter(drafter, target, text):
    first, second = made(drafter, target, text).parameters(), made(drafter, target, text).parameters()
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize(
    "drafter, changes, message",
    [
        ("mtp", {"feature_layers": (1, 2)}, "an MTP head reads one layer"),
        ("eagle3", {"feature_layers": (0, 7)}, "layer 7 is asked for, but the target has layers 0 to 2"),
        ("eagle3", {"feature_layers": (-1, 2)}, "layer -1 was not kept; there are 0, 1, 2"),
        ("eagle3", {"layers": 2}, "has one layer"),
    ],
)
def test_shapes_that_do_not_fit(drafter, changes, message, target, text):
    with pytest.raises(InputError, match=message):
        made(drafter, target, text, **changes)


def test_a_drafter_of_another_kind_is_no_start(target, text, tmp_path):
    made("mtp", target, text).save(tmp_path / "mtp", torch.bfloat16)
    with pytest.raises(InputError, match="holds a drafter of kind mtp; --drafter says eagle3"):
        made("eagle3", target, text, init=tmp_path / "mtp")


def test_labels_of_tokens_that_cannot_be_drafted():
    net = random_net("mtp", reduced=[0, 2, 5])
    assert label_ids(draft_ids(net), V).tolist() == [0, -1, 1, -1, -1, 2, -1, -1, -1, -1, -1]
