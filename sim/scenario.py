"""The scenario file: strict, typed, with units as a person writes them; every fault is reported with its line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, MinLen
from pydantic import Field, TypeAdapter
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from profiles.reading import Document, Section, parse_path, read_document, validate
from sim.batching import PREFILLS, Chunked
from sim.errors import Fault, ScenarioError
from sim.metrics import Objective, Window
from sim.plugins import one_of
from sim.routing import ROUTERS, RoundRobin
from sim.units import Bytes, Count, Duration, PositiveDuration
from sim.verify import POLICIES
from sim.workload.base import ARRIVALS
from sim.workload.build import traffic_faults
from sim.workload.domains import Domains
from sim.workload.length_source import Lengths

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


class Fleet(Section):
    """Replicas of one kind: their profile, their memory and their limits.

    ``profile`` gives step time and acceptance; ``step_profile`` and ``acceptance_profile`` take them from two files.
    Sizes not
    given here come from the (step) profile's ``replica``.
    """

    replicas: Count
    profile: str | None = None
    step_profile: str | None = None
    acceptance_profile: str | None = None
    kv_cache: Bytes
    gpus_per_replica: Count | None = None
    kv_bytes_per_token: Count | None = None
    max_context_tokens: Count | None = None
    block_tokens: Count = 64
    max_running: Count = 256
    max_batch_tokens: Count = 8192
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


class Sweep(Section):
    """One key of the scenario, in turn set to each value: a frontier's loads or concurrencies."""

    key: Annotated[str, MinLen(1)]
    values: Annotated[tuple[Any, ...], MinLen(1)]


class Records(Section):
    """What is kept of the steps, and how wide the windows of time plots are."""

    steps: Literal["full", "per_second"] = "full"
    window: PositiveDuration = 10.0


class Scenario(Section):
    """One question, as a file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    seed: Annotated[int, Ge(0)] = 0
    replications: Count = 1
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


def load_scenario(path: Path, settings: tuple[str, ...] = ()) -> tuple[Scenario, Document]:
    """Read a scenario file, with ``key=value`` settings laid over it; raises `ScenarioError` with every fault.

    What needs the profile or a trace is checked by `sim.build`.
    """
    document = read_document(path, ScenarioError)
    for setting in settings:
        document = with_setting(document, setting)
    return checked(document), document


def checked(document: Document) -> Scenario:
    """Build the scenario of a document and check what concerns several keys."""
    scenario: Scenario = validate(Scenario, document, ScenarioError)
    faults = list(_conflicts(scenario, document))
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
        value = YAML(typ="safe", pure=True).load(io.StringIO(text))
    except YAMLError:
        raise ScenarioError(Fault(f"not a YAML value (got '{text}')", "--set", key=key)) from None
    return document.replaced(path, value)


def with_policies(scenario: Scenario, document: Document, names: list[str]) -> tuple[Scenario, Document]:
    """Keep only the named policies: labels or kinds of the scenario's own, or kinds that need no settings."""
    own = document.data["policies"]
    labels = [label_of(policy) for policy in scenario.policies]
    kept: list[Any] = []
    for name in (name.strip() for name in names):
        found = [own[i] for i, policy in enumerate(scenario.policies) if name in (labels[i], policy.kind)]
        if not found and name not in POLICIES.known():
            known = ", ".join(dict.fromkeys([*labels, *POLICIES.known()]))
            raise ScenarioError(Fault(f"unknown policy '{name}'; known: {known}", "--policies"))
        kept.extend(found or [name])
    document = document.replaced(("policies",), kept)
    return checked(document), document


def label_of(policy: Any) -> str:
    """Return how a policy is called in tables: its kind, and what differs from the kind's defaults."""
    values = TypeAdapter(type(policy)).dump_python(policy, mode="json")
    defaults = {name: field.default for name, field in type(policy).__dataclass_fields__.items()}
    shown = {name: value for name, value in values.items() if name != "kind" and value != defaults[name]}
    return str(policy.kind) + "".join(f" {name}={_compact(value)}" for name, value in shown.items())


def _compact(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(_compact(item) for item in value)
    if isinstance(value, dict):
        return ":".join(_compact(item) for item in value.values())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _conflicts(scenario: Scenario, document: Document) -> list[Fault]:
    """Find what is wrong between keys, options without effect included."""
    faults: list[Fault] = []

    def fault(message: str, *path: str | int) -> None:
        faults.append(document.fault(message, path))

    fleet = scenario.fleet
    if fleet.profile is not None:
        for key in ("step_profile", "acceptance_profile"):
            if getattr(fleet, key) is not None:
                fault("has no effect beside fleet.profile; give one or the other", "fleet", key)
    elif fleet.step_profile is None:
        fault("missing; give profile, or step_profile and acceptance_profile", "fleet", "profile")
    elif fleet.acceptance_profile is None and any(policy.drafter is not None for policy in scenario.policies):
        fault("missing; these policies draft", "fleet", "acceptance_profile")
    if scenario.warmup + scenario.cooldown >= scenario.horizon:
        fault(
            f"warmup and cooldown ({scenario.warmup:g} s + {scenario.cooldown:g} s) leave nothing of the horizon "
            f"({scenario.horizon:g} s) to measure",
            "warmup" if scenario.warmup else "cooldown",
        )
    if fleet.max_running > fleet.max_batch_tokens:
        fault(
            f"max_batch_tokens ({fleet.max_batch_tokens}) must be at least max_running ({fleet.max_running}): each "
            "running request needs a token",
            "fleet",
            "max_batch_tokens",
        )
    if isinstance(fleet.prefill, Chunked) and fleet.prefill.chunk_tokens > fleet.max_batch_tokens:
        fault(
            f"can never be reached: max_batch_tokens is {fleet.max_batch_tokens} (got {fleet.prefill.chunk_tokens})",
            "fleet",
            "prefill",
            "chunk_tokens",
        )
    if fleet.replicas == 1 and "router" in document.data.get("fleet", {}):
        fault("has no effect with one replica", "fleet", "router")
    labels = [label_of(policy) for policy in scenario.policies]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            fault(f"same as policies[{labels.index(label)}] ('{label}')", "policies", index)
    for path, message in traffic_faults(scenario.arrivals, scenario.lengths, scenario.domains, scenario.horizon):
        fault(message, *path)
    if scenario.records.steps == "per_second":
        for key, seconds in (
            ("warmup", scenario.warmup),
            ("cooldown", scenario.cooldown),
            ("horizon", scenario.horizon),
            ("records.window", scenario.records.window),
        ):
            if seconds != int(seconds):
                fault(f"must be whole seconds with records.steps: per_second (got {seconds:g} s)", *key.split("."))
    if scenario.records.window > scenario.horizon:
        fault(
            f"wider than the horizon of {scenario.horizon:g} s (got {scenario.records.window:g} s)", "records", "window"
        )
    if scenario.sweep is not None:
        faults.extend(_sweep_faults(scenario.sweep, document))
    return faults


def _sweep_faults(sweep: Sweep, document: Document) -> list[Fault]:
    path = parse_path(sweep.key)
    if path is None or path[0] in ("sweep", "policies", "name", "seed", "replications"):
        return [document.fault(f"not a key that can be swept (got '{sweep.key}')", ("sweep", "key"))]
    seen: list[Any] = []
    faults = []
    for index, value in enumerate(sweep.values):
        if value in seen:
            faults.append(
                document.fault(f"same as values[{seen.index(value)}] (got {value})", ("sweep", "values", index))
            )
        seen.append(value)
        try:
            checked(document.replaced(path, value).without(("sweep",)))
        except ScenarioError as error:
            faults.extend(
                Fault(
                    f"with {sweep.key} = {value}: {fault.key}: {fault.message}",
                    document.file,
                    document.line_of(("sweep", "values", index)),
                    f"sweep.values[{index}]",
                )
                for fault in error.faults
            )
    return faults


def resolved(scenario: Scenario) -> dict[str, Any]:
    """Return the scenario with every default filled in, as plain data that reads back as the same scenario."""
    return scenario.model_dump(mode="json", by_alias=True, exclude_none=True)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of scenario files, for editors."""
    return Scenario.model_json_schema(by_alias=True)
