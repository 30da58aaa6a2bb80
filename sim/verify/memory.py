"""What a policy may remember, told apart state by state, so that every state is asked once."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from sim.verify.base import Confidence, Policy, Rates, Verifier

#: Confidences of a round, a tuple a request.
Rows = tuple[tuple[float, ...], ...]


class PolicyFault(Exception):
    """A policy broke the seam: raised, was not repeatable, or returned what is no length."""


@dataclass(slots=True)
class Memories:
    """One verifier for every state that a policy can be in, and what it decides there.

    ``rehearsals``: how often each decision is preceded by the same one, unheard; 0 for an engine without fault.
    """

    policy: Policy
    trained_length: int
    steps_per_s: Rates
    rehearsals: int = 0
    _verifiers: dict[Hashable, Verifier] = field(default_factory=dict)
    _decisions: dict[tuple[Hashable, Rows], tuple[tuple[int, ...], Hashable]] = field(default_factory=dict)
    _repeats: int = 64

    def start(self) -> Hashable:
        """Return the state a replica starts in."""
        try:
            verifier = self.policy.start()
        except Exception as error:
            raise PolicyFault(f"start: raised {type(error).__name__}: {error}") from error
        return self._keep(verifier)

    def propose(self, memory: Hashable, requests: int) -> tuple[int, Hashable]:
        """Return how many tokens to draft, at most the trained block, and the state after that was asked."""
        verifier = copy.deepcopy(self._verifiers[memory])
        asked = verifier if hasattr(verifier, "draft_length") else self.policy
        try:
            drafted: object = asked.draft_length(requests, self.trained_length)
        except Exception as error:
            raise PolicyFault(f"draft_length: raised {type(error).__name__}: {error}") from error
        if not isinstance(drafted, (int, np.integer)) or drafted < 0:
            raise PolicyFault(f"draft_length: expected a number of tokens, 0 or more (got {drafted!r})")
        return min(int(drafted), self.trained_length), self._keep(verifier)

    def decide(self, memory: Hashable, confidence: Rows) -> tuple[tuple[int, ...], Hashable]:
        """Return the lengths chosen, and the state after that; at first asks twice, to see that no dice are thrown."""
        key = (memory, confidence)
        if key not in self._decisions:
            rows = np.array(confidence)
            verifier = copy.deepcopy(self._verifiers[memory])
            lengths = self._ask(verifier, rows)
            if self._repeats:
                self._repeats -= 1
                again = copy.deepcopy(self._verifiers[memory])
                if self._ask(again, rows) != lengths or fingerprint(again) != fingerprint(verifier):
                    raise PolicyFault(
                        "verify_lengths: expected the same lengths for the same input (got different ones)"
                    )
            self._decisions[key] = lengths, self._keep(verifier)
        return self._decisions[key]

    def _ask(self, verifier: Verifier, confidence: Confidence) -> tuple[int, ...]:
        shown, rates = confidence.copy(), self.steps_per_s.copy()
        try:
            for _ in range(self.rehearsals):
                verifier.verify_lengths(shown, rates)
            lengths = np.asarray(verifier.verify_lengths(shown, rates))
        except Exception as error:
            raise PolicyFault(f"verify_lengths: raised {type(error).__name__}: {error}") from error
        if not (np.array_equal(shown, confidence) and np.array_equal(rates, self.steps_per_s)):
            raise PolicyFault("verify_lengths: expected the arrays it is given to stay as they are (got them changed)")
        requests, drafted = confidence.shape
        if lengths.shape != (requests,) or lengths.dtype.kind not in "iu":
            raise PolicyFault(
                f"verify_lengths: expected {requests} whole numbers (got shape {lengths.shape}, {lengths.dtype})"
            )
        if requests and (lengths.min() < 0 or lengths.max() > drafted):
            raise PolicyFault(f"verify_lengths: expected lengths in 0..{drafted} (got {lengths.tolist()})")
        return tuple(int(length) for length in lengths)

    def _keep(self, verifier: Verifier) -> Hashable:
        key = fingerprint(verifier)
        self._verifiers.setdefault(key, verifier)
        return key


def fingerprint(value: object) -> Hashable:
    """Return a key that two objects share exactly if all they hold is equal."""
    if value is None or isinstance(value, (bool, int, str, bytes, type)):
        return type(value), value
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    if isinstance(value, (tuple, list, deque)):
        return type(value), tuple(fingerprint(item) for item in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(fingerprint(item) for item in value)
    if isinstance(value, dict):
        return dict, tuple((fingerprint(key), fingerprint(item)) for key, item in value.items())
    if type(value).__module__ in ("builtins", "numpy.random._generator"):
        raise PolicyFault(f"expected a memory of numbers, texts, arrays and containers (got {type(value).__name__})")
    names = [name for kind in type(value).__mro__ for name in _slots(kind)] + list(getattr(value, "__dict__", ()))
    return type(value), tuple((name, fingerprint(getattr(value, name, None))) for name in names)


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
