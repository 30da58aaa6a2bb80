"""Steps of AdamW or Muon, with a state on disk from which a run goes on as if it had never stopped.

A step is a function of the state before it, the seed and its number: which documents it reads and which anchors it
draws do not depend on what came before. So a run that was killed ends with the same bytes as one that was not, as long
as its budget is counted in steps or tokens; a budget in minutes decides the learning rate by the clock.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from decoder.errors import Fault, InputError
from decoder.training.batches import Batch, TrainingText
from decoder.training.muon import Muon
from decoder.training.objective import Objective

STATE = "training.state"  # safetensors; not by that name, which is that of weights
METRICS = "metrics.jsonl"
#: A step of Muon, as a multiple of AdamW's at the same learning rate: of 1 and 3, tried on smollm2 for 300 steps, 3 was
#: better (0.365 and 0.375 of first draft tokens accepted; AdamW 0.342).
MUON_STEP = 3.0
#: Matrices with one side longer than so many of the other are tables over a vocabulary, or a head of one output.
_LONGEST_SIDE = 16
_OF_THE_LOOP = ("step", "tokens", "elapsed_s", "learning_rate", "gradient_norm", "positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How a drafter is trained; exactly one of the budgets ``steps``, ``tokens`` (of answers, with repetition) and
    ``minutes`` (of this machine) is given.

    ``documents`` a step; ``learning_rate`` at its highest, after ``warmup_steps`` in a line and before it falls as a
    half cosine to a twentieth; ``clip``: largest norm of the gradient. Weight decay applies to matrices. ``optimizer``:
    AdamW, or Muon for the matrices between hidden states and AdamW for the rest.
    """

    seed: int = 0
    documents: int = 8
    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    optimizer: Literal["adamw", "muon"] = "adamw"


@dataclass(slots=True)
class Progress:
    """How far a run is: steps done, answer tokens read, seconds spent on steps."""

    steps: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0

    def share(self, settings: LoopSettings) -> float:
        """Return the part of the budget that is used, from 0."""
        if settings.steps is not None:
            return self.steps / settings.steps
        if settings.tokens is not None:
            return self.tokens / settings.tokens
        assert settings.minutes is not None
        return self.elapsed_s / (60 * settings.minutes)


def learning_rate(settings: LoopSettings, progress: Progress) -> float:
    """Return the rate of the next step."""
    warm = min(1.0, (progress.steps + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress.share(settings), 1.0)))
    return settings.learning_rate * warm * (0.05 + 0.95 * cosine)


def mixed_precision(device: torch.device) -> torch.dtype | None:
    """Return bfloat16 where the device multiplies it in hardware, else None: emulated, it is slower than float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else None
    has = (torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_bf16_supported())
    return torch.bfloat16 if any(has) else None


def make_optimizers(parameters: Iterable[nn.Parameter], settings: LoopSettings) -> tuple[torch.optim.Optimizer, ...]:
    """Return what takes the steps; each group's rate is ``times`` that of `learning_rate`."""

    def hidden(value: nn.Parameter) -> bool:
        return value.ndim == 2 and max(value.shape) <= _LONGEST_SIDE * min(value.shape)

    values = list(parameters)
    muon = [value for value in values if hidden(value)] if settings.optimizer == "muon" else []
    rest = [value for value in values if not (muon and hidden(value))]
    groups = [
        {"params": [value for value in rest if value.ndim > 1], "weight_decay": settings.weight_decay, "times": 1.0},
        {"params": [value for value in rest if value.ndim <= 1], "weight_decay": 0.0, "times": 1.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    if not muon:
        return (adamw,)
    group = {"params": muon, "weight_decay": settings.weight_decay, "times": MUON_STEP}
    return adamw, Muon([group], dtype=mixed_precision(muon[0].device) or torch.float32)


def train(
    objective: Objective,
    text: TrainingText,
    settings: LoopSettings,
    folder: Path,
    *,
    device: torch.device,
    save_every_s: float = 120.0,
    facts: dict[str, Any] | None = None,
    stop_after: int | None = None,
) -> Progress:
    """Train until the budget is used up, or Ctrl-C; return how far it came.

    Parameters
    ----------
    objective, text, settings
    folder : path
        Holds ``training.state`` and ``metrics.jsonl``; a run that was begun there goes on.
    device : torch.device
    save_every_s : float
        Seconds between states on disk.
    facts : dict, optional
        What the state must agree on besides the settings (the drafter's shape, the text's digest).
    stop_after : int, optional
        Stop after this many steps of this call, with the state saved.

    Raises `InputError` where the folder's state is of another run, where the loss is no longer finite, or where the
    disk is full.
    """
    parameters = objective.parameters()
    optimizers = make_optimizers(parameters.values(), settings)
    identity = {"kind": objective.kind, "settings": asdict(settings), "facts": facts or {}}
    plan = text.plan(settings.documents, settings.seed)
    folder.mkdir(parents=True, exist_ok=True)
    progress = _load_state(folder / STATE, parameters, optimizers, identity)
    _cut_metrics(folder / METRICS, progress.steps)
    documents = islice(plan, progress.steps, None)
    saved_at, began = time.monotonic(), progress.steps
    try:
        with _Interrupt() as interrupt, (folder / METRICS).open("a", encoding="utf-8") as log, _bar(settings) as bar:
            bar.update(min(progress.share(settings), 1.0) * bar.total)
            while progress.share(settings) < 1 and not interrupt.seen:
                if stop_after is not None and progress.steps - began >= stop_after:
                    break
                before = progress.share(settings)
                batch = text.batch(next(documents), objective.feature_layers)
                line = _step(objective, batch, parameters, optimizers, settings, progress, device)
                log.write(json.dumps(line) + "\n")
                bar.update((min(progress.share(settings), 1.0) - before) * bar.total)
                bar.set_postfix({key: f"{line[key]:.3f}" for key in ("loss", "accepted_length") if key in line})
                if time.monotonic() - saved_at >= save_every_s:
                    log.flush()
                    _save_state(folder / STATE, parameters, optimizers, identity, progress)
                    saved_at = time.monotonic()
    except OSError as fault:
        raise InputError(Fault(f"cannot be written: {fault.strerror or fault}", str(folder / METRICS))) from None
    _save_state(folder / STATE, parameters, optimizers, identity, progress)
    return progress


def _step(
    objective: Objective,
    batch: Batch,
    parameters: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    settings: LoopSettings,
    progress: Progress,
    device: torch.device,
) -> dict[str, float]:
    """Take one step, count it in ``progress``, and return its line of the log."""
    started = time.perf_counter()
    rate = learning_rate(settings, progress)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["times"]
    half = mixed_precision(device)
    with torch.autocast(device.type, half) if half else nullcontext():
        loss, metrics = objective.loss(batch.to(device), np.random.default_rng((settings.seed, 0, progress.steps)))
    loss.backward()  # type: ignore[no-untyped-call]
    norm = float(nn.utils.clip_grad_norm_(parameters.values(), settings.clip))
    if not math.isfinite(norm):
        raise InputError(Fault(f"the loss is not finite any more, at step {progress.steps}", key="--learning-rate"))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    progress.steps += 1
    progress.tokens += int(batch.answer.sum())
    progress.elapsed_s += time.perf_counter() - started
    return {
        "step": progress.steps,
        "tokens": progress.tokens,
        "elapsed_s": round(progress.elapsed_s, 3),
        "learning_rate": rate,
        "gradient_norm": norm,
        **metrics,
    }


@torch.no_grad()
def judge_text(
    objective: Objective, text: TrainingText, documents: int, seed: int, device: torch.device
) -> dict[str, float]:
    """Return an objective's numbers on other text, each document read once, ``documents`` at a time."""
    found = []
    for start in range(0, len(text.usable), documents):
        batch = text.batch(text.usable[start : start + documents], objective.feature_layers).to(device)
        found.append(objective.loss(batch, np.random.default_rng((seed, 3, start)))[1])
    return mean_metrics(found)


def _bar(settings: LoopSettings) -> Any:
    total, unit = (
        (settings.steps, "step")
        if settings.steps is not None
        else (settings.tokens, "token")
        if settings.tokens is not None
        else (60 * (settings.minutes or 0), "s")
    )
    form = "{l_bar}{bar}| {n:.0f}/{total:.0f} {unit} [{elapsed}<{remaining}{postfix}]"
    return tqdm(total=total, unit=unit, desc="train", disable=None, bar_format=form)


class _Interrupt:
    """Turns Ctrl-C into a flag, so that no step is cut in half; a second one ends the program."""

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = None

    def __enter__(self) -> _Interrupt:
        try:
            self._before = signal.signal(signal.SIGINT, self._note)
        except ValueError:  # not the main thread: nobody interrupts here
            self._before = None
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.signal(signal.SIGINT, self._before)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


#: What AdamW and Muon keep of each parameter.
_MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


def _save_state(
    path: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    identity: dict[str, Any],
    progress: Progress,
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, value in parameters.items():
        tensors[f"parameter.{name}"] = value.detach().cpu().contiguous()
        for optimizer in optimizers:
            for moment, kept in optimizer.state.get(value, {}).items():
                tensors[f"{moment}.{name}"] = kept.cpu().contiguous()
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(tensors, part, metadata={"identity": json.dumps(identity), "progress": json.dumps(asdict(progress))})
        part.replace(path)
    except (OSError, SafetensorError) as fault:
        part.unlink(missing_ok=True)
        raise InputError(Fault(f"cannot be written: {fault}", str(path))) from None


def _load_state(
    path: Path, parameters: Any, optimizers: Sequence[torch.optim.Optimizer], identity: dict[str, Any]
) -> Progress:
    if not path.exists():
        return Progress()
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as fault:
        raise InputError(Fault(f"cannot be read: {fault}", str(path))) from None
    found = json.loads(metadata["identity"])
    faults = list(_differences(found, json.loads(json.dumps(identity)), str(path)))
    if faults:
        raise InputError(*faults)
    progress = Progress(**json.loads(metadata["progress"]))
    owners = {value: one for one in optimizers for group in one.param_groups for value in group["params"]}
    for name, value in parameters.items():
        with torch.no_grad():
            value.copy_(tensors[f"parameter.{name}"])
        kept = {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS if f"{moment}.{name}" in tensors}
        if kept:
            owners[value].state[value] = {moment: tensor.to(value.device) for moment, tensor in kept.items()}
    return progress


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Return the facts of the run that was begun in a folder; None where there is none. Raises `InputError`."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            identity: dict[str, Any] = json.loads(file.metadata()["identity"])
    except (OSError, SafetensorError, KeyError, ValueError) as fault:
        raise InputError(Fault(f"cannot be read: {fault}", str(path))) from None
    facts: dict[str, Any] = identity["facts"]
    return facts


def _differences(found: Any, wanted: Any, file: str, key: str = "") -> Iterator[Fault]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for part in sorted(found.keys() | wanted.keys()):
            yield from _differences(found.get(part), wanted.get(part), file, f"{key}.{part}".lstrip("."))
    elif found != wanted:
        yield Fault(
            f"this run was begun with {found}; asked for now: {wanted} (another --out begins anew)", file, key=key
        )


def _cut_metrics(path: Path, steps: int) -> None:
    """Drop what was logged after the state was saved."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.startswith("{") and line.endswith("}") and json.loads(line)["step"] <= steps]
    part = path.with_name(f".{path.name}.part")
    part.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    part.replace(path)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return what was logged, a step a line."""
    return [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]


def mean_metrics(lines: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return what an objective reports, over several steps: means weighted by positions, and how many those were."""
    known = [name for name in lines[0] if name not in _OF_THE_LOOP]
    means = {}
    for name in known:
        # A block at the end of a text may judge no last position.
        given = [line for line in lines if name in line]
        weights = [line["positions"] for line in given]
        means[name] = float(np.average([line[name] for line in given], weights=weights))
    return {**means, "positions": float(sum(line["positions"] for line in lines))}
