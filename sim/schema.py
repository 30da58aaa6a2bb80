"""Write the JSON schema of scenario files, which lets an editor complete and check them as they are written.

python -m sim.schema > scenarios/schema.json
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from sim.units import format_duration

#: What draft 2020-12 calls itself.
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    return argparse.ArgumentParser(
        prog="python -m sim.schema", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def schema_text() -> str:
    """Return the schema as it stands in ``scenarios/schema.json``; the same text for the same version."""
    from sim.scenario import json_schema

    return json.dumps({"$schema": DIALECT, **_for_editors(json_schema())}, indent=1, ensure_ascii=False) + "\n"


def _for_editors(node: Any) -> Any:
    """Say what pydantic's schema leaves out or says in Python's terms.

    A plugin's ``kind`` must be written, a default is shown as a person writes it, titles that repeat a key go, and so
    do the marks of reStructuredText.
    """
    if isinstance(node, list):
        return [_for_editors(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: value for key, value in node.items() if not (key == "title" and isinstance(value, str))}
    if isinstance(node.get("description"), str):
        node["description"] = " ".join(node["description"].replace("``", "`").split())
    if "default" in node:
        default = node.pop("default")
        if node.get("type") == "string" and isinstance(default, float):
            default = format_duration(default)
        if default is not None and "const" not in node:
            node["default"] = default
    if "const" in node.get("properties", {}).get("kind", {}):
        node["required"] = ["kind", *(key for key in node.get("required", []) if key != "kind")]
    return {key: _for_editors(value) for key, value in node.items()}


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser().parse_args(argv)
    sys.stdout.write(schema_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
