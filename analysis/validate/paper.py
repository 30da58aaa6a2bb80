"""The rung ``paper``: what was fitted, what is predicted from it, and how far it is off."""

from __future__ import annotations

from analysis.validate import claims, offline, plateaus, telemetry
from analysis.validate.closed_loop import run_cells
from analysis.validate.plots import draw_all
from analysis.validate.rungs import Report, Settings


def run(settings: Settings) -> Report:
    """Run every part, print in the order of the paper, draw into ``settings.out``."""
    shared, run = settings.shared, settings.run_cells or run_cells
    longer = offline.longer_drafts(shared)
    raw, calibrated = (offline.threshold_sweep(shared, confidence) for confidence in ("raw", "calibrated"))
    calibrations = offline.calibrations(shared)
    outcome = telemetry.simulate_all(shared, seed=settings.seed, jobs=settings.jobs, quick=settings.quick, run=run)
    jagged = plateaus.simulate_jagged(shared, seed=settings.seed, jobs=settings.jobs, quick=settings.quick, run=run)
    evidence = claims.Evidence(shared, outcome, jagged, longer, raw, calibrations, settings.assume)
    sections = (
        offline.fitted_section(shared),
        offline.longer_section(longer),
        offline.sweep_section(raw, calibrated),
        offline.calibration_section(calibrations),
        *telemetry.sections(shared, outcome, settings.assume),
        plateaus.section(jagged),
    )
    plots = tuple(draw_all(evidence, settings.out)) if settings.draw else ()
    return Report(sections, plots, tuple(claims.all_claims(evidence)))
