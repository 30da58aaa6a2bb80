"""A registry's classes as one validated type: a mapping with ``kind``, or just the kind's name."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Union

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from profiles.reading import known_text
from sim.registry import Registry


def _tuples(value: Any) -> Any:
    """Turn lists into tuples, which is what frozen plugins hold; a strict check does not once Python saw the value."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return {key: _tuples(item) for key, item in value.items()} if isinstance(value, dict) else value


def one_of(registry: Registry) -> Any:
    """Return the pydantic type of one plugin of ``registry``, chosen by its key ``kind``."""
    classes = registry.known()
    names = ", ".join(classes)

    def from_name(value: Any) -> Any:
        if isinstance(value, tuple(classes.values())):
            return value
        if not isinstance(value, str | dict):
            raise PydanticCustomError("no_plugin", "expected a name, or a mapping with the key 'kind'")
        if isinstance(value, dict) and "kind" not in value:
            raise PydanticCustomError("unknown_kind", "missing key 'kind'; known: {names}", {"names": names})
        kind = value if isinstance(value, str) else value["kind"]
        if not isinstance(kind, str) or kind not in classes:
            raise PydanticCustomError(
                "unknown_kind",
                "unknown {noun} '{kind}'; {known}",
                {"noun": registry.noun, "kind": str(kind), "known": known_text(str(kind), classes)},
            )
        return {"kind": value} if isinstance(value, str) else _tuples(value)

    union: Any = Union[tuple(classes.values())]  # noqa: UP007 - built at run time
    by_name = tuple(kind for kind, cls in classes.items() if not required_keys(cls))
    return Annotated[Annotated[union, Field(discriminator="kind")], BeforeValidator(from_name), _NameInSchema(by_name)]


def required_keys(plugin: type) -> list[str]:
    """Return the keys that a plugin cannot do without."""
    return [one.name for one in fields(plugin) if one.default is MISSING and one.default_factory is MISSING]


@dataclass(frozen=True, slots=True)
class _NameInSchema:
    """Lets the JSON schema accept, in place of a mapping, the names of plugins that need no settings."""

    names: tuple[str, ...]

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        mapping = handler(schema)
        return {"anyOf": [{"enum": list(self.names)}, mapping]} if self.names else mapping
