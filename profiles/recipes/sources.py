"""The reference data beside the repository: reading it, and naming it the way provenance does."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ruamel.yaml import YAML

from profiles.errors import Fault, ProfileError

Floats = NDArray[np.float64]
Row = dict[str, str]

TELEMETRY = "reference/dspark_paper/derived_mtp_step_time.csv"
POSITIONS = "reference/dspark_paper/fig2_position_conditional_acceptance.csv"
RELIABILITY = "reference/dspark_paper/fig6_reliability_points.csv"
HISTOGRAM = "reference/dspark_paper/fig6_confidence_histogram.csv"
PRINTED = "reference/dspark_paper/fig6_printed_statistics.csv"
ACCEPTED = "reference/dspark_paper/table1_accepted_length.csv"
B300 = "reference/engines/v4_flash_b300_tp4_step_cost.csv"
DCUT_STEPS = "reference/engines/dcut_h20_step_time.csv"
DCUT_THROUGHPUT = "reference/engines/dcut_h20_throughput.csv"
SURVIVAL = "reference/engines/survival_by_position.csv"
PRO_DSPARK = "traces/spec-acceptance/inferencex/dsv4-pro-0813-dspark.yaml"
PRO_MTP = "traces/spec-acceptance/inferencex/dsv4_mtp.yaml"


def cite(*files: str) -> str:
    """Name files of the reference data as provenance does: relative to the repository."""
    return ", ".join(f"../shared/{file}" for file in files)


@dataclass(frozen=True, slots=True)
class Shared:
    """The folder of reference data."""

    root: Path

    def rows(self, file: str, **only: str) -> list[Row]:
        """Return the rows of a CSV file whose columns equal ``only``; raises `ProfileError` where there are none."""
        try:
            with (self.root / file).open(newline="", encoding="utf-8") as lines:
                rows = [row for row in csv.DictReader(lines) if all(row[key] == only[key] for key in only)]
        except OSError as fault:
            problem = f"cannot read: {(fault.strerror or str(fault)).lower()}; --shared names the folder it is in"
            raise ProfileError(Fault(problem, str(self.root / file))) from None
        if not rows:
            raise ProfileError(Fault(f"no rows with {only}", str(self.root / file)))
        return rows

    def columns(self, file: str, *names: str, **only: str) -> tuple[Floats, ...]:
        """Return columns of a CSV file as numbers, from the rows that equal ``only``."""
        rows = self.rows(file, **only)
        return tuple(np.array([float(row[name]) for row in rows]) for name in names)

    def yaml(self, file: str) -> Any:
        """Return a YAML file as plain data."""
        try:
            return YAML(typ="safe").load((self.root / file).read_text(encoding="utf-8"))
        except OSError as fault:
            problem = f"cannot read: {(fault.strerror or str(fault)).lower()}; --shared names the folder it is in"
            raise ProfileError(Fault(problem, str(self.root / file))) from None


def seconds(value: float) -> float:
    """Round a time to five significant digits: more than any of the readings has, and the same on every machine."""
    return float(f"{value:.5g}")


def chance(value: float) -> float:
    """Round a probability to nine decimals: enough for published sums to come out, the same on every machine."""
    return round(float(value), 9)
