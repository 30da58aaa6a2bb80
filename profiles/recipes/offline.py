"""Acceptance of EAGLE-3, DFlash and DSpark for the paper's four open models: table 1, shaped by figure 2."""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, logit

from profiles.recipes.confidence import ConfidenceFit, read_fit, spread_of, trained_head_of
from profiles.recipes.sources import ACCEPTED, POSITIONS, RELIABILITY, Floats, Shared, chance, cite
from profiles.schema import ConfidenceQuality, Drafter, ParametricLaw, Profile, Provenance, Survival

Model = Literal["Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Gemma4-12B"]

DOMAINS = ("Math", "Code", "Chat")
KINDS: dict[str, Literal["block", "chain"]] = {"Eagle3": "chain", "DFlash": "block", "DSpark": "block"}
BLOCK = 7

#: Noise (probit scale) given to a confidence that is only the draft's top probability.
UNTRAINED_NOISE_SD = 0.5


def accepted_length(conditional: Floats) -> float:
    """Return tokens a round, bonus included, of a chain of conditional acceptances."""
    return 1.0 + float(np.cumprod(conditional).sum())


def scale_to(conditional: Floats, target: float) -> tuple[Floats, float]:
    """Move all conditional acceptances by one step on the logit scale until the chain yields ``target`` tokens."""
    shift = float(brentq(lambda s: accepted_length(expit(logit(conditional) + s)) - target, -5.0, 5.0, xtol=1e-14))
    return np.asarray(expit(logit(conditional) + shift)), shift


def table1_mean(shared: Shared, model: Model, drafter: str, domain: str) -> float:
    """Return table 1's accepted length of a domain: the mean over its three benchmarks."""
    (lengths,) = shared.columns(
        ACCEPTED, "accepted_length_tokens_per_round", target_model=model, drafter=drafter, domain=domain
    )
    return float(lengths.mean())


def build_offline(shared: Shared, model: Model) -> Profile:
    """Build ``paper/<model>``."""
    fit = read_fit(shared)
    return Profile(
        format="dspark-profile/1",
        name=f"paper/{model.lower().replace('-', '_')}",
        description=f"Acceptance of EAGLE-3, DFlash and DSpark (trained on blocks of {BLOCK}) for {model}, by "
        "domain; no step time.",
        acceptance={
            drafter.lower(): Drafter(
                kind=kind,
                trained_length=BLOCK,
                domains={domain.lower(): _law(shared, fit, model, drafter, domain) for domain in DOMAINS},
            )
            for drafter, kind in KINDS.items()
        },
    )


def _law(shared: Shared, fit: ConfidenceFit, model: Model, drafter: str, domain: str) -> ParametricLaw:
    (shape,) = shared.columns(POSITIONS, "conditional_acceptance", domain=domain, drafter=drafter)
    target = table1_mean(shared, model, drafter, domain)
    conditional, shift = scale_to(shape, target)
    borrowed = model != "Qwen3-4B"
    others = f"{model}'s drafters" if borrowed else "the other drafters and domains"
    whose = None if (model, drafter, domain) == ("Qwen3-4B", "DSpark", "Chat") else others
    return ParametricLaw(
        survival=Survival(
            values=tuple(chance(s) for s in np.cumprod(conditional)),
            provenance=Provenance(
                origin="derived",
                source=cite(POSITIONS, ACCEPTED),
                note="figure 2's conditional acceptances by "
                f"position{' (of Qwen3-4B: the shape is borrowed)' if borrowed else ''}, all moved by {shift:+.3f} "
                f"in logit so that the chain yields table 1's {target:.4f} tokens a round (mean of three benchmarks)",
            ),
        ),
        spread=spread_of(fit, whose),
        confidence=trained_head_of(fit, BLOCK, whose) if drafter == "DSpark" else _top_probability(fit),
    )


def _top_probability(fit: ConfidenceFit) -> ConfidenceQuality:
    return ConfidenceQuality(
        noise_sd=UNTRAINED_NOISE_SD,
        raw_temperature=fit.raw_temperature,
        provenance=Provenance(
            origin="assumed",
            source=cite(RELIABILITY),
            reason="there is no confidence head; confidence is taken to be the top probability of the draft "
            "distribution, which reads only what came before. How good that is was not published: noise of "
            f"{UNTRAINED_NOISE_SD:g} probits is a guess, and the raw score is taken to be as overconfident as "
            "DSpark's in figure 6",
        ),
    )
