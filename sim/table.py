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
    Column("ttft_s_p50", "TTFT p50 ms", 1e3, 0),
    Column("ttft_s_p99", "p99 ms", 1e3, 0),
    Column("tpot_s_p99", "TPOT p99 ms", 1e3),
    Column("accepted_length", "accepted length", digits=2),
    Column("verify_tokens_per_request", "verified/request", digits=2),
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


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lay rows out in columns: the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *rest]))
    return "\n".join(lines)


def comparison_table(
    rows: Sequence[tuple[str, Estimates, Mapping[str, Difference]]],
    baseline: str,
    assumed: Mapping[str, str],
) -> str:
    """Lay out the comparison.

    ``rows``: label, estimates and differences (against ``baseline``) of each policy. ``assumed``: metric to why it
    rests on an
    assumption; its head gets a star.
    """
    heads = [column.head + ("*" if column.metric in assumed else "") for column in COLUMNS]
    compared = [column for column in COLUMNS if column.metric in COMPARED]
    lines = [["policy", *heads, *(f"Δ {column.head}" for column in compared), "/".join(end[:3] for end in ENDS)]]
    for label, estimates, differences in rows:
        ends = "/".join("-" if (value := estimates[end].value) is None else f"{value:.0f}" for end in ENDS)
        changes = [shown_difference(differences[column.metric]) if label != baseline else "" for column in compared]
        lines.append([label, *(shown(estimates[column.metric], column) for column in COLUMNS), *changes, ends])
    return aligned(lines)
