"""What is varied: axes of keys and values, whose product are the points of a sweep.

A scenario's own ``sweep`` and the option ``--vary`` mean the same and are the same: the option lays its axes over the
file's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import MinLen
from pydantic import Discriminator, Tag

from profiles.reading import NotData, Section, parse_data
from sim.errors import Fault, ScenarioError

#: A key that no section has: a factor on the offered load, whatever the kind of arrivals (`sim.workload.load`).
LOAD = "load"
MAX_POINTS = 100_000


class Axis(Section):
    """One key of the scenario, or ``load``, in turn set to each value."""

    key: Annotated[str, MinLen(1)]
    values: Annotated[tuple[Any, ...], MinLen(1)]


def _shape(value: Any) -> str:
    return "axes" if isinstance(value, list | tuple) else "axis"


#: The section of a scenario.
Sweep = Annotated[
    Annotated[Axis, Tag("axis")] | Annotated[tuple[Axis, ...], MinLen(1), Tag("axes")],
    Discriminator(
        _shape, custom_error_type="sweep_shape", custom_error_message="expected {key: ..., values: [...]} or a list"
    ),
]


def size(axes: Sequence[Axis]) -> int:
    """Return the number of points; without axes there is one."""
    return math.prod(len(axis.values) for axis in axes)


def indices_at(axes: Sequence[Axis], point: int) -> tuple[int, ...]:
    """Return the index of each axis's value at a point; the last axis runs fastest."""
    indices: list[int] = []
    for axis in reversed(axes):
        point, index = divmod(point, len(axis.values))
        indices.append(index)
    return tuple(reversed(indices))


def values_at(axes: Sequence[Axis], point: int) -> tuple[Any, ...]:
    """Return each axis's value at a point."""
    return tuple(axis.values[index] for axis, index in zip(axes, indices_at(axes, point), strict=True))


def label_at(axes: Sequence[Axis], point: int) -> str:
    """Name a point: ``load=0.2, fleet.replicas=4``."""
    return ", ".join(f"{axis.key}={value}" for axis, value in zip(axes, values_at(axes, point), strict=True))


_NUMBER = r"[+-]?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::([0-9]+))?(?::(log))?")


def parse_axis(text: str) -> dict[str, Any]:
    """Read ``load=0.2..1.4:7``, ``load=1..100:5:log`` or ``fleet.replicas=4,8`` as the mapping of an `Axis`.

    A range is of floats; where its ends and steps are whole numbers, of whole numbers. Raises `ScenarioError`.
    """

    def fault(message: str) -> ScenarioError:
        return ScenarioError(Fault(message, f"--vary {text}"))

    key, equals, given = text.partition("=")
    key, given = key.strip(), given.strip()
    if not equals or not key or not given:
        raise fault("expected KEY=VALUES such as load=0.2..1.4:7 or fleet.replicas=4,8")
    if re.match(rf"{_NUMBER}\.\.", given):
        found = _RANGE.fullmatch(given)
        if found is None:
            raise fault(f"expected a range such as 0.2..1.4:7 or 1..100:5:log (got '{given}')")
        if found[3] is None:
            raise fault(f"how many values? write {given}:7 for seven")
        try:
            return {"key": key, "values": _spaced(float(found[1]), float(found[2]), int(found[3]), bool(found[4]))}
        except ValueError as error:
            raise fault(f"{error} (got '{given}')") from None
    try:
        # As YAML, so that 4 is a number, 30s a text and {kind: fixed, tokens: 8} one value.
        values, _ = parse_data(f"[{given}]")
    except NotData:
        raise fault(f"expected values separated by commas, as in YAML (got '{given}')") from None
    return {"key": key, "values": values}


def _spaced(first: float, last: float, count: int, is_log: bool) -> list[float | int]:
    if not 2 <= count <= MAX_POINTS:
        raise ValueError(f"expected 2 to {MAX_POINTS} values in a range")
    if not math.isfinite(first) or not math.isfinite(last) or first == last:
        raise ValueError("expected two different ends")
    if is_log and min(first, last) <= 0:
        raise ValueError("a logarithmic range needs ends above 0")
    raw = np.geomspace(first, last, count) if is_log else np.linspace(first, last, count)
    # Twelve digits: 0.2..1.4:7 has 0.6, not 0.6000000000000001.
    values = [float(f"{value:.12g}") for value in raw]
    return [int(value) for value in values] if all(value.is_integer() for value in values) else [*values]
