"""From points to laws: pure numpy and scipy, each fit with its residuals and with what it cannot tell apart.

Start with `least_squares` (costs that cannot be negative, relative residuals), then `closed_loop` (the law of a step
from runs at constant load), `request_log` (the same from requests one by one), `step_table` and `acceptance`.
`to_profile` turns what they give into sections with provenance, `report` says what was found and what stays open.
"""
