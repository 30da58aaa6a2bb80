"""From laws and survivals to the sections of a profile, each value with its provenance; and what was not identified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from profiles.curves import evaluate, known_range
from profiles.errors import Fault, ProfileError
from profiles.files import find_profile, load_profile
from profiles.fitting.acceptance import SurvivalFit
from profiles.fitting.law import Law
from profiles.recipes.sources import chance, seconds
from profiles.schema import (
    Curve,
    DraftCost,
    Drafter,
    LawCurve,
    LinearPrefill,
    ParametricLaw,
    Prefill,
    PrefillAsVerify,
    Provenance,
    Segment,
    SourcedSeconds,
    StepTime,
    Survival,
    TableCurve,
)

#: Whose spread and confidence are borrowed where a user's counters say nothing of either.
LENDER = "paper/qwen3_4b"


@dataclass(frozen=True, slots=True)
class NotIdentified:
    """A quantity that the data do not determine: what was done about it, and which measurement would settle it."""

    what: str
    taken: str
    settle: str


@dataclass(frozen=True, slots=True)
class Origin:
    """What provenance says of everything that one fit gave."""

    source: str
    hardware: str | None = None
    version: str | None = None
    command: str | None = None
    date: str | None = None

    def of(self, note: str, reason: str | None = None) -> Provenance:
        """Return the provenance of a fitted value; ``reason`` names the assumption that it rests on."""
        return Provenance(
            origin="fitted",
            source=self.source,
            hardware=self.hardware,
            version=self.version,
            command=self.command,
            date=self.date,
            note=note,
            reason=reason,
        )

    def measured(self, note: str) -> Provenance:
        """Return the provenance of a value read as it was measured."""
        return self.of(note).model_copy(update={"origin": "measured"})

    def assumed(self, reason: str) -> Provenance:
        """Return the provenance of an assumption made beside these measurements."""
        return Provenance(origin="assumed", source=self.source, hardware=self.hardware, reason=reason)


WHERE = {
    "floor": "the floor of a step",
    "batch_token": "the cost of a batch token",
    "draft": "the time to draft",
    "draft_request": "the time to draft, by request",
    "context_token": "the cost of a context token",
    "prompt_token": "the cost of a prompt token",
    "admission": "the cost of letting a request in",
    "request": "the cost of a request beside its tokens",
}
SETTLE = {
    "request": (
        "runs at a fixed draft length, of two lengths or more, at the same concurrencies as those without; or a "
        "table of "
        "step time by batch tokens (--step-table)"
    ),
    "context_token": "runs at the same concurrencies with prompts several times longer or shorter",
    "prompt_token": (
        "runs with two prompt lengths, with their waits for the first token; or two ratios of prompt to output"
    ),
    "admission": "runs with three combinations of prompt and output length or more",
}


def not_identified(law: Law, request_share: float | None, drafted: bool) -> list[NotIdentified]:
    """Return what a law leaves open, beside acceptance."""
    found = []
    for name, hosts in law.inside.items():
        if name not in SETTLE:
            continue
        inside = ", ".join(WHERE.get(host, host) for host in hosts if host in WHERE) or "nothing: no run pays for it"
        taken = f"it is inside {inside}"
        if name in ("context_token", "prompt_token", "admission") and law.cost_s[name] > 0:
            taken = f"only a mixture of it and {inside} is known: they share it evenly"
        if name == "prompt_token" and not hosts and law.cost_s[name] > 0:
            taken = "the wait for the first token at the lightest load is charged to the prompt, all of it"
        if name == "request" and request_share is None:
            taken = (
                "a token and a request of its own cost the same here: all is charged to tokens, the dear end "
                "for speculation"
            )
        found.append(NotIdentified(WHERE[name], taken, SETTLE[name]))
    if request_share is not None:
        found.append(
            NotIdentified(
                WHERE["request"],
                f"assumed: {request_share:.0%} of the slope over load (--request-share), the rest is charged to tokens",
                SETTLE["request"],
            )
        )
    if not drafted:
        found.append(
            NotIdentified(
                "the time to draft",
                "the profile has none: it can run no drafter",
                "runs with the drafter on at two draft lengths, a table of draft time by requests (--draft-table), or "
                "another engine's, scaled (--draft-like)",
            )
        )
    return found


def step_time_of(
    law: Law,
    origin: Origin,
    *,
    request_share: float | None,
    measured_verify: Curve | None = None,
    draft: dict[str, DraftCost] | None = None,
) -> StepTime:
    """Return a law as the step time of a profile.

    ``measured_verify``: the curve that the law comes on top of; its floor is then an overhead.
    """
    cost, how = law.cost_s, f"relative residuals {law.rms:.1%} rms, {law.worst:.1%} worst, of {law.misses.size} rows"
    apart = request_share is None and cost["request"] > 0
    reason = None
    if measured_verify is None and not apart:
        share = request_share or 0.0
        reason = (
            "one token and one request cost the same in runs without speculation, so that their costs cannot be "
            "told apart: "
            f"{1 - share:.0%} of the slope over load is charged to tokens; batches beyond the runs go on straight"
        )
    verify = measured_verify or _verify(law, origin.of(f"floor and slope over batch tokens; {how}", reason))
    return StepTime(
        verify=verify,
        per_request=_sourced(cost["request"], origin.of(f"beside its tokens; {how}", reason)),
        per_context_token=_sourced(
            cost["context_token"], origin.of(f"by tokens in the caches; {how}", _mixed(law, "context_token"))
        ),
        overhead=_sourced(cost["floor"], origin.of(f"beside the measured table; {how}")) if measured_verify else None,
        prefill=_prefill(law, verify, origin, how),
        draft=draft or {},
    )


def _verify(law: Law, provenance: Provenance) -> Curve:
    """Return the part that goes with batch tokens: a law, or three points where it has a knee."""
    cost, (low, high) = law.cost_s, law.batch_tokens
    if law.bend_token_s == 0:
        return LawCurve(
            floor_s=seconds(cost["floor"]),
            per_unit_s=seconds(cost["batch_token"]),
            saturating_s=seconds(law.saturating_s),
            saturation=seconds(law.saturation_tokens),
            min_size=low,
            max_size=high,
            beyond="extrapolate",
            provenance=provenance,
        )
    knee = min(max(round(law.bend_tokens), low + 1), high - 1)
    ends = ((low, knee), (knee + 1, high)) if knee + 1 < high else ((low, knee, high),)
    return TableCurve(
        segments=tuple(Segment(between="linear", sizes=part, seconds=_times(law, part)) for part in ends),
        beyond="extrapolate",
        smoothing=f"two straight lines that meet at {knee} batch tokens; fitted, not measured at those sizes",
        provenance=provenance,
    )


def _times(law: Law, sizes: tuple[int, ...]) -> tuple[float, ...]:
    """Return the seconds that the law gives to batches."""
    floor, token = law.cost_s["floor"], law.cost_s["batch_token"]
    return tuple(seconds(floor + token * n + law.bend_token_s * max(n - law.bend_tokens, 0.0)) for n in sizes)


def _sourced(value: float, provenance: Provenance) -> SourcedSeconds | None:
    return SourcedSeconds(seconds=seconds(value), provenance=provenance) if value > 0 else None


def _mixed(law: Law, name: str) -> str | None:
    if name not in law.inside:
        return None
    if not law.inside[name]:
        return (
            "prompts of one length: the wait for the first token at the lightest load is charged to the prompt, "
            "all of it"
        )
    hosts = ", ".join(WHERE.get(host, host) for host in law.inside[name])
    return f"of {WHERE[name]} and {hosts} only a mixture is known: they share it evenly"


def _prefill(law: Law, verify: Curve, origin: Origin, how: str) -> Prefill:
    per_token, admission = law.cost_s["prompt_token"], law.cost_s["admission"]
    if per_token <= 0 and admission <= 0:
        return PrefillAsVerify(
            provenance=origin.assumed(
                "the runs do not tell what a prompt costs; prompt tokens run through the same layers and are "
                "charged as "
                "batch tokens"
            )
        )
    mixed = {name: _mixed(law, name) for name in ("prompt_token", "admission") if law.cost_s[name] > 0}
    first = known_range(verify)[0]
    return LinearPrefill(
        floor_s=seconds(float(evaluate(verify, first, "verify").seconds[first])),
        per_token_s=seconds(per_token),
        per_request_s=seconds(admission) if admission > 0 else None,
        provenance=origin.of(
            "from how prompts slow those who decode and, where known, from first tokens at the lightest load; a "
            "step of "
            f"prompts alone starts from the smallest batch; {how}",
            "; ".join(filter(None, mixed.values())) or None,
        ),
    )


def draft_of(law: Law, origin: Origin, per: Literal["round", "token"], request_share: float | None) -> DraftCost:
    """Return the drafter's cost that a law with speculation found."""
    reason = None
    if request_share is not None:
        reason = (
            f"what a drafted request costs rests on how the slope divides: {1 - request_share:.0%} to tokens, assumed"
        )
    return DraftCost(
        per=per,
        curve=LawCurve(
            floor_s=seconds(law.cost_s["draft"]),
            per_unit_s=seconds(law.cost_s["draft_request"]),
            max_size=max(law.batch_tokens),
            beyond="extrapolate",
            provenance=origin.of("rounds with speculation less rounds without, at the same tokens", reason),
        ),
    )


def draft_like(profile_name: str, drafter: str, verify: Curve, upto: int) -> DraftCost:
    """Return another profile's draft cost, scaled by how much longer this engine verifies the same tokens.

    An assumption, said so. The factor is the median of the ratios of the verify times at 1, 2, 4, ... up to ``upto``.
    """
    path = find_profile(profile_name)
    lender = load_profile(path).step_time
    if lender is None or drafter not in lender.draft:
        raise ProfileError(Fault(f"{profile_name} has no draft time for '{drafter}'", "--draft-like"))
    cost = lender.draft[drafter]
    upto = min(upto, known_range(lender.verify)[1])
    sizes = 2 ** np.arange(int(np.log2(max(upto, 1))) + 1)
    ratios = [
        float(
            evaluate(verify, int(size), "verify").seconds[size]
            / evaluate(lender.verify, int(size), "verify").seconds[size]
        )
        for size in sizes
    ]
    factor = float(np.median(ratios))
    reason = (
        f"drafting was not measured here: {profile_name}'s draft time is taken, times {factor:.3g}, by which this "
        "engine takes "
        f"longer to verify the same tokens (median over 1 to {int(sizes[-1])}; {min(ratios):.3g} to "
        f"{max(ratios):.3g}); that "
        "ratio is assumed to hold for drafting, whatever the drafter"
    )
    provenance = Provenance(origin="assumed", source=profile_name, reason=reason)
    curve = cost.curve
    if isinstance(curve, LawCurve):
        scaled: Curve = curve.model_copy(
            update={
                "floor_s": seconds(curve.floor_s * factor),
                "per_unit_s": seconds(curve.per_unit_s * factor),
                "saturating_s": seconds(curve.saturating_s * factor),
                "provenance": provenance,
            }
        )
    else:
        segments = tuple(
            part.model_copy(update={"seconds": tuple(seconds(time * factor) for time in part.seconds)})
            for part in curve.segments
        )
        scaled = curve.model_copy(update={"segments": segments, "beyond": "extrapolate", "provenance": provenance})
    prefill = cost.prefill and cost.prefill.model_copy(
        update={
            "floor_s": seconds(cost.prefill.floor_s * factor),
            "per_token_s": seconds(cost.prefill.per_token_s * factor),
            "per_request_s": each and seconds(each * factor) if (each := cost.prefill.per_request_s) else None,
            "provenance": provenance,
        }
    )
    return DraftCost(per=cost.per, curve=scaled, prefill=prefill)


def drafter_of(
    fit: SurvivalFit, origin: Origin, kind: Literal["block", "chain"], domain: str, name: str, counted: float | None
) -> Drafter:
    """Return a drafter's section: survival as fitted, spread and confidence borrowed and said so."""
    lent = load_profile(find_profile(LENDER)).acceptance["dspark"].domains["chat"]
    assert isinstance(lent, ParametricLaw)
    length = len(fit.survival)
    temperatures = lent.confidence.raw_temperature
    temperatures = (*temperatures, *[temperatures[-1]] * length)[:length]
    borrowed = f"counters by position say nothing of it: that of Qwen3-4B, DSpark, Alpaca ({LENDER}) is used"
    if counted is not None:
        note = f"accepted prefixes over {counted:,.0f} rounds; 95 % bounds " + ", ".join(
            f"{low:.3f} to {high:.3f}" for low, high in zip(fit.low, fit.high, strict=True)
        )
        note += " (rounds taken for independent: those of one text are not)"
    else:
        note = "differences of mean accepted lengths by draft length"
    if fit.left_out:
        tail = ", ".join(f"{value:g} at k = {k}" for k, value in fit.left_out.items())
        note += f"; left out, as no survival: {tail}"
    return Drafter(
        kind=kind,
        trained_length=length,
        domains={
            domain: ParametricLaw(
                survival=Survival(
                    values=tuple(chance(value) for value in fit.survival),
                    provenance=origin.measured(note) if counted is not None else origin.of(note),
                ),
                spread=lent.spread.model_copy(update={"provenance": _borrow(lent.spread.provenance, borrowed)}),
                confidence=lent.confidence.model_copy(
                    update={
                        "raw_temperature": temperatures,
                        "provenance": _borrow(lent.confidence.provenance, borrowed),
                    }
                ),
            )
        },
    )


def _borrow(provenance: Provenance, reason: str) -> Provenance:
    return Provenance(origin="assumed", source=provenance.source, note=provenance.note, reason=reason)
