"""The exact output law of an engine with a policy on a toy model: every draft, every verdict, no sampling.

An engine serves the toy's requests for some rounds, then goes on without speculation; the law of the first tokens of
all requests together must be the target's. Requests that have those tokens leave the batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sim.verify.base import Policy
from sim.verify.memory import Memories
from sim.verify.toys import Toy

Floats = NDArray[np.float64]
Tokens = tuple[int, ...]

#: What a confidence is made of; the outcome is for policies that ask to see it.
Reading = Literal["past", "own_token", "outcome"]

#: What one request draws in a round: for each position its draft token and, where the policy is shown the outcome,
#: whether it is accepted; there the block ends at the first rejection, since nothing after it matters.
Draw = tuple[tuple[int, bool | None], ...]

#: What the engine did with each request: draft tokens verified, or None where it put the request off to the next round.
Actions = tuple[int | None, ...]


# ------------------------------------------------------------------------------------------------------------- engines


def as_told(lengths: Tokens, draft_length: int) -> Actions:
    """Verify what the policy chose."""
    return lengths


def trim_tail(lengths: Tokens, draft_length: int) -> Actions:
    """Over budget, shorten the requests admitted last."""
    room = _room(lengths, draft_length)
    actions = []
    for length in lengths:
        actions.append(min(length, room))
        room -= actions[-1]
    return tuple(actions)


def drop_batch(lengths: Tokens, draft_length: int) -> Actions:
    """Over budget, drop the drafts of the whole batch."""
    return lengths if sum(lengths) <= _room(lengths, draft_length) else (0,) * len(lengths)


def redraft(lengths: Tokens, draft_length: int) -> Actions:
    """Over budget, put off the requests admitted last; they draft anew in the next round."""
    room = _room(lengths, draft_length)
    actions: list[int | None] = []
    for length in lengths:
        actions.append(length if length <= room else None)
        room -= length if length <= room else 0
    return tuple(actions)


def _room(lengths: Tokens, draft_length: int) -> int:
    """Draft tokens that fit an engine with room for half of what may be asked, rounded up."""
    return (len(lengths) * draft_length + 1) // 2


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine makes of the lengths, and whether it shows the policy this round as if it were the past."""

    act: Callable[[Tokens, int], Actions]
    freshest: bool = False


ENGINES: Mapping[str, Engine] = {
    "as_told": Engine(as_told),
    "trim_tail": Engine(trim_tail),
    "drop_batch": Engine(drop_batch),
    "redraft": Engine(redraft),
    "freshest": Engine(as_told, freshest=True),
}


# ----------------------------------------------------------------------------------------------------------- one round


def draws(toy: Toy, last: int, drafted: int, reading: Reading) -> Iterator[tuple[Draw, float]]:
    """Yield every block that the drafter may propose after ``last``, with its chance."""
    if drafted == 0:
        yield (), 1.0
        return
    for token, q in enumerate(toy.draft_probs[last]):
        if q == 0.0:
            continue
        outcomes: tuple[tuple[bool | None, float], ...] = ((None, 1.0),)
        if reading == "outcome":
            accepted = acceptance(toy, last, token)
            outcomes = ((True, accepted), (False, 1.0 - accepted))
        for outcome, chance in outcomes:
            if chance > 0.0:
                for rest, rest_chance in draws(toy, token, 0 if outcome is False else drafted - 1, reading):
                    yield ((token, outcome), *rest), q * chance * rest_chance


def confidences(toy: Toy, request: int, last: int, draw: Draw, drafted: int, reading: Reading) -> tuple[float, ...]:
    """Return the confidence of every draft token, from what it may read."""
    if reading == "outcome":
        return tuple(float(position < len(draw) and draw[position][1] is True) for position in range(drafted))
    context = (last, *(token for token, _ in draw))
    own = 1 if reading == "own_token" else 0
    return tuple(toy.confidence(request, position, context[: position + 1 + own]) for position in range(drafted))


def acceptance(toy: Toy, last: int, token: int) -> float:
    """Return the chance that a draft token is accepted: u < min(1, p/q)."""
    return min(1.0, toy.target_probs[last][token] / toy.draft_probs[last][token])


def emissions(toy: Toy, last: int, draw: Draw, verified: int | None) -> Iterator[tuple[Tokens, float]]:
    """Yield what a request may emit when so many of its draft tokens reach the target, with its chance.

    After a rejection the residual max(p - q, 0), normalised; after the last accepted one the bonus from p. None: the
    request was put off and emits nothing.
    """
    if verified is None:
        yield (), 1.0
        return
    chance = 1.0
    prefix: Tokens = ()
    for token, outcome in draw[:verified]:
        accepted = acceptance(toy, last, token) if outcome is None else float(outcome)
        if accepted < 1.0:
            residual = np.maximum(np.subtract(toy.target_probs[last], toy.draft_probs[last]), 0.0)
            for other in np.flatnonzero(residual):
                yield (*prefix, int(other)), chance * (1.0 - accepted) * float(residual[other] / residual.sum())
        chance *= accepted
        if chance == 0.0:
            return
        prefix, last = (*prefix, token), token
    for token, p in enumerate(toy.target_probs[last]):
        if p > 0.0:
            yield (*prefix, token), chance * p


@dataclass(frozen=True, slots=True)
class Way:
    """One way a round can go, up to the verdicts of the target; a tuple's items belong to ``running``."""

    number: int
    running: tuple[int, ...]
    last: Tokens
    draws: tuple[Draw, ...]
    chance: float
    confidence: tuple[tuple[float, ...], ...]
    actions: Actions
    memory: Hashable


# ---------------------------------------------------------------------------------------------------------- all rounds


@dataclass(frozen=True, slots=True)
class Case:
    """What to enumerate. ``tokens`` first tokens of each request are judged: every position of every round."""

    policy: Policy
    toy: Toy
    steps_per_s: Floats
    engine: Engine
    reading: Reading
    rounds: int

    @property
    def tokens(self) -> int:
        """One token in each round but the last, and there a whole block."""
        return self.rounds - 1 + self.toy.draft_length


#: Where a round starts from, as far as it matters to the round: what the policy remembers, and each request's last
#: token, None where it has left.
Origin = tuple[Hashable, tuple[int | None, ...]]

#: What the requests emit in a round, as places in a list of texts, an array a request, and the chance of each.
Move = tuple[tuple[NDArray[np.intp], ...], Floats]


class Enumeration:
    """All that can happen in a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        rehearsals = int(getattr(case.policy, "lag", 1)) if case.engine.freshest else 0
        self._memories = Memories(case.policy, case.toy.draft_length, case.steps_per_s, rehearsals)
        self._ways: dict[Origin, list[Way]] = {}
        self._moves: dict[Origin, dict[Hashable, Move]] = {}
        self._emissions: dict[tuple[int | None, Draw, int | None], Floats] = {}
        self._drawn: dict[tuple[int, int, int], list[tuple[Draw, float, tuple[float, ...]]]] = {}
        self._texts = _texts(case.toy.tokens, case.tokens)
        self._emitted = _texts(case.toy.tokens, case.toy.draft_length + 1)

    def law(self) -> Floats:
        """Return the law of the first tokens: an axis a request, each over all sequences of that many tokens.

        Sequences are ordered as numbers to the base of the vocabulary's size.
        """
        toy, tokens = self.case.toy, self.case.tokens
        place = {text: i for i, text in enumerate(self._texts)}
        append = np.array([[place[(text + more)[:tokens]] for more in self._emitted] for text in self._texts])
        shape = (len(self._texts),) * toy.requests

        masses = {self._memories.start(): np.eye(1, math.prod(shape))[0]}
        for number in range(1, self.case.rounds + 1):
            moved: dict[Hashable, Floats] = {}
            for memory, mass in masses.items():
                for flat in np.flatnonzero(mass):
                    state = np.unravel_index(flat, shape)
                    last = tuple(
                        None if len(self._texts[i]) == tokens else (before, *self._texts[i])[-1]
                        for before, i in zip(toy.before, state, strict=True)
                    )
                    for after, (emitted, chances) in self._move(number, (memory, last)).items():
                        reached = np.ravel_multi_index(
                            tuple(append[i, more] for i, more in zip(state, emitted, strict=True)), shape
                        )
                        target = moved.setdefault(after, np.zeros_like(mass))
                        np.add.at(target, reached, mass[flat] * chances)
            masses = moved
        law = np.sum(list(masses.values()), axis=0).reshape(shape)
        for before in toy.before:
            law = np.tensordot(law, continuations(toy, before, self._texts, tokens), (0, 0))
        return np.asarray(law)

    def _move(self, number: int, origin: Origin) -> dict[Hashable, Move]:
        """Return, by what the policy then remembers, what the requests emit in a round."""
        if origin not in self._moves:
            requests = self.case.toy.requests
            joints: dict[Hashable, Floats] = {}
            self._ways[origin] = list(self._enumerate(number, origin))
            for way in self._ways[origin]:
                laws = [self._emission(None, (), None)] * requests
                for request, last, draw, action in zip(way.running, way.last, way.draws, way.actions, strict=True):
                    laws[request] = self._emission(last, draw, action)
                joint = way.chance * laws[0]
                for law in laws[1:]:
                    joint = np.multiply.outer(joint, law)
                joints[way.memory] = joints.get(way.memory, 0.0) + joint
            self._moves[origin] = {memory: (np.nonzero(joint), joint[joint > 0.0]) for memory, joint in joints.items()}
        return self._moves[origin]

    def _emission(self, last: int | None, draw: Draw, action: int | None) -> Floats:
        """Return the law of what one request emits in a round, over all texts that it may; nothing if it has left."""
        key = (last, draw, action)
        if key not in self._emissions:
            law = np.zeros(len(self._emitted))
            for emitted, chance in [((), 1.0)] if last is None else emissions(self.case.toy, last, draw, action):
                law[self._emitted.index(emitted)] += chance
            self._emissions[key] = law
        return self._emissions[key]

    def _blocks(self, request: int, last: int, drafted: int) -> list[tuple[Draw, float, tuple[float, ...]]]:
        """Return what a request may draw in a round, with its chance and its confidences."""
        key = (request, last, drafted)
        if key not in self._drawn:
            toy, reading = self.case.toy, self.case.reading
            self._drawn[key] = [
                (draw, chance, confidences(toy, request, last, draw, drafted, reading))
                for draw, chance in draws(toy, last, drafted, reading)
            ]
        return self._drawn[key]

    def _enumerate(self, number: int, origin: Origin) -> Iterator[Way]:
        memory, lasts = origin
        running = tuple(request for request, last in enumerate(lasts) if last is not None)
        last = tuple(token for token in lasts if token is not None)
        if not running:
            yield Way(number, (), (), (), 1.0, (), (), memory)
            return
        drafted, asked = self._memories.propose(memory, len(running))
        options = [self._blocks(request, token, drafted) for request, token in zip(running, last, strict=True)]
        for blocks in itertools.product(*options):
            drawn, chances, confidence = zip(*blocks, strict=True)
            lengths, after = ((0,) * len(running), asked)
            if drafted:
                lengths, after = self._memories.decide(asked, confidence)
            actions = self.case.engine.act(lengths, drafted)
            yield Way(number, running, last, drawn, math.prod(chances), confidence, actions, after)

    def leak(self) -> Leak | None:
        """Return the first decision of the rounds seen that depends on the very token it is about, or later ones."""
        for ways in self._ways.values():
            for position in range(self.case.toy.draft_length + 1):
                for place, request in enumerate(ways[0].running):
                    seen: dict[Hashable, Way] = {}
                    for way in ways:
                        own = way.draws[place][: max(position - 1, 0)]
                        first = seen.setdefault((way.draws[:place], own, way.draws[place + 1 :]), way)
                        if _reaches(way.actions[place], position) != _reaches(first.actions[place], position):
                            return Leak(request, position, first, way)
        return None


@dataclass(frozen=True, slots=True)
class Leak:
    """Two rounds that differ in nothing before draft token ``position`` (1, 2, ...) of ``request``.

    Yet that token is verified in one and not in the other. Position 0: the request is served at all in one only.
    """

    request: int
    position: int
    one: Way
    other: Way


def _reaches(action: int | None, position: int) -> bool:
    return action is not None and action >= position


def _texts(vocabulary: int, longest: int) -> list[Tokens]:
    """Return every text of 0..longest tokens, shortest first."""
    return [text for n in range(longest + 1) for text in itertools.product(range(vocabulary), repeat=n)]


def continuations(toy: Toy, before: int, texts: list[Tokens], tokens: int) -> Floats:
    """Return [text, sequence]: the chance of each sequence of ``tokens`` when the target goes on from each text."""
    chances = np.zeros((len(texts), toy.tokens**tokens))
    for i, text in enumerate(texts):
        for j, sequence in enumerate(itertools.product(range(toy.tokens), repeat=tokens)):
            if sequence[: len(text)] == text:
                context = (before, *sequence)
                chances[i, j] = math.prod(
                    toy.target_probs[context[n]][context[n + 1]] for n in range(len(text), tokens)
                )
    return chances


def target_law(toy: Toy, tokens: int) -> Floats:
    """Return what `Enumeration.law` must be: the target alone, each request on its own."""
    law: Floats = np.ones(())
    for before in toy.before:
        law = np.multiply.outer(law, continuations(toy, before, [()], tokens)[0])
    return law
