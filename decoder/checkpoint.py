"""Draft checkpoints in DeepSpec's format: ``config.json`` beside ``model.safetensors``."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from decoder.backbone import ParallelBackbone
from decoder.chain import ChainDrafter
from decoder.config import DSPARK, EAGLE3, DraftConfig, dump_config, load_config
from decoder.drafter import Drafter
from decoder.dspark import BlockDrafter
from decoder.eagle3 import Eagle3Net
from decoder.errors import CheckpointError, Fault
from decoder.mtp import MtpNet
from decoder.small_model import SmallModelDrafter
from decoder.target import HfTarget, Target, load_target
from decoder.vocabulary import MAP, map_faults, rows_of, target_ids

DraftNet = ParallelBackbone | Eagle3Net | MtpNet

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def make_net(
    config: DraftConfig, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> DraftNet:
    """Build a draft model with fresh weights; ``device='meta'`` gives names and shapes alone."""
    with torch.device(device):
        net: DraftNet
        if config.architecture == DSPARK:
            net = ParallelBackbone(config)
        elif config.architecture == EAGLE3:
            net = Eagle3Net(config)
        else:
            net = MtpNet(config)
    return net.to(dtype)


def make_drafter(net: DraftNet) -> BlockDrafter | ChainDrafter:
    """Put a draft model behind the `Drafter` seam."""
    net.eval().requires_grad_(False)
    return BlockDrafter(net) if isinstance(net, ParallelBackbone) else ChainDrafter(net)


def check_target(config: DraftConfig, target: Target, file: str) -> None:
    """Raise `CheckpointError` with every way in which a draft config does not fit a target."""
    faults = []

    def expect(key: str, found: Any, allowed: Any, what: str) -> None:
        if found != allowed:
            faults.append(Fault(f"{found}, but the target {what} {allowed}", file, key=key))

    expect("hidden_size", config.hidden_size, target.hidden_size, "has width")
    expect("vocab_size", config.vocab_size, target.vocab_size, "has a vocabulary of")
    if config.num_target_layers is not None:
        expect("num_target_layers", config.num_target_layers, target.num_layers, "has layers:")
    for layer in config.target_layer_ids:
        if layer >= target.num_layers:
            faults.append(
                Fault(
                    f"layer {layer} is asked for, but the target has layers 0 to {target.num_layers - 1}",
                    file,
                    key="target_layer_ids",
                )
            )
    if config.architecture == "Qwen3MtpModel" and len(config.target_layer_ids) != 1:
        faults.append(Fault("an MTP head reads one layer", file, key="target_layer_ids"))
    if faults:
        raise CheckpointError(*faults)


def load_net(
    folder: Path | str, target: Target, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> DraftNet:
    """Read a draft model that belongs to ``target``.

    Raises `CheckpointError` that names each tensor that is unused, missing or of another shape, and each key of the
    config that does not fit the target.
    """
    folder = Path(folder)
    config_file, weights_file = folder / CONFIG, folder / WEIGHTS
    config = load_config(config_file)
    check_target(config, target, str(config_file))
    tensors = _read_tensors(weights_file)
    net = make_net(config, device="meta", dtype=dtype)
    expected = net.state_dict()
    faults = []
    for name in sorted(expected.keys() | tensors.keys()):
        if name in config.shared_with_target:
            if name in tensors:
                faults.append(
                    Fault("in the file, though the config shares it with the target", str(weights_file), key=name)
                )
        elif name not in tensors:
            faults.append(Fault("missing", str(weights_file), key=name))
        elif name not in expected:
            faults.append(Fault("not used by this architecture", str(weights_file), key=name))
        elif tensors[name].shape != expected[name].shape:
            shapes = list(tensors[name].shape), list(expected[name].shape)
            faults.append(Fault(f"shape {shapes[0]}; expected {shapes[1]}", str(weights_file), key=name))
        elif name in MAP:
            continue
        elif not tensors[name].is_floating_point() or not bool(torch.isfinite(tensors[name]).all()):
            faults.append(Fault("holds values that are not finite numbers", str(weights_file), key=name))
    if config.draft_vocab_size is not None and not faults:
        faults += map_faults(tensors, config.vocab_size, str(weights_file))
    if faults:
        raise CheckpointError(*faults)
    token_ids = target_ids(tensors["d2t"]) if config.draft_vocab_size is not None else None
    for name in config.shared_with_target:
        if not isinstance(target, HfTarget):
            raise CheckpointError(
                Fault("the target has no tensors to share", str(config_file), key="shared_with_target")
            )
        shared = target.embed_tokens if name == "embed_tokens.weight" else rows_of(target.lm_head, token_ids)
        # The same memory, but not the target's own parameter: whether the drafter's is trained must not change that.
        tensors[name] = shared.detach()
    # Tensors take the place of meta ones: fresh weights would be drawn only to be thrown away.
    placed = {
        name: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors.items()
    }
    net.load_state_dict(placed, assign=True)
    return net


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as archive:
            return {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
    except OSError as fault:
        raise CheckpointError(Fault(f"cannot read: {(fault.strerror or str(fault)).lower()}", str(path))) from None
    except SafetensorError as fault:
        raise CheckpointError(Fault(f"not a safetensors file, or cut short: {fault}", str(path))) from None


def save_net(net: DraftNet, folder: Path | str, dtype: torch.dtype | None = None) -> None:
    """Write a draft model; the folder appears by rename, whole or not at all, and must not exist before.

    Tensors that the config shares with the target are left out. ``dtype``: of the weights in the file (default: as
    they are).
    """
    folder = Path(folder)
    if folder.exists():
        raise CheckpointError(Fault("exists already; nothing was written", str(folder)))
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        raw = dump_config(net.config)
        raw["dtype"] = str(dtype or net.lm_head.weight.dtype).removeprefix("torch.")
        (part / CONFIG).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        kept = {
            name: tensor.detach().to(device="cpu", dtype=dtype if tensor.is_floating_point() else None).contiguous()
            for name, tensor in net.state_dict().items()
            if name not in net.config.shared_with_target
        }
        save_file(kept, part / WEIGHTS, metadata={"format": "pt"})
        part.chmod(0o755)
        part.replace(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def load_drafter(
    folder: Path | str, target: Target, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Drafter:
    """Load whatever drafter a folder holds: a draft checkpoint, or a language model for two-model speculation."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(Fault("no such folder; a draft checkpoint is a local folder", str(folder)))
    if _is_language_model(folder / CONFIG):
        small = SmallModelDrafter(load_target(folder, device=device, dtype=dtype))
        small.check_target(target)
        return small
    return make_drafter(load_net(folder, target, device=device, dtype=dtype))


def _is_language_model(path: Path) -> bool:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return str(raw["architectures"][0]).endswith("ForCausalLM")
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        # Not ours to judge here: `load_config` says what is wrong with the file.
        return False


def tensor_shapes(net: nn.Module) -> dict[str, list[int]]:
    """Return name and shape of every tensor that a checkpoint of ``net`` holds."""
    return {name: list(tensor.shape) for name, tensor in net.state_dict().items()}
