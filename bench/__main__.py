"""Measure speed, as ratios to a bare SimPy timeout in the same process: ``make bench``.

    python -m bench                 # step costs and W1 to W4
    python -m bench --w5            # the million-request run too (minutes)

Prints a table and writes ``bench/latest.json``: a list of ``name, value, unit, bound, holds``. Bounds are those of the
design (gates on the minimum of several runs). Times are processor time of this process, which on a quiet machine is
the wall's; a machine under other load shows itself in the timeout's time all the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import simpy

from bench.workloads import LONG, WORKLOADS, engine, run, table
from sim.fleet import simulate
from sim.recorder import Recorder
from sim.rng import Streams
from sim.routing import LeastRequests, RoundRobin
from sim.verify import Dspark, NoSpeculation, Policy
from sim.workload.base import RequestTable

RUNNING = 64


@dataclass(frozen=True, slots=True)
class Check:
    """One measured value, with the bound it should keep (None: none) and whether it does."""

    name: str
    value: float
    unit: str
    bound: float | None
    holds: bool | None


def check(name: str, value: float, unit: str, bound: float | None = None) -> Check:
    """Judge a value against its upper bound."""
    return Check(name, value, unit, bound, None if bound is None else value <= bound)


def timeout_s(events: int = 200_000) -> float:
    """Return the seconds of one bare SimPy timeout: schedule, pop, resume."""

    def tick(env: simpy.Environment) -> Generator[simpy.Event, None, None]:
        while True:
            yield env.timeout(1.0)

    env = simpy.Environment()
    env.process(tick(env))
    start = time.process_time()
    env.run(until=events)
    return (time.process_time() - start) / events


class Elsewhere(Dspark):
    """DSpark as somebody else's class: it chooses in Python."""


def step_s(policy: Policy, steps: int, foresight: bool) -> float:
    """Return the seconds of one engine step with 64 running requests, SimPy's part included.

    ``foresight``: nothing can reach the one replica, so that many steps pass in one call. Without it, two replicas
    under a router that looks at their state: each step is an event of its own.
    """
    toy = engine(policy)
    replicas = 1 if foresight else 2
    n = RUNNING * replicas
    ones = np.ones(n, np.int64)
    requests = RequestTable(np.zeros(n), ones, ones << 40, 0 * ones, 0 * ones, domains=("-",))
    router = RoundRobin() if foresight else LeastRequests()
    start = time.process_time()
    result = simulate(toy, router, replicas, requests, steps * 12e-3, Streams(1), Recorder("full"))
    return (time.process_time() - start) / int(result.steps["steps"].sum())


def best(measure: Callable[[], float], times: int = 5) -> float:
    """Return the minimum of several measurements: what the code costs when nothing else runs."""
    gc.collect()
    return min(measure() for _ in range(times))


def step_checks() -> list[Check]:
    """Measure the step costs at 64 running requests, as ratios to a timeout."""
    cases: list[tuple[str, Policy, bool, float | None]] = [
        ("step, none, an event a step", NoSpeculation(), False, 6.0),
        ("step, dspark, an event a step", Dspark(), False, 20.0),
        ("step, none, several a call", NoSpeculation(), True, 6.0),
        ("step, dspark, several a call", Dspark(), True, 12.0),
        ("step, dspark chosen in Python", Elsewhere(), False, None),
    ]
    checks = []
    for name, policy, foresight, bound in cases:
        step_s(policy, 200, foresight)
        ratios = []
        for _ in range(5):
            unit = best(timeout_s, 3)
            ratios.append(step_s(policy, 4000, foresight) / unit)
        checks.append(check(name, min(ratios), "timeouts", bound))
    return checks


def flatness_check() -> Check:
    """Compare the cost of a step in a long run with that in a short one."""
    step_s(Dspark(), 200, True)
    short = best(lambda: step_s(Dspark(), 4_000, True))
    long = best(lambda: step_s(Dspark(), 40_000, True), 3)
    return check("cost of a step, 40,000 steps over 4,000", long / short, "ratio", 1.1)


def workload_checks(with_w5: bool) -> list[Check]:
    """Time the workloads, each in a process of its own, so that its memory can be told."""
    bounds = {("W1", "dspark"): 0.3, ("W4", "dspark"): 3.0}
    checks = []
    for workload in WORKLOADS:
        if workload.name == "W5" and not with_w5:
            continue
        for policy in ("none", "dspark"):
            found = in_own_process(workload.name, policy)
            name = f"{workload.name}, {policy}"
            # The bounds are of a machine whose bare timeout takes 0.65 us; scaled to this one.
            bound = bounds.get((workload.name, policy))
            scaled = None if bound is None else bound * max(found["timeout_s"] / 0.65e-6, 1.0)
            checks.append(check(f"{name}: loop", found["seconds"], "s", scaled))
            limit = 400.0 if (workload.name, policy) == ("W4", "dspark") else 2048.0 if workload.name == "W5" else None
            checks.append(check(f"{name}: memory", found["memory_mib"], "MiB", limit))
            checks.append(check(f"{name}: steps", found["steps"], "steps"))
    return checks


def records_checks() -> list[Check]:
    """Compare W4 with its records on disk: with W4 without, and with a run five times as long."""
    bare, kept, long = (
        in_own_process(*given)
        for given in (("W4", "dspark"), ("W4", "dspark", "--records"), (LONG.name, "dspark", "--records"))
    )
    return [
        check("W4, dspark: records on disk, over the loop without", kept["seconds"] / bare["seconds"], "ratio"),
        check("W4, dspark, five times as long, on disk: loop", long["seconds"] / kept["seconds"], "ratio"),
        check("the same: memory", long["memory_mib"] / kept["memory_mib"], "ratio", 1.1),
    ]


def in_own_process(*options: str) -> dict[str, float]:
    """Return what `one` found in a fresh process, whose memory is its own; ``options``: workload, policy, flags."""
    workload, policy, *flags = options
    command = [sys.executable, "-m", "bench", "--one", workload, "--policy", policy, *flags]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def one(name: str, policy: str, records: bool) -> None:
    """Run one workload and print its seconds, steps and peak memory as JSON; ``records``: write them to disk."""
    workload = next(workload for workload in (*WORKLOADS, LONG) if workload.name == name)
    toy = engine(Dspark() if policy == "dspark" else NoSpeculation())
    requests = table(workload)
    run(WORKLOADS[0], toy, table(WORKLOADS[0]))  # compiled code is loaded
    times = []
    for _ in range(1 if workload.requests > 20_000 else 5):
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            steps = run(workload, toy, requests, Path(folder) if records else None)
            times.append(time.process_time() - start)
    print(
        json.dumps(
            {
                "seconds": min(times),
                "timeout_s": best(timeout_s),
                "steps": steps,
                "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    )


def main() -> int:
    """Measure, print, write; exit 1 where a bound is broken."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--w5", action="store_true", help="run the million-request workload too")
    parser.add_argument("--one", metavar="W", help=argparse.SUPPRESS)
    parser.add_argument("--policy", default="dspark", help=argparse.SUPPRESS)
    parser.add_argument("--records", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.policy, options.records)
        return 0
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    unit = best(timeout_s)
    print(f"machine: {machine}; a bare SimPy timeout takes {unit * 1e6:.2f} us")
    checks = [check("bare SimPy timeout", unit * 1e6, "us"), *step_checks(), flatness_check()]
    checks += [*workload_checks(options.w5), *records_checks()]
    width = max(len(one.name) for one in checks)
    for one_check in checks:
        bound = "" if one_check.bound is None else f"  bound {one_check.bound:8.2f}  "
        verdict = "" if one_check.holds is None else "holds" if one_check.holds else "BROKEN"
        print(f"{one_check.name:{width}s} {one_check.value:12.3f} {one_check.unit:9s}{bound}{verdict}")
    path = Path(__file__).with_name("latest.json")
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"machine": machine, "checks": [asdict(one) for one in checks]}, indent=1) + "\n")
    part.replace(path)
    return 0 if all(one_check.holds is not False for one_check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
