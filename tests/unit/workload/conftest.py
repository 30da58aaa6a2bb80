"""Small files as people and programs write them, and sections of a scenario as text."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profiles.reading import Section, parse_document, validate
from sim.errors import InputError
from sim.workload.build import Arrivals
from sim.workload.domains import Domains
from sim.workload.length_source import Lengths

Write = Callable[..., Path]


class Traffic(Section):
    arrivals: Arrivals
    lengths: Lengths | None = None
    domains: Domains | None = None


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a file below the test's folder and returns its path."""

    def write_file(name: str, content: str | bytes, *, zipped: bool = False) -> Path:
        raw = content.encode() if isinstance(content, str) else content
        path = tmp_path / name
        path.write_bytes(gzip.compress(raw) if zipped else raw)
        return path

    return write_file


@pytest.fixture(scope="session")
def read() -> Callable[[str], Any]:
    """Return a function that reads the traffic sections of a scenario."""
    return lambda text: validate(Traffic, parse_document(text, "s.yaml"))


@pytest.fixture(scope="session")
def faults_of(read: Callable[[str], Any]) -> Callable[[str], list[str]]:
    """Return a function that lists what is wrong with the traffic sections of a scenario."""

    def faults(text: str) -> list[str]:
        with pytest.raises(InputError) as caught:
            read(text)
        return [str(fault) for fault in caught.value.faults]

    return faults
