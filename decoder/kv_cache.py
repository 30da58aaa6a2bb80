"""Key/value caches that can be cut back to the committed tokens, and forked where texts share a beginning."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sim.errors import InvariantError


@dataclass(slots=True)
class KvCache:
    """Keys and values of each layer, ``[1, key/value heads, tokens, head_dim]``.

    Rows are appended and cut, never written over: a `fork` may therefore share memory with its origin.
    """

    layers: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Rows held, the same in every layer."""
        return self.keys[0].shape[-2] if self.keys else 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows to a layer and return all of its rows."""
        if layer == len(self.keys):
            self.keys.append(keys)
            self.values.append(values)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], keys], -2)
            self.values[layer] = torch.cat([self.values[layer], values], -2)
        return self.keys[layer], self.values[layer]

    def crop(self, tokens: int) -> None:
        """Keep the first ``tokens`` rows."""
        if tokens > self.tokens:
            raise ValueError(f"cannot crop {self.tokens} rows to {tokens}")
        self.keys = [keys[..., :tokens, :] for keys in self.keys]
        self.values = [values[..., :tokens, :] for values in self.values]

    def fork(self, tokens: int) -> KvCache:
        """Return a cache of its own that holds the first ``tokens`` rows."""
        other = KvCache(self.layers, list(self.keys), list(self.values))
        other.crop(tokens)
        return other

    def check(self) -> None:
        """Raise unless every layer holds the same rows."""
        lengths = {tensor.shape[-2] for tensor in (*self.keys, *self.values)}
        if len(lengths) > 1 or len(self.keys) not in (0, self.layers):
            raise InvariantError(f"layers hold different rows: {sorted(lengths)} in {len(self.keys)} of {self.layers}")
