"""Traffic: when requests arrive, how long they are and what they are about.

Start with `base` (the table of requests and the seams), then `build` (from a scenario's sections to requests).
Arrivals: `renewal` (poisson, gamma), `on_off`, `varying` (diurnal, peak), `closed_loop`, `replay` with its readers in
`trace`. Lengths: `lengths` (the laws), `length_source` (a law each, or pairs of a trace). `domains`: the mix. Pure
numpy, without a clock: the real engine's load driver uses the same objects as the simulator.
"""
