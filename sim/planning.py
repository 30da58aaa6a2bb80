"""How large a fleet must be: objectives on metrics, and the search for the smallest fleet that meets them.

A policy meets an objective where the mean over replications does; it surely does where the whole 95 % interval does.
The search doubles and bisects on the first replication, then lets all replications decide: its answer met every
objective and the fleet one smaller did not, both simulated. That more replicas never do worse is not assumed beyond
that: a smaller fleet which was not tried might meet them too, and a larger one that was tried and fails is reported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

from profiles.reading import Document, known_text
from sim.build import Plant
from sim.cells import Cell, Work, check_engines
from sim.compare import Estimate, estimate, estimates
from sim.errors import Fault, InputError
from sim.executors import Executor, progress_bar
from sim.metrics import Metrics, metric_names
from sim.scenario import Scenario
from sim.units import parse_duration_s

# ---------------------------------------------------------------------------------------------------------- objectives

Unit = Literal["s", "share", "number"]

_LOWER = ("wasted", "rejected", "aborted", "failed", "unfinished", "preempt", "outside", "trimmed")
_HIGHER = ("user_tokens", "output_tokens", "goodput", "finished", "accepted")


def alias_of(metric: str) -> str:
    """Return the short name of a metric: ``ttft_p99`` for ``ttft_s_p99``, ``user_tps_p50``, ``tps_per_gpu``."""
    short = metric.replace("user_tokens_per_s", "user_tps").replace("output_tokens_per_s", "tps")
    return short.replace("longest_itl", "itl").replace("_s_p", "_p")


def unit_of(metric: str) -> Unit:
    """Return what a metric is counted in."""
    is_span = "_s_p" in metric and "_per_s_" not in metric
    return "s" if is_span else "share" if metric.endswith("_ratio") else "number"


@dataclass(frozen=True, slots=True)
class Goal:
    """An objective on a metric of a whole run: ``ttft_s_p99`` at most 2 seconds."""

    metric: str
    relation: Literal["<=", ">="]
    bound: float

    @property
    def name(self) -> str:
        """The metric's short name."""
        return alias_of(self.metric)

    def __str__(self) -> str:
        """Write the objective as on the command line."""
        return f"{self.name}{self.relation}{self.shown(self.bound)}"

    def met_by(self, value: float | None) -> bool:
        """Whether a value meets it; one that does not exist does not."""
        return value is not None and (value <= self.bound if self.relation == "<=" else value >= self.bound)

    def surely_met_by(self, one: Estimate) -> bool:
        """Whether every value of an interval meets it."""
        return self.met_by(one.high if self.relation == "<=" else one.low)

    def miss_ratio(self, value: float | None) -> float:
        """Return how far a value misses it, as a share of the bound; infinite where there is no value."""
        if value is None:
            return math.inf
        gap = value - self.bound if self.relation == "<=" else self.bound - value
        return gap / abs(self.bound) if self.bound else gap

    def shown(self, value: float | None, half_width: float | None = None) -> str:
        """Write a value of the metric in four digits with its unit, and its interval in as many."""
        if value is None or math.isinf(value):
            return "-" if value is None else "beyond"
        factor, unit = 1.0, ""
        if unit_of(self.metric) == "s":
            factor, unit = (1e3, "ms") if abs(value) < 1 else (1.0, "s")
        elif unit_of(self.metric) == "share":
            factor, unit = 100.0, "%"
        scaled = factor * value
        digits = max(0, 3 - math.floor(math.log10(abs(scaled)))) if scaled else 0
        text = f"{scaled:.{digits}f}"
        if half_width is None:
            return (text.rstrip("0").rstrip(".") if digits else text) + unit
        return f"{text} ±{factor * half_width:.{digits}f}{unit}"


def parse_goal(text: str) -> Goal:
    """Read ``user_tps_p50>=80``, ``ttft_p99<=2s`` or ``goodput_ratio>=95%``; raises `InputError`."""

    def fault(message: str) -> InputError:
        return InputError(Fault(message, f"--objective {text}"))

    found = re.fullmatch(r"\s*(\w+)\s*(<=|>=)\s*(\S+)\s*", text)
    if found is None:
        raise fault("expected a metric, <= or >=, and a value, such as ttft_p99<=2s or user_tps_p50>=80")
    name, relation, given = found.groups()
    metrics = {alias_of(metric): metric for metric in metric_names()}
    metric = metrics.get(name, name)
    if metric not in metrics.values():
        raise fault(f"unknown metric '{name}'; {known_text(name, metrics)}")
    lower = unit_of(metric) == "s" or any(part in metric for part in _LOWER)
    higher = not lower and any(part in metric for part in _HIGHER)
    if (lower and relation == ">=") or (higher and relation == "<="):
        better, other = ("lower", "<=") if lower else ("higher", ">=")
        raise fault(f"'{name}' is better when {better}; write {other}")
    try:
        bound = _bound(given, unit_of(metric))
    except ValueError as error:
        raise fault(f"{error} (got '{given}')") from None
    return Goal(metric, "<=" if relation == "<=" else ">=", bound)


def _bound(text: str, unit: Unit) -> float:
    if unit == "s":
        return parse_duration_s(text)
    is_percent = text.endswith("%")
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        raise ValueError(f"expected a number{' or per cent, such as 95%' if unit == 'share' else ''}") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError("expected a finite number, at least 0")
    if is_percent and unit == "number":
        raise ValueError("expected a number without %")
    if is_percent:
        value /= 100
    if unit == "share" and value > 1:
        raise ValueError("expected a share from 0 to 1, or per cent up to 100%")
    return value


# -------------------------------------------------------------------------------------------------------------- search

#: Who decides: the first replication, the mean of all, or the whole interval of all.
Judge = Literal["first", "mean", "surely"]
Question = tuple[int, Judge]
Search = Generator[Question, bool, int | None]


def smallest_fleet(most: int) -> Search:
    """Ask which sizes meet the objectives, and return the smallest that does; None where ``most`` does not.

    Yields a size and who decides, and is sent the decision. Whatever was returned met the objectives in the mean of
    all replications, and one less did not.
    """
    answer = (yield from _climb(0, most, "first")) or most
    if not (yield answer, "mean"):
        return (yield from _climb(answer, most, "mean"))
    step = 1
    while answer > 1:
        lower = max(answer - step, 1)
        if not (yield lower, "mean"):
            return (yield from _bisect(lower, answer, "mean"))
        answer, step = lower, 2 * step
    return answer


def sure_fleet(answer: int, most: int) -> Search:
    """Like `smallest_fleet`, from its answer on, for a size that surely meets the objectives."""
    if (yield answer, "surely"):
        return answer
    return (yield from _climb(answer, most, "surely"))


def _climb(low: int, most: int, judge: Judge) -> Search:
    """Go up from ``low``, which does not do, in steps that double, then bisect."""
    step = 1
    while low < most:
        size = min(low + step, most)
        if (yield size, judge):
            return (yield from _bisect(low, size, judge))
        low, step = size, 2 * step
    return None


def _bisect(low: int, high: int, judge: Judge) -> Generator[Question, bool, int]:
    """Return the size that does where one less does not, between ``low``, which does not, and ``high``, which does."""
    while high - low > 1:
        middle = (low + high) // 2
        if (yield middle, judge):
            high = middle
        else:
            low = middle
    return high


# ---------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True)
class Trial:
    """A fleet that was simulated for all replications."""

    replicas: int
    estimates: dict[str, Estimate]

    def meets(self, goals: Sequence[Goal]) -> bool:
        """Whether the mean meets every objective."""
        return all(goal.met_by(self.estimates[goal.metric].value) for goal in goals)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a policy needs.

    ``replicas``: the smallest fleet whose mean meets every objective; ``sure_replicas``: the smallest whose intervals
    do, None with one replication. Both are None where the largest fleet allowed does not. ``at``: the trial of the
    answer, else of the largest fleet. ``below``: the trial of one replica less, if there is one. ``binding``: the
    objectives that the next smaller fleet (without an answer: the largest) misses, the furthest missed first.
    ``tried``: all sizes that were simulated; ``failing_above``: those above the answer whose means miss some objective.
    """

    policy: int
    replicas: int | None
    sure_replicas: int | None
    at: Trial
    below: Trial | None
    binding: tuple[Goal, ...]
    tried: tuple[int, ...]
    failing_above: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What every policy needs."""

    scenario: Scenario
    plant: Plant
    goals: tuple[Goal, ...]
    most: int
    answers: tuple[Answer, ...]

    def gpus(self, replicas: int) -> int:
        """Return the GPUs of a fleet, prefill pools included."""
        return self.plant.gpus.total + (replicas - self.scenario.fleet.replicas) * self.plant.gpus_per_replica


def make_plan(
    scenario: Scenario, document: Document, goals: Sequence[Goal], most: int, executor: Executor, *, strict: bool
) -> Plan:
    """Find for each policy the smallest fleet, of up to ``most`` replicas, that meets every objective.

    The policies are searched side by side, so that all processes have work; a size is a point of a sweep over
    ``fleet.replicas``.
    """
    if scenario.sweep is not None:
        message = "a plan is for one traffic; choose one and take the sweep out with --set sweep=null"
        raise InputError(document.fault(message, ("sweep",)))
    for goal in goals:
        if goal.metric.startswith("goodput") and not scenario.objectives.bounds().any():
            message = f"'{goal.name}' counts requests that met the scenario's objectives, and it has none"
            raise InputError(Fault(message, f"--objective {goal}"))
    (plant,) = check_engines(Work(document, strict), [None])
    sizes = {"key": "fleet.replicas", "values": list(range(1, most + 1))}
    trials = _Trials(scenario, Work(document.replaced(("sweep",), sizes, "--max-replicas"), strict), tuple(goals))
    policies = range(len(scenario.policies))
    with executor:
        found = trials.drive({policy: smallest_fleet(most) for policy in policies}, executor)
        sure: dict[int, int | None] = {}
        if scenario.replications > 1:
            known = {policy: answer for policy, answer in found.items() if answer is not None}
            sure = trials.drive({policy: sure_fleet(answer, most) for policy, answer in known.items()}, executor)
    answers = tuple(trials.answer(policy, found[policy], sure.get(policy), most) for policy in policies)
    return Plan(scenario, plant, tuple(goals), most, answers)


class _Trials:
    """The fleets tried so far, a metric each and replication, and the decisions that follow from them."""

    def __init__(self, scenario: Scenario, work: Work, goals: tuple[Goal, ...]) -> None:
        self._scenario, self._work, self._goals = scenario, work, goals
        self._metrics: dict[Cell, Metrics] = {}

    def drive(self, searches: dict[int, Search], executor: Executor) -> dict[int, int | None]:
        """Answer the questions of all searches, by policy, until each returned."""
        found: dict[int, int | None] = {}
        asked: dict[int, Question] = {}
        for policy, search in searches.items():
            asked[policy] = next(search)
        while asked:
            self._run(asked, executor)
            for policy, question in list(asked.items()):
                try:
                    asked[policy] = searches[policy].send(self._decide(policy, *question))
                except StopIteration as end:
                    found[policy] = end.value
                    del asked[policy]
        return found

    def answer(self, policy: int, replicas: int | None, sure: int | None, most: int) -> Answer:
        """Put together what a policy's search found."""
        at = self._trial(policy, most if replicas is None else replicas)
        below = self._trial(policy, replicas - 1) if replicas is not None and replicas > 1 else None
        short = at if replicas is None else below
        missed: list[tuple[float, Goal]] = []
        if short is not None:
            for goal in self._goals:
                value = short.estimates[goal.metric].value
                if not goal.met_by(value):
                    missed.append((goal.miss_ratio(value), goal))
        binding = tuple(goal for _, goal in sorted(missed, key=lambda one: -one[0]))
        last = self._scenario.replications - 1
        above = [size for size in self._sizes(policy, last) if replicas is not None and size > replicas]
        failing = tuple(size for size in above if not self._trial(policy, size).meets(self._goals))
        return Answer(policy, replicas, sure, at, below, binding, self._sizes(policy, 0), failing)

    def _run(self, asked: dict[int, Question], executor: Executor) -> None:
        cells = [cell for policy, question in asked.items() for cell in self._cells(policy, *question)]
        missing = [cell for cell in cells if cell not in self._metrics]
        if not missing:
            return
        sizes = sorted({size for size, _ in asked.values()})
        name = f"{self._scenario.name}, {', '.join(map(str, sizes))} replicas"
        with progress_bar(name, len(missing)) as show:
            for done in executor.run(self._work, missing, show):
                self._metrics[done.cell] = done.unwrapped().metrics

    def _cells(self, policy: int, size: int, judge: Judge) -> list[Cell]:
        count = 1 if judge == "first" else self._scenario.replications
        return [Cell(policy, size - 1, replication) for replication in range(count)]

    def _decide(self, policy: int, size: int, judge: Judge) -> bool:
        if judge == "first":
            first = self._metrics[Cell(policy, size - 1, 0)]
            return all(goal.met_by(estimate([first[goal.metric]]).value) for goal in self._goals)
        trial = self._trial(policy, size)
        if judge == "mean":
            return trial.meets(self._goals)
        return all(goal.surely_met_by(trial.estimates[goal.metric]) for goal in self._goals)

    def _sizes(self, policy: int, replication: int) -> tuple[int, ...]:
        """Return the sizes that a replication of a policy was run at."""
        points = [cell.point or 0 for cell in self._metrics if (cell.policy, cell.replication) == (policy, replication)]
        return tuple(sorted(point + 1 for point in points))

    def _trial(self, policy: int, size: int) -> Trial:
        return Trial(size, estimates([self._metrics[cell] for cell in self._cells(policy, size, "mean")]))
