"""``python -m decoder.collect``: let a target write, and keep its text and hidden states for training and judging."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoder.errors import Fault, InputError
from profiles.errors import exit_code_of

if TYPE_CHECKING:
    from decoder.lab.prompts import Document
    from decoder.lab.writing import Prompt

DESCRIPTION = """Let a target write text and keep it with the hidden states that drafters learn from.

Shards of documents appear one by one; a run that was stopped goes on where it was, with the same result."""
EXAMPLE = "python -m decoder.collect --target smollm2 --tokens 500000"


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m decoder.collect",
        description=DESCRIPTION,
        epilog=f"example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, metavar="NAME", help="smollm2, tiny, or a local Hugging Face folder")
    parser.add_argument(
        "--text",
        choices=("written", "corpus"),
        default="written",
        help="written: the target answers each prompt (default); corpus: it reads the answer that a person wrote",
    )
    parser.add_argument("--domains", default="code,math,chat", metavar="LIST", help="default: code,math,chat")
    parser.add_argument("--split", choices=("train", "held_out"), default="train", help="default: train")
    parser.add_argument(
        "--tokens", type=int, default=500_000, metavar="N", help="answer tokens wanted (default: 500000)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (default: 256)")
    parser.add_argument(
        "--prompt-tokens",
        metavar="N..M",
        help="only prompts of N to M tokens, the last N of each (default: all, whole)",
    )
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="write --max-new-tokens of every answer, past its end",
    )
    parser.add_argument("--per-domain", type=int, metavar="N", help="the first N prompts of each domain (default: all)")
    parser.add_argument(
        "--answers",
        type=int,
        default=1,
        metavar="N",
        help="ask all prompts N times, in turn (default: 1)",
    )
    parser.add_argument(
        "--layers", metavar="LIST", help="layers whose outputs are kept, from 0 (default: five, evenly, and the last)"
    )
    parser.add_argument("--group", type=int, default=192, metavar="N", help="documents a shard, decoded at once")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="write every Nth shard: N runs side by side share the work"
    )
    parser.add_argument("--seed", type=int, default=0, help="of every draw (default: 0)")
    parser.add_argument("--lab", type=Path, default=Path("lab"), metavar="DIR", help="where it lies (default: lab)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reported numbers as JSON too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = make_parser().parse_args(arguments)
    return exit_code_of(lambda: _run(options))


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return five layers, evenly from the second to the last but one, and the last."""
    first, last = min(1, num_layers - 1), max(num_layers - 2, 0)
    return tuple(sorted({round(first + (last - first) * part / 4) for part in range(5)} | {num_layers - 1}))


def _run(options: argparse.Namespace) -> int:
    for key in ("tokens", "max_new_tokens", "group", "per_domain", "answers"):
        value = getattr(options, key)
        if value is not None and value < 1:
            raise InputError(Fault(f"expected at least 1 (got {value})", key=f"--{key.replace('_', '-')}"))
    part, parts = _part(options.part)
    if options.prompt_tokens is not None:
        _span(options.prompt_tokens)
    if options.answers > 1 and options.temperature == 0:
        raise InputError(
            Fault("at temperature 0 all answers to a question are one (got --temperature 0)", key="--answers")
        )
    for key, given in (("--ignore-eos", options.ignore_eos), ("--answers", options.answers > 1)):
        if given and options.text == "corpus":
            raise InputError(Fault("is of answers that are written (got --text corpus)", key=key))
    if options.temperature < 0:
        raise InputError(Fault(f"expected 0 or more (got {options.temperature})", key="--temperature"))
    import platform

    import torch
    import transformers
    from tqdm import tqdm

    from decoder.lab.store import (
        Meta,
        bytes_per_token,
        count_tokens,
        open_folder,
        save_shard,
        shard_path,
    )
    from decoder.lab.targets import target_folder, target_name, target_sha256
    from decoder.lab.writing import read_group, write_group
    from decoder.loading import check_device, eos_ids, load_tokenizer
    from decoder.target import load_target

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    folder = target_folder(options.target, options.lab)
    target = load_target(folder, device=check_device(options.device))
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise InputError(Fault("holds no tokenizer; prompts cannot be asked", str(folder)))
    layers = _layers(options.layers, target.num_layers)
    name = target_name(options.target)
    called = folder_name(options.text, options.temperature, options.split, options.prompt_tokens, options.ignore_eos)
    out = options.lab / name / "text" / called
    meta = Meta(
        target=name,
        target_sha256=target_sha256(folder),
        layers=layers,
        hidden_size=target.hidden_size,
        text=options.text,
        temperature=options.temperature if options.text == "written" else 0.0,
        max_new_tokens=options.max_new_tokens,
        split=options.split,
        seed=options.seed,
        dtype=str(target.dtype).removeprefix("torch."),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu",
        },
        prompt_tokens=options.prompt_tokens,
        ignore_eos=options.ignore_eos,
        per_domain=options.per_domain,
    )
    per_token = bytes_per_token(len(layers), target.hidden_size)
    free = shutil.disk_usage(_existing(options.lab)).free
    # Prompts are kept too; they are shorter than what is written.
    expected = 2 * options.tokens * per_token
    print(
        f"features of layers {', '.join(map(str, layers))}: {per_token} bytes a token, at most {expected / 1e9:.1f} GB "
        f"for {options.tokens} answer tokens and their prompts ({free / 1e9:.1f} GB free)",
        file=sys.stderr,
    )
    if expected > free:
        raise InputError(Fault(f"needs up to {expected / 1e9:.1f} GB; {free / 1e9:.1f} GB are free", str(options.lab)))
    open_folder(out, meta)
    eos = frozenset() if options.ignore_eos else eos_ids(target)
    wanted = -(-options.tokens // parts)
    rows = written = shards = 0
    began = time.perf_counter()
    with tqdm(total=wanted, unit="tok", disable=None) as bar:
        for index, group in enumerate(_groups(options, tokenizer, target.max_context_tokens)):
            if written >= wanted:
                break
            if index % parts != part:
                continue
            path = shard_path(out, index)
            if not path.exists():
                if options.text == "written":
                    texts = write_group(
                        target,
                        group,
                        layers=layers,
                        eos_ids=eos,
                        max_new_tokens=options.max_new_tokens,
                        temperature=options.temperature,
                        seed=options.seed,
                    )
                else:
                    texts = [
                        text
                        for start in range(0, len(group), 8)
                        for text in read_group(target, group[start : start + 8], layers=layers)
                    ]
                save_shard(path, texts)
            more_rows, more = count_tokens(path)
            rows, written, shards = rows + more_rows, written + more, shards + 1
            bar.update(more)
    if written < wanted:
        print(f"the prompts ran out: {written} answer tokens of {wanted} asked for", file=sys.stderr)
    report = {
        "folder": str(out),
        "shards": shards,
        "rows": rows,
        "answer_tokens": written,
        "bytes": rows * per_token,
        "wall_s": time.perf_counter() - began,
    }
    print(f"{out}: {shards} shards, {rows} rows, {written} answer tokens, {rows * per_token / 1e9:.2f} GB")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _part(text: str) -> tuple[int, int]:
    """Return which part of how many, from 0."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise InputError(Fault(f"expected I/N with I from 1 to N, as '1/2' (got '{text}')", key="--part"))
    return int(part) - 1, int(parts)


def _span(text: str) -> tuple[int, int]:
    """Return the fewest and the most tokens of a prompt."""
    fewest, _, most = text.partition("..")
    if not (fewest.isdecimal() and most.isdecimal() and 1 <= int(fewest) <= int(most)):
        raise InputError(Fault(f"expected N..M with N from 1 to M, as '84..96' (got '{text}')", key="--prompt-tokens"))
    return int(fewest), int(most)


def folder_name(
    text: str, temperature: float, split: str, prompt_tokens: str | None = None, ignore_eos: bool = False
) -> str:
    """Return where text of one kind lies: ``written-t1-train``, ``corpus-held_out``, ``written-t1-held_out-84..96``."""
    kind = "corpus" if text == "corpus" else f"written-t{temperature:g}"
    of_some = [] if prompt_tokens is None else [prompt_tokens]
    return "-".join((kind, split, *of_some, *(["ignore_eos"] if ignore_eos else [])))


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path if path.exists() else Path()


def _layers(text: str | None, num_layers: int) -> tuple[int, ...]:
    if text is None:
        return default_layers(num_layers)
    try:
        layers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        layers = ()
    if not layers or layers[0] < 0 or layers[-1] >= num_layers:
        raise InputError(
            Fault(f"expected layers from 0 to {num_layers - 1}, as '1,8,29' (got '{text}')", key="--layers")
        )
    return layers


def _groups(options: argparse.Namespace, tokenizer: Any, longest: int) -> Iterator[list[Prompt]]:
    """Yield groups of prompts, the domains taking turns."""
    from decoder.lab.prompts import load_documents
    from decoder.lab.writing import make_prompt, of_length

    span = None if options.prompt_tokens is None else _span(options.prompt_tokens)

    def made(documents: Sequence[Document], again: int = 0) -> list[Prompt]:
        prompts = [make_prompt(document, tokenizer, options.text) for document in documents]
        if again:
            # Another name has other luck.
            prompts = [dataclasses.replace(prompt, name=f"{prompt.name}#{again + 1}") for prompt in prompts]
        return prompts if span is None else of_length(prompts, *span)

    pools = [load_documents(domain, options.split) for domain in options.domains.split(",")]
    if span is not None:
        pools = [[document for document in pool if made([document])] for pool in pools]
    pools = [pool[: options.per_domain] for pool in pools]
    queue: list[Document] = []
    for turn in range(max(map(len, pools))):
        queue += [pool[turn] for pool in pools if turn < len(pool)]
    # In whole groups, so that the shards of a longer run begin as those of a shorter one.
    for again, start in itertools.product(range(options.answers), range(0, len(queue), options.group)):
        group = made(queue[start : start + options.group], again)
        yield [
            prompt
            for prompt in group
            if len(prompt.token_ids) + max(options.max_new_tokens, len(prompt.answer_ids or ())) <= longest
        ]


if __name__ == "__main__":
    sys.exit(main())
