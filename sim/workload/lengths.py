"""Laws of prompt and output lengths; each length takes one uniform, so that request n keeps its luck."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Le
from scipy.special import ndtr, ndtri

from sim.units import Count
from sim.workload.base import LENGTHS, Floats, Ints

#: Longer than any context there is: beyond it a length is a slip of the pen.
MAX_TOKENS = 1_000_000_000

Tokens = Annotated[int, Ge(1), Le(MAX_TOKENS)]


@LENGTHS.register("fixed")
@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Every length the same."""

    kind: Literal["fixed"] = "fixed"
    tokens: Tokens

    def draw_tokens(self, n: int, *, rng: np.random.Generator) -> Ints:
        """Return ``n`` times the same length; uses no chance."""
        return np.full(n, self.tokens, np.int64)


@LENGTHS.register("lognormal")
@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Lengths whose logarithm is normal, rounded to whole tokens.

    The spread is given as ``sigma`` of the logarithm or as the 95th percentile ``p95``. With ``min`` or ``max`` the law
    is the same one, drawn again until it falls between them (both included): nothing piles up at the limits, and
    ``median`` and ``p95`` are those of the law before. ``min`` is 1 where nothing is said.
    """

    kind: Literal["lognormal"] = "lognormal"
    median: Annotated[float, Gt(0), Le(MAX_TOKENS)]
    sigma: Annotated[float, Gt(0), Le(10)] | None = None
    p95: Annotated[float, Gt(0), Le(MAX_TOKENS)] | None = None
    min: Count = 1
    max: Tokens = MAX_TOKENS

    def __post_init__(self) -> None:
        """Refuse a spread that is given twice or not at all, and limits that leave next to nothing."""
        if (self.sigma is None) == (self.p95 is None):
            given = "neither" if self.sigma is None else f"sigma {self.sigma:g} and p95 {self.p95:g}"
            raise ValueError(f"give one of sigma and p95 (got {given})")
        if self.p95 is not None and self.p95 <= self.median:
            raise ValueError(f"p95: must be above median {self.median:g} (got {self.p95:g})")
        if self.max < self.min:
            raise ValueError(f"max: must be at least min {self.min} (got {self.max})")
        below, above = self._limits()
        if above - below < 1e-6:
            raise ValueError(
                f"min and max: at least a millionth of all lengths must lie between them (got {above - below:.1g} "
                f"from {self.min} to {self.max})"
            )

    @property
    def log_sigma(self) -> float:
        """Standard deviation of the logarithm of a length."""
        if self.sigma is not None:
            return self.sigma
        assert self.p95 is not None
        return float(np.log(self.p95 / self.median) / ndtri(0.95))

    def _limits(self) -> tuple[float, float]:
        """Return the chance of a length below the least and of one up to the greatest allowed."""
        # Lengths are rounded: a draw from min − ½ to max + ½ becomes one from min to max.
        scores = np.log(np.array([self.min - 0.5, self.max + 0.5]) / self.median) / self.log_sigma
        below, above = ndtr(scores)
        return float(below), float(above)

    def draw_tokens(self, n: int, *, rng: np.random.Generator) -> Ints:
        """Draw ``n`` lengths in tokens, each from ``min`` to ``max``."""
        below, above = self._limits()
        # Inversion of the law between the limits: the same law as drawing again, at one uniform a length.
        uniforms = below + (above - below) * rng.random(n)
        tokens = np.rint(self.median * np.exp(self.log_sigma * ndtri(uniforms)))
        # Only rounding at the very ends of the interval is caught here.
        limited: Ints = np.clip(tokens, self.min, self.max).astype(np.int64)
        return limited


@LENGTHS.register("quantiles")
@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """A measured quantile table, straight between its points.

    ``probabilities`` ascend from 0 to 1: the least and the greatest length are part of the table, nothing is
    extrapolated.
    """

    kind: Literal["quantiles"] = "quantiles"
    probabilities: tuple[Annotated[float, Ge(0), Le(1)], ...]
    tokens: tuple[Tokens, ...]

    def __post_init__(self) -> None:
        """Refuse a table that is no quantile function."""
        probabilities, tokens = self.probabilities, self.tokens
        if len(probabilities) != len(tokens):
            raise ValueError(f"tokens: must be as many as probabilities, {len(probabilities)} (got {len(tokens)})")
        if len(probabilities) < 2 or probabilities[0] != 0 or probabilities[-1] != 1:
            raise ValueError(
                "probabilities: must begin with 0 and end with 1, for the least and the greatest length "
                f"(got {list(probabilities)})"
            )
        for name, values, strict in (("probabilities", probabilities, True), ("tokens", tokens, False)):
            for before, after in itertools.pairwise(values):
                if after < before or (strict and after == before):
                    raise ValueError(f"{name}: must ascend (got {before:g} before {after:g})")

    def draw_tokens(self, n: int, *, rng: np.random.Generator) -> Ints:
        """Draw ``n`` lengths in tokens, rounded to whole ones."""
        tokens: Floats = np.interp(rng.random(n), self.probabilities, self.tokens)
        return np.rint(tokens).astype(np.int64)
