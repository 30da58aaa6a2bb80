"""The rung ``engine``: the simulator, given step times measured on this machine, predicts the real engine.

A profile is measured (`decoder.measure`) and written beside the report; acceptance is the bank recorded on held-out
text. Then every policy meets every load twice: on the engine of `decoder`, in real time, and in the simulator, with the
same arrivals, lengths, limits and policies. Nothing of the engine's runs goes into the prediction. The engine runs each
cell several times; how far its own repeats lie apart is the noise that an error is held against.

What the two do not share is luck: the engine's texts are its own, the simulator walks the bank's.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.validate.rungs import Check, Report, Section, Settings, said, table
from profiles.errors import Fault, InputError
from profiles.files import SHIPPED, load_profile
from profiles.reading import parse_document
from sim.cells import Cell, Work, prepare, run_cell
from sim.loading import checked
from sim.metrics import Metrics
from sim.scenario import label_of

log = logging.getLogger(__name__)

TARGET, DRAFTER = "smollm2", "dspark"
BANK = SHIPPED / "measured" / "smollm2_t1.json"

#: What is compared: metric, how it is called, unit, factor, and the largest error in per cent; None: shown only.
COMPARED = (
    ("output_tokens_per_s_per_gpu", "throughput", "tokens/s", 1.0, 5.0),
    ("user_tokens_per_s_p50", "tokens/s/user p50", "tokens/s", 1.0, 5.0),
    ("user_tokens_per_s_p10", "tokens/s/user p10", "tokens/s", 1.0, None),
    ("ttft_s_p50", "TTFT p50", "ms", 1e3, 10.0),
    ("ttft_s_p99", "TTFT p99", "ms", 1e3, None),
    ("accepted_length", "accepted length", "tokens", 1.0, None),
    ("verify_tokens_per_request", "verified tokens", "tokens", 1.0, None),
)
#: Spread of output lengths: standard deviation of their logarithm.
SIGMA = 0.5
#: Largest difference of the mean verification budget, in tokens a request.
BUDGET_BOUND_TOKENS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run. Loads are shares of what ``none`` delivers, simulated, with every seat taken."""

    horizon_s: float
    warmup_s: float
    shares: tuple[float, ...]
    users: int
    max_running: int
    prompt_tokens: int
    output_tokens: int
    repeats: int
    policies: tuple[str, ...]
    kv_cache: str = "512MiB"


def plan_of(quick: bool, block: int) -> Plan:
    """Return the whole plan, or a first look."""
    drafting = f"drafter: {DRAFTER}"
    policies = (
        "none",
        f"{{kind: mtp1, {drafting}}}",
        f"{{kind: fixed, k: {min(3, block)}, {drafting}}}",
        f"{{kind: dspark, confidence: raw, {drafting}}}",
        f"{{kind: dspark_async, confidence: raw, first_budget: 1, {drafting}}}",
    )
    return Plan(
        horizon_s=40.0 if quick else 150.0,
        warmup_s=10.0 if quick else 30.0,
        shares=(0.5,) if quick else (0.25, 0.5, 0.85),
        users=4,
        max_running=8,
        prompt_tokens=96,
        output_tokens=64,
        repeats=1 if quick else 2,
        policies=(policies[0], policies[2], policies[4]) if quick else policies,
    )


def scenario_text(plan: Plan, profile: Path, arrivals: str, seed: int) -> str:
    """Return a scenario of the plan's sizes; paths are absolute, so that it may lie anywhere."""
    return f"""
name: engine
seed: {seed}
horizon: {plan.horizon_s}s
warmup: {plan.warmup_s}s
fleet:
  replicas: 1
  step_profile: {profile.resolve()}
  acceptance_profile: {BANK.resolve()}
  kv_cache: {plan.kv_cache}
  max_context_tokens: 1024
  block_tokens: 16
  max_running: {plan.max_running}
  max_batch_tokens: 256
  prefill: {{kind: chunked, chunk_tokens: 64}}
policies: [{", ".join(plan.policies)}]
arrivals: {arrivals}
lengths:
  prompt: {{kind: fixed, tokens: {plan.prompt_tokens}}}
  output: {{kind: lognormal, median: {plan.output_tokens}, sigma: {SIGMA}, max: {4 * plan.output_tokens}}}
domains: {{code: 0.4, math: 0.3, chat: 0.3}}
"""


def work_of(plan: Plan, profile: Path, arrivals: str, seed: int) -> Work:
    """Return a checked scenario, ready to run."""
    document = parse_document(scenario_text(plan, profile, arrivals, seed), str(profile.parent / "engine.yaml"))
    checked(document)
    return Work(document)


def measured_profile(out: Path, quick: bool) -> Path:
    """Measure this machine, once a folder; the table of the measuring is kept beside the profile."""
    from decoder import measure

    path = out / "profile.json"
    if path.exists():
        log.info("%s is there and is used; delete it to measure anew", path)
        return path
    options = ["--target", TARGET, "--drafter", DRAFTER, "--drafter-name", DRAFTER, "--requests", "1,2,4,8"]
    options += ["--contexts", "64,160", "--prompts", "16,64", "--repeats", "3" if quick else "7"]
    with (out / "profile.txt").open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        code = measure.main([*options, "--out", str(path), "--json", str(out / "profile_points.json")])
    if code:
        raise InputError(Fault("the machine could not be measured; the reason stands above", str(path)))
    return path


def capacity_per_s(plan: Plan, profile: Path, seed: int) -> float:
    """Return the requests per second that `none` finishes with every seat taken, simulated."""
    work = work_of(plan, profile, f"{{kind: closed_loop, users: {plan.max_running}}}", seed)
    delivered = run_cell(work, Cell(0, None, 0)).metrics["output_tokens_per_s_per_gpu"]
    assert delivered is not None
    return float(delivered) / (plan.output_tokens * math.exp(SIGMA**2 / 2))


@dataclass(frozen=True, slots=True)
class Pair:
    """A policy under a load: what was predicted, and what each of the engine's repeats gave."""

    load: str
    policy: str
    predicted: Metrics
    observed: tuple[Metrics, ...]

    def values(self, name: str) -> list[float]:
        """Return a metric of every repeat."""
        return [float(value) for one in self.observed if (value := one[name]) is not None]

    def error_percent(self, name: str) -> float | None:
        """Return predicted over the mean of the repeats, less 1, in per cent; infinite where one of them never came."""
        predicted, values = self.predicted[name], self.values(name)
        if predicted is None or not values:
            return None
        seen = float(np.mean(values))
        if math.isinf(predicted) or math.isinf(seen):
            return 0.0 if predicted == seen else math.inf
        return 100 * (float(predicted) / seen - 1)

    def noise_percent(self, name: str) -> float:
        """Return how far repeats lie from their mean, at most, in per cent; 0 for one repeat."""
        values = np.array(self.values(name))
        if values.size < 2 or bool(np.isinf(values).all()):
            return 0.0
        return math.inf if np.isinf(values).any() else 100 * float(np.abs(values / values.mean() - 1).max())


def run(settings: Settings) -> Report:
    """Measure, serve, simulate, compare."""
    if not BANK.exists():
        raise InputError(Fault("no bank was recorded yet: python -m decoder.bank", str(BANK)))
    bank = load_profile(BANK)
    if DRAFTER not in bank.acceptance:
        raise InputError(Fault(f"knows no drafter '{DRAFTER}'", str(BANK), key="acceptance"))
    plan = plan_of(settings.quick, bank.acceptance[DRAFTER].trained_length)
    profile = measured_profile(settings.out, settings.quick)
    pairs = list(_pairs(plan, profile, settings.seed))
    disturbed = load_profile(profile).disturbed
    return report(plan, pairs, disturbed)


def _pairs(plan: Plan, profile: Path, seed: int) -> Iterator[Pair]:
    from decoder.serve import serve_cell

    capacity = capacity_per_s(plan, profile, seed)
    loads = {f"{share:.0%}": f"{{kind: poisson, rate_per_s: {share * capacity:.4f}}}" for share in plan.shares}
    loads[f"{plan.users} users"] = f"{{kind: closed_loop, users: {plan.users}}}"
    serving = _serving()
    for load, arrivals in loads.items():
        work = work_of(plan, profile, arrivals, seed)
        ready = prepare(work, None, 0)
        observed: dict[int, list[Metrics]] = {index: [] for index in range(len(plan.policies))}
        for repeat in range(plan.repeats):
            # Policies take turns, so that a machine that drifts does not favour one.
            for index in observed:
                policy = ready.scenario.policies[index]
                log.info("%s, %s, repeat %d of %d", load, label_of(policy), repeat + 1, plan.repeats)
                observed[index].append(serve_cell(serving, ready, Cell(index, None, 0), work).metrics)
        for index, found in observed.items():
            predicted = run_cell(work, Cell(index, None, 0)).metrics
            yield Pair(load, label_of(ready.scenario.policies[index]), predicted, tuple(found))


def _serving() -> Any:
    """Return the target, the drafter and prompts that the engine serves with."""
    from decoder.checkpoint import load_drafter
    from decoder.lab.prompts import DOMAINS, load_documents
    from decoder.lab.targets import drafter_folder, target_folder
    from decoder.lab.writing import make_prompt
    from decoder.load import Prompts
    from decoder.loading import load_tokenizer
    from decoder.sampling import Sampling
    from decoder.serve import Plant
    from decoder.target import load_target

    folder, drafter = target_folder(TARGET), drafter_folder(DRAFTER, TARGET)
    assert drafter is not None
    target, tokenizer = load_target(folder), load_tokenizer(folder)
    texts = {
        domain: [
            make_prompt(document, tokenizer, "written").token_ids
            for document in load_documents(domain, "held_out")[:50]
        ]
        for domain in DOMAINS
    }
    return Plant(target, {DRAFTER: load_drafter(drafter, target)}, {}, Prompts(texts), Sampling())


def report(plan: Plan, pairs: Sequence[Pair], disturbed: str | None) -> Report:
    """Return the sections: every number, then what was decided."""
    return Report((_numbers(plan, pairs, disturbed), _decisions(pairs)))


def _numbers(plan: Plan, pairs: Sequence[Pair], disturbed: str | None) -> Section:
    rows, checks = [], []
    for pair in pairs:
        for name, called, unit, factor, bound in COMPARED:
            error, noise, values = pair.error_percent(name), pair.noise_percent(name), pair.values(name)
            predicted = pair.predicted[name]
            if error is None or predicted is None:
                continue
            limit = None if bound is None else max(bound, noise)
            seen = float(np.mean(values))
            checks.append(
                Check(
                    name=f"{pair.load}, {pair.policy}: {called}",
                    predicted=float(predicted) * factor,
                    observed=seen * factor,
                    error=error,
                    bound=limit,
                    unit="%",
                    holds=None if limit is None else abs(error) <= limit,
                )
            )
            rows.append(
                [
                    pair.load,
                    pair.policy,
                    f"{called} ({unit})",
                    f"{factor * float(predicted):.2f}",
                    f"{factor * seen:.2f}",
                    f"{error:+.1f}",
                    f"{noise:.1f}",
                ]
            )
    head = ("load", "policy", "metric", "predicted", "observed", "error %", "noise %")
    lines = [
        *said(
            f"Fitted: step times, on this machine, before ({TARGET}, {DRAFTER}; profile.json); acceptance, a bank of "
            f"held-out text. Predicted: everything below. Each cell ran {plan.repeats} times for {plan.horizon_s:g} s; "
            "noise is how far its repeats lie from their mean. Loads are shares of what none delivers with every "
            "seat taken, simulated."
        ),
        *(said(f"The profile is marked as disturbed: {disturbed}.") if disturbed else ()),
        "",
        *table(head, rows),
    ]
    return Section("The engine, predicted and observed", tuple(lines), tuple(checks))


def _decisions(pairs: Sequence[Pair]) -> Section:
    by_load: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_load.setdefault(pair.load, []).append(pair)
    rows, checks = [], []
    for load, found in by_load.items():
        seen = {pair.policy: float(np.mean(pair.values(_SPEED))) for pair in found if pair.values(_SPEED)}
        told = {pair.policy: float(pair.predicted[_SPEED] or 0.0) for pair in found}
        best, named = max(seen, key=_of(seen)), max(told, key=_of(told))
        regret = 100 * (1 - seen[named] / seen[best])
        rows.append([load, named, best, f"{regret:.1f}"])
        checks.append(
            Check(
                name=f"{load}: regret of the policy that the simulator names",
                predicted=None,
                observed=None,
                error=regret,
                bound=None,
                unit="%",
                holds=None,
            )
        )
        for pair in found:
            budgets = pair.values("verify_tokens_per_request")
            predicted = pair.predicted["verify_tokens_per_request"]
            if pair.policy.startswith("dspark_async") and budgets and predicted is not None:
                error = float(predicted) - float(np.mean(budgets))
                checks.append(
                    Check(
                        name=f"{load}: verification budget of {pair.policy}",
                        predicted=float(predicted),
                        observed=float(np.mean(budgets)),
                        error=error,
                        bound=BUDGET_BOUND_TOKENS,
                        unit="tokens",
                        holds=abs(error) <= BUDGET_BOUND_TOKENS,
                    )
                )
    head = ("load", "fastest, simulated", "fastest, engine", "regret %")
    lines = [*said("By tokens/s/user at the median, at the same load."), "", *table(head, rows)]
    return Section("What the simulator would have chosen", tuple(lines), tuple(checks))


_SPEED = "user_tokens_per_s_p50"


def _of(values: Mapping[str, float]) -> Any:
    return lambda name: values[name]
