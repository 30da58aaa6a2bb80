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
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from profiles.errors import Fault, InputError

T = TypeVar("T")
Path_ = tuple[str | int, ...]

#: Everything a person writes is strict, closed and finite.
STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

MAX_INPUT_BYTES = 64 * 2**20
MAX_DEPTH = 32
MAX_VALUES = 200_000

#: Where a value was written: the 1-based line of the file, or words such as ``--set``.
Place = int | str


class Section(BaseModel):
    """A mapping in a file: frozen, closed to unknown keys, without NaN."""

    model_config = STRICT


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """Plain data read from one file, with the place of every key path."""

    file: str
    data: dict[str, Any]
    places: Mapping[Path_, Place]

    def place_of(self, path: Path_) -> Place:
        """Return the place of the longest prefix of ``path`` that was written anywhere."""
        while path:
            if path in self.places:
                return self.places[path]
            path = path[:-1]
        return 1

    def has(self, *path: str | int) -> bool:
        """Whether the key at ``path`` was written."""
        return _exists(path, self.data)

    def fault(self, message: str, path: Path_) -> Fault:
        """Return a fault of the key at ``path``, placed where it was written: in the file or on the command line."""
        place = self.place_of(path)
        key = dotted(path) or None
        if place == f"--{key}":  # said once is enough
            key = None
        return Fault(message, place, None, key) if isinstance(place, str) else Fault(message, self.file, place, key)

    def replaced(self, path: Path_, value: Any, place: Place = "--set") -> Document:
        """Return the document with another value at ``path``; mappings on the way are made where missing.

        ``place`` is where a fault of the value is reported. Raises `InputError` where there is no such key.
        """
        data = copy.deepcopy(self.data)
        places = {known: line for known, line in self.places.items() if known[: len(path)] != path}
        here: Any = data
        for index, (part, following) in enumerate(itertools.pairwise(path), start=1):
            if isinstance(here, dict) and here.get(part) is None:
                here[part] = {}
                places[path[:index]] = place
            if not _has(here, part):
                raise InputError(Fault("no such key", str(place), key=dotted(path)))
            if isinstance(here[part], str) and isinstance(following, str):
                here[part] = {"kind": here[part]}  # a plugin given by its name alone may get keys
                places[path[:index]] = place
            here = here[part]
        if not _has(here, path[-1]) and not (isinstance(here, dict) and isinstance(path[-1], str)):
            raise InputError(Fault("no such key", str(place), key=dotted(path)))
        here[path[-1]] = value
        places[path] = place
        return Document(self.file, data, places)

    def without(self, path: Path_) -> Document:
        """Return the document without the top-level key ``path``."""
        (key,) = path
        return Document(self.file, {name: value for name, value in self.data.items() if name != key}, self.places)


def read_document(path: Path, error: type[InputError] = InputError) -> Document:
    """Read a YAML 1.2 or JSON mapping from ``path``.

    Raises ``error`` when the file is missing, unreadable, empty, not UTF-8, not valid YAML, has a key
    twice, carries a tag (YAML is data here) or does not hold a mapping.
    """
    file = str(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_INPUT_BYTES + 1)
    except OSError as fault:
        raise error(Fault(f"cannot read: {(fault.strerror or str(fault)).lower()}", file)) from None
    if len(raw) > MAX_INPUT_BYTES:
        raise error(Fault(f"file too large: expected at most {MAX_INPUT_BYTES} bytes", file))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        line = raw[: fault.start].count(b"\n") + 1
        raise error(Fault(f"not UTF-8 text (byte {raw[fault.start]:#04x})", file, line)) from None
    return parse_document(text, file, error)


def parse_document(text: str, file: str, error: type[InputError] = InputError) -> Document:
    """Parse a YAML or JSON mapping; see `read_document`."""
    try:
        data, places = parse_data(text)
    except NotData as fault:
        raise error(Fault(fault.message, file, fault.line, dotted(fault.path) or None)) from None
    if data is None:
        raise error(Fault("empty file; expected a mapping of keys to values", file, 1))
    if not isinstance(data, dict):
        raise error(Fault(f"expected a mapping of keys to values (got {short(data)})", file, 1))
    return Document(file, data, places)


class NotData(Exception):
    """A text is no YAML, or more than data; ``line`` is 1-based, None where it is not known."""

    def __init__(self, message: str, line: int | None = None, path: Path_ = ()) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.path = path


def parse_data(text: str) -> tuple[Any, dict[Path_, Place]]:
    """Parse YAML 1.2 or JSON to plain data and the line of every key; raises `NotData`."""
    lines: dict[Path_, Place] = {}
    try:
        return _plain(YAML(typ="rt").load(text), (), lines, 1), lines
    except MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        raise NotData(_syntax_message(fault), mark.line + 1 if mark else None) from None
    except ReaderError as fault:
        message = f"character {fault.character:#06x} is not allowed"
        raise NotData(message, text.count("\n", 0, fault.position) + 1) from None
    except RecursionError:
        raise NotData(f"nested more than {MAX_DEPTH} levels deep") from None
    except (YAMLError, ValueError) as fault:
        first = (str(fault).splitlines() or [type(fault).__name__])[0]
        raise NotData("a number has too many digits" if "digits" in first else f"syntax error: {first}") from None


#: YAML's words for things, and ours.
_WORDS_OF_YAML = {
    "flow sequence": "list",
    "block sequence": "list",
    "block collection": "list",
    "flow mapping": "mapping",
    "block mapping": "mapping",
    "quoted scalar": "quoted text",
    "block scalar": "text",
    "simple key": "key",
    "'<stream end>'": "the end of the file",
    "end of stream": "end of the file",
}


def _syntax_message(fault: MarkedYAMLError) -> str:
    problem = (fault.problem or "not valid YAML").split("\n")[0]
    if isinstance(fault, DuplicateKeyError):
        return "duplicate key " + problem.removeprefix("found duplicate key ").split(" with value")[0].replace('"', "'")
    if "found another document" in problem:
        return "more than one document; expected one"
    if "\\t" in problem:
        return "syntax error: a tab where only spaces may stand"
    if problem == "mapping values are not allowed here":
        problem = "unexpected ': '; indent evenly, and put quotes around text that holds it"
    where = ""
    if fault.context and fault.context_mark:
        where = f", {fault.context} (from line {fault.context_mark.line + 1})"
    message = f"syntax error: {problem}{where}"
    for theirs, ours in _WORDS_OF_YAML.items():
        message = message.replace(theirs, ours)
    return message


_DATA_TAGS = (None, "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


def _plain(node: Any, path: Path_, lines: dict[Path_, Place], line: int) -> Any:
    """Turn ruamel's tree into plain data and note the line of every key; ``line`` is that of the node's own key."""
    if len(path) > MAX_DEPTH:
        raise NotData(f"nested more than {MAX_DEPTH} levels deep", line)
    if len(lines) > MAX_VALUES:
        raise NotData(f"more than {MAX_VALUES} values, aliases included", line)
    tag = getattr(getattr(node, "tag", None), "value", None)
    if type(node).__name__ in ("TaggedScalar", "CommentedSet", "CommentedOrderedMap", "bytes") or (
        isinstance(node, CommentedMap | CommentedSeq) and tag not in _DATA_TAGS
    ):
        named = f" '{str(tag).replace('tag:yaml.org,2002:', '!!')}'" if tag else ""
        raise NotData(f"a tag{named} is not allowed: a file is data, not code", line, path)
    if isinstance(node, CommentedMap | CommentedSeq):
        marks = node.lc.data or {}
        own = line if node.lc.line is None else node.lc.line + 1
    if isinstance(node, CommentedMap):
        out: dict[str, Any] = {}
        for key, value in node.items():
            at = marks[key][0] + 1 if key in marks else own
            if not isinstance(key, str):
                shown = short(key) if key is None or isinstance(key, bool | int | float) else str(key)
                raise NotData(f"a key must be text; put quotes around it (got {shown})", at, path)
            here = (*path, str(key))
            lines[here] = at
            out[str(key)] = _plain(value, here, lines, at)
        return out
    if isinstance(node, CommentedSeq):
        items = []
        for index, value in enumerate(node):
            here = (*path, index)
            at = marks[index][0] + 1 if index in marks else own
            lines[here] = at
            items.append(_plain(value, here, lines, at))
        return items
    if node is None or isinstance(node, bool):
        return node
    if isinstance(node, int):
        return int(node)
    if isinstance(node, float):
        return float(node)
    text = str(node)  # dates and times stay the text they were written as
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise NotData("half of a surrogate pair is no character", line, path)
    return text


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
        message = _message(item, path, kind, document.data)
        if item["type"] == "value_error":
            path, message = _to_own_key(message, path, kind, document.data)
        fault = document.fault(message, path)
        if str(fault) not in seen:
            seen.add(str(fault))
            faults.append(fault)
    return sorted(faults, key=lambda fault: fault.line or 0)


def _to_own_key(message: str, path: Path_, kind: Any, data: Any) -> tuple[Path_, str]:
    """Move the key that a section's own check names, as in ``cv: must be ...``, from the message to the path."""
    found = re.fullmatch(r"([A-Za-z_]\w*(?:\[\d+\])*): (.*)", message, re.DOTALL)
    inner = parse_path(found[1]) if found else None
    if found is None or inner is None or inner[0] not in known_keys(kind, path, data):
        return path, message
    return (*path, *inner), found[2]


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
        elif missing and isinstance(data, dict | str) and index == len(loc) - 1 and isinstance(part, str):
            path.append(part)  # of a mapping, or of a plugin given by its name alone
    return tuple(path)


def _has(data: Any, part: str | int) -> bool:
    """Whether ``data[part]`` exists."""
    if isinstance(data, dict):
        return part in data
    return isinstance(data, list) and isinstance(part, int) and part < len(data)


def _exists(path: Path_, data: Any) -> bool:
    return all(_has(_value_at(path[:index], data), part) for index, part in enumerate(path))


def _value_at(path: Path_, data: Any) -> Any:
    for part in path:
        data = data[part]
    return data


def known_text(name: str, known: Iterable[str]) -> str:
    """Say what is known, and first which of it is meant, maybe: ``did you mean 'fixed'? known: none, fixed``."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"{hint}known: {', '.join(names)}"


def _message(item: Any, path: Path_, kind: Any, data: Any) -> str:
    sort, ctx = item["type"], item.get("ctx") or {}
    if sort == "missing":
        value = _value_at(path, data) if _exists(path, data) else None
        if isinstance(value, list):  # of a list of fixed length
            return f"expected {len(typing.get_args(_type_at(kind, path, data)))} items (got {short(value)})"
        return "missing"
    got = f" (got {short(_value_at(path, data))})"
    if sort in ("extra_forbidden", "unexpected_keyword_argument"):  # of a model, of a dataclass
        known = known_keys(kind, path[:-1], data)
        return f"unknown key; {known_text(str(path[-1]), known)}"
    if sort == "union_tag_invalid":
        return f"unknown kind '{ctx['tag']}'; known: {ctx['expected_tags'].replace(chr(39), '')}"
    if sort == "union_tag_not_found":
        return f"missing key 'kind'{got}"
    if sort == "unknown_kind":
        return str(item["msg"])
    text = str(item["msg"])
    if sort == "value_error" and "error" in ctx:
        text = str(ctx["error"])
        # A whole section helps nobody.
        is_cut = got.endswith("...)") and isinstance(_value_at(path, data), dict | list)
        return text if "(got" in text or is_cut else text + got
    if sort in ("assertion_error", "json_invalid"):
        return text
    if sort in _EXPECTED:
        numbers = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in ctx.items()}
        return f"expected {_EXPECTED[sort].format(**numbers)}{got}"
    if sort == "too_short":
        return f"expected at least {ctx['min_length']} item{'s' * (ctx['min_length'] > 1)}{got}"
    if sort == "too_long":
        return f"expected {ctx['max_length']} items{got}"
    text = text.removeprefix("Input should be ")
    text = text if text != item["msg"] else text[0].lower() + text[1:]
    return f"expected {text}{got}" if str(item["msg"]).startswith("Input should be ") else f"{text}{got}"


#: What pydantic's kinds of error expected, in words of a person who never heard of pydantic.
_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "model_type": "a mapping of keys to values",
    "string_pattern_mismatch": "text of the pattern {pattern}",
    "string_too_short": "at least {min_length} character",
    "string_type": "text",
    "tuple_type": "a list",
}


def known_keys(kind: Any, path: Path_, data: Any) -> list[str]:
    """Return the keys that the mapping at ``path`` may have: ``kind``, then all others in order of definition."""
    return sorted(_fields(_type_at(kind, path, data)), key=lambda key: key != "kind")


def _type_at(kind: Any, path: Path_, data: Any) -> Any:
    """Return the type of the value at ``path``."""
    for index, part in enumerate(path):
        kind = _step_into(kind, part, _value_at(path[:index], data))
    return _resolve(kind, _value_at(path, data))


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


def short(value: Any) -> str:
    """Show a value the way its author wrote it, cut to what fits a line."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    text = json.dumps(value, default=str) if not isinstance(value, str) else f"'{value}'"
    return text if len(text) <= 60 else text[:57] + "..."
