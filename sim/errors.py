"""Errors of the simulator: faults of the person who wrote the file, and bugs of ours."""

from __future__ import annotations

from profiles.errors import Fault, InputError, exit_code_of

__all__ = ["Fault", "InputError", "InvariantError", "ScenarioError", "TraceError", "exit_code_of"]


class ScenarioError(InputError):
    """A scenario cannot be used; exit code 2."""


class TraceError(InputError):
    """A trace file cannot be replayed; exit code 2."""


class InvariantError(Exception):
    """A law of the simulator was broken: our bug, so it keeps its traceback."""
