"""Speed on request: ``make bench``. `workloads` has the five public workloads, `__main__` measures and prints."""
