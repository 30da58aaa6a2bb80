"""``python -m decoder.serve``: run a scenario on the real engine, and report it as the simulator reports its own."""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles.errors import Fault, InputError, exit_code_of
from sim.options import add_scenario_options, check_json, save_json, scenario_of

if TYPE_CHECKING:
    from decoder.drafter import Drafter
    from decoder.engine import Engine
    from decoder.load import Prompts, WallClock
    from decoder.sampling import Sampling
    from decoder.target import HfTarget
    from sim.cells import Cell, CellResult, Prepared
    from sim.scenario import Scenario

log = logging.getLogger("decoder.serve")

DESCRIPTION = """Run a scenario's traffic on the real engine, in real time, one policy after the other.

The file is the simulator's: arrivals, lengths, limits, memory, prefill and policies mean the same. The profile is what
load-aware policies believe a step costs; the clock is the wall's. Results have the simulator's columns, table and
plots, so that `python -m sim.run` of the same file lies beside them. Prompts are of the lab's domains, cut or joined to
the lengths that the scenario draws; each output ends where the scenario says, which the engine does not know."""
EXAMPLE = "python -m decoder.serve scenarios/smollm2_engine.yaml --drafter dspark"


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m decoder.serve",
        description=DESCRIPTION,
        epilog=f"example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="a scenario file of one replica")
    add_scenario_options(parser)
    parser.add_argument(
        "--target", default="smollm2", metavar="NAME", help="smollm2 (default), tiny, or a local folder"
    )
    parser.add_argument(
        "--drafter",
        action="append",
        default=[],
        metavar="[NAME=]DIR",
        help="one that ships with the target, or a folder; NAME as the policies call it; may be repeated",
    )
    parser.add_argument(
        "--calibration", action="append", default=[], metavar="NAME=FILE", help="temperatures of a drafter"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines as for decoder.evaluate (the lab's)")
    parser.add_argument("--texts", type=int, default=50, metavar="N", help="of the lab, a domain (default: 50)")
    parser.add_argument("--lab", type=Path, default=Path("lab"), metavar="DIR", help="named targets lie there (lab)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of all models")
    parser.add_argument("--graph-sizes", default="", metavar="N,N,...", help="passes are padded to these; CUDA graphs")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")
    parser.add_argument("--out", metavar="DIR", help="where results go (default: runs/<name>-engine)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison as JSON too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = make_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    return exit_code_of(lambda: _run(options))


@dataclass(frozen=True, slots=True)
class Plant:
    """What serves: the target, the drafters by name, their temperatures, prompts and how tokens are drawn."""

    target: HfTarget
    drafters: Mapping[str, Drafter]
    temperatures: Mapping[str, Sequence[float]]
    prompts: Prompts
    sampling: Sampling
    graph_sizes: Sequence[int] = ()


def _run(options: argparse.Namespace) -> int:
    scenario, document = scenario_of(
        options, wanted="a scenario file of one replica, for example scenarios/smollm2_engine.yaml"
    )
    out = Path("runs") / f"{scenario.name}-engine" if options.out is None else Path(options.out)
    if options.json is not None:
        check_json(options.json, out)
    check_scenario(scenario)
    _check_numbers(options, scenario)
    # Imports wait until here so that --help answers at once.
    from tqdm import tqdm

    from analysis.session import draw_plots
    from sim.cells import Work, policy_folders, prepare
    from sim.output import new_folder, versions, write_csv
    from sim.output import write_json as write_run_json
    from sim.report import Outcome, comparison_rows, policy_summary, report_text
    from sim.scenario import resolved

    work = Work(document, options.strict)
    cells = work.cells()
    ready = {(cell.point, cell.replication): prepare(work, cell.point, cell.replication) for cell in cells}
    domains = sorted({domain for one in ready.values() for domain in one.traffic.domains})
    plant = _plant(options, scenario, domains)
    journals = out.with_name(f"{out.name}.rows")
    results = []
    with new_folder(out) as folder:
        for cell in cells:
            one = ready[cell.point, cell.replication]
            kind = scenario.policies[cell.policy].kind
            with tqdm(total=one.scenario.horizon, unit="s", desc=kind, disable=None, leave=False) as bar:

                def show(now_s: float, bar: Any = bar, end_s: float = one.scenario.horizon) -> None:
                    bar.update(min(now_s, end_s) - bar.n)

                results.append(serve_cell(plant, one, cell, work, folder, journals, show))
        first = next(iter(ready.values())).plant
        outcome = Outcome(scenario, first, out, tuple(results))
        for index, home in enumerate(policy_folders(scenario)):
            write_run_json(policy_summary(outcome, index), folder / home / "summary.json")
        manifest = {
            "format": "dspark-run/1",
            "engine": "decoder",
            "scenario": resolved(scenario),
            "seed": scenario.seed,
            "versions": versions(),
        }
        write_run_json(manifest, folder / "manifest.json")
        write_csv(comparison_rows(outcome), folder / "comparison.csv")
        draw_plots(outcome, folder)
    shutil.rmtree(journals, ignore_errors=True)
    print(report_text(outcome))
    if options.json is not None:
        save_json({"scenario": scenario.name, "comparison": comparison_rows(outcome)}, options.json)
    return 0


def check_scenario(scenario: Scenario) -> None:
    """Raise `InputError` where a scenario asks for more than one engine, or for what this one does not do."""
    from sim.batching import Disaggregated

    faults = []
    if scenario.fleet.replicas != 1:
        faults.append(Fault(f"one engine is one replica (got {scenario.fleet.replicas})", key="fleet.replicas"))
    if isinstance(scenario.fleet.prefill, Disaggregated):
        faults.append(Fault("the engine reads its own prompts (got 'disaggregated')", key="fleet.prefill.kind"))
    if faults:
        raise InputError(*faults)


def _check_numbers(options: argparse.Namespace, scenario: Scenario) -> None:
    """Raise `InputError` for numbers among the options that cannot be, before models are read."""
    from decoder.measuring import asked, graph_faults

    faults = graph_faults(asked(options, "graph_sizes"), scenario.fleet.max_batch_tokens)
    for name, least in (("threads", 1), ("texts", 1), ("temperature", 0)):
        value = getattr(options, name)
        if value is not None and not value >= least:
            faults.append(Fault(f"expected at least {least} (got {value})", key=f"--{name}"))
    if faults:
        raise InputError(*faults)


def _plant(options: argparse.Namespace, scenario: Scenario, domains: Sequence[str]) -> Plant:
    import torch

    from decoder.bank import named
    from decoder.calibration import load_calibration
    from decoder.checkpoint import load_drafter
    from decoder.lab.targets import target_folder
    from decoder.loading import TORCH_DTYPES, check_device
    from decoder.measuring import asked
    from decoder.packed import pack_models
    from decoder.sampling import Sampling
    from decoder.target import load_target

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = check_device(options.device)
    sampling = Sampling(temperature=options.temperature)
    folders = named(options.drafter, options.target)
    wanted = {policy.drafter for policy in scenario.policies if policy.drafter is not None}
    missing = sorted(wanted - set(folders))
    if missing:
        raise InputError(
            Fault(f"policies draft with '{missing[0]}'; given: {', '.join(folders) or 'none'}", key="--drafter")
        )
    temperatures = {}
    for text in options.calibration:
        name, equals, file = text.partition("=")
        if not equals or name not in folders:
            raise InputError(Fault(f"expected NAME=FILE, a drafter's name first (got '{text}')", key="--calibration"))
        temperatures[name] = load_calibration(Path(file)).temperatures
    dtype = TORCH_DTYPES[options.dtype]
    folder = target_folder(options.target, options.lab)
    target = load_target(folder, device=device, dtype=dtype)
    drafters = {
        name: load_drafter(path, target, device=device, dtype=dtype) for name, path in folders.items() if name in wanted
    }
    for drafter in (None, *drafters.values()):
        pack_models(target, drafter)
    prompts = _prompts(options, target, folder, domains)
    return Plant(target, drafters, temperatures, prompts, sampling, asked(options, "graph_sizes"))


def _prompts(options: argparse.Namespace, target: HfTarget, folder: Path, domains: Sequence[str]) -> Prompts:
    """Return prompts of the scenario's domains; traffic that names none draws on all."""
    from decoder.lab.prompts import DOMAINS, load_documents
    from decoder.lab.writing import make_prompt
    from decoder.load import Prompts
    from decoder.loading import Models, eos_ids, load_tokenizer, read_prompts
    from sim.workload.domains import UNSAID

    tokenizer = load_tokenizer(folder)
    chat = bool(getattr(tokenizer, "chat_template", None))
    texts: dict[str, list[tuple[int, ...]]] = {}
    if options.prompts is not None:
        models = Models(target, None, None, tokenizer, eos_ids(target), chat)
        for prompt in read_prompts(options.prompts, models):
            texts.setdefault(prompt.domain, []).append(prompt.token_ids)
    else:
        if tokenizer is None:
            raise InputError(Fault("the target folder has no tokenizer; give --prompts with token ids", str(folder)))
        known = [domain for domain in DOMAINS if domain in domains or UNSAID[0] in domains]
        for domain in known:
            documents = load_documents(domain, "held_out")[: options.texts]
            texts[domain] = [make_prompt(document, tokenizer, "written").token_ids for document in documents]
    if UNSAID[0] in domains:
        texts[UNSAID[0]] = [text for found in texts.values() for text in found]
    unknown = sorted(set(domains) - set(texts))
    if unknown:
        raise InputError(
            Fault(
                f"no prompts of domain '{unknown[0]}'; known: {', '.join(texts) or ', '.join(DOMAINS)}", key="domains"
            )
        )
    return Prompts(texts)


def serve_cell(
    plant: Plant,
    ready: Prepared,
    cell: Cell,
    work: Any,
    folder: Path | None = None,
    journals: Path | None = None,
    on_progress: Callable[[float], None] | None = None,
    clock: WallClock | None = None,
) -> CellResult:
    """Serve one policy's traffic and return what the simulator would of a cell of its own.

    ``folder``: gets the records as Parquet; ``journals``: gets them a line at a time while the engine runs. ``clock``:
    one that skips idle time, for a run that is to take less long.
    """
    import numpy as np

    from decoder.journal import Journal
    from decoder.load import Asking, WallClock, drive
    from sim.cells import CellResult, cell_folder
    from sim.invariants import Books
    from sim.kernels import text_draw
    from sim.metrics import Measurement, Timeline
    from sim.output import parquet_file
    from sim.scenario import parsed

    scenario = ready.scenario
    home = cell_folder(parsed(work.document), cell)
    clock = clock or WallClock()
    engine = build_engine(plant, ready, cell, clock)
    warm_up(engine)
    if journals is not None:
        shutil.rmtree(journals / home, ignore_errors=True)
    engine.journal = Journal(journals / home if journals is not None else None)
    text_key = ready.streams.key("luck")
    clock.restart()
    drive(
        engine,
        ready.traffic,
        plant.prompts,
        Asking(
            sampling=plant.sampling,
            seed=int(ready.streams.key("engine")),
            # Of prompts that a bank was recorded on each request gets the one whose text it follows when simulated.
            draw_of=lambda key: int(text_draw(text_key, np.uint64(key))),
        ),
        horizon_s=scenario.horizon,
        clock=clock,
        on_progress=on_progress,
    )
    requests, steps = engine.journal.columns()
    books = Books()
    books.add_requests(requests)
    books.add_steps(steps)
    books.check(engine.scheduler.inside, len(requests["request"]))
    measurement = Measurement(scenario.window, ready.plant.gpus, scenario.objectives.bounds())
    timeline = Timeline(scenario.horizon, scenario.records.window, ready.plant.gpus)
    for taker in (measurement, timeline):
        taker.add_steps(steps)
        taker.add_requests(requests)
    if folder is not None:
        with parquet_file(folder / home / "requests.parquet") as to:
            to(requests)
        with parquet_file(folder / home / "steps.parquet") as to:
            to(steps)
    caveats = (*ready.traffic.caveats, "served by the engine of decoder/, in real time")
    return CellResult(cell, measurement.metrics(), timeline.series(), dict(ready.traffic.trace_rows), caveats)


def build_engine(plant: Plant, ready: Prepared, cell: Cell, clock: Callable[[], float]) -> Engine:
    """Return the engine of a cell: the scenario's limits and memory, its policy, and rates from its profile."""
    from decoder.batch_target import HfBatchTarget
    from decoder.batched_drafting import make_batch_drafter
    from decoder.engine import Engine
    from decoder.engine_rates import FlatStepRates, ProfileStepRates
    from decoder.paged_kv import BlockPool
    from decoder.served import Settings

    scenario, fleet = ready.scenario, ready.scenario.fleet
    policy = scenario.policies[cell.policy]
    drafter = plant.drafters[policy.drafter] if policy.drafter is not None else None
    pool = BlockPool(ready.plant.kv_blocks, fleet.block_tokens)
    context = min(ready.plant.max_context_tokens, plant.target.max_context_tokens)
    target = HfBatchTarget(
        plant.target,
        pool,
        graph_sizes=plant.graph_sizes,
        graph_segments=fleet.max_running if plant.graph_sizes else 0,
        graph_queries=1 + drafter.trained_length if drafter is not None else 1,
        graph_rows=context,
    )
    step_time = ready.plant.step.profile.step_time
    assert step_time is not None
    rates = (
        FlatStepRates()
        if policy.drafter is None
        else ProfileStepRates(step_time, policy.drafter, fleet.max_batch_tokens, fleet.max_running)
    )
    return Engine(
        target,
        make_batch_drafter(drafter, pool, plant.target.device) if drafter is not None else None,
        policy,
        pool,
        Settings(
            prefill=fleet.prefill,
            max_running=fleet.max_running,
            max_batch_tokens=fleet.max_batch_tokens,
            max_waiting=fleet.max_waiting,
            max_context_tokens=context,
            deadline_s=scenario.deadline if scenario.deadline is not None else float("inf"),
        ),
        rates=rates,
        temperatures=plant.temperatures.get(policy.drafter) if policy.drafter is not None else None,
        clock=clock,
    )


def warm_up(engine: Engine) -> None:
    """Run a few steps of several sizes, so that nothing is compiled or first touched while the clock runs."""
    import numpy as np

    from decoder.step_times import Point, run_point

    drafted = engine.trained_length
    for requests in sorted({1, min(4, engine.settings.max_running)}):
        for length in sorted({0, drafted}):
            point = Point(requests, length, 8, prompt=8)
            if engine.pool.blocks_for(8 + 1 + drafted) * (requests + 1) <= engine.pool.blocks:
                run_point(engine, point, 2)
    if drafted:
        engine.policy.start().verify_lengths(np.full((2, drafted), 0.5), np.full(2 * (1 + drafted) + 1, 1.0))
    engine.verifier = engine.policy.start()


if __name__ == "__main__":
    sys.exit(main())
