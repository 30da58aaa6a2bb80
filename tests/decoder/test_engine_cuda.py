"""The engine on a CUDA device: exact in float64; the half-precision kernel and its graphs as plain attention."""

import pytest
import torch

from decoder.batch_target import HfBatchTarget
from decoder.paged_kv import KERNEL_BLOCK_TOKENS, BlockPool, Pages
from decoder.ragged import Segment
from decoder.shapes import SHAPES, make_shape
from sim.verify import Fixed
from tests.decoder.engines import alone, assert_same, drafter_of, engine_of, requests, serve, transformer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def test_batched_is_one_at_a_time():
    target, drafter = transformer(), drafter_of("dspark_rnn")
    expected = alone(target, drafter, Fixed(k=4), requests())
    target.model.to("cuda")
    target.device = torch.device("cuda")
    drafter.net.to("cuda")
    assert_same(serve(engine_of(target, drafter, Fixed(k=4)), requests()), expected)


def passes(target, block_tokens, **graphs):
    """Read three texts in pieces; the logits of every row."""
    pool = BlockPool(3 * -(-40 // block_tokens), block_tokens)
    paged = HfBatchTarget(target, pool, **graphs)
    pages, found = [Pages() for _ in range(3)], []
    for held in pages:
        pool.grow(held, 40)
    starts = [0, 0, 0]
    for counts in ((5, 1, 3), (4, 4, 4), (1, 1, 1), (8, 0, 2)):
        segments = [
            Segment(held.ids, at, count) for held, at, count in zip(pages, starts, counts, strict=True) if count
        ]
        ids = [(7 * row + len(found)) % 500 for row in range(sum(counts))]
        output = paged.forward(ids, segments, (0, 1), range(len(ids)))
        found += [output.logits.float().clone(), output.features.float().clone()]
        starts = [at + count for at, count in zip(starts, counts, strict=True)]
    return found


def test_kernel_and_graphs_agree_with_plain_attention():
    target, _ = make_shape(SHAPES["toy"], device=torch.device("cuda"), dtype=torch.bfloat16)
    plain = passes(target, 16)
    kernel = passes(target, KERNEL_BLOCK_TOKENS)
    sizes = {"graph_sizes": (4, 16), "graph_segments": 4, "graph_queries": 8, "graph_rows": 64}
    graphs = passes(target, KERNEL_BLOCK_TOKENS, **sizes)
    for one, other, captured in zip(plain, kernel, graphs, strict=True):
        torch.testing.assert_close(one, other, atol=0.03, rtol=0.05)
        torch.testing.assert_close(other, captured, atol=0.01, rtol=0.02)
