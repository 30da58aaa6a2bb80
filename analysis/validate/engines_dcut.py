"""Qwen3-8B on an H20: D-Cut's throughput table, from its table of steps and acceptance published elsewhere.

The step table is of whole steps, drafting included, so that fixed blocks need nothing but an accepted length:
throughput = requests x accepted length / step. Two are taken, and named apart: the one that the DSpark paper prints for
its own DFlash (another checkpoint, blocks of 7 and, by figure 4's ratio, of 15), and one fitted to this table's middle
load, which leaves the other four to be predicted. What trimming brings is simulated: Algorithm 1 in the place of D-Cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.validate.engines_cells import Loop, errors_percent, simulate_loop
from analysis.validate.rungs import Check, Section, Settings, compare, said, summarize, table
from profiles.recipes.dcut import TARGET
from profiles.recipes.sources import ACCEPTED, DCUT_STEPS, DCUT_THROUGHPUT, Floats, Shared, cite

LENGTHS = "reference/dspark_paper/fig4_accepted_length_by_draft_length.csv"
#: The five benchmarks whose throughputs the table averages, as the paper calls them, and their domains.
BENCHMARKS = {"GSM8K": "Math", "MATH": "Math", "HumanEval": "Code", "MBPP": "Code", "MT-Bench": "Chat"}
DOMAINS = "{math: 0.4, code: 0.4, chat: 0.2}"
#: Tokens a request verifies by method, and the share of the step table's block of 16 that this is.
BLOCKS = {"dflash_block8": 8, "dflash_block16": 16}
#: The load at which the accepted length is fitted in the second prediction.
FITTED_AT = 16
#: No bound is set from outside; half of the points should be nearer than this once the accepted length is known.
MEDIAN_BOUND_PERCENT = 5.0
GAIN_BOUND_POINTS = 10.0


@dataclass(frozen=True, slots=True)
class Fixed:
    """A fixed block at every load: seconds of a step, tokens/s that were measured, accepted lengths by two sources."""

    method: str
    requests: Floats
    step_s: Floats
    observed: Floats
    published: float
    fitted: float

    def predicted(self, accepted_length: float) -> Floats:
        """Return tokens/s."""
        return np.asarray(self.requests * accepted_length / self.step_s)


def published_length(shared: Shared, verify_tokens: int) -> float:
    """Return the paper's accepted length of DFlash for Qwen3-8B, mean of the five benchmarks.

    Table 1 has blocks of 7 draft tokens (8 verified); longer ones scale as figure 4's, of Qwen3-4B, by domain.
    """
    lengths = []
    for benchmark, domain in BENCHMARKS.items():
        (length,) = shared.columns(
            ACCEPTED, "accepted_length_tokens_per_round", target_model=TARGET, drafter="DFlash", benchmark=benchmark
        )
        verified, accepted = shared.columns(
            LENGTHS, "draft_length_tokens", "accepted_length_tokens_per_round", domain=domain, drafter="DFlash"
        )
        by_size = dict(zip(verified, accepted, strict=True))
        lengths.append(float(length[0]) * by_size[verify_tokens] / by_size[8])
    return float(np.mean(lengths))


def fixed_blocks(shared: Shared) -> list[Fixed]:
    """Return the fixed blocks of DFlash with their measured steps."""
    found = []
    for method, verified in BLOCKS.items():
        requests, observed = shared.columns(
            DCUT_THROUGHPUT, "batch_requests", "output_tokens_per_s", target=TARGET, method=method
        )
        at, ms = shared.columns(
            DCUT_STEPS, "batch_requests", "step_ms", target=TARGET, verified_share_of_block16=f"{verified / 16:.2f}"
        )
        by_load = dict(zip(at, ms / 1e3, strict=True))
        step_s = np.array([by_load[load] for load in requests])
        middle = int(np.flatnonzero(requests == FITTED_AT)[0])
        fitted = float(observed[middle] * step_s[middle] / FITTED_AT)
        found.append(Fixed(method, requests, step_s, observed, published_length(shared, verified), fitted))
    return found


def fixed_section(shared: Shared) -> Section:
    """Predict the fixed blocks."""
    rows, checks, left_out = [], [], []
    for block in fixed_blocks(shared):
        borrowed = errors_percent(block.predicted(block.published), block.observed)
        own = errors_percent(block.predicted(block.fitted), block.observed)
        for i, load in enumerate(block.requests):
            role = "fitted" if load == FITTED_AT else f"{own[i]:+.1f}"
            rows.append(
                [
                    f"{block.method}, {load:.0f} requests",
                    f"{1e3 * block.step_s[i]:.1f}",
                    f"{block.observed[i]:.0f}",
                    f"{block.predicted(block.published)[i]:.0f}",
                    f"{borrowed[i]:+.1f}",
                    f"{block.predicted(block.fitted)[i]:.0f}",
                    role,
                ]
            )
        out = block.requests != FITTED_AT
        left_out += [abs(error) for error in own[out]]
        name = f"D-Cut, {block.method}"
        checks.append(summarize(f"{name}: median |error|, published length", float(np.median(np.abs(borrowed))), "%"))
        checks.append(compare(f"{name}: accepted length", block.published, block.fitted, "tokens"))
    median = float(np.median(left_out))
    checks.append(summarize("D-Cut, fixed blocks: median |error|, left-out loads", median, "%", MEDIAN_BOUND_PERCENT))
    checks.append(summarize("D-Cut, fixed blocks: worst |error|, left-out loads", float(np.max(left_out)), "%"))
    blocks = fixed_blocks(shared)
    lines = [
        *said(
            f"Fitted: nothing but, in the last two columns, one accepted length a block, at {FITTED_AT} requests. "
            f"Read as measured: the steps ({cite(DCUT_STEPS)}). Predicted: tokens/s = requests x accepted length / "
            f"step, against {cite(DCUT_THROUGHPUT)}. Published accepted lengths are of the DSpark paper's own DFlash "
            f"({blocks[0].published:.2f} in blocks of 8; {blocks[1].published:.2f} in blocks of 16, by figure 4)."
        ),
        "",
        *table(("method, load", "step ms", "observed", "published", "error %", "own length", "error %"), rows),
        "",
        *said(
            "The error with a published length is nearly the same at every load: it is the drafter's, not the step's. "
            f"One accepted length a block ({blocks[0].fitted:.2f} and {blocks[1].fitted:.2f}) gives the other loads "
            f"within {median:.1f} % (median), {max(left_out):.1f} % (worst). Steps of blocks of 8 were measured with "
            "16 tokens drafted. Another checkpoint and another temperature move the level "
            "(the table is at temperature 0). Not predicted: EAGLE-3, whose draft length and draft time the page does "
            "not give, and the other targets, which have no table of steps or one load of it."
        ),
    ]
    return Section("(ii) D-Cut's throughput from its steps: Qwen3-8B on an H20", tuple(lines), tuple(checks))


def trimming_section(settings: Settings) -> Section:
    """Simulate what trimming by confidence brings over a fixed block, and hold it against D-Cut's gain."""
    shared, horizon_s = settings.shared, 30.0 if settings.quick else 90.0
    measured = {
        method: shared.columns(DCUT_THROUGHPUT, "batch_requests", "output_tokens_per_s", target=TARGET, method=method)
        for method in ("dflash_block8", "dcut_block8")
    }
    rows, checks = [], []
    for i, load in enumerate(measured["dcut_block8"][0]):
        found = {
            kind: simulate_loop(
                Loop(
                    profile="engines/qwen3_8b_h20",
                    acceptance="paper/qwen3_8b",
                    domains=DOMAINS,
                    policy=f"{{kind: {kind}, drafter: dflash}}",
                    users=int(load),
                    prompt_tokens=1,
                    output_tokens=512,
                    warmup_s=15.0,
                    horizon_s=15.0 + horizon_s,
                ),
                settings.seed,
            )
            for kind in ("fixed, k: 7", "dspark")
        }
        fixed, trimmed = (one["output_tokens_per_s_per_gpu"] or 0.0 for one in found.values())
        gain = 100 * (trimmed / fixed - 1)
        observed = 100 * (measured["dcut_block8"][1][i] / measured["dflash_block8"][1][i] - 1)
        budget = found["dspark"]["verify_tokens_per_request"] or 0.0
        rows.append(
            [
                f"{load:.0f} requests",
                f"{fixed:.0f}",
                f"{trimmed:.0f}",
                f"{budget:.2f}",
                f"{gain:+.1f}",
                f"{observed:+.1f}",
            ]
        )
        checks.append(compare(f"D-Cut, gain of trimming at {load:.0f} requests", gain, float(observed), "points"))
    worst = max(abs(check.error or 0.0) for check in checks)
    summary: Check = summarize("D-Cut, gain of trimming: worst |error|", worst, "points", GAIN_BOUND_POINTS)
    lines = [
        *said(
            "Fitted before: the profile engines/qwen3_8b_h20 (20 rows of steps, 5 of none). Borrowed: DFlash's "
            "acceptance and confidence for Qwen3-8B from the DSpark paper, blocks of 7 draft tokens (8 verified). "
            "Predicted, simulated: Algorithm 1 against the whole block; observed: D-Cut's own rule against the same."
        ),
        "",
        *table(("load", "fixed tok/s", "Algorithm 1", "verifies", "gain %", "D-Cut's gain %"), rows),
        "",
        *said(
            "Two rules and two drafters are compared, so that the gain is judged, not the level. At 4 requests D-Cut "
            "loses a little, which the time of its own decisions would explain; as simulated, deciding is free."
        ),
    ]
    return Section("(ii) What trimming brings: D-Cut and Algorithm 1", tuple(lines), (*checks, summary))
