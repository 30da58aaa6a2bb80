"""Decode steps of any model, system and layout that NVIDIA's aiconfigurator-core covers: the optional extra ``aic``.

``python -m profiles.recipes.aiconfigurator`` writes `aic_decode_steps.csv`, the machines that the reference data lack.
The package loads tables for seconds to minutes, then answers at once.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator

import numpy as np

from profiles.errors import Fault, ProfileError
from profiles.recipes.aic import EXTRA_STEPS, MACHINES, Machine, Steps, steps_of

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)
#: Operations that read the cache have one of these in their name; all others depend on the number of tokens alone.
ATTENTION = ("attention", "mla")


def predict_rows(machine: Machine) -> Iterator[tuple[int, int, float, float]]:
    """Yield tokens, context, milliseconds of attention and of the rest.

    Raises `ProfileError` where the package is not installed or has no tables for the machine.
    """
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError:
        raise ProfileError(Fault("needs the extra 'aic': pip install 'dspark-sim[aic]' (x86-64 Linux)")) from None
    layout = {key: int(value) for key, value in (item.split("=") for item in machine.parallel.split(";"))}
    try:
        engine = EngineHandle.compile(machine.model, machine.system, machine.backend, nextn=0, **layout)
        for tokens in TOKENS:
            for context in CONTEXTS:
                parts = engine.decode_step_per_op(tokens, context, 2)
                attention = sum(ms for name, ms, *_ in parts if any(word in name for word in ATTENTION))
                if attention <= 0:
                    raise ProfileError(Fault(f"no operation of {machine.model} is known to read the cache"))
                yield tokens, context, attention, sum(ms for _, ms, *_ in parts) - attention
    except ProfileError:
        raise
    except Exception as fault:  # the package has errors of its own for each kind of thing it lacks
        first = (str(fault).splitlines() or [type(fault).__name__])[0]
        what = f"{machine.model} on {machine.system} with {machine.backend}, {machine.parallel}"
        raise ProfileError(Fault(f"aiconfigurator has no prediction for {what}: {first[:200]}")) from None


def predict_steps(machine: Machine) -> Steps:
    """Return the predicted decode steps of a machine; see `predict_rows`."""
    tokens, contexts, attention, rest = np.array(list(predict_rows(machine))).T
    return steps_of(tokens, contexts, rest / 1e3, attention / 1e3)


def main() -> None:
    """Write the table of the machines that the reference data lack."""
    with EXTRA_STEPS.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(("model", "backend", "system", "parallel", "tokens_per_rank", "context", "attn_ms", "rest_ms"))
        for machine in MACHINES.values():
            if not machine.in_shared:
                for tokens, context, attention, rest in predict_rows(machine):
                    where = (machine.model, machine.backend, machine.system, machine.parallel)
                    out.writerow((*where, tokens, context, f"{attention:.4f}", f"{rest:.4f}"))


if __name__ == "__main__":
    main()
