"""A scenario as it is run: the file, what the command line lays over it, and every fault of both with its place."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiles.reading import (
    Document,
    NotData,
    Path_,
    Place,
    known_text,
    parse_data,
    parse_path,
    read_document,
)
from sim.axes import parse_axis
from sim.conflicts import conflicts, sweep_faults, without_effect
from sim.errors import Fault, ScenarioError
from sim.plugins import required_keys
from sim.scenario import Scenario, label_of, parsed
from sim.verify import POLICIES


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
    if not path.exists():
        there = {other.stem: other for other in (*Path("scenarios").glob("*.yaml"), *path.parent.glob("*.yaml"))}
        near = difflib.get_close_matches(path.stem, there, n=1)
        hint = f"; did you mean '{there[near[0]]}'?" if near else ""
        raise ScenarioError(Fault(f"cannot read: no such file or directory{hint}", str(path)))
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


def checked(document: Document) -> Scenario:
    """Build the scenario of a document and check what concerns several keys."""
    scenario = parsed(document)
    if scenario.sweep is None:
        faults = [*conflicts(scenario, document), *without_effect(scenario, document)]
    else:
        faults = sweep_faults(scenario.axes, document)
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
            known = known_text(name, dict.fromkeys([*labels, *POLICIES.known()]))
            raise ScenarioError(Fault(f"unknown policy '{name}'; {known}", "--policies"))
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
    faults = [] if scenario.sweep is not None else list(conflicts(scenario, document))
    if faults:
        raise ScenarioError(*faults)
    return scenario, document
