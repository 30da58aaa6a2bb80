"""From requests one by one to the law of a step.

While N requests decode with C tokens in their caches, each receives a token every ``s = floor + batch_token N +
context_token C`` seconds, less the time that prefill takes: a request let in takes ``admission + prompt_token p``
seconds from all, just before its own first token. So a request of n output tokens sees::

    n - 1 = sum over the intervals of its life of (length - prefill in it) / s

which is exact but for the intervals' contexts, taken at their middle. An engine without speculation is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from profiles.errors import Fault, ProfileError
from profiles.fitting.law import COSTS, Law
from profiles.fitting.least_squares import SCATTER, Floats, fit_costs, gain, tell_apart
from profiles.measurements.points import LoggedRequest

#: Requests with fewer output tokens say little of a step: their ends weigh.
MIN_OUTPUT = 8
#: Requests that a fit needs.
MIN_REQUESTS = 20
#: `APART` of a log. Many requests, each with residuals under a per cent, tell apart what closed loops of a few runs
#: cannot; whether they do is asked of the residuals.
APART_IN_A_LOG = 0.005
#: F, by cost added, from which a fit with what hid in other costs is taken.
CLEARLY = 5.0

#: Relative change of anything at which the search for costs ends.
TO_THE_END = 1e-14


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLogFit(Law):
    """The law of a step; ``misses`` are of the tokens that a request should have got in its time, by request.

    ``requests``: the requests that were fitted, in order of arrival. ``until_s``: the end of what was looked at.
    """

    requests: tuple[LoggedRequest, ...]
    until_s: float


@dataclass(frozen=True, slots=True)
class _Lives:
    """Intervals between events, and which requests live through them.

    ``length_s``, ``decoding``, ``context``, ``prompt``, ``let_in``: by interval. ``lives``: 1 where a request decodes
    in an interval, ``[requests, intervals]``. ``tokens``: a request's output less the first.
    """

    length_s: Floats
    decoding: Floats
    context: Floats
    prompt: Floats
    let_in: Floats
    lives: Floats
    tokens: Floats


def fit_request_log(requests: Sequence[LoggedRequest], until_s: float | None = None) -> RequestLogFit:
    """Fit the law of a step to the requests that ended by ``until_s`` (default: all).

    What `tell_apart` leaves out for closed loops of a few runs comes in, cost by cost, where the residuals ask for it.
    Raises `ProfileError` where too few are left or the load never varied.
    """
    until = max(one.last_token_s for one in requests) if until_s is None else until_s
    ended = [one for one in requests if one.last_token_s <= until and one.output_tokens >= MIN_OUTPUT]
    if len(ended) < MIN_REQUESTS:
        raise ProfileError(
            Fault(
                f"{len(ended)} requests of {MIN_OUTPUT} tokens or more ended in time; a fit needs {MIN_REQUESTS}: "
                "log a "
                "longer run"
            )
        )
    lives = _lives(requests, ended, until)
    spent = lives.lives @ lives.length_s
    steps = lives.tokens / spent
    mean = {
        "floor": lives.tokens,
        "batch_token": lives.lives @ (lives.length_s * lives.decoding) * steps,
        "context_token": lives.lives @ (lives.length_s * lives.context) * steps,
        "prompt_token": lives.lives @ lives.prompt,
        "admission": lives.lives @ lives.let_in,
    }
    keep, inside = tell_apart(mean, spent)
    if "batch_token" not in keep:
        raise ProfileError(
            Fault("the number of requests decoding hardly varied: a level is known and no slope; log a run with a ramp")
        )
    best = _search(lives, mean, spent, keep)
    for name in tell_apart(mean, spent, APART_IN_A_LOG)[0]:
        if name not in best.cost_s:
            richer = _search(lives, mean, spent, [*best.cost_s, name])
            if gain(best.misses, richer.misses, len(richer.cost_s)) > CLEARLY:
                best = richer
                inside.pop(name)
    return RequestLogFit(
        cost_s=dict.fromkeys(COSTS, 0.0) | best.cost_s,
        error_s=dict.fromkeys(COSTS, 0.0) | best.error_s,
        inside=inside | {"request": ("batch_token",)},
        misses=best.misses,
        batch_tokens=(max(1, int(lives.decoding[lives.decoding > 0].min())), int(lives.decoding.max())),
        requests=tuple(ended),
        until_s=until,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """Costs that were searched for, their standard errors, and by request the tokens missed, as a share."""

    cost_s: dict[str, float]
    error_s: dict[str, float]
    misses: Floats


def _search(lives: _Lives, mean: dict[str, Floats], spent: Floats, keep: Sequence[str]) -> _Found:
    """Fit the costs ``keep``; ``mean``, ``spent``: what each request pays for and takes, in the mean of its steps."""
    # Means over time are not means over steps; they are where the search begins.
    guess = fit_costs(mean, spent, keep).cost
    start = np.array([max(guess[name], 1e-3 * spent.sum() / mean[name].sum()) for name in keep])

    a_step = {"floor": np.ones_like(lives.decoding), "batch_token": lives.decoding, "context_token": lives.context}
    on_top = {"prompt_token": lives.prompt, "admission": lives.let_in}

    def parts(cost: Floats) -> tuple[Floats, Floats]:
        """Return what a step takes, and the time left beside what prompts took, span by span."""
        step, left_s = np.zeros_like(lives.length_s), lives.length_s.copy()
        for name, price in zip(keep, cost, strict=True):
            if name in a_step:
                step += price * a_step[name]
            else:
                left_s -= price * on_top[name]
        return step, left_s

    def misses(times: Floats) -> Floats:
        step, left_s = parts(times * start)
        return np.asarray(lives.lives @ (left_s / step) / lives.tokens - 1)

    def slopes(times: Floats) -> Floats:
        step, left_s = parts(times * start)
        by_cost = [-left_s / step**2 * a_step[name] if name in a_step else -on_top[name] / step for name in keep]
        return np.asarray((lives.lives @ np.stack(by_cost, axis=1)) / lives.tokens[:, None] * start)

    # Costs, not their logarithms, since one may be 0; exact slopes, and no tolerance of its own. Else the search stops
    # up to 1e-4 short of the end, where is the processor's to say, and simulations differ by a request here and there.
    found = least_squares(
        misses,
        np.ones_like(start),
        slopes,
        loss="soft_l1",
        f_scale=SCATTER,
        bounds=(0.0, np.inf),
        method="dogbox",
        ftol=TO_THE_END,
        xtol=TO_THE_END,
        gtol=TO_THE_END,
    )
    cost = found.x * start
    # A cost that is no thousandth of all time is none.
    share = cost * np.array([mean[name].sum() / spent.sum() for name in keep])
    cost = np.where(share > 1e-3, cost, 0.0)
    errors = _errors(found.jac, found.fun) * start
    return _Found(
        dict(zip(keep, map(float, cost), strict=True)),
        dict(zip(keep, map(float, errors), strict=True)),
        misses(cost / start),
    )


def _lives(requests: Sequence[LoggedRequest], ended: Sequence[LoggedRequest], until_s: float) -> _Lives:
    first, last = (np.array([getattr(one, name) for one in requests]) for name in ("first_token_s", "last_token_s"))
    prompt = np.array([float(one.prompt_tokens) for one in requests])
    output = np.array([float(one.output_tokens) for one in requests])
    times = np.unique(np.concatenate([first, last]))
    times = times[times <= until_s]
    middle = (times[1:] + times[:-1]) / 2
    alive = (first[:, None] < middle) & (middle < last[:, None])
    progress = (middle - first[:, None]) / np.maximum(last - first, 1e-9)[:, None]
    place = np.searchsorted(times, first) - 1
    within = (place >= 0) & (place < middle.size)
    chosen = [index for index, one in enumerate(requests) if one in set(ended)]
    return _Lives(
        length_s=np.diff(times),
        decoding=alive.sum(axis=0).astype(np.float64),
        context=(alive * (prompt[:, None] + progress * output[:, None])).sum(axis=0),
        prompt=np.bincount(place[within], prompt[within], middle.size).astype(np.float64),
        let_in=np.bincount(place[within], minlength=middle.size).astype(np.float64),
        lives=alive[chosen].astype(np.float64),
        tokens=output[chosen] - 1,
    )


def _errors(jacobian: Floats, residuals: Floats) -> Floats:
    """Return standard errors of what was searched for, in its units."""
    left = max(residuals.size - jacobian.shape[1], 1)
    spread = np.diag(np.linalg.pinv(jacobian.T @ jacobian)) * float(residuals @ residuals) / left
    return np.asarray(np.sqrt(np.maximum(spread, 0.0)))
