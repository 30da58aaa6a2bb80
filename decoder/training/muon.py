"""Muon, for the matrices between hidden states, with its products in a precision that the hardware multiplies.

A step goes along the gradient's momentum with all singular values pulled towards 1 (Newton-Schulz, five iterations of
a quintic; Jordan et al. 2024), sized as AdamW's steps are (Liu et al. 2025, arXiv 2502.16982, section 2.2). It is
`torch.optim.Muon` with ``adjust_lr_fn="match_rms_adamw"``, bit for bit where the products are in bfloat16; that one
knows no other precision, and a CPU that only emulates bfloat16 takes tens of seconds for what float32 does in one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.775, 2.0315)
_ITERATIONS = 5
_LEAST_NORM = 1e-7
_MOMENTUM = 0.95
#: Root mean square of AdamW's steps, about.
_ADAMW_RMS = 0.2


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix of the same singular vectors; singular values that were not tiny come to about .5 to 1.3."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix.to(dtype)
    x = x if wide else x.T
    x = x / x.norm().clamp(min=_LEAST_NORM)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


class Muon(torch.optim.Optimizer):
    """Steps for matrices ``[rows, columns]``.

    ``dtype``: of the products. ``weight_decay`` is decoupled, as AdamW's; groups may have their own ``lr`` and
    ``weight_decay``.
    """

    def __init__(self, params: Iterable[dict[str, Any]], *, dtype: torch.dtype, lr: float = 1e-3) -> None:
        """Raise `ValueError` for what is not a matrix."""
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self.dtype = dtype
        for value in (value for group in self.param_groups for value in group["params"]):
            if value.ndim != 2:
                raise ValueError(f"expected matrices (got shape {tuple(value.shape)})")

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take a step of every matrix that has a gradient."""
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is None:
                    continue
                state = self.state[value]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(value.grad)
                momentum = state["momentum_buffer"].lerp_(value.grad, 1 - _MOMENTUM)
                update = orthogonal(value.grad.lerp(momentum, _MOMENTUM), self.dtype)
                value.mul_(1 - group["lr"] * group["weight_decay"])
                value.add_(update, alpha=-group["lr"] * _ADAMW_RMS * max(value.shape) ** 0.5)
