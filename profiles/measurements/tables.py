"""Times by size: ``batch_tokens, step_ms`` of the target and ``requests, draft_ms`` of a drafter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from profiles.measurements.rows import check_columns, collect, csv_rows, read_text

Floats = NDArray[np.float64]


def read_times(path: Path, size: str, time_ms: str) -> tuple[Floats, Floats]:
    """Return ascending sizes and their seconds; a size measured several times gives the median.

    Raises `MeasurementError` with every fault of the file.
    """
    file = str(path)
    columns, rows = csv_rows(read_text(path), file)
    check_columns(columns, (size, time_ms), (), file)
    read = collect(rows, lambda row: (row.number(size, least=1, whole=True), row.number(time_ms, above=0) / 1e3))
    sizes, seconds = np.array(read).T
    each = np.unique(sizes)
    return each, np.array([np.median(seconds[sizes == one]) for one in each])
