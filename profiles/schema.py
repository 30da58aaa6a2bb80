"""What a profile says: how long a step takes and how many draft tokens survive, each with its provenance.

A profile is one JSON file (plus an ``.npz`` bank where acceptance was recorded). It may hold a step time, an
acceptance, or both; a scenario may take the two from different profiles.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Le, MinLen
from pydantic import Field, model_validator

from profiles.reading import Section

Seconds = Annotated[float, Ge(0)]
Tokens = Annotated[int, Ge(1)]
Chance = Annotated[float, Ge(0), Le(1)]
Text = Annotated[str, MinLen(1)]
Beyond = Literal["refuse", "extrapolate"]


class Provenance(Section):
    """Where a value comes from: nothing in a profile stands without one.

    ``origin``: ``measured`` on hardware by us, ``fitted`` to data, ``transcribed`` from a publication, ``derived`` by
    calculation from such, or ``assumed``; an assumption needs its ``reason``. Beside another origin, ``reason`` says
    which assumption the value still rests on.
    """

    origin: Literal["measured", "fitted", "transcribed", "derived", "assumed"]
    source: Text | None = None
    reason: Text | None = None
    hardware: Text | None = None
    version: Text | None = None
    command: Text | None = None
    date: Text | None = None
    note: Text | None = None

    @model_validator(mode="after")
    def _names_its_ground(self) -> Provenance:
        if self.origin == "assumed" and self.reason is None:
            raise ValueError("origin 'assumed' needs a reason")
        if self.origin != "assumed" and self.source is None:
            raise ValueError(f"origin '{self.origin}' needs a source")
        return self


def _check_table(sizes: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    if len(sizes) != len(seconds):
        raise ValueError(f"sizes and seconds differ in length: {len(sizes)} and {len(seconds)}")
    for before, size in pairwise(sizes):
        if size <= before:
            raise ValueError(f"sizes must rise: {size} follows {before}")


class Segment(Section):
    """A stretch of a measured table: ``sizes`` ascending, ``seconds`` at each.

    ``between`` says what a size that was not measured costs: ``round_up`` takes the next larger size (graph
    sizes: the work is padded), ``linear`` interpolates inside the segment and holds its first value to the left.
    """

    between: Literal["round_up", "linear"]
    sizes: Annotated[tuple[Tokens, ...], MinLen(1)]
    seconds: Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(1)]

    @model_validator(mode="after")
    def _is_a_table(self) -> Segment:
        _check_table(self.sizes, self.seconds)
        return self


class TableCurve(Section):
    """Seconds by size, read as written: jagged where the measurement is. Segments follow each other.

    Between two segments there is a cliff: past the last size of one, the next one rules alone.
    """

    kind: Literal["table"] = "table"
    segments: Annotated[tuple[Segment, ...], MinLen(1)]
    beyond: Beyond = "refuse"
    smoothing: Text | None = None
    provenance: Provenance

    @model_validator(mode="after")
    def _segments_follow(self) -> TableCurve:
        for left, right in zip(self.segments, self.segments[1:], strict=False):
            if right.sizes[0] <= left.sizes[-1]:
                raise ValueError(f"segments overlap: {right.sizes[0]} follows {left.sizes[-1]}")
        return self


class LawCurve(Section):
    """A fitted law: ``floor_s + saturating_s (1 - exp(-size / saturation)) + per_unit_s size``.

    ``saturating_s`` and ``saturation`` model experts that are still being loaded at small batches.
    Valid from ``min_size`` to ``max_size``, the range that was fitted.
    """

    kind: Literal["law"] = "law"
    floor_s: Seconds
    per_unit_s: Seconds
    saturating_s: Seconds = 0.0
    saturation: Annotated[float, Gt(0)] = 1.0
    min_size: Tokens = 1
    max_size: Tokens
    beyond: Beyond = "refuse"
    provenance: Provenance

    @model_validator(mode="after")
    def _has_a_range(self) -> LawCurve:
        if self.min_size > self.max_size:
            raise ValueError(f"min_size must not exceed max_size: {self.min_size} and {self.max_size}")
        return self


Curve = Annotated[TableCurve | LawCurve, Field(discriminator="kind")]


class SourcedSeconds(Section):
    """A time with its provenance."""

    seconds: Seconds
    provenance: Provenance


class SourcedCount(Section):
    """A whole number with its provenance."""

    value: Annotated[int, Ge(1)]
    provenance: Provenance


class LinearPrefill(Section):
    """Prompt tokens add ``per_token_s`` each to a step; a step of prompts alone starts from ``floor_s``.

    ``per_request_s``: what letting a request in costs whatever its length, added for each one whose prompt begins in
    the step (anew after a preemption). Absent: nothing.
    """

    kind: Literal["linear"] = "linear"
    floor_s: Seconds
    per_token_s: Seconds
    per_request_s: Annotated[float, Gt(0)] | None = None
    provenance: Provenance

    @model_validator(mode="after")
    def _costs_something(self) -> LinearPrefill:
        if self.per_token_s == 0 and self.per_request_s is None:
            raise ValueError("a prompt must cost something: per_token_s is 0 and there is no per_request_s")
        return self


class RowsPrefill(Section):
    """Prompt tokens are rows of the same pass as verified tokens: ``p`` beside ``b`` add ``rows(b + p) - rows(b)``.

    So a kernel that takes another way past some number of rows does so whatever these are rows of, while what is done
    with verified tokens alone (their logits, their judgement) is no part of a prompt's price. ``rows`` is ``seconds``
    at ``sizes``, linear between them and from nothing at 0; beyond the last, which counts as outside the profile's
    range, at the mean rate of the whole table. ``floor_s``: where a step of prompts alone starts from. ``beside_s``:
    what a prompt adds to a step that decodes, whatever its rows (its attention is a call of its own).
    """

    kind: Literal["rows"] = "rows"
    floor_s: Seconds
    beside_s: Seconds = 0.0
    sizes: Annotated[tuple[Tokens, ...], MinLen(1)]
    seconds: Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(1)]
    provenance: Provenance

    @model_validator(mode="after")
    def _is_a_table(self) -> RowsPrefill:
        _check_table(self.sizes, self.seconds)
        for before, after in pairwise(self.seconds):
            if after < before:
                raise ValueError(f"seconds must not fall, or a prompt would save time: {after} follows {before}")
        return self


class PrefillAsVerify(Section):
    """Prompt tokens cost what verified tokens cost: they count as batch tokens of the verify curve."""

    kind: Literal["as_verify"] = "as_verify"
    provenance: Provenance


Prefill = Annotated[LinearPrefill | RowsPrefill | PrefillAsVerify, Field(discriminator="kind")]


class DraftCost(Section):
    """Time to draft for a number of requests.

    ``per``: ``round`` where one pass drafts the whole block whatever its length (DFlash, DSpark), ``token`` where
    each draft token costs a pass (EAGLE, MTP chains, a small model). ``prefill``: what taking prompts in costs the
    drafter, beside what it costs the target. Absent: nothing, or the target's price holds it.
    """

    per: Literal["round", "token"]
    curve: Curve
    prefill: LinearPrefill | None = None


class StepTime(Section):
    """``step_s = overhead + draft_s(requests, draft length) + verify_s(batch tokens, context, prefill)``.

    ``verify`` is a curve over batch tokens; ``per_request`` and ``per_context_token`` add to it, by the number of
    requests decoding and by the tokens in their caches. ``draft`` names a cost for each drafter.
    """

    verify: Curve
    prefill: Prefill
    per_request: SourcedSeconds | None = None
    per_context_token: SourcedSeconds | None = None
    overhead: SourcedSeconds | None = None
    draft: dict[str, DraftCost] = Field(default_factory=dict)


class Survival(Section):
    """``values[k-1]``: share of rounds, full block verified, whose first k draft tokens were all accepted."""

    values: Annotated[tuple[Chance, ...], MinLen(1)]
    provenance: Provenance

    @model_validator(mode="after")
    def _falls(self) -> Survival:
        for k, (a, b) in enumerate(zip(self.values, self.values[1:], strict=False), start=2):
            if b > a:
                raise ValueError(f"survival must not rise: {b} at position {k} follows {a}")
        return self


class Spread(Section):
    """How acceptance differs, in standard deviations on the probit scale.

    ``request_sd`` between requests, ``token_sd`` between places of one text.
    """

    request_sd: Annotated[float, Ge(0), Le(5)]
    token_sd: Annotated[float, Ge(0), Le(5)]
    provenance: Provenance


class ConfidenceQuality(Section):
    """How well a confidence knows the chance of acceptance.

    ``noise_sd``: noise (probit scale) on what the confidence sees; a calibrated confidence shrinks towards the
    mean accordingly. ``raw_temperature[k-1]``: the raw confidence's logit is the calibrated one's times this, so
    above 1 is overconfident; it is what sequential temperature scaling divides by.
    """

    noise_sd: Annotated[float, Ge(0), Le(5)] = 0.0
    raw_temperature: Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(1)]
    provenance: Provenance


class ParametricLaw(Section):
    """Acceptance as a law; see `sim.acceptance` for the equations."""

    kind: Literal["parametric"] = "parametric"
    survival: Survival
    spread: Spread
    confidence: ConfidenceQuality


class Bank(Section):
    """Acceptance as recorded: an ``.npz`` file beside the profile; `profiles.files.load_bank` says what is in it."""

    kind: Literal["bank"] = "bank"
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+\.npz$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    provenance: Provenance


DomainLaw = Annotated[ParametricLaw | Bank, Field(discriminator="kind")]


class Drafter(Section):
    """What a drafter's tokens are worth, by domain (``any`` where domains were not told apart).

    ``kind``: a ``block`` drafter always drafts its trained block, a ``chain`` drafter token after token.
    ``confidence_reads``: ``past`` if the confidence of draft token k reads nothing later than token k-1,
    ``own_token`` if it reads token k itself, which some policies cannot use without bias.
    """

    kind: Literal["block", "chain"]
    trained_length: Annotated[int, Ge(1), Le(64)]
    confidence_reads: Literal["past", "own_token"] = "past"
    domains: Annotated[dict[str, DomainLaw], Field(min_length=1)]

    @model_validator(mode="after")
    def _has_every_position(self) -> Drafter:
        for domain, law in self.domains.items():
            if isinstance(law, ParametricLaw):
                for name, values in (
                    ("survival.values", law.survival.values),
                    ("confidence.raw_temperature", law.confidence.raw_temperature),
                ):
                    if len(values) != self.trained_length:
                        raise ValueError(
                            f"domains.{domain}.{name} has length {len(values)}; trained_length is {self.trained_length}"
                        )
        return self


class Replica(Section):
    """What one replica of this engine is; a scenario may set its own."""

    gpus: SourcedCount
    kv_bytes_per_token: SourcedCount
    max_context_tokens: SourcedCount


class Profile(Section):
    """A whole profile file."""

    format: Literal["dspark-profile/1"]
    name: Text
    description: Text
    disturbed: Text | None = None
    step_time: StepTime | None = None
    acceptance: dict[str, Drafter] = Field(default_factory=dict)
    replica: Replica | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Profile:
        if self.step_time is None and not self.acceptance:
            raise ValueError("a profile needs step_time, acceptance or both")
        return self


def provenances(section: object, path: str = "") -> dict[str, Provenance]:
    """Collect every provenance in a profile by the dotted path of what it vouches for."""
    found: dict[str, Provenance] = {}
    if isinstance(section, Provenance):
        return {path.removesuffix(".provenance"): section}
    if isinstance(section, Section):
        items = [(name, getattr(section, name)) for name in type(section).model_fields]
    elif isinstance(section, dict):
        items = list(section.items())
    else:
        return {}
    for name, value in items:
        found |= provenances(value, f"{path}.{name}" if path else name)
    return found


def conditional(survival: tuple[float, ...]) -> np.ndarray:
    """Conditional acceptance by position: ``s_k / s_{k-1}``, 0 where nothing survives that far."""
    s = np.concatenate(([1.0], survival))
    return np.divide(s[1:], s[:-1], out=np.zeros(len(s) - 1), where=s[:-1] > 0)
