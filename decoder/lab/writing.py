"""The target writes: many requests at once, their hidden states kept.

A group of prompts is padded on the left to one length, read in one pass, and answered step by step; requests that have
ended are taken out of the batch. Each token is drawn with a number that belongs to its document and position, so a text
does not depend on its neighbours but for the rounding of a batched pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
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
    """A layer of a cache that is written in place; room for ``room`` tokens is taken once."""

    def __init__(self, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room = room
        self.held = 0
        self._all_keys: Tensor | None = None
        self._all_values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append tokens."""
        if self._all_keys is None or self._all_values is None:
            self.lazy_initialization(key_states, value_states)
            batch, heads, _tokens, width = key_states.shape
            self._all_keys = key_states.new_empty(batch, heads, self.room, width)
            self._all_values = value_states.new_empty(batch, heads, self.room, width)
        start, self.held = self.held, self.held + key_states.shape[-2]
        self._all_keys[..., start : self.held, :] = key_states
        self._all_values[..., start : self.held, :] = value_states
        self.keys, self.values = self._all_keys[..., : self.held, :], self._all_values[..., : self.held, :]
        return self.keys, self.values

    def keep(self, rows: Tensor) -> None:
        """Keep these requests alone."""
        assert self._all_keys is not None
        assert self._all_values is not None
        self._all_keys, self._all_values = self._all_keys[rows], self._all_values[rows]
        self.keys, self.values = self._all_keys[..., : self.held, :], self._all_values[..., : self.held, :]


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
    model = target.model
    model.set_attn_implementation(GROUPED)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    batch, device = len(prompts), target.device
    ids = torch.zeros(batch, longest, dtype=torch.int64, device=device)
    mask = torch.zeros(batch, longest + max_new_tokens, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
        mask[row, longest - len(prompt.token_ids) :] = 1
    positions = (mask[:, :longest].cumsum(-1) - 1).clamp_min(0)
    cache = DynamicCache()
    cache.layers = [_RoomyLayer(longest + max_new_tokens) for _ in range(target.num_layers)]
    cache_key = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    lucks = [KeyedLuck(seed, prompt.name) for prompt in prompts]
    written: list[list[int]] = [[] for _ in prompts]
    kept: list[list[Tensor]] = [[] for _ in prompts]
    running = list(range(batch))
    for step in range(max_new_tokens):
        total = longest + step
        output = model(
            input_ids=ids,
            attention_mask=mask[:, :total],
            position_ids=positions,
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=1,
            **{cache_key: cache},
        )
        states = torch.cat([output.hidden_states[layer + 1] for layer in layers], -1)
        if float(states.abs().max()) > FLOAT16_MAX:
            raise TargetError(Fault(f"a hidden state of layers {list(layers)} does not fit float16"))
        halves = states.to(torch.float16)
        chosen = _draw(
            output.logits[:, -1],
            temperature,
            [lucks[row].uniform("token", len(prompts[row].token_ids) + step) for row in running],
        )
        going = []
        for at, row in enumerate(running):
            kept[row].append(halves[at, -len(prompts[row].token_ids) :] if step == 0 else halves[at])
            written[row].append(chosen[at])
            if chosen[at] not in eos_ids:
                going.append(at)
        if not going:
            break
        if len(going) < len(running):
            rows = torch.tensor(going, device=device)
            for layer in cache.layers:
                assert isinstance(layer, _RoomyLayer)
                layer.keep(rows)
            mask, positions = mask[rows], positions[rows]
            running, chosen = [running[at] for at in going], [chosen[at] for at in going]
        ids = torch.tensor(chosen, device=device)[:, None]
        positions = positions[:, -1:] + 1
        if step + 1 < max_new_tokens:
            mask[:, total] = 1
    return [_text(prompt, tokens, states) for prompt, tokens, states in zip(prompts, written, kept, strict=True)]


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
    states = torch.cat([output.hidden_states[layer + 1] for layer in layers], -1)
    if float(states.abs().max()) > FLOAT16_MAX:
        raise TargetError(Fault(f"a hidden state of layers {list(layers)} does not fit float16"))
    halves = states.to(torch.float16).cpu()
    return [
        _text(prompt, prompt.answer_ids or (), [halves[row, : len(whole[row]) - 1]])
        for row, prompt in enumerate(prompts)
    ]
