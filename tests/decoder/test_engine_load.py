"""Traffic through the engine, and what it leaves behind: the simulator's columns, on disk as they happen."""

import dataclasses
import json

import numpy as np
import pytest

from decoder.engine_rates import FlatStepRates, ProfileStepRates
from decoder.errors import InputError
from decoder.journal import REQUESTS, STEPS, Journal, RequestRow, StepRow, load_journal
from decoder.load import Asking, Prompts, drive
from decoder.sampling import Sampling
from profiles.files import SHIPPED, load_profile
from sim.invariants import Books
from sim.metrics import Gpus, Objective, Window, measure
from sim.records import REQUEST_COLUMNS, STEP_COLUMNS
from sim.rng import Streams
from sim.verify import BatchTable, Dspark, Fixed, NoSpeculation
from sim.workload.base import RequestTable
from sim.workload.build import build_users
from sim.workload.closed_loop import ClosedLoop
from sim.workload.length_source import PromptAndOutput
from sim.workload.lengths import Fixed as FixedLength
from tests.decoder.engines import drafter_of, engine_of, request, transformer

PROMPTS = Prompts({"code": [(1, 2, 3), (4, 5)], "chat": [(6, 7, 8, 9)]})
ASKING = Asking(sampling=Sampling(temperature=1.0), seed=3)


class Ticks:
    """A clock on which every look takes a millisecond, and waiting nothing."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1e-3
        return self.now

    def wait_until(self, instant_s):
        assert instant_s < np.inf
        self.now = max(self.now, instant_s)


def table(rows=8, gap_s=0.02):
    number = np.arange(rows)
    return RequestTable(number * gap_s, 2 + number % 5, 1 + 3 * (number % 4), number % 2, number * 0, ("code", "chat"))


def loaded(policy=None, traffic=None, horizon_s=np.inf, folder=None, **options):
    clock = Ticks()
    policy = policy or Fixed(k=4)
    journal = Journal(folder)
    engine = engine_of(transformer(), drafter_of("dspark_rnn"), policy, clock=clock, journal=journal, **options)
    drive(engine, table() if traffic is None else traffic, PROMPTS, ASKING, horizon_s=horizon_s, clock=clock)
    return engine, journal.columns()


def check(requests, steps, inside=0):
    assert tuple(requests) == REQUEST_COLUMNS
    assert tuple(steps) == STEP_COLUMNS
    idle = steps["drafted_tokens"] == 0
    assert (idle == (steps["decoding"] == 0)).all()  # a step that only reads prompts proposes nothing
    assert (steps["draft_s"][idle] == 0).all()
    books = Books()
    books.add_requests(requests)
    books.add_steps(steps)
    books.check(inside, len(requests["request"]))


def test_columns_are_the_simulator_s():
    assert tuple(field.name for field in dataclasses.fields(StepRow)) == STEP_COLUMNS
    assert tuple(field.name for field in dataclasses.fields(RequestRow)) == REQUEST_COLUMNS


@pytest.mark.parametrize(
    "options",
    ({}, {"blocks": 10, "max_running": 3}, {"deadline_s": 0.06}, {"max_waiting": 1, "max_running": 1}),
)
def test_an_open_loop_adds_up(options):
    engine, (requests, steps) = loaded(**options)
    assert engine.idle
    check(requests, steps)
    assert len(requests["request"]) == 8
    assert set(requests["status"]) <= {"finished", "aborted", "rejected"}
    done = requests["status"] == "finished"
    assert done.any()
    np.testing.assert_array_equal(requests["output_tokens"][done], requests["asked_tokens"][done])
    np.testing.assert_array_equal(requests["arrived_s"], table().arrived_s)
    np.testing.assert_array_equal(requests["prompt_tokens"], table().prompt_tokens)
    metrics = measure(requests, steps, Window(0.0, 10.0), Gpus(1, 1, 1), Objective())
    assert metrics["finished"] == done.sum()
    if done.all():
        assert metrics["accepted_length"] == pytest.approx(
            (requests["output_tokens"] - 1).sum() / requests["rounds"].sum()
        )


def test_the_same_seed_gives_the_same_run():
    """Byte for byte, the clock's readings included, where the clock itself is the same."""
    runs = [loaded(policy=Dspark(), blocks=12)[1] for _ in range(2)]
    for mine, theirs in zip(*runs, strict=True):
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name])


def test_drafting_that_is_off_costs_nothing():
    """At two running requests nothing is drafted, and no draft time is paid; alone, drafting goes on."""
    policy = BatchTable(table=((1, 4), (2, 0)))
    _, (_, steps) = loaded(policy=policy, traffic=table(rows=3, gap_s=0.0))
    off = steps["decoding"] > 1
    assert off.any()
    assert (steps["draft_s"][off] == 0).all()
    assert (steps["drafted_tokens"][off] == 0).all()
    assert (steps["draft_s"][steps["decoding"] == 1] > 0).all()


def test_the_horizon_leaves_requests_unfinished_and_counts_them():
    engine, (requests, steps) = loaded(horizon_s=0.05)
    check(requests, steps, inside=engine.scheduler.inside)
    assert (requests["arrived_s"] < 0.05).all()
    assert (requests["status"] == "unfinished").sum() > 0


def users(count=3, think_time=0.05):
    settings = ClosedLoop(users=count, think_time=think_time)
    lengths = PromptAndOutput(prompt=FixedLength(tokens=4), output=FixedLength(tokens=5))
    return build_users(settings, lengths, {"code": 0.5, "chat": 0.5}, Streams(1))


def test_a_closed_loop_has_one_request_a_user_under_way():
    _, (requests, steps) = loaded(traffic=users(), horizon_s=0.8)
    assert len(requests["request"]) > 8
    assert steps["decoding"].max() <= 3
    done = requests["status"] == "finished"
    assert (~done).sum() <= 3
    overlap = (requests["arrived_s"][None] < requests["ended_s"][:, None]) & (
        requests["arrived_s"][:, None] <= requests["arrived_s"][None]
    )
    assert overlap[done].sum(1).max() <= 3


def test_who_asks_again_at_once_waits_for_the_step_under_way():
    """As in the simulator, where the next step is planned before the user who was answered asks again."""
    _, (requests, steps) = loaded(traffic=users(think_time=0.0), horizon_s=0.8)
    arrived_s, admitted_s, ended_s = (requests[name] for name in ("arrived_s", "admitted_s", "ended_s"))
    waited = 0
    for asked_s, taken_s in zip(arrived_s, admitted_s, strict=True):
        served = (admitted_s < asked_s) & ~(ended_s <= asked_s)
        if asked_s > 0 and taken_s > 0 and served.any():
            assert asked_s in ended_s
            # One step begins without the new request.
            assert ((steps["started_s"] > asked_s) & (steps["started_s"] < taken_s)).sum() == 1
            waited += 1
    assert waited > 8


def test_a_user_alone_waits_for_nobody():
    _, (requests, _) = loaded(traffic=users(count=1, think_time=0.0), horizon_s=0.8)
    done = requests["status"] == "finished"
    assert done.sum() > 3
    np.testing.assert_array_equal(requests["arrived_s"][1:], requests["ended_s"][:-1])


def test_a_closed_loop_without_an_end_is_refused():
    with pytest.raises(InputError, match="a closed loop needs an end"):
        loaded(traffic=users())


def test_the_same_text_under_every_policy_and_load():
    """The request's luck is its own: what it says depends on neither policy nor neighbours."""
    texts = []
    for policy, gap_s in ((NoSpeculation(), 0.0), (NoSpeculation(), 1.0)):
        clock = Ticks()
        engine = engine_of(transformer(), None, policy, clock=clock)
        kept, submit = [], engine.submit
        engine.submit = lambda *a, kept=kept, submit=submit, **k: kept.append(submit(*a, **k)) or kept[-1]
        drive(engine, table(gap_s=gap_s), PROMPTS, ASKING, horizon_s=np.inf, clock=clock)
        texts.append([one.output_ids for one in kept])
    assert texts[0] == texts[1]


# Prompts


def test_prompts_are_as_long_as_asked_and_end_as_texts_do():
    for tokens in range(1, 12):
        for draw in range(4):
            found = PROMPTS.take("code", draw, tokens)
            assert len(found) == tokens
            assert found[-1] == (3, 5)[draw % 2]
    assert PROMPTS.take("code", 0, 6) == (3, 4, 5, 1, 2, 3)
    assert PROMPTS.take("code", 1, 6) == (5, 1, 2, 3, 4, 5)
    with pytest.raises(InputError, match="no prompts of domain 'law'; known: code, chat"):
        PROMPTS.take("law", 0, 3)
    with pytest.raises(InputError, match="domain 'code' has no prompt"):
        Prompts({"code": [()]})


# On disk


def test_what_was_written_outlives_the_engine(tmp_path):
    """An engine that dies in the middle of a step leaves every row that was written, and a torn line does no harm."""
    clock = Ticks()
    engine = engine_of(transformer(), None, NoSpeculation(), clock=clock, journal=Journal(tmp_path), max_running=2)
    verify, left = engine.verify, [12]

    def dies(*args):
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("out of memory")
        return verify(*args)

    engine.verify = dies
    with pytest.raises(RuntimeError):
        drive(engine, table(), PROMPTS, ASKING, horizon_s=np.inf, clock=clock)
    kept, steps = engine.journal.columns()
    with (tmp_path / STEPS).open("a") as file:
        file.write('{"replica": 0, "st')
    requests, found = load_journal(tmp_path)
    np.testing.assert_array_equal(found["ended_s"], steps["ended_s"])
    assert len(found["ended_s"]) == 11
    np.testing.assert_array_equal(requests["status"], kept["status"])
    assert set(requests["status"]) == {"finished", "unfinished"}


def test_a_journal_reads_back_as_it_was(tmp_path):
    _, columns = loaded(folder=tmp_path)
    for mine, theirs in zip(columns, load_journal(tmp_path), strict=True):
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name])
    assert "NaN" not in (tmp_path / REQUESTS).read_text()
    json.loads((tmp_path / STEPS).read_text().splitlines()[0])
    with pytest.raises(InputError, match=r"steps.jsonl: exists; a run's rows are not written over"):
        Journal(tmp_path)


# Rates


def test_rates_of_a_step():
    flat = FlatStepRates(0.5).steps_per_s(2, 2, 100, 7, 1, 4)
    assert flat.tolist() == [np.inf, 0, 2, 2, 2, 0, 0]
    step_time = load_profile(SHIPPED / "engines" / "qwen3_8b_h20.json").step_time
    rates = ProfileStepRates(step_time, "dflash", 256, 32)
    idle, busy = (rates.steps_per_s(4, 3, 1000, prompt, 0, 200) for prompt in (0, 50))
    assert (idle[4:] > busy[4:]).all()
    assert (idle[1:4] == 0).all()
    assert idle.size == 17
    assert step_time is not None
    prefill = step_time.prefill.model_copy(update={"per_request_s": 0.03})
    dear = ProfileStepRates(step_time.model_copy(update={"prefill": prefill}), "dflash", 256, 32)
    let_in = dear.steps_per_s(4, 3, 1000, 50, 2, 200)
    np.testing.assert_allclose(1 / let_in[4:], 1 / busy[4:] + 2 * 0.03)


def test_the_engine_tells_its_policy_what_is_left_of_the_batch():
    seen = []

    class Spy(FlatStepRates):
        def steps_per_s(self, *args):
            seen.append(args)
            return super().steps_per_s(*args)

    engine = engine_of(transformer(), drafter_of("dspark_rnn"), Dspark(), rates=Spy(), max_batch_tokens=20)
    engine.submit(request("a", [1] * 5, new=9))
    engine.step()
    engine.submit(request("b", [1] * 30, new=2))
    engine.step()
    assert seen[0] == (1, 4, 5, 16, 1, 4)
