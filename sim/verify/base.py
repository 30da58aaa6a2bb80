"""The seam between an engine and a verification policy; the simulator and the decoder run the same objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, runtime_checkable

import numpy as np
from annotated_types import MinLen
from numpy.typing import NDArray

from sim.registry import Registry

Lengths = NDArray[np.int64]
Confidence = NDArray[np.float64]
Rates = NDArray[np.float64]

POLICIES = Registry("policy", "dspark_sim.policies")

#: What a confidence of draft token k may read: the tokens before k, or k itself as well.
Reads = Literal["past", "own_token"]


#: ``block``: drafts its whole trained block in one pass; ``chain``: drafts token after token, as many as asked.
DrafterKind = Literal["block", "chain"]


class Verifier(Protocol):
    """Chooses lengths step after step; may remember earlier steps of its own replica."""

    def draft_length(self, requests: int, trained_length: int) -> int:
        """Return the draft tokens to propose in each of ``requests`` requests; 0: no drafting in this step.

        Called once a step, before anything is drafted. A block drafter always drafts its trained block; a
        chain drafter drafts exactly this many.
        """
        ...

    def verify_lengths(self, confidence: Confidence, steps_per_s: Rates) -> Lengths:
        """Choose each request's verification length.

        Called once in every step that drafts.

        Parameters
        ----------
        confidence : array [requests, draft_length], in [0, 1]
            Chance that a draft token is accepted, given that its prefix was; requests in order of admission.
        steps_per_s : array [at least requests * (1 + draft_length) + 1]
            ``steps_per_s[b]`` is the engine's rate at a batch of ``b`` tokens, with this step's draft time, requests,
            context and prefill; 0 where the engine cannot run such a batch. Index 0 is infinite and of no use.

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

    @property
    def kind(self) -> str:
        """Name in the registry."""
        ...

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

    def check_drafter(self, trained_length: int, kind: DrafterKind) -> None:
        """Raise `ValueError`, naming key, value and what is allowed, where the drafter cannot do what is asked."""
        ...

    def draft_length(self, requests: int, trained_length: int) -> int:
        """Return what `Verifier.draft_length` returns where nothing is remembered."""
        ...

    def start(self) -> Verifier:
        """Return what decides for one replica; a policy without memory returns itself."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Blind:
    """What policies have in common that draft, but look at no confidence."""

    drafter: Annotated[str, MinLen(1)] = "dspark"

    @property
    def confidence(self) -> Literal["calibrated", "raw"]:
        """Of no account here."""
        return "calibrated"

    @property
    def lossless_with(self) -> frozenset[Reads]:
        """Safe with every confidence, since none is looked at."""
        return frozenset({"past", "own_token"})

    @property
    def sees_outcome(self) -> bool:
        """Only the oracle does."""
        return False

    def check_drafter(self, trained_length: int, kind: DrafterKind) -> None:
        """Any drafter will do."""

    def draft_length(self, requests: int, trained_length: int) -> int:
        """Draft the whole trained block."""
        return trained_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What policies have in common that read a confidence; the defaults suit DSpark's drafter."""

    drafter: Annotated[str, MinLen(1)] = "dspark"
    confidence: Literal["calibrated", "raw"] = "calibrated"

    @property
    def lossless_with(self) -> frozenset[Reads]:
        """Safe with a confidence that reads the past alone."""
        return frozenset({"past"})

    @property
    def sees_outcome(self) -> bool:
        """Only the oracle does."""
        return False

    def check_drafter(self, trained_length: int, kind: DrafterKind) -> None:
        """Any drafter will do."""

    def draft_length(self, requests: int, trained_length: int) -> int:
        """Draft the whole trained block."""
        return trained_length


def check_within_block(key: str, length: int, trained_length: int, kind: DrafterKind) -> None:
    """Raise `ValueError` where a block drafter is asked for more than it was trained to draft."""
    if kind == "block" and length > trained_length:
        raise ValueError(f"{key}: expected at most the drafter's trained block of {trained_length} (got {length})")


def checked_offer(confidence: Confidence, steps_per_s: Rates) -> tuple[Confidence, Rates]:
    """Return both as the kernels want them: C-contiguous float64, writable (each kind of array is compiled for).

    Raises `ValueError` where a confidence is no chance (NaN above all) or the rates end before the largest batch.
    """
    # Imported where it is used, here and in the policies: numba takes longer to load than a scenario to check.
    from sim.verify import kernels

    confidence = np.require(confidence, np.float64, ["C", "W"])
    steps_per_s = np.require(steps_per_s, np.float64, ["C", "W"])
    if confidence.ndim != 2:
        raise ValueError(f"confidence: expected an array [requests, draft_length] (got {confidence.ndim} dimensions)")
    if not kernels.is_chance(confidence):
        wrong = np.argwhere(~((confidence >= 0) & (confidence <= 1)))[0]
        request, position = int(wrong[0]), int(wrong[1])
        raise ValueError(
            f"confidence[{request}, {position}]: expected a chance in 0..1 (got {confidence[request, position]})"
        )
    needed = confidence.shape[0] * (1 + confidence.shape[1]) + 1
    if steps_per_s.ndim != 1 or steps_per_s.size < needed:
        raise ValueError(f"steps_per_s: expected at least {needed} rates, index 0 included (got {steps_per_s.size})")
    return confidence, steps_per_s
