"""How long the engine's steps take, on a grid of requests, verified tokens and context.

The engine itself is timed, with all it does in a step: requests are put into it as if they had come so far (a time does
not depend on what the cache holds), a step is run, and they are put back. Repeats go over the whole grid, in an order
drawn anew each time, so that a machine that drifts or is disturbed shows as spread and not as a slope; and what a whole
pass took longer than others is taken out before medians are (`levelled`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from decoder.batched_drafting import ChainBatch
from decoder.chance import KeyedLuck
from decoder.engine import Engine
from decoder.paged_kv import Pages
from decoder.sampling import Sampling, Shaper
from decoder.served import Served
from decoder.session import Request
from decoder.stopping import Limits
from sim.verify.base import Confidence, Lengths, Rates
from sim.workload.base import RequestTable

Floats = NDArray[np.float64]
#: Fewer repeats tell nothing of their spread.
LEAST_REPEATS = 3
#: Rounds of medians at most; they settle after a few.
POLISHES = 50
#: Tokens that requests hold; any will do.
_TOKEN = 1


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A step: ``requests`` that decode with ``context`` cached tokens each and verify ``length`` draft tokens each.

    ``prompt``: prompt tokens of one more request that is being read in the same step.
    """

    requests: int
    length: int
    context: int
    prompt: int = 0

    @property
    def batch_tokens(self) -> int:
        """Tokens verified."""
        return self.requests * (1 + self.length)


@dataclass(slots=True)
class Samples:
    """Seconds of repeats of one point: of the whole step, and of the drafter in it, taking a prompt in included.

    ``stretches``: the stretch of time that each is of, see `paces_of`.
    """

    step_s: list[float] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)
    stretches: list[int] = field(default_factory=list)

    @property
    def target_s(self) -> Floats:
        """Steps without the drafter."""
        return np.asarray(np.array(self.step_s) - np.array(self.draft_s), np.float64)


@dataclass(frozen=True, slots=True)
class _Given:
    """Verifies as many draft tokens as it is told."""

    length: int
    drafted: int

    def draft_length(self, requests: int, trained_length: int) -> int:
        """Draft the whole block, whatever is verified of it."""
        return self.drafted

    def verify_lengths(self, confidence: Confidence, steps_per_s: Rates) -> Lengths:
        """Verify the given length of every request."""
        return np.full(confidence.shape[0], self.length, np.int64)


def spread(values: Sequence[float] | Floats) -> float:
    """Return half the interquartile range over the median."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float((high - low) / 2 / middle)


def paces_of(samples: Mapping[Point, Samples]) -> dict[int, float]:
    """Return how many times as long as usual steps took in each stretch of time; the median sample's stretch has 1.

    A machine that others use is slow for minutes. Points are not all visited in the same minutes, and the median of a
    point's samples may lie among its slow ones where another's lies among its fast ones. So the logarithms of whole
    steps are taken apart into what a point takes and what a stretch adds, by medians in turn (median polish, Tukey,
    Exploratory Data Analysis, 1977, chapter 11).
    """
    logs = np.log(np.concatenate([found.step_s for found in samples.values()]))
    point = np.repeat(np.arange(len(samples)), [len(found.step_s) for found in samples.values()])
    names, stretch = np.unique(np.concatenate([found.stretches for found in samples.values()]), return_inverse=True)
    of_point = [np.flatnonzero(point == at) for at in range(len(samples))]
    of_stretch = [np.flatnonzero(stretch == at) for at in range(len(names))]
    added = np.zeros(len(names))
    for _ in range(POLISHES):
        left = logs - added[stretch]
        left = logs - np.array([np.median(left[own]) for own in of_point])[point]
        before, added = added, np.array([np.median(left[own]) for own in of_stretch])
        added -= np.median(added[stretch])
        if np.abs(added - before).max() < 1e-6:
            break
    return dict(zip(names.tolist(), np.exp(added).tolist(), strict=True))


def levelled(samples: Mapping[Point, Samples]) -> dict[Point, Samples]:
    """Return samples as they would have been, had all stretches of time been as slow as the median one."""
    paces = paces_of(samples)

    def at_one(seconds: Sequence[float], stretches: Sequence[int]) -> list[float]:
        return [value / paces[stretch] for value, stretch in zip(seconds, stretches, strict=True)]

    return {
        point: Samples(at_one(one.step_s, one.stretches), at_one(one.draft_s, one.stretches), one.stretches)
        for point, one in samples.items()
    }


def run_point(engine: Engine, point: Point, steps: int) -> Samples:
    """Run a point ``steps`` times in a row and leave the engine empty.

    The engine's clock must tell time as the device sees it (synchronized), and its limits must leave room.
    """
    drafted = engine.trained_length
    engine.verifier = _Given(point.length, drafted)
    held = [_put_in(engine, f"r{index}", point.context) for index in range(point.requests)]
    samples = Samples()
    for _ in range(steps):
        if point.prompt:
            _put_prompt(engine, point.prompt)
        engine.step()
        row = engine.journal.steps[-1]
        samples.step_s.append(row.busy_s)
        assert engine.last_times is not None
        taking_in_s = engine.last_times.advance_s if engine.drafter else 0.0
        samples.draft_s.append(row.draft_s if point.requests else taking_in_s)
        for served in [*engine.scheduler.in_prefill, *engine.scheduler.decoding]:
            if served not in held:
                engine.cancel(served)
        for served in held:
            _put_back(engine, served, point.context)
    for served in held:
        engine.cancel(served)
    return samples


def loop_gaps_s(engine: Engine, requests: int, steps: int) -> Floats:
    """Return the seconds from each step's end to the next one's start, while `decoder.load.drive` serves ``requests``.

    It is what no step's time holds: writing the step down, finding out who ended and who arrived. Every request stays
    for ``steps`` steps. The engine is left empty.
    """
    from decoder.load import Asking, Prompts, drive

    each = np.ones(requests, np.int64)
    traffic = RequestTable(np.zeros(requests), each, steps * each, 0 * each, 0 * each, ("-",))
    engine.verifier = _Given(0, engine.trained_length)
    before = len(engine.journal.steps)
    prompts, asking = Prompts({"-": [(_TOKEN,)]}), Asking(sampling=Sampling())
    drive(engine, traffic, prompts, asking, horizon_s=np.inf, clock=engine.clock)
    rows = engine.journal.steps[before:]
    return np.array([later.started_s - row.ended_s for row, later in itertools.pairwise(rows)])


def _served(engine: Engine, name: str, prompt_tokens: int) -> Served:
    request = Request(
        request_id=name,
        prompt_ids=(_TOKEN,) * prompt_tokens,
        limits=Limits(max_new_tokens=engine.settings.max_context_tokens),
        sampling=Sampling(),
    )
    shaper = Shaper(request.sampling, engine.target.vocab_size, engine.target.device)
    served = Served(request, shaper, KeyedLuck(0, name), engine.clock())
    engine.journal.arrived(served)
    served.pages = Pages()
    served.draft = engine.drafter.start(served.pages) if engine.drafter else None
    return served


def _put_in(engine: Engine, name: str, context: int) -> Served:
    served = _served(engine, name, context)
    engine.scheduler.decoding.append(served)
    _put_back(engine, served, context)
    return served


def _put_back(engine: Engine, served: Served, context: int) -> None:
    """Let a request stand where it stood: ``context`` cached tokens and an anchor."""
    assert served.pages is not None
    served.output_ids[:] = [_TOKEN]
    served.rounds.clear()
    served.rows = context
    engine.pool.trim(served.pages, context)
    engine.pool.grow(served.pages, context)
    if served.draft is not None:
        served.draft.rows, served.draft.ahead = context, ()
        if isinstance(engine.drafter, ChainBatch) and served.draft.last_state is None:
            served.draft.last_state = engine.drafter.blank_state()


def _put_prompt(engine: Engine, tokens: int) -> None:
    served = _served(engine, "prompt", tokens)
    assert served.pages is not None
    engine.pool.grow(served.pages, tokens)
    served.to_read = tokens
    engine.scheduler.in_prefill.append(served)


@dataclass(slots=True)
class Visits:
    """Samples of points, gathered pass by pass: each visits every point once, for ``steps`` steps after one of warm-up.

    ``seed``: of the order of each pass. ``took_s``: by the engine's clock, `visit_next` included. A pass is a stretch
    of time of its own (`paces_of`); of single visits `begin_stretch` says when one begins.
    """

    engine: Engine
    points: Sequence[Point]
    steps: int = 4
    seed: int = 0
    samples: dict[Point, Samples] = field(default_factory=lambda: defaultdict(Samples))
    passes: int = 0
    took_s: float = 0.0
    _stretch: int = -1
    _ahead: Iterator[Point] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Draw no order before it is needed."""
        self._ahead = self._endless()

    def again(self, on_point: Callable[[], None] = lambda: None) -> None:
        """Visit every point once more."""
        self.begin_stretch()
        for at in np.random.default_rng((self.seed, self.passes)).permutation(len(self.points)):
            self._visit(self.points[at], self.steps)
            on_point()
        self.passes += 1

    def begin_stretch(self) -> None:
        """Tell visits from now on apart from those before."""
        self._stretch += 1

    def visit_next(self) -> tuple[Point, float]:
        """Visit one point, for one step after one of warm-up; return the point and the step's seconds.

        It is no part of a pass. All points have their turn, in an order drawn anew each time round.
        """
        point = next(self._ahead)
        return point, self._visit(point, 1)[0]

    def _visit(self, point: Point, steps: int) -> list[float]:
        began_s = self.engine.clock()
        once = run_point(self.engine, point, steps + 1)
        samples = self.samples[point]
        samples.step_s += once.step_s[1:]
        samples.draft_s += once.draft_s[1:]
        samples.stretches += [self._stretch] * steps
        self.engine.journal.steps.clear()
        self.took_s += self.engine.clock() - began_s
        return once.step_s[1:]

    def _endless(self) -> Iterator[Point]:
        rng = np.random.default_rng(self.seed)
        while True:
            yield from (self.points[at] for at in rng.permutation(len(self.points)))

    def repeat(self, repeats: int, limit_s: float = np.inf, on_point: Callable[[], None] = lambda: None) -> None:
        """Make ``repeats`` passes; those beyond `LEAST_REPEATS` that would end after ``limit_s`` are left out."""
        for done in range(repeats):
            if done >= LEAST_REPEATS and self.took_s * (done + 1) / done > limit_s:
                break
            self.again(on_point)


def grid(
    requests: Sequence[int],
    lengths: Sequence[int],
    contexts: Sequence[int],
    *,
    max_batch_tokens: int,
    max_cached_tokens: int,
    margin: int,
) -> list[Point]:
    """Return the points within both limits; ``margin``: rows of a request beyond its context."""
    return [
        Point(count, length, context)
        for count, length, context in itertools.product(requests, lengths, contexts)
        if count * (1 + length) <= max_batch_tokens and count * (context + margin) <= max_cached_tokens
    ]


@dataclass(frozen=True, slots=True)
class Fit:
    """A step's target time taken apart: ``verify_s`` at each of ``sizes`` batch tokens, and what adds to it.

    ``draft_s``: what drafting for so many requests takes beside it, the median over all lengths and contexts.
    ``residuals``: fitted over measured medians, less 1, by point.
    """

    sizes: tuple[int, ...]
    verify_s: tuple[float, ...]
    per_request_s: float
    per_context_token_s: float
    draft_s: dict[int, float]
    residuals: dict[Point, float]

    @property
    def rms(self) -> float:
        """Root mean square of the relative residuals."""
        return float(np.sqrt(np.mean(np.square(list(self.residuals.values())))))


def fit(samples: dict[Point, Samples]) -> Fit:
    """Take measured steps apart: ``verify_s[batch tokens] + per_request r + per_context_token c``.

    Least squares of relative errors; no term may be negative. A size keeps a value of its own: the table is as jagged
    as the machine.
    """
    from scipy.optimize import lsq_linear

    points = sorted(samples)
    sizes = sorted({point.batch_tokens for point in points})
    at = {size: column for column, size in enumerate(sizes)}
    matrix = np.zeros((len(points), len(sizes) + 2))
    seconds = np.array([float(np.median(samples[point].target_s)) for point in points])
    for row, point in enumerate(points):
        matrix[row, at[point.batch_tokens]] = 1
        matrix[row, -2] = point.requests
        matrix[row, -1] = point.requests * point.context
    solved = lsq_linear(matrix / seconds[:, None], np.ones(len(points)), bounds=(0, np.inf), method="bvls").x
    fitted = matrix @ solved
    drafts: dict[int, list[float]] = defaultdict(list)
    for point in points:
        drafts[point.requests] += samples[point].draft_s
    return Fit(
        tuple(sizes),
        tuple(float(value) for value in solved[:-2]),
        float(solved[-2]),
        float(solved[-1]),
        {requests: float(np.median(seconds_of)) for requests, seconds_of in drafts.items()},
        {point: float(found) for point, found in zip(points, fitted / seconds - 1, strict=True)},
    )


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """What prompts add to a step: see `profiles.schema.RowsPrefill`. ``residuals``: as `Fit` has them.

    ``draft_floor_s``, ``draft_token_s``: what they add to drafting, in a step of prompts alone and for each token;
    ``draft_rms_s``: root mean square of what these two leave.
    """

    floor_s: float
    beside_s: float
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    draft_floor_s: float
    draft_token_s: float
    draft_rms_s: float
    residuals: dict[Point, float]


def fit_prefill(samples: dict[Point, Samples], base: Fit) -> PrefillFit:
    """Find what the rows of prompts cost in the pass that verifies, as a table at the prompt lengths measured.

    ``samples``: steps with prompts, alone and beside decoding; what decoding and drafting cost is ``base``'s to
    say. Least squares, of relative errors in that pass and of seconds in what is added to drafting; the table may not
    fall, and no price be negative. What a prompt adds beside decoding, whatever its rows, is told from its rows only
    where it was read beside several numbers of batch tokens.
    """
    from scipy.optimize import nnls

    points = sorted(samples)
    sizes = np.array(sorted({point.prompt for point in points}))
    seconds = np.array([float(np.median(samples[point].target_s)) for point in points])
    known = dict(zip(base.sizes, base.verify_s, strict=True))
    decoding = np.array(
        [
            known[point.batch_tokens]
            + base.per_request_s * point.requests
            + base.per_context_token_s * point.requests * point.context
            if point.requests
            else 0.0
            for point in points
        ]
    )
    # Columns: the floor of prompts alone, what is added beside decoding, and what the table grows by over each stretch
    # between its sizes.
    verified = np.array([[point.batch_tokens] for point in points])
    prompts = np.array([[point.prompt] for point in points])
    grown = _grown(verified + prompts, sizes) - _grown(verified, sizes)
    alone = np.array([[float(point.requests == 0)] for point in points])
    told_apart = len({point.batch_tokens for point in points if point.requests}) > 1
    matrix = np.hstack([alone, (1 - alone) * told_apart, grown])
    solved, _ = nnls(matrix / seconds[:, None], np.maximum(seconds - decoding, 0) / seconds)
    fitted = matrix @ solved + decoding
    drafting = np.array(
        [
            np.median(samples[point].draft_s) - (base.draft_s[point.requests] if point.requests else 0)
            for point in points
        ]
    )
    taken_in = np.hstack([alone, prompts])
    draft_solved, _ = nnls(taken_in, drafting)
    return PrefillFit(
        floor_s=float(solved[0]),
        beside_s=float(solved[1]),
        sizes=tuple(sizes.tolist()),
        seconds=tuple(np.cumsum(solved[2:]).tolist()),
        draft_floor_s=float(draft_solved[0]),
        draft_token_s=float(draft_solved[1]),
        draft_rms_s=float(np.sqrt(np.mean((taken_in @ draft_solved - drafting) ** 2))),
        residuals={point: float(found) for point, found in zip(points, fitted / seconds - 1, strict=True)},
    )


def _grown(rows: NDArray[np.int64], sizes: NDArray[np.int64]) -> Floats:
    """Return the share of each stretch of a table that lies below ``rows`` ``[n, 1]``, beyond its end more than all."""
    before = np.concatenate([[0], sizes[:-1]])
    beyond = np.maximum(rows - sizes[-1], 0) / sizes[-1]
    return np.asarray(np.clip((rows - before) / (sizes - before), 0, 1) + beyond, np.float64)
