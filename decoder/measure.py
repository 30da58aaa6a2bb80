"""``python -m decoder.measure``: time the engine's steps on this machine and write what they cost into a profile."""

from __future__ import annotations

import argparse
import logging
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profiles.errors import Fault, InputError, exit_code_of

if TYPE_CHECKING:
    from decoder.drafter import Drafter
    from decoder.engine import Engine
    from decoder.step_times import Fit, Point, Samples
    from decoder.target import HfTarget

log = logging.getLogger("decoder.measure")

#: Half an interquartile range over the median, at the median point: above this a machine counts as disturbed.
DISTURBED = 0.05
#: Steps in a row of which the time between steps is taken.
LOOP_STEPS = 12
DESCRIPTION = """Measure what the engine's steps cost and write a profile for the simulator.

A grid of steps is run: requests that decode x draft tokens verified of each x tokens cached of each, then prompts of
several lengths alone and beside decoding. Medians of repeats are taken apart into a table over batch tokens, a price of
a request and of a cached token (least squares, no term below 0), a draft time over requests, a price of a prompt token,
and the time between steps. How well the parts add up to what was measured is printed and kept in the profile."""
EXAMPLE = """python -m decoder.measure --target smollm2 --drafter dspark --out profiles/measured/cpu_lab.json
  python -m decoder.measure --shape qwen3-8b --device cuda --dtype bfloat16 --requests 1,2,4,8,16,32,64,128,256 \\
      --contexts 512,2048,8192 --graph-sizes 1,2,4,8,16,32,64,128,256,512,1024,2048 \\
      --out profiles/measured/h200_qwen3_8b.json"""


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m decoder.measure",
        description=DESCRIPTION,
        epilog=f"examples:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--target", default="smollm2", metavar="NAME", help="smollm2 (default), tiny, or a local folder")
    what.add_argument(
        "--drafter", metavar="NAME", help="a shipped one's name or a folder (default: the target's first)"
    )
    what.add_argument("--drafter-name", metavar="NAME", help="in the profile, as policies call it (default: its kind)")
    what.add_argument("--shape", metavar="NAME", help="random weights of published dimensions instead of a target")
    what.add_argument("--draft-length", type=int, metavar="N", help="block of the shape's drafter (default: published)")
    what.add_argument("--lab", type=Path, default=Path("lab"), metavar="DIR", help="named targets lie there (lab)")
    where = parser.add_argument_group("where")
    where.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda or cuda:N (default: cpu)")
    where.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of both models")
    where.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")
    points = parser.add_argument_group("the grid")
    points.add_argument("--requests", default="1,2,4,8,16", metavar="N,N,...", help="that decode (default: 1,2,4,8,16)")
    points.add_argument("--lengths", metavar="N,N,...", help="draft tokens verified (default: 0, 1, half and all)")
    points.add_argument("--contexts", default="64,256,512", metavar="N,N,...", help="tokens cached (64,256,512)")
    points.add_argument(
        "--prompts", default="32,128,512", metavar="N,N,...", help="prompt tokens (default: 32,128,512)"
    )
    points.add_argument("--max-batch-tokens", type=int, default=2048, metavar="N", help="of a step (default: 2048)")
    points.add_argument(
        "--kv-tokens", type=int, metavar="N", help="cached in all, at most (default: what the grid asks)"
    )
    points.add_argument("--graph-sizes", default="", metavar="N,N,...", help="passes are padded to these; CUDA graphs")
    points.add_argument("--repeats", type=int, default=5, metavar="N", help="passes over the grid (default: 5)")
    points.add_argument(
        "--minutes", type=float, metavar="X", help="leave out repeats beyond 3 that would end later (default: none)"
    )
    points.add_argument(
        "--steps", type=int, default=3, metavar="N", help="counted of each visit, after one (default: 3)"
    )
    points.add_argument("--seed", type=int, default=0, help="of the order of the grid (default: 0)")
    points.add_argument("--roofline", action="store_true", help="measure copy bandwidth and matrix rate too")
    parser.add_argument("--max-spread", type=float, default=DISTURBED, metavar="X", help="above it: disturbed (0.05)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the profile, .json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every point's medians and spreads too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = make_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    return exit_code_of(lambda: _run(options, shlex.join(["python", "-m", "decoder.measure", *arguments])))


def _run(options: argparse.Namespace, command: str) -> int:
    numbers = {
        name: _numbers(getattr(options, name), f"--{name.replace('_', '-')}", least)
        for name, least in (("requests", 1), ("contexts", 1), ("prompts", 1), ("graph_sizes", 1), ("lengths", 0))
    }
    _check(options, numbers)
    # Imports wait until here so that --help answers at once.
    import torch
    from tqdm import tqdm

    from decoder.loading import check_device, write_json
    from decoder.step_times import Point, fit, fit_prefill, grid, loop_gaps_s, measure

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    check_device(options.device)
    device = torch.device(options.device)
    target, drafter = _models(options, device)
    block = drafter.trained_length if drafter else 0
    lengths = numbers["lengths"] or sorted({0, min(1, block), block // 2, block})
    if max(lengths) > block:
        raise InputError(
            Fault(f"expected at most the drafter's block of {block} (got {max(lengths)})", key="--lengths")
        )
    longest = max(numbers["contexts"]) + 1 + block
    if max(longest, *numbers["prompts"]) > target.max_context_tokens:
        raise InputError(
            Fault(f"the target holds {target.max_context_tokens} tokens; {longest} were asked for", key="--contexts")
        )
    asked = max(numbers["requests"]) * longest
    points = grid(
        numbers["requests"],
        lengths,
        numbers["contexts"],
        max_batch_tokens=options.max_batch_tokens,
        max_cached_tokens=options.kv_tokens or asked,
        margin=1 + block,
    )
    if not points:
        raise InputError(
            Fault("no step of the grid fits the limits of batch tokens and cached tokens", key="--requests")
        )
    middle = Point(numbers["requests"][len(numbers["requests"]) // 2], 0, numbers["contexts"][0])
    prompts = [Point(0, 0, 0, prompt) for prompt in numbers["prompts"]]
    prompts += [Point(middle.requests, 0, middle.context, prompt) for prompt in numbers["prompts"]]
    if middle not in points:
        points.append(middle)
    engine = _engine(options, target, drafter, points, prompts, numbers["graph_sizes"])
    with tqdm(total=(len(points) + len(prompts)) * options.repeats, unit="point", disable=None, leave=False) as bar:

        def show(done: int) -> None:
            bar.update(done)

        began_s = time.perf_counter()
        samples = measure(
            engine,
            [*points, *prompts],
            repeats=options.repeats,
            steps=options.steps,
            seed=options.seed,
            limit_s=np.inf if options.minutes is None else 60 * options.minutes,
            on_progress=show,
        )
        gaps_s = loop_gaps_s(engine, middle.requests, LOOP_STEPS)
        took_s = time.perf_counter() - began_s
    decoding = {point: samples[point] for point in points}
    prefill = {point: samples[point] for point in prompts}
    fitted = fit(decoding)
    floor_s, token_s, prefill_residuals = fit_prefill(prefill, fitted)
    report = _report(samples, fitted, prefill_residuals, gaps_s, options.steps, took_s)
    report["prefill_floor_s"], report["prefill_token_s"] = floor_s, token_s
    if options.roofline:
        report["roofline"] = _roofline(target, decoding)
    profile = _profile(options, command, target, drafter, engine, decoding, fitted, report)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    from profiles.files import save_profile

    save_profile(profile, options.out)
    print("\n".join(_table(report)))
    log.info("wrote %s (%.0f s of measuring)", options.out, took_s)
    if profile.disturbed:
        log.warning("disturbed: %s", profile.disturbed)
    write_json(options.json, report)
    return 0


def _numbers(text: str | None, key: str, least: int) -> list[int]:
    if not text:
        return []
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(Fault(f"expected whole numbers with commas between (got '{text}')", key=key)) from None
    if values != sorted(set(values)) or values[0] < least:
        raise InputError(Fault(f"expected numbers of at least {least} that rise (got '{text}')", key=key))
    return values


def _check(options: argparse.Namespace, numbers: dict[str, list[int]]) -> None:
    faults = [
        Fault(f"expected at least {least} (got {getattr(options, name)})", key=f"--{name.replace('_', '-')}")
        for name, least in (("repeats", 3), ("steps", 1), ("max_batch_tokens", 1), ("threads", 1), ("draft_length", 1))
        if getattr(options, name) is not None and getattr(options, name) < least
    ]
    if options.minutes is not None and not options.minutes > 0:
        faults.append(Fault(f"expected minutes above 0 (got {options.minutes:g})", key="--minutes"))
    faults += [
        Fault("expected at least one number", key=f"--{name}")
        for name in ("requests", "contexts", "prompts")
        if not numbers[name]
    ]
    over = [size for size in numbers["graph_sizes"] if size > options.max_batch_tokens]
    if over:
        faults.append(
            Fault(f"{over[0]} has no effect: no step exceeds {options.max_batch_tokens} tokens", key="--graph-sizes")
        )
    if options.shape is None and options.draft_length is not None:
        faults.append(Fault("has no effect without --shape: a drafter has its own block", key="--draft-length"))
    if options.shape is not None and options.drafter is not None:
        faults.append(Fault("has no effect with --shape, which brings its own", key="--drafter"))
    if options.out.suffix != ".json":
        faults.append(Fault(f"expected a name that ends in .json (got '{options.out}')", key="--out"))
    if faults:
        raise InputError(*faults)


def _models(options: argparse.Namespace, device: Any) -> tuple[HfTarget, Drafter | None]:
    from decoder.packed import pack_models

    target, drafter = _loaded(options, device)
    pack_models(target, drafter)
    return target, drafter


def _loaded(options: argparse.Namespace, device: Any) -> tuple[HfTarget, Drafter | None]:
    from decoder.loading import TORCH_DTYPES

    dtype = TORCH_DTYPES[options.dtype]
    if options.shape is not None:
        from decoder.shapes import make_shape, shape_of

        return make_shape(shape_of(options.shape), device=device, dtype=dtype, draft_length=options.draft_length)
    from decoder.checkpoint import load_drafter
    from decoder.lab.targets import drafter_folder, target_folder
    from decoder.target import load_target

    target = load_target(target_folder(options.target, options.lab), device=options.device, dtype=dtype)
    folder = drafter_folder(options.drafter, options.target)
    return target, load_drafter(folder, target, device=options.device, dtype=dtype) if folder else None


def _engine(
    options: argparse.Namespace,
    target: HfTarget,
    drafter: Drafter | None,
    points: Sequence[Point],
    prompts: Sequence[Point],
    graph_sizes: Sequence[int],
) -> Engine:
    from decoder.batch_target import HfBatchTarget
    from decoder.batched_drafting import make_batch_drafter
    from decoder.engine import Engine
    from decoder.paged_kv import KERNEL_BLOCK_TOKENS, BlockPool
    from decoder.served import Settings
    from sim.batching import Chunked
    from sim.verify import Fixed, NoSpeculation

    block = drafter.trained_length if drafter else 0
    block_tokens = KERNEL_BLOCK_TOKENS if target.device.type == "cuda" else 16

    def blocks(point: Point) -> int:
        one = -(-(point.context + 1 + block) // block_tokens)
        return point.requests * one + -(-point.prompt // block_tokens)

    pool = BlockPool(max(blocks(point) for point in (*points, *prompts)), block_tokens)
    requests = max(point.requests for point in points)
    longest = max(point.context for point in points) + 1 + block
    paged = HfBatchTarget(
        target,
        pool,
        graph_sizes=graph_sizes,
        graph_segments=requests,
        graph_queries=1 + block,
        graph_rows=longest,
    )
    most = options.max_batch_tokens + max(point.prompt for point in prompts)
    settings = Settings(
        prefill=Chunked(chunk_tokens=max(point.prompt for point in prompts)),
        max_running=requests + 1,
        max_batch_tokens=max(most, requests + 1),
        max_context_tokens=target.max_context_tokens,
    )
    policy = Fixed(k=block) if drafter else NoSpeculation()
    batched = make_batch_drafter(drafter, pool, target.device) if drafter else None
    return Engine(paged, batched, policy, pool, settings, clock=device_clock(target.device))


def device_clock(device: Any) -> Callable[[], float]:
    """Return a clock that waits for a device's work before it tells the time."""
    if device.type != "cuda":
        return time.perf_counter
    import torch

    def synchronized() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronized


def _report(
    samples: dict[Point, Samples],
    fitted: Fit,
    prefill_residuals: dict[Point, float],
    gaps_s: Any,
    steps: int,
    took_s: float,
) -> dict[str, Any]:
    from decoder.step_times import spread

    residuals = fitted.residuals | prefill_residuals
    rows = [
        {
            "requests": point.requests,
            "verify_length": point.length,
            "context_tokens": point.context,
            "prompt_tokens": point.prompt,
            "batch_tokens": point.batch_tokens,
            "samples": len(found.step_s),
            "target_s": float(np.median(found.target_s)),
            "target_spread": spread(found.target_s),
            "draft_s": float(np.median(found.draft_s)),
            "draft_spread": spread(found.draft_s) if np.median(found.draft_s) > 0 else None,
            "fitted_over_measured": 1 + residuals[point],
        }
        for point, found in sorted(samples.items())
    ]
    return {
        "points": rows,
        "spread": float(np.median([row["target_spread"] for row in rows])),
        "fit_rms": fitted.rms,
        "fit_worst": float(max(abs(value) for value in fitted.residuals.values())),
        "prefill_worst": float(max(abs(value) for value in prefill_residuals.values())),
        "per_request_s": fitted.per_request_s,
        "per_context_token_s": fitted.per_context_token_s,
        "gap_s": float(np.median(gaps_s)),
        "repeats": len(next(iter(samples.values())).step_s) // steps,
        "measured_for_s": took_s,
    }


def _profile(
    options: argparse.Namespace,
    command: str,
    target: HfTarget,
    drafter: Drafter | None,
    engine: Engine,
    decoding: dict[Point, Samples],
    fitted: Fit,
    report: dict[str, Any],
) -> Any:
    import torch

    from decoder.batch_target import HfBatchTarget
    from profiles.schema import (
        DraftCost,
        LinearPrefill,
        Profile,
        Provenance,
        Replica,
        Segment,
        SourcedCount,
        SourcedSeconds,
        StepTime,
        TableCurve,
    )

    what = options.shape or str(options.target)
    hardware = hardware_of(target.device)

    def told(origin: Any, note: str) -> Provenance:
        return Provenance(
            origin=origin,
            source=f"the engine of decoder/, {what} in {options.dtype}",
            hardware=hardware,
            version=versions(),
            command=command,
            date=time.strftime("%Y-%m-%d"),
            note=note,
        )

    repeats = (
        f"{report['repeats']} repeats of {options.steps} steps, medians; half IQR {report['spread']:.1%} of a median"
    )
    parts = (
        f"verify(batch tokens) + a requests + c cached tokens, least squares over {len(decoding)} measured steps: "
        f"relative residuals {report['fit_rms']:.1%} rms, {report['fit_worst']:.1%} worst; {repeats}"
    )
    sizes, seconds = fitted.sizes, [max(value, 1e-9) for value in fitted.verify_s]
    draft = {}
    if drafter is not None:
        counts = sorted({point.requests for point in decoding})
        drafts = [
            float(np.median([s for point, found in decoding.items() if point.requests == count for s in found.draft_s]))
            for count in counts
        ]
        each = drafter.trained_length if drafter.chained else 1
        draft[options.drafter_name or drafter.kind] = DraftCost(
            per="token" if drafter.chained else "round",
            curve=TableCurve(
                segments=(
                    Segment(between="linear", sizes=tuple(counts), seconds=tuple(value / each for value in drafts)),
                ),
                beyond="extrapolate",
                provenance=told("measured", f"drafting and taking in, over all contexts and lengths; {repeats}"),
            ),
        )
    disturbed = None
    if report["spread"] > options.max_spread:
        disturbed = (
            f"repeats of a step differ by {report['spread']:.1%} (half the interquartile range over the median, at the "
            f"median step); {options.max_spread:.0%} is what an undisturbed machine is taken to stay within"
        )
    assert isinstance(engine.target, HfBatchTarget)
    kv_bytes = engine.target.kv.bytes_per_token + (engine.drafter.bytes_per_token if engine.drafter else 0)
    graphs = [size for size in _numbers(options.graph_sizes, "--graph-sizes", 1) if size in sizes]
    segments = []
    if graphs:
        known = dict(zip(sizes, seconds, strict=True))
        segments.append(Segment(between="round_up", sizes=tuple(graphs), seconds=tuple(known[size] for size in graphs)))
    rest = [(size, value) for size, value in zip(sizes, seconds, strict=True) if not graphs or size > graphs[-1]]
    if rest:
        segments.append(
            Segment(between="linear", sizes=tuple(s for s, _ in rest), seconds=tuple(value for _, value in rest))
        )
    return Profile(
        format="dspark-profile/1",
        name=f"{options.out.parent.name}/{options.out.stem}",
        description=f"The engine of decoder/ on {hardware}: {what} in {options.dtype}, {torch.get_num_threads()} "
        "threads. Step time only; acceptance comes from another profile.",
        disturbed=disturbed,
        step_time=StepTime(
            verify=TableCurve(segments=tuple(segments), beyond="extrapolate", provenance=told("fitted", parts)),
            prefill=LinearPrefill(
                floor_s=report["prefill_floor_s"],
                per_token_s=max(report["prefill_token_s"], 1e-12),
                provenance=told(
                    "fitted",
                    f"a prompt of {options.prompts} tokens alone and beside decoding: relative residual "
                    f"{report['prefill_worst']:.1%} at worst; {repeats}",
                ),
            ),
            per_request=SourcedSeconds(seconds=fitted.per_request_s, provenance=told("fitted", parts)),
            per_context_token=SourcedSeconds(seconds=fitted.per_context_token_s, provenance=told("fitted", parts)),
            overhead=SourcedSeconds(
                seconds=report["gap_s"],
                provenance=told(
                    "measured",
                    f"from a step's end to the next one's start while requests are served, median of {LOOP_STEPS} "
                    "steps: writing it down, finding who ended and who arrived; taking an arrival in is not in it",
                ),
            ),
            draft=draft,
        ),
        replica=Replica(
            gpus=SourcedCount(value=1, provenance=told("measured", "one device")),
            kv_bytes_per_token=SourcedCount(value=kv_bytes, provenance=told("derived", "target and drafter, by shape")),
            max_context_tokens=SourcedCount(value=target.max_context_tokens, provenance=told("derived", "its config")),
        ),
    )


def hardware_of(device: Any) -> str:
    """Return a device's name, with its cores where it is a CPU."""
    import os

    import torch

    if device.type == "cuda":
        return f"1 x {torch.cuda.get_device_name(device)}"
    model = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{model}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def versions() -> str:
    """Return the versions that a step's time depends on."""
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in ("dspark-sim", "torch", "transformers"))


def _roofline(target: HfTarget, decoding: dict[Point, Samples]) -> dict[str, Any]:
    """Return what the device could do at best, and each step's share of it.

    A step reads every weight once and every cached key and value, and multiplies each row with each weight: its floor
    is the larger of bytes over copy bandwidth and operations over matrix rate, both measured here.
    """
    import torch

    clock = device_clock(target.device)
    config = target.model.config
    size = 8192 if target.device.type == "cuda" else 1024
    weights = [tensor for name, tensor in target.model.named_parameters() if "embed_tokens" not in name]
    count = sum(tensor.numel() for tensor in weights)
    if config.tie_word_embeddings:
        count += config.vocab_size * config.hidden_size
    width = target.dtype.itemsize
    source = torch.zeros(256 * 2**20 // 4, device=target.device)
    sink = torch.empty_like(source)
    square = torch.zeros(size, size, dtype=target.dtype, device=target.device)

    def best(work: Callable[[], Any]) -> float:
        spans = []
        for _ in range(5):
            began_s = clock()
            work()
            spans.append(clock() - began_s)
        return min(spans)

    bytes_per_s = 2 * source.nbytes / best(lambda: sink.copy_(source))
    flops_per_s = 2 * size**3 / best(lambda: square @ square)
    kv_bytes = 2 * target.num_layers * config.num_key_value_heads * config.head_dim * width
    rows = []
    for point, found in sorted(decoding.items()):
        memory_s = (count * width + point.requests * point.context * kv_bytes) / bytes_per_s
        compute_s = 2 * count * point.batch_tokens / flops_per_s
        rows.append(
            {
                "batch_tokens": point.batch_tokens,
                "requests": point.requests,
                "context_tokens": point.context,
                "memory_floor_s": memory_s,
                "compute_floor_s": compute_s,
                "share_of_floor": max(memory_s, compute_s) / float(np.median(found.target_s)),
            }
        )
    return {"copy_bytes_per_s": bytes_per_s, "matrix_flops_per_s": flops_per_s, "steps": rows}


def _table(report: dict[str, Any]) -> list[str]:
    head = f"{'requests':>8s} {'verified':>8s} {'cached':>7s} {'prompt':>7s} {'target ms':>10s} {'spread':>7s} "
    lines = [f"{head}{'draft ms':>9s} {'spread':>7s} {'fitted':>7s}"]
    for row in report["points"]:
        draft = "" if row["draft_spread"] is None else f"{row['draft_spread']:.1%}"
        lines.append(
            f"{row['requests']:8d} {row['verify_length']:8d} {row['context_tokens']:7d} {row['prompt_tokens']:7d} "
            f"{1e3 * row['target_s']:10.3f} {row['target_spread']:7.1%} {1e3 * row['draft_s']:9.3f} {draft:>7s} "
            f"{row['fitted_over_measured'] - 1:+7.1%}"
        )
    lines += [
        "",
        f"a request {1e3 * report['per_request_s']:.4f} ms, "
        f"a cached token {1e6 * report['per_context_token_s']:.4f} us, "
        f"a prompt token {1e3 * report['prefill_token_s']:.4f} ms after {1e3 * report['prefill_floor_s']:.3f} ms, "
        f"between steps {1e3 * report['gap_s']:.4f} ms",
        f"parts against measured steps: {report['fit_rms']:.1%} rms, {report['fit_worst']:.1%} worst; "
        f"spread of repeats {report['spread']:.1%}",
    ]
    if "roofline" in report:
        roof = report["roofline"]
        lines.append(
            f"copy {roof['copy_bytes_per_s'] / 1e9:.0f} GB/s, "
            f"matrices {roof['matrix_flops_per_s'] / 1e12:.3f} TFLOP/s; "
            f"share of the floor at the smallest batch {roof['steps'][0]['share_of_floor']:.0%}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
