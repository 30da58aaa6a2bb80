"""How prompts share the engine with decoding."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sim.registry import Registry

PREFILLS = Registry("prefill kind", "dspark_sim.prefills")


class StepShare(NamedTuple):
    """What a step may hold: whether it decodes, and how many prompt tokens at most."""

    decodes: bool
    prompt_tokens: int


class Prefill(Protocol):
    """Decides a step's shares; knows no clock and no dice."""

    @property
    def kind(self) -> str:
        """Name in the registry."""
        ...

    def share(self, decoding: int, prompts_pending: bool, max_batch_tokens: int) -> StepShare:
        """Return the shares of a step with ``decoding`` requests in decode and prompts pending or not."""
        ...
