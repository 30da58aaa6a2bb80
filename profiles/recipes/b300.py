"""V4-Flash on 4 x B300 under vLLM: the measured table, jagged as it is, with its graph limit and cliff."""

from __future__ import annotations

from typing import Literal

import numpy as np

from profiles.recipes.sources import B300, Floats, Shared


def read_verify_s(shared: Shared, mode: Literal["graph", "eager"]) -> tuple[Floats, Floats]:
    """Return batch tokens and seconds of the measured verify steps."""
    tokens, ms = shared.columns(B300, "size", "ms", kind=f"verify_{mode}_tokens")
    return tokens, ms / 1e3


def read_draft_s(shared: Shared) -> tuple[Floats, Floats]:
    """Return requests drafted and seconds of the measured draft passes."""
    requests, ms = shared.columns(B300, "size", "ms", kind="draft_requests")
    return requests, ms / 1e3


def fit_draft_line(shared: Shared) -> tuple[float, float]:
    """Return the line through the draft times: seconds at no request, seconds a request."""
    requests, draft_s = read_draft_s(shared)
    slope, floor = np.polyfit(requests, draft_s, 1)
    return float(floor), float(slope)


def slope_near_graph_limit_s(shared: Shared, from_tokens: int = 512) -> float:
    """Return seconds a token at the top of the graph sizes, where the experts are loaded anyway: a least squares line."""
    tokens, verify_s = read_verify_s(shared, "graph")
    top = tokens >= from_tokens
    return float(np.polyfit(tokens[top], verify_s[top], 1)[0])
