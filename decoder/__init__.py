"""Real speculative decoding in PyTorch: what is measured here, the simulator replays.

Start with `session.py` (a round: draft, decide, verify, commit), then the pure steps it is made of: `sampling.py`
(logits to one distribution), `accept.py` (the acceptance test), `stopping.py` (where output ends). `chance.py` is the
only place where luck enters. `drafter.py` is the seam behind which the drafters stand, one a file: `dspark.py` (the
parallel block of DFlash and DSpark, on `backbone.py`, `markov.py`, `confidence.py`), `chain.py` with `eagle3.py` and
`mtp.py`, `small_model.py`. `target.py` and `kv_cache.py` wrap the model that must be imitated exactly; `checkpoint.py`
reads and writes draft checkpoints, `config.py` says what is in them, `vocabulary.py` which tokens a drafter can say.
`calibration.py` and `evaluation.py` turn rounds into numbers. The commands are `generate.py`, `evaluate.py` and
`calibrate.py`, with `options.py` and `loading.py`.

Drafters come from `lab/` (text that a target wrote), `training/` with `losses.py`, and the commands `collect.py` and
`train.py`; what they are worth at every place of such text goes into a profile by `bank.py`.

`engine.py` serves many requests at once: `scheduler.py` says who is where (`served.py`: what is known of a request),
`batch_target.py` reads all their rows in one pass (`ragged.py`) over blocks of keys and values (`paged_kv.py`),
`batched_drafting.py` and `batched_sampling.py` do for a batch what the files above do for a request. `load.py` brings
it the simulator's traffic, `journal.py` writes the simulator's records: together they are the command `serve.py`.
`measure.py` turns step times (`step_times.py`) into a profile, also those of models of published `shapes.py`.
"""
