"""``python -m profiles.fit``: turn a user's measurement files into a profile, and say what they do not determine."""

from __future__ import annotations

import argparse
import json
import logging
import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from profiles.curves import evaluate, known_range
from profiles.errors import Fault, InputError, exit_code_of
from profiles.files import known_profiles, save_profile
from profiles.fitting.acceptance import SurvivalFit, survival_of_counts, survival_of_lengths
from profiles.fitting.closed_loop import fit_closed_loop, leave_out, with_accepted_length
from profiles.fitting.law import Law
from profiles.fitting.least_squares import Floats
from profiles.fitting.report import Report, as_text, report_of
from profiles.fitting.request_log import fit_request_log
from profiles.fitting.step_table import table_curve
from profiles.fitting.to_profile import (
    NotIdentified,
    Origin,
    draft_like,
    draft_of,
    drafter_of,
    not_identified,
    step_time_of,
)
from profiles.measurements.acceptance import read_acceptance
from profiles.measurements.logs import read_log
from profiles.measurements.points import AcceptanceCounts, LoadPoint
from profiles.measurements.sweeps import draft_tokens_of, read_sweep
from profiles.measurements.tables import read_times
from profiles.schema import (
    Curve,
    DraftCost,
    Drafter,
    PrefillAsVerify,
    Profile,
    Provenance,
    Replica,
    SourcedCount,
    StepTime,
)

log = logging.getLogger("profiles.fit")

BLOCK_DRAFTERS, CHAIN_DRAFTERS = ("dspark", "dflash"), ("mtp", "eagle3")

DESCRIPTION = """\
Fit a profile to your own measurements. Every file is recognised by what is in it:
  --sweep       runs at constant concurrency: CSV (concurrency, output_tokens_per_s[, user_tokens_per_s][, tpot_ms]
                [, ttft_ms][, prompt_tokens][, output_tokens][, accepted_length][, policy][, k]), JSON of vllm bench
                serve or sweep, JSONL of SGLang's bench_serving, AIPerf's profile_export_aiperf.json, InferenceX's
                agg_*.json or CSV
  --log         requests one by one: CSV or JSONL (arrived, first_token, last_token, prompt_tokens, output_tokens; in
                seconds), llmservingsim-bench, AIPerf's profile_export.jsonl, vllm bench serve --save-detailed
  --step-table  CSV batch_tokens, step_ms: read as written, whatever else is fitted comes on top
  --draft-table CSV requests, draft_ms
  --acceptance  Prometheus text of vLLM, JSON of vllm bench serve, SGLang's meta_info with spec_accept_histogram, CSV
                k, accepted_length
The usual way: measure without speculation (POLICY none), count acceptance once, let the simulator predict the rest;
docs/will_dspark_pay.md goes through it. Exit code: 0 written, 1 the worst residual is over --max-error, 2 the input is
at fault or does not determine what was asked."""

EXAMPLE = """\
example: python -m profiles.fit my_engine --sweep docs/examples/will_dspark_pay/none.json \\
    --acceptance docs/examples/will_dspark_pay/metrics.prom --draft-like engines/v4_flash_b300_tp4"""


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    out = argparse.ArgumentParser(
        prog="python -m profiles.fit",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog=EXAMPLE,
    )
    out.add_argument("name", metavar="NAME", help="name of the profile; it is written to NAME.json")
    data = out.add_argument_group("measurements")
    data.add_argument(
        "--sweep",
        nargs="+",
        default=[],
        metavar="[POLICY=]FILE",
        help="closed-loop runs; POLICY (none, mtp1, fixed:K) where the file does not say",
    )
    data.add_argument(
        "--only", action="append", default=[], metavar="KEY=VALUE", help="of an export, the rows that equal this"
    )
    data.add_argument("--log", type=Path, metavar="FILE", help="requests one by one, without speculation")
    data.add_argument(
        "--until", type=float, metavar="S", help="of a log, the requests that ended S seconds after the first arrival"
    )
    data.add_argument("--step-table", type=Path, metavar="FILE", help="step time by batch tokens")
    data.add_argument(
        "--between",
        choices=("linear", "round_up"),
        default="linear",
        help="what sizes between those of a table cost: straight lines (default), or the next larger (padded to "
        "graph sizes)",
    )
    data.add_argument("--draft-table", type=Path, metavar="FILE", help="draft time by requests, a round")
    data.add_argument("--acceptance", type=Path, metavar="FILE", help="what draft tokens were worth")
    data.add_argument(
        "--acceptance-before", type=Path, metavar="FILE", help="an earlier snapshot of the same counters, subtracted"
    )
    say = out.add_argument_group("what files do not say")
    say.add_argument("--drafter", default="dspark", metavar="NAME", help="name of the drafter (default: dspark)")
    say.add_argument(
        "--drafter-kind",
        choices=("block", "chain"),
        help="block: one pass drafts all; chain: a pass a token (default: by the name)",
    )
    say.add_argument(
        "--domain", default="any", metavar="NAME", help="the traffic that acceptance was counted on (default: any)"
    )
    say.add_argument(
        "--lengths-of",
        choices=("chain", "whole_block", "short_block"),
        help="what the runs behind k, accepted_length did",
    )
    say.add_argument("--hardware", metavar="TEXT", help="for provenance, such as '1 x H100'")
    say.add_argument("--engine", metavar="TEXT", help="for provenance, such as 'vLLM 0.19.0'")
    say.add_argument("--gpus", type=int, metavar="N", help="GPUs of one engine")
    say.add_argument("--kv-bytes-per-token", type=int, metavar="N", help="of the whole engine")
    say.add_argument("--max-context-tokens", type=int, metavar="N", help="longest request")
    assume = out.add_argument_group("assumptions, recorded as such")
    assume.add_argument(
        "--request-share",
        type=float,
        metavar="X",
        help="share of the slope over load that belongs to requests, not to batch tokens: 0 to 1",
    )
    assume.add_argument(
        "--draft-like", metavar="PROFILE", help="another profile's draft time, scaled by the ratio of verify times"
    )
    out.add_argument("--out", type=Path, metavar="FILE", help="the profile (default: NAME.json here)")
    out.add_argument("--json", type=Path, metavar="FILE", help="write what is printed as JSON too")
    out.add_argument("--max-error", type=float, metavar="PERCENT", help="exit 1 where a residual is larger")
    out.add_argument("--plots", type=Path, metavar="DIR", help="folder of the plot (default: runs/profiles/NAME)")
    out.add_argument("--no-plots", action="store_true", help="print and write only")
    return out


@dataclass(slots=True)
class Work:
    """What a call gathers on its way: sections of the profile, what stays open, what a reader should know."""

    options: argparse.Namespace
    remarks: list[str] = field(default_factory=list)
    open: list[NotIdentified] = field(default_factory=list)
    law: Law | None = None
    left_out: Floats | None = None

    def origin(self, *files: Path | str) -> Origin:
        """Return the provenance of what these files gave."""
        options = self.options
        words = ["python -m profiles.fit", *map(shlex.quote, _that_count(options.argv))]
        return Origin(
            source=", ".join(str(file) for file in files),
            hardware=options.hardware,
            version=f"{options.engine + '; ' if options.engine else ''}fitted by dspark-sim {version('dspark-sim')}",
            command=" ".join(words),
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, print, write."""
    options = parser().parse_args(argv)
    options.argv = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    _check_options(options)
    work = Work(options)
    profile = build(work)
    out = options.out or Path(f"{options.name}.json")
    report = report_of(profile, out, work.law, work.left_out, work.open, work.remarks)
    _write(out, profile)
    print(as_text(report))
    if options.json is not None:
        _write_json(options.json, report)
    log.info("%s", out)
    if not options.no_plots and work.law is not None:
        from analysis.fit_plots import draw_fit  # matplotlib takes a second to load

        folder = options.plots or Path("runs/profiles") / options.name
        try:
            for plot in draw_fit(report, folder):
                log.info("%s", plot)
        except OSError as fault:
            raise InputError(Fault(f"cannot write: {(fault.strerror or str(fault)).lower()}", str(folder))) from None
    worst = report["worst_percent"]
    return 1 if options.max_error is not None and worst is not None and worst > options.max_error else 0


def _check_options(options: argparse.Namespace) -> None:
    faults = []
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", options.name, re.ASCII) or options.name.endswith(".json"):
        faults.append(
            Fault(
                f"expected letters, digits and _ . - /, no part of it beginning with . or - (got '{options.name}')",
                "NAME",
            )
        )
    if options.name in known_profiles():
        faults.append(Fault(f"'{options.name}' is a shipped profile; take another name", "NAME"))
    for key, low, high in (("request_share", 0.0, 1.0), ("max_error", 0.0, math.inf), ("until", 0.0, math.inf)):
        value = getattr(options, key)
        if value is not None and not low <= value <= high:
            limits = f"{low:g} to {high:g}" if high < math.inf else f"at least {low:g}"
            faults.append(Fault(f"expected {limits} (got {value:g})", f"--{key.replace('_', '-')}"))
    for key in ("gpus", "kv_bytes_per_token", "max_context_tokens"):
        value = getattr(options, key)
        if value is not None and value < 1:
            faults.append(Fault(f"expected at least 1 (got {value})", f"--{key.replace('_', '-')}"))
    if not any((options.sweep, options.log, options.step_table, options.acceptance)):
        faults.append(Fault("nothing to fit: give --sweep, --log, --step-table or --acceptance"))
    if options.sweep and options.log:
        faults.append(Fault("give --sweep or --log: each gives the law of a step", "--log"))
    if options.no_plots and options.plots is not None:
        faults.append(Fault("has no effect beside --no-plots", "--plots"))
    for key, needs in (
        ("until", "log"),
        ("only", "sweep"),
        ("request_share", "sweep"),
        ("acceptance_before", "acceptance"),
        ("lengths_of", "acceptance"),
    ):
        if getattr(options, key) not in (None, []) and not getattr(options, needs):
            faults.append(Fault(f"has no effect without --{needs}", f"--{key.replace('_', '-')}"))
    if options.request_share is not None and options.step_table:
        faults.append(
            Fault("has no effect beside --step-table, which tells tokens and requests apart", "--request-share")
        )
    if options.draft_table and options.draft_like:
        faults.append(Fault("give --draft-table or --draft-like", "--draft-like"))
    if (options.draft_table or options.draft_like) and not any((options.sweep, options.log, options.step_table)):
        key = "--draft-table" if options.draft_table else "--draft-like"
        faults.append(Fault("has no effect without a step time", key))
    replica = [options.gpus, options.kv_bytes_per_token, options.max_context_tokens]
    if any(replica) and not all(replica):
        faults.append(
            Fault(
                "give --gpus, --kv-bytes-per-token and --max-context-tokens together, or none: a scenario may say them"
            )
        )
    for item in options.only:
        if "=" not in item:
            faults.append(Fault(f"expected KEY=VALUE (got '{item}')", "--only"))
    for path in (options.out, options.json):
        if path is not None and not path.parent.is_dir():
            faults.append(Fault("no such folder", str(path.parent)))
    if options.out is not None and options.out.suffix != ".json":
        faults.append(Fault(f"a profile ends in .json (got '{options.out}')", "--out"))
    if faults:
        raise InputError(*faults)


def _that_count(argv: Sequence[str]) -> list[str]:
    """Return the arguments that decide what is in the profile, not where it goes."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in ("--out", "--json", "--plots", "--max-error"):
            if not equals:
                next(words, None)
        elif word != "--no-plots":
            kept.append(word)
    return kept


def kind_of(options: argparse.Namespace) -> str:
    """Return whether the drafter drafts a block or a chain; raises `InputError` where neither name nor option says."""
    if options.drafter_kind is not None:
        return str(options.drafter_kind)
    if options.drafter in BLOCK_DRAFTERS:
        return "block"
    if options.drafter in CHAIN_DRAFTERS:
        return "chain"
    raise InputError(
        Fault(
            f"is '{options.drafter}' a block drafter (one pass drafts all) or a chain (a pass a token)? say block "
            "or chain",
            "--drafter-kind",
        )
    )


# ------------------------------------------------------------------------------------------------------------ build


def build(work: Work) -> Profile:
    """Read the files, fit, and put the profile together; raises `InputError`."""
    options = work.options
    survival, acceptance = _acceptance(work) if options.acceptance else (None, {})
    step_time = _step_time(work, survival)
    if not acceptance:
        work.open.append(
            NotIdentified(
                "acceptance",
                "the profile has none",
                "the engine's counters by draft position over one run with speculation (--acceptance), or another "
                "profile's in the scenario (fleet.acceptance_profile)",
            )
        )
    replica = None
    if options.gpus is not None:
        said = Provenance(origin="assumed", reason="said on the command line of profiles.fit, not measured")
        replica = Replica(
            gpus=SourcedCount(value=options.gpus, provenance=said),
            kv_bytes_per_token=SourcedCount(value=options.kv_bytes_per_token, provenance=said),
            max_context_tokens=SourcedCount(value=options.max_context_tokens, provenance=said),
        )
    files = [*options.sweep, options.log, options.step_table, options.acceptance]
    return Profile(
        format="dspark-profile/1",
        name=options.name,
        description=f"Fitted to {', '.join(str(file) for file in files if file)}.",
        step_time=step_time,
        acceptance=acceptance,
        replica=replica,
    )


def _acceptance(work: Work) -> tuple[SurvivalFit, dict[str, Drafter]]:
    options = work.options
    found = read_acceptance(options.acceptance, options.acceptance_before)
    if isinstance(found, AcceptanceCounts):
        if options.lengths_of is not None:
            raise InputError(Fault("has no effect: the file holds counts by position", "--lengths-of"))
        fit, rounds = survival_of_counts(found), found.rounds
    else:
        fit, rounds = survival_of_lengths(found, options.lengths_of), None
        if fit.left_out:
            tail = ", ".join(f"{value:g} at k = {k}" for k, value in fit.left_out.items())
            work.remarks.append(
                f"{options.acceptance}: accepted length {tail} is no sum of survivals (the difference to the k "
                "before is "
                f"negative or rises); the survival ends at k = {len(fit.survival)}, nothing is smoothed"
            )
    kind = kind_of(options)
    origin = work.origin(options.acceptance)
    drafter = drafter_of(fit, origin, "block" if kind == "block" else "chain", options.domain, options.drafter, rounds)
    work.open.append(
        NotIdentified(
            "how acceptance differs between requests and moments, and how good confidence is",
            "borrowed from figure 6 of the paper (Qwen3-4B, Alpaca)",
            "a recorded bank: confidence and outcome of every draft token",
        )
    )
    return fit, {options.drafter: drafter}


def _step_time(work: Work, survival: SurvivalFit | None) -> StepTime | None:
    options = work.options
    measured: Curve | None = None
    if options.step_table:
        sizes, times = read_times(options.step_table, "batch_tokens", "step_ms")
        measured = table_curve(
            sizes,
            times,
            options.between,
            "extrapolate" if options.between == "linear" else "refuse",
            work.origin(options.step_table).measured(
                f"{sizes.size} sizes, as written; {options.between.replace('_', ' ')} between"
            ),
        )
    drafting: dict[str, DraftCost] = {}
    step_time: StepTime | None = None
    if options.sweep:
        step_time, drafting = _from_sweeps(work, survival, measured)
    elif options.log:
        step_time = _from_log(work, measured)
    elif measured is not None:
        step_time = StepTime(
            verify=measured,
            prefill=PrefillAsVerify(
                provenance=work.origin(options.step_table).assumed(
                    "a table of step times says nothing of prompts; they run through the same layers and are "
                    "charged as batch "
                    "tokens"
                )
            ),
        )
    if step_time is None:
        return None
    if options.draft_table:
        drafting = {options.drafter: _draft_table(work)}
    elif options.draft_like:
        most = known_range(step_time.verify)[1]
        drafting = {options.drafter: draft_like(options.draft_like, options.drafter, step_time.verify, most)}
        work.open.append(
            NotIdentified(
                "the time to draft",
                f"assumed: that of {options.draft_like}, scaled",
                "a table of draft time by requests (--draft-table)",
            )
        )
    return step_time.model_copy(update={"draft": drafting})


def _draft_table(work: Work) -> DraftCost:
    path = work.options.draft_table
    sizes, times = read_times(path, "requests", "draft_ms")
    note = f"{sizes.size} numbers of requests, as written"
    curve = table_curve(sizes, times, work.options.between, "extrapolate", work.origin(path).measured(note))
    return DraftCost(per="round" if kind_of(work.options) == "block" else "token", curve=curve)


def _from_sweeps(
    work: Work, survival: SurvivalFit | None, measured: Curve | None
) -> tuple[StepTime, dict[str, DraftCost]]:
    options = work.options
    points = _read_sweeps(work)
    if survival is not None:
        by_length = {k: 1 + sum(survival.survival[:k]) for k in range(1, len(survival.survival) + 1)}
        points = with_accepted_length(points, by_length)
    drafted = any(point.speculates for point in points)
    per_token = drafted and kind_of(options) == "chain"
    verify_s = None
    if measured is not None:
        most = max(point.concurrency * (1 + (point.draft_tokens or 0)) for point in points)
        verify_s = evaluate(measured, math.ceil(most), f"{options.step_table} (batch tokens)").seconds
    how: dict[str, Any] = {
        "request_share": options.request_share,
        "draft_per_token": per_token,
        "verify_s": verify_s,
    }
    fit = fit_closed_loop(points, **how)
    work.law, work.left_out = fit, leave_out(points, **how)
    files = [_split(item)[1] for item in options.sweep]
    origin = work.origin(*files)
    open_ = not_identified(fit, options.request_share, drafted or bool(options.draft_table or options.draft_like))
    if measured is not None:
        open_ = [one for one in open_ if "beside its tokens" not in one.what]
    work.open += open_
    draft = {}
    if drafted and not options.draft_table:
        draft = {options.drafter: draft_of(fit, origin, "token" if per_token else "round", options.request_share)}
    return step_time_of(fit, origin, request_share=options.request_share, measured_verify=measured), draft


def _split(item: str) -> tuple[str | None, Path]:
    head, equals, tail = item.partition("=")
    if equals and re.fullmatch(r"[a-z0-9_]+(:\d+)?", head) and not Path(item).exists():
        return head, Path(tail)
    return None, Path(item)


def _read_sweeps(work: Work) -> list[LoadPoint]:
    only = dict(item.split("=", 1) for item in work.options.only)
    points: list[LoadPoint] = []
    faults: list[Fault] = []
    for item in work.options.sweep:
        policy, path = _split(item)
        try:
            if policy is not None:
                draft_tokens_of(policy)
            sweep = read_sweep(path, policy, only)
        except ValueError as error:
            faults.append(Fault(str(error), "--sweep"))
            continue
        except InputError as error:
            faults += error.faults
            continue
        points += sweep.points
        work.remarks += sweep.remarks
    if faults:
        raise InputError(*faults)
    gpus = {point.gpus for point in points if point.gpus is not None}
    if work.options.gpus is not None and gpus - {work.options.gpus}:
        raise InputError(
            Fault(f"the runs are of {', '.join(map(str, sorted(gpus)))} GPUs (got {work.options.gpus})", "--gpus")
        )
    if any(point.tpot_s is None for point in points):
        work.remarks.append(
            "runs without TPOT or user_tokens_per_s: a round is concurrency x accepted length / throughput, which "
            "holds the "
            "waits for first tokens"
        )
    return points


def _from_log(work: Work, measured: Curve | None) -> StepTime:
    options = work.options
    if measured is not None:
        raise InputError(Fault("give --log or --step-table: a log is not fitted on top of a table", "--step-table"))
    read = read_log(options.log)
    for reason, count in read.left_out.items():
        work.remarks.append(f"{options.log}: {count} requests left out: {reason}")
    until = None if options.until is None else read.requests[0].arrived_s + options.until
    fit = fit_request_log(read.requests, until)
    work.law = fit
    if fit.cost_s["batch_token"] == 0:
        work.remarks.append(
            f"{options.log}: beside contexts a token costs nothing that the log could show, so that this profile would "
            "verify drafts for free: measure steps by batch tokens (--step-table) before asking it about speculation"
        )
    work.open += not_identified(fit, None, bool(options.draft_table or options.draft_like))
    return step_time_of(fit, work.origin(options.log), request_share=None)


# ------------------------------------------------------------------------------------------------------------ write


def _write(path: Path, profile: Profile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_profile(profile, path)
    except OSError as fault:
        raise InputError(Fault(f"cannot write: {(fault.strerror or str(fault)).lower()}", str(path))) from None


def _write_json(path: Path, report: Report) -> None:
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as fault:
        raise InputError(Fault(f"cannot write: {(fault.strerror or str(fault)).lower()}", str(path))) from None


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
