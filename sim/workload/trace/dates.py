"""Dates and times as traces write them, to the nanosecond: Python's own parser keeps six digits of a second, Azure
has seven.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from sim.workload.base import Ints

_DATE = re.compile(r"\s*(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?\s*", re.ASCII)
EXPECTED_DATE = "expected a time such as '2023-11-16 18:15:46.6805900'"


def date_ns(text: str) -> int:
    """Return nanoseconds since 1970; a time without an offset is taken as UTC. Raises ValueError."""
    match = _DATE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    seconds = int(np.datetime64(f"{match[1]}T{match[2]}", "s").astype(np.int64))
    offset_s = 0
    if match[4]:
        offset_s = (int(match[5]) * 60 + int(match[6])) * (60 if match[4] == "+" else -60)
    return (seconds - offset_s) * 1_000_000_000 + int((match[3] or "").ljust(9, "0"))


def dates_ns(texts: Sequence[str]) -> Ints:
    """Return nanoseconds since 1970 of many times; raises ValueError if one of them is none."""
    matches = [_DATE.fullmatch(text) for text in texts]
    if not all(matches):
        raise ValueError("not all are times")
    seconds = np.array([f"{match[1]}T{match[2]}" for match in matches if match], "datetime64[s]").astype(np.int64)
    parts = [(match[3] or "", match[4] or "", match[5] or "0", match[6] or "0") for match in matches if match]
    fraction_ns = np.array([int(digits.ljust(9, "0")) for digits, *_ in parts], np.int64)
    offset_s = np.array([(int(h) * 60 + int(m)) * (-60 if sign == "-" else 60) for _, sign, h, m in parts], np.int64)
    out: Ints = (seconds - offset_s) * 1_000_000_000 + fraction_ns
    return out
