"""What the lab measured, as the rung ``lab`` reads it: banks by drafter and domain, times by drafter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles.errors import Fault, ProfileError
from profiles.files import BankArrays, load_bank, load_profile
from profiles.recipes.banks import Estimate, Rounds, bootstrap, follow
from profiles.recipes.quality import PositionQuality, judge_survival
from profiles.schema import Bank, Provenance

Floats = NDArray[np.float64]

#: Where `keep_grid` keeps it, beside the report.
GRID = "grid.json"
DOMAIN_ORDER = ("code", "math", "chat")
#: Resampled texts of calibration scores, which take longer than sums.
FEW_DRAWS = 200
#: What `Rounds` holds beside the texts' numbers.
_SUMS = ("rounds", "emitted", "verified", "judged", "held")
#: Keeps the texts of two domains apart: none has as many.
APART = 1_000_000


@dataclass(frozen=True, slots=True)
class Followed:
    """A drafter's rounds at one temperature, by domain; ``sources``: where each came from."""

    name: str
    draft_length: int
    by_domain: Mapping[str, Rounds]
    sources: Mapping[str, Provenance]

    def rounds(self, domain: str | None = None) -> Rounds:
        """Return the rounds of one domain, or of all together."""
        domains = [domain] if domain else list(self.by_domain)
        parts = [self.by_domain[one] for one in domains]
        # By domain, then by text: ascending, as `common` wants them.
        shifted = [part.request + APART * DOMAIN_ORDER.index(one) for part, one in zip(parts, domains, strict=True)]

        def joined(name: str) -> Floats:
            return np.asarray(np.concatenate([getattr(part, name) for part in parts]))

        return Rounds(np.concatenate(shifted), *(joined(name) for name in _SUMS))


@dataclass(frozen=True, slots=True)
class Measured(Followed):
    """A drafter whose banks are at hand, by domain."""

    banks: Mapping[str, BankArrays]

    def judged_half(self) -> tuple[BankArrays, NDArray[np.int64]]:
        """Return the texts that calibration did not see (odd numbers), and each position's text."""
        parts = [chosen(bank, bank.request % 2 == 1) for bank in self.banks.values()]
        texts = [part.request + APART * index for index, part in enumerate(parts)]
        names = BankArrays.__dataclass_fields__
        return BankArrays(*(np.concatenate([getattr(part, name) for part in parts]) for name in names)), np.concatenate(
            texts
        )


def measured(
    name: str, draft_length: int, banks: Mapping[str, BankArrays], sources: Mapping[str, Provenance]
) -> Measured:
    """Follow a drafter's banks."""
    return Measured(name, draft_length, {domain: follow(bank) for domain, bank in banks.items()}, sources, banks)


def chosen(bank: BankArrays, rows: NDArray[np.bool_]) -> BankArrays:
    """Return some positions of a bank."""
    return BankArrays(*(getattr(bank, name)[rows] for name in BankArrays.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class Lab:
    """Everything that was measured: drafters by temperature and name, on corpus text by name, and times by drafter.

    ``grid``: drafters of other depths, lengths and heads, at temperature 1; see `keep_grid`.
    """

    by_temperature: Mapping[float, Mapping[str, Measured]]
    corpus: Mapping[str, Measured]
    grid: Mapping[str, Followed]
    speed: Mapping[str, Mapping[str, Any]]

    def find(self, name: str, temperature: float = 1.0) -> Measured | None:
        """Return a drafter, None where it was not measured."""
        return self.by_temperature.get(temperature, {}).get(name)


def load_lab(profiles: Path, docs: Path) -> Lab:
    """Read every profile of a folder whose name ends in ``_t0``, ``_t1`` or ``_corpus``, and what ``docs`` keeps.

    Raises `ProfileError`.
    """
    found: dict[float, dict[str, Measured]] = {}
    corpus: dict[str, Measured] = {}
    for path in sorted(profiles.glob("*_t[01].json")):
        found.setdefault(float(path.stem[-1]), {}).update(load_measured(path))
    for path in sorted(profiles.glob("*_corpus.json")):
        corpus.update(load_measured(path))
    times = {}
    for path in sorted(docs.glob("speed_*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if "speed" not in report:
            continue
        rows = report["speed"]["by_domain"]
        for row in rows.values():
            row |= {key: float("nan") for key, value in row.items() if value is None}
        times[path.stem.removeprefix("speed_")] = report["speed"]
    return Lab(found, corpus, load_grid(docs / GRID), times)


def load_measured(path: Path) -> dict[str, Measured]:
    """Read the banks of a profile, by drafter; domains that the lab does not know are left out."""
    own = {}
    for name, drafter in load_profile(path).acceptance.items():
        laws = {d: law for d, law in drafter.domains.items() if isinstance(law, Bank) and d in DOMAIN_ORDER}
        ordered = sorted(laws, key=DOMAIN_ORDER.index)
        banks = {domain: load_bank(laws[domain], path, drafter.trained_length) for domain in ordered}
        sources = {domain: laws[domain].provenance for domain in ordered}
        own[name] = measured(name, drafter.trained_length, banks, sources)
    return own


def keep_grid(folders: Sequence[Path], path: Path) -> None:
    """Keep the rounds of drafters that do not ship, whose banks, of temperature 1, lie in some folders.

    Where there are none, what was kept before stays. The rounds of every text are enough for figures 3 and 4 and the
    claims about them, and a small part of the banks.
    """
    drafters: dict[str, Measured] = {}
    for folder in folders:
        for profile in sorted(folder.glob("*_t1.json")):
            drafters.update(load_measured(profile))
    if not drafters:
        return
    rows = {
        name: {
            "draft_length": one.draft_length,
            "domains": {
                domain: {
                    "provenance": one.sources[domain].model_dump(mode="json", exclude_none=True),
                    **{key: getattr(rounds, key).astype(int).tolist() for key in ("request", *_SUMS)},
                }
                for domain, rounds in one.by_domain.items()
            },
        }
        for name, one in sorted(drafters.items())
    }
    part = path.with_name(path.name + ".part")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    part.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    part.replace(path)


def load_grid(path: Path) -> dict[str, Followed]:
    """Read what `keep_grid` wrote; nothing where it wrote nothing. Raises `ProfileError`."""
    if not path.exists():
        return {}
    grid = {}
    try:
        for name, row in json.loads(path.read_text(encoding="utf-8")).items():
            domains = row["domains"].items()
            grid[name] = Followed(
                name,
                row["draft_length"],
                {
                    domain: Rounds(np.array(own["request"]), *(np.array(own[key], np.float64) for key in _SUMS))
                    for domain, own in domains
                },
                {domain: Provenance.model_validate(own["provenance"]) for domain, own in domains},
            )
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        again = "python -m analysis.validate lab"
        raise ProfileError(Fault(f"is no grid of the lab ({fault}); write it again: {again}", str(path))) from None
    return grid


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
