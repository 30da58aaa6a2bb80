"""Read YAML or JSON as data, remember the line of every key, and say what is wrong with it.

Scenarios and profiles both come through here, so that every fault is reported in one form:
``file:line: key: what is wrong (what was found; what is allowed)``.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import itertools
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from profiles.errors import Fault, InputError

T = TypeVar("T")
Path_ = tuple[str | int, ...]

#: Everything a person writes is strict, closed and finite.
STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

MAX_INPUT_BYTES = 64 * 2**20

#: In place of a line: the value was given on the command line.
SET = 0


class Section(BaseModel):
    """A mapping in a file: frozen, closed to unknown keys, without NaN."""

    model_config = STRICT


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """Plain data read from one file, with the 1-based line of every key path."""

    file: str
    data: dict[str, Any]
    lines: Mapping[Path_, int]

    def line_of(self, path: Path_) -> int:
        """Return the line of the longest prefix of ``path`` that exists in the file."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path[:-1]
        return 1

    def fault(self, message: str, path: Path_) -> Fault:
        """Return a fault of the key at ``path``, placed where it was written: in the file or by ``--set``."""
        line = self.line_of(path)
        key = dotted(path) or None
        return Fault(message, "--set", None, key) if line == SET else Fault(message, self.file, line, key)

    def replaced(self, path: Path_, value: Any) -> Document:
        """Return the document with another value at ``path``; mappings on the way are made where missing."""
        data = copy.deepcopy(self.data)
        here: Any = data
        for part, following in itertools.pairwise(path):
            if isinstance(here, dict):
                # A plugin given by its name alone may get keys.
                if isinstance(here.get(part), str) and isinstance(following, str):
                    here[part] = {"kind": here[part]}
                here = here.setdefault(part, {})
            else:
                here = here[part] if _has(here, part) else None
        if not isinstance(here, dict) and not _has(here, path[-1]):
            raise InputError(Fault("no such key", "--set", key=dotted(path)))
        here[path[-1]] = value
        return Document(self.file, data, {**self.lines, path: SET})

    def without(self, path: Path_) -> Document:
        """Return the document without the top-level key ``path``."""
        (key,) = path
        return Document(self.file, {name: value for name, value in self.data.items() if name != key}, self.lines)


def read_document(path: Path, error: type[InputError] = InputError) -> Document:
    """Read a YAML 1.2 or JSON mapping from ``path``.

    Raises ``error`` when the file is missing, unreadable, empty, not UTF-8, not valid YAML, has a key
    twice, carries a tag (YAML is data here) or does not hold a mapping.
    """
    file = str(path)
    try:
        size = path.stat().st_size
        if size > MAX_INPUT_BYTES:
            raise error(Fault(f"file too large: {size} bytes; at most {MAX_INPUT_BYTES}", file))
        raw = path.read_bytes()
    except OSError as fault:
        raise error(Fault(f"cannot read: {(fault.strerror or str(fault)).lower()}", file)) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        line = raw[: fault.start].count(b"\n") + 1
        raise error(Fault(f"not UTF-8 text (byte {raw[fault.start]:#04x})", file, line)) from None
    return parse_document(text, file, error)


def parse_document(text: str, file: str, error: type[InputError] = InputError) -> Document:
    """Parse a YAML or JSON mapping; see `read_document`."""
    if not text.strip():
        raise error(Fault("empty file; expected a mapping of keys to values", file, 1))
    try:
        tree = YAML(typ="rt").load(text)
    except MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        problem = (fault.problem or "not valid YAML").split("\n")[0]
        raise error(Fault(problem, file, mark.line + 1 if mark else None)) from None
    except (YAMLError, ValueError, RecursionError) as fault:
        first = (str(fault).splitlines() or [type(fault).__name__])[0]
        raise error(Fault(f"not valid YAML: {first}", file)) from None
    if not isinstance(tree, CommentedMap):
        raise error(Fault(f"expected a mapping of keys to values (got {_short(tree)})", file, 1))
    lines: dict[Path_, int] = {}
    try:
        data = _plain(tree, (), lines, depth=0)
    except ValueError as fault:
        raise error(Fault(str(fault), file)) from None
    assert isinstance(data, dict)
    return Document(file, data, lines)


def _plain(node: Any, path: Path_, lines: dict[Path_, int], depth: int) -> Any:
    """Turn ruamel's tree into plain data and note the line of every key."""
    if depth > 32:
        raise ValueError("nested more than 32 levels deep")
    if len(lines) > 2_000_000:
        raise ValueError("more than 2,000,000 values, aliases included")
    if isinstance(node, CommentedMap):
        if node.tag.value is not None and not str(node.tag.value).startswith("tag:yaml.org"):
            raise ValueError(f"tags such as '{node.tag.value}' are not allowed: a file is data, not code")
        out: dict[str, Any] = {}
        for key, value in node.items():
            if not isinstance(key, str):
                raise ValueError(f"key {key!r} must be text; put quotes around it")
            here = (*path, str(key))
            lines[here] = node.lc.data[key][0] + 1 if key in node.lc.data else node.lc.line + 1
            out[str(key)] = _plain(value, here, lines, depth + 1)
        return out
    if isinstance(node, CommentedSeq):
        items = []
        for index, value in enumerate(node):
            here = (*path, index)
            lines[here] = node.lc.data[index][0] + 1 if index in node.lc.data else node.lc.line + 1
            items.append(_plain(value, here, lines, depth + 1))
        return items
    if node is None or isinstance(node, bool):
        return node
    if isinstance(node, int):
        return int(node)
    if isinstance(node, float):
        return float(node)
    if isinstance(node, str):
        return str(node)
    if type(node).__name__ in ("TaggedScalar", "CommentedSet", "CommentedOrderedMap"):
        raise ValueError("tags are not allowed: a file is data, not code")
    return str(node)  # dates and times stay the text they were written as


def validate(kind: Any, document: Document, error: type[InputError] = InputError) -> Any:
    """Check ``document`` against a pydantic type and build it; raise every fault at once.

    Validation runs in JSON mode: strict about scalars ("3" is no number), lenient about lists for tuples.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    try:
        return adapter.validate_json(json.dumps(document.data))
    except ValidationError as fault:
        raise error(*_faults(fault, kind, document)) from None


def _faults(error: ValidationError, kind: Any, document: Document) -> Iterable[Fault]:
    seen: set[str] = set()
    faults = []
    items = error.errors(include_url=False)
    for item in items:
        if item["type"] == "too_short" and any(_within(other["loc"], item["loc"]) for other in items):
            continue  # short only because pydantic left out the items that are at fault themselves
        path = _real_path(item["loc"], document.data, missing=item["type"] == "missing")
        fault = document.fault(_message(item, path, kind, document.data), path)
        if str(fault) not in seen:
            seen.add(str(fault))
            faults.append(fault)
    return sorted(faults, key=lambda fault: fault.line or 0)


def _within(inner: Sequence[str | int], outer: Sequence[str | int]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def dotted(path: Path_) -> str:
    """Write a key path as people do: ``policies[3].k``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def first_question(path: Path) -> str:
    """Return the question that a scenario file opens with, or nothing."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("# Question:"):
            return line.removeprefix("# Question:").strip()
    return ""


def parse_path(text: str) -> Path_ | None:
    """Read ``a.b[2].c`` as a key path; None where it is none."""
    if not re.fullmatch(r"[A-Za-z_]\w*(\[\d+\])*(\.[A-Za-z_]\w*(\[\d+\])*)*", text):
        return None
    return tuple(int(part) if part.isdigit() else part for part in re.findall(r"\w+", text))


def _real_path(loc: Sequence[str | int], data: Any, *, missing: bool) -> Path_:
    """Drop from pydantic's location the parts that name union branches, not keys of the file."""
    path: list[str | int] = []
    for index, part in enumerate(loc):
        if _has(data, part):
            data = data[part]
            path.append(part)
        elif missing and isinstance(data, dict) and index == len(loc) - 1 and isinstance(part, str):
            path.append(part)
    return tuple(path)


def _has(data: Any, part: str | int) -> bool:
    """Whether ``data[part]`` exists."""
    if isinstance(data, dict):
        return part in data
    return isinstance(data, list) and isinstance(part, int) and part < len(data)


def _value_at(path: Path_, data: Any) -> Any:
    for part in path:
        data = data[part]
    return data


def _message(item: Any, path: Path_, kind: Any, data: Any) -> str:
    sort, ctx = item["type"], item.get("ctx") or {}
    got = f" (got {_short(item['input'])})"
    if sort in ("extra_forbidden", "unexpected_keyword_argument"):  # of a model, of a dataclass
        known = known_keys(kind, path[:-1], data)
        near = difflib.get_close_matches(str(path[-1]), known, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        return f"unknown key; {hint}known: {', '.join(known)}"
    if sort == "missing":
        return "missing"
    if sort == "union_tag_invalid":
        return f"unknown kind '{ctx['tag']}'; known: {ctx['expected_tags'].replace(chr(39), '')}"
    if sort == "union_tag_not_found":
        return f"missing key 'kind'{got}"
    text = str(item["msg"])
    if sort == "value_error" and "error" in ctx:
        text = str(ctx["error"])
        is_cut = got.endswith("...)") and isinstance(item["input"], dict | list)  # a whole section helps nobody
        return text if "(got" in text or is_cut else text + got
    if sort == "too_short":
        return f"expected at least {ctx['min_length']} item{'s' * (ctx['min_length'] > 1)}{got}"
    if sort in ("assertion_error", "json_invalid"):
        return text
    text = text.removeprefix("Input should be ").removeprefix("Value error, ")
    text = text if text != item["msg"] else text[0].lower() + text[1:]
    return f"expected {text}{got}" if str(item["msg"]).startswith("Input should be ") else f"{text}{got}"


def known_keys(kind: Any, path: Path_, data: Any) -> list[str]:
    """Return the keys that the mapping at ``path`` may have, in order of definition."""
    for index, part in enumerate(path):
        kind = _step_into(kind, part, _value_at(path[:index], data))
    here = _resolve(kind, _value_at(path, data))
    return list(_fields(here))


def _fields(kind: Any) -> dict[str, Any]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {_key_of(field.name, hints[field.name]): hints[field.name] for field in dataclasses.fields(kind)}
    return {}


def _key_of(name: str, hint: Any) -> str:
    """Return a dataclass field's key in the file: its alias where it has one (``from`` is no name in Python)."""
    aliases = (getattr(part, "alias", None) for part in typing.get_args(hint)[1:])
    return next((alias for alias in aliases if isinstance(alias, str)), name)


def _resolve(kind: Any, value: Any) -> Any:
    """Peel annotations and pick the branch of a union that ``value`` belongs to."""
    while typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        branches = [_resolve(branch, value) for branch in typing.get_args(kind) if branch is not type(None)]
        tag = value.get("kind") if isinstance(value, dict) else None
        for branch in branches:
            hint = _fields(branch).get("kind")
            if tag is not None and hint is not None and tag in typing.get_args(hint):
                return branch
        if isinstance(value, list):
            return next((branch for branch in branches if typing.get_origin(branch) in (list, tuple)), branches[0])
        return next((branch for branch in branches if _fields(branch)), branches[0])
    return kind


def _step_into(kind: Any, part: str | int, value: Any) -> Any:
    here = _resolve(kind, value)
    if typing.get_origin(here) in (dict, Mapping, list, tuple):
        return next(arg for arg in reversed(typing.get_args(here)) if arg is not Ellipsis)
    return _fields(here).get(str(part), Any)


def _short(value: Any) -> str:
    """Show a value the way its author wrote it, cut to what fits a line."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    text = json.dumps(value, default=str) if not isinstance(value, str) else f"'{value}'"
    return text if len(text) <= 60 else text[:57] + "..."
