"""``python -m decoder.measure``: time the engine's steps on this machine and write what they cost into a profile."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from decoder.measuring import DISTURBED, LISTS, Measuring, asked, graph_faults, table_of
from profiles.errors import Fault, InputError, exit_code_of

if TYPE_CHECKING:
    from decoder.drafter import Drafter
    from decoder.target import HfTarget

log = logging.getLogger("decoder.measure")

DESCRIPTION = """Measure what the engine's steps cost and write a profile for the simulator.

A grid of steps is run: requests that decode x draft tokens verified of each x tokens cached of each, then prompts of
several lengths alone and beside decoding. Medians of repeats are taken apart into a table over batch tokens, a price of
a request and of a cached token (least squares, no term below 0), a draft time over requests, a table of what the rows
of prompts add and a price of prompts beside decoding, what the drafter takes to take them in, and the time between
steps. How well the parts add up to what was measured is printed and kept in the profile."""
EXAMPLE = """python -m decoder.measure --target smollm2 --drafter dspark --out profiles/measured/cpu_lab.json
  python -m decoder.measure --shape qwen3-8b --device cuda --dtype bfloat16 --requests 1,2,4,8,16,32,64,128,256 \\
      --contexts 512,2048,8192 --graph-sizes 1,2,4,8,16,32,64,128,256,512,1024,2048 \\
      --out profiles/measured/h200_qwen3_8b.json"""


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m decoder.measure",
        description=DESCRIPTION,
        epilog=f"examples:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--target", default="smollm2", metavar="NAME", help="smollm2 (default), tiny, or a local folder")
    what.add_argument(
        "--drafter", metavar="NAME", help="a shipped one's name or a folder (default: the target's first)"
    )
    what.add_argument("--drafter-name", metavar="NAME", help="in the profile, as policies call it (default: its kind)")
    what.add_argument("--shape", metavar="NAME", help="random weights of published dimensions instead of a target")
    what.add_argument("--draft-length", type=int, metavar="N", help="block of the shape's drafter (default: published)")
    what.add_argument("--lab", type=Path, default=Path("lab"), metavar="DIR", help="named targets lie there (lab)")
    where = parser.add_argument_group("where")
    where.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda or cuda:N (default: cpu)")
    where.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of both models")
    where.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")
    points = parser.add_argument_group("the grid")
    points.add_argument("--requests", default="1,2,4,8,16", metavar="N,N,...", help="that decode (default: 1,2,4,8,16)")
    points.add_argument("--lengths", metavar="N,N,...", help="draft tokens verified (default: 0, 1, half and all)")
    points.add_argument("--contexts", default="64,256,512", metavar="N,N,...", help="tokens cached (64,256,512)")
    points.add_argument(
        "--prompts", default="32,128,512", metavar="N,N,...", help="prompt tokens (default: 32,128,512)"
    )
    points.add_argument("--max-batch-tokens", type=int, default=2048, metavar="N", help="of a step (default: 2048)")
    points.add_argument(
        "--kv-tokens", type=int, metavar="N", help="cached in all, at most (default: what the grid asks)"
    )
    points.add_argument("--graph-sizes", default="", metavar="N,N,...", help="passes are padded to these; CUDA graphs")
    points.add_argument("--repeats", type=int, default=5, metavar="N", help="passes over the grid (default: 5)")
    points.add_argument(
        "--minutes", type=float, metavar="X", help="leave out repeats beyond 3 that would end later (default: none)"
    )
    points.add_argument(
        "--steps", type=int, default=3, metavar="N", help="counted of each visit, after one (default: 3)"
    )
    points.add_argument("--seed", type=int, default=0, help="of the order of the grid (default: 0)")
    points.add_argument("--roofline", action="store_true", help="measure copy bandwidth and matrix rate too")
    parser.add_argument("--max-spread", type=float, default=DISTURBED, metavar="X", help="above it: disturbed (0.05)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the profile, .json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every point's medians and spreads too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = make_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    return exit_code_of(lambda: _run(options, shlex.join(["python", "-m", "decoder.measure", *arguments])))


def _run(options: argparse.Namespace, command: str) -> int:
    _check(options)
    # Imports wait until here so that --help answers at once.
    import torch
    from tqdm import tqdm

    from decoder.loading import check_device, write_json

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    check_device(options.device)
    device = torch.device(options.device)
    target, drafter = _models(options, device)
    measuring = Measuring(options, command, target, drafter)
    with tqdm(total=len(measuring.points) * options.repeats, unit="point", disable=None, leave=False) as bar:
        limit_s = np.inf if options.minutes is None else 60 * options.minutes

        def show() -> None:
            bar.update()

        measuring.visits.repeat(options.repeats, limit_s, show)
    profile, report = measuring.write()
    print("\n".join(table_of(report)))
    log.info("wrote %s (%.0f s of measuring)", options.out, measuring.visits.took_s)
    if profile.disturbed:
        log.warning("disturbed: %s", profile.disturbed)
    write_json(options.json, report)
    return 0


def _check(options: argparse.Namespace) -> None:
    numbers = {name: asked(options, name) for name in LISTS}
    faults = [
        Fault(f"expected at least {least} (got {getattr(options, name)})", key=f"--{name.replace('_', '-')}")
        for name, least in (("repeats", 3), ("steps", 1), ("max_batch_tokens", 1), ("threads", 1), ("draft_length", 1))
        if getattr(options, name) is not None and getattr(options, name) < least
    ]
    if options.minutes is not None and not options.minutes > 0:
        faults.append(Fault(f"expected minutes above 0 (got {options.minutes:g})", key="--minutes"))
    faults += [
        Fault("expected at least one number", key=f"--{name}")
        for name in ("requests", "contexts", "prompts")
        if not numbers[name]
    ]
    faults += graph_faults(numbers["graph_sizes"], options.max_batch_tokens)
    if options.shape is None and options.draft_length is not None:
        faults.append(Fault("has no effect without --shape: a drafter has its own block", key="--draft-length"))
    if options.shape is not None and options.drafter is not None:
        faults.append(Fault("has no effect with --shape, which brings its own", key="--drafter"))
    if options.out.suffix != ".json":
        faults.append(Fault(f"expected a name that ends in .json (got '{options.out}')", key="--out"))
    if faults:
        raise InputError(*faults)


def _models(options: argparse.Namespace, device: Any) -> tuple[HfTarget, Drafter | None]:
    from decoder.packed import pack_models

    target, drafter = _loaded(options, device)
    pack_models(target, drafter)
    return target, drafter


def _loaded(options: argparse.Namespace, device: Any) -> tuple[HfTarget, Drafter | None]:
    from decoder.loading import TORCH_DTYPES

    dtype = TORCH_DTYPES[options.dtype]
    if options.shape is not None:
        from decoder.shapes import make_shape, shape_of

        return make_shape(shape_of(options.shape), device=device, dtype=dtype, draft_length=options.draft_length)
    from decoder.checkpoint import load_drafter
    from decoder.lab.targets import drafter_folder, target_folder
    from decoder.target import load_target

    target = load_target(target_folder(options.target, options.lab), device=options.device, dtype=dtype)
    folder = drafter_folder(options.drafter, options.target)
    return target, load_drafter(folder, target, device=options.device, dtype=dtype) if folder else None


if __name__ == "__main__":
    sys.exit(main())
