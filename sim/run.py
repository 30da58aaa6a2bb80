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
from typing import Any

from profiles.errors import Fault, InputError, exit_code_of
from sim.options import add_scenario_options, check_json, save_json, scenario_of


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    out = argparse.ArgumentParser(
        prog="python -m sim.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("scenario", nargs="?", metavar="SCENARIO", help="a scenario file; see scenarios/")
    add_scenario_options(out)
    out.add_argument("--out", metavar="DIR", help="where results go (default: runs/<name>)")
    out.add_argument("--json", metavar="FILE", help="write the comparison as JSON too")
    out.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: all cores)"
    )
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
        blank = parser()
        for name, value in vars(options).items():
            if name != "list" and value != blank.get_default(name):
                key = name.upper() if name == "scenario" else f"--{name.replace('_', '-')}"
                raise InputError(Fault("has no effect beside --list", key))
        return _list()
    if options.jobs < 1:
        raise InputError(Fault(f"expected at least 1 (got {options.jobs})", "--jobs"))
    scenario, document = scenario_of(options)
    if options.dry_run:
        from sim.scenario import resolved

        print(_yaml(resolved(scenario)), end="")
        return 0
    if options.jobs > 1:
        from sim.processes import start_server

        start_server()  # it loads what cells need while this process loads what plots need
    from analysis.session import draw_plots
    from sim.report import report_text
    from sim.session import run_session

    out = Path("runs") / scenario.name if options.out is None else Path(options.out)
    if options.json is not None:
        check_json(Path(options.json), out)
    outcome = run_session(scenario, document, out, jobs=options.jobs, strict=options.strict, draw=draw_plots)
    print(report_text(outcome))
    if options.json is not None:
        from sim.report import comparison_rows

        save_json({"scenario": scenario.name, "comparison": comparison_rows(outcome)}, Path(options.json))
    return 0


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
    writer.width = 1000
    writer.dump(data, stream)
    return stream.getvalue()


if __name__ == "__main__":
    sys.exit(main())
