"""Make the shipped profiles anew from the reference data: ``python -m profiles.build``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from profiles.errors import Fault, InputError, exit_code_of
from profiles.files import SHIPPED, save_profile
from profiles.recipes.catalogue import PROFILES
from profiles.recipes.sources import Shared

log = logging.getLogger("profiles.build")


def main(argv: Sequence[str] | None = None) -> int:
    """Build the named profiles, or all of them."""
    parser = argparse.ArgumentParser(
        prog="python -m profiles.build",
        description="Make the shipped profiles anew from the reference data. Same data, same bytes.",
        epilog="example: python -m profiles.build paper/v4_flash",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="profiles to build (default: all)")
    parser.add_argument("--shared", type=Path, default=SHIPPED.parent.parent / "shared", help="the reference data")
    parser.add_argument(
        "--out", type=Path, default=SHIPPED, help="folder to write to (default: where they are shipped)"
    )
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    for name in arguments.names or PROFILES:
        if name not in PROFILES:
            raise InputError(Fault(f"unknown profile '{name}'; known: {', '.join(sorted(PROFILES))}"))
    shared = Shared(arguments.shared)
    for name in arguments.names or PROFILES:
        profile = PROFILES[name](shared)
        path = arguments.out / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_profile(profile, path)
        log.info("%s", path)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
