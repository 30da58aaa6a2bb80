"""What the decoder's tests share: few threads, the tiny checkpoints, and third parties' warnings."""

from pathlib import Path

import pytest
import torch

from decoder.checkpoint import load_net, make_drafter
from decoder.target import HfTarget, load_target
from tests.decoder.reference import DRAFTS

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def deepspec(shared_dir: Path) -> Path:
    """Return the folder of DeepSpec's checkpoints and vectors."""
    return shared_dir / "reference" / "deepspec"


@pytest.fixture(scope="session")
def targets(deepspec: Path) -> dict[str, HfTarget]:
    """Return the tiny targets in float32, by name."""
    names = sorted(set(DRAFTS.values()))
    return {name: load_target(deepspec / "checkpoints" / name) for name in names}


@pytest.fixture(scope="session")
def targets64(deepspec: Path) -> dict[str, HfTarget]:
    """Return the tiny targets in float64, by name."""
    names = sorted(set(DRAFTS.values()))
    return {name: load_target(deepspec / "checkpoints" / name, dtype=torch.float64) for name in names}


@pytest.fixture(scope="session")
def drafters(deepspec: Path, targets: dict[str, HfTarget]):
    """Return the tiny drafters in float32, by name."""
    return {
        name: make_drafter(load_net(deepspec / "checkpoints" / name, targets[target]))
        for name, target in DRAFTS.items()
    }


@pytest.fixture(scope="session")
def drafters64(deepspec: Path, targets64: dict[str, HfTarget]):
    """Return the tiny drafters in float64, by name."""
    return {
        name: make_drafter(load_net(deepspec / "checkpoints" / name, targets64[target], dtype=torch.float64))
        for name, target in DRAFTS.items()
    }
