"""DeepSpec's tiny checkpoints by name, their recorded runs, and luck that replays recorded draws."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

TARGET_A, TARGET_B = "target_a_qwen3_4l_tied", "target_b_qwen3_6l_untied"

DRAFTS = {
    "dspark_vanilla_block7": TARGET_A,
    "dspark_gated_block7": TARGET_A,
    "dspark_rnn_block7": TARGET_A,
    "dflash_block7": TARGET_A,
    "dspark_vanilla_block5": TARGET_B,
    "dspark_gated_block5": TARGET_B,
    "dspark_rnn_block5": TARGET_B,
    "dflash_block5": TARGET_B,
    "eagle3_ttt5": TARGET_B,
}
SAMPLED = ("dspark_vanilla_block7", "dflash_block7", "eagle3_ttt5", "dspark_rnn_block5")
TOLERANCE = 1e-4  # absolute, float32; the reference's README


def case(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors under ``prefix.``, without it."""
    return {name[len(prefix) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(prefix + ".")}


def assert_near(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Compare tensors of the same shape, absolutely."""
    assert found.shape == expected.shape
    worst = float((found.to(torch.float64) - expected.to(torch.float64)).abs().max()) if found.numel() else 0.0
    assert worst <= tolerance, f"differs by {worst:.3g}"


@dataclass
class Replay:
    """Recorded draws in the place of chance; every distribution is compared with the recorded one on the way.

    ``after`` draws the tokens that were not recorded: those after the last recorded round.
    """

    run: dict[str, Tensor]
    prompt_tokens: int
    checked: int = field(default=0, init=False)

    def _round(self, anchor_position: int) -> int | None:
        hits = torch.nonzero(self.run["round_start"] == anchor_position).flatten().tolist()
        return hits[0] if hits else None

    def _round_of(self, position: int) -> int | None:
        started = torch.nonzero(self.run["round_start"] < position).flatten().tolist()
        index = started[-1]
        ends = int(self.run["round_start"][index]) + int(self.run["round_accepted"][index]) + 1
        return index if position <= ends else None

    def draft(self, probs: Tensor, anchor_position: int, offset: int) -> int:
        index = self._round(anchor_position)
        if index is None:
            return int(probs.argmax())
        assert_near(probs, self.run["round_draft_probs"][index, offset])
        self.checked += 1
        return int(self.run["round_proposed_ids"][index, offset])

    def accepts(self, chance: float, position: int) -> bool:
        index = self._round_of(position)
        if index is None:
            return False
        offset = position - int(self.run["round_start"][index]) - 1
        return float(self.run["round_uniforms"][index, offset]) < chance

    def token(self, probs: Tensor, position: int) -> int:
        if position == self.prompt_tokens:
            return int(self.run["round_anchor_id"][0])
        index = self._round_of(position)
        if index is None:
            return int(probs.argmax())
        assert_near(probs, self.run["round_next_dist"][index])
        self.checked += 1
        return int(self.run["round_next_id"][index])
