"""V4-Flash on 4 x B300 under vLLM: the measured table, jagged as it is, with its graph limit and cliff."""

from __future__ import annotations

from typing import Literal

import numpy as np

from profiles.recipes.confidence import read_fit, spread_of, trained_head_of
from profiles.recipes.sources import B300, SURVIVAL, Floats, Shared, chance, cite, seconds
from profiles.schema import (
    DraftCost,
    Drafter,
    ParametricLaw,
    PrefillAsVerify,
    Profile,
    Provenance,
    Replica,
    Segment,
    SourcedCount,
    StepTime,
    Survival,
    TableCurve,
)

HARDWARE = "4 x B300, tensor parallel"


def read_verify_s(shared: Shared, mode: Literal["graph", "eager"]) -> tuple[Floats, Floats]:
    """Return batch tokens and seconds of the measured verify steps."""
    tokens, ms = shared.columns(B300, "size", "ms", kind=f"verify_{mode}_tokens")
    return tokens, ms / 1e3


def read_draft_s(shared: Shared) -> tuple[Floats, Floats]:
    """Return requests drafted and seconds of the measured draft passes."""
    requests, ms = shared.columns(B300, "size", "ms", kind="draft_requests")
    return requests, ms / 1e3


def fit_draft_line(shared: Shared) -> tuple[float, float]:
    """Return the line through the draft times: seconds at no request, seconds a request."""
    requests, draft_s = read_draft_s(shared)
    slope, floor = np.polyfit(requests, draft_s, 1)
    return float(floor), float(slope)


def slope_near_graph_limit_s(shared: Shared, from_tokens: int = 512) -> float:
    """Return seconds a token at the top of the graph sizes, where all experts are loaded: a least squares line."""
    tokens, verify_s = read_verify_s(shared, "graph")
    top = tokens >= from_tokens
    return float(np.polyfit(tokens[top], verify_s[top], 1)[0])


def flash_survival(shared: Shared) -> Survival:
    """Return DSpark's published survival for V4-Flash, a block of 5."""
    (survival,) = shared.columns(SURVIVAL, "prefix_survival", drafter="V4-Flash DSpark block 5")
    return Survival(
        values=tuple(chance(s) for s in survival),
        provenance=Provenance(
            origin="transcribed",
            source=cite(SURVIVAL),
            hardware="Ascend, W4A8",
            note="80 coding prompts; quantized, and code only: accepted length 3.94 here, 3.36 on mixed prompts "
            f"({cite('reference/engines/README.md')})",
        ),
    )


def build_b300(shared: Shared) -> Profile:
    """Build `engines/v4_flash_b300_tp4`."""
    fit = read_fit(shared)
    survival = flash_survival(shared)
    return Profile(
        format="dspark-profile/1",
        name="engines/v4_flash_b300_tp4",
        description="DeepSeek V4-Flash on 4 x B300 under vLLM: measured verify and draft times, jagged, with the "
        "CUDA graph limit at 1,024 tokens and the cliff behind it.",
        step_time=StepTime(
            verify=TableCurve(
                segments=(
                    _segment("round_up", *read_verify_s(shared, "graph")),
                    _segment("linear", *read_verify_s(shared, "eager")),
                ),
                beyond="refuse",
                provenance=_measured(
                    "median of 5 replays a size, not smoothed: 15 of 82 steps along the graph sizes go down. Batches "
                    "are padded to the next graph size up to 1,024 tokens; larger ones run eagerly, and up to 1,536 "
                    "tokens cost what 1,536 do. 8,192 tokens of context a request, so what context costs is not known"
                ),
            ),
            prefill=PrefillAsVerify(
                provenance=Provenance(
                    origin="assumed",
                    source=cite(B300),
                    reason="prefill was not measured; prompt tokens run through the same layers, and the eager rows "
                    "reach 16,384 tokens a step, so they are charged as batch tokens (eager steps carry host time: "
                    "short chunks may be dear)",
                )
            ),
            draft={
                "dspark": DraftCost(
                    per="round",
                    curve=TableCurve(
                        segments=(_segment("round_up", *read_draft_s(shared)),),
                        beyond="extrapolate",
                        provenance=_measured(
                            "by requests drafted, up to 256, padded to the next graph size; not smoothed"
                        ),
                    ),
                )
            },
        ),
        acceptance={
            "dspark": Drafter(
                kind="block",
                trained_length=len(survival.values),
                domains={
                    "any": ParametricLaw(
                        survival=survival,
                        spread=spread_of(fit, "V4-Flash's drafters"),
                        confidence=trained_head_of(fit, len(survival.values), "V4-Flash's drafters"),
                    )
                },
            )
        },
        replica=Replica(
            gpus=SourcedCount(value=4, provenance=_measured("tensor parallel over 4 GPUs")),
            kv_bytes_per_token=SourcedCount(
                value=3_500,
                provenance=Provenance(
                    origin="assumed",
                    reason="not in the measurement. The public description (43 layers, FP8 entries of 512 values, "
                    "every second layer compressed 4x with an FP4 index, the others 128x) comes to about 3.4 kB a "
                    "token. Tensor parallel GPUs each hold a copy: give the memory of one",
                ),
            ),
            max_context_tokens=SourcedCount(
                value=1_048_576,
                provenance=Provenance(
                    origin="assumed",
                    reason="the public checkpoint takes 1,048,576 tokens; the step times hold for 8,192 a request",
                ),
            ),
        ),
    )


def _segment(between: Literal["round_up", "linear"], sizes: Floats, times_s: Floats) -> Segment:
    return Segment(
        between=between, sizes=tuple(int(size) for size in sizes), seconds=tuple(seconds(time) for time in times_s)
    )


def _measured(note: str) -> Provenance:
    return Provenance(
        origin="transcribed",
        source=f"{cite(B300)} (figure of the vLLM blog post on adaptive verification, 2026-08-14)",
        hardware=HARDWARE,
        note=note,
    )
