"""Other people's measurement files, read as plain points: one module a tool, each format from its own documentation.

Start with `points` (what a run, a logged request and a set of acceptance counts are), then `rows` (a file as rows of
checked numbers). `sweeps` reads closed-loop runs of any known tool, `acceptance` what a drafter's tokens were worth,
`logs` requests one by one, `tables` step and draft times.
"""
