"""Text with features on disk: shards that appear whole, or not at all.

A row is a token that the target read. Its features are the hidden states there, its ``next_id`` the token that follows:
what the target wrote, or what the corpus says. The last token of a text has no row.

===============  ===========  ============================  ================================================
tensor           dtype        shape                         meaning
===============  ===========  ============================  ================================================
``token_ids``    int32        ``[rows]``                    the token read
``next_ids``     int32        ``[rows]``                    the token after it
``features``     float16      ``[rows, layers * hidden]``   outputs of ``meta.layers``, side by side
``starts``       int64        ``[documents + 1]``           a document's first row
``prompts``      int32        ``[documents]``               its prompt tokens: rows from ``prompt - 1`` on are answer
===============  ===========  ============================  ================================================
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from decoder.errors import Fault, InputError

META = "meta.json"
FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What a folder of shards was made of; a second run must agree on it.

    ``layers``: target layers whose outputs are kept, from 0; the last of the model is the state after its final norm.
    ``text``: ``written`` by the target, or ``corpus``. ``prompt_tokens``: "N..M" where only prompts of so many tokens
    were taken, the last N of each; None: all, whole. ``ignore_eos``: answers go on past their end.
    ``per_domain``: prompts of each domain at most; None: all.
    """

    target: str
    target_sha256: str
    layers: tuple[int, ...]
    hidden_size: int
    text: str
    temperature: float
    max_new_tokens: int
    split: str
    seed: int
    dtype: str
    versions: dict[str, str]
    prompt_tokens: str | None = None
    ignore_eos: bool = False
    per_domain: int | None = None


_DEFAULTS = {item.name: item.default for item in fields(Meta) if item.default is not MISSING}


@dataclass(frozen=True, slots=True)
class Text:
    """One document's rows; see the module's table. ``written_tokens`` counts the answer."""

    name: str
    domain: str
    prompt_tokens: int
    token_ids: Tensor
    next_ids: Tensor
    features: Tensor

    @property
    def written_tokens(self) -> int:
        """Tokens of the answer."""
        return int(self.token_ids.shape[0]) - self.prompt_tokens + 1


def bytes_per_token(layers: int, hidden_size: int) -> int:
    """Return what a row takes on disk."""
    return 2 * layers * hidden_size + 8


def open_folder(folder: Path, meta: Meta) -> None:
    """Make a folder for shards, or check that one was begun with the same settings; raises `InputError`."""
    path = folder / META
    raw = json.loads(json.dumps(asdict(meta)))
    if path.exists():
        # A folder of before a setting was there has what was done then: its default.
        found = {**_DEFAULTS, **json.loads(path.read_text(encoding="utf-8"))}
        faults = [
            Fault(f"was begun with {found.get(key)}; asked for now: {value}", str(path), key=key)
            for key, value in raw.items()
            if key != "versions" and found.get(key) != value
        ]
        if faults:
            raise InputError(*faults)
        return
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{META}")
    part.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    part.rename(path)


def load_meta(folder: Path) -> Meta:
    """Read what a folder holds; raises `InputError`."""
    path = folder / META
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return Meta(**{**raw, "layers": tuple(raw["layers"])})
    except OSError:
        raise InputError(Fault("holds no text; `python -m decoder.collect` writes it", str(folder))) from None
    except (ValueError, TypeError, KeyError) as fault:
        raise InputError(Fault(f"cannot be read: {fault}", str(path))) from None


def shard_path(folder: Path, index: int) -> Path:
    """Return where shard ``index`` lies."""
    return folder / f"text-{index:05d}.safetensors"


def save_shard(path: Path, texts: Sequence[Text]) -> None:
    """Write a shard by rename; raises `InputError` where the disk is full."""
    lengths = [int(text.token_ids.shape[0]) for text in texts]
    tensors = {
        "token_ids": torch.cat([text.token_ids for text in texts]).to(torch.int32),
        "next_ids": torch.cat([text.next_ids for text in texts]).to(torch.int32),
        "features": torch.cat([text.features for text in texts]),
        "starts": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64),
        "prompts": torch.tensor([text.prompt_tokens for text in texts], dtype=torch.int32),
    }
    documents = json.dumps([[text.name, text.domain] for text in texts])
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(tensors, part, metadata={"documents": documents})
        part.rename(path)
    except (OSError, SafetensorError) as fault:
        part.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free
        raise InputError(Fault(f"cannot be written: {fault} ({free / 1e9:.2f} GB free)", str(path))) from None


def shard_paths(folder: Path) -> list[Path]:
    """Return the shards of a folder, in order."""
    return sorted(folder.glob("text-*.safetensors"))


def count_tokens(path: Path) -> tuple[int, int]:
    """Return a shard's rows and its answer tokens, without reading features."""
    with safe_open(path, "pt") as file:
        starts, prompts = file.get_tensor("starts"), file.get_tensor("prompts")
    rows = int(starts[-1])
    return rows, rows - int(prompts.sum()) + len(prompts)


def read_shard(path: Path, layers: Sequence[int] | None = None, meta: Meta | None = None) -> Iterator[Text]:
    """Yield a shard's documents; with ``layers``, only those layers' features (``meta`` says which there are).

    Raises `InputError` for a file that was cut off.
    """
    try:
        with safe_open(path, "pt") as file:
            documents: list[list[Any]] = json.loads(file.metadata()["documents"])
            starts = file.get_tensor("starts").tolist()
            prompts = file.get_tensor("prompts").tolist()
            token_ids, next_ids = file.get_tensor("token_ids"), file.get_tensor("next_ids")
            features = file.get_slice("features")
            columns = None
            if layers is not None and meta is not None and tuple(layers) != meta.layers:
                columns = _columns(path, layers, meta)
            for (name, domain), start, end, prompt in zip(documents, starts, starts[1:], prompts, strict=False):
                block: Tensor = features[start:end]
                if columns is not None:
                    block = torch.cat([block[:, part] for part in columns], -1)
                yield Text(name, domain, prompt, token_ids[start:end], next_ids[start:end], block)
    except (OSError, SafetensorError, KeyError) as fault:
        raise InputError(Fault(f"cannot be read: {fault}", str(path))) from None


def _columns(path: Path, layers: Sequence[int], meta: Meta) -> list[slice]:
    faults = [
        Fault(f"layer {layer} was not kept; there are {', '.join(map(str, meta.layers))}", str(path.parent / META))
        for layer in layers
        if layer not in meta.layers
    ]
    if faults:
        raise InputError(*faults)
    width = meta.hidden_size
    return [slice(at * width, (at + 1) * width) for at in (meta.layers.index(layer) for layer in layers)]


def digest(paths: Sequence[Path]) -> str:
    """Return one SHA-256 over the tokens of shards, for provenance: what was trained on, not how it was cut."""
    state = hashlib.sha256()
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in ("token_ids", "next_ids", "starts", "prompts"):
                array: NDArray[Any] = file.get_tensor(name).numpy()
                state.update(array.tobytes())
    return state.hexdigest()
