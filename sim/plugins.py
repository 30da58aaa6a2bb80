"""A registry's classes as one validated type: a mapping with ``kind``, or just the kind's name."""

from __future__ import annotations

from typing import Annotated, Any, Union

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from sim.registry import Registry


def one_of(registry: Registry) -> Any:
    """Return the pydantic type of one plugin of ``registry``, chosen by its key ``kind``."""
    classes = registry.known()
    names = ", ".join(classes)

    def from_name(value: Any) -> Any:
        kind = value if isinstance(value, str) else value.get("kind") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in classes:
            raise PydanticCustomError(
                "unknown_kind",
                "unknown {noun} '{kind}'; known: {names}",
                {"noun": registry.noun, "kind": kind, "names": names},
            )
        return {"kind": value} if isinstance(value, str) else value

    union: Any = Union[tuple(classes.values())]  # noqa: UP007 - built at run time
    return Annotated[Annotated[union, Field(discriminator="kind")], BeforeValidator(from_name)]
