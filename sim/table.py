"""The comparison as a person reads it: one line a policy, units in the head, what is assumed below."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sim.compare import Difference, Estimate

Estimates = Mapping[str, Estimate]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: metric, head, factor to the printed unit and digits after the point."""

    metric: str
    head: str
    factor: float = 1.0
    digits: int = 1


COLUMNS = (
    Column("output_tokens_per_s_per_gpu", "tok/s/GPU", digits=0),
    Column("user_tokens_per_s_p50", "tok/s/user p50"),
    Column("user_tokens_per_s_p10", "p10"),
    Column("ttft_s_p50", "TTFT ms p50", 1e3, 0),
    Column("ttft_s_p99", "p99", 1e3, 0),
    Column("tpot_s_p99", "TPOT ms p99", 1e3),
    Column("accepted_length", "accepted", digits=2),
    Column("verify_tokens_per_request", "verified", digits=2),
    Column("wasted_draft_ratio", "wasted %", 100.0, 0),
    Column("goodput_per_s", "goodput/s", digits=2),
)
COMPARED = ("output_tokens_per_s_per_gpu", "user_tokens_per_s_p50")
ENDS = ("finished", "rejected", "aborted", "failed", "unfinished")


def shown(estimate: Estimate, column: Column) -> str:
    """Write a number with its interval; a dash where there is none, ``beyond`` where it lies past the run."""
    if estimate.value is None:
        return "-"
    if math.isinf(estimate.value):
        return "beyond"
    text = f"{estimate.value * column.factor:.{column.digits}f}"
    if estimate.half_width is not None:
        text += f" ±{estimate.half_width * column.factor:.{column.digits}f}"
    return text


def shown_difference(difference: Difference) -> str:
    """Write a change in per cent with its verdict."""
    change = difference.relative
    if change.value is None:
        return "-"
    text = f"{100 * change.value:+.1f}%"
    if change.half_width is not None:
        text += f" ±{100 * change.half_width:.1f}"
    return f"{text} (tie)" if difference.verdict == "tie" else text


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay rows out in columns: the first to the left, numbers to the right; an empty row stays an empty line."""
    widths = [max(len(row[i]) for row in rows if row) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=bool(row))]
        lines.append("  ".join([row[0].ljust(widths[0]), *padded[1:]]) if row else "")
    return lines


@dataclass(frozen=True, slots=True)
class Row:
    """A policy at a swept value (None without a sweep): its estimates, and its differences against the baseline."""

    policy: str
    swept: str | None
    estimates: Estimates
    differences: Mapping[str, Difference]
    is_baseline: bool


def comparison_table(rows: Sequence[Row], swept: str | None, assumed: Mapping[str, str]) -> str:
    """Lay out the comparison, policies of a swept value together.

    ``swept``: the swept key. ``assumed``: metric to why it rests on an assumption; its head gets a star.
    """
    heads = [column.head + ("*" if column.metric in assumed else "") for column in COLUMNS]
    compared = [column for column in COLUMNS if column.metric in COMPARED]
    ends_head = "/".join(end[:3] for end in ENDS)
    lines = [["policy", *([swept] if swept else []), *heads, *(f"Δ {column.head}" for column in compared), ends_head]]
    for row, before in zip(rows, [rows[0], *rows[:-1]], strict=True):
        if row.swept != before.swept:
            lines.append([])
        values = [shown(row.estimates[column.metric], column) for column in COLUMNS]
        changes = ["" if row.is_baseline else shown_difference(row.differences[column.metric]) for column in compared]
        ends = "/".join(_count(row.estimates[end]) for end in ENDS)
        lines.append([row.policy, *([row.swept] if row.swept else []), *values, *changes, ends])
    return "\n".join(aligned(lines))


def _count(estimate: Estimate) -> str:
    return "-" if estimate.value is None else f"{estimate.value:.0f}"
