"""Shipped scenarios load with their profiles, open with a question, and fit the schema that editors use."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from profiles.reading import first_question
from sim.cells import Work, check_engines
from sim.loading import load_scenario
from sim.schema import main, schema_text
from sim.workload.replay import Replay
from tests.cli.test_dry_run import KINDS, with_kinds
from tests.helpers.scenario import TINY, changed

ROOT = Path(__file__).parents[2]
SCENARIOS = sorted((ROOT / "scenarios").glob("*.yaml"))
NAMES = {path.stem: path for path in SCENARIOS}


def test_the_schema_is_current():
    assert (ROOT / "scenarios" / "schema.json").read_text(encoding="utf-8") == schema_text(), "run `make schema`"


def test_the_command_prints_the_schema(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out == schema_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_opens_with_its_question_and_ends_with_what_it_showed(name):
    lines = NAMES[name].read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# yaml-language-server: $schema=schema.json"
    assert lines[1].startswith("# Question: ")
    assert first_question(NAMES[name]).endswith("?")
    assert f"name: {name}" in lines
    assert lines[-1].startswith("# "), "ends with what the run showed"
    last_key = max(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert re.search(r"\d", " ".join(lines[last_key + 1 :])), "what the run showed has numbers"


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_loads_with_its_profile(name, tmp_path):
    path = NAMES[name]
    scenario, _ = load_scenario(path)
    trace = None
    if isinstance(scenario.arrivals, Replay):
        trace = tmp_path / "t.csv"
        coarse = scenario.arrivals.ties is not None  # seconds that requests share
        times = [60 * (i // 2) if coarse else 60 * i / 7 for i in range(20)]
        trace.write_text("arrived_s,prompt_tokens,output_tokens\n" + "".join(f"{at},50,20\n" for at in times))
    scenario, document = load_scenario(path, trace=trace)
    work = Work(document, strict=True)
    points = list(dict.fromkeys(cell.point for cell in work.cells()))
    check_engines(work, dict.fromkeys((points[0], points[-1])))


# ----------------------------------------------------------------------------------------------------------- the schema


def fits(value: Any, schema: Any, root: Any) -> bool:
    """Tell whether a value fits a schema; knows the words that our schema uses, and refuses others."""
    known = {"$schema", "$defs", "$ref", "additionalProperties", "anyOf", "const", "default", "description"}
    known |= {"discriminator", "enum", "exclusiveMinimum", "items", "maximum", "minimum", "maxItems", "minItems"}
    known |= {"minLength", "minProperties", "oneOf", "pattern", "prefixItems", "properties", "required", "type"}
    assert set(schema) <= known, f"words that this test does not know: {set(schema) - known}"
    if "$ref" in schema and not fits(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root):
        return False
    if "anyOf" in schema and not any(fits(value, one, root) for one in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(fits(value, one, root) for one in schema["oneOf"]) != 1:
        return False
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    types: dict[str, tuple[type, ...]] = {
        "object": (dict,),
        "array": (list,),
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "null": (type(None),),
    }
    if "type" in schema and not isinstance(value, types[schema["type"]]):
        return False
    if isinstance(value, bool):
        return schema.get("type", "boolean") == "boolean"
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        return set(schema.get("required", [])) <= set(value) and all(
            fits(one, properties[key], root)
            if key in properties
            else (others if isinstance(others, bool) else fits(one, others, root))
            for key, one in value.items()
        )
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)) and all(
            fits(one, first[index] if index < len(first) else schema.get("items", {}), root)
            for index, one in enumerate(value)
        )
    if isinstance(value, int | float):
        return (
            schema.get("minimum", value) <= value <= schema.get("maximum", value)
            and schema.get("exclusiveMinimum", value - 1) < value
        )
    if isinstance(value, str):
        return len(value) >= schema.get("minLength", 0) and bool(re.search(schema.get("pattern", ""), value))
    return True


def fits_schema(text: str) -> bool:
    schema = json.loads(schema_text())
    return fits(YAML(typ="safe", pure=True).load(io.StringIO(text)), schema, schema)


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_fits_the_schema(name):
    assert fits_schema(NAMES[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: kinds[0][:30])
def test_every_kind_of_plugin_fits_the_schema(kinds):
    assert fits_schema(with_kinds(*kinds))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("name: tiny", "nam: tiny"),
        ("name: tiny", "name: a b"),
        ("horizon: 2s", "horizon: 2"),
        ("horizon: 2s", "horizon: 30 minutes"),
        ("4GiB", "4GB"),
        ("replicas: 1", "replicas: 0"),
        ("replicas: 1", "replicas: '1'"),
        ("[none, dspark]", "none"),
        ("[none, dspark]", "[]"),
        ("[none, dspark]", "[none, dsprak]"),
        ("[none, dspark]", "[none, fixed]"),
        ("[none, dspark]", "[none, {k: 3}]"),
        ("[none, dspark]", "[none, {kind: fixed, k: 0}]"),
        ("[none, dspark]", "[none, {kind: batch_table, table: [[1, 2, 3]]}]"),
        ("rate_per_s: 4", "rate_per_s: 0"),
        ("rate_per_s: 4", "rate: 4"),
    ],
)
def test_the_schema_refuses_what_the_command_refuses(old, new):
    assert fits_schema(TINY)
    assert not fits_schema(changed(old, new))
