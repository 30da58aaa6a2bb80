"""Fleets from toy numbers, and the books of every run kept a second time.

`engine` builds an engine whose step time is a short sum; `run` simulates it and hands the records to `audit`, which
recounts requests, tokens, memory, time and prices from the columns alone and shares no code with the simulator's own
check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from profiles.curves import NO_ROWS, StepCost
from profiles.schema import ConfidenceQuality, Drafter, ParametricLaw, Provenance, Spread, Survival
from sim.acceptance import AcceptanceTables, acceptance_tables
from sim.batching import Chunked, Disaggregated
from sim.engine import Engine
from sim.fleet import RunResult, simulate
from sim.metrics import Gpus, Metrics, Objective, Window, measure
from sim.recorder import Recorder
from sim.records import REQUEST_COLUMNS, STEP_COLUMNS, STEP_FLOATS
from sim.rng import Streams
from sim.routing import RoundRobin
from sim.verify.base import Blind
from sim.verify.none import NoSpeculation
from sim.workload.base import RequestTable
from sim.workload.closed_loop import Users

TOY = Provenance(origin="assumed", reason="a toy of the tests")
UNBOUNDED = 1 << 40
EVER = float("inf")


# ------------------------------------------------------------------------------------------------------------- building


def traffic(
    arrived_s: Iterable[float] | float = 0.0,
    prompt: Sequence[int] | int = 1,
    output: Sequence[int] | int = 10,
    domain: Sequence[int] | int = 0,
    domains: tuple[str, ...] = ("-",),
) -> RequestTable:
    """Return offered requests; a single number holds for all."""
    arrived = np.atleast_1d(np.asarray(arrived_s, np.float64))
    columns = [np.broadcast_to(np.asarray(one, np.int64), arrived.shape).copy() for one in (prompt, output, domain)]
    return RequestTable(arrived, *columns, np.zeros(arrived.size, np.int64), domains)


def at_once(n: int, prompt: Sequence[int] | int = 1, output: Sequence[int] | int = 10) -> RequestTable:
    """Return ``n`` requests at time 0."""
    return traffic(np.zeros(n), prompt, output)


def law(
    survival: Sequence[float],
    *,
    request_sd: float = 0.0,
    token_sd: float = 0.0,
    noise_sd: float = 0.0,
    raw_temperature: float = 1.0,
) -> ParametricLaw:
    """Return a parametric acceptance law."""
    return ParametricLaw(
        survival=Survival(values=tuple(survival), provenance=TOY),
        spread=Spread(request_sd=request_sd, token_sd=token_sd, provenance=TOY),
        confidence=ConfidenceQuality(
            noise_sd=noise_sd, raw_temperature=(raw_temperature,) * len(survival), provenance=TOY
        ),
    )


def accepts(
    *laws: ParametricLaw,
    kind: Literal["block", "chain"] = "block",
    confidence: Literal["calibrated", "raw"] = "calibrated",
    domains: tuple[str, ...] = ("-",),
) -> AcceptanceTables:
    """Return the acceptance of a drafter, a law a domain (one law serves all)."""
    named = dict(zip(domains if len(laws) > 1 else ("any",), laws, strict=True))
    drafter = Drafter(kind=kind, trained_length=len(laws[0].survival.values), domains=named)
    return acceptance_tables("toy", drafter, domains, confidence, Path("toy.json"))


def always(length: int, chance: float = 1.0, kind: Literal["block", "chain"] = "block") -> AcceptanceTables:
    """Return a drafter whose every token is accepted with the same chance."""
    return accepts(law([chance**k for k in range(1, length + 1)]), kind=kind)


def engine(
    policy: Any = None,
    acceptance: AcceptanceTables | None = None,
    *,
    step_s: float | Callable[[np.ndarray], np.ndarray] = 0.01,
    largest: int = 4096,
    known_from: int = 1,
    known_to: int | None = None,
    per_request_s: float = 0.0,
    per_context_token_s: float = 0.0,
    overhead_s: float = 0.0,
    prompt_floor_s: float = 0.0,
    prompt_token_s: float = 0.001,
    prompt_rows_s: Sequence[float] = (),
    prompt_request_s: float = 0.0,
    prompt_beside_s: float = 0.0,
    prompts_as_batch: bool = False,
    draft_s: float | Callable[[np.ndarray], np.ndarray] = 0.0,
    draft_per_token: bool = False,
    known_requests: int | None = None,
    prefill: Any = None,
    max_running: int = 64,
    max_batch_tokens: int = 4096,
    max_waiting: int | None = None,
    max_context_tokens: int = UNBOUNDED,
    block_tokens: int = 16,
    kv_blocks: int = UNBOUNDED,
    deadline_s: float = EVER,
    seed: int = 0,
) -> Engine:
    """Build an engine; what a test does not say is flat, free and without end.

    ``step_s``, ``draft_s``: seconds of a step whatever its batch tokens (of drafting, whatever the requests), or a
    function of their number. Prompts cost ``prompt_token_s`` a token, or by ``prompt_rows_s`` where that says something
    (see `RowsPrefill`), and ``prompt_request_s`` at their beginning, unless ``prompts_as_batch``. Beside decoding they
    add ``prompt_beside_s``.
    """
    sizes = np.arange(max(largest, max_batch_tokens) + 1, dtype=np.float64)
    verify_s = np.asarray(step_s(sizes) if callable(step_s) else np.full(sizes.size, step_s), np.float64)
    verify_s[0] = 0.0
    requests = np.arange(max_running + 1, dtype=np.float64)
    draft = np.asarray(draft_s(requests) if callable(draft_s) else np.full(requests.size, draft_s), np.float64)
    draft[0] = 0.0
    policy = policy or NoSpeculation()
    return Engine(
        policy=policy,
        cost=StepCost(
            verify_s=verify_s,
            known_from=known_from,
            known_to=sizes.size - 1 if known_to is None else known_to,
            per_request_s=per_request_s,
            per_context_token_s=per_context_token_s,
            overhead_s=overhead_s,
            prefill_as_verify=prompts_as_batch,
            prefill_floor_s=0.0 if prompts_as_batch else prompt_floor_s,
            prefill_rows_s=NO_ROWS if prompts_as_batch else np.asarray(prompt_rows_s, np.float64),
            prefill_token_s=0.0 if prompts_as_batch else prompt_token_s,
            prefill_request_s=0.0 if prompts_as_batch else prompt_request_s,
            prefill_beside_s=prompt_beside_s,
        ),
        draft_s=draft,
        draft_per_token=draft_per_token,
        known_requests=max_running if known_requests is None else known_requests,
        acceptance=acceptance if policy.drafter is not None else None,
        prefill=prefill or Chunked(chunk_tokens=min(512, max_batch_tokens)),
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        max_waiting=max_waiting,
        max_context_tokens=max_context_tokens,
        block_tokens=block_tokens,
        kv_blocks=kv_blocks,
        deadline_s=deadline_s,
        luck_key=Streams(seed).key("luck"),
        text_key=Streams(seed).key("luck"),
    )


def run(
    toy: Engine,
    offered: RequestTable | Users,
    *,
    horizon_s: float = 1000.0,
    replicas: int = 1,
    router: Any = None,
    seed: int = 0,
    steps: Literal["full", "per_second"] = "full",
) -> RunResult:
    """Simulate, audit and return the records."""
    result = simulate(toy, router or RoundRobin(), replicas, offered, horizon_s, Streams(seed), Recorder(steps))
    audit(result, toy, offered, horizon_s=horizon_s, replicas=replicas, steps=steps)
    return result


def metrics_of(
    result: RunResult,
    until_s: float,
    *,
    from_s: float = 0.0,
    replicas: int = 1,
    pool: int = 0,
    objective: Objective | None = None,
) -> Metrics:
    """Measure a run on one GPU a replica."""
    gpus = Gpus(total=replicas + pool, decode=replicas, replicas=replicas)
    return measure(result.requests, result.steps, Window(from_s, until_s), gpus, objective or Objective())


@dataclass(slots=True)
class Spy:
    """A policy that verifies ``take`` draft tokens of each request (None: all) and keeps what it was shown."""

    take: int | None = None
    sees_outcome: bool = False
    drafts: int | None = None
    drafter: str = "toy"
    kind: str = "spy"
    seen: list[np.ndarray] = field(default_factory=list)
    rates: list[np.ndarray] = field(default_factory=list)

    confidence = Blind.confidence
    lossless_with = Blind.lossless_with

    def check_drafter(self, trained_length: int, kind: str) -> None:
        """Any will do."""

    def draft_length(self, requests: int, trained_length: int) -> int:
        """Draft what was asked, or all."""
        return trained_length if self.drafts is None else self.drafts

    def verify_lengths(self, confidence: np.ndarray, steps_per_s: np.ndarray) -> np.ndarray:
        """Note and take."""
        self.seen.append(confidence.copy())
        self.rates.append(steps_per_s.copy())
        requests, drafted = confidence.shape
        return np.full(requests, drafted if self.take is None else self.take, np.int64)

    def start(self) -> Spy:
        """One note book for all replicas."""
        return self


def same_run(left: RunResult, right: RunResult) -> bool:
    """Tell whether two runs wrote the same bytes."""
    return all(
        list(ours) == list(theirs) and all(_same_column(ours[name], theirs[name]) for name in ours)
        for ours, theirs in ((left.requests, right.requests), (left.steps, right.steps))
    )


def _same_column(left: np.ndarray, right: np.ndarray) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool((left == right).all()) if left.dtype == object else left.tobytes() == right.tobytes()


# ------------------------------------------------------------------------------------------------------------- auditing

REASONS_OF = {
    "unfinished": {"horizon"},
    "finished": {"stop", "context_limit"},
    "rejected": {"queue_full", "prompt_too_long"},
    "aborted": {"deadline"},
    "failed": {"kv_exhausted"},
}


def audit(
    result: RunResult,
    toy: Engine,
    offered: RequestTable | Users,
    *,
    horizon_s: float,
    replicas: int,
    steps: Literal["full", "per_second"] = "full",
) -> None:
    """Recount a run; every assertion is one law of the fleet."""
    _audit_shape(result)
    _audit_arrivals(result, offered, horizon_s)
    _audit_requests(result, toy, horizon_s)
    _audit_tokens(result)
    if steps == "full":
        _audit_steps(result, toy, horizon_s, replicas)
        _audit_prices(result, toy, replicas)
        if not isinstance(toy.prefill, Disaggregated):
            _audit_crowd(result, replicas)


def _audit_shape(result: RunResult) -> None:
    assert tuple(result.requests) == REQUEST_COLUMNS
    assert tuple(result.steps) == STEP_COLUMNS
    for columns in (result.requests, result.steps):
        assert len({column.shape for column in columns.values()}) == 1
    for name, column in result.steps.items():
        assert column.dtype.kind == ("f" if name in STEP_FLOATS else "i")


def _audit_arrivals(result: RunResult, offered: RequestTable | Users, horizon_s: float) -> None:
    requests = result.requests
    np.testing.assert_array_equal(requests["request"], np.arange(requests["request"].size))
    assert (np.diff(requests["arrived_s"]) >= 0).all()
    assert (requests["arrived_s"] < horizon_s).all()
    if isinstance(offered, RequestTable):
        came = offered.arrived_s < horizon_s
        np.testing.assert_array_equal(requests["arrived_s"], offered.arrived_s[came])
        np.testing.assert_array_equal(requests["prompt_tokens"], offered.prompt_tokens[came])
        np.testing.assert_array_equal(requests["asked_tokens"], offered.output_tokens[came])


def _audit_requests(result: RunResult, toy: Engine, horizon_s: float) -> None:
    columns = result.requests
    status, reason, out = columns["status"], columns["reason"], columns["output_tokens"]
    times = [columns[name] for name in ("arrived_s", "admitted_s", "first_token_s", "last_token_s", "ended_s")]
    arrived, admitted, first, last, ended = times
    is_ = {name: status == name for name in REASONS_OF}
    assert sum(int(mask.sum()) for mask in is_.values()) == status.size
    for name, reasons in REASONS_OF.items():
        assert set(reason[is_[name]]) <= reasons

    # Time runs forward, and an instant that did not happen leaves no later one but the end.
    for before, after in ((arrived, admitted), (admitted, first), (first, last), (last, ended), (arrived, ended)):
        both = ~np.isnan(before) & ~np.isnan(after)
        assert (before <= after)[both].all()
    assert not (np.isnan(admitted) & ~np.isnan(first)).any()
    np.testing.assert_array_equal(np.isnan(first), out == 0)
    np.testing.assert_array_equal(np.isnan(last), out == 0)
    np.testing.assert_array_equal(np.isnan(ended), is_["unfinished"])
    assert (ended[~is_["unfinished"]] <= horizon_s).all()

    # How it ended says how much it got.
    room = np.minimum(columns["asked_tokens"], toy.max_context_tokens - columns["prompt_tokens"])
    np.testing.assert_array_equal(out[is_["finished"]], room[is_["finished"]])
    np.testing.assert_array_equal(last[is_["finished"]], ended[is_["finished"]])
    cut = room < columns["asked_tokens"]
    np.testing.assert_array_equal(cut[is_["finished"]], (reason == "context_limit")[is_["finished"]])
    others = ~is_["finished"] & ~is_["rejected"]
    assert (out[others] < room[others]).all()
    assert (out[is_["rejected"]] == 0).all()
    np.testing.assert_array_equal(ended[is_["rejected"]], arrived[is_["rejected"]])
    late = ended - arrived > toy.deadline_s
    assert late[is_["aborted"]].all()

    # Gaps between deliveries.
    gap, several = columns["max_itl_s"], out > 1
    np.testing.assert_array_equal(np.isnan(gap), ~several)
    span = (last - first)[several]
    assert (gap[several] <= span * (1 + 1e-12)).all()
    gaps = (columns["rounds"] + columns["preemptions"])[several]
    assert (gap[several] * gaps >= span * (1 - 1e-9)).all()


def _audit_tokens(result: RunResult) -> None:
    requests, steps = result.requests, result.steps
    for name in ("output_tokens", "drafted_tokens", "verified_tokens", "accepted_draft_tokens"):
        assert requests[name].sum() == steps[name].sum(), name
    assert requests["rounds"].sum() == steps["decoding"].sum()
    for columns in (requests, steps):
        assert (columns["accepted_draft_tokens"] <= columns["verified_tokens"]).all()
        assert (columns["verified_tokens"] <= columns["drafted_tokens"]).all()
    # A token came from a prompt, as a round's own or as an accepted draft; the round that reaches the end inside its
    # block leaves its own out.
    out, done = requests["output_tokens"], requests["status"] == "finished"
    from_prompts = out - requests["rounds"] - requests["accepted_draft_tokens"] + done
    least = (out > 0).astype(int)
    assert (from_prompts >= least).all()
    assert (from_prompts <= least + requests["preemptions"] + done).all()
    first = steps["first_tokens"].sum()
    assert least.sum() <= first <= least.sum() + requests["preemptions"].sum()
    assert (steps["first_tokens"] <= steps["output_tokens"]).all()
    computed, asked = steps["prompt_tokens"].sum(), requests["prompt_tokens"][out > 0].sum()
    assert computed >= asked
    if requests["preemptions"].sum() == 0 and (requests["status"] == "finished").all():
        assert computed == asked


def _audit_steps(result: RunResult, toy: Engine, horizon_s: float, replicas: int) -> None:
    steps = result.steps
    assert (steps["steps"] == 1).all()
    assert (np.diff(steps["ended_s"]) >= 0).all()
    assert (steps["ended_s"] <= horizon_s).all()
    np.testing.assert_allclose(steps["ended_s"] - steps["started_s"], steps["busy_s"], rtol=0, atol=1e-9 * horizon_s)
    np.testing.assert_allclose(steps["decoding_s"], steps["decoding"] * steps["busy_s"])
    decodes = steps["replica"] < replicas
    np.testing.assert_array_equal(steps["batch_tokens"], steps["decoding"] + steps["verified_tokens"])
    assert ((steps["batch_tokens"] + steps["prompt_tokens"])[decodes] <= toy.max_batch_tokens).all()
    assert (steps["decoding"] <= toy.max_running).all()
    assert (steps["running"][decodes] <= toy.max_running).all()
    assert (steps["drafted_tokens"] <= steps["decoding"] * toy.trained_length).all()
    assert ((steps["kv_blocks"] >= 0) & (steps["kv_blocks"] <= toy.kv_blocks)).all()
    if toy.max_waiting is not None and not result.requests["preemptions"].any() and decodes.all():
        assert (steps["waiting"] <= toy.max_waiting).all()
    for index in np.unique(steps["replica"]):
        own = {name: column[steps["replica"] == index] for name, column in steps.items()}
        assert (own["started_s"][1:] >= own["ended_s"][:-1]).all()
        if own["running"][-1] == 0:
            assert own["kv_blocks"][-1] == 0


def _audit_prices(result: RunResult, toy: Engine, replicas: int) -> None:
    """Price every step again from its row."""
    steps, cost = result.steps, toy.cost
    n, batch, prompts = steps["decoding"], steps["batch_tokens"], steps["prompt_tokens"]
    drafted = np.divide(steps["drafted_tokens"], n, out=np.zeros(n.size), where=n > 0)
    draft_s = np.where(drafted > 0, toy.draft_s[n] * (drafted if toy.draft_per_token else 1.0), 0.0)
    np.testing.assert_allclose(steps["draft_s"], draft_s, rtol=1e-12)
    expected = cost.overhead_s + draft_s + cost.per_request_s * n + cost.per_context_token_s * steps["context_tokens"]
    expected = expected + cost.prefill_beside_s * ((n > 0) & (prompts > 0))
    expected = expected + cost.prefill_floor_s * ((n == 0) & (prompts > 0))
    expected = expected + cost.verify_s[batch + (prompts if cost.prefill_as_verify else 0)]
    if cost.prefill_rows_s.size:
        expected = expected + _rows_s(cost, batch + prompts) - _rows_s(cost, batch)
    else:
        expected = expected + cost.prefill_token_s * prompts
    expected = expected + cost.prefill_request_s * _begun(result, expected, cost.prefill_request_s)
    np.testing.assert_allclose(steps["busy_s"], expected, rtol=1e-9)
    size = batch + prompts if cost.prefill_as_verify else batch
    outside = (size > cost.known_to) | ((size > 0) & (size < cost.known_from))
    outside |= (drafted > 0) & (n > toy.known_requests)
    outside |= (prompts > 0) & (batch + prompts > cost.prefill_rows_s.size - 1) & (cost.prefill_rows_s.size > 0)
    np.testing.assert_array_equal(steps["outside_steps"], outside)


def _rows_s(cost: StepCost, rows: np.ndarray) -> np.ndarray:
    beyond = np.maximum(rows - (cost.prefill_rows_s.size - 1), 0)
    return np.asarray(cost.prefill_rows_s[rows - beyond] + cost.prefill_token_s * beyond)


def _begun(result: RunResult, others_s: np.ndarray, each_s: float) -> np.ndarray:
    """Return how many prompts each step began, as its length says, and count them."""
    requests, steps = result.requests, result.steps
    if each_s == 0:
        return np.zeros(others_s.size)
    begun = np.rint((steps["busy_s"] - others_s) / each_s)
    assert ((begun >= 0) & (begun <= steps["prompt_tokens"])).all()
    # A prompt that delivered was begun, and none is begun twice but after a preemption.
    assert steps["first_tokens"].sum() <= begun.sum()
    assert begun.sum() <= (~np.isnan(requests["admitted_s"])).sum() + requests["preemptions"].sum()
    return begun


def _audit_crowd(result: RunResult, replicas: int) -> None:
    """Requests inside a replica at every step's end: what the step says is what the requests say."""
    requests, steps = result.requests, result.steps
    stayed = requests["status"] != "rejected"
    for index in range(replicas):
        mine = stayed & (requests["replica"] == index)
        arrived = np.sort(requests["arrived_s"][mine])
        ended = np.sort(requests["ended_s"][mine & ~np.isnan(requests["ended_s"])])
        own = steps["replica"] == index
        at = steps["ended_s"][own]
        inside = (steps["running"] + steps["waiting"])[own]
        # What arrives, or is given up, at that very instant may come before the row or after it.
        most = np.searchsorted(arrived, at, "right") - np.searchsorted(ended, at, "left")
        least = np.searchsorted(arrived, at, "left") - np.searchsorted(ended, at, "right")
        assert ((least <= inside) & (inside <= most)).all()
