"""V4-Flash and V4-Pro as the paper served them: MTP-1's telemetry, acceptance that others published.

Nothing here comes from DSpark's own curves in figures 7 and 8: those are what the profiles are to predict.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from scipy.optimize import least_squares

from profiles.recipes.b300 import fit_draft_line, flash_survival, read_draft_s, read_verify_s, slope_near_graph_limit_s
from profiles.recipes.confidence import ConfidenceFit, read_fit, spread_of, trained_head_of
from profiles.recipes.sources import B300, PRO_DSPARK, PRO_MTP, TELEMETRY, Floats, Shared, chance, cite, seconds
from profiles.schema import (
    DraftCost,
    Drafter,
    LawCurve,
    LinearPrefill,
    ParametricLaw,
    Profile,
    Provenance,
    Replica,
    SourcedCount,
    SourcedSeconds,
    StepTime,
    Survival,
)

Model = Literal["V4-Flash", "V4-Pro"]

#: Accepted length of MTP-1, which the paper does not give. Golden values of V4-Pro at k = 1: 1.79 and 1.92.
MTP_ACCEPTED_LENGTH = 1.85
#: Share of the step time's slope over load that is charged to requests rather than to batch tokens.
REQUEST_SHARE = 0.0

TELEMETRY_HARDWARE = "a GPU of DeepSeek's production fleet, type not published"


@dataclass(frozen=True, slots=True)
class StepLaw:
    """``step_s = floor_s + saturating_s (1 - exp(-2R / saturation_tokens)) + slope_s R`` at R requests a GPU.

    ``requests``: the telemetry's bins; ``rms``, ``worst``: relative residuals there.
    """

    floor_s: float
    saturating_s: float
    saturation_tokens: float
    slope_s: float
    requests: Floats
    rms: float = 0.0
    worst: float = 0.0

    def step_s(self, requests: Floats) -> Floats:
        """Return the seconds of an MTP-1 step."""
        saturated = self.saturating_s * -np.expm1(-2 * requests / self.saturation_tokens)
        return np.asarray(self.floor_s + saturated + self.slope_s * requests)

    @property
    def last_tokens(self) -> int:
        """Return the largest batch of the telemetry."""
        return int(2 * self.requests[-1])


def fit_step_law(shared: Shared, model: Model, mtp_accepted_length: float = MTP_ACCEPTED_LENGTH) -> StepLaw:
    """Fit the step law to the medians of MTP-1's telemetry: relative residuals, every bin alike."""
    requests, per_accepted_ms = shared.columns(
        TELEMETRY, "requests_per_gpu", "step_time_over_mtp_accepted_length_ms", target_model=model
    )
    step_s = per_accepted_ms * mtp_accepted_length / 1e3
    scale = np.array([step_s[0], step_s[0], 20.0, step_s[-1] / requests[-1]])

    def law(p: Floats) -> StepLaw:
        floor_s, saturating_s, saturation_tokens, slope_s = map(float, p * scale)
        return StepLaw(floor_s, saturating_s, saturation_tokens, slope_s, requests)

    found = least_squares(
        lambda p: law(p).step_s(requests) / step_s - 1,
        (0.9, 0.3, 1.0, 0.6),
        bounds=((0, 0, 0.05, 0), (3, 3, 20, 3)),
        xtol=1e-13,
        ftol=1e-13,
        gtol=1e-13,
    )
    best = law(found.x)
    return StepLaw(
        best.floor_s,
        best.saturating_s,
        best.saturation_tokens,
        best.slope_s,
        requests,
        rms=float(np.sqrt((found.fun**2).mean())),
        worst=float(np.abs(found.fun).max()),
    )


@dataclass(frozen=True, slots=True)
class Scaling:
    """How many times longer than 4 x B300 the paper's GPU takes to verify the same tokens.

    ``factor``: the median over the telemetry's bins from ``from_requests`` to ``to_requests``.
    """

    factor: float
    lowest: float
    highest: float
    from_requests: float
    to_requests: float


def scale_from_b300(shared: Shared, law: StepLaw) -> Scaling:
    """Compare the two steps at 2R tokens, for as many requests as the B300's draft time was measured."""
    draft_requests, _ = read_draft_s(shared)
    sizes, verify_s = read_verify_s(shared, "graph")
    requests = law.requests[law.requests <= draft_requests[-1]]
    ratios = law.step_s(requests) / verify_s[np.searchsorted(sizes, 2 * requests)]
    return Scaling(
        float(np.median(ratios)), float(ratios.min()), float(ratios.max()), float(requests[0]), float(requests[-1])
    )


def pro_survival(shared: Shared) -> Survival:
    """Return DSpark's survival for V4-Pro: the differences of the accepted lengths published by k."""
    by_k = shared.yaml(PRO_DSPARK)["deepseek-v4-pro-0813"]["thinking_on"]
    lengths = [1.0] + [float(by_k[k]) for k in range(1, 6)]
    return Survival(
        values=tuple(chance(b - a) for a, b in pairwise(lengths)),
        provenance=Provenance(
            origin="derived",
            source=cite(PRO_DSPARK),
            hardware="B300",
            note="differences of the mean accepted lengths 1.84, 2.51, 3.01, 3.36, 3.61 at k = 1..5. They are "
            "survival only if the k verified tokens are the first k of the same block of 5, as a block drafter's "
            "are. A later checkpoint than the paper's (deepseek-v4-pro-0813), coding prompts, thinking on, "
            "temperature 1, another run for each k",
        ),
    )


def build_serving(
    shared: Shared,
    model: Model,
    *,
    mtp_accepted_length: float = MTP_ACCEPTED_LENGTH,
    request_share: float = REQUEST_SHARE,
    draft_factor: float | None = None,
    survival: Survival | None = None,
    confidence: ConfidenceFit | None = None,
) -> Profile:
    """Build `paper/v4_flash` or `paper/v4_pro`; the arguments vary what is assumed or borrowed.

    Parameters
    ----------
    mtp_accepted_length : float, in (1, 2]
        Sets the level of the step time (telemetry gives step time over accepted length) and MTP-1's acceptance.
    request_share : float, in [0, 1]
        Share of the step time's slope over load that belongs to requests, not to batch tokens.
    draft_factor : float, optional
        DSpark's draft time over that of 4 x B300; by default the ratio of the verify times.
    survival, confidence : optional
        DSpark's survival by position; the spread and confidence quality of all drafters.
    """
    law = fit_step_law(shared, model, mtp_accepted_length)
    scaling = scale_from_b300(shared, law)
    confidence = confidence or read_fit(shared)
    if survival is None:
        survival = flash_survival(shared) if model == "V4-Flash" else pro_survival(shared)
    return Profile(
        format="dspark-profile/1",
        name=f"paper/{model.lower().replace('-', '_')}",
        description=f"DeepSeek {model} as the DSpark paper served it, one GPU's share of the fleet: step time from "
        "MTP-1's telemetry, acceptance as others published it; nothing from DSpark's own curves, which it is to "
        "predict.",
        step_time=StepTime(
            verify=_verify(law, mtp_accepted_length, request_share),
            per_request=_per_request(law, request_share) if request_share > 0 else None,
            prefill=_prefill(shared, law, scaling),
            draft={"dspark": _dspark_draft(shared, model, scaling, draft_factor), "mtp": _mtp_draft(law)},
        ),
        acceptance={
            "dspark": Drafter(
                kind="block",
                trained_length=len(survival.values),
                domains={
                    "any": ParametricLaw(
                        survival=survival,
                        spread=spread_of(confidence, f"{model}'s drafters"),
                        confidence=trained_head_of(confidence, len(survival.values), f"{model}'s drafters"),
                    )
                },
            ),
            "mtp": Drafter(
                kind="chain",
                trained_length=1,
                domains={
                    "any": ParametricLaw(
                        survival=_mtp_survival(model, mtp_accepted_length),
                        spread=spread_of(confidence, f"{model}'s drafters"),
                        confidence=trained_head_of(confidence, 1, f"{model}'s drafters"),
                    )
                },
            ),
        },
        replica=_replica(model),
    )


def _verify(law: StepLaw, mtp_accepted_length: float, request_share: float) -> LawCurve:
    return LawCurve(
        floor_s=seconds(law.floor_s),
        saturating_s=seconds(law.saturating_s),
        saturation=seconds(law.saturation_tokens),
        per_unit_s=seconds(law.slope_s * (1 - request_share) / 2),
        min_size=int(2 * law.requests[0]),
        max_size=law.last_tokens,
        beyond="extrapolate",
        provenance=Provenance(
            origin="fitted",
            source=cite(TELEMETRY),
            hardware=TELEMETRY_HARDWARE,
            note="a + b (1 - exp(-B/c)) + d R, with B = 2R, to the medians of MTP-1's step time over its accepted "
            f"length; relative residuals {law.rms:.1%} rms, {law.worst:.1%} worst. MTP's own drafting and whatever "
            "prefill and host work a step held are inside",
            reason=f"MTP-1's accepted length is not published: {mtp_accepted_length:g} is assumed (golden values of "
            f"V4-Pro at k = 1: 1.79 thinking on, 1.92 off, {cite(PRO_MTP)}) and the level goes with it. MTP-1 "
            "verifies two tokens a request throughout, so cost per token and cost per request cannot be told apart: "
            f"{1 - request_share:.0%} of the slope is charged to batch tokens. The step time of none (one token a "
            "request) is therefore this law's reading, not a measurement; so are full blocks at high load, past "
            f"{law.last_tokens} tokens (linear from there, and counted)",
        ),
    )


def _per_request(law: StepLaw, request_share: float) -> SourcedSeconds:
    return SourcedSeconds(
        seconds=seconds(law.slope_s * request_share),
        provenance=Provenance(
            origin="assumed",
            source=cite(TELEMETRY),
            reason="cost per request and cost per token cannot be told apart in MTP-1's telemetry; "
            f"{request_share:.0%} of the slope is charged to requests",
        ),
    )


def _prefill(shared: Shared, law: StepLaw, scaling: Scaling) -> LinearPrefill:
    slope = slope_near_graph_limit_s(shared)
    return LinearPrefill(
        floor_s=seconds(law.floor_s),
        per_token_s=seconds(slope * scaling.factor),
        provenance=Provenance(
            origin="assumed",
            source=cite(B300),
            reason="no prefill time is published, so this is an order of magnitude: a prompt token costs the slope "
            f"of the 4 x B300 verify table from 512 to 1,024 tokens ({slope * 1e6:.1f} us) times "
            f"{scaling.factor:.2f}, the ratio of the verify times; a step of prompts alone starts from the floor of "
            "the step law",
        ),
    )


def _dspark_draft(shared: Shared, model: Model, scaling: Scaling, draft_factor: float | None) -> DraftCost:
    floor, slope = fit_draft_line(shared)
    requests, _ = read_draft_s(shared)
    factor = scaling.factor if draft_factor is None else draft_factor
    measured = (
        f"draft time measured on 4 x B300, {floor * 1e3:.3f} ms + {slope * 1e3:.4f} ms a request (least squares, 1 to "
        f"{int(requests[-1])} requests), times {factor:.3f}"
    )
    ratio = (
        "as given"
        if draft_factor is not None
        else "the paper's GPU takes so many times longer to verify the same 2R tokens (median over "
        f"{scaling.from_requests:.0f} to {scaling.to_requests:.0f} requests; {scaling.lowest:.2f} to "
        f"{scaling.highest:.2f}, more at low load)"
    )
    own = model == "V4-Flash"
    guess = "the ratio of draft to verify time is assumed to carry over to the paper's GPU"
    guess += "" if own else f", and from V4-Flash, on which it was measured, to {model}"
    return DraftCost(
        per="round",
        curve=LawCurve(
            floor_s=seconds(floor * factor),
            per_unit_s=seconds(slope * factor),
            max_size=int(requests[-1]),
            beyond="extrapolate",
            provenance=Provenance(
                origin="derived" if own else "assumed",
                source=cite(B300, TELEMETRY),
                hardware="4 x B300 (TP4), scaled to the paper's GPU",
                reason=guess,
                note=f"{measured}: {ratio}",
            ),
        ),
    )


def _mtp_draft(law: StepLaw) -> DraftCost:
    return DraftCost(
        per="token",
        curve=LawCurve(
            floor_s=0.0,
            per_unit_s=0.0,
            max_size=int(law.requests[-1]),
            beyond="extrapolate",
            provenance=Provenance(
                origin="assumed",
                reason="MTP-1's draft pass is inside the step of the telemetry and cannot be taken out of it: it "
                "costs nothing more. The steps of none and dspark, which have no such pass, are too long by it",
            ),
        ),
    )


def _mtp_survival(model: Model, mtp_accepted_length: float) -> Survival:
    own = model == "V4-Pro"
    about = "under the paper's traffic no accepted length is published" if own else "none is published for V4-Flash"
    return Survival(
        values=(chance(mtp_accepted_length - 1),),
        provenance=Provenance(
            origin="assumed",
            source=cite(PRO_MTP),
            reason=f"{about}: {mtp_accepted_length:g} tokens a round is about the middle of V4-Pro's golden values "
            "at k = 1 (1.79 thinking on, 1.92 off); the level of the step time rests on the same number",
        ),
    )


def _replica(model: Model) -> Replica:
    kv_bytes, cache = KV[model]
    return Replica(
        gpus=SourcedCount(
            value=1,
            provenance=Provenance(
                origin="assumed",
                reason="telemetry counts requests and tokens per GPU and the fleet's layout is not published: a "
                "replica is one GPU's share",
            ),
        ),
        kv_bytes_per_token=SourcedCount(value=kv_bytes, provenance=Provenance(origin="assumed", reason=cache)),
        max_context_tokens=SourcedCount(
            value=1_048_576,
            provenance=Provenance(
                origin="assumed",
                reason="the public checkpoint takes 1,048,576 tokens; what the fleet allows is not published",
            ),
        ),
    )


#: KV bytes a token, with the reason: an estimate from the public description of the architecture.
KV: dict[Model, tuple[int, str]] = {
    "V4-Flash": (
        3_500,
        "the fleet's cache format is not published. The public description (43 layers, FP8 entries of 512 values, "
        "every second layer compressed 4x with an FP4 index, the others 128x) comes to about 3.4 kB a token, 7 % of "
        "V3.2's. The sliding window, about 3 MB a request whatever its length, is left out",
    ),
    "V4-Pro": (
        5_000,
        "the fleet's cache format is not published. The public description (61 layers, built as V4-Flash's) comes to "
        "about 5 kB a token, 10 % of V3.2's. The sliding window, about 5 MB a request whatever its length, is left "
        "out",
    ),
}
