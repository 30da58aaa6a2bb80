"""The scenario file: its sections, strict and typed, with units as a person writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from pydantic import AfterValidator, Field, TypeAdapter, WithJsonSchema

import sim.workload.build  # noqa: F401 - the kinds of arrivals make themselves known
from profiles.reading import (
    Document,
    Path_,
    Section,
    parse_path,
    validate,
)
from sim.axes import LOAD, Axis, Sweep, indices_at
from sim.batching import PREFILLS, Chunked
from sim.errors import Fault, ScenarioError
from sim.metrics import Objective, Window
from sim.plugins import one_of
from sim.routing import ROUTERS, RoundRobin
from sim.units import BatchTokens, Bytes, Count, Duration, Machines, PositiveDuration
from sim.verify import POLICIES
from sim.workload.base import ARRIVALS
from sim.workload.domains import Domains
from sim.workload.length_source import Lengths
from sim.workload.load import scaled_load

if TYPE_CHECKING:
    from sim.batching.base import Prefill as PrefillSpec
    from sim.routing.base import Router as RouterSpec
    from sim.verify.base import Policy as PolicySpec

    ArrivalsSpec = Any
else:
    PolicySpec = one_of(POLICIES)
    ArrivalsSpec = one_of(ARRIVALS)
    PrefillSpec = one_of(PREFILLS)
    RouterSpec = one_of(ROUTERS)

Positive = Annotated[float, Field(gt=0)]

MAX_WINDOWS = 100_000
DEFAULT_WINDOW_S = 10.0

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"


def _check_name(name: str) -> str:
    if not re.fullmatch(_NAME, name):
        raise ValueError("expected up to 100 letters, digits, '_', '-' and '.', beginning with a letter or digit")
    return name


#: It names a folder.
Name = Annotated[str, AfterValidator(_check_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME}$"})]


class Fleet(Section):
    """Replicas of one kind: their profile, their memory and their limits.

    ``profile`` gives step time and acceptance; ``step_profile`` and ``acceptance_profile`` take them from two files.
    Sizes not
    given here come from the (step) profile's ``replica``.
    """

    replicas: Machines
    profile: str | None = None
    step_profile: str | None = None
    acceptance_profile: str | None = None
    kv_cache: Bytes
    gpus_per_replica: Count | None = None
    kv_bytes_per_token: Count | None = None
    max_context_tokens: Count | None = None
    block_tokens: Count = 64
    max_running: Annotated[int, Ge(1), Le(100_000)] = 256
    max_batch_tokens: BatchTokens = 8192
    max_waiting: Count | None = None
    prefill: PrefillSpec = Field(default_factory=Chunked)
    router: RouterSpec = Field(default_factory=RoundRobin)


class Objectives(Section):
    """What each request should get; goodput counts the requests that got all of it."""

    user_tokens_per_s: Positive | None = None
    ttft: PositiveDuration | None = None
    tpot: PositiveDuration | None = None
    e2e: PositiveDuration | None = None

    def bounds(self) -> Objective:
        """Return the bounds in inside units."""
        return Objective(self.user_tokens_per_s, self.ttft, self.tpot, self.e2e)


class Records(Section):
    """What is kept of the steps, and how wide the windows of time plots are."""

    steps: Literal["full", "per_second"] = "full"
    window: PositiveDuration = DEFAULT_WINDOW_S


class Scenario(Section):
    """One question, as a file."""

    name: Name
    seed: Annotated[int, Ge(0)] = 0
    replications: Machines = 1
    horizon: PositiveDuration
    warmup: Duration = 0.0
    cooldown: Duration = 0.0
    fleet: Fleet
    policies: Annotated[tuple[PolicySpec, ...], MinLen(1)]
    arrivals: ArrivalsSpec
    lengths: Lengths | None = None
    domains: Domains | None = None
    deadline: PositiveDuration | None = None
    objectives: Objectives = Field(default_factory=Objectives)
    sweep: Sweep | None = None
    records: Records = Field(default_factory=Records)

    @property
    def window(self) -> Window:
        """The measurement window."""
        return Window(self.warmup, self.horizon - self.cooldown)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """What is swept: a frontier's loads or concurrencies; nothing in most scenarios."""
        if self.sweep is None:
            return ()
        return (self.sweep,) if isinstance(self.sweep, Axis) else self.sweep


def parsed(document: Document) -> Scenario:
    """Build the scenario of a document that `checked` has passed, or of a part of it."""
    scenario: Scenario = validate(Scenario, document, ScenarioError)
    if not document.has("records", "window"):
        window = max(min(DEFAULT_WINDOW_S, scenario.horizon), math.ceil(scenario.horizon / MAX_WINDOWS))
        records = scenario.records.model_copy(update={"window": float(window)})
        scenario = scenario.model_copy(update={"records": records})
    return scenario


def label_of(policy: Any) -> str:
    """Return how a policy is called in tables: its kind, and what differs from the kind's defaults.

    ``fixed k=3``; a list goes without its name: ``batch_table 1:5/64:3 hysteresis=8``.
    """
    values = TypeAdapter(type(policy)).dump_python(policy, mode="json")
    defaults = {name: field.default for name, field in type(policy).__dataclass_fields__.items()}
    shown = {name: value for name, value in values.items() if name != "kind" and value != defaults[name]}
    lists = [_compact(value) for value in shown.values() if isinstance(value, list)]
    others = [f"{name}={_compact(value)}" for name, value in shown.items() if not isinstance(value, list)]
    return " ".join([str(policy.kind), *lists, *others])


def _compact(value: Any) -> str:
    if isinstance(value, list):
        return ("/" if any(isinstance(item, list) for item in value) else ":").join(_compact(item) for item in value)
    if isinstance(value, dict):
        return ":".join(_compact(item) for item in value.values())
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def at_point(document: Document, axes: Sequence[Axis], point: int) -> Document:
    """Return the document of one point of a sweep, the sweep taken out."""
    part = document.without(("sweep",))
    load: tuple[Any, Path_] | None = None
    for index, (axis, at) in enumerate(zip(axes, indices_at(axes, point), strict=True)):
        where = path_of_value(document, index, at)
        if axis.key == LOAD:
            load = axis.values[at], where
            continue
        path = parse_path(axis.key)
        assert path is not None
        part = part.replaced(path, axis.values[at], str(document.fault("", where)))
    if load is not None:  # last, since it is a factor on what the others may have set
        factor, where = load
        try:
            scaled = scaled_load(parsed(part).arrivals, factor)
        except ValueError as error:
            raise ScenarioError(Fault(str(error), key=LOAD)) from None
        for key, value in scaled.items():
            part = part.replaced(("arrivals", key), value, str(document.fault("", where)))
    return part


def path_of_axis(document: Document, axis: int) -> Path_:
    """Return where an axis of a sweep was written."""
    return ("sweep", axis) if isinstance(document.data["sweep"], list) else ("sweep",)


def path_of_value(document: Document, axis: int, value: int) -> Path_:
    """Return where a value of an axis was written."""
    return (*path_of_axis(document, axis), "values", value)


def resolved(scenario: Scenario) -> dict[str, Any]:
    """Return the scenario with every default filled in, as plain data that reads back as the same scenario."""
    data: dict[str, Any] = _kind_first(scenario.model_dump(mode="json", by_alias=True, exclude_none=True))
    return data


def _kind_first(value: Any) -> Any:
    if isinstance(value, list):
        return [_kind_first(item) for item in value]
    if isinstance(value, dict):
        return {key: _kind_first(value[key]) for key in sorted(value, key=lambda key: key != "kind")}
    return value


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of scenario files, for editors."""
    return Scenario.model_json_schema(by_alias=True)
