"""Fit the temperatures that make a drafter's confidence honest, and show what they mend on held-out rounds."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from decoder.evaluate import domain_requests, draw_lines
from decoder.options import command_parser
from profiles.errors import Fault, InputError, exit_code_of

if TYPE_CHECKING:
    from profiles.recipes.quality import PositionQuality

log = logging.getLogger("decoder.calibrate")


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    out = command_parser(
        "calibrate",
        "Decode prompts with whole blocks verified, fit one temperature a position (Sequential Temperature Scaling)\n"
        "on part of the rounds, and report ECE, AUC and Brier score before and after on the rest.",
        "python -m decoder.calibrate --target DIR --drafter DIR --prompts prompts.jsonl --out calibration.json",
    )
    out.add_argument("--prompts", type=Path, metavar="FILE", required=True, help="JSON lines, as for decoder.evaluate")
    out.add_argument("--out", type=Path, metavar="FILE", required=True, help="where the temperatures go")
    out.add_argument("--plots", type=Path, metavar="DIR", help="folder of reliability diagrams (default: none)")
    out.add_argument(
        "--held-out", type=float, default=0.5, metavar="SHARE", help="of rounds to judge by (default: 0.5)"
    )
    out.add_argument(
        "--min-outcomes",
        type=int,
        metavar="N",
        help="known outcomes that each position needs to be fitted (default: 400, 20 a bin)",
    )
    out.add_argument("--concurrency", type=int, default=1, metavar="N", help="requests at a time (default: 1)")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    # Imports wait until here so that --help answers at once.
    from decoder.calibration import (
        MIN_OUTCOMES,
        Calibration,
        fit_temperatures,
        judge,
        outcomes_of,
        save_calibration,
        summary,
    )
    from decoder.loading import decode_with_progress, load_models, make_decoder, parse_policy, write_json

    if not 0 < options.held_out < 1:
        raise InputError(Fault(f"expected a share between 0 and 1 (got {options.held_out:g})", key="--held-out"))
    for name in ("concurrency", "min_outcomes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(Fault(f"expected at least 1 (got {value})", key="--" + name.replace("_", "-")))
    if options.calibration is not None:
        raise InputError(Fault("is what this command makes; give it to the others", key="--calibration"))
    models = load_models(options)
    if models.drafter is None:
        raise InputError(Fault("missing: there is nothing to calibrate without a drafter", key="--drafter"))
    requests, domains = domain_requests(options, models)
    length = models.drafter.trained_length
    decoder = make_decoder(options, models, parse_policy(f"{{kind: fixed, k: {length}}}"))
    found, interrupted = decode_with_progress(decoder, requests, options.concurrency, "decoding")
    if interrupted:
        raise KeyboardInterrupt
    rounds = [record for generation in found for record in generation.rounds]
    outcomes = outcomes_of(rounds, length)
    fitted, held_out = outcomes.split(1 - options.held_out, np.random.default_rng(options.seed))
    temperatures = fit_temperatures(fitted, min_outcomes=options.min_outcomes or MIN_OUTCOMES)
    before, after = judge(held_out), judge(held_out, temperatures)
    calibration = Calibration(
        temperatures=temperatures,
        drafter=models.drafter.kind,
        domains=tuple(sorted(set(domains.values()))),
        fitted_outcomes=tuple(int(count) for count in fitted.known.sum(0)),
        sampling_temperature=options.temperature,
        seed=options.seed,
    )
    save_calibration(calibration, options.out)
    print("\n".join(table(temperatures, before, after)))
    log.info("wrote %s; it holds for text like that of %s", options.out, ", ".join(calibration.domains))
    report: dict[str, Any] = {
        "calibration": asdict(calibration),
        "held_out": {
            "before": [asdict(quality) for quality in before],
            "after": [asdict(quality) for quality in after],
            "before_summary": summary(before),
            "after_summary": summary(after),
        },
    }
    write_json(options.json, report)
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
        for k, (raw, mended) in enumerate(zip(before, after, strict=True), start=1):
            lines = {
                name: [(bar.mean_confidence, bar.mean_outcome) for bar in quality.reliability]
                for name, quality in (("raw", raw), ("calibrated", mended))
            }
            title = f"Reliability at draft position {k}, held out: {models.drafter.kind}"
            labels = ("predicted survival", "observed survival")
            for path in draw_lines(options.plots / f"reliability_{k}", title, labels, lines, diagonal=True):
                log.info("wrote %s", path)
    return 0


def table(
    temperatures: Sequence[float], before: Sequence[PositionQuality], after: Sequence[PositionQuality]
) -> list[str]:
    """Return the printed table."""
    from decoder.calibration import summary

    def number(value: float | None) -> str:
        return "     -" if value is None else f"{value:6.4f}"

    lines = ["survival up to each position, on held-out rounds: raw -> calibrated", ""]
    lines.append("position  temperature  outcomes  ECE               AUC               Brier")
    for k, (temperature, raw, mended) in enumerate(zip(temperatures, before, after, strict=True), start=1):
        scores = "  ".join(
            f"{number(getattr(raw, name))} -> {number(getattr(mended, name))}" for name in ("ece", "auc", "brier")
        )
        lines.append(f"{k:8d}  {temperature:11.1f}  {raw.outcomes:8d}  {scores}")
    first, last = summary(before)["ece"], summary(after)["ece"]
    lines.append(f"mean ECE {number(first)} -> {number(last)}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
