"""Training block drafters: packed blocks are what is drafted, a run that was killed ends as one that was not."""

import json
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import decoder.losses
import decoder.train
from decoder.checkpoint import load_drafter, load_net
from decoder.config import DSPARK
from decoder.dspark import BlockDrafter
from decoder.errors import InputError
from decoder.lab.store import load_meta, read_shard, shard_paths
from decoder.lab.targets import target_sha256
from decoder.losses import LossWeights, judge, position_weights
from decoder.target import load_target
from decoder.training.batches import TrainingText, norms_path
from decoder.training.block import block_states, draw_anchors, make_block
from decoder.training.loop import (
    LoopSettings,
    Progress,
    judge_text,
    learning_rate,
    make_optimizers,
    read_metrics,
    train,
)
from decoder.training.muon import Muon, orthogonal
from decoder.training.objective import DraftShape
from decoder.vocabulary import draft_ids
from tests.decoder.labs import LAYERS, WIDTH, V, make_lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def target(lab):
    return load_target(lab / "toy" / "target")


def open_text(lab, target):
    folder = lab / "toy" / "text" / "written-t1-train"
    return TrainingText([folder], target_sha256(lab / "toy" / "target"), target.lm_head)


@pytest.fixture(scope="module")
def text(lab, target):
    return open_text(lab, target)


def shape_of(drafter="dspark", **changes):
    fields = {"layers": 1, "ffn": 32, "length": 4, "feature_layers": LAYERS, "markov_rank": 4, "anchors": 5}
    return DraftShape(drafter=drafter, **{**fields, **changes})


# Losses


def literal(hidden, head, target_states, target_head_all, kept, labels, ce_weights, tv_weights, bias, ce_of):
    """The formulas of `decoder.losses`, over the whole vocabulary, left to autograd."""
    p = torch.softmax(target_states @ target_head_all.T, -1)
    logits = hidden @ head.T + bias[0] @ bias[1].T
    q = torch.zeros_like(p).index_copy(1, kept, torch.softmax(logits, -1))
    log_q = torch.log_softmax(logits, -1)
    if ce_of == "text":
        ce = torch.where(labels >= 0, -log_q.gather(1, labels.clamp_min(0)[:, None])[:, 0], 0.0)
    else:
        ce = -(p[:, kept] * log_q).sum(-1)
    tv = (p - q).abs().sum(-1)
    return (ce_weights * ce).sum() + (tv_weights * tv).sum(), ce, 1 - tv / 2


@pytest.mark.parametrize("ce_of", ("text", "target"))
@pytest.mark.parametrize("chunk", (3, 256))
def test_judge_is_the_literal_formula(chunk, ce_of, monkeypatch):
    """Value and gradient, with labels and mass outside the draft vocabulary, over several chunks and in one."""
    monkeypatch.setattr(decoder.losses, "CHUNK_ROWS", chunk)
    generator = torch.Generator().manual_seed(3)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    rows, width, rank, vocabulary = 8, 5, 2, 11
    kept = torch.tensor([0, 2, 3, 7, 8, 10])
    whole, target_states = draw(vocabulary, width), draw(rows, width)
    labels = torch.tensor([0, -1, 3, 5, -1, 1, 2, 2])
    ce_weights, tv_weights = (
        torch.rand(rows, generator=generator).double(),
        torch.rand(rows, generator=generator).double(),
    )
    leaves = [draw(rows, width), draw(len(kept), width), draw(rows, rank), draw(len(kept), rank)]
    for leaf in leaves:
        leaf.requires_grad_()
    hidden, head, low, second = leaves
    found = judge(
        hidden,
        head,
        target_states,
        whole[kept],
        torch.logsumexp(target_states @ whole.T, -1),
        labels,
        ce_weights,
        tv_weights,
        (low, second),
        ce_of,
    )
    want = literal(hidden, head, target_states, whole, kept, labels, ce_weights, tv_weights, (low, second), ce_of)
    for left, right in zip(found, want, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(3 * found.loss, leaves), torch.autograd.grad(3 * want[0], leaves)
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def test_a_label_of_no_probability_has_a_finite_loss():
    head = torch.tensor([[1.0], [-1.0]])
    state = torch.tensor([[400.0]])
    found = judge(state, head, state, head, torch.tensor([400.0]), torch.tensor([1]), torch.ones(1), torch.ones(1))
    assert float(found.ce) == 800
    assert float(found.accept) == 1


def test_position_weights():
    assert position_weights("published", 5)[4] == pytest.approx(np.exp(-1))
    assert position_weights("block", 16)[8] == pytest.approx(np.exp(-0.5))
    assert position_weights("even", 3).tolist() == [1, 1, 1]


# Text


def test_batches_hold_what_the_shards_hold(lab, target, text):
    folder = lab / "toy" / "text" / "written-t1-train"
    stored = [part for path in shard_paths(folder) for part in read_shard(path)]
    batch = text.batch([2, 20], (0, 2))
    for row, number in enumerate((2, 20)):
        want = stored[number]
        rows = len(want.token_ids)
        assert int(batch.rows[row]) == rows
        assert torch.equal(batch.token_ids[row, :rows], want.token_ids.long())
        assert torch.equal(batch.next_ids[row, :rows], want.next_ids.long())
        features = want.features.float().view(rows, 3, WIDTH)
        assert torch.equal(batch.features[row, :rows], features[:, [0, 2]].flatten(1))
        assert torch.equal(batch.final[row, :rows], features[:, 2])
        assert batch.answer[row].nonzero().flatten().tolist() == list(range(want.prompt_tokens - 1, rows))
        norms = torch.logsumexp(features[:, 2] @ target.lm_head.T, -1)
        answer = batch.answer[row, :rows]
        torch.testing.assert_close(batch.log_norms[row, :rows][answer], norms[answer])
        assert bool(batch.log_norms[row][~batch.answer[row]].isnan().all())
    counted = torch.cat([part.next_ids[part.prompt_tokens - 1 :] for part in stored]).long()
    assert torch.equal(text.counts, torch.bincount(counted, minlength=V))
    assert text.answer_tokens == len(counted)
    states = torch.cat([part.features[part.prompt_tokens - 1 :, -WIDTH:] for part in stored]).float()
    mass = torch.softmax(states @ target.lm_head.T, -1).sum(0).double()
    torch.testing.assert_close(text.mass, mass, rtol=1e-5, atol=1e-5)
    assert text.frequent_tokens(5).tolist() == sorted(mass.topk(5).indices.tolist())


def test_log_normalisers_are_made_once(lab, target, monkeypatch):
    norms = norms_path(shard_paths(lab / "toy" / "text" / "written-t1-train")[0])
    open_text(lab, target)
    written = norms.stat().st_mtime_ns
    open_text(lab, target)
    assert norms.stat().st_mtime_ns == written


def test_every_document_once_a_pass(text):
    usable = text.usable
    assert usable == [number for number in range(len(text)) if text.batch([number], ()).answer.sum() > 1]
    plan = text.plan(4, seed=1)
    passes = [[next(plan) for _ in range(len(usable) // 4)] for _ in range(2)]
    for batches in passes:
        read = [number for batch in batches for number in batch]
        assert len(set(read)) == len(read) == len(usable) // 4 * 4
        assert set(read) <= set(usable)
    assert passes[0] != passes[1]
    again = text.plan(4, seed=1)
    assert [next(again) for _ in passes[0]] == passes[0]
    other = text.plan(4, seed=2)
    assert [next(other) for _ in passes[0]] != passes[0]


def test_anchors_are_tokens_that_the_target_wrote(text):
    batch = text.batch(range(8), ())
    anchors, kept = draw_anchors(batch, 1000, np.random.default_rng(0))
    for row in range(8):
        assert anchors[row][kept[row]].tolist() == list(range(int(batch.prompts[row]), int(batch.rows[row])))
    few, kept = draw_anchors(batch, 3, np.random.default_rng(0))
    assert few.shape[1] == 3
    again, _ = draw_anchors(batch, 3, np.random.default_rng(0))
    assert torch.equal(few, again)


# Blocks


def test_packed_blocks_are_what_the_decoder_drafts(target, text):
    """Documents side by side, several blocks each, features at one size: the states are those of drafting alone."""
    objective = make_block(shape_of(layers=2, draft_vocab=30), target, text, None, 0)
    net = objective.net.double()
    with torch.no_grad():
        for layer in net.layers:  # zero at first: nothing would be told apart
            layer.self_attn.o_proj.weight.normal_(0, 0.3)
            layer.mlp.down_proj.weight.normal_(0, 0.3)
    scale = objective._scale.double()
    batch = text.batch([1, 9, 17], LAYERS)
    batch = replace(batch, features=batch.features.double())
    anchors, kept = draw_anchors(batch, 4, np.random.default_rng(2))
    states = block_states(net, batch, batch.features / scale, anchors)
    with torch.no_grad():
        net.fc.weight.div_(scale)
    drafter = BlockDrafter(net)
    assert bool(kept.sum() > 6)
    for document, block in kept.nonzero().tolist():
        anchor = int(anchors[document, block])
        tokens = batch.token_ids[document].tolist()
        drafting = drafter.start()
        drafting.advance(tokens[:anchor], batch.features[document, :anchor], tokens[anchor])
        want = drafting.hidden(tokens[anchor])
        torch.testing.assert_close(states[document, block], want, rtol=0, atol=1e-9)


def test_positions_are_judged_up_to_the_end_of_the_answer(target, text):
    objective = make_block(shape_of(), target, text, None, 0)
    batch = text.batch([0], LAYERS)
    last = int(batch.rows[0]) - 1
    for anchor, want in ((last, 1), (last - 1, 2), (last - 5, 4)):
        _, metrics = objective.loss_at(batch, torch.tensor([[anchor]]), torch.tensor([[True]]))
        assert metrics["positions"] == want
    _, metrics = objective.loss_at(batch, torch.tensor([[last, 0]]), torch.tensor([[True, False]]))
    assert metrics["positions"] == 1


def test_a_drafter_of_a_tied_target_is_trained_further(tmp_path):
    """The drafter's embedding is the target's memory, whose head it is too, and nothing of the target is trained."""
    lab = make_lab(tmp_path / "tied", tied=True)
    target = load_target(lab / "toy" / "target")
    text = open_text(lab, target)
    first = make_block(shape_of(draft_vocab=30), target, text, None, 0)
    first.save(tmp_path / "first", torch.float32)
    again = make_block(shape_of(draft_vocab=30), target, text, tmp_path / "first", 0)
    assert again.net.embed_tokens.weight.data_ptr() == target.embed_tokens.data_ptr()
    assert not any(value.requires_grad for value in target.model.parameters())
    train(again, text, loop(steps=3), tmp_path / "run", device=torch.device("cpu"))


# Starting from the target's own layers


def test_layers_of_the_target_read_features_as_the_target_does(target, text):
    """Its last layer, fed the output of the one before, has the keys and values that the target itself caches."""
    objective = make_block(shape_of(feature_layers=(0, 1), start="target"), target, text, None, 0)
    batch = text.batch([3], (0, 1))
    features = torch.cat([0 * batch.features[..., :WIDTH], batch.features[..., WIDTH:]], -1)
    with torch.no_grad():
        cache = target.model(input_ids=batch.token_ids, use_cache=True).past_key_values
        positions = torch.arange(features.shape[1])[None]
        ((keys, values),) = objective.net.context_rows(features / objective._scale, positions)
    layer = cache.layers[-1]
    torch.testing.assert_close(keys, layer.keys, rtol=1e-2, atol=1e-2)  # features are kept in float16
    torch.testing.assert_close(values, layer.values, rtol=1e-2, atol=1e-2)
    mine, theirs = objective.net.layers[0].mlp, target.model.model.layers[-1].mlp
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(mine(x), theirs(x))


def test_a_narrower_mlp_keeps_what_adds_most(target, text):
    objective = make_block(shape_of(ffn=24, feature_layers=(0, 1), start="target"), target, text, None, 0)
    mine, theirs = objective.net.layers[0].mlp, target.model.model.layers[-1].mlp
    kept = [int((theirs.gate_proj.weight == row).all(-1).nonzero()) for row in mine.gate_proj.weight]
    assert kept == sorted(set(kept))
    assert torch.equal(mine.down_proj.weight, theirs.down_proj.weight[:, kept])
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        error = (mine(x) - theirs(x)).square().mean() / theirs(x).square().mean()
    assert error < 0.25  # a quarter is left out, the quieter part


def test_a_target_without_such_layers_is_refused(target, text):
    with pytest.raises(InputError, match=r"--start: has no 4 layers"):
        make_block(shape_of(layers=4, feature_layers=(0, 1), start="target"), target, text, None, 0)
    layer = target.model.model.layers[-1]
    norm = layer.input_layernorm
    layer.input_layernorm = torch.nn.Identity()
    try:
        with pytest.raises(InputError, match=r"--start: has layers without input_layernorm; .* 'seed'"):
            make_block(shape_of(feature_layers=(0, 1), start="target"), target, text, None, 0)
    finally:
        layer.input_layernorm = norm


def loop(**changes):
    return LoopSettings(**{"documents": 4, "steps": 8, "warmup_steps": 2, "learning_rate": 5e-3, **changes})


def trained(folder, target, text, settings, stops=(None,), drafter="dspark", **changes):
    objective = None
    for stop in stops:
        objective = make_block(shape_of(drafter, **changes), target, text, None, 0)
        train(objective, text, settings, folder, device=torch.device("cpu"), stop_after=stop)
    return objective


@pytest.mark.parametrize(
    "drafter, changes",
    (
        ("dspark", {"head": "vanilla", "draft_vocab": 30}),
        ("dspark", {"head": "gated"}),
        ("dspark", {"head": "rnn", "layers": 2}),
        ("dflash", {}),
    ),
)
def test_a_drafter_learns_and_drafts(drafter, changes, target, text, tmp_path):
    objective = trained(tmp_path / "run", target, text, loop(steps=60), drafter=drafter, **changes)
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 61))
    first, last = (np.mean([line["loss"] for line in part]) for part in (lines[:5], lines[-5:]))
    assert last < 0.85 * first
    objective.save(tmp_path / "saved", torch.bfloat16)
    held = load_file(tmp_path / "saved" / "model.safetensors")
    assert "lm_head.weight" not in held
    assert "embed_tokens.weight" not in held
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in held.items() if name not in ("d2t", "t2d"))
    drafter = load_drafter(tmp_path / "saved", target)
    assert isinstance(drafter, BlockDrafter)
    net = drafter.net
    assert net.config.architecture == DSPARK
    # What was trained on features at one size reads them as they are.
    batch = text.batch([3], LAYERS)
    anchors = batch.prompts[:, None] + 2
    with torch.no_grad():
        ours = block_states(objective.net, batch, batch.features / objective._scale, anchors)
        theirs = block_states(net, batch, batch.features, anchors)
    assert float((ours - theirs).abs().max()) < 0.05 * float(ours.abs().max())
    if changes.get("draft_vocab"):
        ids = draft_ids(net)
        assert ids is not None
        assert torch.equal(ids, text.frequent_tokens(30))
        assert torch.equal(net.lm_head.weight, target.lm_head[ids])


def test_cross_entropy_is_of_what_was_asked_for(target, text):
    losses = {}
    for ce_of in ("text", "target"):
        weights = LossWeights(ce=1.0, tv=0.0, confidence=0.0, ce_of=ce_of)
        objective = make_block(shape_of(weights=weights), target, text, None, 0)
        losses[ce_of] = float(objective.loss(text.batch(range(3), LAYERS), np.random.default_rng(0))[0].detach())
    assert losses["text"] != losses["target"]
    assert losses["text"] == pytest.approx(losses["target"], rel=0.2)


def test_muon_has_the_matrices_between_hidden_states(target, text, tmp_path):
    """Not the Markov head's tables, the confidence head or the norms."""
    objective = make_block(shape_of(draft_vocab=40, markov_rank=2), target, text, None, 0)
    parameters = objective.parameters()
    adamw, muon = make_optimizers(parameters.values(), loop(optimizer="muon"))
    names = {id(value): name for name, value in parameters.items()}
    theirs, ours = (
        {names[id(value)].split(".")[-2] for group in one.param_groups for value in group["params"]}
        for one in (adamw, muon)
    )
    assert ours == {"fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {"markov_w1", "markov_w2", "proj"} <= theirs
    assert not ours & theirs
    (only,) = make_optimizers(parameters.values(), loop())
    assert sum(len(group["params"]) for group in only.param_groups) == len(parameters)


@pytest.mark.parametrize("shape", ((6, 10), (10, 6), (8, 8)))
def test_muon_is_torch_s_where_products_are_in_bfloat16(shape):
    values = [torch.nn.Parameter(torch.linspace(-1, 1, 60 if 6 in shape else 64).reshape(shape)) for _ in range(2)]
    groups = [[{"params": [value], "lr": 0.02, "weight_decay": 0.1}] for value in values]
    theirs, ours = (
        torch.optim.Muon(groups[0], adjust_lr_fn="match_rms_adamw"),
        Muon(groups[1], dtype=torch.bfloat16),
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        values[0].grad = torch.randn(shape, generator=generator)
        values[1].grad = values[0].grad.clone()
        theirs.step()
        ours.step()
    assert torch.equal(values[0], values[1])


def test_muon_s_steps_have_singular_values_near_1_in_any_precision():
    matrix = torch.randn((20, 30), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        step = orthogonal(matrix, dtype)
        assert step.dtype == dtype
        sizes = torch.linalg.svdvals(step.float())
        assert sizes.min() > 0.5
        assert sizes.max() < 1.3


def test_muon_multiplies_in_what_the_hardware_knows(target, text, monkeypatch):
    """Emulated bfloat16 took 35 s a step where float32 takes 2 (smollm2, an AVX2 machine)."""
    parameters = make_block(shape_of(), target, text, None, 0).parameters()
    for known, expected in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        monkeypatch.setattr("decoder.training.loop.mixed_precision", lambda device, known=known: known)
        _, muon = make_optimizers(parameters.values(), loop(optimizer="muon"))
        assert isinstance(muon, Muon)
        assert muon.dtype == expected


@pytest.mark.parametrize("changes", ({"steps": 8}, {"steps": None, "tokens": 400}, {"steps": 8, "optimizer": "muon"}))
def test_a_run_that_was_killed_ends_with_the_same_bytes(changes, target, text, tmp_path):
    settings = loop(**changes)
    whole = trained(tmp_path / "whole", target, text, settings)
    # The second call is a new process as far as the run can tell: a new net and optimiser, the state from disk.
    parts = trained(tmp_path / "parts", target, text, settings, stops=(3, 2, None))
    for name, value in whole.parameters().items():
        assert torch.equal(value, parts.parameters()[name]), name
    logs = [read_metrics(tmp_path / name) for name in ("whole", "parts")]
    for log in logs:
        for line in log:
            line.pop("elapsed_s")
    assert logs[0] == logs[1]
    states = [load_file(tmp_path / name / "training.state") for name in ("whole", "parts")]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_half_precision_is_near(target, text, tmp_path, monkeypatch):
    """What a GPU, or a CPU with bfloat16 in hardware, computes; parameters and losses stay float32."""
    monkeypatch.setattr("decoder.training.loop.mixed_precision", lambda device: None)
    whole = trained(tmp_path / "whole", target, text, loop(steps=3), head="rnn", draft_vocab=30)
    monkeypatch.setattr("decoder.training.loop.mixed_precision", lambda device: torch.bfloat16)
    halved = trained(tmp_path / "half", target, text, loop(steps=3), head="rnn", draft_vocab=30)
    losses = [[line["loss"] for line in read_metrics(tmp_path / name)] for name in ("whole", "half")]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    for name, value in halved.parameters().items():
        assert value.dtype == torch.float32
        assert float((value - whole.parameters()[name]).detach().abs().max()) < 0.05


def test_what_was_logged_after_the_last_state_is_done_again(target, text, tmp_path):
    trained(tmp_path / "run", target, text, loop(), stops=(3,))
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "loss": 9}\n{"step": 5, "lo')
    trained(tmp_path / "run", target, text, loop())
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(1, 9))
    assert all(line["loss"] != 9 for line in read_metrics(tmp_path / "run"))


def test_an_interrupt_ends_the_step_and_keeps_it(target, text, tmp_path):
    class Interrupted:
        def __init__(self, objective):
            self.objective, self.calls = objective, 0
            self.kind, self.feature_layers = objective.kind, objective.feature_layers
            self.parameters, self.save = objective.parameters, objective.save

        def loss(self, batch, rng):
            self.calls += 1
            if self.calls == 3:
                signal.raise_signal(signal.SIGINT)
            return self.objective.loss(batch, rng)

    objective = Interrupted(make_block(shape_of(), target, text, None, 0))
    progress = train(objective, text, loop(), tmp_path / "run", device=torch.device("cpu"))
    assert progress.steps == objective.calls == 3
    whole = trained(tmp_path / "whole", target, text, loop())
    rest = trained(tmp_path / "run", target, text, loop())
    assert all(torch.equal(value, rest.parameters()[name]) for name, value in whole.parameters().items())


def test_another_run_s_state_is_refused(target, text, tmp_path):
    trained(tmp_path / "run", target, text, loop(), stops=(2,))
    with pytest.raises(InputError, match=r"training.state: settings.learning_rate: this run was begun with 0.005"):
        trained(tmp_path / "run", target, text, loop(learning_rate=1e-3))


def test_a_disk_that_is_full_keeps_the_state_before(target, text, tmp_path, monkeypatch):
    trained(tmp_path / "run", target, text, loop(), stops=(2,))
    before = (tmp_path / "run" / "training.state").read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("decoder.training.loop.save_file", full)
    with pytest.raises(InputError, match=r"training.state: cannot be written: .*No space left"):
        trained(tmp_path / "run", target, text, loop())
    assert (tmp_path / "run" / "training.state").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.jsonl", "training.state"]


def test_a_loss_that_is_not_finite_stops_the_run(target, text, tmp_path):
    with pytest.raises(InputError, match="--learning-rate: the loss is not finite any more, at step"):
        trained(tmp_path / "run", target, text, loop(steps=30, learning_rate=1e30, clip=1e30))


def test_the_learning_rate_rises_and_falls():
    settings = loop(steps=100, warmup_steps=10, learning_rate=2.0)
    rates = [learning_rate(settings, Progress(steps=step)) for step in range(100)]
    assert rates[0] == pytest.approx(0.2, rel=1e-3)
    assert max(rates) == rates[9]
    assert rates[99] == pytest.approx(0.1, rel=0.02)
    halfway = learning_rate(loop(steps=None, minutes=2.0, learning_rate=2.0), Progress(steps=99, elapsed_s=60))
    assert halfway == pytest.approx(2 * (0.05 + 0.95 / 2))


# The command


def run(lab, out, *more):
    return decoder.train.main(
        [
            *("--target", str(lab / "toy" / "target"), "--lab", str(lab), "--out", str(out)),
            *(() if "--text" in more else ("--text", str(lab / "toy" / "text" / "written-t1-train"))),
            *("--documents", "4", "--warmup-steps", "2", "--ffn", "32", "--layers-of-draft", "1", *more),
        ]
    )


def test_the_command_trains_reports_and_goes_on(lab, target, tmp_path, capsys):
    out = tmp_path / "drafter"
    more = ("--drafter", "dspark", "--steps", "6", "--draft-vocab", "30", "--markov-rank", "4", "--block", "3")
    assert run(lab, out, *more, "--save-dtype", "bfloat16", "--json", str(tmp_path / "report.json")) == 0
    said = capsys.readouterr()
    assert "6 steps" in said.out
    assert "30 draft tokens hold" in said.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == json.loads((out / "training.json").read_text())
    assert report["weights_sha256"] == target_sha256(out)
    assert report["facts"]["shards"] == [f"written-t1-train/text-0000{n}.safetensors" for n in range(2)]
    net = load_net(out, target)
    assert (net.config.block_size, net.config.draft_vocab_size, net.config.target_layer_ids) == (3, 30, (0, 2))
    weights = (out / "model.safetensors").read_bytes()
    assert run(lab, out, *more, "--save-dtype", "bfloat16") == 0  # done already: nothing is trained twice
    assert (out / "model.safetensors").read_bytes() == weights
    assert report["held_out"] is None
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "curve.png",
        "curve.svg",
        "metrics.jsonl",
        "model.safetensors",
        "training.json",
        "training.state",
    ]


def test_what_was_trained_is_judged_on_other_text(lab, target, text, tmp_path, capsys):
    other = str(lab / "toy" / "text" / "written-t1-train")
    more = ("--drafter", "dflash", "--block", "3", "--steps", "2", "--anchors", "1000", "--held-out", other)
    assert run(lab, tmp_path / "out", *more) == 0
    assert "(held-out text)" in capsys.readouterr().out
    held_out = json.loads((tmp_path / "out" / "training.json").read_text())["held_out"]
    # Every anchor of every document, so that chance has no say.
    objective = make_block(shape_of("dflash", anchors=1000), target, text, tmp_path / "out", 0)
    found = judge_text(objective, text, 4, 5, torch.device("cpu"))
    assert held_out == pytest.approx(found, rel=1e-4)
    assert held_out["positions"] > text.answer_tokens


def test_the_layers_that_are_read_unless_told_otherwise():
    assert decoder.train.default_feature_layers((1, 8, 14, 21, 28, 29)) == (8, 21, 29)
    assert decoder.train.default_feature_layers((5,)) == (5,)


def test_a_drafter_is_trained_further(lab, target, tmp_path):
    assert run(lab, tmp_path / "first", "--drafter", "dflash", "--steps", "3") == 0
    again = ["--target", str(lab / "toy" / "target"), "--lab", str(lab), "--drafter", "dflash", "--documents", "4"]
    again += ["--text", str(lab / "toy" / "text" / "written-t1-train"), "--init", str(tmp_path / "first")]
    assert (
        decoder.train.main([*again, "--steps", "1", "--out", str(tmp_path / "second"), "--learning-rate", "1e-9"]) == 0
    )
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert all(float((first[name] - second[name]).abs().max()) < 1e-5 for name in first)


@pytest.mark.parametrize(
    "more, message",
    (
        (("--steps", "0"), "--steps: expected at least 1 (got 0)"),
        (("--minutes", "-1"), "--minutes: expected a number above 0 (got -1)"),
        (("--steps", "3", "--draft-vocab", "49"), "--draft-vocab: the target has 48 tokens (got 49)"),
        (("--steps", "3", "--feature-layers", "0,5"), "layer 5 was not kept; there are 0, 1, 2"),
        (("--steps", "3", "--feature-layers", "a"), "--feature-layers: expected layers, as '8,21,29' (got 'a')"),
        (("--steps", "3", "--ttt-length", "3"), "--ttt-length: means nothing to dspark"),
        (("--steps", "3", "--documents", "25"), "too little text: "),
        (("--steps", "3", "--text", "absent"), "holds no text; `python -m decoder.collect` writes it"),
        (("--steps", "3", "--init", "elsewhere"), "--ffn: a drafter that is trained further keeps its shape (--init)"),
    ),
)
def test_bad_options(more, message, lab, tmp_path, capsys):
    assert run(lab, tmp_path / "out", "--drafter", "dspark", *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_text_of_another_target_is_refused(lab, tmp_path, capsys):
    other = make_lab(tmp_path / "other", documents=2, seed=9)
    folder = lab / "toy" / "text" / "written-t1-train"
    assert run(other, tmp_path / "out", "--drafter", "dspark", "--steps", "1", "--text", str(folder)) == 2
    assert "meta.json: target_sha256: holds text of another target (toy, weights" in capsys.readouterr().err


def test_a_drafter_of_another_kind_is_no_start(target, text, tmp_path):
    make_block(shape_of("dflash"), target, text, None, 0).save(tmp_path / "dflash", torch.float32)
    with pytest.raises(InputError, match="holds a drafter of kind dflash; --drafter says dspark"):
        make_block(shape_of(), target, text, tmp_path / "dflash", 0)


def test_a_shard_that_was_cut_off_is_named(lab, target, tmp_path):
    folder = tmp_path / "text"
    shutil.copytree(lab / "toy" / "text" / "written-t1-train", folder)
    path = shard_paths(folder)[0]
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(InputError, match=r"text-00000.safetensors: cannot be read"):
        TrainingText([folder], load_meta(folder).target_sha256, target.lm_head)


def test_loss_weights_are_those_of_the_published_configs(deepspec):
    for path in (deepspec / "vectors").glob("dspark_*/training.json"):
        said = json.loads(path.read_text())
        want = (said["ce_loss_alpha"], said["l1_loss_alpha"], said["confidence_head_alpha"])
        weights = LossWeights()
        assert (weights.ce, weights.tv, weights.confidence) == want
        assert position_weights(weights.positions, 2)[1] == pytest.approx(np.exp(-1 / said["loss_decay_gamma"]))
