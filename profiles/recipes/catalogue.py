"""Every shipped profile by name, with the function that makes it."""

from __future__ import annotations

from collections.abc import Callable

from profiles.recipes.serving import build_serving
from profiles.recipes.sources import Shared
from profiles.schema import Profile

PROFILES: dict[str, Callable[[Shared], Profile]] = {
    "paper/v4_flash": lambda shared: build_serving(shared, "V4-Flash"),
    "paper/v4_pro": lambda shared: build_serving(shared, "V4-Pro"),
}
