"""A scenario with a wrong key or value: what its author reads, and on which line."""

import pytest

from profiles.files import known_profiles
from tests.helpers.scenario import TINY, changed

DURATION = "expected a duration such as '30s': a number and one of us, ms, s, min or h"
SIZE = "expected a size such as '96GiB': a number and one of B, KiB, MiB, GiB or TiB"
SECTIONS = (
    "known: name, seed, replications, horizon, warmup, cooldown, fleet, policies, arrivals, lengths, domains, "
    "deadline, objectives, sweep, records"
)
FLEET = (
    "known: replicas, profile, step_profile, acceptance_profile, kv_cache, gpus_per_replica, kv_bytes_per_token, "
    "max_context_tokens, block_tokens, max_running, max_batch_tokens, max_waiting, prefill, router"
)
POLICIES = "known: none, mtp1, fixed, threshold, batch_table, dspark, dspark_async, oracle"
ARRIVALS = "known: closed_loop, on_off, poisson, gamma, replay, diurnal, peak"
PROFILES = f"known: {', '.join(known_profiles())}, or a path that ends in .json"
TWO_DOMAINS = "step_profile: engines/qwen3_8b_h20\n  acceptance_profile: paper/qwen3_8b"

# What is replaced, by what, and the message without the name of the file.
KEYS = [
    ("name: tiny", "name: tiny\nhorizn: 3s", f"2: horizn: unknown key; did you mean 'horizon'? {SECTIONS}"),
    ("name: tiny", "name: tiny\ntemperature: 1", f"2: temperature: unknown key; {SECTIONS}"),
    (
        "  replicas: 1",
        "  replicas: 1\n  replcas: 1",
        f"5: fleet.replcas: unknown key; did you mean 'replicas'? {FLEET}",
    ),
    ("name: tiny\n", "", "1: name: missing"),
    ("horizon: 2s\n", "", "1: horizon: missing"),
    ("  replicas: 1\n", "", "3: fleet.replicas: missing"),
    ("  kv_cache: 4GiB\n", "", "3: fleet.kv_cache: missing"),
    ("policies: [none, dspark]\n", "", "1: policies: missing"),
    ("arrivals: {kind: poisson, rate_per_s: 4}\n", "", "1: arrivals: missing"),
]
TYPES = [
    ("name: tiny", "name: 3", "1: name: expected text (got 3)"),
    ("name: tiny", "name:", "1: name: expected text (got null)"),
    ("name: tiny", "name: [a]", '1: name: expected text (got ["a"])'),
    ("replicas: 1", "replicas: '1'", "4: fleet.replicas: expected a whole number (got '1')"),
    ("replicas: 1", "replicas: true", "4: fleet.replicas: expected a whole number (got true)"),
    ("replicas: 1", "replicas: 1.0", "4: fleet.replicas: expected a whole number (got 1.0)"),
    ("replicas: 1", "replicas: null", "4: fleet.replicas: expected a whole number (got null)"),
    ("replicas: 1", "replicas: [1]", "4: fleet.replicas: expected a whole number (got [1])"),
    ("rate_per_s: 4", "rate_per_s: true", "8: arrivals.rate_per_s: expected a number (got true)"),
    ("rate_per_s: 4", "rate_per_s: '4'", "8: arrivals.rate_per_s: expected a number (got '4')"),
    ("rate_per_s: 4", "rate_per_s: 4/s", "8: arrivals.rate_per_s: expected a number (got '4/s')"),
    ("paper/v4_flash", "4", "5: fleet.profile: expected text (got 4)"),
    ("[none, dspark]", "none", "7: policies: expected a list (got 'none')"),
    ("[none, dspark]", "{none: 1}", '7: policies: expected a list (got {"none": 1})'),
    ("[none, dspark]", "[none, 3]", "7: policies[1]: expected a name, or a mapping with the key 'kind' (got 3)"),
    ("[none, dspark]", "[none, null]", "7: policies[1]: expected a name, or a mapping with the key 'kind' (got null)"),
    (
        "[none, dspark]",
        "[[dspark]]",
        "7: policies[0]: expected a name, or a mapping with the key 'kind' (got [\"dspark\"])",
    ),
    ("lengths:", "objectives: [ttft]\nlengths:", '9: objectives: expected a mapping of keys to values (got ["ttft"])'),
    ("lengths:", "records: full\nlengths:", "9: records: expected a mapping of keys to values (got 'full')"),
    ("lengths:", "domains: [math]\nlengths:", "9: domains[0]: expected a mapping of keys to values (got 'math')"),
    ("lengths:", "domains: math\nlengths:", "9: domains: expected a mapping of keys to values (got 'math')"),
    ("{kind: fixed, tokens: 50}", "fixed", "10: lengths.prompt: expected a mapping of keys to values (got 'fixed')"),
]
UNITS = [
    ("horizon: 2s", "horizon: 30 minutes", f"2: horizon: {DURATION} (got '30 minutes')"),
    ("horizon: 2s", "horizon: 2", f"2: horizon: {DURATION} (got 2)"),
    ("horizon: 2s", "horizon: '2'", f"2: horizon: {DURATION} (got '2')"),
    ("horizon: 2s", "horizon: s", f"2: horizon: {DURATION} (got 's')"),
    ("horizon: 2s", "horizon: 2S", f"2: horizon: {DURATION} (got '2S')"),
    ("horizon: 2s", "horizon: 1h30min", f"2: horizon: {DURATION} (got '1h30min')"),
    ("horizon: 2s", "horizon: true", f"2: horizon: {DURATION} (got true)"),
    ("horizon: 2s", "horizon: null", f"2: horizon: {DURATION} (got null)"),
    ("horizon: 2s", "horizon: [2s]", f'2: horizon: {DURATION} (got ["2s"])'),
    ("horizon: 2s", "horizon: .inf", f"2: horizon: {DURATION} (got .inf)"),
    ("horizon: 2s", "horizon: infs", f"2: horizon: {DURATION} (got 'infs')"),
    ("horizon: 2s", "horizon: -2s", "2: horizon: must not be negative (got '-2s')"),
    ("horizon: 2s", "horizon: 1e999s", "2: horizon: must be finite (got '1e999s')"),
    ("horizon: 2s", "horizon: 0s", "2: horizon: expected above 0 (got '0s')"),
    ("horizon: 2s", "horizon: 10000h", "2: horizon: expected at most 8784h, a year (got 3.6e+07 s)"),
    ("4GiB", "4GB", f"6: fleet.kv_cache: {SIZE} (got '4GB')"),
    ("4GiB", "4", f"6: fleet.kv_cache: {SIZE} (got 4)"),
    ("4GiB", "true", f"6: fleet.kv_cache: {SIZE} (got true)"),
    ("4GiB", "-4GiB", "6: fleet.kv_cache: must not be negative (got '-4GiB')"),
    ("4GiB", "1e999GiB", "6: fleet.kv_cache: must be finite (got '1e999GiB')"),
    ("4GiB", "0GiB", "6: fleet.kv_cache: expected above 0 (got '0GiB')"),
]
RANGES = [
    ("replicas: 1", "replicas: 0", "4: fleet.replicas: expected at least 1 (got 0)"),
    ("replicas: 1", "replicas: -1", "4: fleet.replicas: expected at least 1 (got -1)"),
    ("replicas: 1", "replicas: .nan", "4: fleet.replicas: expected a whole number (got .nan)"),
    ("replicas: 1", f"replicas: {10**30}", f"4: fleet.replicas: expected at most 100000 (got {10**30})"),
    ("rate_per_s: 4", "rate_per_s: 0", "8: arrivals.rate_per_s: expected above 0 (got 0)"),
    ("rate_per_s: 4", "rate_per_s: -4", "8: arrivals.rate_per_s: expected above 0 (got -4)"),
    ("rate_per_s: 4", "rate_per_s: .nan", "8: arrivals.rate_per_s: expected a finite number (got .nan)"),
    ("rate_per_s: 4", "rate_per_s: -.inf", "8: arrivals.rate_per_s: expected a finite number (got -.inf)"),
    ("rate_per_s: 4", "rate_per_s: 1e999", "8: arrivals.rate_per_s: expected a finite number (got .inf)"),
    ("horizon: 2s", "horizon: 2s\nseed: -1", "3: seed: expected at least 0 (got -1)"),
    ("horizon: 2s", "horizon: 2s\nreplications: 0", "3: replications: expected at least 1 (got 0)"),
    ("horizon: 2s", "horizon: 2s\nwarmup: -1s", "3: warmup: must not be negative (got '-1s')"),
    ("[none, dspark]", "[]", "7: policies: expected at least 1 item (got [])"),
    ("4GiB", "4GiB\n  max_batch_tokens: 2000000", "7: fleet.max_batch_tokens: expected at most 1000000 (got 2000000)"),
    (
        "lengths:",
        "objectives: {user_tokens_per_s: 0}\nlengths:",
        "9: objectives.user_tokens_per_s: expected above 0 (got 0)",
    ),
    ("lengths:", "objectives: {ttft: 0ms}\nlengths:", "9: objectives.ttft: expected above 0 (got '0ms')"),
    ("lengths:", "deadline: 0s\nlengths:", "9: deadline: expected above 0 (got '0s')"),
    ("lengths:", "records: {steps: some}\nlengths:", "9: records.steps: expected 'full' or 'per_second' (got 'some')"),
    *[
        (
            "name: tiny",
            f"name: {name}",
            "1: name: expected up to 100 letters, digits, '_', '-' and '.', beginning with a letter or digit "
            f"(got {name if name[0] == chr(39) else repr(name)})",
        )
        for name in ("a b", "../x", "''", ".hidden", "a/b", "naïve")
    ],
]
PLUGINS = [
    ("dspark]", "dsprak]", f"7: policies[1]: unknown policy 'dsprak'; did you mean 'dspark'? {POLICIES}"),
    ("dspark]", "{kind: fxed, k: 3}]", f"7: policies[1]: unknown policy 'fxed'; did you mean 'fixed'? {POLICIES}"),
    ("dspark]", "{kind: 3}]", f"7: policies[1]: unknown policy '3'; {POLICIES}"),
    ("dspark]", "{kind: [fixed]}]", f"7: policies[1]: unknown policy '['fixed']'; did you mean 'fixed'? {POLICIES}"),
    ("dspark]", "{k: 3}]", f"7: policies[1]: missing key 'kind'; {POLICIES}"),
    ("dspark]", "fixed]", "7: policies[1].k: missing"),
    ("dspark]", "{kind: fixed}]", "7: policies[1].k: missing"),
    (
        "dspark]",
        "{kind: fixed, k: 3, kk: 3}]",
        "7: policies[1].kk: unknown key; did you mean 'k'? known: kind, drafter, k",
    ),
    ("dspark]", "{kind: fixed, k: 0}]", "7: policies[1].k: expected at least 1 (got 0)"),
    ("dspark]", "{kind: fixed, k: '3'}]", "7: policies[1].k: expected a whole number (got '3')"),
    ("dspark]", "{kind: fixed, k: true}]", "7: policies[1].k: expected a whole number (got true)"),
    ("dspark]", "{kind: dspark, drafter: ''}]", "7: policies[1].drafter: expected at least 1 character (got '')"),
    ("dspark]", "{kind: dspark, drafter: null}]", "7: policies[1].drafter: expected text (got null)"),
    (
        "dspark]",
        "{kind: dspark, confidence: rw}]",
        "7: policies[1].confidence: expected 'calibrated' or 'raw' (got 'rw')",
    ),
    ("dspark]", "{kind: dspark_async, lag: 0}]", "7: policies[1].lag: expected at least 1 (got 0)"),
    (
        "dspark]",
        "{kind: threshold, min_confidence: 1.5}]",
        "7: policies[1].min_confidence: expected at most 1 (got 1.5)",
    ),
    (
        "dspark]",
        "{kind: threshold, min_confidence: .nan}]",
        "7: policies[1].min_confidence: expected a finite number (got .nan)",
    ),
    ("dspark]", "{kind: batch_table, table: []}]", "7: policies[1].table: expected at least 1 item (got [])"),
    ("dspark]", "{kind: batch_table, table: 3}]", "7: policies[1].table: expected a list (got 3)"),
    ("dspark]", "{kind: batch_table, table: [3]}]", "7: policies[1].table[0]: expected a list (got 3)"),
    ("dspark]", "{kind: batch_table, table: [[1]]}]", "7: policies[1].table[0]: expected 2 items (got [1])"),
    (
        "dspark]",
        "{kind: batch_table, table: [[1, 3, 4]]}]",
        "7: policies[1].table[0]: expected 2 items (got [1, 3, 4])",
    ),
    (
        "dspark]",
        "{kind: batch_table, table: [[2, 3]]}]",
        "7: policies[1].table: expected the first row to start at 1 request (got 2)",
    ),
    (
        "dspark]",
        "{kind: batch_table, table: [[1, 3], [1, 2]]}]",
        "7: policies[1].table: expected requests to rise from row to row (got 1 after 1)",
    ),
    (
        "dspark]",
        "{kind: batch_table, table: [[1, 0]]}]",
        "7: policies[1].table: expected a length above 0 in some row; for no drafting at all use 'none' (got 0)",
    ),
    (
        "dspark]",
        "{kind: batch_table, table: [[1, 3]], hysteresis: -1}]",
        "7: policies[1].hysteresis: expected at least 0 (got -1)",
    ),
    ("{kind: poisson, rate_per_s: 4}", "poisson", "8: arrivals.rate_per_s: missing"),
    (
        "{kind: poisson, rate_per_s: 4}",
        "null",
        "8: arrivals: expected a name, or a mapping with the key 'kind' (got null)",
    ),
    (
        "kind: poisson",
        "kind: poison",
        f"8: arrivals: unknown arrivals kind 'poison'; did you mean 'poisson'? {ARRIVALS}",
    ),
    ("kind: poisson, ", "", f"8: arrivals: missing key 'kind'; {ARRIVALS}"),
    (
        "kind: poisson, rate_per_s: 4",
        "\n  kind: gamma,\n  rate_per_s: 4,\n  cv: 99",
        "11: arrivals.cv: must be from 0.01 to 30 (got 99)",
    ),
    (
        "kind: poisson, rate_per_s: 4",
        "kind: peak, base_per_s: 4, peak_per_s: 8, from: 1s, until: 1s",
        "8: arrivals.until: must be after from 1 s (got 1 s)",
    ),
    ("{kind: fixed, tokens: 20}", "{tokens: 20}", "11: lengths.output: missing key 'kind' (got {\"tokens\": 20})"),
    (
        "4GiB",
        "4GiB\n  router: rr",
        "7: fleet.router: unknown router 'rr'; known: round_robin, least_requests, least_kv, power_of_two",
    ),
    (
        "4GiB",
        "4GiB\n  prefill: chunkd",
        "7: fleet.prefill: unknown prefill kind 'chunkd'; did you mean 'chunked'? "
        "known: chunked, disaggregated, exclusive",
    ),
    (
        "4GiB",
        "4GiB\n  prefill: {kind: chunked, chunk_tokens: 0}",
        "7: fleet.prefill.chunk_tokens: expected at least 1 (got 0)",
    ),
    (
        "4GiB",
        "4GiB\n  prefill: {kind: exclusive, chunk_tokens: 9}",
        "7: fleet.prefill.chunk_tokens: unknown key; known: kind",
    ),
]
CONFLICTS = [
    (
        "horizon: 2s",
        "horizon: 2s\nwarmup: 1s\ncooldown: 1s",
        "3: warmup: warmup and cooldown (1 s + 1 s) leave nothing of the horizon (2 s) to measure",
    ),
    (
        "horizon: 2s",
        "horizon: 2s\ncooldown: 3s",
        "3: cooldown: warmup and cooldown (0 s + 3 s) leave nothing of the horizon (2 s) to measure",
    ),
    (
        "  profile: paper/v4_flash\n",
        "",
        "3: fleet.profile: missing; give profile, or step_profile and acceptance_profile",
    ),
    (
        "  profile: paper",
        "  acceptance_profile: paper",
        "3: fleet.profile: missing; give profile, or step_profile and acceptance_profile",
    ),
    ("  profile: paper", "  step_profile: paper", "3: fleet.acceptance_profile: missing; these policies draft"),
    (
        "4GiB",
        "4GiB\n  max_running: 9000",
        "7: fleet.max_running: must be at most max_batch_tokens, 8192: each running request needs a token (got 9000)",
    ),
    (
        "4GiB",
        "4GiB\n  max_batch_tokens: 200\n  prefill: exclusive",
        "7: fleet.max_batch_tokens: must be at least max_running, 256 where nothing is said: each running request "
        "needs a token (got 200)",
    ),
    (
        "4GiB",
        "4GiB\n  max_batch_tokens: 300",
        "7: fleet.max_batch_tokens: must be at least prefill.chunk_tokens, 512 where nothing is said: a chunk is "
        "part of a batch (got 300)",
    ),
    (
        "4GiB",
        "4GiB\n  prefill: {kind: chunked, chunk_tokens: 9999}",
        "7: fleet.prefill.chunk_tokens: must be at most max_batch_tokens, 8192: a chunk is part of a batch (got 9999)",
    ),
    ("[none, dspark]", "[none, none]", "7: policies[1]: same as policies[0] ('none')"),
    (
        "[none, dspark]",
        "\n  - {kind: fixed, k: 3}\n  - none\n  -\n    k: 3\n    kind: fixed",
        "11: policies[2]: same as policies[0] ('fixed k=3')",
    ),
    ("[none, dspark]", "[dspark, {kind: dspark}]", "7: policies[1]: same as policies[0] ('dspark')"),
    (
        TINY[TINY.index("lengths") :],
        "",
        "1: lengths: missing: arrivals of kind 'poisson' need lengths of prompts and outputs",
    ),
    (
        "{kind: poisson, rate_per_s: 4}",
        "{kind: peak, base_per_s: 1, peak_per_s: 2, from: 2s, until: 3s}",
        "8: arrivals.from: the peak must begin before the horizon, 2 s (got 2 s)",
    ),
    (
        "{kind: poisson, rate_per_s: 4}",
        "{kind: closed_loop, users: 3, ramp: 2s}",
        "8: arrivals.ramp: must be shorter than the horizon, 2 s (got 2 s)",
    ),
    (
        "horizon: 2s",
        "horizon: 2500ms\nrecords: {steps: per_second, window: 1s}",
        "2: horizon: must be whole seconds with records.steps: per_second (got 2.5 s)",
    ),
    (
        "horizon: 2s",
        "horizon: 2s\nwarmup: 500ms\nrecords: {steps: per_second}",
        "3: warmup: must be whole seconds with records.steps: per_second (got 0.5 s)",
    ),
    (
        "horizon: 2s",
        "horizon: 2s\nrecords: {steps: per_second, window: 1500ms}",
        "3: records.window: must be whole seconds with records.steps: per_second (got 1.5 s)",
    ),
    (
        "horizon: 2s",
        "horizon: 2s\nrecords: {window: 3s}",
        "3: records.window: wider than the horizon of 2 s (got 3 s)",
    ),
    (
        "horizon: 2s",
        "horizon: 2s\nrecords: {window: 1us}",
        "3: records.window: cuts the horizon of 2 s into more than 100000 (got 1e-06 s)",
    ),
]
WITH_PROFILES = [
    (
        "paper/v4_flash",
        "paper/v4_flsh",
        f"5: fleet.profile: unknown profile 'paper/v4_flsh'; did you mean 'paper/v4_flash'? {PROFILES}",
    ),
    ("paper/v4_flash", "../p/mine.json", "5: fleet.profile: no such file (got '../p/mine.json')"),
    (
        "paper/v4_flash",
        "paper/qwen3_4b",
        "5: fleet.profile: profile 'paper/qwen3_4b' has no step_time; give it as acceptance_profile, beside a "
        "step_profile",
    ),
    (
        "profile: paper/v4_flash",
        "step_profile: paper/qwen3_4b\n  acceptance_profile: paper/v4_flash",
        "5: fleet.step_profile: profile 'paper/qwen3_4b' has no step_time",
    ),
    ("4GiB", "1B", "6: fleet.kv_cache: holds no block: one takes 224000B (got 1B)"),
    (
        "dspark]",
        "{kind: dspark, drafter: eagle}]",
        "7: policies[1]: profile 'paper/v4_flash' has no acceptance of drafter 'eagle'; known: dspark, mtp "
        "(another's is given as fleet.acceptance_profile, beside fleet.step_profile)",
    ),
    (
        "profile: paper/v4_flash",
        "step_profile: engines/qwen3_8b_h20\n  acceptance_profile: engines/qwen3_8b_h20",
        "8: policies[1]: profile 'engines/qwen3_8b_h20' has no acceptance of drafter 'dspark'; known: none "
        "(another's is given as fleet.acceptance_profile, beside fleet.step_profile)",
    ),
    (
        "[none, dspark]",
        "\n  - none\n  - kind: fixed\n    k: 9",
        "10: policies[1].k: expected at most the drafter's trained block of 5 (got 9)",
    ),
    (
        "[none, dspark]",
        "\n  - kind: batch_table\n    table:\n      - [1, 5]\n      - [9, 6]",
        "11: policies[0].table[1][1]: expected at most the drafter's trained block of 5 (got 6)",
    ),
    (
        "dspark]",
        "{kind: dspark_async, first_budget: 6}]",
        "7: policies[1].first_budget: expected at most the drafter's trained block of 5 (got 6)",
    ),
    (
        "profile: paper/v4_flash",
        TWO_DOMAINS,
        "1: domains: missing; profile 'paper/qwen3_8b' tells domains apart: math, code, chat; "
        "all of one: domains: {math: 1}",
    ),
]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param(*case, id=f"{case[2]}"[:70])
        for case in [*KEYS, *TYPES, *UNITS, *RANGES, *PLUGINS, *CONFLICTS, *WITH_PROFILES]
    ],
)
def test_a_fault_has_its_message(refused, old, new, message):
    assert refused(changed(old, new)) == [f"s.yaml:{message}"]


def test_every_fault_is_reported_at_once_in_order_of_lines(refused):
    text = changed("horizon: 2s", "horizon: 2").replace("replicas: 1", "replicas: 0").replace("tokens: 20", "tokns: 20")
    assert refused(text) == [
        f"s.yaml:2: horizon: {DURATION} (got 2)",
        "s.yaml:4: fleet.replicas: expected at least 1 (got 0)",
        "s.yaml:11: lengths.output.tokens: missing",
        "s.yaml:11: lengths.output.tokns: unknown key; did you mean 'tokens'? known: kind, tokens",
    ]


DOMAINS = changed("profile: paper/v4_flash", TWO_DOMAINS)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("domains: {math: 0.5, code: 0.4}\n", "13: domains: shares must sum to 1 (got 0.9)"),
        (
            "domains:\n  math: 0.5\n  cod: 0.5\n",
            "15: domains.cod: unknown domain 'cod'; profile 'paper/qwen3_8b' knows: math, code, chat",
        ),
        (
            "domains:\n  - {at: 0s, mix: {math: 1}}\n  - {at: 1s, mix: {cod: 1}}\n",
            "15: domains[1].mix.cod: unknown domain 'cod'; profile 'paper/qwen3_8b' knows: math, code, chat",
        ),
        ("domains: [{at: 1s, mix: {math: 1}}]\n", "13: domains: the first mix must begin at 0s (got 1 s)"),
        ("domains: [{at: 0s, mix: {math: 2}}]\n", "13: domains[0].mix.math: expected at most 1 (got 2)"),
    ],
)
def test_a_fault_in_domains_has_its_message(refused, section, message):
    assert refused(DOMAINS + section) == [f"s.yaml:{message}"]


SWEEPS = [
    ("{key: arrivals.rate_per_s}", ["12: sweep.values: missing"]),
    (
        "{key: arrivals.rate_per_s, values: [1], step: 2}",
        ["12: sweep.step: unknown key; known: key, values"],
    ),
    ("{key: arrivals.rate_per_s, values: []}", ["12: sweep.values: expected at least 1 item (got [])"]),
    ("{key: arrivals.rate_per_s, values: 3}", ["12: sweep.values: expected a list (got 3)"]),
    ("{key: seed, values: [1]}", ["12: sweep.key: not a key that can be swept (got 'seed')"]),
    ("{key: policies, values: [none]}", ["12: sweep.key: not a key that can be swept (got 'policies')"]),
    ("{key: 'a b', values: [1]}", ["12: sweep.key: not a key that can be swept (got 'a b')"]),
    (
        "{key: arrivals.rate_per_s, values: [1, 0]}",
        ["12: sweep.values[1]: arrivals.rate_per_s: expected above 0 (got 0)"],
    ),
    (
        "\n  key: arrivals.rate\n  values:\n    - 1\n    - 2\n",
        ["13: sweep.key: arrivals.rate: unknown key; known: kind, rate_per_s"],
    ),
    ("{key: arrivals.rate_per_s, values: [1, 2, 1]}", ["12: sweep.values[2]: same as values[0] (got 1)"]),
    ("{key: fleet.replicas.x, values: [1]}", ["12: sweep.values[0]: fleet.replicas.x: no such key"]),
    (
        "{key: fleet.max_batch_tokens, values: [512, 511]}",
        [
            "12: sweep.values[1]: fleet.max_batch_tokens: must be at least prefill.chunk_tokens, 512 where nothing is "
            "said: a chunk is part of a batch (got 511)"
        ],
    ),
    (
        "{key: horizon, values: [2s, 1s]}\nwarmup: 1s",
        [
            "12: sweep.values[1]: with horizon = '1s': warmup: warmup and cooldown (1 s + 0 s) leave nothing of the "
            "horizon (1 s) to measure"
        ],
    ),
    (
        "{key: fleet.kv_cache, values: [4GiB, 1B]}",
        ["12: sweep.values[1]: fleet.kv_cache: holds no block: one takes 224000B (got 1B)"],
    ),
    (
        "{key: fleet.profile, values: [paper/v4_flash, mine]}",
        [f"12: sweep.values[1]: fleet.profile: unknown profile 'mine'; {PROFILES}"],
    ),
]


@pytest.mark.parametrize(("section", "messages"), SWEEPS, ids=[section[:50] for section, _ in SWEEPS])
def test_a_fault_in_a_sweep_has_its_message(refused, section, messages):
    assert refused(TINY + f"sweep: {section}\n") == [f"s.yaml:{message}" for message in messages]


def test_a_fault_that_all_swept_values_share_is_reported_once(refused):
    text = changed("[none, dspark]", "[none, none]") + "sweep: {key: fleet.replicas, values: [1, 2, 3]}\n"
    assert refused(text) == ["s.yaml:7: policies[1]: same as policies[0] ('none')"]
