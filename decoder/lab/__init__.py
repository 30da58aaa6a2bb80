"""The lab: text that a target wrote, what it was thinking, and drafters trained on both.

Start with `prompts.py` (what is asked, by domain), then `writing.py` (the target answers, many requests at once) and
`store.py` (where tokens and hidden states are kept). `bank.py` judges a block at every place of a text, `recording.py`
makes banks and a profile of it. Everything lies under one folder, ``lab/`` unless a command is
told otherwise::

    lab/<target>/target/            the target as a Hugging Face folder
    lab/<target>/text/<kind>/       shards of text with features: written-t1, written-t0, corpus
    lab/<target>/drafters/<name>/   checkpoints, with the state that training goes on from
    lab/<target>/measured/          banks of drafters that do not ship (the grid of figures 3 and 4)
"""
