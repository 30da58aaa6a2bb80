"""A policy of another distribution is known by its entry point, runs in a scenario and can be judged."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.scenario import changed

ROOT = Path(__file__).resolve().parents[2]
MODULE = '''
"""A policy of somebody else."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from sim.verify.base import Drafting


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstOnly(Drafting):
    """Verify up to ``most`` tokens whose confidence is above one half."""

    kind: Literal["first_only"] = "first_only"
    most: Annotated[int, Ge(1)] = 1

    def verify_lengths(self, confidence, steps_per_s):
        """Look at the past alone."""
        return np.minimum(np.cumprod(confidence > 0.5, axis=1).sum(axis=1), self.most).astype(np.int64)

    def start(self):
        """Nothing to remember."""
        return self
'''


def test_a_policy_of_another_distribution(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(MODULE, encoding="utf-8")
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[dspark_sim.policies]\nfirst_only = theirs:FirstOnly\n", encoding="utf-8")
    (tmp_path / "s.yaml").write_text(
        changed("policies: [none, dspark]", "policies: [none, first_only, {kind: first_only, most: 2}]"),
        encoding="utf-8",
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))

    def run(*words: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert "first_only" in run("sim.run", "--list")
    run("sim.run", "s.yaml", "--out", "out", "--json", "all.json", "--jobs", "1")
    found = {row["policy"]: row for row in json.loads((tmp_path / "all.json").read_text())["comparison"]}
    one, two = found["first_only"], found["first_only most=2"]
    assert 1 < one["verify_tokens_per_request"] <= 2 < two["verify_tokens_per_request"] <= 3
    assert "lossless" in run("sim.verify.check", "first_only")
