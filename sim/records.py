"""What a run writes down: the columns of ``requests.parquet`` and ``steps.parquet``, as plain arrays.

Facts only: every metric is computed from these by `sim.metrics`. A measured run of the real engine writes
the same columns.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

#: Arrays of one length by name; NaN or None where there is no value.
Columns = dict[str, NDArray[Any]]

#: A row an engine step (or, aggregated, a row a second and replica: counts and spans are sums over its steps).
STEP_COLUMNS = (
    "replica",  # index; prefill engines of a disaggregated fleet follow the decode replicas
    "steps",  # 1; more in an aggregated row
    "started_s",  # start of the step (of the first one)
    "ended_s",  # end of the step (of the last one)
    "busy_s",  # its duration (their sum)
    "draft_s",  # of this, drafting
    "decoding",  # requests that decoded
    "decoding_s",  # requests that decoded times the duration of the step: request seconds
    "prompt_tokens",  # prompt tokens computed
    "batch_tokens",  # tokens verified: bonus and draft tokens of the decoding requests
    "drafted_tokens",  # draft tokens proposed
    "verified_tokens",  # draft tokens verified
    "trimmed_tokens",  # draft tokens that the policy chose and the batch limit cut
    "accepted_draft_tokens",  # draft tokens delivered
    "output_tokens",  # tokens delivered, first tokens of prompts included
    "first_tokens",  # of these, tokens that a prompt's last chunk delivered
    "running",  # requests admitted at its end, decoding or in prefill (sum over steps)
    "waiting",  # requests waiting at its end (sum over steps)
    "kv_blocks",  # KV blocks in use at its end (sum over steps)
    "context_tokens",  # tokens in the caches of the decoding requests at its start (sum over steps)
    "outside_steps",  # 1 where the batch lay outside what the profile measured (sum)
)
STEP_FLOATS = frozenset({"started_s", "ended_s", "busy_s", "draft_s", "decoding_s"})

#: A row a request that arrived. Times are seconds from the start of the run, NaN (null) where it did not happen.
REQUEST_COLUMNS = (
    "request",  # row number, in order of arrival
    "tenant",
    "domain",
    "replica",  # decode replica, -1 if it never got to one
    "arrived_s",
    "admitted_s",  # first admission
    "first_token_s",
    "last_token_s",
    "ended_s",
    "prompt_tokens",
    "asked_tokens",  # output tokens it would have
    "output_tokens",  # output tokens delivered
    "rounds",
    "drafted_tokens",
    "verified_tokens",
    "accepted_draft_tokens",
    "preemptions",
    "max_itl_s",  # longest gap between two deliveries
    "status",
    "reason",
)
