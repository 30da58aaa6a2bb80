"""The offered load of any kind of arrivals, scaled: what ``load`` means where a scenario is swept."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


def scaled_load(arrivals: Any, factor: Any) -> dict[str, float | int]:
    """Return the keys of an arrivals section that carry its load, times ``factor``.

    Rates are the keys that end in ``_per_s``, also those of a user's own kind; a replay plays faster or slower; a
    closed loop gets more or fewer users, to the nearest whole one. Shapes (bursts, the time of a peak, pauses) stay.
    Raises ValueError where the factor makes no sense.
    """
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise ValueError(f"expected a factor above 0 (got {factor!r})")
    keys = [field.name for field in dataclasses.fields(arrivals)]
    loads = [key for key in keys if key.endswith("_per_s") or key in ("speed_up", "users")]
    if not loads:
        raise ValueError(
            f"arrivals of kind '{arrivals.kind}' have nothing to scale: no key 'users' or 'speed_up', and none that "
            "ends in '_per_s'"
        )
    return {key: _scaled(key, getattr(arrivals, key), factor) for key in loads}


def _scaled(key: str, value: float, factor: float) -> float | int:
    if key != "users":
        return value * factor
    users = math.floor(value * factor + 0.5)
    if users < 1:
        raise ValueError(f"{factor:g} x {value} users leaves none")
    return users
