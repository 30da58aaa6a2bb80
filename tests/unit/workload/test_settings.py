"""The traffic sections of a scenario: their keys, and what a person reads who got one wrong."""

import math

import pytest

from sim.workload.build import (
    ClosedLoop,
    Diurnal,
    Gamma,
    OnOff,
    Peak,
    Poisson,
    Replay,
    traffic_faults,
)
from sim.workload.domains import MixChange
from sim.workload.length_source import Fixed, Lognormal, PairsOfTrace, PromptAndOutput, Quantiles
from sim.workload.replay import Window

WRITTEN = {
    "poisson, rate_per_s: 3": Poisson(rate_per_s=3),
    "gamma, rate_per_s: 3, cv: 2.5": Gamma(rate_per_s=3, cv=2.5),
    "on_off, on_per_s: 9, off_per_s: 1, mean_on: 30s, mean_off: 2min": OnOff(
        on_per_s=9, off_per_s=1, mean_on=30, mean_off=120
    ),
    "diurnal, mean_per_s: 2, amplitude: 0.5, period: 24h, peak_at: 14h": Diurnal(
        mean_per_s=2, amplitude=0.5, period=86400, peak_at=50400
    ),
    "peak, base_per_s: 20, peak_per_s: 80, from: 10min, until: 15min": Peak(
        base_per_s=20, peak_per_s=80, from_=600, until=900
    ),
    "closed_loop, users: 8, think_time: 2s, think: fixed, ramp: 10s": ClosedLoop(
        users=8, think_time=2, think="fixed", ramp=10
    ),
    "replay, path: t.csv, format: azure, speed_up: 2, window: {from: 1min}, sample: 0.5, ties: keep": Replay(
        path="t.csv", format="azure", speed_up=2, window=Window(from_=60), sample=0.5, ties="keep"
    ),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_arrivals_are_written_with_these_keys(read, text):
    arrivals = read(f"arrivals: {{kind: {text}}}").arrivals
    assert arrivals == WRITTEN[text]
    assert type(arrivals) is type(WRITTEN[text])


def test_lengths_and_domains_are_written_with_these_keys(read):
    traffic = read(
        "arrivals: {kind: poisson, rate_per_s: 3}\n"
        "lengths:\n"
        "  prompt: {kind: quantiles, probabilities: [0, 0.5, 1], tokens: [1, 10, 90]}\n"
        "  output: {kind: lognormal, median: 3, sigma: 0.5, min: 2, max: 9}\n"
        "domains: [{at: 0s, mix: {math: 1}}, {at: 10min, mix: {math: 0.3, code: 0.7}}]\n"
    )
    assert traffic.lengths == PromptAndOutput(
        prompt=Quantiles(probabilities=(0, 0.5, 1), tokens=(1, 10, 90)),
        output=Lognormal(median=3, sigma=0.5, min=2, max=9),
    )
    assert traffic.domains == (MixChange(at=0, mix={"math": 1}), MixChange(at=600, mix={"math": 0.3, "code": 0.7}))
    pairs = read("arrivals: {kind: poisson, rate_per_s: 3}\nlengths: {kind: trace, path: t.csv}\ndomains: {code: 1}")
    assert pairs.lengths == PairsOfTrace(path="t.csv")
    assert pairs.domains == {"code": 1.0}


def test_a_section_dumps_to_what_it_was_read_from(read):
    text = (
        "arrivals: {kind: peak, base_per_s: 20, peak_per_s: 80, from: 10min, until: 15min}\n"
        "lengths: {prompt: {kind: fixed, tokens: 3}, output: {kind: lognormal, median: 3, p95: 9}}\n"
        "domains: [{at: 0s, mix: {math: 1}}, {at: 90s, mix: {code: 1}}]\n"
    )
    traffic = read(text)
    dumped = traffic.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert dumped["arrivals"]["from"] == "10min"
    assert type(traffic).model_validate_json(traffic.model_dump_json(by_alias=True)) == traffic


ARRIVALS_FAULTS = [
    ("poisson, rate_per_s: 0", "s.yaml:1: arrivals.rate_per_s: expected above 0 (got 0)"),
    ("poisson, rate_per_s: .nan", "s.yaml:1: arrivals.rate_per_s: expected a finite number (got .nan)"),
    ("poisson, rate_per_s: .inf", "s.yaml:1: arrivals.rate_per_s: expected a finite number (got .inf)"),
    ("poisson, rate_per_s: '3'", "s.yaml:1: arrivals.rate_per_s: expected a number (got '3')"),
    ("poisson", "s.yaml:1: arrivals.rate_per_s: missing"),
    ("gamma, rate_per_s: 1, cv: 0", "s.yaml:1: arrivals.cv: expected above 0 (got 0)"),
    ("gamma, rate_per_s: 1, cv: 99", "s.yaml:1: arrivals.cv: must be from 0.01 to 30 (got 99)"),
    (
        "on_off, on_per_s: 2, off_per_s: 3, mean_on: 1s, mean_off: 1s",
        "s.yaml:1: arrivals.off_per_s: must be below on_per_s 2 (got 3)",
    ),
    (
        "on_off, on_per_s: 2, mean_on: 0s, mean_off: 1s",
        "s.yaml:1: arrivals.mean_on: expected above 0 (got '0s')",
    ),
    (
        "diurnal, mean_per_s: 2, amplitude: 1.5, period: 1h, peak_at: 0s",
        "s.yaml:1: arrivals.amplitude: expected at most 1 (got 1.5)",
    ),
    (
        "diurnal, mean_per_s: 2, amplitude: 1, period: 24, peak_at: 0s",
        "s.yaml:1: arrivals.period: expected a duration such as '30s': a number and one of us, ms, s, min or h "
        "(got 24)",
    ),
    (
        "peak, base_per_s: 5, peak_per_s: 5, from: 1s, until: 2s",
        "s.yaml:1: arrivals.peak_per_s: must be above base_per_s 5 (got 5)",
    ),
    (
        "peak, base_per_s: 5, peak_per_s: 9, from: 2s, until: 2s",
        "s.yaml:1: arrivals.until: must be after from 2 s (got 2 s)",
    ),
    (
        "peak, base_per_s: 5, peak_per_s: 9, fro: 2s, until: 3s",
        "s.yaml:1: arrivals.from: missing",
    ),
    ("closed_loop, users: 0", "s.yaml:1: arrivals.users: expected at least 1 (got 0)"),
    ("closed_loop, users: 2.5", "s.yaml:1: arrivals.users: expected a whole number (got 2.5)"),
    (
        "closed_loop, users: 2, think: fixed",
        "s.yaml:1: arrivals.think: has no effect without think_time; remove it (got 'fixed')",
    ),
    (
        "replay, path: t, format: csv",
        "s.yaml:1: arrivals.format: expected 'auto', 'azure', 'mooncake', 'burstgpt', 'ragpulse', 'bailian', 'own' or "
        "'run' (got 'csv')",
    ),
    ("replay, path: t, speed_up: 0", "s.yaml:1: arrivals.speed_up: expected above 0 (got 0)"),
    ("replay, path: t, sample: 0", "s.yaml:1: arrivals.sample: expected above 0 (got 0)"),
    ("replay, path: t, sample: 2", "s.yaml:1: arrivals.sample: expected at most 1 (got 2)"),
    ("replay, path: t, ties: drop", "s.yaml:1: arrivals.ties: expected 'keep' or 'spread' (got 'drop')"),
    (
        "replay, path: t, window: {}",
        "s.yaml:1: arrivals.window: give from (above 0s), until, or both (got neither)",
    ),
    (
        "replay, path: t, window: {from: 9s, until: 3s}",
        "s.yaml:1: arrivals.window.until: must be after from 9 s (got 3 s)",
    ),
    (
        "replay, path: t, window: {frm: 9s}",
        "s.yaml:1: arrivals.window.frm: unknown key; did you mean 'from'? known: from, until",
    ),
    (
        "poison, rate_per_s: 3",
        "s.yaml:1: arrivals: unknown kind 'poison'; known: closed_loop, on_off, poisson, gamma, replay, diurnal, peak",
    ),
]


@pytest.mark.parametrize("text, message", ARRIVALS_FAULTS)
def test_a_fault_in_arrivals_is_named(faults_of, text, message):
    assert message in faults_of(f"arrivals: {{kind: {text}}}")


LENGTHS_FAULTS = [
    (
        "{kind: fixed, tokens: 3}",
        "s.yaml:2: lengths: expected {prompt: {kind: ...}, output: {kind: ...}} or {kind: trace, path: ...} "
        '(got {"kind": "fixed", "tokens": 3})',
    ),
    (
        "7",
        "s.yaml:2: lengths: expected {prompt: {kind: ...}, output: {kind: ...}} or {kind: trace, path: ...} (got 7)",
    ),
    ("{kind: trace}", "s.yaml:2: lengths.path: missing"),
    (
        "{kind: trace, path: t, fmt: own}",
        "s.yaml:2: lengths.fmt: unknown key; did you mean 'format'? known: kind, path, format",
    ),
    ("{output: LAW}", "s.yaml:2: lengths.prompt: missing"),
    ("{prompt: LAW, output: LAW, rate: 3}", "s.yaml:2: lengths.rate: unknown key; known: prompt, output"),
    (
        "{output: LAW, prompt: {kind: fixd}}",
        "s.yaml:2: lengths.prompt: unknown kind 'fixd'; known: fixed, lognormal, quantiles",
    ),
    ("{output: LAW, prompt: {tokens: 3}}", "s.yaml:2: lengths.prompt: missing key 'kind' (got {\"tokens\": 3})"),
    (
        "{output: LAW, prompt: {kind: fixed, tokens: 0}}",
        "s.yaml:2: lengths.prompt.tokens: expected at least 1 (got 0)",
    ),
    (
        "{output: LAW, prompt: {kind: lognormal, median: 9}}",
        "s.yaml:2: lengths.prompt: give one of sigma and p95 (got neither)",
    ),
    (
        "{output: LAW, prompt: {kind: lognormal, median: 9, sigma: 1, p95: 20}}",
        "s.yaml:2: lengths.prompt: give one of sigma and p95 (got sigma 1 and p95 20)",
    ),
    (
        "{output: LAW, prompt: {kind: lognormal, median: 9, p95: 9}}",
        "s.yaml:2: lengths.prompt.p95: must be above median 9 (got 9)",
    ),
    (
        "{output: LAW, prompt: {kind: lognormal, median: 9, sigma: 1, min: 5, max: 4}}",
        "s.yaml:2: lengths.prompt.max: must be at least min 5 (got 4)",
    ),
    (
        "{output: LAW, prompt: {kind: lognormal, median: 9, sigma: 0.1, min: 900}}",
        "s.yaml:2: lengths.prompt: min and max: at least a millionth of all lengths must lie between them "
        "(got 0 from 900 to 1000000000)",
    ),
    (
        "{output: LAW, prompt: {kind: quantiles, probabilities: [0, 1], tokens: [3]}}",
        "s.yaml:2: lengths.prompt.tokens: must be as many as probabilities, 2 (got 1)",
    ),
    (
        "{output: LAW, prompt: {kind: quantiles, probabilities: [0.5, 1], tokens: [3, 4]}}",
        "s.yaml:2: lengths.prompt.probabilities: must begin with 0 and end with 1, for the least and the greatest "
        "length (got [0.5, 1.0])",
    ),
    (
        "{output: LAW, prompt: {kind: quantiles, probabilities: [0, 0.5, 0.5, 1], tokens: [3, 4, 5, 6]}}",
        "s.yaml:2: lengths.prompt.probabilities: must ascend (got 0.5 before 0.5)",
    ),
    (
        "{output: LAW, prompt: {kind: quantiles, probabilities: [0, 0.5, 1], tokens: [3, 9, 6]}}",
        "s.yaml:2: lengths.prompt.tokens: must ascend (got 9 before 6)",
    ),
]


@pytest.mark.parametrize("text, message", LENGTHS_FAULTS)
def test_a_fault_in_lengths_is_named(faults_of, text, message):
    section = text.replace("LAW", "{kind: fixed, tokens: 9}")
    assert faults_of(f"arrivals: {{kind: poisson, rate_per_s: 3}}\nlengths: {section}") == [message]


DOMAINS_FAULTS = [
    ("{math: 0.5, code: 0.4}", "s.yaml:2: domains: shares must sum to 1 (got 0.9)"),
    ("{}", "s.yaml:2: domains: shares must sum to 1 (got 0)"),
    ("{math: 1.5}", "s.yaml:2: domains.math: expected at most 1 (got 1.5)"),
    ("{' ': 1}", "s.yaml:2: domains: a domain needs a name (got ' ')"),
    ("[]", "s.yaml:2: domains: the first mix must begin at 0s (got an empty list)"),
    ("[{at: 5s, mix: {math: 1}}]", "s.yaml:2: domains: the first mix must begin at 0s (got 5 s)"),
    (
        "[{at: 0s, mix: {math: 1}}, {at: 9s, mix: {code: 1}}, {at: 9s, mix: {math: 1}}]",
        "s.yaml:2: domains: at: must ascend (got 9 s after 9 s)",
    ),
    ("[{at: 0s, mix: {math: .2}}]", "s.yaml:2: domains[0].mix: shares must sum to 1 (got 0.2)"),
    ("math", "s.yaml:2: domains: expected a mapping of keys to values (got 'math')"),
]


@pytest.mark.parametrize("text, message", DOMAINS_FAULTS)
def test_a_fault_in_domains_is_named(faults_of, text, message):
    assert faults_of(f"arrivals: {{kind: poisson, rate_per_s: 3}}\ndomains: {text}") == [message]


LENGTHS = PromptAndOutput(prompt=Fixed(tokens=9), output=Fixed(tokens=9))
PEAK = Peak(base_per_s=1, peak_per_s=2, from_=600, until=900)


@pytest.mark.parametrize(
    "arrivals, lengths, domains, horizon_s, faults",
    [
        (Poisson(rate_per_s=1), LENGTHS, {"math": 1.0}, 60, []),
        (Replay(path="t"), None, None, 60, []),
        (
            Poisson(rate_per_s=1),
            None,
            None,
            60,
            [(("lengths",), "missing: arrivals of kind 'poisson' need lengths of prompts and outputs")],
        ),
        (
            Replay(path="t"),
            LENGTHS,
            None,
            math.inf,
            [(("lengths",), "has no effect: a replay takes its lengths from the trace; remove it")],
        ),
        (PEAK, LENGTHS, None, 601, []),
        (
            PEAK,
            LENGTHS,
            None,
            600,
            [(("arrivals", "from"), "the peak must begin before the horizon, 600 s (got 600 s)")],
        ),
        (
            ClosedLoop(users=3, ramp=60),
            LENGTHS,
            None,
            60,
            [(("arrivals", "ramp"), "must be shorter than the horizon, 60 s (got 60 s)")],
        ),
        (
            Poisson(rate_per_s=1),
            LENGTHS,
            (MixChange(at=0, mix={"a": 1.0}), MixChange(at=60, mix={"b": 1.0})),
            60,
            [(("domains", 1, "at"), "has no effect: must be before the horizon, 60 s (got 60 s)")],
        ),
    ],
)
def test_an_option_without_effect_is_a_fault(arrivals, lengths, domains, horizon_s, faults):
    assert list(traffic_faults(arrivals, lengths, domains, horizon_s)) == faults
