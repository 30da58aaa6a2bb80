"""Linear layers whose weights are laid out once for the CPU's matrix kernel.

Decoding multiplies a few rows at a time. The stock kernel arranges the whole matrix anew at every call with more than
one row, which makes verifying six tokens twice as dear as one; arranged beforehand it costs one and a half times as
much (SmolLM2-135M, float32, one thread of an AVX2 machine: 67 ms for one token, 133 or 104 ms for six).
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor, nn

from decoder.drafter import Drafter
from decoder.small_model import SmallModelDrafter
from decoder.target import HfTarget

#: Rows that the layout is chosen for; any number may be multiplied.
_ROWS = 8


class PackedLinear(nn.Module):
    """A linear layer for inference. ``weight`` is the layer's own, for those who read it; the kernel reads a copy."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the last axis."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def can_pack() -> bool:
    """Whether this build of torch, on this processor, has the kernel."""
    there = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return there and platform.machine() in ("x86_64", "AMD64")


def pack_linears(model: nn.Module) -> int:
    """Let the float32 linear layers of a model on the CPU be packed ones; return how many. Inference only.

    Weights take their memory twice from then on.
    """
    packed = 0
    for parent in list(model.modules()) if can_pack() else ():
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.float32 and child.weight.device.type == "cpu":
                setattr(parent, name, PackedLinear(child))
                packed += 1
    return packed


def pack_models(target: HfTarget, drafter: Drafter | None) -> None:
    """Pack the linear layers of both, where they run in float32 on the CPU."""
    pack_linears(target.model)
    model = drafter.model if isinstance(drafter, SmallModelDrafter) else drafter
    net = model.model if isinstance(model, HfTarget) else getattr(model, "net", None)
    if isinstance(net, nn.Module):
        pack_linears(net)
