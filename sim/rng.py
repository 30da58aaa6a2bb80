"""Chance: one stream a purpose, and counter-based uniforms keyed by request and position.

Streams are named: a name is hashed into a `numpy.random.SeedSequence` spawn key, so that a new stream never
shifts an old one. Luck inside the step loop is a pure function of (seed, request key, output position), so that
request 17 meets the same luck at the same place of its text under every policy, in whatever order work is done.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numba
import numpy as np


@dataclass(frozen=True, slots=True)
class Streams:
    """Named random streams of one seed; only the fleet builder and the commands make one."""

    seed: int
    replication: int = 0

    def sequence(self, *name: str | int) -> np.random.SeedSequence:
        """Return the seed sequence of a name."""
        digest = hashlib.sha256("\x1f".join(f"{type(part).__name__}:{part}" for part in name).encode()).digest()
        words = tuple(int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4))
        return np.random.SeedSequence(self.seed, spawn_key=(self.replication, *words))

    def get(self, *name: str | int) -> np.random.Generator:
        """Return a fresh generator for a purpose, for example ``get("arrivals")``."""
        return np.random.Generator(np.random.PCG64(self.sequence(*name)))

    def key(self, *name: str | int) -> np.uint64:
        """Return a 64-bit key for the counter-based uniforms of a purpose."""
        return np.uint64(self.sequence(*name).generate_state(1, np.uint64)[0])


@numba.njit(inline="always")
def mix64(x):  # type: ignore[no-untyped-def]
    """Scramble 64 bits: the output function of splitmix64 (Steele, Lea, Flood 2014)."""
    x = np.uint64(x) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.njit(inline="always")
def uniform(key, request_key, position):  # type: ignore[no-untyped-def]
    """Return a uniform in (0, 1), a pure function of its arguments (each a uint64)."""
    bits = mix64(mix64(key ^ mix64(request_key)) ^ np.uint64(position))
    return (np.float64(bits >> np.uint64(11)) + 0.5) * (1.0 / 9007199254740992.0)
