"""``python -m decoder.bank``: record what drafters are worth, at every place of text that their target wrote."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoder.errors import Fault, InputError
from profiles.errors import exit_code_of

if TYPE_CHECKING:
    from decoder.lab.recording import Recorded

log = logging.getLogger("decoder.bank")

DESCRIPTION = """Record acceptance banks: a block drafted at every position of text that the target wrote.

Each drafter gets one file a domain, named by a profile that the simulator reads (`fleet.acceptance_profile`). Drafters
that the profile holds already are kept, so that they can be recorded one by one. Confidences are kept raw and
calibrated: one temperature a position (Sequential Temperature Scaling), fitted on the texts of even number."""
EXAMPLE = """python -m decoder.bank --target smollm2 --drafter dspark=lab/smollm2/drafters/dspark \\
      --drafter mtp=lab/smollm2/drafters/mtp --text written-t1-held_out
  writes profiles/measured/smollm2_t1.json; then: python -m analysis.validate lab"""


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m decoder.bank",
        description=DESCRIPTION,
        epilog=f"example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, metavar="NAME", help="smollm2, tiny, or a local Hugging Face folder")
    parser.add_argument(
        "--drafter",
        action="append",
        required=True,
        metavar="[NAME=]DIR",
        help="one that ships with the target, a draft checkpoint, or a smaller language model; may be repeated "
        "(default name: the folder's)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        default=Path("written-t1-held_out"),
        metavar="NAME",
        help="text that no drafter was trained on: a folder, or the name of one under LAB/TARGET/text "
        "(default: written-t1-held_out)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("profiles/measured"), metavar="DIR", help="default: profiles/measured"
    )
    parser.add_argument(
        "--name", metavar="NAME", help="of the profile (default: TARGET_tTEMPERATURE, or TARGET_corpus)"
    )
    parser.add_argument(
        "--draft-length",
        type=int,
        metavar="N",
        help="draft tokens recorded of chained drafters (default: what each was trained for)",
    )
    parser.add_argument("--texts", type=int, metavar="N", help="texts of each domain at most (default: all)")
    parser.add_argument(
        "--check", type=int, default=1, metavar="N", help="texts a domain whose target is run again (default: 1)"
    )
    parser.add_argument(
        "--min-outcomes", type=int, metavar="N", help="positions that calibration needs (default: 400, 20 a bin)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the outcomes (default: 0)")
    parser.add_argument("--lab", type=Path, default=Path("lab"), metavar="DIR", help="where it lies (default: lab)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reported numbers as JSON too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = make_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    return exit_code_of(lambda: _run(options, shlex.join(["python", "-m", "decoder.bank", *arguments])))


def _run(options: argparse.Namespace, command: str) -> int:
    for key, least in (
        ("draft_length", 1),
        ("texts", 1),
        ("check", 0),
        ("min_outcomes", 1),
        ("threads", 1),
        ("seed", 0),
    ):
        value = getattr(options, key)
        if value is not None and value < least:
            raise InputError(Fault(f"expected at least {least} (got {value})", key=f"--{key.replace('_', '-')}"))
    folders = named(options.drafter, options.target)
    # Imports wait until here so that --help answers at once.
    import torch

    from decoder.calibration import MIN_OUTCOMES
    from decoder.checkpoint import load_drafter
    from decoder.lab.recording import load_texts, record, save_profile_of
    from decoder.lab.targets import target_folder, target_name
    from decoder.loading import check_device, write_json
    from decoder.target import load_target

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = check_device(options.device)
    folder = target_folder(options.target, options.lab)
    name = target_name(options.target)
    text = options.text if options.text.is_dir() else options.lab / name / "text" / options.text
    texts = load_texts(text, folder, options.texts)
    target = load_target(folder, device=device)
    drafters = {key: load_drafter(path, target, device=device) for key, path in folders.items()}
    default = f"{name}_t{texts.temperature:g}" if texts.written else f"{name}_corpus"
    path = options.out / f"{options.name or default}.json"
    found = record(
        texts,
        target,
        drafters,
        chained_length=options.draft_length,
        check_texts=options.check,
        min_outcomes=options.min_outcomes or MIN_OUTCOMES,
        seed=options.seed,
    )
    save_profile_of(path, texts, found, folders, command)
    print("\n".join(table(found)))
    log.info("wrote %s", path)
    write_json(options.json, report(found))
    return 0


def named(drafters: Sequence[str], target: str) -> dict[str, Path]:
    """Read ``[NAME=]DRAFTER``, a folder or one that ships with the target; raises `InputError`."""
    from decoder.lab.targets import drafter_folder

    folders: dict[str, Path] = {}
    for text in drafters:
        before, equals, after = text.partition("=")
        folder = drafter_folder(after if equals else before, target)
        if folder is None:
            raise InputError(Fault("there is nothing to record without a drafter", key="--drafter"))
        name = before if equals else folder.resolve().name
        if not name or not name.replace("_", "").isalnum() or not name.isascii():
            raise InputError(Fault(f"expected a name of letters, digits and '_' (got '{name}')", key="--drafter"))
        if name in folders:
            raise InputError(Fault(f"'{name}' is given twice", key="--drafter"))
        folders[name] = folder
    return folders


def known(*values: float) -> list[float | None]:
    """Return values for JSON: None in the place of NaN."""
    return [None if value != value else value for value in values]


def report(found: Sequence[Recorded]) -> list[dict[str, Any]]:
    """Return what was recorded as plain data, units in the keys."""
    from profiles.recipes.banks import conditional_estimates, follow, length_estimate

    rows = []
    for one in found:
        rounds = follow(one.bank)
        length = length_estimate(rounds)
        rows.append(
            {
                "drafter": one.name,
                "domain": one.domain,
                "texts": len(rounds.request),
                "positions": len(one.bank.position),
                "rounds": int(rounds.rounds.sum()),
                "accepted_length_tokens": length.value,
                "accepted_length_95_tokens": known(length.low, length.high),
                "conditional_acceptance": [
                    dict(zip(("value", "low", "high"), known(rate.value, rate.low, rate.high), strict=True))
                    for rate in conditional_estimates(rounds)
                ],
                "mean_chance": one.bank.chance.mean(0).tolist(),
                "mean_confidence": one.bank.confidence.mean(0).tolist(),
                "mean_confidence_raw": one.bank.confidence_raw.mean(0).tolist(),
                "temperatures": list(one.temperatures),
                "chance_error_mean": one.error_mean,
                "chance_error_worst": one.error_worst,
            }
        )
    return rows


def table(found: Sequence[Recorded]) -> list[str]:
    """Return the printed table."""
    from profiles.recipes.banks import follow, length_estimate

    lines = ["accepted length: tokens a round, bonus included, and its 95 % interval over texts", ""]
    lines.append(
        f"{'drafter':18s} {'domain':8s} {'positions':>9s} {'rounds':>7s} {'length':>7s} {'95 %':>13s}  conditional"
    )
    for one in found:
        rounds = follow(one.bank)
        length = length_estimate(rounds)
        lines.append(
            f"{one.name:18s} {one.domain:8s} {len(one.bank.position):9d} {int(rounds.rounds.sum()):7d} "
            f"{length.value:7.2f} {length.low:6.2f}-{length.high:<6.2f}  "
            + " ".join(f"{rate:.2f}" for rate in rounds.conditional)
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
