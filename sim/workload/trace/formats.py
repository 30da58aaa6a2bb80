"""The formats that are known: names of their columns or fields, the unit of their time, what its grid is.

A unit is never guessed or asked for: it belongs to the format. Further columns are allowed and not read, except where
the names are so common that another data set with another unit would be taken for this one (``exact``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from sim.errors import Fault, TraceError

FormatName = Literal["auto", "azure", "mooncake", "burstgpt", "ragpulse", "bailian", "own", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How one kind of file is read.

    ``time``, ``prompt``, ``output``, ``domain``, ``tenant``: names of the columns. ``optional``: which of them may be
    absent. ``marks``: further names that must be there, to tell formats apart; ``exact``: no others may be.
    ``clock``: how a time is written: a number, a number in quotes, or a date. ``ticks_per_s``: how many units of the
    time column make a second. ``origin``: whether time 0 is the earliest row or the 0 of the column. ``grid_s``: the
    known resolution where that is coarse; None: to be looked for in the data. ``prefix_ids``: where a list of block
    ids stands. ``zero_output``: what a row without output is counted as. ``parquet``: read from Parquet too.
    """

    name: str
    container: Literal["table", "jsonl"]
    time: str
    prompt: str
    output: str
    domain: str | None = None
    tenant: str | None = None
    optional: frozenset[str] = frozenset()
    marks: tuple[str, ...] = ()
    exact: bool = False
    clock: Literal["number", "quoted", "date"] = "number"
    ticks_per_s: float = 1.0
    origin: Literal["first_row", "zero"] = "zero"
    grid_s: float | None = 0.0
    prefix_ids: str | None = None
    zero_output: str = "zero_output"
    parquet: bool = False
    caveats: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """Names without which a file is not of this format."""
        names = (self.time, self.prompt, self.output, self.domain, self.tenant)
        return (*(name for name in names if name and name not in self.optional), *self.marks)

    def fits(self, found: Collection[str]) -> bool:
        """Whether a file with these names is of this format."""
        return set(self.needed) <= set(found) and (not self.exact or set(found) == set(self.needed))


_OWN = {
    "name": "own",
    "time": "arrived_s",
    "prompt": "prompt_tokens",
    "output": "output_tokens",
    "domain": "domain",
    "tenant": "tenant",
    "optional": frozenset({"domain", "tenant"}),
    "grid_s": None,
    "parquet": True,
}

#: In order of looking: a format whose names include another's comes before it.
FORMATS = (
    Format(
        name="azure",
        container="table",
        time="TIMESTAMP",
        prompt="ContextTokens",
        output="GeneratedTokens",
        clock="date",
        ticks_per_s=1e9,
        origin="first_row",
        caveats=(
            "this trace does not say which prompts were served from a prefix cache; every prompt is computed whole",
        ),
    ),
    Format(
        name="burstgpt",
        container="table",
        time="Timestamp",
        prompt="Request tokens",
        output="Response tokens",
        tenant="Model",
        origin="first_row",
        grid_s=1.0,
        zero_output="failed_request",
        caveats=("this trace mixes models that differ in length and rhythm; tenant says which",),
    ),
    Format(
        name="bailian",
        container="jsonl",
        time="timestamp",
        prompt="input_length",
        output="output_length",
        marks=("hash_ids", "chat_id", "parent_chat_id"),
        prefix_ids="hash_ids",
    ),
    Format(
        name="ragpulse",
        container="jsonl",
        time="timestamp",
        prompt="input_length",
        output="output_length",
        marks=("hash_ids", "session_id"),
        clock="quoted",
        grid_s=1.0,
        caveats=("prompts of this trace share parts; no prefix cache is simulated, every prompt is computed whole",),
    ),
    Format(
        name="mooncake",
        container="jsonl",
        time="timestamp",
        prompt="input_length",
        output="output_length",
        marks=("hash_ids",),
        exact=True,
        ticks_per_s=1e3,
        grid_s=None,
        prefix_ids="hash_ids",
    ),
    Format(
        name="run",
        container="table",
        time="arrived_s",
        prompt="prompt_tokens",
        # What a request was to get, not what it got: a replay of a run offers the same load again.
        output="asked_tokens",
        domain="domain",
        tenant="tenant",
        optional=frozenset({"domain", "tenant"}),
        parquet=True,
    ),
    Format(container="table", **_OWN),  # type: ignore[arg-type]
    Format(container="jsonl", **_OWN),  # type: ignore[arg-type]
)

assert {format_.name for format_ in FORMATS} == set(get_args(FormatName)) - {"auto"}


def find_format(
    name: FormatName, container: Literal["table", "jsonl"], found: Collection[str], file: str, line: int | None
) -> Format:
    """Return the format of a file with these column or field names; refuse an unknown one with what is known."""
    noun = "columns" if container == "table" else "fields"
    shown = ", ".join(found) or "none"
    shown = shown if len(shown) <= 200 else shown[:197] + "..."
    here = [format_ for format_ in FORMATS if format_.container == container]
    if name == "auto":
        for format_ in here:
            if format_.fits(found):
                return format_
        known = "; ".join(f"{format_.name} ({', '.join(format_.needed)})" for format_ in here)
        raise TraceError(Fault(f"unknown {noun}: {shown}; known: {known}", file, line))
    for format_ in here:
        if format_.name == name:
            missing = [part for part in format_.needed if part not in found]
            if missing:
                message = f"not of format '{name}': missing {noun} {', '.join(missing)} (got {shown})"
                raise TraceError(Fault(message, file, line))
            return format_
    allowed = ", ".join(format_.name for format_ in here)
    kind = "a CSV or Parquet file" if container == "table" else "a JSONL file"
    raise TraceError(Fault(f"format '{name}' is not {kind}, which this is; formats of such: {allowed}", file))
