"""The model whose output law must not change: a Hugging Face causal LM, one request at a time."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from decoder.errors import Fault, TargetError
from decoder.layers import RmsNorm


class TargetCache(Protocol):
    """The keys and values of one request's committed tokens."""

    @property
    def tokens(self) -> int:
        """Tokens held."""
        ...

    def crop(self, tokens: int) -> None:
        """Keep the first ``tokens``."""
        ...

    def fork(self, tokens: int) -> TargetCache:
        """Return a cache of its own that holds the first ``tokens``."""
        ...


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """``logits`` ``[rows asked for, vocabulary]`` and ``features`` ``[tokens, layers asked for * hidden_size]``."""

    logits: Tensor
    features: Tensor


class Target(Protocol):
    """A target model; a table over a handful of tokens will do (the tests use one)."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context_tokens: int
    device: torch.device

    def new_cache(self) -> TargetCache:
        """Return an empty cache."""
        ...

    def forward(
        self, token_ids: Sequence[int], cache: TargetCache, feature_layers: Sequence[int] = (), logit_rows: int = 0
    ) -> TargetOutput:
        """Append tokens to ``cache``; return the last ``logit_rows`` rows of logits and every row of features.

        ``feature_layers``: layer numbers from 0; -1 is the embedding's output. The last layer's output is the one
        after the final norm, as `transformers` reports it.
        """
        ...


class HfCache:
    """A `transformers` cache of full attention layers that can be cut and forked."""

    def __init__(self, cache: DynamicCache) -> None:
        self.cache = cache

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return int(self.cache.get_seq_length())

    def crop(self, tokens: int) -> None:
        """Keep the first ``tokens``."""
        if tokens > self.tokens:
            raise ValueError(f"cannot crop {self.tokens} tokens to {tokens}")
        # Not `DynamicCache.crop`: what its argument means has changed between versions of transformers.
        for layer in self._filled():
            layer.keys, layer.values = layer.keys[..., :tokens, :], layer.values[..., :tokens, :]

    def fork(self, tokens: int) -> HfCache:
        """Return a cache of its own that holds the first ``tokens``."""
        other = DynamicCache()
        for index, layer in enumerate(self._filled()):
            other.update(layer.keys[..., :tokens, :], layer.values[..., :tokens, :], index)
        return HfCache(other)

    def _filled(self) -> list[Any]:
        layers: list[Any] = list(self.cache.layers)
        return [layer for layer in layers if layer.get_seq_length() > 0]


class HfTarget:
    """A causal LM of `transformers` with full attention in every layer (Qwen3, Llama)."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        config = model.config.get_text_config(decoder=True)
        self.vocab_size = int(config.vocab_size)
        self.hidden_size = int(config.hidden_size)
        self.num_layers = int(config.num_hidden_layers)
        self.max_context_tokens = int(config.max_position_embeddings)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        # The keyword was renamed from `past_key_values` within version 5.
        parameters = inspect.signature(model.forward).parameters
        self.cache_key = "cache" if "cache" in parameters else "past_key_values"
        for layer in self._make_cache().layers:
            if type(layer) is not DynamicLayer:
                raise TargetError(
                    Fault(
                        f"{type(model).__name__} caches with {type(layer).__name__}, which cannot be cut back after a "
                        "rejection; targets need full attention in every layer"
                    )
                )

    def _make_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    @property
    def embed_tokens(self) -> Tensor:
        """Input embedding, ``[vocabulary, hidden_size]``."""
        out: Tensor = self.model.get_input_embeddings().weight
        return out

    @property
    def lm_head(self) -> Tensor:
        """Output head, ``[vocabulary, hidden_size]``."""
        out: Tensor = self.model.get_output_embeddings().weight
        return out

    def new_cache(self) -> HfCache:
        """Return an empty cache."""
        return HfCache(self._make_cache())

    @torch.inference_mode()
    def forward(
        self, token_ids: Sequence[int], cache: TargetCache, feature_layers: Sequence[int] = (), logit_rows: int = 0
    ) -> TargetOutput:
        """Append tokens; see `Target`."""
        assert isinstance(cache, HfCache)
        output = self.model(
            input_ids=torch.tensor([list(token_ids)], device=self.device),
            use_cache=True,
            output_hidden_states=bool(feature_layers),
            # 0 would mean every row to transformers; one row is computed and dropped instead.
            logits_to_keep=max(logit_rows, 1),
            **{self.cache_key: cache.cache},
        )
        logits = output.logits[0]
        if feature_layers:
            features = torch.cat([output.hidden_states[layer + 1][0] for layer in feature_layers], -1)
        else:
            features = logits.new_empty(len(token_ids), 0)
        return TargetOutput(logits if logit_rows else logits[:0], features)


def keep_float64(model: nn.Module) -> None:
    """Replace RMS norms that round to float32 inside; without this a float64 model is exact to some 1e-7 only."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                norm: Any = child
                exact = RmsNorm(norm.weight.shape[0], norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(parent, name, exact)


def load_target(folder: Path | str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> HfTarget:
    """Load a target from a local folder; nothing is downloaded.

    Raises `TargetError` that names what is missing or cannot be used.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise TargetError(Fault("no such folder; a target is a local Hugging Face model folder", str(folder)))
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise TargetError(Fault(f"cannot read: {(fault.strerror or str(fault)).lower()}", str(path))) from None
    except ValueError as fault:
        raise TargetError(Fault(f"not JSON: {fault}", str(path))) from None
    architectures = raw.get("architectures") or ["none"] if isinstance(raw, dict) else ["none"]
    if not str(architectures[0]).endswith("ForCausalLM"):
        raise TargetError(
            Fault(f"expected a causal LM (...ForCausalLM); got {architectures[0]}", str(path), key="architectures")
        )
    if not any(folder.glob("*.safetensors")):
        raise TargetError(Fault("holds no *.safetensors", str(folder)))
    loaded: Any
    quiet = not is_progress_bar_enabled()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as fault:
        raise TargetError(Fault(f"cannot be loaded: {str(fault).splitlines()[0]}", str(folder))) from None
    finally:
        if not quiet:
            enable_progress_bar()  # type: ignore[no-untyped-call]
    model, info = loaded
    wrong = [*sorted(info["missing_keys"]), *(str(key) for key in sorted(info.get("mismatched_keys", ())))]
    if wrong:
        raise TargetError(
            *(Fault("missing, or of a shape that its config does not name", str(folder), key=key) for key in wrong)
        )
    if dtype == torch.float64:
        keep_float64(model)
    return HfTarget(model.to(device))
