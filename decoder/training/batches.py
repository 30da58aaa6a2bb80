"""Steps' worth of text: documents of the lab, drawn in an order that belongs to a seed, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from decoder.errors import Fault, InputError
from decoder.lab.store import META, Meta, digest, load_meta, shard_paths

#: Rows of full-vocabulary logits at once, while log-normalisers are computed.
_CHUNK_ROWS = 256
#: Documents are sorted by length within this many batches, so that little is padding.
_POOL_BATCHES = 16


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents side by side, padded on the right.

    ==============  ============================================  ==================================================
    tensor          shape, dtype                                  meaning
    ==============  ============================================  ==================================================
    ``token_ids``   ``[documents, rows]``, int64                  the token that the target read
    ``next_ids``    ``[documents, rows]``, int64                  the token after it
    ``features``    ``[documents, rows, layers * hidden]``,       outputs of the layers asked for
                    float32
    ``final``       ``[documents, rows, hidden]``, float32        state after the final norm: the target's logits of
                                                                  the token after it are ``lm_head(final)``
    ``log_norms``   ``[documents, rows]``, float32                log of the sum of ``exp`` over all those logits;
                                                                  NaN outside the answer
    ``answer``      ``[documents, rows]``, bool                   whether ``next_ids`` is part of the answer
    ``rows``        ``[documents]``, int64                        rows that are no padding
    ``prompts``     ``[documents]``, int64                        tokens of the prompt: the answer's first token, the
                                                                  first that can be an anchor, is read in this row
    ==============  ============================================  ==================================================
    """

    token_ids: Tensor
    next_ids: Tensor
    features: Tensor
    final: Tensor
    log_norms: Tensor
    answer: Tensor
    rows: Tensor
    prompts: Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the batch on another device."""
        names = self.__dataclass_fields__
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


@dataclass(frozen=True, slots=True)
class _Document:
    shard: int
    start: int
    end: int
    prompt_tokens: int

    @property
    def answer_tokens(self) -> int:
        return self.end - self.start - self.prompt_tokens + 1


class TrainingText:
    """Folders of shards, opened for training with one target.

    Parameters
    ----------
    folders : sequence of path
        As `decoder.collect` writes them.
    target_sha256 : str
        Of the target's weights: text of another target is refused.
    lm_head : tensor [vocabulary, hidden_size]
        The target's; log-normalisers that are not on disk yet are computed with it, once, and kept beside the shards.
    shards : sequence of str, optional
        Names of the shards to read, as `shards` has them, so that a run goes on with the text that it began with;
        default: all.

    Raises `InputError` for a folder without text, text of another target, or a shard that is cut off.
    """

    def __init__(
        self, folders: Sequence[Path], target_sha256: str, lm_head: Tensor, shards: Sequence[str] | None = None
    ) -> None:
        self.metas: list[Meta] = []
        self.paths: list[Path] = []
        self._meta_of: list[Meta] = []
        for folder in folders:
            meta = load_meta(folder)
            if meta.target_sha256 != target_sha256:
                raise InputError(
                    Fault(
                        f"holds text of another target ({meta.target}, weights {meta.target_sha256[:12]}; "
                        f"this one's are {target_sha256[:12]})",
                        str(folder / META),
                        key="target_sha256",
                    )
                )
            found = [path for path in shard_paths(folder) if shards is None or _shard_name(path) in shards]
            if not found:
                raise InputError(Fault("holds no text yet; `python -m decoder.collect` writes it", str(folder)))
            self.metas.append(meta)
            self.paths += found
            self._meta_of += [meta] * len(found)
        gone = sorted(set(shards or ()) - set(self.shards))
        if gone:
            raise InputError(Fault("this run began with it; it is gone", gone[0]))
        self._lm_head = lm_head
        self._documents: list[_Document] = []
        self._files: list[Any] = []
        self._tokens: list[tuple[Tensor, Tensor]] = []
        self._log_norms: list[Tensor] = []
        self.counts = torch.zeros(lm_head.shape[0], dtype=torch.int64)
        """How often each token stands in an answer, ``[vocabulary]``."""
        self.mass = torch.zeros(lm_head.shape[0], dtype=torch.float64)
        """How often the target would write each token: its probability summed over answer rows, ``[vocabulary]``."""
        for index, path in enumerate(self.paths):
            self._open(index, path)
        norms = [norms_path(path) for path in self.paths]
        missing = sum(not path.exists() for path in norms)
        with tqdm(total=missing, desc="log-normalisers", unit="shard", disable=None if missing else True) as bar:
            for index in range(len(self.paths)):
                self._log_norms.append(self._load_norms(index, bar))

    def _open(self, index: int, path: Path) -> None:
        try:
            file: Any = safe_open(path, "pt")
            token_ids, next_ids = file.get_tensor("token_ids"), file.get_tensor("next_ids")
            starts, prompts = file.get_tensor("starts").tolist(), file.get_tensor("prompts").tolist()
        except (OSError, SafetensorError) as fault:
            raise InputError(Fault(f"cannot be read: {fault}", str(path))) from None
        self._files.append(file)
        self._tokens.append((token_ids, next_ids))
        for start, end, prompt in zip(starts, starts[1:], prompts, strict=False):
            document = _Document(index, start, end, prompt)
            self._documents.append(document)
            self.counts += torch.bincount(next_ids[start + prompt - 1 : end], minlength=len(self.counts))

    def _load_norms(self, index: int, bar: Any) -> Tensor:
        path = norms_path(self.paths[index])
        rows = len(self._tokens[index][0])
        if not path.exists():
            save_norms(path, *self._compute_norms(index))
            bar.update()
        try:
            with safe_open(path, "pt") as file:
                norms: Tensor = file.get_tensor("log_norms")
                self.mass += file.get_tensor("mass")
        except (OSError, SafetensorError) as fault:
            raise InputError(Fault(f"cannot be read: {fault}", str(path))) from None
        if len(norms) != rows:
            raise InputError(Fault(f"holds {len(norms)} rows; its shard has {rows}", str(path), key="log_norms"))
        return norms

    @torch.no_grad()
    def _compute_norms(self, index: int) -> tuple[Tensor, Tensor]:
        final = self._columns(index, (self._last_layer(index),))[0]
        norms = torch.full((len(self._tokens[index][0]),), float("nan"))
        mass = torch.zeros_like(self.mass)
        features = self._files[index].get_slice("features")
        for document in self._documents:
            if document.shard != index:
                continue
            for start in range(document.start + document.prompt_tokens - 1, document.end, _CHUNK_ROWS):
                end = min(start + _CHUNK_ROWS, document.end)
                states = features[start:end, final].to(self._lm_head)
                logits = (states @ self._lm_head.T).float()
                top = logits.amax(-1)
                weights = logits.sub_(top[:, None]).exp_()
                total = weights.sum(-1)
                norms[start:end] = (top + total.log()).cpu()
                mass += ((1 / total) @ weights).cpu()
        return norms, mass

    def _last_layer(self, index: int) -> int:
        return self._meta_of[index].layers[-1]

    def _columns(self, index: int, layers: Sequence[int]) -> list[slice]:
        meta, width = self._meta_of[index], self._meta_of[index].hidden_size
        return [slice(at * width, (at + 1) * width) for at in (meta.layers.index(layer) for layer in layers)]

    def check_layers(self, layers: Sequence[int]) -> None:
        """Raise `InputError` unless every shard keeps the outputs of ``layers``."""
        faults = [
            Fault(
                f"layer {layer} was not kept; there are {', '.join(map(str, meta.layers))}",
                meta.text,
                key="--feature-layers",
            )
            for meta in self.metas
            for layer in layers
            if layer not in meta.layers
        ]
        if faults:
            raise InputError(*faults)

    def __len__(self) -> int:
        """Return how many documents there are."""
        return len(self._documents)

    @property
    def shards(self) -> list[str]:
        """Names of the shards, each with its folder's."""
        return [_shard_name(path) for path in self.paths]

    @property
    def usable(self) -> list[int]:
        """Numbers of the documents that hold an anchor: a token of the answer with another after it."""
        return [number for number, document in enumerate(self._documents) if document.answer_tokens > 1]

    @property
    def answer_tokens(self) -> int:
        """Tokens of all answers."""
        return int(self.counts.sum())

    @property
    def digest(self) -> str:
        """SHA-256 over the tokens of all shards."""
        return digest(self.paths)

    def frequent_tokens(self, size: int) -> Tensor:
        """Return the ``size`` tokens that the target would write most often, ascending; of equals, the lowest.

        Not those that it wrote most often: probabilities know of far more tokens than a sample of them holds.
        """
        order = torch.sort(self.mass, descending=True, stable=True).indices
        return order[:size].sort().values

    def feature_scale(self, layers: Sequence[int], rows: int = 4096) -> Tensor:
        """Return the root mean square of each feature over the first ``rows`` answer rows, ``[layers * hidden_size]``.

        Layers differ in size by factors of ten, and so do dimensions of one layer; a first token, where models keep
        values a hundred times as large, stands in no answer. Raises `InputError` for a layer that was not kept.
        """
        self.check_layers(layers)
        parts: list[Tensor] = []
        for document in self._documents:
            if sum(map(len, parts)) >= rows:
                break
            columns = self._columns(document.shard, layers)
            kept = self._files[document.shard].get_slice("features")[
                document.start + document.prompt_tokens : document.end
            ]
            parts.append(torch.cat([kept[:, part] for part in columns], -1).float())
        return torch.cat(parts).square().mean(0).sqrt().clamp_min(1e-6)

    def rarest_token(self) -> int:
        """Return the token that answers hold least often, the lowest of equals: what masks a draft position."""
        return int(torch.sort(self.counts, stable=True).indices[0])

    def batch(self, documents: Sequence[int], layers: Sequence[int]) -> Batch:
        """Return documents by number, with the outputs of ``layers`` as features."""
        chosen = [self._documents[index] for index in documents]
        longest = max(document.end - document.start for document in chosen)
        many, width = len(chosen), self.metas[0].hidden_size
        token_ids = torch.zeros(many, longest, dtype=torch.int64)
        next_ids = torch.zeros(many, longest, dtype=torch.int64)
        features = torch.zeros(many, longest, len(layers) * width)
        final = torch.zeros(many, longest, width)
        log_norms = torch.full((many, longest), float("nan"))
        answer = torch.zeros(many, longest, dtype=torch.bool)
        for at, document in enumerate(chosen):
            rows, here = document.end - document.start, slice(document.start, document.end)
            token_ids[at, :rows] = self._tokens[document.shard][0][here]
            next_ids[at, :rows] = self._tokens[document.shard][1][here]
            log_norms[at, :rows] = self._log_norms[document.shard][here]
            answer[at, document.prompt_tokens - 1 : rows] = True
            kept = self._files[document.shard].get_slice("features")[here]
            for part, columns in enumerate(self._columns(document.shard, layers)):
                features[at, :rows, part * width : (part + 1) * width] = kept[:, columns]
            final[at, :rows] = kept[:, self._columns(document.shard, (self._last_layer(document.shard),))[0]]
        return Batch(
            token_ids,
            next_ids,
            features,
            final,
            log_norms,
            answer,
            torch.tensor([document.end - document.start for document in chosen]),
            torch.tensor([document.prompt_tokens for document in chosen]),
        )

    def plan(self, documents: int, seed: int) -> Iterator[list[int]]:
        """Return which documents each step reads, for ever: every document once a pass, in a new order each pass.

        A last batch that is not full is left out. Raises `InputError` where there are too few documents for one.
        """
        lengths = np.array([document.end - document.start for document in self._documents])
        usable = np.array(self.usable, dtype=np.int64)
        if len(usable) < documents:
            raise InputError(
                Fault(f"too little text: {len(usable)} documents for {documents} a step", str(self.paths[0].parent))
            )
        return _passes(usable, lengths, documents, seed)


def _passes(usable: NDArray[np.int64], lengths: NDArray[np.int64], documents: int, seed: int) -> Iterator[list[int]]:
    pool = documents * _POOL_BATCHES
    for done in count():
        rng = np.random.default_rng((seed, 1, done))
        order = rng.permutation(usable)[: len(usable) // documents * documents]
        for start in range(0, len(order), pool):
            part = order[start : start + pool]
            part = part[np.argsort(lengths[part], kind="stable")]
            for at in rng.permutation(len(part) // documents):
                yield [int(document) for document in part[at * documents : (at + 1) * documents]]


def _shard_name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def norms_path(shard: Path) -> Path:
    """Return where the log-normalisers of a shard lie."""
    return shard.with_name(shard.name.replace("text-", "logz-"))


def save_norms(path: Path, norms: Tensor, mass: Tensor) -> None:
    """Write a shard's log-normalisers ``[rows]``, and the target's probabilities summed over its answer rows.

    By rename; raises `InputError` where the disk is full.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        save_file({"log_norms": norms, "mass": mass}, part)
        part.rename(path)
    except (OSError, SafetensorError) as fault:
        part.unlink(missing_ok=True)
        raise InputError(Fault(f"cannot be written: {fault}", str(path))) from None
