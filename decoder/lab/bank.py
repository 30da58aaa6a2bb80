"""What a drafter is worth at every place of a text that the target wrote.

At each place of the answer a block is drafted as the decoder would draft it there: the token at the place is the
anchor, everything before it is committed, and draft token k is proposed after the text's own tokens up to k. Nothing is
sampled, so that every place says what it has to say exactly, and one pass over the text serves them all.

==================  ====================================================================================================
``chance``          1 - TV of the draft's distribution q and the target's p: the chance that a token drawn from q passes
``token_chance``    min(1, q/p) of the token x that stands in the text: the chance that it came from an accepted draft
                    token, given that it is what was emitted. Over x drawn from p its mean is ``chance``.
``outcome``         whether it did, by luck keyed to the text and the position
==================  ====================================================================================================

Followed along the text, ``outcome`` is what speculative decoding does to *this* text, exactly: a token is emitted with
chance p whatever is drafted, and given the token, acceptance is independent of everything else. ``chance`` is steadier
at one place, but a product of it over a block is only nearly the block's survival: a prefix that was accepted is not
any prefix.
At temperature 0 all three are 1 where the drafter's likeliest token is the text's, else 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoder.chain import ChainDrafter
from decoder.chance import KeyedLuck
from decoder.confidence import SURE
from decoder.drafter import Drafter
from decoder.dspark import BlockDrafter
from decoder.errors import Fault, InputError
from decoder.kv_cache import KvCache
from decoder.lab.store import Text
from decoder.sampling import largest, working_dtype
from decoder.small_model import SmallModelDrafter

#: Rows of blocks in one pass: longer passes spend their time on blocks that do not look at each other.
ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Judged:
    """Blocks of one text: ``place`` ``[places]``, the rest ``[places, draft_length]``.

    ``place``: the anchor's place in the answer, from 0. ``confidence_logits``: raw.
    """

    place: NDArray[np.int64]
    confidence_logits: NDArray[np.float64]
    chance: NDArray[np.float64]
    token_chance: NDArray[np.float64]
    outcome: NDArray[np.bool_]


#: Draft token k of blocks at many places: logits ``[places, draft vocabulary]``, confidence logits ``[places]``.
Drafted = tuple[Tensor, Tensor]


def places_of(text: Text, draft_length: int) -> range:
    """Return the anchors, as indices into the whole text, after which the text holds a whole block.

    The first token of the answer is the first anchor: the prefill drew it.
    """
    tokens = int(text.token_ids.shape[0]) + 1
    return range(text.prompt_tokens, tokens - draft_length)


def target_probs(states: Tensor, head: Tensor, temperature: float) -> Tensor:
    """Return the target's distributions ``[rows, vocabulary]`` after rows whose final states are known.

    ``states`` ``[rows, hidden_size]``: after the final norm. At temperature 0, raw logits are returned: only their
    order matters there.
    """
    logits = states.to(head.dtype) @ head.T
    logits = logits.to(working_dtype(logits.dtype))
    return logits if temperature == 0 else torch.softmax(logits / temperature, -1)


@torch.inference_mode()
def judge_text(
    text: Text,
    drafter: Drafter,
    features: Tensor,
    target: Tensor,
    *,
    temperature: float,
    draft_length: int,
    seed: int = 0,
    written: bool = True,
) -> Judged:
    """Draft a block at every place of a text and judge it.

    Parameters
    ----------
    text : Text
    drafter : Drafter
    features : tensor [rows, feature layers * hidden_size]
        The target's hidden states at the text's rows, over the drafter's ``feature_layers``.
    target : tensor [rows - prompt_tokens, vocabulary]
        `target_probs` of the rows from the answer's first token on.
    temperature : float
        That the text was written at.
    draft_length : int
        Draft tokens of a block.
    seed : int
        Of the outcomes.
    written : bool
        Whether the target wrote the text at this temperature. What a person wrote is not drawn from p: outcomes then
        have ``chance``.
    """
    places = places_of(text, draft_length)
    n, first = len(places), text.prompt_tokens
    tokens = torch.cat([text.token_ids, text.next_ids[-1:]]).long().to(features.device)
    # Row i of these belongs to the answer's token i + 1.
    answer = tokens[first + 1 :]
    wanted = target.gather(1, answer[:, None])[:, 0]
    token_ids = draft_vocabulary(drafter)
    if temperature > 0 and token_ids is not None:
        target = target[:, token_ids]
    out = {name: np.zeros((n, draft_length)) for name in ("logits", "chance", "token_chance")}
    at_once = max(1, ROWS_AT_ONCE // draft_length)
    for start in range(0, n, at_once):
        some = torch.tensor(places[start : start + at_once], device=features.device)
        rows = slice(start, start + len(some))
        for k, (logits, confidence) in enumerate(draft_everywhere(drafter, tokens, features, some, draft_length)):
            there = slice(start + k, start + k + len(some))
            if temperature == 0:
                chance = token_chance = _agrees(logits, token_ids, answer[there])
            else:
                probs = torch.softmax(logits.to(working_dtype(logits.dtype)) / temperature, -1)
                chance = torch.minimum(target[there], probs).sum(-1).clamp_max(1.0)
                offered = _offered(probs, token_ids, answer[there])
                token_chance = torch.where(wanted[there] > 0, (offered / wanted[there]).clamp_max(1.0), 1.0)
            out["logits"][rows, k] = confidence.double().cpu().numpy()
            out["chance"][rows, k] = chance.double().cpu().numpy()
            out["token_chance"][rows, k] = token_chance.double().cpu().numpy()
    luck = KeyedLuck(seed, text.name)
    uniform = np.array([luck.uniform("bank", place) for place in range(first, len(tokens))])
    place = np.arange(n)
    judged_at = place[:, None] + 1 + np.arange(draft_length)
    outcome = uniform[judged_at] < out["token_chance" if written else "chance"]
    return Judged(place, out["logits"], out["chance"], out["token_chance"], outcome)


def draft_vocabulary(drafter: Drafter) -> Tensor | None:
    """Return the target tokens that a drafter can propose, ascending; None: all of them."""
    return drafter.draft_ids if isinstance(drafter, BlockDrafter | ChainDrafter) else None


def _agrees(logits: Tensor, token_ids: Tensor | None, answer: Tensor) -> Tensor:
    """Return 1 where the likeliest draft token is the text's, else 0, ``[places]``."""
    likeliest = largest(logits.to(working_dtype(logits.dtype)))
    return (likeliest if token_ids is None else token_ids[likeliest]).eq(answer).double()


def _offered(probs: Tensor, token_ids: Tensor | None, answer: Tensor) -> Tensor:
    """Return the draft's probability of the text's tokens, ``[places]``; 0 where it cannot propose them."""
    if token_ids is None:
        return probs.gather(1, answer[:, None])[:, 0]
    draft_id = torch.searchsorted(token_ids, answer).clamp_max(len(token_ids) - 1)
    return probs.gather(1, draft_id[:, None])[:, 0] * token_ids[draft_id].eq(answer)


def draft_everywhere(
    drafter: Drafter, tokens: Tensor, features: Tensor, places: Tensor, draft_length: int
) -> Iterator[Drafted]:
    """Yield draft tokens 0, 1, ... of the blocks at ``places``, each after the text's own tokens before it.

    Parameters
    ----------
    tokens : tensor [text tokens]
    features : tensor [text tokens - 1, feature layers * hidden_size]
    places : tensor [places]
        Anchors, ascending; each at least 1.
    """
    if isinstance(drafter, BlockDrafter):
        return _blocks(drafter, tokens, features, places, draft_length)
    if isinstance(drafter, ChainDrafter):
        return _chains(drafter, tokens, features, places, draft_length)
    if isinstance(drafter, SmallModelDrafter):
        return _small_model(drafter, tokens, places, draft_length)
    raise InputError(Fault(f"a {drafter.kind} drafter cannot be recorded", key="--drafter"))


def _blocks(
    drafter: BlockDrafter, tokens: Tensor, features: Tensor, places: Tensor, draft_length: int
) -> Iterator[Drafted]:
    net, length = drafter.net, drafter.trained_length
    device = features.device
    before = int(places[-1])
    features = features[:before].to(net.fc.weight.dtype)
    context = net.context_rows(features[None], torch.arange(before, device=device)[None])
    n = len(places)
    offsets = torch.arange(length, device=device)
    ids = net.block_ids(tokens[places], length).reshape(1, -1)
    positions = (places[:, None] + offsets).reshape(1, -1)
    owner = torch.arange(n, device=device).repeat_interleave(length)
    sees = torch.arange(before, device=device)[None] < places[owner][:, None]
    mask = torch.cat([sees, owner[:, None] == owner[None]], 1)[None, None]
    hidden = net(ids, positions, context, mask)[0].view(n, length, -1)
    state = None
    for k in range(draft_length):
        here, prev = hidden[:, k], tokens[places + k]
        logits, embedding = net.lm_head(here), None
        if net.markov_head is not None:
            bias, state = net.markov_head.step(prev, here, state)
            logits = logits + bias
            embedding = net.markov_head.markov_w1(prev)
        if net.confidence_head is not None:
            confidence = net.confidence_head(here, embedding)
        else:
            confidence = top_probability_logits(logits)
        yield logits, confidence


def _chains(
    drafter: ChainDrafter, tokens: Tensor, features: Tensor, places: Tensor, draft_length: int
) -> Iterator[Drafted]:
    net = drafter.net
    device = features.device
    before, n = int(places[-1]), len(places)
    cache = KvCache(net.config.num_hidden_layers)
    committed = net.rows(
        tokens[1 : before + 1], net.fuse(features[:before]), torch.arange(before, device=device), cache
    )
    # Row place - 1 holds the anchor; a chain sees the rows before its anchor, and its own.
    sees = torch.arange(before, device=device)[None] < places[:, None]
    own = torch.eye(n, dtype=torch.bool, device=device)
    states = committed[places - 1]
    for k in range(draft_length):
        if k > 0:
            sees = torch.cat([sees, own], 1)
            states = net.rows(tokens[places + k], states, places + k - 1, cache, sees)
        logits = net.logits(states)
        yield logits, top_probability_logits(logits)


def _small_model(drafter: SmallModelDrafter, tokens: Tensor, places: Tensor, draft_length: int) -> Iterator[Drafted]:
    model = drafter.model
    last, first = int(places[-1]) + draft_length, int(places[0])
    logits = model.forward(tokens[:last].tolist(), model.new_cache(), logit_rows=last - first).logits
    confidence = top_probability_logits(logits)
    for k in range(draft_length):
        rows = places - first + k
        yield logits[rows], confidence[rows]


def top_probability_logits(logits: Tensor) -> Tensor:
    """Return the log odds of the likeliest token in each row; see `decoder.confidence.top_probability_logit`."""
    probs = torch.softmax(logits.to(working_dtype(logits.dtype)), -1)
    top = probs.amax(-1)
    rest = probs.sum(-1) - top
    odds = torch.log(top / rest).clamp(-SURE, SURE)
    return torch.where(rest > 0, odds, torch.full_like(odds, SURE))
