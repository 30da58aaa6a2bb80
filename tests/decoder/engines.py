"""A real transformer of random weights for the batched engine, and the same requests decoded one at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from decoder.batch_target import HfBatchTarget
from decoder.batched_drafting import make_batch_drafter
from decoder.engine import Engine
from decoder.paged_kv import BlockPool
from decoder.sampling import Sampling
from decoder.served import Served, Settings
from decoder.session import Decoder, Generation, Request
from decoder.small_model import SmallModelDrafter
from decoder.stopping import Limits
from decoder.target import HfTarget, keep_float64
from sim.batching import Chunked
from tests.decoder.toys import LAYERS, WIDTH, tiny_drafter

V = 23
KINDS = ("dspark_vanilla", "dspark_gated", "dspark_rnn", "dflash", "eagle3", "mtp", "small_transformer", "small_model")


def transformer(seed: int = 3, layers: int = LAYERS, context: int = 96) -> HfTarget:
    """Return a target in float64 whose weights are large enough to have opinions."""
    config = Qwen3Config(
        vocab_size=V,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=context,
    )
    model = Qwen3ForCausalLM(config).double()
    keep_float64(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" not in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.7)
    return HfTarget(model)


def drafter_of(kind: str, length: int = 4) -> Any:
    """Return a drafter; `small_model` is a table, which has no batched form, `small_transformer` has one."""
    if kind == "small_transformer":
        return SmallModelDrafter(transformer(seed=4, layers=1), trained_length=length)
    return tiny_drafter(kind, V, length)


def request(name: str, prompt: Sequence[int] = (1, 2), new: int = 10, **fields: Any) -> Request:
    sampling = fields.pop("sampling", None) or Sampling(temperature=fields.pop("temperature", 1.0))
    seed = fields.pop("seed", 0)
    limits = Limits(max_new_tokens=new, **fields)
    return Request(request_id=name, prompt_ids=tuple(prompt), limits=limits, sampling=sampling, seed=seed)


def requests(count: int = 3, temperature: float = 1.0, **fields: Any) -> list[Request]:
    """Return requests whose prompts and outputs differ in length."""
    return [
        request(f"r{i}", [(7 * i + j) % V for j in range(1 + 3 * i)], new=6 + 3 * i, temperature=temperature, **fields)
        for i in range(count)
    ]


def engine_of(
    target: HfTarget,
    drafter: Any,
    policy: Any,
    *,
    blocks: int = 200,
    block_tokens: int = 4,
    batch_target: type[HfBatchTarget] = HfBatchTarget,
    graph_sizes: Sequence[int] = (),
    **options: Any,
) -> Engine:
    settings = {
        "prefill": Chunked(chunk_tokens=16),
        "max_running": 8,
        "max_batch_tokens": 256,
        "max_context_tokens": target.max_context_tokens,
    }
    settings |= {key: options.pop(key) for key in list(options) if key in Settings.__dataclass_fields__}
    pool = BlockPool(blocks, block_tokens)
    paged = batch_target(
        target, pool, graph_sizes=graph_sizes, graph_segments=64, graph_queries=64, graph_rows=target.max_context_tokens
    )
    batched = make_batch_drafter(drafter, pool, target.device) if drafter is not None else None
    return Engine(paged, batched, policy, pool, Settings(**settings), **options)


def serve(engine: Engine, asked: Sequence[Request], **options: Any) -> list[Served]:
    """Submit all requests and run; the books are checked after every step."""
    served = [engine.submit(one, **options) for one in asked]
    while engine.step():
        engine.check()
    assert engine.idle
    assert engine.pool.free == engine.pool.blocks
    return served


def alone(target: HfTarget, drafter: Any, policy: Any, asked: Sequence[Request], **options: Any) -> list[Generation]:
    """Decode with the reference decoder, one at a time."""
    decoder = Decoder(target, drafter, policy, **options)
    return [decoder.generate([one])[0] for one in asked]


def assert_same(served: Sequence[Served], expected: Sequence[Generation]) -> None:
    """Compare texts, and what each round verified and accepted."""
    for found, want in zip(served, expected, strict=True):
        assert found.output_ids == want.output_ids
        assert found.token_ids == want.token_ids
        facts = [
            [
                (r.anchor_position, r.verify_length, r.accepted_draft_tokens, r.bonus_token, r.emitted_tokens)
                for r in rounds
            ]
            for rounds in (found.rounds, want.rounds)
        ]
        assert facts[0] == facts[1]
        for mine, theirs in zip(found.rounds, want.rounds, strict=True):
            # Where nothing could be verified the reference drafts nothing, and a chain stops at what could be.
            assert mine.proposed[: len(theirs.proposed)] == theirs.proposed
