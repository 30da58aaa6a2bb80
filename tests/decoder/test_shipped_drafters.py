"""The drafters that ship are what their reports say, small enough to ship, and made by a command that is given."""

import json

import pytest
import torch
from safetensors.torch import load_file

from decoder.checkpoint import make_net
from decoder.config import load_config
from decoder.lab.targets import SHIPPED, target_sha256
from decoder.train import make_parser

FOLDERS = sorted(path.parent for path in SHIPPED.glob("*/*/config.json"))


def test_both_are_there_and_small():
    assert [folder.relative_to(SHIPPED).as_posix() for folder in FOLDERS] == ["smollm2/dspark", "smollm2/mtp"]
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 25e6


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_shipped_drafter_is_what_its_report_says(folder):
    report = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    assert report["weights_sha256"] == target_sha256(folder)
    assert report["facts"]["target"] == folder.parent.name
    config = load_config(folder / "config.json")
    tensors = load_file(folder / "model.safetensors")
    shapes = {name: value.shape for name, value in make_net(config, device="meta").state_dict().items()}
    assert {name: value.shape for name, value in tensors.items()} == {
        name: shape for name, shape in shapes.items() if name not in config.shared_with_target
    }
    assert {value.dtype for value in tensors.values() if value.is_floating_point()} == {torch.bfloat16}
    words = report["command"].split()
    assert words[:3] == ["python", "-m", "decoder.train"]
    options = make_parser().parse_args(words[3:])
    assert options.drafter == folder.name
    # One that was trained further names what it began as, and that has a report too.
    began = report["facts"]["init_sha256"]
    assert (began is not None) == (options.init is not None)
    if began is not None:
        first = json.loads((folder / "training_init.json").read_text(encoding="utf-8"))
        assert first["weights_sha256"] == began
        assert first["facts"]["text_sha256"] == report["facts"]["text_sha256"]
        assert make_parser().parse_args(first["command"].split()[3:]).out == options.init
