"""The target writes: many requests at once, their hidden states kept.

A group of prompts is read a few at a time, and answered step by step in one batch, padded on the left; requests that
have ended are taken out of it. Each token is drawn with a number that belongs to its document and position, so a text
does not depend on its neighbours but for the rounding of a batched pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask

from decoder.chance import KeyedLuck
from decoder.errors import Fault, TargetError
from decoder.lab.prompts import Document
from decoder.lab.store import FLOAT16_MAX, Text
from decoder.target import HfTarget

GROUPED = "grouped"

#: Prompts that are read in one pass.
TOGETHER = 16


def _grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attend without repeating keys and values: the query heads of a group become rows of one query.

    At one token a request this reads the cache once; the stock function copies it once a query head first.
    """
    batch, heads, tokens, width = query.shape
    if attention_mask is None and tokens > 1:  # nothing is padded, and the prompt is read in one pass
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return mixed.transpose(1, 2).contiguous(), None
    shared = key.shape[1]
    rows = query.reshape(batch, shared, heads // shared * tokens, width)
    if attention_mask is not None and tokens > 1:
        attention_mask = attention_mask.repeat(1, 1, heads // shared, 1)
    mixed = functional.scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return mixed.reshape(batch, heads, tokens, width).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, _grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


class _RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer of a cache that is written in place; room for ``room`` tokens of each request is taken once."""

    def __init__(self, requests: int, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.requests = requests
        self.room = room
        self.held = 0
        self._rows: tuple[Tensor, Tensor] | None = None

    def _all(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values; zeros where nothing was written, since a masked row still meets the sum."""
        if self._rows is None:
            shape = (self.requests, like.shape[1], self.room, like.shape[-1])
            self._rows = like.new_zeros(shape), like.new_zeros(shape)
            self.is_initialized, self.dtype, self.device = True, like.dtype, like.device
        return self._rows

    def _show(self) -> tuple[Tensor, Tensor]:
        assert self._rows is not None
        self.keys, self.values = (rows[..., : self.held, :] for rows in self._rows)
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append tokens."""
        start, self.held = self.held, self.held + key_states.shape[-2]
        for rows, new in zip(self._all(key_states), (key_states, value_states), strict=True):
            rows[..., start : self.held, :] = new
        return self._show()

    def put(self, part: _RoomyLayer, rows: range, end: int) -> None:
        """Take the rows of some requests from a cache of their own, so that they end at ``end``."""
        self.held = end
        for mine, theirs in zip(self._all(part._show()[0]), part._show(), strict=True):
            mine[rows.start : rows.stop, :, end - part.held : end] = theirs
        self._show()

    def keep(self, rows: Tensor) -> None:
        """Keep these requests alone."""
        assert self._rows is not None
        self._rows = self._rows[0][rows], self._rows[1][rows]
        self._show()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A document's name and domain, and its prompt as the target's chat template has it.

    ``answer_ids``: the corpus' own answer; None where the target is to write one.
    """

    name: str
    domain: str
    token_ids: tuple[int, ...]
    answer_ids: tuple[int, ...] | None = None


def make_prompt(document: Document, tokenizer: Any, text: str) -> Prompt:
    """Put a document into the target's chat template; without one, its turns stand a paragraph each."""
    if getattr(tokenizer, "chat_template", None):
        roles = ("user", "assistant")
        messages = [{"role": roles[turn % 2], "content": said} for turn, said in enumerate(document.turns)]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer("\n\n".join(document.turns) + "\n\n").input_ids
    answer = None
    if text == "corpus":
        answer = tuple(tokenizer(document.answer, add_special_tokens=False).input_ids)
        if tokenizer.eos_token_id is not None:
            answer = (*answer, tokenizer.eos_token_id)
    return Prompt(document.name, document.domain, tuple(ids), answer)


def of_length(prompts: Iterable[Prompt], fewest: int, most: int) -> list[Prompt]:
    """Return the prompts of ``fewest`` to ``most`` tokens, the last ``fewest`` of each: all of one length.

    What is cut off is the chat template's greeting, as long as that is longer than ``most - fewest``.
    """
    return [
        dataclasses.replace(prompt, token_ids=prompt.token_ids[-fewest:])
        for prompt in prompts
        if fewest <= len(prompt.token_ids) <= most
    ]


@torch.inference_mode()
def write_group(
    target: HfTarget,
    prompts: Sequence[Prompt],
    *,
    layers: Sequence[int],
    eos_ids: frozenset[int],
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[Text]:
    """Let the target answer prompts, and return each text with its hidden states.

    Parameters
    ----------
    layers : sequence of int
        Target layers to keep, from 0.
    temperature : float
        0 is greedy; no other shaping: what is written is the target's own law.

    Raises
    ------
    TargetError
        Where a hidden state does not fit float16.
    """
    target.model.set_attn_implementation(GROUPED)
    # Shortest first: what is read together is of nearly one length, and little is padded.
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row].token_ids))
    batch = [prompts[row] for row in order]
    lengths = [len(prompt.token_ids) for prompt in batch]
    longest = lengths[-1]
    device = target.device
    lucks = [KeyedLuck(seed, prompt.name) for prompt in batch]
    written: list[list[int]] = [[] for _ in batch]
    kept: list[list[Tensor]] = []
    cache = [_RoomyLayer(len(batch), longest + max_new_tokens) for _ in range(target.num_layers)]
    logits = torch.cat(
        [
            _read_prompts(target, batch, range(start, min(start + TOGETHER, len(batch))), cache, longest, layers, kept)
            for start in range(0, len(batch), TOGETHER)
        ]
    )
    positions = torch.tensor(lengths, device=device)[:, None]
    mask = (torch.arange(longest + max_new_tokens, device=device) >= longest - positions).long()
    running = list(range(len(batch)))
    for step in range(max_new_tokens):
        levels = [lucks[row].uniform("token", lengths[row] + step) for row in running]
        chosen = _draw(logits, temperature, levels)
        for row, token in zip(running, chosen, strict=True):
            written[row].append(token)
        going = [at for at, token in enumerate(chosen) if token not in eos_ids]
        if not going or step + 1 == max_new_tokens:
            break
        if len(going) < len(running):
            rows = torch.tensor(going, device=device)
            for layer in cache:
                layer.keep(rows)
            mask, positions = mask[rows], positions[rows]
            running, chosen = [running[at] for at in going], [chosen[at] for at in going]
        ids = torch.tensor(chosen, device=device)[:, None]
        logits, halves = _pass(target, ids, mask[:, : longest + step + 1], positions, cache, layers)
        for at, row in enumerate(running):
            kept[row].append(halves[at])
        positions = positions + 1
    texts = [_text(prompt, tokens, states) for prompt, tokens, states in zip(batch, written, kept, strict=True)]
    return [texts[order.index(row)] for row in range(len(prompts))]


def _read_prompts(
    target: HfTarget,
    batch: Sequence[Prompt],
    rows: range,
    cache: Sequence[_RoomyLayer],
    longest: int,
    layers: Sequence[int],
    kept: list[list[Tensor]],
) -> Tensor:
    """Read some prompts into their rows of ``cache``; return the logits after each, and add its states to ``kept``."""
    width = len(batch[rows[-1]].token_ids)
    ids = torch.zeros(len(rows), width, dtype=torch.int64, device=target.device)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        tokens = batch[row].token_ids
        ids[at, width - len(tokens) :] = torch.tensor(tokens)
        mask[at, width - len(tokens) :] = 1
    own = [_RoomyLayer(len(rows), width) for _ in cache]
    logits, halves = _pass(target, ids, mask, (mask.cumsum(-1) - 1).clamp_min(0), own, layers)
    for layer, part in zip(cache, own, strict=True):
        layer.put(part, rows, longest)
    kept += [[halves[at, width - len(batch[row].token_ids) :]] for at, row in enumerate(rows)]
    return logits


def _pass(
    target: HfTarget, ids: Tensor, mask: Tensor, positions: Tensor, layers: Sequence[_RoomyLayer], kept: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Run the target; return the last logits ``[requests, vocabulary]`` and every state of ``kept``, in float16."""
    cache = DynamicCache()
    cache.layers = list(layers)
    output = target.model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        output_hidden_states=True,
        logits_to_keep=1,
        **{target.cache_key: cache},
    )
    return output.logits[:, -1], _halves([output.hidden_states[layer + 1] for layer in kept])


def _halves(states: Sequence[Tensor]) -> Tensor:
    """Put layers side by side in float16; raises `TargetError` where that cannot hold them."""
    if max(float(state.abs().max()) for state in states) > FLOAT16_MAX:
        raise TargetError(Fault("a hidden state does not fit float16"))
    return torch.cat([state.to(torch.float16) for state in states], -1)


def _draw(logits: Tensor, temperature: float, levels: Sequence[float]) -> list[int]:
    """Draw a token a row, where the level of the row falls in its cumulative distribution."""
    if temperature == 0:
        return [int(token) for token in logits.argmax(-1)]
    cumulative = torch.softmax(logits.float() / temperature, -1).cumsum(-1)
    wanted = torch.tensor(levels, dtype=torch.float32, device=logits.device)[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, wanted, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
    return [int(token) for token in found]


def _text(prompt: Prompt, written: Sequence[int], states: Sequence[Tensor]) -> Text:
    ids = torch.tensor([*prompt.token_ids, *written], dtype=torch.int32)
    features = torch.cat(list(states)).cpu()
    return Text(prompt.name, prompt.domain, len(prompt.token_ids), ids[:-1], ids[1:], features)


@torch.inference_mode()
def read_group(target: HfTarget, prompts: Sequence[Prompt], *, layers: Sequence[int]) -> list[Text]:
    """Read texts whose answers are known (a corpus), and return them with their hidden states."""
    model = target.model
    model.set_attn_implementation(GROUPED)
    whole = [[*prompt.token_ids, *(prompt.answer_ids or ())] for prompt in prompts]
    longest = max(map(len, whole)) - 1
    ids = torch.zeros(len(whole), longest, dtype=torch.int64, device=target.device)
    for row, tokens in enumerate(whole):
        ids[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
    # Padding stands on the right, behind everything that could look at it: the causal mask is enough.
    output = model(input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=1)
    halves = _halves([output.hidden_states[layer + 1] for layer in layers]).cpu()
    return [
        _text(prompt, prompt.answer_ids or (), [halves[row, : len(whole[row]) - 1]])
        for row, prompt in enumerate(prompts)
    ]
