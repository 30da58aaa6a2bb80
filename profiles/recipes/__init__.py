"""How the shipped profiles are made: ``python -m profiles.build`` reads ``../shared`` and writes the JSON files.

Start with `serving` (V4-Flash and V4-Pro from the paper's telemetry), then `b300`, `offline` (table 1), `dcut` and
`aic` (NVIDIA's kernel tables; `aiconfigurator` asks the package for more); `confidence` fits figure 6 for all of them,
`sources` reads the reference data and names it in provenance, `catalogue` lists every profile. The result is the same
bytes each time; a test builds all profiles anew and compares.
"""
