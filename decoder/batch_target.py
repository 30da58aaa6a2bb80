"""The target over many requests at once: one pass for all their rows, keys and values in blocks.

`transformers` lets a model take its attention from outside; ours finds the pass it belongs to among the arguments and
leaves everything else of the model as it is. Without such a pass it is the stock attention, so that the same model
still decodes one request at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from decoder.errors import Fault, InputError
from decoder.paged_kv import BlockPool, PagedKv
from decoder.ragged import Ragged, Segment
from decoder.target import HfTarget

PAGED = "paged_blocks"


def _paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    ragged: Ragged | None = None,
    kv: PagedKv | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend over blocks; everything is ``[1, heads, rows, head_dim]``."""
    if ragged is None or kv is None:
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return out
    layer = module.layer_idx
    ragged.write(kv, layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    return ragged.attend(query[0].transpose(0, 1), kv, layer, scaling)[None], None


AttentionInterface.register(PAGED, _paged_attention)
AttentionMaskInterface.register(PAGED, sdpa_mask)


@dataclass(frozen=True, slots=True, eq=False)
class BatchOutput:
    """What a pass said.

    ``logits`` ``[rows asked for, vocabulary]``, ``features`` ``[rows, layers asked for * hidden_size]``.
    ``padded_tokens``: rows that only filled a graph's size; ``graph_tokens``: that size, 0 where no graph was used. On
    a device with graphs both tensors lie in the graph's own memory, until its next pass.
    """

    logits: Tensor
    features: Tensor
    graph_tokens: int = 0
    padded_tokens: int = 0


class BatchTarget(Protocol):
    """A target that reads rows of many requests in one pass."""

    vocab_size: int
    max_context_tokens: int
    device: torch.device

    def forward(
        self,
        token_ids: Sequence[int],
        segments: Sequence[Segment],
        feature_layers: Sequence[int],
        logit_rows: Sequence[int],
    ) -> BatchOutput:
        """Read the rows of ``segments``, side by side; ``logit_rows``: which of them need logits."""
        ...

    def scrub(self, blocks: Sequence[int]) -> None:
        """Forget what blocks hold."""
        ...


class HfBatchTarget:
    """A causal LM of `transformers` over a pool of blocks.

    Parameters
    ----------
    target : HfTarget
    pool : BlockPool
    graph_sizes : sequence of int, ascending
        Passes are padded to the next of these sizes; where flash attention reads the blocks (see `PagedKv`) each is
        captured once as a CUDA graph. Larger passes, and passes with more than ``graph_queries`` rows of one request,
        run as they are.
    graph_segments, graph_queries, graph_rows : int
        Requests of a graph at most, rows of each at most, and rows that a request may have cached.
    """

    def __init__(
        self,
        target: HfTarget,
        pool: BlockPool,
        *,
        graph_sizes: Sequence[int] = (),
        graph_segments: int = 0,
        graph_queries: int = 0,
        graph_rows: int = 0,
    ) -> None:
        if list(graph_sizes) != sorted(set(graph_sizes)) or any(size < 1 for size in graph_sizes):
            raise InputError(
                Fault(f"expected sizes of at least 1 that rise (got {list(graph_sizes)})", key="graph_sizes")
            )
        if graph_sizes and min(graph_segments, graph_queries, graph_rows) < 1:
            raise InputError(Fault("graphs need graph_segments, graph_queries and graph_rows", key="graph_sizes"))
        self.target = target
        self.model = target.model
        self.pool = pool
        self.vocab_size = target.vocab_size
        self.max_context_tokens = target.max_context_tokens
        self.device = target.device
        self.graph_sizes = tuple(graph_sizes)
        self.graph_segments, self.graph_queries, self.graph_rows = graph_segments, graph_queries, graph_rows
        config = self.model.config.get_text_config(decoder=True)
        heads = int(config.num_attention_heads)
        self.kv = PagedKv(
            target.num_layers,
            int(getattr(config, "num_key_value_heads", None) or heads),
            int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            pool,
            dtype=target.dtype,
            device=target.device,
        )
        self.model.set_attn_implementation(PAGED)
        # Four dimensions: transformers takes it for a mask that someone made, and makes none itself. Nobody reads it.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=target.device)
        self._graphs: dict[tuple[int, tuple[int, ...]], _Graph] = {}

    @torch.inference_mode()
    def scrub(self, blocks: Sequence[int]) -> None:
        """Forget what blocks hold; see `PagedKv`."""
        self.kv.scrub(blocks)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Sequence[int],
        segments: Sequence[Segment],
        feature_layers: Sequence[int],
        logit_rows: Sequence[int],
    ) -> BatchOutput:
        """Read rows; see `BatchTarget`."""
        size = self._graph_size(segments)
        ragged = Ragged(tuple(segments), self.pool.block_tokens, self.pool.blocks, self.device, padded=size)
        ids = torch.zeros(ragged.positions.shape[0], dtype=torch.int64)
        ids[: ragged.rows] = torch.tensor(token_ids)
        if size is not None and self.kv.has_kernel:
            graph = self._graph(size, tuple(feature_layers))
            logits, features = graph.replay(ids, ragged)
            logits = logits[torch.tensor(list(logit_rows), device=self.device, dtype=torch.int64)]
        else:
            # transformers reads no row at all as every row; one is computed and dropped instead.
            wanted = torch.tensor(list(logit_rows) or [0], device=self.device)
            logits, features = self._read(ids.to(self.device), ragged, feature_layers, wanted)
            logits = logits if logit_rows else logits[:0]
        padded = 0 if size is None else size - ragged.rows
        return BatchOutput(logits, features[: ragged.rows], size or 0, padded)

    def _graph_size(self, segments: Sequence[Segment]) -> int | None:
        rows = sum(segment.rows for segment in segments)
        fits = len(segments) <= self.graph_segments and all(
            segment.rows <= self.graph_queries and segment.start + segment.rows <= self.graph_rows
            for segment in segments
        )
        return next((size for size in self.graph_sizes if size >= rows), None) if fits else None

    def _graph(self, size: int, feature_layers: tuple[int, ...]) -> _Graph:
        key = (size, feature_layers)
        if key not in self._graphs:
            self._graphs[key] = _Graph(self, size, feature_layers)
        return self._graphs[key]

    def _read(
        self, token_ids: Tensor, ragged: Ragged, feature_layers: Sequence[int], logit_rows: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        output = self.model(
            input_ids=token_ids[None],
            position_ids=ragged.positions[None],
            attention_mask=self._no_mask,
            use_cache=False,
            output_hidden_states=bool(feature_layers),
            logits_to_keep=logit_rows,
            ragged=ragged,
            kv=self.kv,
        )
        if not feature_layers:
            return output.logits[0], output.logits.new_empty(token_ids.shape[0], 0)
        return output.logits[0], torch.cat([output.hidden_states[layer + 1][0] for layer in feature_layers], -1)


class _Graph:
    """A pass of one size, captured: fixed buffers in, one launch, fixed buffers out. CUDA alone."""

    def __init__(self, target: HfBatchTarget, size: int, feature_layers: tuple[int, ...]) -> None:
        device = target.device
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.ragged = Ragged.fixed(
            size,
            target.graph_segments,
            target.graph_queries,
            target.graph_rows,
            target.pool.block_tokens,
            target.pool.blocks,
            device,
        )

        def read() -> tuple[Tensor, Tensor]:
            # Logits of all rows (0: every row): which ones are wanted differs from step to step.
            return target._read(self.ids, self.ragged, feature_layers, 0)

        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                read()
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits, self.features = read()

    def replay(self, ids: Tensor, ragged: Ragged) -> tuple[Tensor, Tensor]:
        """Run the pass with new contents; logits and features of every row, padding included."""
        self.ids.copy_(ids, non_blocking=True)
        self.ragged.refill(ragged)
        self.graph.replay()
        return self.logits, self.features
