"""The scenario file: strict, typed, with units as a person writes them; every fault is reported with its line."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from pydantic import AfterValidator, Field, TypeAdapter, WithJsonSchema

from profiles.reading import (
    Document,
    NotData,
    Path_,
    Place,
    Section,
    dotted,
    parse_data,
    parse_path,
    read_document,
    short,
    validate,
)
from sim.axes import LOAD, MAX_POINTS, Axis, Sweep, indices_at, parse_axis, size, values_at
from sim.batching import PREFILLS, Chunked
from sim.errors import Fault, InputError, ScenarioError
from sim.metrics import Objective, Window
from sim.plugins import one_of, required_keys
from sim.routing import ROUTERS, RoundRobin
from sim.units import BatchTokens, Bytes, Count, Duration, Machines, PositiveDuration, format_duration
from sim.verify import POLICIES, BatchTable
from sim.workload.base import ARRIVALS
from sim.workload.build import traffic_faults
from sim.workload.closed_loop import ClosedLoop
from sim.workload.domains import Domains
from sim.workload.length_source import Lengths
from sim.workload.load import scaled_load
from sim.workload.varying import Diurnal

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

MAX_HORIZON_S = 366 * 86400.0
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


def load_scenario(
    path: Path,
    settings: tuple[str, ...] = (),
    trace: Path | None = None,
    options: Sequence[tuple[str, str, Any]] = (),
    vary: Sequence[str] = (),
) -> tuple[Scenario, Document]:
    """Read a scenario file and lay over it what the command line says; raises `ScenarioError` with every fault.

    ``settings``: ``key=value`` each. ``trace``: a trace to replay. ``options``: name of an option, key and value, as
    in ``("--seed", "seed", 3)``. ``vary``: axes that take the place of the file's sweep, as in ``load=0.2..1.4:7``.
    What needs the profile or the trace itself is checked by `sim.build`.
    """
    document = read_document(path, ScenarioError)
    for setting in settings:
        document = with_setting(document, setting)
    if trace is not None:
        document = with_trace(document, trace)
    for option, key, value in options:
        document = document.replaced((key,), value, option)
    if vary:
        document = with_axes(document, vary)
        for key in (setting.partition("=")[0] for setting in settings):
            if key in (axis["key"] for axis in document.data["sweep"]):
                raise ScenarioError(Fault("has no effect: --vary sets it", "--set", key=key))
    return checked(document), document


def parsed(document: Document) -> Scenario:
    """Build the scenario of a document that `checked` has passed, or of a part of it."""
    scenario: Scenario = validate(Scenario, document, ScenarioError)
    if not document.has("records", "window"):
        window = max(min(DEFAULT_WINDOW_S, scenario.horizon), math.ceil(scenario.horizon / MAX_WINDOWS))
        records = scenario.records.model_copy(update={"window": float(window)})
        scenario = scenario.model_copy(update={"records": records})
    return scenario


def checked(document: Document) -> Scenario:
    """Build the scenario of a document and check what concerns several keys."""
    scenario = parsed(document)
    if scenario.sweep is None:
        faults = [*_conflicts(scenario, document), *_without_effect(scenario, document)]
    else:
        faults = _sweep_faults(scenario.axes, document)
    if faults:
        raise ScenarioError(*faults)
    return scenario


def with_setting(document: Document, setting: str) -> Document:
    """Lay ``a.b[2].c=value`` (value as in YAML) over a document; raises `ScenarioError`."""
    key, equals, text = setting.partition("=")
    path = parse_path(key)
    if not equals or path is None:
        raise ScenarioError(Fault(f"expected key=value such as fleet.replicas=16 (got '{setting}')", "--set"))
    try:
        value, _ = parse_data(text)
    except NotData:
        raise ScenarioError(Fault(f"not a YAML value (got '{text}')", "--set", key=key)) from None
    sweep = document.data.get("sweep")
    axes = sweep if isinstance(sweep, list) else [sweep]
    if any(isinstance(axis, dict) and axis.get("key") == key for axis in axes):
        raise ScenarioError(Fault("has no effect: the scenario sweeps it; set sweep.values", "--set", key=key))
    return document.replaced(path, value)


def with_trace(document: Document, trace: Path) -> Document:
    """Let a scenario replay ``trace``; raises `ScenarioError` where it replays none."""
    arrivals = document.data.get("arrivals")
    kind = arrivals.get("kind") if isinstance(arrivals, dict) else arrivals
    if kind != "replay":
        message = f"has no effect: {document.file} replays no trace, its arrivals are of kind '{kind}'"
        raise ScenarioError(Fault(message, "--trace"))
    if not trace.is_absolute():  # a path in a scenario begins at the scenario
        trace = Path(os.path.relpath(trace.resolve(), Path(document.file).resolve().parent))
    return document.replaced(("arrivals", "path"), str(trace), "--trace")


def with_axes(document: Document, texts: Sequence[str]) -> Document:
    """Lay the axes of ``--vary`` over a document, in place of its own sweep; raises `ScenarioError`."""
    document = document.replaced(("sweep",), [parse_axis(text) for text in texts], "--vary")
    places: dict[Path_, Place] = {("sweep", index): f"--vary {text}" for index, text in enumerate(texts)}
    return Document(document.file, document.data, {**document.places, **places})


def with_policies(scenario: Scenario, document: Document, names: list[str]) -> tuple[Scenario, Document]:
    """Keep only the named policies: labels or kinds of the scenario's own, or kinds that need no settings."""
    own = document.data["policies"]
    labels = [label_of(policy) for policy in scenario.policies]
    kept: list[Any] = []
    places: dict[tuple[str | int, ...], Place] = {}
    for name in (name.strip() for name in names):
        found = [i for i, policy in enumerate(scenario.policies) if name in (labels[i], policy.kind)]
        if not found and name not in POLICIES.known():
            known = ", ".join(dict.fromkeys([*labels, *POLICIES.known()]))
            raise ScenarioError(Fault(f"unknown policy '{name}'; known: {known}", "--policies"))
        needed = [] if found else required_keys(POLICIES.known()[name])
        if needed:
            message = f"'{name}' needs {', '.join(needed)}; write it into the scenario"
            raise ScenarioError(Fault(message, "--policies"))
        for i in found:
            places |= {
                ("policies", len(kept), *path[2:]): place
                for path, place in document.places.items()
                if path[:2] == ("policies", i)
            }
            kept.append(own[i])
        if not found:
            kept.append(name)
        if any(one in kept[:index] for index, one in enumerate(kept)):
            raise ScenarioError(Fault(f"'{name}' is given twice", "--policies"))
    document = document.replaced(("policies",), kept, "--policies")
    document = Document(document.file, document.data, {**document.places, **places})
    # An option that served a policy now left out is no fault of the file.
    scenario = parsed(document)
    faults = [] if scenario.sweep is not None else list(_conflicts(scenario, document))
    if faults:
        raise ScenarioError(*faults)
    return scenario, document


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


def _conflicts(scenario: Scenario, document: Document) -> Iterator[Fault]:
    """Find what cannot be between keys."""
    fleet, records = scenario.fleet, scenario.records
    if fleet.profile is not None:
        for key in ("step_profile", "acceptance_profile"):
            if getattr(fleet, key) is not None:
                yield document.fault("has no effect beside fleet.profile; give one or the other", ("fleet", key))
    elif fleet.step_profile is None:
        yield document.fault("missing; give profile, or step_profile and acceptance_profile", ("fleet", "profile"))
    elif fleet.acceptance_profile is None and any(policy.drafter is not None for policy in scenario.policies):
        yield document.fault("missing; these policies draft", ("fleet", "acceptance_profile"))
    if scenario.horizon > MAX_HORIZON_S:
        yield document.fault(f"expected at most {format_duration(MAX_HORIZON_S)}, a year", ("horizon",))
    if scenario.warmup + scenario.cooldown >= scenario.horizon:
        yield document.fault(
            f"warmup and cooldown ({scenario.warmup:g} s + {scenario.cooldown:g} s) leave nothing of the horizon "
            f"({scenario.horizon:g} s) to measure",
            ("warmup" if scenario.warmup else "cooldown",),
        )
    yield from _batch_faults(fleet, document)
    labels = [label_of(policy) for policy in scenario.policies]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            yield document.fault(f"same as policies[{labels.index(label)}] ('{label}')", ("policies", index))
    for path, message in traffic_faults(scenario.arrivals, scenario.lengths, scenario.domains, scenario.horizon):
        yield document.fault(message, path)
    if records.steps == "per_second":
        for path, seconds in (
            (("warmup",), scenario.warmup),
            (("cooldown",), scenario.cooldown),
            (("horizon",), scenario.horizon),
            (("records", "window"), records.window),
        ):
            if seconds != int(seconds):
                yield document.fault(f"must be whole seconds with records.steps: per_second (got {seconds:g} s)", path)
    if records.window > scenario.horizon:
        message = f"wider than the horizon of {scenario.horizon:g} s (got {records.window:g} s)"
        yield document.fault(message, ("records", "window"))
    if scenario.horizon / records.window > MAX_WINDOWS:
        message = f"cuts the horizon of {scenario.horizon:g} s into more than {MAX_WINDOWS} (got {records.window:g} s)"
        yield document.fault(message, ("records", "window"))


def _batch_faults(fleet: Fleet, document: Document) -> Iterator[Fault]:
    """Find limits of a batch that contradict each other; reported at the one that was written."""
    limit = fleet.max_batch_tokens
    parts: list[tuple[tuple[str, ...], int, str]] = [
        (("max_running",), fleet.max_running, "each running request needs a token")
    ]
    if isinstance(fleet.prefill, Chunked):
        parts.append((("prefill", "chunk_tokens"), fleet.prefill.chunk_tokens, "a chunk is part of a batch"))
    for path, value, why in parts:
        if value <= limit:
            continue
        if document.has("fleet", *path):
            message = f"must be at most max_batch_tokens, {limit}: {why} (got {value})"
            yield document.fault(message, ("fleet", *path))
        else:
            message = f"must be at least {dotted(path)}, {value} where nothing is said: {why} (got {limit})"
            yield document.fault(message, ("fleet", "max_batch_tokens"))


def _without_effect(scenario: Scenario, document: Document) -> Iterator[Fault]:
    """Find options that change nothing in this scenario."""

    def idle(reason: str, *path: str | int) -> Fault:
        return document.fault(f"has no effect: {reason}", path)

    fleet, arrivals, objectives, deadline = scenario.fleet, scenario.arrivals, scenario.objectives, scenario.deadline
    if fleet.acceptance_profile is not None and all(policy.drafter is None for policy in scenario.policies):
        yield idle("no policy drafts", "fleet", "acceptance_profile")
    if fleet.replicas == 1 and not isinstance(fleet.router, RoundRobin):
        yield idle("there is one replica", "fleet", "router")
    if isinstance(arrivals, ClosedLoop):
        if fleet.max_waiting is not None and fleet.max_waiting >= arrivals.users:
            yield idle(
                f"the users are {arrivals.users}, and no more can wait (got {fleet.max_waiting})",
                "fleet",
                "max_waiting",
            )
        if arrivals.users == 1 and arrivals.ramp > 0:
            yield idle("there is one user", "arrivals", "ramp")
    if isinstance(arrivals, Diurnal) and arrivals.amplitude == 0:
        yield idle("a swing of 0 is none; use kind 'poisson' (got 0)", "arrivals", "amplitude")
    if isinstance(scenario.domains, tuple):
        for index, (before, after) in enumerate(pairwise(scenario.domains), start=1):
            if before.mix == after.mix:
                yield idle("the mix stays as it was", "domains", index, "mix")
    if deadline is not None and deadline >= scenario.horizon:
        yield idle(f"no request waits longer than the horizon, {scenario.horizon:g} s (got {deadline:g} s)", "deadline")
    if objectives.tpot is not None and objectives.user_tokens_per_s is not None:
        rate = 1 / objectives.tpot
        lax = "user_tokens_per_s" if rate >= objectives.user_tokens_per_s else "tpot"
        yield idle(
            f"user_tokens_per_s is 1 / tpot, and {objectives.user_tokens_per_s:g} and {rate:g} tokens/s are asked for; "
            "remove it",
            "objectives",
            lax,
        )
    if objectives.ttft is not None and objectives.e2e is not None and objectives.ttft >= objectives.e2e:
        yield idle(f"e2e asks for more, {objectives.e2e:g} s (got {objectives.ttft:g} s)", "objectives", "ttft")
    for key in ("ttft", "e2e"):
        bound = getattr(objectives, key)
        if bound is not None and deadline is not None and bound >= deadline:
            yield idle(f"the deadline is {deadline:g} s (got {bound:g} s)", "objectives", key)
    for index, policy in enumerate(scenario.policies):
        if isinstance(policy, BatchTable):
            yield from _idle_rows(policy, ("policies", index), fleet.max_running, document)


def _idle_rows(
    policy: BatchTable, where: tuple[str | int, ...], max_running: int, document: Document
) -> Iterator[Fault]:
    for row, ((_, above), (requests, length)) in enumerate(pairwise(policy.table), start=1):
        if requests > max_running:
            message = f"has no effect: max_running is {max_running} (got {requests})"
            yield document.fault(message, (*where, "table", row))
        if length == above:
            yield document.fault(f"has no effect: same length as the row before (got {length})", (*where, "table", row))
    if policy.hysteresis and len(policy.table) == 1:
        message = f"has no effect: the table has one row (got {policy.hysteresis})"
        yield document.fault(message, (*where, "hysteresis"))


def at_point(document: Document, axes: Sequence[Axis], point: int) -> Document:
    """Return the document of one point of a sweep, the sweep taken out."""
    part = document.without(("sweep",))
    load: tuple[Any, Path_] | None = None
    for index, (axis, at) in enumerate(zip(axes, indices_at(axes, point), strict=True)):
        where = _path_of_value(document, index, at)
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


def _path_of_axis(document: Document, axis: int) -> Path_:
    return ("sweep", axis) if isinstance(document.data["sweep"], list) else ("sweep",)


def _path_of_value(document: Document, axis: int, value: int) -> Path_:
    return (*_path_of_axis(document, axis), "values", value)


def _sweep_faults(axes: Sequence[Axis], document: Document) -> list[Fault]:
    """Find what is wrong with a sweep, and with the scenario of each point.

    A fault that all points share is reported as any other, one that comes with some value of an axis at that value; an
    option is without effect only if it is so at all points.
    """
    own = list(_axis_faults(axes, document))
    if own:
        return own
    found: list[dict[tuple[str | None, str], Fault]] = []
    idle: list[dict[tuple[str | None, str], Fault]] = []
    seen: set[str] = set()
    for point in range(size(axes)):
        try:
            part = at_point(document, axes, point)
            scenario = parsed(part)
            faults = list(_conflicts(scenario, part))
            idle.append({(one.key, one.message): one for one in _without_effect(scenario, part)})
            if repr(part.data) in seen:
                faults.append(Fault("comes to the same users as another load", key=LOAD))
            seen.add(repr(part.data))
        except InputError as error:
            faults = list(error.faults)
        found.append({(one.key, one.message): one for one in faults})
    shared = set(found[0]).intersection(*found[1:]) if len(found) > 1 else set()
    shared_idle = set(idle[0]).intersection(*idle[1:]) if len(idle) == len(found) else set()
    own += [_at_key(fault, axes, document) for known, fault in found[0].items() if known in shared]
    own += [fault for known, fault in idle[0].items() if known in shared_idle] if idle else []
    for known in dict.fromkeys(known for faults_of_point in found for known in faults_of_point):
        if known not in shared:
            points = [point for point, faults_of_point in enumerate(found) if known in faults_of_point]
            own += _at_values(found[points[0]][known], axes, points, document)
    return own


def _at_key(fault: Fault, axes: Sequence[Axis], document: Document) -> Fault:
    """Place a fault of all points: where an axis names the key, or else where the key was written."""
    for index, axis in enumerate(axes):
        if fault.key == axis.key:
            return document.fault(f"{fault.key}: {fault.message}", (*_path_of_axis(document, index), "key"))
    return fault


def _axis_faults(axes: Sequence[Axis], document: Document) -> Iterator[Fault]:
    """Find what is wrong with axes, whatever the scenario."""
    for index, axis in enumerate(axes):
        path = parse_path(axis.key)
        where = (*_path_of_axis(document, index), "key")
        if path is None or path[0] in ("sweep", "policies", "name", "seed", "replications"):
            yield document.fault(f"not a key that can be swept (got '{axis.key}')", where)
        elif axis.key in (other.key for other in axes[:index]):
            yield document.fault(f"is swept twice (got '{axis.key}')", where)
        for at, value in enumerate(axis.values):
            if value in axis.values[:at]:
                message = f"same as values[{axis.values.index(value)}] (got {short(value)})"
                yield document.fault(message, _path_of_value(document, index, at))
    if size(axes) > MAX_POINTS:
        yield document.fault(f"makes {size(axes)} combinations of values; at most {MAX_POINTS}", ("sweep",))


def _at_values(fault: Fault, axes: Sequence[Axis], points: Sequence[int], document: Document) -> Iterator[Fault]:
    """Place a fault of some points: at the values of one axis where it comes with these, else at the first point."""
    indices = [indices_at(axes, point) for point in points]
    for index, axis in enumerate(axes):
        values = sorted({one[index] for one in indices})
        if len(values) * size(axes) == len(points) * len(axis.values):
            for value in values:
                what = f"{fault.key}: {fault.message}" if fault.key else fault.message
                if fault.key != axis.key:
                    what = f"with {axis.key} = {short(axis.values[value])}: {what}"
                yield document.fault(what, _path_of_value(document, index, value))
            return
    yield at_swept_point(fault, axes, points[0], document)


def at_swept_point(fault: Fault, axes: Sequence[Axis], point: int, document: Document) -> Fault:
    """Place a fault of one point where its values were written."""
    what = f"{fault.key}: {fault.message}" if fault.key else fault.message
    settings = [f"{axis.key} = {short(value)}" for axis, value in zip(axes, values_at(axes, point), strict=True)]
    if len(axes) > 1 or fault.key != axes[0].key:
        what = f"with {', '.join(settings)}: {what}"
    at = _path_of_value(document, 0, point) if len(axes) == 1 else ("sweep",)
    return document.fault(what, at)


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
