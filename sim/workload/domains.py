"""What requests are about: a mix of domains that may change as time goes by."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Discriminator, Tag

from profiles.reading import STRICT
from sim.units import Duration, Share
from sim.workload.base import Floats, Ints

#: The one domain of traffic that says nothing about domains.
UNSAID = ("-",)


def _check_mix(mix: dict[str, float]) -> dict[str, float]:
    total = sum(mix.values())
    if abs(total - 1) > 1e-9:
        raise ValueError(f"shares must sum to 1 (got {total:g})")
    for name in mix:
        if not name.strip():
            raise ValueError(f"a domain needs a name (got '{name}')")
    return mix


#: Shares by domain, which sum to 1.
Mix = Annotated[dict[str, Share], AfterValidator(_check_mix)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixChange:
    """From ``at`` on, requests follow ``mix``."""

    at: Duration
    mix: Mix


MixChange.__pydantic_config__ = STRICT  # type: ignore[attr-defined]


def _check_schedule(changes: tuple[MixChange, ...]) -> tuple[MixChange, ...]:
    if not changes or changes[0].at != 0:
        got = f"{changes[0].at:g} s" if changes else "an empty list"
        raise ValueError(f"the first mix must begin at 0s (got {got})")
    for before, after in itertools.pairwise(changes):
        if after.at <= before.at:
            raise ValueError(f"at: must ascend (got {after.at:g} s after {before.at:g} s)")
    return changes


Schedule = Annotated[tuple[MixChange, ...], AfterValidator(_check_schedule)]


def _shape(value: Any) -> str:
    return "a schedule" if isinstance(value, list | tuple) else "a mix"


#: The section of a scenario: a mix for the whole run, or a list of mixes with the time each begins. A step, no slope.
Domains = Annotated[Annotated[Mix, Tag("a mix")] | Annotated[Schedule, Tag("a schedule")], Discriminator(_shape)]


class DomainLaw:
    """A mix or a schedule, made ready to draw from.

    ``names``: the domains in order of first mention; what is drawn are indices into them.
    """

    def __init__(self, domains: Mapping[str, float] | Sequence[MixChange] | None) -> None:
        if domains is None:
            domains = {UNSAID[0]: 1.0}
        changes = [MixChange(at=0.0, mix=dict(domains))] if isinstance(domains, Mapping) else list(domains)
        self.names = tuple(dict.fromkeys(name for change in changes for name in change.mix))
        self._at_s = np.array([change.at for change in changes])
        shares = np.array([[change.mix.get(name, 0.0) for name in self.names] for change in changes])
        upto = np.cumsum(shares, axis=1)
        # Divided by its own last value, so that it ends at exactly 1 and a domain of share 0 is never drawn.
        self._upto = upto / upto[:, -1:]

    def domains_at(self, arrived_s: Floats, uniforms: Floats) -> Ints:
        """Return the domain of requests that arrive at ``arrived_s``, from a uniform in [0, 1) each; both ``[n]``."""
        rows = self._upto[np.searchsorted(self._at_s, arrived_s, side="right") - 1]
        domain: Ints = (rows <= uniforms[:, None]).sum(axis=1)
        return domain

    def domain_at(self, arrived_s: float, uniform: float) -> int:
        """Return the domain of one request; see `domains_at`."""
        row = self._upto[int(self._at_s.searchsorted(arrived_s, side="right")) - 1]
        return int(row.searchsorted(uniform, side="right"))
