"""The compiled part of the step loop: draw, reserve and commit over a replica's slots.

All kernels live in this file, take arrays and scalars of one type each (a new type would compile again), and
allocate nothing. A *slot* is a decoding request of one replica; slots are kept in order of admission.

Integer slot fields are rows of ``slots [SLOT_FIELDS, capacity]``; requests are rows of the run's tables.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sim.acceptance import GRID_POINTS, GRID_REACH, NORMAL_CELLS
from sim.rng import mix64

# Rows of the slot table.
ROW = 0  #: row of the request in the run's tables
EMITTED = 1  #: output tokens delivered so far
LIMIT = 2  #: output tokens at which it ends: its own length or the context limit
CACHED = 3  #: tokens in its KV cache: prompt + emitted - 1, the last token being the next input
BLOCKS = 4  #: KV blocks it holds
ROOM = 5  #: output tokens that the context limit still allows; known to the engine, unlike LIMIT
DOMAIN = 6
PLACE = 7  #: where in the bank it starts
SLOT_FIELDS = 8

# Rows of the integer table of requests (``counts``).
OUT, ROUNDS, DRAFTED, VERIFIED, ACCEPTED, PREEMPTED = 0, 1, 2, 3, 4, 5
COUNT_FIELDS = 6

# Rows of the table of instants and spans of requests (``times``), seconds; NaN where it did not happen.
ARRIVED, ADMITTED, FIRST, LAST, ENDED, MAX_ITL = 0, 1, 2, 3, 4, 5
TIME_FIELDS = 6

# What a commit reports (``report``).
OUT_TOKENS, ACCEPTED_TOKENS, FREED, ENDED_SLOTS, CONTEXT = 0, 1, 2, 3, 4
REPORT_FIELDS = 5

_CELL_SHIFT = np.uint64(64 - NORMAL_CELLS.bit_length() + 1)
_LUCK_MASK = np.uint64((1 << 52) - 1)
_LUCK_STEP = 1.0 / float(1 << 52)
_GRID_SCALE = (GRID_POINTS - 1) / (2.0 * GRID_REACH)
_NOISE_SALT = np.uint64(0xD1B54A32D192ED03)
_EFFECT_SALT = np.uint64(0x8CB92BA72F3D8DD7)
_PLACE_SALT = np.uint64(0xABC98388FB8FAC03)

njit: Any = numba.njit


@njit(inline="always")
def _interpolate(table, x):  # type: ignore[no-untyped-def]
    """Read a table over the grid of x by linear interpolation; its ends hold beyond it."""
    at = (x + GRID_REACH) * _GRID_SCALE
    if at <= 0.0:
        return table[0]
    if at >= GRID_POINTS - 1:
        return table[GRID_POINTS - 1]
    cell = int(at)
    part = at - cell
    return table[cell] + part * (table[cell + 1] - table[cell])


@njit(cache=True)
def request_draws(luck_key, request_key):  # type: ignore[no-untyped-def]
    """Return what is drawn once a request: its key, its cell of the normal table and its place in a bank."""
    key = mix64(luck_key ^ mix64(request_key))
    return key, np.int64(mix64(key ^ _EFFECT_SALT) >> _CELL_SHIFT), np.int64(mix64(key ^ _PLACE_SALT) >> np.uint64(2))


@njit(cache=True)
def draw_drafts(  # type: ignore[no-untyped-def]
    n, drafted, slots, keys, effect, chance, confidence, sd, normals, is_bank, bank, seen, fate
):
    """Draft a block in each of ``n`` slots: what the confidence head says and what the target would accept.

    Writes ``seen [n, drafted]``, the confidences, and ``fate [n]``, the draft tokens that would be accepted were the
    whole block verified. Nothing of ``fate`` may reach a policy before its decision.
    """
    for i in range(n):
        domain = slots[DOMAIN, i]
        place = slots[EMITTED, i]
        alive = True
        fate[i] = 0
        key = keys[i]
        if is_bank:
            # Row of the bank at this place of the text; a text that ends is followed by the next.
            size = bank[domain + 1] - bank[domain]
            row = bank[domain] + (slots[PLACE, i] + place) % size
        for k in range(drafted):
            bits = mix64(mix64(key) ^ np.uint64(place + k))
            luck = (np.float64(bits & _LUCK_MASK) + 0.5) * _LUCK_STEP
            if is_bank:
                seen[i, k] = confidence[0, k, row]
                p = chance[0, k, row]
            else:
                x = effect[i] + sd[domain, 1] * normals[np.int64(bits >> _CELL_SHIFT)]
                p = _interpolate(chance[domain, k], x)
                if sd[domain, 2] > 0.0:
                    other = mix64(bits ^ _NOISE_SALT)
                    x += sd[domain, 2] * normals[np.int64(other >> _CELL_SHIFT)]
                seen[i, k] = _interpolate(confidence[domain, k], x)
            if alive and luck < p:
                fate[i] += 1
            else:
                alive = False


@njit(cache=True)
def missing_blocks(n, ahead, block_tokens, slots):  # type: ignore[no-untyped-def]
    """Return the KV blocks that slots lack to hold ``1 + ahead`` more tokens each (fewer at the context limit)."""
    lacking = 0
    for i in range(n):
        tokens = slots[CACHED, i] + min(1 + ahead, slots[ROOM, i])
        lacking += max((tokens + block_tokens - 1) // block_tokens - slots[BLOCKS, i], 0)
    return lacking


@njit(cache=True)
def take_blocks(n, ahead, block_tokens, slots):  # type: ignore[no-untyped-def]
    """Give each slot the blocks of `missing_blocks`; return how many were taken."""
    taken = 0
    for i in range(n):
        tokens = slots[CACHED, i] + min(1 + ahead, slots[ROOM, i])
        need = (tokens + block_tokens - 1) // block_tokens
        if need > slots[BLOCKS, i]:
            taken += need - slots[BLOCKS, i]
            slots[BLOCKS, i] = need
    return taken


@njit(cache=True)
def fill_rates(requests, highest, limit, prompt_tokens, other_s, verify_s, rates):  # type: ignore[no-untyped-def]
    """Write ``rates[b]``, steps per second at ``b`` batch tokens, for b in requests..highest.

    ``other_s``: everything in the step that does not depend on b. Beyond ``limit`` batch tokens the engine cannot
    go: the rate there is 0.
    """
    rates[0] = np.inf
    for b in range(1, highest + 1):
        rates[b] = 1.0 / (other_s + verify_s[b + prompt_tokens]) if b <= limit and b >= requests else 0.0


@njit(cache=True)
def clip_lengths(n, drafted, budget, slots, lengths):  # type: ignore[no-untyped-def]
    """Cut lengths to the context limit, then trim from the tail of the admission order to ``budget`` in all.

    Returns (draft tokens left, draft tokens trimmed for the budget), or (-1, slot) for a length outside 0..drafted.
    """
    total = 0
    for i in range(n):
        if lengths[i] < 0 or lengths[i] > drafted:
            return -1, i
        lengths[i] = min(lengths[i], slots[ROOM, i] - 1)
        total += lengths[i]
    trimmed = 0
    i = n - 1
    while total > budget and i >= 0:
        cut = min(lengths[i], total - budget)
        lengths[i] -= cut
        total -= cut
        trimmed += cut
        i -= 1
    return total, trimmed


@njit(cache=True)
def commit(  # type: ignore[no-untyped-def]
    n, now, deadline_s, drafted, block_tokens, slots, keys, effect, fate, lengths, counts, times, ended, report
):
    """Deliver a round: accepted prefix and bonus token of each slot, cut where the request ends.

    Frees the blocks of rejected tokens, drops ended slots and keeps the others in order. ``ended [n]`` gets the rows of
    requests that ended (finished, or past their deadline: row as ``-1 - row``); ``report`` is described above.
    Returns the number of slots that remain.
    """
    out_tokens = 0
    accepted_tokens = 0
    freed = 0
    gone = 0
    context = 0
    kept = 0
    for i in range(n):
        row = slots[ROW, i]
        accepted = min(fate[i], lengths[i])
        left = slots[LIMIT, i] - slots[EMITTED, i]
        tokens = min(accepted + 1, left)
        # Stop inside the block: what lies behind it is neither delivered nor counted.
        accepted = min(accepted, left)
        counts[ROUNDS, row] += 1
        counts[DRAFTED, row] += drafted
        counts[VERIFIED, row] += lengths[i]
        counts[ACCEPTED, row] += accepted
        counts[OUT, row] += tokens
        times[MAX_ITL, row] = max(times[MAX_ITL, row], now - times[LAST, row])
        times[LAST, row] = now
        out_tokens += tokens
        accepted_tokens += accepted
        emitted = slots[EMITTED, i] + tokens
        late = now > times[ARRIVED, row] + deadline_s
        if tokens == left or late:
            freed += slots[BLOCKS, i]
            times[ENDED, row] = now
            ended[gone] = row if tokens == left else -1 - row
            gone += 1
            continue
        cached = slots[CACHED, i] + tokens
        blocks = (cached + block_tokens - 1) // block_tokens
        freed += slots[BLOCKS, i] - blocks
        context += cached
        slots[ROW, kept] = row
        slots[EMITTED, kept] = emitted
        slots[LIMIT, kept] = slots[LIMIT, i]
        slots[CACHED, kept] = cached
        slots[BLOCKS, kept] = blocks
        slots[ROOM, kept] = slots[ROOM, i] - tokens
        slots[DOMAIN, kept] = slots[DOMAIN, i]
        slots[PLACE, kept] = slots[PLACE, i]
        keys[kept] = keys[i]
        effect[kept] = effect[i]
        kept += 1
    report[OUT_TOKENS] = out_tokens
    report[ACCEPTED_TOKENS] = accepted_tokens
    report[FREED] = freed
    report[ENDED_SLOTS] = gone
    report[CONTEXT] = context
    return kept
