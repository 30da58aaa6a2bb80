"""Commands start quickly, and the parts shared with the decoder stand alone.

import-linter sees what a module names; this sees what it loads, packages' ``__init__`` included.
"""

import subprocess
import sys
from importlib.util import find_spec

import numba
import pytest

from sim.verify.kernels import compiled

HEAVY = {"matplotlib", "pandas", "plotly", "torch", "transformers"}


def loaded_by(module: str) -> set[str]:
    """Return the top-level names that importing ``module`` in a new interpreter brings in."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("profiles", HEAVY | {"simpy"}),
        ("sim.verify", HEAVY | {"simpy"}),
        ("sim.workload", HEAVY | {"simpy"}),
        ("sim.run", HEAVY),
        ("sim.sweep", HEAVY),
        ("sim.plan", HEAVY),
    ],
)
def test_import_loads_nothing_heavy(module: str, unwanted: set[str]) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{module} does not exist yet")
    assert not loaded_by(module) & unwanted


def test_a_heavy_import_would_be_seen() -> None:
    assert "matplotlib" in loaded_by("matplotlib")


def test_kernels_compile_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the source's folder nor HOME may be written, as in a container of any user: numba finds no locator."""
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])

    def twice(value: int) -> int:
        return 2 * value

    with pytest.raises(RuntimeError, match="cannot cache function"):
        numba.njit(cache=True)(twice)
    assert compiled(twice)(4) == 8
