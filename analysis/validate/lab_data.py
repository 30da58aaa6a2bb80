"""What the lab measured, as the rung ``lab`` reads it: banks by drafter and domain, times by drafter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles.files import BankArrays, load_bank, load_profile
from profiles.recipes.banks import Estimate, Rounds, bootstrap, follow
from profiles.recipes.quality import PositionQuality, judge_survival
from profiles.schema import Bank, Provenance

Floats = NDArray[np.float64]

DOMAIN_ORDER = ("code", "math", "chat")
#: Resampled texts of calibration scores, which take longer than sums.
FEW_DRAWS = 200
#: Keeps the texts of two domains apart: none has as many.
APART = 1_000_000


@dataclass(frozen=True, slots=True)
class Measured:
    """A drafter's banks at one temperature, by domain; ``sources``: where each came from."""

    name: str
    draft_length: int
    banks: Mapping[str, BankArrays]
    sources: Mapping[str, Provenance]

    def rounds(self, domain: str | None = None) -> Rounds:
        """Return the rounds of one domain, or of all together."""
        domains = [domain] if domain else list(self.banks)
        parts = [follow(self.banks[one]) for one in domains]
        # By domain, then by text: ascending, as `common` wants them.
        shifted = [part.request + APART * DOMAIN_ORDER.index(one) for part, one in zip(parts, domains, strict=True)]

        def joined(name: str) -> Floats:
            return np.asarray(np.concatenate([getattr(part, name) for part in parts]))

        names = ("rounds", "emitted", "verified", "judged", "held")
        return Rounds(np.concatenate(shifted), *(joined(name) for name in names))

    def judged_half(self) -> tuple[BankArrays, NDArray[np.int64]]:
        """Return the texts that calibration did not see (odd numbers), and each position's text."""
        parts = [chosen(bank, bank.request % 2 == 1) for bank in self.banks.values()]
        texts = [part.request + APART * index for index, part in enumerate(parts)]
        names = BankArrays.__dataclass_fields__
        return BankArrays(*(np.concatenate([getattr(part, name) for part in parts]) for name in names)), np.concatenate(
            texts
        )


def chosen(bank: BankArrays, rows: NDArray[np.bool_]) -> BankArrays:
    """Return some positions of a bank."""
    return BankArrays(*(getattr(bank, name)[rows] for name in BankArrays.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class Lab:
    """Everything that was measured: drafters by temperature and name, on corpus text by name, and times by drafter."""

    by_temperature: Mapping[float, Mapping[str, Measured]]
    corpus: Mapping[str, Measured]
    speed: Mapping[str, Mapping[str, Any]]

    def find(self, name: str, temperature: float = 1.0) -> Measured | None:
        """Return a drafter, None where it was not measured."""
        return self.by_temperature.get(temperature, {}).get(name)


def load_lab(folders: Sequence[Path], speed: Path) -> Lab:
    """Read every profile of the folders whose name ends in ``_t0``, ``_t1`` or ``_corpus``; raises `ProfileError`."""
    found: dict[float, dict[str, Measured]] = {}
    corpus: dict[str, Measured] = {}
    for folder in folders:
        for path in sorted(folder.glob("*_t[01].json")):
            found.setdefault(float(path.stem[-1]), {}).update(load_measured(path))
        for path in sorted(folder.glob("*_corpus.json")):
            corpus.update(load_measured(path))
    times = {}
    for path in sorted(speed.glob("speed_*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if "speed" not in report:
            continue
        rows = report["speed"]["by_domain"]
        for row in rows.values():
            row |= {key: float("nan") for key, value in row.items() if value is None}
        times[path.stem.removeprefix("speed_")] = report["speed"]
    return Lab(found, corpus, times)


def load_measured(path: Path) -> dict[str, Measured]:
    """Read the banks of a profile, by drafter; domains that the lab does not know are left out."""
    own = {}
    for name, drafter in load_profile(path).acceptance.items():
        laws = {d: law for d, law in drafter.domains.items() if isinstance(law, Bank) and d in DOMAIN_ORDER}
        ordered = sorted(laws, key=DOMAIN_ORDER.index)
        banks = {domain: load_bank(laws[domain], path, drafter.trained_length) for domain in ordered}
        own[name] = Measured(
            name, drafter.trained_length, banks, {domain: laws[domain].provenance for domain in ordered}
        )
    return own


# ---------------------------------------------------------------------------------------------------------- calibration


@dataclass(frozen=True, slots=True)
class Quality:
    """Raw and calibrated confidence of one drafter, on texts that calibration did not see.

    By position: ``before`` and ``after``. ``excess``: raw survival predicted
    minus seen, ``mended``: ECE before minus after, means over positions, with intervals over texts.
    """

    before: Sequence[PositionQuality]
    after: Sequence[PositionQuality]
    excess: Estimate
    mended: Estimate


def qualities(drafters: Mapping[str, Measured], names: Sequence[str]) -> dict[str, Quality]:
    """Judge the confidences of some drafters."""
    return {name: quality_of(drafters[name]) for name in names if name in drafters}


def quality_of(drafter: Measured) -> Quality:
    """Judge the confidence of one drafter."""
    bank, text = drafter.judged_half()
    survived = np.logical_and.accumulate(bank.accepted, axis=1)
    raw = np.asarray(np.cumprod(bank.confidence_raw, axis=1), np.float64)
    calibrated = np.asarray(np.cumprod(bank.confidence, axis=1), np.float64)
    positions = range(survived.shape[1])
    texts, group = np.unique(text, return_inverse=True)
    rows_of = [np.flatnonzero(group == number) for number in range(len(texts))]
    gap = np.array([(raw[rows] - survived[rows]).mean(1).sum() for rows in rows_of])
    counts = np.array([float(len(rows)) for rows in rows_of])

    def mean_ece(survival: Floats, rows: NDArray[np.int64]) -> float:
        return float(np.mean([judge_survival(survival[rows, k], survived[rows, k]).ece for k in positions]))

    def mended(weights: Floats) -> Floats:
        found = []
        for w in weights:
            rows = np.concatenate([np.tile(rows_of[number], int(w[number])) for number in np.flatnonzero(w)])
            found.append(mean_ece(raw, rows) - mean_ece(calibrated, rows))
        return np.array(found)

    return Quality(
        [judge_survival(raw[:, k], survived[:, k], k) for k in positions],
        [judge_survival(calibrated[:, k], survived[:, k], k) for k in positions],
        bootstrap(len(texts), lambda w: (w @ gap) / (w @ counts)),
        bootstrap(len(texts), mended, draws=FEW_DRAWS),
    )
