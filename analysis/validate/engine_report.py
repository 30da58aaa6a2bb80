"""What the rung ``engine`` reports: every number with its noise, the simulator's choices, and forced budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from analysis.validate.engine_pace import EVERY_STEPS
from analysis.validate.engine_pairs import CONFIDENCE, LUCKS, Pair, noise, ratio
from analysis.validate.engine_steps import PARTS
from analysis.validate.rungs import Check, Report, Section, compare, said, summarize, table
from profiles.schema import Profile

if TYPE_CHECKING:
    from analysis.validate.engine import Trial

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
#: What a forced budget is compared by: metric, and how it is called.
FORCED = (("output_tokens_per_s_per_gpu", "throughput"), ("user_tokens_per_s_p50", "tokens/s/user p50"))
SPEED, BUDGET = "user_tokens_per_s_p50", "verify_tokens_per_request"
#: Largest difference of the mean verification budget, in tokens a request.
BUDGET_BOUND_TOKENS = 0.1


def make_report(trial: Trial, profile: Profile, minutes: float) -> Report:
    """Return the sections: every number, then its steps, what was decided, what other budgets would have given."""
    return Report((_numbers(trial, profile, minutes), _steps(trial), _decisions(trial), _budgets(trial)))


def _numbers(trial: Trial, profile: Profile, minutes: float) -> Section:
    plan = trial.plan
    rows, checks = [], []
    for load, pairs in trial.pairs.items():
        for metric, called, unit, factor, bound in COMPARED:
            errors = {name: pair.error(metric) for name, pair in pairs.items()}
            unrest = noise(found.departures for found in errors.values() if found is not None)
            for name, pair in pairs.items():
                error, told, seen = errors[name], pair.told(metric), pair.seen(metric)
                if error is None or told is None or seen is None:
                    continue
                limit = None if bound is None else max(bound, unrest or 0.0)
                checks.append(
                    Check(
                        name=f"{load}, {name}: {called}",
                        predicted=told * factor,
                        observed=seen * factor,
                        error=error.percent,
                        bound=limit,
                        unit="%",
                        holds=None if limit is None else abs(error.percent) <= limit,
                    )
                )
                numbers = [f"{factor * told:.2f}", f"{factor * seen:.2f}", f"{error.percent:+.1f}", _said_noise(unrest)]
                rows.append([load, name, f"{called} ({unit})", *numbers])
    repeats = ", ".join(f"{_repeats(pairs)} at {load}" for load, pairs in trial.pairs.items())
    lasts = ", ".join(f"{load.horizon_s:g} s at {name}" for name, load in trial.loads.items())
    step_time = profile.step_time
    assert step_time is not None
    hardware = step_time.verify.provenance.hardware
    paces = [pace for pairs in trial.pairs.values() for pair in pairs.values() for pace in pair.paces]
    lines = [
        *said(
            f"{profile.description} Fitted: those step times, measured on this machine ({hardware}) before the runs "
            "and between their steps, never from them. Given: acceptance, a bank of the target's own answers to the "
            "questions served, and what engine and simulator share: each repeat's arrivals and who asks which question "
            "(the engine writes its answers anew). Given, too: the machine's pace during a run: steps of the grid, no "
            f"request of the run in them, one after each {EVERY_STEPS} of the run's while its clock stood still; over "
            f"what they take in all the session, whatever its pace, they took {min(paces):.2f} to {max(paces):.2f} "
            f"times as long (quartiles {_quartiles(paces)}). "
            f"Predicted: everything below. A run has about {plan.busy_s:g} s of steps and lasts {lasts}, idle time "
            f"being skipped; repeats: {repeats}; {minutes:.0f} minutes in all, of {plan.minutes:g} allowed. Predicted "
            f"is the mean of {LUCKS} simulations of a run, each with other drafts accepted; predicted and observed are "
            "means over repeats, and an error is one over the other. Noise is what it may stray by "
            f"({CONFIDENCE:.0%}), from how repeats depart from it, taken together over the policies of a load. All "
            "policies that draft use the one drafter. Loads are shares of what none delivers with every seat taken, "
            "simulated. Bounds: 5 % for throughput and tokens/s/user p50, 10 % for TTFT p50, or the noise where that "
            "is more; other errors are shown only. A TTFT p99 is inf where more than a hundredth got no token before "
            "the end."
        ),
        *(said(f"The profile is marked as disturbed: {profile.disturbed}.") if profile.disturbed else ()),
        "",
        *table(("load", "policy", "metric", "predicted", "observed", "error %", "noise %"), rows),
    ]
    return Section("The engine, predicted and observed", tuple(lines), tuple(checks))


def _steps(trial: Trial) -> Section:
    rows, checks = [], []
    for load, pairs in trial.pairs.items():
        found = {(name, part): ratio(pair.priced, pair.taken, part) for name, pair in pairs.items() for part in PARTS}
        unrest = {
            part: noise(one.departures for (_, of), one in found.items() if of == part and one is not None)
            for part in PARTS
        }
        for name in pairs:
            row = [load, name]
            for part, called in PARTS.items():
                error = found[name, part]
                if error is None or not any(one[part] for one in pairs[name].taken):
                    row += ["-", "-"]
                    continue
                row += [f"{error.percent:+.1f}", _said_noise(unrest[part])]
                checks.append(summarize(f"{load}, {name}: {called}, priced over taken", error.percent, "%"))
            rows.append(row)
    head = ["load", "policy"]
    for called in PARTS.values():
        head += [f"{called} %", "noise %"]
    lines = [
        *said(
            "The engine's own steps, each priced from the profile by its requests, tokens and context, at the "
            "machine's pace during its run; over the seconds that they took. Nothing of acceptance, policies or "
            "queueing is in this. Host time between steps is in neither."
        ),
        "",
        *table(head, rows),
    ]
    return Section("The engine's own steps, priced and taken", tuple(lines), tuple(checks))


def _decisions(trial: Trial) -> Section:
    rows, checks = [], []
    for load, pairs in trial.pairs.items():
        seen = {name: value for name, pair in pairs.items() if (value := pair.seen(SPEED)) is not None}
        told = {name: value for name in seen if (value := pairs[name].told(SPEED)) is not None}
        if told:
            best, named = max(seen, key=lambda name: seen[name]), max(told, key=lambda name: told[name])
            regret = 100 * (1 - seen[named] / seen[best]) if seen[best] else 0.0
            rows.append([load, named, best, f"{regret:.1f}"])
            checks.append(summarize(f"{load}: regret of the policy that the simulator names", regret, "%"))
        for name, pair in pairs.items():
            if name.startswith("dspark_async") and (seen_tokens := pair.seen(BUDGET)) is not None:
                called = f"{load}: verification budget of {name}"
                checks.append(compare(called, pair.told(BUDGET), seen_tokens, "tokens", BUDGET_BOUND_TOKENS))
    head = ("load", "fastest, simulated", "fastest, engine", "regret %")
    lines = [*said("By tokens/s/user at the median, at the same load."), "", *table(head, rows)]
    return Section("What the simulator would have chosen", tuple(lines), tuple(checks))


def _budgets(trial: Trial) -> Section:
    rows, checks, left_out = [], [], []
    for load, pairs in trial.pairs.items():
        own = next((pair for name, pair in pairs.items() if name.startswith("dspark_async")), None)
        forced = trial.forced.get(load, {})
        if own is None:
            continue
        if len(forced) < trial.plan.forced:
            left_out.append(f"{load} ({len(forced)} of {trial.plan.forced})")
        gains = {
            name: {metric: ratio(pair.observed, own.observed, metric) for metric, _ in FORCED}
            for name, pair in forced.items()
        }
        unrest = {
            metric: noise(one.departures for found in gains.values() if (one := found[metric]) is not None)
            for metric, _ in FORCED
        }
        rows.append([load, "its own", *_budget_row(own)])
        for name, pair in forced.items():
            row = [load, name, *_budget_row(pair)]
            for metric, called in FORCED:
                gain, bound = gains[name][metric], unrest[metric]
                if gain is None:
                    row += ["-", "-"]
                    continue
                row += [f"{gain.percent:+.1f}", _said_noise(bound)]
                # What is slower refutes nothing.
                checks.append(summarize(f"{load}, {name}: faster by, in {called}", max(gain.percent, 0.0), "%", bound))
            rows.append(row)
    head = ["load", "draft tokens a request", "verified tokens", "tokens/s", "tokens/s/user p50"]
    head += ["throughput %", "noise %", "speed %", "noise %"]
    lines = [
        *said(
            "The engine alone, on the arrivals of the table above: the whole budgets nearest to the one that "
            "dspark_async came to, forced upon every step and spent as it spends its own (by survival). What is faster "
            "by more than noise refutes its choice; without a second repeat there is no noise to hold it against."
        ),
        *(said(f"For want of time fewer were forced at {', '.join(left_out)}.") if left_out else ()),
        "",
        *table(head, [row + [""] * (len(head) - len(row)) for row in rows]),
    ]
    return Section("Other budgets than dspark_async's", tuple(lines), tuple(checks))


def _budget_row(pair: Pair) -> list[str]:
    values = [pair.seen(name) for name in (BUDGET, *(metric for metric, _ in FORCED))]
    return ["-" if value is None else f"{value:.2f}" for value in values]


def _quartiles(values: Sequence[float]) -> str:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{low:.2f}, {middle:.2f}, {high:.2f}"


def _repeats(pairs: Mapping[str, Pair]) -> int:
    return min(len(pair.observed) for pair in pairs.values())


def _said_noise(value: float | None) -> str:
    return "-" if value is None else "inf" if math.isinf(value) else f"{value:.1f}"
