"""Step times: what is measured is the engine's own step; what is fitted adds up; what is wrong is said."""

import json
import math
import re

import numpy as np
import pytest
import torch

from decoder.journal import Journal
from decoder.measure import _models, main, make_parser
from decoder.packed import PackedLinear, can_pack
from decoder.shapes import SHAPES, make_shape
from decoder.step_times import (
    Point,
    Samples,
    Visits,
    fit,
    fit_prefill,
    grid,
    levelled,
    loop_gaps_s,
    paces_of,
    run_point,
    spread,
)
from profiles.curves import draft_cost, step_cost
from profiles.files import load_profile
from sim.batching import Chunked
from sim.verify import Fixed
from tests.decoder.engines import drafter_of, engine_of, transformer

LAW = {"floor": 2.0, "token": 0.3, "request": 0.05, "context": 0.001, "prompt_floor": 1.5, "prompt": 0.1}


def seconds(point):
    """A jagged law: every size of batch has a whim of its own."""
    verify = LAW["floor"] + LAW["token"] * point.batch_tokens + (0.7 if point.batch_tokens % 3 == 1 else 0)
    decoding = verify + LAW["request"] * point.requests + LAW["context"] * point.requests * point.context
    prompt = LAW["prompt"] * point.prompt
    return decoding + prompt if point.requests else LAW["prompt_floor"] + prompt


def lawful(points, draft_s=0.25):
    return {point: Samples([seconds(point) + draft_s] * 3, [draft_s] * 3) for point in points}


def test_parts_of_a_lawful_machine_are_found():
    points = grid((1, 2, 4, 8), (0, 1, 3), (10, 100), max_batch_tokens=64, max_cached_tokens=9999, margin=4)
    found = fit(lawful(points))
    assert found.rms < 1e-9
    assert found.per_request_s == pytest.approx(LAW["request"])
    assert found.per_context_token_s == pytest.approx(LAW["context"])
    for size, value in zip(found.sizes, found.verify_s, strict=True):
        assert value == pytest.approx(2.0 + 0.3 * size + (0.7 if size % 3 == 1 else 0))
    assert found.draft_s == {1: 0.25, 2: 0.25, 4: 0.25, 8: 0.25}


@pytest.mark.parametrize("several", (True, False))
@pytest.mark.parametrize("beside_s", (0.0, 0.3))
def test_what_rows_of_prompts_add_is_found(beside_s, several):
    """A machine that takes another way past 40 rows, of whatever they are rows of; its drafter takes prompts in too."""

    def rows_s(rows):
        return 0.1 * rows + 0.9 * np.clip((rows - 40) / 4, 0, 1)

    base = fit(lawful(grid((1, 2, 4, 8), (0, 1, 3), (10, 100), max_batch_tokens=64, max_cached_tokens=9999, margin=4)))
    points = [Point(0, 0, 0, prompt) for prompt in (8, 40, 44, 90)]
    points += [Point(4, 0, 10, prompt) for prompt in (8, 40, 44, 80)]
    if several:
        points += [Point(4, 1, 10, prompt) for prompt in (8, 40, 44, 80)]
    taken = {}
    for point in points:
        verified = point.batch_tokens
        draft_s = (0.25 if point.requests else 0.11) + 0.02 * point.prompt
        step_s = seconds(point) - LAW["prompt"] * point.prompt + rows_s(verified + point.prompt) - rows_s(verified)
        step_s += draft_s + (beside_s if point.requests else 0.0)
        taken[point] = Samples([step_s] * 3, [draft_s] * 3)
    found = fit_prefill(taken, base)
    assert found.draft_floor_s == pytest.approx(0.11)
    assert found.draft_token_s == pytest.approx(0.02)
    assert found.sizes == (8, 40, 44, 80, 90)
    if several or not beside_s:
        assert found.floor_s == pytest.approx(LAW["prompt_floor"])
        assert found.beside_s == pytest.approx(beside_s, abs=1e-9)
        assert found.seconds == pytest.approx([rows_s(size) for size in found.sizes])
        assert max(map(abs, found.residuals.values())) < 1e-9
    else:
        # Beside one number of batch tokens nothing tells the two apart.
        assert found.beside_s == 0


def test_one_prompt_length_is_enough_for_a_rate():
    base = fit(lawful(grid((1, 2, 4), (0,), (10, 100), max_batch_tokens=64, max_cached_tokens=9999, margin=4)))
    points = [Point(0, 0, 0, 20), Point(4, 0, 10, 20)]
    drafts = {point: 0.25 * (point.requests > 0) for point in points}
    taken = {point: Samples([seconds(point) + own] * 3, [own] * 3) for point, own in drafts.items()}
    found = fit_prefill(taken, base)
    assert found.floor_s == pytest.approx(LAW["prompt_floor"])
    assert found.seconds == pytest.approx((20 * LAW["prompt"],))


def test_a_machine_of_another_law_leaves_residuals():
    points = grid((1, 2, 4, 8), (0, 1, 3), (10, 100), max_batch_tokens=64, max_cached_tokens=9999, margin=4)
    samples = lawful(points)
    samples[points[0]].step_s[:] = [2 * value for value in samples[points[0]].step_s]
    assert fit(samples).rms > 0.02


def test_the_grid_stays_within_its_limits():
    points = grid((1, 8), (0, 7), (10, 50), max_batch_tokens=16, max_cached_tokens=200, margin=8)
    assert points == [Point(1, 0, 10), Point(1, 0, 50), Point(1, 7, 10), Point(1, 7, 50), Point(8, 0, 10)]


def test_spread_is_half_the_interquartile_range():
    assert spread([1.0, 1.0, 1.0]) == 0
    assert spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ("dspark_rnn", "eagle3", "small_transformer"))
def test_the_engine_is_timed_and_left_as_it_was(kind):
    """Every step of a point is the same step: its rows, its drafts, its context; nothing is left behind."""
    engine = engine_of(
        transformer(), drafter_of(kind), Fixed(k=4), prefill=Chunked(chunk_tokens=16), blocks=100, max_running=9
    )
    for point in (Point(3, 2, 17), Point(2, 0, 5, prompt=9), Point(0, 0, 0, prompt=16), Point(8, 4, 1)):
        samples = run_point(engine, point, 3)
        # The drafter takes prompts in where nobody decodes, too.
        assert min(samples.draft_s) > 0
        rows = engine.journal.steps[-3:]
        assert [row.batch_tokens for row in rows] == [point.batch_tokens] * 3
        assert [row.decoding for row in rows] == [point.requests] * 3
        assert [row.context_tokens for row in rows] == [point.requests * point.context] * 3
        assert [row.prompt_tokens for row in rows] == [point.prompt] * 3
        assert all((row.draft_s > 0) is (point.requests > 0) for row in rows)
        assert engine.idle
        assert engine.pool.free == engine.pool.blocks


TOY = [
    "--shape",
    "toy",
    "--requests",
    "1,2",
    "--contexts",
    "8,40",
    "--prompts",
    "8,32",
    "--repeats",
    "3",
    "--steps",
    "1",
]


def test_a_profile_is_written_that_the_simulator_reads(tmp_path, capsys):
    out = tmp_path / "measured" / "toy.json"
    assert main([*TOY, "--out", str(out), "--json", str(tmp_path / "r.json"), "--max-spread", "9", "--roofline"]) == 0
    profile = load_profile(out)
    assert profile.name == "measured/toy"
    assert profile.disturbed is None
    cost = step_cost(profile.step_time, 8)
    assert (cost.verify_s[1:] > 0).all()
    assert (cost.known_from, cost.known_to) == (1, 8)
    drafted, a_token_each = draft_cost(profile.step_time, "dspark", 2)
    assert (drafted.seconds[1:] > 0).all()
    assert not a_token_each
    provenance = profile.step_time.verify.provenance
    assert provenance.origin == "fitted"
    assert "torch" in provenance.version
    assert provenance.command.startswith("python -m decoder.measure --shape toy")
    report = json.loads((tmp_path / "r.json").read_text())
    # Prompts: alone, beside one request, beside two, and beside two that draft.
    assert len(report["points"]) == 2 * 3 * 2 + 2 * 4
    assert "ms rms off" in profile.step_time.draft["dspark"].prefill.provenance.note
    assert all(point["target_s"] > 0 for point in report["points"])
    assert report["roofline"]["copy_bytes_per_s"] > 0
    assert "parts against measured steps" in capsys.readouterr().out


@pytest.mark.skipif(not can_pack(), reason="no kernel for packed weights here")
def test_steps_are_timed_on_packed_weights():
    target, drafter = _models(make_parser().parse_args([*TOY, "--out", "x.json"]), torch.device("cpu"))
    for model in (target.model, drafter.net):
        kinds = {type(module) for module in model.modules()}
        assert PackedLinear in kinds
        assert torch.nn.Linear not in kinds


def test_a_disturbed_machine_is_marked(tmp_path):
    out = tmp_path / "toy.json"
    assert main([*TOY, "--out", str(out), "--max-spread", "0"]) == 0
    assert "repeats of a step differ by" in load_profile(out).disturbed


def test_graph_sizes_make_a_table_that_rounds_up(tmp_path):
    out = tmp_path / "toy.json"
    assert main([*TOY, "--out", str(out), "--graph-sizes", "2,4", "--lengths", "0,1,3"]) == 0
    segments = load_profile(out).step_time.verify.segments
    assert [(segment.between, segment.sizes) for segment in segments] == [("round_up", (2, 4)), ("linear", (8,))]


@pytest.mark.parametrize(
    "options, message",
    (
        (["--shape", "qwen3-9b"], "--shape: unknown shape 'qwen3-9b'; known: qwen3-4b, qwen3-8b, qwen3-14b, toy"),
        (["--device", "cuda"], "--device: this machine, or this build of torch, has no CUDA device"),
        (["--requests", "4,2"], r"--requests: expected numbers of at least 1 that rise \(got '4,2'\)"),
        (["--contexts", "x"], r"--contexts: expected whole numbers with commas between \(got 'x'\)"),
        (["--contexts", "5000"], "--contexts: the target holds 4096 tokens; 5004 were asked for"),
        (["--lengths", "0,4"], r"--lengths: expected at most the drafter's block of 3 \(got 4\)"),
        (["--minutes", "0"], r"--minutes: expected minutes above 0 \(got 0\)"),
        (["--repeats", "1"], r"--repeats: expected at least 3 \(got 1\)"),
        (["--graph-sizes", "4096"], "--graph-sizes: 4096 has no effect: no step exceeds 2048 tokens"),
        (["--drafter", "x"], "--drafter: has no effect with --shape"),
        (["--out", "x.txt"], r"--out: expected a name that ends in .json \(got 'x.txt'\)"),
        (["--max-batch-tokens", "1", "--lengths", "3"], "--requests: no step of the grid fits the limits"),
    ),
)
def test_bad_input_is_said_and_nothing_is_written(tmp_path, capsys, options, message):
    if options[0] == "--device" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    out = tmp_path / "toy.json"
    assert main([*TOY, "--out", str(out), *options]) == 2
    assert any(re.match(message, line) for line in capsys.readouterr().err.splitlines())
    assert not list(tmp_path.iterdir())


def test_shapes_have_the_published_sizes():
    """Weights of the models that a step multiplies with, as published (billions, embeddings aside)."""
    for name, billions in (("qwen3-4b", 4.02), ("qwen3-8b", 7.57), ("qwen3-14b", 13.99)):
        assert SHAPES[name].weight_count / 1e9 == pytest.approx(billions, abs=0.01)
    target, drafter = make_shape(SHAPES["toy"], device=torch.device("cpu"), dtype=torch.bfloat16, draft_length=5)
    assert (target.dtype, drafter.trained_length) == (torch.bfloat16, 5)
    assert SHAPES["toy"].weight_count == sum(
        tensor.numel() for name, tensor in target.model.named_parameters() if "embed" not in name and "norm" not in name
    )


@pytest.mark.needs_shared
@pytest.mark.parametrize("size", ("4b", "8b", "14b"))
def test_shapes_are_those_of_the_published_drafters(shared_dir, size):
    raw = json.loads((shared_dir / "reference/deepspec/configs" / f"dspark_qwen3_{size}_block7.json").read_text())[
        "config"
    ]
    shape = SHAPES[f"qwen3-{size}"]
    found = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "num_hidden_layers": shape.draft_layers,
        "num_target_layers": shape.layers,
        "target_layer_ids": list(shape.feature_layers),
        "block_size": shape.block,
        "markov_rank": shape.markov_rank,
        "mask_token_id": shape.mask_token_id,
        "vocab_size": shape.vocab_size,
        "head_dim": shape.head_dim,
    }
    assert found == {key: raw[key] for key in found}


class Seconds:
    """A clock of which every look takes a second; writing a step down takes ``writing_s`` more."""

    def __init__(self, writing_s=0.0):
        self.now, self.writing_s = 0.0, writing_s

    def __call__(self):
        self.now += 1.0
        return self.now

    def journal(self):
        clock = self

        class Slow(Journal):
            def stepped(self, row):
                clock.now += clock.writing_s
                super().stepped(row)

        return Slow()


@pytest.mark.parametrize("writing_s", (0.0, 7.0))
def test_the_time_between_steps_is_what_the_driver_s_loop_takes(writing_s):
    clock = Seconds(writing_s)
    engine = engine_of(
        transformer(), drafter_of("dspark_rnn"), Fixed(k=4), clock=clock, journal=clock.journal(), max_running=3
    )
    gaps_s = loop_gaps_s(engine, 3, 5)
    # The first step reads the prompts and delivers a token; each later one delivers another.
    assert len(gaps_s) == 5 - 1
    # The loop looks at the clock once, and the next step begins with a look.
    assert gaps_s.tolist() == pytest.approx([2.0 + writing_s] * 4)
    assert engine.idle
    assert engine.pool.free == engine.pool.blocks


def test_single_visits_give_every_point_its_turn():
    engine = engine_of(transformer(), drafter_of("dspark_rnn"), Fixed(k=4), clock=Seconds())
    points = [Point(1, length, context) for length in (0, 2, 4) for context in (4, 8)]
    visits = Visits(engine, points, steps=2, seed=1)
    rounds = [[visits.visit_next() for _ in points] for _ in range(3)]
    orders = [[point for point, _ in found] for found in rounds]
    assert all(sorted(order) == sorted(points) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    # One sample a visit: that of the step after the one of warm-up.
    for point in points:
        assert visits.samples[point].step_s == [seconds for found in rounds for at, seconds in found if at == point]
    assert visits.passes == 0
    assert engine.journal.steps == []


@pytest.mark.parametrize("limit_s, repeats", ((0.0, 3), (1e9, 6)))
def test_repeats_that_would_end_too_late_are_left_out(limit_s, repeats):
    engine = engine_of(transformer(), drafter_of("dspark_rnn"), Fixed(k=4), clock=Seconds())
    point = Point(1, 0, 4)
    visits = Visits(engine, [point], steps=2)
    visits.repeat(6, limit_s)
    assert visits.passes == repeats
    assert len(visits.samples[point].step_s) == 2 * repeats
    before_s = visits.took_s
    visits.again()
    assert len(visits.samples[point].step_s) == 2 * (repeats + 1)
    assert visits.took_s == pytest.approx(before_s * (repeats + 1) / repeats)


def test_each_pass_and_each_run_of_visits_is_a_stretch_of_its_own():
    engine = engine_of(transformer(), drafter_of("dspark_rnn"), Fixed(k=4), clock=Seconds())
    points = [Point(1, length, 4) for length in (0, 2)]
    visits = Visits(engine, points, steps=2)
    visits.again()
    for _ in range(2):
        visits.begin_stretch()
        visits.visit_next()
    visits.again()
    found = [visits.samples[point] for point in points]
    assert sorted(stretch for one in found for stretch in one.stretches) == [0] * 4 + [1, 2] + [3] * 4
    assert all(len(one.step_s) == len(one.draft_s) == len(one.stretches) for one in found)


def visited(rng, points, stretches, noise=0.0):
    """Points' seconds (drafting a tenth), by the pace of each stretch and how often each point is visited in it."""
    samples = {point: Samples() for point in points}
    for stretch, (pace, times) in enumerate(stretches):
        for point, seconds in points.items():
            for _ in range(times[point]):
                step_s = pace * seconds * math.exp(noise * rng.normal())
                samples[point].step_s.append(step_s)
                samples[point].draft_s.append(0.1 * step_s)
                samples[point].stretches.append(stretch)
    return samples


def test_points_visited_at_different_times_are_held_to_one_pace():
    """Half of one point's visits are at a slow time and most of the other's at a fast one; plain medians are off."""
    rng = np.random.default_rng(0)
    one, other = Point(1, 0, 80), Point(0, 0, 0, 64)
    points = {one: 0.1, other: 0.2, **{Point(2, length, 80): 0.1 + 0.01 * length for length in range(6)}}
    paces = [1.3, 1.3, 0.9, 1.0, 0.8]
    few = [dict.fromkeys(points, 4), dict.fromkeys(points, 4), *(dict.fromkeys(points, 3) for _ in range(3))]
    few[2][other] = few[4][other] = 9
    few[0][other] = 1
    samples = visited(rng, points, list(zip(paces, few, strict=True)))
    assert np.median(samples[other].step_s) / np.median(samples[one].step_s) < 0.95 * 2
    level = levelled(samples)
    assert paces_of(samples) == pytest.approx(dict(enumerate(paces)))
    for point, seconds in points.items():
        np.testing.assert_allclose(level[point].step_s, seconds)
        np.testing.assert_allclose(level[point].draft_s, 0.1 * seconds)
        assert level[point].stretches == samples[point].stretches
    # With noise, a pause among it, the paces are found to a few per cent.
    samples = visited(rng, points, list(zip(paces, few, strict=True)), noise=0.1)
    samples[one].step_s[0] *= 50
    found = paces_of(samples)
    np.testing.assert_allclose([found[at] for at in range(5)], paces, rtol=0.08)


def test_a_pace_is_over_that_of_the_median_sample():
    point = Point(1, 0, 80)
    every = {point: Samples([1.0, 2.0, 2.0, 2.0, 5.0], [0.1] * 5, [0, 1, 1, 1, 2])}
    assert paces_of(every) == pytest.approx({0: 0.5, 1: 1.0, 2: 2.5})
    assert levelled(every)[point].step_s == pytest.approx([2.0] * 5)
    alone = {point: Samples([1.0, 2.0], [0.1, 0.2], [4, 4])}
    assert levelled(alone)[point].step_s == [1.0, 2.0]
