"""Names for plugins: a class registers itself, its fields are the keys of the YAML mapping."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeVar

from profiles.reading import STRICT

C = TypeVar("C", bound=type)


class Registry:
    """Plugin classes of one kind, by name.

    Other distributions offer theirs through the entry point ``group``: the entry's name is the
    plugin's ``kind``, its value the class. Entry points are loaded on the first look-up.
    """

    def __init__(self, noun: str, group: str) -> None:
        self.noun = noun
        self.group = group
        self._classes: dict[str, type] = {}
        self._entry_points_read = False

    def register(self, kind: str) -> Callable[[C], C]:
        """Class decorator: make a frozen dataclass with a field ``kind`` known under that name."""

        def add(cls: C) -> C:
            if kind in self._classes:
                raise ValueError(f"{self.noun} '{kind}' is registered twice")
            cls.__pydantic_config__ = STRICT  # type: ignore[attr-defined]
            self._classes[kind] = cls
            return cls

        return add

    def known(self) -> dict[str, type]:
        """Return every known class by name, built-in ones first, in order of registration."""
        if not self._entry_points_read:
            self._entry_points_read = True
            for entry in sorted(entry_points(group=self.group), key=lambda entry: entry.name):
                if entry.name not in self._classes:
                    self.register(entry.name)(entry.load())
        return dict(self._classes)
