"""The compiled step loop of a replica: reserve, draft, choose, price, and deliver, for one step or for many.

A *slot* is a decoding request of one replica; slots are kept in order of admission. What a replica and its engine know
lies in a few flat arrays, since every array that is handed to a compiled function costs about as much as a tenth of
a SimPy event: ``state_i`` and ``state_f`` belong to the replica, ``engine_i`` and ``engine_f`` to the engine and are
only read.
`StateLayout` and `EngineLayout` say what lies where; Python code sees the parts as named views.

Everything here takes arrays and scalars of one type each (a new type would compile again) and allocates nothing.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sim.acceptance import GRID_POINTS, GRID_REACH, NORMAL_CELLS, normal_quantiles
from sim.records import STEP_COLUMNS
from sim.rng import mix64
from sim.verify.kernels import algorithm1, compiled, exhaustive, lagged, leading, table_row

njit: Any = numba.njit
kernel: Any = compiled  # untyped: what it compiles is called from typed code with arrays alone

# ------------------------------------------------------------------------------------------------------------- layouts

# Slot fields: rows of a replica's slot table, int64.
ROW = 0  #: row of the request in the run's tables
EMITTED = 1  #: output tokens delivered so far
LIMIT = 2  #: output tokens at which it ends: its own length or the context limit
CACHED = 3  #: tokens in its KV cache: prompt + emitted - 1, the last token being the next input
BLOCKS = 4  #: KV blocks it holds
ROOM = 5  #: output tokens that the context limit still allows; known to the engine, unlike LIMIT
DOMAIN = 6
FIRST_ROW = 7  #: of its domain's bank: where its text begins
KEY = 8  #: what its luck is keyed by, a uint64 in int64 clothing
EFFECT = 9  #: its cell in the table of normals: the request effect on acceptance
SLOT_FIELDS = 10

# Rows of the integer table of requests (``counts``).
OUT, ROUNDS, DRAFTED, VERIFIED, ACCEPTED, PREEMPTED = range(6)
COUNT_FIELDS = 6

# Rows of the table of instants and spans of requests (``times``), seconds; NaN where it did not happen.
ARRIVED, ADMITTED, FIRST, LAST, ENDED, MAX_ITL = range(6)
TIME_FIELDS = 6

# Head of ``state_i``.
S_CAPACITY, S_LONGEST = 0, 1  #: slots, and draft tokens of a block (at least 1)
S_DECODING = 2  #: slots in use
S_CONTEXT = 3  #: tokens in the caches of the slots
S_FREE = 4  #: free KV blocks
S_PHASE = 5
S_SHARES = 6  #: 1 where the step decodes, 0 where it holds prompts alone
S_PROMPT = 7  #: prompt tokens of the step
S_IN_PREFILL = 8  #: requests in prefill
S_WAITING = 9  #: requests that wait
S_AHEAD = 10  #: draft tokens drafted in each slot in this step; given for a policy that is not compiled
S_VERIFIED = 11  #: draft tokens verified in this step
S_TRIMMED = 12
S_STEP_DECODING = 13  #: slots that decode in this step
S_STEP_CONTEXT = 14
S_ENDED = 15  #: entries of the list of ended requests
S_TABLE_ROW = 16  #: memory of ``batch_table``
S_SEEN_STEPS = 17  #: memory of ``dspark_async``: steps that drafted so far
S_INDEX = 18  #: index of the replica
S_WRONG = 19  #: the length that a policy may not choose
S_ADMITTED = 20  #: requests whose prompt begins in the step
STATE_HEAD = 21

# Head of ``state_f``.
F_NOW = 0  #: start of the step that is planned next, or is under way
F_END = 1  #: end of the step under way
F_UNTIL = 2  #: no step may be delivered that ends at this instant or later
F_DRAFT = 3  #: draft time of the step
STATE_F_HEAD = 4

# Head of ``engine_i``.
(
    E_POLICY,
    E_K,
    E_LAG,
    E_FIRST_BUDGET,
    E_HYSTERESIS,
    E_TABLE_ROWS,
    E_TRAINED,
    E_IS_BLOCK,
    E_IS_BANK,
    E_DRAFT_PER_TOKEN,
    E_AS_VERIFY,
    E_MAX_BATCH,
    E_KNOWN_FROM,
    E_KNOWN_TO,
    E_KNOWN_REQUESTS,
    E_BLOCK_TOKENS,
    E_DOMAINS,
    E_VERIFY_SIZE,
    E_DRAFT_SIZE,
    E_TABLE_POINTS,
    E_ROWS_SIZE,
) = range(21)
ENGINE_HEAD = 21

# Head of ``engine_f``.
(
    C_OVERHEAD,
    C_PER_REQUEST,
    C_PER_CONTEXT,
    C_PREFILL_TOKEN,
    C_PREFILL_FLOOR,
    C_PREFILL_REQUEST,
    C_PREFILL_BESIDE,
    C_DEADLINE,
    C_FLOOR,
) = range(9)
ENGINE_F_HEAD = 9

# Policies that are compiled; the others choose in Python.
NONE, FIXED, THRESHOLD, BATCH_TABLE, DSPARK, DSPARK_ASYNC, ORACLE, IN_PYTHON = range(8)

# Phases of a step.
BEGIN, CHOSEN, UNDER_WAY = range(3)

# Why `advance` returned.
STOPPED = 0  #: at a step's end, as it was asked to, or since no slot is left
UNDER_WAY_UNTIL_END = 1  #: a step is under way that ends at F_UNTIL or later
LACKS_MEMORY = 2  #: the slots lack KV blocks for their next step; nothing was drafted
CHOOSE = 3  #: the policy is to write the lengths of this step
WRONG_LENGTH = 4  #: the policy's lengths are not within 0..drafted
RECORDS_FULL = 5  #: at a step's end; there is no room for the record of another

_CELL_SHIFT = np.uint64(64 - NORMAL_CELLS.bit_length() + 1)
_LUCK_MASK = np.uint64((1 << 52) - 1)
_LUCK_STEP = 1.0 / float(1 << 52)
_GRID_SCALE = (GRID_POINTS - 1) / (2.0 * GRID_REACH)
_NOISE_SALT = np.uint64(0xD1B54A32D192ED03)
_EFFECT_SALT = np.uint64(0x8CB92BA72F3D8DD7)
_TEXT_SALT = np.uint64(0xABC98388FB8FAC03)
_NORMALS = normal_quantiles()
_COLUMNS = len(STEP_COLUMNS)


class StateLayout:
    """Where the parts of a replica's arrays begin: ``state_i`` and ``state_f``."""

    def __init__(self, capacity: int, longest: int, lag: int) -> None:
        candidates = capacity * longest
        self.slots = STATE_HEAD
        self.fate = self.slots + SLOT_FIELDS * capacity
        self.lengths = self.fate + capacity
        self.ended = self.lengths + capacity
        self.work = self.ended + capacity
        self.ring = self.work + 2 * candidates + 1
        self.size_i = self.ring + lag
        self.seen = STATE_F_HEAD
        self.values = self.seen + candidates
        self.rates = self.values + candidates
        self.size_f = self.rates + capacity + candidates + 1


class EngineLayout:
    """Where the parts of an engine's arrays begin: ``engine_i`` and ``engine_f``."""

    def __init__(
        self, table_rows: int, banks: int, verify: int, draft: int, domains: int, table: int, rows: int
    ) -> None:
        self.starts = ENGINE_HEAD
        self.lengths = self.starts + table_rows
        self.bank = self.lengths + table_rows
        self.size_i = self.bank + banks
        self.verify = ENGINE_F_HEAD
        self.draft = self.verify + verify
        self.sd = self.draft + draft
        self.chance = self.sd + 3 * domains
        self.confidence = self.chance + table
        self.rows = self.confidence + table
        self.size_f = self.rows + rows


# -------------------------------------------------------------------------------------------------------------- chance


@kernel
def request_draws(luck_key, request_key):  # type: ignore[no-untyped-def]
    """Return what is drawn once a request: its key and its cell of the normal table."""
    key = mix64(luck_key ^ mix64(request_key))
    return key, np.int64(mix64(key ^ _EFFECT_SALT) >> _CELL_SHIFT)


@kernel
def text_draw(text_key, request_key):  # type: ignore[no-untyped-def]
    """Return a number that chooses the text which a request follows: its rest by the domain's texts says which."""
    key = mix64(text_key ^ mix64(request_key))
    return np.int64(mix64(key ^ _TEXT_SALT) >> np.uint64(2))


@njit(inline="always")
def _interpolate(table, start, x):  # type: ignore[no-untyped-def]
    """Read the table over the grid of x that begins at ``start``, by linear interpolation; its ends hold beyond it."""
    at = min(max((x + GRID_REACH) * _GRID_SCALE, 0.0), GRID_POINTS - 1.000001)
    cell = int(at)
    low = table[start + cell]
    return low + (at - cell) * (table[start + cell + 1] - low)


@kernel
def _draft(n, drafted, slots, engine_i, engine_f, seen, fate):  # type: ignore[no-untyped-def]
    """Draft in each of ``n`` slots: what the confidence head says and what the target would accept.

    Writes ``seen [n, drafted]``, the confidences, and ``fate [n]``, the draft tokens that would be accepted were the
    whole block verified. Nothing of ``fate`` may reach a policy before its decision.
    """
    domains, trained, points = engine_i[E_DOMAINS], engine_i[E_TRAINED], engine_i[E_TABLE_POINTS]
    is_bank = engine_i[E_IS_BANK] == 1
    sd_start = ENGINE_F_HEAD + engine_i[E_VERIFY_SIZE] + engine_i[E_DRAFT_SIZE]
    bank_start = ENGINE_HEAD + 2 * engine_i[E_TABLE_ROWS]
    chance_start = sd_start + 3 * domains
    confidence_start = chance_start + (1 if is_bank else domains) * trained * points
    for i in range(n):
        domain = slots[DOMAIN, i]
        place = slots[EMITTED, i]
        key = mix64(np.uint64(slots[KEY, i]))
        alive = True
        accepted = 0
        if is_bank:
            # Row of the bank whose anchor is the last token emitted; a text that ends is followed by the next.
            first = engine_i[bank_start + domain]
            row = first + (slots[FIRST_ROW, i] + place - 1) % (engine_i[bank_start + domain + 1] - first)
            for k in range(drafted):
                bits = mix64(key ^ np.uint64(place + k))
                luck = (np.float64(bits & _LUCK_MASK) + 0.5) * _LUCK_STEP
                seen[i, k] = engine_f[confidence_start + k * points + row]
                if alive and luck < engine_f[chance_start + k * points + row]:
                    accepted += 1
                else:
                    alive = False
        else:
            effect = engine_f[sd_start + 3 * domain] * _NORMALS[slots[EFFECT, i]]
            token_sd, noise_sd = engine_f[sd_start + 3 * domain + 1], engine_f[sd_start + 3 * domain + 2]
            offset = domain * trained * points
            for k in range(drafted):
                bits = mix64(key ^ np.uint64(place + k))
                x = effect + token_sd * _NORMALS[np.int64(bits >> _CELL_SHIFT)]
                if alive:
                    luck = (np.float64(bits & _LUCK_MASK) + 0.5) * _LUCK_STEP
                    if luck < _interpolate(engine_f, chance_start + offset + k * points, x):
                        accepted += 1
                    else:
                        alive = False
                if noise_sd > 0.0:
                    x += noise_sd * _NORMALS[np.int64(mix64(bits ^ _NOISE_SALT) >> _CELL_SHIFT)]
                seen[i, k] = _interpolate(engine_f, confidence_start + offset + k * points, x)
        fate[i] = accepted


# -------------------------------------------------------------------------------------------------------------- memory


@kernel
def missing_blocks(n, ahead, block_tokens, slots):  # type: ignore[no-untyped-def]
    """Return the KV blocks that slots lack to hold ``1 + ahead`` more tokens each (fewer at the context limit)."""
    lacking = 0
    for i in range(n):
        tokens = slots[CACHED, i] + min(1 + ahead, slots[ROOM, i])
        lacking += max((tokens + block_tokens - 1) // block_tokens - slots[BLOCKS, i], 0)
    return lacking


@kernel
def _take_blocks(n, ahead, block_tokens, slots):  # type: ignore[no-untyped-def]
    for i in range(n):
        tokens = slots[CACHED, i] + min(1 + ahead, slots[ROOM, i])
        slots[BLOCKS, i] = max(slots[BLOCKS, i], (tokens + block_tokens - 1) // block_tokens)


# --------------------------------------------------------------------------------------------------- lengths and price


@njit(inline="always")
def _rows_s(rows, engine_i, engine_f):  # type: ignore[no-untyped-def]
    """Return the seconds of a pass's rows by the profile's table of them."""
    size = engine_i[E_ROWS_SIZE]
    beyond = max(rows - (size - 1), 0)
    return engine_f[engine_f.size - size + rows - beyond] + engine_f[C_PREFILL_TOKEN] * beyond


@njit(inline="always")
def _verify_s(batch, prompt, engine_i, engine_f):  # type: ignore[no-untyped-def]
    """Return the seconds that depend on the batch tokens: the verify curve, and what prompt rows add to such a pass."""
    if engine_i[E_AS_VERIFY] == 1:
        return engine_f[ENGINE_F_HEAD + batch + prompt]
    seconds = engine_f[ENGINE_F_HEAD + batch]
    if prompt > 0 and engine_i[E_ROWS_SIZE] > 0:
        seconds += _rows_s(batch + prompt, engine_i, engine_f) - _rows_s(batch, engine_i, engine_f)
    return seconds


@kernel
def _fill_rates(requests, highest, limit, prompt, other_s, engine_i, engine_f, rates):  # type: ignore[no-untyped-def]
    """Write ``rates[b]``, steps per second at ``b`` batch tokens, for b in requests..highest.

    ``other_s``: everything in the step that does not depend on b. Beyond ``limit`` batch tokens the engine cannot
    go: the rate there is 0, as it is below one token a request, where no batch can lie.
    """
    rates[0] = np.inf
    rates[1:requests] = 0.0
    for b in range(requests, min(highest, limit) + 1):
        rates[b] = 1.0 / (other_s + _verify_s(b, prompt, engine_i, engine_f))
    for b in range(max(limit, requests - 1) + 1, highest + 1):
        rates[b] = 0.0


@kernel
def _draft_length(n, state_i, engine_i):  # type: ignore[no-untyped-def]
    """Return the draft tokens to draft in each slot, and update the memory of a table."""
    policy = engine_i[E_POLICY]
    wanted = engine_i[E_TRAINED]
    if policy == NONE or n == 0:
        return 0
    if policy == IN_PYTHON:
        wanted = state_i[S_AHEAD]
    elif policy == FIXED:
        wanted = engine_i[E_K]
    elif policy == BATCH_TABLE:
        rows = engine_i[E_TABLE_ROWS]
        starts = engine_i[ENGINE_HEAD : ENGINE_HEAD + rows]
        state_i[S_TABLE_ROW] = table_row(state_i[S_TABLE_ROW], n, starts, engine_i[E_HYSTERESIS])
        wanted = engine_i[ENGINE_HEAD + rows + state_i[S_TABLE_ROW]]
    return engine_i[E_TRAINED] if engine_i[E_IS_BLOCK] == 1 and wanted > 0 else wanted


@kernel
def _choose(n, drafted, state_i, engine_i, engine_f, seen, fate, rates, ring, lengths, values, work):  # type: ignore[no-untyped-def]
    """Choose the lengths of a step by a compiled policy; the same kernels that the Python policies call."""
    policy = engine_i[E_POLICY]
    if policy == FIXED:
        lengths[:n] = min(engine_i[E_K], drafted)
    elif policy == BATCH_TABLE:
        lengths[:n] = min(engine_i[ENGINE_HEAD + engine_i[E_TABLE_ROWS] + state_i[S_TABLE_ROW]], drafted)
    elif policy == THRESHOLD:
        leading(seen, engine_f[C_FLOOR], lengths)
    elif policy == DSPARK:
        algorithm1(seen, rates, lengths, values, work)
    elif policy == DSPARK_ASYNC:
        step, lag = state_i[S_SEEN_STEPS], engine_i[E_LAG]
        wanted = ring[step % lag] - n if step >= lag else engine_i[E_FIRST_BUDGET] * n
        ring[step % lag] = lagged(seen, rates, wanted, lengths, values, work)
        state_i[S_SEEN_STEPS] = step + 1
    elif policy == ORACLE:
        for i in range(n):
            for k in range(drafted):
                seen[i, k] = 1.0 if k < fate[i] else 0.0
        exhaustive(seen, rates, lengths, values, work)


@kernel
def _clip_lengths(n, drafted, budget, slots, lengths, state_i):  # type: ignore[no-untyped-def]
    """Cut lengths to the context limit, then trim from the tail of the admission order to ``budget`` in all.

    Returns False where a length lies outside 0..drafted.
    """
    total = 0
    for i in range(n):
        if lengths[i] < 0 or lengths[i] > drafted:
            state_i[S_WRONG] = lengths[i]
            return False
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
    state_i[S_VERIFIED] = total
    state_i[S_TRIMMED] = trimmed
    return True


# ------------------------------------------------------------------------------------------------------------ delivery


@kernel
def _deliver(n, now, deadline_s, drafted, block_tokens, slots, fate, lengths, ended, counts, times, state_i):  # type: ignore[no-untyped-def]
    """Deliver a round: accepted prefix and bonus token of each slot, cut where the request ends.

    Frees the blocks of rejected tokens, drops ended slots and keeps the others in order. ``ended`` gets the rows of
    requests
    that ended (finished, or past their deadline: as ``-1 - row``). Returns tokens delivered and draft tokens among
    them.
    """
    out_tokens = 0
    accepted_tokens = 0
    freed = 0
    gone = state_i[S_ENDED]
    context = 0
    kept = 0
    for i in range(n):
        row = slots[ROW, i]
        accepted = min(fate[i], lengths[i])
        emitted = slots[EMITTED, i]
        left = slots[LIMIT, i] - emitted
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
        if tokens == left or now > times[ARRIVED, row] + deadline_s:
            freed += slots[BLOCKS, i]
            times[ENDED, row] = now
            ended[gone] = row if tokens == left else -1 - row
            gone += 1
            continue
        cached = slots[CACHED, i] + tokens
        blocks = (cached + block_tokens - 1) // block_tokens
        freed += slots[BLOCKS, i] - blocks
        context += cached
        if kept < i:
            for field in range(SLOT_FIELDS):
                slots[field, kept] = slots[field, i]
        slots[EMITTED, kept] = emitted + tokens
        slots[CACHED, kept] = cached
        slots[BLOCKS, kept] = blocks
        slots[ROOM, kept] -= tokens
        kept += 1
    state_i[S_DECODING] = kept
    state_i[S_CONTEXT] = context
    state_i[S_FREE] += freed
    state_i[S_ENDED] = gone
    return out_tokens, accepted_tokens


@kernel
def advance(state_i, state_f, engine_i, engine_f, counts, times, kv_blocks, records, used, most_steps, stop_at_end):  # type: ignore[no-untyped-def]
    """Take a replica through up to ``most_steps`` step ends, from the phase it is in; says why it stopped.

    ``records [rows, columns]`` gets a row a step from row ``used[0]`` on; ``used[0]`` counts on. ``stop_at_end``:
    stop after a
    step in which a request ended, for whoever waits for its seat. A step with prompts is always the last one: Python
    code hands prompts on.
    """
    capacity, longest = state_i[S_CAPACITY], state_i[S_LONGEST]
    candidates = capacity * longest
    at = STATE_HEAD
    slots = state_i[at : at + SLOT_FIELDS * capacity].reshape((SLOT_FIELDS, capacity))
    at += SLOT_FIELDS * capacity
    fate = state_i[at : at + capacity]
    lengths = state_i[at + capacity : at + 2 * capacity]
    ended = state_i[at + 2 * capacity : at + 3 * capacity]
    at += 3 * capacity
    work = state_i[at : at + 2 * candidates + 1]
    ring = state_i[at + 2 * candidates + 1 :]
    all_seen = state_f[STATE_F_HEAD : STATE_F_HEAD + candidates]
    values = state_f[STATE_F_HEAD + candidates : STATE_F_HEAD + 2 * candidates]
    rates = state_f[STATE_F_HEAD + 2 * candidates :]
    block_tokens, max_batch = engine_i[E_BLOCK_TOKENS], engine_i[E_MAX_BATCH]
    phase = state_i[S_PHASE]
    steps = 0
    while True:
        prompt = state_i[S_PROMPT]
        if phase == BEGIN:
            n = state_i[S_DECODING] if state_i[S_SHARES] == 1 else 0
            drafted = _draft_length(n, state_i, engine_i)
            # Reserve for a whole draft before drafting, so that no draft is thrown away for lack of memory.
            lacking = missing_blocks(n, drafted, block_tokens, slots)
            if lacking > state_i[S_FREE]:
                state_i[S_PHASE] = BEGIN
                return LACKS_MEMORY
            if lacking > 0:
                _take_blocks(n, drafted, block_tokens, slots)
                state_i[S_FREE] -= lacking
            state_i[S_STEP_DECODING] = n
            state_i[S_STEP_CONTEXT] = state_i[S_CONTEXT] if n > 0 else 0
            state_i[S_AHEAD] = drafted
            state_f[F_DRAFT] = 0.0
            if drafted > 0:
                seen = all_seen[: n * drafted].reshape((n, drafted))
                _draft(n, drafted, slots, engine_i, engine_f, seen, fate)
                draft_at = ENGINE_F_HEAD + engine_i[E_VERIFY_SIZE] + n
                state_f[F_DRAFT] = engine_f[draft_at] * (drafted if engine_i[E_DRAFT_PER_TOKEN] == 1 else 1)
                limit, highest = max_batch - prompt, n * (1 + drafted)
                other_s = _other_s(n, prompt, state_i, state_f, engine_i, engine_f)
                _fill_rates(n, highest, limit, prompt, other_s, engine_i, engine_f, rates)
                if engine_i[E_POLICY] == IN_PYTHON:
                    state_i[S_PHASE] = CHOSEN
                    return CHOOSE
                _choose(n, drafted, state_i, engine_i, engine_f, seen, fate, rates, ring, lengths, values, work)
            phase = CHOSEN
        if phase == CHOSEN:
            n, drafted = state_i[S_STEP_DECODING], state_i[S_AHEAD]
            if drafted == 0:
                fate[:n] = 0
                lengths[:n] = 0
            if not _clip_lengths(n, drafted, max_batch - prompt - n, slots, lengths, state_i):
                return WRONG_LENGTH
            batch = n + state_i[S_VERIFIED]
            other_s = _other_s(n, prompt, state_i, state_f, engine_i, engine_f)
            state_f[F_END] = state_f[F_NOW] + (other_s + _verify_s(batch, prompt, engine_i, engine_f))
            phase = UNDER_WAY
            if state_f[F_END] >= state_f[F_UNTIL]:
                state_i[S_PHASE] = UNDER_WAY
                return UNDER_WAY_UNTIL_END
        n, drafted = state_i[S_STEP_DECODING], state_i[S_AHEAD]
        now, start = state_f[F_END], state_f[F_NOW]
        gone = state_i[S_ENDED]
        out_tokens = accepted = 0
        if n > 0:  # a step of prompts alone leaves the slots as they are
            out_tokens, accepted = _deliver(
                n, now, engine_f[C_DEADLINE], drafted, block_tokens, slots, fate, lengths, ended, counts, times, state_i
            )
        batch = n + state_i[S_VERIFIED]
        size = batch + (prompt if engine_i[E_AS_VERIFY] == 1 else 0)
        outside = size > engine_i[E_KNOWN_TO] or 0 < size < engine_i[E_KNOWN_FROM]
        outside = outside or (drafted > 0 and n > engine_i[E_KNOWN_REQUESTS])
        outside = outside or (prompt > 0 and 0 < engine_i[E_ROWS_SIZE] <= batch + prompt)
        row = records[used[0]]
        used[0] += 1
        row[0] = state_i[S_INDEX]
        row[1] = 1
        row[2] = start
        row[3] = now
        row[4] = now - start
        row[5] = state_f[F_DRAFT]
        row[6] = n
        row[7] = n * (now - start)
        row[8] = prompt
        row[9] = batch
        row[10] = n * drafted
        row[11] = state_i[S_VERIFIED]
        row[12] = state_i[S_TRIMMED]
        row[13] = accepted
        row[14] = out_tokens
        row[15] = 0
        row[16] = state_i[S_DECODING] + state_i[S_IN_PREFILL]
        row[17] = state_i[S_WAITING]
        row[18] = kv_blocks - state_i[S_FREE]
        row[19] = state_i[S_STEP_CONTEXT]
        row[20] = 1 if outside else 0
        state_f[F_NOW] = now
        phase = BEGIN
        state_i[S_PHASE] = BEGIN
        steps += 1
        if used[0] == records.shape[0]:
            return RECORDS_FULL
        if steps == most_steps or prompt > 0 or state_i[S_DECODING] == 0:
            return STOPPED
        if stop_at_end and state_i[S_ENDED] > gone:
            return STOPPED


@njit(inline="always")
def _other_s(n, prompt, state_i, state_f, engine_i, engine_f):  # type: ignore[no-untyped-def]
    """Return the seconds of a step that do not depend on its lengths: all but those of `_verify_s`."""
    other_s = engine_f[C_OVERHEAD] + engine_f[C_PER_REQUEST] * n + engine_f[C_PER_CONTEXT] * state_i[S_STEP_CONTEXT]
    if prompt > 0:
        if engine_i[E_ROWS_SIZE] == 0:
            other_s += engine_f[C_PREFILL_TOKEN] * prompt
        other_s += engine_f[C_PREFILL_REQUEST] * state_i[S_ADMITTED]
        other_s += engine_f[C_PREFILL_FLOOR if n == 0 else C_PREFILL_BESIDE]
    return other_s + state_f[F_DRAFT]
