"""What every replica of a run shares: costs, tables, limits and the policy; all frozen."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from profiles.curves import StepCost
from sim import kernels
from sim.acceptance import AcceptanceTables
from sim.batching.base import Prefill
from sim.verify import BatchTable, Dspark, DsparkAsync, Fixed, Mtp1, NoSpeculation, Oracle, Policy, Threshold

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Settings of a replica's engine, in whole tokens, blocks and seconds.

    ``draft_s[r]``: seconds to draft for ``r`` requests, for each draft token where ``draft_per_token``.
    ``known_requests``: requests up to which the profile measured drafting. ``text_key``: chooses which text of a bank
    each request follows; ``luck_key``: what it meets there. ``ints``, ``floats``: the same for the kernels, laid out
    by `sim.kernels.EngineLayout`.
    """

    policy: Policy
    cost: StepCost
    draft_s: Floats
    draft_per_token: bool
    known_requests: int
    acceptance: AcceptanceTables | None
    prefill: Prefill
    max_running: int
    max_batch_tokens: int
    max_waiting: int | None
    max_context_tokens: int
    block_tokens: int
    kv_blocks: int
    deadline_s: float
    luck_key: np.uint64
    text_key: np.uint64
    ints: Ints = field(init=False, repr=False)
    floats: Floats = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Lay out the arrays for the kernels."""
        ints, floats = _laid_out(self)
        object.__setattr__(self, "ints", ints)
        object.__setattr__(self, "floats", floats)

    @property
    def trained_length(self) -> int:
        """Draft tokens of a whole block; 0 without a drafter."""
        return self.acceptance.draft_length if self.acceptance is not None else 0

    @property
    def chooses_in_python(self) -> bool:
        """Whether the policy is not one of the compiled ones."""
        return bool(self.ints[kernels.E_POLICY] == kernels.IN_PYTHON)

    @property
    def lag(self) -> int:
        """Steps that the policy looks back."""
        return int(self.ints[kernels.E_LAG])


def _laid_out(engine: Engine) -> tuple[Ints, Floats]:
    cost, tables, policy = engine.cost, engine.acceptance, engine.policy
    is_table = type(policy) is BatchTable
    starts = policy.starts if isinstance(policy, BatchTable) and is_table else np.zeros(1, np.int64)
    lengths = policy.lengths if isinstance(policy, BatchTable) and is_table else np.zeros(1, np.int64)
    bank = tables.bank if tables is not None else np.zeros(1, np.int64)
    sd = tables.sd if tables is not None else np.zeros((1, 3))
    chance = tables.chance if tables is not None else np.zeros((1, 1, 1))
    confidence = tables.confidence if tables is not None else chance
    at = kernels.EngineLayout(
        starts.size, bank.size, cost.verify_s.size, engine.draft_s.size, len(sd), chance.size, cost.prefill_rows_s.size
    )
    ints, floats = np.zeros(at.size_i, np.int64), np.zeros(at.size_f)
    ints[kernels.E_POLICY] = _compiled_kind(policy)
    ints[kernels.E_K] = 1 if isinstance(policy, Mtp1) else policy.k if isinstance(policy, Fixed) else 0
    ints[kernels.E_LAG] = policy.lag if isinstance(policy, DsparkAsync) else 1
    ints[kernels.E_FIRST_BUDGET] = policy.first_budget if isinstance(policy, DsparkAsync) else 0
    ints[kernels.E_HYSTERESIS] = policy.hysteresis if isinstance(policy, BatchTable) else 0
    ints[kernels.E_TABLE_ROWS] = starts.size
    ints[kernels.E_TRAINED] = engine.trained_length
    ints[kernels.E_IS_BLOCK] = tables is not None and tables.is_block
    ints[kernels.E_IS_BANK] = tables is not None and tables.is_bank
    ints[kernels.E_DRAFT_PER_TOKEN] = engine.draft_per_token
    ints[kernels.E_AS_VERIFY] = cost.prefill_as_verify
    ints[kernels.E_MAX_BATCH] = engine.max_batch_tokens
    ints[kernels.E_KNOWN_FROM] = cost.known_from
    ints[kernels.E_KNOWN_TO] = cost.known_to
    ints[kernels.E_KNOWN_REQUESTS] = engine.known_requests
    ints[kernels.E_BLOCK_TOKENS] = engine.block_tokens
    ints[kernels.E_DOMAINS] = len(sd)
    ints[kernels.E_VERIFY_SIZE] = cost.verify_s.size
    ints[kernels.E_DRAFT_SIZE] = engine.draft_s.size
    ints[kernels.E_TABLE_POINTS] = chance.shape[2]
    ints[kernels.E_ROWS_SIZE] = cost.prefill_rows_s.size
    ints[at.starts : at.lengths] = starts
    ints[at.lengths : at.bank] = lengths
    ints[at.bank :] = bank
    floats[kernels.C_OVERHEAD] = cost.overhead_s
    floats[kernels.C_PER_REQUEST] = cost.per_request_s
    floats[kernels.C_PER_CONTEXT] = cost.per_context_token_s
    floats[kernels.C_PREFILL_TOKEN] = cost.prefill_token_s
    floats[kernels.C_PREFILL_FLOOR] = cost.prefill_floor_s
    floats[kernels.C_PREFILL_REQUEST] = cost.prefill_request_s
    floats[kernels.C_PREFILL_BESIDE] = cost.prefill_beside_s
    floats[kernels.C_DEADLINE] = engine.deadline_s
    floats[kernels.C_FLOOR] = policy.min_confidence if isinstance(policy, Threshold) else 0.0
    floats[at.verify : at.draft] = cost.verify_s
    floats[at.draft : at.sd] = engine.draft_s
    floats[at.sd : at.chance] = sd.ravel()
    floats[at.chance : at.confidence] = chance.ravel()
    floats[at.confidence : at.rows] = confidence.ravel()
    floats[at.rows :] = cost.prefill_rows_s
    ints.setflags(write=False)
    floats.setflags(write=False)
    return ints, floats


def _compiled_kind(policy: Policy) -> int:
    """Return the kernel's code of a built-in policy; a class of someone else's, even a subclass, chooses in Python."""
    return {
        NoSpeculation: kernels.NONE,
        Mtp1: kernels.FIXED,
        Fixed: kernels.FIXED,
        Threshold: kernels.THRESHOLD,
        BatchTable: kernels.BATCH_TABLE,
        Dspark: kernels.DSPARK,
        DsparkAsync: kernels.DSPARK_ASYNC,
        Oracle: kernels.ORACLE,
    }.get(type(policy), kernels.IN_PYTHON)
