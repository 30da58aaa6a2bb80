"""Toy models with known laws, and exact enumeration of everything chance can do to the real decoder.

`TableTarget` is p(next | last token) over a few tokens. Its hidden states are fixed vectors, so that the real draft
networks, tiny and with random weights, run on it. `paths` runs a function once for every way its draws can fall.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoder.chain import ChainDrafter
from decoder.checkpoint import make_drafter, make_net
from decoder.config import DSPARK, EAGLE3, MTP, DraftConfig
from decoder.drafter import Reads
from decoder.dspark import BlockDrafter
from decoder.sampling import DraftSampler
from decoder.small_model import SmallModelDrafter
from decoder.target import TargetOutput
from decoder.vocabulary import set_draft_ids

WIDTH = 8
LAYERS = 2


@dataclass
class TokenCache:
    """The cache of a table: the tokens themselves."""

    ids: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def crop(self, tokens: int) -> None:
        if tokens > len(self.ids):
            raise ValueError(f"cannot crop {len(self.ids)} tokens to {tokens}")
        del self.ids[tokens:]

    def fork(self, tokens: int) -> "TokenCache":
        return TokenCache(self.ids[:tokens])


class TableTarget:
    """p(next | last token), float64; impossible tokens have a logit of -inf."""

    num_layers = LAYERS
    hidden_size = WIDTH
    device = torch.device("cpu")

    def __init__(self, table: Any, max_context_tokens: int = 64, dtype: torch.dtype = torch.float64) -> None:
        self.table = torch.as_tensor(np.asarray(table), dtype=torch.float64)
        assert torch.allclose(self.table.sum(-1), torch.ones(len(self.table), dtype=torch.float64))
        self.logits = self.table.log().to(dtype)
        self.vocab_size = len(self.table)
        self.max_context_tokens = max_context_tokens
        generator = torch.Generator().manual_seed(5)
        self.states = torch.randn(LAYERS + 1, self.vocab_size, WIDTH, generator=generator, dtype=torch.float64)
        self.forward_tokens: list[int] = []  # how many tokens each pass read

    def new_cache(self) -> TokenCache:
        return TokenCache()

    def forward(
        self, token_ids: Sequence[int], cache: Any, feature_layers: Sequence[int] = (), logit_rows: int = 0
    ) -> TargetOutput:
        cache.ids.extend(token_ids)
        self.forward_tokens.append(len(token_ids))
        ids = torch.tensor(list(token_ids))
        features = [self.states[layer + 1][ids] for layer in feature_layers]
        return TargetOutput(
            self.logits[ids][len(ids) - logit_rows :],
            torch.cat(features, -1) if features else torch.zeros(len(ids), 0),
        )


class TableDrafter:
    """q(next | last token) with a confidence of one's own; chained, so any length goes."""

    kind = "table"
    chained = True
    feature_layers: tuple[int, ...] = ()

    def __init__(
        self,
        table: Any,
        trained_length: int,
        confidence: Callable[[list[int]], float] = lambda tokens: 0.8,
        reads: Reads = "past",
        peeks: bool = False,
    ) -> None:
        """``confidence`` maps tokens to a chance: the anchor and the draft tokens before the one it speaks of, and
        that one too if it ``peeks``. ``reads`` is what the drafter says of itself."""
        self.logits = torch.as_tensor(np.asarray(table), dtype=torch.float64).log()
        self.trained_length = trained_length
        self.confidence = confidence
        self.confidence_reads = reads
        self.peeks = peeks

    def start(self) -> "TableRequestDrafter":
        return TableRequestDrafter(self, 0)


class TableRequestDrafter:
    def __init__(self, drafter: TableDrafter, tokens: int) -> None:
        self.drafter = drafter
        self.tokens = tokens

    def advance(self, token_ids: Sequence[int], features: Tensor, next_id: int) -> None:
        self.tokens += len(token_ids)

    def propose(self, anchor_id: int, length: int, sampler: DraftSampler) -> list[float]:
        tokens, logits = [anchor_id], []
        for _ in range(length):
            before = list(tokens)
            tokens.append(sampler.draw(self.drafter.logits[tokens[-1]]))
            chance = self.drafter.confidence(list(tokens) if self.drafter.peeks else before)
            chance = min(max(chance, 1e-12), 1 - 1e-7)
            logits.append(float(np.log(chance / (1 - chance))))
        return logits

    def fork(self, tokens: int) -> "TableRequestDrafter":
        return TableRequestDrafter(self.drafter, tokens)


# The real drafters, tiny

DRAFTER_KINDS = ("dspark_vanilla", "dspark_gated", "dspark_rnn", "dflash", "eagle3", "mtp", "small_model")


#: The same with a draft vocabulary that lacks token 1.
REDUCED_KINDS = ("dspark_rnn_reduced", "dflash_reduced", "eagle3_reduced", "mtp_reduced")


def tiny_config(kind: str, vocabulary: int, length: int) -> DraftConfig:
    reduced = kind.endswith("_reduced")
    family, _, head = kind.removesuffix("_reduced").partition("_")
    parallel = family in ("dspark", "dflash")
    return DraftConfig(
        architecture={"dspark": DSPARK, "dflash": DSPARK, "eagle3": EAGLE3, "mtp": MTP}[family],
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1 if family == "eagle3" else 2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        target_layer_ids=(1,) if family == "mtp" else (-1, 1),
        num_target_layers=LAYERS,
        block_size=length if parallel else 0,
        mask_token_id=vocabulary - 1 if parallel else None,
        markov_rank=3 if family == "dspark" else 0,
        markov_head_type=head or "vanilla",
        enable_confidence_head=family == "dspark",
        confidence_head_with_markov=family == "dspark",
        ttt_length=1 if parallel else length,
        draft_vocab_size=vocabulary - 1 if reduced else None,
    )


def tiny_drafter(kind: str, vocabulary: int, length: int, seed: int = 1) -> BlockDrafter | ChainDrafter | Any:
    """Return a drafter with random weights, large enough to disagree with any target, in float64."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "small_model":
        table = torch.softmax(1.5 * torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64), -1)
        return SmallModelDrafter(TableTarget(table), trained_length=length)
    net = make_net(tiny_config(kind, vocabulary, length), dtype=torch.float64)
    with torch.no_grad():
        for name, tensor in net.named_parameters():
            if "norm" not in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.6)
    if net.config.draft_vocab_size is not None:
        set_draft_ids(net, torch.tensor([token for token in range(vocabulary) if token != 1]))
    return make_drafter(net)


# Exact enumeration


class Script:
    """Chance, one way it can fall: follows choices made before, then takes the first that is possible.

    Serves as `Luck` for any number of requests.
    """

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices
        self.options: list[list[float]] = []
        self.chance = 1.0

    def _choose(self, chances: list[float]) -> int:
        at = len(self.options)
        if at == len(self.choices):
            self.choices.append(next(i for i, chance in enumerate(chances) if chance > 0))
        self.options.append(chances)
        self.chance *= chances[self.choices[at]]
        return self.choices[at]

    def draft(self, probs: Tensor, anchor_position: int, offset: int) -> int:
        return self._choose(probs.tolist())

    def accepts(self, chance: float, position: int) -> bool:
        return self._choose([chance, 1 - chance]) == 0

    def token(self, probs: Tensor, position: int) -> int:
        return self._choose(probs.tolist())


def paths(run: Callable[[Script], Any]) -> Iterator[tuple[float, Any]]:
    """Run ``run`` once for every way its draws can fall; yield each way's chance and result."""
    choices: list[int] = []
    while True:
        script = Script(list(choices))
        result = run(script)
        yield script.chance, result
        choices = script.choices
        while choices:
            last = choices.pop()
            after = [i for i, chance in enumerate(script.options[len(choices)]) if i > last and chance > 0]
            if after:
                choices.append(after[0])
                break
        if not choices:
            return
