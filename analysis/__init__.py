"""What is made of runs and profiles: plots, and the numbers read off them. matplotlib is imported here only.

Start with `style` (how a policy looks, how a figure is framed and saved), then `frontier` (throughput per GPU against
tokens/s per user: what is on it, a table, an area, the plot) and `run_plots` (a run over time: the verification budget
against load, the timeline). `session` draws what one ``sim.run`` gave; `profile_plots` draws a profile's curves.
"""
