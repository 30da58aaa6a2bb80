"""Recorded acceptance: what a bank must hold, and what is said of one that does not."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiles.errors import ProfileError
from profiles.files import load_bank
from profiles.schema import Bank, Provenance

ROWS, BLOCK = 6, 3


def arrays(**changes: Any) -> dict[str, Any]:
    half = np.full((ROWS, BLOCK), 0.5)
    return {
        "confidence_raw": half,
        "confidence": half,
        "chance": half,
        "accepted": np.ones((ROWS, BLOCK), bool),
        "request": np.array([0, 0, 0, 1, 1, 1]),
        "position": np.array([0, 1, 2, 0, 1, 2]),
        **changes,
    }


def bank_of(path: Path) -> Bank:
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Bank(file=path.name, sha256=sha256, provenance=Provenance(origin="measured", source="a test"))


def saved(folder: Path, **changes: Any) -> Path:
    path = folder / "bank.npz"
    np.savez(path, **{name: array for name, array in arrays(**changes).items() if array is not None})
    return path


def test_a_good_bank_comes_back_as_it_was(tmp_path: Path) -> None:
    bank = load_bank(bank_of(saved(tmp_path)), tmp_path / "p.json", BLOCK)
    for name, array in arrays().items():
        np.testing.assert_array_equal(getattr(bank, name), array)


HALF = np.full((ROWS, BLOCK), 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"confidence": HALF[:, :2]}, "confidence has shape (6, 2); expected (6, 3), at least one row"),
        ({"request": np.zeros(5, int)}, "request has shape (5,); expected (6,), at least one row"),
        ({"chance": HALF * np.nan}, "chance has values outside [0, 1]"),
        ({"chance": HALF * 3}, "chance has values outside [0, 1]"),
        ({"accepted": HALF}, "accepted holds float64; expected true or false"),
        ({"position": np.arange(6.0)}, "position holds float64; expected whole numbers"),
        ({"confidence": np.full((ROWS, BLOCK), "x")}, "confidence holds <U1; expected numbers"),
        (
            {"position": np.array([0, 1, 2, 1, 2, 3])},
            "position is 1 at row 3; expected request by request, each position from 0 on",
        ),
        (
            {"position": np.arange(6)},
            "position is 3 at row 3; expected request by request, each position from 0 on",
        ),
        (
            {"request": np.array([0, 1, 0, 1, 0, 1]), "position": np.array([0, 0, 1, 1, 2, 2])},
            "position is 1 at row 2; expected request by request, each position from 0 on",
        ),
        (
            {"chance": None},
            "arrays are accepted, confidence, confidence_raw, position, request; expected confidence_raw, confidence, "
            "chance, accepted, request, position",
        ),
        (
            {"chance": np.array([{}], dtype=object)},
            "not an npz archive without pickle: object arrays cannot be loaded when allow_pickle=false",
        ),
    ],
    ids=["width", "rows", "nan", "range", "bool", "whole", "text", "late", "gap", "mixed", "missing", "pickle"],
)
def test_a_bad_bank_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = saved(tmp_path, **changes)
    with pytest.raises(ProfileError) as fault:
        load_bank(bank_of(path), tmp_path / "p.json", BLOCK)
    assert str(fault.value) == f"{path}: {message}"


def test_an_empty_bank_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, **{name: array[:0] for name, array in arrays().items()})
    with pytest.raises(ProfileError, match=r"has shape \(0, 3\); expected \(0, 3\), at least one row"):
        load_bank(bank_of(path), tmp_path / "p.json", BLOCK)


def test_an_altered_bank_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    bank = bank_of(path)
    path.write_bytes(path.read_bytes() + b"\0")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ProfileError) as fault:
        load_bank(bank, tmp_path / "p.json", BLOCK)
    assert str(fault.value) == f"{path}: sha256 is {found}; the profile says {bank.sha256}"


def test_a_missing_bank_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path)
    bank = bank_of(path)
    path.unlink()
    with pytest.raises(ProfileError) as fault:
        load_bank(bank, tmp_path / "p.json", BLOCK)
    assert str(fault.value) == f"{path}: cannot read: no such file or directory"


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"", "file is not a zip file"), (b"{}", "file is not a zip file")],
)
def test_what_is_no_archive_is_refused(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "bank.npz"
    path.write_bytes(content)
    with pytest.raises(ProfileError) as fault:
        load_bank(bank_of(path), tmp_path / "p.json", BLOCK)
    assert str(fault.value) == f"{path}: not an npz archive without pickle: {problem}"


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(ProfileError):
            load_bank(bank_of(path), tmp_path / "p.json", BLOCK)
