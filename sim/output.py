"""What a run leaves behind: ``runs/<name>/``, which appears by rename, whole or not at all."""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import math
import platform
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sim.errors import Fault, InputError
from sim.records import Columns, Sink

#: Packages whose version may change a result.
PACKAGES = ("numpy", "scipy", "numba", "simpy", "pyarrow", "pandas", "matplotlib", "pydantic")


def slugs(texts: Sequence[str]) -> list[str]:
    """Turn labels into folder names, a different one each: ``fixed k=3`` into ``fixed_k3``."""
    names: list[str] = []
    taken: set[str] = set()
    for text in texts:
        name = base = re.sub(r"[^A-Za-z0-9_.-]+", "_", text.replace("=", "")).strip("._")[:80] or "_"
        count = 1
        while name.lower() in taken:  # some file systems do not tell case apart
            count += 1
            name = f"{base}__{count}"
        taken.add(name.lower())
        names.append(name)
    return names


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a folder to fill; it takes the place of ``path`` when the block ends well.

    An earlier run's folder is replaced; any other folder is not touched (`InputError`). When the block fails, nothing
    of it stays.
    """
    try:
        if path.exists() and not _is_replaceable(path):
            raise InputError(Fault("exists and is not a run's folder; give another --out", str(path)))
        if Path.cwd().is_relative_to(path.resolve()):
            raise InputError(Fault("is or holds the folder that we are in; give another --out", str(path)))
        part = path.with_name(f".{path.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    except OSError as error:
        raise InputError(Fault(f"cannot write: {(error.strerror or str(error)).lower()}", str(path))) from None
    try:
        yield part
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        part.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise InputError(Fault(f"cannot write: {(error.strerror or str(error)).lower()}", str(path))) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _is_replaceable(path: Path) -> bool:
    """Whether a folder is empty or an earlier run's."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        return isinstance(manifest, dict) and str(manifest.get("format")).startswith("dspark-run/")
    except (OSError, ValueError):
        return path.is_dir() and not any(path.iterdir())


def plain(value: Any) -> Any:
    """Make a value JSON can hold: infinities become the text ``inf``, NaN is our bug."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def write_json(data: Any, path: Path) -> None:
    """Write JSON by rename."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(plain(data), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


@contextmanager
def parquet_file(path: Path) -> Iterator[Sink]:
    """Give a sink that writes each group of rows as a row group of a Parquet file; NaN becomes null.

    The file appears by rename when the block ends well; otherwise nothing of it stays. At least one group is needed.
    Raises `InputError` where the disk refuses.
    """
    part = path.with_name(path.name + ".part")
    writer: pq.ParquetWriter | None = None

    def write(columns: Columns) -> None:
        nonlocal writer
        arrays = {name: pa.array(column, from_pandas=True) for name, column in columns.items()}
        texts = (name for name, column in columns.items() if column.dtype == object)
        arrays |= {name: arrays[name].cast(pa.string()).dictionary_encode() for name in texts}
        table = pa.table(arrays)
        if writer is None:
            writer = pq.ParquetWriter(part, table.schema, compression="zstd")
        writer.write_table(table)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield write
        assert writer is not None
        writer.close()
        part.replace(path)
    except OSError as error:
        raise InputError(Fault(f"cannot write: {(error.strerror or str(error)).lower()}", str(path))) from None
    finally:
        with suppress(OSError):  # a full disk refuses this too
            if writer is not None:
                writer.close()
            part.unlink(missing_ok=True)


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows of the same keys as Parquet; None is null, whole numbers stay so, what is no scalar becomes JSON."""
    columns = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        kinds = {type(value) for value in values if value is not None}
        if kinds <= {int, float}:
            columns[name] = pa.array(values, pa.int64() if kinds == {int} else pa.float64())
        elif kinds == {bool}:
            columns[name] = pa.array(values, pa.bool_())
        else:
            texts = [one if isinstance(one, str | None) else json.dumps(one) for one in values]
            columns[name] = pa.array(texts, pa.string())
    part = path.with_name(path.name + ".part")
    pq.write_table(pa.table(columns), part, compression="zstd")
    part.replace(path)


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows of the same keys as CSV; None is an empty field."""
    part = path.with_name(path.name + ".part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    part.replace(path)


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on; ``code`` is a digest of the simulator's own source."""
    own = {"dspark-sim": version("dspark-sim"), "code": code_digest(), "python": platform.python_version()}
    return own | {name: version(name) for name in PACKAGES}


@functools.cache
def code_digest() -> str:
    """Digest every source file of `sim` and `profiles`, names and contents, as this process found them."""
    whole = hashlib.sha256()
    root = Path(__file__).parent.parent
    for path in sorted(path for package in ("sim", "profiles") for path in (root / package).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        whole.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()
