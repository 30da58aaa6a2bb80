"""``python -m decoder.train``: train a drafter on text that its target wrote."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoder.errors import Fault, InputError
from profiles.errors import exit_code_of

if TYPE_CHECKING:
    from decoder.training.batches import TrainingText
    from decoder.training.objective import DraftShape, Objective

DESCRIPTION = """Train a drafter on text that its target wrote (`python -m decoder.collect` lets it write).

The target stays as it is, and lends its embedding and head. A run that was stopped goes on where it was when the same
command is given again: with the same result, if its budget is in steps or tokens."""
EXAMPLE = (
    "python -m decoder.train --target smollm2 --drafter dspark --draft-vocab 8192 --minutes 20 --save-dtype bfloat16"
)

#: Who makes a drafter's objective: module and function.
MAKERS = {
    "dspark": ("decoder.training.block", "make_block"),
    "dflash": ("decoder.training.block", "make_block"),
    "eagle3": ("decoder.training.chain", "make_chain"),
    "mtp": ("decoder.training.chain", "make_chain"),
    "small_model": ("decoder.training.small", "make_small"),
}
REPORT = "training.json"


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m decoder.train",
        description=DESCRIPTION,
        epilog=f"example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, metavar="NAME", help="smollm2, tiny, or a local Hugging Face folder")
    parser.add_argument("--drafter", required=True, choices=tuple(MAKERS), help="what is trained")
    parser.add_argument(
        "--text",
        action="append",
        metavar="NAME",
        help="text to learn from: a folder, or the name of one under LAB/TARGET/text; may be repeated "
        "(default: written-t1-train)",
    )
    parser.add_argument(
        "--held-out",
        default="written-t1-held_out",
        metavar="NAME",
        help="text to judge by in the end, where there is any (default: written-t1-held_out)",
    )
    parser.add_argument("--lab", type=Path, default=Path("lab"), metavar="DIR", help="where it lies (default: lab)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: LAB/TARGET/drafters/DRAFTER")
    parser.add_argument("--init", type=Path, metavar="DIR", help="go on from this checkpoint, whose shape counts")
    shape = parser.add_argument_group("shape of a new drafter")
    shape.add_argument("--layers-of-draft", type=int, metavar="N", help="default: 2; eagle3, mtp: 1")
    shape.add_argument("--ffn", type=int, metavar="N", help="width inside the MLPs (default: 1024)")
    shape.add_argument("--block", type=int, metavar="N", help="dspark, dflash: draft tokens a round (default: 5)")
    shape.add_argument("--ttt-length", type=int, metavar="N", help="eagle3, mtp: steps that are unrolled (default: 5)")
    shape.add_argument("--markov-rank", type=int, metavar="N", help="dspark (default: 32)")
    shape.add_argument("--head", choices=("vanilla", "gated", "rnn"), help="dspark's Markov head (default: vanilla)")
    shape.add_argument(
        "--draft-vocab", type=int, metavar="N", help="draft only the N most frequent tokens (default: all)"
    )
    shape.add_argument(
        "--feature-layers",
        metavar="LIST",
        help="target layers that it reads, of those kept (default: three; mtp: the last)",
    )
    shape.add_argument(
        "--start",
        choices=("seed", "target"),
        help="what its layers begin as: chance, or the target's own last layers (default: seed)",
    )
    loss = parser.add_argument_group("loss")
    loss.add_argument("--ce-weight", type=float, default=0.1, help="of cross entropy (default: 0.1)")
    loss.add_argument(
        "--ce-of",
        choices=("text", "target"),
        default="text",
        help="cross entropy of the token that the text goes on with (default, as published), or of the target's "
        "whole distribution",
    )
    loss.add_argument("--tv-weight", type=float, default=0.9, help="of total variation (default: 0.9)")
    loss.add_argument("--confidence-weight", type=float, default=1.0, help="default: 1")
    loss.add_argument(
        "--position-weights",
        choices=("published", "block", "even"),
        default="published",
        help="exp(-k/4) (default), exp(-k/block), or 1 at every position k",
    )
    loop = parser.add_argument_group("training")
    budget = loop.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, metavar="N", help="stop after N steps")
    budget.add_argument("--tokens", type=int, metavar="N", help="stop after reading N answer tokens, with repetition")
    budget.add_argument(
        "--minutes", type=float, metavar="X", help="stop after X minutes of steps; not repeatable to the bit"
    )
    loop.add_argument("--documents", type=int, default=8, metavar="N", help="a step (default: 8)")
    loop.add_argument(
        "--anchors", type=int, metavar="N", help="blocks or chains a document (default: 32; small_model: every token)"
    )
    loop.add_argument("--learning-rate", type=float, default=1e-3, metavar="X", help="highest (default: 0.001)")
    loop.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="adamw (default); muon: for the matrices between hidden states, AdamW for the rest",
    )
    loop.add_argument("--warmup-steps", type=int, default=50, metavar="N", help="default: 50")
    loop.add_argument("--weight-decay", type=float, default=0.01, metavar="X", help="default: 0.01")
    loop.add_argument("--clip", type=float, default=1.0, metavar="X", help="largest norm of the gradient (default: 1)")
    loop.add_argument("--seed", type=int, default=0, help="of weights, order and anchors (default: 0)")
    loop.add_argument(
        "--save-every", type=float, default=120.0, metavar="S", help="seconds between states (default: 120)"
    )
    loop.add_argument(
        "--save-dtype", choices=("float32", "bfloat16"), default="float32", help="of the checkpoint (default: float32)"
    )
    loop.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda or cuda:N (default: cpu)")
    loop.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reported numbers as JSON too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = make_parser().parse_args(words)
    return exit_code_of(lambda: _run(options, shlex.join(["python", "-m", "decoder.train", *words])))


def _run(options: argparse.Namespace, command: str) -> int:
    _check(options)
    import torch

    from decoder.lab.targets import target_folder, target_name, target_sha256
    from decoder.loading import check_device, write_json
    from decoder.target import load_target
    from decoder.training.batches import TrainingText
    from decoder.training.loop import LoopSettings, judge_text, read_facts, read_metrics, train

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = torch.device(check_device(options.device))
    folder = target_folder(options.target, options.lab)
    home = options.lab / target_name(options.target)
    out: Path = options.out or home / "drafters" / options.drafter
    target = load_target(folder, device=str(device))
    sha256 = target_sha256(folder)
    begun = read_facts(out)
    text = TrainingText(
        [_text_folder(name, home) for name in options.text or ["written-t1-train"]],
        sha256,
        target.lm_head,
        begun["shards"] if begun else None,
    )
    shape = make_shape(options, text)
    module, function = MAKERS[options.drafter]
    objective: Objective = getattr(import_module(module), function)(shape, target, text, options.init, options.seed)
    text.check_layers(objective.feature_layers)
    settings = LoopSettings(
        seed=options.seed,
        documents=options.documents,
        steps=options.steps,
        tokens=options.tokens,
        minutes=options.minutes,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
        weight_decay=options.weight_decay,
        clip=options.clip,
        optimizer=options.optimizer,
    )
    facts = {
        "target": target_name(options.target),
        "target_sha256": sha256,
        "text_sha256": text.digest,
        "shards": text.shards,
        "shape": asdict(shape),
        "init_sha256": target_sha256(options.init) if options.init else None,
    }
    trained = sum(value.numel() for value in objective.parameters().values())
    print(
        f"{options.drafter}: {trained / 1e6:.2f} M parameters are trained, on {len(text)} documents with "
        f"{text.answer_tokens} answer tokens{_coverage(shape, text)}",
        file=sys.stderr,
    )
    progress = train(objective, text, settings, out, device=device, save_every_s=options.save_every, facts=facts)
    publish(objective, out, getattr(torch, options.save_dtype))
    held_out = _text_folder(options.held_out, home)
    judged = None
    if progress.share(settings) >= 1 and held_out.is_dir():
        other = TrainingText([held_out], sha256, target.lm_head)
        other.check_layers(objective.feature_layers)
        judged = judge_text(objective, other, options.documents, options.seed, device)
    report = _report(options, command, out, facts, asdict(settings), asdict(progress), judged)
    draw_curve(read_metrics(out), out / "curve", options.drafter)
    _write_text(out / REPORT, json.dumps(report, indent=2) + "\n")
    write_json(options.json, report)
    print(_table(report, out))
    if progress.share(settings) < 1:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _text_folder(name: str, home: Path) -> Path:
    folder = home / "text" / name
    return folder if folder.is_dir() or not Path(name).is_dir() else Path(name)


#: Options that shape a new drafter, with what they are where nothing is said.
_SHAPE: dict[str, Any] = {
    "layers_of_draft": 2,
    "ffn": 1024,
    "block": 5,
    "ttt_length": 5,
    "markov_rank": 32,
    "head": "vanilla",
    "draft_vocab": None,
    "feature_layers": None,
    "start": "seed",
}
_CHAINED = ("eagle3", "mtp")


def _check(options: argparse.Namespace) -> None:
    faults = []
    counts = ("layers_of_draft", "ffn", "block", "ttt_length", "markov_rank", "draft_vocab")
    for key in (*counts, "steps", "tokens", "documents", "anchors", "threads"):
        value = getattr(options, key)
        if value is not None and value < 1:
            faults.append(Fault(f"expected at least 1 (got {value})", key=_option(key)))
    for key in ("minutes", "learning_rate", "clip"):
        value = getattr(options, key)
        if value is not None and not 0 < value < math.inf:
            faults.append(Fault(f"expected a number above 0 (got {value:g})", key=_option(key)))
    for key in ("warmup_steps", "weight_decay", "ce_weight", "tv_weight", "confidence_weight", "save_every", "seed"):
        if not 0 <= getattr(options, key) < math.inf:
            faults.append(Fault(f"expected 0 or more (got {getattr(options, key):g})", key=_option(key)))
    unused = {
        "block": ("dspark", "dflash"),
        "markov_rank": ("dspark",),
        "head": ("dspark",),
        "ttt_length": _CHAINED,
        "feature_layers": ("dspark", "dflash", *_CHAINED),
        "start": ("dspark", "dflash", *_CHAINED),
        "anchors": ("dspark", "dflash", *_CHAINED),
    }
    for key in (*_SHAPE, "anchors"):
        if getattr(options, key) is None:
            continue
        if options.init is not None and key in _SHAPE:
            faults.append(Fault("a drafter that is trained further keeps its shape (--init)", key=_option(key)))
        elif options.drafter not in unused.get(key, MAKERS):
            faults.append(Fault(f"means nothing to {options.drafter}", key=_option(key)))
    if faults:
        raise InputError(*faults)


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def make_shape(options: argparse.Namespace, text: TrainingText) -> DraftShape:
    """Return what the options, and where they say nothing the defaults, ask of a drafter; raises `InputError`."""
    from decoder.losses import LossWeights
    from decoder.training.objective import DraftShape

    kept = text.metas[0].layers
    chosen = {
        key: default if getattr(options, key) is None else getattr(options, key) for key, default in _SHAPE.items()
    }
    vocabulary = len(text.counts)
    draft_vocab = chosen["draft_vocab"]
    if draft_vocab is not None and draft_vocab > vocabulary:
        raise InputError(Fault(f"the target has {vocabulary} tokens (got {draft_vocab})", key="--draft-vocab"))
    if options.drafter == "small_model":
        layers: tuple[int, ...] = ()
    elif chosen["feature_layers"] is not None:
        layers = _layers(chosen["feature_layers"])
    else:
        layers = kept[-1:] if options.drafter == "mtp" else default_feature_layers(kept)
    return DraftShape(
        drafter=options.drafter,
        layers=1 if options.drafter in _CHAINED and options.layers_of_draft is None else chosen["layers_of_draft"],
        ffn=chosen["ffn"],
        length=chosen["ttt_length"] if options.drafter in _CHAINED else chosen["block"],
        feature_layers=layers,
        draft_vocab=None if draft_vocab == vocabulary else draft_vocab,
        markov_rank=chosen["markov_rank"],
        head=chosen["head"],
        anchors=32 if options.anchors is None else options.anchors,
        start=chosen["start"],
        weights=LossWeights(
            ce=options.ce_weight,
            tv=options.tv_weight,
            confidence=options.confidence_weight,
            positions=options.position_weights,
            ce_of=options.ce_of,
        ),
    )


def default_feature_layers(kept: Sequence[int]) -> tuple[int, ...]:
    """Return the last of the layers that were kept and every second before it, three at most: low, high, last."""
    return tuple(sorted(kept)[::-2][:3][::-1])


def _layers(text: str) -> tuple[int, ...]:
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = ()
    if not layers or len(set(layers)) < len(layers):
        raise InputError(Fault(f"expected layers, as '8,21,29' (got '{text}')", key="--feature-layers"))
    return layers


def _coverage(shape: DraftShape, text: TrainingText) -> str:
    if shape.draft_vocab is None:
        return ""
    share = float(text.mass[text.frequent_tokens(shape.draft_vocab)].sum() / text.mass.sum())
    return f"; {shape.draft_vocab} draft tokens hold {share:.2%} of what the target would write"


def publish(objective: Objective, out: Path, dtype: Any) -> None:
    """Write the drafter's files into ``out``, each by rename; raises `InputError` where the disk is full."""
    from safetensors import SafetensorError

    part = out / ".checkpoint"
    shutil.rmtree(part, ignore_errors=True)
    try:
        objective.save(part, dtype)
        for path in sorted(part.iterdir(), reverse=True):  # the weights before the config
            path.replace(out / path.name)
    except (OSError, SafetensorError) as fault:
        raise InputError(Fault(f"cannot be written: {fault}", str(out))) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _accepts(names: Iterable[str]) -> list[str]:
    """Return the names of acceptances among those of metrics, by draft position."""
    return sorted((name for name in names if name.startswith("accept@")), key=lambda name: int(name.partition("@")[2]))


def draw_curve(lines: Sequence[dict[str, float]], stem: Path, drafter: str, points: int = 60) -> list[Path]:
    """Draw loss and acceptance over draft positions trained, as PNG and SVG; each point is a mean over steps."""
    from analysis.style import new_figure, plot_style, save
    from decoder.training.loop import mean_metrics

    size = -(-len(lines) // points)
    parts = [mean_metrics(lines[start : start + size]) for start in range(0, len(lines), size)]
    done, at = 0.0, []
    for part in parts:
        at.append((done + part["positions"] / 2) / 1e6)
        done += part["positions"]
    accepts = _accepts({key for part in parts for key in part})
    with plot_style():
        figure = new_figure(8.0, 3.2, title=f"Training of {drafter}", note="", legend={}, signs={})
        left, right = figure.subplots(1, 2)
        left.plot(at, [part["loss"] for part in parts], color="#303030")
        for shade, key in enumerate(accepts):
            color = (0.05 + 0.6 * shade / len(accepts), 0.25 + 0.45 * shade / len(accepts), 0.6)
            position = int(key.removeprefix("accept@")) + 1
            right.plot(at, [part.get(key, math.nan) for part in parts], color=color, label=f"draft token {position}")
        left.set_ylabel("loss")
        right.set_ylabel("chance of acceptance")
        right.set_ylim(0, 1)
        right.legend()
        for axes in (left, right):
            axes.set_xlabel("draft positions trained (millions)")
        return save(figure, stem)


def _report(
    options: argparse.Namespace,
    command: str,
    out: Path,
    facts: dict[str, Any],
    settings: dict[str, Any],
    progress: dict[str, Any],
    held_out: dict[str, float] | None,
) -> dict[str, Any]:
    import platform

    import torch

    from decoder.lab.targets import target_sha256
    from decoder.training.loop import mean_metrics, read_metrics

    if options.init is not None:  # what the checkpoint says of itself counts, and its config goes along
        shape = {key: value for key, value in facts["shape"].items() if key in ("drafter", "anchors", "weights")}
        facts = {**facts, "shape": shape}
    lines = read_metrics(out)
    positions = sum(line["positions"] for line in lines)
    device = torch.device(options.device)
    return {
        "drafter": options.drafter,
        "command": command,
        "weights_sha256": target_sha256(out),
        "bytes": sum(path.stat().st_size for path in out.glob("*.safetensors")),
        **progress,
        "positions": positions,
        "positions_per_s": positions / max(progress["elapsed_s"], 1e-9),
        "last_5_percent": mean_metrics(lines[-max(1, len(lines) // 20) :]) if lines else {},
        "held_out": held_out,
        "settings": settings,
        "save_dtype": options.save_dtype,
        "facts": facts,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    import platform

    import torch

    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def _table(report: dict[str, Any], out: Path) -> str:
    rows = [
        ("drafter", f"{report['drafter']}, {report['bytes'] / 1e6:.2f} MB in {out}"),
        ("trained", f"{report['steps']} steps, {report['positions']:.0f} draft positions, {report['elapsed_s']:.0f} s"),
        ("speed", f"{report['positions_per_s']:.0f} draft positions/s"),
    ]
    for found, where in ((report["last_5_percent"], "last 5 % of the steps"), (report["held_out"], "held-out text")):
        if found:
            accepts = " ".join(f"{found[key]:.3f}" for key in _accepts(found))
            rows.append(("loss", f"{found['loss']:.4f}, acceptance by position {accepts} ({where})"))
    return "\n".join(f"{name:<11} {value}" for name, value in rows)


if __name__ == "__main__":
    sys.exit(main())
