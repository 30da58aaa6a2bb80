"""Faults of the decoder's input, and the one fault that a request may meet while it runs."""

from __future__ import annotations

from profiles.errors import Fault, InputError

__all__ = ["CheckpointError", "Fault", "InputError", "NotFiniteError", "RequestError", "TargetError"]


class TargetError(InputError):
    """A target folder cannot be used; exit code 2."""


class CheckpointError(InputError):
    """A draft checkpoint cannot be used, or does not belong to the target; exit code 2."""


class RequestError(InputError):
    """A request, or a combination of drafter and policy, asks for what cannot be done; exit code 2."""


class NotFiniteError(Exception):
    """A model returned NaN where a distribution was needed; fails the request it happened to, and no other."""
