"""Load and save profiles: ``paper/v4_flash`` is ``profiles/paper/v4_flash.json``; a path works too."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles.errors import Fault, ProfileError
from profiles.reading import known_text, read_document, validate
from profiles.schema import Bank, Profile

SHIPPED = Path(__file__).parent


def known_profiles() -> list[str]:
    """Return the names of the shipped profiles."""
    return sorted(
        str(path.relative_to(SHIPPED).with_suffix("")).replace(os.sep, "/") for path in SHIPPED.rglob("*.json")
    )


def find_profile(name: str, beside: Path | None = None) -> Path:
    """Return the file of a profile name or path (relative to the file that names it, or to here)."""
    if name.endswith(".json"):
        candidates = [Path(name)] if beside is None else [beside / name, Path(name)]
        return next((path for path in candidates if path.exists()), candidates[0])
    if name in known_profiles():
        return SHIPPED / f"{name}.json"
    if Path(name).is_file():
        raise ProfileError(Fault("is no profile: expected a file whose name ends in .json", name))
    raise ProfileError(
        Fault(f"unknown profile '{name}'; {known_text(name, known_profiles())}, or a path that ends in .json")
    )


def load_profile(path: Path) -> Profile:
    """Read and check a profile file; raises `ProfileError` with every fault."""
    profile: Profile = validate(Profile, read_document(path, ProfileError), ProfileError)
    return profile


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON; it appears by rename, whole or not at all."""
    text = json.dumps(profile.model_dump(mode="json", exclude_none=True), indent=1) + "\n"
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def digest(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class BankArrays:
    """A recorded acceptance bank: a block drafted at every position of text that the target wrote.

    ``confidence_raw``, ``confidence``: raw and calibrated, ``[positions, draft_length]``; ``chance``: 1 - TV of draft
    and target there (at temperature 0: 1 where they agree); ``accepted``: the outcome a draft token had;
    ``request``, ``position``: which text and where in it, ``[positions]``: text by text, each from position 0 on, none
    left out, since requests begin where texts begin.
    """

    confidence_raw: NDArray[np.float64]
    confidence: NDArray[np.float64]
    chance: NDArray[np.float64]
    accepted: NDArray[np.bool_]
    request: NDArray[np.int64]
    position: NDArray[np.int64]


def _read_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    with archive.open(name) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def load_bank(bank: Bank, profile_path: Path, draft_length: int) -> BankArrays:
    """Read the bank beside a profile; raises `ProfileError` if it is missing, altered or inconsistent."""
    path = profile_path.parent / bank.file
    try:
        found = digest(path)
        if found != bank.sha256:
            raise ProfileError(Fault(f"sha256 is {found}; the profile says {bank.sha256}", str(path)))
        with zipfile.ZipFile(path) as archive:
            arrays = {name.removesuffix(".npy"): _read_array(archive, name) for name in archive.namelist()}
    except OSError as fault:
        raise ProfileError(Fault(f"cannot read: {(fault.strerror or str(fault)).lower()}", str(path))) from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as fault:
        raise ProfileError(Fault(f"not an npz archive without pickle: {str(fault).lower()}", str(path))) from None
    expected = list(BankArrays.__dataclass_fields__)
    if sorted(arrays) != sorted(expected):
        found = ", ".join(sorted(arrays)) or "none"
        raise ProfileError(Fault(f"arrays are {found}; expected {', '.join(expected)}", str(path)))
    rows = arrays["position"].shape[0] if arrays["position"].ndim == 1 else 0
    for name in expected:
        want = (rows,) if name in ("request", "position") else (rows, draft_length)
        array = arrays[name]
        if array.shape != want or rows == 0:
            raise ProfileError(Fault(f"{name} has shape {array.shape}; expected {want}, at least one row", str(path)))
        kinds, noun = ("b", "true or false") if name == "accepted" else ("iu", "whole numbers")
        if name in ("confidence_raw", "confidence", "chance"):
            kinds, noun = "f", "numbers"
        if array.dtype.kind not in kinds:
            raise ProfileError(Fault(f"{name} holds {array.dtype}; expected {noun}", str(path)))
        if name in ("confidence_raw", "confidence", "chance") and not ((array >= 0) & (array <= 1)).all():
            raise ProfileError(Fault(f"{name} has values outside [0, 1]", str(path)))
    request, position = arrays["request"].astype(np.int64), arrays["position"].astype(np.int64)
    begins = np.diff(request, prepend=request[0] - 1) != 0
    wanted = np.arange(rows) - np.maximum.accumulate(np.where(begins, np.arange(rows), 0))
    if (position != wanted).any() or np.unique(request).size != begins.sum():
        row = int((position != wanted).argmax())
        raise ProfileError(
            Fault(
                f"position is {position[row]} at row {row}; expected request by request, each position from 0 on",
                str(path),
            )
        )
    return BankArrays(
        confidence_raw=arrays["confidence_raw"].astype(np.float64),
        confidence=arrays["confidence"].astype(np.float64),
        chance=arrays["chance"].astype(np.float64),
        accepted=arrays["accepted"].astype(np.bool_),
        request=request,
        position=position,
    )
