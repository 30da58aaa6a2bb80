"""Every shipped profile by name, with the function that makes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from profiles.recipes.aic import MACHINES, build_aic
from profiles.recipes.b300 import build_b300
from profiles.recipes.dcut import build_qwen3_8b_h20
from profiles.recipes.offline import build_offline
from profiles.recipes.serving import build_serving
from profiles.recipes.sources import Shared
from profiles.schema import Profile

PROFILES: dict[str, Callable[[Shared], Profile]] = {
    **{f"aic/{name}_{end}": partial(build_aic, name=name, end=end) for name in MACHINES for end in ("lower", "upper")},
    "engines/qwen3_8b_h20": build_qwen3_8b_h20,
    "engines/v4_flash_b300_tp4": build_b300,
    "paper/gemma4_12b": partial(build_offline, model="Gemma4-12B"),
    "paper/qwen3_14b": partial(build_offline, model="Qwen3-14B"),
    "paper/qwen3_4b": partial(build_offline, model="Qwen3-4B"),
    "paper/qwen3_8b": partial(build_offline, model="Qwen3-8B"),
    "paper/v4_flash": partial(build_serving, model="V4-Flash"),
    "paper/v4_pro": partial(build_serving, model="V4-Pro"),
}
