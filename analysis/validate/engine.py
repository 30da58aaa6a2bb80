"""The rung ``engine``: the simulator, given step times measured on this machine, predicts the real engine.

A profile is measured (`decoder.measuring`) and written beside the report; acceptance is the bank recorded on held-out
text. Then every policy meets every load twice: on the engine of `decoder`, against the clock, and in the simulator,
with the same arrivals, lengths, limits and policies. Nothing of the engine's runs goes into the prediction. All is
repeated, with new arrivals, for as long as the time allows; how far the errors of the repeats lie apart is the noise
that an error is held against (`engine_pairs`).

Machines drift. The grid of steps is therefore visited while the engine serves as well, a step at a time. What was
found so far is what the engine's policies are told, anew before every load; from what was found in all, the simulator
predicts in the end, for each run at the pace that the visits within it showed (`engine_pace`).

The engine's own choice is put to the test as well: the budgets around the one that ``dspark_async`` settles on are
forced upon it, on the same arrivals.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.validate.engine_pace import PaceReader, at_pace, paces_of_runs
from analysis.validate.engine_pairs import LUCKS, Pair, mean_metrics
from analysis.validate.engine_report import make_report
from analysis.validate.engine_steps import MAX_BATCH_TOKENS, load_steps, priced, taken
from analysis.validate.rungs import Report, Settings
from profiles.errors import Fault, InputError
from profiles.files import SHIPPED, load_bank, load_profile, save_profile
from profiles.reading import parse_document
from profiles.schema import Bank, Drafter
from sim.cells import Cell, Work, prepare, run_cell
from sim.loading import checked
from sim.metrics import Metrics
from sim.output import slugs, write_json
from sim.scenario import label_of, parsed

if TYPE_CHECKING:
    from decoder.measuring import Measuring
    from decoder.serve import Plant
    from decoder.step_times import Point, Visits

log = logging.getLogger(__name__)

TARGET, DRAFTER = "smollm2", "dspark"
#: Acceptance of that drafter on the target's answers to the very questions that are served, `QUESTIONS` a domain.
BANK = SHIPPED / "measured" / "smollm2_engine.json"
#: Questions of each domain that are served: the first of the held-out ones of so many tokens, cut to the fewest (of the
#: chat template's greeting), so that all have one length. They are those of the bank, in its order, and a request asks
#: the one whose text it follows when simulated: of other questions other drafts are accepted. Against a bank of 32
#: held-out questions of any length, predicted accepted lengths were 3 % too high (58 runs, 2026-12-03).
QUESTIONS, PROMPT_TOKENS, LONGEST_PROMPT_TOKENS = 48, 84, 96
#: The text that it was recorded on: `decoder.collect` writes it, see the Makefile. Answers go on past their end, as the
#: engine's do; half of those of chat end within 37 tokens. A bank of answers that end there, followed by other answers'
#: beginnings, predicted 1.59 tokens a round of chat where 1.46 were seen (16 runs, 2026-12-06). Of each question there
#: are three: of first 24 tokens the bank's mean has a standard deviation of 0.7 % then, of one answer each 1.2 %.
TEXT = f"written-t1-held_out-{PROMPT_TOKENS}..{LONGEST_PROMPT_TOKENS}-ignore_eos"
#: Where `make lab` leaves the drafter that it trains.
TRAINED = Path("lab") / TARGET / "drafters" / DRAFTER

#: What the rung may take where nothing is said, measuring included.
MINUTES, QUICK_MINUTES = 30.0, 3.0
#: A run of the engine has between so many seconds of steps; three repeats of all are planned for.
SHORTEST_S, LONGEST_S, PLANNED_REPEATS = 8.0, 60.0, 3
#: What building an engine and its first steps take of a run, about.
SETTING_UP_S = 1.0
#: Passes over the grid of steps before anything is served; what is only a first look makes the fewest. After three on
#: an unquiet machine the parts were up to 23 % off a measured step (2026-12-03).
PASSES = 6
#: What reading the machine's pace adds to a run, about: two steps of the grid to eight of the run's, which are shorter
#: (AVX2, 2026-12-03).
READING = 0.3
#: Loads are looked at for so long, simulated, before any is served.
SIMULATED_S = 600.0
#: Spread of output lengths: standard deviation of their logarithm.
SIGMA = 0.5
#: `dspark_async` that looks back further than any run lasts keeps to its first budget.
FOREVER_STEPS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run. Loads are shares of what ``none`` delivers, simulated, with every seat taken.

    ``forced``: how many budgets are forced at each load. ``repeats``: at most. ``busy_s``: seconds of steps in a run,
    about; requests are short, so that some seconds see many.
    """

    minutes: float
    shares: tuple[float, ...]
    policies: tuple[str, ...]
    block: int
    forced: int = 2
    users: int = 4
    max_running: int = 8
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = 16
    kv_cache: str = "192MiB"
    busy_s: float = SHORTEST_S
    repeats: int = 20

    @property
    def cells(self) -> int:
        """Policies times loads."""
        return len(self.policies) * (len(self.shares) + 1)

    @property
    def runs(self) -> int:
        """Runs of the engine in one repeat."""
        return self.cells + self.forced * (len(self.shares) + 1)

    def within(self, left_s: float) -> Plan:
        """Return the plan with runs of such a length that its planned repeats fit into the time left."""
        each_s = (left_s / PLANNED_REPEATS / self.runs - SETTING_UP_S) / (1 + READING)
        return dataclasses.replace(self, busy_s=round(min(max(each_s, SHORTEST_S), LONGEST_S), 1))


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals, as a scenario has them, and how long a run is, the idle time in it included."""

    arrivals: str
    horizon_s: float


def plan_of(quick: bool, block: int, minutes: float | None = None) -> Plan:
    """Return the whole plan, or a first look."""
    drafting = f"drafter: {DRAFTER}"
    policies: tuple[str, ...] = (
        "none",
        f"{{kind: mtp1, {drafting}}}",
        f"{{kind: fixed, k: {min(3, block)}, {drafting}}}",
        f"{{kind: dspark, confidence: raw, {drafting}}}",
        f"{{kind: dspark_async, confidence: raw, first_budget: 1, {drafting}}}",
    )
    if quick:
        policies = (policies[0], policies[2], policies[4])
    return Plan(
        minutes=minutes if minutes is not None else QUICK_MINUTES if quick else MINUTES,
        shares=(0.5,) if quick else (0.25, 0.5, 0.85),
        policies=policies,
        block=block,
    )


def forcing(budget: int) -> str:
    """Return a policy that verifies so many draft tokens a request, in the mean, whatever the load."""
    return f"{{kind: dspark_async, confidence: raw, lag: {FOREVER_STEPS}, first_budget: {budget}, drafter: {DRAFTER}}}"


def budgets_around(chosen: float, block: int, count: int) -> list[int]:
    """Return the ``count`` whole budgets of 0 to ``block`` nearest to what was chosen, its own rounded one left out."""
    own = round(chosen)
    return sorted(sorted((b for b in range(block + 1) if b != own), key=lambda b: (abs(b - chosen), b))[:count])


def scenario_text(plan: Plan, profile: Path, load: Load, policies: Sequence[str], seed: int) -> str:
    """Return a scenario of the plan's sizes; paths are absolute, so that it may lie anywhere."""
    return f"""
name: engine
seed: {seed}
horizon: {load.horizon_s}s
warmup: {0.2 * load.horizon_s}s
cooldown: {0.1 * load.horizon_s}s
fleet:
  replicas: 1
  step_profile: {profile.resolve()}
  acceptance_profile: {BANK.resolve()}
  kv_cache: {plan.kv_cache}
  max_context_tokens: 1024
  block_tokens: 16
  max_running: {plan.max_running}
  max_batch_tokens: {MAX_BATCH_TOKENS}
  prefill: {{kind: chunked, chunk_tokens: 64}}
policies: [{", ".join(policies)}]
arrivals: {load.arrivals}
lengths:
  prompt: {{kind: fixed, tokens: {plan.prompt_tokens}}}
  output: {{kind: lognormal, median: {plan.output_tokens}, sigma: {SIGMA}, max: {4 * plan.output_tokens}}}
domains: {{code: 0.4, math: 0.3, chat: 0.3}}
"""


def work_of(plan: Plan, profile: Path, load: Load, policies: Sequence[str], seed: int) -> Work:
    """Return a checked scenario, ready to run."""
    document = parse_document(scenario_text(plan, profile, load, policies, seed), str(profile.parent / "e.yaml"))
    checked(document)
    return Work(document)


def drafter_home() -> Path:
    """Return the folder of the drafter: the one that ships, or the one that was trained here."""
    from decoder.lab.targets import SHIPPED as SHIPPED_DRAFTERS

    shipped = SHIPPED_DRAFTERS / TARGET / DRAFTER
    home = shipped if shipped.is_dir() else TRAINED
    if not home.is_dir():
        training = f"python -m decoder.train --target {TARGET} --drafter {DRAFTER} --out {TRAINED}"
        raise InputError(
            Fault(f"no drafter was trained for {TARGET} yet: {training} (make lab does it all)", str(home))
        )
    return home


def checked_bank(home: Path) -> Drafter:
    """Return what the bank knows of the drafter; raises `InputError` unless it was recorded of these weights."""
    from decoder.lab.targets import target_sha256

    recording = f"python -m decoder.bank --target {TARGET} --drafter {DRAFTER}={home} --text {TEXT} --name {BANK.stem}"
    if not BANK.exists():
        raise InputError(Fault(f"no bank of {TARGET} was recorded yet: {recording}", str(BANK)))
    drafters = load_profile(BANK).acceptance
    if DRAFTER not in drafters:
        raise InputError(Fault(f"knows no drafter '{DRAFTER}'; record it: {recording}", str(BANK), key="acceptance"))
    weights = f"weights sha256 {target_sha256(home)[:16]}"
    for domain, law in drafters[DRAFTER].domains.items():
        if isinstance(law, Bank) and weights not in (law.provenance.note or ""):
            key = f"acceptance.{DRAFTER}.domains.{domain}"
            raise InputError(
                Fault(f"is of other weights than {home}; record it again: {recording}", str(BANK), key=key)
            )
    return drafters[DRAFTER]


def check_questions(known: Drafter) -> None:
    """Raise `InputError` unless the bank holds as many texts of each question served: both sides speak of the same."""
    for domain, law in known.domains.items():
        if not isinstance(law, Bank):
            continue
        texts = len(np.unique(load_bank(law, BANK, known.trained_length).request))
        if texts % QUESTIONS:
            key = f"acceptance.{DRAFTER}.domains.{domain}"
            said = f"holds {texts} texts; expected a multiple of the {QUESTIONS} questions served"
            raise InputError(Fault(said, str(BANK), key=key))


def make_measuring(out: Path, home: Path, plant: Plant) -> Measuring:
    """Return what measures this machine; it writes ``profile.json``."""
    from decoder import measure
    from decoder.measuring import Measuring

    options = ["--target", TARGET, "--drafter", str(home), "--drafter-name", DRAFTER, "--requests", "1,2,4,8"]
    # The lengths that most rounds verify and the contexts that there will be. Prompts: up to the rows of a chunk beside
    # the drafts of 8 requests, and both sides of where the matrix product takes another way on these CPUs (40 and 44
    # rows, 10 ms apart on AVX2, 2026-12-03).
    options += ["--lengths", "0,1,2,3,5", "--contexts", "80,144", "--prompts", "8,24,40,44,64,96"]
    options += ["--steps", "2", "--out", str(out / "profile.json")]
    command = shlex.join(["python", "-m", "decoder.measure", *options])
    return Measuring(measure.make_parser().parse_args(options), command, plant.target, plant.drafters[DRAFTER])


def write_profile(measuring: Measuring, out: Path) -> None:
    """Write the profile of what was measured so far, and its table, anew."""
    from decoder.measuring import table_of

    _, report = measuring.write()
    (out / "profile.txt").write_text("\n".join(table_of(report)) + "\n", encoding="utf-8")


def loads_of(plan: Plan, profile: Path, seed: int) -> dict[str, Load]:
    """Return loads, lightest first: shares of what `none` finishes with every seat taken, then users.

    Runs of all loads have as many seconds of steps in them, so a light load's last longer.
    """

    def simulated(arrivals: str, policy: int) -> Metrics:
        work = work_of(plan, profile, Load(arrivals, SIMULATED_S), plan.policies, seed)
        return run_cell(work, Cell(policy, None, 0)).metrics

    assert plan.policies[0] == "none"
    delivered = simulated(f"{{kind: closed_loop, users: {plan.max_running}}}", 0)["output_tokens_per_s_per_gpu"]
    assert delivered is not None
    capacity_per_s = float(delivered) / (plan.output_tokens * math.exp(SIGMA**2 / 2))
    loads = {f"{share:.0%}": f"{{kind: poisson, rate_per_s: {share * capacity_per_s:.4f}}}" for share in plan.shares}
    loads[f"{plan.users} users"] = f"{{kind: closed_loop, users: {plan.users}}}"
    found = {}
    for name, arrivals in loads.items():
        busy = [simulated(arrivals, policy)["busy_ratio"] or 0.0 for policy in range(len(plan.policies))]
        found[name] = Load(arrivals, round(plan.busy_s * len(busy) / sum(busy), 1))
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat of one pair, as it was served: enough to predict it.

    ``seen``: see `PaceReader`. ``records``: folder of its requests and steps.
    """

    pair: Pair
    cell: Cell
    load: Load
    policies: Sequence[str]
    seen: Sequence[tuple[Point, float]]
    records: Path


@dataclass(slots=True)
class Trial:
    """What is served and predicted, load by load, repeat by repeat, until ``until_s`` on the clock ``now``.

    Every policy meets every load once, whatever the limit. Budgets are forced, and repeats added, where the time
    allows. ``pairs`` and ``forced`` are by load, then by policy; ``measure``, which may write ``profile`` anew, is
    called before each load and once all is served, ``on_run`` after every run, which is predicted by then; in the end
    all are predicted anew, and ``on_run`` is called once more. ``visits``: to the grid, to read the machine's pace
    during a run; without them that is 1.
    """

    plan: Plan
    profile: Path
    plant: Plant
    seed: int
    until_s: float
    now: Callable[[], float] = time.monotonic
    measure: Callable[[], None] = lambda: None
    visits: Visits | None = None
    on_run: Callable[[Trial], None] = lambda trial: None
    loads: Mapping[str, Load] = field(default_factory=dict)
    pairs: dict[str, dict[str, Pair]] = field(default_factory=dict)
    forced: dict[str, dict[str, Pair]] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def run(self, loads: Mapping[str, Load]) -> None:
        """Run all; loads and policies take turns, so that a machine that drifts does not favour one."""
        self.loads = loads
        self._run(loads)
        self.measure()
        for run in self.runs:
            for found in (run.pair.predicted, run.pair.priced, run.pair.taken, run.pair.paces):
                found.clear()
        self._predict(len(self.runs))
        self.on_run(self)

    def _run(self, loads: Mapping[str, Load]) -> None:
        took_s: dict[str, float] = {}
        budgets: dict[str, list[int]] = {}
        owed = self.plan.cells
        for repeat in range(self.plan.repeats):
            for name, load in loads.items():
                began_s = self.now()
                if repeat and began_s + took_s[name] > self.until_s:
                    return
                self.measure()
                pairs = self.pairs.setdefault(name, {})
                for turn in range(len(self.plan.policies)):
                    index = (turn + repeat) % len(self.plan.policies)
                    self._serve(pairs, name, load, self.plan.policies, index, repeat)
                if repeat == 0:
                    owed -= len(self.plan.policies)
                    each_s = (self.now() - began_s) / len(self.plan.policies)
                    # What was promised comes before what was not.
                    spare_s = self.until_s - self.now() - owed * each_s
                    count = int(min(self.plan.forced, max(spare_s / each_s, 0)))
                    chosen = chosen_budget(pairs)
                    budgets[name] = [] if chosen is None else budgets_around(chosen, self.plan.block, count)
                forced = self.forced.setdefault(name, {})
                for index, budget in enumerate(budgets[name]):
                    policies = tuple(map(forcing, budgets[name]))
                    self._serve(forced, name, load, policies, index, repeat, f"budget {budget}")
                took_s[name] = self.now() - began_s

    def _serve(
        self,
        to: dict[str, Pair],
        name: str,
        load: Load,
        policies: Sequence[str],
        index: int,
        repeat: int,
        policy: str | None = None,
    ) -> None:
        from decoder.load import WallClock
        from decoder.serve import serve_cell

        work = work_of(self.plan, self.profile, load, policies, self.seed)
        cell, ready = Cell(index, None, repeat), prepare(work, None, repeat)
        policy = policy or label_of(ready.scenario.policies[index])
        log.info("%s, %s, repeat %d", name, policy, repeat + 1)
        pair = to.setdefault(policy, Pair(name, policy))
        clock = WallClock(skips_idle=True)
        reader = PaceReader(self.visits, clock) if self.visits is not None else None
        records = self.profile.with_name("records") / slugs([name])[0] / slugs([policy])[0] / f"repeat_{repeat + 1}"
        shutil.rmtree(records, ignore_errors=True)
        served = serve_cell(self.plant, ready, cell, work, records, clock=clock, on_progress=reader)
        pair.observed.append(served.metrics)
        self.runs.append(Run(pair, cell, load, policies, reader.seen if reader is not None else (), records))
        self._predict(1)
        self.on_run(self)

    def _predict(self, count: int) -> None:
        """Predict the last ``count`` runs from the profile as it is now."""
        from decoder.step_times import levelled

        samples = levelled(self.visits.samples) if self.visits is not None else {}
        paces = paces_of_runs([run.seen for run in self.runs], samples)
        then = self.profile.with_name("profile_at_pace.json")
        for run, pace in list(zip(self.runs, paces, strict=True))[-count:]:
            save_profile(at_pace(load_profile(self.profile), pace), then)
            work = work_of(self.plan, then, run.load, run.policies, self.seed)
            run.pair.paces.append(pace)
            lucks = [run_cell(work, run.cell, luck=luck).metrics for luck in range(LUCKS)]
            run.pair.predicted.append(mean_metrics(lucks))
            steps = load_steps(run.records)
            drafter = parsed(work.document).policies[run.cell.policy].drafter
            run.pair.priced.append(priced(steps, load_profile(then), drafter))
            run.pair.taken.append(taken(steps))

    def rows(self) -> list[dict[str, Any]]:
        """Return every repeat of every run as plain data."""
        by_load = [*self.pairs.values(), *self.forced.values()]
        return [row for found in by_load for pair in found.values() for row in pair.rows()]


def chosen_budget(pairs: Mapping[str, Pair]) -> float | None:
    """Return the mean draft tokens that `dspark_async` had the engine verify of a request in a round."""
    for name, pair in pairs.items():
        if name.startswith("dspark_async"):
            verified = pair.seen("verify_tokens_per_request")
            return None if verified is None else verified - 1
    return None


def run(settings: Settings) -> Report:
    """Measure, serve, simulate, compare."""
    began_s = time.monotonic()
    from decoder.step_times import LEAST_REPEATS

    home = drafter_home()
    known = checked_bank(home)
    check_questions(known)
    plan = plan_of(settings.quick, known.trained_length, settings.minutes)
    until_s = began_s + 60 * plan.minutes
    plant = make_plant(home)
    measuring = make_measuring(settings.out, home, plant)
    log.info("measuring step times")
    measuring.visits.repeat(LEAST_REPEATS if settings.quick else PASSES)
    write_profile(measuring, settings.out)
    profile = settings.out / "profile.json"
    plan = plan.within(until_s - time.monotonic())
    trial = Trial(plan, profile, plant, settings.seed, until_s)
    trial.visits = measuring.visits
    trial.measure = lambda: write_profile(measuring, settings.out)
    # After every run: whoever stops the rung keeps what was measured.
    trial.on_run = lambda one: write_json(one.rows(), settings.out / "runs.json")
    trial.run(loads_of(plan, profile, settings.seed))
    return make_report(trial, load_profile(profile), (time.monotonic() - began_s) / 60)


def make_plant(home: Path) -> Plant:
    """Return the target, the drafter and prompts that the engine serves with."""
    from decoder.checkpoint import load_drafter
    from decoder.lab.prompts import DOMAINS, load_documents
    from decoder.lab.targets import target_folder
    from decoder.lab.writing import make_prompt, of_length
    from decoder.load import Prompts
    from decoder.loading import load_tokenizer
    from decoder.packed import pack_models
    from decoder.sampling import Sampling
    from decoder.serve import Plant
    from decoder.target import load_target

    folder = target_folder(TARGET)
    target, tokenizer = load_target(folder), load_tokenizer(folder)
    drafter = load_drafter(home, target)
    # As in the engine whose steps are measured.
    pack_models(target, drafter)
    texts = {}
    for domain in DOMAINS:
        prompts = (make_prompt(document, tokenizer, "written") for document in load_documents(domain, "held_out"))
        served = of_length(prompts, PROMPT_TOKENS, LONGEST_PROMPT_TOKENS)[:QUESTIONS]
        texts[domain] = [prompt.token_ids for prompt in served]
    return Plant(target, {DRAFTER: drafter}, {}, Prompts(texts), Sampling())
