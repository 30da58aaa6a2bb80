"""Make the measurement files of the example from a run of ``engine.yaml``: they are simulated, not measured.

    python -m sim.run docs/examples/will_dspark_pay/engine.yaml --out runs/engine
    python docs/examples/will_dspark_pay/make.py runs/engine

Times get 1 % of noise a run, as real ones repeat themselves; what the draft's tokens are worth is drawn, 6,000 rounds,
from the survival that the engine's acceptance profile has.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from profiles.files import find_profile, load_profile
from profiles.schema import LawCurve, ParametricLaw

HERE = Path(__file__).parent
LOADS = (1, 2, 4, 8, 16, 32, 64)
ROUNDS = 6000
NOISE = 0.01


def requests(run: Path, policy: str, users: int) -> pd.DataFrame:
    """Return the finished requests of one load that came after the warm-up."""
    rows = pd.read_parquet(run / policy / f"users_{users}" / "requests.parquet")
    return rows[(rows.status.astype(str) == "finished") & (rows.arrived_s >= 60) & (rows.output_tokens > 1)]


def result(rows: pd.DataFrame, users: int, factor: float) -> dict[str, object]:
    """Return one run as ``vllm bench serve`` writes it, the fields that a fit reads."""
    tpot = (rows.last_token_s - rows.first_token_s) / (rows.output_tokens - 1)
    span = float(rows.last_token_s.max() - rows.arrived_s.min())
    return {
        "backend": "vllm",
        "model_id": "Qwen/Qwen3-8B",
        "request_rate": "inf",
        "max_concurrency": users,
        "num_prompts": len(rows),
        "completed": len(rows),
        "failed": 0,
        "duration": round(span * factor, 3),
        "total_input_tokens": int(rows.prompt_tokens.sum()),
        "total_output_tokens": int(rows.output_tokens.sum()),
        "output_throughput": round(float(rows.output_tokens.sum()) / span / factor, 2),
        "mean_ttft_ms": round(1e3 * float((rows.first_token_s - rows.arrived_s).mean()) * factor, 3),
        "mean_tpot_ms": round(1e3 * float(tpot.mean()) * factor, 4),
    }


def main(run: Path) -> None:
    """Write the files beside this one."""
    rng = np.random.default_rng(7)
    noise = {users: float(np.exp(rng.normal(0, NOISE))) for users in LOADS}
    runs = [result(requests(run, "none", users), users, noise[users]) for users in LOADS]
    (HERE / "none.json").write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")

    law = load_profile(find_profile("paper/qwen3_8b")).acceptance["dspark"].domains["chat"]
    assert isinstance(law, ParametricLaw)
    depth = (rng.random((ROUNDS, 1)) < np.array(law.survival.values)).sum(axis=1)
    lines = [
        f'{name}_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {value:.1f}'
        for name, value in (
            ("vllm:spec_decode_num_drafts", ROUNDS),
            ("vllm:spec_decode_num_draft_tokens", ROUNDS * len(law.survival.values)),
            ("vllm:spec_decode_num_accepted_tokens", int(depth.sum())),
        )
    ]
    for k in range(len(law.survival.values)):
        labels = f'engine="0",model_name="Qwen/Qwen3-8B",position="{k}"'
        lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} {(depth > k).sum():.1f}")
    (HERE / "metrics.prom").write_text("\n".join(lines) + "\n", encoding="utf-8")

    step_time = load_profile(find_profile("engines/qwen3_8b_h20")).step_time
    assert step_time is not None
    draft = step_time.draft["dspark"].curve
    assert isinstance(draft, LawCurve)
    times = [(n, 1e3 * (draft.floor_s + draft.per_unit_s * max(n, draft.min_size)) * noise[n]) for n in LOADS]
    table = ["requests,draft_ms", *(f"{n},{ms:.4f}" for n, ms in times)]
    (HERE / "draft.csv").write_text("\n".join(table) + "\n", encoding="utf-8")

    settle = ["concurrency,policy,k,tpot_ms,ttft_ms,accepted_length,prompt_tokens,output_tokens"]
    for k in (3, 7):
        for users in LOADS[1::2]:
            rows = requests(run, f"fixed_k{k}", users)
            one = result(rows, users, float(np.exp(rng.normal(0, NOISE))))
            accepted = 1 + rows.accepted_draft_tokens.sum() / rows.rounds.sum()
            times = f"{one['mean_tpot_ms']},{one['mean_ttft_ms']},{accepted:.3f}"
            settle.append(f"{users},fixed,{k},{times},{rows.prompt_tokens.mean():.0f},{rows.output_tokens.mean():.0f}")
    (HERE / "fixed.csv").write_text("\n".join(settle) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
