"""Verification policies: how many draft tokens of each request the target checks in a step.

Start with `base` (the seam), then one file a policy; `check` proves or refutes that a policy is lossless.
"""
