"""Prove or refute that a policy is lossless, by exact enumeration on toy models.

python -m sim.verify.check dspark
python -m sim.verify.check threshold --set min_confidence=0.5 --reads own_token
python -m sim.verify.check my_package.my_policy:MyPolicy --set floor=0.3 --engine redraft
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np

from profiles.reading import Document, known_text, parse_document, validate
from sim.errors import Fault, InputError, exit_code_of
from sim.verify import POLICIES, Policy
from sim.verify.law import ENGINES, Case, Enumeration, Floats, Leak, Reading, Way, target_law
from sim.verify.memory import PolicyFault
from sim.verify.toys import APPENDIX_A, CURVES, TOYS, Toy, steps_per_s

#: Largest difference between two equal laws: rounding of sums of at most some thousand products.
BOUND = 1e-9

EXAMPLE = """examples:
  python -m sim.verify.check dspark
  python -m sim.verify.check fixed --set k=2 --engine drop_batch
  python -m sim.verify.check threshold --set min_confidence=0.5 --reads own_token
  python -m sim.verify.check my_package.my_policy:MyPolicy --set floor=0.3

engines:
  as_told     verifies what the policy chose
  trim_tail   over budget, shortens the requests admitted last; lossless for lengths that look at one request alone
  drop_batch  over budget, drops the drafts of the whole batch
  redraft     over budget, puts the requests admitted last off to the next round, where they draft anew
  freshest    gives the policy this round's confidences as if they were those of earlier rounds (lag 0)

exit code: 0 lossless, 1 not lossless, 2 the input is at fault"""


@dataclass(frozen=True, slots=True)
class Difference:
    """A first text whose chance is not the target's. ``request`` None: of all requests together."""

    request: int | None
    texts: tuple[tuple[int, ...], ...]
    target: float
    engine: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """What came out in one case. ``worst``: where the two laws differ most, whole texts of all requests."""

    toy: Toy
    curve: str
    reading: Reading
    rounds: int
    worst: Difference
    shown: Difference | None
    leak: Leak | None

    @property
    def error(self) -> float:
        """Return the largest difference between the two laws."""
        return abs(self.worst.engine - self.worst.target)

    @property
    def holds(self) -> bool:
        """Return whether the output law is the target's."""
        return self.error <= BOUND


def judge(
    policy: Policy,
    *,
    reading: Reading = "past",
    engine: str = "as_told",
    rounds: int = 0,
    toys: Sequence[Toy] = TOYS,
) -> Iterator[Judgement]:
    """Judge a policy in every case, given a confidence of that kind; ``rounds`` 0: as many as it needs, at least 2.

    Raises `sim.verify.memory.PolicyFault` where the policy breaks the seam.
    """
    rounds = rounds or max(2, int(getattr(policy, "lag", 1)) + 1)
    for toy in toys:
        for curve in CURVES:
            if toy is not APPENDIX_A or curve == "appendix":
                yield judge_case(policy, toy, curve, reading=reading, engine=engine, rounds=rounds)


def judge_case(policy: Policy, toy: Toy, curve: str, *, reading: Reading, engine: str, rounds: int) -> Judgement:
    """Compare the engine's output law with the target's in one case."""
    rates = steps_per_s(curve, toy.max_batch_tokens)
    enumeration = Enumeration(Case(policy, toy, rates, ENGINES[engine], reading, rounds))
    got, expected = enumeration.law(), target_law(toy, enumeration.case.tokens)
    tokens = enumeration.case.tokens
    place = np.unravel_index(int(np.abs(got - expected).argmax()), got.shape)
    texts = tuple(_text(int(i), toy.tokens, tokens) for i in place)
    worst = Difference(None, texts, float(expected[place]), float(got[place]))
    if abs(worst.engine - worst.target) <= BOUND:
        return Judgement(toy, curve, reading, rounds, worst, None, None)
    shown = first_difference(got, expected, toy.tokens, tokens) or worst
    return Judgement(toy, curve, reading, rounds, worst, shown, enumeration.leak())


def first_difference(got: Floats, expected: Floats, vocabulary: int, tokens: int) -> Difference | None:
    """Return the shortest text of one request whose chance differs; None where only several together show it."""
    for length in range(1, tokens + 1):
        found: list[Difference] = []
        for request in range(got.ndim):
            others = tuple(axis for axis in range(got.ndim) if axis != request)
            laws = [law.sum(axis=others).reshape(vocabulary**length, -1).sum(axis=1) for law in (got, expected)]
            differences = np.abs(laws[0] - laws[1])
            i = int((differences > differences.max() - BOUND).argmax())  # the first of those that are as good as equal
            if differences[i] > BOUND:
                found.append(Difference(request, (_text(i, vocabulary, length),), float(laws[1][i]), float(laws[0][i])))
        if found:
            return max(found, key=lambda difference: round(abs(difference.engine - difference.target), 9))
    return None


def _text(number: int, vocabulary: int, tokens: int) -> tuple[int, ...]:
    return tuple(number // vocabulary**n % vocabulary for n in reversed(range(tokens)))


# ---------------------------------------------------------------------------------------------------------- the policy


def policy_class(name: str) -> type:
    """Find a registered policy, or a class in a module given as ``package.module[:ClassName]``; raises `InputError`."""
    known = POLICIES.known()
    if name in known:
        return known[name]
    path, _, wanted = name.partition(":")
    try:
        found = importlib.util.find_spec(path) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise InputError(
            Fault(f"unknown policy '{name}'; {known_text(name, known)}; or a module: my_package.my_policy[:ClassName]")
        )
    try:
        module = importlib.import_module(path)
    except Exception as error:
        raise InputError(Fault(f"cannot import {path}: {type(error).__name__}: {error}")) from error
    offered = {cls.__name__: cls for cls in _policies_in(module)}
    if wanted and isinstance(getattr(module, wanted, None), type):
        return _as_policy_class(getattr(module, wanted))
    if wanted or len(offered) != 1:
        problem = f"has no class '{wanted}'" if wanted else "does not hold one policy"
        raise InputError(Fault(f"{path} {problem}; policies there: {', '.join(offered) or 'none'}"))
    return next(iter(offered.values()))


def _policies_in(module: ModuleType) -> list[type]:
    classes = [cls for _, cls in inspect.getmembers(module, inspect.isclass) if cls.__module__ == module.__name__]
    return [cls for cls in classes if not _missing(cls)]


def _missing(cls: type) -> list[str]:
    """Names of the seam that a class lacks; a dataclass field without a default counts as there."""
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    needed = [name for name in dir(Policy) if not name.startswith("_")]
    return [name for name in needed if not hasattr(cls, name) and name not in fields]


def _as_policy_class(cls: type) -> type:
    missing = _missing(cls)
    if missing:
        raise InputError(Fault(f"{cls.__module__}:{cls.__name__} is no policy: it lacks {', '.join(missing)}"))
    return cls


def build(cls: type, settings: Sequence[str]) -> Policy:
    """Make a policy from ``key=value`` settings, values as in YAML; raises `InputError`."""
    lines = []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(Fault(f"expected key=value (got '{setting}')", "--set"))
        lines.append(f"{key}: {value}\n")
    document = parse_document("".join(lines), "--set") if lines else Document("--set", {}, {})
    if dataclasses.is_dataclass(cls):
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [key for key in document.data if key not in known]
        if unknown:
            raise InputError(Fault(f"unknown key; {known_text(unknown[0], known)}", "--set", key=unknown[0]))
        try:
            policy: Any = validate(cls, document)
        except InputError as error:  # settings have no lines
            raise InputError(*(Fault(one.message, "--set", key=one.key) for one in error.faults)) from None
    else:
        try:
            policy = cls(**document.data)
        except (TypeError, ValueError) as error:
            raise InputError(Fault(f"{cls.__name__}: {error}", "--set")) from error
    assert isinstance(policy, Policy)
    return policy


# -------------------------------------------------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    args = _parser().parse_args(argv)
    policy = build(policy_class(args.policy), args.set)
    readings = _readings(policy, args.reads)
    print(f"policy {policy}")
    print(f"marked lossless with a confidence that reads: {', '.join(sorted(policy.lossless_with)) or 'nothing'}")
    print(f"engine {args.engine}")
    judgements = []
    try:
        for reading in readings:
            judgements += _report(judge(policy, reading=reading, engine=args.engine, rounds=args.rounds), reading)
    except PolicyFault as fault:
        raise InputError(Fault(str(fault), args.policy)) from fault
    if args.json is not None:
        _write_json(args.json, [_check(policy, args.engine, judgement) for judgement in judgements])
    return 0 if all(judgement.holds for judgement in judgements) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sim.verify.check",
        description="Prove or refute that a policy is lossless: that the output law stays the target's, to 1e-9, "
        "on toy models whose every outcome is enumerated.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("policy", help="a registered kind, or package.module[:ClassName]")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the policy")
    parser.add_argument(
        "--reads",
        choices=get_args(Reading),
        help="what a confidence is made of: the tokens before its own, its own token too, or the outcome; "
        "default: each that the policy is marked for, or past where it is marked for none",
    )
    parser.add_argument("--engine", choices=list(ENGINES), default="as_told", help="what it makes of the lengths")
    parser.add_argument("--rounds", type=_rounds, default=0, help="rounds to enumerate (default: lag + 1, at least 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list of checks")
    return parser


def _rounds(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 4:
        raise argparse.ArgumentTypeError(f"expected 1 to 4 (got {text!r})")
    return int(text)


def _readings(policy: Policy, asked: Reading | None) -> list[Reading]:
    if (asked == "outcome") != policy.sees_outcome and asked is not None:
        raise InputError(
            Fault(
                f"expected outcome for a policy that sees the outcome, past or own_token for others (got {asked})",
                "--reads",
            )
        )
    if asked is not None:
        return [asked]
    return ["outcome"] if policy.sees_outcome else sorted(policy.lossless_with, reverse=True) or ["past"]


def _report(cases: Iterable[Judgement], reading: Reading) -> list[Judgement]:
    """Print as the cases come, up to the first that is not lossless."""
    print(f"\nconfidence reads {reading}\n  {'model':16}{'requests':>8}  {'curve':10}{'error':>9}")
    seen = []
    for case in cases:
        seen.append(case)
        print(f"  {case.toy.name:16}{case.toy.requests:8}  {case.curve:10}{case.error:9.1e}", flush=True)
        if not case.holds:
            print("\n".join(_counterexample(case)))
            return seen
    print(f"lossless: the output law is the target's, within {BOUND:g}, in all {len(seen)} cases")
    return seen


def _counterexample(case: Judgement) -> Iterator[str]:
    shown = case.shown
    assert shown is not None
    yield f"NOT lossless: model {case.toy.name}, curve {case.curve}"
    whose = "all requests together start" if shown.request is None else f"request {shown.request} starts"
    texts = " / ".join(_letters(text) for text in shown.texts)
    yield f"  the chance that {whose} with {texts} is {shown.engine:.6g}; the target's is {shown.target:.6g}"
    if case.leak is not None:
        leak = case.leak
        what = f"whether its draft token {leak.position} is verified" if leak.position else "whether it is served"
        yield f"  round {leak.one.number}, request {leak.request}: {what} depends on what it drafted there or later:"
        for way in (leak.one, leak.other):
            yield "    " + "; ".join(_told(way, place) for place in range(len(way.running)))


def _told(way: Way, place: int) -> str:
    action = way.actions[place]
    done = "put off" if action is None else f"verified {action}"
    drafted = _letters(token for token, _ in way.draws[place])
    confidence = " ".join(f"{value:g}" for value in way.confidence[place])
    return f"request {way.running[place]} drafts {drafted}, confidence {confidence}: {done}"


def _letters(tokens: Iterable[int]) -> str:
    return "".join("ABCDEFGH"[token] for token in tokens)


def _check(policy: Policy, engine: str, case: Judgement) -> dict[str, object]:
    texts = "/".join(_letters(text) for text in case.worst.texts)
    return {
        "name": f"{policy.kind}, reads {case.reading}, engine {engine}, model {case.toy.name}, curve {case.curve}:"
        f" chance of {texts}",
        "predicted": case.worst.target,
        "observed": case.worst.engine,
        "error": case.error,
        "bound": BOUND,
        "unit": "probability",
        "holds": case.holds,
    }


def _write_json(path: Path, checks: list[dict[str, object]]) -> None:
    partial = path.with_name(path.name + ".part")
    try:
        partial.write_text(json.dumps(checks, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise InputError(Fault(f"cannot write: {(error.strerror or str(error)).lower()}", str(path))) from None


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
