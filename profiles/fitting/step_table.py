"""Measured times as curves, read as written: nothing is smoothed."""

from __future__ import annotations

from typing import Literal

from profiles.fitting.least_squares import Floats
from profiles.recipes.sources import seconds
from profiles.schema import Beyond, Provenance, Segment, TableCurve


def table_curve(
    sizes: Floats,
    times_s: Floats,
    between: Literal["round_up", "linear"],
    beyond: Beyond,
    provenance: Provenance,
) -> TableCurve:
    """Return a table of one segment; ``between`` says what sizes that were not measured cost."""
    return TableCurve(
        segments=(
            Segment(
                between=between,
                sizes=tuple(int(size) for size in sizes),
                seconds=tuple(seconds(time) for time in times_s),
            ),
        ),
        beyond=beyond,
        provenance=provenance,
    )
