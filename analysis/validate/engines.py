"""The rung ``engines``: other people's engines, without speculation and with it.

Start with `engines_logs` (two vLLM runs, request by request), then `engines_dcut` (a throughput table from a table of
steps), `engines_flash` (where a fixed draft length stops paying) and `engines_aic` (1,680 closed-loop points of 95
setups, lengths and loads left out). What is fitted is said at the head of each table, what is predicted below it.
"""

from __future__ import annotations

from analysis.validate.engines_aic import aic_report
from analysis.validate.engines_dcut import fixed_section, trimming_section
from analysis.validate.engines_flash import flash_section
from analysis.validate.engines_logs import log_sections
from analysis.validate.engines_plots import draw_logs
from analysis.validate.rungs import Report, Settings


def run(settings: Settings) -> Report:
    """Score all four."""
    series = tuple(draw_logs(settings)) if settings.draw else ()
    setups = aic_report(settings)
    sections = (
        *log_sections(settings),
        fixed_section(settings.shared),
        trimming_section(settings),
        flash_section(settings),
        *setups.sections,
    )
    return Report(sections, (*series, *setups.plots))
