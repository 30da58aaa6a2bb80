"""From closed-loop runs to the law of a step.

With R requests decoding, each verifying k draft tokens and the bonus, a round takes ::

    floor + batch_token n + request R + context_token R c + (admission + prompt_token p) (R - 1) a / o
          [+ draft + draft_request R, where it speculates]
          [+ saturating (1 - exp(-n / saturation)), or + bend max(n - knee, 0), where the data clearly want it]

seconds at n = R (1 + k) batch tokens; c is the tokens in a request's cache, halfway through its answer, p its prompt,
o its output, and a the tokens a round yields. R a / o requests end in each round and as many are let in: their prefill
shares the round. What is observed is the mean length of the rounds between a request's own tokens: accepted length x
TPOT. They hold the prefill of the R - 1 others, for its own comes before its first token. Where only throughput is
known, the rounds are all there are, and R takes the place of R - 1. Where runs of no speculation, one length and one
draft length are all there is, several of these costs cannot be told apart; the fit says which, and where they hide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles.errors import Fault, ProfileError
from profiles.fitting.law import COSTS, Law
from profiles.fitting.least_squares import Fit, Floats, fit_costs, gain, tell_apart
from profiles.measurements.points import LoadPoint

Bools = NDArray[np.bool_]

#: Loads that a law needs: two give its level and slope, the third says how wrong they are.
MIN_LOADS = 3
#: Rows of first tokens count for so much of a row of steps: they hold waiting too.
FIRST_TOKEN_TRUST = 0.15
#: A shape with two more numbers is taken where F is 5 or more: clearly better.
CLEARLY = 2 * 5.0
#: Lengths within this ratio are one: a benchmark draws them anew for each run.
ALIKE = 1.2
#: Of these, runs of few lengths know only a mixture; where one is known the others are kept, and they share it evenly.
SHARED = ("context_token", "prompt_token", "admission")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoopFit(Law):
    """The law of a step, and how far it is from each run (``misses``, of the round's length).

    ``first_token_s``: wait for a first token beside the prompt's own cost, at the lightest load. ``verify_s``: seconds
    by batch tokens, where those were known before; the costs come on top.
    """

    points: tuple[LoadPoint, ...]
    first_token_s: float = 0.0
    draft_per_token: bool = False
    verify_s: Floats | None = None

    def predict_s(self, points: Sequence[LoadPoint]) -> Floats:
        """Return seconds of a round at other points, as `rounds_s` has them of each.

        ``ttft_s`` is used, where given, for how many wait.
        """
        return self._round_s(points, _whole(points))

    def predict_tpot_s(self, points: Sequence[LoadPoint]) -> Floats:
        """Return seconds a token of a request at other points, after its first."""
        return self._round_s(points, np.zeros(len(points), np.bool_)) / _accepted(points)

    def _round_s(self, points: Sequence[LoadPoint], whole: Bools) -> Floats:
        amounts = amounts_of(points, self.draft_per_token, whole)
        tokens = amounts["batch_token"]
        amounts |= {"saturating": _shape("saturating", self.saturation_tokens, tokens)}
        amounts |= {"bend": _shape("bend", self.bend_tokens, tokens)}
        parts = {**self.cost_s, "saturating": self.saturating_s, "bend": self.bend_token_s}
        on_top = sum(cost * amounts[name] for name, cost in parts.items())
        return np.asarray(on_top + _known_s(amounts["batch_token"], self.verify_s))


def rounds_s(points: Sequence[LoadPoint]) -> Floats:
    """Return each run's mean round in seconds: accepted length x TPOT.

    Where only throughput is known the round is ``concurrency x accepted length / throughput``, which holds the waits
    for first tokens too.
    """
    seconds = []
    for point in points:
        accepted = point.accepted_length or 1.0
        if point.tpot_s is not None:
            seconds.append(accepted * point.tpot_s)
        else:
            assert point.output_tokens_per_s is not None
            seconds.append(accepted * point.concurrency / point.output_tokens_per_s)
    return np.array(seconds)


def running(points: Sequence[LoadPoint]) -> Floats:
    """Return how many requests decode: the concurrency less those that queue.

    A request that waits longer for its first token than those of its prompt length do at their lightest load is taken
    to queue for so long.
    """
    groups = alike([point.prompt_tokens for point in points])
    lightest: dict[int, float] = {}
    for group, point in zip(groups, points, strict=True):
        if point.ttft_s is not None:
            lightest[group] = min(lightest.get(group, np.inf), point.ttft_s)
    found = []
    for group, point in zip(groups, points, strict=True):
        share = 1.0
        if point.ttft_s is not None and point.tpot_s is not None and point.output_tokens is not None:
            decode = point.tpot_s * max(point.output_tokens - 1, 1.0)
            queued = point.ttft_s - lightest[group]
            # Under a fifth it is prefill of many at once, which decoding requests wait for as well.
            share = decode / (queued + decode) if queued > 0.2 * decode else 1.0
        found.append(point.concurrency * share)
    return np.array(found)


def alike(lengths: Sequence[float | None]) -> list[int]:
    """Number the lengths so that those within `ALIKE` of their neighbours have one number; unknown ones have -1."""
    ordered = sorted({length for length in lengths if length is not None})
    number: dict[float | None, int] = {None: -1}
    for index, length in enumerate(ordered):
        starts = index == 0 or length > ALIKE * ordered[index - 1]
        number[length] = index if starts else number[ordered[index - 1]]
    return [number[length] for length in lengths]


def _whole(points: Sequence[LoadPoint]) -> Bools:
    """Return of which runs `rounds_s` knows all rounds together, those before first tokens too."""
    return np.array([point.tpot_s is None for point in points])


def _accepted(points: Sequence[LoadPoint]) -> Floats:
    return np.array([point.accepted_length or 1.0 for point in points])


def _known_s(batch_tokens: Floats, verify_s: Floats | None) -> Floats:
    """Return the seconds that a table gives for batches; raises `ProfileError` beyond its end."""
    if verify_s is None:
        return np.zeros_like(batch_tokens)
    sizes = np.maximum(np.rint(batch_tokens).astype(np.int64), 1)
    if sizes.max() >= verify_s.size:
        raise ProfileError(
            Fault(
                f"the table of step time ends at {verify_s.size - 1} batch tokens; a run has {sizes.max()}: measure on"
            )
        )
    return verify_s[sizes]


def _shape(kind: str, at: float, batch_tokens: Floats) -> Floats:
    """Return how much of a bent shape a batch pays for."""
    return -np.expm1(-batch_tokens / at) if kind == "saturating" else np.maximum(batch_tokens - at, 0.0)


def amounts_of(
    points: Sequence[LoadPoint], draft_per_token: bool = False, whole: Bools | None = None
) -> dict[str, Floats]:
    """Return how much of each cost a round of each run pays for; lengths that are not known count as none.

    ``whole``, by run: all rounds, with the prefill of every request, rather than those between a request's own tokens,
    with that of the others. None: what `rounds_s` knows of it.
    """
    requests = running(points)
    whole = _whole(points) if whole is None else whole
    drafts = np.array([float(point.draft_tokens or 0) for point in points])
    speculates = np.where(drafts > 0, drafts if draft_per_token else 1.0, 0.0)
    prompt = np.array([point.prompt_tokens or 0.0 for point in points])
    output = np.array([point.output_tokens or np.inf for point in points])
    let_in = np.where(whole, requests, np.maximum(requests - 1, 0.0)) * _accepted(points) / output
    context = prompt + np.where(np.isfinite(output), output / 2, 0.0)
    tokens = requests * (1 + drafts)
    return {
        "floor": np.ones_like(requests),
        "batch_token": tokens,
        "draft": speculates,
        "draft_request": speculates * requests,
        "context_token": requests * context,
        "prompt_token": let_in * prompt,
        "admission": let_in,
        "request": requests,
    }


def fit_closed_loop(
    points: Sequence[LoadPoint],
    *,
    request_share: float | None = None,
    draft_per_token: bool = False,
    bent: bool = True,
    verify_s: Floats | None = None,
) -> ClosedLoopFit:
    """Fit the law of a step to closed-loop runs; see the module for the equation.

    Parameters
    ----------
    points : runs
        Those that speculate need ``accepted_length`` and ``draft_tokens``.
    request_share : float in [0, 1], optional
        Share of the slope over load to charge to requests instead of to batch tokens where the runs cannot tell; an
        assumption, and the caller's. None: nothing is assumed, and where runs with and without speculation are mixed
        but do not settle it, the fit is refused.
    draft_per_token : bool
        Each draft token is a pass of the drafter (a chain) rather than one pass for all.
    bent : bool
        Try a cost that saturates and one that begins at a knee; the better is kept where it is clearly better.
    verify_s : array [batch tokens], optional
        Seconds of a step by batch tokens, measured apart; then only what comes on top is fitted.

    Raises
    ------
    ProfileError
        Where what was asked for cannot be identified; it names the measurement that would settle it.
    """
    known = verify_s is not None
    check_identifiable(points, request_share=0.0 if known else request_share, draft_per_token=draft_per_token)
    observed = rounds_s(points)
    if verify_s is not None:
        return _fit(points, observed, None, None, draft_per_token, verify_s)[0]
    most = float(amounts_of(points)["batch_token"].max())
    best, _ = _fit(points, observed, None, request_share, draft_per_token)
    if bent:
        shapes = [
            (kind, float(at)) for kind in ("saturating", "bend") for at in np.geomspace(2.0, max(most / 2, 4.0), 12)
        ]
        others = [_fit(points, observed, shape, request_share, draft_per_token) for shape in shapes]
        better, costs = min(others, key=lambda other: other[0].rms)
        if gain(best.misses, better.misses, costs) > CLEARLY:
            best = better
    return best


def _fit(
    points: Sequence[LoadPoint],
    observed: Floats,
    shape: tuple[str, float] | None,
    request_share: float | None,
    draft_per_token: bool,
    verify_s: Floats | None = None,
) -> tuple[ClosedLoopFit, int]:
    """Fit with one bent shape, or without; returns how many costs the runs determine too."""
    amounts = amounts_of(points, draft_per_token)
    if shape is not None:
        amounts[shape[0]] = _shape(*shape, amounts["batch_token"])
    if request_share is not None:
        # With the split of the slope given, one column holds both.
        amounts["batch_token"] = (1 - request_share) * amounts["batch_token"] + request_share * amounts["request"]
    known = _known_s(amounts["batch_token"], verify_s)
    named = [name for name in COSTS if request_share is None or name != "request"]
    if verify_s is not None:
        named.remove("batch_token")
    if shape is not None:
        named.insert(2, shape[0])
    rows, waits = _first_token_rows(points)
    several = waits.size > 0 and rows.max() > ALIKE * rows.min()
    # Prompts of one length: their price is the wait for the first token at the lightest load, all of it.
    price = 0.0
    if waits.size and not several:
        price = max(float(np.median(waits)) - float(observed.min()), 0.0) / float(np.median(rows))
        price = 0.0 if (price * amounts["prompt_token"] > 0.8 * (observed - known)).any() else price
    if price > 0:
        known = known + price * amounts["prompt_token"]
        named.remove("prompt_token")
        waits, rows = waits[:0], rows[:0]
    keep, inside = tell_apart({name: amounts[name] for name in named}, observed)
    free = len(keep)
    if any(name in keep for name in SHARED):
        keep += [name for name in SHARED if name in named and name not in keep and amounts[name].any()]
    columns = {name: np.concatenate([amounts[name], np.zeros(waits.size)]) for name in keep}
    if several:
        columns["first_token"] = np.concatenate([np.zeros_like(observed), np.ones_like(waits)])
        columns["prompt_token"] = np.concatenate([amounts["prompt_token"], rows])
        inside.pop("prompt_token", None)
    else:
        waits = waits[:0]
        columns = {name: column[: observed.size] for name, column in columns.items()}
    trust = np.concatenate([np.ones_like(observed), np.full(waits.size, FIRST_TOKEN_TRUST)])
    known = np.concatenate([known, np.zeros_like(waits)])
    fit = fit_costs(columns, np.concatenate([observed, waits]), list(columns), trust, known)
    law = _to_law(points, fit, inside, shape, request_share)
    if price > 0:
        law.cost_s["prompt_token"] = price
        law.error_s["prompt_token"] = float("nan")
        law.inside["prompt_token"] = ()
    law = replace(law, draft_per_token=draft_per_token, verify_s=verify_s)
    return law, free + (shape is not None)


def _to_law(
    points: Sequence[LoadPoint],
    fit: Fit,
    inside: dict[str, tuple[str, ...]],
    shape: tuple[str, float] | None,
    request_share: float | None,
) -> ClosedLoopFit:
    kind, at = shape or ("", 1.0)
    cost, error = ({name: values.get(name, 0.0) for name in COSTS} for values in (fit.cost, fit.error))
    if request_share is not None:
        slope, its_error = cost["batch_token"], error["batch_token"]
        cost |= {"batch_token": (1 - request_share) * slope, "request": request_share * slope}
        error |= {"batch_token": (1 - request_share) * its_error, "request": request_share * its_error}
    return ClosedLoopFit(
        cost_s=cost,
        error_s=error,
        inside={name: hosts for name, hosts in inside.items() if name in COSTS},
        saturating_s=fit.cost.get("saturating", 0.0),
        saturation_tokens=at if kind == "saturating" else 1.0,
        bend_token_s=fit.cost.get("bend", 0.0),
        bend_tokens=at if kind == "bend" else 0.0,
        first_token_s=fit.cost.get("first_token", 0.0),
        points=tuple(points),
        misses=fit.misses[: len(points)],
        batch_tokens=_batches(points),
    )


def _batches(points: Sequence[LoadPoint]) -> tuple[int, int]:
    tokens = running(points) * np.array([1 + (point.draft_tokens or 0) for point in points])
    return max(1, round(float(tokens.min()))), max(1, round(float(tokens.max())))


def _first_token_rows(points: Sequence[LoadPoint]) -> tuple[Floats, Floats]:
    """Return prompt length and wait for the first token of the lightest load of each combination of lengths."""
    known = [point for point in points if point.ttft_s is not None and point.prompt_tokens is not None]
    prompts, outputs = (alike([getattr(point, name) for point in known]) for name in ("prompt_tokens", "output_tokens"))
    lightest: dict[tuple[int, int], float] = {}
    for key, point in zip(zip(prompts, outputs, strict=True), known, strict=True):
        lightest[key] = min(lightest.get(key, np.inf), point.concurrency)
    chosen = [
        point
        for key, point in zip(zip(prompts, outputs, strict=True), known, strict=True)
        if point.concurrency == lightest[key]
    ]
    return (
        np.array([point.prompt_tokens or 0.0 for point in chosen]),
        np.array([point.ttft_s or 0.0 for point in chosen]),
    )


def check_identifiable(
    points: Sequence[LoadPoint], *, request_share: float | None = None, draft_per_token: bool = False
) -> None:
    """Raise `ProfileError`, naming the measurement that would settle it, where the runs cannot carry a fit."""
    faults = [
        Fault(
            "speculation without an accepted length: a round's length and what it yields cannot be told apart; "
            "settle it "
            "with the engine's acceptance counters over this run, or give accepted_length",
            point.place or None,
        )
        for point in points
        if point.speculates and point.accepted_length is None
    ]
    faults += [
        Fault(
            "speculation without a draft length: how many tokens a round verifies is not known; give k",
            point.place or None,
        )
        for point in points
        if point.speculates and point.draft_tokens is None
    ]
    if faults:
        raise ProfileError(*faults)
    plain = sorted({point.concurrency for point in points if not point.speculates})
    drafted = sorted({point.concurrency for point in points if point.speculates})
    if not plain and drafted:
        raise ProfileError(
            Fault(
                "every run speculates: the time to draft is inside every round and cannot be taken out; settle it "
                "with runs "
                f"without speculation at the same concurrencies ({', '.join(f'{c:g}' for c in drafted)})"
            )
        )
    if len(plain) < MIN_LOADS:
        have = ", ".join(f"{c:g}" for c in plain) or "none"
        raise ProfileError(
            Fault(
                f"a law of step time needs runs without speculation at {MIN_LOADS} concurrencies or more (got "
                f"{have}): two give "
                "a level and a slope, the third says how wrong they are"
            )
        )
    if drafted:
        _check_drafting(points, request_share, draft_per_token, plain, drafted)


def _check_drafting(
    points: Sequence[LoadPoint],
    request_share: float | None,
    draft_per_token: bool,
    plain: list[float],
    drafted: list[float],
) -> None:
    if not set(plain) & set(drafted):
        raise ProfileError(
            Fault(
                "runs with and without speculation share no concurrency: "
                f"{', '.join(f'{c:g}' for c in drafted)} with, {', '.join(f'{c:g}' for c in plain)} without; one of "
                "each at the "
                "same load separates the time to draft from the step"
            )
        )
    lengths = sorted({point.draft_tokens for point in points if point.speculates and point.draft_tokens})
    if len(drafted) < 2:
        raise ProfileError(
            Fault(
                f"runs with speculation at one concurrency only ({drafted[0]:g}): what drafting costs at once and "
                "what it costs "
                "a request cannot be told apart; settle it with a second concurrency"
            )
        )
    if request_share is None and (len(lengths) < 2 or draft_per_token):
        why = (
            "each draft token is a pass of its own and a verified token too, so that"
            if draft_per_token
            else f"all speculative runs have k = {lengths[0]}, so that"
        )
        settle = (
            "a table of step time by batch tokens (--step-table) or of draft time by requests (--draft-table)"
            if draft_per_token
            else "the same concurrencies at a second k, a table of step time by batch tokens (--step-table) or of "
            "draft time by requests (--draft-table)"
        )
        raise ProfileError(
            Fault(
                f"{why} what a drafted request and what a verified token costs cannot be told apart; settle it with "
                f"{settle}, or assume how the slope over load divides (--request-share 0: all to tokens)"
            )
        )


def with_accepted_length(points: Sequence[LoadPoint], by_draft_tokens: Mapping[int, float]) -> list[LoadPoint]:
    """Give the speculative runs that lack one an accepted length, by their draft length."""
    return [
        replace(point, accepted_length=by_draft_tokens.get(point.draft_tokens))
        if point.accepted_length is None and point.draft_tokens is not None
        else point
        for point in points
    ]


def leave_out(points: Sequence[LoadPoint], **options: Any) -> Floats:
    """Return each run's relative error when its concurrency is left out of the fit, NaN where none can be made.

    ``options`` are those of `fit_closed_loop`. It is a prediction of that load from the others, no more.
    """
    errors = np.full(len(points), np.nan)
    observed = rounds_s(points)
    for load in sorted({point.concurrency for point in points}):
        out = np.array([point.concurrency == load for point in points])
        try:
            fit = fit_closed_loop([point for point in points if point.concurrency != load], **options)
        except ProfileError:
            continue
        # Without its wait for the first token, which is of the run that is to be predicted.
        unseen = [replace(point, ttft_s=None) for point in points]
        errors[out] = fit.predict_s(unseen)[out] / observed[out] - 1
    return errors
