"""What all tests share: the reference data beside the repository, seeds, and the options of the make verbs."""

import secrets
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

SHARED_DIR = Path(__file__).resolve().parents[2] / "shared"
SHARED_ABSENT = "../shared is absent: the reference data and traces lie beside the repository"

settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fresh", settings.get_profile("ci"), derandomize=False, max_examples=1000)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed-root",
        default="0",
        metavar="N",
        help="what `seed` and `rng` are derived from: a number, or 'fresh' for a new one, printed at the end",
    )
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed_root == "fresh":  # replaced here, before the option travels to xdist's workers
        config.option.seed_root = str(secrets.randbits(32))
    if not config.option.seed_root.isdecimal():
        raise pytest.UsageError(f"--seed-root: expected a number or 'fresh' (got {config.option.seed_root!r})")


def forget_stale_kernels() -> None:
    """Make numba compile the step loop anew where a module it takes functions from is newer.

    numba's cache looks at the file of a compiled function alone, not at what that file imports.
    """
    sim = Path(__file__).resolve().parents[1] / "sim"
    kernels = sim / "kernels.py"
    parts = [sim / "rng.py", sim / "acceptance.py", sim / "verify" / "kernels.py"]
    if max(part.stat().st_mtime for part in parts) > kernels.stat().st_mtime:
        kernels.touch()


forget_stale_kernels()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "shared_dir" in getattr(item, "fixturenames", ()):
            item.add_marker("needs_shared")
        if item.get_closest_marker("needs_shared") and not SHARED_DIR.is_dir():
            item.add_marker(pytest.mark.skip(reason=SHARED_ABSENT))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple) and SHARED_ABSENT in report.longrepr[2]
    ]
    if skipped:
        noun = "test was" if len(skipped) == 1 else "tests were"
        terminalreporter.section("reference data")
        terminalreporter.line(f"{len(skipped)} {noun} skipped because ../shared is absent", yellow=True, bold=True)
    if config.option.seed_root != "0":
        terminalreporter.line(f"seeds: repeat this run with --seed-root={config.option.seed_root}")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Return the folder of reference data and traces beside the repository; skip where it is absent."""
    if not SHARED_DIR.is_dir():
        pytest.skip(SHARED_ABSENT)
    return SHARED_DIR


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return this test's own seed: the same in every ordinary run, another one under ``make stats``."""
    root = int(request.config.option.seed_root)
    return int(np.random.SeedSequence([root, zlib.crc32(request.node.nodeid.encode())]).generate_state(1)[0])


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Return a generator seeded by ``seed``."""
    return np.random.default_rng(seed)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Return whether golden files are to be written (``make golden``) instead of compared."""
    return bool(request.config.option.update_golden)
