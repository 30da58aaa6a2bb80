"""Print what is in a profile, where each value came from and what is assumed; draw its curves."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from profiles.curves import evaluate, known_range
from profiles.errors import Fault, InputError, exit_code_of
from profiles.files import digest, find_profile, known_profiles, load_bank, load_profile
from profiles.schema import (
    Bank,
    Curve,
    DomainLaw,
    Drafter,
    LinearPrefill,
    Profile,
    RowsPrefill,
    StepTime,
    TableCurve,
    conditional,
    provenances,
)

log = logging.getLogger("profiles.show")

WIDTH = 118
#: Sizes at which curves are printed: those up to the last known one, and that one.
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: Requests of the table of whole steps.
LOADS = (1, 4, 16, 64, 128, 256)

BETWEEN = {"round_up": "rounded up between", "linear": "straight lines between"}

Report = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Show one profile, or list them all."""
    parser = argparse.ArgumentParser(
        prog="python -m profiles.show",
        description="Print what is in a profile and where it came from, and draw its curves. No name: list them.",
        epilog="example: python -m profiles.show paper/v4_flash --out /tmp/v4_flash",
    )
    parser.add_argument(
        "name", nargs="?", help="a shipped profile such as paper/v4_flash, or a path that ends in .json"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the plots (default: runs/profiles/NAME)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same numbers as JSON")
    parser.add_argument("--no-plots", action="store_true", help="print only")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    if arguments.name is None:
        if arguments.out or arguments.json or arguments.no_plots:
            raise InputError(Fault("--out, --json and --no-plots need the NAME of a profile"))
        return _list_profiles()
    if arguments.out and arguments.no_plots:
        raise InputError(Fault("has no effect beside --no-plots", "--out"))

    path = find_profile(arguments.name)
    profile = load_profile(path)
    report = describe(profile, path)
    print(as_text(report))
    if report["assumed"]:
        log.warning(
            "warning: %d of %d values are assumed; metrics that rest on them are no measurements",
            len(report["assumed"]),
            len(report["provenance"]),
        )
    if arguments.json:
        _write(arguments.json, json.dumps(report, indent=1) + "\n")
    if not arguments.no_plots:
        from analysis.profile_plots import draw_profile  # matplotlib takes a second to load

        folder = arguments.out or Path("runs/profiles") / profile.name
        try:
            for plot in draw_profile(profile, path, folder):
                log.info("%s", plot)
        except OSError as fault:
            raise InputError(Fault(f"cannot write: {(fault.strerror or str(fault)).lower()}", str(folder))) from None
    return 0


def _list_profiles() -> int:
    names = known_profiles()
    width = max(map(len, names), default=0) + 2
    for name in names:
        profile = load_profile(find_profile(name))
        has = [what for what, part in (("step time", profile.step_time), ("acceptance", profile.acceptance)) if part]
        print(f"{name:{width}}{', '.join(has)}")
        print(textwrap.indent(textwrap.fill(profile.description, WIDTH - 4), "    "))
    return 0


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as fault:
        raise InputError(Fault(f"cannot write: {(fault.strerror or str(fault)).lower()}", str(path))) from None


# ------------------------------------------------------------------------------------------------------- what is in it


def describe(profile: Profile, path: Path) -> Report:
    """Collect what a profile says, as plain data with units in the keys."""
    sources = provenances(profile)
    return {
        "profile": profile.name,
        "file": str(path),
        "sha256": digest(path),
        "description": profile.description,
        "disturbed": profile.disturbed,
        "step_time": _step_time(profile.step_time) if profile.step_time else None,
        "steps": _whole_steps(profile) if profile.step_time else None,
        "acceptance": {name: _drafter(drafter, path) for name, drafter in profile.acceptance.items()},
        "replica": {
            name: getattr(profile.replica, name).value
            for name in ("gpus", "kv_bytes_per_token", "max_context_tokens")
            if profile.replica
        },
        "provenance": [
            {"value": where, **source.model_dump(mode="json", exclude_none=True)} for where, source in sources.items()
        ],
        "assumed": [where for where, source in sources.items() if source.origin == "assumed"],
    }


def _step_time(step_time: StepTime) -> Report:
    prefill = step_time.prefill
    priced: Report = {}
    if isinstance(prefill, LinearPrefill):
        priced = _linear(prefill)
    elif isinstance(prefill, RowsPrefill):
        each = zip(prefill.sizes, prefill.seconds, strict=True)
        points = [{"rows": size, "ms": 1e3 * seconds, "known": True} for size, seconds in each]
        priced = {"floor_ms": 1e3 * prefill.floor_s, "beside_ms": 1e3 * prefill.beside_s, "points": points}
    return {
        "verify": _curve(step_time.verify, "batch_tokens"),
        "draft": {
            name: {
                "per": cost.per,
                **_curve(cost.curve, "requests"),
                **({"prefill": _linear(cost.prefill)} if cost.prefill is not None else {}),
            }
            for name, cost in step_time.draft.items()
        },
        "prefill": {"kind": prefill.kind, **priced},
        **{
            f"{name}_ms": 1e3 * part.seconds
            for name in ("per_request", "per_context_token", "overhead")
            if (part := getattr(step_time, name)) is not None
        },
    }


def _linear(prefill: LinearPrefill) -> Report:
    priced: Report = {"floor_ms": 1e3 * prefill.floor_s, "per_token_ms": 1e3 * prefill.per_token_s}
    if prefill.per_request_s is not None:
        priced["per_request_ms"] = 1e3 * prefill.per_request_s
    return priced


def _curve(curve: Curve, unit: str) -> Report:
    first, last = known_range(curve)
    sizes = [size for size in SIZES if size < last] + [last]
    seconds = evaluate(curve, last, unit).seconds
    report: Report = {"kind": curve.kind, "known_from": first, "known_to": last, "beyond": curve.beyond}
    if isinstance(curve, TableCurve):
        report["smoothing"] = curve.smoothing
        report["segments"] = [
            {"between": part.between, "from": part.sizes[0], "to": part.sizes[-1], "sizes": len(part.sizes)}
            for part in curve.segments
        ]
    else:
        report["floor_ms"], report["saturating_ms"] = 1e3 * curve.floor_s, 1e3 * curve.saturating_s
        report["saturation"], report["per_unit_ms"] = curve.saturation, 1e3 * curve.per_unit_s
    report["points"] = [{unit: size, "ms": 1e3 * float(seconds[size]), "known": size >= first} for size in sizes]
    return report


def _whole_steps(profile: Profile) -> list[Report]:
    """Return whole decoding steps by load: without drafting, and with every drafter's full block."""
    step_time = profile.step_time
    assert step_time is not None
    rows = []
    for requests in LOADS:
        row: Report = {"requests": requests, "none_ms": _step_ms(step_time, requests, None, 0)}
        for name in step_time.draft:
            if name in profile.acceptance:
                k = profile.acceptance[name].trained_length
                row[f"{name}_{k}_ms"] = _step_ms(step_time, requests, name, k)
        rows.append(row)
    return rows


def _step_ms(step_time: StepTime, requests: int, drafter: str | None, verify_length: int) -> float | None:
    """Return a step's milliseconds (contexts left out), None where the profile does not reach."""
    sizes: list[tuple[Curve, int, int]] = [(step_time.verify, requests * (1 + verify_length), 1)]
    if drafter is not None:
        cost = step_time.draft[drafter]
        sizes.append((cost.curve, requests, verify_length if cost.per == "token" else 1))
    seconds = sum(part.seconds for part in (step_time.overhead,) if part)
    seconds += requests * (step_time.per_request.seconds if step_time.per_request else 0.0)
    for curve, size, times in sizes:
        if size > known_range(curve)[1] and curve.beyond == "refuse":
            return None
        seconds += times * float(evaluate(curve, size, "size").seconds[size])
    return 1e3 * seconds


def _drafter(drafter: Drafter, path: Path) -> Report:
    return {
        "kind": drafter.kind,
        "trained_length": drafter.trained_length,
        "confidence_reads": drafter.confidence_reads,
        "domains": {domain: _law(law, drafter.trained_length, path) for domain, law in drafter.domains.items()},
    }


def _law(law: DomainLaw, length: int, path: Path) -> Report:
    if isinstance(law, Bank):
        bank = load_bank(law, path, length)
        survival = tuple(float(s) for s in np.cumprod(bank.chance, axis=1).mean(axis=0))
        extra: Report = {"positions": int(bank.position.size), "requests": int(np.unique(bank.request).size)}
    else:
        survival = law.survival.values
        extra = {
            "request_sd": law.spread.request_sd,
            "token_sd": law.spread.token_sd,
            "noise_sd": law.confidence.noise_sd,
            "raw_temperature": list(law.confidence.raw_temperature),
        }
    return {
        "kind": law.kind,
        "survival": list(survival),
        "conditional": [float(c) for c in conditional(survival)],
        "accepted_length_tokens": [float(tokens) for tokens in 1 + np.cumsum(survival)],
        **extra,
    }


# ------------------------------------------------------------------------------------------------------------- as text


def as_text(report: Report) -> str:
    """Lay a report out for a terminal; ``*`` marks what is assumed, ``~`` what lies outside the known range."""
    assumed = report["assumed"]
    lines = [report["profile"], textwrap.fill(report["description"], WIDTH)]
    if report["disturbed"]:
        lines.append(textwrap.fill(f"DISTURBED MEASUREMENT: {report['disturbed']}", WIDTH))
    if report["step_time"]:
        lines += ["", *_step_time_lines(report["step_time"], report["steps"], assumed)]
    if report["acceptance"]:
        lines += ["", *_acceptance_lines(report["acceptance"], assumed)]
    if report["replica"]:
        values = report["replica"]
        marks = {name: _mark(f"replica.{name}", assumed) for name in values}
        lines += [
            "",
            f"replica: {values['gpus']}{marks['gpus']} GPU{'s' * (values['gpus'] > 1)}, "
            f"{values['kv_bytes_per_token']:,}{marks['kv_bytes_per_token']} KV bytes a token, "
            f"context up to {values['max_context_tokens']:,}{marks['max_context_tokens']} tokens",
        ]
    lines += ["", "where it comes from  (* assumed)"]
    for where, source in _grouped(report["provenance"]):
        lines += _source_lines(where, source)
    lines += ["", f"{len(assumed)} of {len(report['provenance'])} values are assumed"]
    return "\n".join(lines)


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _mark(where: str, assumed: Iterable[str]) -> str:
    return "*" if where in assumed else ""


def _linear_text(prefill: Report) -> str:
    letting_in = f", {prefill['per_request_ms']:.3g} ms a request let in" if "per_request_ms" in prefill else ""
    return (
        f"{1e3 * prefill['per_token_ms']:.3g} us a prompt token{letting_in}; "
        f"a step of prompts alone starts from {prefill['floor_ms']:.4g} ms"
    )


def _step_time_lines(step_time: Report, steps: list[Report], assumed: list[str]) -> list[str]:
    lines = _wrap(f"verify{_mark('step_time.verify', assumed)}: {_range(step_time['verify'], 'batch tokens')}")
    lines += _points(step_time["verify"], "batch_tokens", "batch tokens")
    for name, cost in step_time["draft"].items():
        mark = _mark(f"step_time.draft.{name}.curve", assumed)
        lines += _wrap(f"draft {name}{mark}, per {cost['per']}: {_range(cost, 'requests')}")
        if any(point["ms"] > 0 for point in cost["points"]):
            lines += _points(cost, "requests", "requests")
        if "prefill" in cost:
            mark = _mark(f"step_time.draft.{name}.prefill", assumed)
            lines.append(f"draft {name}, of prompts{mark}: {_linear_text(cost['prefill'])}")
    prefill, mark = step_time["prefill"], _mark("step_time.prefill", assumed)
    if prefill["kind"] == "linear":
        lines.append(f"prefill{mark}: {_linear_text(prefill)}")
    elif prefill["kind"] == "rows":
        lines += _wrap(
            f"prefill{mark}: prompt tokens as rows of the pass that verifies, p beside b: rows(b + p) - rows(b); "
            f"a step of prompts alone starts from {prefill['floor_ms']:.4g} ms, "
            f"to one that decodes they add {prefill['beside_ms']:.4g} ms"
        )
        lines += _points(prefill, "rows", "rows")
    else:
        lines.append(f"prefill{mark}: prompt tokens cost what verified tokens cost")
    for name, text in (("per_request", "a request"), ("per_context_token", "a context token"), ("overhead", "a step")):
        if f"{name}_ms" in step_time:
            lines.append(f"beside that, {text}{_mark(f'step_time.{name}', assumed)}: {step_time[f'{name}_ms']:.4g} ms")
    names = [key for key in steps[0] if key != "requests"]
    heads = [name.removesuffix("_ms").replace("_", " k=") if name != "none_ms" else "none" for name in names]
    rows = [["whole step, ms", *heads]]
    for row in steps:
        values = ["-" if row[name] is None else f"{row[name]:.2f}" for name in names]
        rows.append([f"{row['requests']} request{'s' * (row['requests'] > 1)}", *values])
    return [*lines, "", *_table(rows)]


def _range(curve: Report, unit: str) -> str:
    if curve["kind"] == "table":
        shapes = [
            f"{part['sizes']} sizes {part['from']:,} to {part['to']:,} {unit} ({BETWEEN[part['between']]})"
            for part in curve["segments"]
        ]
        text = "table, " + ", then ".join(shapes)
        text += f"; smoothed: {curve['smoothing']}" if curve["smoothing"] else ", as written"
    else:
        text = f"law, {curve['floor_ms']:.4g}"
        if curve["saturating_ms"] > 0:
            text += f" + {curve['saturating_ms']:.4g} (1 - exp(-n/{curve['saturation']:.4g}))"
        if curve["per_unit_ms"] > 0:
            text += f" + {curve['per_unit_ms']:.4g} n"
        text += f" ms, n = {curve['known_from']:,} to {curve['known_to']:,} {unit}"
    return f"{text}; beyond: {curve['beyond']}"


def _points(curve: Report, key: str, unit: str) -> list[str]:
    rows = [[f"  {unit}"], ["  ms"]]
    for point in curve["points"]:
        rows[0].append(f"{point[key]:,}")
        rows[1].append(f"{'' if point['known'] else '~'}{point['ms']:.2f}")
    return _table(rows)


def _acceptance_lines(acceptance: Report, assumed: list[str]) -> list[str]:
    lines: list[str] = []
    for name, drafter in acceptance.items():
        length = drafter["trained_length"]
        reads = "the past only" if drafter["confidence_reads"] == "past" else "its own token"
        trained = f"{drafter['kind']}, trained for {length} token{'s' * (length > 1)}"
        lines.append(f"drafter {name}: {trained}; confidence reads {reads}")
        rows = [["  domain", "", *(f"k={k}" for k in range(1, length + 1))]]
        for domain, law in drafter["domains"].items():
            stem = f"acceptance.{name}.domains.{domain}"
            rows.append([f"  {domain}", "survival" + _mark(f"{stem}.survival", assumed), *_three(law["survival"])])
            rows.append(["", "conditional", *_three(law["conditional"])])
            rows.append(["", "accepted length", *_three(law["accepted_length_tokens"])])
            if law["kind"] == "parametric":
                label = "raw temperature" + _mark(f"{stem}.confidence", assumed)
                rows.append(["", label, *(f"{t:.2f}" for t in law["raw_temperature"])])
        lines += _table(rows)
        for domain, law in drafter["domains"].items():
            stem = f"acceptance.{name}.domains.{domain}"
            if law["kind"] == "bank":
                lines.append(f"  {domain}: bank of {law['positions']:,} positions of {law['requests']:,} texts")
            else:
                lines.append(
                    f"  {domain}: spread {law['request_sd']:.2f} between requests, {law['token_sd']:.2f} within"
                    f"{_mark(f'{stem}.spread', assumed)}; confidence noise {law['noise_sd']:.2f}"
                    f"{_mark(f'{stem}.confidence', assumed)} (probits)"
                )
        lines.append("")
    return lines[:-1]


def _three(values: Iterable[float]) -> list[str]:
    return [f"{value:.3f}" for value in values]


def _table(rows: list[list[str]]) -> list[str]:
    """Align columns: the leading text columns to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
    texts = 2 if rows[0][1:2] == [""] else 1
    lines = []
    for row in rows:
        cells = [cell.ljust(widths[c]) if c < texts else cell.rjust(widths[c]) for c, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _grouped(provenance: list[Report]) -> list[tuple[list[str], Report]]:
    """Put values of the same source together."""
    groups: dict[str, tuple[list[str], Report]] = {}
    for entry in provenance:
        source = {key: value for key, value in entry.items() if key != "value"}
        groups.setdefault(json.dumps(source), ([], source))[0].append(entry["value"])
    return list(groups.values())


def _source_lines(where: list[str], source: Report) -> list[str]:
    mark = "*" if source["origin"] == "assumed" else " "
    lines = textwrap.wrap(f"{mark} {', '.join(where)}: {source['origin']}", WIDTH, subsequent_indent="  ")
    labels: list[tuple[str, Callable[[str], str]]] = [
        ("source", lambda text: f"from {text}"),
        ("hardware", lambda text: f"on {text}"),
        ("version", lambda text: f"version {text}"),
        ("command", lambda text: f"by {text}"),
        ("date", lambda text: f"of {text}"),
        ("note", lambda text: text),
        ("reason", lambda text: f"{'because' if source['origin'] == 'assumed' else 'assuming'}: {text}"),
    ]
    for key, phrase in labels:
        if key in source:
            lines += _wrap(phrase(source[key]), "    ")
    return lines


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
