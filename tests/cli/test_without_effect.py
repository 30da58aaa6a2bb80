"""An option that changes nothing in a scenario is an error, not silence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profiles.files import SHIPPED
from tests.helpers.scenario import TINY, changed

Write = Callable[[str, Callable[[Any], object]], None]

USERS = ("kind: poisson, rate_per_s: 4", "kind: closed_loop, users: 3")

# Replacements, and the message without the name of the file.
IDLE = [
    (
        [("profile: paper/v4_flash", "profile: paper/v4_flash\n  step_profile: paper/v4_pro")],
        "6: fleet.step_profile: has no effect beside fleet.profile; for step times of one and acceptance of "
        "another, give step_profile and acceptance_profile instead",
    ),
    (
        [("profile: paper/v4_flash", "profile: paper/v4_flash\n  acceptance_profile: paper/v4_pro")],
        "6: fleet.acceptance_profile: has no effect beside fleet.profile; for step times of one and acceptance of "
        "another, give step_profile and acceptance_profile instead",
    ),
    (
        [
            ("profile: paper/v4_flash", "step_profile: paper/v4_flash\n  acceptance_profile: paper/v4_pro"),
            ("[none, dspark]", "[none]"),
        ],
        "6: fleet.acceptance_profile: has no effect: no policy drafts",
    ),
    ([("4GiB", "4GiB\n  router: least_kv")], "7: fleet.router: has no effect: there is one replica"),
    (
        [USERS, ("4GiB", "4GiB\n  max_waiting: 3")],
        "7: fleet.max_waiting: has no effect: the users are 3, and no more can wait (got 3)",
    ),
    (
        [(USERS[0], "kind: closed_loop, users: 1, ramp: 1s")],
        "8: arrivals.ramp: has no effect: there is one user",
    ),
    (
        [(USERS[0], "kind: closed_loop, users: 3, think: fixed")],
        "8: arrivals.think: has no effect without think_time; remove it (got 'fixed')",
    ),
    (
        [(USERS[0], "kind: diurnal, mean_per_s: 4, amplitude: 0, period: 1h, peak_at: 0s")],
        "8: arrivals.amplitude: has no effect: a swing of 0 is none; use kind 'poisson' (got 0)",
    ),
    (
        [(USERS[0], "kind: replay, path: t.csv")],
        "9: lengths: has no effect: a replay takes its lengths from the trace; remove it",
    ),
    (
        [("lengths:", "domains: [{at: 0s, mix: {a: 1}}, {at: 2s, mix: {b: 1}}]\nlengths:")],
        "9: domains[1].at: has no effect: must be before the horizon, 2 s (got 2 s)",
    ),
    (
        [("lengths:", "domains: [{at: 0s, mix: {a: 1}}, {at: 1s, mix: {a: 1}}]\nlengths:")],
        "9: domains[1].mix: has no effect: the mix stays as it was",
    ),
    (
        [("lengths:", "domains: {a: 1}\nlengths:")],
        "9: domains: has no effect: profile 'paper/v4_flash' does not tell domains apart for 'dspark'",
    ),
    (
        [("horizon: 2s", "horizon: 2s\ndeadline: 2s")],
        "3: deadline: has no effect: no request waits longer than the horizon, 2 s (got 2 s)",
    ),
    (
        [("horizon: 2s", "horizon: 2s\nobjectives: {user_tokens_per_s: 80, tpot: 20ms}")],
        "3: objectives.tpot: has no effect: user_tokens_per_s is 1 / tpot, and 80 and 50 tokens/s are asked for; "
        "remove it",
    ),
    (
        [("horizon: 2s", "horizon: 2s\nobjectives:\n  user_tokens_per_s: 40\n  tpot: 20ms")],
        "4: objectives.user_tokens_per_s: has no effect: user_tokens_per_s is 1 / tpot, and 40 and 50 tokens/s are "
        "asked for; remove it",
    ),
    (
        [("horizon: 2s", "horizon: 2s\nobjectives: {ttft: 1s, e2e: 500ms}")],
        "3: objectives.ttft: has no effect: e2e asks for more, 0.5 s (got 1 s)",
    ),
    (
        [("horizon: 2s", "horizon: 2s\ndeadline: 1s\nobjectives: {e2e: 1s}")],
        "4: objectives.e2e: has no effect: the deadline is 1 s (got 1 s)",
    ),
    (
        [("horizon: 2s", "horizon: 2s\ndeadline: 1s\nobjectives: {ttft: 1500ms}")],
        "4: objectives.ttft: has no effect: the deadline is 1 s (got 1.5 s)",
    ),
    (
        [("dspark]", "{kind: batch_table, table: [[1, 3]], hysteresis: 4}]")],
        "7: policies[1].hysteresis: has no effect: the table has one row (got 4)",
    ),
    (
        [("[none, dspark]", "\n  - kind: batch_table\n    table:\n      - [1, 3]\n      - [257, 2]")],
        "11: policies[0].table[1]: has no effect: max_running is 256 (got 257)",
    ),
    (
        [("dspark]", "{kind: batch_table, table: [[1, 3], [9, 3]]}]")],
        "7: policies[1].table[1]: has no effect: same length as the row before (got 3)",
    ),
    (
        [("4GiB", "4GiB\n  prefill: {kind: chunked, chunk_tokens: 9000}")],
        "7: fleet.prefill.chunk_tokens: must be at most max_batch_tokens, 8192: a chunk is part of a batch (got 9000)",
    ),
]


@pytest.mark.parametrize(("replacements", "message"), IDLE, ids=[message[:60] for _, message in IDLE])
def test_an_option_without_effect_is_a_fault(refused, replacements, message):
    text = TINY
    for old, new in replacements:
        assert text.count(old) == 1
        text = text.replace(old, new)
    assert refused(text) == [f"s.yaml:{message}"]


@pytest.mark.parametrize(
    "section",
    [
        "deadline: 1s",
        "objectives: {user_tokens_per_s: 80, ttft: 1s}",
        "objectives: {ttft: 400ms, e2e: 500ms}",
        "warmup: 1s",
        "records: {steps: per_second}",
        "records: {window: 2s}",
    ],
)
def test_an_option_with_an_effect_is_none(run, section):
    assert run(TINY + section + "\n", "--dry-run").err == ""


@pytest.fixture
def profile(here: Path) -> Write:
    """Return a function that writes a shipped profile, changed, to a file of this folder."""

    def write(name: str, change: Callable[[Any], object]) -> None:
        content = json.loads((SHIPPED / "paper" / "v4_flash.json").read_text(encoding="utf-8"))
        change(content)
        content["name"] = "mine"
        (here / name).write_text(json.dumps(content), encoding="utf-8")

    return write


def confidence(profile: Any) -> Any:
    return profile["acceptance"]["dspark"]["domains"]["any"]["confidence"]


def test_the_raw_confidence_where_it_is_the_calibrated_one(refused, profile):
    profile("mine.json", lambda one: confidence(one).update(raw_temperature=[1, 1, 1, 1, 1]))
    text = changed("paper/v4_flash", "mine.json")
    text = text.replace("[none, dspark]", "\n  - dspark\n  - kind: dspark\n    confidence: raw")
    assert refused(text) == [
        "s.yaml:10: policies[1].confidence: has no effect: profile 'mine' has one confidence of 'dspark', raw as "
        "calibrated"
    ]


def test_a_confidence_that_reads_its_own_token(refused, profile):
    profile("mine.json", lambda one: one["acceptance"]["dspark"].update(confidence_reads="own_token"))
    assert refused(changed("paper/v4_flash", "mine.json")) == [
        "s.yaml:7: policies[1]: 'dspark' is not lossless with the confidence of drafter 'dspark', which reads the "
        "token that it judges"
    ]


def test_a_fault_in_a_profile_is_placed_in_the_profile(refused, profile):
    profile("mine.json", lambda one: confidence(one).update(noise_sd=-1))
    (message,) = refused(changed("paper/v4_flash", "mine.json"))
    assert message == "mine.json:1: acceptance.dspark.domains.any.confidence.noise_sd: expected at least 0 (got -1)"


def test_domains_serve_one_policy_though_another_does_not_tell_them_apart(run, profile):
    def tell_apart(one: Any) -> None:
        domains = one["acceptance"]["dspark"]["domains"]
        domains["math"] = domains["code"] = domains.pop("any")

    profile("mine.json", tell_apart)
    text = changed("paper/v4_flash", "mine.json").replace("[none, dspark]", "[mtp1, dspark]")
    assert run(text + "domains: {math: 0.5, code: 0.5}\n").code == 0


SWEPT = changed("4GiB", "4GiB\n  router: least_kv")


def test_an_option_needs_an_effect_at_one_swept_value_only(run, refused):
    assert run(SWEPT + "sweep: {key: fleet.replicas, values: [1, 2]}\n", "--dry-run").code == 0
    assert run(SWEPT + "sweep: {key: fleet.replicas, values: [1, 2]}\n").code == 0
    assert refused(SWEPT + "sweep: {key: fleet.block_tokens, values: [32, 64]}\n", "--out", "other") == [
        "s.yaml:7: fleet.router: has no effect: there is one replica"
    ]


def test_what_served_a_policy_that_is_left_out_is_no_fault(run):
    text = changed("profile: paper/v4_flash", "step_profile: paper/v4_flash\n  acceptance_profile: paper/v4_flash")
    assert run(text, "--policies", "none", "--dry-run").code == 0


def test_a_trace_that_ends_before_the_measurement_begins_is_refused(here, refused):
    (here / "t.csv").write_text("arrived_s,prompt_tokens,output_tokens\n0,10,5\n0.5,10,5\n", encoding="utf-8")
    replay = changed("{kind: poisson, rate_per_s: 4}", "{kind: replay, path: t.csv}").partition("lengths:")[0]
    scenario = replay + "warmup: 1s\n"
    line = scenario.splitlines().index("warmup: 1s") + 1
    assert refused(scenario) == [
        f"s.yaml:{line}: warmup: nothing to measure: no request arrives from 1 s to 2 s (the last of 2 at 0.5 s)"
    ]
