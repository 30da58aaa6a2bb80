"""From the sections of a scenario to requests: a table of them, or users who make them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

import numpy as np
from pydantic import Field

from sim.errors import Fault, ScenarioError
from sim.rng import Streams
from sim.workload.base import ARRIVALS, OpenArrivals, RequestTable
from sim.workload.closed_loop import ClosedLoop, Users
from sim.workload.domains import DomainLaw, MixChange
from sim.workload.length_source import PairsOfTrace, PromptAndOutput, open_lengths
from sim.workload.on_off import OnOff
from sim.workload.renewal import Gamma, Poisson
from sim.workload.replay import Replay, replay_requests
from sim.workload.varying import Diurnal, Peak

__all__ = [
    "Arrivals",
    "ClosedLoop",
    "Diurnal",
    "Gamma",
    "OnOff",
    "Peak",
    "Poisson",
    "Replay",
    "build_requests",
    "build_users",
    "traffic_faults",
]

if TYPE_CHECKING:
    Arrivals = OpenArrivals | Replay | ClosedLoop
else:
    #: The section of a scenario: any registered kind.
    Arrivals = Annotated[Union[tuple(ARRIVALS.known().values())], Field(discriminator="kind")]  # noqa: UP007

LengthSettings = PromptAndOutput | PairsOfTrace
DomainSettings = Mapping[str, float] | Sequence[MixChange]
KeyPath = tuple[str | int, ...]


def traffic_faults(
    arrivals: Arrivals, lengths: LengthSettings | None, domains: DomainSettings | None, horizon_s: float
) -> Iterator[tuple[KeyPath, str]]:
    """Say what does not fit together in a scenario's traffic, before any file is read.

    Yields the key and a message: a section that is missing, and an option that would have no effect.
    """
    if isinstance(arrivals, Replay):
        if lengths is not None:
            yield ("lengths",), "has no effect: a replay takes its lengths from the trace; remove it"
    elif lengths is None:
        yield ("lengths",), f"missing: arrivals of kind '{arrivals.kind}' need lengths of prompts and outputs"
    if isinstance(arrivals, Peak) and arrivals.from_ >= horizon_s:
        yield (
            ("arrivals", "from"),
            f"the peak must begin before the horizon, {horizon_s:g} s (got {arrivals.from_:g} s)",
        )
    if isinstance(arrivals, ClosedLoop) and arrivals.ramp >= horizon_s:
        yield ("arrivals", "ramp"), f"must be shorter than the horizon, {horizon_s:g} s (got {arrivals.ramp:g} s)"
    if domains is not None and not isinstance(domains, Mapping):
        for index, change in enumerate(domains):
            if change.at >= horizon_s:
                message = f"has no effect: must be before the horizon, {horizon_s:g} s (got {change.at:g} s)"
                yield ("domains", index, "at"), message


def build_requests(
    arrivals: OpenArrivals | Replay,
    lengths: LengthSettings | None,
    domains: DomainSettings | None,
    horizon_s: float,
    streams: Streams,
    base_dir: Path = Path(),
    strict: bool = False,
) -> RequestTable:
    """Return all requests that arrive in [0, horizon_s), whoever serves them.

    Parameters
    ----------
    arrivals, lengths, domains
        Sections of a scenario, checked by `traffic_faults`. ``lengths`` is None for a replay and for nothing else.
        Without ``domains`` there is one, named '-', unless the trace names them.
    horizon_s : float
        May be infinite for a replay: the whole trace.
    streams : Streams
        Arrivals, prompt lengths, output lengths and domains have a stream each; none shifts another.
    base_dir : Path
        Where relative paths of traces begin: the folder of the scenario.
    strict : bool
        Refuse a trace with a row that cannot be used, in place of counting it.

    Raises
    ------
    TraceError
        A trace that cannot be used.
    ScenarioError
        A load too large to draw; an option that has no effect on the trace that was read, or is missing for it. The
        fault has a key, and no file.
    """
    if isinstance(arrivals, Replay):
        if lengths is not None:
            raise ValueError("a replay takes its lengths from the trace")
        return _frozen(replay_requests(arrivals, domains, horizon_s, streams, base_dir, strict))
    if lengths is None:
        raise ValueError(f"arrivals of kind '{arrivals.kind}' need lengths")
    try:
        arrived_s = arrivals.draw_arrivals_s(horizon_s, rng=streams.get("arrivals"))
    except ValueError as fault:
        raise ScenarioError(Fault(str(fault), key="arrivals")) from None
    source = open_lengths(lengths, base_dir, strict)
    prompt_tokens, output_tokens = source.draw(arrived_s.size, streams)
    law = DomainLaw(domains)
    domain = law.domains_at(arrived_s, streams.get("domains").random(arrived_s.size))
    tenant = np.zeros(arrived_s.size, np.int64)
    return _frozen(
        RequestTable(
            arrived_s,
            prompt_tokens,
            output_tokens,
            domain,
            tenant,
            law.names,
            trace_rows=source.trace_rows,
            caveats=source.caveats,
        )
    )


def build_users(
    arrivals: ClosedLoop,
    lengths: LengthSettings,
    domains: DomainSettings | None,
    streams: Streams,
    base_dir: Path = Path(),
    strict: bool = False,
) -> Users:
    """Return the users of a closed loop; parameters and errors as for `build_requests`."""
    return Users(arrivals, open_lengths(lengths, base_dir, strict), DomainLaw(domains), streams)


def _frozen(table: RequestTable) -> RequestTable:
    columns: list[Any] = [table.arrived_s, table.prompt_tokens, table.output_tokens, table.domain, table.tenant]
    for column in columns:
        column.flags.writeable = False
    return table
