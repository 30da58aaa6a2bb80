"""Decode prompts of several domains and report what a drafter is worth: acceptance, and tokens/s against none.

What it decodes is real; `decoder.bank` records many more positions in the same time, and cannot tell the time.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from decoder.options import add_policy, command_parser
from profiles.errors import Fault, InputError, exit_code_of

if TYPE_CHECKING:
    from decoder.evaluation import Acceptance, Rate, Timing
    from decoder.loading import Models, Prompt
    from decoder.session import Decoder, Generation, Request

log = logging.getLogger("decoder.evaluate")


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    out = command_parser(
        "evaluate",
        "Decode prompts by domain and report accepted length, acceptance by position (conditional and survival),\n"
        "with --thresholds what a confidence threshold saves and costs (the paper's figure 5), and with\n"
        "--against-none how much faster one stream is than without a drafter.",
        "python -m decoder.evaluate --target DIR --drafter DIR --prompts prompts.jsonl --thresholds 0,0.4,0.8 \\\n"
        "      --temperature 0 --out runs/evaluate\n"
        '  where prompts.jsonl holds lines such as {"domain": "math", "prompt": "..."} or '
        '{"domain": "code", "prompt_ids": [1, 2]}',
    )
    out.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        required=True,
        help="JSON lines, see below; or text of the lab, a folder or its name (written-t1-held_out): its prompts",
    )
    out.add_argument("--per-domain", type=int, metavar="N", help="prompts of each domain at most (default: all)")
    add_policy(out)
    out.add_argument("--concurrency", type=int, default=1, metavar="N", help="requests at a time (default: 1)")
    out.add_argument("--thresholds", metavar="T,T,...", help="confidence thresholds to decode with as well")
    out.add_argument(
        "--against-none",
        action="store_true",
        help="decode each prompt without the drafter too, in turns, and report tokens/s of one stream",
    )
    out.add_argument("--out", type=Path, metavar="DIR", help="folder of plots (default: none are drawn)")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    return exit_code_of(lambda: _run(options, shlex.join(["python", "-m", "decoder.evaluate", *arguments])))


def _run(options: argparse.Namespace, command: str) -> int:
    # Imports wait until here so that --help answers at once.
    from decoder.evaluation import acceptance, weak_positions
    from decoder.loading import (
        chosen_policy,
        chosen_rates,
        decode_with_progress,
        load_models,
        make_decoder,
        write_json,
    )

    for key in ("concurrency", "per_domain"):
        value = getattr(options, key)
        if value is not None and value < 1:
            raise InputError(Fault(f"expected at least 1 (got {value})", key=f"--{key.replace('_', '-')}"))
    if options.against_none and options.concurrency > 1:
        raise InputError(Fault("is of one stream; --concurrency has no effect", key="--against-none"))
    thresholds = parse_thresholds(options.thresholds)
    models = load_models(options)
    if models.drafter is None:
        raise InputError(Fault("missing: there is nothing to evaluate without a drafter", key="--drafter"))
    requests, domains = domain_requests(options, models)
    policy = chosen_policy(options, models)
    decoder = make_decoder(options, models, policy, chosen_rates(options, policy))
    timings: list[tuple[Timing, Timing]] = []
    if options.against_none:
        found, timings, interrupted = time_both(options, models, decoder, requests)
    else:
        found, interrupted = decode_with_progress(decoder, requests, options.concurrency, policy.kind)
    if interrupted:
        log.warning("interrupted: what follows is of the %d of %d prompts that finished", len(found), len(requests))
    failed = [generation for generation in found if generation.finish_reason == "failed"]
    for generation in failed:
        log.warning("warning: %s", generation.error)
    length = models.drafter.trained_length
    by_domain = _by_domain(found, domains)
    results = {domain: acceptance(generations, length) for domain, generations in by_domain.items()}
    report: dict[str, Any] = {
        "drafter": models.drafter.kind,
        "policy": policy.kind,
        "temperature": options.temperature,
        "greedy": requests[0].sampling.greedy,
        "seed": options.seed,
        "failed_requests": len(failed),
        "interrupted": interrupted,
        "domains": {domain: _acceptance_report(result) for domain, result in results.items()},
        "confidence": {domain: confidence_report(generations, length) for domain, generations in by_domain.items()},
    }
    speed = {}
    if timings:
        speed = speed_by_domain(timings, domains)
        report["speed"] = {"by_domain": speed, **circumstances(options, models, command)}
    if requests[0].sampling.greedy and options.temperature > 0:
        log.warning("warning: top-k 1 makes every draw greedy; these are not sampled numbers")
    print("\n".join(table(results, length)))
    if speed:
        print("\n".join(["", *speed_table(speed)]))
    for domain, result in results.items():
        for k in weak_positions(result.conditional):
            log.warning(
                "warning: %s: acceptance at position %d is less than half of that at position %d; "
                "are the drafter's weights and features those it was trained with?",
                domain,
                k + 1,
                k,
            )
    if thresholds and not interrupted:
        sweep = threshold_sweep(options, models, requests, domains, thresholds)
        report["thresholds"] = sweep
        print()
        print("\n".join(sweep_table(sweep)))
    write_json(options.json, report)
    if options.out is not None:
        for path in draw(report, options.out, models.drafter.kind):
            log.info("wrote %s", path)
    return 130 if interrupted else 1 if failed else 0


def parse_thresholds(text: str | None) -> list[float]:
    """Read thresholds in [0, 1]; raises `InputError`."""
    if text is None:
        return []
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(Fault(f"expected numbers with commas between (got '{text}')", key="--thresholds")) from None
    for value in values:
        if not 0 <= value <= 1:
            raise InputError(Fault(f"expected numbers from 0 to 1 (got {value:g})", key="--thresholds"))
    return values


def domain_requests(options: argparse.Namespace, models: Models) -> tuple[list[Request], dict[str, str]]:
    """Return the requests of the prompt file or of the lab's text, and each one's domain by request id."""
    from decoder.lab.targets import target_name
    from decoder.loading import make_request, read_prompts

    named: Path = options.lab / target_name(options.target) / "text" / options.prompts
    folder = options.prompts if options.prompts.is_dir() else named
    prompts = lab_prompts(folder) if folder.is_dir() else read_prompts(options.prompts, models)
    at_most = getattr(options, "per_domain", None)
    taken: dict[str, int] = {}
    requests, domains = [], {}
    for number, prompt in enumerate(prompts, start=1):
        taken[prompt.domain] = taken.get(prompt.domain, 0) + 1
        if at_most is not None and taken[prompt.domain] > at_most:
            continue
        name = f"prompt {number}"
        requests.append(make_request(options, models, name, prompt.token_ids))
        domains[name] = prompt.domain
    return requests, domains


def lab_prompts(folder: Path) -> list[Prompt]:
    """Return what was asked in a folder of the lab's text; raises `InputError`."""
    from decoder.lab.store import load_meta, read_shard, shard_paths
    from decoder.loading import Prompt

    target, paths = load_meta(folder).target, shard_paths(folder)
    if not paths:
        raise InputError(Fault(f"holds no text of {target} yet", str(folder)))
    return [
        Prompt(text.domain, tuple(text.token_ids[: text.prompt_tokens].tolist()))
        for path in paths
        for text in read_shard(path)
    ]


def time_both(
    options: argparse.Namespace, models: Models, decoder: Decoder, requests: Sequence[Request]
) -> tuple[list[Generation], list[tuple[Timing, Timing]], bool]:
    """Decode each request with the drafter and without, in turns, one stream at a time.

    Returns the generations with it, the times with and without, and whether Ctrl-C ended the work before the rest.
    """
    from decoder.evaluation import time_stream
    from decoder.loading import make_decoder, parse_policy

    plain = make_decoder(options, models, parse_policy("none"))
    for one in (decoder, plain):  # the first passes of a process are slower than the others
        time_stream(one, replace(requests[0], limits=replace(requests[0].limits, max_new_tokens=8)))
    found, timings = [], []
    try:
        for number, request in enumerate(tqdm(requests, desc="prompts", unit="prompt", disable=None, leave=False)):
            both = [time_stream(one, request) for one in ((decoder, plain) if number % 2 else (plain, decoder))]
            mine, none = both if number % 2 else both[::-1]
            found.append(mine[0])
            if mine[1].rounds and "failed" not in (mine[0].finish_reason, none[0].finish_reason):
                timings.append((mine[1], none[1]))
    except KeyboardInterrupt:
        return found, timings, True
    return found, timings, False


def speed_by_domain(timings: Sequence[tuple[Timing, Timing]], domains: Mapping[str, str]) -> dict[str, Any]:
    """Return tokens/s of one stream by domain and over all, with and without the drafter, and their ratio."""
    from decoder.evaluation import speed

    groups: dict[str, list[tuple[Timing, Timing]]] = {domain: [] for domain in sorted(set(domains.values()))}
    for both in timings:
        groups[domains[both[0].request_id]].append(both)
    if len(groups) > 1:
        groups["all"] = list(timings)
    # What one prompt cannot say (an interval) is None.
    return {
        domain: {key: None if value != value else value for key, value in asdict(speed(own)).items()}
        for domain, own in groups.items()
        if own
    }


def circumstances(options: argparse.Namespace, models: Models, command: str) -> dict[str, Any]:
    """Return what a time depends on beside the models."""
    import datetime
    import os
    import platform

    import torch

    device = models.target.device
    return {
        "target": str(options.target),
        "drafter": models.drafter.kind if models.drafter else None,
        "draft_length": models.drafter.trained_length if models.drafter else 0,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": command,
    }


def speed_table(speed: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the printed table of times."""
    lines = ["tokens/s of one stream after its first token; ratio with its 95 % interval over prompts", ""]
    lines.append(
        f"{'domain':12s} {'none':>7s} {'with':>7s} {'ratio':>6s} {'95 %':>11s} {'draft ms':>9s} {'verify ms':>9s}"
    )
    for domain, row in speed.items():
        known = row["ratio_low"] is not None
        interval = f"{row['ratio_low']:5.2f}-{row['ratio_high']:<5.2f}" if known else f"{'-':>11s}"
        lines.append(
            f"{domain:12s} {row['none_tokens_per_s']:7.1f} {row['tokens_per_s']:7.1f} {row['ratio']:6.2f} {interval} "
            f"{1e3 * row['draft_s']:9.2f} {1e3 * row['verify_s']:9.2f}"
        )
    return lines


def _by_domain(found: Sequence[Generation], domains: Mapping[str, str]) -> dict[str, list[Generation]]:
    groups: dict[str, list[Generation]] = {domain: [] for domain in sorted(set(domains.values()))}
    for generation in found:
        if generation.finish_reason != "failed":
            groups[domains[generation.request.request_id]].append(generation)
    if len(groups) > 1:
        groups["all"] = [generation for generations in groups.values() for generation in generations]
    return groups


def _rate_report(rate: Rate) -> dict[str, Any]:
    return {"value": rate.value, "half_width_95": rate.half_width, "held": rate.held, "tried": rate.tried}


def _acceptance_report(result: Acceptance) -> dict[str, Any]:
    return {
        "requests": result.requests,
        "rounds": result.rounds,
        "output_tokens": result.output_tokens,
        "proposed_draft_tokens": result.proposed_tokens,
        "verified_draft_tokens": result.verified_tokens,
        "accepted_draft_tokens": result.accepted_tokens,
        "accepted_length_tokens": result.accepted_length,
        "accepted_length_half_width_95_tokens": result.accepted_length_half_width,
        "draft_acceptance": _rate_report(result.draft_acceptance),
        "conditional_acceptance": [_rate_report(rate) for rate in result.conditional],
        "survival": [_rate_report(rate) for rate in result.survival],
        "draft_s": result.draft_s,
        "verify_s": result.verify_s,
    }


def confidence_report(generations: Sequence[Generation], draft_length: int) -> dict[str, Any]:
    """Return how well the raw confidence knew what was accepted."""
    from decoder.calibration import judge, outcomes_of, summary

    rounds = [record for generation in generations for record in generation.rounds]
    return dict(summary(judge(outcomes_of(rounds, draft_length))))


def table(results: Mapping[str, Acceptance], draft_length: int) -> list[str]:
    """Return the printed table."""

    def number(value: float | None, form: str = ".3f") -> str:
        return "-" if value is None else format(value, form)

    lines = ["accepted length: tokens a round, bonus token included; +- 95 % over requests", ""]
    lines.append(f"{'domain':12s} {'rounds':>7s} {'length':>7s} {'+-':>6s} {'drafts accepted':>16s}")
    for domain, result in results.items():
        lines.append(
            f"{domain:12s} {result.rounds:7d} {number(result.accepted_length, '.2f'):>7s} "
            f"{number(result.accepted_length_half_width, '.2f'):>6s} {number(result.draft_acceptance.value):>16s}"
        )
    for title, rates in (("conditional acceptance", "conditional"), ("survival", "survival")):
        lines += ["", f"{title} by position"]
        lines.append(f"{'domain':12s} " + " ".join(f"{k + 1:>6d}" for k in range(draft_length)))
        for domain, result in results.items():
            lines.append(f"{domain:12s} " + " ".join(f"{number(r.value):>6s}" for r in getattr(result, rates)))
    return lines


def threshold_sweep(
    options: argparse.Namespace,
    models: Models,
    requests: Sequence[Request],
    domains: Mapping[str, str],
    thresholds: Sequence[float],
) -> list[dict[str, Any]]:
    """Decode everything once more for each threshold; tokens a round, the bonus token counted as accepted."""
    from decoder.evaluation import acceptance
    from decoder.loading import decode_with_progress, make_decoder, parse_policy

    assert models.drafter is not None
    rows = []
    for threshold in thresholds:
        decoder = make_decoder(options, models, parse_policy(f"{{kind: threshold, min_confidence: {threshold!r}}}"))
        found, interrupted = decode_with_progress(decoder, requests, options.concurrency, f"threshold {threshold:g}")
        if interrupted:
            log.warning("interrupted: thresholds from %g on are left out", threshold)
            break
        for domain, generations in _by_domain(found, domains).items():
            result = acceptance(generations, models.drafter.trained_length)
            if result.accepted_length is None:
                continue
            verified = result.verified_tokens / result.rounds + 1
            rows.append(
                {
                    "domain": domain,
                    "confidence_threshold": threshold,
                    "accepted_tokens_per_round": result.accepted_length,
                    "rejected_tokens_per_round": verified - result.accepted_length,
                    "verified_tokens_per_round": verified,
                    "acceptance_ratio": result.accepted_length / verified,
                    "draft_acceptance": result.draft_acceptance.value,
                }
            )
    return rows


def sweep_table(sweep: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the printed threshold sweep."""
    lines = ["confidence threshold: tokens a round, bonus token included", ""]
    lines.append(f"{'domain':12s} {'threshold':>9s} {'accepted':>9s} {'rejected':>9s} {'verified':>9s} {'ratio':>6s}")
    for row in sweep:
        lines.append(
            f"{row['domain']:12s} {row['confidence_threshold']:9.2f} {row['accepted_tokens_per_round']:9.3f} "
            f"{row['rejected_tokens_per_round']:9.3f} {row['verified_tokens_per_round']:9.3f} "
            f"{row['acceptance_ratio']:6.3f}"
        )
    return lines


def draw(report: Mapping[str, Any], folder: Path, drafter: str) -> list[Path]:
    """Draw acceptance by position, and the threshold sweep where there is one; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, title in (("conditional_acceptance", "Conditional acceptance"), ("survival", "Survival")):
        lines = {
            domain: [(k + 1, rate["value"]) for k, rate in enumerate(result[name]) if rate["value"] is not None]
            for domain, result in report["domains"].items()
        }
        labels = ("draft position", f"{name.replace('_', ' ')} (share)")
        written += draw_lines(folder / name, f"{title} by draft position: {drafter}", labels, lines)
    if "thresholds" in report:
        for key, label in (
            ("accepted_tokens_per_round", "accepted tokens a round"),
            ("verified_tokens_per_round", "verified tokens a round"),
            ("acceptance_ratio", "accepted / verified tokens"),
        ):
            points: dict[str, list[tuple[float, float]]] = {}
            for row in report["thresholds"]:
                points.setdefault(row["domain"], []).append((row["confidence_threshold"], row[key]))
            title = f"Confidence threshold: {label} ({drafter})"
            written += draw_lines(folder / f"threshold_{key}", title, ("confidence threshold", label), points)
    (folder / "evaluate.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return [*written, folder / "evaluate.json"]


def draw_lines(
    stem: Path,
    title: str,
    labels: tuple[str, str],
    lines: Mapping[str, Sequence[tuple[float, float]]],
    diagonal: bool = False,
) -> list[Path]:
    """Draw one line a name as PNG and SVG; ``diagonal`` adds where both axes agree."""
    # matplotlib takes a second to load, and is analysis's alone.
    from analysis.style import new_figure, plot_style, save

    with plot_style():
        figure = new_figure(6.0, 3.6, title=title, note="", legend={}, signs={})
        axes = figure.subplots()
        for (name, points), marker in zip(lines.items(), "osD^vP*X" * 4, strict=False):
            x, y = np.array(points, np.float64).reshape(-1, 2).T
            axes.plot(x, y, marker=marker, markersize=4, linewidth=1.4, label=name)
        if diagonal:
            axes.plot([0, 1], [0, 1], color="#808080", linestyle="--", linewidth=1)
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.set_ylim(bottom=0)
        axes.legend()
        return save(figure, stem)


if __name__ == "__main__":
    sys.exit(main())
