"""Where a step's time was wrong: the steps that the engine took, over what the profile says they take.

Errors of throughput and speed mix what a step takes with how many there are and with how they queue. Here every step
that the engine ran is priced as it was, by its own requests, tokens and context, at the machine's pace during its run;
so nothing of acceptance, policies or queueing is in these errors.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from profiles.curves import StepCost, draft_cost, step_cost
from profiles.schema import Profile
from sim.metrics import Metrics

Floats = NDArray[np.float64]
#: What is priced, by column of `priced` and `taken`: how it is called.
PARTS = {"plain": "steps without prompts", "draft": "of these, drafting", "prompts": "steps with prompts"}
#: Batch tokens that a step of the served engine may have.
MAX_BATCH_TOKENS = 256


def load_steps(records: Path) -> pd.DataFrame:
    """Return the steps of a run that `decoder.serve.serve_cell` wrote below ``records``."""
    (file,) = records.rglob("steps.parquet")
    return pd.read_parquet(file)


def taken(steps: pd.DataFrame) -> Metrics:
    """Return the seconds that each of `PARTS` took."""
    plain = steps["prompt_tokens"] == 0
    return {
        "plain": float(steps["busy_s"][plain].sum()),
        "draft": float(steps["draft_s"][plain].sum()),
        "prompts": float(steps["busy_s"][~plain].sum()),
    }


def priced(steps: pd.DataFrame, profile: Profile, drafter: str | None) -> Metrics:
    """Return the seconds that a profile says each of `PARTS` takes, host time between steps left out."""
    target_s, draft_s = prices(steps, profile, drafter)
    plain = steps["prompt_tokens"].to_numpy() == 0
    return {
        "plain": float((target_s + draft_s)[plain].sum()),
        "draft": float(draft_s[plain].sum()),
        "prompts": float((target_s + draft_s)[~plain].sum()),
    }


def prices(steps: pd.DataFrame, profile: Profile, drafter: str | None) -> tuple[Floats, Floats]:
    """Return the seconds of each step without and of its drafting, as the profile has them.

    A prompt's price holds what the ``drafter``, where the engine has one, takes for it.
    """
    assert profile.step_time is not None
    cost: StepCost = step_cost(profile.step_time, MAX_BATCH_TOKENS, drafter)
    columns = ("decoding", "batch_tokens", "context_tokens", "prompt_tokens")
    rows = [tuple(map(int, row)) for row in steps[list(columns)].itertuples(index=False)]
    target_s = np.array([cost.target_s(*row) for row in rows]) - cost.overhead_s
    if drafter is None:
        return target_s, np.zeros(target_s.size)
    curve, a_token_each = draft_cost(profile.step_time, drafter, int(steps["decoding"].max()))
    drafted = steps["drafted_tokens"].to_numpy()
    each = np.where(a_token_each, drafted / np.maximum(steps["decoding"].to_numpy(), 1), drafted > 0)
    return target_s, each * curve.seconds[steps["decoding"].to_numpy()]
