"""From an Arrow column of text to indices and names."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.workload.trace.columns import Texts


def encoded(column: Any) -> Texts:
    """Return a chunked column of text without nulls as indices into its names."""
    codes = column.combine_chunks().dictionary_encode()
    return Texts(codes.indices.to_numpy(zero_copy_only=False).astype(np.int64), tuple(codes.dictionary.to_pylist()))
