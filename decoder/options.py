"""The options that the decoder's commands share; loads nothing heavy, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
from pathlib import Path

DTYPES = ("float64", "float32", "bfloat16", "float16")


def command_parser(name: str, description: str, example: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every decoder command takes."""
    parser = argparse.ArgumentParser(
        prog=f"python -m decoder.{name}",
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target", default="smollm2", metavar="NAME", help="smollm2 (default), tiny, or a local Hugging Face folder"
    )
    models.add_argument(
        "--drafter",
        metavar="NAME",
        help="one that ships with the target (dspark, mtp), a draft checkpoint, a smaller language model, or none "
        "(default: the target's dspark, where one ships)",
    )
    models.add_argument("--lab", type=Path, default=Path("lab"), metavar="DIR", help="named targets lie there (lab)")
    models.add_argument("--calibration", type=Path, metavar="FILE", help="temperatures from decoder.calibrate")
    models.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda or cuda:N (default: cpu)")
    models.add_argument("--dtype", choices=DTYPES, default="float32", help="of both models (default: float32)")
    models.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")
    models.add_argument("--raw", action="store_true", help="text goes to the target as it is, in no chat template")
    chance = parser.add_argument_group("sampling")
    chance.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    chance.add_argument("--top-k", type=int, default=0, help="0: all tokens (default)")
    chance.add_argument("--top-p", type=float, default=1.0)
    chance.add_argument("--min-p", type=float, default=0.0)
    chance.add_argument("--repetition-penalty", type=float, default=1.0)
    chance.add_argument("--greedy-draft", action="store_true", help="draft the likeliest token at any temperature")
    chance.add_argument("--seed", type=int, default=0, help="of every draw (default: 0)")
    ends = parser.add_argument_group("where output ends")
    ends.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    ends.add_argument("--stop-token", type=int, action="append", metavar="ID", help="default: the target's own")
    ends.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
    ends.add_argument("--ignore-eos", action="store_true", help="go on after the target's own stop tokens")
    left_out = parser.add_argument_group("not supported, and refused")
    left_out.add_argument("--grammar", metavar="FILE", help=argparse.SUPPRESS)
    left_out.add_argument("--draft-tree-width", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reported numbers as JSON too")
    return parser


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose what is verified, and what it is taken to cost."""
    parser.add_argument(
        "--policy",
        default=None,
        metavar="KIND",
        help="a kind, or a mapping as in scenarios: '{kind: threshold, min_confidence: 0.6}' "
        "(default: the whole block; none without a drafter)",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help="step times that load-aware policies see (default: every batch costs the same)",
    )
    parser.add_argument("--profile-drafter", metavar="NAME", help="whose draft time counts (default: the policy's)")
