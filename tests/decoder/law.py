"""The exact law of what the decoder emits, by running its own steps once for every way chance can fall."""

import copy
import itertools
import pickle
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.sampling import Sampling, Shaper
from decoder.session import Block, Decoder, Generation, Request
from decoder.stopping import Limits
from sim.verify.fixed import Fixed
from tests.decoder.toys import Script, TableTarget, paths

Output = tuple[int, ...]


@dataclass(frozen=True)
class CurveRates:
    """A stated curve, jagged on purpose."""

    curve: tuple[float, ...] = (1.0, 0.9, 0.78, 0.69, 0.62, 0.55, 0.54, 0.4, 0.39)

    def steps_per_s(self, requests: int, draft_length: int) -> NDArray[np.float64]:
        return np.array([np.inf, *self.curve[: requests * (1 + draft_length)]])


@dataclass
class Rounds:
    """Rounds of one request under one drafter and sampling, remembered by what they start from."""

    target: TableTarget
    drafter: Any
    sampling: Sampling
    prompt: Output = (0,)
    max_new_tokens: int = 4
    greedy_draft: bool = False
    _blocks: dict = field(default_factory=dict)
    _outcomes: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = Limits(max_new_tokens=self.max_new_tokens)
        self.request = Request(request_id="toy", prompt_ids=self.prompt, limits=limits, sampling=self.sampling)

    def decoder(self, policy: Any, script: Script | None = None, rates: Any = None) -> Decoder:
        return Decoder(
            self.target, self.drafter, policy, luck=lambda _: script, rates=rates, greedy_draft=self.greedy_draft
        )

    def first(self) -> list[tuple[float, Output]]:
        """Return the law of the first token."""
        policy = Fixed(k=1)
        return [
            (chance, tuple(generation.output_ids))
            for chance, generation in paths(lambda script: self.decoder(policy, script).admit(self.request))
        ]

    def _at(self, output: Output) -> Generation:
        shaper = Shaper(self.sampling, self.target.vocab_size, torch.device("cpu"))
        shaper.commit([*self.prompt, *output])
        generation = Generation(self.request, shaper, None)
        generation.output_ids = list(output)
        return generation

    def blocks(self, output: Output, length: int) -> list[tuple[float, Block]]:
        """Return the law of what is drafted after ``output``."""
        if (output, length) not in self._blocks:
            generation = self._at(output)
            # Any policy of this draft length drafts the same.
            decoder = self.decoder(Fixed(k=max(length, 1)))
            decoder.restore(generation)

            def run(script: Script) -> Block:
                generation.luck = script
                return decoder._draft_one(generation, length)

            self._blocks[output, length] = list(paths(run))
        return self._blocks[output, length]

    def outcomes(self, output: Output, index: int, length: int, verify: int) -> list[tuple[float, Output]]:
        """Return the law of the output after verifying ``verify`` tokens of block ``index``."""
        key = (output, index, length, verify)
        if key not in self._outcomes:
            block = self.blocks(output, length)[index][1]
            decoder = self.decoder(Fixed(k=1))

            def run(script: Script) -> Output:
                generation = self._at(output)
                generation.luck = script
                generation.cache = self.target.new_cache()
                self.target.forward([*self.prompt, *output[:-1]], generation.cache)
                decoder.verify([replace(block, generation=generation)], [verify])
                return tuple(generation.output_ids)

            merged: dict[Output, float] = defaultdict(float)
            for chance, after in paths(run):
                merged[after] += chance
            self._outcomes[key] = [(chance, after) for after, chance in merged.items()]
        return self._outcomes[key]


def joint_law(rounds: Rounds, policy: Any, requests: int = 1, rates: Any = None) -> dict[tuple[Output, ...], float]:
    """Return the exact joint law of the outputs of ``requests`` requests that run together under a policy."""
    deciding = rounds.decoder(policy, rates=rates or CurveRates())
    first = rounds.first()
    states: dict[Any, tuple[float, Any]] = {}
    for combination in itertools.product(first, repeat=requests):
        chance = float(np.prod([c for c, _ in combination]))
        states[tuple(output for _, output in combination), b""] = (chance, policy.start())
    law: dict[tuple[Output, ...], float] = defaultdict(float)
    while states:
        following: dict[Any, tuple[float, Any]] = {}
        for (outputs, _), (weight, verifier) in states.items():
            running = [i for i in range(requests) if len(outputs[i]) < rounds.max_new_tokens]
            if not running:
                law[outputs] += weight
                continue
            before = copy.deepcopy(verifier)
            length = before.draft_length(len(running), rounds.drafter.trained_length)
            options = [list(enumerate(rounds.blocks(outputs[i], length))) for i in running]
            for combination in itertools.product(*options):
                deciding._verifier = copy.deepcopy(before)
                chance = weight * float(np.prod([c for _, (c, _) in combination]))
                lengths = deciding.decide([block for _, (_, block) in combination])
                memory = pickle.dumps(deciding._verifier)
                ends = [
                    rounds.outcomes(outputs[i], index, length, verify)
                    for i, (index, _), verify in zip(running, combination, lengths, strict=True)
                ]
                for end in itertools.product(*ends):
                    after = list(outputs)
                    for i, (_, output) in zip(running, end, strict=True):
                        after[i] = output
                    key = (tuple(after), memory)
                    total = chance * float(np.prod([c for c, _ in end])) + following.get(key, (0.0, None))[0]
                    following[key] = (total, deciding._verifier)
        states = following
    return dict(law)


def shaped(probs: np.ndarray, sampling: Sampling, seen: set[int]) -> np.ndarray:
    """Shape one distribution, written anew and naively: the judge of `decoder.sampling`."""
    with np.errstate(divide="ignore"):
        logits = np.log(probs)
    for token in seen:
        logits[token] *= sampling.repetition_penalty if logits[token] < 0 else 1 / sampling.repetition_penalty
    if sampling.temperature == 0:
        return np.eye(len(probs))[int(np.flatnonzero(logits == logits.max())[0])]
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    kept = order[: sampling.top_k] if sampling.top_k else list(order)
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if nucleus and mass >= sampling.top_p * total * (1 - 1e-12):
            break
        nucleus.append(i)
        mass += weights[i]
    nucleus = [i for i in nucleus if weights[i] >= sampling.min_p * weights[order[0]]]
    out = np.zeros(len(weights))
    out[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return out


def target_law(target: TableTarget, sampling: Sampling, prompt: Output, length: int) -> dict[Output, float]:
    """Return the law of ``length`` tokens of the target alone."""
    law: dict[Output, float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for output, chance in law.items():
            text = [*prompt, *output]
            row = shaped(target.table[text[-1]].numpy().copy(), sampling, set(text))
            for token in np.flatnonzero(row):
                longer[*output, int(token)] = chance * float(row[token])
        law = longer
    return law


def worst_difference(found: dict[tuple[Output, ...], float], alone: dict[Output, float], requests: int = 1) -> float:
    """Return the largest error of a joint law against independent requests of the target alone."""
    worst = abs(sum(found.values()) - 1)
    for combination in itertools.product(alone, repeat=requests):
        chance = float(np.prod([alone[output] for output in combination]))
        worst = max(worst, abs(found.get(combination, 0.0) - chance))
    extra = sum(chance for outputs, chance in found.items() if any(output not in alone for output in outputs))
    return max(worst, extra)
