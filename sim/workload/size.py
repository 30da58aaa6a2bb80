"""The largest load that is drawn: a slip in a rate should be a message, not a machine out of memory."""

from __future__ import annotations

MAX_REQUESTS = 50_000_000


def check_expected_requests(expected: float) -> None:
    """Raise ValueError where a law would offer more requests than a table can sensibly hold."""
    if expected > MAX_REQUESTS:
        raise ValueError(f"offers about {expected:.3g} requests within the horizon; at most {MAX_REQUESTS}")
