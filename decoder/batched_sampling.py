"""The draws of many requests at once: the same steps as `sampling`, `chance` and `accept`, row by row alike.

Uniforms come from each request's own `KeyedLuck`, so a row's token is the one it would have drawn alone; everything
else is tensors, so that a device is waited for once a round, not once a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder.chance import OFFSETS, KeyedLuck
from decoder.sampling import DraftSampler, Sampling, Shaper, largest, one_hot, shape, working_dtype


@dataclass(frozen=True, slots=True)
class Drawer:
    """How one request's tokens are drawn, and where its anchor stands in the text."""

    shaper: Shaper
    luck: KeyedLuck
    anchor_position: int


def finite_rows(logits: Tensor) -> Tensor:
    """Return which rows of ``logits`` hold a distribution, bool ``[rows]``; -inf marks a token as impossible."""
    return ~torch.isnan(logits).any(-1) & torch.isfinite(logits.amax(-1))


def shaped(
    logits: Tensor, shapers: Sequence[Shaper], drafts: Sequence[Sequence[int]], token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return each row's distribution, and which rows were finite.

    Parameters
    ----------
    logits : tensor [rows, vocabulary]
    shapers : sequence [rows]
        Of the request that a row belongs to.
    drafts : sequence [rows]
        The draft tokens that a row follows; read only where a penalty looks at them.
    token_ids : tensor [vocabulary], optional
        The token of each logit, where these are of a reduced vocabulary.

    Returns
    -------
    tensor [rows, vocabulary], tensor [rows] bool
        A row that is not finite gets some distribution or other; its request fails.
    """
    finite = finite_rows(logits)
    logits = torch.where(finite[:, None], logits, 0.0)
    alike: dict[Sampling, list[int]] = {}
    for row, shaper in enumerate(shapers):
        alike.setdefault(shaper.sampling, []).append(row)
    if len(alike) == 1 and shapers[0].sampling.repetition_penalty == 1:
        return shape(logits, shapers[0].sampling), finite
    probs = torch.empty(logits.shape, dtype=working_dtype(logits.dtype), device=logits.device)
    for sampling, rows in alike.items():
        if sampling.repetition_penalty == 1:
            probs[rows] = shape(logits[rows], sampling)
        else:
            for row in rows:
                whole = shapers[row].probs(logits[row : row + 1], drafts[row], token_ids=token_ids)[0]
                probs[row] = whole if token_ids is None else whole[token_ids]
    return probs, finite


def tokens_at(probs: Tensor, levels: Tensor) -> Tensor:
    """Return the token of each row whose share of the cumulative distribution holds its level; see `token_at`.

    ``probs`` ``[rows, vocabulary]``; ``levels`` ``[rows]``, float64 in [0, 1).
    """
    cumulative = probs.to(torch.float64).cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, levels[:, None] * total, right=True)
    # Where rounding put the level on the total, the token that completes it owns it.
    return torch.minimum(found, torch.searchsorted(cumulative, total))[:, 0]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens of a round, and the very distributions they were drawn from.

    ``ids``, ``chances`` ``[requests, drafted]``: each token and what it had under its row; ``rows`` ``[drafted]`` of
    ``[requests, draft vocabulary]``; ``token_ids``: the token of each column, None for the whole vocabulary;
    ``finite`` ``[requests]``.
    """

    ids: Tensor
    chances: Tensor
    rows: tuple[Tensor, ...]
    token_ids: Tensor | None
    finite: Tensor


class BatchSampler:
    """Draws a block for every request of a round; see `DraftSampler`."""

    def __init__(self, drawers: Sequence[Drawer], length: int, device: torch.device, greedy: bool = False) -> None:
        self.drawers = drawers
        self.greedy = greedy
        levels = [
            [drawer.luck.uniform("draft", drawer.anchor_position * OFFSETS + offset) for offset in range(length)]
            for drawer in drawers
        ]
        self._levels = torch.tensor(levels, dtype=torch.float64, device=device).reshape(len(drawers), length)
        self._shapers = [drawer.shaper for drawer in drawers]
        self._penalized = any(shaper.sampling.repetition_penalty != 1 for shaper in self._shapers)
        self._ids: list[Tensor] = []
        self._chances: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._token_ids: Tensor | None = None
        self._finite = torch.ones(len(drawers), dtype=torch.bool, device=device)

    def draw(self, logits: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Draw the next draft token of each request, ``[requests]``, from ``logits`` ``[requests, draft vocabulary]``.

        ``token_ids``: the token of each column, ascending, where the draft vocabulary is reduced.
        """
        drafts: list[list[int]] = [[] for _ in self.drawers]
        if self._penalized and self._ids:
            drafts = torch.stack(self._ids, 1).tolist()
        probs, finite = shaped(logits, self._shapers, drafts, token_ids)
        if self.greedy:
            probs = one_hot(largest(probs), probs.shape[-1], probs.dtype)
        columns = tokens_at(probs, self._levels[:, len(self._ids)])
        tokens = columns if token_ids is None else token_ids[columns]
        self._ids.append(tokens)
        self._chances.append(probs.gather(1, columns[:, None])[:, 0])
        self._rows.append(probs)
        self._token_ids = token_ids
        self._finite &= finite
        return tokens

    def adopt(self, alone: Sequence[DraftSampler], sane: Sequence[bool]) -> None:
        """Take over what requests drew one by one; of those that are not ``sane``, nothing is used."""
        width = next((one.probs.shape[-1] for one, fine in zip(alone, sane, strict=True) if fine), 1)
        length = self._levels.shape[1]
        ids = self._levels.new_zeros((len(alone), length), dtype=torch.int64)
        probs = self._levels.new_ones((len(alone), length, width), dtype=torch.float32)
        for index, (one, fine) in enumerate(zip(alone, sane, strict=True)):
            if fine:
                probs = probs.to(one.probs.dtype)
                ids[index] = torch.tensor(one.token_ids)
                probs[index] = one.probs
        self._ids, self._rows = list(ids.unbind(1)), list(probs.unbind(1))
        self._chances = list(probs.gather(2, ids[..., None])[..., 0].unbind(1))
        self._finite &= torch.tensor(list(sane), device=self._finite.device)

    def drafts(self) -> Drafts:
        """Return what was drawn."""
        if not self._ids:
            nothing = self._levels[:, :0]
            return Drafts(nothing.to(torch.int64), nothing, (), None, self._finite)
        ids, chances = torch.stack(self._ids, 1), torch.stack(self._chances, 1)
        return Drafts(ids, chances, tuple(self._rows), self._token_ids, self._finite)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What the target says of a round, ``[requests]``: accepted draft tokens, its own token, and whether it is sane."""

    accepted: list[int]
    tokens: list[int]
    finite: list[bool]


def judge_rows(
    lengths: Sequence[int], drafts: Drafts, target_probs: Tensor, finite: Tensor, drawers: Sequence[Drawer]
) -> Verdicts:
    """Test every request's draft tokens in order, up to the first that fails; see `accept.judge`.

    Parameters
    ----------
    lengths : sequence [requests]
        Draft tokens that were verified.
    drafts : Drafts
    target_probs : tensor [sum of lengths + requests, vocabulary]
        A request's rows, one after each of its verified prefixes, then the next request's.
    finite : tensor [rows of target_probs], bool
    drawers : sequence [requests]
    """
    device, requests = target_probs.device, len(lengths)
    longest = max(lengths, default=0)
    counts = torch.tensor(list(lengths), device=device)
    firsts = torch.cumsum(counts + 1, 0) - counts - 1
    places = torch.arange(longest + 1, device=device)
    inside = places <= counts[:, None]
    rows = firsts[:, None] + torch.where(inside, places, 0)
    sane = (finite[rows] | ~inside).all(1)
    verified = places[:-1] < counts[:, None]
    ids = torch.where(verified, drafts.ids[:, :longest], 0)
    offered = drafts.chances[:, :longest].to(torch.float64)
    chance = (target_probs[rows[:, :-1], ids].to(torch.float64) / offered).clamp_max(1.0)
    passed = (_uniforms("acceptance", drawers, longest, device) < chance) & verified
    accepted = passed.to(torch.int64).cumprod(1).sum(1)
    possible = ((offered > 0) | ~verified).all(1)
    final = target_probs[firsts + accepted]
    if longest:
        # A refused token is replaced from what the target wanted and the draft did not offer.
        everyone = torch.arange(requests, device=device)
        offer = torch.stack(drafts.rows[:longest], 1)[everyone, accepted.clamp_max(longest - 1)].to(final)
        left = final - offer if drafts.token_ids is None else final.index_add(1, drafts.token_ids, offer, alpha=-1)
        left = left.clamp_min(0)
        total = left.sum(-1, keepdim=True)
        final = torch.where((accepted < counts)[:, None] & (total > 0), left / total, final)
    levels = _uniforms("token", drawers, longest + 1, device)
    tokens = tokens_at(final, levels.gather(1, accepted[:, None])[:, 0])
    found = torch.stack([accepted, tokens, sane.to(torch.int64), possible.to(torch.int64)]).tolist()
    if not all(found[3]):
        raise ValueError("a draft token has no chance under the distribution it is said to come from")
    return Verdicts(found[0], found[1], [bool(one) for one in found[2]])


def _uniforms(purpose: str, drawers: Sequence[Drawer], count: int, device: torch.device) -> Tensor:
    """Return the uniforms of the ``count`` places after each anchor, ``[requests, count]``."""
    levels = [
        [drawer.luck.uniform(purpose, drawer.anchor_position + 1 + k) for k in range(count)] for drawer in drawers
    ]
    return torch.tensor(levels, dtype=torch.float64, device=device).reshape(len(drawers), count)
