"""Set what the simulator predicts beside what others measured: ``python -m analysis.validate paper``.

Start with `rungs` (what a rung is and what it reports) and `command` (the command). `paper` is a rung: `published`
reads the paper's figures, `offline` predicts figures 4 to 6, `closed_loop` simulates a constant number of requests,
`serving` predicts figures 7 and 8 from it, `telemetry` holds that against the clouds, `plateaus` looks for preferred
batches, `claims` judges what is said about DSpark; `plots` draws. `lab` is another: what `lab_data` reads of recorded
banks, judged in `lab_claims`, laid out in `lab_figures`. `law` holds a fitted law against the bank it was fitted to.
`engines` holds other people's engines against it: `engines_logs`, `engines_dcut`, `engines_flash`, `engines_aic`, all
through `engines_cells`; `engines_plots` draws. `document` writes `docs/validation.md` from what rungs print, and checks
it: `kept` spares it to simulate what was simulated, `verdicts` judges the claims from all rungs together.
"""
