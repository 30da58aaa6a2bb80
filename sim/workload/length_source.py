"""Where a request's two lengths come from: a law each, or pairs of a trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Union

import numpy as np
from pydantic import Discriminator, Field, Tag

from profiles.reading import STRICT
from sim.rng import Streams
from sim.workload.base import LENGTHS, Ints, TokenLengths
from sim.workload.lengths import Fixed, Lognormal, Quantiles
from sim.workload.trace.formats import FormatName
from sim.workload.trace.trace import load_trace, trace_file

if TYPE_CHECKING:
    OneLength = TokenLengths
else:
    #: Any registered law, told apart by its ``kind``.
    OneLength = Annotated[Union[tuple(LENGTHS.known().values())], Field(discriminator="kind")]  # noqa: UP007

__all__ = [
    "Fixed",
    "LengthSource",
    "Lengths",
    "Lognormal",
    "PairsOfTrace",
    "PromptAndOutput",
    "Quantiles",
    "open_lengths",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAndOutput:
    """A law for prompts and one for outputs, independent of each other."""

    prompt: OneLength
    output: OneLength


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsOfTrace:
    """Prompt and output of a random row of a trace, drawn together and with replacement."""

    kind: Literal["trace"] = "trace"
    path: str
    format: FormatName = "auto"


PromptAndOutput.__pydantic_config__ = STRICT  # type: ignore[attr-defined]
PairsOfTrace.__pydantic_config__ = STRICT  # type: ignore[attr-defined]


def _shape(value: Any) -> str | None:
    kind = value.get("kind", "") if isinstance(value, dict) else getattr(value, "kind", "")
    if kind == "trace":
        return "pairs of a trace"
    return "a law each" if kind == "" and isinstance(value, dict | PromptAndOutput) else None


#: The section of a scenario.
Lengths = Annotated[
    Annotated[PromptAndOutput, Tag("a law each")] | Annotated[PairsOfTrace, Tag("pairs of a trace")],
    Discriminator(
        _shape,
        custom_error_type="lengths_shape",
        custom_error_message="expected {prompt: {kind: ...}, output: {kind: ...}} or {kind: trace, path: ...}",
    ),
]


class LengthSource(Protocol):
    """Draws pairs of lengths; ``trace_rows`` and ``caveats`` as in `RequestTable`."""

    @property
    def trace_rows(self) -> dict[str, int]:
        """Rows of a trace that could not be used, by reason."""
        ...

    @property
    def caveats(self) -> tuple[str, ...]:
        """What a reader of the results must know."""
        ...

    def draw(self, n: int, streams: Streams, *name: str | int) -> tuple[Ints, Ints]:
        """Draw ``n`` prompt and output lengths from the streams of ``name``."""
        ...


@dataclass(frozen=True, slots=True)
class _Laws:
    settings: PromptAndOutput
    trace_rows: dict[str, int] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()

    def draw(self, n: int, streams: Streams, *name: str | int) -> tuple[Ints, Ints]:
        prompt_tokens = self.settings.prompt.draw_tokens(n, rng=streams.get("lengths", "prompt", *name))
        return prompt_tokens, self.settings.output.draw_tokens(n, rng=streams.get("lengths", "output", *name))


@dataclass(frozen=True, slots=True)
class _Pairs:
    prompt_tokens: Ints
    output_tokens: Ints
    trace_rows: dict[str, int]
    caveats: tuple[str, ...]

    def draw(self, n: int, streams: Streams, *name: str | int) -> tuple[Ints, Ints]:
        uniforms = streams.get("lengths", "pair", *name).random(n)
        row = (uniforms * self.prompt_tokens.size).astype(np.int64)
        return self.prompt_tokens[row], self.output_tokens[row]


def open_lengths(settings: PromptAndOutput | PairsOfTrace, base_dir: Path, strict: bool = False) -> LengthSource:
    """Make a section's lengths ready to draw from; reads the trace if there is one, relative to ``base_dir``."""
    if isinstance(settings, PromptAndOutput):
        return _Laws(settings)
    trace = load_trace(trace_file(base_dir, settings.path, "lengths.path"), settings.format, strict=strict)
    rows = {f"lengths_{reason}": count for reason, count in trace.rows.items()}
    return _Pairs(trace.prompt_tokens, trace.output_tokens, rows, trace.caveats)
