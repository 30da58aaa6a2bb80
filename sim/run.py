"""Simulate a scenario under every policy and compare them.

python -m sim.run scenarios/flash_peak.yaml
python -m sim.run scenarios/azure_conv.yaml --trace ../shared/traces/azure-llm-2023/AzureLLMInferenceTrace_conv.csv
python -m sim.run scenarios/flash_peak.yaml --set fleet.replicas=16 --policies none,mtp1,dspark --replications 5
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles.errors import Fault, InputError, exit_code_of

if TYPE_CHECKING:
    from sim.report import Outcome
    from sim.scenario import Scenario


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    out = argparse.ArgumentParser(
        prog="python -m sim.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("scenario", nargs="?", metavar="SCENARIO", help="a scenario file; see scenarios/")
    out.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="lay a value over the file's")
    out.add_argument("--trace", metavar="PATH", help="trace to replay: sets arrivals.path")
    out.add_argument("--seed", type=int, metavar="N", help="sets seed")
    out.add_argument("--replications", type=int, metavar="N", help="runs of each policy, paired across policies")
    out.add_argument("--policies", metavar="A,B", help="compare only these policies: kinds, or labels of the scenario")
    out.add_argument("--out", metavar="DIR", help="where results go (default: runs/<name>)")
    out.add_argument("--json", metavar="FILE", help="write the comparison as JSON too")
    out.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: all cores)"
    )
    out.add_argument("--strict", action="store_true", help="refuse a trace with rows that cannot be used")
    out.add_argument("--dry-run", action="store_true", help="print the resolved scenario and stop; reads no trace")
    out.add_argument("--list", action="store_true", help="print the known policies, profiles and scenarios and stop")
    return out


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = parser().parse_args(argv)
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    # Imports wait until here so that --help answers at once.
    if options.list:
        return _list()
    if options.scenario is None:
        raise InputError(Fault("missing: a scenario file, for example scenarios/flash_peak.yaml", "SCENARIO"))
    if options.jobs < 1:
        raise InputError(Fault(f"expected at least 1 (got {options.jobs})", "--jobs"))
    from sim.scenario import load_scenario, resolved, with_policies

    given = [(f"--{key}", key, getattr(options, key)) for key in ("seed", "replications")]
    scenario, document = load_scenario(
        Path(options.scenario),
        tuple(options.set),
        None if options.trace is None else Path(options.trace),
        [one for one in given if one[2] is not None],
    )
    if options.strict and not _reads_trace(scenario):
        raise InputError(Fault(f"has no effect: {options.scenario} reads no trace", "--strict"))
    if options.policies is not None:
        scenario, document = with_policies(scenario, document, options.policies.split(","))
    if options.dry_run:
        print(_yaml(resolved(scenario)), end="")
        return 0
    from analysis.session import draw_plots
    from sim.report import report_text
    from sim.session import run_session

    out = Path("runs") / scenario.name if options.out is None else Path(options.out)
    if options.json is not None:
        _check_json(Path(options.json), out)
    outcome = run_session(scenario, document, out, jobs=options.jobs, strict=options.strict, draw=draw_plots)
    print(report_text(outcome))
    if options.json is not None:
        _write_json(outcome, Path(options.json))
    return 0


def _reads_trace(scenario: Scenario) -> bool:
    from sim.workload.length_source import PairsOfTrace
    from sim.workload.replay import Replay

    return isinstance(scenario.arrivals, Replay) or isinstance(scenario.lengths, PairsOfTrace)


def _check_json(path: Path, out: Path) -> None:
    """Refuse before the run what could not be written after it."""
    if path.is_dir():
        raise InputError(Fault("cannot write: is a directory", str(path)))
    folder = path.resolve().parent
    if not folder.is_dir() and not folder.is_relative_to(out.resolve()):
        raise InputError(Fault("cannot write: no such directory", str(path)))


def _write_json(outcome: Outcome, path: Path) -> None:
    from sim.output import write_json
    from sim.report import comparison_rows

    try:
        write_json({"scenario": outcome.scenario.name, "comparison": comparison_rows(outcome)}, path)
    except OSError as error:
        raise InputError(Fault(f"cannot write: {(error.strerror or str(error)).lower()}", str(path))) from None


def _list() -> int:
    from profiles.files import known_profiles
    from profiles.reading import first_question
    from sim.verify import POLICIES

    print("policies")
    for kind, cls in POLICIES.known().items():
        print(f"  {kind:14s} {(cls.__doc__ or '').strip().splitlines()[0]}")
    print("profiles")
    for name in known_profiles():
        print(f"  {name}")
    print("scenarios")
    for path in sorted(Path("scenarios").glob("*.yaml")):
        print(f"  {path}  {first_question(path)}")
    return 0


def _yaml(data: Any) -> str:
    import io

    from ruamel.yaml import YAML

    stream = io.StringIO()
    writer = YAML()
    writer.default_flow_style = False
    writer.dump(data, stream)
    return stream.getvalue()


if __name__ == "__main__":
    sys.exit(main())
