"""From a scenario to what runs: profiles, traffic and one engine a policy, with every check that needs them."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from profiles.curves import draft_cost, step_cost
from profiles.errors import InputError
from profiles.files import digest, find_profile, load_profile
from profiles.reading import Document, parse_path
from profiles.schema import Drafter, Profile, Provenance, SourcedCount, provenances
from sim.acceptance import AcceptanceTables, acceptance_tables
from sim.batching import Disaggregated
from sim.engine import Engine
from sim.errors import Fault, ScenarioError
from sim.metrics import Gpus
from sim.rng import Streams
from sim.scenario import Scenario, label_of
from sim.units import format_bytes
from sim.verify.base import Policy
from sim.workload.domains import UNSAID


@dataclass(frozen=True, slots=True)
class Loaded:
    """A profile with the file it came from."""

    profile: Profile
    path: Path


@dataclass(frozen=True, slots=True)
class Plant:
    """What all policies of a scenario share: profiles, sizes and memory."""

    step: Loaded
    acceptance: Loaded | None
    gpus: Gpus
    gpus_per_replica: int
    max_context_tokens: int
    kv_bytes_per_token: int
    kv_blocks: int

    def loaded(self) -> list[Loaded]:
        """Return the profiles, each once."""
        both = [self.step] if self.acceptance is None else [self.step, self.acceptance]
        return list({one.path: one for one in both}.values())

    def provenances(self) -> dict[str, Provenance]:
        """Return where every value comes from, keyed by profile and path."""
        return {
            f"{one.profile.name}: {path}": provenance
            for one in self.loaded()
            for path, provenance in provenances(one.profile).items()
        }


def build_plant(scenario: Scenario, document: Document) -> Plant:
    """Load the profiles of a scenario and settle the sizes of a replica; raises `ScenarioError` or `ProfileError`."""
    fleet = scenario.fleet
    key = "profile" if fleet.profile is not None else "step_profile"
    step = _load(getattr(fleet, key), key, document)
    if step.profile.step_time is None:
        hint = "" if key == "step_profile" else "; give it as acceptance_profile, beside a step_profile"
        raise ScenarioError(document.fault(f"profile '{step.profile.name}' has no step_time{hint}", ("fleet", key)))
    acceptance: Loaded | None = step
    if fleet.profile is None:
        name = fleet.acceptance_profile
        acceptance = _load(name, "acceptance_profile", document) if name is not None else None
    if acceptance is not None and not acceptance.profile.acceptance:
        acceptance = None
    faults: list[Fault] = []

    def size(key: str, given: int | None, known: SourcedCount | None) -> int:
        if given is not None:
            return given
        if known is None:
            faults.append(document.fault(f"missing; profile '{step.profile.name}' does not say", ("fleet", key)))
            return 1
        return known.value

    replica = step.profile.replica
    gpus = size("gpus_per_replica", fleet.gpus_per_replica, replica.gpus if replica else None)
    kv_bytes = size("kv_bytes_per_token", fleet.kv_bytes_per_token, replica.kv_bytes_per_token if replica else None)
    context = size("max_context_tokens", fleet.max_context_tokens, replica.max_context_tokens if replica else None)
    kv_blocks = fleet.kv_cache // (kv_bytes * fleet.block_tokens)
    if kv_blocks < 1:
        block = kv_bytes * fleet.block_tokens
        faults.append(
            document.fault(
                f"holds no block: one takes {format_bytes(block)} (got {format_bytes(fleet.kv_cache)})",
                ("fleet", "kv_cache"),
            )
        )
    if faults:
        raise ScenarioError(*faults)
    pool = fleet.prefill.replicas if isinstance(fleet.prefill, Disaggregated) else 0
    return Plant(
        step=step,
        acceptance=acceptance,
        gpus=Gpus(total=gpus * (fleet.replicas + pool), decode=gpus * fleet.replicas, replicas=fleet.replicas),
        gpus_per_replica=gpus,
        max_context_tokens=context,
        kv_bytes_per_token=kv_bytes,
        kv_blocks=kv_blocks,
    )


def _load(name: str | None, key: str, document: Document) -> Loaded:
    assert name is not None
    try:
        path = find_profile(name, Path(document.file).parent)
    except InputError as error:
        raise ScenarioError(document.fault(error.faults[0].message, ("fleet", key))) from None
    if not path.exists():
        raise ScenarioError(document.fault(f"no such file (got '{name}')", ("fleet", key)))
    return Loaded(_read(path, digest(path)), path)


@functools.lru_cache(maxsize=8)
def _read(path: Path, digest: str) -> Profile:
    """Read a profile of this content once: all points and replications of a sweep ask for it."""
    return load_profile(path)


def build_engine(
    scenario: Scenario, document: Document, plant: Plant, index: int, domains: tuple[str, ...], streams: Streams
) -> Engine:
    """Build the engine of policy ``index`` over the traffic's ``domains``; raises `ScenarioError` or `ProfileError`."""
    fleet, policy = scenario.fleet, scenario.policies[index]
    where = ("policies", index)
    step_time = plant.step.profile.step_time
    assert step_time is not None
    tables: AcceptanceTables | None = None
    draft_s, per_token, known_requests = np.zeros(fleet.max_running + 1), False, fleet.max_running
    if policy.drafter is not None:
        tables = _acceptance(scenario, document, plant, policy, where, domains)
        try:
            cost, per_token = draft_cost(step_time, policy.drafter, fleet.max_running)
        except InputError as error:
            raise ScenarioError(
                document.fault(f"{error.faults[0].message} (profile {plant.step.profile.name})", where)
            ) from None
        draft_s, known_requests = cost.seconds, cost.known_to
    pool = fleet.prefill if isinstance(fleet.prefill, Disaggregated) else None
    most = max(fleet.max_batch_tokens, pool.max_step_tokens if pool else 0)
    longest = fleet.max_running * (1 + (tables.draft_length if tables else 0))
    try:
        # Prompts are batch tokens in some profiles; elsewhere decoding alone decides how far the curve must reach.
        reach = most if step_time.prefill.kind == "as_verify" else min(fleet.max_batch_tokens, longest)
        cost_of_step = step_cost(step_time, reach, policy.drafter)
    except InputError as error:
        raise ScenarioError(
            document.fault(
                f"{error.faults[0].message}; lower max_running or max_batch_tokens", ("fleet", "max_batch_tokens")
            )
        ) from None
    if cost_of_step.verify_s.size <= longest:
        # Candidates beyond the batch limit are priced by nobody, but policies are shown a rate of 0 for them.
        padded = np.pad(cost_of_step.verify_s, (0, longest + 1 - cost_of_step.verify_s.size), mode="edge")
        cost_of_step = dataclasses.replace(cost_of_step, verify_s=padded)
    return Engine(
        policy=policy,
        cost=cost_of_step,
        draft_s=draft_s,
        draft_per_token=per_token,
        known_requests=known_requests,
        acceptance=tables,
        prefill=fleet.prefill,
        max_running=fleet.max_running,
        max_batch_tokens=fleet.max_batch_tokens,
        max_waiting=fleet.max_waiting,
        max_context_tokens=plant.max_context_tokens,
        block_tokens=fleet.block_tokens,
        kv_blocks=plant.kv_blocks,
        deadline_s=scenario.deadline if scenario.deadline is not None else np.inf,
        luck_key=streams.key("luck"),
        text_key=streams.key("luck"),
    )


def _acceptance(
    scenario: Scenario,
    document: Document,
    plant: Plant,
    policy: Policy,
    where: tuple[str | int, ...],
    domains: tuple[str, ...],
) -> AcceptanceTables:
    assert policy.drafter is not None
    known = plant.acceptance.profile.acceptance if plant.acceptance else {}
    name = (plant.acceptance or plant.step).profile.name
    drafter = known.get(policy.drafter)
    if drafter is None:
        listed = ", ".join(known) or "none"
        raise ScenarioError(
            document.fault(
                f"profile '{name}' has no acceptance of drafter '{policy.drafter}'; known: {listed} "
                "(another's is given as fleet.acceptance_profile, beside fleet.step_profile)",
                where,
            )
        )
    try:
        policy.check_drafter(drafter.trained_length, drafter.kind)
    except ValueError as error:  # it names its key
        key, _, message = str(error).partition(": ")
        raise ScenarioError(document.fault(message, (*where, *(parse_path(key) or ())))) from None
    most = max(
        policy.draft_length(requests, drafter.trained_length) for requests in range(1, scenario.fleet.max_running + 1)
    )
    if most > drafter.trained_length:
        raise ScenarioError(
            document.fault(
                f"drafts {most} tokens; profile '{name}' knows the acceptance of '{policy.drafter}' up to position "
                f"{drafter.trained_length}",
                where,
            )
        )
    if drafter.confidence_reads not in policy.lossless_with and not policy.sees_outcome:
        raise ScenarioError(
            document.fault(
                f"'{label_of(policy)}' is not lossless with the confidence of drafter '{policy.drafter}', which reads "
                "the token that it judges",
                where,
            )
        )
    told_apart = _tells_apart(drafter)
    if told_apart and domains == UNSAID:
        raise ScenarioError(
            document.fault(
                f"missing; profile '{name}' tells domains apart: {', '.join(drafter.domains)}; "
                f"all of one: domains: {{{next(iter(drafter.domains))}: 1}}",
                ("domains",),
            )
        )
    drafters = [known.get(one.drafter) for one in scenario.policies if one.drafter is not None]
    if scenario.domains is not None and not any(_tells_apart(one) for one in drafters):
        raise ScenarioError(
            document.fault(
                f"has no effect: profile '{name}' does not tell domains apart for '{policy.drafter}'", ("domains",)
            )
        )
    assert plant.acceptance is not None
    unknown = [domain for domain in domains if told_apart and domain not in drafter.domains]
    if unknown:
        raise ScenarioError(
            document.fault(
                f"unknown domain '{unknown[0]}'; profile '{name}' knows: {', '.join(drafter.domains)}",
                _path_of_domain(scenario, unknown[0]),
            )
        )
    tables = acceptance_tables(policy.drafter, drafter, domains, policy.confidence, plant.acceptance.path)
    if policy.confidence == "raw":
        calibrated = acceptance_tables(policy.drafter, drafter, domains, "calibrated", plant.acceptance.path)
        if np.allclose(tables.confidence, calibrated.confidence, rtol=1e-9, atol=1e-12):
            message = f"has no effect: profile '{name}' has one confidence of '{policy.drafter}', raw as calibrated"
            raise ScenarioError(document.fault(message, (*where, "confidence")))
    return tables


def _path_of_domain(scenario: Scenario, domain: str) -> tuple[str | int, ...]:
    if isinstance(scenario.domains, tuple):
        index = next(index for index, change in enumerate(scenario.domains) if domain in change.mix)
        return ("domains", index, "mix", domain)
    return ("domains",) if scenario.domains is None else ("domains", domain)  # a trace names domains too


def _tells_apart(drafter: Drafter | None) -> bool:
    return drafter is not None and set(drafter.domains) != {"any"}


def profile_digests(plant: Plant) -> dict[str, str]:
    """Return the sha256 of every profile file."""
    return {one.profile.name: digest(one.path) for one in plant.loaded()}
