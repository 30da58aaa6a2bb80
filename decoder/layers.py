"""Building blocks of the draft models: norm, rotary positions, attention, gated MLP (Qwen3 layout)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from decoder.sampling import working_dtype


class RmsNorm(nn.Module):
    """Root mean square norm; the statistics run in float32, or float64 for float64 input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        wide = x.to(working_dtype(x.dtype))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary:
    """Rotary positions without scaling.

    No module, and without buffers: casting a model to bfloat16 must not round its periods.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim = head_dim
        self.theta = theta

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of ``positions`` ``[batch, tokens]``, each ``[batch, 1, tokens, head_dim]``."""
        # In float32 whatever the dtype, as the published models were trained.
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=positions.device) / self.head_dim
        angles = positions[..., None].float() * self.theta**-exponents
        angles = torch.cat([angles, angles], -1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x`` ``[batch, heads, tokens, head_dim]`` to its positions; dimension i pairs with i + half."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Attention(nn.Module):
    """Grouped-query attention with norms on queries and keys; what is attended to comes from outside.

    ``input_width`` may differ from the model's width (an EAGLE-3 layer reads embedding and state side by side).
    """

    def __init__(self, config: Any, input_width: int | None = None) -> None:
        super().__init__()
        width = input_width or config.hidden_size
        self.head_dim = config.head_dim
        self.heads = config.num_attention_heads
        self.key_value_heads = config.num_key_value_heads
        bias = config.attention_bias
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RmsNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RmsNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys (normed, rotated) and values of ``x`` ``[batch, tokens, width]``.

        Each is ``[batch, key/value heads, tokens, head_dim]``.
        """
        split = (*x.shape[:-1], self.key_value_heads, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(split)).transpose(1, 2)
        return rotate(keys, cos, sin), self.v_proj(x).view(split).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from ``x`` ``[batch, tokens, width]`` to ``keys`` and ``values``.

        ``mask`` (bool, broadcast to ``[batch, heads, tokens, rows]``) is True where a query may look; None: anywhere.
        """
        queries = self.q_norm(self.q_proj(x).view(*x.shape[:-1], self.heads, self.head_dim)).transpose(1, 2)
        groups = self.heads // self.key_value_heads
        mixed = functional.scaled_dot_product_attention(
            rotate(queries, cos, sin),
            keys.repeat_interleave(groups, 1),
            values.repeat_interleave(groups, 1),
            attn_mask=mask,
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:-1], -1))
        return out


class Mlp(nn.Module):
    """Gated MLP with SiLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map the last axis through the gate and back."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
