"""V4-Flash and V4-Pro as the paper served them: MTP-1's telemetry, acceptance that others published.

Nothing here comes from DSpark's own curves in figures 7 and 8: those are what the profiles are to predict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import least_squares

from profiles.recipes.b300 import fit_draft_line, read_draft_s, read_verify_s, slope_near_graph_limit_s
from profiles.recipes.confidence import ConfidenceFit, fit_figure6, read_figure6
from profiles.recipes.sources import (
    B300,
    HISTOGRAM,
    PRINTED,
    PRO_DSPARK,
    PRO_MTP,
    RELIABILITY,
    SURVIVAL,
    TELEMETRY,
    Floats,
    Shared,
    chance,
    cite,
    seconds,
)
from profiles.schema import (
    ConfidenceQuality,
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
    Spread,
    StepTime,
    Survival,
)

Model = Literal["V4-Flash", "V4-Pro"]

#: Accepted length of MTP-1, which the paper does not give; the golden values for V4-Pro are 1.79 and 1.92.
MTP_ACCEPTED_LENGTH = 1.85
#: Share of the slope of the step time that is charged to requests rather than to batch tokens.
REQUEST_SHARE = 0.0

TELEMETRY_HARDWARE = "not published: a GPU of DeepSeek's production fleet"


@dataclass(frozen=True, slots=True)
class StepLaw:
    """``step_s = floor + saturating (1 - exp(-2R / saturation)) + slope R`` at R requests, and its residuals."""

    floor_s: float
    saturating_s: float
    saturation_tokens: float
    slope_s: float
    requests: Floats
    rms: float
    worst: float

    def step_s(self, requests: Floats) -> Floats:
        """Return the seconds of an MTP-1 step at a number of requests a GPU."""
        saturated = self.saturating_s * -np.expm1(-2 * requests / self.saturation_tokens)
        return np.asarray(self.floor_s + saturated + self.slope_s * requests)


def fit_step_law(shared: Shared, model: Model, mtp_accepted_length: float = MTP_ACCEPTED_LENGTH) -> StepLaw:
    """Fit the step law to the medians of MTP-1's telemetry, relative residuals, every bin alike."""
    requests, over_accepted_ms = shared.columns(
        TELEMETRY, "requests_per_gpu", "step_time_over_mtp_accepted_length_ms", target_model=model
    )
    step_s = over_accepted_ms * mtp_accepted_length / 1e3

    def law(p: Floats) -> StepLaw:
        return StepLaw(*(float(value) for value in p * scale), requests, 0.0, 0.0)

    scale = np.array([step_s[0], step_s[0], 20.0, step_s[-1] / requests[-1]])
    found = least_squares(
        lambda p: law(p).step_s(requests) / step_s - 1,
        (0.9, 0.3, 1.0, 0.6),
        bounds=((0, 0, 0.05, 0), (3, 3, 20, 3)),
        xtol=1e-13,
        ftol=1e-13,
        gtol=1e-13,
    )
    misses = found.fun
    best = law(found.x)
    return StepLaw(
        best.floor_s,
        best.saturating_s,
        best.saturation_tokens,
        best.slope_s,
        requests,
        float(np.sqrt((misses**2).mean())),
        float(abs(misses).max()),
    )


@dataclass(frozen=True, slots=True)
class Scaling:
    """How many times slower than on 4 x B300 the paper's GPU verifies the same tokens."""

    factor: float
    lowest: float
    highest: float
    at_requests: tuple[float, float]


def scale_from_b300(shared: Shared, law: StepLaw) -> Scaling:
    """Compare the paper's step with the B300's verify time at the same 2R tokens, over the telemetry's bins.

    Only up to the requests for which the B300 draft time was measured.
    """
    draft_requests, _ = read_draft_s(shared)
    sizes, verify_s = read_verify_s(shared, "graph")
    requests = law.requests[law.requests <= draft_requests[-1]]
    ratios = law.step_s(requests) / verify_s[np.searchsorted(sizes, 2 * requests)]
    return Scaling(
        float(np.median(ratios)),
        float(ratios.min()),
        float(ratios.max()),
        (float(requests[0]), float(requests[-1])),
    )


@dataclass(frozen=True, slots=True)
class Facts:
    """What differs between the two models besides their telemetry."""

    name: str
    description: str
    survival_source: str
    survival_note: str
    mtp_reason: str
    kv_bytes_per_token: int
    kv_reason: str
    draft_note: str


FACTS: dict[Model, Facts] = {
    "V4-Flash": Facts(
        name="paper/v4_flash",
        description="DeepSeek V4-Flash as the DSpark paper served it, a GPU's share: step time from MTP-1's telemetry, "
        "acceptance from independent measurements.",
        survival_source=cite(SURVIVAL),
        survival_note="V4-Flash DSpark block 5, Ascend W4A8, 80 coding prompts: other hardware, quantized, code only; "
        "accepted length 3.94 there, 3.36 on mixed prompts (../shared/reference/engines/README.md)",
        mtp_reason="no MTP-1 acceptance of V4-Flash is published; that of V4-Pro is used",
        kv_bytes_per_token=3_500,
        kv_reason="telemetry gives no cache size; the public description of V4-Flash (43 layers, FP8 entries of 512, every second "
        "layer compressed 4x with an FP4 index, the others 128x) comes to about 3.4 kB a token, 7 % of V3.2's; its sliding window "
        "(some 3 MB a request, whatever the length) is left out",
        draft_note="the ratio was measured on the same model",
    ),
    "V4-Pro": Facts(
        name="paper/v4_pro",
        description="DeepSeek V4-Pro as the DSpark paper served it, a GPU's share: step time from MTP-1's telemetry, "
        "acceptance from independent measurements.",
        survival_source=cite(PRO_DSPARK),
        survival_note="differences of the mean accepted lengths 1.84, 2.51, 3.01, 3.36, 3.61 at k = 1..5: survival only if k verified tokens "
        "are the first k of the same block of 5, which a block drafter's are; a later checkpoint (deepseek-v4-pro-0813), "
        "coding prompts, thinking on, each length from another run",
        mtp_reason="MTP-1's accepted length under the paper's traffic is not published",
        kv_bytes_per_token=5_000,
        kv_reason="telemetry gives no cache size; the public description of V4-Pro (61 layers built as V4-Flash's) comes to about 5 kB "
        "a token, 10 % of V3.2's; its sliding window (some 5 MB a request, whatever the length) is left out",
        draft_note="the ratio was measured on V4-Flash: that V4-Pro's drafter costs the same share of its verify step is a guess",
    ),
}


def read_dspark_survival(shared: Shared, model: Model) -> tuple[float, ...]:
    """Return the published survival of DSpark's block of 5, from sources independent of the paper."""
    if model == "V4-Flash":
        (survival,) = shared.columns(SURVIVAL, "prefix_survival", drafter="V4-Flash DSpark block 5")
        return tuple(chance(s) for s in survival)
    accepted = shared.yaml(PRO_DSPARK)["deepseek-v4-pro-0813"]["thinking_on"]
    lengths = [1.0] + [float(accepted[k]) for k in range(1, 6)]
    return tuple(chance(b - a) for a, b in zip(lengths, lengths[1:], strict=False))


def build_serving(
    shared: Shared,
    model: Model,
    *,
    mtp_accepted_length: float = MTP_ACCEPTED_LENGTH,
    request_share: float = REQUEST_SHARE,
    draft_factor: float | None = None,
    survival: tuple[float, ...] | None = None,
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
        Draft time over that of 4 x B300; by default the ratio of the verify times.
    survival, confidence : optional
        DSpark's survival by position, and the spread and confidence quality of all drafters.
    """
    facts = FACTS[model]
    law = fit_step_law(shared, model, mtp_accepted_length)
    scaling = scale_from_b300(shared, law)
    factor = scaling.factor if draft_factor is None else draft_factor
    confidence = confidence or fit_figure6(read_figure6(shared))
    survival = survival or read_dspark_survival(shared, model)
    return Profile(
        format="dspark-profile/1",
        name=facts.name,
        description=facts.description,
        step_time=StepTime(
            verify=LawCurve(
                floor_s=seconds(law.floor_s),
                saturating_s=seconds(law.saturating_s),
                saturation=seconds(law.saturation_tokens),
                per_unit_s=seconds(law.slope_s * (1 - request_share) / 2),
                min_size=int(2 * law.requests[0]),
                max_size=int(2 * law.requests[-1]),
                beyond="extrapolate",
                provenance=Provenance(
                    origin="fitted",
                    source=cite(TELEMETRY),
                    hardware=TELEMETRY_HARDWARE,
                    note=f"a + b (1 - exp(-B/c)) + d R with B = 2R to the medians of MTP-1's step time, times an assumed accepted length of "
                    f"{mtp_accepted_length:g} (golden values for V4-Pro at k = 1: 1.79 thinking on, 1.92 off, {cite(PRO_MTP)}); relative residuals "
                    f"rms {law.rms:.1%}, worst {law.worst:.1%}. MTP-1 verifies two tokens a request throughout, so cost per token and cost per request "
                    f"cannot be told apart: {1 - request_share:.0%} of the slope is charged to batch tokens. MTP's own drafting, and any prefill "
                    f"or host work in a step, is inside. What none costs (one token a request) is therefore this law's reading, not a measurement; "
                    f"so is a full block at high load, beyond {int(2 * law.requests[-1])} tokens (linear from there, and counted)",
                ),
            ),
            per_request=None
            if request_share == 0
            else SourcedSeconds(
                seconds=seconds(law.slope_s * request_share),
                provenance=Provenance(
                    origin="assumed",
                    source=cite(TELEMETRY),
                    reason="cost per request and per token cannot be told apart in MTP-1's telemetry; "
                    f"{request_share:.0%} of the slope is charged to requests",
                ),
            ),
            prefill=_prefill(shared, law, scaling),
            draft={
                "dspark": _dspark_draft(shared, facts, scaling, factor),
                "mtp": DraftCost(
                    per="token",
                    curve=LawCurve(
                        floor_s=0.0,
                        per_unit_s=0.0,
                        max_size=int(law.requests[-1]),
                        beyond="extrapolate",
                        provenance=Provenance(
                            origin="assumed",
                            reason="MTP-1's draft pass is inside the measured step and cannot be separated from it; for longer chains of "
                            "MTP this is too cheap",
                        ),
                    ),
                ),
            },
        ),
        acceptance={
            "dspark": Drafter(
                kind="block",
                trained_length=len(survival),
                domains={
                    "any": ParametricLaw(
                        survival=Survival(
                            values=survival,
                            provenance=Provenance(
                                origin="transcribed" if model == "V4-Flash" else "derived",
                                source=facts.survival_source,
                                note=facts.survival_note,
                            ),
                        ),
                        spread=_spread(confidence),
                        confidence=_confidence(confidence, len(survival)),
                    )
                },
            ),
            "mtp": Drafter(
                kind="chain",
                trained_length=1,
                domains={
                    "any": ParametricLaw(
                        survival=Survival(
                            values=(chance(mtp_accepted_length - 1),),
                            provenance=Provenance(
                                origin="assumed",
                                source=cite(PRO_MTP),
                                reason=f"{facts.mtp_reason}: accepted length {mtp_accepted_length:g}, about the middle of the golden values "
                                "of V4-Pro at k = 1 (1.79 thinking on, 1.92 off); the step time rests on the same number",
                            ),
                        ),
                        spread=_spread(confidence),
                        confidence=_confidence(confidence, 1),
                    )
                },
            ),
        },
        replica=Replica(
            gpus=SourcedCount(
                value=1,
                provenance=Provenance(
                    origin="assumed",
                    reason="telemetry counts requests and tokens per GPU and the layout of the fleet is not published: "
                    "a replica is one GPU's share of it",
                ),
            ),
            kv_bytes_per_token=SourcedCount(
                value=facts.kv_bytes_per_token, provenance=Provenance(origin="assumed", reason=facts.kv_reason)
            ),
            max_context_tokens=SourcedCount(
                value=1_048_576,
                provenance=Provenance(
                    origin="assumed",
                    reason="the public checkpoint takes 1M tokens; what the fleet allows is not published",
                ),
            ),
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
            reason="no prefill time is published: an order of magnitude only. A prompt token is given the slope of the 4 x B300 verify table from "
            f"512 to 1,024 tokens ({slope * 1e6:.1f} us) times {scaling.factor:.2f}, the ratio of the verify times; a step of prompts alone starts "
            "from the floor of the step law",
        ),
    )


def _dspark_draft(shared: Shared, facts: Facts, scaling: Scaling, factor: float) -> DraftCost:
    floor, slope = fit_draft_line(shared)
    requests, _ = read_draft_s(shared)
    low, high = scaling.at_requests
    return DraftCost(
        per="round",
        curve=LawCurve(
            floor_s=seconds(floor * factor),
            per_unit_s=seconds(slope * factor),
            max_size=int(requests[-1]),
            beyond="extrapolate",
            provenance=Provenance(
                origin="derived",
                source=cite(B300, TELEMETRY),
                hardware="4 x B300 (TP4), scaled to the paper's GPU",
                note=f"the draft time measured on 4 x B300, {floor * 1e3:.3f} ms + {slope * 1e3:.4f} ms a request (least squares over 1 to "
                f"{int(requests[-1])} requests), times {factor:.3f}: so many times longer verifies the paper's GPU the same 2R tokens (median over "
                f"{low:.0f} to {high:.0f} requests; {scaling.lowest:.2f} to {scaling.highest:.2f}, falling with load). {facts.draft_note}",
            ),
        ),
    )


def _spread(confidence: ConfidenceFit) -> Spread:
    return Spread(
        request_sd=confidence.request_sd,
        token_sd=confidence.token_sd,
        provenance=Provenance(
            origin="assumed",
            source=cite(PRINTED, RELIABILITY, HISTOGRAM),
            reason="no spread of these models is published: that of Qwen3-4B on Alpaca (figure 6) is used. Fitted there to the printed AUCs "
            ".818 .812 .864 .907 at positions 1, 3, 5, 7 (model "
            + " ".join(f"{a:.3f}"[1:] for a in confidence.model_auc)
            + "); what a block shares is taken to be the request's, though it may be a stretch of its text",
        ),
    )


def _confidence(confidence: ConfidenceFit, length: int) -> ConfidenceQuality:
    return ConfidenceQuality(
        noise_sd=0.0,
        raw_temperature=confidence.raw_temperature[:length],
        provenance=Provenance(
            origin="assumed",
            source=cite(RELIABILITY, HISTOGRAM),
            reason="no confidence of these models is published: that of Qwen3-4B on Alpaca before calibration (figure 6) is used, and for MTP too. "
            "Noise that is independent by token would look like chance itself: it is not identifiable and set to 0",
        ),
    )
