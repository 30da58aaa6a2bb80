"""Load all that cells need, compiled code included, by running two tiny ones; worker processes are forked after that.

What the cells give is dropped, faults too: a cell that is asked for reports its own.
"""

from __future__ import annotations

from profiles.reading import parse_document
from sim.cells import Work
from sim.executors import attempt

_TINY = """
name: tiny
horizon: 1s
fleet: {replicas: 1, profile: paper/v4_flash, kv_cache: 1GiB}
policies: [none, dspark]
arrivals: {kind: poisson, rate_per_s: 10}
lengths: {prompt: {kind: fixed, tokens: 10}, output: {kind: fixed, tokens: 10}}
"""

for _cell in (_work := Work(parse_document(_TINY, "tiny"))).cells():
    attempt(_work, _cell)
