"""Quantities as a person writes them: the type carries the unit, so the key need not.

Inside, there is one unit each: seconds and bytes.
"""

from __future__ import annotations

import math
import re
from typing import Annotated

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]+)")


def _parse(value: object, noun: str, example: str, units: dict[str, float]) -> float:
    text = value.strip() if isinstance(value, str) else ""
    match = _QUANTITY.fullmatch(text.removeprefix("-"))
    if match is None or match[2] not in units:
        known = f"{', '.join(list(units)[:-1])} or {list(units)[-1]}"
        raise ValueError(f"expected {noun} such as '{example}': a number and one of {known}")
    if text.startswith("-"):
        raise ValueError("must not be negative")
    amount = float(match[1]) * units[match[2]]
    if math.isinf(amount):
        raise ValueError("must be finite")
    return amount


def parse_duration_s(value: object) -> float:
    """Read ``'30s'``, ``'1.5min'`` as seconds; raises ValueError."""
    return _parse(value, "a duration", "30s", SECONDS)


def parse_bytes(value: object) -> int:
    """Read ``'96GiB'`` as bytes; raises ValueError."""
    return round(_parse(value, "a size", "96GiB", {unit: float(size) for unit, size in BYTES.items()}))


def format_duration(seconds: float) -> str:
    """Write seconds back in the largest unit that gives a short exact number: ``'30min'``."""
    if seconds == 0:
        return "0s"
    for unit in ("h", "min", "s", "ms", "us"):
        text = f"{seconds / SECONDS[unit]:g}"
        # Read back, it must be the same number to the last bit.
        if float(text) >= 1 and "e" not in text and float(text) * SECONDS[unit] == seconds:
            return f"{text}{unit}"
    return f"{seconds!r}s"


def format_bytes(size: int) -> str:
    """Write bytes back in the largest unit that divides them: ``'96GiB'``."""
    unit = next(unit for unit in reversed(BYTES) if size % BYTES[unit] == 0)
    return f"{size // BYTES[unit]}{unit}"


_as_duration = PlainSerializer(format_duration, return_type=str, when_used="json")
_as_bytes = PlainSerializer(format_bytes, return_type=str, when_used="json")
_duration_schema = WithJsonSchema(
    {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?\s*(us|ms|s|min|h)\s*$"}
)

Duration = Annotated[float, Ge(0), BeforeValidator(parse_duration_s), _as_duration, _duration_schema]
PositiveDuration = Annotated[float, Gt(0), BeforeValidator(parse_duration_s), _as_duration, _duration_schema]
Bytes = Annotated[
    int,
    Gt(0),
    BeforeValidator(parse_bytes),
    _as_bytes,
    WithJsonSchema({"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*(B|KiB|MiB|GiB|TiB)\s*$"}),
]
Rate = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
#: Beyond the upper limits a number is a slip of the pen that would take all memory.
Count = Annotated[int, Ge(1), Le(1_000_000_000)]
BatchTokens = Annotated[int, Ge(1), Le(1_000_000)]
Machines = Annotated[int, Ge(1), Le(100_000)]
