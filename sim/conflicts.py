"""What cannot be between the keys of a scenario, what changes nothing in it, and the same at every point of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from profiles.reading import Document, dotted, parse_path, short
from sim.axes import LOAD, MAX_POINTS, Axis, indices_at, size, values_at
from sim.batching import Chunked
from sim.errors import Fault, InputError
from sim.routing import RoundRobin
from sim.scenario import MAX_WINDOWS, Fleet, Scenario, at_point, label_of, parsed, path_of_axis, path_of_value
from sim.units import format_duration
from sim.verify import BatchTable
from sim.workload.build import traffic_faults
from sim.workload.closed_loop import ClosedLoop
from sim.workload.varying import Diurnal

MAX_HORIZON_S = 366 * 86400.0


def conflicts(scenario: Scenario, document: Document) -> Iterator[Fault]:
    """Find what cannot be between keys."""
    fleet, records = scenario.fleet, scenario.records
    if fleet.profile is not None:
        for key in ("step_profile", "acceptance_profile"):
            if getattr(fleet, key) is not None:
                yield document.fault(
                    "has no effect beside fleet.profile; for step times of one and acceptance of another, give "
                    "step_profile and acceptance_profile instead",
                    ("fleet", key),
                )
    elif fleet.step_profile is None:
        yield document.fault("missing; give profile, or step_profile and acceptance_profile", ("fleet", "profile"))
    elif fleet.acceptance_profile is None and any(policy.drafter is not None for policy in scenario.policies):
        yield document.fault("missing; these policies draft", ("fleet", "acceptance_profile"))
    if scenario.horizon > MAX_HORIZON_S:
        message = f"expected at most {format_duration(MAX_HORIZON_S)}, a year (got {scenario.horizon:g} s)"
        yield document.fault(message, ("horizon",))
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


def without_effect(scenario: Scenario, document: Document) -> Iterator[Fault]:
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


def sweep_faults(axes: Sequence[Axis], document: Document) -> list[Fault]:
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
            faults = list(conflicts(scenario, part))
            idle.append({(one.key, one.message): one for one in without_effect(scenario, part)})
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


def _axis_faults(axes: Sequence[Axis], document: Document) -> Iterator[Fault]:
    """Find what is wrong with axes, whatever the scenario."""
    for index, axis in enumerate(axes):
        path = parse_path(axis.key)
        where = (*path_of_axis(document, index), "key")
        if path is None or path[0] in ("sweep", "policies", "name", "seed", "replications"):
            yield document.fault(f"not a key that can be swept (got '{axis.key}')", where)
        elif axis.key in (other.key for other in axes[:index]):
            yield document.fault(f"is swept twice (got '{axis.key}')", where)
        for at, value in enumerate(axis.values):
            if value in axis.values[:at]:
                message = f"same as values[{axis.values.index(value)}] (got {short(value)})"
                yield document.fault(message, path_of_value(document, index, at))
    if size(axes) > MAX_POINTS:
        yield document.fault(f"makes {size(axes)} combinations of values; at most {MAX_POINTS}", ("sweep",))


def _at_key(fault: Fault, axes: Sequence[Axis], document: Document) -> Fault:
    """Place a fault of all points: where an axis names the key, or else where the key was written."""
    for index, axis in enumerate(axes):
        if fault.key == axis.key:
            return document.fault(f"{fault.key}: {fault.message}", (*path_of_axis(document, index), "key"))
    return fault


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
                yield document.fault(what, path_of_value(document, index, value))
            return
    yield at_swept_point(fault, axes, points[0], document)


def at_swept_point(fault: Fault, axes: Sequence[Axis], point: int, document: Document) -> Fault:
    """Place a fault of one point where its values were written."""
    what = f"{fault.key}: {fault.message}" if fault.key else fault.message
    settings = [f"{axis.key} = {short(value)}" for axis, value in zip(axes, values_at(axes, point), strict=True)]
    if len(axes) > 1 or fault.key != axes[0].key:
        what = f"with {', '.join(settings)}: {what}"
    at = path_of_value(document, 0, point) if len(axes) == 1 else ("sweep",)
    return document.fault(what, at)
