"""The folder of a sweep: what was asked, and a file a finished cell. What is finished stays, whatever happens then.

``sweep.json`` says what the cells depend on: the scenario with every default filled in, the digests of profiles and
traces, and versions. Its own digest stands in every cell's file; a file with another one, or one that was torn, counts
for nothing. Files appear by rename.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.files import digest as digest_of_file
from profiles.reading import short
from sim.build import Plant, profile_digests
from sim.cells import Cell, CellResult, Work
from sim.errors import Fault, InputError
from sim.output import versions, write_json
from sim.scenario import Scenario, at_point, parsed, resolved
from sim.workload.length_source import PairsOfTrace
from sim.workload.replay import Replay

log = logging.getLogger(__name__)

FORMAT = "dspark-sweep/1"
MANIFEST = "manifest.json"
_ASKED, _CELLS = "sweep.json", "cells"
#: Plots may look otherwise; numbers do not.
_OF_PLOTS = ("matplotlib", "pandas")


def dependences(work: Work, plants: Mapping[int | None, Plant]) -> dict[str, Any]:
    """Return everything that the results of a work's cells depend on, as plain data."""
    scenario = parsed(work.document)
    traces: dict[str, str] = {}
    profiles: dict[str, str] = {}
    for point, plant in plants.items():
        profiles |= profile_digests(plant)
        document = work.document if point is None else at_point(work.document, scenario.axes, point)
        for path in _trace_paths(parsed(document)):
            if path not in traces:
                traces[path] = digest_of_file(Path(work.document.file).parent / path)
    return {
        "scenario": resolved(scenario),
        "strict": work.strict,
        "profiles": profiles,
        "traces": traces,
        "versions": {name: one for name, one in versions().items() if name not in _OF_PLOTS},
    }


def _trace_paths(scenario: Scenario) -> Iterator[str]:
    for section in (scenario.arrivals, scenario.lengths):
        if isinstance(section, Replay | PairsOfTrace):
            yield section.path


@dataclass(frozen=True, slots=True)
class CellStore:
    """The results of a sweep's cells under ``folder``."""

    folder: Path
    digest: str

    def save(self, result: CellResult) -> None:
        """Keep what a cell gave."""
        cell = result.cell
        data = {
            "sweep": self.digest,
            "cell": {"policy": cell.policy, "point": cell.point, "replication": cell.replication},
            "metrics": result.metrics,
            "trace_rows": result.trace_rows,
            "caveats": list(result.caveats),
        }
        try:
            write_json(data, self._path(cell))
        except OSError as error:
            raise _cannot_write(self.folder, error) from None

    def load(self, cell: Cell) -> CellResult | None:
        """Return what a cell gave; None where it is not finished."""
        path = self._path(cell)
        try:
            data = json.loads(path.read_bytes())
            if data["sweep"] != self.digest:
                raise ValueError("of another sweep")
            metrics = {name: _number(value) for name, value in data["metrics"].items()}
            return CellResult(cell, metrics, {}, data["trace_rows"], tuple(data["caveats"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s: not usable, its cell runs again (%s)", path, error)
            return None

    def _path(self, cell: Cell) -> Path:
        return self.folder / _CELLS / f"{cell.point or 0:05d}-{cell.replication:03d}-{cell.policy:02d}.json"


def open_store(folder: Path, asked: dict[str, Any], *, resume: bool) -> CellStore:
    """Open the folder of a sweep for what is ``asked`` (`dependences`).

    ``resume`` keeps the cells that are there, and raises `InputError`, saying what differs, where something else was
    asked for. Without it a sweep that was finished gives way to the new one; one that was not, and whatever else the
    folder holds, is left alone (`InputError`).
    """
    text = json.dumps(asked, sort_keys=True)
    store = CellStore(folder, hashlib.sha256(text.encode()).hexdigest())
    earlier = _read(folder / _ASKED)
    try:
        if earlier is not None and resume:
            changes = list(differences(earlier["asked"], json.loads(text)))
            if changes:
                more = f"; and {len(changes) - 8} more" if len(changes) > 8 else ""
                message = "cannot resume, it was begun with something else: " + "; ".join(changes[:8]) + more
                raise InputError(Fault(message, str(folder)))
        elif earlier is not None and not _is_complete(folder):
            count = sum(1 for _ in (folder / _CELLS).glob("*.json"))
            message = (
                f"holds an unfinished sweep ({count} cells are done); --resume it, remove it or give another --out"
            )
            raise InputError(Fault(message, str(folder)))
        elif earlier is None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(Fault("exists and is not a sweep's folder; give another --out", str(folder)))
        elif earlier is not None:
            if Path.cwd().is_relative_to(folder.resolve()):
                raise InputError(Fault("is or holds the folder that we are in; give another --out", str(folder)))
            shutil.rmtree(folder)
        (folder / _CELLS).mkdir(parents=True, exist_ok=True)
        write_json({"format": FORMAT, "digest": store.digest, "asked": asked}, folder / _ASKED)
    except OSError as error:
        raise _cannot_write(folder, error) from None
    return store


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and data.get("format") == FORMAT and "asked" in data else None


def _is_complete(folder: Path) -> bool:
    """Whether every cell of a sweep is finished; its manifest is written last."""
    try:
        return bool(json.loads((folder / MANIFEST).read_bytes())["failed"] == [])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _number(value: Any) -> Any:
    return {"inf": math.inf, "-inf": -math.inf}.get(value, value) if isinstance(value, str) else value


def _cannot_write(path: Path, error: OSError) -> InputError:
    return InputError(Fault(f"cannot write: {(error.strerror or str(error)).lower()}", str(path)))


def differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """Say what differs between two trees of plain data: ``fleet.replicas: 4, now 8``."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            inner = f"{key}.{name}".removeprefix("scenario.").lstrip(".")
            if name not in new:
                yield f"{inner}: {short(old[name])}, now not there"
            elif name not in old:
                yield f"{inner}: was not there, now {short(new[name])}"
            else:
                yield from differences(old[name], new[name], f"{key}.{name}".lstrip("."))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{key}[{index}]")
    elif old != new:
        short_key = key.removeprefix("scenario.")
        if key == "versions.code":
            yield "the source of sim or profiles changed"
        elif key.startswith(("profiles.", "traces.")):
            yield f"{short_key}: the file changed"
        else:
            yield f"{short_key}: {short(old)}, now {short(new)}"
