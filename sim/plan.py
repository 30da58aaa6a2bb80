"""Find the smallest fleet that meets your objectives at a scenario's traffic, policy by policy.

python -m sim.plan scenarios/flash_peak.yaml --objective "user_tps_p50>=80" --objective "ttft_p99<=2s"
python -m sim.plan scenarios/flash_peak.yaml --objective "goodput_ratio>=95%" --policies none,dspark --max-replicas 32

An objective is on a metric of the whole run, in its own unit: 80 (tokens/s), 2s or 80ms, 95%. A wrong name lists all
that there are. The mean over replications must meet it; `sure` says which fleet's whole 95 % interval does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles.errors import Fault, InputError, exit_code_of
from sim.options import add_executor_options, add_scenario_options, check_json, executor_of, save_json, scenario_of

if TYPE_CHECKING:
    from sim.compare import Estimate
    from sim.planning import Answer, Goal, Plan

#: Replications where neither the scenario nor an option says.
REPLICATIONS = 5
LARGEST = 10_000


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    out = argparse.ArgumentParser(
        prog="python -m sim.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("scenario", metavar="SCENARIO", help="a scenario file; see scenarios/")
    out.add_argument("--objective", action="append", default=[], metavar="M>=V", help="an objective; several are met")
    out.add_argument(
        "--max-replicas", type=int, default=64, metavar="N", help="the largest fleet allowed (default: %(default)s)"
    )
    add_scenario_options(out)
    add_executor_options(out)
    out.add_argument("--json", metavar="FILE", help="write the plan as JSON too: a list, an entry a policy")
    return out


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 1 if no policy can meet the objectives."""
    options = parser().parse_args(argv)
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    executor = executor_of(options)
    if not options.objective:
        raise InputError(Fault('missing: an objective, for example --objective "user_tps_p50>=80"', "--objective"))
    if not 1 <= options.max_replicas <= LARGEST:
        raise InputError(Fault(f"expected 1 to {LARGEST} (got {options.max_replicas})", "--max-replicas"))
    if options.json is not None:
        check_json(Path(options.json))
    from sim.planning import make_plan, parse_goal

    goals = [parse_goal(text) for text in options.objective]
    for index, goal in enumerate(goals):
        if goal.metric in (other.metric for other in goals[:index]):
            raise InputError(Fault(f"'{goal.name}' is asked for twice", f"--objective {options.objective[index]}"))
    scenario, document = scenario_of(options, replications=REPLICATIONS)
    plan = make_plan(scenario, document, goals, options.max_replicas, executor, strict=options.strict)
    print(plan_text(plan))
    if options.json is not None:
        save_json(plan_rows(plan), Path(options.json))
    return 0 if any(answer.replicas is not None for answer in plan.answers) else 1


def plan_text(plan: Plan) -> str:
    """Return what is printed on stdout."""
    from sim.report import assumed_metrics
    from sim.scenario import label_of
    from sim.table import ENDS, aligned

    scenario, repeats = plan.scenario, plan.scenario.replications
    starred = assumed_metrics(plan.plant)
    has_sure = repeats > 1
    heads = [f"{goal}{'*' if goal.metric in starred else ''}" for goal in plan.goals]
    ends_head = "/".join(end[:3] for end in ENDS)
    lines = [["policy", "replicas", "GPUs", *(["sure"] if has_sure else []), *heads, "binds", ends_head]]
    for answer in plan.answers:
        policy = scenario.policies[answer.policy]
        replicas, sure = (str(one or "-") for one in (answer.replicas, answer.sure_replicas))
        gpus = "-" if answer.replicas is None else str(plan.gpus(answer.replicas))
        lines.append(
            [
                label_of(policy) + (" (upper bound)" if policy.sees_outcome else ""),
                replicas,
                gpus,
                *([sure] if has_sure else []),
                *(_estimate_text(goal, answer.at.estimates[goal.metric]) for goal in plan.goals),
                _binding_text(answer),
                "/".join(f"{answer.at.estimates[end].value or 0:.0f}" for end in ENDS),
            ]
        )
    said = f"{repeats} replications, ± 95 %" if has_sure else "one replication: no intervals"
    text = [f"{scenario.name}: smallest fleet of up to {plan.most} replicas that meets every objective, {said}", ""]
    text += [*aligned(lines), ""]
    text.append(
        "Values are of the answer, or of the largest fleet. binds: what the next smaller fleet misses, and by how much."
    )
    if has_sure:
        text.append("sure: the smallest fleet whose whole intervals meet every objective; replicas: whose means do.")
    if starred.keys() & {goal.metric for goal in plan.goals}:
        text.append("* rests on an assumed value: " + ", ".join(sorted(set(starred.values()))))
    for answer in plan.answers:
        label = label_of(scenario.policies[answer.policy])
        if answer.replicas is None:
            tried = ", ".join(map(str, answer.tried))
            text.append(f"{label}: no fleet that was tried meets every objective ({tried} replicas)")
        if answer.failing_above:
            sizes = ", ".join(map(str, answer.failing_above))
            text.append(f"not monotone: {label} misses an objective again with {sizes} replicas")
        lost = _lost_ratio(answer.at.estimates)
        if answer.replicas is not None and lost > 0:
            text.append(f"{label}: {100 * lost:.2g} % of requests were turned away, gave up or failed at the answer")
    return "\n".join(text)


def _estimate_text(goal: Goal, one: Estimate) -> str:
    return goal.shown(one.value, one.half_width)


def _binding_text(answer: Answer) -> str:
    if answer.replicas == 1:
        return "-"
    short = answer.at if answer.below is None else answer.below
    parts = [f"{goal.name} {goal.shown(short.estimates[goal.metric].value)}" for goal in answer.binding]
    return f"{', '.join(parts)} at {short.replicas}"


def _lost_ratio(estimates: dict[str, Estimate]) -> float:
    arrived = estimates["arrived"].value or 0.0
    lost = sum(estimates[end].value or 0.0 for end in ("rejected", "aborted", "failed"))
    return lost / arrived if arrived else 0.0


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return the plan as plain data, an entry a policy; seconds, shares and tokens/s as the metric's name says."""
    from sim.scenario import label_of

    return [
        {
            "policy": label_of(plan.scenario.policies[answer.policy]),
            "upper_bound": plan.scenario.policies[answer.policy].sees_outcome,
            "replicas": answer.replicas,
            "gpus": None if answer.replicas is None else plan.gpus(answer.replicas),
            "sure_replicas": answer.sure_replicas,
            "max_replicas": plan.most,
            "replications": plan.scenario.replications,
            "binding": [goal.metric for goal in answer.binding],
            "objectives": [
                {
                    "objective": str(goal),
                    "metric": goal.metric,
                    "relation": goal.relation,
                    "bound": goal.bound,
                    "at": {"replicas": answer.at.replicas, **_estimate(answer.at.estimates[goal.metric])},
                    "below": None
                    if answer.below is None
                    else {"replicas": answer.below.replicas, **_estimate(answer.below.estimates[goal.metric])},
                    "holds": goal.met_by(answer.at.estimates[goal.metric].value),
                }
                for goal in plan.goals
            ],
            "estimates": {name: _estimate(one) for name, one in answer.at.estimates.items()},
            "tried": list(answer.tried),
            "failing_above": list(answer.failing_above),
        }
        for answer in plan.answers
    ]


def _estimate(one: Estimate) -> dict[str, float | None]:
    return {"mean": one.value, "half_width_95": one.half_width}


if __name__ == "__main__":
    sys.exit(main())
