"""Training drafters on text that a target wrote.

Start with `loop.py` (steps, schedule, state on disk; `muon.py` is one of its two ways to step), then `objective.py`,
the seam behind which the drafters' losses stand: `block.py` (DSpark and DFlash), `chain.py` (EAGLE-3 and MTP),
`small.py` (a small language model). `batches.py` reads the lab's text. The losses themselves are in
`decoder/losses.py`; the command is `decoder/train.py`.
"""
