"""NVIDIA's predicted decode steps as profiles: rest and attention apart, by tokens and by context.

A step that verifies k + 1 tokens a request reads each request's cache once. What its attention then costs was not
measured: not more than if every token were a request of its own, not less than if the tokens past the first were free.
Both ends are kept, as two profiles; at one token a request and `CONTEXT` tokens of context they agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.optimize import lsq_linear

from profiles.recipes.b300 import fit_draft_line, read_verify_s
from profiles.recipes.sources import B300, Floats, Shared, cite, seconds
from profiles.schema import (
    DraftCost,
    LawCurve,
    PrefillAsVerify,
    Profile,
    Provenance,
    Replica,
    Segment,
    SourcedCount,
    SourcedSeconds,
    StepTime,
    TableCurve,
)

STEPS = "reference/aic/decode_step_split.csv"
#: Machines that the reference data lack, by `profiles.recipes.aiconfigurator`.
EXTRA_STEPS = Path(__file__).with_name("aic_decode_steps.csv")
PACKAGE = "aiconfigurator-core 0.12.0"
#: Tokens in a request's cache at which the upper end holds.
CONTEXT = 4096
#: Contexts that the attention law is fitted to: beyond them the kernel tables are extrapolations of their own.
CONTEXTS = (512, 16384)

End = Literal["lower", "upper"]


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a system: which rows of the table, and what one replica of it is.

    ``gpus``: of the replica. Where attention is data parallel the rows are of one GPU's share of an engine, and so is
    the replica. ``kv_bytes_per_token`` with its reason. ``in_shared``: the rows are in the reference data, not in
    `EXTRA_STEPS`.
    """

    model: str
    system: str
    backend: str
    parallel: str
    gpus: int
    kv_bytes_per_token: int
    kv_reason: str
    max_context_tokens: int
    in_shared: bool = True

    @property
    def hardware(self) -> str:
        """Return the machine in words."""
        share = "a GPU's share of 8 x" if "attention_dp_size=8" in self.parallel else f"{self.gpus} x"
        return (
            f"{share} {self.system.removesuffix('_sxm').upper()} ({self.parallel.replace(';', ', ')}), {self.backend}"
        )


def _qwen(model: str, system: str, backend: str, layers: int) -> Machine:
    bytes_ = 2 * layers * 8 * 128 * 2
    reason = f"keys and values: 2 x {layers} layers x 8 KV heads x 128 x 2 bytes (bf16), of the public configuration"
    return Machine(model, system, backend, "tp_size=1", 1, bytes_, reason, 32_768)


_EP8 = "tp_size=1;attention_dp_size=8;moe_tp_size=1;moe_ep_size=8"
_MLA = (
    "61 layers x (512 + 64) values x 2 bytes, of the public configuration; every GPU holds the caches of its requests"
)
_V4 = "an estimate from the public description of the architecture, as in paper/"

MACHINES: dict[str, Machine] = {
    "qwen3_8b_h100": _qwen("Qwen/Qwen3-8B", "h100_sxm", "vllm", 36),
    "qwen3_8b_h200": _qwen("Qwen/Qwen3-8B", "h200_sxm", "vllm", 36),
    "qwen3_8b_b200": _qwen("Qwen/Qwen3-8B", "b200_sxm", "vllm", 36),
    "qwen3_32b_fp8_h200": _qwen("Qwen/Qwen3-32B-FP8", "h200_sxm", "sglang", 64),
    "deepseek_v3_h200_tp8": Machine(
        "deepseek-ai/DeepSeek-V3",
        "h200_sxm",
        "sglang",
        "tp_size=8;moe_tp_size=1;moe_ep_size=8",
        8,
        70_272,
        _MLA,
        163_840,
    ),
    "deepseek_v3_h200_dp8": Machine("deepseek-ai/DeepSeek-V3", "h200_sxm", "sglang", _EP8, 1, 70_272, _MLA, 163_840),
    "v4_flash_h200_dp8": Machine(
        "sgl-project/DeepSeek-V4-Flash-FP8", "h200_sxm", "sglang", _EP8, 1, 3_500, _V4, 1_048_576
    ),
    "v4_pro_h200_dp8": Machine("sgl-project/DeepSeek-V4-Pro-FP8", "h200_sxm", "sglang", _EP8, 1, 5_000, _V4, 1_048_576),
}


MACHINES |= {
    name: replace(MACHINES[like], system=system, in_shared=False)
    for name, like, system in (
        ("qwen3_32b_fp8_h100", "qwen3_32b_fp8_h200", "h100_sxm"),
        ("qwen3_32b_fp8_b200", "qwen3_32b_fp8_h200", "b200_sxm"),
        ("deepseek_v3_b200_tp8", "deepseek_v3_h200_tp8", "b200_sxm"),
        ("deepseek_v3_b200_dp8", "deepseek_v3_h200_dp8", "b200_sxm"),
        ("v4_flash_h100_dp8", "v4_flash_h200_dp8", "h100_sxm"),
        ("v4_flash_b200_dp8", "v4_flash_h200_dp8", "b200_sxm"),
        ("v4_pro_b200_dp8", "v4_pro_h200_dp8", "b200_sxm"),
    )
}


@dataclass(frozen=True, slots=True)
class Steps:
    """Predicted decode steps: ``rest_s`` by ``tokens``, ``attention_s [tokens, contexts]``."""

    tokens: Floats
    contexts: Floats
    rest_s: Floats
    attention_s: Floats


@dataclass(frozen=True, slots=True)
class AttentionLaw:
    """``attention_s = floor_s + request_s R + context_s R c`` at R requests of c tokens in the cache.

    ``rms``, ``worst``: relative residuals of the whole step, attention and rest, at one token a request.
    """

    floor_s: float
    request_s: float
    context_s: float
    rms: float
    worst: float


def read_steps(shared: Shared, machine: Machine) -> Steps:
    """Read the rows of a machine."""
    tokens, contexts, rest, attention = (shared if machine.in_shared else Shared(EXTRA_STEPS.parent)).columns(
        STEPS if machine.in_shared else EXTRA_STEPS.name,
        "tokens_per_rank",
        "context",
        "rest_ms",
        "attn_ms",
        model=machine.model,
        system=machine.system,
        backend=machine.backend,
        parallel=machine.parallel,
    )
    return steps_of(tokens, contexts, rest / 1e3, attention / 1e3)


def steps_of(tokens: Floats, contexts: Floats, rest_s: Floats, attention_s: Floats) -> Steps:
    """Arrange rows by tokens and context; every pair must be there once."""
    sizes, lengths = np.unique(tokens), np.unique(contexts)
    place = np.searchsorted(sizes, tokens), np.searchsorted(lengths, contexts)
    table = np.full((2, sizes.size, lengths.size), np.nan)
    table[0][place], table[1][place] = rest_s, attention_s
    assert not np.isnan(table).any(), "a pair of tokens and context is missing"
    return Steps(sizes, lengths, table[0][:, 0], table[1])


def fit_attention(steps: Steps) -> AttentionLaw:
    """Fit the attention to residuals relative to the whole step, nothing negative."""
    tokens, contexts = np.meshgrid(steps.tokens, steps.contexts, indexing="ij")
    inside = (contexts >= CONTEXTS[0]) & (contexts <= CONTEXTS[1])
    whole = (steps.rest_s[:, None] + steps.attention_s)[inside]
    terms = np.stack([np.ones_like(tokens), tokens, tokens * contexts], axis=-1)[inside]
    found = lsq_linear(terms / whole[:, None], steps.attention_s[inside] / whole, bounds=(0, np.inf), tol=1e-12)
    misses = (terms @ found.x - steps.attention_s[inside]) / whole
    floor, request, context = map(float, found.x)
    return AttentionLaw(floor, request, context, float(np.sqrt((misses**2).mean())), float(np.abs(misses).max()))


def build_aic(shared: Shared, name: str, end: End) -> Profile:
    """Build `aic/<name>_<end>` from the reference data."""
    machine = MACHINES[name]
    source = cite(STEPS) if machine.in_shared else f"profiles/recipes/{EXTRA_STEPS.name}"
    return profile_of(f"aic/{name}_{end}", machine, read_steps(shared, machine), end, source, scale_b300(shared))


@dataclass(frozen=True, slots=True)
class Lender:
    """The one engine whose draft time was measured: verify time by tokens, and the line through its draft time."""

    tokens: Floats
    verify_s: Floats
    draft_floor_s: float
    draft_request_s: float


def scale_b300(shared: Shared) -> Lender:
    """Read the B300's verify and draft times."""
    tokens, verify_s = read_verify_s(shared, "graph")
    floor, slope = fit_draft_line(shared)
    return Lender(tokens, verify_s, floor, slope)


def profile_of(name: str, machine: Machine, steps: Steps, end: End, source: str, lender: Lender) -> Profile:
    """Return one end of a machine's decode steps as a profile."""
    law = fit_attention(steps)
    predicted = Provenance(
        origin="derived",
        source=f"{source} ({PACKAGE})",
        hardware=machine.hardware,
        note="predicted from kernel times that NVIDIA measured, one operation at a time; no whole step was measured. "
        "The package's own accuracy on H200, decode alone: within 12 % for two models, SGLang's table of DeepSeek-V3 "
        "1.2 to 2.15 times too high. Where a system lacks a kernel's times, those of another backend stand in. "
        "Whether weights and caches fit the memory was not looked at",
    )
    fit = (
        f"attention as floor + a R + c R context, contexts {CONTEXTS[0]:,} to {CONTEXTS[1]:,}: residuals "
        f"{law.rms:.1%} rms, "
        f"{law.worst:.1%} worst of the whole step at one token a request"
    )
    fitted = predicted.model_copy(update={"origin": "fitted", "note": f"{fit}; {predicted.note}"})
    each_once = (
        "lower end: a request's cache is read once for all its tokens, and tokens past the first add no attention"
        if end == "lower"
        else f"upper end: every verified token costs the attention of a request of {CONTEXT:,} tokens in the "
        "cache, whatever "
        "the true context: take it where contexts are about so long"
    )
    verify_s = steps.rest_s
    if end == "upper":
        verify_s = verify_s + steps.attention_s[:, int(np.flatnonzero(steps.contexts == CONTEXT)[0])]
    return Profile(
        format="dspark-profile/1",
        name=name,
        description=f"{machine.model} on {machine.hardware}: decode steps predicted from NVIDIA's kernel tables, "
        f"{end} end "
        "of what verifying costs. Step time only; take acceptance from another profile.",
        step_time=StepTime(
            verify=TableCurve(
                segments=(
                    Segment(
                        between="linear",
                        sizes=tuple(int(size) for size in steps.tokens),
                        seconds=tuple(seconds(time) for time in verify_s),
                    ),
                ),
                beyond="extrapolate",
                provenance=predicted.model_copy(update={"note": f"{each_once}; as written; {predicted.note}"}),
            ),
            per_request=_some(law.request_s, fitted) if end == "lower" else None,
            per_context_token=_some(law.context_s, fitted) if end == "lower" else None,
            overhead=_some(law.floor_s, fitted) if end == "lower" else None,
            prefill=PrefillAsVerify(
                provenance=Provenance(
                    origin="assumed",
                    source=source,
                    reason="the table is of decoding; prompt tokens run through the same layers and are charged as "
                    "batch "
                    "tokens, beyond 2,048 on a straight line",
                )
            ),
            draft={"dspark": _draft(steps, lender, source)},
        ),
        replica=_replica(machine),
    )


def _some(value: float, provenance: Provenance) -> SourcedSeconds | None:
    return SourcedSeconds(seconds=seconds(value), provenance=provenance) if value > 0 else None


def _draft(steps: Steps, lender: Lender, source: str) -> DraftCost:
    sizes = 2.0 ** np.arange(9)
    ratios = np.interp(sizes, steps.tokens, steps.rest_s) / lender.verify_s[np.searchsorted(lender.tokens, sizes)]
    factor = float(np.median(ratios))
    return DraftCost(
        per="round",
        curve=LawCurve(
            floor_s=seconds(lender.draft_floor_s * factor),
            per_unit_s=seconds(lender.draft_request_s * factor),
            max_size=256,
            beyond="extrapolate",
            provenance=Provenance(
                origin="assumed",
                source=f"{cite(B300)}, {source}",
                reason="no drafter was measured on this machine: DSpark's draft time for V4-Flash on 4 x B300 is "
                "taken, times "
                f"{factor:.3f}, by which this machine takes longer for the same tokens without attention (median "
                "over 1 to 256; "
                f"{ratios.min():.2f} to {ratios.max():.2f}); that the ratio holds for drafting, and for this "
                "model's drafter, "
                "is a guess",
            ),
        ),
    )


def _replica(machine: Machine) -> Replica:
    stated = "public configuration and model card"
    origin: Literal["derived", "assumed"] = "assumed" if machine.model.startswith("sgl-project") else "derived"
    kv = (
        Provenance(origin="assumed", reason=machine.kv_reason)
        if origin == "assumed"
        else Provenance(origin="derived", source=stated, note=machine.kv_reason)
    )
    return Replica(
        gpus=SourcedCount(
            value=machine.gpus,
            provenance=Provenance(origin="derived", source=PACKAGE, note=machine.parallel.replace(";", ", ")),
        ),
        kv_bytes_per_token=SourcedCount(value=machine.kv_bytes_per_token, provenance=kv),
        max_context_tokens=SourcedCount(
            value=machine.max_context_tokens,
            provenance=Provenance(
                origin="transcribed", source=stated, note=f"steps are of contexts up to {CONTEXTS[1]:,}"
            ),
        ),
    )
