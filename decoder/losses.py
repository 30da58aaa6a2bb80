"""What a drafter is trained for: cross entropy, total variation and confidence, weighted by position.

Per draft position, with p the target's distribution and q the drafter's::

    ce   = -log q(label)                  label: the token that the text goes on with
    tv   = sum |p - q| = 2 (1 - accept)   accept = sum min(p, q), the chance that the draft token is accepted
    bce  = -accept log c - (1 - accept) log(1 - c)            c: the confidence, accept held fixed

and ``loss = sum_k w_k (ce_weight ce + tv_weight tv + confidence_weight bce) / sum_k w_k`` over all positions judged.

`judge` computes the first two from states and heads, some rows at a time, with their gradients: logits of a whole step
are never held. A drafter with a reduced vocabulary has q = 0 outside it; what the target puts there can never be
accepted and counts in full. A label outside has no cross entropy (it would be infinite) and the weight of none.

A label is one draw from p. Where the target is at hand its whole distribution can take the label's place,
``ce = -sum p log q`` over the draft vocabulary: at temperature 1 the gradient has the same mean, without the noise of
which token was drawn (distillation).

Source: what the published DSpark configs train with (DeepSpec), which its training vectors pin down; that is with
labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from decoder.sampling import working_dtype

#: Rows whose logits are held at once; some 8 MB each for draft and target at 8,192 tokens, 32 MB at 32,768.
CHUNK_ROWS = 256

PositionWeights = Literal["published", "block", "even"]
CrossEntropy = Literal["text", "target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """Weights of the terms; the defaults are those of the published configs.

    ``positions``: how the weight falls over a block's positions k = 0, 1, ...: ``published`` exp(-k / 4); ``block``
    exp(-k / block length), which falls as far over a long block as over a short one; ``even`` 1. ``ce_of``: what the
    cross entropy is of, the ``text``'s own next token or the ``target``'s distribution.
    """

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    positions: PositionWeights = "published"
    ce_of: CrossEntropy = "text"


def position_weights(form: PositionWeights, length: int) -> Tensor:
    """Return the weight of each position of a block, ``[length]``, float32; the first has 1."""
    k = torch.arange(length, dtype=torch.float32)
    if form == "even":
        return torch.ones(length)
    return torch.exp(-k / (4.0 if form == "published" else float(length)))


class Judged(NamedTuple):
    """``loss``: the weighted sum of both terms over all rows, a scalar; ``ce``, ``accept`` ``[rows]``, no gradient."""

    loss: Tensor
    ce: Tensor
    accept: Tensor


def judge(
    hidden: Tensor,
    head: Tensor,
    target_states: Tensor,
    target_head: Tensor,
    log_norms: Tensor,
    labels: Tensor,
    ce_weights: Tensor,
    tv_weights: Tensor,
    bias: tuple[Tensor, Tensor] | None = None,
    ce_of: CrossEntropy = "text",
) -> Judged:
    """Compare the drafter's distributions with the target's.

    Parameters
    ----------
    hidden : tensor [rows, hidden_size]
        States that the draft head reads.
    head : tensor [draft vocabulary, hidden_size]
    target_states : tensor [rows, hidden_size]
        The target's states after its final norm, where it predicts the same tokens.
    target_head : tensor [draft vocabulary, hidden_size]
        The target's head, the rows of the draft vocabulary.
    log_norms : tensor [rows]
        Log of the sum of exp over all of the target's logits, those outside the draft vocabulary too.
    labels : tensor [rows], int
        Draft ids of the tokens that follow; -1 where that lies outside the draft vocabulary.
    ce_weights, tv_weights : tensor [rows]
        Weight of each row's terms in the sum.
    bias : (tensor [rows, rank], tensor [draft vocabulary, rank]), optional
        States and second matrix of a Markov head: their product is added to the logits.
    ce_of : {"text", "target"}
        Whether the cross entropy is of the labels or of the target's distribution.

    Returns
    -------
    Judged
        ``ce`` of a label is 0 where that is -1. The loss goes backward into ``hidden``, ``head`` and ``bias``, where
        these want it.
    """
    half = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else None
    low, second = bias if bias is not None else (None, None)
    if not torch.is_grad_enabled():  # or gradients would be worked out for nobody
        hidden, head = hidden.detach(), head.detach()
        low, second = (None, None) if low is None or second is None else (low.detach(), second.detach())
    soft = ce_of == "target"
    loss, ce, accept = _Judge.apply(  # type: ignore[no-untyped-call]
        hidden,
        head,
        target_states,
        target_head,
        log_norms,
        labels,
        ce_weights,
        tv_weights,
        low,
        second,
        half,
        soft,
    )
    return Judged(loss, ce, accept)


class _Judge(torch.autograd.Function):
    """The gradient of both terms with respect to a row's logits is known in closed form, from what is at hand.

    d ce / d logit_j = q_j - [j = label], or q_j sum_i p_i - p_j;
    d sum |p - q| / d logit_j = q_j (s_j - sum_i s_i q_i), s = sign(q - p).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        target_states: Tensor,
        target_head: Tensor,
        log_norms: Tensor,
        labels: Tensor,
        ce_weights: Tensor,
        tv_weights: Tensor,
        low: Tensor | None,
        second: Tensor | None,
        half: torch.dtype | None,
        soft: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs = ctx.needs_input_grad
        rows = hidden.shape[0]
        wide = working_dtype(hidden.dtype)
        narrow = half or wide
        ce, accept = hidden.new_zeros(rows, dtype=wide), hidden.new_zeros(rows, dtype=wide)
        d_hidden = torch.empty_like(hidden, dtype=wide) if needs[0] else None
        d_head = torch.zeros_like(head, dtype=wide) if needs[1] else None
        d_low = torch.empty_like(low, dtype=wide) if low is not None and needs[8] else None
        d_second = torch.zeros_like(second, dtype=wide) if second is not None and needs[9] else None
        backward = any(part is not None for part in (d_hidden, d_head, d_low, d_second))
        matrix, target_matrix = head.detach().to(narrow), target_head.to(narrow)
        second_matrix = None if second is None else second.detach().to(narrow)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, rows, CHUNK_ROWS):
                part = slice(start, start + CHUNK_ROWS)
                x = hidden[part].detach().to(narrow)
                q = x @ matrix.T
                if low is not None and second_matrix is not None:
                    q.addmm_(low[part].detach().to(narrow), second_matrix.T)
                q = q.to(wide)
                p = (target_states[part].to(narrow) @ target_matrix.T).to(wide)
                p.sub_(log_norms[part, None].to(wide)).exp_()
                label = labels[part].clamp_min(0)[:, None]
                inside = labels[part] >= 0
                mass = p.sum(-1)
                at_label = torch.einsum("nv,nv->n", p, q) if soft else q.gather(1, label)[:, 0]
                top = q.max(-1)
                q = torch.softmax(q, -1)
                # The largest probability never underflows, and with its logit gives the normaliser.
                norm = top.values - q.gather(1, top.indices[:, None])[:, 0].log()
                ce[part] = mass * norm - at_label if soft else torch.where(inside, norm - at_label, 0.0)
                accept[part] = torch.minimum(p, q).sum(-1)
                if not backward:
                    continue
                ce_weight = ce_weights[part].to(wide)
                tv_weight = tv_weights[part].to(wide)
                if soft:
                    pull, push = ce_weight[:, None] * p, ce_weight * mass
                else:
                    pull, push = None, torch.where(inside, ce_weight, 0.0)
                grad = torch.sub(q, p, out=p).sign_()
                mean = torch.einsum("nv,nv->n", grad, q)
                grad.mul_(tv_weight[:, None]).add_((push - tv_weight * mean)[:, None]).mul_(q)
                if pull is None:
                    grad.scatter_add_(1, label, -push[:, None])
                else:
                    grad.sub_(pull)
                grad = grad.to(narrow)
                if d_hidden is not None:
                    d_hidden[part] = (grad @ matrix).to(wide)
                if d_head is not None:
                    d_head += (grad.T @ x).to(wide)
                if d_low is not None and second_matrix is not None:
                    d_low[part] = (grad @ second_matrix).to(wide)
                if d_second is not None and low is not None:
                    d_second += (grad.T @ low[part].detach().to(narrow)).to(wide)
        ctx.save_for_backward(d_hidden, d_head, d_low, d_second)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ce, accept)
        loss = (ce_weights * ce).sum() + (tv_weights * 2 * (1 - accept)).sum()
        return loss, ce, accept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        d_hidden, d_head, d_low, d_second = (
            None if part is None or scale is None else part * scale for part in ctx.saved_tensors
        )
        return d_hidden, d_head, None, None, None, None, None, None, d_low, d_second, None, None


def confidence_loss(logits: Tensor, accept: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the cross entropy of confidences against the chances of acceptance, a scalar.

    All are ``[rows]``; ``logits`` are before the sigmoid.
    """
    wide = working_dtype(logits.dtype)
    each = functional.binary_cross_entropy_with_logits(logits.to(wide), accept.to(wide), reduction="none")
    return (each * weights).sum()
