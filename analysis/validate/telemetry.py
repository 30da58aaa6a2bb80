"""Predictions of figures 7 and 8 held against the telemetry: speed, budget, anchors, and what they hang on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from analysis.validate.closed_loop import OUTPUT_TOKENS, TOKENS, Runner, run_cells
from analysis.validate.published import (
    LENIENT,
    MODELS,
    STRICT,
    Cloud,
    Curve,
    Matched,
    budget_cloud,
    line_requests,
    match,
    parabola,
    speed_cloud,
)
from analysis.validate.rungs import Check, Section, compare, said, summarize, table
from analysis.validate.serving import (
    LOADS,
    MTP_LOADS,
    QUICK_LOADS,
    REFINED,
    SHIPPED,
    Assumptions,
    Pair,
    Request,
    draft_passes,
    predict,
)
from profiles.recipes.serving import MTP_ACCEPTED_LENGTH, Model, fit_step_law
from profiles.recipes.sources import Floats, Shared

#: What a prediction is held to: per cent of speed (median, and at every load), tokens of budget (median), and points
#: of the gains at the lenient promise.
SPEED_MEDIAN, SPEED_WORST, BUDGET_MEDIAN, GAIN_POINTS = 8.0, 15.0, 0.5, 10.0

#: Loads and tokens of a run where only differences between assumptions matter; all meet the same luck.
QUICK_TOKENS = 40_000
SENSITIVITY_LOADS, SENSITIVITY_TOKENS = (7, 14, 28, 55, 85, 115, 145, 175, 212), 200_000

VARIANTS = {"shipped": SHIPPED, "refined": REFINED}

_A = Assumptions
#: One assumption changed at a time, then what the architecture says of draft passes.
SENSITIVITIES: dict[str, Assumptions] = {
    "as shipped": SHIPPED,
    "slope of the step: 25 % by request": _A(request_share=0.25),
    "slope of the step: 50 % by request": _A(request_share=0.5),
    "slope of the step: all by request": _A(request_share=1.0),
    "MTP-1 accepts 1.79": _A(mtp_accepted_length=1.79),
    "MTP-1 accepts 1.92": _A(mtp_accepted_length=1.92),
    "DSpark accepts 3.36 on full blocks": _A(accepted_length=3.36),
    "DSpark accepts 3.94 on full blocks": _A(accepted_length=3.94),
    "draft time x 0.5": _A(draft_scale=0.5),
    "draft time x 1.5": _A(draft_scale=1.5),
    "spread x 0.5": _A(spread_scale=0.5),
    "spread x 1.5": _A(spread_scale=1.5),
    "raw confidence": _A(confidence="raw"),
    "scheduler does not price drafting": _A(priced_draft=False),
    "pass of MTP-1 out: one layer": _A(mtp_pass="layer"),
    "pass of MTP-1 out: one of three stages": _A(mtp_pass="stage"),
    "draft time by layers of the target": _A(draft_by_layer=True),
    "draft ratio load by load": _A(draft_by_load=True),
    "refined: the last three together": REFINED,
    "refined, drafting not priced": dataclasses.replace(REFINED, priced_draft=False),
}
#: Those of them that a quick run looks at.
QUICK = ("as shipped", "slope of the step: 50 % by request", "refined: the last three together")


@dataclass(frozen=True, slots=True)
class Seen:
    """What was observed of a model: clouds where they are dense, and the gains that the clouds themselves give.

    ``mtp_line``: MTP-1's speed by the law fitted to its cloud, whose bins bump about the lenient promise.
    """

    mtp: Cloud
    dspark: Cloud
    budget: Cloud
    mtp_line: Curve
    lenient: Matched
    lenient_by_bins: Matched
    strict: Matched


def read_seen(shared: Shared, model: Model) -> Seen:
    """Read a model's telemetry."""
    mtp, dspark = speed_cloud(shared, model, "MTP"), speed_cloud(shared, model, "DSpark")
    law = fit_step_law(shared, model, 1.0)  # step time over accepted length: one over the speed
    loads = np.arange(2.0, 300.0)
    line = Curve(loads, 1 / law.step_s(loads))
    whole, bins = Curve(dspark.requests, dspark.median), Curve(mtp.requests, mtp.median)
    return Seen(
        mtp.dense(),
        dspark.dense(),
        budget_cloud(shared, model).dense(least=20),  # its bins are narrow
        line,
        match(line, whole, LENIENT[model]),
        match(bins, whole, LENIENT[model]),
        match(bins, whole, STRICT[model]),
    )


@dataclass(frozen=True, slots=True)
class Errors:
    """A prediction of DSpark against the clouds: relative errors of speed, errors of budget in tokens, by bin."""

    speed: Floats
    budget: Floats

    @property
    def speed_bias(self) -> float:
        """Median error of speed in per cent."""
        return 100 * float(np.median(self.speed))

    @property
    def speed_median(self) -> float:
        """Median size of the error of speed in per cent."""
        return 100 * float(np.median(np.abs(self.speed)))

    @property
    def speed_worst(self) -> float:
        """Largest error of speed in per cent, with its sign."""
        return 100 * float(self.speed[np.abs(self.speed).argmax()])

    @property
    def budget_bias(self) -> float:
        """Median error of the budget in tokens."""
        return float(np.median(self.budget))


def errors_of(pair: Pair, seen: Seen) -> Errors:
    """Hold a prediction against the bins inside the simulated loads."""
    speed = pair.dspark.at("user_tokens_per_s", seen.dspark.requests) / seen.dspark.median - 1
    budget = pair.dspark.at("verify_tokens", seen.budget.requests) - seen.budget.median
    return Errors(speed[~np.isnan(speed)], budget[~np.isnan(budget)])


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that was simulated for figures 7 and 8.

    ``pairs``: by model and variant, at every load. ``sensitivities``: by model and what was changed, at few loads.
    """

    seen: dict[Model, Seen]
    pairs: dict[Model, dict[str, Pair]]
    sensitivities: dict[Model, dict[str, Pair]]


def simulate_all(shared: Shared, *, seed: int, jobs: int, quick: bool, run: Runner = run_cells) -> Outcome:
    """Simulate both models under both variants, and every sensitivity."""
    loads, mtp_loads = (QUICK_LOADS, QUICK_LOADS) if quick else (LOADS, MTP_LOADS)
    tokens, output_tokens = (QUICK_TOKENS, 64) if quick else (TOKENS, OUTPUT_TOKENS)
    full = [
        Request(model, assumed, loads, mtp_loads, tokens, output_tokens)
        for model in MODELS
        for assumed in VARIANTS.values()
    ]
    names = QUICK if quick else tuple(SENSITIVITIES)
    some = [
        Request(
            model, SENSITIVITIES[name], QUICK_LOADS if quick else SENSITIVITY_LOADS, (), min(tokens, SENSITIVITY_TOKENS)
        )
        for model in MODELS
        for name in names
    ]
    found = iter(predict(shared, [*full, *some], seed=seed, jobs=jobs, what="figures 7 and 8", run=run))
    pairs = {model: {name: next(found) for name in VARIANTS} for model in MODELS}
    sensitivities = {model: {name: next(found) for name in names} for model in MODELS}
    return Outcome({model: read_seen(shared, model) for model in MODELS}, pairs, sensitivities)


# ------------------------------------------------------------------------------------------------------------- sections

SETUP = (
    "A closed loop at a constant number of requests per GPU, decoding only: prompts of one token at no cost, as if "
    "prefill were done elsewhere; 512 tokens an answer; DSpark as `dspark_async` with lag 2. The telemetry is of an "
    "open load, with prefill somewhere: its requests vary within each point. Speed is throughput over requests, as the "
    "two figures agree it is. V4-Pro's acceptance is a later checkpoint's. Shipped: the profiles paper/v4_flash and "
    "paper/v4_pro. Refined: the same with draft passes by the drafters' public architecture (three layers, MTP-1's "
    "one), found after a first comparison; it has no free number, and nothing of DSpark's curves is in it."
)


def fitted_section(outcome: Outcome) -> Section:
    """Report MTP-1, which was fitted."""
    rows, checks = [], []
    for model, seen in outcome.seen.items():
        pair = outcome.pairs[model]["shipped"]
        own = pair.mtp.at("user_tokens_per_s", seen.mtp.requests)
        known = ~np.isnan(own)
        relative = 100 * (own[known] / seen.mtp.median[known] - 1)
        rows.append([model, str(relative.size), f"{np.median(np.abs(relative)):.1f}", _signed(relative)])
        checks.append(
            summarize(f"{model}: MTP-1's speed, fitted, median |error|", float(np.median(np.abs(relative))), "%")
        )
    lines = [
        *said(
            "MTP-1's step time is fitted to its cloud (accepted length 1.85, not published): what the simulation gives "
            "back is the fit. Bins of 50 points or more, 5 to 205 requests per GPU."
        ),
        *table(("MTP-1, tokens/s/user", "bins", "median |error| %", "worst %"), rows),
    ]
    return Section("Serving, fitted: MTP-1", tuple(lines), tuple(checks))


def _signed(relative: Floats) -> str:
    return f"{relative[np.abs(relative).argmax()]:+.1f}"


def speed_section(outcome: Outcome, model: Model, judged: str) -> Section:
    """Report DSpark's speed at every dense bin."""
    seen, pairs = outcome.seen[model], outcome.pairs[model]
    rows, checks = [], []
    for i, load in enumerate(seen.dspark.requests):
        row = [f"{load:.1f}", f"{seen.dspark.p10[i]:.1f}", f"{seen.dspark.median[i]:.1f}", f"{seen.dspark.p90[i]:.1f}"]
        for name, pair in pairs.items():
            own = float(pair.dspark.at("user_tokens_per_s", load))
            if np.isnan(own):
                row += ["-", "-"]
                continue
            row += [f"{own:.1f}", f"{100 * (own / seen.dspark.median[i] - 1):+.1f}"]
            checks.append(
                compare(
                    f"{model}, {name}: DSpark's speed at {load:.1f} requests/GPU",
                    own,
                    float(seen.dspark.median[i]),
                    "tokens/s/user",
                    SPEED_WORST / 100 * float(seen.dspark.median[i]) if name == judged else None,
                )
            )
        shipped = pairs[judged].dspark
        row += [
            "-" if np.isnan(value) else f"{value:.2f}"
            for value in (float(shipped.at(key, load)) for key in ("accepted_length", "draft_ratio"))
        ]
        rows.append(row)
    for name, pair in pairs.items():
        checks.append(
            summarize(
                f"{model}, {name}: DSpark's speed, median |error|",
                errors_of(pair, seen).speed_median,
                "%",
                SPEED_MEDIAN if name == judged else None,
            )
        )
    head = ["requests/GPU", "p10", "observed", "p90"]
    for name in pairs:
        head += [name, "error %"]
    head += [f"accepted ({judged})", "draft share"]
    summary = [
        [
            name,
            *(f"{value:+.1f}" for value in (errors.speed_bias, errors.speed_worst)),
            f"{errors.speed_median:.1f}",
        ]
        for name, errors in ((name, errors_of(pair, seen)) for name, pair in pairs.items())
    ]
    lines = [
        *table(head, rows),
        "",
        *table(("", "median error %", "worst %", "median |error| %"), summary),
    ]
    return Section(f"Serving, predicted: {model}, DSpark's tokens/s per user (figure 7)", tuple(lines), tuple(checks))


def budget_section(outcome: Outcome, judged: str) -> Section:
    """Report the verification budget over load."""
    rows, checks = [], []
    for model, seen in outcome.seen.items():
        pairs = outcome.pairs[model]
        for load in (10, 20, 40, 60, 80, 100, 120, 140, 160, 180, 200):
            near = int(np.abs(seen.budget.requests - load).argmin())
            observed = f"{seen.budget.median[near]:.2f}" if abs(seen.budget.requests[near] - load) < 3 else "-"
            rows.append(
                [
                    f"{model}, {load}",
                    observed,
                    f"{float(parabola(model, np.array(float(load)))):.2f}",
                    *(f"{float(pair.dspark.at('verify_tokens', load)):.2f}" for pair in pairs.values()),
                ]
            )
        for name, pair in pairs.items():
            errors = errors_of(pair, seen)
            checks.append(
                summarize(
                    f"{model}, {name}: verification budget, median |error|",
                    float(np.median(np.abs(errors.budget))),
                    "tokens/request",
                    BUDGET_MEDIAN if name == judged else None,
                )
            )
            rows.append([f"{model}, {name}: median error", f"{errors.budget_bias:+.2f}", "", *[""] * len(pairs)])
    lines = [
        *said("Tokens a request verifies in a step, bonus included, by requests per GPU; MTP-1's is 2 throughout."),
        *table(("requests/GPU", "observed", "parabola", *outcome.pairs["V4-Flash"]), rows),
    ]
    return Section("Serving, predicted: verification budget (figure 8)", tuple(lines), tuple(checks))


def anchor_section(shared: Shared, outcome: Outcome, judged: str) -> Section:
    """Report the matched anchors, and at the strict promise the feasible requests."""
    rows, strict_rows, checks = [], [], []
    for model, seen in outcome.seen.items():
        speed = LENIENT[model]
        printed = {"V4-Flash": (51, 60), "V4-Pro": (52, 57)}[model]
        rows.append([f"{model} at {speed:g}: printed (fitted lines)", "", "", f"+{printed[0]}", f"+{printed[1]}"])
        rows.append([f"{model} at {speed:g}: cloud, MTP-1 by its law", *_gains(seen.lenient)])
        rows.append([f"{model} at {speed:g}: cloud, bins alone", *_gains(seen.lenient_by_bins)])
        for name, pair in outcome.pairs[model].items():
            own = match(pair.mtp.curve, pair.dspark.curve, speed)
            rows.append([f"{model} at {speed:g}: {name}", *_gains(own)])
            bound = GAIN_POINTS if name == judged else None
            for what, mine, theirs in (
                ("throughput at matched speed", own.throughput_gain, seen.lenient.throughput_gain),
                ("speed at matched throughput", own.speed_gain, seen.lenient.speed_gain),
            ):
                checks.append(
                    compare(f"{model}, {name}: gain in {what}, {speed:g} tokens/s/user", mine, theirs, "% gain", bound)
                )
        lines_at = line_requests(shared, model, STRICT[model])
        strict_rows.append(
            [f"{model} at {STRICT[model]:g}: fitted lines", f"{lines_at['MTP']:.1f}", f"{lines_at['DSpark']:.1f}"]
        )
        strict_rows.append([f"{model} at {STRICT[model]:g}: cloud", *map(_load, seen.strict.requests)])
        for name, pair in outcome.pairs[model].items():
            own = match(pair.mtp.curve, pair.dspark.curve, STRICT[model])
            strict_rows.append([f"{model} at {STRICT[model]:g}: {name}", *map(_load, own.requests)])
            for method, mine, theirs in zip(("MTP-1", "DSpark"), own.requests, seen.strict.requests, strict=True):
                checks.append(
                    compare(
                        f"{model}, {name}: {method}'s requests at {STRICT[model]:g} tokens/s/user",
                        mine,
                        theirs,
                        "requests/GPU",
                    )
                )
    lines = [
        *said(
            "Gains of DSpark over MTP-1 where MTP-1 gives the lenient promise. What the clouds give is MTP-1 by the "
            "law fitted to its cloud, since its bins bump there, against DSpark's bins."
        ),
        *table(("", "MTP-1 req/GPU", "DSpark req/GPU", "throughput %", "speed %"), rows),
        "",
        "Requests per GPU that get the strict promise; no ratio, which hangs on fitted lines that leave the cloud.",
        *table(("", "MTP-1", "DSpark"), strict_rows),
    ]
    return Section("Serving, predicted: anchors (figure 7)", tuple(lines), tuple(checks))


def _gains(matched: Matched) -> list[str]:
    return [*map(_load, matched.requests), _gain(matched.throughput_gain), _gain(matched.speed_gain)]


def _load(value: float | None) -> str:
    return "outside" if value is None else f"{value:.1f}"


def _gain(value: float | None) -> str:
    return "outside" if value is None else f"{value:+.0f}"


def sensitivity_section(shared: Shared, outcome: Outcome) -> Section:
    """Report how far each assumption moves the prediction."""
    rows, checks = [], []
    for model, found in outcome.sensitivities.items():
        seen = outcome.seen[model]
        for name, pair in found.items():
            errors = errors_of(pair, seen)
            own = match(seen.mtp_line, pair.dspark.curve, LENIENT[model])
            budgets = pair.dspark.at("verify_tokens", np.array([20.0, 100.0, 200.0]))
            rows.append(
                [
                    f"{model}: {name}",
                    f"{errors.speed_bias:+.1f}",
                    f"{errors.speed_worst:+.1f}",
                    f"{errors.budget_bias:+.2f}",
                    "/".join(f"{budget:.1f}" for budget in budgets),
                    _gain(own.throughput_gain),
                    _gain(own.speed_gain),
                ]
            )
            checks.append(summarize(f"{model}, {name}: DSpark's speed, median error", errors.speed_bias, "%"))
            checks.append(summarize(f"{model}, {name}: budget, median error", errors.budget_bias, "tokens/request"))
        rows.append(
            [
                f"{model}: the clouds",
                "",
                "",
                "",
                "/".join(f"{_at(seen.budget, load):.1f}" for load in (20, 100, 200)),
                _gain(seen.lenient.throughput_gain),
                _gain(seen.lenient.speed_gain),
            ]
        )
        rows.append([])
    lines = [
        *said(
            "One assumption changed at a time: few loads, short runs, the same luck. Errors against the dense cloud: "
            "median and worst of speed in per cent, median of the budget in tokens; the budget at 20, 100 and 200 "
            "requests per GPU; gains at the lenient promise, MTP-1 by its law."
        ),
        *table(("", "speed %", "worst %", "budget", "at 20/100/200", "throughput %", "speed gain %"), rows[:-1]),
        "",
        *(line for paragraph in _mechanisms(shared, outcome) for line in said(f"- {paragraph}")),
    ]
    return Section("Serving: what the predictions hang on, and why they miss", tuple(lines), tuple(checks))


def _at(cloud: Cloud, load: float) -> float:
    return float(np.interp(load, cloud.requests, cloud.median))


def _mechanisms(shared: Shared, outcome: Outcome) -> list[str]:
    """Name what the misses come from, with the numbers of this run."""
    bias: dict[str, dict[Model, Errors]] = {}
    for model, found in outcome.sensitivities.items():
        for name, pair in found.items():
            bias.setdefault(name, {})[model] = errors_of(pair, outcome.seen[model])
    if set(bias) != set(SENSITIVITIES):
        return ["A quick run: mechanisms need every sensitivity."]

    def speeds(name: str) -> str:
        return " and ".join(
            f"{bias[name][model].speed_bias - bias['as shipped'][model].speed_bias:+.1f}" for model in MODELS
        )

    def budgets(name: str) -> str:
        return " and ".join(
            f"{bias[name][model].budget_bias - bias['as shipped'][model].budget_bias:+.2f}" for model in MODELS
        )

    at, shares = np.array(100.0), []
    for model in MODELS:
        own = draft_passes(shared, model, REFINED, 200).mtp_s[100]
        shares.append(f"{100 * own / float(fit_step_law(shared, model, MTP_ACCEPTED_LENGTH).step_s(at)):.1f}")
    half, every = "slope of the step: 50 % by request", "slope of the step: all by request"
    layer, stage = "pass of MTP-1 out: one layer", "pass of MTP-1 out: one of three stages"
    mixed, unpriced = "DSpark accepts 3.36 on full blocks", "scheduler does not price drafting"
    return [
        "Numbers are for Flash and Pro, against the shipped prediction: speed in points, budget in tokens.",
        "Not identifiable, and the main one: MTP-1 has two tokens a request throughout, so how much of the "
        f"slope is a request's is open. Half of it moves speed by {speeds(half)} and the budget by {budgets(half)}; "
        f"all of it, by {speeds(every)} and {budgets(every)}. The shipped share of 0 gives the shortest budget, "
        "so a budget that is too long is not its doing.",
        "Draft pass of MTP-1: the telemetry's step holds it, and the shipped profiles charge it to DSpark too. Taken "
        f"out as one layer more than the target's it is worth {speeds(layer)}; as one of the three stages of DSpark's "
        f"measured pass, over two tokens ({' and '.join(shares)} % of the step at 100 requests per GPU), "
        f"{speeds(stage)}.",
        "Draft time of Pro: both drafters have three layers, so Pro's pass goes with one layer of its target (of 61), "
        "not with all of it; the shipped ratio of whole steps charges 61/43 of that: "
        f"{speeds('draft time by layers of the target')}. Half the shipped draft time: {speeds('draft time x 0.5')}.",
        "Budget too long: draft time is sunk, and lengthens what pays. A scheduler that prices verification alone, as "
        f"algorithm 1 is written, moves it by {budgets(unpriced)}. Survival from coding prompts is kinder than mixed "
        f"traffic's: at an accepted length of 3.36, {budgets(mixed)}, but speed {speeds(mixed)}, so it is not that "
        f"alone. Spread is borrowed: 1.5 times as much, {budgets('spread x 1.5')} with {speeds('spread x 1.5')} in "
        "speed. None of the three is published for this traffic.",
        "Anchors amplify: " + "; ".join(_amplification(outcome, model) for model in MODELS) + ".",
        "Level: the accepted length of MTP-1 sets it; 1.79 is worth "
        f"{speeds('MTP-1 accepts 1.79')} in speed, 1.92 {speeds('MTP-1 accepts 1.92')}.",
    ]


def _amplification(outcome: Outcome, model: Model) -> str:
    """Say what a per cent of speed is worth at the lenient promise."""
    curve = outcome.pairs[model]["shipped"].dspark.curve
    speed = LENIENT[model]
    ends = [curve.requests_at(speed * factor) for factor in (1.05, 0.95)]
    if None in ends:
        return f"{model}'s prediction does not reach 5 % around {speed:g}"
    fast, slow = (float(end or 0) for end in ends)
    worth = np.log(slow / fast) / np.log(1.05 / 0.95)
    return f"one per cent of {model}'s speed is {worth:.1f} per cent of throughput at {speed:g}"


def summary_of(outcome: Outcome, model: Model) -> Mapping[str, Errors]:
    """Return the errors of each variant."""
    return {name: errors_of(pair, outcome.seen[model]) for name, pair in outcome.pairs[model].items()}


def sections(shared: Shared, outcome: Outcome, judged: str) -> list[Section]:
    """Return all sections on figures 7 and 8."""
    bound: list[Check] = []
    return [
        Section("Serving: how", said(SETUP), tuple(bound)),
        fitted_section(outcome),
        *(speed_section(outcome, model, judged) for model in MODELS),
        budget_section(outcome, judged),
        anchor_section(shared, outcome, judged),
        sensitivity_section(shared, outcome),
    ]
