"""`tiny`: a target of 6 M parameters, trained from nothing in minutes on CPython's standard library.

For tests and demonstrations alone. It is so undertrained that it is easy to copy: what drafters reach on it says
nothing of real models, nor of one kind of text against another.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from decoder.errors import Fault, TargetError
from decoder.lab.prompts import load_documents
from decoder.lab.targets import no_progress_bars
from decoder.lab.writing import make_prompt

END = "<|end|>"
TRAINING = "training.json"
#: Longer texts are cut; a cut one has no end token.
_LONGEST_TEXT_TOKENS = 320
_WARM_UP_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySize:
    """Dimensions of the model, and how long it is trained: ``train_tokens`` in batches of ``batch_tokens``."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    train_tokens: int = 400_000
    batch_tokens: int = 4096
    learning_rate: float = 2e-3


def make_tiny(folder: Path, size: TinySize | None = None, *, seed: int = 0) -> None:
    """Train the target and write it as a Hugging Face folder, by rename, with its tokenizer and ``training.json``.

    The same seed gives the same bytes on the same machine, number of threads and versions. ``training.json`` holds the
    mean loss of each step, nats a token.

    Raises
    ------
    TargetError
        Where this Python has no source of its standard library to learn from.
    """
    size = size or TinySize()
    documents = [document for document in load_documents("code", "train") if document.group.startswith("stdlib/")]
    if not documents:
        raise TargetError(Fault("this Python's standard library has no source text to train on", key="--target tiny"))
    tokenizer = _make_tokenizer(["\n\n".join((*document.turns, document.answer)) for document in documents], size)
    prompts = [make_prompt(document, tokenizer, "corpus") for document in documents]
    texts = [(*prompt.token_ids, *(prompt.answer_ids or ()))[:_LONGEST_TEXT_TOKENS] for prompt in prompts]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=size.vocab_size,
                hidden_size=size.hidden_size,
                intermediate_size=size.intermediate_size,
                num_hidden_layers=size.num_hidden_layers,
                num_attention_heads=size.num_attention_heads,
                num_key_value_heads=size.num_key_value_heads,
                head_dim=size.head_dim,
                max_position_embeddings=2048,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                dtype=torch.float32,
            )
        )
    losses = _train(model, texts, size, np.random.default_rng(seed))
    training = {
        "seed": seed,
        "size": asdict(size),
        "documents": len(texts),
        "losses_nats_per_token": losses,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".target.", dir=folder.parent))
    try:
        with no_progress_bars():
            model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        (part / TRAINING).write_text(json.dumps(training, indent=1) + "\n", encoding="utf-8")
        part.chmod(0o755)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _make_tokenizer(texts: Sequence[str], size: TinySize) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of ``size.vocab_size`` tokens; the end token is the first."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=size.vocab_size,
            special_tokens=[END],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END)  # type: ignore[no-untyped-call]


def _train(model: nn.Module, texts: Sequence[Sequence[int]], size: TinySize, rng: np.random.Generator) -> list[float]:
    """Train on next-token cross entropy; return each step's loss, nats a token."""
    steps = max(1, size.train_tokens // size.batch_tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

    def scale(step: int) -> float:
        return min((step + 1) / _WARM_UP_STEPS, 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    batches = _batches(texts, size.batch_tokens, rng)
    losses = []
    model.train()
    with tqdm(total=steps, unit="step", desc="tiny", disable=None, leave=False) as bar:
        for _ in range(steps):
            ids, labels = next(batches)
            loss = functional.cross_entropy(model(input_ids=ids, use_cache=False).logits.flatten(0, 1), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(round(float(loss.detach()), 4))
            bar.set_postfix(loss=losses[-1], refresh=False)
            bar.update()
    return losses


def _batches(
    texts: Sequence[Sequence[int]], batch_tokens: int, rng: np.random.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``ids`` ``[texts, tokens]`` and what follows each, ``[texts * tokens]``, without end.

    Texts of a batch are of like length and padded on the right: the causal mask is enough, and -100 is no label.
    """
    while True:
        # Like lengths meet other neighbours in every pass over the texts.
        order = sorted(range(len(texts)), key=[len(text) * rng.uniform(0.9, 1.1) for text in texts].__getitem__)
        groups: list[list[int]] = [[]]
        longest = 0
        for index in order:
            longest = max(longest, len(texts[index]))
            if longest * (len(groups[-1]) + 1) > batch_tokens and groups[-1]:
                groups.append([])
                longest = len(texts[index])
            groups[-1].append(index)
        for at in rng.permutation(len(groups)):
            group = [texts[index] for index in groups[at]]
            ids = torch.zeros(len(group), max(map(len, group)) - 1, dtype=torch.int64)
            labels = torch.full_like(ids, -100)
            for row, text in enumerate(group):
                ids[row, : len(text) - 1] = torch.tensor(text[:-1])
                labels[row, : len(text) - 1] = torch.tensor(text[1:])
            yield ids, labels.flatten()
