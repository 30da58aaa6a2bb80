"""What a draft checkpoint's ``config.json`` says, in DeepSpec's keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from decoder.errors import CheckpointError, Fault

DSPARK: Final = "Qwen3DSparkModel"
EAGLE3: Final = "Qwen3Eagle3Model"
MTP: Final = "Qwen3MtpModel"

#: Tensors that a checkpoint may leave to its target, where its config says so.
SHAREABLE = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Dimensions of a draft model; the names are those of DeepSpec's ``config.json``.

    ``block_size`` and ``mask_token_id`` belong to parallel drafters (DFlash, DSpark), ``ttt_length`` (the steps that
    training unrolled) to chained ones (EAGLE-3, MTP). ``target_layer_ids``: layer outputs of the target that the
    drafter reads; -1 is the embedding's. ``draft_vocab_size``: tokens that it can draft, None: all (see
    `decoder.vocabulary`). ``shared_with_target``: our extension; these tensors are not in the file and
    come from the target.
    """

    architecture: Literal["Qwen3DSparkModel", "Qwen3Eagle3Model", "Qwen3MtpModel"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    attention_bias: bool = False
    max_position_embeddings: int = 32768
    block_size: int = 0
    mask_token_id: int | None = None
    markov_rank: int = 0
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    ttt_length: int = 1
    draft_vocab_size: int | None = None
    shared_with_target: tuple[str, ...] = ()
    #: Keys we do not use, kept so that a checkpoint is written back as it was read.
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Return the drafter's short name: dspark, dflash, eagle3 or mtp."""
        if self.architecture == DSPARK:
            return "dspark" if self.markov_rank > 0 else "dflash"
        return {EAGLE3: "eagle3", MTP: "mtp"}[self.architecture]

    @property
    def draft_vocabulary(self) -> int:
        """Tokens that the draft head scores."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def trained_length(self) -> int:
        """Draft tokens a round that the drafter was trained for."""
        return self.block_size if self.architecture == DSPARK else self.ttt_length


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "target_layer_ids",
)
_PLAIN = tuple(
    name
    for name in DraftConfig.__dataclass_fields__
    if name not in ("architecture", "rope_theta", "target_layer_ids", "shared_with_target", "extra")
)


def load_config(path: Path) -> DraftConfig:
    """Read a draft model's ``config.json``; raises `CheckpointError` that names file and key."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise CheckpointError(Fault(f"cannot read: {(fault.strerror or str(fault)).lower()}", str(path))) from None
    except ValueError as fault:
        raise CheckpointError(Fault(f"not JSON: {fault}", str(path))) from None
    if not isinstance(raw, dict):
        raise CheckpointError(Fault("expected a JSON object", str(path)))
    return parse_config(raw, str(path))


def parse_config(raw: Mapping[str, Any], file: str | None = None) -> DraftConfig:
    """Check the keys of a draft config; raises `CheckpointError` with every fault."""
    faults: list[Fault] = []

    def fault(key: str, message: str) -> None:
        faults.append(Fault(message, file, key=key))

    known = (DSPARK, EAGLE3, MTP)
    architectures = raw.get("architectures") or [None]
    if architectures[0] not in known:
        fault("architectures", f"unknown draft architecture '{architectures[0]}'; known: {', '.join(known)}")
        raise CheckpointError(*faults)
    architecture = architectures[0]
    needed = (*_REQUIRED, *(("block_size", "mask_token_id") if architecture == DSPARK else ("ttt_length",)))
    for key in needed:
        if raw.get(key) is None:
            fault(key, "missing")
    for key, value in raw.items():
        if key in (*_PLAIN, "target_layer_ids") and value is not None:
            _check_value(key, value, fault)
    rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta", 1e4)}
    rope_type = rope.get("rope_type", "default")
    if rope_type != "default" or raw.get("rope_scaling"):
        fault("rope_parameters", f"only rope_type 'default' is supported (got '{rope_type}')")
    if raw.get("use_sliding_window"):
        fault("use_sliding_window", "sliding windows are not supported: a drafter sees its whole context")
    if raw.get("hidden_act", "silu") != "silu":
        fault("hidden_act", f"expected 'silu'; got '{raw['hidden_act']}'")
    reduced, vocabulary = raw.get("draft_vocab_size"), raw.get("vocab_size")
    if type(reduced) is int and type(vocabulary) is int and reduced > vocabulary:
        fault("draft_vocab_size", f"{reduced} is more than the vocabulary of {vocabulary} tokens")
    shared = tuple(raw.get("shared_with_target", ()))
    for name in shared:
        if name not in SHAREABLE:
            fault("shared_with_target", f"'{name}' cannot be shared; allowed: {', '.join(SHAREABLE)}")
    if raw.get("markov_rank", 0) and raw.get("markov_head_type", "vanilla") not in ("vanilla", "gated", "rnn"):
        fault("markov_head_type", f"expected vanilla, gated or rnn; got '{raw['markov_head_type']}'")
    if raw.get("confidence_head_with_markov") and not raw.get("markov_rank", 0):
        fault("confidence_head_with_markov", "needs a Markov head (markov_rank above 0)")
    mask = raw.get("mask_token_id")
    if isinstance(mask, int) and isinstance(vocabulary, int) and not 0 <= mask < vocabulary:
        fault("mask_token_id", f"{mask} lies outside the vocabulary of {vocabulary} tokens")
    if faults:
        raise CheckpointError(*faults)
    plain = {key: raw[key] for key in _PLAIN if raw.get(key) is not None}
    if reduced == vocabulary:
        plain.pop("draft_vocab_size", None)  # the whole vocabulary: there is no map
    used = {*plain, "architectures", "target_layer_ids", "rope_theta", "shared_with_target"}
    return DraftConfig(
        architecture=architecture,
        target_layer_ids=tuple(raw["target_layer_ids"]),
        rope_theta=float(rope.get("rope_theta", 1e4)),
        shared_with_target=shared,
        extra={key: value for key, value in raw.items() if key not in used},
        **plain,
    )


def _check_value(key: str, value: Any, fault: Any) -> None:
    if key == "target_layer_ids":
        if not isinstance(value, list) or not value or not all(type(item) is int and item >= -1 for item in value):
            fault(key, f"expected a list of layer numbers from -1 (the embedding); got {value}")
    elif key in ("attention_bias", "enable_confidence_head", "confidence_head_with_markov"):
        if not isinstance(value, bool):
            fault(key, f"expected true or false; got {value}")
    elif key == "markov_head_type":
        return
    elif key == "rms_norm_eps":
        if not isinstance(value, int | float) or not 0 <= value < 1:
            fault(key, f"expected a number from 0 to 1; got {value}")
    elif type(value) is not int or value < (0 if key in ("markov_rank", "mask_token_id") else 1):
        fault(key, f"expected a whole number above 0; got {value}")


def dump_config(config: DraftConfig) -> dict[str, Any]:
    """Return the JSON object of a config: the keys it was read with, and ours."""
    raw: dict[str, Any] = dict(config.extra)
    raw["architectures"] = [config.architecture]
    raw["target_layer_ids"] = list(config.target_layer_ids)
    raw["rope_parameters"] = {**raw.get("rope_parameters", {"rope_type": "default"}), "rope_theta": config.rope_theta}
    if config.shared_with_target:
        raw["shared_with_target"] = list(config.shared_with_target)
    chained = {"ttt_length"}
    parallel = {
        "block_size",
        "mask_token_id",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
    }
    skipped = chained if config.architecture == DSPARK else parallel
    for name in _PLAIN:
        value = getattr(config, name)
        if name not in skipped and value is not None:
            raw[name] = value
    return dict(sorted(raw.items()))
