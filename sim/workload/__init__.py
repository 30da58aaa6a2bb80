"""Traffic: when requests arrive, how long they are and what they are about.

Start with `base` (the table of requests and the seams), then `arrivals`, `lengths`, `domains`, `replay`.
"""
