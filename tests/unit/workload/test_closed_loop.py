"""Users: what each asks next depends on the seed, the user and the turn, and on nothing else."""

import numpy as np
import pytest

from sim.rng import Streams
from sim.workload.build import ClosedLoop, build_users
from sim.workload.closed_loop import _BLOCK
from sim.workload.domains import MixChange
from sim.workload.length_source import Fixed, Lognormal, PairsOfTrace, PromptAndOutput

LENGTHS = PromptAndOutput(prompt=Lognormal(median=900, p95=4000), output=Lognormal(median=90, sigma=1))
MIX = {"math": 0.5, "code": 0.5}


def users_of(seed=1, *, lengths=LENGTHS, domains=MIX, **options):
    return build_users(ClosedLoop(**{"users": 4, "think_time": 2.0, **options}), lengths, domains, Streams(seed))


def test_turns_do_not_depend_on_the_order_in_which_they_are_asked_for():
    orderly, hasty = users_of(), users_of()
    turns = [(user, turn) for user in range(4) for turn in range(2 * _BLOCK + 3)]
    wanted = {key: orderly.turn(*key, ready_s=3.0) for key in turns}
    order = np.random.default_rng(0).permutation(len(turns))
    assert {turns[i]: hasty.turn(*turns[i], ready_s=3.0) for i in order} == wanted
    assert hasty.turn(2, 5, 3.0) == hasty.turn(2, 5, 3.0)


def test_a_user_is_the_same_in_a_larger_crowd():
    few, many = users_of(users=3), users_of(users=300)
    assert [few.turn(2, turn, 0.0) for turn in range(50)] == [many.turn(2, turn, 0.0) for turn in range(50)]


def test_users_turns_and_seeds_differ():
    users = users_of()
    seen = {users.turn(user, turn, 0.0).prompt_tokens for user in range(4) for turn in range(3 * _BLOCK)}
    assert len(seen) > 300
    assert users_of(2).turn(0, 1, 0.0) != users.turn(0, 1, 0.0)


def test_the_first_request_needs_no_thought_and_the_next_follow_the_answer():
    users = users_of(think="fixed")
    assert users.turn(1, 0, 7.0)[:2] == (7.0, 0.0)
    # Think time begins when the answer ends: start-to-start gaps would count the service twice.
    assert users.turn(1, 1, 11.5)[:2] == (13.5, 2.0)
    assert users.turn(1, _BLOCK, 20.0)[:2] == (22.0, 2.0)


def test_exponential_pauses_have_their_mean_and_are_what_is_added():
    users = users_of(users=1)
    turns = [users.turn(0, turn, 5.0) for turn in range(1, 4000)]
    assert np.mean([turn.think_s for turn in turns]) == pytest.approx(2.0, rel=0.1)
    assert all(turn.arrived_s == 5.0 + turn.think_s for turn in turns)


def test_without_think_time_the_next_request_comes_at_once():
    assert users_of(think_time=0.0).turn(0, 9, 4.25)[:2] == (4.25, 0.0)


def test_users_start_evenly_over_the_ramp():
    assert users_of(ramp=10.0).starts_s.tolist() == [0, 2.5, 5, 7.5]
    assert users_of().starts_s.tolist() == [0, 0, 0, 0]


def test_think_time_and_domains_do_not_shift_lengths():
    plain, other = users_of(), users_of(think_time=50.0, think="fixed", domains={"chat": 1.0})
    for turn in range(40):
        assert plain.turn(0, turn, 0.0)[2:4] == other.turn(0, turn, 0.0)[2:4]
    fixed = users_of(lengths=PromptAndOutput(prompt=Fixed(tokens=7), output=LENGTHS.output))
    for turn in range(40):
        assert plain.turn(0, turn, 0.0).output_tokens == fixed.turn(0, turn, 0.0).output_tokens
        assert plain.turn(0, turn, 0.0).think_s == fixed.turn(0, turn, 0.0).think_s


def test_domains_follow_the_time_of_arrival():
    users = users_of(domains=(MixChange(at=0, mix={"math": 1.0}), MixChange(at=60, mix={"code": 1.0})), think="fixed")
    assert users.domains == ("math", "code")
    assert users.turn(0, 3, 57.9).domain == 0
    assert users.turn(0, 3, 58.0).domain == 1


def test_pairs_of_a_trace_stay_together(write):
    rows = "".join(f"{row / 4},{row + 1},{2 * row + 5}\n" for row in range(50))
    path = write("t.csv", "arrived_s,prompt_tokens,output_tokens\n" + rows)
    users = build_users(ClosedLoop(users=2), PairsOfTrace(path="t.csv"), None, Streams(1), path.parent)
    turns = [users.turn(user, turn, 0.0) for user in range(2) for turn in range(80)]
    assert all(turn.output_tokens == 2 * turn.prompt_tokens + 3 for turn in turns)
    assert (users.domains, users.trace_rows) == (("-",), {"lengths_read": 50})


def test_memory_is_one_block_a_user():
    users = users_of(users=2)
    for turn in range(10 * _BLOCK):
        users.turn(0, turn, 0.0)
    assert sum(block is not None for block in users._blocks) == 1
    assert users._blocks[0].think_s.size == _BLOCK
