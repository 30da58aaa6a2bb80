"""Where output ends: stop tokens and stop strings first, then length, then context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "context", "failed", "cancelled"]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a request is done.

    ``max_new_tokens``: output tokens at most. ``stop_token_ids``: the first of these that is emitted ends the output
    and stays in it. ``stop_strings``: likewise; the token that completes the string is the last, so that text,
    token ids and logprobs always speak of the same tokens.
    """

    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """How many of the offered tokens are emitted, and why the output ends there (None: it goes on)."""

    emitted: int
    reason: FinishReason | None


def cut(
    output_ids: Sequence[int], offered: Sequence[int], limits: Limits, context_room: int, decode: Decode | None
) -> Cut:
    """Decide how many of ``offered`` may follow ``output_ids``.

    Parameters
    ----------
    output_ids, offered : sequences of token ids
        What was emitted before, and what a round would add.
    limits : Limits
    context_room : int
        Tokens that still fit in the target's context, before ``offered``.
    decode : callable, optional
        Token ids to text; needed for stop strings.
    """
    by_length = limits.max_new_tokens - len(output_ids)
    allowed = min(len(offered), by_length, context_room)
    stops = [k for k in range(allowed) if offered[k] in limits.stop_token_ids]
    stop = stops[0] + 1 if stops else None
    if limits.stop_strings and decode is not None:
        stop = _string_stop(output_ids, offered[: stop or allowed], limits.stop_strings, decode) or stop
    if stop is not None:
        return Cut(stop, "stop")
    if allowed < len(offered) or allowed in (by_length, context_room):
        # The limit was reached, even if by the last token offered: there is no next round.
        return Cut(allowed, "length" if by_length <= context_room else "context")
    return Cut(allowed, None)


def _string_stop(
    output_ids: Sequence[int], offered: Sequence[int], strings: Sequence[str], decode: Decode
) -> int | None:
    """Return how many of ``offered`` it takes until the text holds a stop string; None if it does not."""

    def found(count: int) -> bool:
        text = decode([*output_ids, *offered[:count]])
        return any(string in text for string in strings)

    # Whole text first: most rounds hold no stop string, and then one decoding is enough. The whole text, not a tail of
    # it, since a string may begin in any earlier token.
    if not offered or not found(len(offered)):
        return None
    return next(count for count in range(1, len(offered) + 1) if found(count))
