"""Profiles: what a step costs and what draft tokens are worth, measured or published, with provenance.

Start with `schema` (what a profile says), then `files` (load, save), `curves` (evaluated for the step loop).
`reading` turns YAML and JSON into checked data with line numbers; scenarios use it too.
"""
