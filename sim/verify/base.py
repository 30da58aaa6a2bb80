"""The seam between an engine and a verification policy; the simulator and the decoder run the same objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sim.registry import Registry

Lengths = NDArray[np.int64]
Confidence = NDArray[np.float64]
Rates = NDArray[np.float64]

POLICIES = Registry("policy", "dspark_sim.policies")

#: What a confidence of draft token k may read: the tokens before k, or k itself as well.
Reads = Literal["past", "own_token"]


class Verifier(Protocol):
    """Chooses lengths step after step; may remember earlier steps of its own replica."""

    def verify_lengths(self, confidence: Confidence, steps_per_s: Rates) -> Lengths:
        """Choose each request's verification length.

        Parameters
        ----------
        confidence : array [requests, draft_length], in [0, 1]
            Chance that a draft token is accepted, given that its prefix was; requests in order of admission.
        steps_per_s : array [at least requests * (1 + draft_length) + 1]
            ``steps_per_s[b]`` is the engine's rate at a batch of ``b`` tokens, with this step's draft time, requests,
            context and prefill. Index 0 is infinite and of no use.

        Returns
        -------
        array [requests], int64
            Draft tokens to verify in each request, 0..draft_length; the bonus token is not counted.
        """
        ...


@runtime_checkable
class Policy(Protocol):
    """A verification policy: frozen settings, the YAML keys of one entry under ``policies``.

    ``drafter``: the profile's name of the drafter, None where nothing is ever drafted.
    ``confidence``: which confidence it is given.
    ``lossless_with``: what a confidence may read for the output law to stay the target's; proven by
    `sim.verify.check` in the tests. ``sees_outcome``: it is given the outcome in place of a confidence.
    """

    kind: str

    @property
    def drafter(self) -> str | None:
        """Name of the drafter in the profile."""
        ...

    @property
    def confidence(self) -> Literal["calibrated", "raw"]:
        """Which confidence the policy reads."""
        ...

    @property
    def lossless_with(self) -> frozenset[Reads]:
        """Confidences that keep this policy lossless."""
        ...

    @property
    def sees_outcome(self) -> bool:
        """Whether the outcome is shown to it; True for the oracle alone."""
        ...

    def draft_length(self, requests: int, trained_length: int) -> int:
        """Return the draft tokens to propose in each of ``requests`` requests; 0: no drafting in this step.

        Called before anything is drafted. A block drafter always drafts its trained block; a chain
        drafter drafts exactly this many.
        """
        ...

    def start(self) -> Verifier:
        """Return what decides for one replica; a policy without memory returns itself."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What policies that draft have in common; the defaults suit DSpark's drafter."""

    drafter: str | None = "dspark"
    confidence: Literal["calibrated", "raw"] = "calibrated"

    @property
    def lossless_with(self) -> frozenset[Reads]:
        """Safe with a confidence that reads the past alone."""
        return frozenset({"past"})

    @property
    def sees_outcome(self) -> bool:
        """Only the oracle does."""
        return False

    def draft_length(self, requests: int, trained_length: int) -> int:
        """Draft the whole trained block."""
        return trained_length
