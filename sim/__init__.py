"""A SimPy fleet that serves traffic under pluggable verification policies, fed by measured or published curves.

Start with `scenario` (the file; `loading` reads it, `conflicts` says what cannot be in it), then `fleet` (arrivals, a
router, replicas), `replica` and `kernels` (the step loop). `acceptance` and `rng` are where chance enters; `records`
says what comes out (`recorder` hands it on while a run goes, `invariants` checks it), `metrics` what it means;
`verify`, `workload`, `batching` and `routing` hold the decisions. `run`, `sweep` and `plan` are the commands; `cells`
cuts their work into independent pieces, which `executors` runs.
"""
