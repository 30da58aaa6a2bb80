"""Qwen3-8B on an H20: verify and draft time taken apart from D-Cut's whole steps and the throughput of `none`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import lsq_linear

from profiles.recipes.sources import DCUT_STEPS, DCUT_THROUGHPUT, Floats, Shared, cite, seconds
from profiles.schema import (
    DraftCost,
    LawCurve,
    LinearPrefill,
    Profile,
    Provenance,
    Replica,
    Segment,
    SourcedCount,
    SourcedSeconds,
    StepTime,
    TableCurve,
)

HARDWARE = "1 x H20"
TARGET = "Qwen3-8B"
#: Sizes at which the verify time is fitted: flat up to 16 tokens (weights are read anyway), straight past 128.
KNOTS = np.array([16.0, 32.0, 64.0, 128.0, 1024.0])
FLAT_FROM = 4

LAYERS, KV_HEADS, HEAD_DIM, BYTES_PER_VALUE = 36, 8, 128, 2


@dataclass(frozen=True, slots=True)
class Split:
    """The steps taken apart: ``verify_s`` at `KNOTS`, ``request_s`` and ``draft_s`` for each request."""

    verify_s: Floats
    request_s: float
    draft_floor_s: float
    draft_s: float
    rms: float
    worst: float


def split_steps(shared: Shared) -> Split:
    """Fit ``verify(B) + request R [+ draft_floor + draft R]`` to both tables, relative residuals, nothing negative.

    A row of the step table drafts a block of 16 and verifies a share of it; a row of `none` takes R / throughput
    seconds and has B = R tokens. With both, cost per token, per request and per draft can be told apart.
    """
    requests, tokens, ms = shared.columns(DCUT_STEPS, "batch_requests", "batch_tokens", "step_ms", target=TARGET)
    alone, tokens_per_s = shared.columns(
        DCUT_THROUGHPUT, "batch_requests", "output_tokens_per_s", target=TARGET, method="none"
    )
    observed = np.concatenate([ms / 1e3, alone / tokens_per_s])
    count, batch = np.concatenate([requests, alone]), np.concatenate([tokens, alone])
    drafts = np.concatenate([np.ones_like(requests), np.zeros_like(alone)])
    hats = np.array([np.interp(batch, KNOTS, unit) for unit in np.eye(KNOTS.size)]).T
    terms = np.column_stack([hats, count, drafts, drafts * count])
    found = lsq_linear(terms / observed[:, None], np.ones_like(observed), bounds=(0, np.inf), tol=1e-12)
    misses = terms @ found.x / observed - 1
    *verify_s, request_s, draft_floor_s, draft_s = found.x
    return Split(
        np.array(verify_s),
        float(request_s),
        float(draft_floor_s) if draft_floor_s > 1e-7 else 0.0,
        float(draft_s),
        float(np.sqrt((misses**2).mean())),
        float(np.abs(misses).max()),
    )


def build_qwen3_8b_h20(shared: Shared) -> Profile:
    """Build `engines/qwen3_8b_h20`."""
    split = split_steps(shared)
    source = cite(DCUT_STEPS, DCUT_THROUGHPUT)
    fitted = (
        "verify(B) + a R + d R (drafting) to the 20 step rows and the 5 rows of none (seconds = requests / "
        f"throughput), all at temperature 0: relative residuals {split.rms:.1%} rms, {split.worst:.1%} worst"
    )
    per_token_s = float((split.verify_s[-1] - split.verify_s[-2]) / (KNOTS[-1] - KNOTS[-2]))
    return Profile(
        format="dspark-profile/1",
        name="engines/qwen3_8b_h20",
        description="Qwen3-8B (bf16) on one H20 under vLLM: a compute-poor GPU, where verified tokens cost almost in "
        "proportion. Step time only; take acceptance from paper/qwen3_8b.",
        step_time=StepTime(
            verify=TableCurve(
                segments=(
                    Segment(
                        between="linear",
                        sizes=(FLAT_FROM, *(int(knot) for knot in KNOTS)),
                        seconds=(seconds(split.verify_s[0]), *(seconds(time) for time in split.verify_s)),
                    ),
                ),
                beyond="extrapolate",
                smoothing="straight lines between 16, 32, 64, 128 and 1,024 tokens, flat below; fitted, not measured "
                "at those sizes",
                provenance=Provenance(origin="fitted", source=source, hardware=HARDWARE, note=fitted),
            ),
            per_request=SourcedSeconds(
                seconds=seconds(split.request_s),
                provenance=Provenance(
                    origin="fitted",
                    source=source,
                    hardware=HARDWARE,
                    note="what a request costs beside its tokens: attention over its context, host work, and (in the "
                    "rows of none) its share of prefill",
                ),
            ),
            prefill=LinearPrefill(
                floor_s=seconds(split.verify_s[0]),
                per_token_s=seconds(per_token_s),
                provenance=Provenance(
                    origin="assumed",
                    source=cite(DCUT_STEPS),
                    reason="prefill was not measured; a prompt token costs what a verified token costs from 128 to "
                    "1,024 tokens, where the GPU computes all the time, and a step of prompts alone starts from the "
                    "flat part of the verify time",
                ),
            ),
            draft={
                "dflash": _draft(
                    split,
                    Provenance(
                        origin="fitted",
                        source=source,
                        hardware=HARDWARE,
                        note=f"{fitted}. Drafting a block of 16 has no measurable floor: all of it grows with "
                        "requests, and it takes in whatever else a speculative round adds for each request. For "
                        "shorter blocks nothing was measured: the same is charged",
                    ),
                ),
                "dspark": _draft(
                    split,
                    Provenance(
                        origin="assumed",
                        source=cite("reference/dspark_paper/fig4_round_latency.csv"),
                        reason="DSpark was not measured on this machine: DFlash's time is used; in figure 4 a round "
                        "of DSpark takes 0.2 % (block of 3) to 1.3 % (15) longer than one of DFlash",
                    ),
                ),
            },
        ),
        replica=Replica(
            gpus=SourcedCount(
                value=1,
                provenance=Provenance(origin="transcribed", source=cite(DCUT_STEPS), note="tensor_parallel = 1"),
            ),
            kv_bytes_per_token=SourcedCount(
                value=2 * LAYERS * KV_HEADS * HEAD_DIM * BYTES_PER_VALUE,
                provenance=Provenance(
                    origin="derived",
                    source="public configuration of Qwen3-8B",
                    note=f"keys and values: 2 x {LAYERS} layers x {KV_HEADS} KV heads x {HEAD_DIM} x "
                    f"{BYTES_PER_VALUE} bytes (bf16)",
                ),
            ),
            max_context_tokens=SourcedCount(
                value=32_768,
                provenance=Provenance(
                    origin="transcribed",
                    source="public model card of Qwen3-8B",
                    note="native context length; the measurements used far shorter texts",
                ),
            ),
        ),
    )


def _draft(split: Split, provenance: Provenance) -> DraftCost:
    return DraftCost(
        per="round",
        curve=LawCurve(
            floor_s=seconds(split.draft_floor_s),
            per_unit_s=seconds(split.draft_s),
            min_size=FLAT_FROM,
            max_size=64,
            beyond="extrapolate",
            provenance=provenance,
        ),
    )
