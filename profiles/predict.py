"""``python -m profiles.predict``: profiles of a machine that nobody here owns, from NVIDIA's kernel tables."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from profiles.errors import Fault, InputError, exit_code_of
from profiles.files import find_profile, load_profile, save_profile
from profiles.recipes.aic import CONTEXT, Lender, Machine, fit_attention, profile_of
from profiles.recipes.aiconfigurator import predict_steps
from profiles.schema import TableCurve

log = logging.getLogger("profiles.predict")

#: The engine whose measured draft time is scaled.
LENDER = "engines/v4_flash_b300_tp4"


def main(argv: Sequence[str] | None = None) -> int:
    """Predict a machine's decode steps and write both ends of what verification costs as profiles."""
    parser = argparse.ArgumentParser(
        prog="python -m profiles.predict",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Make two profiles of a model on a system from NVIDIA's kernel tables: the lower and the upper "
        "end of what\n"
        "verifying several tokens a request costs. Needs the extra 'aic' (aiconfigurator-core, about 600 MB). The "
        "shipped\n"
        "profiles aic/* are made this way and need nothing.",
        epilog="example: python -m profiles.predict h100_8b --model Qwen/Qwen3-8B --system h100_sxm --backend vllm \\\n"
        "    --layout tp_size=1 --gpus 1 --kv-bytes-per-token 147456 --max-context-tokens 32768",
    )
    parser.add_argument("name", metavar="NAME", help="NAME_lower.json and NAME_upper.json are written")
    parser.add_argument("--model", required=True, help="as on Hugging Face, such as Qwen/Qwen3-8B")
    parser.add_argument("--system", required=True, help="such as h100_sxm, h200_sxm, b200_sxm")
    parser.add_argument("--backend", required=True, help="vllm, sglang or trtllm")
    parser.add_argument(
        "--layout",
        default="tp_size=1",
        metavar="KEY=N,...",
        help="tp_size, attention_dp_size, moe_tp_size, moe_ep_size (default: tp_size=1)",
    )
    parser.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="of a replica; 1 where attention is data parallel"
    )
    parser.add_argument("--kv-bytes-per-token", type=int, required=True, metavar="N", help="of the whole replica")
    parser.add_argument("--max-context-tokens", type=int, required=True, metavar="N", help="longest request")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="folder to write to (default: here)")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    machine = _machine(options)
    steps = predict_steps(machine)
    law = fit_attention(steps)
    at = int(np.flatnonzero(steps.contexts == CONTEXT)[0])
    print(
        f"{machine.model} on {machine.hardware}, predicted: step of one token a request, {CONTEXT:,} tokens of context"
    )
    print("  requests   rest ms   attention ms")
    for row in range(0, steps.tokens.size, 3):
        print(f"{steps.tokens[row]:>10,.0f}{1e3 * steps.rest_s[row]:>10.3f}{1e3 * steps.attention_s[row, at]:>15.3f}")
    print(f"attention as a law: {law.rms:.1%} rms, {law.worst:.1%} worst of the whole step")
    for end in ("lower", "upper"):
        name = f"{options.name}_{end}"
        path = options.out / f"{name}.json"
        try:
            save_profile(profile_of(name, machine, steps, end, "aiconfigurator", _lender()), path)
        except OSError as fault:
            raise InputError(Fault(f"cannot write: {(fault.strerror or str(fault)).lower()}", str(path))) from None
        log.info("%s", path)
    return 0


def _machine(options: argparse.Namespace) -> Machine:
    faults = []
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", options.name):
        faults.append(Fault(f"expected letters, digits and _ . - (got '{options.name}')", "NAME"))
    if not re.fullmatch(
        r"(tp|attention_dp|moe_tp|moe_ep)_size=[1-9]\d*(,(tp|attention_dp|moe_tp|moe_ep)_size=[1-9]\d*)*",
        options.layout,
    ):
        faults.append(
            Fault(
                f"expected tp_size=N[,attention_dp_size=N][,moe_tp_size=N][,moe_ep_size=N] (got '{options.layout}')",
                "--layout",
            )
        )
    for key in ("gpus", "kv_bytes_per_token", "max_context_tokens"):
        if getattr(options, key) < 1:
            faults.append(Fault(f"expected at least 1 (got {getattr(options, key)})", f"--{key.replace('_', '-')}"))
    if not options.out.is_dir():
        faults.append(Fault("no such folder", str(options.out)))
    if faults:
        raise InputError(*faults)
    return Machine(
        options.model,
        options.system,
        options.backend,
        options.layout.replace(",", ";"),
        options.gpus,
        options.kv_bytes_per_token,
        "said on the command line of profiles.predict",
        options.max_context_tokens,
        in_shared=False,
    )


def _lender() -> Lender:
    """Return the measured draft time from the shipped profile: its tables are those of the reference data."""
    step_time = load_profile(find_profile(LENDER)).step_time
    assert step_time is not None
    draft = step_time.draft["dspark"].curve
    assert isinstance(step_time.verify, TableCurve)
    assert isinstance(draft, TableCurve)
    graph, drafted = step_time.verify.segments[0], draft.segments[0]
    slope, floor = np.polyfit(drafted.sizes, drafted.seconds, 1)
    return Lender(np.array(graph.sizes, np.float64), np.array(graph.seconds), float(floor), float(slope))


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
