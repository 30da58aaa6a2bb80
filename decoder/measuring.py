"""The grid of steps that `decoder.measure` times, what was found of it, and the profile that this makes."""

from __future__ import annotations

import argparse
import dataclasses
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profiles.errors import Fault, InputError

if TYPE_CHECKING:
    from decoder.drafter import Drafter
    from decoder.engine import Engine
    from decoder.step_times import Fit, Point, PrefillFit, Samples, Visits
    from decoder.target import HfTarget
    from profiles.schema import Profile

#: Half an interquartile range over the median, at the median point: above this a machine counts as disturbed.
DISTURBED = 0.05
#: Steps in a row of which the time between steps is taken.
LOOP_STEPS = 12
#: Lists of numbers among the options, and the least that each may hold.
LISTS = {"requests": 1, "contexts": 1, "prompts": 1, "graph_sizes": 1, "lengths": 0}


def asked(options: argparse.Namespace, name: str) -> list[int]:
    """Return a list of the options; raises `InputError` where it is none."""
    return _numbers(getattr(options, name), f"--{name.replace('_', '-')}", LISTS[name])


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


def graph_faults(sizes: Sequence[int], max_batch_tokens: int) -> list[Fault]:
    """Return a fault where a graph would be larger than any pass."""
    over = [size for size in sizes if size > max_batch_tokens]
    if not over:
        return []
    return [Fault(f"{over[0]} has no effect: no step exceeds {max_batch_tokens} tokens", key="--graph-sizes")]


class Measuring:
    """The grid of steps that the options ask for, on an engine of its own.

    Parameters
    ----------
    options : parsed by `make_parser`
    command : str
        For the provenance.
    target, drafter
        Packed already, where that is wanted (`pack_models`).

    Attributes
    ----------
    visits : Visits
        Make passes with it, as many as wanted, at any time.

    Raises
    ------
    InputError
        Where the grid asks for more than the models, or its own limits, allow.
    """

    def __init__(self, options: argparse.Namespace, command: str, target: HfTarget, drafter: Drafter | None) -> None:
        from decoder.step_times import Visits

        self._options, self._command, self._target, self._drafter = options, command, target, drafter
        self._decoding, self._prompts = _grid(options, target, drafter)
        self._engine = _engine(options, target, drafter, self._decoding, self._prompts)
        self.points = [*self._decoding, *self._prompts]
        self.visits = Visits(self._engine, self.points, options.steps, options.seed)

    def write(self) -> tuple[Profile, dict[str, Any]]:
        """Fit what was sampled so far, and write the profile; returns it, and what the table and --json show."""
        from decoder.step_times import fit, fit_prefill, levelled, loop_gaps_s
        from profiles.files import save_profile

        options = self._options
        gaps_s = loop_gaps_s(self._engine, _middle(options).requests, LOOP_STEPS)
        samples = levelled(self.visits.samples)
        decoding = {point: samples[point] for point in self._decoding}
        prefill = {point: samples[point] for point in self._prompts}
        fitted = fit(decoding)
        report = _report(self.visits, samples, fitted, fit_prefill(prefill, fitted), gaps_s)
        if options.roofline:
            report["roofline"] = _roofline(self._target, decoding)
        profile = _profile(options, self._command, self._target, self._drafter, self._engine, decoding, fitted, report)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        save_profile(profile, options.out)
        return profile, report


def _grid(options: argparse.Namespace, target: HfTarget, drafter: Drafter | None) -> tuple[list[Point], list[Point]]:
    """Return the steps that decode, and those that read a prompt, alone and beside some that decode."""
    from decoder.step_times import Point, grid

    requests, contexts, prompts = (asked(options, name) for name in ("requests", "contexts", "prompts"))
    block = drafter.trained_length if drafter else 0
    lengths = asked(options, "lengths") or sorted({0, min(1, block), block // 2, block})
    if max(lengths) > block:
        raise InputError(
            Fault(f"expected at most the drafter's block of {block} (got {max(lengths)})", key="--lengths")
        )
    longest = max(contexts) + 1 + block
    if max(longest, *prompts) > target.max_context_tokens:
        raise InputError(
            Fault(f"the target holds {target.max_context_tokens} tokens; {longest} were asked for", key="--contexts")
        )
    points = grid(
        requests,
        lengths,
        contexts,
        max_batch_tokens=options.max_batch_tokens,
        max_cached_tokens=options.kv_tokens or max(requests) * longest,
        margin=1 + block,
    )
    if not points:
        raise InputError(
            Fault("no step of the grid fits the limits of batch tokens and cached tokens", key="--requests")
        )
    middle = _middle(options)
    if middle not in points:
        points.append(middle)
    # Beside several numbers of batch tokens, or what a prompt adds for being there is not told from what its rows add.
    fewest = dataclasses.replace(middle, requests=requests[0])
    drafting = dataclasses.replace(middle, length=lengths[len(lengths) // 2])
    beside = [Point(0, 0, 0), *sorted({fewest, middle, drafting} & set(points))]
    return points, [dataclasses.replace(point, prompt=prompt) for point in beside for prompt in prompts]


def _middle(options: argparse.Namespace) -> Point:
    """Return the step in the middle of the grid."""
    from decoder.step_times import Point

    requests = asked(options, "requests")
    return Point(requests[len(requests) // 2], 0, asked(options, "contexts")[0])


def _engine(
    options: argparse.Namespace,
    target: HfTarget,
    drafter: Drafter | None,
    points: Sequence[Point],
    prompts: Sequence[Point],
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
        graph_sizes=asked(options, "graph_sizes"),
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
    visits: Visits,
    samples: dict[Point, Samples],
    fitted: Fit,
    prefill: PrefillFit,
    gaps_s: Any,
) -> dict[str, Any]:
    """Return what was found. Medians are of ``samples``, levelled; spreads are of what was visited, as it was."""
    from decoder.step_times import spread

    residuals = fitted.residuals | prefill.residuals
    raw = visits.samples
    rows = [
        {
            "requests": point.requests,
            "verify_length": point.length,
            "context_tokens": point.context,
            "prompt_tokens": point.prompt,
            "batch_tokens": point.batch_tokens,
            "samples": len(found.step_s),
            "target_s": float(np.median(found.target_s)),
            "target_spread": spread(raw[point].target_s),
            "draft_s": float(np.median(found.draft_s)),
            "draft_spread": spread(raw[point].draft_s) if np.median(found.draft_s) > 0 else None,
            "fitted_over_measured": 1 + residuals[point],
        }
        for point, found in sorted(samples.items())
    ]
    return {
        "points": rows,
        "spread": float(np.median([row["target_spread"] for row in rows])),
        "fit_rms": fitted.rms,
        "fit_worst": float(max(abs(value) for value in fitted.residuals.values())),
        "prefill_worst": float(max(abs(value) for value in prefill.residuals.values())),
        "prefill_floor_s": prefill.floor_s,
        "prefill_beside_s": prefill.beside_s,
        "prefill_draft_floor_s": prefill.draft_floor_s,
        "prefill_draft_token_s": prefill.draft_token_s,
        "prefill_draft_rms_s": prefill.draft_rms_s,
        "prefill_rows": [
            {"rows": size, "seconds": seconds} for size, seconds in zip(prefill.sizes, prefill.seconds, strict=True)
        ],
        "per_request_s": fitted.per_request_s,
        "per_context_token_s": fitted.per_context_token_s,
        "gap_s": float(np.median(gaps_s)),
        "measured_for_s": visits.took_s,
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
        RowsPrefill,
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

    least, most = (fold(row["samples"] for row in report["points"]) for fold in (min, max))
    repeats = (
        f"medians of {least if least == most else f'{least} to {most}'} steps a point, each held to the pace of its "
        f"pass; half IQR as they were {report['spread']:.1%} of a median"
    )
    parts = (
        f"verify(batch tokens) + a requests + c cached tokens, least squares over {len(decoding)} measured steps: "
        f"relative residuals {report['fit_rms']:.1%} rms, {report['fit_worst']:.1%} worst; {repeats}"
    )
    sizes, seconds = fitted.sizes, [max(value, 1e-9) for value in fitted.verify_s]
    draft = {}
    if drafter is not None:
        each = drafter.trained_length if drafter.chained else 1
        draft[options.drafter_name or drafter.kind] = DraftCost(
            per="token" if drafter.chained else "round",
            curve=TableCurve(
                segments=(
                    Segment(
                        between="linear",
                        sizes=tuple(fitted.draft_s),
                        seconds=tuple(value / each for value in fitted.draft_s.values()),
                    ),
                ),
                beyond="extrapolate",
                provenance=told("measured", f"drafting and taking in, over all contexts and lengths; {repeats}"),
            ),
            prefill=LinearPrefill(
                floor_s=report["prefill_draft_floor_s"],
                per_token_s=max(report["prefill_draft_token_s"], 1e-12),
                provenance=told(
                    "fitted",
                    f"taking in prompts of {options.prompts} tokens, least squares, "
                    f"{1e3 * report['prefill_draft_rms_s']:.2g} ms rms off; {repeats}",
                ),
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
    graphs = [size for size in asked(options, "graph_sizes") if size in sizes]
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
            prefill=RowsPrefill(
                floor_s=report["prefill_floor_s"],
                beside_s=report["prefill_beside_s"],
                sizes=tuple(row["rows"] for row in report["prefill_rows"]),
                seconds=tuple(max(row["seconds"], 1e-9) for row in report["prefill_rows"]),
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


def table_of(report: dict[str, Any]) -> list[str]:
    """Return what was measured, a line a step, and the parts it was taken apart into."""
    head = f"{'requests':>8s} {'verified':>8s} {'cached':>7s} {'prompt':>7s} {'target ms':>10s} {'spread':>7s} "
    lines = [f"{head}{'draft ms':>9s} {'spread':>7s} {'fitted':>7s}"]
    for row in report["points"]:
        draft = "" if row["draft_spread"] is None else f"{row['draft_spread']:.1%}"
        lines.append(
            f"{row['requests']:8d} {row['verify_length']:8d} {row['context_tokens']:7d} {row['prompt_tokens']:7d} "
            f"{1e3 * row['target_s']:10.3f} {row['target_spread']:7.1%} {1e3 * row['draft_s']:9.3f} {draft:>7s} "
            f"{row['fitted_over_measured'] - 1:+7.1%}"
        )
    rows = ", ".join(f"{row['rows']} {1e3 * row['seconds']:.2f} ms" for row in report["prefill_rows"])
    lines += [
        "",
        f"rows of prompts: {rows}",
        f"a request {1e3 * report['per_request_s']:.4f} ms, "
        f"a cached token {1e6 * report['per_context_token_s']:.4f} us, "
        f"a step of prompts alone from {1e3 * report['prefill_floor_s']:.3f} ms, "
        f"prompts beside decoding {1e3 * report['prefill_beside_s']:.3f} ms, "
        f"between steps {1e3 * report['gap_s']:.4f} ms",
        f"parts against measured steps: {report['fit_rms']:.1%} rms, {report['fit_worst']:.1%} worst; "
        f"spread of repeats {report['spread']:.1%}",
    ]
    if any(row["draft_s"] for row in report["points"]):
        lines.append(
            f"the drafter takes prompts in for {1e6 * report['prefill_draft_token_s']:.3f} us a token, alone from "
            f"{1e3 * report['prefill_draft_floor_s']:.3f} ms, {1e3 * report['prefill_draft_rms_s']:.3f} ms rms off"
        )
    if "roofline" in report:
        roof = report["roofline"]
        lines.append(
            f"copy {roof['copy_bytes_per_s'] / 1e9:.0f} GB/s, "
            f"matrices {roof['matrix_flops_per_s'] / 1e12:.3f} TFLOP/s; "
            f"share of the floor at the smallest batch {roof['steps'][0]['share_of_floor']:.0%}"
        )
    return lines
