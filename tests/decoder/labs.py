"""A lab in a folder: a tiny target that is sure of itself, and texts that it wrote, in two shards."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from decoder.lab.store import Meta, open_folder, save_shard, shard_path
from decoder.lab.targets import target_sha256
from decoder.lab.writing import Prompt, write_group
from decoder.target import load_target

V, WIDTH, LAYERS = 48, 32, (0, 1, 2)


def make_lab(lab: Path, documents: int = 24, seed: int = 7, tied: bool = False) -> Path:
    """Make ``lab/toy/target`` and ``lab/toy/text/written-t1-train``; return ``lab``."""
    home = lab / "toy"
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=V,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.7,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(home / "target")
    target = load_target(home / "target")
    generator = torch.Generator().manual_seed(seed + 1)
    prompts = [
        Prompt(f"d{n}", "code", tuple(torch.randint(4, V, (3 + n % 4,), generator=generator).tolist()))
        for n in range(documents)
    ]
    folder = home / "text" / "written-t1-train"
    open_folder(
        folder,
        Meta(
            target="toy",
            target_sha256=target_sha256(home / "target"),
            layers=LAYERS,
            hidden_size=WIDTH,
            text="written",
            temperature=1.0,
            max_new_tokens=24,
            split="train",
            seed=0,
            dtype="float32",
            versions={},
        ),
    )
    half = documents // 2
    for index, group in enumerate((prompts[:half], prompts[half:])):
        texts = write_group(
            target, group, layers=LAYERS, eos_ids=frozenset([1]), max_new_tokens=24, temperature=1.0, seed=0
        )
        save_shard(shard_path(folder, index), texts)
    return lab
