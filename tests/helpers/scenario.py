"""A scenario so small that it ends at once, and how to spoil it."""

#: Line 1 is ``name``, 7 ``policies``, 8 ``arrivals``, 11 the last.
TINY = """\
name: tiny
horizon: 2s
fleet:
  replicas: 1
  profile: paper/v4_flash
  kv_cache: 4GiB
policies: [none, dspark]
arrivals: {kind: poisson, rate_per_s: 4}
lengths:
  prompt: {kind: fixed, tokens: 50}
  output: {kind: fixed, tokens: 20}
"""


def changed(old: str, new: str) -> str:
    """Return the tiny scenario with one part, which it holds once, replaced."""
    assert TINY.count(old) == 1, old
    return TINY.replace(old, new)
