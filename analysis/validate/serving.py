"""Figures 7 and 8 predicted: DSpark for V4-Flash and V4-Pro, from MTP-1's telemetry and acceptance others published.

Fitted are MTP-1's step times. Predicted are DSpark's speed, budget and frontier: nothing of DSpark's own curves enters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from analysis.validate.closed_loop import OUTPUT_TOKENS, Cell, Runner, Steady, build_engine, run_cells
from analysis.validate.published import Curve
from profiles.recipes.b300 import fit_draft_line, flash_survival, read_draft_s, read_verify_s
from profiles.recipes.confidence import read_fit
from profiles.recipes.offline import scale_to
from profiles.recipes.serving import (
    MTP_ACCEPTED_LENGTH,
    Model,
    build_serving,
    fit_step_law,
    pro_survival,
    scale_from_b300,
)
from profiles.recipes.sources import Floats, Shared, chance
from profiles.schema import Profile, Survival
from sim.engine import Engine
from sim.verify import DsparkAsync, Mtp1, Policy
from sim.verify.base import Confidence, Lengths, Rates, Verifier

#: Requests per GPU that are simulated; between them curves are straight.
LOADS = (5, 7, 9, 12, 14, 17, 22, 28, 36, 45, 55, 65, 75, 85, 95, 105, 115, 125, 135, 145, 155, 165, 175, 185, 195, 212)
#: MTP-1's curve is smoother, and known: it is what the step time was fitted to.
MTP_LOADS = (5, 9, 14, 22, 36, 55, 75, 95, 115, 135, 155, 175, 212)
QUICK_LOADS = (5, 22, 75, 135, 212)

#: Layers of the target, from the public description of its architecture.
LAYERS: dict[Model, int] = {"V4-Flash": 43, "V4-Pro": 61}
#: DSpark's drafter for either model is three layers of the target's kind over a block of 5, where MTP-1's is one over
#: the two tokens of the last round (public checkpoints, sgl-project/sglang pull request 29538).
STAGES, BLOCK, MTP_TOKENS = 3, 5, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What a prediction rests on and could be otherwise; the defaults are what the shipped profiles say.

    ``draft_scale``: times the draft cost. ``accepted_length``: DSpark's on full blocks, all conditional acceptances
    moved by one step in logit; None: as published. ``spread_scale``: times both standard deviations.
    ``priced_draft``: whether the scheduler's rates hold the draft time of the round, as the engine's steps do.

    ``mtp_pass``: MTP-1's own draft pass, which DSpark does not have: ``inside`` the step law and charged to DSpark too;
    taken out as one ``layer`` more than the target's (a lower bound: no head, no launch), or as one ``stage`` of
    DSpark's measured draft pass. ``draft_by_layer``: a drafter has as many layers whatever the target, so its time goes
    with that of a layer of the target, not of all. ``draft_by_load``: the ratio of draft to verify time is carried over
    load by load (a straight line in log load), not as its median.
    """

    mtp_accepted_length: float = MTP_ACCEPTED_LENGTH
    request_share: float = 0.0
    draft_scale: float = 1.0
    accepted_length: float | None = None
    spread_scale: float = 1.0
    confidence: Literal["calibrated", "raw"] = "calibrated"
    priced_draft: bool = True
    mtp_pass: Literal["inside", "layer", "stage"] = "inside"
    draft_by_layer: bool = False
    draft_by_load: bool = False


SHIPPED = Assumptions()
#: What the architecture says beyond the shipped profiles: independent of DSpark's curves.
REFINED = Assumptions(mtp_pass="stage", draft_by_layer=True, draft_by_load=True)


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of a draft pass on the paper's GPU, by requests ``[0..n]``: DSpark's, and MTP-1's inside its step."""

    dspark_s: Floats
    mtp_s: Floats


def draft_passes(shared: Shared, model: Model, assumed: Assumptions, most: int) -> Passes:
    """Scale the draft pass measured on 4 x B300 to the paper's GPU, up to ``most`` requests.

    With T the paper's MTP-1 step, V and m the B300's times to verify and for a pass of MTP-1, and l the layers of
    V4-Flash over those of the model, the factor is ``g = l (T - g m) / V``: MTP-1's pass scales as DSpark's does.
    """
    law = fit_step_law(shared, model, assumed.mtp_accepted_length)
    floor_s, slope_s = fit_draft_line(shared)
    sizes, verify_s = read_verify_s(shared, "graph")
    requests = law.requests[law.requests <= read_draft_s(shared)[0][-1]]
    step_s, b300_s = law.step_s(requests), verify_s[np.searchsorted(sizes, 2 * requests)]
    layers = LAYERS["V4-Flash"] / LAYERS[model] if assumed.draft_by_layer else 1.0
    extra = 1 / (LAYERS[model] + 1) if assumed.mtp_pass == "layer" else 0.0

    def stage_s(n: Floats) -> Floats:
        """One of the drafter's layers, over MTP-1's tokens instead of a block, on the B300."""
        return np.asarray((floor_s + slope_s * n * MTP_TOKENS / BLOCK) / STAGES)

    own_s = layers * stage_s(requests) if assumed.mtp_pass == "stage" else 0.0
    factors = layers * step_s * (1 - extra) / (b300_s + own_s)
    n = np.arange(most + 1, dtype=np.float64)
    factor = np.full(n.size, float(np.median(factors)))
    if assumed.draft_by_load:
        slope, at_one = np.polyfit(np.log(requests), factors, 1)
        factor = at_one + slope * np.log(np.clip(n, requests[0], requests[-1]))
    dspark_s = factor * (floor_s + slope_s * n) * assumed.draft_scale
    held = np.maximum(n, requests[0])  # as the step law is
    mtp_s = {"inside": 0.0 * n, "layer": extra * law.step_s(held), "stage": factor * stage_s(held)}[assumed.mtp_pass]
    dspark_s[0] = mtp_s[0] = 0.0
    return Passes(dspark_s, mtp_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpriced(DsparkAsync):
    """`dspark_async` whose rates are the target's alone: the draft time of a round is paid, but not seen.

    ``draft_s``: seconds to draft, by requests.
    """

    draft_s: tuple[float, ...]

    def start(self) -> Verifier:  # type: ignore[override]
        """Start without a past."""
        return _Unpriced(DsparkAsync.start(self), self.draft_s)


@dataclass(frozen=True, slots=True)
class _Unpriced:
    search: Verifier
    draft_s: tuple[float, ...]

    def draft_length(self, requests: int, trained_length: int) -> int:
        return trained_length

    def verify_lengths(self, confidence: Confidence, steps_per_s: Rates) -> Lengths:
        rates = steps_per_s.copy()
        known = np.isfinite(rates) & (rates > 0)
        rates[known] = 1 / (1 / rates[known] - self.draft_s[confidence.shape[0]])
        return self.search.verify_lengths(confidence, rates)


def survival_of(shared: Shared, model: Model, accepted_length: float | None) -> Survival:
    """Return the published survival, or one moved to ``accepted_length``."""
    published = flash_survival(shared) if model == "V4-Flash" else pro_survival(shared)
    if accepted_length is None:
        return published
    conditional = np.array([b / a for a, b in pairwise((1.0, *published.values))])
    moved, _ = scale_to(conditional, accepted_length)
    return published.model_copy(update={"values": tuple(chance(s) for s in np.cumprod(moved))})


def profile_of(shared: Shared, model: Model, assumed: Assumptions) -> Profile:
    """Build the profile of a model under assumptions."""
    fit = read_fit(shared)
    scaling = scale_from_b300(shared, fit_step_law(shared, model, assumed.mtp_accepted_length))
    return build_serving(
        shared,
        model,
        mtp_accepted_length=assumed.mtp_accepted_length,
        request_share=assumed.request_share,
        draft_factor=None if assumed.draft_scale == 1 else scaling.factor * assumed.draft_scale,
        survival=survival_of(shared, model, assumed.accepted_length),
        confidence=dataclasses.replace(
            fit, request_sd=fit.request_sd * assumed.spread_scale, token_sd=fit.token_sd * assumed.spread_scale
        ),
    )


def engine_of(
    profile: Profile, assumed: Assumptions, passes: Passes | None, policy: Policy, requests: int, seed: int
) -> Engine:
    """Build the engine of a policy under assumptions; ``passes`` None: draft passes as in the profile."""
    engine = build_engine(profile, policy, requests, seed=seed)
    if passes is not None:
        # What is taken out of the verify time, MTP-1 pays as draft time: its own steps stay what they were.
        loads = np.arange(engine.cost.verify_s.size) / MTP_TOKENS
        verify_s = engine.cost.verify_s - np.interp(loads, np.arange(1, passes.mtp_s.size), passes.mtp_s[1:])
        verify_s[0] = 0.0
        draft_s = passes.mtp_s if isinstance(policy, Mtp1) else passes.dspark_s
        engine = dataclasses.replace(
            engine, cost=dataclasses.replace(engine.cost, verify_s=verify_s), draft_s=draft_s[: requests + 1].copy()
        )
    if not assumed.priced_draft and isinstance(policy, DsparkAsync):
        blind = Unpriced(
            confidence=policy.confidence, first_budget=policy.first_budget, draft_s=tuple(engine.draft_s.tolist())
        )
        engine = dataclasses.replace(engine, policy=blind)
    return engine


@dataclass(frozen=True, slots=True)
class Prediction:
    """One policy over load, runs in order of it."""

    model: Model
    runs: tuple[Steady, ...]

    def over_load(self, name: str) -> Floats:
        """Return a value of every run."""
        return np.array([float(getattr(run, name)) for run in self.runs])

    @property
    def curve(self) -> Curve:
        """Tokens/s per user over requests per GPU, from the first load simulated to the last."""
        loads = self.over_load("requests")
        dense = np.linspace(loads[0], loads[-1], 400)
        return Curve(dense, self.at("user_tokens_per_s", dense))

    def at(self, name: str, requests: Floats | float) -> Floats:
        """Return a value at loads between those simulated; NaN outside.

        Speed is interpolated as time per token, which is nearly straight over load.
        """
        loads, values = self.over_load("requests"), self.over_load(name)
        if name == "user_tokens_per_s":
            return np.asarray(1 / np.interp(requests, loads, 1 / values, left=np.nan, right=np.nan))
        return np.asarray(np.interp(requests, loads, values, left=np.nan, right=np.nan))


@dataclass(frozen=True, slots=True)
class Pair:
    """MTP-1 and DSpark of one model under the same assumptions."""

    mtp: Prediction
    dspark: Prediction


@dataclass(frozen=True, slots=True)
class Request:
    """What to predict: a model under assumptions, at which loads; tokens a run and an answer."""

    model: Model
    assumed: Assumptions
    loads: tuple[int, ...]
    mtp_loads: tuple[int, ...]
    tokens: int
    output_tokens: int = OUTPUT_TOKENS


def predict(
    shared: Shared, asked: Sequence[Request], *, seed: int, jobs: int, what: str, run: Runner = run_cells
) -> list[Pair]:
    """Simulate everything that is asked for, all runs in one pool."""
    cells: list[Cell] = []
    for one in asked:
        profile, passes = profile_of(shared, one.model, one.assumed), None
        if one.assumed.mtp_pass != "inside" or one.assumed.draft_by_layer or one.assumed.draft_by_load:
            passes = draft_passes(shared, one.model, one.assumed, 4 * max(*one.loads, *one.mtp_loads))
        mtp = Mtp1()
        block = profile.acceptance["dspark"].trained_length
        dspark = DsparkAsync(first_budget=block, confidence=one.assumed.confidence)
        for policy, loads in ((mtp, one.mtp_loads), (dspark, one.loads)):
            cells += [
                Cell(
                    engine_of(profile, one.assumed, passes, policy, load, seed),
                    load,
                    one.tokens,
                    one.output_tokens,
                    seed,
                )
                for load in loads
            ]
    runs = iter(run(cells, jobs, what))
    return [
        Pair(
            Prediction(one.model, tuple(next(runs) for _ in one.mtp_loads)),
            Prediction(one.model, tuple(next(runs) for _ in one.loads)),
        )
        for one in asked
    ]
