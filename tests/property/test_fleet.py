"""Laws of every fleet: whatever the engine, the load and the policy, the books add up and chance keeps its place."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.batching import Chunked, Disaggregated, Exclusive
from sim.routing import LeastKv, LeastRequests, PowerOfTwo, RoundRobin
from sim.verify import BatchTable, Dspark, DsparkAsync, Fixed, NoSpeculation, Oracle, Threshold
from tests.helpers.fleet import accepts, engine, law, metrics_of, run, same_run, traffic

MODEL = law([0.8, 0.62, 0.45, 0.35], request_sd=0.5, token_sd=0.8, noise_sd=0.4)

prefills = st.one_of(
    st.builds(Chunked, chunk_tokens=st.integers(1, 16)),
    st.just(Exclusive()),
    st.builds(
        Disaggregated,
        replicas=st.integers(1, 2),
        hand_off=st.sampled_from([0.0, 0.01, 0.3]),
        max_step_tokens=st.integers(5, 60),
    ),
)
policies = st.one_of(
    st.just(NoSpeculation()),
    st.builds(Fixed, k=st.integers(1, 4)),
    st.builds(Threshold, min_confidence=st.floats(0, 1)),
    st.just(BatchTable(table=((1, 4), (3, 2), (6, 0)), hysteresis=1)),
    st.just(Dspark()),
    st.builds(DsparkAsync, lag=st.integers(1, 3), first_budget=st.integers(0, 2)),
    st.just(Oracle()),
)
routers = st.sampled_from([RoundRobin(), LeastRequests(), LeastKv(), PowerOfTwo()])


@st.composite
def engines(draw):
    seats = draw(st.integers(1, 10))
    return engine(
        draw(policies),
        accepts(MODEL, kind=draw(st.sampled_from(["block", "chain"]))),
        step_s=lambda batch: 0.01 + 1e-3 * np.maximum(batch - 8, 0),
        largest=64,
        known_to=draw(st.integers(1, 60)),
        per_request_s=draw(st.sampled_from([0.0, 1e-4])),
        per_context_token_s=draw(st.sampled_from([0.0, 1e-6])),
        overhead_s=draw(st.sampled_from([0.0, 1e-3])),
        prompt_token_s=1e-3,
        prompt_rows_s=draw(st.sampled_from([(), (0.0, 2e-3, 5e-3, 5.5e-3), tuple(1e-3 * np.arange(70) ** 1.2)])),
        prompt_request_s=draw(st.sampled_from([0.0, 3e-3])),
        prompt_beside_s=draw(st.sampled_from([0.0, 2e-3])),
        prompts_as_batch=draw(st.booleans()),
        draft_s=lambda requests: 1e-3 + 1e-4 * requests,
        draft_per_token=draw(st.booleans()),
        known_requests=draw(st.integers(1, 10)),
        prefill=draw(prefills),
        max_running=seats,
        max_batch_tokens=draw(st.integers(max(seats, 16), 40)),
        max_waiting=draw(st.none() | st.integers(1, 6)),
        max_context_tokens=draw(st.sampled_from([20, 70, 10_000])),
        block_tokens=draw(st.integers(1, 5)),
        kv_blocks=draw(st.integers(2, 200)),
        deadline_s=draw(st.sampled_from([0.2, 2.0, np.inf])),
    )


@st.composite
def loads(draw, most=25):
    n = draw(st.integers(1, most))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.01, 0.05, 0.3, 2.0]), min_size=n, max_size=n))
    prompts = draw(st.lists(st.integers(1, 60), min_size=n, max_size=n))
    outputs = draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
    return traffic(np.cumsum(gaps), prompts, outputs)


@given(toy=engines(), offered=loads(), replicas=st.integers(1, 3), router=routers, horizon_s=st.floats(0.01, 60))
@settings(max_examples=150)
def test_the_books_of_any_fleet_add_up(toy, offered, replicas, router, horizon_s):
    """`run` audits: arrivals, tokens, blocks, order of time and the price of every step."""
    run(toy, offered, replicas=replicas, router=router, horizon_s=horizon_s)


@given(toy=engines(), offered=loads(), replicas=st.integers(1, 3), router=routers)
@settings(max_examples=40)
def test_the_same_seed_gives_the_same_bytes(toy, offered, replicas, router):
    one, other = (run(toy, offered, replicas=replicas, router=router, horizon_s=20.0) for _ in range(2))
    assert same_run(one, other)


@given(toy=engines(), offered=loads(), replicas=st.integers(1, 3), router=routers)
@settings(max_examples=40)
def test_no_metric_is_nan_and_shares_are_shares(toy, offered, replicas, router):
    pool = toy.prefill.replicas if isinstance(toy.prefill, Disaggregated) else 0
    result = run(toy, offered, replicas=replicas, router=router, horizon_s=20.0)
    measured = metrics_of(result, 20.0, replicas=replicas, pool=pool)
    for name, value in measured.items():
        assert value is None or value == value, name
        if value is not None and name.endswith("_ratio"):
            assert -1e-9 <= value <= 1 + 1e-9, name
    ends = ("finished", "rejected", "aborted", "failed", "unfinished")
    assert measured["arrived"] == sum(measured[end] for end in ends)


@given(toy=engines(), offered=loads(most=12), later=st.floats(0.01, 30))
@settings(max_examples=40)
def test_the_past_does_not_know_the_horizon(toy, offered, later):
    """A run to a later horizon begins with the very steps of the shorter run."""
    short, long = run(toy, offered, horizon_s=1.0), run(toy, offered, horizon_s=1.0 + later)
    n = short.steps["steps"].size
    # Steps that end at one instant on several engines may be told in either order.
    assert sorted(short.steps["busy_s"].tolist()) == sorted(long.steps["busy_s"][:n].tolist())
    tokens = long.requests["output_tokens"][: short.requests["output_tokens"].size]
    assert (short.requests["output_tokens"] <= tokens).all()


@given(toy=engines(), offered=loads())
@settings(max_examples=40)
def test_sums_by_second_are_sums_of_the_steps(toy, offered):
    full, summed = (run(toy, offered, horizon_s=20.0, steps=steps) for steps in ("full", "per_second"))
    for name, column in full.steps.items():
        if name not in ("replica", "started_s", "ended_s"):
            np.testing.assert_allclose(summed.steps[name].sum(), column.sum(), rtol=1e-9)
