"""What the commands that read a scenario have in common: options, and the checks that go with them.

Imports wait inside the functions so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles.errors import Fault, InputError

if TYPE_CHECKING:
    from profiles.reading import Document
    from sim.executors import Executor
    from sim.scenario import Scenario


def add_scenario_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that lay something over a scenario."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="lay a value over the file's")
    parser.add_argument("--trace", metavar="PATH", help="trace to replay: sets arrivals.path")
    parser.add_argument("--seed", type=int, metavar="N", help="sets seed")
    parser.add_argument("--replications", type=int, metavar="N", help="runs of each policy, paired across policies")
    parser.add_argument(
        "--policies", metavar="A,B", help="compare only these policies: kinds, or labels of the scenario"
    )
    parser.add_argument("--strict", action="store_true", help="refuse a trace with rows that cannot be used")


def scenario_of(
    options: argparse.Namespace,
    vary: Sequence[str] = (),
    replications: int | None = None,
    wanted: str = "a scenario file, for example scenarios/flash_peak.yaml",
) -> tuple[Scenario, Document]:
    """Load the scenario that the options name and change; raises `InputError`.

    ``vary``: axes to sweep; ``replications``: how many where neither file nor option says; ``wanted``: what is said to
    be missing where no file is named.
    """
    if options.scenario is None:
        raise InputError(Fault(f"missing: {wanted}", "SCENARIO"))
    from sim.loading import load_scenario, with_policies

    given = [(f"--{key}", key, getattr(options, key)) for key in ("seed", "replications")]
    scenario, document = load_scenario(
        Path(options.scenario),
        tuple(options.set),
        None if options.trace is None else Path(options.trace),
        [one for one in given if one[2] is not None],
        vary,
    )
    if replications is not None and not document.has("replications"):
        document = document.replaced(("replications",), replications)
        scenario = scenario.model_copy(update={"replications": replications})
    if options.strict and not _reads_trace(scenario):
        raise InputError(Fault(f"has no effect: {options.scenario} reads no trace", "--strict"))
    if options.policies is not None:
        scenario, document = with_policies(scenario, document, options.policies.split(","))
    return scenario, document


def _reads_trace(scenario: Scenario) -> bool:
    from sim.workload.length_source import PairsOfTrace
    from sim.workload.replay import Replay

    return isinstance(scenario.arrivals, Replay) or isinstance(scenario.lengths, PairsOfTrace)


def add_executor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say who runs the cells."""
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: all cores)")
    parser.add_argument(
        "--executor", choices=("local", "ray"), default="local", help="processes of this machine, or a Ray cluster"
    )
    parser.add_argument(
        "--address",
        metavar="A",
        help="the Ray cluster, such as auto or 10.0.0.1:6379 (default: one started here); what it asks of who "
        "connects, such as RAY_AUTH_MODE and RAY_AUTH_TOKEN, comes from the environment",
    )


def executor_of(options: argparse.Namespace) -> Executor:
    """Return who runs the cells; raises `InputError` for options that do not go together."""
    if options.jobs is not None and options.jobs < 1:
        raise InputError(Fault(f"expected at least 1 (got {options.jobs})", "--jobs"))
    import os

    jobs = options.jobs or os.cpu_count() or 1
    if options.executor == "local":
        if options.address is not None:
            raise InputError(Fault("has no effect without --executor ray", "--address"))
        if jobs > 1:
            from sim.processes import start_server

            start_server()  # before anything that takes time to load
    from sim.executors import LocalExecutor, RayExecutor

    if options.executor == "local":
        return LocalExecutor(jobs)
    if options.address is not None and options.jobs is not None:
        raise InputError(Fault("has no effect: the cluster has its processors", "--jobs"))
    return RayExecutor(options.address, options.jobs)


def check_json(path: Path, out: Path | None = None) -> None:
    """Refuse before the run what could not be written after it; ``out`` will be there by then."""
    if path.is_dir():
        raise InputError(Fault("cannot write: is a directory", str(path)))
    folder = path.resolve().parent
    if not folder.is_dir() and (out is None or not folder.is_relative_to(out.resolve())):
        raise InputError(Fault("cannot write: no such directory", str(path)))


def save_json(data: Any, path: Path) -> None:
    """Write what ``--json`` asks for; raises `InputError`."""
    from sim.output import write_json

    try:
        write_json(data, path)
    except OSError as error:
        raise InputError(Fault(f"cannot write: {(error.strerror or str(error)).lower()}", str(path))) from None
