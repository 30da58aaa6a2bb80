"""What must hold in every run, checked on the rows that it wrote."""

from __future__ import annotations

from collections import Counter

import numpy as np

from sim.errors import InvariantError
from sim.records import Columns

_OF_BOTH = ("output_tokens", "drafted_tokens", "verified_tokens", "accepted_draft_tokens")


class Books:
    """Counts requests and tokens as their rows pass by, and says at the end whether they add up."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._steps: Counter[str] = Counter()

    def add_steps(self, steps: Columns) -> None:
        """Count rows of steps."""
        for name in _OF_BOTH:
            self._steps[name] += int(steps[name].sum())

    def add_requests(self, requests: Columns) -> None:
        """Count rows of requests, and those in which something is wrong."""
        count = self._requests
        for name in _OF_BOTH:
            count[name] += int(requests[name].sum())
        status, tokens, first = requests["status"], requests["output_tokens"], requests["first_token_s"]
        arrived, last = requests["arrived_s"], requests["last_token_s"]
        started = ~np.isnan(first)
        ordered = (arrived <= first) & (first <= last) & ~(last > requests["ended_s"])
        accepted, verified, drafted = (
            requests[name] for name in ("accepted_draft_tokens", "verified_tokens", "drafted_tokens")
        )
        for name, which in (
            ("requests", np.ones(status.size, np.bool_)),
            ("unfinished", status == "unfinished"),
            ("with tokens", tokens > 0),
            ("started", started),
            ("finished unstarted", (status == "finished") & ~started),
            ("ordered", ordered & started),
            ("too long", tokens > requests["asked_tokens"]),
            ("too many", (accepted > verified) | (verified > drafted)),
        ):
            count[name] += int(which.sum())

    def check(self, inside: int, offered: int) -> None:
        """Raise `InvariantError` unless all adds up; says which equation failed.

        ``inside``: requests in the fleet at the horizon. ``offered``: requests that arrived before it.
        """
        steps, requests = self._steps, self._requests

        def equal(what: str, left: int, right: int) -> None:
            if left != right:
                raise InvariantError(f"{what} fails: {left} and {right}")

        equal("arrivals offered = arrivals recorded", offered, requests["requests"])
        equal("unfinished at the horizon = requests inside the fleet", requests["unfinished"], inside)
        equal("tokens delivered by steps = tokens of requests", steps["output_tokens"], requests["output_tokens"])
        for name in _OF_BOTH[1:]:
            equal(f"{name} of steps = of requests", steps[name], requests[name])
        equal("requests with tokens = requests with a first token", requests["with tokens"], requests["started"])
        equal("finished requests without a token", requests["finished unstarted"], 0)
        equal("arrived <= first token <= last token <= end", requests["ordered"], requests["started"])
        equal("requests with more tokens than asked", requests["too long"], 0)
        equal("requests with accepted > verified or verified > drafted", requests["too many"], 0)
