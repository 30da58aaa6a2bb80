"""What a fit found, as data and as text: costs, rows with their errors, what stays open, what is assumed."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from profiles.fitting.closed_loop import ClosedLoopFit, rounds_s
from profiles.fitting.law import Law
from profiles.fitting.least_squares import Floats
from profiles.fitting.request_log import RequestLogFit
from profiles.fitting.to_profile import NotIdentified
from profiles.schema import Drafter, Profile, provenances

Report = dict[str, Any]

WIDTH = 118

LABELS = {
    "floor_us": "a step",
    "batch_token_us": "a batch token",
    "request_us": "a request beside its tokens",
    "context_token_us": "a token in the caches",
    "prompt_token_us": "a prompt token",
    "admission_us": "a request let in",
    "draft_us": "a step that drafts",
    "draft_request_us": "a request drafted",
    "saturating_us": "and as experts are loaded, up to",
    "bend_us": "a batch token past the knee",
}
#: Rows of a log that are printed: the worst.
WORST_ROWS = 8


def report_of(
    profile: Profile,
    file: Path,
    law: Law | None,
    left_out: Floats | None,
    open_: Sequence[NotIdentified],
    remarks: Sequence[str],
) -> Report:
    """Return what a fit found, as plain data with units in the keys.

    ``left_out``: errors of closed-loop runs predicted with their concurrency left out, NaN where none could be made.
    """
    sources = provenances(profile)
    unseen = None if left_out is None or np.isnan(left_out).all() else 100 * np.abs(left_out)
    return {
        "profile": profile.name,
        "file": str(file),
        "costs": {} if law is None else _costs(law),
        "rows": _rows(law, left_out),
        "rms_percent": None if law is None else 100 * law.rms,
        "worst_percent": None if law is None else 100 * law.worst,
        "left_out_median_percent": None if unseen is None else float(np.nanmedian(unseen)),
        "left_out_worst_percent": None if unseen is None else float(np.nanmax(unseen)),
        "survival": {name: _survivals(drafter) for name, drafter in profile.acceptance.items()},
        "not_identified": [dataclasses.asdict(one) for one in dict.fromkeys(open_)],
        "assumed": [where for where, source in sources.items() if source.origin == "assumed"],
        "values": len(sources),
        "remarks": list(remarks),
    }


def _costs(law: Law) -> Report:
    costs: Report = {}
    for name, value in law.cost_s.items():
        if value > 0:
            error = law.error_s[name]
            costs[f"{name}_us"] = {"value": 1e6 * value, "standard_error": None if np.isnan(error) else 1e6 * error}
    if law.saturating_s > 0:
        costs["saturating_us"] = {"value": 1e6 * law.saturating_s, "saturation_tokens": law.saturation_tokens}
    if law.bend_token_s > 0:
        costs["bend_us"] = {"value": 1e6 * law.bend_token_s, "bend_tokens": law.bend_tokens}
    return costs


def _rows(law: Law | None, left_out: Floats | None) -> list[Report]:
    if isinstance(law, ClosedLoopFit):
        return _run_rows(law, np.full(len(law.points), np.nan) if left_out is None else left_out)
    return _request_rows(law) if isinstance(law, RequestLogFit) else []


def _run_rows(fit: ClosedLoopFit, left_out: Floats) -> list[Report]:
    rows = []
    for point, observed, miss, unseen in zip(fit.points, rounds_s(fit.points), fit.misses, left_out, strict=True):
        rows.append(
            {
                "concurrency": point.concurrency,
                "k": point.draft_tokens,
                "prompt_tokens": point.prompt_tokens,
                "output_tokens": point.output_tokens,
                "accepted_length_tokens": point.accepted_length,
                "observed_round_ms": 1e3 * float(observed),
                "fitted_round_ms": 1e3 * float(observed * (1 + miss)),
                "error_percent": 100 * float(miss),
                "error_left_out_percent": None if np.isnan(unseen) else 100 * float(unseen),
                "place": point.place,
            }
        )
    return rows


def _request_rows(fit: RequestLogFit) -> list[Report]:
    return [
        {
            "arrived_s": one.arrived_s - fit.requests[0].arrived_s,
            "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.output_tokens,
            "fitted_output_tokens": 1 + (one.output_tokens - 1) * (1 + float(miss)),
            "error_percent": 100 * float(miss),
        }
        for one, miss in zip(fit.requests, fit.misses, strict=True)
    ]


def _survivals(drafter: Drafter) -> dict[str, list[float]]:
    return {domain: list(law.survival.values) for domain, law in drafter.domains.items() if law.kind == "parametric"}


def as_text(report: Report) -> str:
    """Return the report as it is printed."""
    lines = [f"{report['profile']}: written to {report['file']}"]
    if report["costs"]:
        lines += ["", "what a step costs"]
        for key, cost in report["costs"].items():
            error = cost.get("standard_error")
            spread = f" ±{_us(error)}" if error is not None else ""
            at = cost.get("saturation_tokens", cost.get("bend_tokens"))
            tail = f" ({at:.3g} tokens)" if at is not None else ""
            lines.append(f"  {LABELS[key]:<32}{_us(cost['value']):>12}{spread}{tail}")
    if report["rows"]:
        lines += ["", *_rows_text(report)]
    for drafter, domains in report["survival"].items():
        for domain, values in domains.items():
            shares = " ".join(f"{value:.3f}" for value in values)
            lines += ["", f"survival of {drafter}, {domain}: {shares}; {1 + sum(values):.2f} tokens a round"]
    if report["not_identified"]:
        lines += ["", "not identified by these measurements"]
        for one in report["not_identified"]:
            lines += _wrap(f"- {one['what']}: {one['taken']}. To settle it: {one['settle']}.")
    if report["remarks"]:
        lines += ["", "to know"]
        for remark in report["remarks"]:
            lines += _wrap(f"- {remark}")
    lines += [
        "",
        f"{len(report['assumed'])} of {report['values']} values are assumed: {', '.join(report['assumed']) or 'none'}",
    ]
    return "\n".join(part for line in lines for part in (_wrap(line) if len(line) > WIDTH else [line]))


def _us(value: float) -> str:
    return f"{value / 1e3:.3f} ms" if value >= 1e3 else f"{value:.3g} us"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _rows_text(report: Report) -> list[str]:
    rows = report["rows"]
    if "concurrency" in rows[0]:
        lines = ["mean round, ms: fitted to all runs; left out: predicted from the runs at other concurrencies"]
        lines.append("  requests    k   prompt   output   observed     fitted    error   left out")
        for row in rows:
            sizes = "".join(
                f"{'-' if row[key] is None else f'{row[key]:,.0f}':>9}" for key in ("prompt_tokens", "output_tokens")
            )
            unseen = row["error_left_out_percent"]
            lines.append(
                f"{row['concurrency']:>10,.0f}{'-' if row['k'] is None else row['k']:>5}{sizes}"
                f"{row['observed_round_ms']:>11.3f}"
                f"{row['fitted_round_ms']:>11.3f}{row['error_percent']:>+8.1f} %"
                + ("          -" if unseen is None else f"{unseen:>+9.1f} %")
            )
    else:
        lines = [f"tokens that a request got in its time, the worst {min(WORST_ROWS, len(rows))} of {len(rows)}"]
        lines.append("  arrived s   prompt   output   fitted    error")
        for row in sorted(rows, key=lambda one: -abs(one["error_percent"]))[:WORST_ROWS]:
            lines.append(
                f"{row['arrived_s']:>11.2f}{row['prompt_tokens']:>9,}{row['output_tokens']:>9,}{row['fitted_output_tokens']:>9,.0f}"
                f"{row['error_percent']:>+8.1f} %"
            )
    tail = f"residuals of the fit: {report['rms_percent']:.1f} % rms, {report['worst_percent']:.1f} % worst"
    if report["left_out_median_percent"] is not None:
        tail += (
            f"; loads left out: {report['left_out_median_percent']:.1f} % median, "
            f"{report['left_out_worst_percent']:.1f} % worst"
        )
    return [*lines, tail]
