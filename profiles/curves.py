"""Step time as arrays: what a step costs at every batch, and where that was not measured.

Everything a profile says is evaluated once, at whole sizes, into read-only arrays; the step loop only looks up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from profiles.errors import Fault, ProfileError
from profiles.schema import Curve, LawCurve, LinearPrefill, PrefillAsVerify, RowsPrefill, StepTime, TableCurve

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
#: Where a profile has no table of rows.
NO_ROWS: Floats = np.empty(0)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A curve at sizes 0, 1, ..., n.

    ``seconds[0]`` is 0: no work, no time. ``known_from`` and ``known_to`` bound the sizes that the
    profile knows; outside them the values are extrapolated (only where the profile allows it).
    """

    seconds: Floats
    known_from: int
    known_to: int


def evaluate(curve: Curve, max_size: int, what: str) -> Evaluated:
    """Evaluate ``curve`` at every size up to ``max_size``.

    Raises `ProfileError` where ``max_size`` lies beyond what was measured and the profile refuses to
    extrapolate. Below the smallest known size, the smallest known value holds: a step has a floor.
    """
    sizes = np.arange(max_size + 1, dtype=np.float64)
    first, last = known_range(curve)
    if max_size > last and curve.beyond == "refuse":
        raise ProfileError(
            Fault(f"{what} is known up to {last}; {max_size} was asked for and the profile does not extrapolate")
        )
    if isinstance(curve, LawCurve):
        at = np.clip(sizes, first, last)
        seconds = curve.floor_s + curve.saturating_s * -np.expm1(-at / curve.saturation) + curve.per_unit_s * at
        # Linear beyond the fitted range: the slope of the law at its end.
        slope = curve.per_unit_s + curve.saturating_s / curve.saturation * np.exp(-last / curve.saturation)
    else:
        seconds, slope = _evaluate_table(curve, sizes)
    seconds = seconds + slope * np.maximum(sizes - last, 0.0)
    seconds[0] = 0.0
    seconds.setflags(write=False)
    return Evaluated(seconds, first, last)


def known_range(curve: Curve) -> tuple[int, int]:
    """Return the smallest and the largest size that a curve was measured or fitted at."""
    if isinstance(curve, LawCurve):
        return curve.min_size, curve.max_size
    return curve.segments[0].sizes[0], curve.segments[-1].sizes[-1]


def _evaluate_table(curve: TableCurve, sizes: Floats) -> tuple[Floats, float]:
    out = np.empty_like(sizes)
    start = -1.0
    for segment in curve.segments:
        known, seconds = np.array(segment.sizes, np.float64), np.array(segment.seconds)
        here = (sizes > start) & (sizes <= known[-1])
        if segment.between == "round_up":
            out[here] = seconds[np.searchsorted(known, sizes[here])]
        else:
            out[here] = np.interp(sizes[here], known, seconds)
        start = known[-1]
    out[sizes > start] = seconds[-1]
    # Linear beyond the last point: the slope over the last segment, never downwards.
    slope = (seconds[-1] - seconds[0]) / (known[-1] - known[0]) if known.size > 1 else 0.0
    return out, max(float(slope), 0.0)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, as arrays and coefficients.

    A step that decodes ``r`` requests with ``b`` batch tokens (each request's bonus and its verified
    draft tokens), ``c`` tokens in their caches and ``p`` prompt tokens, with the beginnings of ``a`` prompts, takes ::

        overhead_s + draft_s[r] + verify_s[b + p'] + per_request_s r + per_context_token_s c + prefill

    where prompts count as batch tokens (``p' = p``) or not (``p' = 0``), and add ``prefill_request_s a`` and either
    ``prefill_token_s p`` or, where there is a table of rows, ``rows(b + p) - rows(b)``; plus ``prefill_floor_s`` in a
    step without decoding, ``prefill_beside_s`` in one that decodes. ``prefill_rows_s``: that table at 0, 1, ... rows,
    beyond which each adds ``prefill_token_s``; empty where there is none. What prompts cost a drafter is part of these.
    """

    verify_s: Floats
    known_from: int
    known_to: int
    per_request_s: float
    per_context_token_s: float
    overhead_s: float
    prefill_as_verify: bool
    prefill_floor_s: float
    prefill_rows_s: Floats
    prefill_token_s: float
    prefill_request_s: float
    prefill_beside_s: float = 0.0

    def is_outside(self, batch_tokens: int, prompt_tokens: int) -> bool:
        """Return whether a step is of sizes that the profile does not know."""
        size = batch_tokens + (prompt_tokens if self.prefill_as_verify else 0)
        past_rows = prompt_tokens > 0 and 0 < self.prefill_rows_s.size <= batch_tokens + prompt_tokens
        return size > self.known_to or 0 < size < self.known_from or past_rows

    def prompts_s(self, batch_tokens: int | Ints, prompt_tokens: int, admitted: int) -> Floats:
        """Return the seconds that prompts add to passes of ``batch_tokens`` verified tokens, but for being such.

        ``admitted``: requests whose prompt begins in the step.
        """
        batch = np.asarray(batch_tokens)
        if prompt_tokens == 0:
            return np.zeros(batch.shape)
        seconds = self.prefill_request_s * admitted + np.where(batch == 0, self.prefill_floor_s, self.prefill_beside_s)
        if self.prefill_rows_s.size == 0:
            return seconds + self.prefill_token_s * prompt_tokens
        return seconds + (self._rows_s(batch + prompt_tokens) - self._rows_s(batch))

    def _rows_s(self, rows: Ints) -> Floats:
        last = self.prefill_rows_s.size - 1
        return self.prefill_rows_s[np.minimum(rows, last)] + self.prefill_token_s * np.maximum(rows - last, 0)

    def target_s(
        self, requests: int, batch_tokens: int, context_tokens: int, prefill_tokens: int, admitted: int = 0
    ) -> float:
        """Return the seconds of a step without its draft time; all sizes in whole tokens.

        ``admitted``: requests whose prompt begins in this step.
        """
        seconds = self.overhead_s + self.per_request_s * requests + self.per_context_token_s * context_tokens
        seconds += float(self.verify_s[batch_tokens + (prefill_tokens if self.prefill_as_verify else 0)])
        return seconds + float(self.prompts_s(batch_tokens, prefill_tokens, admitted))


def step_cost(step_time: StepTime, max_batch_tokens: int, drafter: str | None = None) -> StepCost:
    """Evaluate a profile's step time up to a batch of ``max_batch_tokens``; raises `ProfileError`.

    ``drafter``: who takes prompts in as well.
    """
    verify = evaluate(step_time.verify, max_batch_tokens, "step_time.verify (batch tokens)")
    prefill = step_time.prefill
    floor_s = token_s = request_s = beside_s = 0.0
    rows_s = NO_ROWS
    if isinstance(prefill, LinearPrefill):
        floor_s, token_s, request_s = prefill.floor_s, prefill.per_token_s, prefill.per_request_s or 0.0
    elif isinstance(prefill, RowsPrefill):
        floor_s, beside_s = prefill.floor_s, prefill.beside_s
        token_s = prefill.seconds[-1] / prefill.sizes[-1]
        rows_s = np.interp(np.arange(prefill.sizes[-1] + 1), (0, *prefill.sizes), (0.0, *prefill.seconds))
    draft = step_time.draft.get(drafter) if drafter is not None else None
    if draft is not None and (own := draft.prefill) is not None:
        floor_s, token_s = floor_s + own.floor_s, token_s + own.per_token_s
        request_s += own.per_request_s or 0.0
        rows_s = rows_s + own.per_token_s * np.arange(rows_s.size)
    rows_s.setflags(write=False)
    return StepCost(
        verify_s=verify.seconds,
        known_from=verify.known_from,
        known_to=verify.known_to,
        per_request_s=step_time.per_request.seconds if step_time.per_request else 0.0,
        per_context_token_s=step_time.per_context_token.seconds if step_time.per_context_token else 0.0,
        overhead_s=step_time.overhead.seconds if step_time.overhead else 0.0,
        prefill_as_verify=isinstance(prefill, PrefillAsVerify),
        prefill_floor_s=floor_s,
        prefill_rows_s=rows_s,
        prefill_token_s=token_s,
        prefill_request_s=request_s,
        prefill_beside_s=beside_s,
    )


def draft_cost(step_time: StepTime, drafter: str, max_requests: int) -> tuple[Evaluated, bool]:
    """Return seconds of drafting by requests, and whether they are for each draft token (a chain).

    Raises `ProfileError` where the profile has no cost for the drafter.
    """
    if drafter not in step_time.draft:
        known = ", ".join(step_time.draft) or "none"
        raise ProfileError(Fault(f"no draft cost for drafter '{drafter}'; known: {known}", key="step_time.draft"))
    cost = step_time.draft[drafter]
    return evaluate(cost.curve, max_requests, f"step_time.draft.{drafter} (requests)"), cost.per == "token"
